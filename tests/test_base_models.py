"""The models that a run can name: pinned on the hub, held in few bits, converted from a package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import privet.gguf
from privet.adapters import build_model
from privet.config import Config, compose, options
from privet.errors import ConfigError
from privet.losses import causal
from privet.privacy.engine import GradientEngine

UNPINNED = ("pretrained", "tinyllava")
"""A user's own choice, and one whose file asks for a commit."""


@pytest.mark.parametrize("name", [n for n in options("model") if n not in UNPINNED])
def test_a_model_of_the_hub_is_pinned_to_a_commit(name: str) -> None:
    model = compose([f"model={name}"]).model
    if model.path is not None and "/" in model.path and model.path[0] not in "~/" and ":" not in model.path:
        assert re.fullmatch("[0-9a-f]{40}", model.revision or "")
    else:
        assert model.revision is None


def language_model(tmp_path: Path, bits: int | None) -> Config:
    from transformers import AutoModelForCausalLM, LlamaConfig

    if not (tmp_path / "config.json").exists():
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=96, initializer_range=0.2, **sizes))
        made.save_pretrained(tmp_path)
    task = ["task=e2e", "task.path=x", "task.test_path=y"]
    base = [f"model.path={tmp_path}", "model.lora.targets=[q_proj,v_proj]"]
    return compose(["model=pretrained", *base, f"model.bits={'null' if bits is None else bits}", *task])


def test_few_bits_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = language_model(tmp_path, 4)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "bitsandbytes" else find(n, *a)
    )
    with pytest.raises(ConfigError, match=r"model\.bits = 4 needs the package bitsandbytes"):
        build_model(config)
    with pytest.raises(ConfigError, match=r"model\.bits = 8 has no effect with model\.architecture"):
        compose(["model=tiny_random", "model.bits=8"])


@pytest.mark.parametrize("bits", [8, 4])
def test_in_few_bits_every_row_has_its_own_gradient(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    ids = torch.randint(0, 96, (3, 9), generator=torch.Generator().manual_seed(0))
    outputs, model = [], None
    for held in (None, bits):
        model = build_model(language_model(tmp_path, held))
        generator = torch.Generator().manual_seed(0)
        values = {n: torch.randn(v.shape, generator=generator) * 0.1 for n, v in model.initial().items()}
        model.load(values)
        with torch.no_grad():
            outputs.append(model.module(input_ids=ids))
    assert model is not None
    difference = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    assert 0 < difference < {8: 0.1, 4: 0.6}[bits]
    assert {p.dtype for n, p in model.module.named_parameters() if "lora_" in n} == {torch.float32}
    parameters = [model.parameter(n).requires_grad_(True) for n in model.spec.lora]
    engine = GradientEngine(model.module, clip=1.0)
    with engine.attached():
        causal(model.module(input_ids=ids), ids).sum().backward()
        norms = engine.accumulate(3).norms
    for row in range(3):
        one = ids[row : row + 1]
        gradients = torch.autograd.grad(causal(model.module(input_ids=one), one).sum(), parameters)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        torch.testing.assert_close(norms[row], norm, rtol=1e-3, atol=1e-4)


def test_a_conversion_leaves_a_whole_model_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("a")
        raise ConfigError("no room")

    target = tmp_path / "deep" / "model"
    monkeypatch.setattr(privet.gguf, "_write", broken)
    with pytest.raises(ConfigError, match="no room"):
        privet.gguf.convert(tmp_path / "x.gguf", target)
    assert list(target.parent.iterdir()) == []
    target.mkdir()
    privet.gguf.convert(tmp_path / "x.gguf", target)  # it is there: nothing to do


def test_a_conversion_says_in_one_line_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no such thing")
    with pytest.raises(SystemExit) as caught:
        privet.gguf.main([str(tmp_path / "x.gguf"), str(tmp_path / "model")])
    assert re.fullmatch(r"privet: '.*x\.gguf' cannot be read: .*", str(caught.value))
    assert not (tmp_path / "model").exists()
