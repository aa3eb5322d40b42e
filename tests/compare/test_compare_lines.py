from __future__ import annotations

import json
from pathlib import Path

import pytest

from privet.compare.lines import Comparison, compare
from privet.compare.runs import find_runs, read_run
from privet.errors import PrivetError
from tests.compare.conftest import MakeRun


def labels(comparison: Comparison) -> list[str]:
    return [line.label for line in comparison.lines]


def test_runs_are_found_below_folders_and_counted_once(make_run: MakeRun, tmp_path: Path) -> None:
    one, two = make_run("one", "method=fedavg"), make_run("deep/two", "method=fedavg", "seed=1")
    (tmp_path / "runs" / "notes").mkdir()
    found, remarks = find_runs([one, tmp_path / "runs", tmp_path / "runs" / "notes"])
    assert sorted(found) == sorted([one, two])
    assert remarks == [f"{tmp_path / 'runs' / 'notes'} holds no run"]


def test_a_path_that_is_not_there_or_holds_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PrivetError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(PrivetError, match="holds no run"):
        find_runs([tmp_path])


def test_runs_that_differ_in_their_seed_alone_are_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(f"a{seed}", "method=fedavg", f"seed={seed}")
    make_run("b", "method=fedavg", "seed=0", "train.local_steps=5")
    comparison = compare([tmp_path / "runs"])
    assert [(len(line.runs), line.seeds) for line in comparison.lines] == [(3, [0, 1, 2]), (1, [0])]
    assert labels(comparison) == ["fedavg (local_steps=4)", "fedavg (local_steps=5)"]
    assert list(comparison.telling) == ["train.local_steps"]


def test_trackers_make_no_lines(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", "tracking=none")
    make_run("b", "method=fedavg", "tracking=tensorboard", "seed=1")
    assert len(compare([tmp_path / "runs"]).lines) == 1


def test_a_repeated_seed_counts_and_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", "seed=7")
    make_run("b", "method=fedavg", "seed=7")
    comparison = compare([tmp_path / "runs"])
    assert len(comparison.lines[0].runs) == 2
    assert "2 runs with 1 seed" in comparison.remarks[0]


def test_settings_are_compared_where_they_mean_something(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=fedhsip")
    make_run("c", "method=fedhsip", "method.assignment=random")
    make_run("d", "method=fedavg", "privacy=none")
    comparison = compare([tmp_path / "runs"])
    assert list(comparison.telling) == ["method.assignment"]
    # Rates differ by method and by privacy; clip and delta, null without privacy, do not differ.
    assert set(comparison.differing) == {"train.lr", "train.head_lr", "train.optimizer"}
    assert labels(comparison) == [
        "fedavg",
        "fedhsip (assignment=hsip)",
        "fedhsip (assignment=random)",
        "fedavg",
    ]


def test_an_old_configuration_without_a_key_is_no_error(make_run: MakeRun, tmp_path: Path) -> None:
    old = make_run("old", "method=fedavg")
    text = (old / "config.yaml").read_text()
    (old / "config.yaml").write_text("\n".join(t for t in text.splitlines() if "evaluate_every" not in t))
    make_run("new", "method=fedavg")
    comparison = compare([tmp_path / "runs"])
    assert len(comparison.lines) == 2
    assert list(comparison.telling) == ["evaluate_every"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.test_rows=10", "the task differs (task.test_rows: 2600, 10)"),
        ("model=roberta_base_random", "the model differs (model.name: tiny_random, roberta_base_random)"),
        ("privacy.delta=1e-6", "the budgets differ in delta (1e-05, 1e-06)"),
    ],
)
def test_what_is_not_comparable_is_said(make_run: MakeRun, tmp_path: Path, override: str, words: str) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=ffa_lora", override)
    comparison = compare([tmp_path / "runs"])
    assert comparison.warnings == [f"not comparable: {words}"]
    if "privacy" not in override:
        assert len(comparison.sets) == 2
    else:
        assert len(comparison.sets[0].budgets) == 2


def test_another_adjacency_or_test_set_is_not_comparable(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=ffa_lora", privacy={"adjacency": "replace one row"}, examples=401)
    words = " ".join(compare([tmp_path / "runs"]).warnings)
    assert "test rows (400, 401)" in words
    assert "adjacency (add or remove one row, replace one row)" in words


def test_training_rows_rank_and_partition_are_what_a_comparison_varies(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("a", "method=fedavg")
    make_run(
        "b", "method=fedavg", "task.train_rows=99", "model.lora.rank=2", "federation.partition.alpha=0.1"
    )
    comparison = compare([tmp_path / "runs"])
    assert not comparison.warnings
    assert len(comparison.sets) == 1
    assert set(comparison.telling) == {"task.train_rows", "model.lora.rank", "federation.partition.alpha"}


def test_a_run_without_a_score_stays_with_its_set(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=ffa_lora", summary={"metrics": None})
    comparison = compare([tmp_path / "runs"])
    assert len(comparison.sets) == 1
    assert comparison.lines[1].score(comparison.metrics[0]) is None


def test_failed_unfinished_and_damaged_runs_are_apart_with_their_reason(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("fine", "method=fedavg")
    failed = make_run("failed", "method=fedavg", summary={"status": "failed"})
    (failed / "failure.json").write_text(json.dumps({"reason": "nodes:\n too few"}))
    killed = make_run("killed", "method=fedavg", "federation.rounds=9", scores=(0.5, 0.6))
    (killed / "summary.json").unlink()
    torn = (killed / "rounds.jsonl").read_text() + '{"round": 3, "ph'
    (killed / "rounds.jsonl").write_text(torn)
    broken = make_run("broken", "method=fedavg")
    (broken / "privacy.json").write_text("{")
    empty = tmp_path / "runs" / "empty"
    (empty / "logs").mkdir(parents=True)
    (empty / "logs" / "flwr.log").write_text("")
    problems = {run.path.name: run.problem for run in compare([tmp_path / "runs"]).apart}
    assert problems["failed"] == "failed: nodes: too few"
    assert problems["killed"].startswith("unfinished: 2 of 9 rounds")
    assert problems["broken"] == "damaged: privacy.json is not valid JSON"
    assert "never began" in problems["empty"]
    assert len(problems) == 4


@pytest.mark.parametrize("name", ["summary.json", "privacy.json", "communication.json", "rounds.jsonl"])
@pytest.mark.parametrize(
    "text", ["[]\n", "1\n", '{"rounds": 7, "totals": [], "nodes": "x"}\n', "\x00\xff{\n"]
)
def test_no_content_of_a_file_breaks_the_reader(make_run: MakeRun, name: str, text: str) -> None:
    path = make_run("odd", "method=fedavg")
    (path / name).write_bytes(text.encode("latin-1"))
    assert read_run(path).path == path


def test_bytes_count_every_message_and_add_up_over_rounds(make_run: MakeRun) -> None:
    run = read_run(make_run("a", "method=fedavg", scores=(0.5, 0.6, 0.7)))
    # two nodes, two ways, 1000 bytes: 4000 a round
    assert [r.bytes_so_far for r in run.rounds] == [4000, 8000, 12000]
    assert run.bytes == 12000
