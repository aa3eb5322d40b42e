"""The launcher against real Flower and Ray, with an app of two short files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

from privet.launcher import launch

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system")]

ROOT = Path(__file__).resolve().parents[2]
TAG = "PRIVET_TEST_TAG"
FEDERATION = {"num-supernodes": 2, "client-resources-num-cpus": 1}

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "trivial"
version = "1.0.0"
description = "Counts rounds"
license = { file = "LICENSE" }
dependencies = ["flwr[simulation]>=1.42.0,<1.43"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "privet"
fab-format-version = 1
flwr-version-target = "1.42.0"
[tool.flwr.app.components]
serverapp = "trivial.server:app"
clientapp = "trivial.client:app"
[tool.flwr.app.config]
rounds = 2
run-dir = ""
mode = "ok"
"""

CLIENT = """
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    time.sleep(float(message.content["config"]["sleep"]))
    values = message.content["arrays"]["w"].numpy() + 1.0
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(values)})}), reply_to=message)
"""

SERVER = """
import json, os, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    run_dir = Path(config["run-dir"])
    (run_dir / "started").write_text(os.getcwd())
    if config["mode"] == "raise":
        raise ValueError("rank = 0 is not allowed")
    if config["mode"] == "reason":
        (run_dir / "failure.json").write_text(json.dumps({"reason": "every client refused"}))
        raise RuntimeError("something less clear")
    if config["mode"] == "die":
        os._exit(3)
    values = np.zeros(3)
    for _ in range(config["rounds"]):
        while len(nodes := list(grid.get_node_ids())) < 2:
            time.sleep(0.1)
        (run_dir / "round").touch()
        content = RecordDict({
            "arrays": ArrayRecord({"w": Array(values)}),
            "config": ConfigRecord({"sleep": 600.0 if config["mode"] == "hang" else 0.0}),
        })
        sent = [Message(content, dst_node_id=n, message_type=MessageType.TRAIN) for n in nodes]
        replies = list(grid.send_and_receive(sent, timeout=120))
        values = np.mean([r.content["arrays"]["w"].numpy() for r in replies], axis=0)
    (run_dir / "result").write_text(json.dumps(values.tolist()))
"""

DRIVER = """
import json, signal, sys
from pathlib import Path
from privet.launcher import launch

# A background job of a shell may have been started with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
outcome = launch(
    run_config={"run-dir": sys.argv[2], "mode": sys.argv[3]}, run_dir=Path(sys.argv[2]),
    federation={"num-supernodes": 2, "client-resources-num-cpus": 1}, app_dir=Path(sys.argv[1]),
)
print(json.dumps([outcome.status, outcome.detail]))
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Flower app that adds one to three numbers a round, beside files that are none of its business."""
    folder = tmp_path / "app"
    (folder / "trivial").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "LICENSE").write_text("Apache-2.0")
    (folder / "README.md").write_text("# Trivial")
    (folder / "trivial" / "__init__.py").touch()
    (folder / "trivial" / "client.py").write_text(textwrap.dedent(CLIENT))
    (folder / "trivial" / "server.py").write_text(textwrap.dedent(SERVER))
    return folder


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A mark of this test on all processes that it starts, and a temporary folder of its own."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(TAG, value)
    return value


