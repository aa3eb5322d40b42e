"""Weights written from leaves: per-example gradients of the leaves against batches of one through dense weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from client_app.trainer import Noise, Trainer
from privet.adapters import AdaptedModel, build_model
from privet.config import Config, compose
from privet.data.collate import Tokenised, pad_batch
from privet.errors import ConfigError
from privet.hadamard import Hadamard, dense, private_a, private_b, pull, widen
from privet.privacy.engine import GradientEngine
from privet.privacy.pullback import Pullback


class Known:
    """A Randomness for tests: seeded normals that it remembers, and draws of every row or none."""

    def __init__(self, rows: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.drawn: list[Tensor] = []
        self.rows = rows

    def normal(self, shape: Sequence[int], *, device: Any, dtype: torch.dtype) -> Tensor:
        self.drawn.append(torch.randn(tuple(shape), generator=self.generator, dtype=dtype))
        return self.drawn[-1].clone()

    def uniform(self, n: int) -> NDArray[np.float64]:
        return np.zeros(n) if self.rows else np.ones(n)


def setting(*overrides: str, clip: float = 1.0) -> Config:
    return compose(
        ["model=tiny_random", "method=fedpara", f"privacy.clip={clip}", "train.head_lr=null", *overrides]
    )


def doubled(config: Config) -> AdaptedModel:
    model = build_model(config)
    model.module.double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if parameter.dim() == 2 and ".lora_" not in name:  # at the usual 0.02 there is hardly a gradient
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def leaves_of(model: AdaptedModel, *, scale: float = 0.4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    out = {}
    for t in model.spec.targets:
        for name, shape in (
            (t.b, (t.out, model.spec.rank)),
            (t.a, (model.spec.rank, t.inp)),
            (private_b(t), (t.out, model.spec.rank)),
            (private_a(t), (model.spec.rank, t.inp)),
        ):
            out[name] = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return out


def make_rows() -> Tokenised:
    generator = torch.Generator().manual_seed(1)
    lengths = (7, 3, 5, 9)
    texts = [torch.randint(1000, 2000, (n,), generator=generator).numpy() for n in lengths]
    return Tokenised([t.astype(np.int32) for t in texts], np.array([0, 1, 1, 0]))


def by_dense_weights(
    model: AdaptedModel, values: Mapping[str, Tensor], rows: Tokenised, *, plus_one: bool
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Each row's gradients of the leaves and the head, with dW formed and plain autograd, one row a batch."""
    found, losses = [], []
    head = list(model.spec.head)
    for row in range(len(rows)):
        leaves = {n: v.clone().requires_grad_(True) for n, v in values.items()}
        leaves |= {n: model.parameter(n).detach().clone().requires_grad_(True) for n in head}
        replaced: dict[str, Tensor] = {}
        for t in model.spec.targets:
            layer: Any = model.module.backbone.get_submodule(t.name)
            mask = leaves[private_b(t)] @ leaves[private_a(t)]
            change = (leaves[t.b] @ leaves[t.a]) * (mask + 1 if plus_one else mask)
            full = model.full_name(t.b).replace("lora_B.default.weight", "base_layer.weight")
            replaced[full] = layer.base_layer.weight.detach() + model.spec.scaling * change
            replaced |= {model.full_name(n): torch.zeros_like(model.parameter(n)) for n in (t.a, t.b)}
        replaced |= {model.full_name(n): leaves[n] for n in head}
        batch = pad_batch(rows, np.array([row]), 0, torch.device("cpu"))
        labels = batch.pop("labels")
        loss = F.cross_entropy(functional_call(model.module, replaced, (), batch), labels)
        names = list(leaves)
        found.append(dict(zip(names, torch.autograd.grad(loss, [leaves[n] for n in names]), strict=True)))
        losses.append(float(loss.detach()))
    return found, losses


class Exact(Trainer):
    """The trainer without its rounding of logits to float32."""

    def _losses(self, rows: NDArray[np.int64]) -> Tensor:
        batch = pad_batch(self._rows, rows, self._pad_id, self._model.device)
        labels = batch.pop("labels")
        return F.cross_entropy(self._model.module(**batch), labels, reduction="none")


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


