from __future__ import annotations

import os

import pytest
import torch

from privet.config import compose
from privet.devices import all_cores, pick_device, pick_dtype, resources_warning
from privet.errors import ConfigError


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert pick_device("auto") == "cpu"
    assert pick_dtype("auto", "cpu") == torch.float32
    gpus(monkeypatch, 1)
    assert pick_device("auto") == "cuda"
    assert pick_device("cpu") == "cpu"
    assert pick_dtype("auto", "cuda") == torch.bfloat16
    gpus(monkeypatch, 1, bf16=False)
    assert pick_dtype("auto", "cuda:0") == torch.float32
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16


@pytest.mark.parametrize(("setting", "words"), [("cuda", "0 GPUs"), ("cuda:3", "0 GPUs"), ("gpu", "cuda:N")])
def test_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, words: str
) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=words):
        pick_device(setting)


def test_an_idle_gpu_is_named_and_a_missing_one_refused() -> None:
    train = compose().train
    assert resources_warning(train, 0.0, 0) is None
    assert resources_warning(train, 0.5, 1) is None
    assert "stay idle" in str(resources_warning(train, 0.0, 2))
    assert resources_warning(compose(["train.device=cpu"]).train, 0.0, 2) is None
    with pytest.raises(ConfigError, match="set it to 0"):
        resources_warning(train, 0.5, 0)
    with pytest.raises(ConfigError, match="at most 1"):
        resources_warning(train, 2.0, 1)


def test_a_bfloat16_base_trains_factors_in_float32(settings: list[str]) -> None:
    from privet.adapters import build_model

    model = build_model(compose(settings), dtype=torch.bfloat16)
    assert model.module.get_parameter("backbone.embeddings.word_embeddings.weight").dtype == torch.bfloat16
    assert {model.parameter(n).dtype for n in (*model.spec.lora, *model.spec.head)} == {torch.float32}
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    assert model.module(**inputs).dtype == torch.float32


def test_all_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that shares a machine, by its own pinning or a scheduler's, takes no other's cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    with all_cores():
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 1
