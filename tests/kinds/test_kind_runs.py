"""Every kind of task in whole runs on tiny models: the loss falls without privacy, the budget holds with it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

KINDS = ["generation", "instructions"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_without_privacy(
    kind: str, run: Callable[..., Any], language_tasks: dict[str, list[str]]
) -> None:
    result = run(
        *language_tasks[kind], "method=fedavg", "privacy=none", "federation.rounds=3", "train.optimizer=adamw",
        "train.lr=0.02", "train.local_steps=4", "evaluation=both",
    )  # fmt: skip
    assert result.error is None
    scores = [r["eval"] for r in result.rounds]
    assert scores[-1]["loss"] < scores[0]["loss"] < 4
    assert scores[-1]["loss"] < 1.8
    assert scores[-1]["perplexity"] == pytest.approx(math.exp(scores[-1]["loss"]))
    held = result.rounds[-1]["eval_clients"]["global"]  # on rows of the clients that do not train
    assert held["loss"] < 1.8
    assert held["perplexity"] > 1
    assert result.rounds[-1]["train_loss"] < result.rounds[0]["train_loss"]
    assert result.json("summary.json")["status"] == "completed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fedavg", "ffa_lora"])
def test_the_budget_holds(
    kind: str, method: str, run: Callable[..., Any], language_tasks: dict[str, list[str]]
) -> None:
    result = run(*language_tasks[kind], f"method={method}", "privacy.epsilon=3")
    assert result.error is None
    assert 2.5 < result.json("privacy.json")["max_epsilon"] <= 3
    assert result.rounds[-1]["train_loss"] is None
    assert math.isfinite(result.rounds[-1]["eval"]["loss"])
    assert result.rounds[-1]["phases"][-1]["failed"] == []


def test_the_adapter_is_a_language_models_and_its_card_loads_it(
    tmp_path: Path,
    run: Callable[..., Any],
    language_tasks: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The card's own lines, on a saved base model, give the loss that the run's last round had."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=48, initializer_range=0.2, **sizes))
    base.save_pretrained(tmp_path / "tokenizer")
    result = run(
        *[o for o in language_tasks["generation"] if "model." not in o and "model=" not in o], "model=pretrained",
        f"model.path={tmp_path / 'tokenizer'}", "model.lora.targets=[q_proj,v_proj]", "model.max_length=32",
        "method=fedavg", "privacy=none", "train.optimizer=adamw", "train.lr=0.02",
    )  # fmt: skip
    assert result.error is None
    card = (result.path / "adapter" / "README.md").read_text()
    assert "goes on from prompts of the form '{text}\\n'" in card
    monkeypatch.chdir(result.path)
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    assert names["written"].shape[1] > names["prompt"]["input_ids"].shape[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    lines = (tmp_path / "test.csv").read_text().splitlines()[1:]
    total, tokens = 0.0, 0
    for row in csv.reader(lines):
        given, learned = tokenizer.encode(row[0]), [*tokenizer.encode(row[1]), tokenizer.eos_token_id]
        with torch.no_grad():
            logits = names["model"](torch.tensor([given + learned])).logits[0].log_softmax(-1)
        total -= float(sum(logits[len(given) - 1 + i, t] for i, t in enumerate(learned)))
        tokens += len(learned)
    assert result.rounds[-1]["eval"]["loss"] == pytest.approx(total / tokens, rel=1e-4)


def test_a_probe_has_nothing_to_train(run: Callable[..., Any], language_tasks: dict[str, list[str]]) -> None:
    error = run(*language_tasks["generation"], "method=probe").error
    assert "which a language model (task.kind=generation) has not" in str(error)
