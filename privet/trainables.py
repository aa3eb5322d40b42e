"""What a client trains: which numbers the optimiser owns, and how they reach the model.

:class:`Factors` trains LoRA factors and head parameters in place. :class:`Projected` trains FedHSIP's short
vector and writes its expansion into the factors after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from privet.adapters import AdaptedModel, TargetModule
from privet.privacy.pullback import Pullback
from privet.projection import Projection, unflatten

THETA = "theta"


class Trainables(Protocol):
    """The interface between a method's client half and the local trainer."""

    @property
    def model_names(self) -> Sequence[str]:
        """Model parameters whose gradients are needed."""
        ...

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """What the optimiser updates, by name."""
        ...

    @property
    def projection(self) -> tuple[Projection, Sequence[str]] | None:
        """The projection and the model parameters it covers, in its order; None without one."""
        ...

    @property
    def products(self) -> Sequence[TargetModule]:
        """Targets that clip an example by the gradient of their whole weight, while only their B trains."""
        ...

    @property
    def pullbacks(self) -> Sequence[Pullback]:
        """Model parameters that are written from leaves, by their names here, and the chain rule of each."""
        ...

    def collect(self) -> None:
        """Without privacy: turn the model's autograd gradients into gradients of the leaves."""
        ...

    def refresh(self) -> None:
        """Bring the model up to date with the leaves after a step."""
        ...


class Factors:
    """Model parameters trained in place.

    Parameters
    ----------
    model : AdaptedModel
        Holds the parameters.
    names : sequence of str
        Which of them train.
    clip_products : bool
        Under privacy, clip and noise the gradient of the whole weight of every target whose B trains, in place of
        that of B (FedASK). A must not train then.
    """

    projection = None
    pullbacks: tuple[Pullback, ...] = ()

    def __init__(self, model: AdaptedModel, names: Sequence[str], *, clip_products: bool = False) -> None:
        self.model_names = tuple(names)
        self.products = tuple(t for t in model.spec.targets if clip_products and t.b in self.model_names)
        self.leaves = {n: model.parameter(n) for n in names}

    def collect(self) -> None:
        """Nothing to do: autograd wrote the leaves' own gradients."""

    def refresh(self) -> None:
        """Nothing to do: the optimiser changed the model itself."""


class Projected:
    """FedHSIP's vector theta (d,) and the head: ``factors = offset + P theta``.

    Parameters
    ----------
    model : AdaptedModel
        Receives the expansion.
    projection : Projection
        P, over the row-flattened factors in the order of `offset`.
    theta : Tensor (d,)
        Start value.
    offset : mapping of name to Tensor
        theta_D at theta = 0, in the order of FedHSIP's concatenation.
    head : sequence of str
        Head parameters trained next to theta.
    """

    products: tuple[TargetModule, ...] = ()
    pullbacks: tuple[Pullback, ...] = ()

    def __init__(
        self,
        model: AdaptedModel,
        projection: Projection,
        theta: Tensor,
        offset: Mapping[str, Tensor],
        head: Sequence[str],
    ) -> None:
        self._model = model
        self._order = tuple(offset)
        self._shapes = {n: tuple(v.shape) for n, v in offset.items()}
        self._rule = projection.to(model.device)
        self._offset = {n: v.to(model.device) for n, v in offset.items()}
        self.theta = nn.Parameter(theta.to(model.device, torch.float32, copy=True))
        self.model_names = (*self._order, *head)
        self.leaves = {THETA: self.theta, **{n: model.parameter(n) for n in head}}
        self.refresh()

    @property
    def projection(self) -> tuple[Projection, Sequence[str]]:
        """P and the names it covers."""
        return self._rule, self._order

    @torch.no_grad()
    def collect(self) -> None:
        """Set theta's gradient to ``P^T g_D``."""
        grads = []
        for name in self._order:
            parameter = self._model.parameter(name)
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            grads.append(grad.flatten().float())
            parameter.grad = None
        self.theta.grad = self._rule.project(torch.cat(grads))

    @torch.no_grad()
    def refresh(self) -> None:
        """Write ``offset + P theta`` into the model."""
        for name, piece in unflatten(self._rule.expand(self.theta), self._shapes).items():
            self._model.parameter(name).copy_(self._offset[name] + piece)
