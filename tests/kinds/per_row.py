"""A private step by hand: every row alone, clipped, and summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privet.privacy.rng import SeededRandomness


class Everything(SeededRandomness):
    """Draws every row; its noise is not asked for."""

    def uniform(self, n: int) -> Any:
        return np.zeros(n)


def clipped_sums(
    losses: Iterable[Tensor], parameters: Sequence[Tensor], clip: float
) -> tuple[list[Tensor], list[float]]:
    """Return the sums over rows of their clipped gradients, by parameter, and every row's norm before."""
    sums, norms = [torch.zeros_like(p) for p in parameters], []
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters)
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        norms.append(norm)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, clip / max(norm, 1e-12))
    return sums, norms
