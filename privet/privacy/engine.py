"""Differentially private gradients at the price of ordinary ones.

For the examples i of a draw, all trained coordinates concatenated into one vector g_i per example, the engine
computes

    (sum_i g_i min(1, C / ||g_i||) + N(0, sigma^2 C^2 I)) / b

with b the expected size of a draw (Abadi et al. 2016, Algorithm 1, flat clipping). One forward and one
backward pass over a micro-batch suffice: the layers that train hand out per-example gradients in the pass
(:mod:`privet.privacy.per_sample`), and what is kept per example (:mod:`privet.privacy.parts`) lives until
the micro-batch is added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from privet.errors import ConfigError
from privet.privacy.low_rank import ProductPart, WeightProduct
from privet.privacy.moments import Weights
from privet.privacy.parts import LinearPart, Part, ProjectedParameters, ProjectedPart, uneven_rows
from privet.privacy.per_sample import Fold, InputKeeper, OuterTap, StandIn, Tap, is_linear, is_transposed
from privet.privacy.pullback import Pullback, PulledPart
from privet.privacy.supported import (
    ImageGuard,
    owners,
    refuse_cutting_checkpoints,
    refuse_unsupported,
    trainable,
)

if TYPE_CHECKING:
    from privet.privacy.rng import Randomness


@dataclass(frozen=True)
class Clipped:
    """What one micro-batch looked like before clipping: private, it must not leave the node.

    Attributes
    ----------
    norms : Tensor
        Norm of every example's gradient, (rows,); not finite where the gradient is not.
    nonfinite : int
        Examples whose gradient was replaced by zero.
    """

    norms: Tensor
    nonfinite: int


class GradientEngine:
    """Clipped and noised gradient sums of a model's trainable linear layers.

    An engine is built once for a model and a set of trainable parameters and may be attached for any number
    of rounds. While it is attached, a backward pass leaves the trainable parameters without a ``.grad``.

    Parameters
    ----------
    model : nn.Module
        Anything whose trainable parameters all belong to `nn.Linear` or `Conv1D` layers that see one row
        per example first, for example a PEFT model. It must stand on its device already.
    clip : float
        C, the bound on the norm of one example's whole gradient.
    projection : ProjectedParameters, optional
        Train shared coordinates in place of the parameters that it names; the remaining ones (a head)
        train as they are, inside the same clip.
    products : sequence of WeightProduct
        LoRA pairs with a frozen A: the examples' gradients with respect to the *whole* weight are what is
        clipped and noised; what comes out is still the gradient of B. Other pairs and the head are clipped by
        their own gradients, inside the same clip.
    pullbacks : sequence of Pullback
        Weights that are written from leaves: the leaves' gradients are what is clipped, noised and released,
        inside the same clip.

    Raises
    ------
    ConfigError
        For a trainable parameter without a per-example rule, and for layers that mix the examples of a batch;
        the message names it.

    Examples
    --------
    >>> engine = GradientEngine(model, clip=1.0)
    >>> with engine.attached():
    ...     for batch in micro_batches:
    ...         loss_per_example(model, batch).sum().backward()
    ...         engine.accumulate(rows=len(batch))
    ...     gradients = engine.private_sum(randomness, sigma=0.8, expected_batch=32)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clip: float,
        projection: ProjectedParameters | None = None,
        products: Sequence[WeightProduct] = (),
        pullbacks: Sequence[Pullback] = (),
    ) -> None:
        if not (clip > 0 and math.isfinite(clip)):
            raise ConfigError(f"privacy.clip = {clip} is not allowed: greater than 0 and finite")
        refuse_unsupported(model)
        self._model = model
        self._clip = clip
        self._parameters = trainable(model)
        layers = owners(model, self._parameters)
        self._parts, self._taps = _build(model, layers, projection, products, pullbacks)
        self._images = ImageGuard(model, layers)
        self._batch_norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
        self._shapes = {name: shape for part in self._parts for name, shape in part.shapes.items()}
        self._sums: dict[str, Tensor] = {}
        self._attached = False

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every result of :meth:`private_sum`, by name; without products, the vector that is clipped."""
        return self._shapes

    # --- life of the taps ---------------------------------------------------------------------------

    def attach(self) -> None:
        """Tap the layers and start with an empty sum.

        Raises
        ------
        ConfigError
            If other parameters train than when the engine was built, a layer's forward was replaced by
            someone else, a batch normalisation layer is in training mode, or re-entrant checkpointing would
            cut the gradient off.
        RuntimeError
            If the engine is attached already.
        """
        if self._attached:
            raise RuntimeError("the engine is attached already")
        now = trainable(self._model)
        for name in now.keys() ^ self._parameters.keys():
            raise ConfigError(f"{name} began or ceased to train after the engine was built: build a new one")
        for name, parameter in now.items():
            if parameter is not self._parameters[name]:
                raise ConfigError(f"{name} was replaced after the engine was built: build a new one")
        for name, tap in self._taps.items():
            if not is_linear(tap.module):
                raise ConfigError(f"{name} has a forward that is not its own: is another engine attached?")
        self._refuse_batch_norm()
        refuse_cutting_checkpoints(self._model)
        for part in self._parts:
            part.begin()
        for tap in self._taps.values():
            tap.insert()
        self._images.insert()
        self._attached = True

    def detach(self) -> None:
        """Give the model back as it was, and forget the sum. Does nothing on a detached engine."""
        if not self._attached:
            return
        for tap in self._taps.values():
            tap.remove()
        self._images.remove()
        self._attached = False
        self._sums = {}
        self.discard()

    @contextmanager
    def attached(self) -> Iterator[GradientEngine]:
        """Attach for the length of a ``with`` block."""
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    # --- one step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def accumulate(self, rows: int) -> Clipped:
        """Clip the examples of one micro-batch and add them to the sum.

        Call it after ``loss.sum().backward()``, where `loss` has one entry per example that depends on no
        other example. The per-example gradients are freed, also when this raises; the sum then is as before.

        Parameters
        ----------
        rows : int
            Number of examples in the micro-batch.

        Returns
        -------
        Clipped
            Norms and the count of examples that were not finite, for this node's own log.

        Raises
        ------
        ConfigError
            If a layer did not keep one row per example, a layer was used but the backward pass did not reach
            it, or a trainable parameter has a gradient besides the recorded one; the message names it.
        """
        self._require_attached()
        try:
            # Inside the caller's autocast region the sums would be products in bfloat16.
            with ExitStack() as stack:
                for device in {part.device.type for part in self._parts}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                clipped, added = self._clip_rows(self._recorded(rows))
        finally:
            self.discard()
        # Nothing below allocates for a second micro-batch, so an example is in the sum wholly or not at all.
        for name, tensor in added.items():
            if name in self._sums:
                self._sums[name].add_(tensor)
            else:
                self._sums[name] = tensor
        return clipped

    @torch.no_grad()
    def second_moments(self, rows: int, weights: Weights) -> dict[str, Tensor]:
        """Return ``sum_i f(|g_i|) g_i^2`` of one micro-batch, entry by entry, by parameter name; not private.

        Called in place of :meth:`accumulate`; the sum of the step stays as it is. An example whose gradient is not
        finite counts as zero.

        Parameters
        ----------
        rows : int
            Number of examples in the micro-batch.
        weights : callable
            f, one of :data:`privet.privacy.moments.KINDS`.
        """
        self._require_attached()
        try:
            parts = self._recorded(rows)
            norms = torch.stack([p.squared_norms().to(parts[0].device) for p in parts]).sum(0).sqrt()
            finite = norms.isfinite()
            for part in parts:
                part.zero_rows(finite.logical_not().to(part.device))
            factors = weights(norms, self._clip).where(finite, 0.0)
            sums: dict[str, Tensor] = {}
            for part in parts:
                sums.update(part.squared_sum(factors.to(part.device, part.dtype)))
            return sums
        finally:
            self.discard()

    def refuse_mixing(self, losses: Tensor) -> None:
        """Measure that the gradient of one example's loss stays in that example's rows; nothing is kept of it.

        It shows what a model's layers do not tell: examples that see each other in code of the model's own, or
        rows in another order than that of the examples. Any two examples will do, best of made-up tokens.

        Parameters
        ----------
        losses : Tensor
            One loss per example, at least two, fresh from the attached model.

        Raises
        ------
        ConfigError
            If another row got a gradient; the message names the layer.
        """
        self._require_attached()
        try:
            losses[0].backward()
            for part in self._recorded(len(losses)):
                if bool((part.squared_norms()[1:] > 0).any()):
                    raise ConfigError(
                        f"{part.name}: the loss of one example has a gradient in the rows of others; a model "
                        "that mixes the examples of a batch, or reorders them, is not supported under DP"
                    )
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop what a micro-batch has left per example, say when its backward pass ran out of memory."""
        for part in self._parts:
            part.clear()
        for tap in self._taps.values():
            tap.reset()

    @torch.no_grad()
    def private_sum(self, randomness: Randomness, sigma: float, expected_batch: int) -> dict[str, Tensor]:
        """Release the noised sum of this step and start the next one.

        An empty draw needs no special case: without a call to :meth:`accumulate` the result is noise alone.

        Parameters
        ----------
        randomness : Randomness
            Source of the noise.
        sigma : float
            Noise multiplier: the standard deviation in every coordinate that is clipped is ``sigma * clip``.
        expected_batch : int
            b, the public divisor; never the size of the actual draw.

        Returns
        -------
        dict of str to Tensor
            ``(sum + noise) / b`` by parameter name, ``"theta"`` for projected coordinates; at least float32.
        """
        self._require_attached()
        if not (sigma >= 0 and math.isfinite(sigma)):
            raise ValueError(f"sigma = {sigma} is not a noise multiplier")
        if expected_batch < 1:
            raise ValueError(f"expected_batch = {expected_batch} is not a batch size")
        if any(part.rows is not None for part in self._parts):
            raise RuntimeError("a micro-batch was neither accumulated nor discarded")
        released: dict[str, Tensor] = {}
        for part in self._parts:
            totals = {}
            for name, noise in part.noise(randomness, sigma * self._clip).items():
                total = noise if name not in self._sums else noise.add_(self._sums[name])
                totals[name] = total.div_(expected_batch)
            released.update(part.release(totals))
        self._sums = {}
        return released

    # --- inside -------------------------------------------------------------------------------------

    def _recorded(self, rows: int) -> list[Part]:
        """Return the parts that the backward pass reached, all checked against `rows`."""
        self._refuse_batch_norm()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise ConfigError(
                    f"{name} has a .grad: it was not cleared, or the parameter is used outside of its own "
                    "layer, where it has no per-example rule"
                )
        recorded = [part for part in self._parts if part.rows is not None]
        for part in recorded:
            if part.rows != rows:
                raise uneven_rows(part.name, part.rows or 0, rows)
        for name, tap in self._taps.items():
            if tap.missed is not None:
                raise ConfigError(f"{name} was used but got no gradient: {tap.missed}")
        if not recorded:
            raise ConfigError("the backward pass reached no trainable layer")
        return recorded

    def _clip_rows(self, parts: list[Part]) -> tuple[Clipped, dict[str, Tensor]]:
        squares = [part.squared_norms() for part in parts]
        device = squares[0].device
        norms = torch.stack([s.to(device) for s in squares]).sum(0).sqrt()
        finite = norms.isfinite()
        nonfinite = int(finite.logical_not().sum())
        factors = self._clip / norms.clamp_min(self._clip)
        if nonfinite:
            # A factor of zero is not enough: zero times infinity would spoil the whole sum.
            factors = factors.where(finite, 0.0)
            for part in parts:
                part.zero_rows(finite.logical_not().to(part.device))
        added: dict[str, Tensor] = {}
        for part in parts:
            added.update(part.weighted_sum(factors.to(part.device, part.dtype)))
        return Clipped(norms, nonfinite), added

    def _refuse_batch_norm(self) -> None:
        for name, module in self._batch_norms.items():
            if module.training or not module.track_running_stats:
                raise ConfigError(
                    f"{name}: batch normalisation mixes the examples of a batch; put it in eval mode"
                )

    def _require_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("the engine is not attached")


