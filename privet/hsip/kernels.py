"""Compiled inner loops of the assignment solver; imported only when it runs, as loading numba takes time.

Every kernel works through the independent pieces ``first <= piece < last`` and releases the interpreter's lock:
threads share the pieces out, and what a piece yields does not depend on which thread had it. Compiled code goes
to disk only where ``NUMBA_CACHE_DIR`` names a folder, as an installed app may be read-only.

A *row* is one coordinate: its signed unit profile times sqrt(alpha), K numbers, then its three loads times the
square roots of their coefficients. In rows, eq. 12 is, up to a constant, a sum over slots of

    (alpha + 2 lambda) n^2 / 2  -  ||sum of profiles||^2 / 2  +  (sum of loads - mean)^2.

Each pair of a slot gives alpha (1 - cos), hence n^2 / 2 and the squared sum; the rows' own squared lengths, one
or, for a zero profile, zero, are part of the constant wherever the rows are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from privet.hsip.slots import Rules, Slots

Array = NDArray[Any]

NOISE = 4096
"""Draws in the table of noise; a row of prices starts at a random place of it."""

_kernel: Callable[[Any], Any] = njit(
    nogil=True, fastmath=True, error_model="numpy", cache=bool(os.environ.get("NUMBA_CACHE_DIR"))
)


@_kernel
def _mixed(state: np.uint64) -> np.uint64:
    """Return a well-mixed 64-bit number for every input (splitmix64)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# --- groups of like directions -------------------------------------------------------------------


@_kernel
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


@_kernel
def _main_direction(
    rows: Array, order: Array, start: int, stop: int, offset: Array, steps: int, seed: int, out: Array
) -> None:
    """Write to `out` the direction of largest spread about `offset`: power iteration on up to 4096 rows."""
    width = len(offset)
    stride = (stop - start) // 4096 + 1
    old = np.empty(width)
    state = _mixed(np.uint64(seed) ^ _mixed(np.uint64(start)))
    for k in range(width):
        state = _mixed(state)
        out[k] = np.float64(state >> np.uint64(11)) / 9007199254740992.0 - 0.5
    for _ in range(steps):
        for k in range(width):
            old[k] = out[k]
            out[k] = 0.0
        for at in range(start, stop, stride):
            i = order[at]
            along = 0.0
            for k in range(width):
                along += (rows[i, k] - offset[k]) * old[k]
            for k in range(width):
                out[k] += along * (rows[i, k] - offset[k])
        length = 0.0
        for k in range(width):
            length += out[k] * out[k]
        if length < 1e-30:  # no spread at all: any direction will do
            for k in range(width):
                out[k] = old[k]
            return
        for k in range(width):
            out[k] /= np.sqrt(length)


@_kernel
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
    offset, direction = np.empty(width), np.empty(width)
    for node in range(first, last):
        start, middle, stop = starts[node], middles[node], stops[node]
        for turn in range(2):
            for k in range(width):
                offset[k] = 0.0
            if turn == 0 and not as_lines:
                continue
            if turn == 1:
                if middle <= start or middle >= stop:
                    continue
                for at in range(start, stop):
                    for k in range(width):
                        offset[k] += rows[order[at], k] / (stop - start)
            _main_direction(rows, order, start, stop, offset, steps, seed + turn, direction)
            for at in range(start, stop):
                i = order[at]
                along = 0.0
                for k in range(width):
                    along += rows[i, k] * direction[k]
                keys[at] = along
                if turn == 0 and along < 0:
                    for k in range(width):
                        rows[i, k] = -rows[i, k]
        if start < middle < stop:
            _select(keys, order, start, middle, stop)


@_kernel
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
            i = order[at]
            for c in range(count):
                along[c] = 0.0
            for k in range(directions.shape[1]):
                v = directions[i, k]
                for c in range(count):
                    along[c] += v * anchors[block, k, c]
            best, most = 0, np.float32(-1e30)
            for c in range(count):
                v = abs(along[c]) if as_lines else along[c]
                if v > most:
                    best, most = c, v
            label[at] = best


# --- exchanges between two slots -----------------------------------------------------------------


@_kernel
def _survey(
    rows: Array,
    slot: int,
    count: int,
    begin: int,
    size: int,
    K: int,
    mine: Array,
    other: Array,
    cost: Array,
    pull: Array,
    columns: Array,
) -> None:
    """Price the leaving of `size` of a slot's rows from `begin` on, and find the other slot's pull on each.

    `mine` and `other` are the two slots' sums of rows. The rows go to `columns`, one a column, for _swaps.
    """
    width = rows.shape[2]
    for c in range(size):
        i = begin + c
        if i >= count:
            i -= count
        stay, go, lever, square = 0.0, 0.0, 0.0, 0.0
        for k in range(K):
            v = rows[slot, i, k]
            columns[k, c] = v
            stay += (mine[k] - v) * v
            go += other[k] * v
        for k in range(K, width):
            v = rows[slot, i, k]
            columns[k, c] = v
            lever += v * (mine[k] - other[k])
            square += v * v
        cost[c] = stay + 2.0 * (square - lever)
        pull[c] = go


