"""What holds for every method there is, in whole runs of the real apps on the tiny model."""

from __future__ import annotations

import pytest

from tests.conftest import state_of
from tests.strategies.session import TINY, Run, expect_same, finished, start
from tests.strategies.session import make as method

ADAMW = ["train.optimizer=adamw", "train.lr=0.03", "train.head_lr=0.03"]
RATES = {"scaffold": ["train.lr=0.5", "train.head_lr=0.2"]}  # plain SGD only


@pytest.mark.parametrize("name", TINY)
def test_without_privacy_the_loss_falls_in_any_order_of_replies(run: Run, name: str) -> None:
    plan = [
        "privacy=none",
        "federation.rounds=5",
        "train.local_steps=8",
        "train.batch_size=25",
        "evaluation=none",
    ]
    overrides = [f"method={name}", *TINY[name], *plan, *RATES.get(name, ADAMW)]
    first, second = (finished(run(*overrides, reverse=reverse)) for reverse in (False, True))
    losses = [r["train_loss"] for r in first.rounds]
    assert losses[-1] < 0.9 * losses[0], losses
    expect_same(state_of(first), state_of(second))


@pytest.mark.parametrize("name", TINY)
def test_a_private_run_spends_no_more_than_its_budget_on_any_node(run: Run, name: str) -> None:
    outcome = finished(run(f"method={name}", *TINY[name], "privacy.epsilon=2", "evaluation=none"))
    privacy = outcome.json("privacy.json")
    assert 1.8 < privacy["max_epsilon"] <= 2.0
    assert len(privacy["nodes"]) == 3
    state = state_of(outcome)
    assert all(bool(v.isfinite().all()) for v in state.values())
    before = start(method(f"method={name}", *TINY[name]))
    assert any(bool((v != before[n]).any()) for n, v in state.items() if n in before)