def _build(
    model: nn.Module,
    owners: Mapping[str, nn.Module],
    projection: ProjectedParameters | None,
    products: Sequence[WeightProduct],
    pullbacks: Sequence[Pullback],
) -> tuple[list[Part], dict[str, StandIn]]:
    """Return the parts of the clipped vector and a stand-in for every layer that trains or is listened to."""
    parts: list[Part] = []
    taps: dict[str, StandIn] = {}
    names = {f"{name}.weight" if name else "weight": name for name in owners}
    if projection is not None:
        modules = {}
        for parameter in projection.order:
            layer = names.get(parameter)
            if layer is None or not owners[layer].get_parameter("weight").requires_grad:
                raise ConfigError(f"projection: {parameter} is not the trainable weight of a linear layer")
            bias = owners[layer].bias
            if bias is not None and bias.requires_grad:
                raise ConfigError(f"projection: the bias of {layer} trains too: freeze it")
            modules[parameter] = owners[layer]
        projected = ProjectedPart(projection, modules)
        parts.append(projected)
        for parameter in projection.order:
            taps[names[parameter]] = Tap(modules[parameter], projected.recorder(parameter))
    parts.extend(_tap_products(model, owners, products, taps))
    for pullback in pullbacks:
        layer = names.get(pullback.weight)
        if layer is None or owners[layer].bias is not None or layer in taps:
            raise ConfigError(
                f"pullbacks: {pullback.weight} is not the trainable weight of a linear layer without bias, "
                "or is in the projection, a product or another pullback"
            )
        pulled = PulledPart(pullback, owners[layer])
        parts.append(pulled)
        taps[layer] = Tap(owners[layer], pulled.record)
    for name, module in owners.items():
        if name not in taps:
            part = LinearPart(name, module)
            parts.append(part)
            taps[name] = Tap(module, part.record)
    for name, tap in taps.items():
        if isinstance(tap, Tap):
            tap.fold = Fold.around(model, name)
    return parts, taps


