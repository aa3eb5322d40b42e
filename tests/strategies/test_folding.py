"""What FedEx-LoRA and FLoRA share: the server's model is the mean of the clients', and nodes follow it exactly."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor

from privet.adapters import AdaptedModel, TargetModule, count, load_model
from privet.config import Config, compose
from privet.errors import ConfigError, Refusal
from privet.wire import Arrays, Payload
from server_app.evaluation import Evaluator
from server_app.plan import make_plan
from server_app.results import RunDirectory
from strategies.checkpoint import Checkpoint
from strategies.folding import Folding, StackMerger, stack_a, stack_b
from strategies.rounds import to_record
from tests.conftest import state_of
from tests.strategies.session import (
    NODES,
    Run,
    StubSession,
    adapter_of,
    all_moved,
    expect_same,
    finished,
    kept_by,
    make,
    on_empty_draws,
    product,
    random_values,
    relative,
    start,
)

METHODS = ["fedex", "flora"]


def folding(name: str, *overrides: str) -> Folding:
    made = make(f"method={name}", "federation.clients=3", *overrides)
    assert isinstance(made, Folding)
    return made


def base_change(model: AdaptedModel, before: Arrays, target: TargetModule) -> Tensor:
    """How the frozen weight differs from the one that came, in units of B A; read off the model itself."""
    return (model._frozen(target.name).weight.double() - before[target.name].double()) / model.spec.scaling


def untouched(method: Folding) -> Arrays:
    model = load_model(method.config)
    model.load({})
    return {t.name: model._frozen(t.name).weight.detach().clone() for t in method.spec.targets}


class Node(StubSession):
    """A node whose training gives random factors; remembers its whole model afterwards, as one dense change."""

    def __init__(self, method: Folding, seed: int) -> None:
        super().__init__(method)
        self.method, self.seed = method, seed
        self.before = untouched(method)
        self.models: dict[str, Tensor] = {}

    def train(self, trainables: Any, **_: Any) -> None:
        self.started = self.model.read([*self.model.spec.lora, *self.model.spec.head])
        self.trained = list(trainables.leaves)
        values = random_values(self.method, 1000 * self.seed + self.round)
        with torch.no_grad():
            for name, leaf in trainables.leaves.items():
                leaf.copy_(values[name] * 0.3)
        now = self.model.read(self.model.spec.lora)
        self.models = {
            t.name: base_change(self.model, self.before, t) + product(now, t) for t in self.model.spec.targets
        }


def play(
    method: Folding,
    state: Arrays,
    nodes: Sequence[Node],
    number: int,
    weights: Sequence[float] | None = None,
    once: bool = False,
) -> Arrays:
    """One round of both halves, with the checks of both."""
    method.round_number = number
    merger = method.merger("train", state)
    for i, node in enumerate(nodes):
        request = method.download("train", state, once)
        method.check_download("train", request)
        node.round = number
        reply = method.client("train", request, node)
        method.check_upload("train", reply)
        merger.add(f"client-{node.seed}", reply, weights[i] if weights else 1.0)
    return method.update("train", state, merger.mean())


def server_model(method: Folding, state: Arrays, target: TargetModule) -> Tensor:
    """The server's model as one dense change, through the model itself."""
    model = load_model(method.config)
    before = untouched(method)
    model.load(method.model_values(state))
    return base_change(model, before, target) + product(model.read(method.spec.lora), target)


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("weights", [None, [1.0, 6.0, 3.0]])
def test_the_servers_model_is_the_mean_of_the_clients_models_round_after_round(
    name: str, weights: list[float] | None
) -> None:
    method = folding(name)
    nodes = [Node(method, k) for k in range(3)]
    state = start(method)
    shares = [w / sum(weights) for w in weights] if weights else [1 / 3] * 3
    for number in range(1, 6):
        state = play(method, state, nodes, number, weights)
        for t in method.spec.targets:
            mean = sum(p * node.models[t.name] for p, node in zip(shares, nodes, strict=True))
            assert isinstance(mean, Tensor)
            assert relative(server_model(method, state, t), mean) < 2e-6, number
            plain = sum(p * node.models[t.name] for p, node in zip([0.5, 0.25, 0.25], nodes, strict=True))
            assert isinstance(plain, Tensor)
            assert relative(server_model(method, state, t), plain) > 0.05
    assert not torch.equal(nodes[0].models[t.name], nodes[1].models[t.name])


