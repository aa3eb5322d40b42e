"""LoRA on quantised bases: bitsandbytes where it is installed, and a stand-in for its layers everywhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from privet.errors import ConfigError
from privet.privacy.engine import GradientEngine
from tests.privacy.families import (
    FAMILIES,
    VOCAB,
    Known,
    assert_equal,
    batches_of_one,
    clipped_products,
    clipped_sum,
    engine_sum,
    freeze_a,
    loss_of,
    make_base,
    make_batch,
    norms_of,
    products_of,
    random_projection,
    rows_of,
)


class Rounded(torch.autograd.Function):
    """``x W^T`` with int8 weights, one scale a row, as quantised layers compute it: a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, weight.to(x.dtype) * scale.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return g @ (weight.to(g.dtype) * scale.to(g.dtype)), None, None


class QuantLinear(nn.Linear):
    """A frozen linear layer of int8 weights, a subclass of nn.Linear like those of bitsandbytes."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None, device="meta")
        scale = source.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (source.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.register_buffer("scale", scale)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Rounded.apply(x, self.weight, self.scale)
        return out if self.bias is None else out + self.bias


Make = Callable[[nn.Linear], nn.Module]


def quantised(family: str, make: Make, dtype: torch.dtype, suffixes: tuple[str, ...]) -> Any:
    """The family's model with an adapter in float on quantised layers."""
    base = make_base(family).to(dtype)
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(suffixes):
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, make(module))
    for bits in ("8", "4"):  # how PEFT knows for which layers it has adapters of their own
        setattr(base, f"is_loaded_in_{bits}bit", make.__name__.startswith({"8": "eight", "4": "four"}[bits]))
    entry = FAMILIES[family]
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=entry.targets, modules_to_save=entry.whole or None)
    model = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


