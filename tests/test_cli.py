from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from privet.cli import main
from privet.config import options
from tests.conftest import Outcome


def test_check_prints_the_plan_and_trains_nothing(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *settings, "method=fedhsip", "federation.rounds=4"]) == 0
    text = capsys.readouterr().out
    for words in (
        "epsilon 6",
        "client-2",
        "sigma",
        "upload a round",
        "one-off download",
        "trained",
        "memory",
    ):
        assert words in text
    assert main(["run", "--dry-run", *settings, "method=fedhsip", "federation.rounds=4"]) == 0
    assert capsys.readouterr().out == text


def test_check_as_json_has_every_number(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", *settings, "method=ffa_lora"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [c["n"] for c in plan["clients"]] == [50, 50, 50]
    for client in plan["clients"]:
        assert client["q"] == pytest.approx(16 / 50)
        assert client["steps"] == 4
        assert client["sigma"] > 0
        assert client["epsilon"] <= 6.0
    assert plan["per_round"]["upload_numbers"] == plan["per_round"]["download_numbers"] == 512
    assert plan["per_round"]["upload_bytes"] == 2048
    assert plan["trained"] == 512 + 66
    assert plan["memory_bytes"] > 0


def test_the_plan_is_what_the_run_then_does(
    run: Callable[..., Outcome], settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "--json", *settings, "method=fedhsip", "federation.rounds=4", "federation.sampled=2"])
    plan = json.loads(capsys.readouterr().out)
    outcome = run("method=fedhsip", "federation.rounds=4", "federation.sampled=2")
    nodes = {n["node"]: n for n in outcome.json("privacy.json")["nodes"]}
    for client in plan["clients"]:
        node = nodes[client["node"]]
        assert node["steps"] == client["steps"]
        assert node["epsilon"] == pytest.approx(client["epsilon"], rel=1e-9)
        assert node["entries"][0]["sigma"] == client["sigma"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "method=fedhsp"], "did you mean 'fedhsip'"),
        (["run", "seed=1,2"], "privet run -m"),
        (["run", "seed=1", "sweep.parallel=2"], "goes with -m"),
        (["run", "seed=1", "--json"], "--json goes with --dry-run"),
        (["check", "task.path=nowhere.csv"], "nowhere.csv"),
        (["check", "model=tiny_random", "model.lora.targets=[qury]"], "did you mean 'query'"),
        (["check", "model=tiny_random", "federation.partition.kind=natural"], "federation.partition"),
        (["check", "model=tiny_random", "federation.gpus_per_client=1"], "no GPU is visible"),
        (["check", "model=pretrained", "model.path=/no/such/model"], "/no/such/model"),
        (["ledger", "/no/such/run"], "holds no ledger"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("privet: ")
    assert words in line


def test_ledger_shows_budget_spent_and_what_still_fits(
    run: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run("method=ffa_lora")
    assert main(["ledger", str(outcome.path)]) == 0
    text = capsys.readouterr().out
    assert "client-2: lifetime epsilon" in text
    assert "steps that still fit" in text
    assert main(["ledger", "--json", str(outcome.path / "nodes" / "client-0")]) == 0
    (ledger,) = json.loads(capsys.readouterr().out)
    assert ledger["runs"][0]["steps"] == 4


def test_methods_are_listed_with_messages_numbers_and_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "model=roberta_base_random", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(found) == options("method")
    assert all(e["paper"] and e["stays"] and not e["refused"] for e in found.values())
    assert (found["fedask"]["upload"], found["fedask"]["download"]) == (442_368, 516_096)
    assert found["fedask"]["messages"] == ["sketch", "project"]
    assert found["fedhsip"]["messages"] == ["(warmup)", "train"]


def test_a_method_that_cannot_run_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "model=tiny_random", "task.head=frozen"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "task.head = frozen is not allowed" in lines["probe"]
    assert "train" in lines["fedavg"]
    assert main(["methods", "model.lora.targets=[qury]"]) == 2
    assert "did you mean 'query'" in capsys.readouterr().err
