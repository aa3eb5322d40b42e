"""The plots of a comparison: a metric against rounds, epsilon spent and bytes sent.

Drawn without a display. Every line has its own colour, dash and marker, so that it is told apart in grey and by the
colour-blind as well; the colours are Okabe and Ito's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from privet.compare.lines import Budget, Comparable, Comparison, Line
from privet.compare.runs import RoundScore
from privet.compare.statistics import Metric, Spread, standard_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
MISSING = "the plots need matplotlib: pip install 'privet[report]'"

_COLOURS: dict[Theme, tuple[str, ...]] = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    "dark": ("#4FA3E0", "#FF8A4C", "#2CC69B", "#E5A3C6", "#F2B84B", "#9AD4F7", "#F0F0F0"),
}
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = "os^DvPX*"
_INK: dict[Theme, tuple[str, str, str]] = {  # text, grid, ground
    "light": ("#222222", "#DDDDDD", "#FFFFFF"),
    "dark": ("#E4E4E0", "#3A3D40", "#1B1D1F"),
}
_PANELS_A_ROW = 3
_MOST_BANDS = 3  # more bands than that in a panel are mud: bars instead
_ONE_PANEL = (6.8, 4.5)
_DPI = 150


@dataclass(frozen=True)
class Plot:
    """One picture with its words.

    Attributes
    ----------
    name : str
        Name of its file, without the ending.
    """

    name: str
    title: str
    caption: str
    light: bytes
    dark: bytes


@dataclass(frozen=True)
class _Curve:
    """One line of a plot: where it is, and its mean and deviation there."""

    line: Line
    x: list[float]
    spread: list[Spread]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(comparison: Comparison) -> list[list[Plot]]:
    """Draw the plots of every set; a plot without a point is left out.

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    labels = list(dict.fromkeys(line.label for line in comparison.lines))
    out = []
    for number, group in enumerate(comparison.sets, start=1):
        suffix = f"-{number}" if len(comparison.sets) > 1 else ""
        plots = [kind(group, labels, suffix) for kind in (_by_round, _by_epsilon, _by_bytes)]
        out.append([p for p in plots if p is not None])
    return out


# --- the three plots -----------------------------------------------------------------------------


def _by_round(group: Comparable, labels: Sequence[str], suffix: str) -> Plot | None:
    curves = [_curve(line, group.metric, lambda r: r.number) for line in group.lines]
    return _panels(
        group,
        labels,
        curves,
        name=f"{_file(group.metric)}-by-round{suffix}",
        title=f"{_capital(group.metric.name)} against rounds",
        x_label="round",
        caption="after every scored round (a warm-up has no scores)"
        + ("; marks of one round are set slightly apart" if len(group.lines) > 1 else ""),
        dodge=0.05 if len(labels) > 1 else 0.0,
    )


def _by_bytes(group: Comparable, labels: Sequence[str], suffix: str) -> Plot | None:
    curves = [_curve(line, group.metric, lambda r: r.bytes_so_far / 1e6) for line in group.lines]
    values = [x for c in curves for x in c.x if x > 0]
    log = bool(values) and max(values) > 30 * min(values)
    return _panels(
        group,
        labels,
        curves,
        name=f"{_file(group.metric)}-by-bytes{suffix}",
        title=f"{_capital(group.metric.name)} against bytes sent",
        x_label="MB sent so far" + (" (log scale)" if log else ""),
        caption="against the bytes of all messages until then: all clients, both ways, heads, one-off material and "
        "repeated requests included",
        log=log,
    )


