"""The table of a comparison: one list of columns for the terminal, the page and the CSV file."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from privet.compare.lines import Comparison, Line, show
from privet.compare.runs import Run
from privet.compare.statistics import Metric, standard_error

NOT_PRIVATE = "not private"
_NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes
    ----------
    cell : function of a line
        The text that is shown.
    value : function of a line
        What the column is sorted by.
    number : bool
        Whether it is aligned to the right.
    """

    title: str
    cell: Callable[[Line], str]
    value: Callable[[Line], Any]
    number: bool = True


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns that say what a line is and what came out."""
    lines = comparison.lines
    out = [
        Column("method", lambda line: line.method, lambda line: line.method, number=False),
        *(_setting(key, lines) for key in comparison.telling),
        Column("epsilon", _target, lambda line: line.budget.target),
        *(_metric(metric) for metric in comparison.metrics),
        Column("seeds", lambda line: _seeds(line), lambda line: len(line.seeds)),
        Column("epsilon spent", spent, lambda line: line.largest(lambda r: r.epsilon)),
        Column("numbers up / down", _numbers, lambda line: line.largest(lambda r: r.upload_numbers)),
        Column(
            "bytes in all",
            lambda line: size(line.mean(lambda r: r.bytes)),
            lambda line: line.mean(lambda r: r.bytes),
        ),
        Column("seconds", lambda line: _seconds(line), lambda line: line.mean(lambda r: r.seconds)),
        *(_metric(metric) for metric in _client_metrics(comparison)),
    ]
    if any(r.void_rounds for line in lines for r in line.runs):
        out.append(_count("void rounds", lambda r: r.void_rounds))
    if any(r.failures for line in lines for r in line.runs):
        out.append(_count("failed replies", lambda r: len(r.failures)))
    return out


def setting_columns(comparison: Comparison) -> list[Column]:
    """Return the columns of the other settings that differ."""
    return [_setting(key, comparison.lines) for key in comparison.differing]


def text_table(comparison: Comparison, width: int | None = None) -> str:
    """Return the table for a terminal, with warnings above and the runs without a result below.

    Parameters
    ----------
    width : int, optional
        Columns of the terminal; by default those of this one. Settings that do not fit become a second table.
    """
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    main, settings = columns(comparison), setting_columns(comparison)
    blocks = [[f"warning: {text}" for text in comparison.warnings]]
    if comparison.lines:
        whole = _laid_out([*main, *settings], comparison.lines)
        if settings and max(map(len, whole)) > width:
            keys = main[: 2 + len(comparison.telling)]
            blocks += [_laid_out(main, comparison.lines), _laid_out([*keys, *settings], comparison.lines)]
        else:
            blocks.append(whole)
    else:
        blocks.append(["no run has a result"])
    blocks.append([f"note: {text}" for text in comparison.remarks])
    blocks.append(apart_lines(comparison.apart))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def apart_lines(runs: Sequence[Run]) -> list[str]:
    """Return the runs without a result, a line each."""
    if not runs:
        return []
    return ["Not in the table:", *(f"  {run.path}: {run.problem}" for run in runs)]


def csv_table(comparison: Comparison) -> str:
    """Return the table as CSV, with full precision and every score."""
    keys = [*comparison.telling, *comparison.differing]
    metrics = list(dict.fromkeys(n for line in comparison.lines for r in line.runs for n in r.scores))
    rows: list[dict[str, Any]] = []
    for line in comparison.lines:
        row: dict[str, Any] = {
            "task": line.setting("task.name"),
            "model": line.setting("model.name"),
            "method": line.method,
            **{key: show(line.setting(key)) if key in line.first.settings else None for key in keys},
            "private": str(line.budget.private).lower(),
            "epsilon_target": line.budget.target,
            "delta": line.budget.delta,
            "epsilon_spent": line.largest(lambda r: r.epsilon),
            "runs": len(line.runs),
            "seeds": " ".join(str(s) for s in line.seeds),
        }
        for name in metrics:
            metric = Metric(name)
            spread = line.score(metric)
            if not metric.counts:
                row[name.replace(" ", "_")] = None if spread is None else spread.mean
                continue
            error = None if spread is None else standard_error(metric, spread, line.test_rows(metric))
            row[f"{name}_mean".replace(" ", "_")] = None if spread is None else spread.mean
            row[f"{name}_std".replace(" ", "_")] = None if spread is None else spread.deviation
            row[f"{name}_standard_error".replace(" ", "_")] = error
        row |= {
            "upload_numbers": line.largest(lambda r: r.upload_numbers),
            "download_numbers": line.largest(lambda r: r.download_numbers),
            "bytes": line.mean(lambda r: r.bytes),
            "seconds": line.mean(lambda r: r.seconds),
            "void_rounds": sum(r.void_rounds for r in line.runs),
            "failed_replies": sum(len(r.failures) for r in line.runs),
        }
        rows.append(row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else ["method"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _plain(v) for k, v in row.items()} for row in rows)
    return stream.getvalue()


def spent(line: Line) -> str:
    """The epsilon spent, or that the line is not private."""
    value = line.largest(lambda r: r.epsilon)
    if not line.budget.private:
        return NOT_PRIVATE
    return _NOTHING if value is None else f"{value:.2f}"


def count_text(number: float | None) -> str:
    """Write a whole number with thin gaps between thousands."""
    return _NOTHING if number is None else f"{round(number):,}".replace(",", " ")


def size(amount: float | None) -> str:
    """Write a number of bytes."""
    if amount is None:
        return _NOTHING
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} GB"


# --- cells ---------------------------------------------------------------------------------------


def _setting(key: str, lines: Sequence[Line]) -> Column:
    def cell(line: Line) -> str:
        return show(line.setting(key)) if key in line.first.settings else _NOTHING

    def value(line: Line) -> Any:
        found = line.setting(key)
        return found if isinstance(found, (int, float)) else cell(line)

    known = [line.setting(key) for line in lines if key in line.first.settings]
    return Column(key, cell, value, number=all(v is None or isinstance(v, (int, float)) for v in known))


def _metric(metric: Metric) -> Column:
    def cell(line: Line) -> str:
        spread = line.score(metric)
        return _NOTHING if spread is None else metric.spread_text(spread)

    def value(line: Line) -> float | None:
        spread = line.score(metric)
        return None if spread is None else spread.mean

    return Column(metric.title, cell, value)


def _client_metrics(comparison: Comparison) -> list[Metric]:
    """The clients' scores that are no main metric; a loss stays in the CSV file."""
    names = dict.fromkeys(n for line in comparison.lines for r in line.runs for n in r.scores if " " in n)
    found = [m for m in map(Metric, names) if m.counts and not m.lower_is_better]
    return [m for m in found if m not in comparison.metrics]


