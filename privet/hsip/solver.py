"""The solver of FedHSIP's assignment (eq. 12)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from privet.hsip.grouping import Ints, Workers, bundle, order_coordinates
from privet.hsip.objective import Coefficients, Floats, normalise, unit_profiles
from privet.hsip.slots import Rules, Slots, fill

BUNDLE = 16
"""Slots that meet each other in one pass, about."""

PICK = 16
"""Rows of a slot that a visit considers at most."""

PASSES = 16
ANNEALED_PASSES = 800
ANNEALED_BELOW = 20_000
"""Below so many coordinates there is time to anneal."""

HEAT = (1.2, 0.25)
"""Temperature at the start and the end of annealing, as a share of what a coordinate costs after the first passes."""

_CHUNK = 1 << 16


def assign_slots(
    profiles: Floats,
    sensitivity: Floats,
    energy: Floats,
    heterogeneity: Floats,
    d: int,
    *,
    coefficients: Coefficients = (1, 1, 1, 1, 1),
    balance: Literal["soft", "hard"] = "soft",
    align_signs: bool = True,
    seed: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Assign D coordinates to d slots so that coordinates of a slot pull the same way and loads are even.

    A local search for the minimum of :func:`privet.hsip.objective.objective` with s, e and h scaled to mean one.
    Coordinates are first cut into slots of like direction by repeated halving. Then, pass by pass, slots are
    gathered in bundles around random anchors; any two slots of a bundle meet and take the best of all swaps and
    moves between them while the objective falls. Below 20 000 coordinates, passes that also accept rises,
    ever fewer, lie in between; their result is kept if it is better.

    Time and memory are near-linear in D. The result depends on the arguments only, not on threads or time.

    Parameters
    ----------
    profiles : array (D, K)
        u, one row a coordinate. A row of zeros has cosine 0 with every other.
    sensitivity, energy, heterogeneity : arrays (D,)
        s, e, h, at least zero; scaled to mean one here.
    d : int
        Number of slots, at most D.
    coefficients : tuple of float
        alpha (conflict), beta (sensitivity), gamma (energy), eta (heterogeneity), lambda (count).
    balance : {"soft", "hard"}
        ``hard``: every slot holds floor(D / d) or ceil(D / d). ``soft``: sizes are left to lambda, up to
        1.5 D / d + 3.
    align_signs : bool
        Choose signs, so that a profile and its negative are alike; otherwise all are +1.
    seed : int
        Drives whatever is drawn at random.

    Returns
    -------
    slots : int64 (D,)
        Slot of each coordinate; none is empty.
    signs : int8 (D,)
        +1 or -1 for each coordinate.

    Raises
    ------
    ValueError
        An argument has the wrong shape, is out of range or is not finite.
    """
    loads = _check(profiles, (sensitivity, energy, heterogeneity), d, coefficients, balance)
    alpha, *weights, lam = (float(c) for c in coefficients)
    rng = np.random.default_rng(seed)
    D = len(profiles)
    # With alpha = 0 profiles still settle ties and signs; this small they settle nothing else.
    scale = math.sqrt(alpha or 1e-9 * (sum(weights) + lam or 1.0))
    rows = np.empty(profiles.shape, np.float32)
    for at in range(0, D, _CHUNK):
        rows[at : at + _CHUNK] = scale * unit_profiles(np.asarray(profiles[at : at + _CHUNK], np.float64))
    heavy = np.stack(
        [math.sqrt(w) * normalise(v).astype(np.float32) for w, v in zip(weights, loads, strict=True)], axis=1
    )
    soft = balance == "soft"
    with Workers() as workers:
        order = order_coordinates(rows, d, align_signs, rng, workers)
        slots = fill(rows, heavy, order, d, soft)
        rules = Rules(
            least=1 if soft else D // d,
            most=slots.rows.shape[1],
            crowding=alpha + 2 * lam,
            as_lines=align_signs,
            pick=PICK,
            repeats=max(2, math.ceil(D / d / 8)),
        )
        del rows, heavy, order
        _Search(slots, rules, alpha, lam, rng, workers).run()
    return _read(slots, profiles)


