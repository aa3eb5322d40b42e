"""Bring like directions together: coordinates into slots at the start, and slots into bundles in every pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privet.environment import available_cpus
from privet.hsip.slots import slot_bounds

Ints = NDArray[np.int64]
Singles = NDArray[np.float32]

PIECES = 16
"""Parts that work is cut into for the threads, at most."""

BLOCK = 1 << 15
"""Slots among which anchors are sought; more are first halved into blocks, which keeps a pass near-linear."""


class Workers:
    """Threads that run kernels over ranges of independent pieces."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(available_cpus())

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def each(self, total: int, work: Callable[[int, int], Any]) -> list[Any]:
        """Call ``work(first, last)`` on ranges that make up ``0..total``; return the results in order."""
        size = max(1, -(-total // PIECES))
        starts = range(0, total, size)
        return list(self._pool.map(lambda first: work(first, min(first + size, total)), starts))


def halve_to(
    rows: Singles,
    order: Ints,
    cuts: Ints,
    size: int,
    bounds: Ints,
    as_lines: bool,
    steps: int,
    rng: np.random.Generator,
    workers: Workers,
) -> Ints:
    """Halve the ranges between `cuts` until none is longer than `size`; return the new cuts.

    Parameters
    ----------
    rows : float32 (n, K)
        Directions; with `as_lines` flipped in place.
    order : int64 (n,)
        Permutation of the rows, reordered in place.
    cuts : int64
        Where the ranges start and end, in slots.
    bounds : int64
        Where each slot starts in `order`.
    """
    from privet.hsip.kernels.groups import halve

    keys = np.empty(len(order), np.float32)
    while np.diff(cuts).max() > size:
        middles = cuts[:-1] + (np.diff(cuts) + 1) // 2
        at = [bounds[c] for c in (cuts[:-1], middles, cuts[1:])]
        seed = int(rng.integers(1 << 62))
        workers.each(
            len(middles),
            lambda first, last, at=at, seed=seed: halve(  # type: ignore[misc]
                rows, order, *at, keys, steps, seed, as_lines, first, last
            ),
        )
        cuts = np.unique(np.concatenate([cuts, middles]))
    return cuts


def order_coordinates(
    profiles: Singles, d: int, as_lines: bool, rng: np.random.Generator, workers: Workers
) -> Ints:
    """Order the coordinates so that each slot's share of consecutive ones points the same way.

    Zero profiles come last: they conflict alike with everything, and least where they are together. With `as_lines`
    rows of `profiles` are flipped, in place, to the main direction of their slot.
    """
    from privet.hsip.kernels.groups import halve

    D = len(profiles)
    moves = (profiles != 0).any(1)
    order = np.concatenate([np.flatnonzero(moves), np.flatnonzero(~moves)])
    bounds = slot_bounds(D, d)
    cuts = np.unique([0, -(-int(moves.sum()) * d // D), d])
    halve_to(profiles, order, cuts, 1, bounds, as_lines, 3, rng, workers)
    if as_lines:
        keys = np.empty(D, np.float32)
        at = bounds[:-1], bounds[:-1], bounds[1:]
        workers.each(d, lambda first, last: halve(profiles, order, *at, keys, 3, 0, True, first, last))
    return order


def bundle(
    directions: Singles, size: int, as_lines: bool, rng: np.random.Generator, workers: Workers
) -> tuple[Ints, Ints, Ints]:
    """Gather slots around randomly drawn anchor slots, about `size` to an anchor and at most twice as many.

    Returns
    -------
    order, starts, stops : int64
        The bundles are ``order[start:stop]``.
    """
    from privet.hsip.kernels.groups import nearest

    d = len(directions)
    order = rng.permutation(d)
    cuts = np.array([0, d])
    if d > BLOCK:
        ends = np.arange(d + 1)
        cuts = halve_to(directions.copy(), order, cuts, BLOCK, ends, as_lines, 1, rng, workers)
    sizes = np.diff(cuts)
    count = -(-int(sizes.max()) // size)
    drawn = cuts[:-1, None] + (rng.random((len(sizes), count)) * sizes[:, None]).astype(np.int64)
    anchors = np.ascontiguousarray(directions[order[drawn]].transpose(0, 2, 1))
    label = np.empty(d, np.int64)
    parts = max(1, PIECES // len(sizes))
    edges = cuts[:-1, None] + sizes[:, None] * np.arange(parts + 1) // parts
    starts, stops = edges[:, :-1].ravel(), edges[:, 1:].ravel()
    blocks = np.repeat(np.arange(len(sizes)), parts)
    workers.each(
        len(starts),
        lambda first, last: nearest(
            directions, order, anchors, blocks, starts, stops, as_lines, label, first, last
        ),
    )
    label += np.repeat(np.arange(len(sizes)) * count, sizes)
    by_label = np.argsort(label, kind="stable")
    found = np.unique(label[by_label], return_index=True)[1]
    lengths = np.diff(found, append=d)
    parts_of = -(-lengths // (2 * size))
    which = np.repeat(np.arange(len(found)), parts_of)
    part = np.arange(len(which)) - np.repeat(np.cumsum(parts_of) - parts_of, parts_of)
    begin = found[which] + lengths[which] * part // parts_of[which]
    return order[by_label], begin, np.append(begin[1:], d)
