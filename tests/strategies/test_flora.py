"""FLoRA: a fresh start every round, and the clients' products in the base weight."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Message

from privet.adapters import initial_tensors
from privet.wire import Arrays
from strategies.flora import FLoRA
from tests.conftest import state_of
from tests.strategies.session import (
    Run,
    StubSession,
    expect_same,
    finished,
    make,
    one_round,
    relative,
    start,
)


def flora(*overrides: str) -> FLoRA:
    made = make("method=flora", "federation.clients=3", *overrides)
    assert isinstance(made, FLoRA)
    return made


def test_every_round_starts_from_a_new_a_that_all_nodes_draw_alike_and_nobody_sends() -> None:
    method = flora()
    state, seen = start(method), [initial_tensors(method.spec, 0, "shared")]
    nodes = [StubSession(method), StubSession(method)]
    for number in range(1, 6):
        for node in nodes:
            node.round = number
        request = method.download("train", state, False)
        assert set(request.adapter) <= set(method.stacks(1))
        state = one_round(method, state, nodes, number=number)
        expect_same(nodes[0].started, nodes[1].started)
        assert not any(bool(nodes[0].started[n].any()) for n in method.spec.b)
        seen.append(nodes[0].started)
    for name, (_, inp) in method.spec.a.items():
        drawn = torch.stack([values[name] for values in seen])
        assert all(not torch.equal(drawn[i], drawn[j]) for i in range(6) for j in range(i))
        assert float(drawn.abs().max()) <= inp**-0.5
        assert float(drawn.std()) == pytest.approx((3 * inp) ** -0.5, rel=0.1)


def test_the_draws_follow_from_seed_and_round_alone() -> None:
    again, other = flora(), flora("seed=1")
    for number in (1, 7):
        first = flora().start_factors(again.download("train", start(again), False), number)
        expect_same(first, again.start_factors(again.download("train", start(again), False), number))
        different = other.start_factors(other.download("train", start(other), False), number)
        assert not any(torch.equal(first[n], different[n]) for n in first)
        assert set(first) == set(again.spec.a)


def test_the_servers_model_is_the_change_alone() -> None:
    """No factor is in the state; those of the initial model have the product zero."""
    method = flora()
    state = one_round(method, start(method), [StubSession(method)])
    assert not set(state) & set(method.spec.lora)
    values = {**initial_tensors(method.spec, 0, "shared"), **method.model_values(state)}
    assert not any(bool(values[n].any()) for n in method.spec.b)
    assert set(method.model_values(state)) == {*method.spec.deltas, *method.spec.head}


@pytest.mark.parametrize("privacy", ["dp", "none"])
def test_a_real_run_folds_the_mean_of_the_products_that_were_sent(run: Run, privacy: str) -> None:
    uploads: list[Arrays] = []

    def look(message: Message, reply: Message) -> Message:
        if "request" in message.content and message.content["request"]["phase"] == "train":
            arrays = reply.content["adapter"].items()
            uploads.append({n: torch.from_numpy(a.numpy().copy()).double() for n, a in arrays})
        return reply

    plan = ["federation.rounds=2", "evaluation=none", "federation.weighting=uniform"]
    outcome = finished(run("method=flora", f"privacy={privacy}", *plan, tamper=look))
    state = state_of(outcome)
    assert len(uploads) == 6
    for t in flora().spec.targets:
        total = sum(u[t.b] @ u[t.a] for u in uploads) / 3
        assert isinstance(total, torch.Tensor)
        assert relative(state[t.delta].double(), total) < 1e-5
