"""Exchange rows between two slots: price all swaps and moves, carry out the best.

A *row* is one coordinate: its signed unit profile times sqrt(alpha), K numbers, then its three loads times the
square roots of their coefficients. In rows, eq. 12 is, up to a constant, a sum over slots of

    (alpha + 2 lambda) n^2 / 2  -  ||sum of profiles||^2 / 2  +  (sum of loads - mean)^2.

Each pair of a slot gives alpha (1 - cos), hence n^2 / 2 and the squared sum; the rows' own squared lengths, alpha
or, for a zero profile, zero, are part of the constant wherever the rows are. So the swap of p and q between slots
with sums A and B changes eq. 12 by

    p.(A - p) + q.(B - q) - |q.(A - p)| - |p.(B - q)|     (profiles; without signs to choose, no bars)
    + 2 (q - p).(A - B + q - p)                            (loads)

and a move is a swap with a row of zeros, which also changes the counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from privet.hsip.kernels import kernel, mixed
from privet.hsip.slots import Rules, Slots

Array = NDArray[Any]

NOISE = 4096
"""Draws in the table of noise; a row of prices starts at a random place of it."""


@kernel
def _add_up(slots: Slots, slot: int, total: Array) -> None:
    """Write the sum of a slot's rows to `total`."""
    for k in range(len(total)):
        total[k] = 0.0
    for i in range(slots.counts[slot]):
        for k in range(len(total)):
            total[k] += slots.rows[slot, i, k]


@kernel
def _leave(
    slots: Slots, slot: int, begin: int, size: int, mine: Array, other: Array, cost: Array, pull: Array
) -> None:
    """Price the leaving of `size` of a slot's rows from `begin` on, and find the other slot's pull on each.

    `mine` and `other` are the two slots' sums.
    """
    K = slots.directions.shape[1]
    for c in range(size):
        i = (begin + c) % slots.counts[slot]
        stay, go, lever, square = 0.0, 0.0, 0.0, 0.0
        for k in range(K):
            v = slots.rows[slot, i, k]
            stay += (mine[k] - v) * v
            go += other[k] * v
        for k in range(K, len(mine)):
            v = slots.rows[slot, i, k]
            lever += v * (mine[k] - other[k])
            square += v * v
        cost[c] = stay + 2.0 * (square - lever)
        pull[c] = go


@kernel
def _best_move(
    size: int, cost: Array, pull: Array, crowding: float, as_lines: bool, noise: Array, heat: np.float32
) -> tuple[np.float32, int]:
    """Return the least price of a move, and whose; 0 and -1 if none is below zero."""
    least, best = np.float32(0.0), -1
    for c in range(size):
        go = abs(pull[c]) if as_lines else pull[c]
        price = np.float32(cost[c] - go + crowding - heat * noise[c])
        if price < least:
            least, best = price, c
    return least, best


@kernel
def _best_swap(
    slots: Slots, pair: Array, begin: Array, size: Array, cost: Array, pull: Array, as_lines: bool, noise: Array,
    heat: np.float32, state: np.uint64,
) -> tuple[np.float32, int, int]:  # fmt: skip
    """Return the least price of a swap, and whose; 0, -1, -1 if none is below zero."""
    rows, a, b = slots.rows, pair[0], pair[1]
    K, width = slots.directions.shape[1], rows.shape[2]
    least, best_c, best_q = np.float32(0.0), -1, -1
    for c in range(size[0]):
        i = (begin[0] + c) % slots.counts[a]
        state = mixed(state)
        toss = np.int64(state & np.uint64(NOISE - 1))
        j = begin[1]
        for q in range(size[1]):
            cos, load = np.float32(0.0), np.float32(0.0)
            for k in range(K):
                cos += rows[a, i, k] * rows[b, j, k]
            for k in range(K, width):
                load += rows[a, i, k] * rows[b, j, k]
            to_b, to_a = pull[0, c] - cos, pull[1, q] - cos
            if as_lines:
                to_b, to_a = abs(to_b), abs(to_a)
            price = cost[0, c] + cost[1, q] - to_b - to_a - np.float32(4.0) * load - heat * noise[toss + q]
            if price < least:
                least, best_c, best_q = price, c, q
            j += 1
            if j == slots.counts[b]:
                j = 0
    return least, best_c, best_q


@kernel
def _exact(slots: Slots, rules: Rules, pair: Array, i: int, j: int, sums: Array) -> tuple[float, bool, bool]:
    """Return the change of eq. 12 by one exchange in double precision, and whether the rows change sign.

    i < 0 or j < 0: nothing moves from that slot.
    """
    a, b, K = pair[0], pair[1], slots.directions.shape[1]
    own, to_a, to_b, loads = 0.0, 0.0, 0.0, 0.0
    for k in range(slots.rows.shape[2]):
        p = np.float64(slots.rows[a, i, k]) if i >= 0 else 0.0
        q = np.float64(slots.rows[b, j, k]) if j >= 0 else 0.0
        if k < K:
            own += p * (sums[0, k] - p) + q * (sums[1, k] - q)
            to_a += q * (sums[0, k] - p)
            to_b += p * (sums[1, k] - q)
        else:
            loads += 2.0 * (q - p) * (sums[0, k] - sums[1, k] + q - p)
    gap = slots.counts[b] - slots.counts[a]
    more = 0 if i >= 0 and j >= 0 else gap + 1 if i >= 0 else 1 - gap
    change = own + loads + rules.crowding * more
    if rules.as_lines:
        return change - abs(to_a) - abs(to_b), to_b < 0, to_a < 0
    return change - to_a - to_b, False, False


