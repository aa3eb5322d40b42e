"""FedRand: which half travels, which one stays, and what the server makes of halves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from client_app.node_config import NodeConfig
from privet.adapters import count
from privet.config import compose
from privet.errors import ConfigError, Refusal
from privet.wire import Arrays, Payload
from server_app.plan import make_plan
from strategies.fedrand import FedRand
from tests.conftest import Outcome
from tests.strategies.session import StubSession, make, random_values, start

Run = Callable[..., Outcome]


def fedrand(*overrides: str) -> FedRand:
    made = make("method=fedrand", *overrides)
    assert isinstance(made, FedRand)
    return made


def halves(method: FedRand, value: float) -> tuple[Arrays, Arrays]:
    a = {n: torch.full(s, value) for n, s in method.spec.a.items()}
    b = {n: torch.full(s, 10 * value) for n, s in method.spec.b.items()}
    return a, b


def merge(method: FedRand, state: Arrays, replies: list[tuple[Arrays, float]]) -> Arrays:
    merger = method.merger("train", state)
    head = {n: torch.zeros(s) for n, s in method.shared_head.items()}
    for i, (half, weight) in enumerate(replies):
        payload = Payload(half, head)
        method.check_upload("train", payload)
        merger.add(str(i), payload, weight)
    return method.update("train", state, merger.mean())


# --- server (eq. 8 to 10) ------------------------------------------------------------------------


def test_each_half_is_the_weighted_mean_over_those_who_sent_it() -> None:
    method = fedrand()
    (a1, _), (a2, _), (_, b3) = (halves(method, v) for v in (1.0, 4.0, 0.7))
    after = merge(method, start(method), [(a1, 2.0), (a2, 1.0), (b3, 5.0)])
    assert all(torch.allclose(after[n], torch.tensor(2.0)) for n in method.spec.a)  # (2 * 1 + 1 * 4) / 3
    assert all(torch.allclose(after[n], torch.tensor(7.0)) for n in method.spec.b)


@pytest.mark.parametrize("empty", ["a", "b"])
@pytest.mark.parametrize("normalise", ["true", "false"])
def test_a_half_that_nobody_sent_stays(empty: str, normalise: str) -> None:
    method = fedrand(f"method.normalise={normalise}")
    state = start(method)
    a, b = halves(method, 1.0)
    after = merge(method, state, [(b if empty == "a" else a, 1.0)] * 4)
    assert all(torch.equal(after[n], state[n]) for n in getattr(method.spec, empty))
    other = method.spec.b if empty == "a" else method.spec.a
    assert not any(torch.equal(after[n], state[n]) for n in other)


def test_equal_clients_are_a_fixed_point() -> None:
    method = fedrand()
    state = {n: torch.randn(v.shape) for n, v in start(method).items()}
    a = {n: state[n] for n in method.spec.a}
    b = {n: state[n] for n in method.spec.b}
    after = merge(method, state, [(a, 3.0), (b, 1.0), (a, 2.0)])
    for name in method.spec.lora:
        torch.testing.assert_close(after[name], state[name], rtol=1e-6, atol=1e-7)


def test_without_normalisation_a_half_shrinks_by_the_others_share() -> None:
    method = fedrand("method.normalise=false")
    (a1, _), (a2, _), (_, b3) = (halves(method, v) for v in (1.0, 4.0, 0.7))
    after = merge(method, start(method), [(a1, 2.0), (a2, 1.0), (b3, 5.0)])
    assert all(torch.allclose(after[n], torch.tensor(6.0 / 8)) for n in method.spec.a)
    assert all(torch.allclose(after[n], torch.tensor(35.0 / 8)) for n in method.spec.b)


def test_both_halves_or_a_part_of_one_are_refused() -> None:
    method = fedrand()
    a, b = halves(method, 1.0)
    head = {n: torch.zeros(s) for n, s in method.shared_head.items()}
    for adapter in ({**a, **b}, dict(list(a.items())[1:]), {}):
        with pytest.raises(Refusal):
            method.check_upload("train", Payload(adapter, head))
    for half in (a, b):
        method.check_upload("train", Payload(half, head))


# --- client (eq. 6 and 7) ------------------------------------------------------------------------


def session_of(
    method: FedRand,
    *,
    coin: float | Callable[[str], float],
    kept: Arrays | None,
    round_number: int = 3,
) -> StubSession:
    """A session whose coin and kept factors are given."""
    coins = coin if callable(coin) else lambda _: coin
    store = None if kept is None else {"factors": kept}
    return StubSession(method, coins=coins, kept=store, round_number=round_number)


@pytest.mark.parametrize(("coin", "sent"), [(0.49, "a"), (0.51, "b")])
def test_the_coin_decides_which_half_comes_from_the_server_and_goes_back(coin: float, sent: str) -> None:
    method = fedrand()
    server, kept = random_values(method, 1), random_values(method, 2)
    session = session_of(method, coin=coin, kept={n: kept[n] for n in method.spec.lora})
    reply = method.client("train", method.download("train", server, False), session)
    from_server = getattr(method.spec, sent)
    assert set(reply.adapter) == set(from_server)
    for name in method.spec.lora:
        source = server if name in from_server else kept
        assert torch.equal(session.started[name], source[name]), name
        torch.testing.assert_close(session.store["factors"][name], source[name] + 1)  # both are kept, trained
    for name, value in reply.adapter.items():
        torch.testing.assert_close(value, server[name] + 1)
    assert set(session.trained) == {*method.spec.lora, *method.spec.head}
    assert session.flags == []


def test_a_late_joiner_starts_from_the_server_and_says_so() -> None:
    method = fedrand()
    server = random_values(method, 1)
    for round_number, flags in ((1, []), (4, ["no-past-half"])):
        session = session_of(method, coin=0.1, kept=None, round_number=round_number)
        method.client("train", method.download("train", server, False), session)
        assert all(torch.equal(session.started[n], server[n]) for n in method.spec.lora)
        assert session.flags == flags


def test_the_ablation_without_past_parameters_starts_from_the_server() -> None:
    method = fedrand("method.past_parameters=false")
    server, kept = random_values(method, 1), random_values(method, 2)
    session = session_of(method, coin=0.1, kept={n: kept[n] for n in method.spec.lora})
    reply = method.client("train", method.download("train", server, False), session)
    assert all(torch.equal(session.started[n], server[n]) for n in method.spec.lora)
    assert set(reply.adapter) == set(method.spec.a)


def test_the_literal_first_round_starts_from_an_own_a_and_zero_b() -> None:
    method = fedrand("method.round0=local")
    server = random_values(method, 1)
    starts = []
    for coin in (0.1, 0.2):
        session = session_of(method, coin=coin, kept=None, round_number=1)
        method.client("train", method.download("train", server, False), session)
        starts.append(session.started)
        assert not any(session.started[n].any() for n in method.spec.b)
        bound = max(s[1] ** -0.5 for s in method.spec.a.values())
        assert all(0 < session.started[n].abs().max() <= bound for n in method.spec.a)
    assert not any(torch.equal(starts[0][n], starts[1][n]) for n in method.spec.a)
    later = session_of(method, coin=0.1, kept=None, round_number=2)
    method.client("train", method.download("train", server, False), later)
    assert torch.equal(later.started[next(iter(method.spec.a))], server[next(iter(method.spec.a))])


def test_hidden_halves_are_in_the_clipped_vector() -> None:
    """Design rule 4: what never leaves is clipped and noised as well."""
    method = fedrand()
    assert method.trained_numbers == count(method.spec.lora) + count(method.spec.head)


def test_a_real_node_tosses_its_own_coin(run: Run, tmp_path: Path) -> None:
    """In a simulation the seed decides; on a real node the server cannot foresee the half."""
    from types import SimpleNamespace

    from client_app.node import _Phase
    from client_app.rows import Rows
    from client_app.store import NodeStore

    config = fedrand().config
    request = SimpleNamespace(run="r", round=1, fingerprint="f" * 64)
    real = {"name": "north", "data-path": "/data/x.csv"}
    draws: dict[str, list[float]] = {"real": [], "simulated": []}
    for i in range(8):
        for kind, raw in (
            ("real", {**real, "store": str(tmp_path / f"s{i}")}),
            ("simulated", {"partition-id": 0, "num-partitions": 1}),
        ):
            node = NodeConfig.read(raw)
            with NodeStore(node.root(str(tmp_path / f"n{i}")), node.name) as store:
                phase = _Phase(node, request, config, store, Rows(node, config, store, {}), lambda: None)  # type: ignore[arg-type]
                first, second = phase.chance("coin"), phase.chance("coin")
                assert first == second  # a repeated request gets the same
                draws[kind].append(first)
    assert len(set(draws["simulated"])) == 1
    assert len(set(draws["real"])) == 8
    assert all(0 <= v < 1 for values in draws.values() for v in values)


@pytest.mark.parametrize("rho", ["0", "1", "1.5"])
def test_rho_must_leave_a_choice(rho: str) -> None:
    with pytest.raises(ConfigError, match=r"method\.rho"):
        fedrand(f"method.rho={rho}")


# --- a coin for every module, beyond the paper ---------------------------------------------------


def test_with_layers_every_module_tosses_its_own_coin() -> None:
    method = fedrand("method.subset=layers")
    server, kept = random_values(method, 1), random_values(method, 2)
    coins = {t.name: c for t, c in zip(method.spec.targets, (0.1, 0.9, 0.7, 0.2), strict=True)}
    tossed: list[str] = []

    def coin(purpose: str) -> float:
        tossed.append(purpose)
        (value,) = (v for name, v in coins.items() if purpose.endswith(name))
        return value

    session = session_of(method, coin=coin, kept={n: kept[n] for n in method.spec.lora})
    reply = method.client("train", method.download("train", server, False), session)
    method.check_upload("train", reply)
    assert len(set(tossed)) == len(tossed) == 4
    sent = {t.a if coins[t.name] < 0.5 else t.b for t in method.spec.targets}
    assert set(reply.adapter) == sent
    for name in method.spec.lora:
        assert torch.equal(session.started[name], (server if name in sent else kept)[name]), name
        torch.testing.assert_close(session.store["factors"][name], session.started[name] + 1)
    assert set(session.trained) == {*method.spec.lora, *method.spec.head}  # rule 4


@pytest.mark.parametrize("normalise", [True, False])
def test_with_layers_every_array_is_averaged_over_those_who_sent_it(normalise: bool) -> None:
    method = fedrand("method.subset=layers", f"method.normalise={str(normalise).lower()}")
    rng = np.random.default_rng(3)
    state, replies, expected = start(method), [], {n: [0.0, 0.0] for n in method.spec.lora}
    for weight in (1.0, 2.0, 4.0):
        reply: Arrays = {}
        for t in method.spec.targets[:-1]:
            name = str(rng.choice([t.a, t.b]))
            reply[name] = torch.full(method.spec.lora[name], float(rng.integers(1, 9)))
        last = method.spec.targets[-1].a  # nobody sends its B
        reply[last] = torch.ones(method.spec.lora[last])
        for name, value in reply.items():
            expected[name][0] += weight * float(value[0, 0])
            expected[name][1] += weight
        replies.append((reply, weight))
    after = merge(method, state, replies)
    seen = set()
    for name, (total, weight) in expected.items():
        want = (
            state[name]
            if not weight
            else torch.full_like(state[name], total / (weight if normalise else 7.0))
        )
        torch.testing.assert_close(after[name], want)
        seen.add(weight)
    assert len(seen) > 2  # parts of the replies, all and none


def test_with_layers_exactly_one_half_of_every_module_is_accepted() -> None:
    method = fedrand("method.subset=layers")
    a, b = halves(method, 1.0)
    head = {n: torch.zeros(s) for n, s in method.shared_head.items()}
    first, second = method.spec.targets[:2]
    mixed = {**a, first.b: b[first.b]}
    del mixed[first.a]
    for good in (a, b, mixed):
        method.check_upload("train", Payload(good, head))
    with pytest.raises(Refusal):
        fedrand().check_upload("train", Payload(mixed, head))
    for bad in (
        {**a, **b},
        {**mixed, first.a: a[first.a]},
        {n: v for n, v in mixed.items() if n != second.a},
        {**mixed, second.a: a[second.a][:1]},
        {},
    ):
        with pytest.raises(Refusal):
            method.check_upload("train", Payload(bad, head))


def test_the_plan_counts_the_larger_half_of_every_module() -> None:
    """Where m and n differ, a mixture may be larger than either half."""
    wide = ["model.lora.targets=[dense]"]  # 32 x 32, 64 x 32 and 32 x 64
    both, layers = (fedrand(*wide, f"method.subset={s}") for s in ("all", "layers"))
    most = sum(4 * max(t.out, t.inp) for t in layers.spec.targets)
    assert count(layers.upload_shapes("train")[0]) == most
    assert count(both.upload_shapes("train")[0]) == max(count(both.spec.a), count(both.spec.b)) < most


def test_a_run_with_layers_sends_mixtures_and_averages_them(run: Run) -> None:
    uploads = Uploads()
    overrides = ["method=fedrand", "method.subset=layers", "evaluation=none"]
    outcome = run(*overrides, tamper=uploads)
    turned = run(*overrides, "privacy=none", reverse=True)
    plain = run(*overrides, "privacy=none")
    for each in (outcome, turned, plain):
        if each.error:
            raise each.error
    method = fedrand()
    expected = start(method)
    for number in (1, 2):
        sent = [arrays for round_number, _, arrays in uploads.seen if round_number == number]
        assert len(sent) == 3
        for name in expected:
            those = [s[name].double() for s in sent if name in s]
            if those:
                expected[name] = torch.stack(those).mean(0).float()
    state = load_file(next((outcome.path / "checkpoints").glob("*.safetensors")))
    for name in method.spec.lora:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-6, atol=1e-7)
    assert any(set(s) not in (set(method.spec.a), set(method.spec.b)) for _, _, s in uploads.seen)
    first, second = (load_file(next((o.path / "checkpoints").glob("*.safetensors"))) for o in (turned, plain))
    assert all(torch.equal(first[n], second[n]) for n in first)
    traffic = outcome.json("communication.json")["rounds"][-1]["nodes"]["client-0"]["upload"]
    assert traffic["numbers"]["adapter"] == 512  # 32 x 32 throughout: half of D whatever the coins


# --- whole runs ----------------------------------------------------------------------------------


def test_numbers_of_plan_and_messages_are_the_papers(run: Run, settings: list[str]) -> None:
    overrides = ["model=roberta_base_random", "method=fedrand"]
    plan = make_plan(compose([*settings, *overrides])).to_dict()["per_round"]
    assert (plan["upload_numbers"], plan["download_numbers"]) == (147_456, 294_912)
    small = ["federation.clients=1", "federation.rounds=1", "train.local_steps=1", "train.batch_size=2"]
    rows = ["task.train_rows=8", "task.test_rows=4", "evaluation=none", "privacy.epsilon=50"]
    outcome = run(*overrides, *small, *rows, nodes=1)
    if outcome.error:
        raise outcome.error
    (record,) = outcome.rounds
    assert (record["upload_numbers"], record["download_numbers"]) == (147_456, 294_912)


class Uploads:
    """Looks at uploads on their way."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, dict[str, torch.Tensor]]] = []

    def __call__(self, message: Message, reply: Message) -> Message:
        if "request" in message.content and message.content["request"]["phase"] == "train":
            request = message.content["request"]
            arrays = {n: torch.from_numpy(a.numpy().copy()) for n, a in reply.content["adapter"].items()}
            self.seen.append((request["round"], request["node"], arrays))
        return reply


