"""Second moments of per-example gradients, coordinate by coordinate: statistics of private rows, without any noise.

FedHSIP's sensitivity s_i where its warm-up is not private (design rule 12 has the private one). Each kind is a mean
over examples of ``f(|g|) g_i^2``:

    moment           f = 1                        the gradient as it is
    clipped_moment   f = (min(1, C / |g|))^2      as the clip leaves it
    clip_rate        f = 1 / |g|^2 if |g| > C     the coordinate's part in the clipped examples: the sum over i is the
                                                  share of examples that the clip cuts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Norms (rows,) and C to factors (rows,).
Weights = Callable[[Tensor, float], Tensor]


def _one(norms: Tensor, clip: float) -> Tensor:
    return torch.ones_like(norms)


def _clipped(norms: Tensor, clip: float) -> Tensor:
    return (clip / norms.clamp_min(clip)).square()


def _cut(norms: Tensor, clip: float) -> Tensor:
    return norms.clamp_min(clip).square().reciprocal().where(norms > clip, 0.0)


KINDS: Mapping[str, Weights] = {"moment": _one, "clipped_moment": _clipped, "clip_rate": _cut}
