"""Show how a run goes, from the events that the ServerApp appends to ``events.jsonl``.

The display and the run share only that file: the ServerApp runs in a process of Flower's, and a person may
follow the same run from a second terminal. One live block on a terminal, one line an event elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

EVENTS_FILE = "events.jsonl"
_REFRESH = 0.2
_BARS = "▁▂▃▄▅▆▇█"


class EventReader:
    """Reads what was appended to a JSON lines file since the last call.

    A last line without its newline is left for the next call; a line that is no JSON object is skipped.

    Parameters
    ----------
    path : Path
        The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new events, oldest first."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                events.append(event)
        return events


@dataclass(frozen=True)
class RoundState:
    """What is kept of a finished round."""

    void: bool
    metrics: dict[str, float]
    seconds: float | None


@dataclass
class RunState:
    """What is known of a run from its events so far; `update` is the only way to change it.

    A resumed run appends to the events of the one before: a second plan, and then perhaps rounds that were
    there already. What comes again replaces what was there, so that nothing is counted twice.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    total: int = 0
    current: int = 0
    finished: int = 0
    phase: str = ""
    done: int = 0
    sent: int = 0
    rounds: dict[int, RoundState] = field(default_factory=dict)
    refusals: dict[int, int] = field(default_factory=dict)
    epsilon: float | None = None
    upload_bytes: int | None = None
    download_bytes: int | None = None
    note: str = ""
    _planned_again: bool = False

    @property
    def refused(self) -> int:
        """Refused replies over all rounds."""
        return sum(self.refusals.values())

    @property
    def void(self) -> int:
        """Rounds that changed nothing."""
        return sum(r.void for r in self.rounds.values())

    @property
    def metrics(self) -> dict[str, float]:
        """The newest scores."""
        return next((r.metrics for _, r in sorted(self.rounds.items(), reverse=True) if r.metrics), {})

    @property
    def accuracy(self) -> list[float]:
        """The accuracy of every scored round, oldest first."""
        return [r.metrics["accuracy"] for _, r in sorted(self.rounds.items()) if "accuracy" in r.metrics]

    @property
    def seconds(self) -> list[float]:
        """What every round took, oldest first."""
        return [r.seconds for _, r in sorted(self.rounds.items()) if r.seconds is not None]

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in one event; unknown kinds and missing keys are ignored."""
        take = getattr(self, f"_on_{event.get('event')}", None)
        if take is not None:
            take(event)

    def pause(self) -> None:
        """Forget how the run before this one ended: it goes on."""
        self.end, self.phase, self.done, self.sent = None, "", 0, 0
        self.current = self.finished

    def _on_plan(self, event: Mapping[str, Any]) -> None:
        self.pause()
        self._planned_again = bool(self.plan)
        self.plan = dict(event)
        self.total = int(event.get("rounds") or 0) + int(event.get("warmup_rounds") or 0)

    def _rewind(self, event: Mapping[str, Any]) -> None:
        """Drop rounds that the run takes anew after a second plan: it goes on from its last checkpoint."""
        number = int(event.get("round") or 0)
        if not self._planned_again or not number:
            return
        self._planned_again = False
        self.rounds = {k: v for k, v in self.rounds.items() if k < number}
        self.refusals = {k: v for k, v in self.refusals.items() if k < number}
        self.finished = number - 1

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        self._rewind(event)
        self.current = int(event.get("round") or self.current)
        self.total = int(event.get("of") or self.total)
        self.phase = str(event.get("phase") or "")
        self.done, self.sent = 0, int(event.get("sent") or 0)

    def _on_reply(self, event: Mapping[str, Any]) -> None:
        self.done = int(event.get("done") or self.done + 1)
        self.sent = int(event.get("sent") or self.sent)
        if event.get("ok") is False:
            number = int(event.get("round") or self.current)
            self.refusals[number] = self.refusals.get(number, 0) + 1

    def _on_round(self, event: Mapping[str, Any]) -> None:
        self._rewind(event)
        self.current = int(event.get("round") or self.current)
        self.total = int(event.get("of") or self.total)
        self.finished = self.current
        self.phase, self.done, self.sent = "", 0, 0
        seconds = event.get("seconds")
        self.rounds[self.current] = RoundState(
            void=bool(event.get("void")),
            metrics=_numbers(event.get("eval")),
            seconds=None if seconds is None else float(seconds),
        )
        if event.get("epsilon_max") is not None:
            self.epsilon = float(event["epsilon_max"])
        for key in ("upload_bytes", "download_bytes"):
            if event.get(key) is not None:
                setattr(self, key, int(event[key]))

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self.note = str(event.get("text") or "")

    def _on_end(self, event: Mapping[str, Any]) -> None:
        self.end = dict(event)

    def seconds_left(self, since_round: float) -> float | None:
        """Estimate of the remaining time from the mean round, None before the first round's end.

        Parameters
        ----------
        since_round : float
            Seconds since the last round ended.
        """
        if not self.seconds or not self.total:
            return None
        mean = sum(self.seconds) / len(self.seconds)
        left = self.total - self.finished
        # A round that takes longer than the mean still has to end.
        return max(0.0, mean * left - min(since_round, mean)) if left > 0 else 0.0


