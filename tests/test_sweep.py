"""Sweeps without Flower: which runs there are, which of them run, and that nothing outlives a sweep."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from privet import runner, slots, sweep
from privet.cli import main
from privet.config import compose
from privet.errors import ConfigError, PrivetError
from privet.experiments import Block

TINY = "model=tiny_random"

# Stands in for a run: it says what it got, and ends as its name asks.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[1])
log = run.parent / "log.jsonl"
def tell(what):
    with log.open("a") as file:
        file.write(json.dumps({"what": what, "run": run.name, "time": time.time(), "cpus": sys.argv[2],
                               "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}) + "\\n")
tell("start")
if "seed=9" in run.name:
    print("privet: the run failed: no node answered")
    sys.exit(1)
if "seed=8" in run.name:
    import subprocess
    subprocess.Popen(["sleep", "99"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)
if "seed=7" in run.name:
    signal.signal(signal.SIGINT, lambda *_: (tell("interrupted"), sys.exit(130)))
    time.sleep(60)
time.sleep(0.3)
(run / "summary.json").write_text(json.dumps({"status": "completed", "metrics": {"loss": 1.0, "accuracy": 0.75},
    "epsilon": 2.5, "upload_numbers": 1536, "download_numbers": 512, "seconds": 3.25}))
tell("end")
"""


def expand(overrides: list[str]) -> tuple[list[sweep.Combination], list[str]]:
    return sweep.expand([Block(overrides, frozenset())])


def stub_command(run_dir: Path, cpus: int | None) -> list[str]:
    return [sys.executable, "-c", CHILD, str(run_dir), str(cpus)]


def begun(path: Path, *overrides: str) -> None:
    """Make the directory of a run whose server began."""
    from server_app.results import RunDirectory  # PyTorch, which the driver below does without

    RunDirectory(path).begin(compose(overrides), "run-1")


