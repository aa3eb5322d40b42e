"""What a node's owner has set goes before what a run asks for, in every message and before anything is charged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from client_app.node import answer_describe, answer_evaluate, answer_train
from privet.adapters import adapter_spec, initial_tensors
from privet.config import Config, compose
from privet.plan import required_sigma
from privet.wire import Payload, Request, code_hash, pack_request, unpack_description, unpack_failure
from tests.conftest import write_table

ROWS = 40
Answer = Callable[[RecordDict, dict[str, Any]], RecordDict]


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Any]:
    table = write_table(tmp_path / "own.csv", ROWS)
    return {"name": "north", "data-path": str(table), "store": str(tmp_path / "store")}


@pytest.fixture
def config(settings: list[str]) -> Config:
    return compose([*settings, "method=ffa_lora", "privacy.epsilon=4", "privacy.clip=0.5"])


def request(config: Config, phase: str = "train") -> Request:
    spec = adapter_spec(config)
    start = initial_tensors(spec, config.seed, config.task.head)
    planned = config.train.steps(ROWS) * config.federation.rounds
    return Request(
        run="run-1",
        round=1,
        phase=phase,
        node="north",
        config=config.to_json(),
        config_hash=config.hash,
        code_hash=code_hash(),
        store="",
        sigma=required_sigma(config, config.train.batch_size / ROWS, planned),
        planned_steps=planned,
        payload=Payload({n: start[n] for n in spec.b}, {n: start[n] for n in spec.head}),
    )


@pytest.mark.parametrize(
    ("floor", "kind", "words"),
    [
        ({"max-epsilon": 3.9}, "epsilon", "above this node's max-epsilon 3.9"),
        ({"min-clip": 0.51}, "clip", "privacy.clip = 0.5 is below this node's min-clip 0.51"),
        ({"methods": "fedask fedhsip"}, "method", "fedask, fedhsip only"),
        ({"code-hash": "0" * 16}, "code-pin", "other code only"),
    ],
)
@pytest.mark.parametrize(
    ("answer", "phase"),
    [(answer_describe, "describe"), (answer_train, "train"), (answer_evaluate, "evaluate")],
)
def test_a_run_that_asks_for_more_is_refused(
    node: dict[str, Any],
    config: Config,
    floor: dict[str, Any],
    kind: str,
    words: str,
    answer: Answer,
    phase: str,
) -> None:
    failed = unpack_failure(answer(pack_request(request(config, phase)), {**node, **floor}))
    assert failed is not None
    assert (failed.kind, failed.uncharged) == (kind, True)
    assert words in failed.reason
    assert not (Path(node["store"]) / "ledger.jsonl").exists()


def test_a_run_within_the_floors_trains(node: dict[str, Any], config: Config) -> None:
    floors = {
        "max-epsilon": 5,
        "min-clip": 0.5,
        "methods": "ffa_lora",
        "code-hash": code_hash()[:20],
        "device": "cpu",
    }
    assert unpack_failure(answer_train(pack_request(request(config)), {**node, **floors})) is None
    assert (Path(node["store"]) / "ledger.jsonl").exists()


@pytest.mark.parametrize("target", ["strategies.fedavg.FedAvg", "strategies.fedask.FedASK"])
def test_a_method_is_its_class_and_not_its_name(node: dict[str, Any], config: Config, target: str) -> None:
    """The name is a word of the server's; a class counts by the file that it is defined in."""
    other = compose(["model=tiny_random", "method=" + target.split(".")[1], "privacy.epsilon=4"]).method
    named = dataclasses.replace(other, name="ffa_lora")
    content = pack_request(request(dataclasses.replace(config, method=named)))
    failed = unpack_failure(answer_train(content, {**node, "methods": "ffa_lora"}))
    assert failed is not None
    assert failed.kind == "method"


def test_the_owners_device_goes_before_the_runs(node: dict[str, Any], config: Config) -> None:
    far = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cuda:77"))
    failed = unpack_failure(answer_train(pack_request(request(far)), node))
    assert failed is not None
    assert failed.kind == "config"
    assert unpack_failure(answer_train(pack_request(request(far)), {**node, "device": "cpu"})) is None


def test_a_node_says_which_weights_it_has(node: dict[str, Any], config: Config) -> None:
    def told(settings: Config) -> str:
        return unpack_description(answer_describe(pack_request(request(settings, "describe")), node)).weights

    assert told(config).startswith("random:")
    assert told(config) != told(dataclasses.replace(config, seed=config.seed + 1))


@pytest.mark.parametrize(
    ("content", "logged"),
    [
        ("", "is empty"),
        ("text,label\n", "has no rows"),
        ("text,labl\nsecret-cell,no\n", "unknown column 'label' - did you mean 'labl'?"),
        ("text,label\nsecret-cell,no\nsecret-cell,no,yes\n", "line 3 has 3 cells, the header 2"),
        ('text,label\n"secret-cell,no\n', "quotation mark opened in data row 1"),
        (None, "there is no file"),
    ],
)
def test_a_broken_table_is_named_in_the_nodes_own_log_only(
    node: dict[str, Any], config: Config, content: str | None, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(node["data-path"])
    path.unlink() if content is None else path.write_text(content)
    for answer, phase in ((answer_describe, "describe"), (answer_train, "train")):
        failed = unpack_failure(answer(pack_request(request(config, phase)), node))
        assert failed is not None
        assert (failed.kind, failed.reason) == ("data", "the node's own log has the reason")
    assert logged in caplog.text
    assert "secret-cell" not in caplog.text


def test_rows_left_out_are_named_by_number_in_the_nodes_own_log(
    node: dict[str, Any], config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ["fine,no", "secret-cell,perhaps", ",yes", "fine too,yes", *["secret-cell,maybe"] * 7, "no label,"]
    Path(node["data-path"]).write_text("text,label\n" + "\n".join(rows) + "\n")
    content = answer_describe(pack_request(request(config, "describe")), node)
    assert unpack_description(content).examples == 12
    assert (
        "8 of 12 rows with a label not in task.labels are left out (data row 2, 5, 6, 7, 8, ...)"
        in caplog.text
    )
    assert "1 of 12 rows without a text are left out (data row 3)" in caplog.text
    assert "1 of 12 rows without a label are left out (data row 12)" in caplog.text
    assert "secret-cell" not in caplog.text
    assert "perhaps" not in caplog.text
