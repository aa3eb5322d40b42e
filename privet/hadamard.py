"""Elementwise products of two low-rank matrices, as one LoRA pair of larger rank (FedPara).

``(B_g A_g) o (B_p A_p)`` has the rank r^2 at most, and by the Khatri-Rao product (each row of one factor times each
row of the other) its factors are written down at once: column (a, b) of the wide B is ``B_g[:, a] o B_p[:, b]``, row
(a, b) of the wide A is ``A_g[a] o A_p[b]``. With "+ 1" on the second product the first pair stands beside them. So
the model runs an ordinary LoRA of rank r^2 or r + r^2, and no m x n matrix is formed for an example or a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from privet.adapters import AdaptedModel, TargetModule
from privet.privacy.pullback import Pullback


def private_b(target: TargetModule) -> str:
    """Name of a target's second B (m x r)."""
    return f"{target.name}.private_B"


def private_a(target: TargetModule) -> str:
    """Name of a target's second A (r x n)."""
    return f"{target.name}.private_A"


def widen(first: Tensor, second: Tensor, *, plus_one: bool) -> Tensor:
    """Return the wide factor (m, r^2), or (m, r + r^2) with `plus_one`, of two of (m, r).

    For A, give and take transposes.
    """
    products = (first[:, :, None] * second[:, None, :]).flatten(1)
    return torch.cat([first, products], 1) if plus_one else products


def pull(gradient: Tensor, first: Tensor, second: Tensor, *, plus_one: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients (rows, m, r) of both factors from those of the wide one (rows, m, r^2 or r + r^2)."""
    rank = first.shape[1]
    start = rank if plus_one else 0
    products = gradient[:, :, start:].unflatten(2, (rank, rank))
    of_first = torch.einsum("imab,mb->ima", products, second)
    if plus_one:
        of_first = of_first + gradient[:, :, :rank]
    return of_first, torch.einsum("imab,ma->imb", products, first)


def dense(b: Tensor, a: Tensor, second_b: Tensor, second_a: Tensor, *, plus_one: bool) -> Tensor:
    """Return ``(B A) o (B_2 A_2 + 1)``, or without the 1, as one matrix (m, n), float64."""
    mask = second_b.double() @ second_a.double()
    return (b.double() @ a.double()) * (mask + 1 if plus_one else mask)


class Hadamard:
    """Both pairs of every target, and head parameters, trained behind wide LoRA factors.

    The model is widened; its next ``load`` makes it narrow again.

    Parameters
    ----------
    model : AdaptedModel
        Receives the wide factors.
    values : mapping of name to Tensor
        Start values: each target's A and B, and its second pair by :func:`private_a` and :func:`private_b`.
    head : sequence of str
        Head parameters trained next to them.
    plus_one : bool
        Whether 1 is added to the second product.
    """

    projection = None
    products: tuple[TargetModule, ...] = ()

    def __init__(
        self, model: AdaptedModel, values: Mapping[str, Tensor], head: Sequence[str], *, plus_one: bool
    ) -> None:
        self._model = model
        self._plus_one = plus_one
        targets, rank = model.spec.targets, model.spec.rank
        names = [n for t in targets for n in (t.b, t.a, private_b(t), private_a(t))]
        kind = model.parameter(names[0]).dtype  # float32 outside of tests
        self._factors = {n: nn.Parameter(values[n].to(model.device, kind, copy=True)) for n in names}
        self.leaves = {**self._factors, **{n: model.parameter(n) for n in head}}
        self.model_names = (*model.spec.lora, *head)
        # A wide factor, its two leaves, and whether all three stand transposed in the formulas.
        self._wide = [w for t in targets for w in ((t.b, private_b(t), False), (t.a, private_a(t), True))]
        self.pullbacks = tuple(
            Pullback(
                name,
                {n: tuple(values[n].shape) for n in (name, second)},
                partial(self._pull, name, second, turned),
            )
            for name, second, turned in self._wide
        )
        model.widen(rank**2 + (rank if plus_one else 0))
        self.refresh()

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return float32 CPU copies of the named factors."""
        return {n: self._factors[n].detach().to("cpu", torch.float32, copy=True) for n in names}

    @torch.no_grad()
    def collect(self) -> None:
        """Set the leaves' gradients by the chain rule."""
        for name, second, turned in self._wide:
            parameter = self._model.parameter(name)
            wide = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for leaf, gradient in self._pull(name, second, turned, wide[None]).items():
                self._factors[leaf].grad = gradient[0].contiguous()
            parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the wide factors into the model."""
        for name, second, turned in self._wide:
            wide = widen(*self._pair(name, second, turned), plus_one=self._plus_one)
            self._model.parameter(name).copy_(wide.t() if turned else wide)

    def _pair(self, name: str, second: str, turned: bool) -> tuple[Tensor, Tensor]:
        pair = (self._factors[name].detach(), self._factors[second].detach())
        return (pair[0].t(), pair[1].t()) if turned else pair

    def _pull(self, name: str, second: str, turned: bool, gradient: Tensor) -> dict[str, Tensor]:
        """The chain rule: gradients of a wide factor (rows, *shape) to those of its two leaves."""
        first_leaf, second_leaf = (v.to(gradient.dtype) for v in self._pair(name, second, turned))
        wide = gradient.transpose(1, 2) if turned else gradient
        found = pull(wide, first_leaf, second_leaf, plus_one=self._plus_one)
        return {n: v.transpose(1, 2) if turned else v for n, v in zip((name, second), found, strict=True)}