def tagged(value: str) -> list[str]:
    """Command lines of living processes with the tag, other than this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(TAG) == value:
                found.append(" ".join(process.cmdline())[:200])
        except (psutil.Error, OSError):
            continue
    return found


def temp_dirs() -> set[Path]:
    return {p for base in {"/tmp", os.environ.get("TMPDIR", "/tmp")} for p in Path(base).glob("privet-*")}


def start_driver(app: Path, run_dir: Path, mode: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(app), str(run_dir), mode],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str], limit: float = 120) -> None:
    end = time.monotonic() + limit
    while not path.exists():
        assert process.poll() is None, "the launcher ended early"
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.1)


def test_two_rounds_complete_and_leave_only_the_run_directory(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"
    ticks = []
    outcome = launch(
        run_config={"run-dir": str(run_dir), "mode": "ok"},
        run_dir=run_dir,
        federation=FEDERATION,
        app_dir=app,
        on_tick=lambda: ticks.append(time.monotonic()),
        timeout=240,
    )
    assert (outcome.status, outcome.detail, outcome.exit_code) == ("completed", "", 0)
    assert json.loads((run_dir / "result").read_text()) == [2.0, 2.0, 2.0]
    assert "finished:completed" in (run_dir / "logs" / "flwr.log").read_text()
    assert "Starting Flower Simulation" in (run_dir / "logs" / "simulation.log").read_text()
    assert list((run_dir / "logs" / "ray").iterdir())
    cwd = Path((run_dir / "started").read_text())
    assert cwd.name == "cwd"
    assert not cwd.parent.exists()
    assert tagged(tag) == []
    assert len(ticks) > 20


def test_a_raising_server_app_gives_its_reason_in_one_line(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"
    outcome = launch(
        run_config={"run-dir": str(run_dir), "mode": "raise"},
        run_dir=run_dir,
        federation=FEDERATION,
        app_dir=app,
    )
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.detail == "ValueError: rank = 0 is not allowed"
    assert tagged(tag) == []


def test_failure_file_is_preferred_and_ends_the_run_at_once(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"
    outcome = launch(
        run_config={"run-dir": str(run_dir), "mode": "reason"},
        run_dir=run_dir,
        federation=FEDERATION,
        app_dir=app,
    )
    assert (outcome.status, outcome.detail) == ("failed", "every client refused")
    assert tagged(tag) == []


def test_killed_simulation_is_a_failure(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"
    outcome = launch(
        run_config={"run-dir": str(run_dir), "mode": "die"},
        run_dir=run_dir,
        federation=FEDERATION,
        app_dir=app,
    )
    assert outcome.status == "failed"
    assert "was killed" in outcome.detail
    assert tagged(tag) == []


def test_ctrl_c_while_clients_train_leaves_no_process(app: Path, tmp_path: Path, tag: str) -> None:
    before = temp_dirs()
    run_dir = tmp_path / "run"
    driver = start_driver(app, run_dir, "hang")
    wait_for(run_dir / "round", driver)
    end = time.monotonic() + 120
    while not any("ray::ClientAppActor.run" in line for line in tagged(tag)):
        assert time.monotonic() < end, f"no client started: {tagged(tag)}"
        time.sleep(0.2)
    running = " ".join(tagged(tag))
    for name in ("flower-superlink", "flwr-simulation", "raylet", "gcs_server"):
        assert name in running
    mine = temp_dirs() - before
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=60)
    assert json.loads(out) == ["stopped", "stopped by Ctrl-C"]
    assert driver.returncode == 130
    assert tagged(tag) == []
    assert not any((p / "home").exists() and p in mine and _is_of(p, run_dir) for p in temp_dirs())


def _is_of(temp: Path, run_dir: Path) -> bool:
    """Whether a launch's temporary folder belongs to this run and not to a neighbour's."""
    return str(run_dir) in (temp / "bin" / "flwr-simulation").read_text()


def test_sigterm_during_the_start_leaves_no_process(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"
    driver = start_driver(app, run_dir, "hang")
    wait_for(run_dir / "logs" / "superlink.log", driver)
    time.sleep(1.0)
    driver.send_signal(signal.SIGTERM)
    out, _ = driver.communicate(timeout=60)
    assert json.loads(out) == ["stopped", "stopped by SIGTERM"]
    assert driver.returncode == 128 + signal.SIGTERM
    assert tagged(tag) == []


def test_an_exception_of_the_caller_leaves_no_process(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"

    def on_tick() -> None:
        if (run_dir / "logs" / "flwr.log").exists():
            raise KeyError("a bug in the display")

    with pytest.raises(KeyError, match="a bug in the display"):
        launch(
            run_config={"run-dir": str(run_dir), "mode": "hang"},
            run_dir=run_dir,
            federation=FEDERATION,
            app_dir=app,
            on_tick=on_tick,
        )
    assert tagged(tag) == []


def test_time_limit_fails_the_run(app: Path, tmp_path: Path, tag: str) -> None:
    run_dir = tmp_path / "run"
    outcome = launch(
        run_config={"run-dir": str(run_dir), "mode": "hang"},
        run_dir=run_dir,
        federation=FEDERATION,
        app_dir=app,
        timeout=2,
    )
    assert outcome.status == "failed"
    assert outcome.detail == "stopped: the run took longer than 2 s"
    assert outcome.exit_code == 1
    assert tagged(tag) == []


def test_what_flower_refuses_is_told(app: Path, tmp_path: Path, tag: str) -> None:
    pyproject = app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('serverapp = "trivial.server:app"', ""))
    outcome = launch(run_config={}, run_dir=tmp_path / "run", federation=FEDERATION, app_dir=app)
    assert outcome.status == "failed"
    assert outcome.flower_run_id is None
    assert outcome.detail.startswith("Flower refused the run: ")
    assert "serverapp" in outcome.detail
    assert tagged(tag) == []
