"""The tasks of the papers on real files, where they are: ../shared/data beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from privet.config import TaskConfig, compose
from privet.data.tasks import load_task
from privet.errors import DataError
from privet.kinds.generation import fill
from privet.kinds.writing import by_prompt

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the data files are not here")


def test_sst2_from_its_tsv_files() -> None:
    files = [f"task.path={DATA}/sst2/train.tsv", f"task.test_path={DATA}/sst2/test.tsv"]
    data = load_task(compose(["task=sst2", *files, "task.labels=[0,1]"]).task)
    assert (len(data.train), len(data.test), data.dropped) == (60614, 872, {})
    assert data.test.labels.sum() == 444


def test_mnli_from_its_json_files() -> None:
    files = [f"task.path={DATA}/mnli/train.json", f"task.test_path={DATA}/mnli/dev.json"]
    columns = ["task.text_column=text_a", "task.pair_column=text_b"]
    data = load_task(compose(["task=mnli_mismatched", *files, *columns]).task)
    assert len(data.train) + sum(data.dropped.values()) == 8999
    assert len(data.test) == 1000
    assert data.train.pairs is not None
    assert data.train.pairs[1] == "Working as a part of the system."
    assert set(data.train.labels.tolist()) == {0, 1, 2}


def test_e2e_has_its_references_by_attribute_set() -> None:
    files = [f"task.path={DATA}/e2e/trainset.csv", f"task.test_path={DATA}/e2e/testset_w_refs.csv"]
    task = compose(["task=e2e", *files]).task
    data = load_task(task)
    assert (len(data.train), len(data.test)) == (42061, 4693)
    prompts, references = by_prompt(fill(task.prompt, data.test), data.test.targets or [])
    assert (len(prompts), sum(map(len, references))) == (630, 4693)
    assert prompts[0] == "name[Blue Spice], eatType[coffee shop], area[city centre]\n"


def test_gsm8k_as_instructions() -> None:
    files = [f"task.path={DATA}/gsm8k/train.jsonl", f"task.test_path={DATA}/gsm8k/test.jsonl"]
    task = compose(
        ["task=instructions", *files, "task.text_column=question", "task.label_column=answer"]
    ).task
    data = load_task(task)
    assert (len(data.train), len(data.test)) == (7473, 1319)
    assert data.train.targets is not None
    assert data.train.targets[0].endswith("#### 72")


def coco(*overrides: str) -> TaskConfig:
    place = DATA / "coco_mini"
    files = [f"task.path={place}/captions_train2017.json", f"task.image_folder={place}/train2017"]
    files += [f"task.test_path={place}/captions_val2017.json", f"task.test_image_folder={place}/val2017"]
    return compose(["task=coco", *files, *overrides]).task


def test_coco_has_five_captions_an_image() -> None:
    data = load_task(coco())
    assert (len(data.train), len(data.test), data.dropped) == (130, 125, {})
    assert data.train.images is not None
    assert data.test.images is not None
    keys = [image.key for image in data.test.images]
    assert len(by_prompt(keys, data.test.targets or [])[0]) == 25
    assert {len(found) for found in by_prompt(keys, data.test.targets or [])[1]} == {5}
    sizes = {image.open().size for image in [*data.train.images, *data.test.images]}
    assert max(max(size) for size in sizes) == 640


def test_coco_needs_its_images() -> None:
    with pytest.raises(DataError, match="data row 1 is one with an image file that is not there"):
        load_task(coco(f"task.image_folder={DATA}/coco_mini/val2017"))
