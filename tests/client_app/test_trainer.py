"""The local steps against gradients taken one example at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from client_app.trainer import Noise, Trainer
from privet.adapters import AdaptedModel, build_model
from privet.config import Config, compose
from privet.data.collate import Tokenised, pad_batch
from privet.errors import ConfigError
from privet.privacy.rng import SeededRandomness
from privet.projection import Projection, flatten, random_projection
from privet.trainables import THETA, Factors, Projected


class Everything:
    """Draws every row; noise comes from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = SeededRandomness(seed)

    def normal(self, shape: Sequence[int], *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        return self._rng.normal(shape, device=device, dtype=dtype)

    def uniform(self, n: int) -> NDArray[np.float64]:
        return np.zeros(n)


class Nothing(Everything):
    """Draws no row."""

    def uniform(self, n: int) -> NDArray[np.float64]:
        return np.ones(n) * (1 - 2**-53)


def tiny(settings: list[str], *overrides: str) -> Config:
    return compose([*settings, *overrides])


def rows(count: int = 11, seed: int = 0) -> Tokenised:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(200, 3000, size=rng.integers(3, 12)) for _ in range(count)]
    return Tokenised(ids, rng.integers(0, 2, size=count))


def start(model: AdaptedModel, seed: int = 1) -> dict[str, Tensor]:
    """Non-zero values everywhere, so that every factor has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(v.shape, generator=generator) * 0.2 for n, v in model.initial().items()}


def one_at_a_time(model: AdaptedModel, data: Tokenised, names: Sequence[str]) -> list[dict[str, Tensor]]:
    """Gradients of every example by itself (float32)."""
    out = []
    parameters = [model.parameter(n) for n in names]
    for p in parameters:
        p.requires_grad_(True)
    for i in range(len(data)):
        batch = pad_batch(data, [i], 0, "cpu")
        labels = batch.pop("labels")
        loss = torch.nn.functional.cross_entropy(model.module(**batch), labels)
        grads = torch.autograd.grad(loss, parameters)
        out.append({n: g.detach().clone() for n, g in zip(names, grads, strict=True)})
    for p in parameters:
        p.requires_grad_(False)
    return out


def trainer(config: Config, model: AdaptedModel, data: Tokenised) -> Trainer:
    return Trainer(model, data, 0, config.train, config.privacy)


@pytest.mark.parametrize("micro", [1, 3, 100])
def test_a_private_step_is_the_definition(settings: list[str], micro: int) -> None:
    config = tiny(settings, "privacy.clip=0.4", f"train.micro_batch={micro}", "train.head_lr=0.25")
    model, data = build_model(config), rows()
    model.load(start(model))
    names = [*model.spec.lora, *model.spec.head]
    before = model.read(names)
    expected = {n: torch.zeros_like(v) for n, v in before.items()}
    norms = []
    for gradient in one_at_a_time(model, data, names):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
        norms.append(norm)
        for n in names:
            expected[n] += gradient[n] * min(1.0, 0.4 / norm)
    assert max(norms) > 0.4  # otherwise nothing is clipped
    seen = trainer(config, model, data).train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything()))
    after = model.read(names)
    for n in names:
        lr = 0.25 if n in model.spec.head else 0.5
        # The divisor is the expected batch of 16, not the 11 rows that were drawn.
        torch.testing.assert_close(after[n], before[n] - lr * expected[n] / 16, rtol=1e-4, atol=1e-6)
    assert seen.drawn == (11,)
    assert seen.grad_norm == pytest.approx(float(np.median(norms)), rel=1e-4)


def projected(model: AdaptedModel, rule: Projection) -> Projected:
    shapes = model.spec.lora
    offset = {n: model.initial()[n] for n in shapes}
    return Projected(model, rule, torch.randn(rule.d) * 0.1, offset, list(model.spec.head))


def test_a_projected_private_step_is_the_dense_one(settings: list[str]) -> None:
    """P^T first, then one clip over theta and the head."""
    config = tiny(settings, "privacy.clip=0.4")
    model, data = build_model(config), rows()
    model.load({"head.weight": torch.randn(2, 32), "head.bias": torch.randn(2)})
    base = random_projection(1024, 160, 0)
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], 1024)).float()
    trained = projected(model, Projection(base.slots, signs, 160))
    rule = trained.projection[0]
    dense = torch.zeros(1024, 160)
    dense[torch.arange(1024), rule.slots] = rule.coefficients
    names = [*model.spec.lora, *model.spec.head]
    theta, head = trained.theta.detach().clone(), model.read(model.spec.head)
    sums = {THETA: torch.zeros(160), **{n: torch.zeros_like(v) for n, v in head.items()}}
    for gradient in one_at_a_time(model, data, names):
        own = {THETA: dense.T @ flatten(gradient, model.spec.lora), **{n: gradient[n] for n in head}}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in own.values()))
        for n, g in own.items():
            sums[n] += g * min(1.0, 0.4 / norm)
    trainer(config, model, data).train_private(trained, 1, Noise(1.0, 0.0, Everything()))
    new_theta = theta - 0.5 * sums[THETA] / 16
    torch.testing.assert_close(trained.theta.detach(), new_theta, rtol=1e-4, atol=1e-6)
    for n in head:
        torch.testing.assert_close(model.read([n])[n], head[n] - 0.5 * sums[n] / 16, rtol=1e-4, atol=1e-6)
    initial = flatten(model.initial(), model.spec.lora)
    factors = flatten(model.read(model.spec.lora), model.spec.lora)
    torch.testing.assert_close(factors, initial + dense @ new_theta, rtol=1e-4, atol=1e-5)


def test_noise_has_sigma_c_over_b_in_every_coordinate_also_on_empty_draws(settings: list[str]) -> None:
    """Rule 3 and cases 2 and 3: an empty draw is a step of noise alone, over all that trains."""
    config = tiny(settings, "privacy.clip=0.4", "train.lr=1")
    model, data = build_model(config), rows()
    names = [*model.spec.lora, *model.spec.head]
    before = model.read(names)
    seen = trainer(config, model, data).train_private(Factors(model, names), 50, Noise(0.1, 2.0, Nothing()))
    assert seen.steps == 50
    assert seen.drawn == (0,) * 50
    assert math.isnan(seen.train_loss)
    moved = {n: v - before[n] for n, v in model.read(names).items()}
    assert all(bool((m != 0).all()) for m in moved.values())
    for m in (moved[next(iter(model.spec.a))], moved[next(iter(model.spec.b))], moved["head.weight"]):
        assert float(m.std()) == pytest.approx(2.0 * 0.4 / 16 * math.sqrt(50), rel=0.35)
    every = torch.cat([m.flatten() for m in moved.values()])
    assert float(every.std()) == pytest.approx(2.0 * 0.4 / 16 * math.sqrt(50), rel=0.08)


def test_a_local_head_is_noised_like_everything_else(settings: list[str]) -> None:
    """Rule 4: what trains on private rows is inside the noised vector, also what never leaves."""
    config = tiny(settings, "task.head=local")
    model, data = build_model(config), rows()
    names = [*model.spec.b, *model.spec.head]
    trainer(config, model, data).train_private(Factors(model, names), 1, Noise(0.1, 1.0, Nothing()))
    assert bool((model.read(["head.weight"])["head.weight"] != 0).all())


def test_weight_decay_acts_after_the_noise(settings: list[str]) -> None:
    """Rule 5: the same noise with and without decay differs by exactly lr * decay * w."""
    moved = []
    for decay in (0.0, 0.3):
        config = tiny(settings, f"train.weight_decay={decay}")
        model, data = build_model(config), rows()
        model.load(start(model))
        names = list(model.spec.b)
        before = model.read(names)
        trainer(config, model, data).train_private(Factors(model, names), 1, Noise(1.0, 1.0, Everything(3)))
        moved.append({n: v - before[n] for n, v in model.read(names).items()})
    for n in names:
        torch.testing.assert_close(moved[1][n] - moved[0][n], -0.5 * 0.3 * before[n], rtol=1e-3, atol=1e-6)


class Pull:
    """Draws every leaf to zero, and writes down what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Tensor], dict[str, float]]] = []

    def before_step(self, leaves: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        assert not torch.is_grad_enabled()
        self.seen.append(({n: p.grad.clone() for n, p in leaves.items() if p.grad is not None}, dict(rates)))
        for leaf in leaves.values():
            leaf.grad += 0.3 * leaf


@pytest.mark.parametrize("private", [True, False])
def test_a_correction_acts_after_the_noise_in_every_step(settings: list[str], private: bool) -> None:
    """Rule 5: with equal noise, one step with and without differs by exactly the correction."""
    moved, pull = [], Pull()
    for correction in (None, pull):
        config = tiny(settings, "train.head_lr=0.25", *([] if private else ["privacy=none"]))
        model, data = build_model(config), rows()
        model.load(start(model))
        names = [*model.spec.b, *model.spec.head]
        before = model.read(names)
        local, factors = trainer(config, model, data), Factors(model, names)
        if private:
            local.train_private(factors, 1, Noise(1.0, 1.0, Everything(3)), correction=correction)
        else:
            local.train_plain(factors, 1, 0, correction=correction)
        moved.append({n: v - before[n] for n, v in model.read(names).items()})
    ((gradients, rates),) = pull.seen
    assert rates == {n: 0.25 if n in model.spec.head else 0.5 for n in names}
    for n in names:
        torch.testing.assert_close(moved[0][n], -rates[n] * gradients[n], rtol=1e-4, atol=1e-6)
        pulled = moved[1][n] - moved[0][n]
        torch.testing.assert_close(pulled, -rates[n] * 0.3 * before[n], rtol=1e-3, atol=1e-6)


def test_frozen_parameters_stay_and_nothing_trains_afterwards(settings: list[str]) -> None:
    config = tiny(settings)
    model, data = build_model(config), rows()
    before = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    names = [*model.spec.b, *model.spec.head]
    trainer(config, model, data).train_private(Factors(model, names), 2, Noise(0.5, 1.0, Everything()))
    trained = {model.full_name(n) for n in names}
    for n, p in model.module.named_parameters():
        assert torch.equal(p, before[n]) == (n not in trained)
        assert not p.requires_grad
        assert p.grad is None


@pytest.mark.parametrize("micro", [1, 4, 100])
def test_plain_training_follows_its_seed_and_not_the_micro_batch(settings: list[str], micro: int) -> None:
    results = []
    for size, seed in ((micro, 5), (11, 5), (11, 6)):
        config = tiny(settings, "privacy=none", f"train.micro_batch={size}", "train.batch_size=4")
        model = build_model(config)
        names = [*model.spec.lora, *model.spec.head]
        trainer(config, model, rows()).train_plain(Factors(model, names), 5, seed)
        results.append(flatten(model.read(names), dict.fromkeys(names, ())))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(results[1], results[2], rtol=1e-3)


def test_a_projection_that_only_reorders_is_plain_lora(settings: list[str]) -> None:
    """P a permutation, d = D: FedHSIP's local training is FedIT's."""
    config = tiny(settings, "privacy=none")
    results = []
    for use_projection in (False, True):
        model = build_model(config)
        shapes = model.spec.lora
        if use_projection:
            trained: Projected | Factors = Projected(
                model,
                random_projection(1024, 1024, 3),
                torch.zeros(1024),
                {n: model.initial()[n] for n in shapes},
                list(model.spec.head),
            )
        else:
            trained = Factors(model, [*shapes, *model.spec.head])
        trainer(config, model, rows()).train_plain(trained, 4, 0)
        results.append(model.read([*shapes, *model.spec.head]))
    for n, v in results[0].items():
        torch.testing.assert_close(v, results[1][n], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("private", [True, False])
def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(
    settings: list[str], private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(limit: int) -> dict[str, Tensor]:
        config = tiny(settings, "train.batch_size=11", *([] if private else ["privacy=none"]))
        model = build_model(config)
        model.load(start(model))
        forward = model.module.forward

        def limited(**inputs: Tensor) -> Tensor:
            if len(inputs["input_ids"]) > limit:
                raise torch.OutOfMemoryError("no memory")
            return forward(**inputs)

        monkeypatch.setattr(model.module, "forward", limited)
        names = [*model.spec.lora, *model.spec.head]
        if private:
            trainer(config, model, rows()).train_private(
                Factors(model, names), 2, Noise(1.0, 0.0, Everything())
            )
        else:
            trainer(config, model, rows()).train_plain(Factors(model, names), 2, 0)
        return model.read(names)

    plenty, little = result(100), result(2)
    for n, v in plenty.items():
        torch.testing.assert_close(v, little[n], rtol=1e-4, atol=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        result(0)


def test_a_row_that_is_not_finite_counts_for_nothing_and_spoils_nothing(settings: list[str]) -> None:
    """Rule 8: its gradient is zero, the count stays local, the step goes on."""
    config = tiny(settings)
    model = build_model(config)
    embeddings = model.module.get_parameter("backbone.embeddings.word_embeddings.weight")
    with torch.no_grad():
        embeddings[199] = math.nan  # a token that one row alone has
    data = rows()
    data.ids[4][0] = 199
    names = [*model.spec.b, *model.spec.head]
    seen = trainer(config, model, data).train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything()))
    assert seen.nonfinite == 1
    assert all(bool(torch.isfinite(v).all()) for v in model.read(names).values())
    assert bool(model.read(["head.bias"])["head.bias"].any())


def mix(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
    """Take the mean over the batch off, as no model of transformers does."""
    return output - output.mean(0, keepdim=True)


def test_a_model_that_mixes_a_batch_is_refused_before_a_row_is_drawn(settings: list[str]) -> None:
    """From the values a run starts with: the head and every B are zero, and no gradient of a row would show it."""

    class Untouched(Everything):
        def uniform(self, n: int) -> NDArray[np.float64]:
            raise AssertionError("a row was drawn")

    config = tiny(settings, "privacy.clip=1.0", "train.micro_batch=4")
    model, data = build_model(config), rows()
    names = [*model.spec.lora, *model.spec.head]
    before = model.read(names)
    handle = model.module.backbone.get_submodule("encoder.layer.0.output").register_forward_hook(mix)
    with pytest.raises(ConfigError, match=r"the loss of one example has a gradient in the rows of others"):
        trainer(config, model, data).train_private(Factors(model, names), 1, Noise(1.0, 0.0, Untouched()))
    after = model.read(names)
    assert all(torch.equal(after[n], before[n]) for n in names)
    trainer(config, model, data).train_plain(Factors(model, names), 1, 0)  # no promise, no refusal
    alone = tiny(settings, "privacy.clip=1.0", "train.micro_batch=1")
    trainer(alone, model, data).train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything()))
    handle.remove()
    trainer(config, model, data).train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything()))


def test_looking_for_mixing_leaves_no_trace(settings: list[str]) -> None:
    config = tiny(settings, "privacy.clip=1.0", "train.micro_batch=4", "model.lora.dropout=0.5")
    model, data = build_model(config), rows()
    model.load(start(model))
    names = [*model.spec.lora, *model.spec.head]
    before, state = model.read(names), torch.get_rng_state()
    seen = trainer(config, model, data).train_private(Factors(model, names), 0, Noise(1.0, 0.0, Nothing()))
    after = model.read(names)
    assert all(torch.equal(after[n], before[n]) for n in names)
    assert torch.equal(torch.get_rng_state(), state)
    assert (seen.steps, seen.drawn) == (0, ())
