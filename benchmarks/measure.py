"""Timing steps in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

K = TypeVar("K")


class Clock(Protocol):
    """Times a call.

    Attributes
    ----------
    names : tuple of str
        What it reads; the first is what targets are about.
    """

    names: tuple[str, ...]

    def time(self, call: Callable[[], None]) -> tuple[float, ...]:
        """Run `call` and return the seconds it took, one number a name."""
        ...


class CpuClock:
    """Process CPU time and wall time."""

    names: tuple[str, ...] = ("cpu", "wall")

    def time(self, call: Callable[[], None]) -> tuple[float, ...]:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        return time.process_time() - cpu, time.perf_counter() - wall


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a ratio taken within every turn."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], base: Sequence[float]) -> Ratio:
        """Ratios of two variants, turn by turn."""
        low, median, high = np.percentile(np.divide(own, base), [25, 50, 75])
        return cls(float(median), float(low), float(high))


class Times(Generic[K]):
    """Seconds by key, turn and clock."""

    def __init__(self, names: tuple[str, ...], values: Mapping[K, Sequence[tuple[float, ...]]]) -> None:
        self.names = names
        self._values = values

    def series(self, key: K, clock: str) -> list[float]:
        """Seconds of every turn."""
        at = self.names.index(clock)
        return [reading[at] for reading in self._values[key]]

    def median(self, key: K, clock: str) -> float:
        """Median seconds."""
        return float(np.median(self.series(key, clock)))

    def ratio(self, key: K, base: K, clock: str) -> Ratio:
        """Ratio of one call's time to another's in the same turn."""
        return Ratio.of(self.series(key, clock), self.series(base, clock))


def in_turns(
    calls: Mapping[K, Callable[[], None]],
    turns: int,
    clock: Clock,
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda turn: None,
) -> Times[K]:
    """Time all calls once a turn, in a new order every turn, after one turn that does not count."""
    order = random.Random(seed)
    values: dict[K, list[tuple[float, ...]]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    for turn in range(turns):
        for key in order.sample(list(calls), len(calls)):
            values[key].append(clock.time(calls[key]))
        progress(turn + 1)
    return Times(clock.names, values)
