"""Scores on the clients: whose model, on which rows, and what may leave."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from safetensors.torch import load_file

from client_app.node import answer_evaluate
from client_app.trainer import Trainer
from privet.adapters import adapter_spec, load_model, load_tokenizer
from privet.config import Config, compose
from privet.data.collate import tokenise
from privet.data.holdout import split_holdout
from privet.data.partition import client_examples
from privet.data.tasks import Examples, load_test
from privet.wire import Failed, Payload, Request, code_hash, pack_request, unpack_failure, unpack_scores
from strategies.rounds import spread
from tests.conftest import Outcome, state_of, write_table

Run = Callable[..., Outcome]
NODES = ("client-0", "client-1", "client-2")


def accuracy(config: Config, values: dict[str, torch.Tensor], examples: Examples) -> float:
    """Score row by row, without padding."""
    model = load_model(config)
    model.load(values)
    tokenizer = load_tokenizer(config.model)
    hits = 0
    for i in range(len(examples)):
        rows = tokenise(tokenizer, examples.take(np.array([i])), config.model.max_length)
        ids = torch.from_numpy(rows.ids[0])[None]
        with torch.no_grad():
            logits = model.module(input_ids=ids, attention_mask=torch.ones_like(ids))
        hits += int(logits.argmax()) == int(rows.labels[0])
    return hits / len(examples)


def test_without_dp_both_models_are_scored_on_each_nodes_held_out_rows(run: Run, settings: list[str]) -> None:
    overrides = ["method=fedrand", "privacy=none", "evaluation=both", "holdout=0.2"]
    outcome = run(*overrides)
    if outcome.error:
        raise outcome.error
    scores = outcome.rounds[-1]["eval_clients"]
    assert set(scores["nodes"]) == set(NODES)
    assert scores["failed"] == []
    config = compose([*settings, *overrides])
    state = state_of(outcome)
    for i, node in enumerate(NODES):
        _, held = split_holdout(config, client_examples(config, i))
        assert len(held) == 10  # 20 % of 50
        (file,) = (outcome.path / "nodes" / node / "tensors").glob("factors-*")
        own = {**state, **load_file(file)}
        assert scores["nodes"][node]["global.accuracy"] == pytest.approx(accuracy(config, state, held))
        assert scores["nodes"][node]["personal.accuracy"] == pytest.approx(accuracy(config, own, held))
    each = [scores["nodes"][n]["personal.accuracy"] for n in NODES]
    assert scores["personal"]["accuracy"] == pytest.approx(statistics.fmean(each))
    assert scores["personal"]["accuracy_std"] == pytest.approx(statistics.stdev(each))
    assert scores["personal"]["nodes"] == 3
    assert outcome.rounds[-1]["eval"]["examples"] == 30  # the server's own, on the public rows
    assert outcome.json("summary.json")["client_metrics"]["personal"] == scores["personal"]
    traffic = outcome.json("communication.json")
    assert traffic["rounds"][0]["nodes"]["client-0"]["evaluate"]["numbers"]["adapter"] == 1024
    assert traffic["totals"]["evaluate_numbers_adapter"] == 2 * 3 * 1024
    assert outcome.rounds[0]["download_numbers"] == 3 * 1024  # counted apart


def test_held_out_rows_do_not_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    class Counting(Trainer):
        def __init__(self, model: Any, rows: Any, *rest: Any) -> None:
            trained.append(len(rows))
            super().__init__(model, rows, *rest)

    monkeypatch.setattr("client_app.node.Trainer", Counting)
    outcome = run("method=fedavg", "privacy=none", "evaluation=client", "holdout=0.2")
    assert outcome.error is None
    assert {n["examples"] for n in outcome.json("privacy.json")["nodes"]} == {40}
    assert set(trained) == {40}
    assert outcome.rounds[0]["eval"] is None
    assert outcome.rounds[0]["eval_clients"]["personal"] is None  # FedAvg has no model of a node's own


def test_under_dp_only_public_rows_are_scored(run: Run, settings: list[str]) -> None:
    overrides = ["method=fedrand", "evaluation=client"]
    outcome = run(*overrides)
    if outcome.error:
        raise outcome.error
    config = compose([*settings, *overrides])
    public = load_test(config.task)
    scores = outcome.rounds[-1]["eval_clients"]
    state = state_of(outcome)
    for node in NODES:
        (file,) = (outcome.path / "nodes" / node / "tensors").glob("factors-*")
        assert scores["nodes"][node]["global.accuracy"] == pytest.approx(accuracy(config, state, public))
        own = {**state, **load_file(file)}
        assert scores["nodes"][node]["personal.accuracy"] == pytest.approx(accuracy(config, own, public))
    assert {n["examples"] for n in outcome.json("privacy.json")["nodes"]} == {50}  # nothing is held out
    for node in outcome.json("privacy.json")["nodes"]:
        assert [e["round"] for e in node["entries"]] == [1, 2]  # and nothing is charged for it


def test_local_heads_are_scored_at_last(run: Run, settings: list[str]) -> None:
    overrides = ["method=ffa_lora", "task.head=local", "evaluation=both", "privacy=none"]
    outcome = run(*overrides)
    if outcome.error:
        raise outcome.error
    scores = outcome.rounds[-1]["eval_clients"]
    assert scores["global"] is None  # the server has no head
    assert outcome.rounds[-1]["eval"] is None
    config = compose([*settings, *overrides])
    (file,) = (outcome.path / "nodes" / "client-1" / "tensors").glob("head-*")
    _, held = split_holdout(config, client_examples(config, 1))
    expected = accuracy(config, {**state_of(outcome), **load_file(file)}, held)
    assert scores["nodes"]["client-1"]["personal.accuracy"] == pytest.approx(expected)


def test_a_node_that_cannot_score_is_named_and_costs_nothing(run: Run) -> None:
    def crash(message: Any) -> bool:
        request = message.content.get("request", {"phase": "", "node": ""})
        return (request["phase"], request["node"]) == ("evaluate", "client-1")

    outcome = run("method=fedavg", "evaluation=client", crash=crash)
    assert outcome.error is None
    scores = outcome.rounds[-1]["eval_clients"]
    assert [f["node"] for f in scores["failed"]] == ["client-1"]
    assert set(scores["nodes"]) == {"client-0", "client-2"}
    assert not outcome.rounds[-1]["void"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"global.accuracy": float("nan")}, "non-finite"),
        ({"row 17: chest pain": 1.0}, "malformed"),
        ({"global.accuracy": 55.0}, "malformed"),
        ({"global.loss": 1.79e308}, "malformed"),
        ({"global.accuracy": 1}, ""),
    ],
)
def test_scores_that_are_none_are_refused_by_name(run: Run, change: dict[str, float], kind: str) -> None:
    def tamper(message: Any, reply: Any) -> Any:
        if message.content.get("request", {"phase": ""})["phase"] == "evaluate":
            reply.content["values"] = MetricRecord(dict(change))
        return reply

    outcome = run("method=probe", "evaluation=client", "federation.rounds=1", tamper=tamper)
    assert outcome.error is None
    scores = outcome.rounds[0]["eval_clients"]
    assert {f["reason"].partition(":")[0] for f in scores["failed"]} == ({kind} if kind else set())
    assert len(scores["nodes"]) == (0 if kind else 3)


# --- a real node ---------------------------------------------------------------------------------


def ask(settings: list[str], *overrides: str, node: str = "north") -> Request:
    config = compose([*settings, "method=fedavg", "evaluation=client", *overrides])
    spec = adapter_spec(config)
    shapes = {**spec.lora}
    return Request(
        run="run-1",
        round=1,
        phase="evaluate",
        node=node,
        config=config.to_json(),
        config_hash=config.hash,
        code_hash=code_hash(),
        store="",
        sigma=1.0 if config.privacy.private else 0.0,
        planned_steps=4,
        payload=Payload(
            {n: torch.zeros(s) for n, s in shapes.items()}, {n: torch.ones(s) for n, s in spec.head.items()}
        ),
    )


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Any]:
    path = write_table(tmp_path / "own.csv", 40, seed=4)
    return {"name": "north", "data-path": str(path), "store": str(tmp_path / "store")}


def failed(request: Request, node: dict[str, Any]) -> Failed:
    failure = unpack_failure(answer_evaluate(pack_request(request), node))
    assert failure is not None
    return failure


def test_a_real_node_scores_dp_runs_on_what_its_owner_calls_public_only(
    settings: list[str], node: dict[str, Any], tmp_path: Path
) -> None:
    """A test set that the server names could be any file of the node."""
    request = ask(settings, f"task.test_path={node['data-path']}", "task.test_rows=null")
    assert failed(request, node).kind == "no-public-rows"
    public = write_table(tmp_path / "public.csv", 14, seed=8)
    scores = unpack_scores(answer_evaluate(pack_request(request), {**node, "public-path": str(public)}))
    assert scores.examples == 14
    assert set(scores.values) == {"global.accuracy", "global.loss", "global.f1"}


def test_a_real_node_does_not_score_for_runs_without_dp_unless_its_owner_allows_it(
    settings: list[str], node: dict[str, Any]
) -> None:
    request = ask(settings, "privacy=none")
    assert failed(request, node).kind == "not-private"
    scores = unpack_scores(answer_evaluate(pack_request(request), {**node, "allow-non-private": True}))
    assert scores.examples == 4  # its held-out tenth


@pytest.mark.parametrize("part", ["adapter", "head"])
def test_foreign_arrays_are_refused(settings: list[str], node: dict[str, Any], part: str) -> None:
    import dataclasses

    request = ask(settings, "privacy=none")
    arrays = {**getattr(request.payload, part), "another": torch.zeros(2)}
    payload = dataclasses.replace(request.payload, **{part: arrays})
    wrong = dataclasses.replace(request, payload=payload)
    assert failed(wrong, {**node, "allow-non-private": True}).kind == "shape"


def test_only_requests_for_scores_are_answered_with_scores(settings: list[str], node: dict[str, Any]) -> None:
    import dataclasses

    wrong = dataclasses.replace(ask(settings, "privacy=none"), phase="train")
    assert failed(wrong, {**node, "allow-non-private": True}).kind == "phase"


# --- pieces --------------------------------------------------------------------------------------


def test_spread_is_mean_and_sample_deviation_over_nodes() -> None:
    scores = {
        "a": {"global.accuracy": 0.5, "personal.accuracy": 0.75},
        "b": {"global.accuracy": 0.7},
        "c": {"global.accuracy": 0.9},
    }
    found = spread(scores, "global")
    assert found == {"accuracy": pytest.approx(0.7), "accuracy_std": pytest.approx(0.2), "nodes": 3}
    assert spread(scores, "personal") == {"accuracy": 0.75, "accuracy_std": 0.0, "nodes": 1}
    assert spread({"a": {"global.loss": 1.0}}, "personal") is None


def test_what_is_held_out_follows_the_rows_and_not_their_order(settings: list[str]) -> None:
    config = compose([*settings, "method=fedavg", "privacy=none", "evaluation=client", "holdout=0.25"])
    examples = client_examples(config, 0)
    train, held = split_holdout(config, examples)
    assert (len(train), len(held)) == (37, 13)
    assert sorted(train.texts + held.texts) == sorted(examples.texts)
    turned = examples.take(np.arange(len(examples))[::-1])
    assert set(split_holdout(config, turned)[1].texts) == set(held.texts)
    one = examples.take(np.array([0]))
    assert [len(part) for part in split_holdout(config, one)] == [1, 0]
    private = compose([*settings, "method=fedavg", "evaluation=client"])
    assert [len(part) for part in split_holdout(private, examples)] == [50, 0]
