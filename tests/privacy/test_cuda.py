"""The engine on GPUs: the numbers of the CPU. Skipped where there is none; two devices need two.

python -m pytest tests/privacy/test_cuda.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn

from privet.privacy.engine import GradientEngine
from privet.privacy.parts import THETA
from privet.privacy.rng import SecureRandomness
from tests.privacy.families import (
    FAMILIES,
    Batch,
    Gradients,
    Known,
    NoFloat32,
    assert_equal,
    engine_sum,
    freeze_a,
    loss_of,
    make_batch,
    make_model,
    norms_of,
    products_of,
    random_projection,
    relative_error,
)

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_one = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
MODES = ["A and B", "W", "theta"]
CLIP = 0.5


class OnDevice(Known):
    """Normals of the CPU's generator, on the device that is asked for; remembers which."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.devices: list[torch.device] = []

    def normal(self, shape: Sequence[int], *, device: Any, dtype: torch.dtype) -> Tensor:
        self.devices.append(torch.device(device))
        return super().normal(shape, device="cpu", dtype=dtype).to(device)


def geometry(model: Any, mode: str) -> dict[str, Any]:
    """What `mode` hands to the engine; freezes A where it must."""
    if mode == "W":
        return {"products": products_of(freeze_a(model))}
    if mode == "theta":
        order = tuple(n for n, _ in model.named_parameters() if "lora_" in n)
        return {"projection": random_projection(model, 37, order)}
    return {}


def moved(batch: Batch, device: str) -> Batch:
    return {k: v.to(device) for k, v in batch.items()}


def on_cpu(gradients: Gradients) -> Gradients:
    return {n: g.cpu() for n, g in gradients.items()}


@pytest.fixture(autouse=True)
def _exact_products() -> Any:
    """No TensorFloat-32, which has ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@needs_one
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_cpu(family: str, mode: str) -> None:
    """In float64: another device adds in another order, and nothing else."""
    model, batch, loss = make_model(family), make_batch(family=family), loss_of(family)
    ways = geometry(model, mode)
    with NoFloat32():
        norms, want = engine_sum(model, batch, CLIP, loss, **ways)
        model.to("cuda")
        got_norms, got = engine_sum(model, moved(batch, "cuda"), CLIP, loss, **ways)
    assert {g.device.type for g in got.values()} == {"cuda"}
    torch.testing.assert_close(
        got_norms.cpu(), norms, rtol=1e-6, atol=1e-9
    )  # sines and cosines are in float32
    assert_equal(on_cpu(got), want, 1e-5)


@needs_one
@pytest.mark.parametrize("mode", MODES)
def test_long_float32_rows_do_not_exceed_the_clip(mode: str) -> None:
    model, loss = make_model("llama", torch.float32), loss_of("llama")
    ways = geometry(model, mode)
    batch = make_batch((7,), "llama")
    model.to("cuda")
    engine = GradientEngine(model, clip=CLIP, **ways)
    with engine.attached():
        loss(model, moved(batch, "cuda")).sum().backward()
        assert float(engine.accumulate(1).norms) > CLIP
        scale = 3.0 if mode == "W" else 1.0
        flat = torch.cat([s.double().flatten() / scale for s in engine._sums.values()])
    assert float(flat.norm()) <= CLIP * (1 + 1e-6)


@needs_one
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("region", [True, False], ids=["autocast", "base"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_bfloat16_is_near_float32(family: str, region: bool, mode: str) -> None:
    batch, loss = moved(make_batch(family=family), "cuda"), loss_of(family)
    model = make_model(family, torch.bfloat16)
    ways = geometry(model, mode)
    model.to("cuda")
    wide = copy.deepcopy(model).float()
    _, want = engine_sum(wide, batch, CLIP, loss, **ways)
    engine = GradientEngine(wide if region else model, clip=CLIP, **ways)
    with engine.attached(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=region):
        loss(engine._model, batch).sum().backward()
        engine.accumulate(4)
        got = engine.private_sum(OnDevice(), 0.0, 1)
    assert {g.dtype for g in got.values()} == {torch.float32}
    assert relative_error(got, want) < 0.15


@needs_one
def test_noise_is_drawn_for_the_device() -> None:
    layer = nn.Linear(400, 500, device="cuda")
    engine = GradientEngine(layer, clip=0.5)
    with engine.attached():
        noise = engine.private_sum(SecureRandomness(), 1.5, 8)
    assert {g.device.type for g in noise.values()} == {"cuda"}
    assert float(noise["weight"].std()) == pytest.approx(1.5 * 0.5 / 8, rel=0.02)


def split(model: nn.Module) -> nn.Module:
    """The first layer on one GPU, everything else on the other."""
    inner = "base_model.model.model.layers"
    parts: dict[str, int] = {}
    above = ""
    for step in inner.split("."):
        siblings = model.get_submodule(above.rstrip(".")).named_children()
        parts |= {f"{above}{name}": 1 for name, _ in siblings if name != step}
        above += f"{step}."
    parts |= {f"{inner}.0": 0, f"{inner}.1": 1}
    return dispatch_model(model, parts)


@needs_two
@pytest.mark.parametrize("mode", MODES)
def test_a_model_on_two_devices_equals_one_on_the_cpu(mode: str) -> None:
    """As `device_map` spreads it: norms gathered, factors handed back, noise where each parameter is."""
    batch, loss = make_batch(family="llama"), loss_of("llama")
    plain = make_model("llama")
    ways = geometry(plain, mode)
    norms, want = engine_sum(plain, batch, CLIP, loss, **ways)
    model = split(copy.deepcopy(plain))
    engine, source = GradientEngine(model, clip=CLIP, **ways), OnDevice(3)
    with engine.attached():
        loss(model, moved(batch, "cuda:1")).sum().backward()
        got_norms = engine.accumulate(4).norms
        got = engine.private_sum(source, 0.0, 1)
    torch.testing.assert_close(got_norms.cpu(), norms, rtol=1e-6, atol=1e-9)
    assert_equal(on_cpu(got), want, 1e-5)
    assert float(norms_of({n: g[None] for n, g in on_cpu(got).items()})) > 0
    homes = {n: p.device for n, p in model.named_parameters()}
    assert all(g.device == homes[n] for n, g in got.items() if n != THETA)
    assert len(set(source.devices)) == (1 if mode == "theta" else 2)