def passed(runs: list[list[str]], gpus: int = 0) -> runner.Checked:
    return runner.Checked([runner.CheckedPlan(None, []) for _ in runs], gpus)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the plan check and the child process, which need PyTorch and Flower."""
    monkeypatch.setattr(runner, "check", passed)
    monkeypatch.setattr(slots, "child_command", stub_command)
    monkeypatch.setattr(sweep, "available_cpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def go(
    stubs: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def start(*arguments: str) -> tuple[int, str, str]:
        code = main(["run", "-m", "--runs", str(tmp_path), "--name", "s", TINY, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return start


def log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def started(folder: Path) -> list[str]:
    return [entry["run"] for entry in log(folder) if entry["what"] == "start"]


def names(*overrides: str) -> list[str]:
    found, errors = expand([TINY, *overrides])
    assert errors == []
    return [c.name for c in found]


# --- which runs ----------------------------------------------------------------------------------


def test_every_combination_in_a_stable_order() -> None:
    found, errors = expand(
        [TINY, "method=ffa_lora,fedavg", "privacy.epsilon=3,1", "seed=range(1,3)", "train.local_steps=4"]
    )
    assert errors == []
    assert [(c.config.method.name, c.config.privacy.epsilon, c.config.seed) for c in found] == [
        (method, epsilon, seed)
        for method in ("ffa_lora", "fedavg")
        for epsilon in (3.0, 1.0)
        for seed in (1, 2)
    ]
    assert found[0].name == "method=ffa_lora,privacy.epsilon=3,seed=1"
    assert found[0].values == {"method": "ffa_lora", "privacy.epsilon": "3", "seed": "1"}
    assert found[0].overrides == [
        TINY,
        "method=ffa_lora",
        "privacy.epsilon=3",
        "seed=1",
        "train.local_steps=4",
    ]
    assert {c.config.train.local_steps for c in found} == {4}


def test_hydras_own_syntax_is_read_by_hydra() -> None:
    assert names("seed=choice(4,2)") == ["seed=4", "seed=2"]
    # A list and a quoted comma are one value each; lists can be swept like anything else.
    found, _ = expand(["model=tiny_random", "model.lora.targets=[query],[query,value]"])
    assert [c.config.model.lora.targets for c in found] == [("query",), ("query", "value")]
    data = ["task=csv", "task.labels=[a,b]", "task.test_rows=9"]
    found, _ = expand([*data, "task.path='a,b.csv'", "task.text_column='x, y','z'"])
    assert [c.config.task.text_column for c in found] == ["x, y", "z"]
    assert {Path(c.config.task.path).name for c in found} == {"a,b.csv"}


def test_paths_are_absolute_for_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found, _ = expand(
        ["task=csv", "task.labels=[a,b]", "task.test_rows=9", "task.path=x.csv,y.csv", "seed=1,2"]
    )
    assert [c.config.task.path for c in found] == [f"{tmp_path}/{n}.csv" for n in ("x", "x", "y", "y")]
    assert [c.name for c in found][:2] == ["seed=1,task.path=x.csv", "seed=2,task.path=x.csv"]
    assert all(compose(c.overrides) == c.config for c in found)


def test_runs_without_privacy_come_once() -> None:
    assert names("privacy=dp,none", "privacy.epsilon=3,6", "seed=1,2") == [
        "privacy=dp,privacy.epsilon=3,seed=1",
        "privacy=dp,privacy.epsilon=3,seed=2",
        "privacy=dp,privacy.epsilon=6,seed=1",
        "privacy=dp,privacy.epsilon=6,seed=2",
        "privacy=none,seed=1",
        "privacy=none,seed=2",
    ]
    found, errors = expand([TINY, "privacy=none,dp", "privacy.clip=0.5", "privacy.accountant=prv"])
    assert errors == []
    assert [(c.name, c.config.privacy.clip) for c in found] == [("privacy=none", None), ("privacy=dp", 0.5)]


def test_a_budget_swept_without_privacy_is_a_mistake() -> None:
    found, errors = expand([TINY, "privacy=none", "privacy.epsilon=3,6"])
    assert found == []
    assert [re.sub(r" =.*", "", e) for e in errors] == [
        "privacy.epsilon=3: privacy.epsilon",
        "privacy.epsilon=6: privacy.epsilon",
    ]


def test_the_same_configuration_is_one_run() -> None:
    assert names("privacy.epsilon=3,3.0,6", "seed=1,1") == [
        "privacy.epsilon=3,seed=1",
        "privacy.epsilon=6,seed=1",
    ]


def test_all_errors_at_once_each_with_its_combination() -> None:
    found, errors = expand([TINY, "method=fedavg,fedavgg", "privacy.epsilon=-1,6", "seed=1,2"])
    assert [c.name for c in found] == [f"method=fedavg,privacy.epsilon=6,seed={s}" for s in (1, 2)]
    assert len(errors) == 6
    assert errors[0].startswith(
        "method=fedavg,privacy.epsilon=-1,seed=1: privacy.epsilon = -1.0 is not allowed"
    )
    assert errors[-1].startswith("method=fedavgg,privacy.epsilon=6,seed=2: unknown method 'fedavgg'")
    assert all("\n" not in e for e in errors)
    _, errors = expand([TINY, "sead=1", "seed=1,2"])
    assert len(errors) == 1
    assert errors[0].startswith("every combination: unknown key 'sead'")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=1"], "needs something to sweep"),
        (["seed=1,2", "seed=3"], "seed is set twice"),
        (["seed=interval(1,2)"], "name the values"),
        (["method=glob(*)"], "name the values"),
        (["seed=shuffle(1,2)"], "fixed order"),
        (["seed"], "reads key=value"),
    ],
)
def test_what_cannot_be_swept(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expand([TINY, *overrides])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sweep.parallel=0"], "sweep.parallel = 0 is not allowed"),
        (["sweep.parallel=two"], "sweep.parallel = 'two' is not allowed"),
        (["sweep.parallel=5"], "at most 4"),
        (["sweep.paralel=2"], "did you mean 'sweep.parallel'"),
        (["sweep.parallel=1,2"], "not allowed to be swept"),
    ],
)
def test_settings_of_the_sweep(stubs: None, overrides: list[str], words: str) -> None:
    assert sweep.read_settings(["seed=1", "sweep.parallel=2"]) == (sweep.SweepSettings(2), ["seed=1"])
    assert sweep.read_settings(["seed=1,2"])[0].parallel == 1
    with pytest.raises(ConfigError, match=words):
        sweep.read_settings(["seed=1", *overrides])


# --- names ---------------------------------------------------------------------------------------


def test_names_are_safe_bounded_and_tell_runs_apart() -> None:
    def name(*values: str) -> str:
        return sweep.run_name({"model.path": values[0], "seed": "1"})

    assert sweep.run_name({"seed": "1", "method": "fedavg"}) == "method=fedavg,seed=1"
    values = ["a/b", "a b", "a$b", "a-b", "x" * 300, "x" * 299 + "y", "[a,b]", "../..", "ü"]
    found = [name(v) for v in values]
    assert len(set(found)) == len(values)
    for text in found:
        assert re.fullmatch(r"[A-Za-z0-9._+,=-]{1,120}", text)
        assert not text.startswith((".", "-"))
    assert sweep.sweep_name(["seed", "method"]) == "sweep-method-seed"
    assert len(sweep.sweep_name([f"group.key{i}" for i in range(50)])) <= 120


# --- which of them run ---------------------------------------------------------------------------


def test_finished_runs_are_skipped_broken_and_missing_ones_run(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    code, out, err = go("seed=1,2,3", "method=fedavg,ffa_lora")
    assert (code, err) == (0, "")
    order = [f"method={m},seed={s}" for s in (1, 2, 3) for m in ("fedavg", "ffa_lora")]
    assert started(folder) == order
    assert f"done {order[0]}: accuracy 0.7500, epsilon 2.50" in out
    listed = json.loads((folder / "sweep.json").read_text())
    assert [r["name"] for r in listed["runs"]] == order
    assert all(r["config_hash"] == compose(r["overrides"]).hash for r in listed["runs"])

    (folder / "log.jsonl").unlink()
    (folder / order[1] / "summary.json").unlink()
    (folder / order[2] / "summary.json").write_text('{"status": "failed"}')
    shutil.rmtree(folder / order[3])
    launch = (folder / order[1] / "launch.json").read_text()
    code, out, _ = go("seed=1,2,3", "method=fedavg,ffa_lora")
    assert code == 0
    assert started(folder) == order[1:4]
    assert (folder / order[1] / "launch.json").read_text() == launch
    assert "skipped: 3 finished" in out
    assert f"resume {order[1]} (1 of 3)" in out
    assert f"start {order[3]} (3 of 3)" in out
    assert f"done {order[3]}: accuracy 0.7500, epsilon 2.50" in out

    # More values: only the new run runs, and the others stay listed.
    (folder / "log.jsonl").unlink()
    assert go("seed=4,1", "method=fedavg,ffa_lora")[0] == 0
    assert started(folder) == ["method=fedavg,seed=4", "method=ffa_lora,seed=4"]
    assert len(json.loads((folder / "sweep.json").read_text())["runs"]) == 8


def test_nothing_is_checked_or_run_when_all_is_finished(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go("seed=1,2")[0] == 0
    monkeypatch.setattr(runner, "check", None)
    monkeypatch.setattr(slots, "child_command", None)
    assert go("seed=1,2")[0] == 0


def test_a_folder_with_another_configuration_is_refused_by_name(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert go("seed=1,2", "train.lr=0.1")[0] == 0
    begun(tmp_path / "s" / "seed=3", TINY, "seed=3", "train.batch_size=8")
    (tmp_path / "s" / "log.jsonl").unlink()
    code, out, err = go("seed=1,2,3,4", "train.lr=0.2")
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert [line.split()[1] for line in lines] == ["seed=1:", "seed=2:", "seed=3:"]
    folder = tmp_path / "s" / "seed=1"
    assert f"{folder} holds a run with other settings (train.lr is 0.1 there and 0.2 here)" in lines[0]
    assert "train.batch_size is 8 there" in lines[2]
    assert started(tmp_path / "s") == []
    assert not (tmp_path / "s" / "seed=4").exists()


def test_a_dry_run_shows_states_and_writes_nothing(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert go("seed=1,2")[0] == 0
    (tmp_path / "s" / "seed=2" / "summary.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = go("seed=1,2,3", "--dry-run")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["run", "state"],
        ["seed=1", "finished"],
        ["seed=2", "broken"],
        ["seed=3", "missing"],
    ]
    code, out, _ = go("seed=1,2,3", "--dry-run", "--json")
    runs = json.loads(out)
    assert [(r["name"], r["state"]) for r in runs] == [
        ("seed=1", "finished"),
        ("seed=2", "broken"),
        ("seed=3", "missing"),
    ]
    assert runs[2]["config_hash"] == compose([TINY, "seed=3"]).hash
    assert runs[2]["path"] == str(tmp_path / "s" / "seed=3")
    assert sorted(tmp_path.rglob("*")) == before
    with runner.locked(tmp_path / "s" / "seed=2"):
        assert "running" in go("seed=1,2,3", "--dry-run")[1]


def test_what_the_plans_refuse_starts_nothing(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(runs: list[list[str]]) -> runner.Checked:
        plans = [runner.CheckedPlan("no such column" if "seed=2" in r else None, ["note"]) for r in runs]
        return runner.Checked(plans, 0)

    monkeypatch.setattr(runner, "check", check)
    # What began was checked then, and is not asked for again.
    begun(tmp_path / "t" / "seed=2", TINY, "seed=2", "privacy.epsilon=1")
    assert go("seed=1,2", "privacy.epsilon=1", "--name", "t", "--dry-run")[0] == 0
    code, _, err = go("seed=1,2,3", "privacy.epsilon=1,-1")
    assert code == 2
    assert err.splitlines()[-1] == "privet: privacy.epsilon=1,seed=2: no such column"
    assert len(err.splitlines()) == 4
    assert not (tmp_path / "s").exists()


def test_two_sweeps_never_share_a_folder(go: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with runner.locked(tmp_path / "s"):
        code, _, err = go("seed=1,2")
    assert code == 2
    assert "is being run by another process" in err
    begun(tmp_path / "s")
    assert "single run's directory" in go("seed=1,2")[2]


# --- failures, slots and signals -----------------------------------------------------------------


def test_a_failed_run_does_not_stop_the_others(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, _ = go("seed=9,1")
    assert code == 1
    assert started(tmp_path / "s") == ["seed=9", "seed=1"]
    assert "FAILED seed=9: no node answered" in out
    assert "done seed=1: accuracy 0.7500" in out


def test_what_a_killed_run_started_does_not_survive(
    go: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    before = {p.pid for p in psutil.process_iter()}
    code, out, _ = go("seed=8,1")
    assert code == 1
    assert "FAILED seed=8: killed by SIGKILL" in out
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert [p for p in left if p.info["cmdline"] == ["sleep", "99"]] == []


@pytest.mark.parametrize(
    ("parallel", "gpus", "given", "cpus", "cuda"),
    [
        (1, 2, None, "None", {None}),
        (2, 0, None, "2", {None}),
        (2, 1, None, "2", {None}),
        (2, 4, None, "2", {"0", "1"}),
        (2, 8, "5,GPU-ab,7", "2", {"5", "GPU-ab"}),
        (2, 8, "3", "2", {"3"}),
        (2, 8, "", "2", {""}),
        (3, 2, None, "1", {"0", "1"}),
    ],
)
def test_slots_share_the_machine(
    go: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: int,
    gpus: int,
    given: str | None,
    cpus: str,
    cuda: set[str | None],
) -> None:
    monkeypatch.setattr(runner, "check", lambda runs: passed(runs, gpus))
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert go("seed=1,2,3,4", f"sweep.parallel={parallel}")[0] == 0
    entries = log(tmp_path / "s")
    assert {e["cpus"] for e in entries} == {cpus}
    assert {e["cuda"] for e in entries} == cuda
    going, most = 0, 0
    on: dict[str | None, int] = {}
    for e in sorted(entries, key=lambda e: e["time"]):
        step = 1 if e["what"] == "start" else -1
        going += step
        on[e["cuda"]] = on.get(e["cuda"], 0) + step
        most = max(most, going)
        if len(cuda) >= parallel > 1:
            assert on[e["cuda"]] <= 1
    assert most == parallel


def test_a_slot_has_one_gpu(go: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check", lambda runs: passed(runs, 2))
    _, _, err = go("seed=1,2", "sweep.parallel=2", "federation.gpus_per_client=2")
    assert err == "privet: every combination: federation.gpus_per_client = 2 with sweep.parallel: at most 1\n"
    assert go("seed=1,2", "federation.gpus_per_client=2")[0] == 0


DRIVER = """
import sys
from pathlib import Path
from privet import cli, runner, slots
from tests import test_sweep
runner.check = test_sweep.passed
slots.child_command = test_sweep.stub_command
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_run_and_nothing_survives(tmp_path: Path, number: signal.Signals) -> None:
    root = Path(__file__).resolve().parents[1]
    arguments = [
        "run",
        "-m",
        "--runs",
        str(tmp_path),
        "--name",
        "s",
        TINY,
        "seed=70,71,72",
    ]
    # Started with SIGINT ignored, as a shell starts background jobs, children would ignore it too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments, "sweep.parallel=2"],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 60
        while len(log(tmp_path / "s")) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        # A child leads a group of its own.
        running = [e["pid"] for e in log(tmp_path / "s") if psutil.pid_exists(e["pid"])]
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 128 + number
    assert "stopped: 3 of 3 runs are left" in out
    entries = log(tmp_path / "s")
    assert sum(e["what"] == "start" for e in entries) == 2
    assert sum(e["what"] == "interrupted" for e in entries) == (2 if number == signal.SIGINT else 0)
    assert running == []


