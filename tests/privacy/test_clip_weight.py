"""Clipping on the gradient of the whole weight while B trains, against batches of one on merged weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from client_app.trainer import Noise, Trainer
from privet.adapters import build_model
from privet.config import compose
from privet.data.collate import Tokenised, pad_batch
from privet.errors import ConfigError
from privet.privacy import low_rank
from privet.privacy.engine import GradientEngine
from privet.privacy.low_rank import WeightProduct, direct_squares, gram_squares, outer_squares
from privet.privacy.parts import ProjectedParameters
from privet.trainables import Factors
from tests.privacy import families
from tests.privacy.families import (
    LENGTHS,
    SCALING,
    Gradients,
    Known,
    assert_equal,
    clipped_products,
    freeze_a,
    losses,
    make_batch,
    norms_of,
    on_merged_weights,
    products_of,
    relative_error,
)


def make_model(family: str = "bert", dtype: torch.dtype = torch.float64, **lora: Any) -> Any:
    return freeze_a(families.make_model(family, dtype, **lora))


def engine_sum(
    model: nn.Module,
    batch: Any,
    clip: float,
    loss: Callable[..., Tensor] = losses,
    products: list[WeightProduct] | None = None,
) -> tuple[Tensor, Gradients]:
    """Norms and the clipped sum without noise, from one micro-batch."""
    chosen = products_of(model) if products is None else products
    return families.engine_sum(model, batch, clip, loss, products=chosen)


# --- against the definition -----------------------------------------------------------------------


@pytest.mark.parametrize("whole", [None, ["classifier"]])
def test_equals_batches_of_one_on_merged_weights_and_is_another_geometry(whole: list[str] | None) -> None:
    model, batch = make_model(modules_to_save=whole), make_batch()
    samples = on_merged_weights(model, batch)
    norms = norms_of(samples)
    clip = float(norms.median())  # some examples are clipped, some are not
    got_norms, got = engine_sum(model, batch, clip)
    torch.testing.assert_close(got_norms, norms, rtol=1e-9, atol=0)
    assert_equal(got, clipped_products(model, samples, clip), 1e-9)
    _, on_b = engine_sum(model, batch, clip, products=[])
    name = next(n for n in got if "lora_B" in n)
    assert float((on_b[name] - got[name]).norm()) > 1e-2 * float(got[name].norm())


def test_some_targets_by_their_weight_and_others_by_b() -> None:
    model, batch = make_model("bert"), make_batch()
    chosen = products_of(model)[::2]
    samples = on_merged_weights(model, batch)
    for product in products_of(model)[1::2]:
        a = model.get_parameter(product.a).detach()
        samples[product.b] = SCALING * samples[product.b] @ a.t()
    clip = float(norms_of(samples).median())
    norms, got = engine_sum(model, batch, clip, products=chosen)
    torch.testing.assert_close(norms, norms_of(samples), rtol=1e-9, atol=0)
    factors = (clip / norms).clamp(max=1)
    want = {n: torch.einsum("b,b...->...", factors, g) for n, g in samples.items()}
    for product in chosen:
        want[product.b] = SCALING * want[product.b] @ model.get_parameter(product.a).detach().t()
    assert_equal(got, want, 1e-9)


class Delta(nn.Module):
    """A LoRA layer written out with its whole product as one parameter, on the input that lora_A sees."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base, self.dropout = layer.base_layer, layer.lora_dropout["default"]
        product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        self.delta = nn.Parameter(product.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(self.dropout(x), self.delta)
        return out


def written_out(model: nn.Module, batch: Any, loss: Callable[..., Tensor]) -> Gradients:
    """Per-example gradients of the whole products, by lora_B's name, from single losses out of the whole batch."""
    twin = copy.deepcopy(model).requires_grad_(False)
    layers = [n for n, m in twin.named_modules() if isinstance(m, LoraLinear)]
    for name in layers:
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, Delta(twin.get_submodule(name)))
    deltas = [twin.get_parameter(f"{name}.delta") for name in layers]
    rows = [torch.autograd.grad(one, deltas, retain_graph=True) for one in loss(twin, batch)]
    return {
        f"{name}.lora_B.default.weight": torch.stack(c)
        for name, c in zip(layers, zip(*rows, strict=True), strict=True)
    }


