"""Answers that last: what is known is not computed again, whatever ended the process before."""

from __future__ import annotations

import contextlib
from pathlib import Path

from privet.answers import Answers


class Model:
    """Answers a text with itself and a running number."""

    def __init__(self, texts: list[str], fail_at: int = 99) -> None:
        self.texts, self.fail_at, self.calls = texts, fail_at, list[list[int]]()

    def __call__(self, places: list[int]) -> list[str]:
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append(places)
        return [f"{self.texts[i]} {i}" for i in places]


def test_what_was_answered_before_the_end_is_kept(tmp_path: Path) -> None:
    texts, file = ["a", "b", "c", "d", "e"], tmp_path / "deep" / "answers.jsonl"
    broken = Model(texts, fail_at=2)
    with contextlib.suppress(KeyboardInterrupt):
        Answers(file).ask(texts, broken, at_once=2, what="asking")
    with file.open("a") as out:
        out.write('\n["a line that was cut o')
    model = Model(texts)
    assert Answers(file).ask(texts, model, at_once=2, what="asking") == ["a 0", "b 1", "c 2", "d 3", "e 4"]
    assert model.calls == [[4]]
    assert Answers(file).ask(texts, Model(texts, fail_at=0), at_once=2, what="asking")[4] == "e 4"


def test_the_same_question_again_is_asked_again(tmp_path: Path) -> None:
    """Where answers are drawn, as for pass@k, the second must not be the first once more."""
    texts, file = ["a", "b", "a"], tmp_path / "answers.jsonl"
    for fail_at in (99, 0):  # the second time from the file
        assert Answers(file).ask(texts, Model(texts, fail_at), at_once=2, what="asking") == [
            "a 0",
            "b 1",
            "a 2",
        ]


def test_without_a_file_nothing_is_left(tmp_path: Path) -> None:
    answers = Answers()
    assert answers.ask([["a", 1]], Model(["a"]), at_once=1, what="asking") == ["a 0"]
    assert list(tmp_path.iterdir()) == []
