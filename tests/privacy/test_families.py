"""Every family's per-example gradients against batches of one, in every way that an adapter is clipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from privet.errors import ConfigError
from privet.privacy.engine import GradientEngine
from privet.privacy.parts import THETA
from tests.privacy.families import (
    FAMILIES,
    IMAGE,
    Batch,
    Gradients,
    Known,
    NoFloat32,
    assert_equal,
    batches_of_one,
    clipped_products,
    clipped_sum,
    engine_sum,
    freeze_a,
    loss_of,
    make_batch,
    make_model,
    norms_of,
    on_merged_weights,
    one_of,
    products_of,
    random_projection,
    relative_error,
    rows_of,
)

Case = tuple[Any, dict[str, Any], Gradients, Callable[[float], Gradients]]


@lru_cache(maxsize=2)
def slow(family: str, dtype: torch.dtype) -> tuple[Any, Gradients]:
    """The model with both factors training, and its per-example gradients."""
    model = make_model(family, dtype)
    return model, batches_of_one(model, make_batch(family=family), loss_of(family))


def both_factors(family: str, dtype: torch.dtype) -> Case:
    model, samples = slow(family, dtype)
    return model, {}, samples, lambda clip: clipped_sum(samples, clip)


def b_only(family: str, dtype: torch.dtype) -> Case:
    """With A frozen the gradient still flows through it to earlier layers."""
    model, samples = slow(family, dtype)
    samples = {n: g for n, g in samples.items() if "lora_A" not in n}
    return freeze_a(copy.deepcopy(model)), {}, samples, lambda clip: clipped_sum(samples, clip)


def whole_weight(family: str, dtype: torch.dtype) -> Case:
    model = freeze_a(copy.deepcopy(slow(family, dtype)[0]))
    samples = on_merged_weights(copy.deepcopy(model).double(), make_batch(family=family), loss_of(family))
    geometry = {"products": products_of(model)}
    return model, geometry, samples, lambda clip: clipped_products(model, samples, clip)


def projected(family: str, dtype: torch.dtype) -> Case:
    """Clipped after projecting, against the dense matrix."""
    model, samples = slow(family, dtype)
    order = tuple(n for n in samples if "lora_" in n)
    rule = random_projection(model, 37, order)
    P = torch.zeros(len(rule.slots), rule.d, dtype=dtype)
    P[torch.arange(len(P)), rule.slots] = rule.coefficients.to(dtype)
    shared = {THETA: torch.cat([samples[n].flatten(1) for n in order], 1) @ P}
    shared |= {n: g for n, g in samples.items() if n not in order}
    return model, {"projection": rule}, shared, lambda clip: clipped_sum(shared, clip)


MODES = {"A and B": both_factors, "B": b_only, "W": whole_weight, "theta": projected}


def median_clip(samples: Gradients) -> float:
    norms = norms_of(samples)
    return float(norms[norms > 0].median())


def check(family: str, mode: str, dtype: torch.dtype, tolerance: float) -> None:
    model, geometry, samples, clipped = MODES[mode](family, dtype)
    norms = norms_of(samples)
    assert int((norms > 0).sum()) >= 3  # a row of one token has nothing to predict
    clip = median_clip(samples)  # some examples are clipped, some are not
    want = clipped(clip)
    assert all(float(w.abs().max()) > 0 for w in want.values())
    got_norms, got = engine_sum(model, make_batch(family=family), clip, loss_of(family), **geometry)
    torch.testing.assert_close(got_norms.double(), norms, rtol=tolerance, atol=tolerance)
    assert_equal(got, want, tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_batches_of_one_in_float64(family: str, mode: str) -> None:
    with NoFloat32():
        check(family, mode, torch.float64, 1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_batches_of_one_in_float32(family: str, mode: str) -> None:
    check(family, mode, torch.float32, 1e-5)


# --- the same in every other way that a family is run ------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "opt", "t5", "llava-projector"])
def test_gradient_checkpointing_changes_nothing(family: str, reentrant: bool, mode: str) -> None:
    """By transformers' own switch, in layers that get more than hidden states (the decoder of T5)."""
    model, geometry, samples, _ = MODES[mode](family, torch.float64)
    model, batch, loss = copy.deepcopy(model), make_batch(family=family), loss_of(family)
    clip = median_clip(samples)
    norms, want = engine_sum(model, batch, clip, loss, **geometry)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    repeated = []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    linear = next(m for m in layer.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(lambda *_: repeated.append(None))
    got_norms, got = engine_sum(model, batch, clip, loss, **geometry)
    assert len(repeated) >= 2  # it was checkpointed
    torch.testing.assert_close(got_norms, norms, rtol=1e-12, atol=1e-12)
    assert_equal(got, want, 1e-12)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "opt", "t5", "llava"])