def test_lora_dropout_clips_what_a_really_saw() -> None:
    """The same masks in both passes, for every example of the batch."""
    model, batch = make_model("bert", modules_to_save=None, lora_dropout=0.5), make_batch()

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(3)
        return losses(m, b)

    samples = written_out(model, batch, loss)
    clip = float(norms_of(samples).median())
    norms, got = engine_sum(model, batch, clip, loss)
    torch.testing.assert_close(norms, norms_of(samples), rtol=1e-9, atol=0)
    assert_equal(got, clipped_products(model, samples, clip), 1e-9)
    plain = norms_of(on_merged_weights(model.eval(), batch))
    assert float((plain - norms).abs().min()) > 1e-6


class Net(nn.Module):
    """One adapted layer, run `uses` times, each time in a checkpoint of its own if asked. One loss an example."""

    def __init__(self, uses: int = 1, reentrant: bool | None = None, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.uses, self.reentrant = uses, reentrant

    def block(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h))

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone().requires_grad_(self.reentrant is True)
        for _ in range(self.uses):
            h = (
                self.block(h)
                if self.reentrant is None
                else checkpoint(self.block, h, use_reentrant=self.reentrant)
            )
        return (h.sum(1).square() * torch.arange(1, h.shape[2] + 1)).sum(1)


