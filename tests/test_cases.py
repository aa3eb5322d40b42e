"""Faults that users of Flower, Opacus and PEFT reported in public, tried here, each as a whole kind.

Every case has a test of its own below, on the real parts; what another test covers already is named here and not
repeated. ``test_the_map_is_true`` checks that each named test exists and that no case is left out.

case | also covered by
1  | tests/privacy/test_engine.py::test_gradient_checkpointing
1  | tests/privacy/test_engine.py::test_a_checkpoint_that_cuts_the_gradient_is_an_error
2  | tests/privacy/test_sampling.py::test_draws_of_a_tiny_client_may_be_empty
2  | tests/test_faults.py::test_empty_draws_alone_with_diagnostics_lose_nothing
3  | tests/client_app/test_trainer.py::test_noise_has_sigma_c_over_b_in_every_coordinate_also_on_empty_draws
4  | tests/privacy/test_accounting.py::test_twenty_rounds_of_one_accountant
4  | tests/privacy/test_ledger.py::test_spent_is_one_accountant_over_all_steps_of_the_run
5  | tests/test_rules.py::test_epsilon_grows_exactly_when_a_client_takes_part
6  | tests/test_rules.py::test_epsilon_is_one_accountants_over_all_steps_and_the_largest_of_the_nodes
7  | tests/test_config.py::test_wrong_settings_give_one_helpful_line
8  | tests/privacy/test_engine.py::test_detach_restores_the_model_and_attach_works_again
8  | tests/client_app/test_node.py::test_rows_that_change_during_a_run_are_refused
9  | tests/test_faults.py::test_a_client_with_fewer_rows_than_a_batch
9  | tests/privacy/test_engine.py::test_the_divisor_is_the_expected_batch
10 | tests/test_rules.py::test_budgets_at_both_ends_give_a_number_within_them
10 | tests/privacy/test_accounting.py::test_extreme_mechanisms_end_in_a_number
10 | tests/privacy/test_accounting.py::test_a_budget_below_the_floor_is_one_line
11 | tests/test_faults.py::test_every_client_reports_zero_rows
12 | tests/test_faults.py::test_a_wrong_reply_is_refused_by_name_and_the_round_goes_on
12 | tests/test_faults.py::test_a_diverged_run_is_refused_as_not_finite
13 | tests/test_faults.py::test_all_clients_failing_ends_in_a_clear_error_with_everything_recorded
13 | tests/test_faults.py::test_an_exception_of_a_client_crosses_as_its_kind_only
14 | tests/client_app/test_node.py::test_a_node_started_with_nothing_names_the_missing_key
15 | tests/data/test_own_data.py::test_the_nodes_of_the_page_read_their_tables
16 | tests/system/test_privet_run.py::test_privet_run_trains_through_flower_and_leaves_everything
17 | tests/test_devices.py::test_a_device_that_is_not_here_is_refused
17 | tests/client_app/test_trainer.py::test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else
18 | tests/test_wire.py::test_request_survives_the_wire_exactly
18 | tests/client_app/test_store.py::test_tensors_come_back_bit_by_bit
"""

from __future__ import annotations

import ast
import csv
import gc
import importlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message, RecordDict
from safetensors.torch import load_file
from torch import Tensor, nn

from privet.config import compose
from privet.privacy.accounting import Step, epsilon
from privet.privacy.ledger import MECHANISM, Entry, Ledger
from tests.conftest import Outcome, state_of, write_table
from tests.test_faults import asks, set_field, tampering

Run = Callable[..., Outcome]
Nodes = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[1]


# --- what several cases need ---------------------------------------------------------------------


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def downloads(outcome: Outcome, round_number: int, node: str) -> dict[str, Tensor]:
    """The arrays with which the server asked a node: its state before that round."""
    (message,) = (m for m in outcome.grid.sent if asks(m, round_number=round_number, node=node))
    records = [message.content[part] for part in ("adapter", "head")]
    return {n: torch.from_numpy(a.numpy().copy()) for record in records for n, a in record.items()}


def failures(outcome: Outcome) -> list[tuple[int, str, str]]:
    """(round, node, kind of refusal) of the summary."""
    return [
        (f["round"], f["node"], f["reason"].partition(":")[0])
        for f in outcome.json("summary.json")["failures"]
    ]


def own_tables(folder: Path, rows: dict[str, int], **keys: Any) -> Nodes:
    """Real nodes of these names, each with a table and a store of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        {
            "name": name,
            "data-path": str(write_table(folder / f"{name}.csv", count, seed=i)),
            "store": str(folder / "stores" / name),
            **{key.replace("_", "-"): value for key, value in keys.items()},
        }
        for i, (name, count) in enumerate(rows.items())
    ]


def one_file_a_client(folder: Path, *rows: int) -> list[str]:
    """Settings of a simulation in which client i has a file of `rows[i]` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for client, count in enumerate(rows):
        write_table(folder / f"{client}.csv", count, seed=client)
    test = write_table(folder / "test.csv", 20, seed=99)
    return [
        f"task.path='{folder}/{{client}}.csv'",
        f"task.test_path={test}",
        "task.test_rows=null",
        f"federation.clients={len(rows)}",
    ]


def ledger_of(store: Path) -> Ledger | None:
    path = store / "ledger.jsonl"
    return Ledger.load(path) if path.exists() else None


