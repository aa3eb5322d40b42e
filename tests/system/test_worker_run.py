"""Real SuperNodes whose messages go through `privet worker`: a private FedASK run, and one worker killed on the way."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.deployment import ROOT, Site, deployed, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.xdist_group("system"),
    pytest.mark.timeout(900),
]

NAMES = ("north", "south")


class Workers:
    """The nodes' workers, and their logs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def socket(self, name: str) -> Path:
        return self.site.base / "run" / f"{name}.sock"

    def log(self, name: str) -> Path:
        return self.site.state / f"worker-{name}.log"

    def start(self, name: str) -> None:
        settings = self.site.folder / "nodes" / name / "node.toml"
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "privet.cli", "worker", "--node-config", str(settings), "--idle", "0"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        before = self.log(name).stat().st_size
        until(
            lambda: b"listening at" in self.log(name).read_bytes()[before:],
            180,
            lambda: self.log(name).read_text(),
        )

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait(10)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with deployed(tmp_path, *NAMES) as site:
        found = Workers(site)
        try:
            yield found
        finally:
            found.close()


def test_a_private_run_through_workers_survives_the_death_of_one(workers: Workers) -> None:
    site = workers.site
    for name in NAMES:
        site.furnish(name, worker=str(workers.socket(name)), max_epsilon=8.0)
        workers.start(name)
    site.up(*NAMES)
    run = site.submit("method=fedask", "privacy=dp", "federation.rounds=3", "federation.min_replies=1")

    # North's worker dies as soon as it has answered round 1's first phase, and is started again.
    until(lambda: "train took" in workers.log("north").read_text(), 300, site.told)
    workers.running["north"].kill()
    workers.running["north"].wait(10)
    workers.start("north")

    assert site.wait(run, 600) == "finished:completed", site.told()
    assert not any(r["void"] for r in run.rounds)
    for name in NAMES:
        entries = site.ledger(name).entries
        assert [(e.round, e.phase) for e in entries] == [(n, "sketch") for n in range(1, 4)]
        assert len({e.sigma for e in entries}) == 1
        # What a node has spent is what the run says of it, and below its cap.
        (spent,) = [n["epsilon"] for n in run.json("privacy.json")["nodes"] if n["node"] == name]
        assert spent == pytest.approx(site.ledger(name).spent(entries[0].run, "rdp"), rel=1e-6)
        assert spent <= 3.0
    # Every message went through a worker: no ClientApp has opened a store or loaded a model.
    log = workers.log("south").read_text()
    assert log.count("train took") == 6
    assert "refuses" not in log
    seconds = {p["name"]: p["seconds"] for p in run.rounds[-1]["phases"]}
    print(json.dumps(seconds))
