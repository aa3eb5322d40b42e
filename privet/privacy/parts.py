"""The parts of the per-example vector that is clipped.

A training step clips one vector per example: everything that trains, concatenated. A *part* is a block of
its coordinates. It knows how the block's per-example gradients are kept between the backward pass and the
clipping, what they add to the squared norm, how they are summed, and which noise their sum needs. The engine
only adds the squared norms over the parts and hands back one factor per example, so another geometry (a norm
other than the gradient's own, with the noise that belongs to it) is another part, as in
:mod:`privet.privacy.low_rank`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from privet.errors import ConfigError
from privet.privacy.per_sample import Layout, Recorder, examples_tokens, is_transposed, sum_dtype

if TYPE_CHECKING:
    from privet.privacy.rng import Randomness

#: Name of the projected coordinates among the results of the engine.
THETA = "theta"


def uneven_rows(layer: str, rows: int, expected: int | None) -> ConfigError:
    """The error for a layer whose input does not have one row per example."""
    return ConfigError(
        f"{layer} saw {rows} rows in a micro-batch of {expected}: "
        "its input must keep one row per example, so this layer cannot train under DP"
    )


class Part(ABC):
    """A block of coordinates of the vector that is clipped per example.

    Attributes
    ----------
    name : str
        For messages.
    shapes : dict of str to torch.Size
        The summed gradients that the block gives, by name.
    device, dtype
        Where the sums live, and their precision: float32, or float64 for a float64 model.
    """

    name: str
    shapes: dict[str, torch.Size]
    device: torch.device
    dtype: torch.dtype

    def begin(self) -> None:  # noqa: B027 - most parts read nothing but what is recorded
        """Get ready for the steps to come; called whenever the engine is attached."""

    @property
    @abstractmethod
    def rows(self) -> int | None:
        """Examples recorded since the last :meth:`clear`; None if the backward pass did not come by."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Squared norm of the block for each example, (rows,)."""

    @abstractmethod
    def zero_rows(self, rows: Tensor) -> None:
        """Set the gradients of the examples selected by the mask `rows` (rows,) to zero."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """``sum_i factors_i g_i`` over the examples, by name, for `factors` (rows,), as :meth:`noise` is shaped."""

    def squared_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """``sum_i factors_i g_i^2`` over the examples, entry by entry, by name, for `factors` (rows,)."""
        raise ConfigError(f"{self.name} has no second moments by coordinate")

    @abstractmethod
    def clear(self) -> None:
        """Free everything kept per example."""

    def noise(self, randomness: Randomness, std: float) -> dict[str, Tensor]:
        """Gaussian noise of standard deviation `std` in every coordinate, by name."""
        return {
            name: randomness.normal(tuple(shape), device=self.device, dtype=self.dtype) * std
            for name, shape in self.shapes.items()
        }

    def release(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn noised sums into the gradients that :attr:`shapes` announces: post-processing."""
        return totals

    def _check_rows(self, layer: str, rows: int) -> None:
        if self.rows not in (None, rows):
            raise uneven_rows(layer, rows, self.rows)


