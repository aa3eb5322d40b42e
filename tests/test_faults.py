"""What goes wrong at a node or on the way: refused by name, nothing lost, and the run ends as the policy says."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from tests.conftest import Outcome, write_table

Run = Callable[..., Outcome]


def asks(message: Message, *, round_number: int | None = None, node: str | None = None) -> bool:
    """Whether a message is a training request, of that round and to that node."""
    request = message.content["request"]
    return (
        message.metadata.message_type == "train"
        and round_number in (None, request["round"])
        and node in (None, request["node"])
    )


def tampering(change: Callable[[RecordDict], None], **which: Any) -> Callable[[Message, Message], Message]:
    """Change the reply to the requests that :func:`asks` selects."""

    def tamper(message: Message, reply: Message) -> Message:
        if asks(message, **which):
            change(reply.content)
        return reply

    return tamper


def put_nan(content: RecordDict) -> None:
    name, array = next(iter(content["adapter"].items()))
    values = array.numpy().copy()
    values.flat[0] = math.nan
    content["adapter"][name] = Array(values)


def cut_shape(content: RecordDict) -> None:
    name, array = next(iter(content["adapter"].items()))
    content["adapter"][name] = Array(array.numpy()[:-1].copy())


def drop_array(content: RecordDict) -> None:
    arrays = dict(content["adapter"].items())
    arrays.popitem()
    content["adapter"] = ArrayRecord(arrays)


def set_field(record: str, name: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        kind = MetricRecord if record == "metrics" else ConfigRecord
        content[record] = kind({**dict(content[record]), name: value})

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put_nan, "non-finite"),
        (cut_shape, "shape"),
        (drop_array, "shape"),
        (set_field("reply", "config_hash", "x"), "config-hash"),
        (set_field("reply", "code_hash", "x"), "code-hash"),
        (set_field("reply", "request", "x"), "mismatch"),
        (set_field("reply", "node", "client-0"), "mismatch"),
        (set_field("metrics", "examples", 0), "zero-rows"),
        (set_field("metrics", "examples", 10**9), "plan"),
        (set_field("metrics", "steps", 10**6), "plan"),
        (set_field("metrics", "steps", 0), "plan"),
        (set_field("metrics", "steps", -1), "plan"),
        (set_field("reply", "flags", "x"), "malformed"),
        (set_field("reply", "flags", ["row 17: chest pain"]), "malformed"),
        (set_field("reply", "flags", ["no-past-half"] * 9), "malformed"),
        (lambda content: content.pop("adapter"), "malformed"),
    ],
)
def test_a_wrong_reply_is_refused_by_name_and_the_round_goes_on(
    run: Run, change: Callable[[RecordDict], None], reason: str
) -> None:
    outcome = run(
        "method=ffa_lora", "privacy=none", tamper=tampering(change, round_number=2, node="client-1")
    )
    assert outcome.error is None
    first, second = outcome.rounds
    assert first["phases"][0]["failed"] == []
    (failed,) = second["phases"][0]["failed"]
    assert failed["node"] == "client-1"
    assert failed["reason"].startswith(reason)
    assert second["phases"][0]["replied"] == 2
    assert not second["void"]
    assert outcome.json("summary.json")["failures"][0]["node"] == "client-1"
    assert math.isfinite(second["eval"]["loss"])


@pytest.mark.parametrize(
    "change",
    [
        set_field("metrics", "sigma", 1e6),
        set_field("metrics", "sigma", math.nan),
        set_field("metrics", "sigma", math.inf),
        set_field("metrics", "q", 1e-6),
        set_field("metrics", "steps", 0),
        set_field("metrics", "steps", -1),
    ],
)
def test_a_node_cannot_make_its_spending_look_less(run: Run, change: Callable[[RecordDict], None]) -> None:
    outcome = run("method=ffa_lora", tamper=tampering(change, round_number=2, node="client-1"))
    assert outcome.error is None
    (failed,) = outcome.rounds[1]["phases"][0]["failed"]
    assert failed["reason"].startswith("plan")
    nodes = outcome.json("privacy.json")["nodes"]
    assert len({n["epsilon"] for n in nodes}) == 1
    assert all(n["steps"] == 4 for n in nodes)


def test_a_score_that_fails_costs_the_score_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from server_app.evaluation import Evaluator

    def explode(self: object, *_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Evaluator, "__call__", explode)
    outcome = run("method=ffa_lora")
    assert outcome.error is None
    assert [r["eval"] for r in outcome.rounds] == [None, None]
    assert (outcome.path / "adapter" / "adapter_model.safetensors").is_file()


def test_empty_draws_alone_with_diagnostics_lose_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase whose every draw is empty has no loss; it is paid for and must be answered."""
    import numpy as np

    from client_app import trainer

    monkeypatch.setattr(trainer, "poisson_draw", lambda *_: np.zeros(0, dtype=np.int64))
    outcome = run("method=ffa_lora", "privacy.diagnostics=true")
    assert outcome.error is None
    assert all(r["phases"][0]["replied"] == 3 for r in outcome.rounds)
    assert all(r["train_loss"] is None for r in outcome.rounds)


