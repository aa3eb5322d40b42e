"""The parts of the launcher that need no Flower."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from privet import launcher
from privet.errors import ConfigError
from privet.launcher import MARKER, Outcome, Signals, end_processes, failure_reason, find_processes, launch


def test_a_folder_without_an_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pyproject"):
        launch(run_config={}, run_dir=tmp_path / "run", federation={}, app_dir=tmp_path)
    assert not (tmp_path / "run").exists()


def test_exit_codes() -> None:
    assert Outcome("completed", "", "1").exit_code == 0
    assert Outcome("failed", "x", "1").exit_code == 1
    assert Outcome("stopped", "x", "1", signal.SIGTERM).exit_code == 143
    assert Outcome("stopped", "stopped with flwr stop", "1").exit_code == 1


@pytest.mark.parametrize(
    ("detail", "log", "reason"),
    [
        ("", "", ""),
        ("Simulation failed with exception: rank = 0", "", "rank = 0"),
        ("Simulation failed with exception: 'w'", "  File x\nKeyError: 'w'\n", "KeyError: 'w'"),
        (
            "Simulation failed with exception: epsilon = 0",
            "privet.errors.ConfigError: epsilon = 0\n",
            "epsilon = 0",
        ),
        (
            "Simulation failed with exception: An error was encountered. Ending simulation.",
            "x.LoadError: no module\nRuntimeError: Simulation Runtime crashed.\n",
            "LoadError: no module",
        ),
        ("", "\x1b[91mERROR \x1b[0m:     Exit Code: 700\n", "Exit Code: 700"),
        ("Simulation failed with exception: two\nlines", "", "two lines"),
        ("Simulation failed with exception: now", "ValueError: handled earlier\n", "now"),
    ],
)
def test_failure_reason(detail: str, log: str, reason: str) -> None:
    assert failure_reason(detail, log) == reason


def test_failure_reason_is_bounded() -> None:
    assert len(failure_reason("x" * 5000, "")) == 500


@pytest.mark.parametrize(
    "value", ["", 'a "b" \\ c', "tab\there", "\x7f del", "Zürich 😀", "lr=0.5 seed=1", 7, -1]
)
def test_run_config_values_survive_toml(value: str | int) -> None:
    assert tomllib.loads(f"key = {launcher._toml(value)}")["key"] == value


@pytest.mark.parametrize(
    ("cores", "federation", "cpus"),
    [
        (2, {"num-supernodes": 8, "client-resources-num-cpus": 1}, 2),
        (64, {"num-supernodes": 4, "client-resources-num-cpus": 2}, 8),
        (2, {"num-supernodes": 2, "client-resources-num-cpus": 4}, 4),
        (64, {"num-supernodes": 4, "init-args-num-cpus": 3}, 3),
    ],
)
def test_ray_gets_no_more_cpus_than_it_can_use(
    monkeypatch: pytest.MonkeyPatch, cores: int, federation: dict[str, str | int | float], cpus: int
) -> None:
    monkeypatch.setattr(launcher, "available_cpus", lambda: cores)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert launcher._with_ray_cpus(federation)["init-args-num-cpus"] == cpus
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # Ray refuses a number beside an existing cluster
    assert "init-args-num-cpus" not in launcher._with_ray_cpus(federation)


def test_stage_takes_the_app_and_nothing_else(tmp_path: Path) -> None:
    app = tmp_path / "app"
    for name in (
        "pyproject.toml",
        "LICENSE",
        ".gitignore",
        "server_app/app.py",
        "conf/method/fedhsip.yaml",
        "tests/test_x.py",
        ".venv/lib/a.py",
        "myenv/pyvenv.cfg",
        "myenv/lib/b.py",
        "runs/one/config.yaml",
        "out/events.jsonl",
        "privet/__pycache__/x.py",
        "data/rows.csv",
    ):
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text("x")
    (app / "link.py").symlink_to(app / "server_app/app.py")
    launcher._stage(app, tmp_path / "staged", skip=app / "out")
    staged = {
        p.relative_to(tmp_path / "staged").as_posix() for p in (tmp_path / "staged").rglob("*") if p.is_file()
    }
    assert staged == {
        "pyproject.toml",
        "LICENSE",
        ".gitignore",
        "server_app/app.py",
        "conf/method/fedhsip.yaml",
        "tests/test_x.py",
    }


def test_marked_processes_are_found_and_ended_even_if_stubborn(tmp_path: Path) -> None:
    token = os.urandom(8).hex()
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    with subprocess.Popen(
        [sys.executable, "-c", stubborn], env=os.environ | {MARKER: token}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [p.pid for p in find_processes(token)] == [process.pid]
        assert list(find_processes(token + "0")) == []
        end_processes(lambda: list(find_processes(token)), hurry=lambda: True)
        assert process.wait(timeout=5) == -signal.SIGKILL
    assert list(find_processes(token)) == []


def test_processes_that_lost_their_environment_are_found_by_folder(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "99"], env={}, cwd=tmp_path) as process:
        try:
            assert process.pid in [p.pid for p in find_processes("no-such-token", tmp_path)]
        finally:
            process.kill()


def test_signals_are_recorded_and_handlers_restored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.first == signal.SIGTERM
            assert not signals.impatient
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.impatient
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.first == 0
    finally:
        signal.signal(signal.SIGHUP, before)
