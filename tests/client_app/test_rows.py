"""Tokenised rows kept in a node's store: the same rows, made again whenever anything differs or is damaged."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.holdings import Holdings
from client_app.node_config import NodeConfig
from client_app.retention import purge
from client_app.rows import Prepared, RowFacts, Rows
from client_app.store import TOKENS, NodeStore
from privet.config import Config, compose
from privet.data.collate import Tokenised, tokenise
from tests.conftest import write_table


class Node:
    """A node with a table of its own, and how often its rows were tokenised."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder = folder
        self.table = write_table(folder / "own.csv", 30)
        self.settings = [*settings, "method=ffa_lora"]
        self.made = 0
        self.raw: dict[str, Any] = {"name": "n", "data-path": str(self.table), "store": str(folder / "store")}

    def tokenise(self, *arguments: Any) -> Tokenised:
        self.made += 1
        return tokenise(*arguments)

    def ask(self, *overrides: str, **raw: Any) -> tuple[Prepared, RowFacts]:
        """Prepare the rows as a fresh process would."""
        node = NodeConfig.read({**self.raw, **raw})
        config: Config = compose([*self.settings, *overrides])
        with NodeStore(Path(self.raw["store"]), "n") as store:
            rows = Holdings().rows(node, config, store)
            return rows.prepared(self.tokenise), rows.facts

    @property
    def files(self) -> list[Path]:
        return sorted((Path(self.raw["store"]) / TOKENS).glob("*"))


@pytest.fixture
def node(tmp_path: Path, settings: list[str]) -> Node:
    return Node(tmp_path, settings)


def same(one: Tokenised, other: Tokenised) -> bool:
    pairs = zip(one.ids, other.ids, strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs) and np.array_equal(
        one.labels, other.labels
    )


def test_the_second_message_reads_what_the_first_one_kept(node: Node) -> None:
    first, facts = node.ask()
    second, again = node.ask()
    assert node.made == 1
    assert same(first.rows, second.rows)
    assert (first.pad_id, facts) == (second.pad_id, again)
    assert (facts.usable, facts.table) == (30, 30)


def test_a_phase_without_training_reads_no_row(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    _, facts = node.ask()
    monkeypatch.setattr(NodeConfig, "examples", lambda *_, **__: pytest.fail("the table was read"))
    with NodeStore(Path(node.raw["store"]), "n") as store:
        rows = Rows(NodeConfig.read(node.raw), compose(node.settings), store, {})
        assert (rows.facts, rows.declared) == (facts, 30)


@pytest.mark.parametrize(
    ("overrides", "raw"),
    [
        (["model.max_length=7"], {}),
        (["task.labels=[yes,no]"], {}),
        (["privacy=none", "evaluation=client"], {"allow-non-private": True}),
        ([], {"text-column": "site"}),
        ([], {"labels": "yes,no"}),
        ([], {"public-examples": 12}),
    ],
)
def test_other_settings_have_rows_of_their_own(node: Node, overrides: list[str], raw: dict[str, Any]) -> None:
    node.ask()
    node.ask(*overrides, **raw)
    assert node.made == 2


def test_what_shapes_no_row_shares_them(node: Node) -> None:
    node.ask()
    node.ask("train.lr=0.25", "privacy.epsilon=2", "seed=5")
    assert node.made == 1


def test_a_table_that_changed_is_read_again(node: Node) -> None:
    _, facts = node.ask()
    write_table(node.table, 30, seed=4)
    _, other = node.ask()
    assert node.made == 2
    assert facts.snapshot != other.snapshot


def test_a_table_with_an_old_time_and_other_bytes_is_read_again(node: Node) -> None:
    """Times are no part of what is compared: the bytes are."""
    _, facts = node.ask()
    times = node.table.stat()
    node.table.write_text(node.table.read_text().replace("great", "awful"))
    os.utime(node.table, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert node.ask()[1].snapshot != facts.snapshot


def test_only_the_owner_can_read_what_is_kept(node: Node) -> None:
    node.ask()
    assert {f.suffix for f in node.files} == {".json", ".safetensors"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in node.files} == {0o600}
    assert stat.S_IMODE(node.files[0].parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("damage", ["cut", "turned", "gone"])
def test_what_is_damaged_is_made_again(node: Node, suffix: str, damage: str) -> None:
    first, facts = node.ask()
    (file,) = (f for f in node.files if f.suffix == suffix)
    raw = bytearray(file.read_bytes())
    raw[-20] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(raw[:-30] if damage == "cut" else raw)
    again, same_facts = node.ask()
    assert node.made == 2
    assert same(first.rows, again.rows)
    assert facts == same_facts
    node.ask()
    assert node.made == 2  # and the new one is good


def test_a_store_that_cannot_take_them_costs_time_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from client_app import store

    write = store.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.parent.name == TOKENS:
            path.with_name(f".{path.name}.tmp").write_bytes(data[:10])
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(store, "write_atomic", full)
    first, _ = node.ask()
    second, _ = node.ask()
    assert node.made == 2
    assert same(first.rows, second.rows)
    assert node.files == []


def test_a_purge_takes_them_and_use_keeps_them_young(node: Node) -> None:
    node.ask()
    old = time.time() - 40 * 86400
    for file in node.files:
        os.utime(file, (old, old))
    node.ask()
    with NodeStore(Path(node.raw["store"]), "n") as store:
        assert purge(store, older_than=30).tokens == 0
        for file in node.files:
            os.utime(file, (old, old))
        assert purge(store, older_than=30).tokens > 0
    assert node.files == []


def test_only_the_latest_few_are_kept(node: Node) -> None:
    for length in range(5, 13):
        node.ask(f"model.max_length={length}")
    assert len(node.files) == 8  # four, of two files each


def test_a_simulation_keeps_none(node: Node, settings: list[str]) -> None:
    config = compose(settings)
    with NodeStore(node.folder / "client", "client-0") as store:
        rows = Holdings().rows(NodeConfig.read({"partition-id": 0, "num-partitions": 3}), config, store)
        assert len(rows.prepared(tokenise).rows) == rows.facts.usable == rows.declared == 50
        assert store.files(TOKENS) == []


def test_pairs_keep_their_segments(tmp_path: Path) -> None:
    from client_app.rows import _flatten, _unflatten

    rows = Tokenised([np.array([1, 2]), np.array([3])], np.array([0, 1]), [np.array([0, 1]), np.array([0])])
    back = _unflatten(_flatten(rows))
    assert same(rows, back)
    assert back.types is not None
    assert [t.tolist() for t in back.types] == [[0, 1], [0]]
    assert {f.name for f in dataclasses.fields(Tokenised)} >= {"ids", "labels", "types"}
    empty = Tokenised([], np.array([], dtype=np.int64))
    assert len(_unflatten(_flatten(empty))) == 0
