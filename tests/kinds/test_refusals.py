"""Nodes without anything to learn, and chats that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privet.config import TaskConfig, compose
from privet.data.tasks import load_node_file, load_task, snapshot
from privet.errors import DataError


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def write(path: Path, cells: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": cell, "site": "a"}) + "\n" for cell in cells))
    return path


def task(path: Path, *overrides: str) -> TaskConfig:
    chats = ["task.text_column=messages", "task.label_column=null", f"task.test_path={path}"]
    return compose(["task=instructions", f"task.path={path}", *chats, *overrides]).task


def test_a_chat_ends_with_its_last_answer(tmp_path: Path) -> None:
    cells = [
        chat("q", "a"),
        chat("q", "a", "q2", "a2", "thanks"),
        chat("only a question"),
        chat("q", " "),
        [],
    ]
    data = load_task(task(write(tmp_path / "t.jsonl", cells)))
    assert data.train.targets == ["a", "a2"]
    assert [json.loads(text) for text in data.train.texts] == [chat("q"), chat("q", "a", "q2")]
    assert data.dropped == {"without an answer": 3}
    assert data.train.labels.tolist() == [0, 0]


def test_parquet_holds_chats_too(tmp_path: Path) -> None:
    import pandas as pd

    cells = [chat("q", "a"), chat("q", "a", "q2", "a2")]
    pd.DataFrame({"messages": cells}).to_parquet(tmp_path / "t.parquet")
    assert load_task(task(tmp_path / "t.parquet")).train.targets == ["a", "a2"]


@pytest.mark.parametrize("cell", ["text", [1], [{"role": "user"}], [{"role": "user", "content": 1}], None])
def test_what_is_no_chat_is_refused_and_on_a_node_left_out(tmp_path: Path, cell: Any) -> None:
    path = write(tmp_path / "t.jsonl", [chat("q", "a"), cell])
    with pytest.raises(
        DataError, match=r"column 'messages' holds no list of \{role, content\} messages in 1 rows"
    ):
        load_task(task(path))
    assert load_node_file(task(path), str(path)).targets == ["a"]


def test_a_role_that_no_template_knows_leaves_out_the_row(tmp_path: Path) -> None:
    strange = [{"role": "tool", "content": "x"}, *chat("q", "a")]
    data = load_task(task(write(tmp_path / "t.jsonl", [chat("q", "a"), strange])))
    assert len(data.train) == 1


def test_a_snapshot_sees_the_answers(tmp_path: Path) -> None:
    one, two = (
        load_task(task(write(tmp_path / f"{a}.jsonl", [chat("q", a)]))).train for a in ("first", "second")
    )
    assert one.texts == two.texts
    assert snapshot(one) != snapshot(two)


def test_the_rows_of_a_prompt_stay_together_and_its_texts_may_repeat(tmp_path: Path) -> None:
    """E2E's many sentences for the same attributes are no repetitions, and no attribute set is on both sides."""
    path = tmp_path / "t.csv"
    lines = [f"name[{i % 7}],text {i % 14}" for i in range(42)]
    path.write_text("mr,ref\n" + "\n".join(lines) + "\n")
    cfg = compose(["task=e2e", f"task.path={path}", "task.test_rows=8", "task.deduplicate=true"]).task
    data = load_task(cfg)
    assert data.dropped["with the text of an earlier row"] == 28
    assert not set(data.train.texts) & set(data.test.texts)
    taken = data.train.take(np.array([1, 0]))
    assert data.train.targets is not None
    assert taken.targets == [data.train.targets[1], data.train.targets[0]]


def test_texts_cannot_split_the_clients(
    run: Callable[..., Any], language_tasks: dict[str, list[str]]
) -> None:
    split = ["federation.partition.kind=dirichlet", "federation.partition.column=label"]
    error = run(*language_tasks["generation"], *split).error
    assert "federation.partition.column = label is not possible with task.kind=generation" in str(error)


@pytest.mark.parametrize("privacy", ["none", "dp"])
def test_a_client_whose_rows_teach_nothing_is_refused_by_name(
    privacy: str, run: Callable[..., Any], language_tasks: dict[str, list[str]]
) -> None:
    result = run(*language_tasks["instructions"], "method=fedavg", f"privacy={privacy}", "model.max_length=5")
    assert result.rounds[0]["void"]
    failed = result.rounds[0]["phases"][0]["failed"]
    assert sorted(f["node"] for f in failed) == ["client-0", "client-1", "client-2"]
    assert all("no row of this node has a token to learn" in f["reason"] for f in failed)
