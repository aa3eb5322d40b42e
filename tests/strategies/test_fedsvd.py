"""FedSVD: the product is kept, A is orthonormal, zero is no trap, and what it equals."""

from __future__ import annotations

import pytest
import torch

from privet.adapters import AdaptedModel, count, load_model
from privet.errors import ConfigError
from privet.wire import Arrays
from strategies.fedsvd import FedSVD
from tests.conftest import Outcome, state_of
from tests.strategies.session import (
    NODES,
    Run,
    StubSession,
    adapter_of,
    all_moved,
    expect_same,
    finished,
    learns,
    make,
    on_empty_draws,
    one_round,
    product,
    random_values,
    relative,
    start,
    with_numbered_noise,
)


def fedsvd(*overrides: str) -> FedSVD:
    made = make("method=fedsvd", "federation.rounds=9", *overrides)
    assert isinstance(made, FedSVD)
    return made


def sessions(method: FedSVD, values: list[Arrays]) -> list[StubSession]:
    return [StubSession(method, step=lambda _, v=v: v) for v in values]  # type: ignore[misc]


# --- refactorisation -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_the_product_is_kept_and_a_is_orthonormal(size: float) -> None:
    method = fedsvd()
    state = start(method)
    trained = [{n: v * size for n, v in random_values(method, i).items()} for i in range(3)]
    after = one_round(method, state, sessions(method, trained))
    for t in method.spec.targets:
        mean = sum(v[t.b].double() for v in trained) / 3
        assert relative(product(after, t), mean @ state[t.a].double()) < 1e-6
        _, s, vh = torch.linalg.svd(mean @ state[t.a].double())  # the dense m x n product
        a = after[t.a].double()
        torch.testing.assert_close(a @ a.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6)
        torch.testing.assert_close(a.T @ a, vh[:4].T @ vh[:4], rtol=0, atol=1e-6)
        torch.testing.assert_close(after[t.b].double().norm(dim=0), s[:4], rtol=1e-5, atol=0)
    for name in method.spec.head:
        torch.testing.assert_close(after[name], sum(v[name] for v in trained) / 3)


def gradient_of_b(method: FedSVD, values: Arrays) -> Arrays:
    model = load_model(method.config)
    head = {n: v for n, v in random_values(method, 7).items() if method.is_head(n)}
    model.load({**values, **head})
    parameters = {n: model.parameter(n) for n in method.spec.b}
    for p in parameters.values():
        p.requires_grad_(True)
    ids = torch.arange(12).view(2, 6) + 1000
    logits = model.module(input_ids=ids, attention_mask=torch.ones_like(ids))
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    found = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.requires_grad_(False)
    model.load({})
    return found


@pytest.mark.parametrize("rank", [0, 2])
def test_a_zero_or_deficient_b_leaves_an_orthonormal_basis_of_as_own_rows(rank: int) -> None:
    method = fedsvd()
    state = start(method)
    values = random_values(method)
    for name in method.spec.b:
        values[name][:, rank:] = 0
    after = one_round(method, state, sessions(method, [values]))
    for t in method.spec.targets:
        a, before = after[t.a].double(), state[t.a].double()
        torch.testing.assert_close(a @ a.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6)
        beyond = before - before @ a.T @ a
        assert float(beyond.norm() / before.norm()) < 1e-6  # the same row space
        assert float(after[t.b][:, rank:].abs().max()) < 1e-6
        if not rank:
            assert not after[t.b].any()
    gradients = gradient_of_b(method, {n: after[n] for n in method.spec.lora})
    assert set(gradients) == set(method.spec.b)
    assert all(float(g.abs().max()) > 1e-6 for g in gradients.values())


def test_period_and_warmup_say_when() -> None:
    for period, warmup, turning in (
        (1, 0, [1, 2, 3, 4, 5, 6, 7]),
        (3, 0, [3, 6]),
        (2, 3, [5, 7]),
        (0, 0, []),
    ):
        method = fedsvd(f"method.period={period}", f"method.warmup={warmup}")
        state, found = start(method), []
        for number in range(1, 8):
            values = random_values(method, number)
            after = one_round(method, state, sessions(method, [values]), number=number)
            if any(n in after and not torch.equal(after[n], state[n]) for n in method.spec.a):
                found.append(number)
            state = after
        assert found == turning, (period, warmup)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.period=-1"], r"method\.period"),
        (["method.period=0", "method.warmup=2"], r"method\.warmup = 2 has no effect"),
        (["method.warmup=9"], "nothing would be refactorised"),
        (["method.period=10"], "nothing would be refactorised"),
    ],
)
def test_settings_without_an_effect_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fedsvd(*overrides)


def test_only_b_trains_and_travels_back() -> None:
    method = fedsvd()
    session = StubSession(method)
    reply = method.client("train", method.download("train", random_values(method), False), session)
    assert set(session.trained) == {*method.spec.b, *method.spec.head}
    assert set(reply.adapter) == set(method.spec.b)
    assert session.store == {}
    assert method.trained_numbers == count(method.spec.b) + count(method.spec.head)


