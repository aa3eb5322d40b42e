"""Linear layers that hand out what per-example gradients are made of.

While tapped, a layer computes its ordinary output and its ordinary input gradient, but in the backward pass
it gives its input and its output gradient to a recorder and leaves out the batch gradient of its weight,
which differentially private training has no use for. The layer's class, parameters, hooks and state dict stay
as they are.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

#: Takes a layer's input (rows, ..., n) and output gradient (rows, ..., m), once for every use of the layer.
Recorder: TypeAlias = Callable[[Tensor, Tensor], None]


def is_linear(module: nn.Module) -> bool:
    """Whether `module` computes ``x W^T + b`` (`nn.Linear`) or ``x W + b`` (`Conv1D`), and nothing else.

    A subclass with a forward of its own (a quantised layer) does not count, nor does a layer whose forward
    someone replaced.
    """
    return getattr(module.forward, "__func__", None) in (nn.Linear.forward, Conv1D.forward)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as (n, m), inputs first, as in GPT-2's `Conv1D`."""
    return isinstance(module, Conv1D)


def examples_tokens(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """View input and output gradient as (rows, tokens, n) and (rows, tokens, m) of one dtype."""
    if x.dim() == 2:
        x, g = x.unsqueeze(1), g.unsqueeze(1)
    elif x.dim() > 3:
        x, g = x.flatten(1, -2), g.flatten(1, -2)
    return x.to(g.dtype), g


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of norms and sums: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Layout:
    """The order in which the weight gradients of one layer are computed.

    A product whose first factor is the narrow one takes a fifth of the time of its transpose on a CPU
    (8 x 384 against 384 x 8), so the narrow side comes first whichever way the weight is stored.

    Attributes
    ----------
    inputs_first : bool
        Whether gradients come out as (rows, n, m) rather than (rows, m, n).
    swapped : bool
        Whether that is the transpose of the stored weight.
    """

    inputs_first: bool
    swapped: bool

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Layout for a linear layer."""
        first, second = module.get_parameter("weight").shape
        swapped = first > second
        return cls(inputs_first=is_transposed(module) != swapped, swapped=swapped)

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        """``sum_t g_t x_t^T`` for each example, at least float32; x is (rows, t, n), g is (rows, t, m)."""
        left, right = (x, g) if self.inputs_first else (g, x)
        return torch.bmm(left.transpose(1, 2), right).to(sum_dtype(g.dtype))

    def swap(self, matrix: Tensor) -> Tensor:
        """Turn a matrix from the order of the weight to that of the gradients, or back."""
        return matrix.t() if self.swapped else matrix


class _TappedLinear(torch.autograd.Function):
    """``x W^T + b`` with the recorder in place of the gradients of W and b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, record: Recorder
    ) -> Tensor:
        ctx.transposed, ctx.record = transposed, record
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.record(x, g)
        # Earlier layers need this gradient whether or not this layer's own weight trains.
        gx = None
        if ctx.needs_input_grad[0]:
            gx = g.matmul((weight.t() if ctx.transposed else weight).to(g.dtype)).to(x.dtype)
        return gx, None, None, None, None


class Tap:
    """Stands in for the `forward` of one linear layer from :meth:`insert` to :meth:`remove`.

    A deep copy of a tapped layer is a plain layer: nothing that happens to a copy of a model reaches the
    recorder of the original.

    Attributes
    ----------
    called, recorded : bool
        Whether, since :meth:`reset`, a forward pass used the layer and a backward pass came by.

    Parameters
    ----------
    module : nn.Module
        A layer for which :func:`is_linear` holds.
    record : Recorder
        Called in the backward pass, once for every use of the layer since.
    """

    def __init__(self, module: nn.Module, record: Recorder) -> None:
        self.module = module
        self._recorder = record
        self._replaced: dict[str, Any] = {}
        self.reset()

    def insert(self) -> None:
        """Replace the layer's forward."""
        instance = self.module.__dict__
        self._replaced = {"forward": instance["forward"]} if "forward" in instance else {}
        instance["forward"] = self

    def remove(self) -> None:
        """Put back what :meth:`insert` replaced."""
        del self.module.__dict__["forward"]
        self.module.__dict__.update(self._replaced)
        self._replaced = {}

    def reset(self) -> None:
        """Forget whether the layer was used."""
        self.called = False
        self.recorded = False

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102
        self.called = True
        weight, bias = self.module.weight, self.module.bias
        out: Tensor = _TappedLinear.apply(x, weight, bias, is_transposed(self.module), self._record)
        return out

    def _record(self, x: Tensor, g: Tensor) -> None:
        self._recorder(x, g)
        self.recorded = True

    def __deepcopy__(self, memo: dict[int, Any]) -> types.MethodType:
        return types.MethodType(type(self.module).forward, copy.deepcopy(self.module, memo))
