"""FedEx-LoRA: the residual is what FedAvg's mean of factors misses, and it is sent as exact factors."""

from __future__ import annotations

import torch

from strategies.fedex import FedEx
from strategies.folding import stack_a, stack_b
from tests.conftest import state_of
from tests.strategies.session import (
    Run,
    StubSession,
    expect_same,
    finished,
    make,
    one_round,
    product,
    random_values,
    relative,
    start,
)


def fedex(*overrides: str) -> FedEx:
    made = make("method=fedex", "federation.clients=3", *overrides)
    assert isinstance(made, FedEx)
    return made


def sessions(method: FedEx, seeds: list[int]) -> list[StubSession]:
    return [StubSession(method, step=lambda _, k=k: random_values(method, k)) for k in seeds]  # type: ignore[misc]


def test_the_residual_is_the_mean_product_less_the_product_of_means() -> None:
    """Dense, in float64, from the clients' factors; the covariance of the factors, which is not small."""
    method = fedex()
    after = one_round(method, start(method), sessions(method, [1, 2, 3]))
    values = [random_values(method, k) for k in (1, 2, 3)]
    for t in method.spec.targets:
        products = torch.stack([product(v, t) for v in values]).mean(0)
        b = torch.stack([v[t.b].double() for v in values]).mean(0)
        a = torch.stack([v[t.a].double() for v in values]).mean(0)
        torch.testing.assert_close(after[t.b].double(), b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(after[t.a].double(), a, rtol=1e-6, atol=1e-7)
        residual = products - b @ a
        assert float(residual.norm() / products.norm()) > 0.5
        assert relative(after[t.delta].double(), residual) < 1e-6
        sent = after[stack_b(t)].double(), after[stack_a(t)].double()
        assert sent[0].shape == (t.out, 3 * method.spec.rank)
        assert relative(sent[0] @ sent[1], products) < 1e-6


def test_residuals_add_up_over_rounds_and_the_factors_are_the_last_ones() -> None:
    method = fedex()
    state, total = start(method), {t.name: torch.zeros(t.out, t.inp).double() for t in method.spec.targets}
    nodes = sessions(method, [1, 2])
    for number in (1, 2, 3):
        for k, node in enumerate(nodes):
            node._step = lambda _, s=10 * number + k: random_values(method, s)  # type: ignore[misc]
        state = one_round(method, state, nodes, number=number)
        values = [random_values(method, 10 * number + k) for k in range(2)]
        for t in method.spec.targets:
            total[t.name] += sum(product(v, t) for v in values) / 2 - product(state, t)
            assert relative(state[t.delta].double(), total[t.name]) < 2e-6


def test_clients_that_agree_leave_no_residual() -> None:
    method = fedex()
    after = one_round(method, start(method), sessions(method, [4, 4, 4]))
    for t in method.spec.targets:
        assert float(after[t.delta].norm() / product(after, t).norm()) < 1e-6


def test_nodes_are_sent_the_mean_factors_and_start_from_them() -> None:
    method = fedex()
    state = one_round(method, start(method), sessions(method, [1, 2, 3]))
    request = method.download("train", state, False)
    assert set(request.adapter) == {*method.spec.lora, *method.stacks(1)}
    node = StubSession(method)
    method.client("train", request, node)
    expect_same(node.started, {n: state[n] for n in (*method.spec.lora, *method.spec.head)})


def test_the_first_rounds_factors_are_fedavgs_and_one_client_is_fedavg(run: Run) -> None:
    plain = ["privacy=none", "evaluation=none"]
    first = [
        state_of(finished(run(f"method={m}", *plain, "federation.rounds=1"))) for m in ("fedavg", "fedex")
    ]
    expect_same(first[0], {n: first[1][n] for n in first[0]})
    alone = ["federation.clients=1", "task.train_rows=40"]
    both = [state_of(finished(run(f"method={m}", *plain, *alone, nodes=1))) for m in ("fedavg", "fedex")]
    for name, value in both[0].items():
        torch.testing.assert_close(both[1][name], value, rtol=1e-4, atol=1e-6)
    assert all(float(both[1][n].abs().max()) < 1e-6 for n in fedex().spec.deltas)
