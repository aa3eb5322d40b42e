"""METEOR, which is a Java program that pycocoevalcap carries."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from privet.errors import ConfigError


def check_java() -> None:
    """Raise ConfigError where there is no Java."""
    if shutil.which("java") is None:
        raise ConfigError(
            "meteor is a Java program and there is no java on this machine: install a Java runtime, "
            "or leave it out of task.writing.measures"
        )


def meteor(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return METEOR 1.5 (English, normalised), from 0 to 1."""
    check_java()
    from pycocoevalcap.meteor.meteor import Meteor

    scorer = Meteor()
    try:
        said = {i: [_line(text)] for i, text in enumerate(written)}
        wanted = {i: [_line(text) for text in texts] for i, texts in enumerate(references)}
        return float(scorer.compute_score(wanted, said)[0])
    finally:
        scorer.meteor_p.kill()
        scorer.meteor_p.wait()


def _line(text: str) -> str:
    """Return a text without what the program reads as the end of a field."""
    return " ".join(text.replace("|||", " ").lower().split()) or "."
