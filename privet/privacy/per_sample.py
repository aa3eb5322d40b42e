"""Linear layers that hand out what per-example gradients are made of.

While tapped, a layer computes its ordinary output and its ordinary input gradient, but in the backward pass
it gives its input and its output gradient to a recorder and leaves out the batch gradient of its weight,
which differentially private training has no use for. The layer's class, parameters, hooks and state dict stay
as they are. Of a LoRA pair whose A is frozen, B can be tapped so that the recorder gets the input of A.
"""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.module_tracker import ModuleTracker
from transformers.pytorch_utils import Conv1D

from privet.errors import ConfigError

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
    """``x W^T + b`` with the recorder in place of the gradients of W and b.

    The recorder gets x, or `seen` in its place: for the outer half of a LoRA pair, the input of the pair.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seen: Tensor | None,
        transposed: bool,
        record: Recorder,
    ) -> Tensor:
        ctx.transposed, ctx.record, ctx.dtype = transposed, record, x.dtype
        ctx.save_for_backward(x if seen is None else seen, weight)
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        seen, weight = ctx.saved_tensors
        ctx.record(seen, g)
        # Earlier layers need this gradient whether or not this layer's own weight trains.
        gx = None
        if ctx.needs_input_grad[0]:
            gx = g.matmul((weight.t() if ctx.transposed else weight).to(g.dtype)).to(ctx.dtype)
        return gx, None, None, None, None, None


class StandIn(ABC):
    """Stands in for the `forward` of one linear layer from :meth:`insert` to :meth:`remove`.

    A deep copy of such a layer is a plain layer: nothing that happens to a copy of a model reaches the
    recorder of the original.

    Parameters
    ----------
    module : nn.Module
        A layer for which :func:`is_linear` holds.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
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

    @property
    def missed(self) -> bool:
        """Whether, since :meth:`reset`, the layer was used but no backward pass came by, as it should have."""
        return False

    @abstractmethod
    def reset(self) -> None:
        """Forget what happened."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return what the layer computes for x (rows, ..., n)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> types.MethodType:
        return types.MethodType(type(self.module).forward, copy.deepcopy(self.module, memo))


class Tap(StandIn):
    """Gives a layer's input and output gradient to a recorder.

    Parameters
    ----------
    module : nn.Module
        A layer for which :func:`is_linear` holds.
    record : Recorder
        Called in the backward pass, once for every use of the layer since.
    """

    def __init__(self, module: nn.Module, record: Recorder) -> None:
        self._recorder = record
        super().__init__(module)

    def reset(self) -> None:
        """Forget whether the layer was used."""
        self._uses = 0
        self._records = 0

    @property
    def missed(self) -> bool:
        """Whether the layer was used but no backward pass came by."""
        return self._uses > 0 and self._records == 0

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102
        # Within a backward pass, checkpointing repeats a use that is counted already.
        self._uses += not _TRACKER.is_bw
        weight, bias, seen = self.module.weight, self.module.bias, self._seen(x)
        out: Tensor = _TappedLinear.apply(x, weight, bias, seen, is_transposed(self.module), self._record)
        return out

    def _seen(self, x: Tensor) -> Tensor | None:
        """Return what the recorder is to get in place of x."""
        return None

    def _record(self, x: Tensor, g: Tensor) -> None:
        self._recorder(x, g)
        self._records += 1


#: Says whether a backward pass is running; it tracks no module unless entered.
_TRACKER = ModuleTracker()


class InputKeeper(StandIn):
    """Keeps the input of a frozen layer until the layer that reads its output asks for it.

    The frozen layer's own backward pass is no use for this: it does not run where the input needs no gradient.
    """

    def reset(self) -> None:
        """Drop the input."""
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102
        out: Tensor = type(self.module).forward(self.module, x)
        self._kept = (x.detach(), out)
        return out

    def take(self, out: Tensor) -> Tensor | None:
        """Return the input from which the layer has just computed `out`; None if `out` is anything else."""
        kept, self._kept = self._kept, None
        return kept[0] if kept is not None and kept[1] is out else None


class OuterTap(Tap):
    """Taps the outer layer of a product ``W_outer W_inner``, whose recorder gets the input of the inner one.

    Parameters
    ----------
    module : nn.Module
        The outer layer, for which :func:`is_linear` holds.
    record : Recorder
        Called with the *inner* layer's input and the outer layer's output gradient.
    inner : InputKeeper
        Stands in for the inner layer.
    complete : callable
        Called when every use of the layer so far has been recorded, so that none is to come. It may stay away:
        uses without a gradient (an evaluation) are not told from uses that get theirs later.
    name : str
        For messages.
    """

    def __init__(
        self,
        module: nn.Module,
        record: Recorder,
        inner: InputKeeper,
        complete: Callable[[], None],
        name: str,
    ) -> None:
        self._inner = inner
        self._complete = complete
        self._name = name
        super().__init__(module, record)

    def _seen(self, x: Tensor) -> Tensor:
        seen = self._inner.take(x)
        if seen is None:
            raise ConfigError(
                f"{self._name} does not read the output of its A unchanged: no clip on the product"
            )
        return seen

    def _record(self, x: Tensor, g: Tensor) -> None:
        super()._record(x, g)
        if self._records == self._uses:
            self._complete()