@kernel
def _flip(slots: Slots, slot: int, i: int) -> None:
    """Change the sign of a row's profile."""
    for k in range(slots.directions.shape[1]):
        slots.rows[slot, i, k] = -slots.rows[slot, i, k]


@kernel
def _apply(slots: Slots, pair: Array, i: int, j: int) -> None:
    """Carry out one exchange; a move leaves its place to the slot's last row."""
    rows, ids, counts, a, b = slots.rows, slots.ids, slots.counts, pair[0], pair[1]
    if i < 0:
        a, b, i, j = b, a, j, i
    if j >= 0:
        for k in range(rows.shape[2]):
            rows[a, i, k], rows[b, j, k] = rows[b, j, k], rows[a, i, k]
        ids[a, i], ids[b, j] = ids[b, j], ids[a, i]
        return
    free, end = counts[b], counts[a] - 1
    for k in range(rows.shape[2]):
        rows[b, free, k] = rows[a, i, k]
        rows[a, i, k] = rows[a, end, k]
    ids[b, free] = ids[a, i]
    ids[a, i] = ids[a, end]
    counts[a] -= 1
    counts[b] += 1


@kernel
def _visit(
    slots: Slots, rules: Rules, pair: Array, noise: Array, heat: np.float32, state: np.uint64, sums: Array,
    cost: Array, pull: Array,
) -> None:  # fmt: skip
    """Make the best exchange between two slots, and again while there is one."""
    counts = slots.counts
    begin, size = np.empty(2, np.int64), np.empty(2, np.int64)
    for side in range(2):
        _add_up(slots, pair[side], sums[side])
    for _ in range(rules.repeats):
        for side in range(2):
            n = counts[pair[side]]
            state = mixed(state)
            size[side] = min(n, rules.pick)
            begin[side] = np.int64(state >> np.uint64(33)) % n
            _leave(
                slots, pair[side], begin[side], size[side], sums[side], sums[1 - side], cost[side], pull[side]
            )
        least, i, j = _best_swap(slots, pair, begin, size, cost, pull, rules.as_lines, noise, heat, state)
        for side in range(2):
            n, m = counts[pair[side]], counts[pair[1 - side]]
            if n > rules.least and m < rules.most:
                state = mixed(state)
                toss = np.int64(state & np.uint64(NOISE - 1))
                price, c = _best_move(
                    size[side], cost[side], pull[side], rules.crowding * (m - n + 1), rules.as_lines, noise[toss:],
                    heat,
                )  # fmt: skip
                if price < least:
                    least = price
                    i, j = (c, -1) if side == 0 else (-1, c)
        if i < 0 and j < 0:
            if size[0] < counts[pair[0]] or size[1] < counts[pair[1]]:
                continue  # other rows come up next
            return
        if i >= 0:
            i = (begin[0] + i) % counts[pair[0]]
        if j >= 0:
            j = (begin[1] + j) % counts[pair[1]]
        change, flip_i, flip_j = _exact(slots, rules, pair, i, j, sums)
        if heat == 0 and change >= 0:  # single precision only thought it a gain
            return
        if flip_i:
            _flip(slots, pair[0], i)
        if flip_j:
            _flip(slots, pair[1], j)
        _apply(slots, pair, i, j)
        for side in range(2):
            _add_up(slots, pair[side], sums[side])


@kernel
def _face(slots: Slots, slot: int, as_lines: bool, total: Array) -> None:
    """Flip rows that pull against the rest of their slot, and note the slot's direction."""
    K = slots.directions.shape[1]
    _add_up(slots, slot, total)
    for _ in range(8 if as_lines else 0):
        flips = 0
        for i in range(slots.counts[slot]):
            along = 0.0
            for k in range(K):
                along += (total[k] - slots.rows[slot, i, k]) * slots.rows[slot, i, k]
            if along < -1e-6:  # below it, round-off could flip for ever
                flips += 1
                _flip(slots, slot, i)
                for k in range(K):
                    total[k] += 2.0 * slots.rows[slot, i, k]
        if flips == 0:
            break
    length = 0.0
    for k in range(K):
        length += total[k] * total[k]
    for k in range(K):
        slots.directions[slot, k] = total[k] / np.sqrt(length) if length > 0 else 0.0


@kernel
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
) -> None:
    """Let every two slots of each bundle order[start:stop] meet once.

    They take the best of all swaps and moves between them (of large slots, of a random run of `pick` rows each),
    and repeat. With heat, each price is lowered by a draw from heat x Exp(1), so that an exchange which costs x is
    taken with a chance that falls like exp(-x / heat).
    """
    sums = np.empty((2, slots.rows.shape[2]))
    cost, pull = np.empty((2, rules.pick), np.float32), np.empty((2, rules.pick), np.float32)
    pair = np.empty(2, np.int64)
    for bundle in range(first, last):
        start = starts[bundle]
        members = stops[bundle] - start
        even = members + (members & 1)
        state = mixed(np.uint64(seed) ^ mixed(np.uint64(start)))
        for turn in range(even - 1):  # a round-robin tournament; an odd one out meets nobody this turn
            for match in range(even // 2):
                x = (turn + match) % (even - 1)
                y = even - 1 if match == 0 else (turn - match) % (even - 1)
                if x < members and y < members:
                    pair[0], pair[1] = order[start + x], order[start + y]
                    state = mixed(state)
                    _visit(slots, rules, pair, noise, heat, state, sums, cost, pull)
        for at in range(start, stops[bundle]):
            _face(slots, order[at], rules.as_lines, sums[0])
