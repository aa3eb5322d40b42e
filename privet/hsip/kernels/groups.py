"""Find groups of like directions: halve at the main direction, or go to the nearest anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from privet.hsip.kernels import kernel, mixed

Array = NDArray[Any]


@kernel
def _select(keys: Array, order: Array, start: int, middle: int, stop: int) -> None:
    """Permute both so that keys[start:middle] <= keys[middle:stop] (Hoare's quickselect)."""
    low, high = start, stop - 1
    while low < high:
        a, b, c = keys[low], keys[(low + high) >> 1], keys[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if middle <= j:
            high = j
        elif middle >= i:
            low = i
        else:
            return


@kernel
def _project(
    rows: Array, order: Array, start: int, stop: int, offset: Array, steps: int, seed: int, keys: Array
) -> None:
    """Write to `keys` where each row lies along the direction of largest spread about `offset`.

    The direction comes from power iteration on up to 4096 of the rows.
    """
    width = len(offset)
    old, new = np.empty(width), np.empty(width)
    state = mixed(np.uint64(seed) ^ mixed(np.uint64(start)))
    for k in range(width):
        state = mixed(state)
        new[k] = np.float64(state >> np.uint64(11)) / 9007199254740992.0 - 0.5
    for _ in range(steps):
        for k in range(width):
            old[k], new[k] = new[k], 0.0
        for at in range(start, stop, (stop - start) // 4096 + 1):
            along = 0.0
            for k in range(width):
                along += (rows[order[at], k] - offset[k]) * old[k]
            for k in range(width):
                new[k] += along * (rows[order[at], k] - offset[k])
        length = 0.0
        for k in range(width):
            length += new[k] * new[k]
        for k in range(width):  # where there is no spread at all, any direction will do
            new[k] = new[k] / np.sqrt(length) if length > 1e-30 else old[k]
    for at in range(start, stop):
        along = 0.0
        for k in range(width):
            along += rows[order[at], k] * new[k]
        keys[at] = along


@kernel
def halve(
    rows: Array,
    order: Array,
    starts: Array,
    middles: Array,
    stops: Array,
    keys: Array,
    steps: int,
    seed: int,
    as_lines: bool,
    first: int,
    last: int,
) -> None:
    """Reorder each node order[start:stop] so that its cut at `middle` separates unlike directions.

    With `as_lines` a row and its negative are the same: rows are first flipped, in place, to the side of their
    node's main direction. A node without a cut is only flipped. The more `steps` of power iteration the better
    the cut; one step gives another good cut with every seed.
    """
    width = rows.shape[1]
    offset = np.empty(width)
    for node in range(first, last):
        start, middle, stop = starts[node], middles[node], stops[node]
        for k in range(width):
            offset[k] = 0.0
        if as_lines:
            _project(rows, order, start, stop, offset, steps, seed, keys)
            for at in range(start, stop):
                if keys[at] < 0:
                    for k in range(width):
                        rows[order[at], k] = -rows[order[at], k]
        if start < middle < stop:
            for at in range(start, stop):
                for k in range(width):
                    offset[k] += rows[order[at], k] / (stop - start)
            _project(rows, order, start, stop, offset, steps, seed + 1, keys)
            _select(keys, order, start, middle, stop)


@kernel
def nearest(
    directions: Array,
    order: Array,
    anchors: Array,
    blocks: Array,
    starts: Array,
    stops: Array,
    as_lines: bool,
    label: Array,
    first: int,
    last: int,
) -> None:
    """Label each of order[start:stop] with that anchor of its block (block, K, anchor) which is most alike."""
    count = anchors.shape[2]
    along = np.empty(count, np.float32)
    for piece in range(first, last):
        block = blocks[piece]
        for at in range(starts[piece], stops[piece]):
            for c in range(count):
                along[c] = 0.0
            for k in range(directions.shape[1]):
                v = directions[order[at], k]
                for c in range(count):
                    along[c] += v * anchors[block, k, c]
            best, most = 0, np.float32(-1e30)
            for c in range(count):
                v = abs(along[c]) if as_lines else along[c]
                if v > most:
                    best, most = c, v
            label[at] = best
