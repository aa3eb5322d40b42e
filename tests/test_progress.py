from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from privet.progress import EventReader, Progress, RunState, plan_line, sparkline

PLAN = {
    "event": "plan",
    "method": "fedhsip",
    "task": "tweets",
    "model": "minilm",
    "rounds": 2,
    "warmup_rounds": 1,
    "clients": 4,
    "epsilon_target": 6.0,
    "trained": 147456,
    "upload_numbers": 46080,
    "download_numbers": 46080,
}
RUN = [
    PLAN,
    {"event": "note", "text": "an idle GPU: set federation.gpus_per_client"},
    {"event": "phase", "round": 1, "of": 3, "phase": "warmup", "sent": 4},
    {"event": "reply", "round": 1, "phase": "warmup", "node": "0", "done": 1, "sent": 4, "ok": True},
    {
        "event": "reply",
        "round": 1,
        "phase": "warmup",
        "node": "site-[b]",
        "done": 2,
        "sent": 4,
        "ok": False,
        "reason": "not finite",
    },
    {
        "event": "round",
        "round": 1,
        "of": 3,
        "eval": {"accuracy": 0.714, "loss": 0.6},
        "epsilon_max": 1.25,
        "upload_bytes": 1_500_000,
        "download_bytes": 800,
        "seconds": 30.0,
        "void": False,
    },
    {"event": "phase", "round": 2, "of": 3, "phase": "train", "sent": 4},
]
END = {
    "event": "end",
    "status": "completed",
    "metrics": {"accuracy": 0.8612},
    "epsilon": 5.9,
    "run_dir": "/data/runs/a [bold] name/" + "x" * 90,
}


def write(path: Path, events: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(e) + "\n" for e in events)


def state_after(events: list[dict[str, Any]]) -> RunState:
    state = RunState()
    for event in events:
        state.update(event)
    return state


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width, color_system=None, highlight=False), out


def test_reader_keeps_a_partial_line_and_skips_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    path.write_bytes(b'{"event": "note", "text": "Z\xc3')
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b'\xbcrich"}\nno json\n[1]\n{"event"')
    assert reader.read() == [{"event": "note", "text": "Zürich"}]
    with path.open("ab") as file:
        file.write(b': "end"}\n')
    assert reader.read() == [{"event": "end"}]
    assert reader.read() == []


def test_state_follows_the_events() -> None:
    state = state_after(RUN)
    assert (state.total, state.current, state.phase, state.done, state.sent) == (3, 2, "train", 0, 4)
    assert (state.refused, state.void, state.epsilon) == (1, 0, 1.25)
    assert state.accuracy == [0.714]
    # Two rounds of 30 s are left; 10 s of the next have passed.
    assert state.seconds_left(10.0) == 50.0
    assert state.seconds_left(100.0) == 30.0


def test_a_resumed_run_counts_only_what_is_left() -> None:
    state = state_after([PLAN, {"event": "round", "round": 2, "of": 3, "seconds": 8.0}])
    assert state.seconds_left(0.0) == 8.0


RESUMED = [
    PLAN,
    {"event": "round", "round": 1, "of": 3, "eval": {"accuracy": 0.5}, "seconds": 10.0, "void": False},
    {"event": "reply", "round": 2, "phase": "train", "node": "0", "ok": False, "reason": "x"},
    {"event": "round", "round": 2, "of": 3, "eval": {"accuracy": 0.6}, "seconds": 10.0, "void": True},
    {"event": "phase", "round": 3, "of": 3, "phase": "train", "sent": 4},
    {"event": "end", "status": "failed"},
    PLAN,
]
AGAIN = [
    {"event": "phase", "round": 2, "of": 3, "phase": "sketch", "sent": 4},
    {"event": "reply", "round": 2, "phase": "sketch", "node": "0", "ok": False, "reason": "x"},
    {"event": "phase", "round": 2, "of": 3, "phase": "train", "sent": 4},
    {"event": "round", "round": 2, "of": 3, "eval": {"accuracy": 0.7}, "seconds": 30.0, "void": True},
]