def _by_epsilon(group: Comparable, labels: Sequence[str], suffix: str) -> Plot | None:
    lines = [line for line in group.lines if line.budget.private]
    curves = [c for line in lines if (c := _curve(line, group.metric, lambda r: r.epsilon)).x]
    if not curves:
        return None
    families = {label: [c for c in curves if c.line.label == label] for label in labels}
    families = {label: family for label, family in families.items() if family}
    joined = any(len(family) > 1 for family in families.values())
    led = any(len(c.x) > 1 for c in curves)
    width = max(x for c in curves for x in c.x) - (
        min(x for c in curves for x in c.x) if led or joined else 0.0
    )
    shifts = _apart(len(families), 0.012 * width)

    def paint(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for (label, family), shift in zip(families.items(), shifts, strict=True):
            look = _look(label, labels, theme)
            if not joined:
                look["linestyle"] = "none"
            thin = {"color": look["color"], "linestyle": _look(label, labels, theme)["linestyle"]}
            for curve in family:
                means = [group.metric.scaled(s.mean) for s in curve.spread]
                axes.plot(curve.x, means, **thin, linewidth=0.9, alpha=0.6)
            ends = sorted(((c.x[-1] + shift, c.spread[-1]) for c in family), key=lambda end: end[0])
            _bars(axes, [x for x, _ in ends], [s for _, s in ends], group.metric, look, label)
        axes.set_xlabel("epsilon spent (largest over the nodes)")
        _dress([axes], group, curves, theme, 1)
        if not (led or joined):  # one budget: room on both sides
            axes.set_xlim(0.8 * min(c.x[0] for c in curves), 1.2 * max(c.x[0] for c in curves))
        _legend(figure, theme)

    words = "at the end of every private line" + (", joined over budgets" if joined else "")
    words += "; thin lines lead there round by round" if led else ""
    words += "; marks are set slightly apart" if len(families) > 1 else ""
    return Plot(
        name=f"{_file(group.metric)}-by-epsilon{suffix}",
        title=f"{_capital(group.metric.name)} against epsilon spent",
        caption=_caption(group, curves, words) + " Runs without privacy have no epsilon and are not shown.",
        light=_png(paint, _ONE_PANEL, "light"),
        dark=_png(paint, _ONE_PANEL, "dark"),
    )


def _panels(
    group: Comparable,
    labels: Sequence[str],
    curves: Sequence[_Curve],
    *,
    name: str,
    title: str,
    x_label: str,
    caption: str,
    dodge: float = 0.0,
    log: bool = False,
) -> Plot | None:
    """Draw one panel a budget, on common axes."""
    curves = [c for c in curves if c.x]
    if not curves:
        return None
    budgets = [b for b in group.budgets if any(c.line.budget == b for c in curves)]
    across = 2 if len(budgets) == 4 else min(len(budgets), _PANELS_A_ROW)
    down = -(-len(budgets) // across)
    alone = all(len(c.x) == 1 for c in curves)

    def paint(figure: Figure, theme: Theme) -> None:
        grid = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
        for panel, budget in zip(grid, budgets, strict=False):
            there = [c for c in curves if c.line.budget == budget]
            for curve, shift in zip(there, _apart(len(there), dodge), strict=True):
                look = _look(curve.line.label, labels, theme)
                if alone:
                    look["linestyle"] = "none"
                x = [x + shift for x in curve.x]
                if len(there) > _MOST_BANDS or len(x) == 1:
                    _bars(panel, x, curve.spread, group.metric, look, curve.line.label)
                else:
                    _band(panel, x, curve.spread, group.metric, look, curve.line.label)
            if len(budgets) > 1:
                panel.set_title(_panel_title(budget), fontsize=10, color=_INK[theme][0])
        if log:
            _log_axis(grid[0])
        elif len({x for c in curves for x in c.x}) == 1:  # one place: room on both sides
            grid[0].set_xlim(curves[0].x[0] - 0.9, curves[0].x[0] + 0.9)
        _dress(grid[: len(budgets)], group, curves, theme, across)
        for place, panel in enumerate(grid):
            if place >= len(budgets):
                panel.set_axis_off()
                continue
            if place % across:
                panel.set_ylabel("")
            if place + across >= len(budgets):  # the lowest of its column carries the axis
                panel.set_xlabel(x_label, fontsize=10, color=_INK[theme][0])
                panel.tick_params(labelbottom=True)
        _legend(figure, theme)

    extent = _ONE_PANEL if across == 1 else (3.3 * across + 0.7, 3.0 * down + 1.1)
    return Plot(
        name=name,
        title=title,
        caption=_caption(group, curves, caption),
        light=_png(paint, extent, "light"),
        dark=_png(paint, extent, "dark"),
    )


# --- drawing -------------------------------------------------------------------------------------


def _bars(
    axes: Axes, x: Sequence[float], spread: Sequence[Spread], metric: Metric, look: dict[str, Any], label: str
) -> None:
    """Means joined by a line, with a bar of one deviation on each."""
    y = [metric.scaled(s.mean) for s in spread]
    error = [metric.scaled(s.deviation or 0.0) for s in spread]
    bars: dict[str, Any] = {"yerr": error, "elinewidth": 0.9, "capsize": 2.5} if any(error) else {}
    axes.errorbar(x, y, label=label, **look, **bars, linewidth=1.6)


def _band(
    axes: Axes, x: Sequence[float], spread: Sequence[Spread], metric: Metric, look: dict[str, Any], label: str
) -> None:
    """Means joined by a line, in a band of one deviation each way."""
    y = [metric.scaled(s.mean) for s in spread]
    error = [metric.scaled(s.deviation or 0.0) for s in spread]
    axes.plot(x, y, label=label, **look, markevery=max(1, len(y) // 8), linewidth=1.6)
    if any(error):
        low = [a - e for a, e in zip(y, error, strict=True)]
        high = [a + e for a, e in zip(y, error, strict=True)]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _apart(count: int, step: float) -> list[float]:
    """Small shifts, so that marks at one place do not hide each other."""
    return [(i - (count - 1) / 2) * step for i in range(count)]


def _look(label: str, labels: Sequence[str], theme: Theme) -> dict[str, Any]:
    """Colour, dash and marker of a label, the same in all plots."""
    i = labels.index(label)
    colours = _COLOURS[theme]
    return {
        "color": colours[i % len(colours)],
        "linestyle": _DASHES[i % len(_DASHES)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "markersize": 6.5,
        "markeredgecolor": _INK[theme][2],
        "markeredgewidth": 0.6,
    }


def _dress(
    panels: Sequence[Axes], group: Comparable, curves: Sequence[_Curve], theme: Theme, across: int
) -> None:
    """Give panels on common axes their limits, colours and labels, and one of them the standard error's bar."""
    ink, grid, ground = _INK[theme]
    error = _typical_error(group, curves)
    low, high = _limits(group.metric, curves, error)
    whole = all(x == int(x) for c in curves for x in c.x)
    for axes in panels:
        axes.set_ylim(low, high)
        axes.set_facecolor(ground)
        axes.grid(axis="y", color=grid, linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(ink)
        axes.tick_params(colors=ink, labelsize=9)
        remark = "" if low <= 0 <= high else "\n(axis does not start at 0)"
        axes.set_ylabel(group.metric.title + remark, fontsize=10, color=ink)
        axes.xaxis.label.set_color(ink)
        if whole:
            from matplotlib.ticker import MaxNLocator

            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    if error:
        last = panels[across - 1]
        middle, place = (low + high) / 2, last.get_yaxis_transform()
        last.errorbar(
            [1.02], [middle], [error], transform=place, color=ink, linewidth=1.0, capsize=3, clip_on=False
        )
        last.text(
            1.045, middle, "± 1 standard error of a score", transform=place, rotation=90, fontsize=7.5, color=ink,
            va="center", ha="left", clip_on=False,
        )  # fmt: skip


def _typical_error(group: Comparable, curves: Sequence[_Curve]) -> float | None:
    """The test set's standard error at the middle score, in the unit of the axis; None where it is unknown."""
    rows = [n for c in curves if (n := c.line.test_rows(group.metric)) is not None]
    means = sorted(s.mean for c in curves for s in c.spread[-1:])
    middle = Spread(means[len(means) // 2], None, 1)
    error = standard_error(group.metric, middle, min(rows)) if rows else None
    return None if error is None else group.metric.scaled(error)


def _limits(metric: Metric, curves: Sequence[_Curve], error: float | None) -> tuple[float, float]:
    """Limits that hold every bar, and at least eight standard errors: noise is not blown up to fill the axis."""
    ends = [s.mean + sign * (s.deviation or 0.0) for c in curves for s in c.spread for sign in (-1, 1)]
    low, high = metric.scaled(min(ends)), metric.scaled(max(ends))
    middle, half = (low + high) / 2, max(0.54 * (high - low), 4 * (error or 0.0), 1e-9 + 1e-3 * abs(high))
    low, high = middle - half, middle + half
    return (max(low, 0.0), min(high, 100.0 + 0.02 * half)) if metric.share else (low, high)


def _log_axis(axes: Axes) -> None:
    """A logarithmic axis with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, theme: Theme) -> None:
    """One legend for the figure, below it; entries of all panels, each once."""
    found: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    longest = max(map(len, found), default=1)
    columns = max(1, min(len(found), int(figure.get_figwidth() * 11 // (longest + 8))))
    legend = figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=columns, frameon=False, fontsize=9,
        handlelength=3.4,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(_INK[theme][0])


def _png(paint: Callable[[Figure, Theme], None], extent: tuple[float, float], theme: Theme) -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10}):
        figure = Figure(figsize=extent, layout="constrained", facecolor=_INK[theme][2])
        FigureCanvasAgg(figure)
        paint(figure, theme)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=_DPI, facecolor=_INK[theme][2])
    return stream.getvalue()


# --- points and words ----------------------------------------------------------------------------


def _curve(line: Line, metric: Metric, place: Callable[[RoundScore], float | None]) -> _Curve:
    """Mean over the runs of a line, round by round; a place is the mean of the runs' places."""
    by_round: dict[int, list[tuple[float, float]]] = {}
    for run in line.runs:
        for entry in run.rounds:
            x = place(entry)
            if metric.name in entry.scores and x is not None:
                by_round.setdefault(entry.number, []).append((x, entry.scores[metric.name]))
    places, spreads = [], []
    for _, points in sorted(by_round.items()):
        spread = Spread.of([y for _, y in points])
        assert spread is not None
        places.append(sum(x for x, _ in points) / len(points))
        spreads.append(spread)
    return _Curve(line, places, spreads)


def _caption(group: Comparable, curves: Sequence[_Curve], where: str) -> str:
    rows = {n for c in curves if (n := c.line.test_rows(group.metric)) is not None}
    on = f" on {' or '.join(f'{n:,}'.replace(',', ' ') for n in sorted(rows))} test rows" if rows else ""
    several = any(s.deviation is not None for c in curves for s in c.spread)
    spread = (
        " Means over runs that differ in their seed alone; bands and bars are one sample standard deviation."
        if several
        else " Single runs, so no spread is shown."
    )
    return f"{_capital(group.metric.name)}{on}, {where}.{spread}"


def _panel_title(budget: Budget) -> str:
    if budget.target is None:
        return "not private"
    return f"epsilon {budget.target:g}" + ("" if budget.private else ", not private")


def _file(metric: Metric) -> str:
    return "".join(c if c.isalnum() else "-" for c in metric.name)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
