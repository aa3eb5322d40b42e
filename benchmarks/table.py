"""The results: one row a model and method, the same for the terminal, for Markdown and for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import Ratio
from benchmarks.variants import ENGINES, PRIVET


@dataclass(frozen=True)
class Cell:
    """One variant against the non-private step of the same turn.

    Attributes
    ----------
    seconds : float
        Median time of its step by the first clock.
    time : dict of str to Ratio
        By clock; targets are about the first.
    noise : float, optional
        Share of its step that the noise takes.
    peak, above : float, optional
        Ratio of the peaks of memory, and of the peaks above the loaded model.
    """

    engine: str
    seconds: float
    time: dict[str, Ratio]
    noise: float | None = None
    peak: float | None = None
    above: float | None = None

    @property
    def main(self) -> Ratio:
        """Ratio by the first clock."""
        return next(iter(self.time.values()))


@dataclass(frozen=True)
class Row:
    """All engines on one model with one method.

    Attributes
    ----------
    seconds : float
        Median time of the non-private step.
    memory : int, optional
        Bytes that the non-private step needs above the loaded model.
    """

    case: str
    layers: int
    method: str
    seconds: float
    memory: int | None
    cells: tuple[Cell, ...]

    def cell(self, engine: str) -> Cell | None:
        """Return the engine's cell; None where it has no rule for the method."""
        return next((c for c in self.cells if c.engine == engine), None)


HEADER = (
    "model, batch",
    "layers",
    "method",
    "plain s",
    *(f"time: {engine}" for engine in ENGINES),
    "noise",
    "plain MB",
    *(f"memory: {engine}" for engine in ENGINES),
)


def _texts(row: Row) -> tuple[str, ...]:
    cells = [row.cell(engine) for engine in ENGINES]
    privet = row.cell(PRIVET)
    noise = f"{privet.noise:.1%}" if privet is not None and privet.noise is not None else "-"
    return (
        row.case,
        str(row.layers),
        row.method,
        f"{row.seconds:.3f}",
        *(_time(c.main) if c else "-" for c in cells),
        noise,
        "-" if row.memory is None else f"{row.memory / 1e6:.0f}",
        *(_memory(c) for c in cells),
    )


def _time(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _memory(cell: Cell | None) -> str:
    if cell is None or cell.peak is None or cell.above is None:
        return "-"
    return f"{cell.peak:.3f} / {cell.above:.3f}"


def text(rows: Iterable[Row]) -> str:
    """Return the table for a terminal."""
    lines = [HEADER, *(_texts(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def markdown(rows: Iterable[Row]) -> str:
    """Return the table for a page."""
    lines = [HEADER, ("---",) * len(HEADER), *(_texts(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain objects."""
    return [asdict(row) for row in rows]
