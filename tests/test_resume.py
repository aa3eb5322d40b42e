"""A run that was killed goes on where it stopped: bit-equal without privacy, never more steps under DP."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message

from privet.errors import ConfigError
from privet.privacy.ledger import Ledger
from privet.privacy.spending import Spending
from server_app.results import RunDirectory
from strategies.checkpoint import Checkpoint
from tests.conftest import Outcome, state_of
from tests.grid import Killed
from tests.strategies.session import TINY

Run = Callable[..., Outcome]


def asks(message: Message, phase: str | None = None, round_number: int | None = None) -> bool:
    if "request" not in message.content:
        return False
    request = message.content["request"]
    return phase in (None, request["phase"]) and round_number in (None, request["round"])


def once(condition: Callable[[Message], bool]) -> Callable[[Message], bool]:
    """Kill the server before the first message for which the condition holds."""

    def check(message: Message) -> bool:
        if condition(message):
            raise Killed
        return False

    return check


def record_of(outcome: Outcome) -> list[dict[str, Any]]:
    """The rounds without times."""
    rounds = json.loads(json.dumps(outcome.rounds))
    for record in rounds:
        record.pop("seconds")
        for phase in record["phases"]:
            phase.pop("seconds")
    return rounds


def expect_equal(first: Outcome, second: Outcome) -> None:
    one, other = state_of(first), state_of(second)
    assert one.keys() == other.keys()
    assert [n for n in one if not torch.equal(one[n], other[n])] == []
    names = [p.name for p in (first.path / "adapter").iterdir()]
    for name in names:
        if name.endswith(".safetensors"):
            assert (first.path / "adapter" / name).read_bytes() == (
                second.path / "adapter" / name
            ).read_bytes()
    assert record_of(first) == record_of(second)
    assert first.json("communication.json") == second.json("communication.json")
    assert first.json("summary.json")["metrics"] == second.json("summary.json")["metrics"]


def kill_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield places in a run of three rounds where the server dies, as arguments of a run."""
    yield "before any request", {"drop": once(lambda m: asks(m, round_number=1))}
    yield "before the second round", {"drop": once(lambda m: asks(m, round_number=2))}
    seen: list[Message] = []

    def second_node(message: Message) -> bool:
        if asks(message, round_number=3):
            seen.append(message)
        return len(seen) == 2

    yield "between two nodes of the last round", {"drop": once(second_node)}
    for name, when in (
        ("checkpoint", "before"),
        ("checkpoint", "after"),
        ("round", "before"),
        ("round", "after"),
    ):
        yield f"{when} {name}", {"patch": (name, when)}
    yield "before the end", {"patch": ("finish", "before")}


