"""Texts as words, for measures whose libraries expect words."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """Return the words and marks of a text as BLEU's 13a tokenisation has them, in lower case."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return str(Tokenizer13a()(text)).lower().split()
