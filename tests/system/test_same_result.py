"""A simulation and a deployment are the same run: one seed, one result, but for the order of sums."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Outcome, state_of
from tests.system.deployment import Submitted, deployed

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.xdist_group("system"),
    pytest.mark.timeout(1500),
]

NODES = ("client-0", "client-1")  # a simulation's names: batches are drawn from a seed and the node's name
METHODS = ("fedavg", "fedask")


def test_simulation_and_deployment_agree(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    overrides = ["privacy=none", "federation.rounds=2", "seed=5"]
    with deployed(tmp_path / "deployed", *NODES) as site:
        for i, name in enumerate(NODES):
            site.furnish(name, rows=40 + 8 * i, allow_non_private=True)
            shutil.copy(site.base / f"{name}.csv", tmp_path / f"{i}.csv")
        site.up(*NODES)
        deployed_runs = {m: site.submit(f"method={m}", *overrides) for m in METHODS}
        for submitted in deployed_runs.values():
            assert site.wait(submitted, 1200) == "finished:completed"
        settings = site.settings(*overrides, f"task.path='{tmp_path}/{{client}}.csv'")
    for method, submitted in deployed_runs.items():
        check_same(run(*settings, f"method={method}", nodes=2), submitted)


def check_same(simulated: Outcome, submitted: Submitted) -> None:
    assert simulated.error is None
    one, other = state_of(simulated), state_of(Outcome(submitted.path, simulated.grid, None))
    assert one.keys() == other.keys()
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, rtol=1e-4, atol=1e-6)
    first, second = simulated.json("summary.json"), submitted.json("summary.json")
    assert second["metrics"] == pytest.approx(first["metrics"], rel=1e-4)
    for name in ("upload_numbers", "download_numbers", "seed", "rounds"):
        assert first[name] == second[name]
    for here, there in zip(simulated.rounds, submitted.rounds, strict=True):
        assert there["train_loss"] == pytest.approx(here["train_loss"], rel=1e-4)
        assert there["upload_bytes"] == here["upload_bytes"]