def test_an_error_of_the_sweep_itself_leaves_no_run(
    stubs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        if log(tmp_path / "s"):
            raise KeyError("a bug in the display")

    monkeypatch.setattr(slots._Loop, "_collect", broken)
    found = sweep.prepare([TINY, "seed=70,71", "sweep.parallel=2"], tmp_path, "s")
    with pytest.raises(KeyError, match="a bug in the display"):
        slots.run(found)
    assert not [e["pid"] for e in log(tmp_path / "s") if psutil.pid_exists(e["pid"])]
    assert not runner.is_locked(tmp_path / "s")


def test_the_childs_command_resumes_its_folder(tmp_path: Path) -> None:
    command = slots.child_command(tmp_path, 2)
    assert command[1:3] == ["-m", "privet.cli"]
    from privet.cli import _parser

    arguments = _parser().parse_args(command[3:])
    assert (arguments.resume, arguments.cpus, arguments.parent) == (tmp_path, 2, os.getpid())
    assert "--cpus" not in slots.child_command(tmp_path, None)


def test_the_live_overview_and_lines_on_a_terminal(stubs: None, tmp_path: Path) -> None:
    import io

    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    found = sweep.prepare([TINY, "seed=1,2"], tmp_path, "s")
    events = [{"event": "plan", "rounds": 3}, {"event": "round", "round": 2, "eval": {"accuracy": 0.5}}]
    (tmp_path / "s" / "seed=2").mkdir(parents=True)
    (tmp_path / "s" / "seed=2" / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert slots.run(found, console) == 0
    text = out.getvalue()
    assert re.search(r"seed=2 +round 2 of 3 +accuracy 50\.0 %", text)
    assert "1 of 2 done" in text
    assert "done seed=1: accuracy 0.7500" in text


def test_sweep_errors_are_privets_own() -> None:
    assert issubclass(sweep.SweepError, PrivetError)


def test_cuda_sees_nothing_after_a_name_that_is_no_device() -> None:
    assert sweep.devices({"CUDA_VISIBLE_DEVICES": "3, 1,-1,2"}, 8) == ["3", "1"]
    assert sweep.devices({}, 2) == ["0", "1"]