@pytest.fixture
def noise_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """(sigma, divisor) of every noised sum that any client makes."""
    from privet.privacy.engine import GradientEngine

    seen: list[tuple[float, int]] = []
    real = GradientEngine.private_sum

    def spy(self: GradientEngine, rng: Any, sigma: float, expected_batch: int) -> dict[str, Tensor]:
        seen.append((sigma, expected_batch))
        return real(self, rng, sigma, expected_batch)

    monkeypatch.setattr(GradientEngine, "private_sum", spy)
    return seen


# --- the map -------------------------------------------------------------------------------------


def test_the_map_is_true() -> None:
    assert __doc__ is not None
    rows = re.findall(r"^(\d+) +\| (\S+)::(\S+)$", __doc__, re.MULTILINE)
    assert len(rows) == __doc__.count("::")
    for _, file, name in rows:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, (file, name)
    here = {int(m[1]) for name in globals() if (m := re.match(r"test_case_(\d\d)_", name))}
    assert here == {int(number) for number, _, _ in rows} == set(range(1, 19))


# --- privacy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_case_01_checkpointing_changes_no_gradient_or_is_refused(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reentrant: bool,
) -> None:
    """Opacus 732: DP with gradient checkpointing lost gradients silently."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from client_app import node

    settings = ["method=fedavg", "privacy.randomness=seeded", "federation.rounds=1"]
    plain = run(*settings, path=tmp_path / "plain" / "same")
    real, passes = node.load_model, []

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        backbone = model.module.get_submodule("backbone")
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for layer in backbone.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = True  # it checkpoints in training only; its dropouts stay off
                layer.register_forward_pre_hook(lambda *_: passes.append(1))
        return model

    monkeypatch.setattr(node, "load_model", checkpointed)
    outcome = run(*settings, path=tmp_path / "checkpointed" / "same")
    assert passes
    if outcome.error is None:
        want, got = state_of(plain), state_of(outcome)
        assert all(torch.allclose(got[n], want[n], rtol=1e-5, atol=1e-7) for n in want)
    else:
        assert reentrant  # here the gradient really stops, and nothing may be made of what is left
        assert {f[1:] for f in failures(outcome)} == {(f"client-{i}", "config") for i in range(3)}
        assert "got no gradient" in caplog.text


def test_case_02_tiny_client_with_empty_draws_finishes_and_pays_for_each_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise_steps: list[tuple[float, int]]
) -> None:
    """Opacus 676, 743, 522: empty Poisson draws, the first one included, crashed or were not counted."""
    from client_app import trainer

    real, begun = trainer.poisson_draw, []

    def first_is_empty(rows: int, q: float, rng: Any) -> Any:
        if not any(r is rng for r in begun):  # a phase has a source of its own
            begun.append(rng)
            return np.zeros(0, dtype=np.int64)
        return real(rows, q, rng)

    monkeypatch.setattr(trainer, "poisson_draw", first_is_empty)
    outcome = run(
        "method=ffa_lora",
        *one_file_a_client(tmp_path / "data", 6, 7, 6),
        "train.batch_size=1",
        "train.local_steps=null",
        "train.local_epochs=10",
        "federation.rounds=1",
    )
    assert outcome.error is None
    assert outcome.rounds[0]["phases"][0]["replied"] == 3
    for client, steps in (("client-0", 60), ("client-1", 70), ("client-2", 60)):
        store = outcome.path / "nodes" / client
        (line,) = (store / "log.jsonl").read_text().splitlines()
        drawn = json.loads(line)["drawn"]
        assert len(drawn) == steps
        assert drawn[0] == 0
        assert 0 in drawn[1:]
        assert max(drawn) > 0
        ledger = ledger_of(store)
        assert ledger is not None
        assert [e.steps for e in ledger.entries] == [steps]
    assert len(noise_steps) == 190
    assert all(sigma > 0 and divisor == 1 for sigma, divisor in noise_steps)
    assert {n["steps"] for n in outcome.json("privacy.json")["nodes"]} == {60, 70}


@pytest.mark.parametrize("all_empty", [False, True])
def test_case_03_one_row_pays_for_all_its_steps_and_empty_draws_move_the_weights(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_empty: bool
) -> None:
    """FL4Health PR 114: steps with an empty draw were skipped, neither noised nor charged."""
    from client_app import trainer

    if all_empty:
        monkeypatch.setattr(trainer, "poisson_draw", lambda *_: np.zeros(0, dtype=np.int64))
    nodes = own_tables(tmp_path / "own", {"a": 1}, public_examples=10)
    settings = ["method=ffa_lora", "federation.clients=1", "federation.rounds=1"]
    settings += ["train.batch_size=1", "train.local_steps=50"]
    outcome = run(*settings, nodes=1, node_configs=nodes)
    assert outcome.error is None
    ledger = ledger_of(tmp_path / "own" / "stores" / "a")
    assert ledger is not None
    assert [(e.steps, e.q) for e in ledger.entries] == [(50, 0.1)]
    (node,) = outcome.json("privacy.json")["nodes"]
    assert node["steps"] == 50
    assert node["epsilon"] == pytest.approx(epsilon([Step(0.1, ledger.entries[0].sigma, 50)], 1e-5, "rdp"))
    before, after = downloads(outcome, 1, "a"), state_of(outcome)
    assert all(bool((after[n] != before[n]).all()) for n in before)


def test_case_04_twenty_rounds_are_one_accountants_on_the_server_and_on_the_node(tmp_path: Path) -> None:
    """Flower 2216: each round started a new accountant, so 20 rounds read 2.61 where 6.32 was spent."""
    from privet.plan import required_sigma
    from privet.privacy.spending import Spending

    config = compose(["privacy.epsilon=50", "privacy.delta=1e-5"])
    server = Spending(config.privacy)
    node = Ledger(tmp_path / "ledger.jsonl", delta=1e-5, max_epsilon=None, node="north")
    for number in range(1, 21):
        step = Step(0.016, 0.8, 62)
        server.add("north", number, "train", step)
        entry = Entry(
            run="r",
            method="fedavg",
            round=number,
            phase="train",
            mechanism=MECHANISM,
            q=step.q,
            sigma=step.sigma,
            clip=1.0,
            steps=step.steps,
            declared=8000,
            request=f"{number:064x}",
            time="2026-01-01T00:00:00+00:00",
        )
        node.charge(entry, run_epsilon=50.0, accountant="rdp")
        if number == 1:
            assert server.epsilon("north") == pytest.approx(2.61, abs=0.005)
    assert server.epsilon("north") == pytest.approx(6.32, abs=0.005)
    assert node.spent("r", "rdp") == server.epsilon("north") == server.largest()
    # The other way round: that budget over those steps asks for that noise.
    asked = compose(["privacy.epsilon=6.3242"])
    assert required_sigma(asked, 0.016, 20 * 62) == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=ffa_lora", "federation.rounds=4", "federation.sampled=1"],
        ["method=fedhsip", "method.warmup_rounds=1", "federation.rounds=3", "federation.sampled=2"],
    ],
)
def test_case_05_a_clients_epsilon_grows_when_it_took_part_and_never_otherwise(
    run: Run, overrides: list[str]
) -> None:
    """PFLlib 175: epsilon per client and round stood still, or grew for clients that slept."""
    names = [f"client-{i}" for i in range(3)]
    before: dict[int, dict[str, float]] = {}
    asked: dict[int, set[str]] = {}

    def spent(store: Path) -> dict[str, float]:
        ledgers = {n: ledger_of(store / n) for n in names}
        return {n: 0.0 if k is None else k.spent(k.runs[0], "rdp") for n, k in ledgers.items()}

    def watch(message: Message) -> bool:
        if asks(message):
            request = message.content["request"]
            before.setdefault(request["round"], spent(Path(request["store"])))
            asked.setdefault(request["round"], set()).add(request["node"])
        return False

    def spoil(message: Message, reply: Message) -> Message:
        """A reply that is refused was paid for all the same."""
        if asks(message, round_number=2):
            set_field("reply", "request", "x")(reply.content)
        return reply

    outcome = run(*overrides, crash=watch, tamper=spoil)
    assert outcome.error is None
    assert outcome.rounds[1]["void"]
    path = [before[number] for number in sorted(before)] + [spent(outcome.path / "nodes")]
    for number, (then, now) in enumerate(itertools.pairwise(path), start=1):
        for name in names:
            assert (now[name] > then[name]) == (name in asked[number]), (number, name)
            assert now[name] >= then[name]
        assert outcome.rounds[number - 1]["epsilon_max"] == pytest.approx(max(now.values()), rel=1e-9)
    shown = {n["node"]: n["epsilon"] for n in outcome.json("privacy.json")["nodes"]}
    assert shown == pytest.approx(path[-1], rel=1e-9)


def test_case_06_disjoint_clients_give_a_maximum_and_a_list_never_a_sum(run: Run, tmp_path: Path) -> None:
    """Flower 605: the epsilons of clients with disjoint data were added up."""
    files = one_file_a_client(tmp_path / "data", 20, 30, 40, 60, 90)
    outcome = run("method=ffa_lora", *files, "federation.sampled=2", "federation.rounds=3", nodes=5)
    assert outcome.error is None
    privacy = outcome.json("privacy.json")
    each = {n["node"]: n["epsilon"] for n in privacy["nodes"]}
    assert set(each) == {f"client-{i}" for i in range(5)}
    assert len(set(each.values())) > 2  # they took part differently often and have different rows
    for node in privacy["nodes"]:
        steps = [Step(e["q"], e["sigma"], e["steps"]) for e in node["entries"]]
        assert node["epsilon"] == pytest.approx(epsilon(steps, 1e-5, "rdp"), rel=1e-12)
    largest = max(each.values())
    assert privacy["max_epsilon"] == outcome.json("summary.json")["epsilon"] == largest <= 6.0
    assert outcome.rounds[-1]["epsilon_max"] == largest < sum(each.values())


@pytest.mark.parametrize(
    "setting",
    [
        "train.sampler=weighted",
        "+train.sampler=weighted",
        "train.class_weights=[1,5]",
        "task.class_weights=balanced",
        "privacy.sampling=weighted",
        "privacy.poisson=false",
        "federation.partition.oversample=true",
    ],
)
def test_case_07_weighted_sampling_is_refused_in_one_line(
    run: Run, settings: list[str], capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    """Opacus 813: a weighted sampler was quietly replaced, or voided the amplification."""
    from privet.cli import main

    assert main(["check", *settings, setting]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert printed.out == ""
    assert setting.removeprefix("+").partition("=")[0] in line
    assert "unknown key" in line or "every key exists already" in line
    outcome = run("method=ffa_lora", setting)
    assert outcome.grid.sent == []  # refused before any message
    assert outcome.json("failure.json")["reason"] in line


def hooked_modules() -> int:
    """Living modules with a hook of anybody's."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [m for m in gc.get_objects() if isinstance(m, nn.Module)]
    return sum(any(getattr(m, kind, None) for kind in kinds) for m in modules)


