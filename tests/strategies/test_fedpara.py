"""FedPara: which pair travels, which one stays, what the server's and the nodes' models are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from peft import PeftModel
from torch import Tensor

from privet.adapters import (
    build_model,
    count,
    export,
    initial_tensors,
    load_model,
    load_tokenizer,
)
from privet.errors import ConfigError
from privet.hadamard import Hadamard, private_a, private_b
from privet.wire import Arrays, Payload
from strategies.fedpara import FedPara
from tests.conftest import Outcome, state_of
from tests.strategies.session import NODES, StubSession, kept_by, make

Run = Callable[..., Outcome]
VARIANTS = ["plus_one", "literal"]


def fedpara(*overrides: str) -> FedPara:
    made = make("method=fedpara", *overrides)
    assert isinstance(made, FedPara)
    return made


def random_values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) * 0.5 for n, s in shapes.items()}


def expected_change(b: Tensor, a: Tensor, pair: Arrays, target: Any, variant: str) -> Tensor:
    mask = pair[private_b(target)].double() @ pair[private_a(target)].double()
    return (b.double() @ a.double()) * (mask + (variant == "plus_one"))


class PairSession(StubSession):
    """A session whose training adds one to every leaf, with the pair that the node keeps."""

    def __init__(self, method: FedPara, kept: Arrays | None, acknowledged: int = 0) -> None:
        store = None if kept is None else {"private-pair": kept}
        super().__init__(method, kept=store, acknowledged=acknowledged)

    def train(self, trainables: Any, **_: Any) -> None:
        started = {n: v.detach().clone() for n, v in trainables.leaves.items()}
        super().train(trainables)
        self.started = started  # the four small factors, where the model has the wide ones
        trainables.refresh()


# --- starts --------------------------------------------------------------------------------------


def gradients(method: FedPara, start: Arrays, steps: int) -> dict[str, float]:
    """Largest gradient of each kind of leaf over some plain steps from the server's start."""
    model = load_model(method.config)
    model.load({})
    begin = {**method.initial(initial_tensors(method.spec, 0, "shared")), **start}
    pairs = Hadamard(model, begin, list(method.trained_head), plus_one=method.params.variant == "plus_one")
    ids = torch.arange(12).view(2, 6) + 1000
    found: dict[str, float] = {}
    for parameter in (model.parameter(n) for n in pairs.model_names):
        parameter.requires_grad_(True)
    with torch.no_grad():  # a head at zero would let nothing through
        model.parameter("head.weight").copy_(torch.randn(2, 32))
    for _ in range(steps):
        logits = model.module(input_ids=ids, attention_mask=torch.ones_like(ids))
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
        pairs.collect()
        for name, leaf in pairs.leaves.items():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            assert leaf.grad is not None
            found[kind] = max(found.get(kind, 0.0), float(leaf.grad.abs().max()))
            with torch.no_grad():
                leaf.sub_(0.5 * leaf.grad)
            leaf.grad = None
        pairs.refresh()
    model.load({})
    return {k: v for k, v in found.items() if k.startswith(("lora", "private"))}


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_start_is_alive_and_the_dead_one_is_dead(variant: str) -> None:
    method = fedpara(f"method.variant={variant}")
    alive = gradients(method, method.private_start(), 3)
    assert set(alive) == {"lora_A", "lora_B", "private_A", "private_B"}
    assert all(v > 0 for v in alive.values())
    first = gradients(method, method.private_start(), 1)
    assert {k for k, v in first.items() if v > 0} == {"lora_B"}  # as in LoRA, B moves first
    if variant == "literal":
        zero = {n: torch.zeros(s) if n.endswith("B") else torch.ones(s) for n, s in method.private.items()}
        assert set(gradients(method, zero, 3).values()) == {0.0}


def test_the_private_start_is_common_and_has_the_stated_size() -> None:
    for variant in VARIANTS:
        method, again = (fedpara(f"method.variant={variant}", "model.lora.rank=8") for _ in range(2))
        start, same = method.private_start(), again.private_start()
        assert all(torch.equal(start[n], same[n]) for n in start)
        other = fedpara(f"method.variant={variant}", "model.lora.rank=8", "seed=1").private_start()
        lora = initial_tensors(method.spec, method.config.seed, "shared")
        for t in method.spec.targets:
            assert not torch.equal(start[private_a(t)], other[private_a(t)])
            assert not torch.equal(start[private_a(t)], lora[t.a])
        product = torch.cat(
            [(start[private_b(t)] @ start[private_a(t)]).flatten() for t in method.spec.targets]
        )
        if variant == "plus_one":
            assert not product.any()
            assert max(float(start[n].abs().max()) for n in start) <= 32**-0.5
        else:
            assert float(product.mean()) == pytest.approx(0, abs=0.1)
            assert float(product.square().mean()) == pytest.approx(1, abs=0.2)


