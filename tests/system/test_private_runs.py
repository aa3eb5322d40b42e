"""Private runs over TLS and node authentication: what is left on the server, what is spent on the nodes."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from opacus.accountants import RDPAccountant

from privet.cli import main
from privet.privacy.ledger import Entry, Ledger
from tests.system.deployment import Site, Submitted, deployed

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system"), pytest.mark.timeout(900)]

NODES = ("north", "south")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with deployed(tmp_path, *NODES) as site:
        for name in NODES:
            site.furnish(name, max_epsilon=12.0)
        site.up(*NODES)
        yield site


def epsilon_of(entries: tuple[Entry, ...], delta: float) -> float:
    """Epsilon of a run's charges by Opacus alone."""
    accountant = RDPAccountant()
    for entry in entries:
        for _ in range(entry.steps):
            accountant.step(noise_multiplier=entry.sigma, sample_rate=entry.q)
    return float(accountant.get_epsilon(delta))


def check_ledger(ledger: Ledger, run: Submitted, steps: int, budget: float) -> None:
    """A node spent what the server says it spent, in as many steps as planned, and not more than the budget."""
    summary, privacy = run.json("summary.json"), run.json("privacy.json")
    entries = ledger.for_run(summary["run"])
    told = {n["node"]: n for n in privacy["nodes"]}[ledger.node]
    spent = epsilon_of(entries, privacy["delta"])
    assert 0 < spent <= budget
    assert told["epsilon"] == pytest.approx(spent, rel=1e-4)
    assert sum(e.steps for e in entries) == told["steps"] == steps
    places = [(e.round, e.phase) for e in entries]
    assert len(places) == len(set(places))


def check_results(site: Site, run: Submitted, method: str, rounds: int, budget: float) -> None:
    """All that a run leaves is where the ServerApp ran, and nothing there comes from a row."""
    summary = run.json("summary.json")
    assert (summary["status"], summary["method"], summary["private"]) == ("completed", method, True)
    assert (summary["failures"], summary["void_rounds"]) == ([], [])
    assert 0 < summary["epsilon"] <= budget
    assert [r["round"] for r in run.rounds] == list(range(1, rounds + 1))
    assert [r["train_loss"] for r in run.rounds] == [None] * rounds
    assert run.rounds[-1]["eval"]["examples"] == 30
    for name in (
        "config.yaml",
        "communication.json",
        "adapter/README.md",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/head.safetensors",
    ):
        assert (run.path / name).is_file(), name
    assert not (run.path / "nodes").exists()  # the nodes' stores are theirs
    for file in run.path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"site0" not in content, file  # a column of the tables that nobody asked for
            assert str(site.base / "north.csv").encode() not in content, file


def test_a_private_run_of_fedask(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    run = site.submit("method=fedask", "federation.rounds=1")
    assert site.wait(run, 600) == "finished:completed"
    check_results(site, run, "fedask", 1, 3.0)
    assert [(p["name"], p["replied"]) for p in run.rounds[0]["phases"]] == [("sketch", 2), ("project", 2)]
    for name in NODES:
        check_ledger(site.ledger(name), run, 2, 3.0)
        store = site.state / name / "store"
        assert stat.S_IMODE(store.stat().st_mode) == 0o700
        assert all(
            stat.S_IMODE(f.stat().st_mode) == 0o600 for f in store.rglob("*.json*") if f.name != "log.jsonl"
        )
        assert (
            "train_loss" in (store / "log.jsonl").read_text()
        )  # the node's own log has what does not leave it
    assert main(["status", str(run.path)]) == 0
    assert "run1: finished, round 1" in capsys.readouterr().out


@pytest.mark.long
def test_two_private_runs_at_once_on_the_same_nodes(site: Site) -> None:
    """FedHSIP and FedRand, submitted together: each keeps to its own budget, one ledger holds both."""
    hsip = site.submit("method=fedhsip", "method.warmup_rounds=1", "federation.rounds=3", "privacy.epsilon=2")
    rand = site.submit("method=fedrand", "federation.rounds=2", "privacy.epsilon=2.5")
    assert site.wait(hsip, 900) == "finished:completed"
    assert site.wait(rand, 600) == "finished:completed"
    check_results(site, hsip, "fedhsip", 3, 2.0)
    check_results(site, rand, "fedrand", 2, 2.5)
    for name in NODES:
        ledger = site.ledger(name)
        check_ledger(ledger, hsip, 6, 2.0)
        check_ledger(ledger, rand, 4, 2.5)
        assert set(ledger.runs) == {r.json("summary.json")["run"] for r in (hsip, rand)}
        both = epsilon_of(ledger.entries, ledger.lifetime_delta)
        # The lifetime is accounted at one order, so it may say more than the best order does, and never less.
        assert both <= ledger.lifetime() * (1 + 1e-6)
        assert ledger.lifetime() <= 12.0
        assert (site.state / name / "store" / "tensors").is_dir()  # FedRand's halves, FedHSIP's rule