@pytest.mark.parametrize("name", METHODS)
def test_a_nodes_change_is_the_servers_to_the_last_bit(name: str) -> None:
    method = folding(name)
    nodes = [Node(method, k) for k in range(3)]
    states = [start(method)]
    for number in range(1, 5):
        states.append(play(method, states[-1], nodes, number))
        for node in nodes:
            kept = dict(node.store.get("base-change", {}))
            assert int(kept.pop("at", torch.tensor(0))) == number - 1
            expect_same(kept, {n: v for n, v in states[-2].items() if n in method.spec.deltas})


@pytest.mark.parametrize("name", METHODS)
def test_a_stack_is_the_sum_of_products_in_any_order_of_replies(name: str) -> None:
    method = folding(name)
    head = {n: torch.zeros(s) for n, s in method.shared_head.items()}
    values = [{n: v for n, v in random_values(method, k).items() if n in method.spec.lora} for k in range(3)]
    weights = [0.3, 5.0, 1.7]
    found = []
    for order in itertools.permutations(range(3)):
        merger = StackMerger(method.spec.targets)
        for k in order:
            merger.add(f"client-{k}", Payload(values[k], head), weights[k])
        found.append(merger.mean())
    for other in found[1:]:
        expect_same(found[0].once, other.once)
        expect_same(found[0].adapter, other.adapter)
    for t in method.spec.targets:
        expected = sum(w / 7 * product(v, t) for w, v in zip(weights, values, strict=True))
        assert isinstance(expected, Tensor)
        b, a = found[0].once[stack_b(t)].double(), found[0].once[stack_a(t)].double()
        assert (b.shape[1], a.shape[0]) == (12, 12)
        assert relative(b @ a, expected) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_weights_sum_to_one_over_those_who_replied(name: str) -> None:
    """Equal replies are a fixed point, however many and however heavy."""
    method = folding(name)
    values = {n: v for n, v in random_values(method, 0).items() if n in method.spec.lora}
    for weights in ([0.1], [3.0, 4.0, 0.5]):
        merger = StackMerger(method.spec.targets)
        for k, weight in enumerate(weights):
            merger.add(str(k), Payload(values), weight)
        once = merger.mean().once
        for t in method.spec.targets:
            assert relative(once[stack_b(t)].double() @ once[stack_a(t)].double(), product(values, t)) < 1e-6


# --- nodes that fall behind ----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_who_missed_a_round_asks_for_the_whole_change_and_only_then(name: str) -> None:
    method = folding(name)
    here, away = [Node(method, 0), Node(method, 1)], Node(method, 2)
    state = play(method, start(method), [*here, away], 1)
    state = play(method, state, here, 2)
    state = play(method, state, here, 3)
    for lost in (False, True):  # without any store it is the same
        if lost:
            away.store.clear()
        request = method.download("train", state, False)
        away.round = 4
        trained = len(away.models)
        with pytest.raises(Refusal) as refused:
            method.client("train", request, away)
        assert refused.value.kind == "needs-once"
        assert len(away.models) == trained
        whole = method.download("train", state, True)
        method.check_download("train", whole)
        assert not set(whole.adapter) & set(method.stacks(1))  # one or the other
        method.client("train", whole, away)
        kept = dict(away.store["base-change"])
        assert int(kept.pop("at")) == 3
        expect_same(kept, {n: state[n] for n in method.spec.deltas})
    state = play(method, state, [*here, away], 4)
    state = play(method, state, [*here, away], 5)
    for t in method.spec.targets:
        mean = (here[0].models[t.name] + here[1].models[t.name] + away.models[t.name]) / 3
        assert relative(server_model(method, state, t), mean) < 2e-6


@pytest.mark.parametrize("name", METHODS)
def test_a_change_that_begins_with_the_first_stack_needs_nothing_before_it(name: str) -> None:
    method = folding(name)
    state = play(method, start(method), [Node(method, 0)], 1)
    late = Node(method, 1)
    play(method, state, [late], 2)
    expect_same(
        {n: late.store["base-change"][n] for n in method.spec.deltas},
        {n: state[n] for n in method.spec.deltas},
    )


