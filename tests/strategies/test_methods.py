"""What each method exchanges, trains and computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from privet.adapters import adapter_spec, count, initial_tensors
from privet.config import Config, compose
from privet.errors import ConfigError, Refusal
from privet.projection import flatten, random_projection
from privet.trainables import THETA
from privet.wire import Payload, Reply
from server_app.plan import make_plan
from strategies.base import load_method
from strategies.fedhsip import _COUNT, _SQUARE, _SUM, FedHSIP, _digest, _pack_rule, _unpack_rule
from tests.conftest import Outcome
from tests.strategies.session import make as method


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fedavg", 294_912, 294_912),
        ("ffa_lora", 147_456, 147_456),
        ("fedpara", 294_912, 294_912),
        ("fedsvd", 147_456, 294_912),
        ("fedsvd method.period=0", 147_456, 147_456),
        ("fedsa", 147_456, 147_456),
        ("fedsa method.global_b=mean", 147_456, 147_456),
        ("fedper", 49_152, 49_152),
        ("fedper method.shared_layers=4", 98_304, 98_304),
        ("fedhsip", 46_080, 46_080),
        ("unilora", 46_080, 46_080),
        ("probe", 0, 0),
    ],
)
def test_numbers_of_a_round_are_the_papers(name: str, up: int, down: int, settings: list[str]) -> None:
    chosen = f"method={name}".split()
    config = compose([*settings, "model=roberta_base_random", *chosen, "federation.rounds=3"])
    plan = make_plan(config).to_dict()
    assert (plan["per_round"]["upload_numbers"], plan["per_round"]["download_numbers"]) == (up, down)
    assert plan["per_round"]["upload_bytes"] == 4 * up


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("fedavg", 294_912),
        ("ffa_lora", 147_456),
        ("fedpara", 294_912),
        ("fedsa", 147_456),
        ("fedper", 49_152),
        ("fedhsip", 46_080),
        ("unilora", 46_080),
    ],
)
def test_real_messages_carry_these_numbers(run: Callable[..., Outcome], name: str, numbers: int) -> None:
    outcome = run(
        "model=roberta_base_random",
        f"method={name}",
        "privacy=none",
        "federation.clients=1",
        f"federation.rounds={2 if name in ('fedhsip', 'fedper') else 1}",
        "train.local_steps=1",
        "train.batch_size=2",
        "task.train_rows=8",
        "task.test_rows=4",
        "train.lr=1e-3",
        *(["method.warmup_rounds=1"] if name == "fedhsip" else []),
        nodes=1,
    )
    if outcome.error:
        raise outcome.error
    last = outcome.rounds[-1]
    assert (last["upload_numbers"], last["download_numbers"]) == (numbers, numbers)
    traffic = outcome.json("communication.json")["rounds"][-1]["nodes"]["client-0"]
    assert traffic["upload"]["numbers"] == {"adapter": numbers, "head": 1538, "once": 0}
    assert traffic["upload"]["bytes"]["adapter"] == 4 * numbers
    once = {"fedhsip": 294_912 + 36_864 + 32, "fedper": 294_912 - 49_152}.get(name, 0)
    assert traffic["download"]["numbers"]["once"] == once
    assert outcome.json("summary.json")["upload_numbers"] == numbers


def test_private_weights_are_uniform_and_others_follow_the_rows() -> None:
    """Rule 13."""
    reply = Reply("n", "", "", "", examples=70, steps=1, q=0.1, sigma=1.0)
    assert method("method=fedavg").weight(reply) == 1.0
    assert method("method=fedavg", "privacy=none").weight(reply) == 70.0
    assert method("method=fedavg", "federation.weighting=samples").weight(reply) == 70.0
    assert method("method=fedavg", "privacy=none", "federation.weighting=uniform").weight(reply) == 1.0


def test_ffa_averages_products_exactly_and_fedavg_does_not() -> None:
    ffa = method("method=ffa_lora")
    spec = ffa.spec
    target = spec.targets[0]
    torch.manual_seed(0)
    A = torch.randn(spec.rank, target.inp)
    Bs = [torch.randn(target.out, spec.rank) for _ in range(3)]
    merger = ffa.merger("train", {})
    for i, B in enumerate(Bs):
        merger.add(str(i), Payload({target.b: B}), 1.0)
    merged = merger.mean().adapter[target.b] @ A
    torch.testing.assert_close(merged, sum(B @ A for B in Bs) / 3, rtol=1e-5, atol=1e-6)
    As = [torch.randn(spec.rank, target.inp) for _ in range(3)]
    products = sum(B @ a for B, a in zip(Bs, As, strict=True)) / 3
    factors = (sum(Bs) / 3) @ (sum(As) / 3)
    assert float((products - factors).norm() / products.norm()) > 0.3


def test_what_each_method_sends_and_trains() -> None:
    spec = method("method=fedavg").spec
    assert set(method("method=fedavg").exchanged) == set(spec.lora)
    assert set(method("method=ffa_lora").exchanged) == set(spec.b)
    assert method("method=probe").exchanged == {}
    assert method("method=fedhsip").exchanged == {THETA: (160,)}
    assert method("method=ffa_lora", "task.head=frozen").trained_numbers == count(spec.b)
    assert method("method=ffa_lora", "task.head=local").shared_head == {}
    assert method("method=ffa_lora", "task.head=local").trained_numbers == count(spec.b) + count(spec.head)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=probe", "task.head=frozen"], "task.head = frozen is not allowed"),
        (["method=fedhsip", "method.dimension=2000"], "method.dimension = 2000"),
        (["method=fedhsip", "method.init=zero"], "method.init = zero is not allowed"),
        (["method=fedhsip", "method.init=warm", "method.assignment=random"], "method.init = warm"),
        (["method=fedhsip", "method.coefficients=[1,1]"], "five numbers"),
        (["method=fedhsip", "method.warmup_rounds=0"], "at least 1"),
    ],
)
def test_impossible_settings_of_a_method_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        method(*overrides)


def test_a_local_head_stays_and_the_rest_travels(run: Callable[..., Outcome]) -> None:
    outcome = run("method=ffa_lora", "task.head=local", "evaluation=none")
    assert outcome.error is None
    traffic = outcome.json("communication.json")["rounds"][0]["nodes"]["client-0"]
    assert traffic["upload"]["numbers"]["head"] == traffic["download"]["numbers"]["head"] == 0
    kept = sorted((outcome.path / "nodes" / "client-0" / "tensors").glob("head-*"))
    assert kept
    assert bool(load_file(kept[-1])["head.weight"].any())


def test_a_frozen_head_stays_at_the_seeds_values(run: Callable[..., Outcome]) -> None:
    outcome = run("method=ffa_lora", "task.head=frozen", "privacy=none")
    config = compose(["model=tiny_random", "task.head=frozen"])
    head = load_file(outcome.path / "adapter" / "head.safetensors")
    initial = initial_tensors(adapter_spec(config), 0, "frozen")
    assert torch.equal(head["head.weight"], initial["head.weight"])


# --- FedHSIP -------------------------------------------------------------------------------------


def test_fedhsip_with_the_identity_is_fedavg(run: Callable[..., Outcome]) -> None:
    """P a permutation, d = D, PEFT's offset: the whole run is FedIT's, round by round."""
    plain = ["privacy=none", "federation.rounds=3"]
    fedavg = run("method=fedavg", *plain)
    hsip = run("method=fedhsip", "method.assignment=random", "method.dimension=1024", *plain)
    assert fedavg.error is None
    assert hsip.error is None
    adapters = [load_file(o.path / "adapter" / "adapter_model.safetensors") for o in (fedavg, hsip)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, value in adapters[0].items():
        torch.testing.assert_close(value, adapters[1][name], rtol=1e-4, atol=1e-6)


def warm(
    config: Config, spec_total: int, nodes: int, seed: int = 0
) -> tuple[FedHSIP, dict[str, torch.Tensor]]:
    hsip = load_method(config, adapter_spec(config))
    assert isinstance(hsip, FedHSIP)
    hsip._run = SimpleNamespace(  # type: ignore[assignment]
        nodes={f"client-{k}": SimpleNamespace(sigma=0.8, steps_per_round=2) for k in range(nodes)}
    )
    generator = torch.Generator().manual_seed(seed)
    state = {n: torch.randn(s, generator=generator) for n, s in hsip.spec.lora.items()}
    for k in range(nodes):
        deltas = torch.randn(2, spec_total, generator=generator) * 0.01
        state[f"{_SUM}client-{k}"] = deltas.sum(0)
        state[f"{_SQUARE}client-{k}"] = deltas.square().sum(0)
        state[f"{_COUNT}client-{k}"] = torch.tensor(2.0)
    return hsip, state


def test_warmup_statistics_are_the_definitions(settings: list[str]) -> None:
    config = compose([*settings, "privacy=none", "method.warmup_rounds=2"])
    hsip, state = warm(config, 1024, 3)
    u, s, e, h = hsip.statistics(state)
    for i in (0, 17, 1023):
        means = np.array([float(state[f"{_SUM}client-{k}"][i]) / 2 for k in range(3)])
        squares = np.array([float(state[f"{_SQUARE}client-{k}"][i]) / 2 for k in range(3)])
        assert u[i] == pytest.approx(means / np.sqrt(squares + 1e-12), rel=1e-6)
        assert e[i] == pytest.approx(squares.mean(), rel=1e-6)
        assert s[i] == pytest.approx(squares.mean(), rel=1e-6)  # no noise floor without DP
        assert h[i] == pytest.approx(means.var(), rel=1e-6)


def test_pure_noise_has_no_sensitivity(settings: list[str]) -> None:
    """Rule 12: s is the mean square less DP-SGD's own floor, so noise alone comes out near zero."""
    config = compose([*settings, "method.warmup_rounds=2", "method.warmup_lr=0.5", "privacy.clip=0.3"])
    hsip, state = warm(config, 1024, 3)
    floor = 2 * (0.5 * 0.8 * 0.3 / 16) ** 2
    generator = torch.Generator().manual_seed(1)
    for k in range(3):
        deltas = torch.randn(2, 1024, generator=generator) * floor**0.5
        state[f"{_SUM}client-{k}"], state[f"{_SQUARE}client-{k}"] = deltas.sum(0), deltas.square().sum(0)
    _, s, e, _ = hsip.statistics(state)
    assert e.mean() == pytest.approx(floor, rel=0.1)
    signal = state[f"{_SQUARE}client-0"] + 2 * floor * 9
    state[f"{_SQUARE}client-0"] = signal
    _, with_signal, _, _ = hsip.statistics(state)
    assert s.mean() < 0.45 * floor  # what clamping noise at zero leaves
    assert with_signal.mean() > 2.5 * floor


