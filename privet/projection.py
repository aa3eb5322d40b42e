"""FedHSIP's projection: one short vector drives every LoRA coordinate through a signed assignment.

``theta_D = P theta_d`` with ``P[i, slot(i)] = sign(i) / sqrt(n_slot(i))`` and zero elsewhere (FedHSIP, eq. 6
to 8). As every slot is used, ``P^T P = I``: expanding and projecting are adjoint, and projecting a gradient
never lengthens it. Uni-LoRA is the case of a random assignment with all signs positive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Projection:
    """A signed assignment of D coordinates to d slots.

    Parameters
    ----------
    slots : Tensor, int64 (D,)
        Slot of each coordinate, in ``[0, d)``.
    signs : Tensor, float32 (D,)
        +1 or -1 for each coordinate.
    d : int
        Number of slots; none may be empty.
    """

    slots: Tensor
    signs: Tensor
    d: int

    def __post_init__(self) -> None:
        if self.slots.ndim != 1 or self.slots.shape != self.signs.shape:
            raise ValueError("slots and signs must be vectors of one length")
        if self.slots.numel() and not 0 <= int(self.slots.min()) <= int(self.slots.max()) < self.d:
            raise ValueError(f"a slot lies outside 0..{self.d - 1}")
        if not bool((self.signs.abs() == 1).all()):
            raise ValueError("a sign is neither +1 nor -1")
        if int(self.counts.min()) == 0:
            raise ValueError("a slot is empty")

    @cached_property
    def counts(self) -> Tensor:
        """Coordinates of each slot, int64 (d,)."""
        return torch.bincount(self.slots, minlength=self.d)

    @cached_property
    def coefficients(self) -> Tensor:
        """The non-zero entry of each row of P, float32 (D,)."""
        return self.signs * self.counts.to(torch.float32).rsqrt()[self.slots]

    def to(self, device: torch.device) -> Projection:
        """Return the same rule on a device."""
        return Projection(self.slots.to(device), self.signs.to(device), self.d)

    def expand(self, theta: Tensor) -> Tensor:
        """Return ``P theta`` (D,) of a vector (d,)."""
        return theta[self.slots] * self.coefficients.to(theta.dtype)

    def project(self, values: Tensor) -> Tensor:
        """Return ``P^T values`` (d,) of a vector (D,)."""
        out = torch.zeros(self.d, dtype=values.dtype, device=values.device)
        return out.index_add_(0, self.slots, values * self.coefficients.to(values.dtype))


def flatten(values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Concatenate the named arrays, row by row and in the order of `shapes`, to one vector (D,)."""
    return torch.cat([values[n].flatten() for n in shapes])


