"""FedHSIP beyond the paper: warm-ups without noise, other sensitivities, slots of one factor only, many clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from safetensors.torch import load_file

import strategies.fedhsip as module
from client_app.node import refuse_raw
from client_app.node_config import NodeConfig
from client_app.scoring import public_rows
from client_app.trainer import Trainer
from privet.adapters import adapter_spec, build_model, count, initial_tensors, load_tokenizer
from privet.config import compose
from privet.data.collate import pad_batch, tokenise
from privet.data.partition import client_examples
from privet.data.tasks import load_test
from privet.errors import ConfigError, Refusal
from privet.privacy.ledger import Ledger
from privet.projection import flatten
from privet.seeding import child_seed
from privet.trainables import Factors
from server_app.plan import make_plan
from strategies.base import load_method
from strategies.fedhsip import _COUNT, _MOMENT, _SQUARE, _SUM, FedHSIP
from tests.conftest import Outcome
from tests.grid import Killed

Run = Callable[..., Outcome]
NODES = ("client-0", "client-1", "client-2")
RAW = "method.warmup_privacy=none"


def fedhsip(*overrides: str) -> FedHSIP:
    config = compose(["model=tiny_random", "method=fedhsip", *overrides])
    made = load_method(config, adapter_spec(config))
    assert isinstance(made, FedHSIP)
    return made


def warmed(method: FedHSIP, nodes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state as after a warm-up of two rounds."""
    method._run = SimpleNamespace(  # type: ignore[assignment]
        nodes={f"client-{k}": SimpleNamespace(sigma=0.8, steps_per_round=2) for k in range(nodes)}
    )
    generator = torch.Generator().manual_seed(seed)
    state = {
        n: torch.randn(s, generator=generator) for n, s in {**method.spec.lora, **method.shared_head}.items()
    }
    for k in range(nodes):
        deltas = torch.randn(2, method.total, generator=generator) * (0.01 + 0.002 * k)
        state[f"{_SUM}client-{k}"], state[f"{_SQUARE}client-{k}"] = deltas.sum(0), deltas.square().sum(0)
        state[f"{_COUNT}client-{k}"] = torch.tensor(2.0)
    return state


# --- a warm-up without noise ---------------------------------------------------------------------


def test_a_raw_warmup_is_not_charged_and_the_run_is_not_private(run: Run, settings: list[str]) -> None:
    overrides = ["method=fedhsip", "method.warmup_rounds=2", "federation.rounds=4"]
    sent: list[Mapping[str, Any]] = []

    def look(message: Message, reply: Message) -> Message:
        request = message.content.get("request")
        if request and (request["round"], request["node"]) == (3, "client-0"):
            sent.append({n: torch.from_numpy(a.numpy().copy()) for n, a in message.content["head"].items()})
        return reply

    outcome = run(*overrides, RAW, tamper=look)
    if outcome.error:
        raise outcome.error
    privacy = outcome.json("privacy.json")
    assert privacy["private"] is outcome.json("summary.json")["private"] is False
    assert privacy["warnings"][0] == "not private: the warmup rounds trained on private rows without noise"
    card = (outcome.path / "adapter" / "README.md").read_text()
    assert "**Not private:** not private: the warmup rounds trained on private rows without noise" in card
    notes = [e["text"] for e in outcome.lines("events.jsonl") if e["event"] == "note"]
    assert any(n.startswith("not private: method.warmup_privacy=none") for n in notes)
    for node in privacy["nodes"]:
        assert [(e["round"], e["phase"]) for e in node["entries"]] == [(3, "train"), (4, "train")]
        ledger = Ledger.load(outcome.path / "nodes" / node["node"] / "ledger.jsonl")
        assert [(e.round, e.phase, e.steps) for e in ledger.entries] == [(3, "train", 2), (4, "train", 2)]
        assert 5.9 < node["epsilon"] <= 6.0  # the whole budget is for the rounds with noise
    sigmas = {
        kind: make_plan(compose([*settings, *overrides, *more])).to_dict()["clients"][0]["sigma"]
        for kind, more in (
            ("raw", [RAW]),
            ("dp", []),
            ("two", ["method.assignment=random", "federation.rounds=2"]),
        )
    }
    assert sigmas["raw"] == sigmas["two"] < sigmas["dp"]
    (head,) = sent  # of what the warm-up trained only the rule is used
    initial = initial_tensors(fedhsip().spec, 0, "shared")
    assert all(torch.equal(head[n], initial[n]) for n in head)
    assert [r["train_loss"] for r in outcome.rounds] == [None] * 4  # a diagnostic is a release of its own


