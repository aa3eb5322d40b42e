"""A server that lies in its messages: the real node refuses in one line, logs it, releases nothing, spends nothing.

The real server runs with one real node, and before each of its messages reaches the node, the node is sent that
message spoilt in one way after the other. The run must then come to its end as if nothing had been: what is refused has
moved nothing.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from privet.adapters import adapter_spec, initial_tensors
from privet.config import Config, options
from privet.plan import required_sigma
from privet.wire import PARTS, Payload, Request, code_hash, pack_request, unpack_failure, unpack_reply
from tests.client_app.lying import (
    ROWS,
    RealNode,
    bombs,
    config_of,
    honest,
    same_arrays,
    spoilt_arrays,
    spoilt_fields,
    with_config,
    with_field,
)

NewNode = Callable[..., RealNode]
PHASES = {"train", "warmup", "sketch", "project"}


@pytest.fixture
def new_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> NewNode:
    def make(name: str = "node", **keys: Any) -> RealNode:
        (tmp_path / name).mkdir()
        return RealNode(tmp_path / name, caplog, **keys)

    return make


def request_of(config: Config, **changes: Any) -> Request:
    """The first training request of an honest server."""
    spec = adapter_spec(config)
    start = initial_tensors(spec, config.seed, config.task.head)
    planned = config.train.steps(ROWS) * config.federation.rounds
    private = config.privacy.private
    values: dict[str, Any] = {
        "run": "run-1",
        "round": 1,
        "phase": "train",
        "node": "north",
        "config": config.to_json(),
        "config_hash": config.hash,
        "code_hash": code_hash(),
        "store": "",
        "sigma": required_sigma(config, config.train.batch_size / ROWS, planned) if private else 0.0,
        "planned_steps": planned,
        "payload": Payload({n: start[n] for n in spec.b}, {n: start[n] for n in spec.head}),
    }
    return Request(**{**values, **changes})


# --- every method, every phase ---------------------------------------------------------------------

VARIANTS = {
    "fedask transport=factor": ["method=fedask", "method.transport=factor"],
    "fedask sketch=exact": ["method=fedask", "method.sketch=exact", "privacy=none"],
    "ffa_lora int8": ["method=ffa_lora", "federation.upload=int8"],
}
METHODS = {name: [f"method={name}"] for name in options("method")} | VARIANTS
FIELDS = ("ffa_lora", "fedask", "fedhsip")  # the fields of a request are no method's own
SETTINGS = {"fedhsip": ["method.warmup_rounds=1"], "fedper": ["method.shared_layers=1"]}


@pytest.mark.parametrize("method", METHODS)
def test_spoilt_messages_of_every_phase_are_refused_and_move_nothing(
    method: str, new_node: NewNode, tmp_path: Path
) -> None:
    overrides = [*METHODS[method], *SETTINGS.get(method, []), "federation.rounds=3"]
    node = new_node(allow_non_private="privacy=none" in overrides)
    seen: dict[tuple[str, ...], int] = {}
    believed: list[str] = []

    def spoil(message: Message) -> None:
        if message.metadata.message_type != "train":
            return
        content = message.content
        phase = str(content["request"]["phase"])
        what_it_is = (phase, *(name for part in PARTS for name in content[part]))
        if what_it_is in seen:
            return
        lies = [*spoilt_arrays(content)]
        if method in FIELDS:
            lies += spoilt_fields(content, 3, PHASES)
        for what, lie in lies:
            try:
                node.refuses_and_stays(lie)
            except AssertionError as error:
                believed.append(f"{phase}, {what}: {error}")
        seen[what_it_is] = len(lies)

    sent = honest(node, tmp_path, *overrides, on_message=spoil)
    assert believed == []
    asked = [m.content["request"] for m in sent if m.metadata.message_type == "train"]
    assert {phase for phase, *_ in seen} == {r["phase"] for r in asked}
    assert min(seen.values()) >= 20
    if "privacy=none" not in overrides:
        # What was spent is what the honest messages cost, and nothing of the lies.
        charged = [(r["round"], r["phase"]) for r in asked if r["phase"] != "project"]
        assert [(e.round, e.phase) for e in node.entries] == charged


# --- the configuration -----------------------------------------------------------------------------


def changed(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = to

    return change


def to_non_private(raw: dict[str, Any]) -> None:
    raw["privacy"] = {**raw["privacy"], "mode": "none", "epsilon": None, "delta": None, "clip": None}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (to_non_private, "changed"),
        (changed("privacy", "epsilon", to=6.5), "changed"),
        (changed("privacy", "clip", to=1e6), "config"),
        (changed("privacy", "clip", to=10.0), "changed"),
        (changed("privacy", "accountant", to="prv"), "changed"),
        (changed("privacy", "randomness", to="seeded"), "seeded"),
        (changed("privacy", "diagnostics", to=True), "diagnostics"),
        (changed("train", "local_steps", to=7), "changed"),
        (changed("train", "batch_size", to=40), "changed"),
        (changed("train", "lr", to=0.25), "changed"),
        (changed("federation", "rounds", to=300), "changed"),
        (changed("task", "labels", to=["no", "maybe"]), "changed"),
        (changed("seed", to=1), "changed"),
        (changed("seed", to=-1), "config"),
        (changed("seed", to=1.5), "config"),
        (changed("train", "lr", to=10**400), "config"),
        (changed("train", "lr", to=1e300), "config"),
        (changed("train", "weight_decay", to=1e300), "config"),
        (changed("train", "lr", to=math.nan), "config"),
        (changed("privacy", to=None), "config"),
        (changed("forged\nnorth trains", to=1), "config"),
        (changed("method", "rho", to=1), "config"),
    ],
)
def test_a_configuration_that_changes_between_rounds_is_refused(
    new_node: NewNode, change: Callable[[dict[str, Any]], None], kind: str
) -> None:
    node = new_node(allow_non_private=True)
    config = config_of("method=ffa_lora", "federation.rounds=3")
    node.trains(request_of(config))
    again = pack_request(request_of(config, round=2, met=True, acknowledged=1))
    lie = with_config(again, change)
    if change is to_non_private:
        lie = with_field(lie, "sigma", 0.0)
    assert node.refuses_and_stays(lie).kind == kind
    assert [e.round for e in node.entries] == [1]
    node.trains(request_of(config, round=2, met=True, acknowledged=1))


@pytest.mark.parametrize(
    ("floor", "change", "kind"),
    [
        ({}, to_non_private, "not-private"),
        ({"max_epsilon": 5.0}, changed("seed", to=1), "epsilon"),
        ({"max_delta": 1e-6}, changed("seed", to=1), "delta"),
        ({"max_epsilon": 9.0}, changed("privacy", "delta", to=0.5), "delta"),
        ({"min_clip": 0.6}, changed("privacy", "clip", to=0.5), "clip"),
        ({"methods": "fedask"}, changed("seed", to=1), "method"),
        ({"code_hash": "0" * 16}, changed("seed", to=1), "code-pin"),
    ],
)
def test_what_the_owner_does_not_allow_is_refused_from_the_first_message_on(
    new_node: NewNode, floor: dict[str, Any], change: Callable[[dict[str, Any]], None], kind: str
) -> None:
    node = new_node(**floor)
    for message in ("train", "evaluate", "query.describe"):
        phase = "evaluate" if message == "evaluate" else "train"
        content = pack_request(request_of(config_of("method=ffa_lora", "evaluation=both"), phase=phase))
        assert node.refuses_and_stays(with_config(content, change), message).kind == kind
    assert node.entries == ()


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "strategies.base.LoraStrategy",
        "strategies.rounds.RoundStrategy",
        "strategies.base.load_method",
        "strategies.fedavg.Nothing",
        "strategies.nowhere.FedAvg",
        "strategies.fedavg.FedAvg\n",
        "strategies...FedAvg",
        "",
    ],
)
def test_only_a_method_below_strategies_is_ever_made(new_node: NewNode, target: str) -> None:
    content = pack_request(request_of(config_of("method=ffa_lora")))
    failed = new_node().refuses_and_stays(with_config(content, changed("method", "_target_", to=target)))
    assert failed.kind == "config"
    assert "_target_" in failed.reason


def test_one_cap_holds_over_runs_whatever_store_the_server_names(new_node: NewNode, tmp_path: Path) -> None:
    """A second run with a new name and a new folder meets the ledger of the first."""
    node = new_node(max_epsilon=6.4)
    config = config_of("method=ffa_lora", "federation.rounds=1")
    node.trains(request_of(config, store=str(tmp_path / "first")))
    for store in (str(tmp_path / "second"), "../second", "/second\0", ""):
        failed = node.refuses_and_stays(pack_request(request_of(config, run="run-2", store=store)))
        assert failed.kind == "budget"
    assert len(node.entries) == 1
    assert not (tmp_path / "first").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("store", ["nodes", "/nodes/../other", "/no\0des", "/no\ndes"])
def test_a_simulated_node_keeps_to_a_plain_absolute_store(new_node: NewNode, store: str) -> None:
    node = new_node()
    node.context.node_config = {"partition-id": 0, "num-partitions": 1}
    request = request_of(config_of("method=ffa_lora"), node="client-0", store=store)
    assert node.refuses(pack_request(request)).kind == "malformed"


def test_a_store_that_is_a_link_is_refused(new_node: NewNode, tmp_path: Path) -> None:
    node = new_node()
    (tmp_path / "elsewhere").mkdir()
    node.store.symlink_to(tmp_path / "elsewhere")
    failed = node.refuses(pack_request(request_of(config_of("method=ffa_lora"))))
    assert (failed.kind, failed.reason) == ("store", "the node's own log has the reason")
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- order and repetition --------------------------------------------------------------------------


def test_rounds_are_answered_in_order_and_once(new_node: NewNode) -> None:
    node = new_node()
    config = config_of("method=ffa_lora", "federation.rounds=4")
    first = request_of(config)
    reply = node.trains(first)
    assert same_arrays(node.trains(first).adapter, reply.adapter)  # from the store
    other = {n: v + 1 for n, v in first.payload.adapter.items()}
    moved = request_of(config, payload=Payload(other, first.payload.head))
    assert node.refuses_and_stays(pack_request(moved)).kind == "replay"
    # A round that this node was left out of is nothing strange; what it skips it cannot go back to.
    node.trains(request_of(config, round=3, met=True, acknowledged=1))
    for number in (1, 2):
        back = request_of(config, round=number, met=True, payload=Payload(other, first.payload.head))
        assert node.refuses_and_stays(pack_request(back)).kind == "order"
    late = request_of(config, round=4, met=True)  # the server had said that round 1 counts
    assert node.refuses_and_stays(pack_request(late)).kind == "order"
    assert node.refuses_and_stays(pack_request(request_of(config, round=5))).kind == "round"
    assert [(e.round, e.steps) for e in node.entries] == [(1, 1), (3, 1)]
    stray = request_of(config, round=2, acknowledged=1, met=False)
    assert node.refuses_and_stays(pack_request(stray)).kind == "round"


def test_a_basis_meets_the_factors_of_its_own_round_only(new_node: NewNode, tmp_path: Path) -> None:
    """FedASK: a second phase of another round, or without a first one, gets nothing."""
    node = new_node()
    bases: list[RecordDict] = []
    kinds: list[tuple[int, str]] = []

    def spoil(message: Message) -> None:
        if message.metadata.message_type != "train":
            return
        if message.content["request"]["phase"] == "project":
            bases.append(message.content)
            return
        for basis in bases[-1:]:  # the node has answered it, and is to train the next round
            for number in {1, 2, 3} - {basis["request"]["round"]}:
                stray = with_field(with_field(basis, "round", number), "met", True)
                kinds.append((number - basis["request"]["round"], node.refuses_and_stays(stray).kind))

    honest(node, tmp_path, "method=fedask", "federation.rounds=3", on_message=spoil)
    assert kinds == [(1, "factors-lost"), (2, "factors-lost"), (-1, "round"), (1, "factors-lost")]
    assert node.refuses_and_stays(bases[0]).kind == "order"


# --- FedHSIP's rule --------------------------------------------------------------------------------


def test_a_rule_that_is_none_is_refused(new_node: NewNode, tmp_path: Path) -> None:
    from strategies.fedhsip import _digest

    node = new_node()
    kinds: dict[str, str] = {}

    def resign(content: RecordDict, name: str, change: Callable[[np.ndarray], np.ndarray]) -> RecordDict:
        """Change the rule and give it the digest that belongs to it."""
        arrays = {n: a.numpy() for n, a in content["once"].items()}
        arrays[name] = change(arrays[name].copy())
        rule = {n: torch.from_numpy(arrays[n]) for n in ("slots", "signs")}
        spoilt = RecordDict(dict(content.items()))
        spoilt["once"] = ArrayRecord(
            {**{n: Array(v) for n, v in arrays.items()}, "rule_digest": Array(_digest(rule).numpy())}
        )
        return spoilt

    def first(value: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(slots: np.ndarray) -> np.ndarray:
            slots[0] = value
            return slots

        return change

    def spoil(message: Message) -> None:
        content = message.content
        if message.metadata.message_type != "train" or "slots" not in content["once"]:
            return
        lies = {
            "out of range": resign(content, "slots", first(160)),
            "far out of range": resign(content, "slots", first(65535)),
            "an empty slot": resign(content, "slots", lambda s: np.where(s == 7, 8, s).astype(s.dtype)),
            "other indices": resign(content, "slots", lambda s: s.astype(np.uint32)),
            "too few signs": resign(content, "signs", lambda s: s[:-1].copy()),
            "too many signs": resign(content, "signs", lambda s: np.append(s, s[:1])),
            "signs as numbers": resign(content, "signs", lambda s: s.astype(np.float32)),
            "two axes": resign(content, "slots", lambda s: s[None].copy()),
        }
        wrong = RecordDict(dict(content.items()))
        wrong["once"] = ArrayRecord({**content["once"], "rule_digest": Array(np.zeros(32, np.uint8))})
        lies["another digest"] = wrong
        for what, lie in lies.items():
            kinds[what] = node.refuses_and_stays(lie).kind

    honest(
        node, tmp_path, "method=fedhsip", "method.warmup_rounds=1", "federation.rounds=2", on_message=spoil
    )
    assert kinds.pop("another digest") == "needs-once"
    assert len(kinds) == 8
    assert set(kinds.values()) == {"rule"}
    assert [e.phase for e in node.entries] == ["warmup", "train"]


# --- scores ----------------------------------------------------------------------------------------


def test_scores_are_given_only_when_they_are_due_and_on_public_rows(
    new_node: NewNode, tmp_path: Path
) -> None:
    node = new_node()
    config = config_of("method=ffa_lora", "federation.rounds=4", "evaluate_every=2", "evaluation=both")

    def kind(request: Request) -> str:
        return node.refuses_and_stays(pack_request(request), "evaluate").kind

    def score(number: int = 2, config: Config = config, **changes: Any) -> Request:
        return request_of(config, **{"phase": "evaluate", "round": number, **changes})

    assert kind(score()) == "no-public-rows"
    assert kind(score(1)) == kind(score(3)) == "phase"
    assert kind(score(0)) == kind(score(5)) == kind(score(-1)) == "round"
    assert kind(score(config=config_of("method=ffa_lora", "evaluation=server"))) == "phase"
    assert kind(score(phase="train")) == "phase"
    assert kind(score(sigma=math.nan)) == "sigma"
    assert node.entries == ()


def test_a_score_says_nothing_about_private_rows_under_dp(new_node: NewNode, tmp_path: Path) -> None:
    """With the owner's public file the scores are of that file alone, whatever the node's own rows are."""
    from tests.conftest import write_table

    public = write_table(tmp_path / "public.csv", 12, seed=3)
    config = config_of("method=ffa_lora", "federation.rounds=1", "evaluation=both")
    found = []
    for seed in (0, 1):
        node = new_node(f"node{seed}", public_path=str(public))
        write_table(Path(node.config["data-path"]), ROWS, seed=seed)
        content = pack_request(request_of(config, phase="evaluate"))
        found.append(dict(node.answer(content, "evaluate")["values"]))
        assert node.entries == ()
        for name, lie in spoilt_arrays(content):
            if "missing" not in name:  # what is not sent has the seed's own value
                node.refuses_and_stays(lie, "evaluate")
        node.trains(request_of(config))
        other = with_config(content, changed("seed", to=1))
        assert node.refuses_and_stays(other, "evaluate").kind == "changed"
    assert found[0] == found[1]


# --- memory ----------------------------------------------------------------------------------------


def test_no_memory_is_taken_for_what_an_array_declares() -> None:
    from privet.errors import Refusal
    from privet.wire import unpack_request

    content = pack_request(request_of(config_of("method=ffa_lora")))
    name, whole = next(iter(content["adapter"].items()))
    unpack_request(content)
    for what, array in bombs(whole):
        content["adapter"] = ArrayRecord({name: array})
        tracemalloc.start()
        with pytest.raises(Refusal):
            unpack_request(content)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, what


# --- anything else ---------------------------------------------------------------------------------

VALUES: list[Any] = [0, 1, -1, 2, (1 << 40) + 1, 0.5, -0.0, 1e-300, 1e300, math.nan, math.inf, True, False]
VALUES += ["", "x", "..", "/nope", "a\0b", "a\nb", "é" * 300, b"\x00\xff", [], [1, 2], ["x"], ["\0"]]


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, int]]:
    """What the trainer was really asked to do, whatever the ledger says."""
    from client_app.trainer import Trainer

    done: list[tuple[float, float, int]] = []
    real = Trainer.train_private

    def train(self: Trainer, trainables: Any, steps: int, noise: Any, *, charge: Any, **more: Any) -> Any:
        def charged() -> None:
            charge()
            done.append((noise.q, noise.sigma, steps))

        return real(self, trainables, steps, noise, charge=charged, **more)

    monkeypatch.setattr(Trainer, "train_private", train)
    return done


def mutated(content: RecordDict, rng: random.Random) -> tuple[str, RecordDict]:
    """Change one field, one leaf of the configuration, one record or one bit of one array."""
    way = rng.choice(["field", "field", "config", "config", "array", "record"])
    if way == "field":
        field, value = rng.choice([*content["request"]]), rng.choice([*VALUES, None])
        return f"{field} = {value!r}", with_field(content, field, value)
    if way == "config":
        raw = json.loads(content["request"]["config"])
        leaves = [*_leaves(raw)]
        path, value = (
            rng.choice(leaves),
            rng.choice([v for v in VALUES if not isinstance(v, bytes)] + [None, {}]),
        )
        return f"{path} = {value!r}", with_config(content, changed(*path, to=value))
    spoilt = RecordDict(dict(content.items()))
    if way == "record":
        name = rng.choice([*content])
        other = rng.choice([None, MetricRecord({"x": 1.0}), ConfigRecord({"x": 1}), ArrayRecord({})])
        if other is None:
            spoilt.pop(name)
        else:
            spoilt[name] = other
        return f"{name} -> {other}", spoilt
    part = rng.choice([p for p in PARTS if content[p]])
    name = rng.choice([*content[part]])
    whole = content[part][name]
    data = bytearray(whole.data)
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    arrays = {**content[part], name: Array(whole.dtype, tuple(whole.shape), whole.stype, bytes(data))}
    spoilt[part] = ArrayRecord(arrays)
    return f"{part}/{name} byte {place}", spoilt


def _leaves(raw: Any, path: tuple[str, ...] = ()) -> Any:
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        # Sizes of a model of the server's own are the node's time and memory, and no lie.
        elif path != ("model", "architecture") and key != "tokenizer":
            yield (*path, key)


@pytest.mark.parametrize(
    ("method", "phase"), [("ffa_lora", "train"), ("fedask", "sketch"), ("fedsa", "train")]
)
def test_whatever_changes_in_an_answered_request_is_refused_or_changes_nothing(
    method: str, phase: str, new_node: NewNode, tmp_path: Path, spent: list[tuple[float, float, int]]
) -> None:
    node = new_node()
    sent: list[RecordDict] = []
    honest(
        node,
        tmp_path,
        f"method={method}",
        "federation.rounds=2",
        on_message=lambda m: sent.append(m.content) if m.metadata.message_type == "train" else None,
    )
    request = next(c for c in reversed(sent) if c["request"]["phase"] == phase)
    answer = unpack_reply(node.answer(request))
    rng = random.Random(f"{method}/{phase}")
    saved = shutil.copytree(node.store, tmp_path / "saved")
    for _ in range(120):
        what, content = mutated(request, rng)
        ledger = (node.store / "ledger.jsonl").read_bytes()
        reply = node.answer(content)
        failed = unpack_failure(reply)
        if failed is not None:
            assert list(reply) == ["failed"], what
            assert failed.kind != "error", what
            assert failed.reason.isprintable(), what
            assert (node.store / "ledger.jsonl").read_bytes() == ledger, what
            continue
        got = unpack_reply(reply)
        if got.request == answer.request:  # the same in all that decides the answer
            assert same_arrays(got.payload.adapter, answer.payload.adapter), what
            assert (node.store / "ledger.jsonl").read_bytes() == ledger, what
            continue
        # Another run of that server, or a later round: a request of its own, and it was paid for.
        assert what.startswith("run = "), what
        assert node.entries[-1].request == got.request, what
        shutil.rmtree(node.store)
        shutil.copytree(saved, node.store)
        spent.pop()
    assert sorted(spent) == sorted((e.q, e.sigma, e.steps) for e in node.entries)


def test_whatever_a_first_request_asks_for_is_refused_or_paid(
    new_node: NewNode, spent: list[tuple[float, float, int]], tmp_path: Path
) -> None:
    node = new_node(max_epsilon=8.0)
    content = pack_request(request_of(config_of("method=ffa_lora", "federation.rounds=2")))
    rng = random.Random(7)
    trained = 0
    for _ in range(160):
        what, changed_content = mutated(content, rng)
        reply = node.answer(changed_content)
        failed = unpack_failure(reply)
        entries = [(e.q, e.sigma, e.steps) for e in node.entries]
        assert entries[-len(spent) :] == spent or not spent, what
        if failed is None:
            trained += 1
            got = unpack_reply(reply)
            assert (got.q, got.sigma, got.steps) == entries[-1], what
        else:
            assert failed.kind != "error", f"{what}: {failed.reason}"
            assert list(reply) == ["failed"], what
        if node.store.exists():
            shutil.rmtree(node.store)
        spent.clear()
    assert trained > 5