def test_reentrant_checkpointing_without_gradients_of_the_inputs_is_refused(family: str) -> None:
    model = make_model(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.disable_input_require_grads()
    engine = GradientEngine(model, clip=1.0)
    with pytest.raises(ConfigError, match="re-entrant checkpointing loses the gradients"):
        engine.attach()


@pytest.mark.parametrize("region", [True, False], ids=["autocast", "base"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "opt", "t5", "llava-projector"])
def test_bfloat16_is_as_near_as_plain_bfloat16(family: str, region: bool) -> None:
    """Clipped, summed and released in float32: the error is that of the backward pass, not larger."""
    batch, loss = make_batch(family=family), loss_of(family)
    model = make_model(family, torch.bfloat16)
    wide = copy.deepcopy(model).float()
    model = copy.deepcopy(wide) if region else model

    def in_region(m: nn.Module, b: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=region):
            return loss(m, b)

    clip = median_clip(batches_of_one(wide, batch, loss))
    want = clipped_sum(batches_of_one(wide, batch, loss), clip)
    plain = {n: g.float() for n, g in batches_of_one(model, batch, in_region).items()}
    _, got = engine_sum(model, batch, clip, in_region)
    assert {g.dtype for g in got.values()} == {torch.float32}
    error = relative_error(got, want)
    assert 1e-4 < error < 0.15
    assert error < 1.5 * relative_error(clipped_sum(plain, clip), want) + 0.01
    for row in range(3):  # the very same forward pass: what the engine adds is one rounding to 8 bits
        one = one_of(batch, row)
        alone = {n: g[0].float() for n, g in batches_of_one(model, one, in_region).items()}
        assert relative_error(engine_sum(model, one, 1e9, in_region)[1], alone) < 0.008
    largest = max(got.values(), key=Tensor.numel)  # a sum in bfloat16 has 8 bits
    assert float((largest.bfloat16().float() == largest)[largest != 0].float().mean()) < 0.5


@pytest.mark.parametrize("clip", [1e-3, 1e3])
@pytest.mark.parametrize("mode", ["A and B", "theta"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_no_example_of_a_language_model_exceeds_the_clip(family: str, mode: str, clip: float) -> None:
    """One example a micro-batch, in float32: what is summed has a norm of C, up to the last digits."""
    model, geometry, _, _ = MODES[mode](family, torch.float32)
    for row in range(3):
        one = one_of(make_batch(family=family), row)
        norms, got = engine_sum(model, one, clip, loss_of(family), **geometry)
        norm = float(torch.cat([g.flatten() for g in got.values()]).double().norm())
        assert norm <= clip * (1 + 1e-6)
        assert norm == pytest.approx(min(clip, float(norms)), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "llava-projector"])
def test_rows_of_a_language_model_that_are_not_finite_count_as_zero(family: str, mode: str) -> None:
    """Rule 8, from an embedding or an image of that row alone on: not a bad loss, but bad numbers on the way."""
    model, geometry, samples, _ = MODES[mode](family, torch.float64)
    model, clip = copy.deepcopy(model), median_clip(samples)
    batch = make_batch(family=family)
    if "pixel_values" in batch:
        batch["pixel_values"][1] = torch.inf
    else:
        batch["input_ids"][1, 0] = IMAGE
        model.get_input_embeddings().weight.data[IMAGE] = torch.nan
    engine = GradientEngine(model, clip=clip, **geometry)
    with engine.attached():
        loss_of(family)(model, batch).sum().backward()
        clipped = engine.accumulate(4)
        got = engine.private_sum(Known(), 0.0, 1)
    assert clipped.nonfinite == 1
    assert clipped.norms.isfinite().tolist() == [True, False, True, True]
    _, want = engine_sum(model, rows_of(batch, [0, 2, 3]), clip, loss_of(family), **geometry)
    assert_equal(got, want, 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_mixes_its_examples(family: str) -> None:
    """In float32: where padding alone is in sight, softmax in float32 of a float64 mask is not a number."""
    model, batch = make_model(family, torch.float32), make_batch(family=family)
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        engine.refuse_mixing(loss_of(family)(model, batch))
        assert all(part.rows is None for part in engine._parts)
