"""Measuring one case: all of its variants in turns, their noise, and their peaks of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.measure import Clock, Times, in_turns
from benchmarks.memory import Peak
from benchmarks.models import Workload
from benchmarks.steps import Mechanism, Private, Step
from benchmarks.table import Cell, Row
from benchmarks.variants import METHODS, PRIVATE, PRIVET, VARIANTS, Key, Variant

_NOISE = "noise"


def build_steps(work: Workload) -> dict[Key, Step]:
    """Build a step of every variant."""
    return {variant.key: variant.build(work, Mechanism()) for variant in VARIANTS}


def measure(
    steps: Mapping[Key, Step], turns: int, clock: Clock, progress: Callable[[int], None] = lambda turn: None
) -> Times[Key]:
    """Time the steps in turns and, among them, the noise of those that are Privet's."""
    calls: dict[Key, Callable[[], None]] = dict(steps)
    for (method, _), step in steps.items():
        if isinstance(step, Private):
            calls[method, _NOISE] = step.noise
    return in_turns(calls, turns, clock, progress=progress)


def rows(case: str, layers: int, times: Times[Key], peaks: Mapping[Key, Peak]) -> list[Row]:
    """Put measurements into the table's form; `peaks` may be empty."""
    out = []
    for method in METHODS:
        variants = [v for v in PRIVATE if v.method == method]
        base = variants[0].base_key
        out.append(
            Row(
                case=case,
                layers=layers,
                method=method,
                seconds=times.median(base, times.names[0]),
                memory=peaks[base].above if peaks else None,
                cells=tuple(_cell(variant, times, peaks) for variant in variants),
            )
        )
    return out


def _cell(variant: Variant, times: Times[Key], peaks: Mapping[Key, Peak]) -> Cell:
    key, base, main = variant.key, variant.base_key, times.names[0]
    noise = None
    if variant.engine == PRIVET:
        noise = times.ratio((variant.method, _NOISE), key, main).median
    return Cell(
        engine=variant.engine,
        seconds=times.median(key, main),
        time={clock: times.ratio(key, base, clock) for clock in times.names},
        noise=noise,
        peak=peaks[key].total / peaks[base].total if peaks else None,
        above=peaks[key].above / peaks[base].above if peaks else None,
    )