class LinearPart(Part):
    """Weight and bias, whichever trains, of one linear layer.

    The gradient of an example is kept as a matrix. Where the layer sees one token per example (a
    classification head) it is an outer product, and only its two factors are kept. Several uses of the layer
    in one pass add up.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        prefix = f"{name}." if name else ""
        own = dict(module.named_parameters(recurse=False))
        self._weight_name = f"{prefix}weight" if own["weight"].requires_grad else None
        self._bias_name = f"{prefix}bias" if "bias" in own and own["bias"].requires_grad else None
        self._transposed = is_transposed(module)
        self._layout = Layout.of(module)
        self.shapes = {f"{prefix}{key}": p.shape for key, p in own.items() if p.requires_grad}
        self.device = own["weight"].device
        self.dtype = sum_dtype(own["weight"].dtype)
        self._outer: tuple[Tensor, Tensor] | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def record(self, x: Tensor, g: Tensor) -> None:
        """Keep what one use of the layer adds; x is (rows, ..., n), g is (rows, ..., m)."""
        self._check_rows(self.name, g.shape[0])
        x, g = examples_tokens(x, g)
        if self._bias_name is not None:
            bias = g.sum(1, dtype=self.dtype)
            self._bias = bias if self._bias is None else self._bias.add_(bias)
        if self._weight_name is None:
            return
        first = self._outer is None and self._weight is None
        m, n = g.shape[2], x.shape[2]
        if first and x.shape[1] == 1 and m * n > m + n:
            # Copies: the input is often one token of a whole sequence that would be kept alive with it.
            self._outer = (x[:, 0].to(self.dtype, copy=True), g[:, 0].to(self.dtype, copy=True))
            return
        if self._outer is not None:
            earlier_x, earlier_g = self._outer
            self._weight = self._layout.gradients(earlier_x[:, None], earlier_g[:, None])
            self._outer = None
        weight = self._layout.gradients(x, g)
        self._weight = weight if self._weight is None else self._weight.add_(weight)

    @property
    def rows(self) -> int | None:
        """Examples recorded since the last :meth:`clear`."""
        kept = self._kept()
        return kept[0].shape[0] if kept else None

    def squared_norms(self) -> Tensor:
        """Squared norm over weight and bias, (rows,)."""
        # Not Tensor.norm: in float32 on the CPU it falls short on long rows, and examples would exceed C.
        squares = [t.flatten(1).square().sum(1) for t in (self._weight, self._bias) if t is not None]
        if self._outer is not None:
            # In float64: a square that vanishes in float32 may stand next to one that is all but infinite.
            x, g = (t.double().square().sum(1) for t in self._outer)
            squares.append((x * g).to(self.dtype))
        return torch.stack(squares).sum(0)

    def zero_rows(self, rows: Tensor) -> None:
        """Set the selected examples to zero, the factors of outer products included."""
        for tensor in self._kept():
            tensor[rows] = 0

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Sum over the examples with their factors, in the layout of the parameters."""
        sums = {}
        if self._weight_name is not None:
            if self._outer is not None:
                x, g = self._outer
                g = g * factors[:, None]
                sums[self._weight_name] = x.t() @ g if self._transposed else g.t() @ x
            elif self._weight is not None:
                flat = factors @ self._weight.flatten(1)
                sums[self._weight_name] = self._layout.swap(flat.view(self._weight.shape[1:]))
        if self._bias_name is not None and self._bias is not None:
            sums[self._bias_name] = factors @ self._bias
        return sums

    def squared_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Sum squares over the examples with their factors, in the layout of the parameters."""
        sums = {}
        if self._weight_name is not None:
            if self._outer is not None:
                x, g = (t.square() for t in self._outer)
                g = g * factors[:, None]
                sums[self._weight_name] = x.t() @ g if self._transposed else g.t() @ x
            elif self._weight is not None:
                flat = factors @ self._weight.flatten(1).square()
                sums[self._weight_name] = self._layout.swap(flat.view(self._weight.shape[1:]))
        if self._bias_name is not None and self._bias is not None:
            sums[self._bias_name] = factors @ self._bias.square()
        return sums

    def clear(self) -> None:
        """Free the matrices and the factors of outer products."""
        self._outer = self._weight = self._bias = None

    def _kept(self) -> list[Tensor]:
        return [t for t in (*(self._outer or ()), self._weight, self._bias) if t is not None]


@dataclass(frozen=True)
class ProjectedParameters:
    """A map from d shared coordinates to the D coordinates of named parameters, ``theta_D = P theta_d``.

    P has one entry a row: coordinate i reads ``coefficients[i] * theta_d[slots[i]]`` (FedHSIP, Uni-LoRA).

    Parameters
    ----------
    slots : Tensor
        int64, (D,): the shared coordinate of every coordinate.
    coefficients : Tensor
        (D,): sign and normaliser of every coordinate.
    d : int
        Number of shared coordinates.
    order : tuple of str
        Parameter names, as in ``model.named_parameters()``, whose row-flattened concatenation is theta_D.

    Raises
    ------
    ConfigError
        If the two tensors do not fit each other or a slot lies outside of 0 .. d - 1.
    """

    slots: Tensor
    coefficients: Tensor
    d: int
    order: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.slots.dim() != 1 or self.slots.shape != self.coefficients.shape:
            raise ConfigError(
                f"projection: slots {tuple(self.slots.shape)} and coefficients "
                f"{tuple(self.coefficients.shape)} must be two vectors of one length"
            )
        if self.slots.dtype != torch.int64:
            raise ConfigError(f"projection: slots are {self.slots.dtype}, not int64")
        if self.slots.numel() and not 0 <= int(self.slots.min()) <= int(self.slots.max()) < self.d:
            raise ConfigError(f"projection: a slot lies outside of 0 .. {self.d - 1}")
        if not bool(torch.isfinite(self.coefficients).all()):
            raise ConfigError("projection: a coefficient is not finite")
        if len(set(self.order)) != len(self.order):
            raise ConfigError("projection: a parameter stands twice in the order")


class ProjectedPart(Part):
    """Per-example gradients with respect to theta_d: ``g_d = P^T g_D``.

    Every layer's gradients are scattered into one (rows, d) buffer as soon as the backward pass reaches the
    layer; the (rows, D) matrix never exists. The norm is that of g_d: examples are clipped after projecting.

    Parameters
    ----------
    projection : ProjectedParameters
        The map.
    modules : mapping of str to nn.Module
        The linear layer that owns each parameter of ``projection.order``, by the parameter's name.

    Raises
    ------
    ConfigError
        If the parameters do not add up to D coordinates.
    """

    name = "the projection"

    def __init__(self, projection: ProjectedParameters, modules: Mapping[str, nn.Module]) -> None:
        weights = [modules[name].get_parameter("weight") for name in projection.order]
        sizes = [w.numel() for w in weights]
        if sum(sizes) != projection.slots.numel():
            raise ConfigError(
                f"projection: slots has {projection.slots.numel()} entries, "
                f"but the parameters in its order have {sum(sizes)}"
            )
        self.shapes = {THETA: torch.Size((projection.d,))}
        self.device = weights[0].device
        self.dtype = sum_dtype(weights[0].dtype)
        slots = projection.slots.to(self.device).split(sizes)
        coefficients = projection.coefficients.to(self.device, self.dtype).split(sizes)
        self._recorders: dict[str, Recorder] = {}
        for name, weight, block, scale in zip(projection.order, weights, slots, coefficients, strict=True):
            layout = Layout.of(modules[name])
            ordered = (layout.swap(t.view(weight.shape)).flatten() for t in (block, scale))
            self._recorders[name] = partial(self._scatter, name, layout, *ordered)
        self._buffer: Tensor | None = None

    def recorder(self, name: str) -> Recorder:
        """Recorder of the layer that owns the parameter `name`."""
        return self._recorders[name]

    def _scatter(
        self, name: str, layout: Layout, slots: Tensor, coefficients: Tensor, x: Tensor, g: Tensor
    ) -> None:
        self._check_rows(name, g.shape[0])
        gradients = layout.gradients(*examples_tokens(x, g)).flatten(1).to(self.device)
        if self._buffer is None:
            self._buffer = gradients.new_zeros(gradients.shape[0], self.shapes[THETA][0])
        self._buffer.index_add_(1, slots, gradients.mul_(coefficients))

    @property
    def rows(self) -> int | None:
        """Examples recorded since the last :meth:`clear`."""
        return None if self._buffer is None else self._buffer.shape[0]

    def squared_norms(self) -> Tensor:
        """Squared norm of every g_d, (rows,)."""
        return self._filled().square().sum(1)

    def zero_rows(self, rows: Tensor) -> None:
        """Set the selected rows of the buffer to zero."""
        self._filled()[rows] = 0

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Sum of the rows of the buffer with their factors: ``{"theta": (d,)}``."""
        return {THETA: factors @ self._filled()}

    def clear(self) -> None:
        """Free the buffer."""
        self._buffer = None

    def _filled(self) -> Tensor:
        assert self._buffer is not None, "asked before the backward pass"
        return self._buffer