@_kernel
def _swaps(
    column: int,
    a: Array,
    b: Array,
    size: int,
    K: int,
    cost: Array,
    pull_a: Array,
    pull_b: Array,
    noise: Array,
    heat: np.float32,
    as_lines: bool,
    cos: Array,
    load: Array,
    price: Array,
) -> np.float32:
    """Price, but for its own leaving, the swap of one column of a with each of b; return the least price."""
    for q in range(size):
        cos[q] = 0.0
        load[q] = 0.0
    for k in range(K):
        v = a[k, column]
        for q in range(size):
            cos[q] += v * b[k, q]
    for k in range(K, len(a)):
        v = a[k, column]
        for q in range(size):
            load[q] += v * b[k, q]
    least = np.float32(1e30)
    for q in range(size):
        to_b, to_a = pull_a[column] - cos[q], pull_b[q] - cos[q]
        if as_lines:
            to_b, to_a = abs(to_b), abs(to_a)
        price[q] = cost[q] - to_b - to_a - np.float32(4.0) * load[q] - heat * noise[q]
        least = min(least, price[q])
    return least


@_kernel
def _exact(
    rows: Array, a: int, b: int, i: int, j: int, K: int, sums: Array, as_lines: bool
) -> tuple[float, bool, bool]:
    """Change of eq. 12, but for the counts, by one exchange in double precision; do the rows change sign?

    i < 0 or j < 0: nothing moves from that slot.
    """
    own_a, own_b, to_a, to_b, loads = 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(rows.shape[2]):
        p = np.float64(rows[a, i, k]) if i >= 0 else 0.0
        q = np.float64(rows[b, j, k]) if j >= 0 else 0.0
        if k < K:
            own_a += p * (sums[0, k] - p)
            own_b += q * (sums[1, k] - q)
            to_a += q * (sums[0, k] - p)
            to_b += p * (sums[1, k] - q)
        else:
            loads += 2.0 * (q - p) * (sums[0, k] - sums[1, k] + q - p)
    if as_lines:
        return own_a + own_b - abs(to_a) - abs(to_b) + loads, to_b < 0, to_a < 0
    return own_a + own_b - to_a - to_b + loads, False, False


@_kernel
def _apply(slots: Slots, a: int, b: int, i: int, j: int, flip_i: bool, flip_j: bool, sums: Array) -> None:
    """Carry out one exchange; a slot's last row fills the place of one that only left."""
    rows, ids, counts = slots.rows, slots.ids, slots.counts
    K = slots.directions.shape[1]
    both = i >= 0 and j >= 0
    for k in range(rows.shape[2]):
        p = rows[a, i, k] if i >= 0 else np.float32(0.0)
        q = rows[b, j, k] if j >= 0 else np.float32(0.0)
        new_p = -p if flip_i and k < K else p
        new_q = -q if flip_j and k < K else q
        sums[0, k] += np.float64(new_q) - np.float64(p)
        sums[1, k] += np.float64(new_p) - np.float64(q)
        if both:
            rows[a, i, k], rows[b, j, k] = new_q, new_p
        elif i >= 0:
            rows[b, counts[b], k] = new_p
            rows[a, i, k] = rows[a, counts[a] - 1, k]
        else:
            rows[a, counts[a], k] = new_q
            rows[b, j, k] = rows[b, counts[b] - 1, k]
    if both:
        ids[a, i], ids[b, j] = ids[b, j], ids[a, i]
        return
    if i < 0:
        a, b, i = b, a, j
    ids[b, counts[b]] = ids[a, i]
    ids[a, i] = ids[a, counts[a] - 1]
    counts[a] -= 1
    counts[b] += 1


@_kernel
def _face(slots: Slots, slot: int, as_lines: bool) -> None:
    """Flip rows that pull against the rest of their slot, and note the slot's direction."""
    rows, n = slots.rows, slots.counts[slot]
    K = slots.directions.shape[1]
    total = np.zeros(K)
    for i in range(n):
        for k in range(K):
            total[k] += rows[slot, i, k]
    for _ in range(8 if as_lines else 0):
        flips = 0
        for i in range(n):
            along = 0.0
            for k in range(K):
                along += (total[k] - rows[slot, i, k]) * rows[slot, i, k]
            if along < -1e-6:  # below it, round-off could flip for ever
                flips += 1
                for k in range(K):
                    total[k] -= 2.0 * rows[slot, i, k]
                    rows[slot, i, k] = -rows[slot, i, k]
        if flips == 0:
            break
    length = 0.0
    for k in range(K):
        length += total[k] * total[k]
    for k in range(K):
        slots.directions[slot, k] = total[k] / np.sqrt(length) if length > 0 else 0.0