@pytest.mark.parametrize("privacy", ["dp", "none"])
def test_a_real_run_averages_the_halves_that_were_sent(run: Run, privacy: str) -> None:
    uploads = Uploads()
    outcome = run("method=fedrand", f"privacy={privacy}", "federation.rounds=3", tamper=uploads)
    if outcome.error:
        raise outcome.error
    method = fedrand()
    expected = start(method)
    for number in (1, 2, 3):
        sent = [arrays for round_number, _, arrays in uploads.seen if round_number == number]
        assert len(sent) == 3
        for half in (method.spec.a, method.spec.b):
            those = [s for s in sent if set(s) == set(half)]
            for name in half if those else ():
                expected[name] = torch.stack([s[name].double() for s in those]).mean(0).float()
    (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
    state = load_file(file)
    for name in method.spec.lora:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-6, atol=1e-7)
    kinds = {node: {frozenset(a) for _, n, a in uploads.seen if n == node} for _, node, _ in uploads.seen}
    assert max(map(len, kinds.values())) == 2  # the coin is tossed anew every round


def test_past_halves_make_a_difference_and_replaced_ones_are_removed(run: Run) -> None:
    kept = []
    for past in ("true", "false"):
        outcome = run(
            "method=fedrand", "privacy=none", "federation.rounds=3", f"method.past_parameters={past}"
        )
        files = sorted((outcome.path / "nodes").glob("*/tensors/*"))
        assert len(files) == 3  # one a node
        kept.append([load_file(file) for file in files])
    assert all(arrays.keys() == set(fedrand().spec.lora) for arrays in kept[0])
    assert any(not torch.equal(one[n], other[n]) for one, other in zip(*kept, strict=True) for n in one)


def test_late_joiners_and_lost_stores_are_flagged_in_the_record(run: Run) -> None:
    sampled = run("method=fedrand", "federation.sampled=2", "federation.rounds=4", "seed=3")
    assert sampled.error is None
    seen: set[str] = set()
    schedule = sampled.json("run.json")["schedule"]["rounds"]
    for record, planned in zip(sampled.rounds, schedule, strict=True):
        new = {n for n in planned["nodes"] if n not in seen} if record["round"] > 1 else set()
        assert record["phases"][0]["flags"] == {n: ["no-past-half"] for n in sorted(new)}
        seen |= set(planned["nodes"])
    assert seen == {"client-0", "client-1", "client-2"}
    assert any(r["phases"][0]["flags"] for r in sampled.rounds)

    def lose(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        if (request["round"], request["node"]) == (1, "client-1"):
            shutil.rmtree(Path(request["store"]) / "client-1")
        return reply

    lost = run("method=fedrand", "privacy=none", tamper=lose)
    assert lost.error is None
    assert lost.rounds[1]["phases"][0]["flags"] == {"client-1": ["no-past-half", "store-lost"]}
