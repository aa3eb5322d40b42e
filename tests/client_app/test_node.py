"""A node's duties: what it checks, refuses, charges and answers, whatever the server says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from client_app.node import answer_describe, answer_train
from client_app.node_config import NodeConfig
from privet.adapters import adapter_spec, initial_tensors
from privet.config import Config, compose
from privet.errors import Refusal
from privet.plan import required_sigma
from privet.privacy.ledger import Ledger
from privet.wire import (
    Payload,
    Reply,
    Request,
    code_hash,
    pack_request,
    unpack_description,
    unpack_failure,
    unpack_reply,
)

NODE = {"partition-id": 0, "num-partitions": 3}
ROWS = 50  # of client 0: 150 training rows over three clients


@pytest.fixture
def config(settings: list[str]) -> Config:
    return compose([*settings, "method=ffa_lora"])


@pytest.fixture
def ask(config: Config, tmp_path: Path) -> Callable[..., Request]:
    """Make the request that an honest server would send, with changes."""

    def make(**changes: Any) -> Request:
        settings = changes.pop("config", config)
        spec = adapter_spec(settings)
        start = initial_tensors(spec, settings.seed, settings.task.head)
        planned = settings.train.steps(ROWS) * settings.federation.rounds
        private = settings.privacy.private
        q = settings.train.batch_size / ROWS
        values: dict[str, Any] = {
            "run": "run-1",
            "round": 1,
            "phase": "train",
            "node": "client-0",
            "config": settings.to_json(),
            "config_hash": settings.hash,
            "code_hash": code_hash(),
            "store": str(tmp_path / "nodes"),
            "sigma": required_sigma(settings, q, planned) if private else 0.0,
            "planned_steps": planned,
            "payload": Payload({n: start[n] for n in spec.b}, {n: start[n] for n in spec.head}),
        }
        return Request(**{**values, **changes})

    return make


def answer(request: Request, node: dict[str, Any] = NODE) -> RecordDict:
    return answer_train(pack_request(request), node)


def trained(request: Request, node: dict[str, Any] = NODE) -> Reply:
    content = answer(request, node)
    assert unpack_failure(content) is None, unpack_failure(content)
    return unpack_reply(content)


def refused(request: Request, node: dict[str, Any] = NODE, *, uncharged: bool = True) -> str:
    failed = unpack_failure(answer(request, node))
    assert failed is not None
    assert failed.uncharged == uncharged
    assert "\n" not in failed.reason
    return failed.kind


def ledger(request: Request, node: str = "client-0") -> Ledger:
    return Ledger.load(Path(request.store) / node / "ledger.jsonl")


def entries(request: Request) -> int:
    path = Path(request.store) / "client-0" / "ledger.jsonl"
    return len(ledger(request).entries) if path.exists() else 0


def test_describe_says_who_and_how_many(ask: Callable[..., Request]) -> None:
    content = answer_describe(pack_request(ask(phase="describe", round=0)), NODE)
    description = unpack_description(content)
    assert (description.node, description.examples) == ("client-0", ROWS)
    assert description.code_hash == code_hash()


def test_a_phase_is_charged_before_it_is_answered(ask: Callable[..., Request], config: Config) -> None:
    request = ask()
    reply = trained(request)
    (entry,) = ledger(request).entries
    assert (entry.steps, entry.q, entry.sigma, entry.clip) == (
        2,
        16 / ROWS,
        request.sigma,
        config.privacy.clip,
    )
    assert (reply.steps, reply.q, reply.sigma, reply.examples) == (2, 16 / ROWS, request.sigma, ROWS)
    assert entry.request == request.fingerprint


def test_a_crash_between_charge_and_reply_leaves_the_charge(
    ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_app import trainer

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.GradientEngine, "private_sum", die)
    with pytest.raises(KeyboardInterrupt):
        answer(ask())
    assert entries(ask()) == 1


def test_a_repeated_request_is_answered_from_the_store_uncharged(ask: Callable[..., Request]) -> None:
    first, second = trained(ask()), trained(ask())
    assert entries(ask()) == 1
    for name, value in first.payload.adapter.items():
        assert torch.equal(value, second.payload.adapter[name])


def test_the_same_round_with_another_request_is_refused(ask: Callable[..., Request]) -> None:
    trained(ask())
    other = ask()
    moved = {n: v + 1 for n, v in other.payload.adapter.items()}
    assert (
        refused(dataclasses.replace(other, payload=Payload(moved, other.payload.head)), uncharged=False)
        == "replay"
    )
    assert entries(other) == 1


def test_under_dp_only_public_constants_leave(ask: Callable[..., Request]) -> None:
    reply = trained(ask())
    assert reply.train_loss != reply.train_loss
    assert reply.grad_norm != reply.grad_norm
    log = (Path(ask().store) / "client-0" / "log.jsonl").read_text()
    assert json.loads(log)["train_loss"] > 0  # the node itself may know


def test_without_dp_and_with_diagnostics_the_loss_is_shown(
    ask: Callable[..., Request], settings: list[str]
) -> None:
    plain = compose([*settings, "method=ffa_lora", "privacy=none"])
    assert trained(ask(config=plain, run="plain")).train_loss > 0
    shown = compose([*settings, "method=ffa_lora", "privacy.diagnostics=true"])
    assert trained(ask(config=shown, run="shown")).grad_norm > 0


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"config_hash": "0" * 64}, "config-hash"),
        ({"code_hash": "0" * 64}, "code-hash"),
        ({"node": "client-1"}, "another-node"),
        ({"phase": "steal"}, "phase"),
        ({"sigma": 0.01}, "sigma"),
        ({"sigma": float("nan")}, "sigma"),
        ({"planned_steps": 1}, "sigma"),
        ({"run": "../other"}, "malformed"),
        ({"payload": Payload()}, "shape"),
    ],
)
def test_a_lying_request_is_refused_before_any_charge(
    ask: Callable[..., Request], changes: dict[str, Any], kind: str
) -> None:
    assert refused(ask(**changes)) == kind
    assert entries(ask()) == 0


def test_sigma_planned_for_fewer_steps_is_too_low(ask: Callable[..., Request], config: Config) -> None:
    """Rule 9: noise calibrated for 2 steps does not do for the 4 that the schedule gives."""
    low = required_sigma(config, 16 / ROWS, 2)
    assert refused(ask(sigma=low)) == "sigma"


def test_steps_beyond_the_budget_are_refused_whatever_was_planned(
    ask: Callable[..., Request], config: Config
) -> None:
    low = required_sigma(config, 16 / ROWS, 2)
    liar = {"sigma": low, "planned_steps": 2}
    trained(ask(**liar))
    assert refused(ask(**liar, round=2)) == "budget"
    assert ledger(ask()).spent("run-1", "rdp") <= 6.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_arrays_that_are_not_finite_are_refused(ask: Callable[..., Request], bad: float) -> None:
    request = ask()
    spoilt = {n: v.clone().fill_(bad) for n, v in request.payload.adapter.items()}
    assert (
        refused(dataclasses.replace(request, payload=Payload(spoilt, request.payload.head))) == "non-finite"
    )


def test_a_run_is_frozen_at_first_contact(ask: Callable[..., Request], settings: list[str]) -> None:
    trained(ask())
    changed = compose([*settings, "method=ffa_lora", "train.lr=0.25"])
    assert refused(ask(config=changed, round=2)) == "changed"
    assert refused(ask(planned_steps=40, sigma=9.0, round=2)) == "changed"
    trained(ask(round=2))
    assert (
        refused(
            ask(
                round=1,
                payload=Payload(
                    *[{k: v + 1 for k, v in p.items()} for p in (ask().payload.adapter, ask().payload.head)]
                ),
            )
        )
        == "order"
    )


def test_rows_that_change_during_a_run_are_refused(
    ask: Callable[..., Request], tmp_path: Path, settings: list[str]
) -> None:
    from tests.conftest import write_table

    table = write_table(tmp_path / "own.csv", ROWS)
    node = {"name": "client-0", "data-path": str(table), "store": str(tmp_path / "store")}
    trained(ask(), node)
    write_table(table, ROWS, seed=5)
    assert refused(ask(round=2), node) == "changed"


def test_a_node_with_only_a_data_path_works(
    ask: Callable[..., Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.conftest import write_table

    monkeypatch.setenv("HOME", str(tmp_path))
    node = {"data-path": str(write_table(tmp_path / "own.csv", ROWS))}
    name = NodeConfig.read(node).name
    trained(ask(node=name), node)
    assert (tmp_path / ".privet" / "nodes" / name / "ledger.jsonl").is_file()


def test_a_node_started_with_nothing_names_the_missing_key(ask: Callable[..., Request]) -> None:
    failed = unpack_failure(answer(ask(), {}))
    assert failed is not None
    assert "data-path" in failed.reason


def test_declared_rows_are_what_crosses_and_what_sets_q(
    ask: Callable[..., Request], tmp_path: Path, config: Config
) -> None:
    from tests.conftest import write_table

    table = write_table(tmp_path / "own.csv", ROWS)
    node = {
        "name": "client-0",
        "data-path": str(table),
        "store": str(tmp_path / "store"),
        "public-examples": 40,
    }
    request = ask(sigma=required_sigma(config, 16 / 40, 4))
    reply = trained(request, node)
    assert (reply.examples, reply.q) == (40, 16 / 40)


def test_a_nodes_lifetime_cap_holds_across_runs(ask: Callable[..., Request], tmp_path: Path) -> None:
    capped = {**NODE, "max-epsilon": 6.4}
    trained(ask(), capped)
    trained(ask(round=2), capped)
    content = answer(ask(run="run-2"), capped)
    failed = unpack_failure(content)
    assert failed is not None
    assert failed.kind == "budget"
    assert "max-epsilon" in failed.reason


def test_a_run_that_cannot_end_within_the_cap_is_refused_before_it_costs_anything(
    ask: Callable[..., Request], tmp_path: Path
) -> None:
    """Its own epsilon fits; all of its rounds, as the lifetime counts them, do not."""
    content = answer(ask(), {**NODE, "max-epsilon": 6.0})
    failed = unpack_failure(content)
    assert failed is not None
    assert (failed.kind, failed.uncharged) == ("budget", True)
    assert "that run" in failed.reason
    (path,) = tmp_path.rglob("ledger.jsonl")
    assert not Ledger.load(path).entries
    trained(ask(), {**NODE, "max-epsilon": 6.4})


def test_seeded_noise_and_diagnostics_are_for_simulations(
    ask: Callable[..., Request], tmp_path: Path, settings: list[str]
) -> None:
    from tests.conftest import write_table

    table = write_table(tmp_path / "own.csv", ROWS)
    node = {"name": "client-0", "data-path": str(table), "store": str(tmp_path / "store")}
    for setting, kind in (
        ("privacy.randomness=seeded", "seeded"),
        ("privacy.diagnostics=true", "diagnostics"),
    ):
        assert refused(ask(config=compose([*settings, "method=ffa_lora", setting])), node) == kind


def test_seeded_runs_repeat_and_secure_runs_do_not(
    ask: Callable[..., Request], tmp_path: Path, settings: list[str]
) -> None:
    def values(setting: str, where: str) -> torch.Tensor:
        config = compose([*settings, "method=ffa_lora", f"privacy.randomness={setting}"])
        reply = trained(ask(config=config, store=str(tmp_path / where)))
        return torch.cat([v.flatten() for v in reply.payload.adapter.values()])

    assert torch.equal(values("seeded", "a"), values("seeded", "b"))
    assert not torch.equal(values("secure", "c"), values("secure", "d"))
    assert not torch.equal(values("fast", "e"), values("fast", "f"))


def test_a_class_outside_strategies_is_never_imported(ask: Callable[..., Request], config: Config) -> None:
    for target in ("os.system", "strategies.base.load_method", "strategies.nothing.Here", "strategies..x.Y"):
        bad = dataclasses.replace(config, method=dataclasses.replace(config.method, target=target))
        failed = unpack_failure(answer(ask(config=bad)))
        assert failed is not None
        assert failed.kind == "config"
        assert "_target_" in failed.reason


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 80])
def test_node_names_that_could_leave_a_folder_are_refused(name: str) -> None:
    with pytest.raises(Refusal):
        NodeConfig.read({"name": name, "partition-id": 0})


def test_a_damaged_store_is_refused_and_named_locally_only(ask: Callable[..., Request]) -> None:
    trained(ask())
    path = Path(ask().store) / "client-0" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"steps":2', '"steps":1'))
    failed = unpack_failure(answer(ask(round=2)))
    assert failed is not None
    assert (failed.kind, failed.reason) == ("store", "the node's own log has the reason")


def test_a_lost_ledger_stops_training(ask: Callable[..., Request]) -> None:
    trained(ask())
    (Path(ask().store) / "client-0" / "ledger.jsonl").unlink()
    assert refused(ask(round=2), uncharged=False) == "store"


def own_table(tmp_path: Path, rows: int = ROWS, **keys: Any) -> dict[str, Any]:
    """Node configuration of a real node called client-0 with its own table and store."""
    from tests.conftest import write_table

    table = write_table(tmp_path / "own.csv", rows)
    node = {"name": "client-0", "data-path": str(table), "store": str(tmp_path / "store")}
    return {**node, **{k.replace("_", "-"): v for k, v in keys.items()}}


@pytest.mark.parametrize("keys", [{}, {"max_epsilon": 3.0}])
def test_a_real_node_trains_without_dp_only_if_its_owner_says_so(
    ask: Callable[..., Request], tmp_path: Path, settings: list[str], keys: dict[str, Any]
) -> None:
    plain = compose([*settings, "method=ffa_lora", "privacy=none"])
    node = own_table(tmp_path, **keys)
    assert refused(ask(config=plain), node) == "not-private"
    assert not (tmp_path / "store" / "log.jsonl").exists()
    assert trained(ask(config=plain), {**node, "allow-non-private": True}).steps == 2


def test_a_cap_on_epsilon_is_a_cap_on_delta_too(
    ask: Callable[..., Request], tmp_path: Path, settings: list[str]
) -> None:
    loose = compose([*settings, "method=ffa_lora", "privacy.delta=0.9", "privacy.epsilon=2.9"])
    node = own_table(tmp_path, max_epsilon=3.0)
    assert refused(ask(config=loose), node) == "delta"
    assert not (tmp_path / "store" / "ledger.jsonl").exists()


def test_describe_is_no_count_query(ask: Callable[..., Request], tmp_path: Path, settings: list[str]) -> None:
    """What a real node declares does not depend on what the server's task selects."""
    node = own_table(tmp_path)
    counts = set()
    for labels in ("[no,yes]", "[no,zzz]", "[zzz,yyy]"):
        config = compose([*settings, "method=ffa_lora", f"task.labels={labels}"])
        request = ask(config=config, phase="describe")
        counts.add(unpack_description(answer_describe(pack_request(request), node)).examples)
    assert counts == {ROWS}


