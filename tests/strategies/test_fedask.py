"""FedASK: two phases, exact products, what happens when a node is lost between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor

from client_app.node import answer_train
from client_app.trainer import Noise, Trainer
from privet.adapters import initial_tensors, load_tokenizer
from privet.config import compose
from privet.data.collate import tokenise
from privet.data.partition import client_examples
from privet.errors import ConfigError, Refusal
from privet.privacy.ledger import Ledger
from privet.privacy.rng import make_randomness
from privet.wire import Arrays, Payload, pack_request, unpack_failure, unpack_request
from server_app.plan import make_plan
from strategies.fedask import FedASK
from tests.conftest import Outcome
from tests.grid import Killed
from tests.strategies.session import StubSession, make, product, relative, start
from tests.strategies.session import one_round as play_round

Run = Callable[..., Outcome]


def fedask(*overrides: str) -> FedASK:
    made = make("method=fedask", *overrides)
    assert isinstance(made, FedASK)
    notes: list[str] = []
    made._run = SimpleNamespace(  # type: ignore[assignment]
        recorder=SimpleNamespace(event=lambda kind, text: notes.append(text)), notes=notes
    )
    return made


class GivenSession(StubSession):
    """A session whose training writes given values, and of which nothing may be remarked."""

    def __init__(self, method: FedASK, trained: Arrays, round_number: int) -> None:
        names = [*method.spec.lora, *method.spec.head]
        super().__init__(method, step=lambda m: {**m.read(names), **trained}, round_number=round_number)

    def flag(self, text: str) -> None:
        raise AssertionError(text)


def one_round(method: FedASK, state: Arrays, trained: list[Arrays], *, number: int = 1) -> Arrays:
    """Server half and client half against each other, without messages."""
    sessions = [GivenSession(method, values, number) for values in trained]
    return play_round(method, state, sessions, number=number)


def random_factors(method: FedASK, count: int) -> list[Arrays]:
    generator = torch.Generator().manual_seed(5)
    shapes = {**method.spec.lora, **method.spec.head}
    return [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(count)]


@pytest.mark.parametrize("transport", ["sketch", "factor"])
@pytest.mark.parametrize("oversampling", [0, 4])
def test_private_rounds_aggregate_the_products_exactly(transport: str, oversampling: int) -> None:
    method = fedask(f"method.transport={transport}", f"method.sketch_oversampling={oversampling}")
    state = start(method)
    trained = random_factors(method, 4)
    after = one_round(method, state, trained)
    assert set(after) == set(state)
    for target in method.spec.targets:
        mean = sum(t[target.b].double() for t in trained) / 4 @ state[target.a].double()  # A is the server's
        assert relative(product(after, target), mean) < 1e-6
        balanced = after[target.b].double().T @ after[target.b].double()
        assert relative(after[target.a].double() @ after[target.a].double().T, balanced) < 1e-5
    for name in method.spec.head:
        torch.testing.assert_close(after[name], sum(t[name] for t in trained) / 4)


def test_both_transports_give_the_same_factors_up_to_signs() -> None:
    sketched, sent = fedask(), fedask("method.transport=factor")
    trained = random_factors(sketched, 3)
    first, second = (one_round(m, start(m), trained) for m in (sketched, sent))
    for target in sketched.spec.targets:
        assert relative(product(first, target), product(second, target)) < 1e-6
        for name in (target.a, target.b):
            torch.testing.assert_close(first[name].abs(), second[name].abs(), rtol=1e-3, atol=1e-4)


def test_rounds_without_dp_train_both_and_cut_to_the_rank() -> None:
    method = fedask("privacy=none", "method.sketch_oversampling=28")  # 4 + 28: covers every rank here
    trained = random_factors(method, 3)
    after = one_round(method, start(method), trained)
    for target in method.spec.targets:
        dense = sum(product(t, target) for t in trained) / 3
        u, s, vh = torch.linalg.svd(dense)
        assert relative(product(after, target), (u[:, :4] * s[:4]) @ vh[:4]) < 1e-5
    assert any("rank 4 cuts off" in n for n in method.run.notes)  # type: ignore[attr-defined]


def best_of_rank(dense: Tensor, rank: int) -> tuple[Tensor, float]:
    """The best approximation of that rank, and the share of the norm that it lacks."""
    u, s, vh = torch.linalg.svd(dense)
    return (u[:, :rank] * s[:rank]) @ vh[:rank], float(s[rank:].norm() / s.norm())


@pytest.mark.parametrize("replies", [1, 2, 5])
def test_an_exact_sketch_gives_the_best_rank_r_of_the_mean_product(replies: int) -> None:
    """Eckart-Young against a dense SVD, whatever the number of replies; rank 2 in 32 x 32 leaves room for 5."""
    exact = ["privacy=none", "model.lora.rank=2", "federation.clients=5", "method.sketch=exact"]
    method = fedask(*exact)
    trained = random_factors(method, replies)
    widths: list[int] = []
    original = method.download

    def look(phase: str, state: Arrays, once: bool) -> Payload:
        sent = original(phase, state, once)
        method.check_download(phase, sent)
        if phase == "project":
            widths.extend(v.shape[1] for v in sent.adapter.values())
        return sent

    method.download = look  # type: ignore[method-assign]
    after = one_round(method, start(method), trained)
    assert set(widths) == {2 * replies}  # the rank of the mean product, not the 5 * 2 + 4 of the sketch
    lost = total = 0.0
    for target in method.spec.targets:
        dense = sum(product(t, target) for t in trained) / replies
        best, share = best_of_rank(dense, 2)
        assert relative(product(after, target), best) < 1e-5
        lost, total = lost + (share * float(dense.norm())) ** 2, total + float(dense.square().sum())
    assert method._figures["basis_columns"] == 2 * replies
    assert method._figures["truncation"] == pytest.approx((lost / total) ** 0.5, abs=1e-6)
    fixed = fedask(*exact, "method.sketch=fixed")
    state = one_round(fixed, start(fixed), trained)
    errors = [
        relative(product(state, t), best_of_rank(sum(product(f, t) for f in trained) / replies, 2)[0])
        for t in fixed.spec.targets
    ]
    assert (max(errors) > 0.05) == (replies == 5)  # 2 + 4 columns do not hold ten dimensions


def test_a_basis_that_is_too_wide_or_a_projection_on_another_is_refused() -> None:
    method = fedask(
        "privacy=none", "federation.clients=2", "method.sketch=exact", "method.sketch_oversampling=0"
    )
    good = {f"{t.name}.basis": torch.zeros(t.out, 3) for t in method.spec.targets}
    method.check_download("project", Payload(good))
    first = next(iter(good))
    for wrong in (torch.zeros(32, 9), torch.zeros(32, 0), torch.zeros(31, 3), torch.zeros(96)):
        with pytest.raises(Refusal):
            method.check_download("project", Payload({**good, first: wrong}))
    with pytest.raises(Refusal):
        method.check_download("project", Payload({}))
    one_round(method, start(method), random_factors(method, 2))  # both of rank 4
    reply = {f"{t.name}.projection": torch.zeros(t.inp, 8) for t in method.spec.targets}
    method.check_upload("project", Payload(reply))
    with pytest.raises(Refusal):
        method.check_upload("project", Payload({n: v[:, :7] for n, v in reply.items()}))


def test_only_b_trains_under_dp_and_both_without() -> None:
    for method, names in ((fedask(), "b"), (fedask("privacy=none"), "lora")):
        session = GivenSession(method, {}, 1)
        method.round_number = 1
        method.client("sketch", method.download("sketch", start(method), True), session)
        assert set(session.trained) == {*getattr(method.spec, names), *method.spec.head}
        assert method.trained_numbers == sum(session.model.parameter(n).numel() for n in session.trained)


def test_a_zero_product_keeps_the_factors_alive() -> None:
    method = fedask()
    state = start(method)
    zero = {n: torch.zeros(s) for n, s in method.spec.b.items()}
    after = one_round(method, state, [zero, zero])
    for target in method.spec.targets:
        assert torch.equal(after[target.a], state[target.a])
        assert torch.equal(after[target.b], state[target.b])
    assert any("their product is 0" in n for n in method.run.notes)  # type: ignore[attr-defined]


def test_sigma_split_one_is_fedsvd() -> None:
    method = fedask("method.sigma_split=1")
    after = one_round(method, start(method), random_factors(method, 3))
    for target in method.spec.targets:
        a = after[target.a].double()
        torch.testing.assert_close(a @ a.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5)


def test_omega_changes_with_the_round_unless_it_is_fixed() -> None:
    def sums(*overrides: str) -> list[Tensor]:
        method = fedask(*overrides)
        out = []
        for method.round_number in (1, 2):
            out.append(method.download("sketch", start(method), True).once["omega"])
        return out

    assert not torch.equal(*sums())
    assert torch.equal(*sums("method.omega=fixed"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["privacy=none", "method.transport=factor"], "method.transport = factor"),
        (["privacy=none", "method.clip=W"], "method.clip = W"),
        (["method.sketch=exact"], "method.sketch = exact is not allowed with privacy=dp"),
        (["method.sketch_oversampling=-1"], "at least 0"),
        (["method.sigma_split=1.5"], "method.sigma_split = 1.5"),
        (["method.stage2_dropout=retry"], "method.stage2_dropout = retry"),
    ],
)
def test_impossible_settings_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        fedask(*overrides)


class OneStep(GivenSession):
    """A session that takes one real private step on one row, without noise."""

    def __init__(self, method: FedASK) -> None:
        super().__init__(method, {}, 1)
        config = method.config
        rows = client_examples(config, 0).take(np.array([0]))
        tokens = tokenise(load_tokenizer(config.model), rows, 32)
        self._trainer = Trainer(self.model, tokens, 0, config.train, config.privacy)

    def train(self, trainables: Any, *, lr: float | None = None) -> None:
        self._trainer.train_private(trainables, 1, Noise(1.0, 0.0, make_randomness("fast", None)))


def test_the_clip_bounds_what_it_says(settings: list[str]) -> None:
    """What moves B is (alpha / r) c G A^T, with c = C / ||G|| for G = dl/dB or for G = dl/dW."""
    clip, moved = 1e-3, {}
    small = [f"privacy.clip={clip}", "train.batch_size=1", "train.lr=1", "task.head=frozen"]
    for geometry in ("B", "W"):
        method = fedask(*settings, *small, f"method.clip={geometry}")
        method.round_number = 1
        session = OneStep(method)
        first = method.initial(initial_tensors(method.spec, 0, "frozen"))
        method.client("sketch", method.download("sketch", first, True), session)
        kept = session.recall("factors")
        assert kept is not None
        moved[geometry] = torch.cat([kept[n].flatten() for n in method.spec.b]).double()
    assert float(moved["B"].norm()) == pytest.approx(clip, rel=1e-4)  # from B = 0, one step of rate 1
    cosine = moved["B"] @ moved["W"] / (moved["B"].norm() * moved["W"].norm())
    assert float(cosine) == pytest.approx(1, abs=1e-6)  # the same direction, another length
    assert float(moved["W"].norm()) != pytest.approx(clip, rel=0.05)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "up", "down"), [("sketch", 442_368, 516_096), ("factor", 147_456, 294_912)]
)
def test_numbers_of_plan_and_messages_are_the_papers(
    run: Run, settings: list[str], transport: str, up: int, down: int
) -> None:
    overrides = ["model=roberta_base_random", "method=fedask", f"method.transport={transport}"]
    plan = make_plan(compose([*settings, *overrides])).to_dict()["per_round"]
    assert (plan["upload_numbers"], plan["download_numbers"]) == (up, down)
    small = ["federation.clients=1", "federation.rounds=1", "train.local_steps=1", "train.batch_size=2"]
    rows = ["task.train_rows=8", "task.test_rows=4", "evaluation=none", "privacy.epsilon=50"]
    outcome = run(*overrides, *small, *rows, nodes=1)
    if outcome.error:
        raise outcome.error
    (record,) = outcome.rounds
    assert (record["upload_numbers"], record["download_numbers"]) == (up, down)
    traffic = outcome.json("communication.json")["rounds"][0]["nodes"]["client-0"]
    assert traffic["upload"]["bytes"]["adapter"] == 4 * up
    assert traffic["download"]["bytes"]["adapter"] == 4 * down
    assert traffic["upload"]["numbers"]["head"] == traffic["download"]["numbers"]["head"] == 1538
    assert outcome.json("summary.json")["upload_numbers"] == up


# --- whole runs ----------------------------------------------------------------------------------


def kept_factors(outcome: Outcome, node: str) -> Arrays:
    (file,) = (outcome.path / "nodes" / node / "tensors").glob("factors-*")
    return load_file(file)


def final(outcome: Outcome) -> Arrays:
    (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
    return load_file(file)


def expect_mean_of(outcome: Outcome, nodes: list[str], *, rank: int = 4) -> float:
    """Distance of the final products from the dense mean over the nodes' own factors, cut to the rank."""
    spec = fedask().spec
    state = final(outcome)
    factors = [kept_factors(outcome, n) for n in nodes]
    worst = 0.0
    for target in spec.targets:
        dense = sum(product(f, target) for f in factors) / len(factors)
        u, s, vh = torch.linalg.svd(dense)
        worst = max(worst, relative(product(state, target), (u[:, :rank] * s[:rank]) @ vh[:rank]))
    return worst


