"""What a comparison shows, in sentences that claim no more than the numbers carry.

Two lines are *level* where their difference is below its standard error, and one is *ahead* from two standard errors
on. In between the order is open, and said to be. Lines of different budgets, tasks or models never compete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from privet.compare.lines import Budget, Comparable, Comparison, Line
from privet.compare.statistics import Metric, Spread, standard_error
from privet.compare.table import count_text


@dataclass(frozen=True)
class Entry:
    """A line's mean score with its standard error, None where nothing is known about that."""

    line: Line
    spread: Spread
    error: float | None


@dataclass(frozen=True)
class Contest:
    """Lines of one budget, best first.

    Attributes
    ----------
    level : list of Entry
        The best and those whose difference from it is below its standard error.
    open : list of Entry
        Worse by one to two standard errors, or by a difference whose error is unknown.
    behind : list of Entry
        Worse by two standard errors or more.
    """

    metric: Metric
    budget: Budget
    level: Sequence[Entry]
    open: Sequence[Entry]
    behind: Sequence[Entry]
    all_level: bool

    @property
    def entries(self) -> list[Entry]:
        """All of them, best first."""
        return [*self.level, *self.open, *self.behind]

    @property
    def winner(self) -> Entry | None:
        """The one that is ahead of all others by two standard errors."""
        return self.level[0] if len(self.level) == 1 and self.behind and not self.open else None


def contests(group: Comparable) -> list[Contest]:
    """Judge the lines of every budget; a budget without a score has no contest."""
    out = []
    for budget in group.budgets:
        entries = []
        for line in group.at(budget):
            spread = line.score(group.metric)
            if spread is not None:
                error = standard_error(group.metric, spread, line.test_rows(group.metric))
                entries.append(Entry(line, spread, error))
        if entries:
            out.append(judge(group.metric, budget, entries))
    return out


def judge(metric: Metric, budget: Budget, entries: Sequence[Entry]) -> Contest:
    """Sort entries into level with the best, open and behind."""
    ranked = sorted(entries, key=lambda e: e.spread.mean, reverse=not metric.lower_is_better)
    best = ranked[0]
    level, unsettled, behind = [best], [], []
    for entry in ranked[1:]:
        error = error_of_difference(best, entry)
        apart = abs(best.spread.mean - entry.spread.mean)
        if error is None:
            unsettled.append(entry)
        elif apart < error or apart == 0:
            level.append(entry)
        elif apart < 2 * error:
            unsettled.append(entry)
        else:
            behind.append(entry)
    return Contest(
        metric, budget, level, unsettled, behind, all(_level(a, b) for a, b in combinations(ranked, 2))
    )


def error_of_difference(a: Entry, b: Entry) -> float | None:
    """Standard error of the difference of two means, taken as independent; None where either is unknown."""
    if a.error is None or b.error is None:
        return None
    return math.hypot(a.error, b.error)


def headline(comparison: Comparison) -> str:
    """Return one sentence on the whole comparison."""
    if not comparison.lines:
        return "No run has a result."
    found = [(group, contest) for group in comparison.sets for contest in contests(group)]
    if not found:
        return "No run has a score."
    if len(comparison.sets) > 1:
        return f"{len(comparison.sets)} sets of runs that cannot be compared with each other; each is judged by itself."
    judged = [contest for _, contest in found]
    if len({e.line.label for c in judged for e in c.entries}) == 1:
        return _alone(judged) + "."
    if len(judged) <= 2:
        return _capital("; ".join(map(_clause, judged))) + "."
    return _many([c for c in judged if len(c.entries) > 1]) + "."


def findings(group: Comparable) -> list[str]:
    """Return a sentence for every budget, on what was not repeated, and on the messages."""
    judged = contests(group)
    out = [_sentence(contest) for contest in judged]
    competing = [e for c in judged if len(c.entries) > 1 for e in c.entries]
    single = [e.line for e in competing if e.spread.count == 1]
    if single:
        every = len(single) == len(competing)
        names = _listed([f"{line.label} {line.budget.text}" for line in single])
        who = "Every configuration ran once" if every else f"{names} ran once"
        private = any(line.budget.private for line in single)
        why = "private runs draw their noise afresh each time, and " if private else ""
        out.append(f"{who}; {why}how far such runs scatter is not in the error.")
    traffic = _traffic(group)
    return [*out, traffic] if traffic else out


# --- sentences -----------------------------------------------------------------------------------


def _level(a: Entry, b: Entry) -> bool:
    error = error_of_difference(a, b)
    apart = abs(a.spread.mean - b.spread.mean)
    return error is not None and (apart < error or apart == 0)


def _clause(contest: Contest) -> str:
    """A few words on one budget, for the headline."""
    metric, entries = contest.metric, contest.entries
    where = contest.budget.text
    best = entries[0]
    if len(entries) == 1:
        return f"{where}, {best.line.label} reaches {metric.name} {_value(metric, best)}"
    if contest.all_level:
        return f"{where}, {_all(entries)} are level ({metric.name} {_range(metric, entries)})"
    if contest.winner:
        return f"{where}, {best.line.label} is ahead ({metric.name} {_value(metric, best)})"
    if len(contest.level) > 1 and not contest.open:
        names = _listed([e.line.label for e in contest.level])
        return f"{where}, {names} are level at the top ({metric.name} {_range(metric, contest.level)})"
    top = [*contest.level, *contest.open]
    return f"{where}, the order at the top is open ({metric.name} {_range(metric, top)})"