# --- what it equals ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["factor", "sketch"])
def test_private_fedask_with_all_values_in_b_has_the_same_products(transport: str) -> None:
    """Training moves B by a gradient of the weight, G A^T, as SGD does; compared round by round, and densely."""
    svd = fedsvd()
    ask = make(
        "method=fedask", "federation.rounds=9", f"method.transport={transport}", "method.sigma_split=1"
    )
    generator = torch.Generator().manual_seed(3)
    shapes = {t: (t.out, t.inp) for t in svd.spec.targets}
    states = {"svd": start(svd), "ask": start(ask)}
    dense = {t.name: torch.zeros(t.out, t.inp, dtype=torch.float64) for t in svd.spec.targets}
    rows = {t.name: start(svd)[t.a].double() for t in svd.spec.targets}
    for number in (1, 2, 3):
        gradients = [
            {t.name: torch.randn(s, generator=generator) for t, s in shapes.items()} for _ in range(3)
        ]

        def step(model: AdaptedModel, g: dict[str, torch.Tensor]) -> Arrays:
            at = model.read(model.spec.lora)
            return {t.b: at[t.b] - 0.1 * g[t.name] @ at[t.a].T for t in model.spec.targets}

        for name, method in (("svd", svd), ("ask", ask)):
            stubs = [
                StubSession(method, step=lambda m, g=g: step(m, g), round_number=number)  # type: ignore[misc]
                for g in gradients
            ]
            states[name] = one_round(method, states[name], stubs, number=number)
        for t in svd.spec.targets:
            mean = sum(g[t.name].double() for g in gradients) / 3
            a = rows[t.name]
            dense[t.name] = dense[t.name] - 0.1 * mean @ a.T @ a
            rows[t.name] = torch.linalg.svd(dense[t.name])[2][:4]
            for state in states.values():
                assert relative(product(state, t), dense[t.name]) < 1e-5


def test_private_fedask_by_factors_is_fedsvd_in_a_whole_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["federation.rounds=2", "evaluation=none"]
    ask = ["method=fedask", "method.transport=factor", "method.sigma_split=1"]
    first = with_numbered_noise(run, monkeypatch, "method=fedsvd", *plan)
    second = with_numbered_noise(run, monkeypatch, *ask, *plan)
    expect_same(state_of(first), state_of(second))


@pytest.mark.parametrize("privacy", ["none", "dp"])
def test_period_0_is_ffa_lora_bit_for_bit(run: Run, monkeypatch: pytest.MonkeyPatch, privacy: str) -> None:
    plan = [f"privacy={privacy}", "federation.rounds=2"]
    made: list[Outcome] = []
    for method in (["method=ffa_lora"], ["method=fedsvd", "method.period=0"], ["method=fedsvd"]):
        if privacy == "dp":
            made.append(with_numbered_noise(run, monkeypatch, *method, *plan))
        else:
            made.append(finished(run(*method, *plan)))
    ffa, never, always = made
    expect_same(state_of(ffa), state_of(never))
    expect_same(adapter_of(ffa), adapter_of(never))
    assert [r["eval"] for r in ffa.rounds] == [r["eval"] for r in never.rounds]
    assert [r["download_numbers"] for r in ffa.rounds] == [r["download_numbers"] for r in never.rounds]
    other = adapter_of(always)
    assert any(not torch.equal(v, other[n]) for n, v in adapter_of(ffa).items())


# --- whole runs ----------------------------------------------------------------------------------


def test_real_messages_carry_both_factors_down_and_b_up(run: Run) -> None:
    small = ["federation.clients=1", "federation.rounds=1", "train.local_steps=1", "train.batch_size=2"]
    rows = ["task.train_rows=8", "task.test_rows=4", "evaluation=none", "privacy.epsilon=50"]
    outcome = finished(run("model=roberta_base_random", "method=fedsvd", *small, *rows, nodes=1))
    (record,) = outcome.rounds
    assert (record["upload_numbers"], record["download_numbers"]) == (147_456, 294_912)


def test_a_run_without_privacy_learns(run: Run) -> None:
    outcome = learns(run, "method=fedsvd")
    state = state_of(outcome)
    for t in make("method=fedsvd").spec.targets:
        torch.testing.assert_close(state[t.a] @ state[t.a].T, torch.eye(4), rtol=0, atol=1e-5)


def test_a_private_run_noises_b_alone_and_stays_in_its_budget(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = on_empty_draws(run, monkeypatch, "method=fedsvd", "method.warmup=1", "federation.rounds=2")
    state, before = state_of(outcome), start(fedsvd())
    assert all_moved({n: state[n] for n in fedsvd().spec.lora}, before)
    assert list((outcome.path / "nodes" / NODES[0] / "tensors").glob("*")) == []