def test_rounds_that_come_again_count_once() -> None:
    state = state_after(RESUMED)
    assert (state.finished, state.current, state.phase, state.end) == (2, 2, "", None)
    state = state_after([*RESUMED, AGAIN[0]])
    assert (state.finished, state.void, state.refused, state.accuracy) == (1, 0, 0, [0.5])
    state = state_after([*RESUMED, *AGAIN])
    assert (state.finished, state.total, state.void, state.refused) == (2, 3, 1, 1)
    assert state.accuracy == [0.5, 0.7]
    assert state.seconds_left(0.0) == 20.0
    # Also where only the round's end was written.
    assert state_after([*RESUMED, AGAIN[3]]).accuracy == [0.5, 0.7]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_resumed_run_shows_its_earlier_rounds_once(tmp_path: Path, terminal: bool) -> None:
    path = tmp_path / "events.jsonl"
    write(path, RESUMED[:-1])
    screen, out = console(terminal=terminal)
    with Progress(path, screen) as progress:
        progress.tick(force=True)
        assert "round 1/3" not in out.getvalue()
        assert "Starting Flower" in out.getvalue() or "resuming after round 2 of 3" in out.getvalue()
        write(path, [PLAN, {"event": "round", "round": 3, "of": 3, "eval": {"accuracy": 0.8}, "seconds": 1}])
        progress.tick(force=True)
        write(path, [END])
    text = out.getvalue()
    assert "3 of 3, 1 void" in text
    assert "failed" not in text
    if not terminal:
        assert text.count("round 3/3") == 1
        assert "node 0 refused" not in text


def test_a_resumed_run_that_never_comes_up_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, RESUMED[:-1])
    screen, out = console(terminal=False)
    with Progress(path, screen):
        pass
    assert "failed" not in out.getvalue()


def test_unknown_and_incomplete_events_are_harmless() -> None:
    events: list[dict[str, Any]] = [
        {"event": k} for k in ("plan", "phase", "reply", "round", "note", "end", "new")
    ]
    state = state_after([*events, {}, {"event": None}])
    assert state.seconds_left(0.0) is None


def test_plain_lines_off_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    screen, out = console(terminal=False)
    with Progress(path, screen) as progress:
        progress.tick()
        write(path, RUN)
        progress.tick()
        write(
            path,
            [{"event": "round", "round": 2, "void": True, "eval": None, "epsilon_max": 2.0, "seconds": 9}],
        )
        write(path, [END])
    text = out.getvalue()
    lines = text.splitlines()
    assert lines[0] == "starting Flower and Ray ..."
    assert lines[1] == "fedhsip · tweets with minilm · 4 clients · 1 warm-up + 2 rounds · epsilon 6"
    assert lines[2] == "46 080 numbers up, 46 080 down per client and round"
    assert lines[3] == "an idle GPU: set federation.gpus_per_client"
    assert lines[4] == "round 1, warmup: node site-[b] refused: not finite"
    assert lines[5] == (
        "round 1/3 (30.0 s): accuracy 71.4 %, loss 0.6, epsilon 1.25, 1.5 MB up, 800 B down, about 1:00 left"
    )
    assert lines[6].startswith("round 2/3 (9.0 s): void: too few replies, nothing changed, epsilon 2.00")
    assert "86.1 %" in text
    assert "5.90 of 6" in text
    assert "2 of 3, 1 void, 1 replies refused" in text
    assert lines[-1] == f"Run directory: {END['run_dir']}"
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [60, 100])
def test_live_block_on_a_terminal(tmp_path: Path, width: int) -> None:
    path = tmp_path / "events.jsonl"
    screen, out = console(terminal=True, width=width)
    with Progress(path, screen) as progress:
        progress.tick(force=True)
        assert "Starting Flower and Ray" in out.getvalue()
        write(path, RUN)
        progress.tick(force=True)
        shown, still = console(terminal=False, width=width)
        shown.print(progress.block())
        progress.stopping()
    text = still.getvalue()
    assert "2 of 3" in text
    assert "train: 0 of 4 clients done, 1 refused so far" in text
    assert "71.4 %" in text
    assert "1.25 spent of 6" in text
    assert "1.5 MB up, 800 B down" in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert "Stopping the run" in out.getvalue()
    assert "node site-[b] refused: not finite" in out.getvalue()


def test_a_run_without_privacy_says_so() -> None:
    assert "not private" in plan_line({**PLAN, "epsilon_target": None})


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.7, 0.7]) == "▁▁"
    assert len(sparkline([float(i) for i in range(100)])) == 24
