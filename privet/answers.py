"""What a model has answered to long lists of questions, kept as it comes, so that nothing is asked twice."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Answers:
    """What a model has answered, one JSON line each, in a file that only grows.

    Parameters
    ----------
    file : Path or None
        Where it is kept; a last line that was cut off is left out. None: nowhere, and no progress is shown.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: dict[str, Any] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    key, answer = json.loads(line)
                except ValueError:
                    continue
                self._known[key] = answer

    def ask(
        self, questions: Sequence[Any], answer: Callable[[list[int]], list[Any]], *, at_once: int, what: str
    ) -> list[Any]:
        """Return an answer to every question; only those that are not known yet are computed.

        A question that stands in the list again has an answer of its own, as one that is drawn may differ.

        Parameters
        ----------
        questions : sequence
            JSON values that say all that an answer depends on, but for the model.
        answer : callable
            Answers the questions at some places of the list.
        at_once : int
            Questions between two writes of answers.
        what : str
            Names the work where progress is shown.
        """
        seen: Counter[str] = Counter()
        keys: list[str] = []
        for question in questions:
            key = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()
            keys.append(f"{key}#{seen[key]}")
            seen[key] += 1
        todo = [place for place, key in enumerate(keys) if key not in self._known]
        with self._progress(what, len(keys), len(keys) - len(todo)) as bar:
            for start in range(0, len(todo), at_once):
                places = todo[start : start + at_once]
                self._add({keys[i]: found for i, found in zip(places, answer(places), strict=True)})
                bar.update(len(places))
        return [self._known[key] for key in keys]

    def _add(self, found: dict[str, Any]) -> None:
        self._known |= found
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as out:
                out.writelines(f"\n{json.dumps(pair)}" for pair in found.items())

    def _progress(self, what: str, total: int, done: int) -> Any:
        from tqdm import tqdm

        return tqdm(total=total, initial=done, desc=what, leave=False, disable=self._file is None)