def _alone(found: Sequence[Contest]) -> str:
    """One line at several budgets: its scores."""
    metric, label = found[0].metric, found[0].entries[0].line.label
    scores = [f"{_value(metric, c.entries[0])} {c.budget.text}" for c in found]
    return f"{label} reaches {metric.name} {_listed(scores)}"


def _many(found: Sequence[Contest]) -> str:
    """The headline over many budgets: where somebody is ahead, and where nobody is."""
    if not found:
        return "No two configurations have the same budget, so none is compared with another"
    won: dict[str, list[str]] = {}
    for contest in found:
        if contest.winner:
            won.setdefault(contest.winner.line.label, []).append(contest.budget.text)
    if not won:
        where = (
            f"any of the {len(found)} budgets" if len(found) > 1 else found[0].budget.text.removeprefix("at ")
        )
        return f"No configuration is ahead of all others at {where}: the differences do not settle an order"
    parts = [f"{label} is ahead {_listed(places)}" for label, places in won.items()]
    rest = len(found) - sum(len(places) for places in won.values())
    return "; ".join(parts) + (
        f"; at {rest} of {len(found)} budgets nothing settles an order" if rest else ""
    )


def _sentence(contest: Contest) -> str:
    metric, entries = contest.metric, contest.entries
    where, best = _capital(contest.budget.text), entries[0]
    if len(entries) == 1:
        return (
            f"{where}: {best.line.label} alone, {metric.name} {_value(metric, best)}{_error(metric, best)}."
        )
    if contest.all_level:
        return (
            f"{where}: {_all(entries)} are level, {metric.name} {_range(metric, entries)}; "
            "no difference reaches its standard error" + _largest_error(metric, entries) + "."
        )
    if contest.winner:
        parts = [
            f"{best.line.label} is ahead with {metric.name} {_value(metric, best)}{_error(metric, best)}"
        ]
    elif len(contest.level) > 1:
        parts = [
            f"{_listed([e.line.label for e in contest.level])} are level with the best "
            f"({metric.name} {_range(metric, contest.level)})"
        ]
    else:
        parts = [
            f"{best.line.label} has the best {metric.name}, {_value(metric, best)}{_error(metric, best)}"
        ]
    if contest.open:
        known = all(e.error is not None for e in [best, *contest.open])
        why = "less than two standard errors away" if known else "and no standard error is known"
        parts.append(f"against {_named(metric, contest.open)} the order is open, {why}")
    if contest.behind:
        verb = "is" if len(contest.behind) == 1 else "are"
        parts.append(f"{_named(metric, contest.behind)} {verb} behind by two standard errors or more")
    return f"{where}: " + "; ".join(parts) + "."


def _traffic(group: Comparable) -> str:
    """A sentence on the numbers that a client sends in a round."""
    sent: dict[str, float] = {}
    for line in group.lines:
        numbers = line.largest(lambda r: r.upload_numbers)
        if numbers is not None:
            sent[line.label] = max(numbers, sent.get(line.label, 0))
    some = {label: n for label, n in sent.items() if n > 0}
    if len(set(some.values())) < 2:
        return ""
    fewest, most = min(some.values()), max(some.values())
    few = [label for label, n in some.items() if n == fewest]
    many = [label for label, n in some.items() if n == most]
    text = (
        f"Per client and round, {_listed(few)} {'sends' if len(few) == 1 else 'send'} {count_text(fewest)} adapter "
        f"numbers and {_listed(many)} {count_text(most)}, {most / fewest:.3g} times as many"
    )
    none = [label for label, n in sent.items() if n == 0]
    if none:
        text += f"; {_listed(none)} {'sends' if len(none) == 1 else 'send'} the head alone"
    return text + "."


def _value(metric: Metric, entry: Entry) -> str:
    return f"{metric.text(entry.spread.mean)}{metric.unit}"


def _named(metric: Metric, entries: Sequence[Entry]) -> str:
    return _listed([f"{e.line.label} ({_value(metric, e)})" for e in entries])


def _range(metric: Metric, entries: Sequence[Entry]) -> str:
    values = sorted(e.spread.mean for e in entries)
    low, high = metric.text(values[0]), metric.text(values[-1])
    return f"{low}{metric.unit}" if low == high else f"{low} to {high}{metric.unit}"


def _error(metric: Metric, entry: Entry) -> str:
    if entry.error is None:
        return ""
    return f" (standard error {metric.text(entry.error)}{' points' if metric.share else ''})"


def _all(entries: Sequence[Entry]) -> str:
    return "both configurations" if len(entries) == 2 else f"all {len(entries)} configurations"


def _largest_error(metric: Metric, entries: Sequence[Entry]) -> str:
    errors = [e for a, b in combinations(entries, 2) if (e := error_of_difference(a, b)) is not None]
    return f" (up to {metric.text(max(errors))}{' points' if metric.share else ''})" if errors else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
