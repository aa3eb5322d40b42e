"""Uploads that are kept, and the client models that they give away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from privet.errors import StoreError
from server_app.audit import audit
from server_app.uploads import Upload, kept_uploads, rebuild
from tests.conftest import Outcome
from tests.strategies.session import NODES, finished, kept_by, make

Run = Callable[..., Outcome]


def test_nothing_is_kept_unless_asked_for(run: Run) -> None:
    outcome = finished(run("method=fedavg", "privacy=none", "evaluation=none"))
    assert not (outcome.path / "uploads").exists()
    assert audit(outcome.path, rows=30).clients == {}


def test_a_fedavg_client_is_rebuilt_exactly_and_a_fedrand_one_from_its_halves(run: Run) -> None:
    """The node keeps both factors of its last round: what the server may and may not know of them."""
    plan = ["privacy=none", "evaluation=none", "federation.rounds=4", "keep_uploads=true"]
    outcome = finished(run("method=fedrand", *plan))
    uploads, spec = kept_uploads(outcome.path, "train"), make("method=fedrand").spec
    assert sorted(uploads) == list(NODES)
    assert all([u.round for u in sent] == [1, 2, 3, 4] for sent in uploads.values())
    common = {n: torch.zeros(s) for n, s in {**spec.lora, **spec.head}.items()}
    for node, sent in uploads.items():
        halves = [set(u.arrays) & set(spec.lora) for u in sent]
        assert all(half in (set(spec.a), set(spec.b)) for half in halves)
        whole, own = rebuild(sent, common), kept_by(outcome, node, "factors")
        assert all(torch.equal(whole[n], own[n]) for n in halves[-1])
        other = set(spec.lora) - halves[-1]
        earlier = [u for u, half in zip(sent, halves, strict=True) if half == other]
        assert all(torch.equal(whole[n], earlier[-1].arrays[n] if earlier else common[n]) for n in other)
    found = audit(outcome.path, rows=30).clients
    assert set(found) == {"newest of every array", "last two uploads"}
    loss = found["last two uploads"]["loss"]
    assert loss["low"] <= loss["mean"] <= loss["high"]


def test_only_the_newest_count_where_the_attack_says_so() -> None:
    one, two, three = (
        Upload(k, {name: torch.tensor(float(k))}) for k, name in ((1, "a"), (2, "b"), (3, "b"))
    )
    common = {"a": torch.tensor(0.0), "b": torch.tensor(0.0), "c": torch.tensor(9.0)}
    assert rebuild([one, two, three], common) == {"a": 1.0, "b": 3.0, "c": 9.0}
    assert rebuild([one, two, three], common, last=2) == {"a": 0.0, "b": 3.0, "c": 9.0}
    assert common["a"] == 0.0


def test_a_model_that_knows_its_rows_tells_them_and_so_does_its_upload(run: Run) -> None:
    settings = [
        "privacy=none",
        "evaluation=none",
        "task.train_rows=24",
        "train.optimizer=adamw",
        "train.lr=0.02",
    ]
    outcome = finished(run("method=fedavg", *settings, "train.local_steps=60", "keep_uploads=true"))
    found = audit(outcome.path)
    newest = found.clients["newest of every array"]
    assert newest == found.clients["last two uploads"]
    assert newest["loss"]["low"] > 0.55
    assert "clients' models, last two uploads: AUROC" in "\n".join(found.lines())


def test_a_damaged_upload_is_refused(run: Run) -> None:
    outcome = finished(run("method=ffa_lora", "privacy=none", "evaluation=none", "keep_uploads=true"))
    path: Path = next((outcome.path / "uploads").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError, match="is not an upload"):
        audit(outcome.path, rows=30)
