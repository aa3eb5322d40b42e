"""Images of rows: found where they may be, told apart, and refused or left out by their row's number alone."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from privet.config import FederationConfig, TaskConfig
from privet.data.choices import letter_choices
from privet.data.images import Picture
from privet.data.partition import partition
from privet.data.tasks import OwnNames, load_node_file, load_task, read_node_table, snapshot
from privet.errors import ConfigError, DataError

SECRET = "patient-17"


def png(colour: tuple[int, int, int] = (1, 2, 3), size: tuple[int, int] = (4, 6)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "images"
    place.mkdir()
    for i in range(6):
        (place / f"{i}.png").write_bytes(png((40 * i, 0, 0)))
    return place


@pytest.fixture
def captions(task: Callable[..., TaskConfig], folder: Path) -> Callable[..., TaskConfig]:
    """A captioning task over a CSV file or another table."""

    def make(cells: list[Any], name: str = "table.csv", **changes: Any) -> TaskConfig:
        path = folder.parent / name
        frame = pd.DataFrame({"file": cells, "caption": [f"caption {i}" for i in range(len(cells))]})
        if name.endswith(".parquet"):
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False)
        values: dict[str, Any] = {
            "kind": "captioning", "path": str(path), "test_path": str(path), "test_rows": None, "text_column": None,
            "image_column": "file", "image_folder": str(folder), "label_column": "caption", "labels": (),
            "prompt": "{image}", "head": None, "pooling": None,
        }  # fmt: skip
        return task(**{**values, **changes})

    return make


def test_names_below_a_folder(captions: Callable[..., TaskConfig]) -> None:
    data = load_task(captions(["0.png", "3.png"])).train
    assert data.images is not None
    assert [image.key for image in data.images] == ["0.png", "3.png"]
    assert data.texts == ["", ""]
    assert data.targets == ["caption 0", "caption 1"]
    assert np.asarray(data.images[1].open())[0, 0].tolist() == [120, 0, 0]


def test_without_a_folder_they_lie_beside_the_table(captions: Callable[..., TaskConfig]) -> None:
    data = load_task(captions(["images/2.png"], image_folder=None)).train
    assert data.images is not None
    assert data.images[0].open().size == (4, 6)


@pytest.mark.parametrize("form", ["bytes", "struct", "path in a struct"])
def test_a_table_holds_the_images_itself(form: str, captions: Callable[..., TaskConfig]) -> None:
    cells: list[Any] = {
        "bytes": [png(), png((9, 9, 9))],
        "struct": [{"bytes": png(), "path": "a.png"}, {"bytes": png((9, 9, 9)), "path": None}],
        "path in a struct": [{"bytes": None, "path": "0.png"}, {"bytes": None, "path": "1.png"}],
    }[form]
    data = load_task(captions(cells, "table.parquet")).train
    assert data.images is not None
    assert len({image.key for image in data.images}) == 2
    assert all(image.open().size == (4, 6) for image in data.images)


def test_a_datasets_folder_has_images(captions: Callable[..., TaskConfig], tmp_path: Path) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    place = tmp_path / "saved"
    features = Features({"file": ImageFeature(), "caption": Value("string")})
    rows = {"file": [{"bytes": png(), "path": None}, None], "caption": ["one", "two"]}
    Dataset.from_dict(rows, features=features).save_to_disk(str(place))
    config = captions(["0.png"], path=str(place), test_path=str(place))
    data = load_task(config)
    assert data.train.images is not None
    assert data.train.images[0].open().size == (4, 6)
    assert data.dropped == {"without an image": 1}


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/passwd", "..\\secret.png", "link.png", "way/secret.png"]
)
def test_no_name_leads_out_of_the_folder(
    name: str, captions: Callable[..., TaskConfig], folder: Path
) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(png())
    (folder.parent / "secret.png").write_bytes(png())
    (folder / "link.png").symlink_to(outside / "secret.png")
    (folder / "way").symlink_to(outside)
    with pytest.raises(
        DataError, match=r"data row 2 is one with an image outside of the image folder \(1"
    ) as caught:
        load_task(captions(["0.png", name]))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "with an image file that is not there"), (b"no image", "cannot be read")]
)
def test_a_bad_image_refuses_a_simulation_and_leaves_a_nodes_row_out(
    content: bytes | None,
    reason: str,
    captions: Callable[..., TaskConfig],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if content is not None:
        (folder / f"{SECRET}.png").write_bytes(content)
    config = captions(["0.png", f"{SECRET}.png", "1.png", ""])
    with pytest.raises(DataError, match=f"data row 2 is one .*{reason}") as caught:
        load_task(config)
    assert SECRET not in str(caught.value)
    own = OwnNames(image_folder=str(folder))
    with caplog.at_level(logging.WARNING, "privet"):
        rows = load_node_file(config, config.path, own, tell=True)
    assert rows.targets == ["caption 0", "caption 2"]
    assert any(reason in line and "(data row 2)" in line for line in caplog.messages)
    assert any("without an image" in line and "(data row 4)" in line for line in caplog.messages)
    assert not any(SECRET in line for line in caplog.messages)


def test_an_image_that_breaks_off_is_found_when_it_is_decoded(
    captions: Callable[..., TaskConfig], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    stream = io.BytesIO()
    noise.save(stream, "PNG")
    (folder / f"{SECRET}.png").write_bytes(stream.getvalue()[:400])
    config = captions(["0.png", f"{SECRET}.png"])
    data = load_task(config).train
    assert data.images is not None
    with pytest.raises(DataError, match="data row 2: the image cannot be decoded") as caught:
        data.images[1].open()
    assert SECRET not in str(caught.value)
    node = load_node_file(config, config.path, OwnNames(image_folder=str(folder)))
    assert node.images is not None
    with caplog.at_level(logging.WARNING, "privet"):
        assert np.asarray(node.images[1].open()).std() == 0  # grey: no row makes a node fail
    assert "data row 2" in caplog.text


def test_a_nodes_folder_is_its_own(captions: Callable[..., TaskConfig], folder: Path) -> None:
    """A server that names a folder of the node gets nothing from it."""
    private = folder.parent / "private"
    private.mkdir()
    (private / "x.png").write_bytes(png())
    config = captions(["x.png", "images/0.png"], image_folder=str(private))
    table = read_node_table(config, config.path)
    assert table.examples.targets == ["caption 1"]  # beside the table
    assert table.dropped == {"with an image file that is not there": 1}
    assert table.examples.images is not None
    assert table.examples.images[0].lenient


def test_a_node_names_its_own_image_column(captions: Callable[..., TaskConfig], folder: Path) -> None:
    config = captions(["0.png"], image_column="photo")
    with pytest.raises(DataError, match="unknown column 'photo'"):
        load_node_file(config, config.path)
    own = OwnNames(image_column="file", image_folder=str(folder), text_column="ignored")
    assert len(load_node_file(config, config.path, own)) == 1


def test_rows_without_a_folder_of_files(captions: Callable[..., TaskConfig], tmp_path: Path) -> None:
    from privet.data.images import pictures

    with pytest.raises(DataError, match=r"'hub:x' names image files: set task\.image_folder"):
        pictures(pd.Series(["a.png"]), "hub:x", None, lenient=False)


def write_coco(path: Path, images: Any, annotations: Any) -> str:
    path.write_text(json.dumps({"info": {}, "images": images, "annotations": annotations}))
    return str(path)


def test_captions_as_coco_has_them(captions: Callable[..., TaskConfig], tmp_path: Path) -> None:
    images = [
        {"id": 7, "file_name": "0.png", "topic": ["a"]},
        {"id": 9, "file_name": "1.png", "topic": ["b", "c"]},
    ]
    annotations = [{"id": i, "image_id": k, "caption": f"c{i}"} for i, k in enumerate([9, 7, 9])]
    path = write_coco(tmp_path / "coco.json", images, annotations)
    config = captions(["0.png"], path=path, test_path=path, image_column="file_name", label_column="caption")
    data = load_task(config, "topic").train
    assert data.images is not None
    assert [i.key for i in data.images] == ["1.png", "0.png", "1.png"]
    assert data.targets == ["c0", "c1", "c2"]
    assert data.columns is not None
    assert data.columns[1] == "a"
    assert data.columns[0] == data.columns[2] in ("b", "c")  # an image's captions stay together


@pytest.mark.parametrize(
    ("images", "annotations", "words"),
    [
        (
            [{"id": 1, "file_name": "0.png"}],
            [{"image_id": 2, "caption": "x"}],
            "image_id is not the id of an image",
        ),
        ([{"file_name": "0.png"}], [{"image_id": 2, "caption": "x"}], "image_id is not the id of an image"),
        ([{"id": 1}], [{"image_id": [], "caption": "x"}], "image_id is not the id of an image"),
        ([1], [], "no lists of records"),
        ({"id": 1}, [], "no lists of records"),
    ],
)
def test_captions_that_are_none(
    images: Any, annotations: Any, words: str, captions: Callable[..., TaskConfig], tmp_path: Path
) -> None:
    path = write_coco(tmp_path / "coco.json", images, annotations)
    with pytest.raises(DataError, match=words):
        load_task(captions(["0.png"], path=path, test_path=path, image_column="file_name"))


def test_no_image_is_on_both_sides_of_a_split(captions: Callable[..., TaskConfig], folder: Path) -> None:
    cells = [f"{i % 6}.png" for i in range(18)]
    data = load_task(captions(cells, test_path=None, test_rows=4))
    keys = [{image.key for image in part.images or []} for part in (data.train, data.test)]
    assert not keys[0] & keys[1]
    assert len(data.test) == 4
    assert len(data.train) + sum(data.dropped.values()) == 14
    assert set(data.dropped) == {"with the image of a test row"}


def test_the_same_text_of_another_image_is_no_repetition(captions: Callable[..., TaskConfig]) -> None:
    config = captions(["0.png", "1.png", "0.png"], deduplicate=True)
    path = Path(config.path)
    path.write_text("file,caption\n0.png,a\n1.png,a\n0.png,a\n")
    assert len(load_task(config).train) == 2


def test_a_changed_image_changes_the_snapshot(captions: Callable[..., TaskConfig], folder: Path) -> None:
    config = captions(["0.png", "1.png"])
    before = snapshot(load_task(config).train)
    assert snapshot(load_task(config).train) == before
    (folder / "1.png").write_bytes(png((7, 7, 7), (8, 8)))
    assert snapshot(load_task(config).train) != before
    one, other = (Picture(f"sha256:{i}", None, b"", "") for i in range(2))
    assert one.stamp != other.stamp


def test_classes_of_objects_drive_a_split(
    captions: Callable[..., TaskConfig],
    federation: Callable[..., FederationConfig],
    folder: Path,
    tmp_path: Path,
) -> None:
    objects = [["cat"], ["dog"], ["car", "bus"]]
    images = [{"id": i, "file_name": f"{i}.png", "objects": objects[i % 3]} for i in range(6)]
    annotations = [
        {"id": 5 * i + j, "image_id": i, "caption": f"c{i}{j}"} for i in range(6) for j in range(5)
    ]
    path = write_coco(tmp_path / "coco.json", images, annotations)
    data = load_task(
        captions(["0.png"], path=path, test_path=path, image_column="file_name"), "objects"
    ).train
    assert data.columns is not None
    assert set(data.columns) <= {"cat", "dog", "car", "bus"}
    count = len(set(data.columns))
    parts = partition(federation(count, kind="natural", column="objects"), data, 0)
    for part in parts:
        assert len(set(data.columns[part])) == 1
    uneven = partition(federation(2, kind="dirichlet", column="objects", alpha=0.1), data, 0)
    assert sorted(np.concatenate(uneven).tolist()) == list(range(30))


# --- choices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "answer", "letter"),
    [
        (["ice", "fire"], 1, "B"),
        (["ice", "fire"], 1.0, "B"),
        (["ice", "fire"], "A", "A"),
        (["ice", "fire"], "fire", "B"),
        (["3", "1"], "1", "B"),  # a text of its own goes before a place
        (["ice", "fire"], 2, ""),
        (["ice", "fire"], -1, ""),
        (["ice", "fire"], 0.5, ""),
        (["ice", "fire"], None, ""),
        ([], 0, ""),
        ("ice", 0, ""),
    ],
)
def test_an_answer_is_a_letter(choices: Any, answer: Any, letter: str) -> None:
    frame, name = letter_choices(pd.DataFrame({"c": [choices], "a": [answer]}), "c", "a")
    assert frame[name].tolist() == [letter]
    if letter:
        assert frame["c"][0] == f"A. {choices[0]}\nB. {choices[1]}"


def test_a_question_with_choices(task: Callable[..., TaskConfig], tmp_path: Path) -> None:
    path = tmp_path / "science.parquet"
    pd.DataFrame(
        {
            "question": ["Which is cold?", "Which is hot?", "No image?"],
            "choices": [["ice", "fire"], ["ice", "fire", "sun"], ["a", "b"]],
            "answer": [0, 1, 0],
            "image": [{"bytes": png(), "path": None}, {"bytes": png((5, 5, 5)), "path": None}, None],
        }
    ).to_parquet(path)
    values: dict[str, Any] = {
        "kind": "visual_question", "path": str(path), "test_path": str(path), "test_rows": None,
        "text_column": "question", "choices_column": "choices", "image_column": "image", "label_column": "answer",
        "labels": (), "prompt": "{image}{text}\n{choices}\n", "head": None, "pooling": None,
    }  # fmt: skip
    data = load_task(task(**values))
    assert data.train.targets == ["A", "B"]
    assert data.train.pairs == ["A. ice\nB. fire", "A. ice\nB. fire\nC. sun"]
    assert data.dropped == {"without an image": 1}
    with pytest.raises(ConfigError, match=r"\{choices\} stands in it exactly where"):
        task(**{**values, "prompt": "{image}{text}"})
    with pytest.raises(ConfigError, match=r"task\.choices_column and task\.pair_column"):
        task(**{**values, "pair_column": "question"})