def test_a_real_node_without_a_usable_row_trains_on_noise(
    ask: Callable[..., Request], tmp_path: Path, settings: list[str]
) -> None:
    config = compose([*settings, "method=ffa_lora", "task.labels=[zzz,yyy]"])
    reply = trained(ask(config=config), own_table(tmp_path))
    assert reply.examples == ROWS
    assert all(bool((v != 0).all()) for v in reply.payload.adapter.values())


def test_an_old_request_does_not_bring_back_an_old_head(
    ask: Callable[..., Request], settings: list[str]
) -> None:
    config = compose([*settings, "method=ffa_lora", "task.head=local", "evaluation=none"])
    spec = adapter_spec(config)
    start = Payload({n: torch.zeros(s) for n, s in spec.b.items()})
    requests = [ask(config=config, round=r, payload=start) for r in (1, 2)]
    for request in requests:
        trained(request)
    kept = Path(requests[0].store) / "client-0"

    def head() -> set[str]:
        (file,) = (f for f in kept.rglob("*.json") if "kept-" in f.name)
        return {
            requests[i].fingerprint[:16] for i in (0, 1) if requests[i].fingerprint[:16] in file.read_text()
        }

    assert head() == {requests[1].fingerprint[:16]}
    trained(requests[0])  # answered from the store
    assert head() == {requests[1].fingerprint[:16]}


