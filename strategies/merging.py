"""Running weighted sums: one reply at a time, memory independent of the number of clients."""

from __future__ import annotations

import math
from collections.abc import Collection
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
    """``sum_k w_k x_k / sum_k w_k`` of the adapter and head arrays, each over the replies that hold it.

    The sum is kept as an unevaluated pair of float64 (Knuth's two-sum), about 32 digits, so that the float32
    result does not depend on the order in which replies arrive.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._weights: dict[tuple[str, str], list[float]] = {}

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Add one reply with a positive weight."""
        if not weight > 0:
            raise ValueError(f"weight {weight} of {node} is not positive")
        for part, arrays in (("adapter", payload.adapter), ("head", payload.head)):
            for name, value in arrays.items():
                self._weights.setdefault((part, name), []).append(weight)
                term = value.double() * weight
                high, low = self._sums.get((part, name), (torch.zeros_like(term), torch.zeros_like(term)))
                total = high + term
                shift = total - high
                low = low + ((high - (total - shift)) + (term - shift))
                self._sums[part, name] = (total, low)

    def mean(self) -> Payload:
        """Return the weighted mean as float32 arrays."""
        parts: dict[str, Arrays] = {"adapter": {}, "head": {}}
        for (part, name), (high, low) in self._sums.items():
            total = math.fsum(self._weights[part, name])
            parts[part][name] = ((high + low) / total).float()
        return Payload(**parts)


class KeptMean(WeightedMean):
    """A weighted mean that also keeps every reply, for rounds that may have to do without a node later.

    The one merger whose memory grows with the number of clients; it lives for one round.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replies: dict[str, tuple[Payload, float]] = {}

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Add and keep one reply."""
        super().add(node, payload, weight)
        self._replies[node] = (payload, weight)

    def only(self, nodes: Collection[str]) -> KeptMean:
        """Return the merger as if only these nodes had replied."""
        rest = KeptMean()
        for node, (payload, weight) in self._replies.items():
            if node in nodes:
                rest.add(node, payload, weight)
        return rest
