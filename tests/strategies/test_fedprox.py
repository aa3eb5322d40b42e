"""FedProx: the pull is there also under DP, by exactly its formula, and mu = 0 is FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from client_app import trainer
from privet.adapters import count
from privet.corrections import Correction
from privet.errors import ConfigError
from privet.trainables import Trainables
from privet.wire import Arrays
from strategies.fedprox import FedProx, Proximal
from tests.conftest import Outcome, state_of
from tests.strategies.session import (
    NODES,
    Run,
    StubSession,
    all_moved,
    expect_same,
    finished,
    kept_by,
    make,
    on_empty_draws,
    random_values,
    start,
    with_numbered_noise,
)

SEEDED = "privacy.randomness=seeded"


def leaves_of(seed: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 5), "b": (4, 3), "head": (2,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


RATES = {"a": 0.3, "b": 0.3, "head": 0.7}


def descend(mu: float, *, decoupled: bool, optimizer: str = "sgd", steps: int = 3) -> dict[str, torch.Tensor]:
    """Minimise |w - 1|^2 / 2 with the pull to where w began."""
    leaves = leaves_of(0)
    pull = Proximal(mu, leaves, decoupled=decoupled)
    groups = [{"params": [p], "lr": RATES[n]} for n, p in leaves.items()]
    made = torch.optim.SGD(groups) if optimizer == "sgd" else torch.optim.AdamW(groups)
    for _ in range(steps):
        for leaf in leaves.values():
            leaf.grad = leaf.detach() - 1
        with torch.no_grad():
            pull.before_step(leaves, RATES)
        made.step()
    return {n: p.detach() for n, p in leaves.items()}


# --- the correction ------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_of_sgd_are_the_formula_in_both_forms(decoupled: bool) -> None:
    """w <- w - lr (g + mu (w - w_t)), by scalars."""
    found = descend(0.4, decoupled=decoupled)
    for name, began in leaves_of(0).items():
        for after, first in zip(found[name].flatten().tolist(), began.flatten().tolist(), strict=True):
            w = first
            for _ in range(3):
                w -= RATES[name] * ((w - 1) + 0.4 * (w - first))
            assert after == pytest.approx(w, rel=1e-5, abs=1e-6)


def test_the_two_forms_differ_for_adamw_and_so_does_the_pull_from_none() -> None:
    coupled, decoupled, none = (
        descend(mu, decoupled=d, optimizer="adamw") for mu, d in ((0.4, False), (0.4, True), (0.0, True))
    )
    assert not torch.allclose(coupled["a"], decoupled["a"], rtol=1e-3)
    assert not torch.allclose(decoupled["a"], none["a"], rtol=1e-3)


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_strength_nothing_moves_to_the_last_bit(decoupled: bool) -> None:
    leaves = leaves_of(0)
    pull = Proximal(0.0, leaves, decoupled=decoupled)
    for leaf in leaves.values():
        leaf.data += 0.3
        leaf.grad = leaf.detach() * 0.1
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in leaves.items() if p.grad is not None}
    with torch.no_grad():
        pull.before_step(leaves, RATES)
    for name, leaf in leaves.items():
        assert torch.equal(leaf, before[name][0])
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, before[name][1])


def test_a_leaf_that_no_loss_reaches_is_pulled_too() -> None:
    leaves = leaves_of(0)
    pull = Proximal(0.5, leaves, decoupled=False)
    leaves["a"].data += 1
    with torch.no_grad():
        pull.before_step(leaves, RATES)
    torch.testing.assert_close(leaves["a"].grad, torch.full((3, 5), 0.5))


def test_a_negative_strength_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.mu"):
        make("method=fedprox", "method.mu=-0.1")


class PulledSession(StubSession):
    """Says what the correction moves: values or gradients."""

    moved = ""

    def train(self, trainables: Trainables, *, correction: Correction | None = None, **_: Any) -> None:
        assert correction is not None
        for leaf in trainables.leaves.values():
            leaf.data += 1
            leaf.grad = torch.zeros_like(leaf)
        before = self.model.read(trainables.leaves)
        with torch.no_grad():
            correction.before_step(trainables.leaves, dict.fromkeys(trainables.leaves, 0.5))
        values = any(not torch.equal(leaf, before[n]) for n, leaf in trainables.leaves.items())
        gradients = any(bool(p.grad.any()) for p in trainables.leaves.values() if p.grad is not None)
        self.moved = {(True, False): "values", (False, True): "gradients"}[values, gradients]


@pytest.mark.parametrize(("privacy", "moved"), [("none", "gradients"), ("dp", "values")])
def test_the_form_follows_the_privacy(privacy: str, moved: str) -> None:
    method = make("method=fedprox", f"privacy={privacy}")
    session = PulledSession(method)
    method.client("train", method.download("train", random_values(method), False), session)
    assert session.moved == moved


# --- whole runs ----------------------------------------------------------------------------------


class Steps:
    """Looks at what trains before and after every local step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Arrays, Arrays]] = []
        original = trainer._step

        def step(optimizer: Any, trainables: Any, correction: Any) -> None:
            before = {n: p.detach().clone() for n, p in trainables.leaves.items()}
            original(optimizer, trainables, correction)
            self.seen.append((before, {n: p.detach().clone() for n, p in trainables.leaves.items()}))

        monkeypatch.setattr(trainer, "_step", step)