def test_case_08_a_worker_that_lives_for_three_rounds_hooks_nothing_twice(
    run: Run, tmp_path: Path, noise_steps: list[tuple[float, int]]
) -> None:
    """Opacus 608: a model that stayed in its process was given its hooks twice."""
    settings = ["method=fedavg", "privacy.randomness=seeded", "federation.rounds=3"]
    outcomes, before = [], hooked_modules()
    for folder in ("first", "second"):
        outcomes.append(run(*settings, path=tmp_path / folder / "same"))
        assert outcomes[-1].error is None
        assert [r["phases"][0]["failed"] for r in outcomes[-1].rounds] == [[], [], []]
        assert len(noise_steps) == 3 * 3 * 2 * len(outcomes)  # rounds, clients, steps
        assert hooked_modules() <= before
    # What the process has done before decides nothing.
    assert same(state_of(outcomes[0]), state_of(outcomes[1]))


def grow(path: Path) -> None:
    write_table(path, 80, seed=1)


def grow_where_no_task_looks(path: Path) -> None:
    with path.open("a") as stream:
        stream.write("a new text,maybe,site0\n")


def shrink(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))


def edit(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], "another text,yes,site0\n"]))


@pytest.mark.parametrize(
    ("change", "declared"),
    [
        (grow, None),
        (grow_where_no_task_looks, None),
        (shrink, None),
        (edit, None),
        (grow, 40),
        (grow_where_no_task_looks, 40),
    ],
)
def test_case_08_data_that_change_are_refused_within_a_run_and_followed_by_the_next(
    run: Run, tmp_path: Path, change: Callable[[Path], None], declared: int | None
) -> None:
    """Opacus 688: the sampling rate stayed that of the data a client once had."""
    nodes = own_tables(tmp_path / "own", {"a": 60, "b": 50, "c": 60})
    if declared:
        nodes[1]["public-examples"] = declared
    table = Path(nodes[1]["data-path"])

    def between(message: Message, reply: Message) -> Message:
        if asks(message, round_number=1, node="b"):
            change(table)
        return reply

    first = run("method=ffa_lora", node_configs=nodes, tamper=between)
    assert first.error is None
    hidden = (
        change is grow_where_no_task_looks and declared is not None
    )  # neither rows nor count have changed
    assert failures(first) == ([] if hidden else [(2, "b", "changed")])
    steps = {n["node"]: n["steps"] for n in first.json("privacy.json")["nodes"]}
    assert steps == {"a": 4, "b": 4 if hidden else 2, "c": 4}

    second = run("method=ffa_lora", node_configs=nodes)
    assert second.error is None
    assert failures(second) == []
    rows = declared or len(table.read_text().splitlines()) - 1
    ledger = ledger_of(tmp_path / "own" / "stores" / "b")
    assert ledger is not None
    old, new = ({(e.q, e.sigma) for e in ledger.for_run(r)} for r in ledger.runs)
    ((q, sigma),) = new
    assert q == 16 / rows
    assert (old == new) == (rows == (declared or 50))  # the noise belongs to the rate
    assert epsilon([Step(q, sigma, 4)], 1e-5, "rdp") <= 6.0
    assert len(ledger.for_run(ledger.runs[1])) == 2


