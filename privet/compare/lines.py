"""From runs to lines: runs that differ in their seed alone are one line, with a label that tells it from the others.

This is also where it is decided what may be compared at all: lines with one task, one model and one test set form a
*set*; inside a set, lines of one budget (private or not, epsilon, delta, adjacency) compete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from privet.compare.runs import Run, find_runs, read_run
from privet.compare.statistics import Metric, Spread

NO_EFFECT = frozenset({"seed", "tracking"})
"""Settings that make no line of their own."""

_OWN_COLUMN = frozenset({"method.name", "method._target_", "privacy.mode", "privacy.epsilon"})
_EXPERIMENT = ("task.head", "task.pooling", "task.train_rows", "model.lora.", "model.max_length")
"""Settings below task and model that a comparison may vary."""


@dataclass(frozen=True)
class Budget:
    """What a line promised; only lines of one budget compete."""

    private: bool
    target: float | None
    delta: float | None
    adjacency: str | None

    @property
    def text(self) -> str:
        """Words for a sentence."""
        if self.target is None:
            return "without privacy"
        promised = f"at epsilon {self.target:g}"
        if not self.private:
            return f"{promised} in name only (not private)"
        return promised + (f", delta {self.delta:g}" if self.delta is not None else "")

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Private ones first, by epsilon."""
        return (self.target is None, not self.private, self.target or 0.0)


@dataclass(frozen=True)
class Line:
    """Runs that differ in their seed alone.

    Attributes
    ----------
    details : dict
        The settings that tell this line from others of its method and budget.
    """

    runs: Sequence[Run]
    details: Mapping[str, Any]

    @property
    def first(self) -> Run:
        """One of the runs: for what they have in common."""
        return self.runs[0]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.first.method

    @cached_property
    def label(self) -> str:
        """The method and what tells it apart; the same at every budget."""
        short = [key.rpartition(".")[2] for key in self.details]
        named = [
            f"{last if short.count(last) == 1 else key}={show(value)}"
            for (key, value), last in zip(self.details.items(), short, strict=True)
        ]
        return f"{self.method} ({', '.join(named)})" if named else self.method

    @property
    def budget(self) -> Budget:
        """What was promised."""
        run = self.first
        return Budget(run.private, run.target, run.delta, run.adjacency)

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds, in order."""
        return sorted(
            {run.seed for run in self.runs}, key=lambda s: (s is None, s if isinstance(s, int) else 0)
        )

    def setting(self, key: str) -> Any:
        """A setting's value, None where the runs do not have it."""
        return self.first.settings.get(key)

    def score(self, metric: Metric) -> Spread | None:
        """Spread of a final score over the runs that have it."""
        return Spread.of([r.scores[metric.name] for r in self.runs if metric.name in r.scores])

    def test_rows(self, metric: Metric) -> int | None:
        """Rows that a score was measured on, None where the runs do not say."""
        group = metric.name.rpartition(" ")[0]
        counts = [r.scores.get(f"{group} examples".strip()) for r in self.runs if metric.name in r.scores]
        known = [c for c in counts if c is not None]
        return int(min(known)) if known and len(known) == len(counts) else None

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        """Mean of a number over the runs that have it."""
        spread = Spread.of([v for r in self.runs if (v := value(r)) is not None])
        return None if spread is None else spread.mean

    def largest(self, value: Callable[[Run], float | None]) -> float | None:
        """Largest of a number over the runs."""
        return max((v for r in self.runs if (v := value(r)) is not None), default=None)


@dataclass(frozen=True)
class Comparable:
    """Lines of one task, one model and one test set, and the metric they are compared by."""

    lines: Sequence[Line]
    metric: Metric

    @property
    def title(self) -> str:
        """Task and model by name."""
        first = self.lines[0]
        return f"{first.setting('task.name')} with {first.setting('model.name')}"

    @property
    def budgets(self) -> list[Budget]:
        """The budgets, the smallest epsilon first and those without privacy last."""
        return sorted({line.budget for line in self.lines}, key=lambda b: b.order)

    def at(self, budget: Budget) -> list[Line]:
        """Lines of one budget."""
        return [line for line in self.lines if line.budget == budget]


@dataclass(frozen=True)
class Comparison:
    """Everything that is compared.

    Attributes
    ----------
    apart : list of Run
        Runs without a result, each with its problem.
    telling : list of str
        Settings that tell lines of one method and budget apart.
    differing : list of str
        The other settings that differ between lines that have them.
    warnings : list of str
        Why lines are not comparable.
    remarks : list of str
        What else a reader should know.
    """

    sets: Sequence[Comparable]
    apart: Sequence[Run]
    telling: Sequence[str]
    differing: Sequence[str]
    warnings: Sequence[str]
    remarks: Sequence[str]

    @property
    def lines(self) -> list[Line]:
        """All lines, set by set."""
        return [line for group in self.sets for line in group.lines]

    @property
    def metrics(self) -> list[Metric]:
        """The main metrics, each once."""
        return list(dict.fromkeys(group.metric for group in self.sets))


def compare(paths: Sequence[Path]) -> Comparison:
    """Read all runs that `paths` are or hold, and arrange them.

    Raises
    ------
    PrivetError
        If a path does not exist, or none holds a run.
    """
    found, remarks = find_runs(paths)
    runs = [read_run(path) for path in found]
    complete = [r for r in runs if not r.problem]
    telling, differing = _differing(complete)
    lines = [
        Line(group, {k: group[0].settings[k] for k in telling if k in group[0].settings})
        for group in _grouped(complete, _line_key).values()
    ]
    lines.sort(key=lambda line: (line.budget.order, line.method, line.label))
    sets = [Comparable(group, _metric(group)) for group in _sets(lines)]
    return Comparison(
        sets=sets,
        apart=[r for r in runs if r.problem],
        telling=telling,
        differing=differing,
        warnings=_warnings(lines),
        remarks=[*remarks, *_remarks(lines)],
    )


