"""What a model has answered to long lists of questions, kept as it comes, so that nothing is asked twice."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Answered = Callable[[list[Any]], list[Any]]


class Answers:
    """What a model has answered, one JSON line each, in a file that only grows.

    Parameters
    ----------
    file : Path
        Where it is kept; a last line that was cut off is left out.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Any] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                try:
                    key, answer = json.loads(line)
                except ValueError:
                    continue
                self._known[key] = answer

    def ask(self, kind: str, questions: Sequence[Any], answer: Answered, at_once: int) -> list[Any]:
        """Return an answer to every question; only those that are not known yet are computed, `at_once` at a time.

        A question that stands in the list again has an answer of its own, as one that is drawn may differ.
        """
        seen: Counter[str] = Counter()
        keys = []
        for question in questions:
            key = _key(kind, question.args)
            keys.append(f"{key}#{seen[key]}")
            seen[key] += 1
        missing = {
            key: question for key, question in zip(keys, questions, strict=True) if key not in self._known
        }
        todo = list(missing.items())
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as out, _progress(kind, len(keys), len(keys) - len(todo)) as bar:
            for start in range(0, len(todo), at_once):
                part = todo[start : start + at_once]
                for (key, _), found in zip(part, answer([question for _, question in part]), strict=True):
                    self._known[key] = found
                    out.write("\n" + json.dumps([key, found]))
                out.flush()
                bar.update(len(part))
        return [self._known[key] for key in keys]


def _progress(kind: str, total: int, done: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=done, desc=kind.replace("_", " "), unit="question", leave=False)


def _key(kind: str, asked: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps([kind, *asked], sort_keys=True, default=str).encode()).hexdigest()