@pytest.mark.parametrize("plus_one", [True, False])
def test_the_wide_pair_is_the_dense_product(plus_one: bool) -> None:
    torch.manual_seed(0)
    b, b2 = torch.randn(2, 7, 3, dtype=torch.float64)
    a, a2 = torch.randn(2, 3, 5, dtype=torch.float64)
    wide_b = widen(b, b2, plus_one=plus_one)
    wide_a = widen(a.t(), a2.t(), plus_one=plus_one).t()
    assert wide_b.shape[1] == wide_a.shape[0] == (12 if plus_one else 9)
    mask = b2 @ a2 + (1 if plus_one else 0)
    torch.testing.assert_close(wide_b @ wide_a, (b @ a) * mask, rtol=0, atol=1e-12)
    torch.testing.assert_close(dense(b, a, b2, a2, plus_one=plus_one), (b @ a) * mask, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plus_one", [True, False])
def test_the_chain_rule_is_autograds(plus_one: bool) -> None:
    torch.manual_seed(0)
    first, second = (torch.randn(6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    wide = widen(first, second, plus_one=plus_one)
    upstream = torch.randn(4, *wide.shape, dtype=torch.float64)
    got = pull(upstream, first.detach(), second.detach(), plus_one=plus_one)
    for row in range(4):
        want = torch.autograd.grad(wide, [first, second], upstream[row], retain_graph=True)
        for found, expected in zip(got, want, strict=True):
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("clip", [1e6 - 1, 0.05])
def test_clipped_gradients_of_all_leaves_equal_batches_of_one(plus_one: bool, clip: float) -> None:
    config = setting(clip=clip)
    model = doubled(config)
    rows, values = make_rows(), leaves_of(model)
    each, losses = by_dense_weights(model, values, rows, plus_one=plus_one)
    norms = torch.stack([flat(g).norm() for g in each])
    assert set(each[0]) == {*values, *model.spec.head}
    assert bool((norms < clip).all() if clip > 1 else (norms > clip).all())
    trainables = Hadamard(model, values, list(model.spec.head), plus_one=plus_one)
    trainer = Exact(model, rows, 0, config.train, config.privacy)
    seen: dict[str, Tensor] = {}

    class Look:
        """Stops the step: what the optimiser would have used."""

        def before_step(self, leaves: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
            for name, leaf in leaves.items():
                assert leaf.grad is not None
                seen[name] = leaf.grad.clone()

    shown = trainer.train_private(trainables, 1, Noise(1.0, 0.0, Known()), correction=Look())
    assert shown.train_loss == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert shown.grad_norm == pytest.approx(float(norms.median()), rel=1e-6)
    factors = (clip / norms).clamp(max=1)
    scale = max(float(g.abs().max()) for one in each for g in one.values())
    for name in each[0]:
        want = sum(f * one[name] for f, one in zip(factors, each, strict=True)) / config.train.batch_size
        assert float((seen[name] - want).abs().max()) * config.train.batch_size < 1e-9 * max(scale, 1), name
        assert seen[name].dtype == torch.float64


def test_plain_steps_have_the_same_gradients() -> None:
    config = setting("train.batch_size=4", "train.optimizer=sgd", "train.lr=0.1")
    model = doubled(config)
    rows, values = make_rows(), leaves_of(model)
    each, _ = by_dense_weights(model, values, rows, plus_one=True)
    trainables = Hadamard(model, values, list(model.spec.head), plus_one=True)
    head = {n: model.parameter(n).detach().clone() for n in model.spec.head}
    Exact(model, rows, 0, config.train, config.privacy).train_plain(trainables, 1, 0)
    for name, leaf in trainables.leaves.items():
        want = {**values, **head}[name] - 0.1 * sum(one[name] for one in each) / 4
        torch.testing.assert_close(leaf.detach(), want, rtol=0, atol=1e-9)
    for t in model.spec.targets:  # the model follows its leaves
        pair = (trainables.leaves[n].detach() for n in (t.b, t.a, private_b(t), private_a(t)))
        product = model.parameter(t.b).detach() @ model.parameter(t.a).detach()
        torch.testing.assert_close(product, dense(*pair, plus_one=True), rtol=0, atol=1e-9)


def test_an_empty_draw_is_noise_on_both_pairs() -> None:
    config = setting("train.batch_size=4", "train.optimizer=sgd", "train.lr=1.0", clip=0.5)
    model = doubled(config)
    values = leaves_of(model)
    trainables = Hadamard(model, values, [], plus_one=True)
    randomness = Known(rows=False)
    Trainer(model, make_rows(), 0, config.train, config.privacy).train_private(
        trainables, 1, Noise(0.5, 0.8, randomness)
    )
    moved = {n: (values[n] - leaf.detach()) * 4 / (0.8 * 0.5) for n, leaf in trainables.leaves.items()}
    assert sum(v.numel() for v in moved.values()) == sum(d.numel() for d in randomness.drawn)
    every, drawn = torch.cat([v.flatten() for v in moved.values()]), randomness.drawn
    # The identity as covariance: every leaf got a draw of its own, entry for entry.
    torch.testing.assert_close(every.sort()[0], torch.cat([d.flatten() for d in drawn]).sort()[0])
    for value in moved.values():
        assert any(torch.allclose(value, d, atol=1e-9) for d in drawn if d.shape == value.shape)


class Twice(nn.Module):
    """A low-rank layer used twice, with a leaf pair behind its outer weight."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(12, 5, bias=False)
        self.mix = nn.Linear(5, 12, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.mix(self.outer(x)))).sum((1, 2))


def test_two_uses_of_a_layer_add_up() -> None:
    torch.manual_seed(0)
    net = Twice().double()
    first, second = (torch.randn(5, 3, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        net.outer.weight.copy_(widen(first, second, plus_one=True))
    shapes = {"first": (5, 3), "second": (5, 3)}

    def chain(g: Tensor) -> dict[str, Tensor]:
        return dict(zip(shapes, pull(g, first, second, plus_one=True), strict=True))

    x = torch.randn(6, 2, 12, dtype=torch.float64)
    engine = GradientEngine(net, clip=0.7, pullbacks=[Pullback("outer.weight", shapes, chain)])
    assert dict(engine.shapes) == {n: torch.Size(s) for n, s in shapes.items()}
    with engine.attached():
        for part in (x[:4], x[4:]):
            net(part).sum().backward()
            engine.accumulate(rows=len(part))
        got = engine.private_sum(Known(), 0.0, 1)
    total = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
    for row in x:
        leaves = [v.clone().requires_grad_(True) for v in (first, second)]
        loss = functional_call(net, {"outer.weight": widen(*leaves, plus_one=True)}, (row[None],)).sum()
        one = dict(zip(shapes, torch.autograd.grad(loss, leaves), strict=True))
        factor = min(1.0, 0.7 / float(flat(one).norm()))
        assert factor < 1
        for name in shapes:
            total[name] += factor * one[name]
    for name in shapes:
        torch.testing.assert_close(got[name], total[name], rtol=0, atol=1e-9)


def test_rows_that_are_not_finite_count_as_zero() -> None:
    torch.manual_seed(0)
    net = Twice().double()
    halves = {"top": (2, 12), "rest": (3, 12)}
    rule = Pullback("outer.weight", halves, lambda g: {"top": g[:, :2], "rest": g[:, 2:]})
    engine = GradientEngine(net, clip=1.0, pullbacks=[rule])
    x = torch.randn(3, 2, 12, dtype=torch.float64)
    sums = []
    for batch in (x, torch.cat([x, torch.full_like(x[:1], float("inf"))])):
        with engine.attached():
            net(batch).sum().backward()
            assert engine.accumulate(rows=len(batch)).nonfinite == len(batch) - 3
            sums.append(engine.private_sum(Known(), 0.0, 1))
    for name in halves:
        torch.testing.assert_close(sums[0][name], sums[1][name])


def test_weights_that_cannot_be_pulled_back_are_refused() -> None:
    net = Twice()
    with pytest.raises(ConfigError, match="no leaves"):
        Pullback("outer.weight", {}, lambda g: {})
    rule = Pullback("outer.weight", {"leaf": (5, 12)}, lambda g: {"leaf": g})
    for rules in ([rule, rule], [Pullback("mix.weight", {"leaf": (12, 5)}, lambda g: {"leaf": g})]):
        with pytest.raises(ConfigError, match="pullbacks: "):
            GradientEngine(net, clip=1.0, pullbacks=rules)
    wrong = Pullback("outer.weight", {"leaf": (5, 11)}, lambda g: {"leaf": g})
    engine = GradientEngine(net, clip=1.0, pullbacks=[wrong])
    with engine.attached(), pytest.raises(ConfigError, match="leaf came as"):
        net(torch.randn(2, 1, 12)).sum().backward()