EVERYONE = ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize(
    "privacy",
    [
        [],
        ["privacy=none", "method.sketch_oversampling=28"],
        ["privacy=none", "method.sketch=exact", "train.optimizer=adamw", "train.lr=0.02"],
    ],
)
def test_a_real_run_ends_in_the_mean_product(run: Run, privacy: list[str]) -> None:
    outcome = run("method=fedask", *privacy)
    if outcome.error:
        raise outcome.error
    assert [p["name"] for p in outcome.rounds[0]["phases"]] == ["sketch", "project"]
    assert [p["replied"] for p in outcome.rounds[0]["phases"]] == [3, 3]
    assert expect_mean_of(outcome, EVERYONE) < 1e-5
    for record in outcome.rounds:
        assert set(record["method"]) == {"basis_columns", "truncation"}
        assert record["method"]["truncation"] < 1e-6 or privacy  # a common A: rank 4 is all there is
    if "method.sketch=exact" in privacy:
        assert 4 < outcome.rounds[-1]["method"]["basis_columns"] <= 12 < 3 * 4 + 4
        assert outcome.rounds[-1]["method"]["truncation"] > 1e-4
    for node in outcome.json("privacy.json")["nodes"]:
        assert [e["phase"] for e in node["entries"]] == (["sketch"] * 2 if not privacy else [])
    assert outcome.json("summary.json")["status"] == "completed"