def test_a_diverged_run_is_refused_as_not_finite(run: Run) -> None:
    outcome = run("method=fedavg", "privacy=none", "train.lr=1e30", "train.head_lr=1e30")
    assert "every round was void" in str(outcome.error)
    kinds = {f["reason"].partition(":")[0] for f in outcome.json("summary.json")["failures"]}
    assert kinds == {"non-finite"}


def test_a_refused_reply_changes_nothing(run: Run) -> None:
    """The aggregate with a refused third reply is the aggregate of the other two."""
    from safetensors.torch import load_file

    spoilt = run("method=ffa_lora", "privacy=none", tamper=tampering(put_nan, node="client-2"))
    gone = run("method=ffa_lora", "privacy=none", crash=lambda m: asks(m, node="client-2"))
    first, second = (load_file(o.path / "checkpoints" / "round-00002.safetensors") for o in (spoilt, gone))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_flowers_error_text_goes_nowhere(run: Run) -> None:
    outcome = run("method=ffa_lora", crash=lambda m: asks(m, node="client-0"))
    assert outcome.error is None
    assert outcome.rounds[0]["phases"][0]["failed"] == [
        {"node": "client-0", "reason": "flower: Flower reports error code 2"}
    ]
    for file in outcome.path.rglob("*.json*"):
        assert "secret" not in file.read_text()


def test_an_exception_of_a_client_crosses_as_its_kind_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from client_app import trainer

    def explode(self: object, *_: object, **__: object) -> None:
        raise ZeroDivisionError("secret row text")

    monkeypatch.setattr(trainer.Trainer, "train_private", explode)
    outcome = run("method=ffa_lora")
    assert outcome.error is not None
    reasons = {f["reason"] for f in outcome.rounds[0]["phases"][0]["failed"]}
    assert reasons == {"error: ZeroDivisionError; the node's own log has more"}


def test_all_clients_failing_ends_in_a_clear_error_with_everything_recorded(run: Run) -> None:
    outcome = run("method=ffa_lora", crash=asks)
    assert "every round was void" in str(outcome.error)
    assert [r["void"] for r in outcome.rounds] == [True, True]
    summary = outcome.json("summary.json")
    assert summary["status"] == "failed"
    assert "every round was void" in summary["reason"]
    assert "every round was void" in outcome.json("failure.json")["reason"]
    # The nodes may have trained before they broke, so the requests count in full.
    privacy = outcome.json("privacy.json")
    assert all(node["steps"] == 4 for node in privacy["nodes"])


def test_a_void_round_leaves_the_model_as_it_was(run: Run) -> None:
    from safetensors.torch import load_file

    short = run("method=ffa_lora", "privacy=none", "federation.rounds=1")
    long = run("method=ffa_lora", "privacy=none", crash=lambda m: asks(m, round_number=2))
    assert [r["void"] for r in long.rounds] == [False, True]
    assert long.rounds[0]["eval"] == long.rounds[1]["eval"] == short.rounds[0]["eval"]
    first = load_file(short.path / "checkpoints" / "round-00001.safetensors")
    second = load_file(long.path / "checkpoints" / "round-00002.safetensors")
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_too_few_replies_make_a_void_round(run: Run) -> None:
    outcome = run(
        "method=ffa_lora",
        "federation.min_replies=3",
        crash=lambda m: asks(m, round_number=1, node="client-2"),
    )
    assert [r["void"] for r in outcome.rounds] == [True, False]
    # Those who did train in the void round have spent: 2 rounds x 2 steps.
    spent = {n["node"]: n["steps"] for n in outcome.json("privacy.json")["nodes"]}
    assert spent == {"client-0": 4, "client-1": 4, "client-2": 4}


def test_every_client_reports_zero_rows(run: Run) -> None:
    outcome = run(
        "method=ffa_lora",
        "privacy=none",
        tamper=tampering(set_field("metrics", "examples", 0), round_number=1),
    )
    assert [r["void"] for r in outcome.rounds] == [True, False]
    assert {f["reason"] for f in outcome.rounds[0]["phases"][0]["failed"]} == {
        "zero-rows: the node trained on no rows"
    }


