"""FedPer: which layers travel, round 0, and where the private layers start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from privet.adapters import AdapterSpec, Shapes, TargetModule, count
from privet.errors import ConfigError, Refusal
from privet.wire import Arrays, Payload
from strategies.fedper import FedPer, layers_of
from strategies.rounds import NEEDS_ONCE
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
KEPT = "private-layers"
ONE = "method.shared_layers=1"  # of the tiny model's two


def fedper(*overrides: str) -> FedPer:
    made = make("method=fedper", ONE, *overrides)
    assert isinstance(made, FedPer)
    return made


def take(values: Arrays, shapes: Shapes) -> Arrays:
    return {n: values[n] for n in shapes}


# --- layers --------------------------------------------------------------------------------------


def spec_of(*names: str) -> AdapterSpec:
    return replace(fedper().spec, targets=tuple(TargetModule(n, 32, 16) for n in names))


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["encoder.layer.0.query", "encoder.layer.0.value", "encoder.layer.1.query"], [2, 1]),
        ([f"h.{i}.attn.c_attn" for i in range(12)], [1] * 12),  # 10 comes after 9
        (["layers.0.experts.0.w", "layers.0.experts.1.w", "layers.1.experts.0.w"], [2, 1]),
        (["encoder.block.0.layer.0.q", "encoder.block.0.layer.1.wi", "decoder.block.0.layer.0.q"], [2, 1]),
        (["embed.proj", "model.layers.0.q_proj", "model.layers.0.v_proj", "pooler.dense"], [1, 2, 1]),
        (["conv1.proj", "stage2.0.fc", "stage2.1.fc"], [1, 1, 1]),
    ],
)
def test_layers_are_read_from_the_names_in_model_order(names: list[str], layers: list[int]) -> None:
    found = layers_of(spec_of(*names))
    assert [len(layer) for layer in found] == layers
    assert [t.name for layer in found for t in layer] == names


@pytest.mark.parametrize("shared", [1, 2, 4, 12])
def test_the_top_layers_are_shared_by_their_own_shapes(shared: int) -> None:
    method = make("model=roberta_base_random", "method=fedper", f"method.shared_layers={shared}")
    assert isinstance(method, FedPer)
    top = {str(i) for i in range(12 - shared, 12)}
    assert {n.split(".")[2] for n in method.shared} == top
    assert {n.split(".")[2] for n in method.private} == {str(i) for i in range(12)} - top
    assert {**method.private, **method.shared} == method.spec.lora
    assert count(method.shared) == 294_912 * shared // 12
    numbers = count(method.private)
    assert method.once_cost() == (numbers, 4 * numbers)


@pytest.mark.parametrize("shared", [0, 3])
def test_more_layers_than_there_are_and_none_are_refused(shared: int) -> None:
    with pytest.raises(ConfigError, match=r"method\.shared_layers = \d"):
        make("method=fedper", f"method.shared_layers={shared}")


# --- both halves ---------------------------------------------------------------------------------


def test_round_0_is_fedavg_and_starts_the_private_layers() -> None:
    method = fedper()
    values = [random_values(method, i) for i in range(3)]
    sessions = [StubSession(method, step=lambda _, v=v: v) for v in values]  # type: ignore[misc]
    state = one_round(method, start(method), sessions, phases=method.warmup_phases)
    for name in (*method.spec.lora, *method.spec.head):
        torch.testing.assert_close(state[name], sum(v[name] for v in values) / 3)
    assert all(s.store == {} for s in sessions)
    state = method.finish_warmup(state)
    first, later = (method.download("train", state, once) for once in (True, False))
    assert first.adapter.keys() == later.adapter.keys() == method.shared.keys()
    assert first.once.keys() == method.private.keys()
    assert later.once == {}
    assert all(torch.equal(v, state[n]) for n, v in first.once.items())
    assert method.download("warmup", state, True).once == {}
    session = StubSession(method, acknowledged=1)
    reply = method.client("train", first, session)
    assert all(torch.equal(session.started[n], state[n]) for n in method.spec.lora)
    method.check_upload("train", reply)
    assert reply.adapter.keys() == method.shared.keys()
    assert session.flags == []


def test_private_layers_go_on_from_where_they_were() -> None:
    method = fedper()
    server, own = random_values(method, 1), random_values(method, 2)
    for once in (False, True):  # a server that missed the last reply sends the start again: it is not needed
        session = StubSession(method, kept={KEPT: take(own, method.private)}, acknowledged=4)
        reply = method.client("train", method.download("train", server, once), session)
        for name in method.spec.lora:
            source = own if name in method.private else server
            assert torch.equal(session.started[name], source[name]), name
        assert set(session.trained) == {*method.spec.lora, *method.spec.head}  # rule 4
        assert session.store[KEPT].keys() == method.private.keys()
        assert all(torch.equal(v, own[n] + 1) for n, v in session.store[KEPT].items())
        assert all(torch.equal(v, server[n] + 1) for n, v in reply.adapter.items())
        assert session.flags == []
    assert method.trained_numbers == count(method.spec.lora) + count(method.spec.head)


def test_a_node_without_private_layers_asks_for_them_before_it_trains() -> None:
    method = fedper()
    server = random_values(method, 1)
    session = StubSession(method, acknowledged=3)
    with pytest.raises(Refusal) as refused:
        method.client("train", method.download("train", server, False), session)
    assert refused.value.kind == NEEDS_ONCE
    assert session.trained == []
    method.client("train", method.download("train", server, True), session)
    assert session.flags == ["private-layers-lost"]
    assert all(torch.equal(session.started[n], server[n]) for n in method.private)


def test_a_wrong_start_of_the_private_layers_is_refused_before_training() -> None:
    method = fedper()
    sent = method.download("train", random_values(method), True)
    first = next(iter(sent.once))
    for once in (
        dict(list(sent.once.items())[1:]),
        {**sent.once, "another": torch.zeros(1)},
        {**sent.once, first: sent.once[first][:1]},
        {**sent.once, first: torch.full_like(sent.once[first], torch.nan)},
    ):
        session = StubSession(method)
        with pytest.raises(Refusal):
            method.client("train", Payload(sent.adapter, sent.head, once), session)
        assert session.trained == []


@pytest.mark.parametrize("head", ["shared", "local"])
def test_a_nodes_own_model_is_the_servers_top_with_its_lower_layers(head: str) -> None:
    method = fedper(f"task.head={head}")
    server, own = random_values(method, 1), random_values(method, 2)
    received = Payload(take(server, method.spec.lora), take(server, method.shared_head))
    assert method.personal(received, StubSession(method)) is None
    kept = {KEPT: take(own, method.private)}
    if head == "local":
        kept["head"] = take(own, dict(method.spec.head))
    mine = method.personal(received, StubSession(method, kept=kept))
    assert mine is not None
    owned = {*method.private, *(method.spec.head if head == "local" else ())}
    assert set(mine) == {*method.spec.lora, *method.spec.head}
    for name, value in mine.items():
        assert torch.equal(value, own[name] if name in owned else server[name]), name


# --- whole runs ----------------------------------------------------------------------------------


def download_numbers(outcome: Outcome, node: str, way: str = "download") -> list[Any]:
    rounds = outcome.json("communication.json")["rounds"]
    return [r["nodes"][node][way]["numbers"] for r in rounds if way in r["nodes"].get(node, {})]


def test_a_run_without_privacy_learns_models_of_the_nodes(run: Run) -> None:
    outcome = learns(run, "method=fedper", ONE, "evaluation=both", "holdout=0.2")
    method = fedper()
    kept = [kept_by(outcome, node, KEPT) for node in NODES]
    assert kept[0].keys() == method.private.keys()
    assert all(not torch.equal(kept[0][n], kept[1][n]) for n in method.private)
    scores = outcome.rounds[-1]["eval_clients"]
    assert scores["personal"]["nodes"] == 3
    assert scores["global"]["loss"] != scores["personal"]["loss"]
    shared, private, head = (count(s) for s in (method.shared, method.private, method.spec.head))
    for node in NODES:
        first, second, *later = download_numbers(outcome, node)
        assert first == {"adapter": shared + private, "head": head, "once": 0}
        assert second == {"adapter": shared, "head": head, "once": private}
        assert later == [{"adapter": shared, "head": head, "once": 0}] * 4
        assert [n["adapter"] for n in download_numbers(outcome, node, "upload")] == [
            shared + private,
            *[shared] * 5,
        ]
    # The server's model, scored and exported, has round 0's lower layers.
    state, exported = state_of(outcome), adapter_of(outcome)
    assert all(torch.equal(exported[f"base_model.model.{n}"], state[n]) for n in method.spec.lora)


def test_all_layers_shared_are_fedavg(run: Run) -> None:
    """With the whole table as a batch, so that the batches of round 0 are FedAvg's too."""
    plan = ["privacy=none", "federation.rounds=3", "train.batch_size=50", "evaluation=none"]
    fedavg = finished(run("method=fedavg", *plan))
    fedper = finished(run("method=fedper", "method.shared_layers=2", *plan))
    one, other = adapter_of(fedavg), adapter_of(fedper)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
    assert list((fedper.path / "nodes").glob(f"*/tensors/{KEPT}-*")) == []