def test_warmup_keeps_each_clients_change(settings: list[str]) -> None:
    hsip, _ = warm(compose([*settings, "privacy=none"]), 1024, 2)
    shapes = hsip.spec.lora
    before = {n: torch.zeros(s) for n, s in shapes.items()}
    merger = hsip.merger("warmup", before)
    for k, value in enumerate((1.0, 3.0)):
        merger.add(f"client-{k}", Payload({n: torch.full(s, value) for n, s in shapes.items()}), 1.0)
    state = hsip.update("warmup", before, merger.mean())
    assert all(bool((state[n] == 2.0).all()) for n in shapes)
    assert bool((state[f"{_SUM}client-1"] == 3.0).all())
    assert bool((state[f"{_SQUARE}client-1"] == 9.0).all())


def test_a_warmup_without_replies_cannot_be_assigned_by(settings: list[str]) -> None:
    hsip, _ = warm(compose([*settings, "privacy=none"]), 1024, 0)
    with pytest.raises(Refusal, match="no warm-up round"):
        hsip.finish_warmup({})


@pytest.mark.parametrize("init", ["offset", "uniform", "warm"])
def test_the_three_starts(settings: list[str], init: str) -> None:
    config = compose([*settings, "privacy=none", f"method.init={init}"])
    hsip, state = warm(config, 1024, 3)
    start = hsip.finish_warmup({**state, **{n: torch.zeros(s) for n, s in hsip.shared_head.items()}})
    values = flatten(hsip.model_values(start), hsip.spec.lora)
    initial = flatten(initial_tensors(hsip.spec, 0, "shared"), hsip.spec.lora)
    rule = hsip._state_rule(start)
    if init == "offset":
        assert torch.equal(values, initial)
        assert not start[THETA].any()
    elif init == "uniform":
        assert 0.01 < float(start[THETA].abs().max()) <= 0.02
        torch.testing.assert_close(values, rule.expand(start[THETA]))
    else:
        torch.testing.assert_close(start[THETA], rule.project(flatten(state, hsip.spec.lora)))
    assert set(start) == {THETA, "slots", "signs", *hsip.shared_head}


