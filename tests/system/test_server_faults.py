"""A ServerApp or a SuperLink that is killed or stopped: the run goes on after its last round, and nobody pays twice."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from privet import runner
from privet.cli import main
from tests.conftest import Outcome, state_of
from tests.system.deployment import Site, Submitted, deployed, kill, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.xdist_group("system"),
    pytest.mark.timeout(2400),
]

LIMIT = 600.0  # seconds that anything may take which takes half a minute on a machine with nothing else to do


def resumed(run: Submitted) -> list[str]:
    return [e["text"] for e in run.events("note") if e["text"].startswith("resumed")]


def finished_rounds(run: Submitted) -> list[int]:
    return [r["round"] for r in run.rounds]


def test_a_serverapp_killed_between_the_phases_of_fedask_is_resumed(tmp_path: Path) -> None:
    """Private: every phase is charged once, though both servers asked for it."""
    names = ("north", "south")
    with deployed(tmp_path, *names) as site:
        for name in names:
            site.furnish(name)
        site.up(*names)
        run = site.submit("method=fedask", "federation.rounds=2")
        until(lambda: run.events("reply", round=2, phase="sketch", node="south"), 2 * LIMIT, site.told)
        (server,) = site.workers("superlink", "flwr-serverapp")
        kill(server)
        assert finished_rounds(run) == [1]
        again = site.submit(resume=run.path)
        assert site.wait(again, 2 * LIMIT) == "finished:completed"
        assert resumed(again) == ["resumed after round 1"]
        assert finished_rounds(again) == [1, 2]
        summary, privacy = again.json("summary.json"), again.json("privacy.json")
        assert summary["failures"] == []  # the stored replies were sent again
        told = {n["node"]: n["epsilon"] for n in privacy["nodes"]}
        for name in names:
            ledger = site.ledger(name)
            assert Counter((e.round, e.phase) for e in ledger.entries) == {(1, "sketch"): 1, (2, "sketch"): 1}
            assert ledger.runs == (summary["run"],)
            assert 0 < ledger.spent(summary["run"], "rdp") <= told[name] * (1 + 1e-6) <= 3.0 * (1 + 1e-6)
        # Flower has seen by now, or will within a minute, that the first one is dead.
        until(lambda: site.status(run).startswith("finished"), LIMIT, site.told)
        assert site.status(run) == "finished:failed"
        # A run that is complete is not run again.
        third = site.submit(resume=run.path)
        assert site.wait(third, LIMIT) == "finished:failed"
        assert again.json("summary.json") == summary


def test_a_run_that_was_stopped_and_lost_its_superlink_ends_as_if_nothing_had_been(
    tmp_path: Path, run: Callable[..., Outcome]
) -> None:
    """Not private, so that the end can be compared: `privet stop`, then kill -9 of the SuperLink's whole unit."""
    names = ("client-0", "client-1")
    overrides = ["method=fedavg", "privacy=none", "federation.rounds=3"]
    with deployed(tmp_path / "deployed", *names) as site:
        for i, name in enumerate(names):
            site.furnish(name, allow_non_private=True)
            shutil.copy(site.base / f"{name}.csv", tmp_path / f"{i}.csv")
        site.up(*names)
        first = site.submit(*overrides)
        until(lambda: first.events("round", round=1), LIMIT, site.told)
        assert main(["stop", first.id]) == 0
        assert site.status(first) == "finished:stopped"
        until(lambda: not site.workers("superlink", "flwr-serverapp"), LIMIT, site.told)
        assert runner.state_of(first.path) == "broken"

        second = site.submit(resume=first.path)
        until(lambda: second.events("round", round=2), LIMIT, site.told)
        site.kill("superlink", family=True)
        site.superlink(seconds=LIMIT)
        site.online(*names, seconds=LIMIT)
        assert set(site.statuses()) == set(site.ids.values())  # the registered keys are in the database

        third = site.submit(resume=first.path)
        assert site.wait(third, LIMIT) == "finished:completed"
        assert resumed(third)[-1].startswith("resumed after round")
        assert finished_rounds(third) == [1, 2, 3]
        settings = site.settings(*overrides, f"task.path='{tmp_path}/{{client}}.csv'")
    whole = run(*settings, nodes=2)
    assert whole.error is None
    one, other = state_of(whole), state_of(Outcome(third.path, whole.grid, None))
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, rtol=1e-4, atol=1e-6)
    assert third.json("summary.json")["metrics"] == pytest.approx(
        whole.json("summary.json")["metrics"], rel=1e-4
    )


def test_with_process_isolation_a_run_survives_a_killed_superlink(tmp_path: Path) -> None:
    names = ("north", "south")
    with deployed(tmp_path, *names) as site:
        for name in names:
            site.furnish(name)
        superlink(site)
        executor(site)
        site.register(*names)
        for name in names:
            site.node(name)
        site.online(*names, seconds=LIMIT)
        run = site.submit("method=ffa_lora", "federation.rounds=3", "federation.timeout=400")
        until(lambda: run.events("round", round=1), LIMIT, site.told)
        site.kill("superlink")
        superlink(site)
        site.online(*names, seconds=LIMIT)
        assert site.wait(run, 2 * LIMIT) == "finished:completed"
        assert resumed(run) == []
        assert finished_rounds(run) == [1, 2, 3]
        assert not run.rounds[-1]["void"]
        for name in names:
            entries = site.ledger(name).entries
            assert all(n == 1 for n in Counter((e.round, e.phase) for e in entries).values())


def superlink(site: Site) -> None:
    site.superlink(lambda c: [*c, "--isolation", "process"], seconds=LIMIT)


def executor(site: Site) -> None:
    """Start Flower's SuperExec as a unit of its own would."""
    unit = site.folder / "superlink" / "privet-superexec.service"
    text = (site.folder / "superlink" / "privet-superlink.service").read_text()
    (command,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    program = shlex.split(command.removeprefix("ExecStart="))[0].replace("superlink", "superexec")
    roots = site.folder / "superlink" / "ca.crt"
    own = f"{program} --runtime-api-address 127.0.0.1:{site.port} --root-certificates {roots}"
    unit.write_text(text.replace(command, f"ExecStart={own}"))
    site.start(unit, "superexec.log")
