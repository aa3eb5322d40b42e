"""Run the runs of a sweep side by side, each in a child process, and leave none of them behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table

from privet import runner
from privet.errors import PrivetError
from privet.launcher import Signals, end_processes
from privet.progress import EVENTS_FILE, EventReader, RunState
from privet.sweep import Combination, Sweep, cpus_of, device_of, devices, main_metric, write_list

CONSOLE_FILE = "console.txt"
"""What a run of a sweep printed, in the run's ``logs``; the launcher sets aside only ``*.log``."""

MARKER = "PRIVET_SWEEP_RUN"
"""Environment variable by which everything that one child started is found again, should it be killed."""

_TICK = 0.2


@dataclass
class _Child:
    """One run that is going on."""

    combination: Combination
    run_dir: Path
    slot: int
    token: str
    process: subprocess.Popen[bytes]
    reader: EventReader
    state: RunState = field(default_factory=RunState)
    started: float = field(default_factory=time.monotonic)


def run(sweep: Sweep, console: Console | None = None) -> int:
    """Run what is not finished; return 0, 1 where a run failed, or 128 + the signal that stopped the sweep."""
    console = console or Console(highlight=False)
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrivetError(f"{sweep.folder} cannot be made: {error.strerror}") from None
    with runner.locked(sweep.folder):
        write_list(sweep)
        return _Loop(sweep, console).run()


class _Loop:
    """Keeps the slots busy, shows how the runs go, and leaves no process behind."""

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self.sweep = sweep
        self.console = console
        self.queue = [c for c in sweep.combinations if sweep.states[c.name] != "finished"]
        self.total = len(self.queue)
        self.slots = max(1, min(sweep.settings.parallel, self.total))
        self.visible = devices(os.environ, sweep.gpus)
        self.children: list[_Child] = []
        self.finished = 0
        self.failed = 0
        self._forwarded = 0

    def run(self) -> int:
        """Run to the end of the queue, or to a signal's."""
        skipped = len(self.sweep.combinations) - self.total
        if skipped:
            self._print(f"skipped: {skipped} finished")
        with Signals() as signals, self._live() as live:
            try:
                while self.children or (self.queue and not signals.first):
                    while self.queue and not signals.first and len(self.children) < self.slots:
                        self._start(self.queue.pop(0))
                    self._forward(signals)
                    self._collect()
                    if live is not None:
                        live.update(self._overview(), refresh=True)
                    time.sleep(_TICK)
            finally:
                self._abandon()
        if signals.first:
            left = self.total - self.finished - self.failed
            self._print(f"stopped: {left} of {self.total} runs are left; the same command goes on with them")
            return 128 + signals.first
        return 1 if self.failed else 0

    def _start(self, combination: Combination) -> None:
        taken = {child.slot for child in self.children}
        slot = next(i for i in range(self.slots) if i not in taken)
        run_dir = self.sweep.path(combination)
        state = self.sweep.states[combination.name]
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if state == "missing":
            runner.write_launch(run_dir, combination.overrides)
        token = secrets.token_hex(16)
        environment = os.environ | {MARKER: token}
        device = device_of(slot, self.visible, self.slots)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        with (run_dir / "logs" / CONSOLE_FILE).open("wb") as output:
            process = subprocess.Popen(
                child_command(run_dir, cpus_of(self.slots)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Out of the terminal's reach: a signal comes from here, once, whoever it was sent to.
                start_new_session=True,
            )
        reader = EventReader(run_dir / EVENTS_FILE)
        self.children.append(_Child(combination, run_dir, slot, token, process, reader))
        number = self.total - len(self.queue)
        self._print(
            f"{'start' if state == 'missing' else 'resume'} {combination.name} ({number} of {self.total})"
        )

    def _forward(self, signals: Signals) -> None:
        """Pass on every signal once: a second Ctrl-C means at once, to a run as well."""
        for number in signals.received[self._forwarded :]:
            self._forwarded += 1
            if self._forwarded == 1:
                self._print("stopping the runs (Ctrl-C again: at once) ...")
            for child in self.children:
                if child.process.poll() is None:
                    child.process.send_signal(number)

    def _collect(self) -> None:
        for child in list(self.children):
            for event in child.reader.read():
                child.state.update(event)
            if child.process.poll() is not None:
                self.children.remove(child)
                self._ended(child)

    def _ended(self, child: _Child) -> None:
        code = child.process.returncode
        if code < 0:
            # It could not clean up after itself.
            _end_marked(child.token)
        name, seconds = child.combination.name, time.monotonic() - child.started
        if code == 0 and runner.is_completed(child.run_dir):
            self.finished += 1
            self._print(f"done {name}: {', '.join([*_results(child.run_dir), f'{seconds:.0f} s'])}")
        elif self._forwarded:
            self._print(f"stopped {name}")
        else:
            self.failed += 1
            self._print(f"FAILED {name}: {_reason(child.run_dir, code)} (see {child.run_dir / 'logs'})")

    def _abandon(self) -> None:
        """End the children that an error here left behind; after a good end there are none."""
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            try:
                child.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            _end_marked(child.token)

    # --- what is shown ---

    @contextlib.contextmanager
    def _live(self) -> Iterator[Live | None]:
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            yield None
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            yield live

    def _overview(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(no_wrap=True, overflow="ellipsis")
        for child in self.children:
            state = child.state
            where = f"round {state.finished} of {state.total}" if state.plan else "starting"
            scores = f"accuracy {100 * state.accuracy[-1]:.1f} %" if state.accuracy else state.phase
            table.add_row(child.combination.name, where, scores)
        failed = f", {self.failed} failed" if self.failed else ""
        table.add_row(f"{self.finished} of {self.total} done{failed}", "", "")
        return table

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def child_command(run_dir: Path, cpus: int | None) -> list[str]:
    """Return the command of one run; it starts afresh or goes on, whatever its directory needs."""
    command = [
        sys.executable,
        "-m",
        "privet.cli",
        "run",
        "--resume",
        str(run_dir),
        "--parent",
        str(os.getpid()),
    ]
    return command if cpus is None else [*command, "--cpus", str(cpus)]


def _end_marked(token: str) -> None:
    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARKER) == token:
                    found.append(process)
        return found

    end_processes(find, lambda: True)


def _reason(run_dir: Path, code: int) -> str:
    """One line on why a child failed: its own, or how it ended."""
    with contextlib.suppress(OSError):
        lines = (run_dir / "logs" / CONSOLE_FILE).read_text(errors="replace").splitlines()
        told = [line.removeprefix("privet: ") for line in lines if line.startswith("privet: ")]
        if told:
            return told[-1].removeprefix("the run failed: ")
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _results(run_dir: Path) -> list[str]:
    summary = runner.read_summary(run_dir)
    score = main_metric(summary)
    texts = [] if score is None else [f"{score[0]} {score[1]:.4f}"]
    epsilon = summary.get("epsilon")
    return [*texts, "not private" if epsilon is None else f"epsilon {float(epsilon):.2f}"]