def phase_of(message: Message) -> tuple[str, int, str]:
    request = message.content["request"]
    return request["phase"], request["round"], request["node"]


def lose_once(node: str, round_number: int = 2) -> Callable[[Message, Message], Message]:
    """Answer the project phase of one round with a crash of that node."""

    def tamper(message: Message, reply: Message) -> Message:
        if "request" in message.content and phase_of(message) == ("project", round_number, node):
            from flwr.app import Error

            return Message(Error(code=1, reason="gone"), reply_to=message)
        return reply

    return tamper


def test_a_node_lost_between_the_phases_is_left_out_by_a_requery(run: Run) -> None:
    outcome = run("method=fedask", tamper=lose_once("client-1"))
    if outcome.error:
        raise outcome.error
    record = outcome.rounds[1]
    assert [(p["name"], p["sent"], p["replied"]) for p in record["phases"]] == [
        ("sketch", 3, 3),
        ("project", 3, 2),
        ("project", 2, 2),
    ]
    assert not record["void"]
    assert expect_mean_of(outcome, ["client-0", "client-2"]) < 1e-5
    assert expect_mean_of(outcome, EVERYONE) > 1e-2
    nodes = outcome.json("communication.json")["rounds"][1]["nodes"]
    again = nodes["client-0"]["requery"]["numbers"]["adapter"]
    spec = fedask().spec
    assert again == sum(8 * (t.out + t.inp) for t in spec.targets)  # the basis down, the projection up
    assert "requery" not in nodes["client-1"]
    assert (
        nodes["client-0"]["upload"]
        == outcome.json("communication.json")["rounds"][0]["nodes"]["client-0"]["upload"]
    )
    for node in EVERYONE:  # never charged for it
        entries = Ledger.load(outcome.path / "nodes" / node / "ledger.jsonl").entries
        assert [(e.round, e.phase, e.steps) for e in entries] == [(1, "sketch", 2), (2, "sketch", 2)]


