"""`privet eval RUN --harness`: scores against the model's own likelihoods, answers that last, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privet.adapters import build_model, load_tokenizer
from privet.answers import Answers
from privet.cli import main
from privet.errors import PrivetError
from server_app import harness
from server_app.harness import Settings, benchmark
from server_app.saved import final_model
from tests.conftest import Outcome
from tests.kinds.conftest import AREAS, NAMES
from tests.strategies.session import finished

Run = Callable[..., Outcome]
QUESTIONS = [
    {"question": f"Where is {name} ?", "choices": AREAS, "answer": i % 3} for i, name in enumerate(NAMES)
]

CHOICE = """
task: nearby
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], do_sample: false, max_gen_toks: 3}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(q) for q in QUESTIONS))
    (folder / "nearby.yaml").write_text(CHOICE.format(path=path))
    (folder / "written.yaml").write_text(WRITTEN.format(path=path))
    return folder


@pytest.fixture
def trained(run: Run, language_tasks: dict[str, list[str]]) -> Path:
    outcome = run(
        *language_tasks["generation"], "method=fedavg", "privacy=none", "federation.rounds=1", "evaluation=none"
    )  # fmt: skip
    return finished(outcome).path


def likelihood(model: Any, tokenizer: Any, question: str, choice: str) -> float:
    given = tokenizer(question, add_special_tokens=False)["input_ids"]
    whole = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
    logits = model.module(input_ids=torch.tensor([whole]), attention_mask=torch.ones(1, len(whole)))
    logs = torch.log_softmax(logits[0].double(), -1)
    return float(sum(logs[i - 1, whole[i]] for i in range(len(given), len(whole))))


def test_choices_are_scored_by_the_trained_models_likelihoods(trained: Path, tasks: Path) -> None:
    (found,) = benchmark(trained, Settings(("nearby",), folder=tasks, batch=3))
    config, _, values = final_model(trained)
    model, tokenizer = build_model(config), load_tokenizer(config.model)
    model.load(values)
    best = [
        max(range(3), key=lambda i: likelihood(model, tokenizer, str(q["question"]), AREAS[i]))
        for q in QUESTIONS
    ]
    right = sum(b == q["answer"] for b, q in zip(best, QUESTIONS, strict=True))
    assert found.scores["nearby"]["acc"] == right / len(QUESTIONS)
    # It is the trained model that answers, by the numbers and not only by the choices.
    kept = [
        json.loads(line)
        for line in (trained / "eval/harness-nearby.answers.jsonl").read_text().split("\n")[1:]
    ]
    sums = sorted(likelihood(model, tokenizer, str(q["question"]), a) for q in QUESTIONS for a in AREAS)
    assert sorted(answer[0] for _, answer in kept) == pytest.approx(sums, abs=1e-4)
    record = json.loads(found.file.read_text())
    assert record["questions"] == {"nearby": 4}
    assert record["scores"] == found.scores


def test_a_command_that_was_broken_off_goes_on(
    trained: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    own = Answers.ask

    def ask(self: Answers, questions: Any, answer: Any, *, at_once: int, what: str) -> Any:
        def counted(places: list[int]) -> list[Any]:
            if len(asked) == 2:
                raise KeyboardInterrupt
            asked.append(len(places))
            return list(answer(places))

        return own(self, questions, counted, at_once=1, what=what)

    monkeypatch.setattr(Answers, "ask", ask)
    arguments = ["eval", str(trained), "--harness", "written", "--harness-tasks", str(tasks)]
    assert main(arguments) == 130
    file = trained / "eval" / "harness-written.answers.jsonl"
    with file.open("a") as out:
        out.write('\n["cut o')
    assert not (trained / "eval" / "harness-written.json").exists()
    left: list[int] = []

    def ask_again(self: Answers, questions: Any, answer: Any, *, at_once: int, what: str) -> Any:
        def counted(places: list[int]) -> list[Any]:
            left.append(len(places))
            return list(answer(places))

        return own(self, questions, counted, at_once=at_once, what=what)

    monkeypatch.setattr(Answers, "ask", ask_again)
    assert main([*arguments, "--json"]) == 0
    assert asked == [1, 1]
    assert sum(left) == len(QUESTIONS) - 2
    scores = json.loads(capsys.readouterr().out)
    assert 0 <= scores["written"]["written"]["exact_match"] <= 1


def test_a_limit_is_said(trained: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["eval", str(trained), "--harness", "nearby", "--harness-tasks", str(tasks), "--limit", "2"])
        == 0
    )
    said = capsys.readouterr().out
    assert "the first 2 questions only: no benchmark's score" in said
    record = json.loads((trained / "eval" / "harness-nearby.json").read_text())
    assert (record["questions"], record["limit"]) == ({"nearby": 2}, 2)


def test_what_cannot_be_asked_is_refused(
    trained: Path, tasks: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--harness", "nearbi", "--harness-tasks", str(tasks)], "nearby"),
        (["--harness", ""], "needs names of tasks"),
        (["--harness", "nearby", "--limit", "0"], "--limit 0 is not allowed"),
        (["--harness", "nearby", "--harness-tasks", str(tasks / "none")], "is no folder"),
        (["task=csv", "--harness", "nearby"], "does not go with --harness"),
        (["--harness", "nearby", "--personal"], "--personal does not go with --harness"),
        (["--limit", "0"], "--limit goes with --harness"),
        (["--run-code"], "--run-code goes with --harness"),
    ):
        assert main(["eval", str(trained), *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    (tasks / "nearby.yaml").write_text((tasks / "nearby.yaml").read_text().replace(".jsonl", ".gone"))
    with pytest.raises(PrivetError, match="nearby could not be scored"):
        list(benchmark(trained, Settings(("nearby",), folder=tasks)))
    (tasks / "written.yaml").write_text((tasks / "written.yaml").read_text() + "unsafe_code: true\n")
    with pytest.raises(PrivetError, match="--run-code allows that"):
        list(benchmark(trained, Settings(("written",), folder=tasks)))
    other = finished(run("method=fedavg", "privacy=none", "federation.rounds=1", "evaluation=none"))
    with pytest.raises(PrivetError, match="asks language models"):
        list(benchmark(other.path, Settings(("nearby",))))
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(PrivetError, match=r"privet\[eval\]"):
        list(benchmark(trained, Settings(("nearby",))))
