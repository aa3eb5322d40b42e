"""Texts that a model writes: as it would write them alone, whatever stands beside them in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from privet.adapters import AdaptedModel, build_model, load_tokenizer
from privet.answers import Answers
from privet.config import compose
from privet.data.examples import Examples
from privet.kinds.catalogue import kind_of
from privet.kinds.writing import by_prompt, write
from privet.predict import macro_f1

PROMPTS = [[6, 15, 24], [7], [9, 10, 11, 12, 13], [6, 15], [8, 9]]


@pytest.fixture
def model(small_model: list[str]) -> tuple[AdaptedModel, Any]:
    config = compose([*small_model, "task=e2e", "task.path=x", "task.test_path=y"])
    adapted = build_model(config)
    generator = torch.Generator().manual_seed(1)
    adapted.load({n: torch.randn(v.shape, generator=generator) * 0.3 for n, v in adapted.initial().items()})
    return adapted, load_tokenizer(config.model)


def greedily(model: AdaptedModel, prompt: list[int], most: int, end: int) -> list[int]:
    """One token after the other, each time from the whole text."""
    ids: list[int] = []
    while len(ids) < most and end not in ids:
        with torch.no_grad():
            logits = model.module(input_ids=torch.tensor([prompt + ids]))
        ids.append(int(logits[0, -1].argmax()))
    return ids


def test_a_batch_is_written_as_each_text_alone(model: tuple[AdaptedModel, Any]) -> None:
    adapted, tokenizer = model
    got = write(adapted, tokenizer, PROMPTS, [tokenizer.eos_token_id], beams=1, most=6)
    want = [greedily(adapted, prompt, 6, tokenizer.eos_token_id) for prompt in PROMPTS]
    assert got == [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in want]
    assert len(set(got)) > 1


def test_more_beams_find_a_likelier_text(model: tuple[AdaptedModel, Any]) -> None:
    adapted, tokenizer = model

    def likelihood(texts: list[list[int]]) -> float:
        total = 0.0
        for prompt, ids in zip(PROMPTS, texts, strict=True):
            with torch.no_grad():
                logits = adapted.module(input_ids=torch.tensor([prompt + ids]))[0].log_softmax(-1)
            total += sum(float(logits[len(prompt) - 1 + i, t]) for i, t in enumerate(ids))
        return total

    written = {}
    for beams in (1, 4):
        texts = write(adapted, tokenizer, PROMPTS, [], beams=beams, most=4)
        written[beams] = [tokenizer.encode(text) for text in texts]
    if all(len(ids) == 4 for texts in written.values() for ids in texts):  # else special tokens were left out
        assert likelihood(written[4]) >= likelihood(written[1])


def test_answers_to_one_prompt_are_its_references() -> None:
    prompts, references = by_prompt(["p", "q", "p", "r"], ["1", "2", "3", "4"], most=2)
    assert prompts == ["p", "q"]
    assert references == [["1", "3"], ["2"]]


def test_every_prompt_is_judged_once_against_all_its_answers(
    small_model: list[str], model: tuple[AdaptedModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import privet.kinds.language

    seen: list[Any] = []

    def measure(*arguments: Any) -> dict[str, float]:
        seen.append(arguments)
        return {"bleu": 1.0}

    monkeypatch.setattr(privet.kinds.language, "measure", measure)
    config = compose(
        [*small_model, "task=e2e", "task.path=x", "task.test_path=y", "task.writing.measures=[bleu]"]
    )
    data = Examples(
        ["name", "Where", "name"], None, np.zeros(3, dtype=np.int64), targets=["is", "the", "near"]
    )
    assert kind_of(config).judge(model[0], model[1], data, 32, Answers()) == {"bleu": 1.0}
    ((names, written, references),) = seen
    assert (names, len(written), references) == (("bleu",), 2, [["is", "near"], ["the"]])


def test_the_last_round_is_judged(run: Callable[..., Any], language_tasks: dict[str, list[str]]) -> None:
    tasks = [o for o in language_tasks["generation"] if o != "task.writing=null"]
    result = run(
        *tasks, "method=fedavg", "privacy=none", "task.writing.measures=[exact_match]", "task.writing.max_tokens=4",
        "task.writing.rows=5", "train.local_steps=1",
    )  # fmt: skip
    assert result.error is None
    assert ["exact_match" in r["eval"] for r in result.rounds] == [False, True]
    assert result.json("summary.json")["metrics"]["exact_match"] == 0


def test_a_measure_that_cannot_be_is_refused_before_anything_trains(
    run: Callable[..., Any], language_tasks: dict[str, list[str]]
) -> None:
    tasks = [o for o in language_tasks["generation"] if o != "task.writing=null"]
    error = run(*tasks, "method=fedavg", "task.writing.measures=[blue]").error
    assert "unknown measure 'blue' - did you mean 'bleu'" in str(error)


def test_macro_f1_by_hand() -> None:
    # Label 0: 1 hit of 2 guesses and 3 rows; label 1: 2 hits of 3 guesses and 2 rows; label 2 stands nowhere.
    guesses, labels = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 1, 3, 0])
    assert macro_f1(guesses, labels) == pytest.approx((2 * 1 / 4 + 2 * 2 / 5 + 0) / 3)
    assert macro_f1(labels, labels) == 1