def test_an_error_after_rows_were_drawn_crosses_as_its_kind_only(
    ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_app import trainer
    from privet.errors import ConfigError

    def explode(*_: object, **__: object) -> None:
        raise ConfigError("saw 13 rows in a micro-batch of 7")

    monkeypatch.setattr(trainer.GradientEngine, "accumulate", explode)
    failed = unpack_failure(answer(ask()))
    assert failed is not None
    assert (failed.kind, failed.reason, failed.uncharged) == (
        "config",
        "the node's own log has the reason",
        False,
    )


def test_a_model_that_cannot_train_row_by_row_costs_nothing_and_is_told(
    ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_app import trainer
    from privet.errors import ConfigError

    def explode(*_: object, **__: object) -> None:
        raise ConfigError("layer 3: the loss of one example has a gradient in the rows of others")

    monkeypatch.setattr(trainer.GradientEngine, "refuse_mixing", explode)
    failed = unpack_failure(answer(ask()))
    assert failed is not None
    assert (failed.kind, failed.uncharged) == ("config", True)
    assert failed.reason.startswith("layer 3: the loss of one example")
    assert entries(ask()) == 0
    monkeypatch.undo()
    trained(ask())  # the same request again, as nothing was charged for it


def test_a_phase_that_was_cut_off_is_neither_repeated_nor_called_uncharged(
    ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_app import trainer

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.GradientEngine, "private_sum", die)
    with pytest.raises(KeyboardInterrupt):
        answer(ask())
    monkeypatch.undo()
    for _ in range(2):
        assert refused(ask(), uncharged=False) == "charged"
    assert entries(ask()) == 1
    trained(ask(round=2))
    assert [(e.round, e.steps) for e in ledger(ask()).entries] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_epsilon": 3}, "did you mean 'max-epsilon'"),
        ({"max-epsilon": 0.0}, "greater than 0"),
        ({"max-epsilon": "3"}, "max-epsilon"),
        ({"public-examples": 0}, "at least 1"),
        ({"store": "relative/folder"}, "absolute"),
    ],
)
def test_wrong_node_settings_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        NodeConfig.read({"partition-id": 0, **keys})


def test_a_refused_request_does_not_move_the_node_to_its_round(
    ask: Callable[..., Request], settings: list[str]
) -> None:
    config = compose([*settings, "method=ffa_lora", "federation.rounds=3"])
    trained(ask(config=config))
    assert refused(ask(config=config, round=3, phase="warmup")) == "phase"  # the method has no warm-up
    assert refused(ask(config=config, round=3, sigma=0.01)) == "sigma"
    trained(ask(config=config, round=2))


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16])
def test_arrays_of_another_type_are_refused(ask: Callable[..., Request], kind: torch.dtype) -> None:
    request = ask()
    name, value = next(iter(request.payload.adapter.items()))
    adapter = {**request.payload.adapter, name: torch.zeros(value.shape).to(kind)}
    wrong = dataclasses.replace(request, payload=Payload(adapter, request.payload.head))
    assert refused(wrong) == "shape"
