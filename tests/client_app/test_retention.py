"""What ended runs left goes; the ledger, recent runs and the run at hand stay, and a purged run does not begin anew."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from client_app.memory import KeptArrays, commit
from client_app.node import answer_train
from client_app.retention import purge
from client_app.store import NodeStore
from privet.config import compose
from privet.errors import PrivetError
from privet.wire import pack_request, unpack_failure
from tests.client_app.test_floors import request
from tests.conftest import write_table

DAY = 86400.0


def fill(store: NodeStore, run: str) -> None:
    """Leave what a run leaves: its facts, a secret, a kept array, a stored reply."""
    store.save_json(f"run-{run}", {"config": "c", "code": "d", "rows": "r", "round": 3})
    store.save_json(f"secret-{run}", {"secret": 7})
    kept = KeptArrays(store, run, 3, f"tag-{run}")
    kept.keep("half", {"a": torch.ones(4)})
    store.save_reply(f"f-{run}", {"adapter": {"x": torch.ones(2)}}, {"kept": kept.pending()}, run=run)
    commit(store, kept.pending())


def age(root: Path, days: float, *names: str) -> None:
    for path in root.rglob("*"):
        if path.is_file() and (not names or any(n in str(path.relative_to(root)) for n in names)):
            os.utime(path, (time.time() - days * DAY,) * 2)


def left(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with NodeStore(tmp_path / "store", "north") as store:
        store.ledger(1e-5, 8.0)
        for run in ("old", "new"):
            fill(store, run)
    root = tmp_path / "store"
    (root / "tokens").mkdir()
    (root / "tokens" / "rows.safetensors").write_bytes(b"tokens")
    (root / "log.jsonl").write_text(
        '{"run": "old", "train_loss": 1}\n{"run": "new", "train_loss": 2}\nno json\n'
    )
    age(root, 40.0)
    age(root, 0.2, "new")
    return root


BASE = {
    "ledger.jsonl",
    "ledger.head",
    "node.json",
    "lock",
    "log.jsonl",
    "json/run-old.json",
    "json/run-new.json",
}
NEW = {
    "json/kept-new.json",
    "json/secret-new.json",
    "replies/new/f-new.safetensors",
    "tensors/half-tag-new.safetensors",
}


def test_ended_runs_go_and_recent_ones_and_the_ledger_stay(root: Path) -> None:
    before = (root / "ledger.jsonl").read_bytes()
    with NodeStore(root, "north") as store:
        dry = purge(store, dry_run=True)
        assert "json/secret-old.json" in left(root)
        found = purge(store)
    assert found == dry
    assert list(found.runs) == ["old"]
    assert found.recent == ["new"]
    assert (found.runs["old"] > 0, found.tokens) == (True, 6)
    assert left(root) == BASE | NEW
    assert (root / "ledger.jsonl").read_bytes() == before
    assert (root / "log.jsonl").read_text() == '{"run": "new", "train_loss": 2}\nno json\n'
    with NodeStore(root, "north") as store:
        assert store.load_json("run-old").keys() == {"config", "code", "round", "purged"}  # type: ignore[union-attr]
        assert purge(store).runs == {}


def test_older_than_run_spare_and_force(root: Path) -> None:
    with NodeStore(root, "north") as store:
        assert purge(store, older_than=41).runs == {}
        assert purge(store, run="new").recent == ["new"]
        assert "tokens/rows.safetensors" in left(root)
        assert list(purge(store, run="new", force=True).runs) == ["new"]
        assert NEW.isdisjoint(left(root))
        assert {"json/secret-old.json", "tokens/rows.safetensors"} <= left(root)
        with pytest.raises(PrivetError, match=r"keeps nothing of a run 'other' \(runs: old\)"):
            purge(store, run="other")
        assert purge(store, older_than=39, spare="old").runs == {}
        assert purge(store, older_than=39).runs.keys() == {"old"}


def test_what_an_interrupted_phase_left_goes_and_what_a_reply_needs_stays(root: Path) -> None:
    with NodeStore(root, "north") as store:
        store.save_tensors("half-orphan", {"a": torch.ones(3)})
        kept = KeptArrays(store, "new", 4, "pending")
        kept.keep("half", {"a": torch.ones(4)})
        store.save_reply("f-4", {}, {"kept": kept.pending()}, run="new")  # not committed yet
        (root / "tensors" / ".half-x.safetensors.tmp").write_bytes(b"torn")
        age(root / "tensors", 5)
        assert purge(store).leftovers > 0
    tensors = {n for n in left(root) if n.startswith("tensors/")}
    assert tensors == {"tensors/half-tag-new.safetensors", "tensors/half-pending.safetensors"}


@pytest.fixture
def ask(tmp_path: Path, settings: list[str]) -> Callable[..., str | None]:
    """Ask a node for round 1 of a run; the kind of its refusal, if it refuses."""
    table = write_table(tmp_path / "own.csv", 40)
    node = {"name": "north", "data-path": str(table), "store": str(tmp_path / "store")}

    def send(run: str, **keys: Any) -> str | None:
        asked = dataclasses.replace(request(compose([*settings, "method=ffa_lora"])), run=run)
        failed = unpack_failure(answer_train(pack_request(asked), {**node, **keys}))
        return failed.kind if failed else None

    return send


def test_a_purged_run_cannot_go_on(tmp_path: Path, ask: Callable[..., str | None]) -> None:
    assert ask("first") is None
    with NodeStore(tmp_path / "store", "north") as store:
        assert list(purge(store, force=True).runs) == ["first"]
    assert ask("first") == "purged"
    assert ask("second") is None


def test_retention_applies_when_another_run_begins(tmp_path: Path, ask: Callable[..., str | None]) -> None:
    assert ask("first") is None
    store = tmp_path / "store"
    age(store, 31)
    ledger = (store / "ledger.jsonl").read_bytes()
    assert ask("second") is None
    assert (store / "replies" / "first").exists()  # no retention-days, no purge
    assert ask("third", **{"retention-days": 30}) is None
    assert not (store / "replies" / "first").exists()
    assert (store / "replies" / "second").exists()
    assert (store / "ledger.jsonl").read_bytes().startswith(ledger)


def test_a_damaged_store_of_another_run_stops_no_run(tmp_path: Path, ask: Callable[..., str | None]) -> None:
    assert ask("first") is None
    damaged = tmp_path / "store" / "json" / "run-first.json"
    damaged.write_text("{}")
    assert ask("second", **{"retention-days": 1}) is None
    assert damaged.exists()