def test_accepting_the_loss_uses_the_stale_basis_and_says_how_much_it_misses(run: Run) -> None:
    outcome = run("method=fedask", "method.stage2_dropout=accept", tamper=lose_once("client-1"))
    assert outcome.error is None
    assert [p["name"] for p in outcome.rounds[1]["phases"]] == ["sketch", "project"]
    assert not outcome.rounds[1]["void"]
    assert expect_mean_of(outcome, ["client-0", "client-2"]) > 1e-3
    (note,) = [e["text"] for e in outcome.lines("events.jsonl") if "accepted" in e.get("text", "")]
    assert "the basis misses about" in note


def test_void_leaves_the_state_as_it_was(run: Run) -> None:
    before = run("method=fedask", "federation.rounds=1", "privacy=none")
    outcome = run("method=fedask", "privacy=none", "method.stage2_dropout=void", tamper=lose_once("client-1"))
    assert outcome.error is None
    assert [r["void"] for r in outcome.rounds] == [False, True]
    first, second = final(before), final(outcome)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_a_second_loss_in_the_requery_voids_the_round(run: Run) -> None:
    seen: list[str] = []

    def tamper(message: Message, reply: Message) -> Message:
        if "request" in message.content and phase_of(message)[:2] == ("project", 2):
            seen.append(phase_of(message)[2])
            if (seen.count("client-1") == 1 and seen[-1] == "client-1") or len(seen) == 4:
                return lose_once(seen[-1])(message, reply)
        return reply

    outcome = run("method=fedask", tamper=tamper)
    assert outcome.error is None
    assert [r["void"] for r in outcome.rounds] == [False, True]
    assert [p["replied"] for p in outcome.rounds[1]["phases"]] == [3, 2, 1]