@pytest.mark.parametrize("name", METHODS)
def test_after_a_void_round_the_same_stack_is_not_folded_twice(name: str) -> None:
    method = folding(name)
    node = Node(method, 0)
    first = play(method, start(method), [node], 1)
    play(method, first, [node], 2)  # its result is thrown away
    before = node.store["base-change"]
    again = play(method, first, [node], 3)
    expect_same(before, node.store["base-change"])
    for t in method.spec.targets:
        assert relative(server_model(method, again, t), node.models[t.name]) < 2e-6
    assert again["versions"].tolist() == [1, 3]


# --- what a node accepts -------------------------------------------------------------------------


def versions(before: int, now: int) -> Tensor:
    return torch.from_numpy(np.array([before, now], dtype=np.uint32))


@pytest.mark.parametrize("name", METHODS)
def test_requests_that_cannot_be_are_refused(name: str) -> None:
    method = folding(name)
    state = play(method, start(method), [Node(method, k) for k in range(3)], 1)
    good, whole = method.download("train", state, False), method.download("train", state, True)
    head, once = good.head, good.once
    most = method.most_columns
    assert most == 12
    first, *_ = method.spec.targets

    def wide(columns: int) -> Arrays:
        made = {n: torch.zeros(s) for n, s in method.stacks(columns).items()}
        return {**{n: good.adapter[n] for n in method.sent}, **made}

    for columns in (method.spec.rank, most):
        method.check_download("train", Payload(wide(columns), head, once))
    bad = {
        "too wide": Payload(wide(most + method.spec.rank), head, once),
        "absurd": Payload(wide(64 * method.spec.rank), head, once),
        "no multiple of the rank": Payload(wide(method.spec.rank + 1), head, once),
        "no column": Payload(wide(0), head, once),
        "one width differs": Payload({**wide(most), stack_b(first): torch.zeros(first.out, 4)}, head, once),
        "half a stack": Payload({n: v for n, v in wide(most).items() if n != stack_b(first)}, head, once),
        "a number for a matrix": Payload({**wide(most), stack_a(first): torch.tensor(1.0)}, head, once),
        "not a number": Payload(
            {**wide(most), stack_a(first): torch.full((most, first.inp), math.nan)}, head, once
        ),
        "another array": Payload({**wide(most), "x": torch.zeros(1)}, head, once),
        "no versions": Payload(wide(most), head),
        "versions of another type": Payload(wide(most), head, {"versions": torch.tensor([0, 1])}),
        "three versions": Payload(wide(most), head, {"versions": versions(0, 1).repeat(2)[:3]}),
        "a version on itself": Payload(wide(most), head, {"versions": versions(1, 1)}),
        "a stack that is no version": Payload(wide(most), head, {"versions": versions(0, 0)}),
        "a version without a stack": Payload({n: good.adapter[n] for n in method.sent}, head, once),
        "stack and change": Payload(wide(most), head, whole.once),
        "part of a change": Payload(
            whole.adapter, head, {n: v for n, v in whole.once.items() if n != first.delta}
        ),
        "a change that is none": Payload(
            whole.adapter, head, {**whole.once, first.delta: torch.full((first.out, first.inp), math.inf)}
        ),
        "no head": Payload(wide(most), {}, once),
    }

    def accepts(payload: Payload) -> bool:
        try:
            method.check_download("train", payload)
        except Refusal:
            return False
        return True

    assert [what for what, payload in bad.items() if accepts(payload)] == []


@pytest.mark.parametrize("name", METHODS)
def test_what_comes_back_is_both_factors_and_nothing_else(name: str) -> None:
    method = folding(name)
    node = Node(method, 0)
    reply = method.client("train", method.download("train", start(method), True), node)
    assert set(reply.adapter) == set(method.spec.lora)
    assert set(node.trained) == {*method.spec.lora, *method.spec.head}
    assert method.trained_numbers == count(method.spec.lora) + count(method.spec.head)
    with pytest.raises(Refusal):
        method.check_upload("train", Payload(reply.adapter, reply.head, {"versions": versions(0, 1)}))