def show(value: Any) -> str:
    """Write a setting's value."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return str(value)


# --- keys ----------------------------------------------------------------------------------------


def _grouped(items: Sequence[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _line_key(run: Run) -> str:
    own = {k: v for k, v in run.settings.items() if k not in NO_EFFECT}
    # What the run says about itself belongs to the line, so that no line is half private.
    return _text([own, run.private, run.target, run.delta, run.adjacency])


def _sets(lines: Sequence[Line]) -> list[list[Line]]:
    """Part the lines by task, model and number of test rows; a line without a score goes with the first number."""
    sets: list[list[Line]] = []
    for group in _grouped(lines, lambda line: _place(line.first)).values():
        first = next((rows for line in group if (rows := _rows(line))), [])
        by_rows: dict[str, list[Line]] = {}
        for line in group:
            by_rows.setdefault(str(_rows(line) or first), []).append(line)
        sets += by_rows.values()
    return sets


def _rows(line: Line) -> list[float]:
    return sorted({r.scores["examples"] for r in line.runs if "examples" in r.scores})


def _place(run: Run) -> str:
    """Task and model of a run, as a key."""
    return _text([_definition(run, "task."), _definition(run, "model.")])


def _definition(run: Run, group: str) -> dict[str, Any]:
    """What makes a task the same task, or a model the same model."""
    return {k: v for k, v in run.settings.items() if k.startswith(group) and not k.startswith(_EXPERIMENT)}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# --- what differs --------------------------------------------------------------------------------


def _differing(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return the settings that tell lines of one method and budget apart, and the others that differ.

    A setting is compared where it means something: a method's among the runs of that method, a task's or model's
    among the runs of that task or model, a budget's among the runs that have one.
    """
    keys = list(dict.fromkeys(k for r in runs for k in r.settings))
    telling, differing = [], []
    for key in keys:
        if key in NO_EFFECT or key in _OWN_COLUMN:
            continue
        scope = _scope(key)
        if _varies(runs, key, lambda r: (_place(r), r.method, r.private, r.target)):
            telling.append(key)
        elif _varies(runs, key, scope):
            differing.append(key)
    return telling, differing


def _scope(key: str) -> Callable[[Run], tuple[Any, ...]]:
    group = key.partition(".")[0]
    if group == "privacy":
        return lambda r: (r.settings.get("privacy.mode"),)
    if group in ("method", "task", "model") and key != f"{group}.name":
        return lambda r: (r.settings.get(f"{group}.name"),)
    return lambda r: ()


def _varies(runs: Sequence[Run], key: str, scope: Callable[[Run], tuple[Any, ...]]) -> bool:
    values: dict[tuple[Any, ...], set[str]] = {}
    for run in runs:
        value = _text(run.settings[key]) if key in run.settings else ""
        values.setdefault(scope(run), set()).add(value)
    return any(len(found) > 1 for found in values.values())


# --- what may be compared ------------------------------------------------------------------------


def _metric(lines: Sequence[Line]) -> Metric:
    """Choose the score that most lines have; accuracy, then other shares, then the rest, the server's first."""
    names = dict.fromkeys(n for line in lines for r in line.runs for n in r.scores)
    candidates = [m for m in map(Metric, names) if m.counts]
    if not candidates:
        return Metric("accuracy")

    def rank(metric: Metric) -> tuple[int, bool, bool, bool, bool]:
        having = sum(line.score(metric) is not None for line in lines)
        return (
            having,
            " " not in metric.name,
            metric.name.endswith("accuracy"),
            metric.share,
            not metric.lower_is_better,
        )

    return max(candidates, key=rank)


def _warnings(lines: Sequence[Line]) -> list[str]:
    """Say in plain lines which runs are not comparable and why."""
    out = []
    for what, group in (("task", "task."), ("model", "model.")):
        keys = dict.fromkeys(k for line in lines for k in _definition(line.first, group))
        unequal = [k for k in keys if len({_text(line.setting(k)) for line in lines}) > 1]
        if unequal:
            # The name says it all; without a difference in names, the settings do.
            named = [k for k in unequal if k == f"{group}name"] or unequal[:3]
            found = "; ".join(f"{k}: {_values(line.setting(k) for line in lines)}" for k in named)
            out.append(f"not comparable: the {what} differs ({found})")
    rows = {int(n) for line in lines for r in line.runs if (n := r.scores.get("examples")) is not None}
    if len(rows) > 1:
        out.append(f"not comparable: scored on different numbers of test rows ({_values(sorted(rows))})")
    private = [line.budget for line in lines if line.budget.target is not None]
    for what, values in (
        ("delta", [b.delta for b in private]),
        ("adjacency", [b.adjacency for b in private]),
    ):
        if len(set(values)) > 1:
            out.append(f"not comparable: the budgets differ in {what} ({_values(values)})")
    return out


def _values(values: Any) -> str:
    return ", ".join(dict.fromkeys(show(v) for v in values))


def _remarks(lines: Sequence[Line]) -> list[str]:
    out = []
    for line in lines:
        if len(line.runs) > len(line.seeds):
            out.append(
                f"{line.label} {line.budget.text}: {len(line.runs)} runs with {len(line.seeds)} "
                f"seed{'s' if len(line.seeds) > 1 else ''}; every run counts"
            )
    return out
