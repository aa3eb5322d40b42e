"""Tables on the hub: what names them, how they are read, and one line where they cannot be had."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets.exceptions import DatasetNotFoundError

from privet.data.hub import HubTable
from privet.data.sources import find_table, read_table
from privet.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hub:nyu-mll/glue#sst2:train", ("nyu-mll/glue", None, "sst2", "train")),
        ("hub:nyu-mll/glue@0a1b#sst2:validation", ("nyu-mll/glue", "0a1b", "sst2", "validation")),
        ("hub:squad:train", ("squad", None, None, "train")),
        ("hub:a/b.c-d@v1.0:test_x", ("a/b.c-d", "v1.0", None, "test_x")),
    ],
)
def test_a_name_is_read_and_written(text: str, parts: tuple[Any, ...]) -> None:
    table = find_table(text)
    assert isinstance(table, HubTable)
    assert (table.name, table.revision, table.config, table.split) == parts
    assert str(table) == text


@pytest.mark.parametrize(
    "text",
    ["hub:", "hub:a/b", "hub:a/b#c", "hub:a/b/c:train", "hub:../x:train", "hub:a/b:train[:10%]", "hub:a b:c"],
)
def test_a_name_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write hub:owner/name#config:split"):
        find_table(text)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the datasets library answers, and what it was asked for."""
    held: list[Any] = []

    def load(*args: Any, **options: Any) -> Any:
        answer = held.pop(0)
        held.append((args, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    return held


def test_class_labels_are_read_as_names_and_rows_without_one_as_empty(answers: list[Any]) -> None:
    features = Features(
        {"sentence": Value("string"), "label": ClassLabel(names=["no", "yes"]), "idx": Value("int32")}
    )
    data = {"sentence": ["a", "b", "c"], "label": [1, 0, -1], "idx": [0, 1, 2]}
    answers.append(Dataset.from_dict(data, features=features))
    frame = read_table(find_table("hub:o/n@r#c:train"), ["label", "sentence"])
    assert frame.to_dict("list") == {"label": ["yes", "no", ""], "sentence": ["a", "b", "c"]}
    assert answers == [(("o/n", "c"), {"split": "train", "revision": "r"})]


def test_a_column_that_is_not_there_is_named_with_the_nearest(answers: list[Any]) -> None:
    answers.append(Dataset.from_dict({"sentence": ["a"], "label": [1]}))
    with pytest.raises(
        DataError, match=r"'hub:o/n:train': unknown column 'sentense' - did you mean 'sentence'"
    ):
        read_table(find_table("hub:o/n:train"), ["sentense"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConnectionError("Couldn't reach 'o/n' on the Hub (OfflineModeIsEnabled)"),
            "the hub cannot be reached",
        ),
        (DatasetNotFoundError("Dataset 'o/n' is gated"), "the hub has no such dataset, or not for this user"),
        (ValueError("BuilderConfig 'c' not found.\nAvailable: ['d']"), "not found. Available: ['d']"),
        (RuntimeError("Dataset scripts are no longer supported"), "scripts are no longer supported"),
    ],
)
def test_what_cannot_be_had_is_one_line(answers: list[Any], error: Exception, words: str) -> None:
    answers.append(error)
    with pytest.raises(DataError) as caught:
        read_table(find_table("hub:o/n#c:train"))
    assert words in str(caught.value)
    assert str(caught.value).startswith("'hub:o/n#c:train'")
    assert "\n" not in str(caught.value)


def test_without_a_network_the_library_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"the hub cannot be reached|cannot be loaded"):
        read_table(find_table("hub:nobody/nothing-here#c:train"))
