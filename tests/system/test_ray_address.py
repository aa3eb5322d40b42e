"""A simulation on a Ray cluster that is there already: ``RAY_ADDRESS``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from privet.launcher import _free_ports
from tests.conftest import write_table
from tests.system.test_privet_run import BIN, small

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.xdist_group("system"),
    pytest.mark.timeout(600),
]


@dataclass
class Head:
    """A Ray head of the test's own, on loopback."""

    process: subprocess.Popen[bytes]
    address: str
    folder: Path

    def log_text(self) -> str:
        """Everything that its processes have logged."""
        logs = (self.folder / "session_latest" / "logs").glob("*")
        return "".join(p.read_text(errors="replace") for p in logs if p.is_file())


@pytest.fixture
def head() -> Iterator[Head]:
    # Ray's socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port, client_port = _free_ports(2)
        command = [
            "start",
            "--head",
            "--block",
            f"--port={port}",
            "--node-ip-address=127.0.0.1",
            "--num-cpus=2",
        ]
        command += [
            f"--ray-client-server-port={client_port}",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
        ]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        with (Path(folder) / "head.log").open("wb") as log:
            process = subprocess.Popen(
                [BIN / "ray", *command],
                cwd=folder,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait_for(process, port, Path(folder) / "head.log")
            yield Head(process, f"127.0.0.1:{port}", Path(folder))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own session: the head and what it started


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + 90
    while "Ray runtime started" not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < limit, log.read_text(errors="replace")
        time.sleep(0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_run_joins_a_cluster_that_is_there_and_leaves_it_running(head: Head, tmp_path: Path) -> None:
    table = write_table(tmp_path / "rows.csv", 120)
    done = subprocess.run(
        [BIN / "privet", "run", *small(table), "method=ffa_lora", "federation.rounds=2"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": head.address},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["failures"]) == ("completed", 2, [])
    # It ran there: the head saw Flower's workers, and the run had no Ray of its own.
    assert "ClientAppActor" in head.log_text()
    assert not (run / "logs" / "ray").exists()
    assert head.process.poll() is None