def test_a_node_without_its_factors_says_so_and_is_left_out(run: Run) -> None:
    def forget(message: Message, reply: Message) -> Message:
        if "request" in message.content and phase_of(message) == ("sketch", 2, "client-2"):
            folder = Path(message.content["request"]["store"]) / "client-2" / "tensors"
            for file in folder.glob("factors-*"):
                file.unlink()
        return reply

    outcome = run("method=fedask", tamper=forget)
    assert outcome.error is None
    (failed,) = outcome.rounds[1]["phases"][1]["failed"]
    assert failed["node"] == "client-2"
    assert failed["reason"].startswith("factors-lost")
    assert outcome.rounds[1]["phases"][2]["replied"] == 2


def dies_in_round(number: int) -> Callable[[Message], bool]:
    """Kill the server before it sends anything of a round."""

    def check(message: Message) -> bool:
        if "request" in message.content and phase_of(message)[1] == number:
            raise Killed
        return False

    return check


def test_factors_of_an_earlier_round_are_not_projected(run: Run) -> None:
    """A node that missed the sketch of a round has the last one's factors, which are no use now."""
    outcome = run("method=fedask", "federation.rounds=3", drop=dies_in_round(3))
    sent = [
        m for m in outcome.grid.sent if "request" in m.content and phase_of(m) == ("project", 1, "client-0")
    ]
    request = unpack_request(sent[0].content)
    late = dataclasses.replace(request, round=3, acknowledged=2, met=True)
    failed = unpack_failure(answer_train(pack_request(late), {"partition-id": 0, "num-partitions": 3}))
    assert failed is not None
    assert failed.kind == "factors-lost"


def test_any_number_of_projections_pushes_out_no_reply_that_was_paid_for(run: Run) -> None:
    """Under DP a projection is post-processing: it costs nothing, and nothing is stored for it."""
    outcome = run("method=fedask", "federation.rounds=1")
    sent = [m for m in outcome.grid.sent if "request" in m.content and phase_of(m)[2] == "client-0"]
    sketch_request, project_request = (
        unpack_request(next(m for m in sent if phase_of(m)[0] == p).content) for p in ("sketch", "project")
    )
    node = {"partition-id": 0, "num-partitions": 3}
    for i in range(6):
        turned = {n: v * (i + 2) for n, v in project_request.payload.adapter.items()}
        other = dataclasses.replace(project_request, payload=Payload(turned))
        assert unpack_failure(answer_train(pack_request(other), node)) is None
    assert unpack_failure(answer_train(pack_request(sketch_request), node)) is None  # still stored
    (entry,) = Ledger.load(outcome.path / "nodes" / "client-0" / "ledger.jsonl").entries
    assert entry.phase == "sketch"


def test_another_omega_is_refused_before_anything_is_charged(run: Run) -> None:
    outcome = run("method=fedask", "federation.rounds=2", drop=dies_in_round(2))
    sent = [
        m for m in outcome.grid.sent if "request" in m.content and phase_of(m) == ("sketch", 1, "client-0")
    ]
    request = unpack_request(sent[0].content)
    for once in ({}, {"omega": torch.tensor([1, 2], dtype=torch.uint32)}):
        payload = Payload(request.payload.adapter, request.payload.head, once)
        wrong = dataclasses.replace(request, round=2, payload=payload)
        failed = unpack_failure(answer_train(pack_request(wrong), {"partition-id": 0, "num-partitions": 3}))
        assert failed is not None
        assert (failed.kind, failed.uncharged) == ("omega", True)
