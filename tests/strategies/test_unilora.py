"""Uni-LoRA: FedHSIP's random projection by a name of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from privet.adapters import count
from privet.errors import ConfigError
from privet.projection import flatten
from privet.trainables import THETA
from strategies.unilora import UniLora
from tests.conftest import Outcome, state_of
from tests.strategies.session import (
    adapter_of,
    all_moved,
    expect_same,
    finished,
    make,
    on_empty_draws,
    start,
    with_numbered_noise,
)

Run = Callable[..., Outcome]


def unilora(*overrides: str) -> UniLora:
    made = make("method=unilora", *overrides)
    assert isinstance(made, UniLora)
    return made


@pytest.mark.parametrize(("privacy", "init"), [("none", "uniform"), ("dp", "offset")])
def test_a_run_is_fedhsips_with_a_random_assignment_bit_for_bit(
    run: Run, monkeypatch: pytest.MonkeyPatch, init: str, privacy: str
) -> None:
    plan = [f"privacy={privacy}", f"method.init={init}", "method.dimension=100", "seed=4"]
    made: list[Outcome] = []
    for method in (["method=unilora"], ["method=fedhsip", "method.assignment=random"]):
        if privacy == "dp":
            made.append(with_numbered_noise(run, monkeypatch, *method, *plan))
        else:
            made.append(finished(run(*method, *plan)))
    first, second = made
    expect_same(state_of(first), state_of(second))
    expect_same(adapter_of(first), adapter_of(second))
    assert [r["eval"] for r in first.rounds] == [r["eval"] for r in second.rounds]
    assert first.json("communication.json") == second.json("communication.json")


@pytest.mark.parametrize("init", ["offset", "uniform"])
def test_the_model_is_the_balanced_expansion_of_theta(init: str) -> None:
    """Against a dense P, made from what the model does with unit vectors."""
    method = unilora(f"method.init={init}", "method.dimension=60")
    state = start(method)
    total = count(method.spec.lora)
    assert state[THETA].shape == (60,)
    offset = flatten(method.model_values({**state, THETA: torch.zeros(60)}), method.spec.lora).double()
    columns = [
        flatten(method.model_values({**state, THETA: e}), method.spec.lora).double() - offset
        for e in torch.eye(60)
    ]
    dense = torch.stack(columns, 1)
    assert dense.shape == (total, 60)
    torch.testing.assert_close(dense.T @ dense, torch.eye(60, dtype=torch.float64), rtol=0, atol=1e-6)
    assert float(dense.min()) > -1e-6  # no signs
    counts = (dense > 1e-6).sum(0)
    assert {int(c) for c in counts} <= {total // 60, total // 60 + 1}
    assert bool(((dense > 1e-6).sum(1) == 1).all())
    values = flatten(method.model_values(state), method.spec.lora).double()
    torch.testing.assert_close(values, offset + dense @ state[THETA].double(), rtol=0, atol=1e-6)
    b = np.concatenate([method.model_values(state)[n].numpy().ravel() for n in method.spec.b])
    if init == "offset":
        assert not state[THETA].any()
        assert not b.any()  # W = W0
    else:
        assert not offset.any()
        assert 0.01 < float(state[THETA].abs().max()) <= 0.02
    other = unilora(f"method.init={init}", "method.dimension=60", "seed=1")
    moved = flatten(other.model_values({**state, THETA: torch.arange(60.0)}), method.spec.lora).double()
    mine = offset + dense @ torch.arange(60, dtype=torch.float64)
    assert not torch.allclose(moved, mine, atol=0.1)  # another seed, another rule


def test_there_is_no_warmup_and_nothing_is_sent_once() -> None:
    method = unilora()
    assert method.warmup_rounds == 0
    assert method.once_cost() == (0, 0)
    assert method.download("train", start(method), True).once == {}
    assert method.dimension == 160  # 1024 / 6.4
    assert method.trained_numbers == 160 + count(method.spec.head)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method.init=warm", r"method\.init = warm is not allowed"),
        ("method.dimension=2000", r"method\.dimension = 2000"),
        ("method.assignment=hsip", "unknown key|Key 'assignment'|method.assignment"),
    ],
)
def test_what_it_does_not_have_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        unilora(override)


def test_a_private_run_noises_theta_and_stays_in_its_budget(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = on_empty_draws(run, monkeypatch, "method=unilora")
    assert all_moved({THETA: state_of(outcome)[THETA]}, start(unilora()))
    for node in outcome.json("privacy.json")["nodes"]:
        assert [e["phase"] for e in node["entries"]] == ["train", "train"]