LAYERS = {
    "bert": (".query", ".key", ".value", ".dense"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def check(model: Any, family: str, tolerance: float) -> None:
    """All ways to clip against batches of one."""
    batch, loss = make_batch(family=family), loss_of(family)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    samples = batches_of_one(model, batch, loss)
    norms = norms_of(samples)
    clip = float(norms[norms > 0].median())
    got_norms, got = engine_sum(model, batch, clip, loss)
    torch.testing.assert_close(got_norms.double(), norms, rtol=tolerance, atol=tolerance)
    assert_equal(got, clipped_sum(samples, clip), tolerance)

    order = tuple(n for n in samples if "lora_" in n)
    rule = random_projection(model, 37, order)
    flat = torch.cat([samples[n].flatten(1) for n in order], 1)
    theta = flat.new_zeros(len(flat), 37).index_add_(1, rule.slots, flat * rule.coefficients.to(flat.dtype))
    shared = {"theta": theta} | {n: g for n, g in samples.items() if n not in order}
    assert_equal(
        engine_sum(model, batch, clip, loss, projection=rule)[1], clipped_sum(shared, clip), tolerance
    )

    freeze_a(model)
    whole = on_written_out(model, batch, loss)
    _, got = engine_sum(model, batch, clip, loss, products=products_of(model))
    assert_equal(got, clipped_products(model, whole, clip), tolerance)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


class WithDelta(nn.Module):
    """An adapted layer with ``s B A`` written out as one parameter: a quantised weight has no gradient to compare."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        self.base, self.delta = layer.base_layer, nn.Parameter((layer.scaling["default"] * b @ a).detach())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(x, self.delta)
        return out


def on_written_out(model: Any, batch: dict[str, Tensor], loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if hasattr(module, "lora_A") and name:
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, WithDelta(module))
    found = batches_of_one(twin, batch, loss)
    return {
        n.removesuffix(".delta") + ".lora_B.default.weight" if n.endswith(".delta") else n: g
        for n, g in found.items()
    }


@pytest.mark.parametrize("family", LAYERS)
def test_a_quantised_base_equals_batches_of_one(family: str) -> None:
    model = quantised(family, QuantLinear, torch.float64, LAYERS[family])
    if family == "llama":  # its norm layers are float32 inside, with a rounding that shows the padding
        check(model, family, 1e-6)
    else:
        check(model, family, 1e-9)


def test_a_quantised_layer_that_trains_is_named() -> None:
    """Its weight cannot, but its bias could: the layer computes something of its own."""
    model = quantised("bert", QuantLinear, torch.float64, LAYERS["bert"])
    layer = model.base_model.model.bert.encoder.layer[0].attention.self.key
    assert isinstance(layer, QuantLinear)
    layer.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"layer\.0\.attention\.self\.key\.bias trains, .*QuantLinear"):
        GradientEngine(model, clip=1.0)


def test_outliers_that_are_picked_over_the_batch_are_refused() -> None:
    """LLM.int8(): a large number in one example changes which columns are rounded for all."""
    model = quantised("bert", QuantLinear, torch.float64, LAYERS["bert"])
    layer = model.base_model.model.bert.encoder.layer[0].attention.self.key
    layer.state = type("State", (), {"threshold": 0.0})()
    GradientEngine(model, clip=1.0)
    layer.state.threshold = 6.0
    with pytest.raises(ConfigError, match=r"key .QuantLinear.*llm_int8_threshold=0\.0"):
        GradientEngine(model, clip=1.0)


# --- bitsandbytes -----------------------------------------------------------------------------------


def eight_bit(source: nn.Linear, threshold: float = 0.0) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(
        source.in_features, source.out_features, bias=source.bias is not None, has_fp16_weights=False,
        threshold=threshold,
    )  # fmt: skip
    return _filled(layer, source)


def four_bit(source: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(
        source.in_features, source.out_features, bias=source.bias is not None, compute_dtype=torch.float32
    )
    return _filled(layer, source)


def _filled(layer: Any, source: nn.Linear) -> nn.Module:
    layer.load_state_dict(source.state_dict())
    layer.requires_grad_(False)
    return layer.to("cpu")  # quantises


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("make", [eight_bit, four_bit])
def test_bitsandbytes_equals_batches_of_one(make: Make, family: str) -> None:
    """As loaded for training: the base in evaluation mode, the adapter in float32."""
    pytest.importorskip("bitsandbytes")
    model = quantised(family, make, torch.float32, LAYERS[family]).eval()
    kinds = {p.dtype for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
    assert kinds <= {torch.int8, torch.uint8}
    assert {type(m).__module__ for m in model.modules() if hasattr(m, "lora_A")} == {"peft.tuners.lora.bnb"}
    check(model, family, 1e-4)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_bitsandbytes_with_an_outlier_threshold_is_refused() -> None:
    """And rightly: what one example gives depends on the other."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    source = nn.Linear(64, 32, bias=False)
    x = torch.randn(2, 5, 64)
    x[1, :, 3] = 20.0
    outputs = []
    for threshold in (0.0, 6.0):
        layer = eight_bit(source, threshold).eval()
        outputs.append(float((layer(x)[0] - layer(x[:1])[0]).abs().max()))
    assert outputs[0] < 1e-6 < 1e-4 < outputs[1]

    def eight_bit_with_outliers(linear: nn.Linear) -> nn.Module:
        return eight_bit(linear, 6.0)

    model = quantised("bert", eight_bit_with_outliers, torch.float32, LAYERS["bert"])
    with pytest.raises(ConfigError, match=r"Linear8bitLt.*llm_int8_threshold=0\.0"):
        GradientEngine(model, clip=1.0)


def test_rows_that_are_not_finite_leave_a_quantised_base_alone() -> None:
    model = quantised("bert", QuantLinear, torch.float64, LAYERS["bert"])
    batch, loss = make_batch(), loss_of("bert")
    batch["input_ids"][1, 0] = VOCAB - 1
    model.get_input_embeddings().weight.data[VOCAB - 1] = torch.nan
    engine = GradientEngine(model, clip=0.5)
    with engine.attached(), warnings.catch_warnings():
        loss(model, batch).sum().backward()
        assert engine.accumulate(4).nonfinite == 1
        got = engine.private_sum(Known(), 0.0, 1)
    assert_equal(got, engine_sum(model, rows_of(batch, [0, 2, 3]), 0.5, loss)[1], 1e-9)