def test_the_rule_survives_the_wire_and_its_digest_sees_every_change() -> None:
    rule = random_projection(1023, 160, 0)
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], 1023)).float()
    state = {"slots": rule.slots.to(torch.int32), "signs": signs}
    packed = _pack_rule(state, 160)
    assert packed["slots"].dtype == torch.uint16
    got = _unpack_rule(packed, 1023, 160)
    assert torch.equal(got.slots, rule.slots)
    assert torch.equal(got.signs, signs)
    other = {**packed, "slots": packed["slots"].clone()}
    other["slots"][5] = (int(other["slots"][5]) + 1) % 160
    assert not torch.equal(_digest(packed), _digest(other))
    for bad in ({}, {"slots": packed["slots"]}, {**packed, "slots": packed["slots"][:9]}):
        with pytest.raises(Refusal):
            _unpack_rule(bad, 1023, 160)


def test_the_rule_is_sent_once(run: Callable[..., Outcome]) -> None:
    outcome = run("method=fedhsip", "method.warmup_rounds=1", "federation.rounds=4")
    assert outcome.error is None
    sizes = [
        r["nodes"]["client-0"]["download"]["numbers"]["once"]
        for r in outcome.json("communication.json")["rounds"]
    ]
    assert sizes == [0, 1024 + 128 + 32, 32, 32]


def test_the_warmup_is_charged_in_the_same_budget(run: Callable[..., Outcome]) -> None:
    outcome = run("method=fedhsip", "method.warmup_rounds=2", "federation.rounds=4")
    assert outcome.error is None
    for node in outcome.json("privacy.json")["nodes"]:
        assert [e["phase"] for e in node["entries"]] == ["warmup", "warmup", "train", "train"]
        assert node["steps"] == 8
        assert node["epsilon"] == pytest.approx(6.0, abs=0.01)
        assert node["epsilon"] <= 6.0
