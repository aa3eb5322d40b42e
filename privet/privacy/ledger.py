"""A node's privacy ledger: what was spent on its rows, over rounds and runs, and the two budgets it enforces.

An entry is durable *before* what it pays for is released, so that the ledger is an upper bound: a crash in
between leaves an entry without a release and never a release without an entry.

The file is JSON lines. The first line is the header; every later line is one entry. Each line carries a
SHA-256 over itself and the line before, and a small file beside the ledger (suffix ``.head``) repeats the
last check that was acknowledged. Together they detect torn, edited, swapped, lost and rolled-back lines. They
guard against accidents and careless edits, not against the node's operator, who could recompute them: it is
the operator's own promise that the ledger keeps.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from privet.atomic import sync_folder, write_atomic
from privet.errors import ConfigError, Refusal, StoreError
from privet.privacy import accounting
from privet.privacy.accounting import Step

MECHANISM = "poisson-subsampled gaussian"
ADJACENCY = "add/remove one row"

_FORMAT = "privet-ledger"
_VERSION = 1
_DEFAULT_CAP = (
    8.0  # the filter's order where the node sets no max-epsilon: good for a few runs of epsilon 3 to 6
)
_TOLERANCE = 1e-6  # relative; a calibrated sigma meets its budget to the last digit
_MOST_STEPS = 1_000_000  # where "what still fits" stops counting


def utc_now() -> str:
    """Return the current time as ISO 8601 in UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Entry:
    """One charge: `steps` runs of the sampled Gaussian mechanism within one phase of one round.

    Attributes
    ----------
    run, method, round, phase : str, str, int, str
        What was asked for.
    mechanism : str
        Always `MECHANISM`; nothing else can be accounted.
    q, sigma, clip, steps : float, float, float, int
        Sampling rate, noise standard deviation divided by `clip`, L2 bound of a row's gradient, steps.
    declared : int
        The public row count that `q` was computed from.
    request : str
        Hash of the request that this paid for.
    time : str
        ISO 8601, UTC.
    """

    run: str
    method: str
    round: int
    phase: str
    mechanism: str
    q: float
    sigma: float
    clip: float
    steps: int
    declared: int
    request: str
    time: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        for name in ("run", "method", "phase", "request", "time"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"ledger entry: {name} = {value!r} is not allowed: a text")
        for name, least in (("round", 0), ("steps", 1), ("declared", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"ledger entry: {name} = {value!r} is not allowed: a whole number, at least {least}"
                )
        for name in ("q", "sigma", "clip"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < math.inf:
                raise ConfigError(f"ledger entry: {name} = {value!r} is not allowed: a finite number above 0")
        if self.q > 1.0:
            raise ConfigError(f"ledger entry: q = {self.q} is not allowed: at most 1")
        if self.mechanism != MECHANISM:
            raise ConfigError(f"ledger entry: mechanism = {self.mechanism!r} is not allowed: '{MECHANISM}'")

    @property
    def step(self) -> Step:
        """What the accountants need of it."""
        return Step(self.q, self.sigma, self.steps)


@dataclass(frozen=True)
class Budget:
    """What a run may spend here, fixed by its first charge; `max_epsilon` is the node's cap at the time."""

    epsilon: float
    delta: float
    accountant: str
    max_epsilon: float | None

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "max_epsilon"):
            value = getattr(self, name)
            if name == "max_epsilon" and value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < math.inf:
                raise ConfigError(f"budget: {name} = {value!r} is not allowed: a finite number above 0")
        if self.delta >= 1.0:
            raise ConfigError(f"privacy.delta = {self.delta} is not allowed: less than 1")
        if self.accountant not in accounting.ACCOUNTANTS:
            allowed = ", ".join(accounting.ACCOUNTANTS)
            raise ConfigError(f"privacy.accountant = {self.accountant} is not allowed (allowed: {allowed})")


@dataclass(frozen=True)
class _Header:
    format: str
    version: int
    node: str
    delta: float
    order: float
    max_epsilon: float | None
    created: str


class Ledger:
    """Opens the ledger at `path`, or creates it where neither it nor its head exists.

    The caller holds the node's store lock. Opening an existing ledger verifies every line and writes nothing.

    Parameters
    ----------
    path : Path
        The JSON lines file; its folder must exist.
    delta : float
        Delta of the run at hand. The lifetime is accounted at the smaller one of it and the delta that the
        ledger was made with.
    max_epsilon : float or None
        The operator's cap for the node's lifetime, over all runs; None for no cap. It may change between
        openings, for reasons that do not depend on the data; the filter's order does not change with it.
    node : str
        The node's own name.

    Raises
    ------
    StoreError
        If the ledger is damaged, incomplete or another node's; one line that says what the operator must do.
    ConfigError
        If `delta` or `max_epsilon` is out of range.
    """

    def __init__(self, path: Path, *, delta: float, max_epsilon: float | None, node: str) -> None:
        if not 0.0 < delta < 1.0:
            raise ConfigError(f"privacy.delta = {delta} is not allowed: greater than 0 and less than 1")
        if max_epsilon is not None and not 0.0 < max_epsilon < math.inf:
            raise ConfigError(f"max-epsilon = {max_epsilon} is not allowed: a finite number greater than 0")
        self.path = Path(path)
        self.delta = delta
        self.max_epsilon = max_epsilon
        if not self.path.exists():
            self._create(node)
        self._read()
        if self._header.node != node:
            raise StoreError(f"{self.path} is the ledger of node '{self._header.node}', not of '{node}'")

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Open an existing ledger for reading, with the delta, cap and node that it records itself."""
        path = Path(path)
        if not path.is_file():
            raise StoreError(f"{path} is not a ledger: no such file")
        ledger = cls.__new__(cls)
        ledger.path = path
        ledger._read()
        last = ledger._budgets[-1] if ledger._budgets else None
        ledger.delta = last.delta if last else ledger._header.delta
        ledger.max_epsilon = last.max_epsilon if last else ledger._header.max_epsilon
        return ledger

    # --- reading ---------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """The node whose rows this ledger is about."""
        return self._header.node

    @property
    def created(self) -> str:
        """When the ledger was made, ISO 8601 in UTC."""
        return self._header.created

    @property
    def order(self) -> float:
        """The Renyi order of the lifetime filter, fixed when the ledger was made."""
        return self._header.order

    @property
    def lifetime_delta(self) -> float:
        """The delta of the lifetime: never larger than the one that the ledger was made with."""
        return min(self.delta, self._header.delta)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All charges in the order in which they were made."""
        return tuple(self._entries)

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs in the order of their first charge."""
        return tuple(dict.fromkeys(entry.run for entry in self._entries))

    def for_run(self, run: str) -> tuple[Entry, ...]:
        """Return the charges of one run."""
        return tuple(entry for entry in self._entries if entry.run == run)

    def budget(self, run: str) -> Budget | None:
        """Return the budget that a run's first charge fixed; None before it."""
        for entry, budget in zip(self._entries, self._budgets, strict=True):
            if entry.run == run:
                return budget
        return None

    def spent(self, run: str, accountant: str) -> float:
        """Return a run's epsilon so far, at the delta of its first charge."""
        budget = self.budget(run)
        delta = self.delta if budget is None else budget.delta
        return accounting.epsilon(_steps(self.for_run(run)), delta, accountant)

    def lifetime(self) -> float:
        """Return the epsilon of all runs together, as the lifetime filter sees it."""
        return self._lifetime_with(None)

    def remaining_steps(
        self, run: str, q: float, sigma: float, run_epsilon: float | None, accountant: str
    ) -> int:
        """Return how many more steps at (q, sigma) fit in the run's budget and the node's lifetime.

        Without `run_epsilon` only the lifetime counts. The answer stops at 1 000 000.
        """
        run_steps = _steps(self.for_run(run))

        def fits(steps: int) -> bool:
            step = Step(q, sigma, steps)
            if not self._lifetime_fits(step):
                return False
            if run_epsilon is None:
                return True
            return _within(accounting.epsilon([*run_steps, step], self.delta, accountant), run_epsilon)

        low, high = 0, 1
        while fits(high):
            if high == _MOST_STEPS:
                return high
            low, high = high, min(2 * high, _MOST_STEPS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # --- charging --------------------------------------------------------------------------------

    def admit(self, run: str, planned: Step) -> None:
        """Refuse a run that has charged nothing yet if all of its steps cannot fit in the node's lifetime.

        What it charged until it no longer fitted would be spent on a run without an end.

        Raises
        ------
        Refusal
            ``"budget"``; the ledger is unchanged.
        """
        if not self.for_run(run) and not self._lifetime_fits(planned):
            raise Refusal(
                "budget",
                f"the {planned.steps} steps at q = {planned.q:.4g} and sigma = {planned.sigma:g} that run {run} plans "
                f"do not fit in what is left of the node's max-epsilon = {self.max_epsilon:g}",
            )

    def charge(self, entry: Entry, *, run_epsilon: float, accountant: str) -> None:
        """Record `entry`, durably, or refuse it; nothing that it pays for may leave before this returns.

        A repeated request is charged again: its answer is a new run of the mechanism. A caller that still has
        the stored reply sends that instead and does not call this.

        Raises
        ------
        Refusal
            ``"replay"`` if this run's round and phase was charged for another request; ``"budget"`` if the
            run's or the node's budget does not allow it, or the run's budget is not the one that it began
            with. The ledger is then unchanged.
        StoreError
            If the entry cannot be written durably.
        """
        budget = Budget(run_epsilon, self.delta, accountant, self.max_epsilon)
        self._refuse_replay(entry)
        self._refuse_moved_budget(entry.run, budget)
        cost = accounting.epsilon([*_steps(self.for_run(entry.run)), entry.step], self.delta, accountant)
        what = (
            f"run {entry.run}, round {entry.round}: {entry.steps} steps at q = {entry.q:.4g} "
            f"and sigma = {entry.sigma:g}"
        )
        if not _within(cost, run_epsilon):
            raise Refusal(
                "budget",
                f"{what} would bring epsilon to {cost:.4g}, above the run's {run_epsilon:g} "
                f"at delta = {self.delta:g}",
            )
        if not self._lifetime_fits(entry.step):
            # How much other runs have spent is not this server's business, so no amount is named.
            raise Refusal(
                "budget",
                f"{what} do not fit in what is left of the node's max-epsilon = {self.max_epsilon:g}",
            )
        self._append(entry, budget)

    def _refuse_replay(self, entry: Entry) -> None:
        for old in self._entries:
            same = (old.run, old.round, old.phase) == (entry.run, entry.round, entry.phase)
            if same and old.request != entry.request:
                raise Refusal(
                    "replay",
                    f"run {entry.run}, round {entry.round}: {entry.phase} was charged for another request",
                )

    def _refuse_moved_budget(self, run: str, budget: Budget) -> None:
        first = self.budget(run)
        if first is None:
            return
        for name in ("epsilon", "delta", "accountant"):
            began, now = getattr(first, name), getattr(budget, name)
            if began != now:
                raise Refusal(
                    "budget", f"run {run} began with privacy.{name} = {began}, it cannot go on with {now}"
                )

    def _lifetime_with(self, step: Step | None) -> float:
        steps = _steps(self._entries) + ([] if step is None else [step])
        return accounting.lifetime_epsilon(steps, self.order, self.lifetime_delta)

    def _lifetime_fits(self, step: Step) -> bool:
        return self.max_epsilon is None or _within(self._lifetime_with(step), self.max_epsilon)

    # --- the file --------------------------------------------------------------------------------

    @property
    def _head_path(self) -> Path:
        return self.path.with_suffix(".head")

    def _create(self, node: str) -> None:
        if self._head_path.exists():
            raise StoreError(
                f"{self.path} is missing although {self._head_path.name} exists: restore it from a backup"
            )
        if not node:
            raise ConfigError("the ledger needs the node's name")
        order = accounting.filter_order(self.max_epsilon or _DEFAULT_CAP, self.delta)
        header = _Header(_FORMAT, _VERSION, node, self.delta, order, self.max_epsilon, utc_now())
        line, check = _line(dataclasses.asdict(header), "")
        try:
            write_atomic(self.path, line)
            self._write_head(0, check)
        except OSError as err:
            raise StoreError(f"{self.path} cannot be written: {err.strerror}") from None

    def _read(self) -> None:
        try:
            # The head first: a charge made meanwhile then only makes the ledger longer than the head says.
            head = self._head_path.read_bytes() if self._head_path.exists() else None
            raw = self.path.read_bytes()
        except OSError as err:
            raise StoreError(f"{self.path} cannot be read: {err.strerror}") from None
        lines = raw.split(b"\n")
        torn = lines.pop()
        acknowledged = self._acknowledged(head)
        if len(lines) - 1 < acknowledged[0]:
            raise StoreError(
                f"{self.path} has lost entries: {max(0, len(lines) - 1)} of {acknowledged[0]} are left; "
                "restore it from a backup"
            )
        if torn:
            raise StoreError(
                f"{self.path} ends in an incomplete line; its charge was never acknowledged: delete that line"
            )
        checks: list[str] = []
        bodies = []
        for number, line in enumerate(lines, start=1):
            body, check = _parse(line, checks[-1] if checks else "", f"{self.path} line {number}")
            bodies.append(body)
            checks.append(check)
        if acknowledged[1] is None:
            # Only a crash while the ledger was being made leaves it without a head.
            if len(lines) > 1:
                raise StoreError(f"{self._head_path} is missing: restore it from a backup")
        elif checks[acknowledged[0]] != acknowledged[1]:
            raise StoreError(
                f"{self.path} does not belong to {self._head_path.name}: restore both from one backup"
            )
        self._header = self._parse_header(bodies[0])
        self._entries: list[Entry] = []
        self._budgets: list[Budget] = []
        for number, body in enumerate(bodies[1:], start=2):
            try:
                self._entries.append(Entry(**body["entry"]))
                self._budgets.append(Budget(**body["budget"]))
            except (KeyError, TypeError, ConfigError):
                raise StoreError(
                    f"{self.path} line {number} is not an entry that this version can account"
                ) from None
        self._check = checks[-1]
        self._size = len(raw)

    def _acknowledged(self, head: bytes | None) -> tuple[int, str | None]:
        """Return (entries, check) of the head file; (0, None) where it was never written."""
        if head is None:
            return 0, None
        body, _ = _parse(head.rstrip(b"\n"), "", str(self._head_path))
        count, check = body.get("entries"), body.get("last")
        if not isinstance(count, int) or not isinstance(check, str) or count < 0:
            raise StoreError(f"{self._head_path} is damaged: restore it and the ledger from one backup")
        return count, check

    def _parse_header(self, body: Mapping[str, Any]) -> _Header:
        try:
            header = _Header(**body)
        except TypeError:
            raise StoreError(f"{self.path} line 1 is not the header of a ledger") from None
        if header.format != _FORMAT or header.version != _VERSION:
            raise StoreError(
                f"{self.path} is not a ledger of version {_VERSION}: {header.format} {header.version}"
            )
        return header

    def _write_head(self, entries: int, check: str) -> None:
        line, _ = _line({"entries": entries, "last": check}, "")
        write_atomic(self._head_path, line)

    def _append(self, entry: Entry, budget: Budget) -> None:
        body = {"entry": dataclasses.asdict(entry), "budget": dataclasses.asdict(budget)}
        line, check = _line(body, self._check)
        try:
            if not self._head_path.exists():
                self._write_head(len(self._entries), self._check)
            self._write_line(line)
            # From here on the charge stands, whatever happens: the ledger may only err upwards.
            self._entries.append(entry)
            self._budgets.append(budget)
            self._check = check
            self._size += len(line)
            self._write_head(len(self._entries), check)
        except OSError as err:
            raise StoreError(f"{self.path} cannot be written: {err.strerror}") from None

    def _write_line(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size != self._size:
                raise StoreError(f"{self.path} was changed by another process: open it again")
            try:
                written = os.write(descriptor, line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, "no space left for a whole line")
                os.fsync(descriptor)
            except OSError:
                # Nothing has been acknowledged: take the torn line back so that the ledger stays readable.
                os.ftruncate(descriptor, self._size)
                os.fsync(descriptor)
                raise
        finally:
            os.close(descriptor)
        sync_folder(self.path.parent)


def describe(ledger: Ledger) -> dict[str, Any]:
    """Return what an auditor asks of a ledger as plain JSON values: budgets, spent, what still fits.

    `fits` counts further steps at a run's last q and sigma.
    """
    runs = []
    for run in ledger.runs:
        entries, budget = ledger.for_run(run), ledger.budget(run)
        assert budget is not None
        last = entries[-1]
        spent = ledger.spent(run, budget.accountant)
        runs.append(
            {
                "run": run,
                "methods": sorted({e.method for e in entries}),
                "rounds": len({e.round for e in entries}),
                "entries": len(entries),
                "steps": sum(e.steps for e in entries),
                "declared": last.declared,
                "q": last.q,
                "sigma": last.sigma,
                "clip": last.clip,
                "accountant": budget.accountant,
                "delta": budget.delta,
                "budget": budget.epsilon,
                "epsilon": spent,
                "fits": ledger.remaining_steps(run, last.q, last.sigma, budget.epsilon, budget.accountant),
                "first": entries[0].time,
                "last": last.time,
            }
        )
    lifetime = ledger.lifetime()
    cap = ledger.max_epsilon
    return {
        "path": str(ledger.path),
        "node": ledger.node,
        "created": ledger.created,
        "mechanism": MECHANISM,
        "adjacency": ADJACENCY,
        "delta": ledger.lifetime_delta,
        "order": ledger.order,
        "max_epsilon": cap,
        "lifetime_epsilon": lifetime,
        "lifetime_left": None if cap is None else max(0.0, cap - lifetime),
        "entries": len(ledger.entries),
        "runs": runs,
    }


def _steps(entries: Sequence[Entry]) -> list[Step]:
    return [entry.step for entry in entries]


def _within(cost: float, budget: float) -> bool:
    return cost <= budget * (1 + _TOLERANCE)


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _line(body: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Return the line of `body` that follows a line with check `previous`, and its own check."""
    check = hashlib.sha256(f"{previous}\n{_canonical(body)}".encode()).hexdigest()
    return (_canonical({**body, "check": check}) + "\n").encode(), check


def _parse(line: bytes, previous: str, where: str) -> tuple[dict[str, Any], str]:
    """Undo :func:`_line`; any deviation, be it white space, is damage."""
    try:
        body = json.loads(line)
        check = body.pop("check")
        expected = _line(body, previous)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StoreError(f"{where} is damaged: restore the ledger from a backup") from None
    if (line + b"\n", check) != expected:
        raise StoreError(f"{where} was changed or moved: restore the ledger from a backup")
    return body, check
