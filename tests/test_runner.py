"""Starting and resuming runs, without Flower: what is launched, and what a run's directory must survive."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import privet.launcher
from privet import runner
from privet.cli import main
from privet.config import Config, compose
from privet.errors import PrivetError
from privet.launcher import Outcome
from server_app.results import RunDirectory

TINY = ["model=tiny_random", "federation.clients=3"]


class Launches:
    """Stands in for Flower and keeps what it was asked for."""

    def __init__(self) -> None:
        self.run_config: dict[str, Any] = {}
        self.federation: dict[str, Any] = {}
        self.seen: dict[str, str] = {}
        self.locked = False
        self.count = 0

    def __call__(
        self,
        *,
        run_config: Mapping[str, Any],
        run_dir: Path,
        federation: Mapping[str, Any],
        app_dir: Path,
        **_: object,
    ) -> Outcome:
        privet.launcher._check_keys(app_dir, run_config)
        self.run_config, self.federation = dict(run_config), dict(federation)
        self.seen = {p.name: p.read_text() for p in run_dir.iterdir() if p.is_file()}
        self.locked = runner.is_locked(run_dir)
        self.count += 1
        (run_dir / "summary.json").write_text(json.dumps({"status": "completed"}))
        return Outcome("completed", "", "1")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    stub = Launches()
    monkeypatch.setattr(privet.launcher, "launch", stub)
    return stub


def begun(path: Path, *overrides: str) -> Config:
    """Make the directory of a run whose server began."""
    config = compose(overrides)
    RunDirectory(path).begin(config, "run-1")
    return config


# --- before a run --------------------------------------------------------------------------------


def test_a_run_never_writes_into_another_runs_folder(tmp_path: Path) -> None:
    config = compose()
    first, second = runner.new_run_dir(tmp_path, None, config), runner.new_run_dir(tmp_path, None, config)
    assert first != second
    runner.new_run_dir(tmp_path, "mine", config)
    with pytest.raises(PrivetError, match="exists already"):
        runner.new_run_dir(tmp_path, "mine", config)


def test_local_paths_become_absolute_and_hub_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own-model").mkdir()
    data = ["task=csv", "task.labels=[a,b]", "task.test_path=test.csv", "task.path='site {client}.csv'"]
    hub = [*data, "model=pretrained", "model.path=FacebookAI/roberta-base"]
    assert runner.absolute(hub, compose(hub))[0] == [
        *hub,
        f"task.path='{tmp_path}/site {{client}}.csv'",
        f"task.test_path='{tmp_path}/test.csv'",
    ]
    own = [*data, "model=pretrained", "model.path=own-model"]
    overrides, config = runner.absolute(own, compose(own))
    assert config.model.path == f"{tmp_path}/own-model"
    assert config.task.path == f"{tmp_path}/site {{client}}.csv"
    assert compose(overrides) == config


def test_run_checks_starts_and_says_how_to_start_again(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def check(runs: list[list[str]]) -> runner.Checked:
        asked.append(runs)
        return runner.Checked([runner.CheckedPlan(None, ["a GPU stays idle"])], 0)

    monkeypatch.setattr(runner, "check", check)
    assert main(["run", "seed=1", *TINY, "--runs", str(tmp_path), "--name", "one"]) == 0
    assert asked == [[["seed=1", *TINY]]]
    assert "note: a GPU stays idle" in capsys.readouterr().err
    run = tmp_path / "one"
    assert launches.run_config == {"run-dir": str(run), "overrides": shlex.join(["seed=1", *TINY])}
    assert json.loads(launches.seen["launch.json"])["overrides"] == ["seed=1", *TINY]
    assert launches.locked
    assert not runner.is_locked(run)


def test_what_the_plan_refuses_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = runner.Checked([runner.CheckedPlan("rank = 0 is not allowed", [])], 0)
    monkeypatch.setattr(runner, "check", lambda _: refused)
    assert main(["run", *TINY, "--runs", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "privet: rank = 0 is not allowed\n"
    assert not (tmp_path / "runs").exists()


def test_the_batch_check_answers_for_every_run(settings: list[str]) -> None:
    settings = [*settings, "method=ffa_lora"]
    checked = runner.check([settings, [*settings, "model.lora.targets=[qury]"], [*settings, "seed=-1"]])
    assert [p.error is None for p in checked.plans] == [True, False, False]
    assert "did you mean 'query'" in str(checked.plans[1].error)
    assert "seed = -1" in str(checked.plans[2].error)


# --- resume --------------------------------------------------------------------------------------


def test_a_complete_run_is_left_alone(
    tmp_path: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text('{"status": "completed"}')
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run'} is complete already\n"
    assert launches.count == 0


@pytest.mark.parametrize("summary", [None, '{"status": "failed"}', "{torn"])
def test_a_broken_run_goes_on_with_its_own_configuration(
    tmp_path: Path, launches: Launches, summary: str | None
) -> None:
    run = tmp_path / "run"
    begun(run, *TINY, "federation.cpus_per_client=2", "federation.gpus_per_client=0.5")
    runner.write_launch(run, ["federation.clients=7"])
    (run / "events.jsonl").write_text('{"event": "plan"}\n{"event": "rou')
    if summary is not None:
        (run / "summary.json").write_text(summary)
    assert main(["run", "--resume", str(run)]) == 0
    assert launches.run_config == {"run-dir": str(run), "resume": True}
    assert launches.federation == {
        "num-supernodes": 3,
        "client-resources-num-cpus": 2,
        "client-resources-num-gpus": 0.5,
    }
    # What the server appends next must not become part of the torn line.
    assert launches.seen["events.jsonl"] == '{"event": "plan"}\n{"event": "rou\n'
    assert launches.locked


def test_a_run_that_died_before_its_server_starts_afresh(tmp_path: Path, launches: Launches) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "superlink.log").write_text("x")
    runner.write_launch(run, ["seed=4", *TINY])
    (run / "events.jsonl").write_text('{"event": "end", "status": "failed"}\n')
    (run / "failure.json").write_text('{"reason": "no nodes"}')
    (run / "summary.json").write_text('{"status": "failed"}')
    assert runner.state_of(run) == "broken"
    assert main(["run", "--resume", str(run)]) == 0
    assert launches.run_config == {"run-dir": str(run), "overrides": shlex.join(["seed=4", *TINY])}
    assert launches.federation["num-supernodes"] == 3
    assert set(launches.seen) == {"launch.json", "lock"}


def test_a_run_is_found_by_its_name(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path / "runs" / "one", *TINY)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--resume", "one"]) == 0
    assert launches.run_config["run-dir"] == str(tmp_path / "runs" / "one")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "seed=2"], "'seed=2' does not go with --resume: a run keeps its configuration"),
        (["RUN", "--name", "x"], "--name does not go with --resume"),
        (["RUN", "--dry-run"], "--dry-run does not go with --resume"),
        (["RUN", "-m"], "--multirun does not go with --resume"),
        (["/no/such/run"], "there is no such directory"),
        (["EMPTY"], "is no run's directory"),
        (["SWEEP"], "is a sweep"),
        (["WRONG"], "config.yaml cannot be read"),
        (["OLD"], "config.yaml: federation.clients is missing"),
    ],
)
def test_wrong_resumes_are_one_line(
    tmp_path: Path,
    launches: Launches,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    for name in ("RUN", "EMPTY", "SWEEP", "WRONG", "OLD"):
        (tmp_path / name).mkdir()
    (tmp_path / "SWEEP" / "sweep.json").write_text("{}")
    begun(tmp_path / "RUN")
    (tmp_path / "WRONG" / "config.yaml").write_text("a: [")
    text = (tmp_path / "RUN" / "config.yaml").read_text()
    (tmp_path / "OLD" / "config.yaml").write_text(text.replace("  clients: 4\n", ""))
    given = str(tmp_path / arguments[0]) if arguments[0].isupper() else arguments[0]
    assert main(["run", "--resume", given, *arguments[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert launches.count == 0


def test_the_saved_configuration_is_the_one_that_ran(tmp_path: Path) -> None:
    config = begun(
        tmp_path / "run",
        "task=csv",
        "task.path='/data/yes: {client} #1.csv'",
        "task.test_path=/data/t.csv",
        "task.labels=[no,'yes',on,'1e3','null','','a: #b']",
        "privacy.delta=1e-7",
        "privacy.epsilon=1e3",
    )
    saved = runner.saved_config(tmp_path / "run")
    assert saved == config
    assert saved.hash == config.hash


# --- one process a directory ---------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from privet.runner import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock of ``tmp_path / "run"`` in another process."""
    begun(tmp_path / "run", *TINY)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_two_processes_never_drive_one_run(
    tmp_path: Path,
    launches: Launches,
    holder: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    assert runner.state_of(run) == "running"
    assert main(["run", "--resume", str(run)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"privet: {run} is being run by another process: wait for it, or stop it"
    ]
    assert launches.count == 0
    # A lock dies with its process, so that a killed run can be resumed.
    holder.kill()
    holder.wait()
    assert runner.state_of(run) == "broken"
    assert main(["run", "--resume", str(run)]) == 0
    assert launches.count == 1


def test_a_run_stops_once_when_its_sweep_is_gone() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        ticks: list[int] = []
        for parent, signals in ((None, 0), (os.getppid(), 0), (os.getpid(), 1)):
            watch = runner._watching(parent, lambda: ticks.append(1))
            watch()
            watch()
            assert len(received) == signals
        assert len(ticks) == 6
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("clients", "share", "cpus", "expected"),
    [(4, 1, None, None), (4, 1, 2, 2), (4, 1, 16, 4), (4, 2, 16, 8), (4, 4, 2, 4), (1, 1, 2, 1)],
)
def test_a_share_of_the_cores_is_never_exceeded_and_fits_one_client(
    clients: int, share: int, cpus: int | None, expected: int | None
) -> None:
    config = compose([f"federation.clients={clients}", f"federation.cpus_per_client={share}"])
    assert runner.federation_settings(config, cpus).get("init-args-num-cpus") == expected


def test_a_failed_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / "a run", *TINY)
    monkeypatch.setattr(privet.launcher, "launch", lambda **_: Outcome("stopped", "by Ctrl-C", "1", 2))
    assert main(["run", "--resume", str(tmp_path / "a run")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"to go on: privet run --resume '{tmp_path / 'a run'}'"
    )
