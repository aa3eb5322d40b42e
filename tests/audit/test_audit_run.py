"""``privet audit`` on real runs: honest claims stand, a broken one is caught."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from privet.cli import main
from privet.config import compose
from privet.data.canaries import draw_canaries
from privet.data.partition import client_examples, declared_rows
from privet.errors import PrivetError
from server_app.audit import audit
from tests.conftest import Outcome
from tests.strategies.session import finished

Run = Callable[..., Outcome]


def test_canaries_are_dealt_by_coin_and_every_process_draws_the_same(settings: list[str]) -> None:
    plain, config = compose(settings), compose([*settings, "task.canaries=200"])
    drawn, again = draw_canaries(config), draw_canaries(config)
    assert drawn.examples.texts == again.examples.texts
    assert np.array_equal(drawn.included, again.included)
    assert 75 < int(drawn.included.sum()) < 125
    for client in range(3):
        rows, before = client_examples(config, client), client_examples(plain, client)
        assert rows.texts[: len(before)] == before.texts
        own = np.flatnonzero(drawn.included & (drawn.clients == client))
        assert rows.texts[len(before) :] == [drawn.examples.texts[i] for i in own]
        assert np.array_equal(rows.labels[len(before) :], drawn.examples.labels[own])
        assert declared_rows(config)[client] == len(before) + len(own)
        assert 50 < int((drawn.clients == client).sum()) < 80
    assert len(draw_canaries(plain).examples) == 0


@pytest.mark.usefixtures("known_draws")
def test_a_run_without_noise_that_claims_half_an_epsilon_is_caught(
    run: Run, planted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("privet.privacy.rng.SecureRandomness.normal", silent)
    outcome = finished(run(*planted, nodes=1))
    assert outcome.json("privacy.json")["max_epsilon"] <= 0.5
    assert main(["audit", str(outcome.path)]) == 1
    said = capsys.readouterr().out
    assert "REFUTED" in said
    found = outcome.json("audit/audit.json")
    assert found["refuted"]
    assert found["lower_bound"]["epsilon"] > found["claimed_epsilon"]
    assert {p.name for p in (outcome.path / "audit").glob("*.png")} == {
        "roc.png",
        "losses.png",
        "canaries.png",
    }


def silent(_: Any, shape: Sequence[int], *, device: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(tuple(shape), device=device, dtype=dtype)


@pytest.mark.usefixtures("known_draws")
def test_the_same_run_with_its_noise_stands(run: Run, planted: list[str]) -> None:
    outcome = finished(run(*planted, nodes=1))
    found = audit(outcome.path)
    assert not found.refuted
    assert found.bound is not None
    assert (found.bound.canaries, found.bound.guesses) == (128, 64)
    assert found.bound.refutable > 3
    assert found.claimed is not None
    assert found.claimed <= 0.5


def test_a_run_without_privacy_and_canaries_has_separations_only(run: Run) -> None:
    outcome = finished(run("method=ffa_lora", "privacy=none", "evaluation=none"))
    found = audit(outcome.path, rows=60)
    assert (found.claimed, found.bound, found.refuted) == (None, None, False)
    loss = found.membership["loss"]
    assert (loss["members"], loss["others"]) == (60, 30)
    assert 0.3 < loss["auroc"]["value"] < 0.7
    # Of one prediction a row the K per cent are all one figure, which stands once.
    assert sorted(found.membership) == sorted(
        ["loss", *(f"max-renyi-0/label/alpha={a}" for a in ("0.5", "1", "2", "inf"))]
    )
    assert json.loads((outcome.path / "audit" / "audit.json").read_text())["membership"] == found.membership


def test_what_cannot_be_audited_is_refused(run: Run, tmp_path: Any) -> None:
    outcome = finished(run("method=probe", "privacy=none", "evaluation=none", "federation.rounds=1"))
    with pytest.raises(PrivetError, match="runs with canaries"):
        audit(outcome.path, guesses=10)
    (outcome.path / "summary.json").unlink()
    with pytest.raises(PrivetError, match="not complete"):
        audit(outcome.path)
    with pytest.raises(PrivetError, match="holds no run"):
        audit(tmp_path)
