"""Whole runs through the real apps: every method, private and not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Outcome


@pytest.mark.parametrize("method", ["fedavg", "ffa_lora", "fedhsip", "probe"])
@pytest.mark.parametrize("privacy", ["dp", "none"])
def test_every_method_runs(run: Callable[..., Outcome], method: str, privacy: str) -> None:
    outcome = run(f"method={method}", f"privacy={privacy}", "federation.rounds=3")
    if outcome.error:
        raise outcome.error
    summary = outcome.json("summary.json")
    assert summary["status"] == "completed"
    assert summary["private"] == (privacy == "dp")
