"""FedSA-LoRA: A travels, B stays, and what the server's model is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Message

from privet.adapters import count
from privet.config import compose
from privet.errors import ConfigError, Refusal
from privet.wire import Arrays, Payload
from server_app.plan import make_plan
from strategies.fedsa import FedSA
from tests.conftest import Outcome, state_of
from tests.strategies.session import (
    NODES,
    StubSession,
    adapter_of,
    all_moved,
    finished,
    kept_by,
    learns,
    make,
    on_empty_draws,
    one_round,
    random_values,
    start,
)

Run = Callable[..., Outcome]
OWN = "own-b"


def fedsa(*overrides: str) -> FedSA:
    made = make("method=fedsa", *overrides)
    assert isinstance(made, FedSA)
    return made


def half(values: Arrays, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    return {n: values[n] for n in shapes}


# --- both halves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("global_b", ["none", "mean"])
def test_a_travels_and_b_stays(global_b: str) -> None:
    method = fedsa(f"method.global_b={global_b}")
    server, own = random_values(method, 1), random_values(method, 2)
    session = StubSession(method, kept={OWN: half(own, method.spec.b)})
    request = method.download("train", server, True)
    assert set(request.adapter) == set(method.spec.a)
    assert request.once == {}
    reply = method.client("train", request, session)
    method.check_upload("train", reply)
    for name in method.spec.lora:
        source = server if name in method.spec.a else own
        assert torch.equal(session.started[name], source[name]), name
    assert set(session.trained) == {*method.spec.lora, *method.spec.head}  # rule 4
    assert method.trained_numbers == count(method.spec.lora) + count(method.spec.head)
    assert reply.adapter.keys() == method.spec.a.keys()
    assert all(torch.equal(v, server[n] + 1) for n, v in reply.adapter.items())
    assert set(session.store[OWN]) == set(method.spec.b)
    assert all(torch.equal(v, own[n] + 1) for n, v in session.store[OWN].items())
    assert set(reply.once) == (set(method.spec.b) if global_b == "mean" else set())
    assert all(torch.equal(v, own[n] + 1) for n, v in reply.once.items())
    assert session.flags == []


def test_a_first_b_is_zero_and_a_lost_one_is_flagged() -> None:
    method = fedsa()
    for acknowledged, flags in ((0, []), (2, ["own-b-lost"])):
        session = StubSession(method, acknowledged=acknowledged)
        method.client("train", method.download("train", random_values(method), False), session)
        assert not any(session.started[n].any() for n in method.spec.b)
        assert session.flags == flags


@pytest.mark.parametrize("global_b", ["none", "mean"])
def test_the_servers_model_has_the_mean_a_and_no_b_or_the_last_rounds_mean(global_b: str) -> None:
    method = fedsa(f"method.global_b={global_b}")
    state = start(method)
    for number in (1, 2):
        values = [random_values(method, 10 * number + i) for i in range(3)]
        sessions = [StubSession(method, step=lambda _, v=v: v) for v in values]  # type: ignore[misc]
        state = one_round(method, state, sessions, number=number)
    mean = {n: torch.stack([v[n].double() for v in values]).mean(0).float() for n in method.spec.lora}
    model = method.model_values(state)
    for name in method.spec.a:
        torch.testing.assert_close(model[name], mean[name])
    assert set(model) & set(method.spec.b) == (set(method.spec.b) if global_b == "mean" else set())
    for name in set(model) & set(method.spec.b):
        torch.testing.assert_close(model[name], mean[name])
    assert set(method.download("train", state, True).adapter) == set(method.spec.a)


def test_what_a_reply_shows_is_checked() -> None:
    values = random_values(fedsa())
    a, b = (half(values, shapes) for shapes in (fedsa().spec.a, fedsa().spec.b))
    head = half(values, dict(fedsa().spec.head))
    first = next(iter(b))
    bad = [
        {},
        dict(list(b.items())[1:]),
        {**b, first: b[first][:1]},
        {**b, first: torch.full_like(b[first], torch.inf)},
        {**b, first: torch.full_like(b[first], 1e13)},
        {**b, first: b[first].to(torch.uint8)},
        {**b, "another": b[first]},
    ]
    method = fedsa("method.global_b=mean")
    method.check_upload("train", Payload(a, head, b))
    for once in bad:
        with pytest.raises(Refusal):
            method.check_upload("train", Payload(a, head, once))
    fedsa().check_upload("train", Payload(a, head))
    for payload in (Payload(a, head, b), Payload({**a, **b}, head), Payload(b, head), Payload(a)):
        with pytest.raises(Refusal):
            fedsa().check_upload("train", payload)


@pytest.mark.parametrize("head", ["shared", "local"])
def test_a_nodes_own_model_is_the_servers_a_with_its_b_and_head(head: str) -> None:
    method = fedsa(f"task.head={head}", "method.global_b=mean")
    server, own = random_values(method, 1), random_values(method, 2)
    received = Payload(half(server, method.spec.lora), half(server, method.shared_head))
    assert method.personal(received, StubSession(method)) is None
    kept = {OWN: half(own, method.spec.b)}
    if head == "local":
        kept["head"] = half(own, dict(method.spec.head))
    mine = method.personal(received, StubSession(method, kept=kept))
    assert mine is not None
    owned = {*method.spec.b, *(method.spec.head if head == "local" else ())}
    assert set(mine) == {*method.spec.lora, *method.spec.head}
    for name, value in mine.items():
        assert torch.equal(value, own[name] if name in owned else server[name]), name


def test_plans_say_whose_models_count(settings: list[str]) -> None:
    def remarks(*overrides: str) -> list[str]:
        plan = make_plan(compose([*settings, "method=fedsa", *overrides]))
        return [text for text in plan.warnings if "B = 0" in text]

    assert len(remarks()) == 1
    assert remarks("evaluation=both") == remarks("evaluation=client") == remarks("evaluation=none") == []
    assert remarks("method.global_b=mean") == []
    with pytest.raises(ConfigError, match=r"method\.global_b = last is not allowed"):
        fedsa("method.global_b=last")


# --- whole runs ----------------------------------------------------------------------------------


def test_a_run_without_privacy_learns_models_of_the_nodes(run: Run) -> None:
    outcome = learns(run, "method=fedsa", "evaluation=both", "holdout=0.2", "task.head=local")
    kept = [kept_by(outcome, node, OWN) for node in NODES]
    assert all(not torch.equal(kept[0][n], kept[1][n]) for n in fedsa().spec.b)
    assert not any(adapter_of(outcome)[f"base_model.model.{n}"].any() for n in fedsa().spec.b)
    scores = outcome.rounds[-1]["eval_clients"]
    assert scores["global"] is None  # no head on the server
    assert scores["personal"]["nodes"] == 3
    assert scores["personal"]["accuracy"] > 0.75
    assert [p["flags"] for r in outcome.rounds for p in r["phases"]] == [
        {n: ["fresh-head"] for n in NODES},
        *[{}] * 5,
    ]


def test_the_shown_b_is_averaged_counted_apart_scored_and_exported(run: Run) -> None:
    outcome = finished(run("method=fedsa", "method.global_b=mean", "privacy=none", "evaluation=both"))
    state, method = state_of(outcome), fedsa()
    own = [kept_by(outcome, node, OWN) for node in NODES]
    exported = adapter_of(outcome)
    for name in method.spec.b:
        mean = torch.stack([o[name].double() for o in own]).mean(0).float()
        torch.testing.assert_close(state[name], mean, rtol=1e-6, atol=1e-8)
        assert torch.equal(exported[f"base_model.model.{name}"], state[name])
    numbers = outcome.json("communication.json")["rounds"][-1]["nodes"]["client-0"]
    a, b = count(method.spec.a), count(method.spec.b)
    head = count(method.spec.head)
    assert numbers["upload"]["numbers"] == {"adapter": a, "head": head, "once": b}
    assert numbers["download"]["numbers"] == {"adapter": a, "head": head, "once": 0}
    assert outcome.rounds[-1]["upload_numbers"] == 3 * a
    scores = outcome.rounds[-1]["eval_clients"]
    assert scores["global"]["loss"] != scores["personal"]["loss"]


def test_a_private_run_noises_both_factors_and_stays_in_its_budget(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 4: on empty draws every number of the B that never leaves is noise of the size of A's."""
    outcome = on_empty_draws(run, monkeypatch, "method=fedsa", "evaluation=both")
    before, state = start(fedsa()), state_of(outcome)
    assert all_moved({n: state[n] for n in fedsa().spec.a}, before)
    sigma = outcome.json("privacy.json")["nodes"][0]["entries"][0]["sigma"]
    clip = outcome.json("privacy.json")["nodes"][0]["entries"][0]["clip"]
    for node in NODES:
        own = kept_by(outcome, node, OWN)
        assert all_moved(own, {n: torch.zeros(s) for n, s in fedsa().spec.b.items()})
        size = torch.cat([v.flatten() for v in own.values()]).std()
        # four steps of lr 0.5, divided by the expected batch of 16
        assert float(size) == pytest.approx(2 * 0.5 * sigma * clip / 16, rel=0.15)
    assert outcome.rounds[-1]["eval_clients"]["personal"]["nodes"] == 3


def test_the_shown_b_is_no_release_of_its_own(run: Run) -> None:
    """What a reply shows under DP is the output of the steps that were charged."""
    shown, hidden = (
        finished(run("method=fedsa", f"method.global_b={b}", "evaluation=none")) for b in ("mean", "none")
    )
    for outcome in (shown, hidden):
        for node in outcome.json("privacy.json")["nodes"]:
            assert [(e["phase"], e["steps"]) for e in node["entries"]] == [("train", 2), ("train", 2)]
    epsilons = {o.json("privacy.json")["max_epsilon"] for o in (shown, hidden)}
    assert len(epsilons) == 1


def test_a_lost_store_is_flagged_in_the_record(run: Run) -> None:
    def lose(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        if (request["round"], request["node"]) == (1, "client-1"):
            shutil.rmtree(Path(request["store"]) / "client-1")
        return reply

    lost = finished(run("method=fedsa", "privacy=none", "evaluation=none", tamper=lose))
    assert lost.rounds[0]["phases"][0]["flags"] == {}
    assert lost.rounds[1]["phases"][0]["flags"] == {"client-1": ["own-b-lost", "store-lost"]}
