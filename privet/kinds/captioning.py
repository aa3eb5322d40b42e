"""A text that says what an image shows."""

from __future__ import annotations

from typing import ClassVar

from privet.kinds.seeing import SeeingKind


class Captioning(SeeingKind):
    """The prompt is the same for all rows; all captions of an image are references for what is written of it."""

    name: ClassVar[str] = "captioning"