def _tap_products(
    model: nn.Module,
    owners: Mapping[str, nn.Module],
    products: Sequence[WeightProduct],
    taps: dict[str, StandIn],
) -> list[Part]:
    """Return a part for every product and add the stand-ins of both of its layers to `taps`.

    Raises
    ------
    ConfigError
        For a product that is not a frozen A and a trained B, or that is spoken for already.
    """
    parts: list[Part] = []
    plain = {f"{n}.weight": n for n, m in model.named_modules() if _without_bias(m)} if products else {}
    for product in products:
        a, b = plain.get(product.a), plain.get(product.b)
        if a is None or a in owners:
            raise ConfigError(f"products: {product.a} is not the frozen weight of an nn.Linear without bias")
        if b is None or b not in owners:
            raise ConfigError(f"products: {product.b} is not the trained weight of an nn.Linear without bias")
        if a in taps or b in taps:
            raise ConfigError(f"products: {product.a} or {product.b} is in the projection or another product")
        inner, outer = model.get_submodule(a), owners[b]
        read, given = outer.get_parameter("weight").shape[1], inner.get_parameter("weight").shape[0]
        if read != given:
            raise ConfigError(f"products: {product.b} reads {read} numbers, but {product.a} gives {given}")
        part = ProductPart(product, inner, outer)
        parts.append(part)
        taps[a] = keeper = InputKeeper(inner)
        taps[b] = OuterTap(outer, part.record, keeper, part.complete, part.name)
    return parts


def _without_bias(module: nn.Module) -> bool:
    return is_linear(module) and not is_transposed(module) and module.bias is None