@_kernel
def exchange(
    slots: Slots,
    rules: Rules,
    order: Array,
    starts: Array,
    stops: Array,
    noise: Array,
    heat: np.float32,
    seed: int,
    first: int,
    last: int,
) -> int:
    """Visit every pair of slots of each bundle order[start:stop] once; return how many exchanges were made.

    A visit prices all swaps and moves between the two slots (of large slots, of a random run of `pick` rows each),
    takes the best and repeats. With heat, each price is lowered by a draw from heat x Exp(1), so that an exchange
    which costs x is taken with a chance that falls like exp(-x / heat).
    """
    rows, counts = slots.rows, slots.counts
    width, K = rows.shape[2], slots.directions.shape[1]
    room = min(rules.pick, rows.shape[1])
    sums = np.empty((2, width))
    cost, pull = np.empty((2, room), np.float32), np.empty((2, room), np.float32)
    columns = np.empty((2, width, room), np.float32)
    cos, load, price = np.empty(room, np.float32), np.empty(room, np.float32), np.empty(room, np.float32)
    pair, size = np.empty(2, np.int64), np.empty(2, np.int64)
    begin, best = np.empty(2, np.int64), np.empty(2, np.int64)
    taken = 0
    for bundle in range(first, last):
        start = starts[bundle]
        members = stops[bundle] - start
        even = members + (members & 1)
        state = _mixed(np.uint64(seed) ^ _mixed(np.uint64(start)))
        for turn in range(even - 1):  # a round-robin tournament; an odd one out meets nobody this turn
            for match in range(even // 2):
                x = (turn + match) % (even - 1)
                y = even - 1 if match == 0 else (turn - match) % (even - 1)
                if x >= members or y >= members:
                    continue
                pair[0], pair[1] = order[start + x], order[start + y]
                for side in range(2):
                    for k in range(width):
                        total = 0.0
                        for i in range(counts[pair[side]]):
                            total += rows[pair[side], i, k]
                        sums[side, k] = total
                for _ in range(rules.repeats):
                    least = np.float32(0.0)
                    for side in range(2):
                        n = counts[pair[side]]
                        state = _mixed(state)
                        size[side] = min(n, rules.pick)
                        begin[side] = np.int64(state >> np.uint64(33)) % n
                        best[side] = -1
                        _survey(
                            rows, pair[side], n, begin[side], size[side], K, sums[side], sums[1 - side],
                            cost[side], pull[side], columns[side],
                        )  # fmt: skip
                    for side in range(2):
                        n, m = counts[pair[side]], counts[pair[1 - side]]
                        if n <= rules.least or m >= rules.most:
                            continue
                        state = _mixed(state)
                        toss = np.int64(state & np.uint64(NOISE - 1))
                        for c in range(size[side]):
                            go = abs(pull[side, c]) if rules.as_lines else pull[side, c]
                            value = cost[side, c] - go + rules.crowding * (m - n + 1) - heat * noise[toss + c]
                            if value < least:
                                least = value
                                best[side], best[1 - side] = c, -1
                    for c in range(size[0]):
                        state = _mixed(state)
                        toss = np.int64(state & np.uint64(NOISE - 1))
                        value = cost[0, c] + _swaps(
                            c, columns[0], columns[1], size[1], K, cost[1], pull[0], pull[1], noise[toss:], heat,
                            rules.as_lines, cos, load, price,
                        )  # fmt: skip
                        if value < least:
                            least = value
                            best[0], best[1] = c, 0
                            for q in range(size[1]):
                                if price[q] < price[best[1]]:
                                    best[1] = q
                    if best[0] < 0 and best[1] < 0:
                        if size[0] < counts[pair[0]] or size[1] < counts[pair[1]]:
                            continue
                        break
                    for side in range(2):
                        if best[side] >= 0:
                            best[side] = (best[side] + begin[side]) % counts[pair[side]]
                    a, b, i, j = pair[0], pair[1], best[0], best[1]
                    change, flip_i, flip_j = _exact(rows, a, b, i, j, K, sums, rules.as_lines)
                    if j < 0:
                        change += rules.crowding * (counts[b] - counts[a] + 1)
                    elif i < 0:
                        change += rules.crowding * (counts[a] - counts[b] + 1)
                    if heat == 0 and change >= 0:  # single precision only thought it a gain
                        break
                    _apply(slots, a, b, i, j, flip_i, flip_j, sums)
                    taken += 1
        for at in range(start, stops[bundle]):
            _face(slots, order[at], rules.as_lines)
    return taken