@pytest.mark.parametrize("rows", [1, 5, 9, 10])
def test_case_09_few_rows_are_warned_of_by_a_stated_rule_and_the_divisor_stays(
    run: Run, tmp_path: Path, settings: list[str], noise_steps: list[tuple[float, int]], rows: int
) -> None:
    """Opacus 571: a client with fewer rows than a batch trained with another divisor, or not at all."""
    from server_app.plan import make_plan

    files = one_file_a_client(tmp_path / "data", 60, rows)
    plan = make_plan(compose([*settings, "method=ffa_lora", *files]))
    assert any(f"only {rows} rows" in w for w in plan.warnings) == (rows < 10)
    assert plan.nodes["client-1"].q == 1.0
    if rows in (5, 9):
        outcome = run("method=ffa_lora", *files, "federation.rounds=1", nodes=2)
        assert outcome.error is None
        assert {divisor for _, divisor in noise_steps} == {16}  # of the small client too
        assert any(f"only {rows} rows" in w for w in outcome.json("privacy.json")["warnings"])
        assert {n["steps"] for n in outcome.json("privacy.json")["nodes"]} == {2}


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("target", [50.0, 0.01, 1e-4, 1e5])
def test_case_10_odd_budgets_end_in_a_number_or_a_line_before_round_1(
    run: Run, settings: list[str], capsys: pytest.CaptureFixture[str], accountant: str, target: float
) -> None:
    """Opacus 601, 604: a large target never ended, a small one raised deep inside."""
    from privet.cli import main

    odd = [f"privacy.epsilon={target}", f"privacy.accountant={accountant}"]
    code = main(["check", "--json", *settings, "method=ffa_lora", *odd])
    printed = capsys.readouterr()
    if code == 0:
        clients = json.loads(printed.out)["clients"]
        assert clients
        for client in clients:
            assert 0 < client["epsilon"] <= target
            assert 0 < client["sigma"] < math.inf
        return
    assert (code, target) == (2, 1e-4)  # below what the accountants can express at this delta
    (line,) = printed.err.strip().splitlines()
    assert f"privacy.epsilon = {target:g}" in line
    if accountant == "prv":
        return  # the way of the line is the same
    outcome = run("method=ffa_lora", *odd)
    assert not any(asks(m) for m in outcome.grid.sent)
    assert outcome.json("failure.json")["reason"] in line


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("q", [1.0, 0.3, 0.016, 1e-4])
def test_case_10_little_noise_has_an_epsilon(q: float, accountant: str) -> None:
    """Opacus 601, 604: at sigma 0.3 the PRV accountant raised."""
    few, many = (epsilon([Step(q, 0.3, steps)], 1e-5, accountant) for steps in (1, 100))
    assert 0 <= few < many < math.inf


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["privacy=dp", "privacy=none"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_case_11_zero_rows_from_everyone_void_the_round_and_leave_the_model(
    run: Run, privacy: str, weighting: str
) -> None:
    """Flower 7708, 7693, 7645: a total weight of zero divided by zero."""
    outcome = run(
        "method=fedavg",
        privacy,
        f"federation.weighting={weighting}",
        "federation.rounds=3",
        tamper=tampering(set_field("metrics", "examples", 0), round_number=2),
    )
    assert outcome.error is None
    assert [r["void"] for r in outcome.rounds] == [False, True, False]
    assert failures(outcome) == [(2, f"client-{i}", "zero-rows") for i in range(3)]
    assert same(downloads(outcome, 2, "client-0"), downloads(outcome, 3, "client-0"))
    assert not same(downloads(outcome, 1, "client-0"), downloads(outcome, 2, "client-0"))
    assert all(bool(v.isfinite().all()) for v in state_of(outcome).values())


def test_case_11_nodes_that_declare_no_rows_end_the_run_by_name(run: Run) -> None:
    """Flower 7708: without DP a node without a usable row says so itself; nobody's row count is guessed."""

    def no_rows(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.describe":
            set_field("description", "examples", 0)(reply.content)
        return reply

    outcome = run("method=ffa_lora", tamper=no_rows)
    assert not any(asks(m) for m in outcome.grid.sent)
    assert "client-0: the node has no rows" in outcome.json("failure.json")["reason"]
    absent = outcome.json("summary.json")["failures"]
    assert [(f["node"], f["reason"]) for f in absent] == [
        (f"client-{i}", "zero-rows: the node has no rows") for i in range(3)
    ]


def test_case_11_tables_without_a_usable_row_void_every_round(run: Run, tmp_path: Path) -> None:
    """Flower 7645: with real tables, in which the task selects nothing."""
    nodes = own_tables(tmp_path / "own", {"a": 20, "b": 20, "c": 20}, allow_non_private=True, labels="x,y")
    outcome = run("method=ffa_lora", "privacy=none", node_configs=nodes)
    assert "every round was void" in str(outcome.error)
    assert failures(outcome) == [(r, n, "zero-rows") for r in (1, 2) for n in "abc"]


def put(part: str, value: float, where: int) -> Callable[[RecordDict], None]:
    """Spoil one number of the reply's adapter or head."""

    def change(content: RecordDict) -> None:
        name, array = list(content[part].items())[-1]
        values = array.numpy().copy()
        values.flat[where] = value
        content[part][name] = Array(values)

    return change


@pytest.mark.parametrize(
    ("part", "value", "where"),
    [("adapter", math.nan, 0), ("adapter", -math.inf, -1), ("head", math.inf, 0), ("head", math.nan, -1)],
)
def test_case_12_a_reply_that_is_not_finite_is_refused_and_three_are_aggregated(
    run: Run, part: str, value: float, where: int
) -> None:
    """Flower 1060, 2342: one client's NaN made the whole model NaN."""
    replies: list[tuple[int, dict[str, Tensor]]] = []
    spoil = tampering(put(part, value, where), round_number=2, node="client-2")

    def watch(message: Message, reply: Message) -> Message:
        if asks(message, round_number=2) and not asks(message, node="client-2"):
            arrays = [a for p in ("adapter", "head") for a in reply.content[p].items()]
            values = {n: torch.from_numpy(a.numpy().copy()).double() for n, a in arrays}
            replies.append((reply.content["metrics"]["examples"], values))
        return spoil(message, reply)

    outcome = run(
        "method=fedavg", "privacy=none", "federation.clients=4", "federation.rounds=3", nodes=4, tamper=watch
    )
    assert outcome.error is None
    assert failures(outcome) == [(2, "client-2", "non-finite")]
    phase = outcome.rounds[1]["phases"][0]
    assert (phase["sent"], phase["replied"], outcome.rounds[1]["void"]) == (4, 3, False)
    total = sum(rows for rows, _ in replies)
    for name, got in downloads(outcome, 3, "client-0").items():
        mean = sum(values[name] * rows / total for rows, values in replies)
        torch.testing.assert_close(got.double(), mean, rtol=1e-5, atol=1e-8)
    assert outcome.json("summary.json")["status"] == "completed"
    assert all(math.isfinite(r["eval"]["loss"]) for r in outcome.rounds)


@pytest.mark.parametrize("min_replies", [1, 3])
@pytest.mark.parametrize("at_flower", [False, True])
def test_case_13_one_raises_then_all_and_the_run_ends_as_the_policy_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, min_replies: int, at_flower: bool
) -> None:
    """Flower 4346, 1400: an exception in a client hung the run, or ended it without a word of which client."""
    from client_app import node

    real = node.answer_train

    def raises(request: Any) -> bool:
        return request["round"] == 3 or (request["round"], request["node"]) == (2, "client-1")

    def answer(content: RecordDict, *rest: Any) -> RecordDict:
        if raises(content["request"]):
            raise RuntimeError("secret row text")
        return real(content, *rest)

    crash: dict[str, Any] = {}
    if at_flower:
        crash["crash"] = lambda m: asks(m) and raises(m.content["request"])
    else:
        monkeypatch.setattr(node, "answer_train", answer)
    outcome = run("method=ffa_lora", "federation.rounds=3", f"federation.min_replies={min_replies}", **crash)
    assert outcome.error is None  # the run has a round that counted
    void = [False, min_replies == 3, True]
    assert [r["void"] for r in outcome.rounds] == void
    summary = outcome.json("summary.json")
    assert summary["status"] == "completed"
    assert summary["void_rounds"] == [i + 1 for i, v in enumerate(void) if v]
    kind = "flower" if at_flower else "error"
    assert failures(outcome) == [(2, "client-1", kind), *((3, f"client-{i}", kind) for i in range(3))]
    for failed in summary["failures"]:
        assert "\n" not in failed["reason"]
        assert ("error code 2" if at_flower else "RuntimeError") in failed["reason"]
    for file in outcome.path.glob("*.json*"):
        assert "secret" not in file.read_text()
    # Who raised may have trained: it counts in full.
    assert {n["steps"] for n in outcome.json("privacy.json")["nodes"]} == {6}


def test_case_14_a_node_with_only_a_data_path_takes_part(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower 4120: keys that only a simulation sets (partition-id) were expected of real nodes."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("platform.node", lambda: "ward-7")
    node = {"data-path": str(write_table(tmp_path / "own.csv", 40))}
    outcome = run("method=ffa_lora", "federation.clients=1", nodes=1, node_configs=[node])
    assert outcome.error is None
    assert outcome.rounds[-1]["phases"][0]["replied"] == 1
    assert (tmp_path / "home" / ".privet" / "nodes" / "ward-7" / "ledger.jsonl").is_file()


def test_case_14_nodes_with_nothing_are_told_the_missing_keys(run: Run, tmp_path: Path) -> None:
    """Flower 4120: a KeyError, where the missing key should be named."""
    good = own_tables(tmp_path / "own", {"a": 40, "b": 40})
    outcome = run("method=ffa_lora", node_configs=[*good, {}])
    assert outcome.error is None
    (failed,) = outcome.json("summary.json")["failures"]
    assert failed["reason"].startswith("node-config: ")
    assert "--node-config needs data-path (and name)" in failed["reason"]
    assert {n["node"] for n in outcome.json("privacy.json")["nodes"]} == {"a", "b"}
    outcome = run("method=ffa_lora", node_configs=[{}, {}, {}])
    assert "--node-config needs data-path (and name)" in outcome.json("failure.json")["reason"]
    assert not any(asks(m) for m in outcome.grid.sent)


# --- own tables ----------------------------------------------------------------------------------

NAMES: dict[str, tuple[str, str, str, dict[str, str], dict[str, Any]]] = {
    # name: suffix, text column, label column, label values, what its node says
    "north": ("csv", "text", "label", {"no": "no", "yes": "yes"}, {}),
    "south": (
        "tsv",
        "free text",
        "Urgent?",
        {"no": "0", "yes": "1"},
        {"text-column": "free text", "label-column": "Urgent?", "labels": "0,1"},
    ),
    "west": (
        "jsonl",
        "body",
        "label",
        {"no": "later, or never", "yes": "now"},
        {"text-column": "body", "labels": '["later, or never", "now"]'},
    ),
}


def three_tables(folder: Path, *, mapped: bool) -> Nodes:
    """Three nodes whose tables hold the same rows, under names of their own or under the task's."""
    folder.mkdir(parents=True)
    nodes: Nodes = []
    for seed, (name, (suffix, text, label, values, keys)) in enumerate(NAMES.items()):
        plain = write_table(folder / f"{name}-plain.csv", 40, seed=seed)
        with plain.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        path = folder / f"{name}.{suffix}"
        # The names that the task uses stand there too, over other things.
        records = [
            {text: r["text"], label: values[r["label"]]}
            | ({"text": "nothing"} if text != "text" else {})
            | ({"label": "no"} if label != "label" else {})
            for r in rows
        ]
        if suffix == "jsonl":
            path.write_text("".join(json.dumps(r) + "\n" for r in records))
        else:
            with path.open("w", newline="") as stream:
                out = csv.DictWriter(stream, records[0].keys(), delimiter={"csv": ",", "tsv": "\t"}[suffix])
                out.writeheader()
                out.writerows(records)
        nodes.append(
            {
                "name": name,
                "store": str(folder / "stores" / name),
                "allow-non-private": True,
                **({"data-path": str(path), **keys} if mapped else {"data-path": str(plain)}),
            }
        )
    return nodes


def test_case_15_three_tables_of_other_names_are_one_federation(run: Run, tmp_path: Path) -> None:
    """Flower 3076, PR 3212: every client had to hold the same columns, from a hub."""
    settings = ["method=fedavg", "privacy=none"]
    mapped = run(*settings, node_configs=three_tables(tmp_path / "mapped", mapped=True))
    plain = run(*settings, node_configs=three_tables(tmp_path / "plain", mapped=False))
    for outcome in (mapped, plain):
        assert outcome.error is None
        assert failures(outcome) == []
    assert same(state_of(mapped), state_of(plain))
    private = run("method=ffa_lora", node_configs=three_tables(tmp_path / "private", mapped=True))
    assert private.error is None
    assert {n["examples"] for n in private.json("privacy.json")["nodes"]} == {40}


@pytest.mark.parametrize(
    ("keys", "kind", "shown"),
    [
        ({"text-column": "Befund"}, "data", "the node's own log has the reason"),
        ({"label-column": "Befund"}, "data", "the node's own log has the reason"),
        ({"labels": "Befund"}, "config", "labels of this node are 1 values and task.labels 2"),
        ({"labels": "0,1,Befund"}, "config", "labels of this node are 3 values and task.labels 2"),
        ({"labels": "Befund,Befund"}, "node-config", "a value stands twice"),
        ({"labels": '["Befund", 0.5]'}, "node-config", "labels is not allowed"),
        ({"labels": '["Befund"'}, "node-config", "no JSON list"),
        ({"label_column": "Befund"}, "node-config", "did you mean 'label-column'"),
    ],
)
def test_case_15_names_that_do_not_fit_are_refused_in_a_line_that_tells_nothing(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], kind: str, shown: str
) -> None:
    """Flower PR 3212: a wrong column name surfaced as an exception that quoted the table."""
    nodes = three_tables(tmp_path / "own", mapped=True)
    nodes[1] |= keys
    outcome = run("method=ffa_lora", "federation.rounds=1", node_configs=nodes)
    assert outcome.error is None
    (failed,) = outcome.json("summary.json")["failures"]
    assert failed["reason"].startswith(f"{kind}: ")
    assert shown in failed["reason"]
    for file in outcome.path.glob("*.json*"):
        assert "Befund" not in file.read_text()
        assert str(tmp_path / "own") not in file.read_text()
    if kind == "data":
        assert "unknown column 'Befund'" in caplog.text  # the owner can read it


def test_case_15_what_a_node_declares_is_the_same_for_every_task(tmp_path: Path, settings: list[str]) -> None:
    """Flower 3076: with names of its own, too, a node's answer is no count query."""
    from client_app.node import answer_describe
    from privet.wire import Request, code_hash, pack_request, unpack_description, unpack_failure

    def answers(node: dict[str, Any], *overrides: str) -> int:
        config = compose([*settings, *overrides])
        facts = {"config": config.to_json(), "config_hash": config.hash, "code_hash": code_hash()}
        request = Request(
            run="r", round=0, phase="describe", node="", store="", sigma=0.0, planned_steps=0, **facts
        )
        content = answer_describe(pack_request(request), node)
        assert unpack_failure(content) is None, (node["name"], overrides)
        return unpack_description(content).examples

    for node in three_tables(tmp_path / "own", mapped=True):
        tasks: list[list[str]] = [
            ["task.labels=[no,yes]"],
            ["task.labels=[x,y]"],
            ["task.minimum={label: 3}"],
        ]
        if "text-column" in node:  # the owner's word, whatever the server says
            tasks += [["task.text_column=label"], ["task.text_column=nowhere"]]
        if node["data-path"].endswith("jsonl"):  # only rows say which keys there are, so no key is an error
            tasks += [["task.pair_column=diagnosis"], ["task.minimum={diagnosis: 1}"]]
        assert {answers(node, *task) for task in tasks} == {40}


# --- Flower, GPUs, numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("set_before", [None, "0", ""])
def test_case_16_privet_run_never_installs_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_before: str | None
) -> None:
    """FLIP PR 772: Flower's run-time installation fetched gigabytes at every run."""
    from flwr.common.constant import FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION as SWITCH

    from privet.launcher import Signals, _Launch

    monkeypatch.delenv(SWITCH, raising=False)
    if set_before is not None:
        monkeypatch.setenv(SWITCH, set_before)
    (tmp_path / "logs").mkdir()
    launch = _Launch(tmp_path, Signals(), lambda: None, None)
    try:
        # A process that it starts, as it starts the SuperLink.
        code = "import os, sys; print(dict(os.environ))"
        process = launch._start([sys.executable, "-c", code], tmp_path / "logs" / "x.log")
        assert process.wait(timeout=30) == 0
    finally:
        launch.close()
    seen = ast.literal_eval((tmp_path / "logs" / "x.log").read_text())
    # By Flower's own reading of what that process was given.
    monkeypatch.setenv(SWITCH, seen[SWITCH])
    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert superlink._runtime_dependency_install_default() is False


