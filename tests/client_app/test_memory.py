"""What a method keeps on a node: in its place only together with the reply, and never rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from client_app.memory import KeptArrays, commit, safe_run
from client_app.store import NodeStore
from privet.errors import Refusal


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NodeStore]:
    with NodeStore(tmp_path / "node", "n") as opened:
        yield opened


def kept(store: NodeStore, number: int, *, run: str = "r", tag: str | None = None) -> KeptArrays:
    return KeptArrays(store, run, number, tag or f"t{number}")


def value(arrays: dict[str, torch.Tensor] | None) -> float | None:
    return None if arrays is None else float(arrays["x"])


def put(memory: KeptArrays, number: float, name: str = "half") -> None:
    memory.keep(name, {"x": torch.tensor(number)})


def test_arrays_take_their_place_with_the_reply_only(store: NodeStore) -> None:
    first = kept(store, 1)
    put(first, 1.0)
    assert value(first.recall("half")) is None
    commit(store, first.pending())
    commit(store, first.pending())  # a repeated answer changes nothing
    assert value(kept(store, 2).recall("half")) == 1.0
    assert value(kept(store, 2).recall("half", this_round=True)) is None
    assert value(kept(store, 1).recall("half", this_round=True)) == 1.0
    assert value(kept(store, 2, run="another").recall("half")) is None
    assert value(kept(store, 2).recall("other")) is None


def test_a_late_repetition_of_an_earlier_round_does_not_roll_back(store: NodeStore) -> None:
    first, second = kept(store, 1), kept(store, 2)
    put(first, 1.0)
    put(first, 1.5, "only-in-the-first")
    put(second, 2.0)
    commit(store, second.pending())
    commit(store, first.pending())
    assert value(kept(store, 3).recall("half")) == 2.0
    assert value(kept(store, 3).recall("only-in-the-first")) is None


def test_replaced_files_are_removed_and_others_stay(store: NodeStore) -> None:
    first, second = kept(store, 1), kept(store, 2)
    put(first, 1.0)
    put(first, 5.0, "head")
    commit(store, first.pending())
    put(second, 2.0)
    commit(store, second.pending())
    assert sorted(p.stem for p in (store.root / "tensors").iterdir()) == ["half-t2", "head-t1"]
    assert value(kept(store, 3).recall("head")) == 5.0


def test_what_is_not_finite_is_not_kept(store: NodeStore) -> None:
    with pytest.raises(Refusal):
        put(kept(store, 1), float("nan"))


@pytest.mark.parametrize("run", ["", "../x", "a/b", "a..b", ".hidden", "x" * 82])
def test_a_run_cannot_leave_the_store(run: str) -> None:
    with pytest.raises(Refusal):
        safe_run(run)
