"""Doubles and whole runs that the tests of several methods share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from privet.adapters import AdaptedModel, TargetModule, adapter_spec, initial_tensors, load_model
from privet.config import compose, options
from privet.privacy.rng import make_randomness
from privet.trainables import Trainables
from privet.wire import Arrays
from strategies.base import LoraStrategy, load_method
from tests.conftest import Outcome

Run = Callable[..., Outcome]
Step = Callable[[AdaptedModel], Arrays]
NODES = ("client-0", "client-1", "client-2")


def make(*overrides: str) -> LoraStrategy:
    """Make a method on the tiny model."""
    config = compose(["model=tiny_random", *overrides])
    return load_method(config, adapter_spec(config))


def start(method: LoraStrategy) -> Arrays:
    config = method.config
    return method.initial(initial_tensors(method.spec, config.seed, config.task.head))


TINY: dict[str, list[str]] = {
    **{name: [] for name in options("method")},
    "fedhsip": ["method.warmup_rounds=1"],
    "fedper": ["method.shared_layers=1"],
    "fedsa": ["method.global_b=mean"],
}
"""Every method, with what it needs to show itself in a run of a few rounds on the tiny model."""


def random_values(method: LoraStrategy, seed: int = 0) -> Arrays:
    """Random factors and head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {**method.spec.lora, **method.spec.head}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def product(values: Arrays, target: TargetModule) -> Tensor:
    return values[target.b].double() @ values[target.a].double()


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


class StubSession:
    """A session whose training is given; kept arrays, flags and what training began with are there to be looked at.

    Parameters
    ----------
    step : function of the model
        Values that the trained leaves take; by default each grows by one.
    """

    def __init__(
        self,
        method: LoraStrategy,
        *,
        step: Step | None = None,
        kept: dict[str, Arrays] | None = None,
        acknowledged: int = 0,
        round_number: int = 3,
        coins: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        self.model = load_model(method.config)
        self.round = round_number
        self.acknowledged = acknowledged
        self.chance = coins
        self.store = dict(kept or {})
        self.flags: list[str] = []
        self.started: Arrays = {}
        self.trained: list[str] = []
        self._step = step

    def train(self, trainables: Trainables, **_: Any) -> None:
        self.started = self.model.read([*self.model.spec.lora, *self.model.spec.head])
        self.trained = list(trainables.leaves)
        values = self._step(self.model) if self._step else {}
        with torch.no_grad():
            for name, leaf in trainables.leaves.items():
                leaf.copy_(values.get(name, leaf + 1))

    def recall(self, name: str, *, this_round: bool = False) -> Arrays | None:
        return self.store.get(name)

    def keep(self, name: str, arrays: Arrays) -> None:
        self.store[name] = arrays

    def flag(self, text: str) -> None:
        self.flags.append(text)


def one_round(
    method: LoraStrategy,
    state: Arrays,
    sessions: Sequence[StubSession],
    *,
    number: int = 1,
    phases: Sequence[str] | None = None,
) -> Arrays:
    """Server half and client half against each other, without messages; all replies weigh alike."""
    method.round_number = number
    for phase in phases or method.phases:
        merger = method.merger(phase, state)
        for i, session in enumerate(sessions):
            reply = method.client(phase, method.download(phase, state, True), session)
            method.check_upload(phase, reply)
            merger.add(str(i), reply, 1.0)
        state = method.update(phase, state, merger.mean())
    return state


# --- whole runs ----------------------------------------------------------------------------------


def finished(outcome: Outcome) -> Outcome:
    if outcome.error:
        raise outcome.error
    return outcome


def kept_by(outcome: Outcome, node: str, name: str) -> Arrays:
    (file,) = (outcome.path / "nodes" / node / "tensors").glob(f"{name}-*")
    return load_file(file)


def adapter_of(outcome: Outcome) -> Arrays:
    return load_file(outcome.path / "adapter" / "adapter_model.safetensors")


def expect_same(first: Arrays, second: Arrays) -> None:
    """Bit for bit."""
    assert first.keys() == second.keys()
    assert [n for n in first if not torch.equal(first[n], second[n])] == []


def learns(run: Run, *overrides: str) -> Outcome:
    """Without privacy the loss falls."""
    more = ["privacy=none", "federation.rounds=6", "train.local_steps=8", "train.batch_size=25"]
    rate = ["train.optimizer=adamw", "train.lr=0.03", "evaluate_every=6"]
    outcome = finished(run(*more, *rate, *overrides))
    losses = [r["train_loss"] for r in outcome.rounds]
    assert losses[-1] < 0.75 * losses[0], losses
    return outcome


def on_empty_draws(run: Run, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Outcome:
    """A private run whose nodes draw no row at all: what moved was moved by noise alone."""
    monkeypatch.setattr("client_app.trainer.poisson_draw", lambda *_: np.zeros(0, dtype=np.int64))
    outcome = finished(run(*overrides))
    assert 5.5 < outcome.json("privacy.json")["max_epsilon"] <= 6.0
    assert {r["train_loss"] for r in outcome.rounds} == {None}
    return outcome


def all_moved(now: Arrays, before: Arrays) -> bool:
    """Whether every single number is another than before."""
    return all(bool((now[n] != before[n]).all()) for n in now)


def with_numbered_noise(run: Run, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Outcome:
    """A private run whose n-th training has the n-th draws and noise, whatever the method is called.

    With `privacy.randomness=seeded` they follow from the request, and so from the method's name.
    """
    numbers = itertools.count()
    monkeypatch.setattr(
        "client_app.node.make_randomness", lambda *_: make_randomness("seeded", next(numbers))
    )
    return finished(run(*overrides))