def test_a_lost_message_ends_with_the_timeout(run: Run) -> None:
    outcome = run("method=ffa_lora", "federation.timeout=0.5", drop=lambda m: asks(m, node="client-1"))
    assert outcome.error is None
    assert outcome.rounds[0]["phases"][0]["failed"] == [
        {"node": "client-1", "reason": "timeout: no reply within 0.5 s"}
    ]


def test_a_client_with_fewer_rows_than_a_batch(run: Run, tmp_path: Path) -> None:
    """b > n: every row at every step (q = 1), the divisor stays b."""
    for client, rows in enumerate((60, 60, 6)):
        write_table(tmp_path / f"{client}.csv", rows, seed=client)
    test = write_table(tmp_path / "test.csv", 20, seed=9)
    outcome = run(
        "method=ffa_lora",
        f"task.path='{tmp_path}/{{client}}.csv'",
        f"task.test_path={test}",
        "task.test_rows=null",
    )
    assert outcome.error is None
    entries = {n["node"]: n["entries"][0]["q"] for n in outcome.json("privacy.json")["nodes"]}
    assert entries == {"client-0": 16 / 60, "client-1": 16 / 60, "client-2": 1.0}
    assert any("only 6 rows" in w for w in outcome.json("privacy.json")["warnings"])


@pytest.mark.parametrize("method", [["method=ffa_lora"], ["method=fedhsip", "method.warmup_rounds=2"]])
def test_a_node_that_lost_its_store_stays_refused_under_dp_and_is_noted_without(
    run: Run, method: list[str]
) -> None:
    def lose(message: Message, reply: Message) -> Message:
        if asks(message, round_number=2, node="client-1"):
            shutil.rmtree(Path(message.content["request"]["store"]) / "client-1")
        return reply

    private = run(*method, "federation.rounds=4", tamper=lose)
    assert private.error is None
    for record in private.rounds[2:]:
        (failed,) = record["phases"][0]["failed"]
        assert failed["node"] == "client-1"
        assert failed["reason"].startswith("store-lost")
    assert not (private.path / "nodes" / "client-1" / "ledger.jsonl").exists()  # no fresh ledger
    spent = {n["node"]: n["steps"] for n in private.json("privacy.json")["nodes"]}
    assert spent == {"client-0": 8, "client-1": 4, "client-2": 8}
    plain = run(*method, "federation.rounds=4", "privacy=none", tamper=lose)
    assert plain.rounds[2]["phases"][0]["failed"] == []
    notes = [e["text"] for e in plain.lines("events.jsonl") if e["event"] == "note"]
    assert "client-1 lost its store and starts afresh" in notes


def test_a_lost_projection_rule_is_sent_again(run: Run) -> None:
    def lose(message: Message, reply: Message) -> Message:
        if asks(message, round_number=2, node="client-1"):
            folder = Path(message.content["request"]["store"]) / "client-1" / "tensors"
            shutil.rmtree(folder)
            folder.mkdir()
        return reply

    outcome = run("method=fedhsip", "method.warmup_rounds=1", "federation.rounds=3", tamper=lose)
    assert outcome.error is None
    assert outcome.rounds[2]["phases"][0]["failed"] == []
    nodes = outcome.json("communication.json")["rounds"][2]["nodes"]
    once = {n: t["download"]["numbers"]["once"] for n, t in nodes.items()}
    assert once == {"client-0": 32, "client-1": 32, "client-2": 32}  # the digest alone
    assert nodes["client-1"]["requery"]["numbers"]["once"] == 1024 + 128 + 32
    assert "requery" not in nodes["client-0"]
    assert outcome.json("privacy.json")["nodes"][1]["steps"] == 6  # asking again costs nothing


def test_a_missing_node_is_waited_for_and_named(run: Run, quick_wait: None) -> None:
    outcome = run("method=ffa_lora", nodes=2)
    assert "2 of 3 nodes connected" in str(outcome.error)
    assert "num-supernodes=3" in outcome.json("failure.json")["reason"]


def test_bad_settings_stop_a_run_before_any_message(run: Run) -> None:
    outcome = run("method=ffa_lora", "privacy.epsilon=-1")
    assert "privacy.epsilon = -1" in outcome.json("failure.json")["reason"]
    assert outcome.grid.sent == []


