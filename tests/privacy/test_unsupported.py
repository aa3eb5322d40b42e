"""What the engine does not do right is refused by name, before anything trains; what looks alike but is right works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from privet.errors import ConfigError
from privet.privacy.engine import GradientEngine
from tests.privacy.families import (
    DECODER,
    IMAGE,
    Batch,
    Known,
    assert_equal,
    batches_of_one,
    clipped_sum,
    engine_sum,
    loss_of,
    make_base,
    make_batch,
    make_model,
    norms_of,
    rows_of,
)


def refused(model: nn.Module, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        GradientEngine(model, clip=1.0)
    assert "\n" not in str(caught.value)


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_dora": True}, r"query: the adapter variant DoraLinearVariant"),
        ({"alora_invocation_tokens": [3]}, r"query: the adapter variant ALoraLinearVariant"),
        ({"init_lora_weights": "mica"}, r"query: the adapter variant MiCALinearVariant"),
        ({"modules_to_save": ["LayerNorm"]}, r"LayerNorm\.modules_to_save\.default\.weight .*LayerNorm"),
        ({"modules_to_save": ["word_embeddings"]}, r"word_embeddings\.modules_to_save\.default\.weight .*Embed"),
        ({"target_modules": ["query", "word_embeddings"]}, r"word_embeddings\.lora_embedding_A\.default"),
        ({"trainable_token_indices": [3, 4]}, r"word_embeddings\.token_adapter\.trainable_tokens_delta"),
        ({"bias": "all"}, r"LayerNorm\.bias trains, .*LayerNorm"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_adapters_of_another_kind(options: dict[str, Any], match: str) -> None:
    refused(make_model("bert", **options), match)


def test_adapters_of_weights_that_are_no_layer() -> None:
    """PEFT reads the factors there without calling them."""
    base = nn.ModuleDict({"attend": nn.MultiheadAttention(8, 2, batch_first=True)})
    refused(
        get_peft_model(base, LoraConfig(r=2, target_modules=["attend"])), r"attend.*adapter of this layer"
    )
    base = make_base("llama")
    model = get_peft_model(base, LoraConfig(r=2, target_parameters=["q_proj.weight"], target_modules=[]))
    refused(model, r"q_proj.*ParamWrapper.*adapter of this layer")


def test_adapters_of_convolutions() -> None:
    base = nn.Sequential(nn.Conv2d(3, 4, 2))
    refused(get_peft_model(base, LoraConfig(r=2, target_modules=["0"])), r"lora_A\.default\.weight .*Conv2d")


@pytest.mark.parametrize("method", ["AdaLoraConfig", "LoHaConfig", "VeraConfig", "IA3Config", "OFTConfig"])
def test_other_methods_of_peft(method: str) -> None:
    import peft

    own = {
        "AdaLoraConfig": {"total_step": 10},
        "IA3Config": {"feedforward_modules": []},
        "OFTConfig": {"oft_block_size": 4},
    }
    config = getattr(peft, method)(target_modules=["query"], **own.get(method, {}))
    refused(get_peft_model(make_base("bert"), config), r"query.* trains, but there is no per-example rule")


def check(model: nn.Module, family: str = "bert") -> None:
    batch, loss = make_batch(family=family), loss_of(family)
    samples = batches_of_one(model, batch, loss)
    clip = float(norms_of(samples).median())
    _, got = engine_sum(model, batch, clip, loss)
    assert_equal(got, clipped_sum(samples, clip), 1e-9)


def test_a_bias_of_lora_itself_works() -> None:
    model = make_model("bert", lora_bias=True)
    assert any(n.endswith("lora_B.default.bias") for n, p in model.named_parameters() if p.requires_grad)
    check(model)


def test_two_adapters_at_once_work() -> None:
    model = make_model("bert")
    model.add_adapter("second", LoraConfig(r=3, target_modules=["query", "key"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.double().named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)
    assert (
        len({n.split(".")[-2] for n in GradientEngine(model, clip=1.0).shapes} & {"default", "second"}) == 2
    )
    check(model)


def test_layers_that_are_run_again_with_adapters_of_their_own_work() -> None:
    """PEFT's layer replication: copies share the frozen base weights."""
    model = make_model("llama", layer_replication=[(0, 2), (0, 2)], init_lora_weights=False)
    assert len({n.split(".layers.")[1][0] for n in GradientEngine(model, clip=1.0).shapes}) == 4
    check(model, "llama")


