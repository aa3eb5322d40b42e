"""A sweep of two tiny runs, really through Flower; then again, and again with one of them broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_table

BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system"), pytest.mark.timeout(600)]


def test_a_sweep_trains_each_run_once_and_resumes_the_broken_one(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", 120)
    settings = [
        "model=tiny_random",
        "task=csv",
        "task.path=rows.csv",
        "task.labels=[no,yes]",
        "task.test_rows=30",
        "federation.clients=1",
        "federation.rounds=1",
        "federation.min_replies=1",
        "train.local_steps=2",
        "train.batch_size=16",
        "train.lr=0.5",
        "method=ffa_lora",
    ]

    def sweep() -> str:
        command = [BIN / "privet", "run", "-m", *settings, "privacy.epsilon=3,6", "sweep.parallel=2"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    sweep()
    folder = tmp_path / "runs" / "sweep-privacy.epsilon"
    runs = [folder / f"privacy.epsilon={e}" for e in (3, 6)]
    first = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [s["status"] for s in first] == ["completed", "completed"]
    assert 0 < first[0]["epsilon"] <= 3.0 < first[1]["epsilon"] <= 6.0

    assert "skipped: 2 finished" in sweep()
    assert [json.loads((run / "summary.json").read_text()) for run in runs] == first

    (runs[1] / "summary.json").unlink()
    out = sweep()
    assert "skipped: 1 finished" in out
    assert "resume privacy.epsilon=6 (1 of 1)" in out
    again = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert again[0] == first[0]
    assert again[1]["status"] == "completed"
    assert again[1]["run"] == first[1]["run"]
    assert again[1]["metrics"] == first[1]["metrics"]
    assert again[1]["epsilon"] == first[1]["epsilon"]