def test_a_node_without_rows_takes_no_part(run: Run) -> None:
    def no_rows(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.describe" and message.metadata.dst_node_id == 1002:
            set_field("description", "examples", 0)(reply.content)
        return reply

    outcome = run("method=ffa_lora", "federation.sampled=2", tamper=no_rows)
    assert outcome.error is None
    assert {n["node"] for n in outcome.json("privacy.json")["nodes"]} == {"client-0", "client-1"}


def test_two_nodes_of_one_name_are_refused(run: Run) -> None:
    configs = [{"partition-id": i, "num-partitions": 3, "name": "north"} for i in range(3)]
    outcome = run("method=ffa_lora", node_configs=configs)
    assert "two nodes have this name" in str(outcome.error)


def test_one_node_that_cannot_start_is_named_and_the_others_train(run: Run) -> None:
    configs: list[dict[str, Any]] = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    configs[2] = {"name": "south", "data-path": "/no/such/table.csv", "store": "/tmp/privet-never-made"}
    outcome = run("method=ffa_lora", node_configs=configs)
    assert outcome.error is None
    assert {n["node"] for n in outcome.json("privacy.json")["nodes"]} == {"client-0", "client-1"}
    (failed,) = outcome.json("summary.json")["failures"]
    assert (failed["round"], failed["phase"], failed["node"]) == (0, "describe", "south")
    assert "/no/such" not in failed["reason"]  # local paths stay in the node's own log


def test_a_directory_that_holds_a_run_is_not_used_again(run: Run) -> None:
    first = run("method=ffa_lora")
    before = (first.path / "summary.json").read_text()
    second = run("method=ffa_lora", path=first.path)
    assert "holds a run already" in str(second.error)
    assert (first.path / "summary.json").read_text() == before


# --- finite replies that lead nowhere ------------------------------------------------------------


def fill(phase: str, value: float, node: str = "client-1") -> Callable[[Message, Message], Message]:
    """Replace every number of one node's uploads in round 1."""

    def change(message: Message, reply: Message) -> Message:
        if asks(message, round_number=1, node=node) and message.content["request"]["phase"] == phase:
            for name, array in list(reply.content["adapter"].items()):
                reply.content["adapter"][name] = Array(np.full(array.shape, value, dtype=np.float32))
        return reply

    return change


@pytest.mark.parametrize("value", [3e38, -2e12])
def test_a_huge_reply_is_refused_by_name(run: Run, value: float) -> None:
    """Finite in float32, and still no model: one such reply would make all later rounds overflow."""
    outcome = run("method=fedask", "federation.rounds=2", tamper=fill("sketch", value))
    assert outcome.error is None
    (failed,) = outcome.rounds[0]["phases"][0]["failed"]
    assert failed["node"] == "client-1"
    assert failed["reason"].startswith("magnitude")
    assert outcome.rounds[1]["phases"][0]["failed"] == []


@pytest.mark.parametrize("field", ["train_loss", "grad_norm"])
def test_under_dp_a_reply_that_shows_a_loss_or_a_norm_is_refused(run: Run, field: str) -> None:
    def change(message: Message, reply: Message) -> Message:
        if asks(message, round_number=1, node="client-1"):
            reply.content["metrics"][field] = 3.25
        return reply

    outcome = run("method=ffa_lora", tamper=change)
    assert outcome.error is None
    (failed,) = outcome.rounds[0]["phases"][0]["failed"]
    assert failed["reason"].startswith("whitelist")
    assert outcome.rounds[0]["train_loss"] is None


def test_numbers_of_the_summary_are_those_of_a_round_that_counts(run: Run) -> None:
    def crash(message: Message) -> bool:
        return asks(message, round_number=2) and message.content["request"]["phase"] == "project"

    outcome = run("method=fedask", crash=crash)
    assert [r["void"] for r in outcome.rounds] == [False, True]
    first = outcome.json("communication.json")["rounds"][0]["nodes"]["client-0"]
    summary = outcome.json("summary.json")
    assert summary["upload_numbers"] == first["upload"]["numbers"]["adapter"]
    assert summary["download_numbers"] == first["download"]["numbers"]["adapter"]


def test_impossible_losses_are_refused_without_dp_too(run: Run) -> None:
    def change(message: Message, reply: Message) -> Message:
        if asks(message, round_number=1, node="client-1"):
            reply.content["metrics"]["train_loss"] = 1e308
        return reply

    outcome = run("method=fedavg", "privacy=none", tamper=change)
    assert outcome.error is None
    (failed,) = outcome.rounds[0]["phases"][0]["failed"]
    assert failed["reason"].startswith("malformed")
