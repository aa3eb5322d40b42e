"""The solver's state: every slot with its rows side by side, so that a pair of slots is two short reads."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Slots(NamedTuple):
    """All slots with their rows (:mod:`privet.hsip.kernels.exchanges` says what a row is).

    Attributes
    ----------
    rows : float32 (d, room, K + 3)
        Rows of each slot; those beyond its count mean nothing.
    ids : int32 (d, room)
        Which coordinate a row is.
    counts : int64 (d,)
        Rows of each slot.
    directions : float32 (d, K)
        Sum of each slot's profiles, scaled to length one.
    """

    rows: NDArray[np.float32]
    ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    directions: NDArray[np.float32]

    def copy(self) -> Slots:
        """Return an independent copy."""
        return Slots(self.rows.copy(), self.ids.copy(), self.counts.copy(), self.directions.copy())

    def restore(self, other: Slots) -> None:
        """Take over, in place, what `other` holds."""
        self.rows[...], self.ids[...] = other.rows, other.ids
        self.counts[...], self.directions[...] = other.counts, other.directions


class Rules(NamedTuple):
    """What the exchanges may do.

    Attributes
    ----------
    least, most : int
        Bounds of a slot's count.
    crowding : float
        alpha + 2 lambda: what one more row costs a slot, for each that it holds.
    as_lines : bool
        Are a profile and its negative alike, as signs may be chosen?
    pick : int
        Rows of a slot that a visit considers at most.
    repeats : int
        Exchanges in a visit at most.
    """

    least: int
    most: int
    crowding: float
    as_lines: bool
    pick: int
    repeats: int


def slot_bounds(D: int, d: int) -> NDArray[np.int64]:
    """Cut 0..D into d ranges of floor(D / d) or ceil(D / d)."""
    return (np.arange(d + 1) * D + d - 1) // d


def fill(
    profiles: NDArray[np.float32], loads: NDArray[np.float32], order: NDArray[np.int64], d: int, soft: bool
) -> Slots:
    """Put consecutive coordinates of `order` into slots of even size.

    Soft slots have room for half as many again and three more.
    """
    D, K = profiles.shape
    bounds = slot_bounds(D, d)
    counts = np.diff(bounds)
    room = math.ceil(1.5 * D / d) + 3 if soft else -(-D // d)
    slots = Slots(
        np.zeros((d, room, K + 3), np.float32),
        np.zeros((d, room), np.int32),
        counts,
        np.zeros((d, K), np.float32),
    )
    # By place within the slot, so that no temporary array is as large as the rows.
    for place in range(int(counts.max())):
        has = np.flatnonzero(counts > place)
        coordinate = order[bounds[has] + place]
        slots.rows[has, place, :K] = profiles[coordinate]
        slots.rows[has, place, K:] = loads[coordinate]
        slots.ids[has, place] = coordinate
    return slots