def _count(title: str, number: Callable[[Run], int]) -> Column:
    def total(line: Line) -> int:
        return sum(number(r) for r in line.runs)

    return Column(title, lambda line: str(total(line)), total)


def _target(line: Line) -> str:
    return "none" if line.budget.target is None else f"{line.budget.target:g}"


def _seeds(line: Line) -> str:
    seeds, runs = len(line.seeds), len(line.runs)
    return str(seeds) if seeds == runs else f"{seeds} ({runs} runs)"


def _seconds(line: Line) -> str:
    value = line.mean(lambda r: r.seconds)
    return _NOTHING if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _numbers(line: Line) -> str:
    up, down = line.largest(lambda r: r.upload_numbers), line.largest(lambda r: r.download_numbers)
    return f"{count_text(up)} / {count_text(down)}"


def _laid_out(shown: Sequence[Column], lines: Iterable[Line]) -> list[str]:
    rows = [[c.title for c in shown], *([c.cell(line) for c in shown] for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]

    def line_of(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(w) if c.number else cell.ljust(w)
            for c, cell, w in zip(shown, row, widths, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return [line_of(rows[0]), "  ".join("-" * w for w in widths), *map(line_of, rows[1:])]


def _plain(value: Any) -> Any:
    """A cell that a spreadsheet does not take for a formula."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@"):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