def test_patterns_of_rank_and_alpha_and_rank_stabilised_scaling_work() -> None:
    check(make_model("bert", rank_pattern={"query": 3}, alpha_pattern={"value": 5}, use_rslora=True))


# --- layers ---------------------------------------------------------------------------------------


def test_weights_that_are_made_of_others() -> None:
    refused(nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))), r"0\..* trains")
    bias_alone = parametrizations.spectral_norm(nn.Linear(3, 3))
    for name, parameter in bias_alone.named_parameters():
        parameter.requires_grad_(name == "bias")
    refused(nn.Sequential(bias_alone), r"0\.bias trains")
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = weight_norm(nn.Linear(3, 3))
    refused(nn.Sequential(old), r"0\.(bias|weight_g) trains, .*Linear")


def test_attention_that_reads_its_output_layer() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    attention.in_proj_weight.requires_grad_(False)
    attention.in_proj_bias.requires_grad_(False)
    refused(nn.Sequential(attention), r"0\.out_proj\.weight trains, .*NonDynamicallyQuantizableLinear")


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Embedding(3, 2), "Embedding"), (nn.LayerNorm(3), "LayerNorm"), (nn.Conv1d(2, 2, 1), "Conv1d"),
        (nn.Bilinear(2, 2, 2), "Bilinear"), (nn.GRU(2, 2), "GRU"), (nn.PReLU(), "PReLU"),
    ],
)  # fmt: skip
def test_layers_without_a_rule(layer: nn.Module, name: str) -> None:
    refused(nn.Sequential(layer), rf"0\.\w+ trains, but there is no per-example rule for {name}")


def test_weights_that_are_not_in_memory() -> None:
    refused(nn.Sequential(nn.Linear(2, 2, device="meta")), r"0\.weight trains, but is offloaded")


# --- whole models ---------------------------------------------------------------------------------


def test_wrappers_that_spread_a_batch() -> None:
    refused(nn.DataParallel(nn.Linear(2, 2)), "the model .DataParallel. spreads the examples")


def test_compiled_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    refused(torch.compile(model), "the model .OptimizedModule. is compiled")
    model[0].compile()
    refused(model, r"0 .Linear. is compiled")