def test_case_16_the_readme_says_what_plain_flwr_run_does() -> None:
    """FLIP PR 772: nobody was told."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    block = readme.partition("## With Flower's own command")[2].partition("## ")[0]
    assert "export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run ." in block
    assert "installs the app's dependencies into a fresh environment on every run" in block.replace("*", "")
    assert "`privet run` never does" in block


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


@pytest.mark.parametrize(
    ("visible", "overrides", "code", "words"),
    [
        (0, ["federation.gpus_per_client=1"], 2, "no GPU is visible; set it to 0"),
        (0, ["federation.gpus_per_client=0.01"], 2, "no GPU is visible; set it to 0"),
        (0, ["train.device=cuda"], 2, "use train.device=auto"),
        (1, ["train.device=cuda:1"], 2, "use train.device=auto"),
        (1, ["federation.gpus_per_client=2"], 2, "set at most 1"),
        (1, [], 0, "unless federation.gpus_per_client is above 0"),
        (1, ["federation.gpus_per_client=0.5"], 0, ""),  # two at a time, four in turns
        (1, ["train.device=cpu"], 0, ""),
    ],
)
def test_case_17_gpus_and_shares_that_do_not_match_are_told_what_to_set(
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    visible: int,
    overrides: list[str],
    code: int,
    words: str,
) -> None:
    """Flower 5855, 1942: clients waited for ever for a GPU that was not there, or trained without a word."""
    from privet.cli import main

    gpus(monkeypatch, visible)
    assert main(["check", "--json", *settings, "method=ffa_lora", "federation.clients=4", *overrides]) == code
    printed = capsys.readouterr()
    if code:
        (line,) = printed.err.strip().splitlines()
        assert words in line
    else:
        remarks = [w for w in json.loads(printed.out)["warnings"] if "GPU" in w]
        assert len(remarks) == bool(words)
        assert words in "".join(remarks)


def test_case_17_clients_that_find_no_room_are_named_and_the_others_count(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower 5855: four clients on a GPU sized for two."""
    from client_app import node

    real, loads = node.load_model, itertools.count()

    def small_gpu(*args: Any, **kwargs: Any) -> Any:
        if next(loads) % 4 >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return real(*args, **kwargs)

    monkeypatch.setattr(node, "load_model", small_gpu)
    outcome = run("method=ffa_lora", "federation.clients=4", "federation.rounds=1", nodes=4)
    assert outcome.error is None
    assert outcome.rounds[0]["phases"][0]["replied"] == 2
    assert [f[1] for f in failures(outcome)] == ["client-2", "client-3"]
    for failure in outcome.json("summary.json")["failures"]:
        assert "OutOfMemoryError" in failure["reason"]
        assert "federation.gpus_per_client" in failure["reason"]  # what to set