def test_under_dp_two_steps_differ_from_fedavg_by_exactly_the_pull(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal noise and draws the first step is the same; the second has - lr mu (w_1 - w_0) on top."""
    settings = [SEEDED, "federation.rounds=1", "train.local_steps=2", "train.head_lr=0.25"]
    steps = Steps(monkeypatch)
    with_numbered_noise(run, monkeypatch, "method=fedavg", *settings)
    plain, steps.seen = steps.seen, []
    with_numbered_noise(run, monkeypatch, "method=fedprox", "method.mu=0.5", *settings)
    assert len(plain) == len(steps.seen) == 2 * len(NODES)
    spec = make("method=fedprox").spec
    for i in range(0, len(plain), 2):
        (began, middle), (_, ended) = plain[i : i + 2]
        expect_same(steps.seen[i][0], began)
        expect_same(steps.seen[i][1], middle)
        pulled = steps.seen[i + 1][1]
        assert set(pulled) == {*spec.lora, *spec.head}
        for name, value in ended.items():
            lr = 0.25 if name in spec.head else 0.5
            expected = -lr * 0.5 * (middle[name].double() - began[name].double())
            assert bool(expected.any())
            torch.testing.assert_close((pulled[name] - value).double(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("privacy", [["privacy=none"], [SEEDED]])
def test_mu_0_is_fedavg_bit_for_bit_and_mu_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch, privacy: list[str]
) -> None:
    fedavg, same, other = (
        state_of(with_numbered_noise(run, monkeypatch, *method, *privacy))
        for method in (
            ["method=fedavg"],
            ["method=fedprox", "method.mu=0"],
            ["method=fedprox", "method.mu=0.5"],
        )
    )
    expect_same(fedavg, same)
    spec = make("method=fedprox").spec  # without noise A hardly moves in two rounds
    assert not any(torch.equal(fedavg[n], other[n]) for n in (*spec.b, *spec.head))


def distance(outcome: Outcome) -> float:
    method = make("method=fedprox")
    began, now = start(method), state_of(outcome)
    return float(sum((now[n] - began[n]).square().sum() for n in began)) ** 0.5


def test_a_stronger_pull_keeps_the_model_nearer(run: Run) -> None:
    fixed = ["method=fedprox", "privacy=none", "federation.rounds=1", "train.local_steps=8", "train.lr=0.1"]
    found = [distance(finished(run(*fixed, f"method.mu={mu}"))) for mu in (0.0, 0.3, 1.5)]
    assert found[0] > found[1] > found[2]


def test_a_local_head_is_pulled_to_what_the_node_began_with(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    settings = ["task.head=local", "privacy=none", "train.local_steps=2", "evaluation=none"]
    outcome = finished(run("method=fedprox", "method.mu=1", *settings))
    spec = make("method=fedprox").spec
    first, second = ([s for i, s in enumerate(steps.seen) if i // 6 == r] for r in (0, 1))
    for i, node in enumerate(NODES):
        head = kept_by(outcome, node, "head")
        expect_same(
            {n: second[2 * i][0][n] for n in spec.head}, {n: first[2 * i + 1][1][n] for n in spec.head}
        )
        expect_same(head, {n: second[2 * i + 1][1][n] for n in spec.head})


def test_everything_that_trains_is_noised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    method = make("method=fedprox")
    assert isinstance(method, FedProx)
    assert method.trained_numbers == count(method.spec.lora) + count(method.spec.head)
    outcome = on_empty_draws(run, monkeypatch, "method=fedprox", "federation.rounds=1")
    assert all_moved(state_of(outcome), start(method))