# --- server --------------------------------------------------------------------------------------


def base_outputs(method: FedPara, values: Arrays) -> Tensor:
    model = load_model(method.config)
    model.load(values)
    ids = torch.arange(12).view(2, 6) + 1000
    with torch.no_grad():
        return model.module(input_ids=ids, attention_mask=torch.ones_like(ids)).double()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_servers_model_is_the_product_with_the_common_start(variant: str) -> None:
    method = fedpara(f"method.variant={variant}")
    state = random_values({**method.spec.lora, **method.spec.head})
    values = method.model_values(state)
    start = method.private_start()
    for t in method.spec.targets:
        got = values[t.b].double() @ values[t.a].double()
        if t.delta in values:
            got = got + values[t.delta].double()
        want = expected_change(state[t.b], state[t.a], start, t, variant)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (set(values) == set(state)) == (variant == "plus_one")
    assert set(state) == {*method.spec.lora, *method.spec.head}  # left as it was


def test_the_literal_model_exports(tmp_path: Path) -> None:
    method = fedpara("method.variant=literal")
    values = method.model_values(random_values({**method.spec.lora, **method.spec.head}))
    export(method.config, values, tmp_path)
    model = build_model(method.config)
    model.load(values)
    tokens = load_tokenizer(method.config.model)(["good day", "a longer text than that"], padding=True)
    batch = {k: torch.tensor(tokens[k]) for k in ("input_ids", "attention_mask")}
    base = build_model(method.config).module.backbone
    from peft.tuners.lora import Linear

    names = [n for n, m in base.named_modules() if isinstance(m, Linear)]
    for name in names:  # the base model without an adapter
        parent, _, leaf = name.rpartition(".")
        setattr(base.get_submodule(parent), leaf, base.get_submodule(name).base_layer)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        got = loaded(**batch).last_hidden_state
        want = model.module.backbone(**batch).last_hidden_state
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# --- client --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_global_pair_travels_and_the_private_one_stays(variant: str) -> None:
    method = fedpara(f"method.variant={variant}")
    server = random_values({**method.spec.lora, **method.spec.head}, 1)
    kept = random_values(method.private, 2)
    session = PairSession(method, kept)
    reply = method.client("train", method.download("train", server, False), session)
    method.check_upload("train", reply)
    assert set(session.started) == {*method.spec.lora, *method.private, *method.spec.head}
    for name, value in {**server, **kept}.items():
        assert torch.equal(session.started[name], value), name
    for name in method.spec.lora:
        torch.testing.assert_close(reply.adapter[name], server[name] + 1)
    for name in method.private:
        torch.testing.assert_close(session.store["private-pair"][name], kept[name] + 1)
    assert session.flags == []
    assert method.trained_numbers == 2 * count(method.spec.lora) + count(method.spec.head)  # rule 4
    session.model.load({})  # narrow again
    assert session.model.read(method.spec.lora).keys() == method.spec.lora.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_trains_is_the_product(variant: str) -> None:
    """The wide model under training computes W0 + alpha / r (B_g A_g) o (B_p A_p [+ 1])."""
    method = fedpara(f"method.variant={variant}")
    server = random_values({**method.spec.lora, **method.spec.head}, 1)
    kept = random_values(method.private, 2)
    changes = {
        t.delta: expected_change(server[t.b], server[t.a], kept, t, variant).float()
        for t in method.spec.targets
    }
    head = {n: server[n] for n in method.spec.head}
    want = base_outputs(method, {**head, **changes})
    model = load_model(method.config)
    model.load(head)
    Hadamard(model, {**server, **kept}, [], plus_one=variant == "plus_one")
    ids = torch.arange(12).view(2, 6) + 1000
    with torch.no_grad():
        got = model.module(input_ids=ids, attention_mask=torch.ones_like(ids)).double()
    model.load({})
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nodes_own_model_is_its_pair_with_the_servers(variant: str) -> None:
    method = fedpara(f"method.variant={variant}")
    state = random_values({**method.spec.lora, **method.spec.head}, 1)
    kept = random_values(method.private, 2)
    values = method.model_values(state)
    received = Payload(
        {n: v for n, v in values.items() if not method.is_head(n)}, {n: state[n] for n in method.spec.head}
    )
    assert method.personal(received, PairSession(method, None)) is None
    own = method.personal(received, PairSession(method, kept))
    assert own is not None
    changes = {
        t.delta: expected_change(state[t.b], state[t.a], kept, t, variant).float()
        for t in method.spec.targets
    }
    want = base_outputs(method, {**received.head, **changes})
    torch.testing.assert_close(base_outputs(method, own), want, rtol=1e-4, atol=1e-5)
    if variant == "plus_one":  # a neutral pair is the server's model
        neutral = method.personal(received, PairSession(method, method.private_start()))
        assert neutral is not None
        torch.testing.assert_close(base_outputs(method, neutral), base_outputs(method, values))
    local = fedpara(f"method.variant={variant}", "task.head=local")
    session = PairSession(local, kept)
    session.store["head"] = random_values(dict(method.spec.head), 5)
    mine = local.personal(Payload(received.adapter), session)
    assert mine is not None
    assert all(torch.equal(mine[n], session.store["head"][n]) for n in method.spec.head)


