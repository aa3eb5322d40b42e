"""``privet eval`` on finished runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

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