def die_at(monkeypatch: pytest.MonkeyPatch, method: str, when: str, call: int) -> None:
    """Kill the server around the n-th call of a method of the run directory."""
    original = getattr(RunDirectory, method)
    calls = 0

    def wrapped(self: RunDirectory, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            raise Killed
        result = original(self, *arguments, **named)
        if calls == call:
            raise Killed
        return result

    monkeypatch.setattr(RunDirectory, method, wrapped)


@pytest.fixture
def killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run, die at the given place, resume; return the finished run."""

    def make(*overrides: str, patch: tuple[str, str] | None = None, **grid: Any) -> Outcome:
        with monkeypatch.context() as patched:
            if patch is not None:
                die_at(patched, *patch, call=1 if patch[0] == "finish" else 2)
            broken = run(*overrides, **grid)
        assert isinstance(broken.error, Killed)
        assert not (broken.path / "summary.json").exists()
        resumed = run(path=broken.path, resume=True)
        if resumed.error:
            raise resumed.error
        return resumed

    return make


PLACES = [
    "before any request",
    "before the second round",
    "between two nodes of the last round",
    "before checkpoint",
    "after checkpoint",
    "before round",
    "after round",
    "before the end",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_anywhere_ends_bit_equal_without_privacy(
    run: Run, killed: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    overrides = ["method=fedask", "privacy=none", "federation.rounds=3"]
    points = dict(kill_points(monkeypatch))
    assert list(points) == PLACES
    expect_equal(run(*overrides), killed(*overrides, **points[place]))


@pytest.mark.parametrize("method", TINY)
def test_every_method_resumes_bit_equal(run: Run, killed: Callable[..., Outcome], method: str) -> None:
    overrides = [
        f"method={method}",
        *TINY[method],
        "privacy=none",
        "federation.rounds=3",
        "evaluation=both",
    ]
    last = {"fedask": "project"}.get(method, "train")
    place = {"drop": once(lambda m: asks(m, phase=last, round_number=3))}
    expect_equal(run(*overrides), killed(*overrides, **place))


def test_a_run_killed_in_its_warmup_resumes_bit_equal(run: Run, killed: Callable[..., Outcome]) -> None:
    overrides = ["method=fedhsip", "method.warmup_rounds=2", "privacy=none", "federation.rounds=4"]
    for number in (2, 3):
        place = {"drop": once(lambda m, n=number: asks(m, round_number=n))}  # type: ignore[misc]
        expect_equal(run(*overrides), killed(*overrides, **place))


def test_a_run_that_had_lost_a_node_resumes_bit_equal(run: Run, killed: Callable[..., Outcome]) -> None:
    """The interrupted round's replies are stored and sent again; who failed before stays on record."""

    def lost(message: Message) -> bool:
        return asks(message, round_number=1) and message.content["request"]["node"] == "client-1"

    seen: list[Message] = []

    def third(message: Message) -> bool:
        if asks(message, round_number=2):
            seen.append(message)
        return len(seen) == 3

    overrides = ["method=fedrand", "privacy=none", "federation.rounds=3"]
    expect_equal(run(*overrides, crash=lost), killed(*overrides, crash=lost, drop=once(third)))


# --- under DP ------------------------------------------------------------------------------------


def ledgers(outcome: Outcome) -> dict[str, list[tuple[int, str, int]]]:
    return {
        path.parent.name: [(e.round, e.phase, e.steps) for e in Ledger.load(path).entries]
        for path in sorted((outcome.path / "nodes").glob("*/ledger.jsonl"))
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", ["fedask", "fedrand"])
def test_under_dp_a_resumed_run_takes_no_step_more(
    killed: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, method: str, place: str
) -> None:
    overrides = [f"method={method}", "federation.rounds=3"]
    outcome = killed(*overrides, **dict(kill_points(monkeypatch))[place])
    phase = "sketch" if method == "fedask" else "train"
    expected = [(number, phase, 2) for number in (1, 2, 3)]
    assert ledgers(outcome) == dict.fromkeys(("client-0", "client-1", "client-2"), expected)
    privacy = outcome.json("privacy.json")
    assert {n["node"]: n["steps"] for n in privacy["nodes"]} == dict.fromkeys(ledgers(outcome), 6)
    assert privacy["max_epsilon"] <= 6.0
    assert [r["round"] for r in outcome.rounds] == [1, 2, 3]
    assert outcome.json("summary.json")["status"] == "completed"


def test_a_node_that_died_while_it_trained_is_charged_once_and_sits_the_round_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_app import trainer

    original = trainer.GradientEngine.private_sum
    calls = 0

    def die(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:  # two steps a phase: client-1 in round 2
            raise Killed
        return original(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.GradientEngine, "private_sum", die)
        broken = run("method=fedrand", "federation.rounds=3")
    assert isinstance(broken.error, Killed)
    resumed = run(path=broken.path, resume=True)
    assert resumed.error is None
    (failed,) = resumed.rounds[1]["phases"][0]["failed"]
    assert failed["node"] == "client-1"
    assert resumed.rounds[2]["phases"][0]["failed"] == []
    expected = [(number, "train", 2) for number in (1, 2, 3)]
    assert ledgers(resumed) == dict.fromkeys(("client-0", "client-1", "client-2"), expected)
    assert {n["node"]: n["steps"] for n in resumed.json("privacy.json")["nodes"]} == dict.fromkeys(
        expected_nodes, 6
    )


expected_nodes = ("client-0", "client-1", "client-2")


def test_a_ledger_that_is_gone_stays_refused_after_a_resume(run: Run) -> None:
    """A reset ledger would forget what was spent."""
    broken = run("method=fedavg", "federation.rounds=3", drop=once(lambda m: asks(m, round_number=3)))
    for name in ("ledger.jsonl", "ledger.head"):
        (broken.path / "nodes" / "client-0" / name).unlink()
    resumed = run(path=broken.path, resume=True)
    assert resumed.error is None
    (failed,) = resumed.rounds[2]["phases"][0]["failed"]
    assert failed["node"] == "client-0"
    assert not (broken.path / "nodes" / "client-0" / "ledger.jsonl").exists()


def test_a_whole_store_that_is_gone_stays_refused_after_a_resume(run: Run) -> None:
    broken = run("method=fedavg", "federation.rounds=3", drop=once(lambda m: asks(m, round_number=3)))
    shutil.rmtree(broken.path / "nodes" / "client-0")
    resumed = run(path=broken.path, resume=True)
    assert resumed.error is None
    (failed,) = resumed.rounds[2]["phases"][0]["failed"]
    assert failed["reason"].startswith("store-lost")


def test_what_was_never_asked_is_not_counted_as_spent(run: Run) -> None:
    """Only in the round that was interrupted may an earlier try have been charged."""
    broken = run("method=fedavg", "federation.rounds=4", drop=once(lambda m: asks(m, round_number=2)))
    resumed = run(path=broken.path, resume=True, drop=lambda m: m.metadata.dst_node_id == 1002)
    assert resumed.error is None
    spent = {n["node"]: [e["round"] for e in n["entries"]] for n in resumed.json("privacy.json")["nodes"]}
    assert spent == {"client-0": [1, 2, 3, 4], "client-1": [1, 2, 3, 4], "client-2": [1, 2]}


# --- what cannot be resumed ----------------------------------------------------------------------


def test_a_new_run_does_not_write_into_a_broken_one(run: Run) -> None:
    broken = run("method=fedavg", drop=once(lambda m: asks(m, round_number=2)))
    again = run("method=fedavg", path=broken.path)
    assert "holds a run already" in str(again.error)


def test_a_complete_run_and_an_empty_folder_are_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    whole = run("method=probe")
    before = whole.json("summary.json")
    again = run(path=whole.path, resume=True)
    assert "is complete already" in str(again.error)
    assert whole.json("summary.json") == before
    assert "holds no run to resume" in str(run(path=tmp_path / "empty", resume=True).error)


def test_a_changed_configuration_or_code_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = run("method=fedavg", drop=once(lambda m: asks(m, round_number=2)))
    text = (broken.path / "config.yaml").read_text()
    (broken.path / "config.yaml").write_text(text.replace("lr: 0.5", "lr: 0.25"))
    assert "config.yaml was changed" in str(run(path=broken.path, resume=True).error)
    (broken.path / "config.yaml").write_text(text)
    saved = json.loads((broken.path / "run.json").read_text())
    (broken.path / "run.json").write_text(json.dumps({**saved, "code_hash": "0" * 64}))
    assert "the code was changed" in str(run(path=broken.path, resume=True).error)
    (broken.path / "run.json").write_text(json.dumps(saved))
    assert run(path=broken.path, resume=True).error is None


def test_no_second_server_drives_a_run_that_goes_on(run: Run) -> None:
    """A server may outlive the command that started it, and its lock with it."""
    errors: list[str] = []

    def again(message: Message) -> bool:
        if asks(message, round_number=2) and not errors:
            path = Path(message.content["request"]["store"]).parent
            errors.append(str(run(path=path, resume=True).error))
        return False

    outcome = run("method=probe", "federation.rounds=3", drop=again)
    assert outcome.error is None
    assert "is being run by another process" in errors[0]
    assert [r["round"] for r in outcome.rounds] == [1, 2, 3]


def test_time_goes_on_from_the_checkpoint(run: Run) -> None:
    broken = run("method=probe", drop=once(lambda m: asks(m, round_number=2)))
    (file,) = (broken.path / "checkpoints").glob("*")
    file.write_bytes(dataclasses.replace(Checkpoint.load(file), seconds=5000.0).to_bytes())
    resumed = run(path=broken.path, resume=True)
    assert 5000 < resumed.json("summary.json")["seconds"] < 5600


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"resume": "true"}, "without quotes"),
        ({"resume": True, "run-dir": ""}, "needs run-dir"),
        ({"resume": True, "seed": 3}, "seed is not allowed with resume"),
        ({"resume": True, "overrides": "train.lr=1"}, "overrides is not allowed with resume"),
    ],
)
def test_flowers_own_run_configuration_is_checked(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    from server_app.run import open_run

    context = SimpleNamespace(run_id=1, run_config={"run-dir": str(tmp_path / "run"), **config})
    with pytest.raises(ConfigError, match=words), open_run(context):  # type: ignore[arg-type]
        pass
    assert not (tmp_path / "run").exists()


def test_damaged_files_are_named(run: Run) -> None:
    broken = run("method=fedavg", drop=once(lambda m: asks(m, round_number=2)))
    (file,) = (broken.path / "checkpoints").glob("*")
    intact = file.read_bytes()
    file.write_bytes(intact[: len(intact) // 2])
    assert "is not a checkpoint that can be read" in str(run(path=broken.path, resume=True).error)
    file.write_bytes(intact)
    rounds = (broken.path / "rounds.jsonl").read_text()
    (broken.path / "rounds.jsonl").write_text(rounds + '{"round": 2, "pha')  # torn while it was written
    resumed = run(path=broken.path, resume=True)
    assert resumed.error is None
    assert [r["round"] for r in resumed.rounds] == [1, 2]


@pytest.mark.parametrize("connected", [True, False])
def test_a_node_that_is_away_at_the_resume_does_not_change_the_plan(
    run: Run, quick_wait: None, connected: bool
) -> None:
    """Who takes part when and how much noise everybody adds was fixed before the first round."""
    broken = run("method=fedavg", "federation.rounds=3", drop=once(lambda m: asks(m, round_number=2)))

    def silent(message: Message) -> bool:
        return message.metadata.dst_node_id == 1002

    resumed = run(path=broken.path, resume=True, nodes=3 if connected else 2, drop=silent)
    assert resumed.error is None
    for record in resumed.rounds[1:]:
        assert record["phases"][0]["sent"] == 3
        (failed,) = record["phases"][0]["failed"]
        assert failed == {"node": "client-2", "reason": "absent: the node is not connected"}
    sigmas = {e["sigma"] for n in resumed.json("privacy.json")["nodes"] for e in n["entries"]}
    assert len(sigmas) == 1


def test_a_checkpoint_keeps_state_and_facts_bit_by_bit(tmp_path: Path) -> None:
    state = {
        "a": torch.tensor([0.1, -0.0, 1e-45]),
        "slots": torch.tensor([3, 1], dtype=torch.int32),
        "count": torch.ones(()),
    }
    made = Checkpoint(7, state, ["n"], [("train", "n")], {"n": []}, {"round": 7}, {"n": {}}, 12.5)
    (tmp_path / "c").write_bytes(made.to_bytes())
    read = Checkpoint.load(tmp_path / "c")
    for name, value in state.items():
        assert read.state[name].dtype == value.dtype
        assert read.state[name].shape == value.shape
        assert torch.equal(read.state[name], value)
    assert torch.signbit(read.state["a"][1])
    for name in ("round", "met", "informed", "spent", "record", "traffic", "seconds"):
        assert getattr(read, name) == getattr(made, name)


def test_spending_survives_a_checkpoint() -> None:
    from privet.config import compose
    from privet.privacy.accounting import Step

    first, second = (Spending(compose([]).privacy) for _ in range(2))
    first.add("a", 1, "train", Step(0.1, 0.8, 4))
    first.add("a", 2, "train", Step(0.1, 0.8, 4))
    second.restore(json.loads(json.dumps(first.to_json())))
    assert second.epsilon("a") == first.epsilon("a")
    assert second.entries("a") == first.entries("a")
