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

import numpy as np
import torch
from torch import Tensor

from privet.hsip.objective import normalise, objective, unit_profiles
from privet.hsip.sketch import profile_sketch
from privet.hsip.solver import assign_slots

__all__ = [
    "Projection",
    "assign_slots",
    "default_dimension",
    "flatten",
    "normalise",
    "objective",
    "profile_sketch",
    "random_projection",
    "unflatten",
    "unit_profiles",
]


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
