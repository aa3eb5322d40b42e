"""What the page claims: never more than the numbers carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from privet.compare.lines import compare
from privet.compare.verdict import contests, findings, headline
from tests.compare.conftest import MakeRun

# At 400 rows and an accuracy of 0.8 the standard error is 0.02, that of a difference 0.0283.


@pytest.mark.parametrize(
    ("other", "place"),
    [(0.800, "level"), (0.780, "level"), (0.765, "open"), (0.735, "behind")],
)
def test_level_open_and_behind(make_run: MakeRun, tmp_path: Path, other: float, place: str) -> None:
    make_run("a", "method=fedavg", scores=(0.8,))
    make_run("b", "method=ffa_lora", scores=(other,))
    (contest,) = contests(compare([tmp_path / "runs"]).sets[0])
    found = {e.line.method: name for name in ("level", "open", "behind") for e in getattr(contest, name)}
    assert found == {"fedavg": "level", "ffa_lora": place}
    assert (contest.winner is not None) == (place == "behind")
    assert contest.all_level == (place == "level")


def test_a_difference_below_the_error_is_never_a_winner(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", scores=(0.80,))
    make_run("b", "method=ffa_lora", scores=(0.79,))
    comparison = compare([tmp_path / "runs"])
    assert headline(comparison) == (
        "At epsilon 6, delta 1e-05, both configurations are level (accuracy 79.00 to 80.00 %)."
    )
    text = " ".join(findings(comparison.sets[0]))
    assert "ahead" not in text
    assert "no difference reaches its standard error" in text
    assert "Every configuration ran once" in text


def test_more_test_rows_settle_the_same_difference(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", scores=(0.80,), examples=40_000)
    make_run("b", "method=ffa_lora", scores=(0.79,), examples=40_000)
    comparison = compare([tmp_path / "runs"])
    assert headline(comparison) == "At epsilon 6, delta 1e-05, fedavg is ahead (accuracy 80.00 %)."
    assert "ffa_lora (79.00 %) is behind by two standard errors or more" in findings(comparison.sets[0])[0]


def test_seeds_that_scatter_take_a_win_away(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, score in enumerate((0.70, 0.90)):
        make_run(f"a{seed}", "method=fedavg", f"seed={seed}", scores=(score,), examples=40_000)
    make_run("b", "method=ffa_lora", scores=(0.79,), examples=40_000)
    assert "level" in headline(compare([tmp_path / "runs"]))


def test_budgets_do_not_compete(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", "privacy=none", scores=(0.99,))
    make_run("b", "method=ffa_lora", scores=(0.60,))
    make_run("c", "method=fedavg", "privacy.epsilon=3", scores=(0.55,))
    comparison = compare([tmp_path / "runs"])
    assert [len(c.entries) for c in contests(comparison.sets[0])] == [1, 1, 1]
    assert "No two configurations have the same budget" in headline(comparison)
    assert "ahead" not in headline(comparison)


def test_one_method_over_budgets_is_told_as_that(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", "privacy.epsilon=3", scores=(0.7,))
    make_run("b", "method=fedavg", "privacy=none", scores=(0.9,))
    assert headline(compare([tmp_path / "runs"])) == (
        "fedavg reaches accuracy 70.00 % at epsilon 3, delta 1e-05 and 90.00 % without privacy."
    )


def test_a_loss_wins_by_being_low_and_needs_seeds_for_it(make_run: MakeRun, tmp_path: Path) -> None:
    for method, losses in (("fedavg", (1.0, 1.1)), ("ffa_lora", (2.0, 2.1))):
        for seed, loss in enumerate(losses):
            make_run(
                f"{method}{seed}", f"method={method}", f"seed={seed}", summary={"metrics": {"loss": loss}}
            )
    assert headline(compare([tmp_path / "runs"])).endswith("fedavg is ahead (loss 1.05).")


def test_without_any_error_the_order_is_open(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", summary={"metrics": {"loss": 1.0}})
    make_run("b", "method=ffa_lora", summary={"metrics": {"loss": 9.0}})
    comparison = compare([tmp_path / "runs"])
    assert "open" in headline(comparison)
    assert "no standard error is known" in findings(comparison.sets[0])[0]


def test_sets_are_judged_apart(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", scores=(0.99,))
    make_run("b", "method=ffa_lora", "task.test_rows=10", scores=(0.5,))
    assert "cannot be compared" in headline(compare([tmp_path / "runs"]))


def test_traffic_says_how_many_times(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", numbers=640)
    make_run("b", "method=fedhsip", numbers=100)
    make_run("c", "method=probe", numbers=0)
    text = findings(compare([tmp_path / "runs"]).sets[0])[-1]
    assert text == (
        "Per client and round, fedhsip sends 100 adapter numbers and fedavg 640, 6.4 times as many; "
        "probe sends the head alone."
    )


def test_nothing_to_say(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg", summary={"metrics": None})
    assert headline(compare([tmp_path / "runs"])) == "No run has a score."