def as_proto(content: RecordDict) -> RecordDict:
    """Through the bytes of Flower's protobuf form."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as Proto

    return recorddict_from_proto(Proto.FromString(recorddict_to_proto(content).SerializeToString()))


def as_objects(content: RecordDict) -> RecordDict:
    """Through the byte objects in which Flower carries a message between processes."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    contents = {key: value.deflate() for key, value in get_all_nested_objects(content).items()}
    again = inflate_object_from_contents(content.object_id, contents)
    assert isinstance(again, RecordDict)
    return again


def odd_arrays() -> Iterator[tuple[str, Tensor]]:
    """Every type that travels in every shape that has gone wrong somewhere."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.uint16, torch.uint32):
        floats = torch.arange(24, dtype=torch.float32).reshape(4, 6) * (
            0.37 if dtype.is_floating_point else 1
        )
        base = floats.to(dtype)
        shapes = {
            "plain": base,
            "scalar": base[1, 1].clone(),
            "view": base[1, 1],
            "one": base[:1, 0],
            "empty": base[:0, 0],
            "no-rows": base[:0],
            "no-columns": base[:, :0],
            "transposed": base.t(),
            "strided": base[::2, 1::3],
            "expanded": base[:, :1].expand(4, 5),
        }
        yield from ((f"{str(dtype).removeprefix('torch.')}.{name}", value) for name, value in shapes.items())
        if dtype.is_floating_point:
            limits = torch.finfo(dtype)
            edge = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, limits.eps]
            yield f"{dtype}.edges", torch.tensor(edge, dtype=dtype)
    yield "tracked", nn.Parameter(torch.ones(2, 3)) * 2


@pytest.mark.parametrize("way", [as_proto, as_objects])
def test_case_18_arrays_have_their_values_and_shapes_on_the_other_side(
    way: Callable[[RecordDict], RecordDict],
) -> None:
    """PyTorch 110285, Flower 4344: bfloat16 has no NumPy type; 0-d tensors came back with a dimension."""
    from privet.wire import (
        PARTS,
        Payload,
        Reply,
        Request,
        pack_reply,
        pack_request,
        unpack_reply,
        unpack_request,
    )

    arrays = dict(odd_arrays())
    reply = Reply("n", "f", "h", "c", 100, 5, 0.1, 1.25, payload=Payload(adapter=arrays, head=arrays))
    got = unpack_reply(way(pack_reply(reply)))
    request = Request("r", 1, "train", "n", "{}", "h", "c", "", 1.0, 2, payload=Payload(once=arrays))
    asked = unpack_request(way(pack_request(request)))
    assert asked.fingerprint == request.fingerprint
    pairs = [(got.payload.adapter, arrays), (got.payload.head, arrays), (asked.payload.once, arrays)]
    for received, sent in pairs:
        assert list(received) == list(sent)
        for name, value in sent.items():
            back = received[name]
            wide = torch.float32 if value.is_floating_point() else value.dtype
            assert back.dtype == wide, name
            assert back.shape == value.shape, name
            assert torch.equal(back.to(value.dtype), value), name  # exactly: the wider type holds every value
            assert back.is_contiguous(), name
            assert not back.requires_grad, name
    numbers = sum(v.numel() for v in arrays.values())
    assert (
        reply.payload.numbers() == got.payload.numbers() == {"adapter": numbers, "head": numbers, "once": 0}
    )
    assert reply.payload.bytes() == got.payload.bytes()
    assert set(PARTS) == {"adapter", "head", "once"}


def test_case_18_a_bfloat16_base_gives_an_adapter_that_crosses_and_loads(run: Run) -> None:
    """PyTorch 110285: through a whole run, every reply sent as Flower's bytes."""

    def wire(_: Message, reply: Message) -> Message:
        return Message(as_objects(reply.content), reply_to=_)

    outcome = run("method=fedavg", "train.dtype=bfloat16", tamper=wire)
    assert outcome.error is None
    assert failures(outcome) == []
    adapter = load_file(outcome.path / "adapter" / "adapter_model.safetensors")
    for values in (adapter, state_of(outcome)):
        assert {v.dtype for v in values.values()} == {torch.float32}
        assert all(bool(v.isfinite().all()) for v in values.values())
