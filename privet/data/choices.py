"""Questions with answers to choose from: lists become lettered lines, and the answer one of the letters."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

LETTERS = string.ascii_uppercase


def letter_choices(frame: pd.DataFrame, choices: str, answer: str) -> tuple[pd.DataFrame, str]:
    """Return the table with every list of choices as lettered lines, and the name of a new column of answers' letters.

    An answer is the place of a choice (from 0), its letter or its text. A row whose choices are no list, or whose
    answer is none of them, has no answer.
    """
    name = f"letter of {answer}"
    rows = [_row(c, a) for c, a in zip(frame[choices], frame[answer], strict=True)]
    return frame.assign(**{choices: [text for text, _ in rows], name: [letter for _, letter in rows]}), name


def _row(cell: Any, answer: Any) -> tuple[str, str]:
    if not isinstance(cell, (list, tuple, np.ndarray)) or not 0 < len(cell) <= len(LETTERS):
        return "", ""
    texts = [str(choice).strip() for choice in cell]
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    place = _place(texts, answer)
    return lines, "" if place is None else LETTERS[place]


def _place(texts: list[str], answer: Any) -> int | None:
    """Return which of the choices an answer is; its own text goes before a number that it could be read as."""
    text = str(answer).strip()
    if isinstance(answer, str) and text in texts:
        return texts.index(text)
    if len(text) == 1 and text in LETTERS[: len(texts)]:
        return LETTERS.index(text)
    try:
        place = int(float(text))
    except (ValueError, OverflowError):
        return None
    return place if place == float(text) and 0 <= place < len(texts) else None