@pytest.mark.parametrize(
    "name",
    ["MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig", "DeepseekV3Config", "GptOssConfig", "OlmoeConfig"],
)
def test_mixtures_of_experts(name: str) -> None:
    import transformers

    few = {"num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
    config = getattr(transformers, name)(
        **DECODER, **few, num_experts_per_tok=1, first_k_dense_replace=0, moe_intermediate_size=8,
        q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, head_dim=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    refused(model, "mixture of experts")


def test_several_examples_in_a_row_are_named() -> None:
    """Packed: one long row with positions that start anew."""
    model, batch = make_model("llama"), make_batch(family="llama")
    lengths = batch["attention_mask"].sum(1).tolist()
    packed = {k: torch.cat([v[i, :n] for i, n in enumerate(lengths)])[None] for k, v in batch.items()}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        logits = model(input_ids=packed["input_ids"], position_ids=positions).logits
        logits.square().sum().backward()
        with pytest.raises(ConfigError, match=r"q_proj.* saw 1 rows in a micro-batch of 4"):
            engine.accumulate(4)


class Mixing(nn.Module):
    """Layers that look harmless, and a step between them that is not."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.step = nn.Linear(3, 3), nn.Linear(3, 3), step

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.step(torch.tanh(self.first(x))))
        return h.square().flatten(1).sum(1)


@pytest.mark.parametrize(
    ("step", "good"),
    [
        (lambda h: h - h.mean(0), False),
        (lambda h: h.flip(0), False),
        (
            lambda h: torch.nn.functional.batch_norm(h.flatten(0, 1), None, None, training=True).view_as(h),
            False,
        ),
        (lambda h: h - h.mean(1, keepdim=True), True),
        (lambda h: h.flip(1), True),
    ],
    ids=["mean", "permutation", "functional-batch-norm", "mean-of-tokens", "order-of-tokens"],
)
def test_mixing_in_a_models_own_code_is_measured(step: Any, good: bool) -> None:
    model = Mixing(step)
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        values = model(torch.randn(3, 3, 3))
        if good:
            engine.refuse_mixing(values)
        else:
            with pytest.raises(
                ConfigError, match=r"first: the loss of one example has a gradient in the rows of"
            ):
                engine.refuse_mixing(values)
        model(torch.randn(2, 3, 3)).sum().backward()  # nothing is left of it
        assert len(engine.accumulate(2).norms) == 2


def test_tokens_first_is_measured_where_the_row_count_fits() -> None:
    """As many tokens as examples: no count tells (tokens, examples, n) from (examples, tokens, n)."""
    model = Mixing(lambda h: h)
    x = torch.randn(3, 3, 3)

    def tokens_first(x: Tensor) -> Tensor:
        h = model.second(torch.tanh(model.first(x.transpose(0, 1))))
        return h.square().sum((0, 2))

    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        with pytest.raises(ConfigError, match="first: the loss of one example"):
            engine.refuse_mixing(tokens_first(x))
        engine.refuse_mixing(model(x))


# --- images ---------------------------------------------------------------------------------------


def two_images_for_the_first(batch: Batch) -> Batch:
    """And none for the last: as many images as examples, but not one each."""
    ids = batch["input_ids"].clone()
    ids[0, 4:8], ids[3, :4] = IMAGE, 5
    return {**batch, "input_ids": ids}


def test_layers_that_see_images_need_one_in_every_example() -> None:
    """Else the count of images fits, and an image's gradient is counted for another example."""
    model, loss = make_model("llava-projector"), loss_of("llava-projector")
    batch = two_images_for_the_first(rows_of(make_batch((9, 3, 5, 8), "llava-projector"), slice(None)))
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        with pytest.raises(ConfigError, match=r"multi_modal_projector.*exactly one image"):
            loss(model, batch)
        with pytest.raises(ConfigError, match="needs input_ids"):
            model(
                inputs_embeds=model.get_input_embeddings()(batch["input_ids"]),
                pixel_values=batch["pixel_values"],
            )
    loss(model, batch)  # as it was


def test_more_images_than_examples_are_named() -> None:
    model, loss = make_model("llava-projector"), loss_of("llava-projector")
    batch = make_batch((9, 8), "llava-projector")
    batch["input_ids"][:, 4:8] = IMAGE
    batch["pixel_values"] = torch.cat([batch["pixel_values"]] * 2)
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        loss(model, batch).sum().backward()
        with pytest.raises(ConfigError, match="saw 4 rows in a micro-batch of 2"):
            engine.accumulate(2)


def test_a_frozen_image_side_takes_any_number_of_images() -> None:
    """The language model sees one row per example whatever its images."""
    model, loss = make_model("llava"), loss_of("llava")
    batch = two_images_for_the_first(make_batch((9, 3, 5, 8), "llava"))
    singles = []
    for row in range(4):
        counted = int(batch["attention_mask"][row].sum())
        images = {0: [0, 1], 1: [2], 2: [3], 3: []}[row]
        one = {k: v[row : row + 1, :counted] for k, v in batch.items() if v.dim() == 2}
        if images:
            one["pixel_values"] = batch["pixel_values"][images]
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        singles.append(torch.autograd.grad(loss(model, one).sum(), list(named.values())))
    samples = {n: torch.stack(g) for n, g in zip(named, zip(*singles, strict=True), strict=True)}
    _, got = engine_sum(model, batch, 0.5, loss)
    assert_equal(got, clipped_sum(samples, 0.5), 1e-6)  # float32 inside


# --- tokens that a model folds together --------------------------------------------------------------


def test_folding_in_another_model_is_named() -> None:
    """OPT's own layers are known; the same code under another name is not trusted."""
    model = make_model("opt")
    layer = model.base_model.model.model.decoder.layers[1]
    layer.__class__ = type("SomeLayer", (type(layer),), {})
    engine = GradientEngine(model, clip=1.0)
    batch = make_batch(family="opt")
    with engine.attached():
        loss_of("opt")(model, batch).sum().backward()
        with pytest.raises(ConfigError, match=r"layers\.1\.fc1.* saw 28 rows in a micro-batch of 4"):
            engine.accumulate(4)


def test_evaluating_with_another_batch_does_not_change_how_a_fold_is_undone() -> None:
    """The row count is that of the use, not of the layer's latest input."""
    model, loss = make_model("opt"), loss_of("opt")
    batch = make_batch(family="opt")
    _, want = engine_sum(model, batch, 0.5, loss)
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        values = loss(model, batch)
        with torch.no_grad():
            loss(model, rows_of(batch, slice(0, 2)))
        values.sum().backward()
        engine.accumulate(4)
        assert_equal(engine.private_sum(Known(), 0.0, 1), want, 1e-12)
    assert not any(m._forward_pre_hooks for m in model.modules())