def test_a_lost_pair_is_flagged_and_a_first_one_is_not() -> None:
    method = fedpara()
    server = random_values({**method.spec.lora, **method.spec.head}, 1)
    for acknowledged, flags in ((0, []), (2, ["private-pair-lost"])):
        session = PairSession(method, None, acknowledged)
        method.client("train", method.download("train", server, False), session)
        assert session.flags == flags
        start = method.private_start()
        assert all(torch.equal(session.started[n], start[n]) for n in start)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.variant = minus_one is not allowed"):
        fedpara("method.variant=minus_one")


# --- whole runs ----------------------------------------------------------------------------------


def kept_pair(outcome: Outcome, node: str) -> Arrays:
    return kept_by(outcome, node, "private-pair")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_without_privacy_learns_in_any_order(run: Run, variant: str) -> None:
    overrides = ["method=fedpara", f"method.variant={variant}", "privacy=none", "federation.rounds=3"]
    more = ["train.local_steps=6", "evaluate_every=3", "train.optimizer=adamw", "train.lr=0.04"]
    scored = ["evaluation=both", "holdout=0.2"]
    first, second = (run(*overrides, *more, *scored, reverse=r) for r in (False, True))
    if first.error:
        raise first.error
    losses = [r["train_loss"] for r in first.rounds]
    assert losses[-1] < 0.8 * losses[0]
    one, other = state_of(first), state_of(second)
    assert set(one) == {*fedpara().spec.lora, *fedpara().spec.head}
    assert all(torch.equal(one[n], other[n]) for n in one)
    scores = first.rounds[-1]["eval_clients"]
    assert scores["personal"]["nodes"] == 3
    assert scores["nodes"]["client-0"]["personal.loss"] != scores["nodes"]["client-0"]["global.loss"]
    pairs = [kept_pair(first, n) for n in NODES]
    assert all(not torch.equal(pairs[0][n], pairs[1][n]) for n in pairs[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_private_run_noises_both_pairs_and_stays_in_its_budget(
    run: Run, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Rule 4: on empty draws what trains is noise alone, and every number of the private pair has it."""
    from client_app import trainer

    monkeypatch.setattr(trainer, "poisson_draw", lambda *_: np.zeros(0, dtype=np.int64))
    outcome = run("method=fedpara", f"method.variant={variant}", "evaluation=client", "evaluate_every=2")
    if outcome.error:
        raise outcome.error
    start = fedpara(f"method.variant={variant}").private_start()
    before = initial_tensors(fedpara().spec, 0, "shared")
    state = state_of(outcome)
    for node in NODES:
        pair = kept_pair(outcome, node)
        assert all(bool((pair[n] != start[n]).all()) for n in start)
    assert all(bool((state[n] != before[n]).all()) for n in fedpara().spec.lora)
    privacy = outcome.json("privacy.json")
    assert 5.9 < privacy["max_epsilon"] <= 6.0
    assert [[e["phase"] for e in n["entries"]] for n in privacy["nodes"]] == [["train"] * 2] * 3
    assert outcome.rounds[-1]["eval_clients"]["personal"]["nodes"] == 3
    assert [r["train_loss"] for r in outcome.rounds] == [None, None]


def test_a_lost_store_is_flagged_in_the_record(run: Run) -> None:
    def lose(message: Message, reply: Message) -> Message:
        request = message.content.get("request", {"round": 0, "node": ""})
        if (request["round"], request["node"]) == (1, "client-1"):
            shutil.rmtree(Path(request["store"]) / "client-1")
        return reply

    lost = run("method=fedpara", "privacy=none", "federation.sampled=3", tamper=lose)
    if lost.error:
        raise lost.error
    assert lost.rounds[0]["phases"][0]["flags"] == {}
    assert lost.rounds[1]["phases"][0]["flags"] == {"client-1": ["private-pair-lost", "store-lost"]}
