"""Running weighted sums: one reply at a time, memory independent of the number of clients."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from privet.wire import Arrays, Payload


class Merger(Protocol):
    """Takes the valid replies of one phase, in any order."""

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Take one reply."""
        ...

    def mean(self) -> Payload:
        """Return what the phase comes to; called once, after at least one reply."""
        ...


class WeightedMean:
    """``sum_k w_k x_k / sum_k w_k`` of the adapter and head arrays.

    The sum is kept as an unevaluated pair of float64 (Knuth's two-sum), about 32 digits, so that the float32
    result does not depend on the order in which replies arrive.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._weights: list[float] = []

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Add one reply with a positive weight."""
        if not weight > 0:
            raise ValueError(f"weight {weight} of {node} is not positive")
        self._weights.append(weight)
        for part, arrays in (("adapter", payload.adapter), ("head", payload.head)):
            for name, value in arrays.items():
                term = value.double() * weight
                high, low = self._sums.get((part, name), (torch.zeros_like(term), torch.zeros_like(term)))
                total = high + term
                shift = total - high
                low = low + ((high - (total - shift)) + (term - shift))
                self._sums[part, name] = (total, low)

    def mean(self) -> Payload:
        """Return the weighted mean as float32 arrays."""
        parts: dict[str, Arrays] = {"adapter": {}, "head": {}}
        total = math.fsum(self._weights)
        for (part, name), (high, low) in self._sums.items():
            parts[part][name] = ((high + low) / total).float()
        return Payload(**parts)
