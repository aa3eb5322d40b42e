"""An answer to a question about an image."""

from __future__ import annotations

from typing import ClassVar

from privet.kinds.seeing import SeeingKind


class VisualQuestion(SeeingKind):
    """Questions in ``{text}``, with ``{choices}`` to choose from or not; the answer is a text or a choice's letter."""

    name: ClassVar[str] = "visual_question"