def net(
    tokens: int = 3, dtype: torch.dtype = torch.float64, r: int = 2, **options: Any
) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = get_peft_model(Net(**options), LoraConfig(r=r, lora_alpha=3 * r, target_modules=["inner"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype), torch.randn(4, tokens, model.base_model.model.inner.in_features, dtype=dtype)


def call(model: nn.Module, x: Any) -> Tensor:
    out: Tensor = model(x)
    return out


def test_a_checkpoint_that_cuts_the_gradient_is_an_error() -> None:
    model, x = net()
    engine = GradientEngine(model, clip=1.0, products=products_of(model))
    with engine.attached():
        with pytest.warns(UserWarning, match="requires_grad"):
            out = checkpoint(model, x, use_reentrant=True)
        assert not out.requires_grad
        with pytest.raises(ConfigError, match=r"lora_B.* was used but got no gradient"):
            engine.accumulate(len(x))


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_layer_used_twice_has_the_norm_of_the_sum(tokens: int, reentrant: bool | None) -> None:
    model, x = net(tokens, uses=2, reentrant=reentrant)
    plain, _ = net(tokens, uses=2)
    samples = written_out(plain, x, call)
    clip = float(norms_of(samples).median())
    norms, got = engine_sum(model, x, clip, call)
    torch.testing.assert_close(norms, norms_of(samples), rtol=1e-9, atol=0)
    assert_equal(got, clipped_products(model, samples, clip), 1e-9)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("uses", [1, 2])
def test_tokens_are_let_go_of_within_the_backward_pass(uses: int, reentrant: bool | None) -> None:
    """Also where checkpointing repeats the forward pass, else long rows would pile up over the layers."""
    model, x = net(uses=uses, reentrant=reentrant)
    engine = GradientEngine(model, clip=1.0, products=products_of(model))
    (part,) = engine._parts
    with engine.attached():
        call(model, x).sum().backward()
        assert part.rows == 4
        assert part._uses == []
        engine.accumulate(4)
        assert part.rows is None
        assert not [v for v in vars(part).values() if isinstance(v, Tensor) and v.shape[0] == 4]


def test_evaluating_while_attached_changes_nothing() -> None:
    """A use without a gradient is not told from one to come: the norm waits."""
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        with torch.no_grad():
            inside = losses(model, batch)
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 1)
    assert torch.equal(inside, losses(model, batch))
    assert_equal(got, engine_sum(model, batch, 0.5)[1], 1e-12)


def test_a_second_backward_pass_before_the_norms_is_refused() -> None:
    """Its gradient could not join the norm any more."""
    model, x = net()
    engine = GradientEngine(model, clip=1.0, products=products_of(model))
    with engine.attached():
        call(model, x).sum().backward()
        with pytest.raises(ConfigError, match="after its norm was taken"):
            call(model, x).sum().backward()


def test_micro_batches_add_up_to_the_batch() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        for rows in (slice(0, 3), slice(3, 4)):
            losses(model, {k: v[rows] for k, v in batch.items()}).sum().backward()
            engine.accumulate(len(range(*rows.indices(4))))
        got = engine.private_sum(Known(), 0.0, 32)
        again = engine.private_sum(Known(), 0.0, 1)
    want = {n: g / 32 for n, g in engine_sum(model, batch, 0.5)[1].items()}
    assert_equal(got, want, 1e-12)
    assert all(bool((g == 0).all()) for g in again.values())  # the sum starts anew


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "m", "n"), [(1, 5, 4), (9, 20, 70), (33, 50, 70), (200, 8, 3)])
def test_both_norm_formulas_agree(tokens: int, m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(5, tokens, w, generator=generator, dtype=torch.float64) for w in (n, m))
    want = torch.einsum("btm,btn->bmn", g, x).square().sum((1, 2))
    for got in (gram_squares(x, g), direct_squares(x, g), outer_squares(x, g)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
    monkeypatch.setattr(low_rank, "_SCRATCH", 2 * tokens * (m + n + tokens))  # in blocks of examples
    torch.testing.assert_close(outer_squares(x, g), want, rtol=1e-10, atol=0)


@pytest.mark.parametrize("formula", [gram_squares, direct_squares])
def test_formulas_add_what_rounding_may_take(formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Run in float32, where rounding shows: without the margin a part of these fall short, by 1e-8 to 1e-1."""
    generator = torch.Generator().manual_seed(0)
    for cancelling in (1.0, 0.1, 0.01, 0.001):
        x, g = (torch.randn(40, 32, w, generator=generator) + 0.5 for w in (20, 30))
        x[:, 16:], g[:, 16:] = x[:, :16], cancelling * g[:, 16:] - g[:, :16]
        truth = torch.einsum("btm,btn->bmn", g.double(), x.double()).square().sum((1, 2))
        assert bool((formula(x, g).double() >= truth).all())


def test_the_cheaper_formula_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gram one while t (m + n) <= m n: 40 x 24 is at its limit with 15 tokens."""
    taken = []
    for name in ("gram_squares", "direct_squares"):
        plain = getattr(low_rank, name)

        def spy(x: Tensor, g: Tensor, name: str = name, plain: Any = plain) -> Tensor:
            taken.append((name, x.shape[1]))
            return plain(x, g)

        monkeypatch.setattr(low_rank, name, spy)
    for tokens in (15, 16):
        outer_squares(torch.ones(1, tokens, 24), torch.ones(1, tokens, 40))
    assert taken == [("gram_squares", 15), ("direct_squares", 16)]


class Pair(nn.Module):
    """Nothing but A and B; the gradient at B's output is `weights` times the scaling, whatever A and B are."""

    def __init__(self, n: int, m: int, r: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(n, r, bias=False), nn.Linear(r, m, bias=False)
        self.a.requires_grad_(False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, weights = batch
        out: Tensor = (self.b(self.a(x)) * 4.0 * weights).flatten(1).sum(1)
        return out


PAIR = [WeightProduct("a.weight", "b.weight", 4.0)]


@pytest.mark.parametrize("cancelling", [0.0, 0.01, 1e-4])
@pytest.mark.parametrize(
    ("tokens", "m", "n"), [(512, 1600, 1200), (2048, 96, 96), (1, 1600, 1600), (4096, 1, 1)]
)
def test_float32_norms_do_not_fall_short(tokens: int, m: int, n: int, cancelling: float) -> None:
    """On long rows, and where the tokens of a row all but cancel out; the margin is small but there."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, tokens, n, generator=generator) + 1.0
    weights = torch.randn(2, tokens, m, generator=generator)
    if cancelling:
        half = tokens // 2
        x[:, half : 2 * half] = x[:, :half]
        rest = cancelling * weights[:, :half]
        weights[:, half : 2 * half] = rest - weights[:, :half]
    truth = torch.einsum("btm,btn->bmn", weights.double(), x.double()).flatten(1).norm(dim=1)
    norms, _ = engine_sum(Pair(n, m), (x, weights), 1.0, call, PAIR)
    assert bool((norms >= truth * (1 - 1e-7)).all())
    assert bool((norms <= truth * (1 + (0.1 if cancelling else 1e-6))).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [1e-3, 0.3, 1e3])
def test_no_example_exceeds_the_clip_in_the_coordinates_of_the_noise(clip: float, dtype: torch.dtype) -> None:
    """Rounding included: what noise is added to is bounded by s C for B, jointly with the head."""
    model, batch = make_model("bert", dtype), make_batch()
    for row in range(len(LENGTHS)):
        one = {k: v[row : row + 1] for k, v in batch.items()}
        engine = GradientEngine(model, clip=clip, products=products_of(model))
        with engine.attached():
            losses(model, one).sum().backward()
            engine.accumulate(1)
            scale = {n: SCALING if "lora_B" in n else 1.0 for n in engine.shapes}
            flat = torch.cat([g.double().flatten() / scale[n] for n, g in engine._sums.items()])
        assert float(flat.norm()) <= clip * (1 + 1e-6)


def test_rounding_of_the_sum_enters_the_norm() -> None:
    """Tokens that cancel in x but not after rounding: P is then longer than G, and it is P that is released."""
    pair = Pair(64, 64, r=16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 64, generator=generator).expand(1, 1001, 64) * 1e4
    weights = torch.randn(1, 1001, 64, generator=generator)
    weights[:, -1] = 0
    weights[:, -1] = -weights.double().sum(1).float()
    engine = GradientEngine(pair, clip=1e-4, products=PAIR)
    with engine.attached():
        call(pair, (x, weights)).sum().backward()
        (part,) = engine._parts
        sketch = float(part._sketch.double().norm())
        truth = float(torch.einsum("btm,btn->mn", weights.double(), x.double()).norm())
        assert sketch > 4 * truth * 1.0001  # the case that this test is about
        engine.accumulate(1)
        assert float(engine._sums["b.weight"].double().norm()) <= 4 * 1e-4 * (1 + 1e-6)


@pytest.mark.parametrize("whole_step", [False, True])
def test_bfloat16_and_autocast_sum_in_float32(whole_step: bool) -> None:
    batch = make_batch()
    model = make_model("bert", torch.bfloat16).float()
    norms, want = engine_sum(model, batch, 0.7)
    engine = GradientEngine(model, clip=0.7, products=products_of(model))
    with engine.attached(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=whole_step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = losses(model, batch)
        values.sum().backward()
        (sketch, *_) = (p._sketch for p in engine._parts if hasattr(p, "_sketch"))
        assert (
            float((sketch.bfloat16().float() == sketch)[sketch != 0].float().mean()) < 0.1
        )  # not a product in bfloat16
        got_norms = engine.accumulate(len(LENGTHS)).norms
        got = engine.private_sum(Known(), 0.0, 1)
    torch.testing.assert_close(got_norms, norms, rtol=0.05, atol=0)
    assert relative_error(got, want) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_count_as_zero(bad: float) -> None:
    model, batch = make_model("bert"), make_batch()
    spoil = torch.tensor([1, bad, 1, 1], dtype=torch.float64)
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        (losses(model, batch) * spoil).sum().backward()
        clipped = engine.accumulate(4)
        got = engine.private_sum(Known(), 0.0, 1)
    assert clipped.nonfinite == 1
    assert clipped.norms.isfinite().tolist() == [True, False, True, True]
    rest = {k: v[[0, 2, 3]] for k, v in batch.items()}
    assert_equal(got, engine_sum(model, rest, 0.5)[1], 1e-9)


def test_rows_beyond_float32_count_as_zero() -> None:
    """The norm is finite in float64 while P is infinite: zero times infinity would spoil the sum."""
    x, weights = torch.ones(3, 2, 8), torch.ones(3, 2, 8)
    x[1] *= 1e30
    weights[1] *= 1e30
    engine = GradientEngine(Pair(8, 8), clip=0.5, products=PAIR)
    with engine.attached():
        call(engine._model, (x, weights)).sum().backward()
        assert engine.accumulate(3).nonfinite == 1
        got = engine.private_sum(Known(), 0.0, 1)["b.weight"]
    assert_equal(
        {"b": got},
        {"b": engine_sum(Pair(8, 8), (x[::2], weights[::2]), 0.5, call, PAIR)[1]["b.weight"]},
        1e-6,
    )


# --- noise ----------------------------------------------------------------------------------------


def noise_alone(model: nn.Module, draw: Tensor, products: list[WeightProduct] = PAIR) -> Tensor:
    """What an empty draw releases for B, given the one draw of its noise; sigma 1.5, C 0.5, b 8."""
    engine = GradientEngine(model, clip=0.5, products=products)
    with engine.attached():
        return engine.private_sum(Known(draws=[draw]), 1.5, 8)[products[0].b]


@pytest.mark.parametrize("deficient", [False, True])
def test_noise_for_known_normals(deficient: bool) -> None:
    """Linear in Z, and with orthonormal rows in Z its own Gram matrix is s^2 sigma^2 C^2 A A^T / b^2."""
    pair = Pair(n=7, m=9, r=4).double()
    a = pair.a.weight.data
    if deficient:
        a[2] = 2 * a[0] - a[1]
        a[3] = 0
    want = (4.0 * 1.5 * 0.5 / 8) ** 2 * a @ a.t()
    eye = torch.eye(9, 4, dtype=torch.float64)
    root = noise_alone(pair, eye)
    torch.testing.assert_close(root.t() @ root, want, rtol=1e-12, atol=1e-15)
    z = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(noise_alone(pair, z), z @ root[:4], rtol=1e-12, atol=1e-15)


def test_noise_is_that_of_the_whole_matrix_times_a() -> None:
    """Z is N Q for a standard normal N (m x n) and A^T = Q R, so that the release is N A^T."""
    pair = Pair(n=7, m=9, r=4).double()
    whole = torch.randn(9, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, r = torch.linalg.qr(pair.a.weight.detach().t())
    torch.testing.assert_close(q @ r, pair.a.weight.t(), rtol=1e-12, atol=1e-12)
    want = 4.0 * 1.5 * 0.5 / 8 * whole @ pair.a.weight.t()
    torch.testing.assert_close(noise_alone(pair, whole @ q), want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("deficient", [False, True])
def test_noise_has_the_stated_covariance(deficient: bool) -> None:
    """Rows ~ N(0, s^2 sigma^2 C^2 A A^T / b^2): 4 % on the variance, a factor of 1.1 would be 21 %."""
    pair = Pair(n=7, m=2000, r=3)
    if deficient:
        pair.a.weight.data[2] = pair.a.weight.data[0]
    engine, randomness = GradientEngine(pair, clip=0.5, products=PAIR), Known(seed=4)
    with engine.attached():
        draws = torch.cat([engine.private_sum(randomness, 1.5, 8)["b.weight"] for _ in range(10)]).double()
    a = pair.a.weight.detach().double()
    want = (4.0 * 1.5 * 0.5 / 8) ** 2 * a @ a.t()
    values, axes = torch.linalg.eigh(want)
    kept = values > 1e-9 * values.max()
    assert int(kept.sum()) == (2 if deficient else 3)
    white = draws @ axes[:, kept] / values[kept].sqrt()
    covariance = white.t() @ white / len(white)
    assert float((covariance - torch.eye(len(covariance), dtype=torch.float64)).abs().max()) < 0.04
    assert float(white.mean(0).abs().max()) < 0.03
    silent = draws @ axes[:, ~kept]
    assert float(silent.abs().max()) < 1e-6 if deficient else silent.numel() == 0
    first, second = draws[:2000].flatten(), draws[2000:4000].flatten()
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05  # fresh in each step


def test_noise_adds_to_the_sum_and_the_head_has_its_own() -> None:
    model, batch = make_model("bert"), make_batch()
    _, total = engine_sum(model, batch, 0.5)
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        alone = engine.private_sum(Known(seed=1), 2.0, 4)
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(seed=1), 2.0, 4)
    assert_equal(got, {n: alone[n] + g / 4 for n, g in total.items()}, 1e-9)
    trained = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    assert dict(engine.shapes) == trained == {n: g.shape for n, g in alone.items()}
    head = next(g for n, g in alone.items() if n.endswith("classifier.modules_to_save.default.weight"))
    assert float(head.std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.4)


@pytest.mark.parametrize("r", [3, 9])
def test_a_rank_deficient_a(r: int) -> None:
    """Fewer directions than rows: equal rows, a zero row, or more rows than inputs."""
    model, x = net(r=r)
    a = model.get_parameter("base_model.model.inner.lora_A.default.weight").data
    a[1], a[2] = a[0], 0
    assert torch.linalg.matrix_rank(a) == min(r - 2, 6)
    samples = written_out(model, x, call)
    clip = float(norms_of(samples).median())
    norms, got = engine_sum(model, x, clip, call)
    torch.testing.assert_close(norms, norms_of(samples), rtol=1e-9, atol=0)
    assert_equal(got, clipped_products(model, samples, clip), 1e-9)


# --- life and refusals ----------------------------------------------------------------------------


def test_a_may_change_between_attachments_but_not_within() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        engine.private_sum(Known(), 1.0, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.mul_(-2).add_(0.1)
    with engine.attached():
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 1)
        assert_equal(got, clipped_products(model, on_merged_weights(copy.deepcopy(model), batch), 0.5), 1e-9)
        model.get_parameter(products_of(model)[0].a).data[0, 0] += 1
        with pytest.raises(ConfigError, match=r"lora_A.* changed while the engine was attached"):
            engine.private_sum(Known(), 1.0, 1)
    model.get_parameter(products_of(model)[0].a).data[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"lora_A.* is not finite"):
        engine.attach()


def test_detach_restores_the_model() -> None:
    model, batch = make_model("bert"), make_batch()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    engine, other = (GradientEngine(model, clip=0.5, products=products_of(model)) for _ in range(2))
    with engine.attached():
        with pytest.raises(ConfigError, match=r"lora_A.* another engine"):
            other.attach()
        losses(model, batch).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        engine.accumulate(len(LENGTHS))
    assert all(before[n].keys() == m.__dict__.keys() for n, m in model.named_modules())
    losses(model, batch).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_deep_copy_is_a_plain_model() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        losses(model, batch)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.01)
        assert not torch.equal(losses(twin, batch), losses(model, batch))
        losses(twin, batch).sum().backward()
        assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)
        engine.discard()
        assert all(bool((g == 0).all()) for g in engine.private_sum(Known(), 0.0, 1).values())
    twin.zero_grad()
    want = clipped_products(twin, on_merged_weights(twin, batch), 0.5)
    assert_equal(engine_sum(twin, batch, 0.5)[1], want, 1e-9)


def test_discard_forgets_a_failed_micro_batch() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5, products=products_of(model))
    with engine.attached():
        losses(model, batch).sum().backward()
        with pytest.raises(RuntimeError, match="neither accumulated nor discarded"):
            engine.private_sum(Known(), 0.0, 1)
        engine.discard()
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 1)
    assert_equal(got, engine_sum(model, batch, 0.5)[1], 1e-12)


def test_a_weight_used_outside_of_its_layer_is_named() -> None:
    pair, batch = Pair(3, 3), (torch.ones(2, 1, 3), torch.ones(2, 1, 3))
    engine = GradientEngine(pair, clip=1.0, products=PAIR)
    with engine.attached():
        (call(pair, batch).sum() + pair.b.weight.sum()).backward()
        with pytest.raises(ConfigError, match=r"b\.weight has a \.grad"):
            engine.accumulate(2)


def test_layers_without_one_row_per_example_are_named() -> None:
    pair, x = Pair(3, 3), torch.ones(2, 4, 3)
    engine = GradientEngine(pair, clip=1.0, products=PAIR)
    with engine.attached():
        pair.b(pair.a(x.flatten(0, 1))).sum().backward()
        with pytest.raises(ConfigError, match="b saw 8 rows in a micro-batch of 2"):
            engine.accumulate(2)
        with pytest.raises(ConfigError, match="b saw"):
            (pair.b(pair.a(x)).sum() + pair.b(pair.a(x[:1])).sum()).backward()


def test_something_between_a_and_b_is_refused() -> None:
    """The input of A would not be what the gradient at B's output belongs to."""
    pair, x = Pair(3, 3), torch.ones(2, 4, 3)
    engine = GradientEngine(pair, clip=1.0, products=PAIR)
    with engine.attached():
        for wrong in (lambda: pair.b(torch.tanh(pair.a(x))), lambda: pair.b(torch.ones(2, 4, 4))):
            with pytest.raises(ConfigError, match="b does not read the output of its A unchanged"):
                wrong()
        u = pair.a(x)
        pair.b(u)
        with pytest.raises(ConfigError, match="unchanged"):
            pair.b(u)


def test_products_that_do_not_fit_are_refused() -> None:
    model = make_model("bert")
    (first, second, *_) = products_of(model)
    head = "base_model.model.classifier.modules_to_save.default.weight"

    def refused(match: str, *products: WeightProduct, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            GradientEngine(model, clip=1.0, products=products, **options)

    refused("nowhere is not the frozen", WeightProduct("nowhere", first.b, 1.0))
    refused("lora_B.* is not the frozen", WeightProduct(first.b, first.b, 1.0))
    refused("nowhere is not the trained", WeightProduct(first.a, "nowhere", 1.0))
    refused(
        "classifier.* is not the trained weight of an nn.Linear without bias",
        WeightProduct(first.a, head, 1.0),
    )
    refused("lora_A.* is not the trained", WeightProduct(first.a, second.a, 1.0))
    refused("another product", first, first)
    refused("another product", first, WeightProduct(first.a, second.b, 1.0))
    slots = torch.zeros(model.get_parameter(first.b).numel(), dtype=torch.int64)
    refused(
        "in the projection",
        first,
        projection=ProjectedParameters(slots, torch.ones(len(slots)), 1, (first.b,)),
    )
    for scaling in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="a scaling of"):
            WeightProduct(first.a, first.b, scaling)
    model.get_parameter(first.a).requires_grad_(True)
    refused("lora_A.* is not the frozen", first)
    wide = nn.ModuleDict(
        {"a": nn.Linear(3, 2, bias=False).requires_grad_(False), "b": nn.Linear(4, 5, bias=False)}
    )
    with pytest.raises(ConfigError, match=r"b\.weight reads 4 numbers, but a\.weight gives 2"):
        GradientEngine(wide, clip=1.0, products=PAIR)


def test_a_that_begins_to_train_is_refused() -> None:
    model = make_model("bert")
    engine = GradientEngine(model, clip=1.0, products=products_of(model))
    model.get_parameter(products_of(model)[0].a).requires_grad_(True)
    with pytest.raises(ConfigError, match=r"lora_A.* began or ceased to train"):
        engine.attach()


# --- a method's way to it -------------------------------------------------------------------------


def test_factors_take_the_step_of_the_definition(settings: list[str]) -> None:
    """The trainer hands names and scaling on: one step on a node's rows, from gradients of the merged weights."""
    config = compose([*settings, "privacy.clip=0.4", "train.micro_batch=4"])
    model, rng = build_model(config), np.random.default_rng(0)
    ids = [rng.integers(200, 3000, size=rng.integers(3, 12)) for _ in range(9)]
    rows = Tokenised(ids, rng.integers(0, 2, size=9))
    generator = torch.Generator().manual_seed(1)
    model.load({n: torch.randn(v.shape, generator=generator) * 0.2 for n, v in model.initial().items()})
    names = [*model.spec.b, *model.spec.head]
    trained = Factors(model, names, clip_products=True)
    assert [t.b for t in trained.products] == list(model.spec.b)
    assert Factors(model, names).products == ()

    before, s = model.read([*model.spec.lora, *model.spec.head]), model.spec.scaling
    weights = {
        t.b: model.module.backbone.get_submodule(t.name).base_layer.weight.requires_grad_(True)
        for t in model.spec.targets
    }
    wanted = {**weights, **{n: model.parameter(n).requires_grad_(True) for n in model.spec.head}}
    expected = {n: torch.zeros_like(p) for n, p in wanted.items()}
    clipped = 0
    for i in range(len(rows)):
        batch = pad_batch(rows, [i], 0, "cpu")
        labels = batch.pop("labels")
        found = torch.autograd.grad(F.cross_entropy(model.module(**batch), labels), list(wanted.values()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in found))
        clipped += norm > 0.4
        for n, g in zip(wanted, found, strict=True):
            expected[n] += g * min(1.0, 0.4 / norm)
    assert clipped
    for p in wanted.values():
        p.requires_grad_(False)

    trainer = Trainer(model, rows, 0, config.train, config.privacy)
    trainer.train_private(trained, 1, Noise(1.0, 0.0, Known()))
    after = model.read(before)
    lr, b = config.train.lr, config.train.batch_size
    for t in model.spec.targets:
        torch.testing.assert_close(after[t.a], before[t.a], rtol=0, atol=0)
        step = s * expected[t.b] @ before[t.a].t()
        torch.testing.assert_close(after[t.b], before[t.b] - lr / b * step, rtol=1e-4, atol=1e-6)
    for n in model.spec.head:
        torch.testing.assert_close(
            after[n], before[n] - (config.train.head_lr or lr) / b * expected[n], rtol=1e-4, atol=1e-6
        )
    with pytest.raises(ConfigError, match=r"lora_A.* is not the frozen weight"):
        trainer.train_private(
            Factors(model, [*model.spec.lora], clip_products=True), 1, Noise(1.0, 0.0, Known())
        )
