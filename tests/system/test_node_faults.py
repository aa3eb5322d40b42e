"""Nodes that are killed, slow or full: the round ends by policy, the node comes back with all that it had."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from privet.privacy.ledger import Ledger
from tests.system.deployment import Site, Submitted, deployed, kill, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.xdist_group("system"),
    pytest.mark.timeout(1500),
]

NODES = ("north", "south")
LIMIT = 600.0  # seconds that anything may take which takes half a minute on a machine with nothing else to do


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with deployed(tmp_path_factory.mktemp("faults"), *NODES) as site:
        for name in NODES:
            site.furnish(name)
        site.up(*NODES)
        yield site


@pytest.fixture(autouse=True)
def _ready(site: Site) -> Iterator[None]:
    """All nodes are there when a test begins; a failed one shows every log."""
    site.online(*NODES, seconds=LIMIT)
    try:
        yield
    finally:
        print(site.told())  # pytest shows it where the test has failed


def replies(run: Submitted, node: str, phase: str, number: int) -> list[dict[str, Any]]:
    return run.events("reply", node=node, phase=phase, round=number)


def phases(run: Submitted, number: int) -> list[tuple[str, int, list[str]]]:
    """Name, replies and who failed, for every phase of a round."""
    record = run.rounds[number - 1]
    assert record["round"] == number
    return [(p["name"], p["replied"], [f["node"] for f in p["failed"]]) for p in record["phases"]]


def reason(run: Submitted, number: int) -> str:
    """Why the one node that failed in a round did."""
    (failed,) = [f for p in run.rounds[number - 1]["phases"] for f in p["failed"]]
    assert failed["node"] == "south"
    return str(failed["reason"])


def check_spent(site: Site, run: Submitted, charged: dict[str, list[int]]) -> None:
    """Ledgers hold these rounds, each once; the server counts no less than they do, and nobody is over budget."""
    summary, privacy = run.json("summary.json"), run.json("privacy.json")
    told = {n["node"]: n["epsilon"] for n in privacy["nodes"]}
    for name in NODES:
        ledger = site.ledger(name)
        entries = ledger.for_run(summary["run"])
        assert Counter(e.round for e in entries) == Counter(charged[name])
        assert ledger.spent(summary["run"], "rdp") <= told[name] * (1 + 1e-6) <= 3.0 * (1 + 1e-6)
    assert summary["status"] == "completed"
    assert summary["void_rounds"] == []


def test_a_supernode_killed_between_the_phases_of_fedask_comes_back(site: Site) -> None:
    run = site.submit("method=fedask", "federation.rounds=4")
    until(lambda: replies(run, "south", "sketch", 1), LIMIT, site.told)
    site.kill("south")
    assert site.workers("south", "flwr-clientapp") == []
    before = site.ledger("south").entries
    assert [e.round for e in before if e.run.startswith("fedask")] == [1]

    # Flower needs a minute to see that the node is gone; then the other one is asked again, without it.
    until(lambda: run.events("round", round=1), LIMIT, site.told)
    assert phases(run, 1) == [("sketch", 2, []), ("project", 1, ["south"]), ("project", 1, [])]
    assert not run.rounds[0]["void"]
    assert reason(run, 1).endswith("the node is gone")

    site.online("south", seconds=LIMIT)
    assert site.wait(run, 2 * LIMIT) == "finished:completed"
    last = phases(run, 4)
    assert last == [("sketch", 2, []), ("project", 2, [])]
    assert all(not p["flags"] for r in run.rounds for p in r["phases"])  # nothing was lost
    assert site.ledger("south").entries[: len(before)] == before
    there = [r for r in (1, 2, 3, 4) if ("sketch", 2, []) in phases(run, r)]
    check_spent(site, run, {"north": [1, 2, 3, 4], "south": there})


def test_a_client_process_killed_while_it_trains_costs_one_round(site: Site) -> None:
    """FedRand: the half that the node kept in round 1 is there in round 3."""
    run = site.submit("method=fedrand", "federation.rounds=3", "train.local_steps=150", "privacy.epsilon=3")

    def trains() -> bool:
        # The charge is written right before the first step.
        ledger = site.ledger("south") if (site.state / "south/store/ledger.head").exists() else None
        return ledger is not None and any(
            e.round == 2 and e.run.startswith("fedrand") for e in ledger.entries
        )

    until(trains, LIMIT, site.told)
    (worker,) = site.workers("south", "flwr-clientapp")
    kill(worker)
    until(lambda: run.events("round", round=2), LIMIT, site.told)
    assert phases(run, 2) == [("train", 1, ["south"])]
    assert reason(run, 2).endswith("the node's client process ended before it answered")
    assert site.wait(run, LIMIT) == "finished:completed"
    assert phases(run, 3) == [("train", 2, [])]
    assert [p["flags"] for p in run.rounds[2]["phases"]] == [{}]
    check_spent(site, run, {"north": [1, 2, 3], "south": [1, 2, 3]})


@contextlib.contextmanager
def slowed(site: Site, name: str) -> Iterator[None]:
    """Give a node's client processes a twentieth of a CPU; they live and say so, and get nowhere."""
    stopped: set[psutil.Process] = set()
    done = threading.Event()

    def hold() -> None:
        while not done.is_set():
            workers = site.workers(name, "flwr-clientapp")
            for worker in workers:
                with contextlib.suppress(psutil.Error):
                    worker.suspend()
                    stopped.add(worker)
            if done.wait(1.9):
                return
            for worker in workers:
                with contextlib.suppress(psutil.Error):
                    worker.resume()
            done.wait(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for worker in stopped:
            with contextlib.suppress(psutil.Error):
                worker.resume()


def test_a_node_slower_than_the_timeout_is_left_out_and_takes_part_again(site: Site) -> None:
    run = site.submit("method=ffa_lora", "federation.rounds=2", "federation.timeout=150")
    until(lambda: run.events("phase", round=1), LIMIT, site.told)
    with slowed(site, "south"):
        until(lambda: run.events("round", round=1), LIMIT, site.told)
    assert phases(run, 1) == [("train", 1, ["south"])]
    assert reason(run, 1) == "timeout: no reply within 150 s"
    assert site.wait(run, LIMIT) == "finished:completed"
    assert phases(run, 2) == [("train", 2, [])]
    # It did the first round all the same, only too late to count; it has paid, and the server has counted that.
    check_spent(site, run, {"north": [1, 2], "south": [1, 2]})


def test_a_full_disk_under_the_store_costs_a_round_and_no_ledger(site: Site, tmp_path: Path) -> None:
    store = site.state / "south" / "store"
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a disk of its own needs the right to mount one")
    config = site.folder / "nodes" / "south" / "node.toml"
    own = config.read_text()
    try:
        config.write_text(own.replace(str(store), str(disk / "store")))
        site.kill("south", family=True)
        site.online("south", seconds=LIMIT)
        run = site.submit("method=ffa_lora", "federation.rounds=3")
        until(lambda: run.events("round", round=1), LIMIT, site.told)
        fill(disk)
        until(lambda: run.events("round", round=2), LIMIT, site.told)
        (disk / "filler").unlink()
        assert phases(run, 2) == [("train", 1, ["south"])]
        assert reason(run, 2) == "store: the node's own log has the reason"
        assert "No space left on device" in (site.state / "south.log").read_text()
        assert site.wait(run, LIMIT) == "finished:completed"
        assert phases(run, 3) == [("train", 2, [])]
        assert not run.rounds[2]["phases"][0]["flags"]
        ledger = Ledger.load(disk / "store" / "ledger.jsonl")
        assert {e.round for e in ledger.entries} in ({1, 3}, {1, 2, 3})
        told = {n["node"]: n for n in run.json("privacy.json")["nodes"]}["south"]
        assert ledger.spent(ledger.runs[0], "rdp") <= told["epsilon"] <= 3.0
    finally:
        config.write_text(own)
        site.kill("south", family=True)
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no page of a file system free."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(os.urandom(4096))