class Progress:
    """Follows a run's events and draws them; use as a context manager.

    Events that are there at the start belong to a run that is resumed: they count, but are not told again.

    Parameters
    ----------
    events : Path
        The run's ``events.jsonl``.
    console : rich.console.Console or None
        Where to draw, standard output by default.
    """

    def __init__(self, events: Path, console: Console | None = None) -> None:
        self.state = RunState()
        self.console = console or Console(highlight=False)
        self._reader = EventReader(events)
        self._started = self._round_ended = time.monotonic()
        self._drawn = 0.0
        self._stopping = False
        self._starting = True
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._started = self._round_ended = time.monotonic()
        for event in self._reader.read():
            self.state.update(event)
        self.state.pause()
        self.state.note = ""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        else:
            self._print("starting Flower and Ray ...")
            if self.state.finished:
                self._print(f"resuming after round {self.state.finished} of {self.state.total}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick(force=True)
        if self._live is not None:
            # Where the run did not reach its end, the last state stays on the screen.
            self._live.transient = self.state.end is not None
            self._live.stop()
        if self.state.end is not None:
            self.console.print(summary_table(self.state, time.monotonic() - self._started))
            if self.state.end.get("run_dir"):
                # Printed apart from the table, so that a long path stays whole and can be copied.
                self.console.print(
                    f"Run directory: {self.state.end['run_dir']}", soft_wrap=True, markup=False
                )

    def tick(self, *, force: bool = False) -> None:
        """Read new events and redraw; cheap enough to be called ten times a second."""
        for event in self._reader.read():
            self._starting = False
            self.state.update(event)
            if event.get("event") == "round":
                self._round_ended = time.monotonic()
            self._tell(event)
        now = time.monotonic()
        if self._live is not None and (force or now - self._drawn >= _REFRESH):
            self._drawn = now
            self._live.update(self.block(), refresh=True)

    def stopping(self) -> None:
        """Say that the run is being stopped."""
        self._stopping = True
        if self._live is None:
            self._print("stopping the run ...")
        else:
            self.tick(force=True)

    def block(self) -> RenderableType:
        """The live block."""
        state = self.state
        elapsed = time.monotonic() - self._started
        if self._stopping:
            self._spinner.update(text="Stopping the run (Ctrl-C again: at once)", style="yellow")
        elif self._starting or not state.plan:
            self._spinner.update(text=f"Starting Flower and Ray, takes 15 to 30 s   {_clock(elapsed)}")
        if not state.plan:
            return self._spinner
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True, min_width=8)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        rows.add_row("Round", self._round_line(elapsed))
        rows.add_row("Phase", self._phase_line())
        if state.metrics:
            rows.add_row("Accuracy" if state.accuracy else "Metrics", _metrics_line(state))
        target = state.plan.get("epsilon_target")
        if target is not None:
            spent = 0.0 if state.epsilon is None else state.epsilon
            rows.add_row("Epsilon", f"{spent:.2f} spent of {float(target):g}")
        rows.add_row("Traffic", _traffic(state))
        if message := message_line(state.plan):
            rows.add_row("Message", message)
        parts: list[RenderableType] = [Text(plan_line(state.plan), style="bold"), rows]
        if state.note:
            parts.append(Text(state.note, style="yellow"))
        if self._stopping or self._starting:
            parts.append(self._spinner)
        return Group(*parts)

    def _round_line(self, elapsed: float) -> RenderableType:
        state = self.state
        finished = state.finished
        within = state.done / state.sent if state.sent else 0.0
        line = Table.grid(padding=(0, 2))
        left = state.seconds_left(time.monotonic() - self._round_ended)
        line.add_row(
            f"{max(state.current, finished)} of {state.total or '?'}",
            ProgressBar(
                total=max(state.total, 1), completed=min(finished + 0.9 * within, state.total), width=24
            ),
            f"{_clock(elapsed)} so far" + ("" if left is None else f", about {_clock(left)} left"),
        )
        return line

    def _phase_line(self) -> str:
        state = self.state
        refused = f", {state.refused} refused so far" if state.refused else ""
        if not state.phase:
            return f"between rounds{refused}" if state.seconds else f"preparing{refused}"
        return f"{state.phase}: {state.done} of {state.sent} clients done{refused}"

    def _tell(self, event: Mapping[str, Any]) -> None:
        """Print what must not be lost; on a terminal that is only refusals, above the block."""
        kind = event.get("event")
        if kind == "reply" and event.get("ok") is False:
            self._print(
                f"round {event.get('round')}, {event.get('phase')}: node {event.get('node')} refused: "
                f"{event.get('reason') or 'no reason given'}"
            )
        elif self._live is not None:
            return
        elif kind == "plan":
            self._print(plan_line(event))
            if message := message_line(event):
                self._print(message)
        elif kind == "note":
            self._print(str(event.get("text") or ""))
        elif kind == "round":
            self._print(round_line(self.state, event))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