def test_a_raw_warmup_trains_without_noise_and_a_private_one_with(run: Run) -> None:
    """Two runs agree bit by bit exactly in what had no noise."""
    first, second = ([], [])
    for kind, seen in ((RAW, first), ("method.warmup_privacy=dp", second)):

        def look(message: Message, reply: Message, seen: list[Any] = seen) -> Message:
            request = message.content.get("request")
            if request and request["phase"] == "warmup" and request["node"] == "client-0":
                seen.append({n: a.numpy().copy() for n, a in reply.content["adapter"].items()})
            return reply

        for _ in range(2):
            outcome = run("method=fedhsip", "method.warmup_rounds=1", kind, "evaluation=none", tamper=look)
            assert outcome.error is None
    assert all(np.array_equal(first[0][n], first[1][n]) for n in first[0])
    assert not any(np.array_equal(second[0][n], second[1][n]) for n in second[0])


@pytest.mark.parametrize("mode", ["dp", "none"])
def test_a_public_warmup_trains_on_public_rows_at_no_charge(
    run: Run, settings: list[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    seen: list[tuple[int, bool]] = []

    class Watched(Trainer):
        def train_plain(self, *arguments: Any, **named: Any) -> Any:
            seen.append((len(self._rows), False))
            return super().train_plain(*arguments, **named)

        def train_private(self, *arguments: Any, **named: Any) -> Any:
            seen.append((len(self._rows), True))
            return super().train_private(*arguments, **named)

    monkeypatch.setattr("client_app.node.Trainer", Watched)
    overrides = [
        "method=fedhsip",
        "method.warmup_rounds=1",
        "method.warmup_privacy=public",
        f"privacy={mode}",
    ]
    config = compose([*settings, *overrides])
    test = len(load_test(config.task))
    own = [len(client_examples(config, k)) for k in range(3)]
    shares = [len(range(k, test, 3)) for k in range(3)]
    outcome = run(*overrides, "method.sensitivity=moment", "federation.rounds=2", "evaluation=none")
    if outcome.error:
        raise outcome.error
    private = mode == "dp"
    assert not set(shares) & set(own)
    assert sorted(seen[:3]) == sorted((n, False) for n in shares)
    assert {(n, how) for n, how in seen[3:]} <= {(n, private) for n in own}
    privacy = outcome.json("privacy.json")
    assert privacy["private"] is private
    if private:
        sigmas = {
            make_plan(compose([*settings, *overrides, more])).to_dict()["clients"][0]["sigma"]
            for more in ("method.warmup_privacy=public", RAW)
        }
        assert len(sigmas) == 1  # the whole budget is for the rounds with noise
        assert not any("not private" in w for w in privacy["warnings"])
        for node in privacy["nodes"]:
            assert {(e["round"], e["phase"]) for e in node["entries"]} <= {(2, "train")}
    assert any("test rows" in e["text"] for e in outcome.lines("events.jsonl") if e["event"] == "note")


def test_a_public_warmup_leaves_the_rule_only_and_needs_the_owners_file(tmp_path: Any) -> None:
    method = fedhsip("method.warmup_privacy=public", "task.head=shared")
    state = method.finish_warmup(warmed(method, 3))
    initial = initial_tensors(method.spec, method.config.seed, "shared")
    assert all(torch.equal(state[n], initial[n]) for n in method.shared_head)
    node = NodeConfig.read({"name": "north", "data-path": "/data/x.csv", "store": str(tmp_path)})
    with pytest.raises(Refusal, match="this phase trains on public rows only: it needs public-path"):
        public_rows(node, method.config, "this phase trains on public rows only")


def test_a_local_head_does_not_come_out_of_a_raw_warmup(run: Run) -> None:
    overrides = ["method=fedhsip", "method.warmup_rounds=1", "task.head=local", "evaluation=none", RAW]

    def stop(message: Message) -> bool:
        request = message.content.get("request")
        if request and request["round"] == 2:
            raise Killed
        return False

    outcome = run(*overrides, drop=stop)
    assert isinstance(outcome.error, Killed)
    assert not list((outcome.path / "nodes" / "client-0").glob("tensors/head-*"))
    resumed = run(path=outcome.path, resume=True)  # the plan knows again which rounds are charged
    assert resumed.error is None
    assert {n["steps"] for n in resumed.json("privacy.json")["nodes"]} == {2}
    assert list((outcome.path / "nodes" / "client-0").glob("tensors/head-*"))


def test_a_real_node_refuses_a_raw_warmup_unless_its_owner_allows_it(tmp_path: Any) -> None:
    real = {"name": "north", "data-path": "/data/x.csv", "store": str(tmp_path)}
    refuse_raw(NodeConfig.read({"partition-id": 0, "num-partitions": 1}))
    refuse_raw(NodeConfig.read({**real, "allow-non-private": True}))
    for more in ({}, {"allow-non-private": True, "max-epsilon": 3.0}):
        with pytest.raises(Refusal, match="without noise"):
            refuse_raw(NodeConfig.read({**real, **more}))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["privacy=none", "method.warmup_privacy=dp"], "method.warmup_privacy = dp has no effect"),
        (["method.warmup_privacy=open"], "method.warmup_privacy = open is not allowed"),
        (["method.warmup_privacy=public", "method.init=warm"], "method.init = warm is not allowed"),
        (["method.sensitivity=moment"], "method.sensitivity = moment is not allowed"),
        (["privacy=none", "method.sensitivity=clip_rate"], "not allowed with privacy=none: there is no clip"),
        (["privacy=none", "method.sensitivity=clipped_moment"], "there is no clip"),
        ([RAW, "method.init=warm"], "method.init = warm is not allowed"),
        (["method.balance=even"], "method.balance = even is not allowed"),
        (
            ["method.assignment=random", "method.separate_AB_slots=true"],
            "method.separate_AB_slots = True has no",
        ),
        (
            ["method.assignment=random", "method.align_signs=false"],
            "method.align_signs = False has no effect",
        ),
        (["method.separate_AB_slots=true", "method.dimension=1"], "with method.dimension = 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        fedhsip(*overrides)


# --- sensitivities -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moment", "clipped_moment", "clip_rate"])
def test_moments_are_means_over_batches_of_one(settings: list[str], kind: str) -> None:
    config = compose([*settings, "method=fedhsip", RAW, "train.micro_batch=5"])
    model = build_model(config)
    names = [*model.spec.lora, *model.spec.head]
    generator = torch.Generator().manual_seed(0)
    model.load({n: torch.randn(model.parameter(n).shape, generator=generator) * 0.3 for n in names})
    rows = tokenise(load_tokenizer(config.model), client_examples(config, 0).take(np.arange(12)), 32)
    each: list[dict[str, torch.Tensor]] = []
    for row in range(12):
        batch = pad_batch(rows, np.array([row]), 0, torch.device("cpu"))
        labels = batch.pop("labels")
        parameters = [model.parameter(n).requires_grad_(True) for n in names]
        loss = torch.nn.functional.cross_entropy(model.module(**batch), labels)
        each.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
        for parameter in parameters:
            parameter.requires_grad_(False)
    norms = torch.stack([flatten(g, {n: tuple(g[n].shape) for n in names}).norm() for g in each])
    clip = float(norms.median())
    privacy = compose([*settings, "method=fedhsip", f"privacy.clip={clip}"]).privacy
    trainer = Trainer(model, rows, 0, config.train, privacy)
    got = trainer.moments(Factors(model, names), kind, 1, 0)
    scale = {
        "moment": torch.ones(12),
        "clipped_moment": (clip / norms).clamp(max=1) ** 2,
        "clip_rate": (norms > clip) / norms**2,
    }[kind]
    for name in names:
        want = sum(f * g[name] ** 2 for f, g in zip(scale, each, strict=True)) / 12
        torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-9)
    if kind == "clip_rate":
        share = float((norms > clip).float().mean())
        assert sum(float(v.sum()) for v in got.values()) == pytest.approx(share, rel=1e-4)


class Spy:
    """Stands in for the solver and keeps what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._original = module.assign_slots
        monkeypatch.setattr(module, "assign_slots", self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((arguments, named))
        return self._original(*arguments, **named)


def test_moments_travel_apart_and_their_mean_is_the_sensitivity(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    sent: list[torch.Tensor] = []
    spec = fedhsip().spec

    def look(message: Message, reply: Message) -> Message:
        if message.content.get("request", {"phase": ""})["phase"] == "warmup":
            once = {n: torch.from_numpy(a.numpy().copy()) for n, a in reply.content["once"].items()}
            assert set(once) == {n + _MOMENT for n in spec.lora}
            sent.append(torch.cat([once[n + _MOMENT].flatten() for n in spec.lora]))
        return reply

    overrides = ["method=fedhsip", "method.warmup_rounds=1", "method.sensitivity=moment"]
    outcome = run(*overrides, "privacy=none", "federation.weighting=uniform", tamper=look)
    if outcome.error:
        raise outcome.error
    ((arguments, _),) = spy.calls
    np.testing.assert_allclose(arguments[1], torch.stack(sent).double().mean(0).numpy(), rtol=1e-6)
    assert (arguments[1] > 0).mean() > 0.9
    traffic = outcome.json("communication.json")["rounds"][0]["nodes"]["client-0"]["upload"]
    assert traffic["numbers"]["adapter"] == traffic["numbers"]["once"] == count(spec.lora)


def test_moments_that_were_not_asked_for_or_cannot_be_are_refused(run: Run) -> None:
    def change(message: Message, reply: Message) -> Message:
        request = message.content.get("request")
        if request and request["phase"] == "warmup" and request["node"] == "client-1":
            arrays = {n: Array(a.numpy()) for n, a in reply.content["once"].items()}
            arrays = {n: Array(-a.numpy() - 1) for n, a in arrays.items()} or {
                "x": Array(np.zeros(3, np.float32))
            }
            reply.content["once"] = ArrayRecord(arrays)
        return reply

    for more, words in (
        (["method.sensitivity=moment"], "malformed: a squared gradient is negative"),
        ([], "shape: unexpected array 'x' in once"),
    ):
        outcome = run("method=fedhsip", "privacy=none", "method.warmup_rounds=1", *more, tamper=change)
        assert outcome.error is None
        (failed,) = outcome.rounds[0]["phases"][0]["failed"]
        assert failed["node"] == "client-1"
        assert failed["reason"].startswith(words)


def test_a_private_phase_shows_no_moments(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a method asks for: before anything of single rows is computed."""
    asked = {"sensitivity": "moment"}
    monkeypatch.setattr(FedHSIP, "_moments", property(lambda self: asked))
    outcome = run("method=fedhsip", "method.warmup_rounds=1", "federation.min_replies=1")
    failed = outcome.rounds[0]["phases"][0]["failed"]
    assert {f["node"] for f in failed} == set(NODES)
    assert all(f["reason"].startswith("phase") for f in failed)


# --- the assignment ------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [160, 2, 1023])
def test_separate_slots_hold_one_factor_only(dimension: int) -> None:
    method = fedhsip("privacy=none", "method.separate_AB_slots=true", f"method.dimension={dimension}")
    state = method.finish_warmup(warmed(method, 3))
    of_b = flatten(
        {n: torch.full(s, n in method.spec.b) for n, s in method.spec.lora.items()}, method.spec.lora
    )
    slots = state["slots"]
    in_b, in_a = set(slots[of_b].tolist()), set(slots[~of_b].tolist())
    assert not in_b & in_a
    assert in_b | in_a == set(range(dimension))  # none is empty
    assert len(in_b) == pytest.approx(dimension * float(of_b.float().mean()), abs=1)
    together = fedhsip("privacy=none", f"method.dimension={dimension}")
    shared = together.finish_warmup(warmed(together, 3))["slots"]
    if dimension < 1023:
        assert set(shared[of_b].tolist()) & set(shared[~of_b].tolist())


def test_the_solver_gets_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    method = fedhsip(
        "privacy=none", "method.balance=hard", "method.align_signs=false", "method.coefficients=[1,2,3,4,5]"
    )
    state = method.finish_warmup(warmed(method, 3))
    ((_, named),) = spy.calls
    seed = child_seed(method.config.seed, "hsip")
    want = {"coefficients": (1, 2, 3, 4, 5), "balance": "hard", "align_signs": False, "seed": seed}
    assert named == want
    assert bool((state["signs"] == 1).all())
    sizes = torch.bincount(state["slots"].long())
    assert set(sizes.tolist()) <= {1024 // 160, 1024 // 160 + 1}
    default = fedhsip("privacy=none")
    signs = default.finish_warmup(warmed(default, 3))["signs"]
    assert {-1.0, 1.0} == set(signs.tolist())
    assert spy.calls[1][1] | {"seed": seed} == {
        "coefficients": (1, 1, 1, 1, 1), "balance": "soft", "align_signs": True, "seed": seed,
    }  # fmt: skip


# --- many clients --------------------------------------------------------------------------------


def test_profiles_of_many_clients_are_mixed_into_32_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    method = fedhsip("privacy=none")
    state = warmed(method, 300)
    u, s, e, h = method.statistics(state)
    assert u.shape == (1024, 32)
    means = np.stack([state[f"{_SUM}client-{k}"].double().numpy() / 2 for k in range(300)], 1)
    squares = np.stack([state[f"{_SQUARE}client-{k}"].double().numpy() / 2 for k in range(300)], 1)
    np.testing.assert_allclose(s, squares.mean(1), rtol=1e-9)
    np.testing.assert_allclose(e, squares.mean(1), rtol=1e-9)
    np.testing.assert_allclose(h, means.var(1), rtol=1e-9)
    exact = means / np.sqrt(squares + 1e-12)
    lengths = np.linalg.norm(exact, axis=1)
    error = (u @ u.T - exact @ exact.T) / np.outer(lengths, lengths)
    off = error[~np.eye(len(error), dtype=bool)]
    assert off.std() == pytest.approx(32**-0.5, rel=0.15)
    assert abs(off.mean()) < 0.02
    again, *_ = method.statistics(dict(reversed(state.items())))
    assert np.array_equal(u, again)  # whichever order the replies came in
    monkeypatch.setattr(module, "_MOST_COLUMNS", 300)
    assert np.allclose(method.statistics(state)[0], exact[:, np.argsort([f"client-{k}" for k in range(300)])])


def test_thirty_two_clients_keep_their_own_columns() -> None:
    method = fedhsip("privacy=none")
    state = warmed(method, 32)
    u, *_ = method.statistics(state)
    order = sorted(f"client-{k}" for k in range(32))
    mean, square = (state[f"{kind}{order[5]}"].double().numpy() / 2 for kind in (_SUM, _SQUARE))
    np.testing.assert_allclose(u[:, 5], mean / np.sqrt(square + 1e-12), rtol=1e-12)


def test_the_state_after_the_warmup_holds_nothing_of_single_clients(run: Run) -> None:
    outcome = run("method=fedhsip", "privacy=none", "method.warmup_rounds=1", "method.sensitivity=moment")
    assert outcome.error is None
    (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
    assert set(load_file(file)) == {"theta", "slots", "signs", "head.weight", "head.bias"}
