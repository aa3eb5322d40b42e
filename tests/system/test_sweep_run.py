"""FedASK and FedRand in a sweep, really through Flower; then again, and again with one of them broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_table

BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.xdist_group("system"),
    pytest.mark.timeout(600),
]


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
        "evaluation=both",
    ]

    def sweep() -> str:
        command = [BIN / "privet", "run", "-m", *settings, "method=fedask,fedrand", "sweep.parallel=2"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = sweep()
    folder = tmp_path / "runs" / "sweep-method"
    runs = [folder / f"method={m}" for m in ("fedask", "fedrand")]
    first = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [(s["status"], s["method"]) for s in first] == [("completed", "fedask"), ("completed", "fedrand")]
    assert all(0 < s["epsilon"] <= 6.0 for s in first)
    (record,) = [json.loads(line) for line in (runs[0] / "rounds.jsonl").read_text().splitlines()]
    assert [(p["name"], p["replied"]) for p in record["phases"]] == [("sketch", 1), ("project", 1)]
    assert first[0]["client_metrics"]["personal"] is None
    assert first[1]["client_metrics"]["personal"]["nodes"] == 1
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert lines.index("method") < lines.index("fedask") < lines.index("fedrand")  # the one table at the end

    assert "skipped: 2 finished" in sweep()
    assert [json.loads((run / "summary.json").read_text()) for run in runs] == first

    (runs[1] / "summary.json").unlink()
    out = sweep()
    assert "skipped: 1 finished" in out
    assert "resume method=fedrand (1 of 1)" in out
    again = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert again[0] == first[0]
    assert again[1]["status"] == "completed"
    assert again[1]["run"] == first[1]["run"]
    assert again[1]["metrics"] == first[1]["metrics"]
    assert again[1]["epsilon"] == first[1]["epsilon"]
