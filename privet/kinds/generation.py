"""A text after a prompt, for example a sentence that says what a table says."""

from __future__ import annotations

from typing import Any, ClassVar

from privet.data.examples import Examples
from privet.kinds.language import LanguageKind


class Generation(LanguageKind):
    """The answer follows the task's ``prompt`` and ends with the tokenizer's end of text."""

    name: ClassVar[str] = "generation"
    specials = True

    def texts(self, tokenizer: Any, examples: Examples) -> tuple[list[str], list[str]]:
        """Return prompts and answers as they are."""
        return fill(self._prompt, examples), list(examples.targets or [])


def fill(prompt: str | None, examples: Examples) -> list[str]:
    """Return the prompt of every row: the row's texts in place of ``{text}`` and ``{pair}``."""
    form = prompt or "{text}"
    pairs = examples.pairs or [""] * len(examples)
    # In one pass, so that a text which says {pair} stays as it is.
    return [
        pair.join(part.replace("{text}", text) for part in form.split("{pair}"))
        for text, pair in zip(examples.texts, pairs, strict=True)
    ]