# --- texts ---------------------------------------------------------------------------------------


def plan_line(plan: Mapping[str, Any]) -> str:
    """One line on what runs: method, task, model, clients, rounds, budget."""
    rounds = f"{plan.get('rounds', '?')} rounds"
    if plan.get("warmup_rounds"):
        rounds = f"{plan['warmup_rounds']} warm-up + {rounds}"
    target = plan.get("epsilon_target")
    parts = [
        str(plan.get("method", "?")),
        f"{plan.get('task', '?')} with {plan.get('model', '?')}",
        f"{plan.get('clients', '?')} clients",
        rounds,
        "not private" if target is None else f"epsilon {float(target):g}",
    ]
    return " · ".join(parts)


def message_line(plan: Mapping[str, Any]) -> str:
    """What one client sends and receives in one round; empty if the plan does not say."""
    if plan.get("upload_numbers") is None:
        return ""
    down = int(plan.get("download_numbers") or 0)
    return f"{_count(plan['upload_numbers'])} numbers up, {_count(down)} down per client and round"


def round_line(state: RunState, event: Mapping[str, Any]) -> str:
    """One line on a finished round, for logs."""
    parts = [f"round {event.get('round')}/{state.total}"]
    if event.get("seconds") is not None:
        parts[0] += f" ({float(event['seconds']):.1f} s)"
    if event.get("void"):
        parts.append("void: too few replies, nothing changed")
    parts += [f"{k} {_metric(k, v)}" for k, v in _numbers(event.get("eval") or {}).items()]
    if event.get("epsilon_max") is not None:
        parts.append(f"epsilon {float(event['epsilon_max']):.2f}")
    if state.upload_bytes is not None:
        parts.append(_traffic(state))
    left = state.seconds_left(0.0)
    if left:
        parts.append(f"about {_clock(left)} left")
    return parts[0] + ": " + ", ".join(parts[1:]) if len(parts) > 1 else parts[0]


def summary_table(state: RunState, elapsed: float) -> Table:
    """The short table at the end of a run."""
    end = state.end or {}
    table = Table(show_header=False, title=str(end.get("status") or "ended"), title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    if state.plan:
        table.add_row("method", f"{state.plan.get('method')} on {state.plan.get('task')}")
    for key, value in _numbers(end.get("metrics") or state.metrics).items():
        table.add_row(key, _metric(key, value))
    target = state.plan.get("epsilon_target")
    epsilon = end.get("epsilon", state.epsilon)
    if epsilon is not None:
        table.add_row(
            "epsilon", f"{float(epsilon):.2f}" + ("" if target is None else f" of {float(target):g}")
        )
    elif state.plan:
        table.add_row("epsilon", "none: not private")
    rounds = f"{state.finished} of {state.total}"
    rounds += f", {state.void} void" if state.void else ""
    table.add_row("rounds", rounds + (f", {state.refused} replies refused" if state.refused else ""))
    if state.upload_bytes is not None:
        table.add_row("traffic", _traffic(state))
    table.add_row("time", _clock(elapsed))
    return table


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {
        str(k): float(v) for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)
    }


def _metrics_line(state: RunState) -> str:
    if not state.accuracy:
        return ", ".join(f"{k} {_metric(k, v)}" for k, v in state.metrics.items())
    last = _metric("accuracy", state.accuracy[-1])
    if len(state.accuracy) == 1:
        return last
    return f"{last}  {sparkline(state.accuracy)}  best {_metric('accuracy', max(state.accuracy))}"


def sparkline(values: list[float], width: int = 24) -> str:
    """The last `width` values as bars between their least and greatest."""
    values = values[-width:]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in values)


def _metric(key: str, value: float) -> str:
    shares = ("accuracy", "f1", "precision", "recall")
    return f"{100 * value:.1f} %" if any(s in key for s in shares) and 0 <= value <= 1 else f"{value:.4g}"


def _traffic(state: RunState) -> str:
    return f"{_bytes(state.upload_bytes or 0)} up, {_bytes(state.download_bytes or 0)} down"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _count(number: Any) -> str:
    return f"{int(number):,}".replace(",", " ")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