@pytest.mark.parametrize("name", METHODS)
def test_a_base_that_cannot_be_changed_is_refused_before_the_first_round_trains(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = folding(name)
    node = Node(method, 0)
    monkeypatch.setattr(node.model, "_folded", {})
    quantised = SimpleNamespace(weight=torch.zeros(1, dtype=torch.int8))
    monkeypatch.setattr(AdaptedModel, "_frozen", lambda *_: quantised)
    with pytest.raises(ConfigError, match="is quantised"):
        method.client("train", method.download("train", start(method), True), node)
    assert node.trained == []


@pytest.mark.parametrize("name", METHODS)
def test_few_bits_are_refused_with_the_plan(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"model\.bits = 4 is not allowed with method={name}, which changes"
    ):
        make_plan(compose([f"method={name}", "model.bits=4"]))


# --- plans and remarks ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_names_what_a_sample_of_clients_costs(settings: list[str], name: str) -> None:
    whole = make_plan(compose([*settings, f"method={name}"])).to_dict()
    assert whole["one_off"] == {"download_numbers": 0, "download_bytes": 0}
    assert not any(name in text for text in whole["warnings"])
    some = make_plan(
        compose([*settings, f"method={name}", "federation.sampled=2", "train.dtype=bfloat16"])
    ).to_dict()
    numbers = 4 * 32 * 32
    assert some["one_off"] == {"download_numbers": numbers, "download_bytes": 4 * numbers}
    assert len([text for text in some["warnings"] if text.startswith(name)]) == 2
    assert any("4 096 numbers" in text for text in some["warnings"])


def test_real_messages_carry_the_planned_numbers(
    run: Run, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everybody in the round, from the second round on; RoBERTa-base's shapes."""
    nothing = torch.zeros(768, 1), torch.zeros(1, 768)
    monkeypatch.setattr("privet.adapters.factorise", lambda _: nothing)  # 24 SVDs that nobody looks at
    tiny = [
        "train.local_steps=1",
        "train.batch_size=2",
        "task.train_rows=8",
        "task.test_rows=4",
        "evaluation=none",
    ]
    for name, down, first in (("fedex", 589_824, 294_912), ("flora", 294_912, 0)):
        overrides = ["model=roberta_base_random", f"method={name}", "federation.clients=1", "privacy=none"]
        plan = make_plan(compose([*settings, *overrides])).to_dict()["per_round"]
        assert (plan["upload_numbers"], plan["download_numbers"]) == (294_912, down)
        outcome = finished(run(*overrides, *tiny, nodes=1))
        assert [r["download_numbers"] for r in outcome.rounds] == [first, down]
        assert [r["upload_numbers"] for r in outcome.rounds] == [294_912, 294_912]
        traffic = outcome.json("communication.json")["rounds"][1]["nodes"]["client-0"]
        assert traffic["download"]["numbers"] == {"adapter": down, "head": 1538, "once": 2}
        assert traffic["upload"]["numbers"] == {"adapter": 294_912, "head": 1538, "once": 0}


# --- whole runs ----------------------------------------------------------------------------------


class Followers:
    """Compares, in every training of a whole run, the node's change with the server's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[Arrays] = []
        self.compared = 0
        folded, checkpoint = Folding._folded, RunDirectory.checkpoint

        def compare(method: Folding, received: Payload, session: Any) -> Arrays:
            changes = folded(method, received, session)
            server = self.states[-1] if self.states else {}
            expect_same(changes, {n: v for n, v in server.items() if n in method.spec.deltas})
            self.compared += bool(changes)
            return changes

        def remember(directory: RunDirectory, saved: Checkpoint) -> None:
            self.states.append(saved.state)
            checkpoint(directory, saved)

        monkeypatch.setattr(Folding, "_folded", compare)
        monkeypatch.setattr(RunDirectory, "checkpoint", remember)


def requeries(outcome: Any) -> dict[tuple[int, str], int]:
    """Numbers of the dense change that were sent again, by round and node."""
    return {
        (r["round"], node): ways["requery"]["numbers"]["once"]
        for r in outcome.json("communication.json")["rounds"]
        for node, ways in r["nodes"].items()
        if "requery" in ways
    }


@pytest.mark.parametrize("name", METHODS)
def test_nodes_follow_the_server_when_only_some_take_part(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    followers = Followers(monkeypatch)
    plan = ["federation.sampled=2", "federation.rounds=6", "train.local_steps=1", "evaluation=none", "seed=1"]
    outcome = finished(run(f"method={name}", *plan, "privacy=none"))
    assert followers.compared == 10  # all but the first round's two
    assert not any(phase["failed"] for r in outcome.rounds for phase in r["phases"])
    expected, last = {}, dict.fromkeys(NODES, 0)
    for planned in outcome.json("run.json")["schedule"]["rounds"]:
        for node in planned["nodes"]:
            if last[node] not in (0, planned["number"] - 1):
                expected[planned["number"], node] = count(folding(name).spec.deltas) + 2
            last[node] = planned["number"]
    assert expected
    assert requeries(outcome) == expected


@pytest.mark.parametrize("name", METHODS)
def test_nodes_follow_the_server_through_void_rounds_lost_replies_and_lost_stores(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    followers = Followers(monkeypatch)

    def tamper(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        place = request["round"], request["node"]
        if place in {(2, "client-0"), (3, "client-0"), (3, "client-1")}:  # round 3 is void
            record = reply.content["adapter"]
            first = next(iter(record))
            reply.content["adapter"] = ArrayRecord({**dict(record), first: Array(record[first].numpy()[:1])})
        if place == (4, "client-2"):
            shutil.rmtree(Path(request["store"]) / "client-2")
        return reply

    plan = ["federation.rounds=6", "federation.min_replies=2", "train.local_steps=1", "evaluation=none"]
    outcome = finished(run(f"method={name}", *plan, "privacy=none", tamper=tamper))
    assert [r["void"] for r in outcome.rounds] == [False, False, True, False, False, False]
    assert followers.compared == 15
    assert requeries(outcome) == {(5, "client-2"): count(folding(name).spec.deltas) + 2}
    assert outcome.rounds[4]["phases"][0]["flags"] == {"client-2": ["base-change-lost", "store-lost"]}
    assert state_of(outcome)["versions"].tolist() == [5, 6]


@pytest.mark.parametrize("name", METHODS)
def test_the_exported_adapter_and_the_scores_are_the_folded_models(run: Run, name: str) -> None:
    outcome = finished(run(f"method={name}", "privacy=none", "train.optimizer=adamw", "train.lr=0.05"))
    method, state, adapter = folding(name), state_of(outcome), adapter_of(outcome)
    scorer = Evaluator(Config.from_dict(yaml.safe_load((outcome.path / "config.yaml").read_text())))
    found = scorer(2, to_record(method.model_values(state)))
    assert outcome.rounds[-1]["eval"]["loss"] == pytest.approx(found["loss"], rel=1e-6)
    plain = {n: v for n, v in method.model_values(state).items() if n not in method.spec.deltas}
    assert scorer(2, to_record(plain))["loss"] != found["loss"]  # the change matters
    for t in method.spec.targets:
        prefix = f"base_model.model.{t.name}"
        whole = adapter[f"{prefix}.lora_B.weight"].double() @ adapter[f"{prefix}.lora_A.weight"].double()
        torch.testing.assert_close(whole, server_model(method, state, t), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_personal_models_with_a_local_head_stand_on_the_folded_base(run: Run, name: str) -> None:
    overrides = ["task.head=local", "privacy=none", "evaluation=both", "train.lr=0.3"]
    outcome = finished(run(f"method={name}", *overrides))
    scores = outcome.rounds[-1]["eval_clients"]
    assert (scores["personal"]["nodes"], scores["global"], scores["failed"]) == (3, None, [])
    assert bool(kept_by(outcome, "client-1", "head")["head.weight"].any())


@pytest.mark.parametrize("name", METHODS)
def test_everything_that_trains_is_noised(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    method = folding(name)
    outcome = on_empty_draws(run, monkeypatch, f"method={name}", "train.local_steps=2")
    state = state_of(outcome)
    assert all_moved({n: state[n] for n in (*method.sent, *method.spec.head)}, start(method))
    assert all(bool((state[n] != 0).all()) for n in (*method.spec.deltas, *method.stacks(1)))
