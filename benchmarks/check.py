"""Whether the variants compute the same thing: nobody should time a wrong step.

At sigma 0 and a bound that clips nothing, every private gradient must be the non-private one; at a bound that clips
half of the examples, Opacus's must be Privet's. (That Privet clips right is shown in tests/privacy by loops over
batches of one.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.models import Workload
from benchmarks.steps import Mechanism, Private, PrivateProjected, Step
from benchmarks.variants import BY_KEY, PRIVATE, PRIVET, Variant

_NO_CLIP = 1e6


class WrongStepError(AssertionError):
    """A variant's gradient is not what it should be."""


def check(work: Workload, tolerance: float = 1e-4) -> float:
    """Compare all variants on a workload; returns the largest relative difference.

    Raises
    ------
    WrongStepError
        Names the variant whose gradient is off.
    """
    worst = 0.0
    for variant in PRIVATE:
        step = variant.build(work, Mechanism(_NO_CLIP, 0.0))
        plain = BY_KEY[variant.base_key].build(work, Mechanism()).gradients()
        expected = step.project(plain) if isinstance(step, PrivateProjected) else plain
        worst = max(worst, _compare(variant, "unclipped", step, expected, tolerance))
        if variant.engine != PRIVET:
            mechanism, expected = _half_clipped(work, BY_KEY[variant.method, PRIVET])
            worst = max(
                worst, _compare(variant, "clipped", variant.build(work, mechanism), expected, tolerance)
            )
    return worst


def _half_clipped(work: Workload, variant: Variant) -> tuple[Mechanism, dict[str, Tensor]]:
    """Return a mechanism that clips half of the examples, and Privet's gradient under it."""
    probe = variant.build(work, Mechanism(_NO_CLIP, 0.0))
    assert isinstance(probe, Private)
    probe.gradients()
    mechanism = Mechanism(float(probe.norms.median()), 0.0)
    return mechanism, variant.build(work, mechanism).gradients()


def _compare(
    variant: Variant, what: str, step: Step, expected: Mapping[str, Tensor], tolerance: float
) -> float:
    got = step.gradients()
    if got.keys() != expected.keys():
        missing = ", ".join(sorted(got.keys() ^ expected.keys()))
        raise WrongStepError(f"{variant.engine}, {variant.method}: other parameters train: {missing}")
    worst = 0.0
    for name, right in expected.items():
        size = float(torch.linalg.vector_norm(right.double()))
        off = float(torch.linalg.vector_norm((got[name] - right).double())) / size if size else math.inf
        if not off <= tolerance:
            raise WrongStepError(
                f"{variant.engine}, {variant.method}, {what}: the gradient of {name} is off by {off:.1e}"
            )
        worst = max(worst, off)
    return worst
