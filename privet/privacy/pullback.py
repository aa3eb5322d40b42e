"""Clipping in the coordinates that a layer's weight is made of (FedPara).

A tapped layer's weight W is not trained itself: it is written from smaller arrays, its leaves, say as a product
of entries. At the leaves' present values the chain rule is linear in the gradient of W, so every example's
gradient is turned into those of the leaves as soon as the backward pass reaches the layer, and what is clipped,
summed and noised are the leaves' own coordinates: all of them, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from privet.errors import ConfigError
from privet.privacy.parts import Part
from privet.privacy.per_sample import Layout, examples_tokens, sum_dtype

#: Turns gradients of a weight (rows, *weight) into those of its leaves (rows, *leaf), linearly, row by row.
Pull: TypeAlias = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Pullback:
    """A weight that is written from leaves.

    Parameters
    ----------
    weight : str
        Name of the weight, as in ``model.named_parameters()``.
    leaves : mapping of str to tuple of int
        Shapes of the leaves, by name. A leaf belongs to one weight only.
    pull : callable
        The chain rule at the leaves' present values.

    Raises
    ------
    ConfigError
        Without leaves.
    """

    weight: str
    leaves: Mapping[str, tuple[int, ...]]
    pull: Pull

    def __post_init__(self) -> None:
        if not self.leaves:
            raise ConfigError(f"pullbacks: {self.weight} has no leaves")


class PulledPart(Part):
    """Per-example gradients with respect to the leaves of one layer's weight.

    The gradients of the weight itself, one matrix an example, live for one use of the layer only.

    Parameters
    ----------
    pullback : Pullback
        Names, shapes and the chain rule.
    module : nn.Module
        The linear layer that owns the weight.
    """

    def __init__(self, pullback: Pullback, module: nn.Module) -> None:
        self.name = pullback.weight.removesuffix(".weight")
        weight = module.get_parameter("weight")
        self.shapes = {name: torch.Size(shape) for name, shape in pullback.leaves.items()}
        self.device = weight.device
        self.dtype = sum_dtype(weight.dtype)
        self._pull = pullback.pull
        self._layout = Layout.of(module)
        self._kept: dict[str, Tensor] = {}

    def record(self, x: Tensor, g: Tensor) -> None:
        """Add what one use of the layer gives to the leaves; x (rows, ..., n), g (rows, ..., m)."""
        self._check_rows(self.name, g.shape[0])
        # Inside the caller's autocast region the products would be in bfloat16.
        with torch.autocast(g.device.type, enabled=False):
            found = self._layout.gradients(*examples_tokens(x, g.to(self.dtype)))
            pulled = self._pull(found.transpose(1, 2) if self._layout.swapped else found)
        for name, shape in self.shapes.items():
            value = pulled[name].to(self.dtype)
            if value.shape != (g.shape[0], *shape):
                raise ConfigError(
                    f"pullbacks: {name} came as {tuple(value.shape)}, expected {(g.shape[0], *shape)}"
                )
            # A first value may be a view of the weight's gradients, which must not stay alive with it.
            self._kept[name] = self._kept[name].add_(value) if name in self._kept else value.clone()

    @property
    def rows(self) -> int | None:
        """Examples recorded since the last :meth:`clear`."""
        return next((v.shape[0] for v in self._kept.values()), None)

    def squared_norms(self) -> Tensor:
        """Squared norm over all leaves for each example, (rows,)."""
        return torch.stack([v.flatten(1).square().sum(1) for v in self._kept.values()]).sum(0)

    def zero_rows(self, rows: Tensor) -> None:
        """Set the gradients of the selected examples to zero."""
        for value in self._kept.values():
            value[rows] = 0

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """``sum_i factors_i g_i`` of every leaf."""
        return {n: (factors @ v.flatten(1)).view(v.shape[1:]) for n, v in self._kept.items()}

    def clear(self) -> None:
        """Free the gradients."""
        self._kept = {}
