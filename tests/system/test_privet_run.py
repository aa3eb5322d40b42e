"""The real thing, small: `privet run` and plain `flwr run`, through SuperLink and Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import write_table

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system"), pytest.mark.timeout(600)]


def small(table: Path) -> list[str]:
    return [
        "model=tiny_random",
        "task=csv",
        f"task.path={table}",
        "task.labels=[no,yes]",
        "task.test_rows=30",
        "federation.clients=2",
        "train.local_steps=2",
        "train.batch_size=16",
        "train.lr=0.5",
    ]


def privet(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "privet", *arguments], cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )


def test_privet_run_trains_through_flower_and_leaves_everything(tmp_path: Path) -> None:
    table = write_table(tmp_path / "rows.csv", 120)
    done = privet(
        "run", *small(table), "method=fedhsip", "method.warmup_rounds=1", "federation.rounds=2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["rounds"] == 2
    assert 0 < summary["epsilon"] <= 6.0
    for name in (
        "config.yaml",
        "rounds.jsonl",
        "privacy.json",
        "communication.json",
        "adapter/README.md",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/head.safetensors",
        "nodes/client-0/ledger.jsonl",
    ):
        assert (run / name).is_file(), name
    assert str(run) in done.stdout
    # The server's epsilon is the one in the nodes' own ledgers.
    ledgers = json.loads(privet("ledger", str(run), "--json", cwd=tmp_path).stdout)
    assert [ledger["runs"][0]["epsilon"] for ledger in ledgers] == pytest.approx([summary["epsilon"]] * 2)


def test_a_run_that_cannot_work_fails_at_once_in_one_line(tmp_path: Path) -> None:
    done = privet("run", "method=fedhsp", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        line for line in done.stderr.strip().splitlines() if "did you mean 'fedhsip'" in line
    ]
    assert not (tmp_path / "runs").exists()


def flwr(*arguments: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [BIN / "flwr", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plain_flwr_run_of_two_rounds_is_completed_in_flwr_list(tmp_path: Path) -> None:
    """The README's plain Flower way, checked through `flwr list`."""
    from privet.launcher import _free_ports, find_processes

    table = write_table(tmp_path / "rows.csv", 120)
    token = f"privet-test-{os.getpid()}-{time.monotonic_ns()}"
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(_free_ports(1)[0]),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PRIVET_LAUNCH": token,
    }
    run_dir = tmp_path / "plain"
    settings = " ".join([*small(table), "federation.rounds=2"])
    try:
        started = flwr(
            "run",
            str(ROOT),
            "--run-config",
            f'method="ffa_lora" run-dir="{run_dir}" overrides="{settings}"',
            "--federation-config",
            "num-supernodes=2 client-resources-num-cpus=1",
            "--format",
            "json",
            env=env,
        )
        run_id = str(json.loads(started[started.index("{") :])["run-id"])
        deadline = time.monotonic() + 400
        status = ""
        while not status.startswith("finished") and time.monotonic() < deadline:
            time.sleep(3)
            listed = flwr("list", "--run-id", run_id, "--format", "json", env=env)
            status = json.loads(listed[listed.index("{") :])["runs"][0]["status"]
        assert status == "finished:completed"
        assert json.loads((run_dir / "summary.json").read_text())["rounds"] == 2
    finally:
        for process in find_processes(token):
            process.kill()
