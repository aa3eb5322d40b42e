from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from privet.compare import text_table as table_of_paths
from privet.compare.lines import compare
from privet.compare.statistics import Metric, Spread, standard_error
from privet.compare.table import csv_table, text_table
from tests.compare.conftest import MakeRun


def row_of(text: str, start: str) -> list[str]:
    (line,) = [t for t in text.splitlines() if t.startswith(start)]
    return [cell for cell in line.split("  ") if cell.strip()]


def test_mean_and_deviation_by_hand(make_run: MakeRun, tmp_path: Path) -> None:
    # 0.80, 0.84, 0.91: mean 0.85, squares 0.0025 + 0.0001 + 0.0036 = 0.0062, over 2: 0.0031, root 0.055678
    for seed, (score, seconds) in enumerate([(0.80, 10), (0.84, 20), (0.91, 60)]):
        make_run(f"a{seed}", "method=fedavg", f"seed={seed}", scores=(score,), seconds=seconds)
    table = text_table(compare([tmp_path / "runs"]), width=200)
    cells = [c.strip() for c in row_of(table, "fedavg")]
    assert cells == ["fedavg", "6", "85.00 ± 5.57", "3", "5.90", "100 / 101", "4 kB", "30"]
    assert "accuracy %" in table.splitlines()[0]


def test_one_run_has_no_deviation(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", scores=(0.8123,))
    assert [c.strip() for c in row_of(text_table(compare([tmp_path / "runs"])), "fedavg")][2:4] == [
        "81.23",
        "1",
    ]


def test_not_private_is_what_privacy_json_says(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", "privacy=none")
    make_run("b", "method=ffa_lora", "privacy.randomness=seeded", privacy={"private": False})
    text = text_table(compare([tmp_path / "runs"]), width=200)
    assert row_of(text, "fedavg")[1].strip() == "none"
    assert "not private" in " ".join(row_of(text, "fedavg"))
    assert row_of(text, "ffa_lora")[1].strip() == "6"
    assert "not private" in " ".join(row_of(text, "ffa_lora"))


def test_the_largest_epsilon_over_seeds_is_shown(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", "seed=0", epsilon=5.1)
    make_run("b", "method=fedavg", "seed=1", epsilon=5.7)
    assert "5.70" in " ".join(row_of(text_table(compare([tmp_path / "runs"])), "fedavg"))


def test_settings_that_do_not_fit_become_a_second_table(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=fedavg", "privacy=none")
    comparison = compare([tmp_path / "runs"])
    wide, narrow = text_table(comparison, width=400), text_table(comparison, width=100)
    assert wide.count("epsilon spent") == narrow.count("epsilon spent") == 1
    assert "train.lr" in wide.splitlines()[0]
    assert "train.lr" not in narrow.splitlines()[0]
    assert "train.lr" in narrow
    assert max(map(len, narrow.splitlines())) <= 100


def test_runs_apart_warnings_and_remarks_are_in_the_text(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=fedavg")
    make_run("c", "method=fedavg", "task.test_rows=10")
    bad = make_run("bad", "method=fedavg")
    (bad / "summary.json").unlink()
    text = table_of_paths([str(tmp_path / "runs")])
    assert text.startswith("warning: not comparable: the task differs")
    assert "note: fedavg at epsilon 6, delta 1e-05: 2 runs with 1 seed" in text
    assert "Not in the table:" in text
    assert f"{bad}: unfinished" in text
    (tmp_path / "only").mkdir()
    bad.rename(tmp_path / "only" / "bad")
    assert table_of_paths([tmp_path / "only"]).startswith("no run has a result")


def test_scores_of_clients_are_columns(make_run: MakeRun, tmp_path: Path) -> None:
    clients = {
        "global": {"accuracy": 0.7, "accuracy_std": 0.1, "loss": 0.5, "nodes": 3},
        "personal": {"accuracy": 0.9, "loss": 0.4, "nodes": 3},
    }
    make_run("a", "method=fedavg", summary={"client_metrics": clients})
    text = text_table(compare([tmp_path / "runs"]), width=300)
    assert "global accuracy %" in text
    assert "personal accuracy %" in text
    assert "std" not in text
    assert "nodes" not in text
    assert [c.strip() for c in row_of(text, "fedavg")][-2:] == ["70.00", "90.00"]


def test_without_a_servers_score_the_clients_one_is_the_main_metric(
    make_run: MakeRun, tmp_path: Path
) -> None:
    clients = {"global": None, "personal": {"loss": 0.4, "accuracy": 0.9, "nodes": 3}}
    make_run("a", "method=fedavg", summary={"metrics": None, "client_metrics": clients})
    assert compare([tmp_path / "runs"]).metrics == [Metric("personal accuracy")]


def test_csv_has_every_number_in_full(make_run: MakeRun, tmp_path: Path) -> None:
    scores = (0.80, 0.84, 0.91)
    for seed, score in enumerate(scores):
        make_run(f"a{seed}", "method=fedavg", f"seed={seed}", scores=(score,))
    make_run("b", "method=ffa_lora", scores=(0.5,))
    first, second = csv.DictReader(io.StringIO(csv_table(compare([tmp_path / "runs"]))))
    deviation = math.sqrt(0.0031)
    assert float(first["accuracy_mean"]) == pytest.approx(0.85)
    assert float(first["accuracy_std"]) == pytest.approx(deviation)
    # binomial over 400 rows, and the scatter of three seeds
    error = math.sqrt(0.85 * 0.15 / 400 + 0.0031 / 3)
    assert float(first["accuracy_standard_error"]) == pytest.approx(error)
    assert float(first["loss_mean"]) == pytest.approx(0.15)
    assert (first["seeds"], first["runs"], first["private"], first["bytes"]) == (
        "0 1 2",
        "3",
        "true",
        "4000.0",
    )
    assert float(second["accuracy_standard_error"]) == pytest.approx(0.025)  # sqrt(0.25 / 400)
    assert second["accuracy_std"] == ""


def test_a_cell_is_no_formula_for_a_spreadsheet(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", settings={"odd": "=1+1"})
    make_run("b", "method=fedavg", settings={"odd": "-1"})
    rows = list(csv.DictReader(io.StringIO(csv_table(compare([tmp_path / "runs"])))))
    assert sorted(r["odd"] for r in rows) == ["'=1+1", "-1"]


def test_standard_error_of_a_loss_comes_from_seeds_alone() -> None:
    spread = Spread.of([1.0, 3.0])
    assert spread == Spread(2.0, pytest.approx(math.sqrt(2)), 2)
    assert spread is not None
    assert standard_error(Metric("loss"), spread, 1000) == pytest.approx(1.0)
    assert standard_error(Metric("loss"), Spread(2.0, None, 1), 1000) is None
