"""``privet eval`` on finished runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from client_app.personal import personal_models
from privet.cli import main
from privet.errors import PrivetError
from server_app.rescore import rescore
from tests.conftest import Outcome, write_table
from tests.strategies.session import finished

Run = Callable[..., Outcome]


def task(path: Path, labels: str = "[no,yes]") -> list[str]:
    return ["task=csv", f"task.path={path}", f"task.test_path={path}", f"task.labels={labels}"]


def test_the_runs_own_task_gives_its_own_scores_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = finished(run("method=fedsvd", "evaluation=server"))
    expected = outcome.json("summary.json")["metrics"]
    assert rescore(outcome.path, []).scores == pytest.approx(expected)
    assert outcome.json("eval/csv.json")["scores"] == pytest.approx(expected)
    assert main(["eval", str(outcome.path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.pop("task") == "csv"
    assert said == pytest.approx(expected)


def test_another_table_is_scored_with_the_runs_model(run: Run, tmp_path: Path) -> None:
    outcome = finished(run("method=fedavg", "privacy=none", "evaluation=none", "federation.rounds=1"))
    here, there = (write_table(tmp_path / f"{seed}.csv", 40, seed=seed) for seed in (5, 6))
    found = [rescore(outcome.path, task(path)) for path in (here, there, here)]
    assert [f.scores["examples"] for f in found] == [40, 40, 40]
    assert found[0].scores == found[2].scores
    assert found[0].scores["loss"] != found[1].scores["loss"]
    turned = rescore(outcome.path, task(here, "[yes,no]")).scores
    assert turned["accuracy"] == pytest.approx(1 - found[0].scores["accuracy"])


def test_what_does_not_fit_is_refused(run: Run, tmp_path: Path) -> None:
    outcome = finished(run("method=ffa_lora", "privacy=none", "evaluation=none", "federation.rounds=1"))
    path = write_table(tmp_path / "rows.csv", 40)
    for overrides, words in (
        (task(path, "[no,yes,perhaps]"), "task.labels has 3 values and the run's 2"),
        (["train.lr=1"], "'train.lr=1' is not allowed"),
        (["task=instructions", f"task.path={path}", "task.test_rows=2"], "the run's is classification"),
    ):
        with pytest.raises(PrivetError, match=words.replace(".", r"\.").replace("[", r"\[")):
            rescore(outcome.path, overrides)
    (outcome.path / "summary.json").unlink()
    with pytest.raises(PrivetError, match="only a completed run"):
        rescore(outcome.path, [])
    local = finished(run("method=ffa_lora", "task.head=local", "privacy=none", "evaluation=none"))
    with pytest.raises(PrivetError, match="has no head"):
        rescore(local.path, [])


@pytest.mark.parametrize("method", ["method=fedrand", "method=fedper method.shared_layers=1"])
def test_the_nodes_own_models_are_scored(
    method: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the run's own rows each node's model has the score that the node gave it in the last round."""
    outcome = finished(run(*method.split(), "privacy.epsilon=20", "evaluation=both", "federation.rounds=3"))
    said = outcome.rounds[-1]["eval_clients"]
    found = rescore(outcome.path, [], personal_models)
    for node, values in said["nodes"].items():
        assert found.personal[node]["loss"] == pytest.approx(values["personal.loss"])
        assert found.personal[node]["loss"] != pytest.approx(found.scores["loss"], abs=1e-6)
    assert found.spread["loss"] == pytest.approx(said["personal"]["loss"])
    assert found.spread["loss_std"] == pytest.approx(said["personal"]["loss_std"])
    assert main(["eval", str(outcome.path), "--personal", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["personal"] == pytest.approx(found.spread)


def test_own_models_where_there_are_none_or_elsewhere(run: Run) -> None:
    outcome = finished(run("method=fedavg", "privacy=none", "evaluation=none", "federation.rounds=1"))
    with pytest.raises(PrivetError, match="no node of a fedavg run has a model of its own"):
        rescore(outcome.path, [], personal_models)
    shutil.rmtree(outcome.path / "nodes")
    with pytest.raises(PrivetError, match="was no simulation"):
        rescore(outcome.path, [], personal_models)


def test_local_heads_make_whole_models_on_the_nodes(run: Run) -> None:
    outcome = finished(
        run("method=fedavg", "task.head=local", "privacy=none", "evaluation=client", "federation.rounds=1")
    )
    found = rescore(outcome.path, [], personal_models)
    assert found.scores == {}
    assert set(found.personal) == {"client-0", "client-1", "client-2"}
