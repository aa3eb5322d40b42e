from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from privet.cli import main
from server_app import tracking
from tests.conftest import Outcome


class Fake:
    """A tracker in memory that can be made to fail."""

    package: ClassVar[str] = "json"
    made: ClassVar[list[Fake]] = []
    fails_at: ClassVar[str] = ""

    def __init__(self, directory: Path, name: str, settings: tracking.Settings) -> None:
        self.settings, self.rounds, self.ended = settings, {}, None
        self.made.append(self)
        self._maybe_fail("start")

    rounds: dict[int, dict[str, float]]
    ended: tuple[str, dict[str, float]] | None

    def round(self, number: int, values: Mapping[str, float]) -> None:
        self._maybe_fail(f"round {number}")
        self.rounds[number] = dict(values)

    def end(self, status: str, values: Mapping[str, float]) -> None:
        self._maybe_fail("end")
        self.ended = (status, dict(values))

    def _maybe_fail(self, where: str) -> None:
        if where == self.fails_at:
            raise RuntimeError("no\nroute")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(tracking, "TRACKERS", {"wandb": Fake})
    monkeypatch.setattr(Fake, "made", [])
    return Fake


def test_tensorboard_has_every_round_and_the_result(run: Callable[..., Outcome]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = run("method=fedavg", "privacy=none", "tracking=tensorboard")
    if outcome.error:
        raise outcome.error
    events = EventAccumulator(str(outcome.path / "tensorboard"))
    events.Reload()
    rounds = outcome.rounds
    for tag, key in (("bytes/upload", "upload_bytes"), ("train/loss", "train_loss")):
        points = events.Scalars(tag)
        assert [(p.step, p.value) for p in points] == [(r["round"], pytest.approx(r[key])) for r in rounds]
    accuracy = [p.value for p in events.Scalars("eval/accuracy")]
    assert accuracy == pytest.approx([r["eval"]["accuracy"] for r in rounds])
    (final,) = events.Scalars("final/eval/accuracy")
    assert final.value == pytest.approx(outcome.json("summary.json")["metrics"]["accuracy"])
    totals = outcome.json("communication.json")["totals"]
    sent = sum(n for key, n in totals.items() if key.startswith("upload_bytes"))
    assert events.Scalars("bytes_so_far/upload")[-1].value == sent


def test_a_tracker_sees_what_the_record_holds_and_no_private_loss(
    run: Callable[..., Outcome], fake: type[Fake]
) -> None:
    outcome = run("method=fedavg", "tracking=wandb", "seed=5")
    (tracker,) = fake.made
    assert sorted(tracker.rounds) == [1, 2]
    for record in outcome.rounds:
        values = tracker.rounds[record["round"]]
        assert values["privacy/epsilon_max"] == record["epsilon_max"]
        assert values["eval/accuracy"] == record["eval"]["accuracy"]
        assert values["round/void"] == 0
        assert not any("loss" in key and "eval" not in key for key in values)
        assert "train/grad_norm" not in values
    status, values = tracker.ended or ("", {})
    assert status == "completed"
    assert values["epsilon"] == outcome.json("summary.json")["epsilon"]
    assert tracker.settings["seed"] == 5
    assert tracker.settings["privacy.epsilon"] == 6.0
    assert tracker.settings["task.labels"] == "['no', 'yes']"


def test_a_failed_run_ends_its_tracker_as_failed(run: Callable[..., Outcome], fake: type[Fake]) -> None:
    outcome = run(
        "method=fedavg", "tracking=wandb", crash=lambda message: message.metadata.message_type == "train"
    )
    assert outcome.error is not None
    assert fake.made[0].ended is not None
    assert fake.made[0].ended[0] == "failed"


@pytest.mark.parametrize("where", ["start", "round 1", "end"])
def test_a_tracker_that_fails_is_noted_and_costs_nothing(
    run: Callable[..., Outcome], fake: type[Fake], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(fake, "fails_at", where)
    outcome = run("method=fedavg", "tracking=wandb")
    assert outcome.error is None
    assert outcome.json("summary.json")["status"] == "completed"
    notes = [
        e["text"] for e in outcome.lines("events.jsonl") if e["event"] == "note" and "tracking" in e["text"]
    ]
    assert notes == [f"tracking=wandb failed at {where} and is off now: RuntimeError: no route"]
    assert len(fake.made[0].rounds) == (2 if where == "end" else 0)


def test_a_missing_package_is_refused_before_anything_runs(
    run: Callable[..., Outcome],
    settings: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert main(["check", *settings, "tracking=mlflow"]) == 2
    words = "tracking = mlflow needs a package that is not installed: pip install 'privet[mlflow]'"
    assert capsys.readouterr().err == f"privet: {words}\n"
    outcome = run("method=fedavg", "tracking=mlflow")
    assert str(outcome.error) == words
    assert not (outcome.path / "rounds.jsonl").exists()
    assert not outcome.grid.sent


def test_every_choice_has_a_class_and_an_extra() -> None:
    import tomllib
    from typing import get_args, get_type_hints

    from privet.config import Config

    choices = set(get_args(get_type_hints(Config)["tracking"])) - {"none"}
    root = Path(__file__).resolve().parents[2]
    extras: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert choices == set(tracking.TRACKERS)
    for name, kind in tracking.TRACKERS.items():
        assert any(requirement.startswith(kind.package) for requirement in extras[name])


def test_numbers_of_clients_and_no_number_that_is_none() -> None:
    values = tracking.round_values(
        {
            "round": 1,
            "eval": {"accuracy": 0.5, "loss": None},
            "eval_clients": {"global": {"accuracy": 0.4}, "personal": None, "failed": [], "nodes": {"a": {}}},
            "train_loss": None,
            "epsilon_max": None,
            "void": True,
        }
    )
    assert values == {"eval/accuracy": 0.5, "eval_clients/global/accuracy": 0.4, "round/void": 1.0}