def test_a_private_run_charges_round_0_and_noises_what_stays(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 4: on empty draws every number of the layers that never leave has moved."""
    outcome = on_empty_draws(run, monkeypatch, "method=fedper", ONE, "evaluation=both", "federation.rounds=3")
    state, method = state_of(outcome), fedper()
    for node in NODES:
        assert all_moved(kept_by(outcome, node, KEPT), state)  # the state has their start
    assert all_moved({n: state[n] for n in method.spec.lora}, start(method))
    for node in outcome.json("privacy.json")["nodes"]:
        assert [e["phase"] for e in node["entries"]] == ["warmup", "train", "train"]
    assert outcome.rounds[-1]["eval_clients"]["personal"]["nodes"] == 3


def test_late_joiners_get_the_start_and_lost_layers_are_sent_again(run: Run) -> None:
    sampled = finished(
        run("method=fedper", ONE, "federation.sampled=1", "federation.rounds=6", "seed=3", "evaluation=none")
    )
    private = count(fedper().private)
    for node in NODES:
        once = [n["once"] for n in download_numbers(sampled, node)[1:]]  # after round 0
        assert once == ([private] + [0] * (len(once) - 1) if once else [])
    assert [r["phases"][0]["failed"] for r in sampled.rounds] == [[]] * 6

    def lose(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        if (request["round"], request["node"]) == (2, "client-1"):
            shutil.rmtree(Path(request["store"]) / "client-1")
        return reply

    plan = ["privacy=none", "federation.rounds=3", "evaluation=none"]
    lost = finished(run("method=fedper", ONE, *plan, tamper=lose))
    assert lost.rounds[1]["phases"][0]["flags"] == {}
    assert lost.rounds[2]["phases"][0]["flags"] == {"client-1": ["private-layers-lost", "store-lost"]}
    (again,) = download_numbers(lost, "client-1", "requery")
    assert again["once"] == private
    assert lost.rounds[2]["phases"][0]["replied"] == 3
