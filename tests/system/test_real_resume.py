"""A real run whose every process is killed goes on where it was, and ends bit-equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from privet.launcher import MARKER
from tests.conftest import Outcome

BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system"), pytest.mark.timeout(600)]


def family(process: psutil.Process) -> list[psutil.Process]:
    """The command's process and everything that its launch started, whoever its parent is by now."""
    tokens = set()
    for child in process.children(recursive=True):
        try:
            tokens.add(child.environ().get(MARKER))
        except psutil.Error:
            continue
    tokens.discard(None)
    found = [process]
    for other in psutil.process_iter():
        try:
            if other.environ().get(MARKER) in tokens:
                found.append(other)
        except psutil.Error:
            continue
    return found


def test_kill_9_and_resume_of_fedrand(
    tmp_path: Path, run: Callable[..., Outcome], settings: list[str]
) -> None:
    overrides = ["method=fedrand", "privacy=none", "federation.rounds=6", "evaluation=both"]
    whole = run(*overrides)  # the same configuration in this process, not interrupted
    assert whole.error is None
    config_hash = json.loads((whole.path / "run.json").read_text())["config_hash"]

    command = [BIN / "privet", "run", "--name", "killed", *settings, *overrides]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as started:
        folder = tmp_path / "runs" / "killed"
        deadline = time.monotonic() + 200
        while not (folder / "checkpoints").exists() or not list((folder / "checkpoints").glob("round-*")):
            assert started.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for process in family(psutil.Process(started.pid)):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    assert not (folder / "summary.json").exists()
    done = subprocess.run(
        [BIN / "privet", "run", "--resume", folder],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "run.json").read_text())["config_hash"] == config_hash
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert any(e.get("text", "").startswith("resumed after round") for e in events)
    for name in ("adapter_model.safetensors", "head.safetensors"):
        assert (folder / "adapter" / name).read_bytes() == (whole.path / "adapter" / name).read_bytes(), name
    metrics = [json.loads((path / "summary.json").read_text()) for path in (folder, whole.path)]
    assert metrics[0]["metrics"] == metrics[1]["metrics"]
    assert metrics[0]["client_metrics"] == metrics[1]["client_metrics"]
    again = subprocess.run(
        [BIN / "privet", "run", "--resume", folder],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 0
    assert "complete already" in again.stdout + again.stderr
