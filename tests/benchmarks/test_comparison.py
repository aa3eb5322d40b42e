"""The protocol of the comparison: what runs, in which order, and what the tables say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.comparison import METHODS, Comparison, Trial
from privet import runner
from privet.config import compose, options


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    monkeypatch.setattr(runner, "is_completed", lambda path: (path / "summary.json").exists())
    return Comparison(tmp_path, ["ffa_lora", "probe"], [])


def finish(trial: Trial | None, accuracy: float) -> None:
    assert trial is not None
    trial.path.mkdir()
    (trial.path / "summary.json").write_text(json.dumps({"metrics": {"accuracy": accuracy}}))


def test_every_method_has_as_many_trials_on_validation_rows_and_no_test_row(plan: Comparison) -> None:
    for method in METHODS:
        trials = plan.tuning(method)
        assert len(trials) == 3
        for rate, trial in trials.items():
            config = compose(trial.overrides)
            assert config.task.validation_rows == 1300
            assert config.privacy.private
            assert rate == (config.train.head_lr if method == "probe" else config.train.lr)
    assert set(METHODS) <= set(options("method"))


def test_the_final_runs_take_the_best_rate_and_score_the_test_rows(plan: Comparison) -> None:
    assert plan.final("ffa_lora", "dp", 1) is None
    assert plan.rate("ffa_lora") is None
    for rate, trial in plan.tuning("ffa_lora").items():
        finish(trial, 0.9 if rate > 2 else 0.8)
    (best,) = [rate for rate in plan.tuning("ffa_lora") if rate > 2]
    assert plan.rate("ffa_lora") == best
    private, public = plan.final("ffa_lora", "dp", 2), plan.final("ffa_lora", "none", 2)
    assert private is not None
    assert public is not None
    assert compose(private.overrides).train.lr == best
    assert compose(public.overrides).train.lr == compose(["method=ffa_lora", "privacy=none"]).train.lr
    assert {compose(t.overrides).task.validation_rows for t in (private, public)} == {None}


def test_what_is_finished_is_not_run_again(plan: Comparison) -> None:
    names = [t.path.name for t in plan.todo()]
    assert names[:3] == ["tune-ffa_lora-0.5", "tune-ffa_lora-1.5", "tune-ffa_lora-4.5"]
    assert "ffa_lora-none-1" in names
    assert not any("-dp-" in name for name in names)
    finish(next(plan.todo()), 0.7)
    assert [t.path.name for t in plan.todo()] == names[1:]


def test_the_tables_have_mean_and_spread_and_say_what_is_open(plan: Comparison) -> None:
    for rate, trial in plan.tuning("probe").items():
        finish(trial, rate / 100)
    for seed, accuracy in ((1, 0.80), (2, 0.82), (3, 0.87)):
        finish(plan.final("probe", "none", seed), accuracy)
    finish(plan.final("probe", "dp", 1), 0.75)
    assert "| `probe` | 3.3: 3.30, 10: 10.00, 30: 30.00 | 30 |" in plan.tables()
    assert "| `probe` | 75.00 (1 of 3) | 83.00 ± 3.61 |" in plan.tables()
    assert "| `ffa_lora` | open | open |" in plan.tables()


def test_pairs_are_compared_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "is_completed", lambda path: (path / "summary.json").exists())
    plan = Comparison(tmp_path, ["fedhsip", "unilora"], [])
    for seed, accuracy in ((1, 0.80), (3, 0.86)):
        finish(plan.final("fedhsip", "none", seed), accuracy)
    for seed, accuracy in ((1, 0.81), (2, 0.60), (3, 0.83)):
        finish(plan.final("unilora", "none", seed), accuracy)
    assert plan.differences("fedhsip", "unilora", "none") == pytest.approx([-0.01, 0.03])
    assert "| `fedhsip` less `unilora` | open | 1.00 ± 2.83 (2 of 3) |" in plan.tables()
    assert "| `fedask` less `fedavg` | open | open |" in plan.tables()