def unflatten(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Undo :func:`flatten`; the results are views of `vector`."""
    pieces = torch.split(vector, [math.prod(s) for s in shapes.values()])
    return {n: piece.view(s) for (n, s), piece in zip(shapes.items(), pieces, strict=True)}


def default_dimension(D: int) -> int:
    """d = D / 6.4: 46 080 for RoBERTa-base at rank 8, as in FedHSIP's Table 4."""
    return max(1, round(D / 6.4))


def random_projection(D: int, d: int, seed: int) -> Projection:
    """Return a balanced random assignment with positive signs (Uni-LoRA).

    Every slot holds floor(D / d) or ceil(D / d) coordinates.
    """
    order = np.random.default_rng(seed).permutation(D)
    slots = np.empty(D, dtype=np.int64)
    slots[order] = np.arange(D) % d
    return Projection(torch.from_numpy(slots), torch.ones(D), d)


def unit_profiles(profiles: Floats, tol: float = 1e-12) -> Floats:
    """Return the rows of `profiles` (D x K) at length one; rows shorter than `tol` become zero."""
    norms = np.linalg.norm(profiles, axis=1, keepdims=True)
    return np.where(norms > tol, profiles / np.maximum(norms, tol), 0.0)


def objective(
    slots: NDArray[np.int64],
    signs: Floats,
    profiles: Floats,
    sensitivity: Floats,
    energy: Floats,
    heterogeneity: Floats,
    d: int,
    coefficients: tuple[float, float, float, float, float] = (1, 1, 1, 1, 1),
) -> float:
    """Return FedHSIP's assignment objective (eq. 12).

    Sum over slots of alpha x conflict + beta (S - mean S)^2 + gamma (E - mean E)^2 + eta (H - mean H)^2
    + lambda (n - D/d)^2. The conflict of a slot is the sum over its pairs of ``1 - cos``, by the closed form
    ``C(n, 2) - (||sum x||^2 - sum ||x||^2) / 2`` with x the signed unit profiles.

    Parameters
    ----------
    slots, signs : arrays (D,)
        The assignment.
    profiles : array (D, K)
        Update direction of each coordinate over the K clients; scaled to length one here.
    sensitivity, energy, heterogeneity : arrays (D,)
        Loads s, e, h, already on the scale in which they are to count.
    d : int
        Number of slots.
    coefficients : tuple of float
        alpha (conflict), beta (sensitivity), gamma (energy), eta (heterogeneity), lambda (count).
    """
    alpha, beta, gamma, eta, lam = coefficients
    x = unit_profiles(profiles) * signs[:, None]
    n = np.bincount(slots, minlength=d).astype(np.float64)
    length = np.bincount(slots, weights=(x * x).sum(1), minlength=d)
    total = np.zeros(d)
    for k in range(x.shape[1]):
        total += np.bincount(slots, weights=x[:, k], minlength=d) ** 2
    value = alpha * float((n * (n - 1) / 2 - (total - length) / 2).sum())
    for weight, load in ((beta, sensitivity), (gamma, energy), (eta, heterogeneity)):
        sums = np.bincount(slots, weights=load, minlength=d)
        value += weight * float(((sums - sums.mean()) ** 2).sum())
    return value + lam * float(((n - len(slots) / d) ** 2).sum())


def normalise(load: Floats) -> Floats:
    """Scale a non-negative load to mean one, so that s, e, h and the count weigh alike in eq. 12."""
    mean = float(load.mean())
    return load / mean if mean > 0 else np.ones_like(load)


def assign_slots(
    profiles: Floats,
    sensitivity: Floats,
    energy: Floats,
    heterogeneity: Floats,
    d: int,
    *,
    coefficients: tuple[float, float, float, float, float] = (1, 1, 1, 1, 1),
    balance: Literal["soft", "hard"] = "soft",
    align_signs: bool = True,
    seed: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Assign D coordinates to d balanced slots so that coordinates of a slot pull the same way.

    The profiles' lines are cut into groups of neighbours by halving along the direction of largest spread,
    level by level, until a group is one slot; the loads s, e, h are then evened out by exchanging coordinates
    between neighbouring slots wherever eq. 12 falls. Deterministic for a seed; O(D K log d).

    Parameters
    ----------
    profiles : array (D, K)
        u, one row a coordinate.
    sensitivity, energy, heterogeneity : arrays (D,)
        s, e, h; scaled to mean one here.
    d : int
        Number of slots, at most D.
    coefficients : tuple of float
        alpha, beta, gamma, eta, lambda of eq. 12.
    balance : {"soft", "hard"}
        Whether lambda decides the slots' sizes; this solver keeps them at floor or ceil of D / d either way.
    align_signs : bool
        Choose signs; without, all are +1.
    seed : int
        Drives the start of the power iterations.

    Returns
    -------
    slots : int64 (D,)
        Slot of each coordinate; every slot holds floor(D / d) or ceil(D / d).
    signs : int8 (D,)
        +1 or -1 for each coordinate.
    """
    D = len(profiles)
    if not 1 <= d <= D:
        raise ValueError(f"d = {d} is not allowed: between 1 and D = {D}")
    x = unit_profiles(np.asarray(profiles, dtype=np.float64))
    signs = np.where((x @ _leading_direction(x, seed) < 0) & align_signs, -1.0, 1.0)
    x *= signs[:, None]
    order = _line_order(x, d, seed)
    bounds = (np.arange(d + 1) * D + d - 1) // d
    slots = np.empty(D, dtype=np.int64)
    slots[order] = np.repeat(np.arange(d), np.diff(bounds))
    if align_signs:
        signs *= _slot_signs(x, slots, d)
    loads = np.stack([normalise(v) for v in (sensitivity, energy, heterogeneity)], axis=1)
    _exchange(slots, signs, unit_profiles(profiles), loads, order, bounds, coefficients, align=align_signs)
    return slots, signs.astype(np.int8)


def _leading_direction(x: Floats, seed: int) -> Floats:
    """First right singular vector of x (D x K), by the K x K Gram matrix."""
    _, vectors = np.linalg.eigh(x.T @ x)
    leading: Floats = vectors[:, -1]
    return leading * (1.0 if leading[np.abs(leading).argmax()] >= 0 else -1.0)


def _line_order(x: Floats, d: int, seed: int) -> NDArray[np.int64]:
    """Order the rows so that consecutive slots hold neighbouring directions (level-by-level halving)."""
    D, K = x.shape
    rng = np.random.default_rng(seed)
    order = np.arange(D)
    cuts = np.array([0, d])
    while np.diff(cuts).max() > 1:
        starts = (cuts[:-1] * D + d - 1) // d
        sizes = np.diff((cuts * D + d - 1) // d)
        node = np.repeat(np.arange(len(sizes)), sizes)
        rows = x[order]
        centred = rows - (np.add.reduceat(rows, starts, axis=0) / sizes[:, None])[node]
        direction = rng.standard_normal((len(sizes), K))
        for _ in range(4):
            along = np.einsum("ij,ij->i", centred, direction[node])
            direction = np.add.reduceat(centred * along[:, None], starts, axis=0)
            direction /= np.linalg.norm(direction, axis=1, keepdims=True) + 1e-300
        along = np.einsum("ij,ij->i", centred, direction[node])
        order = order[np.lexsort((order, along, node))]
        middle = cuts[:-1] + (np.diff(cuts) + 1) // 2
        cuts = np.unique(np.concatenate([cuts, middle]))
    return order


def _slot_signs(x: Floats, slots: NDArray[np.int64], d: int) -> Floats:
    """Flip rows against their slot's own leading direction; rows at the half-space's edge need it."""
    signs = np.ones(len(x))
    for _ in range(3):
        y = x * signs[:, None]
        sums = np.stack([np.bincount(slots, weights=y[:, k], minlength=d) for k in range(x.shape[1])], axis=1)
        against = np.einsum("ij,ij->i", y, sums[slots] - y) < 0
        # Flipping several rows of one slot at once could raise the conflict; flip the worst of each slot.
        worst = np.lexsort((np.einsum("ij,ij->i", y, sums[slots]), slots))
        first = np.unique(slots[worst], return_index=True)[1]
        pick = worst[first]
        pick = pick[against[pick]]
        if not len(pick):
            break
        signs[pick] *= -1
    return signs


def _exchange(
    slots: NDArray[np.int64],
    signs: Floats,
    x: Floats,
    loads: Floats,
    order: NDArray[np.int64],
    bounds: NDArray[np.int64],
    coefficients: tuple[float, float, float, float, float],
    sweeps: int = 4,
    align: bool = True,
) -> None:
    """Swap one coordinate between neighbouring slots wherever eq. 12 falls; counts stay as they are.

    Slots are paired (0,1), (2,3), ... then (1,2), (3,4), ...; all pairs of a sweep are disjoint, so their best
    swaps are found and applied together. Changes `slots` and `signs` in place.
    """
    alpha, beta, gamma, eta, _ = coefficients
    weights = np.array([beta, gamma, eta])
    d = len(bounds) - 1
    width = int(np.diff(bounds).max())
    members = np.full((d, width), -1)
    for column in range(width):
        has = np.diff(bounds) > column
        members[has, column] = order[bounds[:-1][has] + column]
    for sweep in range(sweeps):
        left = np.arange(sweep % 2, d - 1, 2)
        if not len(left):
            break
        a, b = members[left], members[left + 1]
        xa, xb = _gather(x * signs[:, None], a), _gather(x * signs[:, None], b)
        la, lb = _gather(loads, a), _gather(loads, b)
        sum_a, sum_b = xa.sum(1), xb.sum(1)
        load_a, load_b = la.sum(1), lb.sum(1)
        # Conflict falls by half the rise of ||sum||^2; a moved row takes the sign that suits its new slot.
        rest_a = sum_a[:, None] - xa
        rest_b = sum_b[:, None] - xb
        keep_a = np.einsum("pik,pik->pi", rest_a, xa)
        keep_b = np.einsum("pjk,pjk->pj", rest_b, xb)
        into_b = np.einsum("pjk,pik->pij", rest_b, xa)
        into_a = np.einsum("pik,pjk->pij", rest_a, xb)
        if align:
            into_b, into_a = np.abs(into_b), np.abs(into_a)
        delta = alpha * (keep_a[:, :, None] + keep_b[:, None, :] - into_b - into_a)
        shift = lb[:, None, :, :] - la[:, :, None, :]
        gap = (load_a - load_b)[:, None, None, :]
        delta = delta + np.einsum("pijq,q->pij", 2 * shift * (shift + gap), weights)
        delta[(a[:, :, None] < 0) | (b[:, None, :] < 0)] = np.inf
        flat = delta.reshape(len(left), -1)
        best = flat.argmin(1)
        gain = flat[np.arange(len(left)), best] < -1e-9
        i, j = np.unravel_index(best, (width, width))
        for pair in np.flatnonzero(gain):
            p, q = a[pair, i[pair]], b[pair, j[pair]]
            slots[p], slots[q] = slots[q], slots[p]
            members[left[pair], i[pair]], members[left[pair] + 1, j[pair]] = q, p
            if not align:
                continue
            new_p = np.sign(rest_b[pair, j[pair]] @ (x[p] * signs[p])) or 1.0
            new_q = np.sign(rest_a[pair, i[pair]] @ (x[q] * signs[q])) or 1.0
            signs[p] *= new_p
            signs[q] *= new_q


def _gather(values: Floats, rows: NDArray[np.int64]) -> Floats:
    """Rows of `values` by index, zero where the index is -1."""
    return np.where((rows >= 0)[..., None], values[np.maximum(rows, 0)], 0.0)
