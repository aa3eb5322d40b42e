"""What the engine is held to, and where a table misses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.table import Row
from benchmarks.variants import GHOST, HOOKS, HSIP, ONLY_B, PRIVET, PRODUCT, TWO

#: Time and peak memory of a private step as ratios to the non-private one.
TIME = {TWO: 1.05, ONLY_B: 1.05, PRODUCT: 1.05, HSIP: 1.10}
MEMORY = {TWO: 1.02, ONLY_B: 1.02, PRODUCT: 1.02, HSIP: 1.10}
NOISE = 0.02  # share of a step that the cryptographic noise may take
GHOST_GAIN = 1.4  # how much faster than ghost clipping
_SAME = 1.01  # peaks of memory this close are equal


def misses(table: Iterable[Row]) -> list[str]:
    """Say in one line each where the table is not as it should be."""
    return [f"{row.case}, {row.method}: {line}" for row in table for line in _of_row(row)]


def _of_row(row: Row) -> Iterator[str]:
    own, hooks, ghost = (row.cell(engine) for engine in (PRIVET, HOOKS, GHOST))
    assert own is not None, "every row has Privet's engine"
    if own.main.median > TIME[row.method]:
        yield f"time {own.main.median:.3f}, at most {TIME[row.method]:.2f}"
    if own.peak is not None and own.peak > MEMORY[row.method]:
        yield f"peak memory {own.peak:.3f}, at most {MEMORY[row.method]:.2f}"
    if own.noise is not None and own.noise > NOISE:
        yield f"noise takes {own.noise:.1%} of the step, at most {NOISE:.0%}"
    if hooks is not None and own.main.low > hooks.main.high:
        yield f"slower than Opacus hooks: {own.main.median:.3f} against {hooks.main.median:.3f}"
    if ghost is not None and ghost.main.median < GHOST_GAIN * own.main.median:
        gain = ghost.main.median / own.main.median
        yield f"{gain:.2f} times faster than ghost clipping, at least {GHOST_GAIN}"
    for other in (hooks, ghost):
        # Above the model: each library's code, a few megabytes, is not what an engine needs for a step.
        if other is None or own.above is None or other.above is None:
            continue
        if own.above > _SAME * other.above:
            yield f"more memory than {other.engine}: {own.above:.3f} against {other.above:.3f}"
