"""SCAFFOLD: what the control variates are, that c is the mean of those that count, and what they are for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from safetensors.torch import load_file
from torch import Tensor

from privet.adapters import count
from privet.corrections import Correction
from privet.errors import ConfigError
from privet.trainables import Trainables
from privet.wire import Arrays
from server_app.results import RunDirectory
from strategies.base import LoraStrategy
from strategies.checkpoint import Checkpoint
from strategies.scaffold import Drift, Scaffold
from tests.conftest import state_of
from tests.strategies.session import (
    NODES,
    Run,
    StubSession,
    all_moved,
    finished,
    kept_by,
    make,
    on_empty_draws,
    random_values,
    start,
)

C = "control/"


def scaffold(*overrides: str, nodes: int = 3) -> Scaffold:
    made = make("method=scaffold", *overrides)
    assert isinstance(made, Scaffold)
    made._run = SimpleNamespace(nodes={f"client-{k}": None for k in range(nodes)})  # type: ignore[assignment]
    return made


class Quadratic(StubSession):
    """A client with the loss sum h (w - t)^2 / 2, one h and one t for every number that trains.

    Gradient descent, with the correction where the trainer has it and a learning rate of its own for the head.
    """

    lr, head_lr, steps = 0.2, 0.1, 5

    def __init__(self, method: LoraStrategy, h: Arrays, t: Arrays) -> None:
        super().__init__(method)
        self.h, self.t = h, t
        self.gradients: dict[str, list[Tensor]] = {}

    def train(self, trainables: Trainables, *, correction: Correction | None = None, **_: Any) -> None:
        self.gradients = {n: [] for n in trainables.leaves}
        rates = {n: self.head_lr if n in self.model.spec.head else self.lr for n in trainables.leaves}
        with torch.no_grad():
            for _step in range(self.steps):
                for name, leaf in trainables.leaves.items():
                    leaf.grad = self.h[name] * (leaf - self.t[name])
                    self.gradients[name].append(leaf.grad.double().clone())
                if correction is not None:
                    correction.before_step(trainables.leaves, rates)
                for name, leaf in trainables.leaves.items():
                    assert leaf.grad is not None
                    leaf -= rates[name] * leaf.grad
                    leaf.grad = None


def clients(method: LoraStrategy, number: int = 3) -> list[Quadratic]:
    made = []
    for k in range(number):
        curvature = {n: 0.5 + v.abs() for n, v in random_values(method, k).items()}
        made.append(Quadratic(method, curvature, random_values(method, 100 + k)))
    return made


def play(
    method: LoraStrategy,
    state: Arrays,
    sessions: Mapping[int, Quadratic],
    number: int,
    weights: Mapping[int, float] | None = None,
) -> Arrays:
    """One round of both halves; every reply counts."""
    merger = method.merger("train", state)
    for k, session in sessions.items():
        session.round = number
        reply = method.client("train", method.download("train", state, False), session)
        session.acknowledged = number
        method.check_upload("train", reply)
        merger.add(str(k), reply, (weights or {}).get(k, 1.0))
    return method.update("train", state, merger.mean())


def optimum(sessions: list[Quadratic], name: str) -> Tensor:
    """Where the mean of the losses is least: by numbers, sum h t / sum h."""
    top = sum(s.h[name].double() * s.t[name].double() for s in sessions)
    assert isinstance(top, Tensor)
    return top / sum(s.h[name].double() for s in sessions)


def own_control(session: Quadratic, name: str) -> Tensor:
    """c_k after the last reply, which counts."""
    return session.store["controls"][f"new/{name}"].double()


# --- what it is for ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, {0: 1.0, 1: 5.0, 2: 2.0}])
def test_it_finds_the_joint_optimum_of_quadratics_and_fedavg_does_not(
    weights: dict[int, float] | None,
) -> None:
    """With c_k = g_k(x*) and c = 0 nothing moves, for any weights of the average."""
    farthest = {}
    for method in (scaffold(), make("method=fedavg")):
        sessions = clients(method)
        state = start(method)
        for number in range(1, 51):
            state = play(method, state, dict(enumerate(sessions)), number, weights)
        names = [*method.spec.lora, *method.spec.head]
        farthest[type(method).__name__] = max(
            float((state[n].double() - optimum(sessions, n)).abs().max()) for n in names
        )
    assert farthest["Scaffold"] < 2e-3
    assert farthest["FedAvg"] > 0.3


def test_at_the_optimum_nothing_moves() -> None:
    method = scaffold()
    sessions = clients(method)
    names = [*method.spec.lora, *method.spec.head]
    state = {n: optimum(sessions, n).float() for n in names}
    state |= {C + n: torch.zeros_like(state[n]) for n in names}
    for session in sessions:
        own = {n: session.h[n] * (state[n] - session.t[n]) for n in names}
        kept = {**{f"old/{n}": v * 9 for n, v in own.items()}, **{f"new/{n}": v for n, v in own.items()}}
        session.keep("controls", {**kept, "round": torch.tensor(1)})
        session.acknowledged = 1
    after = play(method, state, dict(enumerate(sessions)), 2)
    for n in names:
        torch.testing.assert_close(after[n], state[n], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[C + n], state[C + n], rtol=0, atol=1e-5)


# --- what the control variates are ---------------------------------------------------------------


def test_c_k_is_the_mean_gradient_of_the_round_and_c_their_mean_over_all_clients() -> None:
    """Also where some take no part: those that never did count with zero."""
    method = scaffold(nodes=5)
    sessions = clients(method, 4)
    state = start(method)
    for number, chosen in enumerate(([0, 1, 2], [1, 2], [0, 2]), 1):
        state = play(method, state, {k: sessions[k] for k in chosen}, number)
        for k in chosen:
            for name, gradients in sessions[k].gradients.items():
                mean = torch.stack(gradients).mean(0)
                torch.testing.assert_close(own_control(sessions[k], name), mean, rtol=1e-4, atol=1e-5)
        for name in method.controlled:
            total = sum(own_control(sessions[k], name) for k in range(3))
            assert isinstance(total, Tensor)
            torch.testing.assert_close(state[C + name].double(), total / 5, rtol=1e-4, atol=1e-5)


def test_the_models_are_averaged_by_weight_and_only_over_replies() -> None:
    method = scaffold(nodes=9)
    sessions = clients(method, 2)
    state = start(method)
    after = play(method, state, dict(enumerate(sessions)), 1, {0: 3.0, 1: 1.0})
    for name in method.controlled:
        ends = []
        for session in sessions:
            lr = session.head_lr if name in method.spec.head else session.lr
            ends.append(state[name].double() - lr * torch.stack(session.gradients[name]).sum(0))
        torch.testing.assert_close(after[name].double(), (3 * ends[0] + ends[1]) / 4, rtol=1e-5, atol=1e-5)


def test_every_step_is_corrected_by_c_minus_c_k() -> None:
    method = scaffold()
    (session, *_) = clients(method)
    names = list(method.controlled)
    state = {**random_values(method, 7), **{C + n: v for n, v in random_values(method, 8).items()}}
    own = random_values(method, 9)
    session.keep("controls", {**{f"new/{n}": v for n, v in own.items()}, "round": torch.tensor(2)})
    session.acknowledged, session.steps, session.round = 2, 1, 3
    reply = method.client("train", method.download("train", state, False), session)
    sent = {**reply.adapter, **reply.head}
    assert set(sent) == {*names, *(C + n for n in names)}
    for n in names:
        lr = 0.1 if n in method.spec.head else 0.2
        (g,) = session.gradients[n]
        corrected = state[n].double() - lr * g - lr * (state[C + n].double() - own[n].double())
        torch.testing.assert_close(sent[n].double(), corrected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sent[C + n].double(), g - own[n].double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("acknowledged", "value"), [(0, 1.0), (3, 1.0), (4, 2.0)])
def test_the_control_that_counts_is_the_one_the_server_took(acknowledged: int, value: float) -> None:
    method = scaffold()
    kept = {f"old/{n}": torch.full(s, 1.0) for n, s in method.controlled.items()}
    kept |= {f"new/{n}": torch.full(s, 2.0) for n, s in method.controlled.items()}
    stored = {"controls": {**kept, "round": torch.tensor(4)}}
    session = StubSession(method, kept=stored, acknowledged=acknowledged, round_number=5)
    own = method._own_controls(session)
    assert all(bool((v == value).all()) for v in own.values())
    assert session.flags == []


@pytest.mark.parametrize(
    ("kept_round", "acknowledged", "flags"),
    [(None, 0, []), (None, 2, ["controls-lost"]), (1, 2, ["controls-lost"])],
)
def test_lost_controls_are_flagged(kept_round: int | None, acknowledged: int, flags: list[str]) -> None:
    method = scaffold()
    kept = {f"{age}/{n}": torch.ones(s) for n, s in method.controlled.items() for age in ("old", "new")}
    stored = {} if kept_round is None else {"controls": {**kept, "round": torch.tensor(kept_round)}}
    session = StubSession(method, kept=stored, acknowledged=acknowledged)
    own = method._own_controls(session)
    assert session.flags == flags
    assert all(bool((v == (0 if kept_round is None else 1)).all()) for v in own.values())


def test_the_sum_of_the_rates_is_kept_for_each_leaf() -> None:
    """A schedule changes the rate from step to step; c_k+ divides by what was applied."""
    leaves = {"a": torch.nn.Parameter(torch.zeros(2)), "head": torch.nn.Parameter(torch.zeros(2))}
    drift = Drift({"a": torch.ones(2)})
    for rate in (0.5, 0.25, 0.125):
        drift.before_step(leaves, {"a": rate, "head": 9.0})
    assert drift.rates == {"a": 0.875}
    assert leaves["head"].grad is None
    assert leaves["a"].grad is not None
    assert leaves["a"].grad.tolist() == [3.0, 3.0]  # nobody cleared them here


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.optimizer=adamw", r"train\.optimizer = adamw"),
        ("train.momentum=0.9", r"train\.momentum = 0\.9"),
    ],
)
def test_anything_but_plain_sgd_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scaffold(override)


@pytest.mark.parametrize("privacy", ["dp", "none"])
def test_what_travels_and_trains(privacy: str) -> None:
    method = scaffold(f"privacy={privacy}")
    lora, head = count(method.spec.lora), count(method.spec.head)
    assert (count(method.exchanged), count(method.shared_head)) == (2 * lora, 2 * head)
    assert method.trained_numbers == lora + head
    assert scaffold("task.head=local").shared_head == {}
    assert set(scaffold("task.head=local").controlled) == set(method.spec.lora)


# --- whole runs ----------------------------------------------------------------------------------


class Traffic:
    """Looks at what nodes are sent and what they send."""

    def __init__(self) -> None:
        self.seen: list[tuple[Arrays, Arrays]] = []

    def __call__(self, message: Message, reply: Message) -> Message:
        if "request" in message.content and message.content["request"]["phase"] == "train":
            self.seen.append((_arrays(message), _arrays(reply)))
        return reply


def _arrays(message: Message) -> Arrays:
    return {
        n: torch.from_numpy(a.numpy().copy()).double()
        for part in ("adapter", "head")
        for n, a in message.content[part].items()
    }


@pytest.mark.parametrize("privacy", ["dp", "none"])
def test_what_is_sent_follows_from_what_is_released(run: Run, privacy: str) -> None:
    """Under DP too: c_k+ - c_k is x, y and c and nothing else, so it is post-processing."""
    traffic = Traffic()
    rates = ["train.head_lr=0.25", "train.local_steps=3", "evaluation=none"]
    finished(run("method=scaffold", f"privacy={privacy}", *rates, tamper=traffic))
    method = scaffold()
    assert len(traffic.seen) == 6
    for down, up in traffic.seen:
        assert set(down) == set(up) == {*method.controlled, *(C + n for n in method.controlled)}
        for n in method.controlled:
            applied = 3 * (0.25 if n in method.spec.head else 0.5)
            change = (down[n] - up[n]) / applied - down[C + n]
            torch.testing.assert_close(up[C + n], change, rtol=1e-5, atol=1e-6)
    assert any(bool(down[C + n].any()) for down, _ in traffic.seen for n in method.controlled)


def cut(reply: Message) -> Message:
    """Something on the way breaks a reply, after the node has done and stored its work."""
    record = reply.content["adapter"]
    name = next(iter(record))
    reply.content["adapter"] = ArrayRecord({**dict(record), name: Array(record[name].numpy()[:1])})
    return reply


def expect_mean(directory: Path, checkpoint: Checkpoint) -> None:
    """c is the mean over all nodes of the c_k that the server has taken."""
    totals: dict[str, Tensor] = {}
    for node in NODES:
        files = list((directory / "nodes" / node / "tensors").glob("controls-*"))
        assert len(files) <= 1
        for file in files:
            kept = load_file(file)
            age = "new" if int(kept["round"]) <= checkpoint.acknowledged.get(node, 0) else "old"
            for name, value in kept.items():
                if name.startswith(age):
                    short = name.removeprefix(f"{age}/")
                    totals[short] = totals.get(short, torch.zeros(())) + value.double()
    for name, total in totals.items():
        torch.testing.assert_close(checkpoint.state[C + name].double(), total / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("privacy", "least", "upload"), [("none", 1, "float32"), ("dp", 3, "float32"), ("none", 2, "int8")]
)
def test_c_stays_the_mean_of_the_controls_that_count(
    run: Run, monkeypatch: pytest.MonkeyPatch, privacy: str, least: int, upload: str
) -> None:
    """Replies are lost after the node stored its new c_k; with three needed ones their rounds are void."""
    lost = {(1, "client-2"), (2, "client-0"), (3, "client-0"), (3, "client-1"), (5, "client-1")}
    original, checked = RunDirectory.checkpoint, []

    def check(self: RunDirectory, checkpoint: Checkpoint) -> None:
        original(self, checkpoint)
        expect_mean(self.path, checkpoint)
        checked.append(checkpoint.round)

    monkeypatch.setattr(RunDirectory, "checkpoint", check)

    def tamper(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        return cut(reply) if (request["round"], request["node"]) in lost else reply

    settings = [
        "federation.rounds=6",
        f"federation.min_replies={least}",
        f"federation.upload={upload}",
        "evaluation=none",
        "train.local_steps=1",
    ]
    outcome = run("method=scaffold", f"privacy={privacy}", *settings, tamper=tamper)
    finished(outcome)
    assert checked == [1, 2, 3, 4, 5, 6]
    void = {1: (), 2: (3,), 3: (1, 2, 3, 5)}[least]
    assert [r["void"] for r in outcome.rounds] == [n in void for n in checked]
    (file,) = (outcome.path / "checkpoints").glob("*")
    last = Checkpoint.load(file)
    assert last.acknowledged == dict.fromkeys(NODES, 6)
    assert all(bool(last.state[C + n].any()) for n in (*scaffold().spec.b, *scaffold().spec.head))


def test_a_local_head_is_left_alone(run: Run) -> None:
    outcome = finished(run("method=scaffold", "task.head=local", "privacy=none", "evaluation=client"))
    method = scaffold("task.head=local")
    assert set(state_of(outcome)) == {*method.spec.lora, *(C + n for n in method.spec.lora)}
    kept = kept_by(outcome, "client-0", "controls")
    assert set(kept) == {"round", *(f"{age}/{n}" for age in ("old", "new") for n in method.spec.lora)}
    traffic = outcome.json("communication.json")["rounds"][-1]["nodes"]["client-0"]
    assert traffic["upload"]["numbers"] == {"adapter": 2 * count(method.spec.lora), "head": 0, "once": 0}
    assert bool(kept_by(outcome, "client-0", "head")["head.weight"].any())
    assert outcome.rounds[-1]["eval_clients"]["personal"]["nodes"] == 3


def test_a_lost_store_is_on_the_record(run: Run) -> None:
    def lose(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        if (request["round"], request["node"]) == (1, "client-1"):
            shutil.rmtree(Path(request["store"]) / "client-1")
        return reply

    outcome = finished(run("method=scaffold", "privacy=none", tamper=lose))
    assert outcome.rounds[1]["phases"][0]["flags"] == {"client-1": ["controls-lost", "store-lost"]}


def test_everything_that_trains_is_noised_and_so_are_the_controls(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = scaffold()
    outcome = on_empty_draws(run, monkeypatch, "method=scaffold")
    state = state_of(outcome)
    assert all_moved(state, start(method))
    kept = kept_by(outcome, "client-0", "controls")
    assert all(bool((v != 0).all()) for v in kept.values())