def _check(
    profiles: Floats, loads: tuple[Floats, ...], d: int, coefficients: Coefficients, balance: str
) -> list[Floats]:
    """Return the loads as float64 vectors, or raise ValueError with one clear line."""
    shape = np.shape(profiles)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"profiles of shape {shape} are not allowed: D x K, neither of them 0")
    if not np.isfinite(profiles).all():
        raise ValueError("profiles hold a value that is not finite")
    vectors = [np.asarray(v, np.float64) for v in loads]
    for name, vector in zip(("sensitivity", "energy", "heterogeneity"), vectors, strict=True):
        if vector.shape != shape[:1]:
            raise ValueError(f"{name} of shape {vector.shape} does not fit {shape[0]} profiles")
        if not (np.isfinite(vector).all() and (vector >= 0).all()):
            raise ValueError(f"{name} holds a value that is negative or not finite")
    if not 1 <= d <= shape[0] or int(d) != d:
        raise ValueError(f"d = {d} is not allowed: between 1 and D = {shape[0]}")
    if len(coefficients) != 5 or not all(math.isfinite(c) and c >= 0 for c in coefficients):
        raise ValueError(f"coefficients = {coefficients} are not allowed: five numbers of at least 0")
    if balance not in ("soft", "hard"):
        raise ValueError(f"balance = {balance!r} is not allowed: soft or hard")
    return vectors


class _Search:
    """Local search over the slots, greedy or annealed."""

    def __init__(
        self,
        slots: Slots,
        rules: Rules,
        alpha: float,
        lam: float,
        rng: np.random.Generator,
        workers: Workers,
    ) -> None:
        from privet.hsip.kernels.exchanges import NOISE

        self._slots, self._rules, self._alpha, self._lam = slots, rules, alpha, lam
        self._rng, self._workers = rng, workers
        self._noise = rng.exponential(size=NOISE + rules.pick).astype(np.float32)

    def run(self) -> None:
        """Improve the slots in place."""
        d, D = len(self._slots.counts), int(self._slots.counts.sum())
        alone = np.arange(d)
        self._meet(alone, alone, alone + 1)  # every slot in a bundle of its own only settles its signs
        if d == 1:
            return
        self._passes([0.0] * PASSES)
        if D >= ANNEALED_BELOW:
            return
        plain, (costs, still) = self._slots.copy(), self._costs()
        # The median, as one coordinate with a huge load must not set the temperature for all.
        typical = float(np.median(costs - still)) * d / D
        if typical <= 0:
            return
        self._passes(typical * np.geomspace(*HEAT, ANNEALED_PASSES))
        self._passes([0.0] * PASSES)
        if self._costs()[0].sum() > costs.sum():
            self._slots.restore(plain)

    def _passes(self, heats: Iterable[float]) -> None:
        """Let every two slots of a bundle meet, with new bundles for every pass."""
        for heat in heats:
            found = bundle(self._slots.directions, BUNDLE, self._rules.as_lines, self._rng, self._workers)
            self._meet(*found, heat)

    def _meet(self, order: Ints, starts: Ints, stops: Ints, heat: float = 0.0) -> None:
        from privet.hsip.kernels.exchanges import exchange

        seed = int(self._rng.integers(1 << 62))
        self._workers.each(
            len(starts),
            lambda first, last: exchange(
                self._slots,
                self._rules,
                order,
                starts,
                stops,
                self._noise,
                np.float32(heat),
                seed,
                first,
                last,
            ),
        )

    def _costs(self) -> tuple[Floats, Floats]:
        """Each slot's part of the objective (d,), up to a constant in their sum, and what zero profiles add to it."""
        rows, _, counts, directions = self._slots
        K = directions.shape[1]
        held = np.where((np.arange(rows.shape[1]) < counts[:, None])[..., None], rows, 0).astype(np.float64)
        sums = held.sum(1)
        moving = (held[..., :K] != 0).any(2).sum(1)
        conflict = (self._alpha * counts**2 - (sums[:, :K] ** 2).sum(1)) / 2
        loads = ((sums[:, K:] - sums[:, K:].mean(0)) ** 2).sum(1)
        crowd = self._lam * (counts - counts.mean()) ** 2
        return conflict + loads + crowd, self._alpha * (counts**2 - moving**2) / 2


def _read(slots: Slots, profiles: Floats) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return slot and sign of every coordinate."""
    D, K = profiles.shape
    assigned, signs = np.empty(D, np.int64), np.empty(D, np.int8)
    d, room = slots.ids.shape
    step = max(1, _CHUNK // room)
    for at in range(0, d, step):
        part = slice(at, min(d, at + step))
        slot, place = np.nonzero(np.arange(room) < slots.counts[part, None])
        ids = slots.ids[part][slot, place]
        assigned[ids] = slot + at
        against = np.einsum("ik,ik->i", slots.rows[part][slot, place, :K], profiles[ids]) < 0
        signs[ids] = np.where(against, -1, 1)
    return assigned, signs
