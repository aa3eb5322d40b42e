"""Linear layers that hand out what per-example gradients are made of.

While tapped, a layer computes its ordinary output and its ordinary input gradient, but in the backward pass
it gives its input and its output gradient to a recorder and leaves out the batch gradient of its weight,
which differentially private training has no use for. The layer's class, parameters, hooks and state dict stay
as they are. Of a LoRA pair whose A is frozen, B can be tapped so that the recorder gets the input of A.
"""

from __future__ import annotations

import copy
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker
from transformers.pytorch_utils import Conv1D

from privet.errors import ConfigError

#: Takes a layer's input (rows, ..., n) and output gradient (rows, ..., m), once for every use of the layer.
Recorder: TypeAlias = Callable[[Tensor, Tensor], None]


def is_linear(module: nn.Module) -> bool:
    """Whether `module` computes ``x W^T + b`` (`nn.Linear`) or ``x W + b`` (`Conv1D`), and nothing else.

    A subclass with a forward of its own (a quantised layer) does not count, nor does a layer whose forward
    someone replaced, whose weight is made from other parameters, or whose weight is read without calling it.
    """
    forward = getattr(getattr(module, _slot(module)), "__func__", None)
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        forward in (nn.Linear.forward, Conv1D.forward)
        and "weight" in own <= {"weight", "bias"}
        and not isinstance(module, NonDynamicallyQuantizableLinear)  # inside of nn.MultiheadAttention
    )


def _slot(module: nn.Module) -> str:
    """Return the attribute that holds a layer's own forward.

    In a model that is spread over devices, Accelerate's hooks wrap it: they move inputs between devices.
    """
    return "_old_forward" if "_hf_hook" in module.__dict__ else "forward"


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


#: Layers that fold the tokens of all examples into one dimension, (b, t, n) to (b t, n), and the names of
#: the linear layers in them that see the result.
_FOLDING = {"OPTDecoderLayer": ("fc1", "fc2")}


class Fold:
    """Takes (b t, n) apart into (b, t, n) again for linear layers inside of a layer that folds.

    The number of examples is that of the folding layer's own input. A model that folds in another order, or that
    is not known to fold, is not covered: the engine refuses its row counts.

    Parameters
    ----------
    layer : nn.Module
        The layer that folds.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._rows = 0
        self._hook: RemovableHandle | None = None

    @classmethod
    def around(cls, model: nn.Module, name: str) -> Fold | None:
        """Return the fold for the linear layer `name` of `model`; None if nothing folds its input."""
        path = name.split(".")
        for depth in range(len(path)):
            layer = model.get_submodule(".".join(path[:depth])) if depth else model
            if path[depth] in _FOLDING.get(type(layer).__name__, ()):
                return cls(layer)
        return None

    def insert(self) -> None:
        """Begin to look at the folding layer's input."""
        self._hook = self._layer.register_forward_pre_hook(self._look, with_kwargs=True)

    def remove(self) -> None:
        """Stop looking."""
        if self._hook is not None:
            self._hook.remove()

    def undone(self, record: Recorder, x: Tensor) -> Recorder:
        """Return `record` for the use of a linear layer on x (b t, n), with both tensors taken apart."""
        if x.dim() != 2:
            return record
        size = (self._rows, -1)
        return lambda x, g: record(x.unflatten(0, size), g.unflatten(0, size))

    def _look(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rows = (args[0] if args else kwargs["hidden_states"]).shape[0]


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
        self._at = "forward"
        self._replaced: dict[str, Any] = {}
        self.reset()

    def insert(self) -> None:
        """Replace the layer's forward."""
        instance = self.module.__dict__
        self._at = _slot(self.module)
        self._replaced = {self._at: instance[self._at]} if self._at in instance else {}
        instance[self._at] = self

    def remove(self) -> None:
        """Put back what :meth:`insert` replaced."""
        del self.module.__dict__[self._at]
        self.module.__dict__.update(self._replaced)
        self._replaced = {}

    @property
    def missed(self) -> str | None:
        """Why the layer got no gradient of a use since :meth:`reset`, where one was due; None if all is well."""
        return None

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

    Attributes
    ----------
    fold : Fold or None
        Takes apart what another layer of the model folds together before this one sees it; None at first.
    """

    def __init__(self, module: nn.Module, record: Recorder) -> None:
        self._recorder = record
        self.fold: Fold | None = None
        super().__init__(module)

    def insert(self) -> None:
        """Replace the layer's forward."""
        super().insert()
        if self.fold is not None:
            self.fold.insert()

    def remove(self) -> None:
        """Put back what :meth:`insert` replaced."""
        super().remove()
        if self.fold is not None:
            self.fold.remove()

    def reset(self) -> None:
        """Forget whether the layer was used."""
        self._uses = 0  # with a gradient to come
        self._records = 0
        self._promised = 0  # uses that a re-entrant checkpoint will repeat in its backward pass
        self._repeated = 0  # records of such repeats
        self._silent = 0  # uses without a gradient: an evaluation, or a part of the model that runs without

    @property
    def missed(self) -> str | None:
        """Why the layer got no gradient of a use since :meth:`reset`, where one was due; None if all is well.

        A use whose output the loss does not depend on is well: its gradient is zero.
        """
        if self._repeated < self._promised:
            return (
                "under re-entrant checkpointing the inputs must require grad "
                "(model.enable_input_require_grads()), or use_reentrant=False"
            )
        if self._silent and not self._uses:
            return "it ran under torch.no_grad() only"
        return None

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102
        # Within a backward pass, checkpointing repeats a use that is counted already.
        record: Recorder = self._repeat if _TRACKER.is_bw else self._record
        if not _TRACKER.is_bw:
            promised = not torch.is_grad_enabled() and _in_reentrant_checkpoint()
            self._promised += promised
            self._uses += promised or torch.is_grad_enabled()
            self._silent += not (promised or torch.is_grad_enabled())
        if self.fold is not None:
            record = self.fold.undone(record, x)
        weight, bias, seen = self.module.weight, self.module.bias, self._seen(x)
        out: Tensor = _TappedLinear.apply(x, weight, bias, seen, is_transposed(self.module), record)
        return out

    def _seen(self, x: Tensor) -> Tensor | None:
        """Return what the recorder is to get in place of x."""
        return None

    def _record(self, x: Tensor, g: Tensor) -> None:
        self._recorder(x, g)
        self._records += 1

    def _repeat(self, x: Tensor, g: Tensor) -> None:
        self._repeated += 1
        self._record(x, g)


def _in_reentrant_checkpoint() -> bool:
    """Whether the caller runs in the forward pass of a re-entrant checkpoint, which looks like an evaluation."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_qualname.endswith("CheckpointFunction.forward"):
            return True
    return False


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
        uses that the loss does not depend on are not told from uses that get their gradient later.
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
