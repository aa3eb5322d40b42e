"""Clipping on the gradient of the whole weight where only the outer LoRA factor trains (FedASK).

A target layer is ``W = W_0 + s B A`` with A (r x n) frozen and B (m x r) trained. What is clipped is the gradient
``G_i = dl_i/dW`` (m x n) of every example, and what trains is B, by ``s G A^T``. The mechanism releases

    s (sum_i c_i G_i + N(0, sigma^2 C^2 I_{m x n})) A^T

without forming a matrix of m x n numbers for a batch. With the reduced factorisation ``A^T = Q R``, Q (n x k)
orthonormal, it is ``(sum_i c_i P_i + s sigma C Z) R`` for ``P_i = s G_i Q`` (m x k) and Z (m x k) standard normal:
the noise times Q is standard normal again. So everything private happens in the coordinates P, where the noise
covers every direction alike and ``|P_i| <= s |G_i|``; R, which may be singular, acts on noised numbers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from privet.errors import ConfigError
from privet.privacy.parts import Part
from privet.privacy.per_sample import examples_tokens, sum_dtype

if TYPE_CHECKING:
    from privet.privacy.rng import Randomness

#: Numbers in float64 (8 MiB) that a norm may take at a time, if that is enough for one example. A CPU takes
#: longer with more: it is the fresh memory that costs.
_SCRATCH = 1 << 20


@dataclass(frozen=True)
class WeightProduct:
    """A target layer whose examples are clipped by the gradient of its whole weight.

    Parameters
    ----------
    a, b : str
        Names of the weights of lora_A (frozen) and lora_B (trained), as in ``model.named_parameters()``.
    scaling : float
        s in ``W_0 + s B A``: LoRA's alpha / r.

    Raises
    ------
    ConfigError
        If the scaling is not a positive number.
    """

    a: str
    b: str
    scaling: float

    def __post_init__(self) -> None:
        if not (self.scaling > 0 and math.isfinite(self.scaling)):
            raise ConfigError(
                f"{self.b}: a scaling of {self.scaling} is not allowed: greater than 0 and finite"
            )


def gram_squares(x: Tensor, g: Tensor) -> Tensor:
    """``|sum_t g_t x_t^T|^2`` by inner products of tokens; x (rows, t, n) and g (rows, t, m) give (rows,).

    Never less than the true value: what rounding may take away is added.
    """
    t, n, m = x.shape[1], x.shape[2], g.shape[2]
    inputs, outputs = (torch.bmm(v, v.transpose(1, 2)) for v in (x, g))
    size = (inputs.diagonal(dim1=1, dim2=2) * outputs.diagonal(dim1=1, dim2=2)).sqrt_().sum(1)
    # Every number takes part in n + m + 2 t additions at the most, whatever their order (hence two sums). Rounding
    # is relative to sum_t |g_t| |x_t|, which is far above the result where tokens cancel out.
    squares = inputs.mul_(outputs).sum(2).sum(1)
    return squares + (n + m + 2 * t + 4) * torch.finfo(x.dtype).eps * size.square_()


def direct_squares(x: Tensor, g: Tensor) -> Tensor:
    """Give the same as :func:`gram_squares` by forming the matrix of m x n, with the same promise."""
    t, n, m = x.shape[1], x.shape[2], g.shape[2]
    norms = torch.bmm(g.transpose(1, 2), x).square_().sum(2).sum(1).sqrt_()
    size = (x.square().sum(2) * g.square().sum(2)).sqrt_().sum(1)
    eps = torch.finfo(x.dtype).eps
    return (norms * (1 + (n + m + 4) * eps) + (t + 4) * eps * size).square_()


def outer_squares(x: Tensor, g: Tensor) -> Tensor:
    """Squared norm of ``sum_t g_t x_t^T`` for each example, by the cheaper formula, in float64.

    In float32, tokens that cancel out make a norm fall short by 1e-4 and more, or the margin against it large.

    Parameters
    ----------
    x, g : Tensor
        (rows, t, n) and (rows, t, m).

    Returns
    -------
    Tensor
        (rows,), float64, never less than the true value.
    """
    t, n, m = x.shape[1], x.shape[2], g.shape[2]
    by_tokens = t * (m + n) <= m * n
    formula, scratch = (gram_squares, 2 * t * t) if by_tokens else (direct_squares, m * n)
    at_once = max(1, _SCRATCH // (t * (m + n) + scratch))
    blocks = zip(x.split(at_once), g.split(at_once), strict=True)
    return torch.cat([formula(a.double(), b.double()) for a, b in blocks])


class ProductPart(Part):
    """lora_B of one target layer, clipped by the gradient of the layer's whole weight.

    Per example, P (k x m, the narrow side first) is kept, and the input and output gradient of the pair only
    until no use of the layer is outstanding: the norm of a sum over uses needs the tokens of all of them.

    Parameters
    ----------
    product : WeightProduct
        Names and scaling.
    a, b : nn.Module
        The two linear layers.
    """

    def __init__(self, product: WeightProduct, a: nn.Module, b: nn.Module) -> None:
        self.name = product.b.removesuffix(".weight")
        self._product = product
        self._a = a
        weight = b.get_parameter("weight")
        self.shapes = {product.b: weight.shape}
        self.device = weight.device
        self.dtype = sum_dtype(weight.dtype)
        self._frozen: Tensor | None = None  # A as of `begin`
        self._uses: list[tuple[Tensor, Tensor]] = []
        self._squares: Tensor | None = None
        self._sketch: Tensor | None = None

    def begin(self) -> None:
        """Factorise A, which may have changed since the engine was attached last."""
        a = self._a.get_parameter("weight").detach()
        if not bool(a.isfinite().all()):
            raise ConfigError(f"{self._product.a} is not finite")
        self._frozen = a.clone()
        q, r = torch.linalg.qr(a.to("cpu", torch.float64).t())
        self._q, self._r = q.to(self.device, self.dtype), r.to(self.device)

    def record(self, x: Tensor, g: Tensor) -> None:
        """Keep one use of the layer; x (rows, ..., n) is what A read, g (rows, ..., m) what came back to B."""
        self._check_rows(self.name, g.shape[0])
        if self._squares is not None:
            raise ConfigError(
                f"{self.name} got a gradient again after its norm was taken: "
                "one forward and one backward pass for a micro-batch"
            )
        # Inside the caller's autocast region the products would be in bfloat16.
        with torch.autocast(g.device.type, enabled=False):
            x, g = examples_tokens(x, g.to(self.dtype))
            sketch = torch.bmm((x @ self._q).transpose(1, 2), g)
        self._sketch = sketch if self._sketch is None else self._sketch.add_(sketch)
        self._uses.append((x, g))

    def complete(self) -> None:
        """Take the norms and let go of the tokens: every use is recorded."""
        x, g = (torch.cat(side, 1) if len(side) > 1 else side[0] for side in zip(*self._uses, strict=True))
        self._squares = outer_squares(x, g)
        self._uses = []

    @property
    def rows(self) -> int | None:
        """Examples recorded since the last :meth:`clear`."""
        return None if self._sketch is None else self._sketch.shape[0]

    def squared_norms(self) -> Tensor:
        """``|G_i|^2`` for each example, (rows,), never less than ``|P_i|^2 / s^2``."""
        if self._squares is None:
            self.complete()
        assert self._squares is not None
        # What is summed is P as it was rounded. Whatever rounding did to either side, it must not exceed C.
        least = self._filled().flatten(1).square().sum(1, dtype=torch.float64)
        # Both hold s^2: the gradient at lora_B's output is that at the layer's, times s.
        return torch.maximum(self._squares, least) / self._product.scaling**2

    def zero_rows(self, rows: Tensor) -> None:
        """Set P of the selected examples to zero."""
        self._filled()[rows] = 0

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """``sum_i factors_i P_i``, (m, k): not yet a gradient of B, see :meth:`release`."""
        sketch = self._filled()
        return {self._product.b: (factors @ sketch.flatten(1)).view(sketch.shape[1:]).t()}

    def clear(self) -> None:
        """Free P and the tokens."""
        self._uses = []
        self._squares = self._sketch = None

    def noise(self, randomness: Randomness, std: float) -> dict[str, Tensor]:
        """Noise of deviation ``s std`` in every coordinate of P, (m, k)."""
        m = self.shapes[self._product.b][0]
        z = randomness.normal((m, self._r.shape[0]), device=self.device, dtype=torch.float64)
        return {self._product.b: z * (self._product.scaling * std)}

    def release(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn noised sums of P into those of B's gradient: ``P R``, (m, r)."""
        if self._frozen is None or not torch.equal(self._a.get_parameter("weight"), self._frozen):
            raise ConfigError(f"{self._product.a} changed while the engine was attached: A must be frozen")
        return {name: (total @ self._r).to(self.dtype) for name, total in totals.items()}

    def _filled(self) -> Tensor:
        assert self._sketch is not None, "asked before the backward pass"
        return self._sketch
