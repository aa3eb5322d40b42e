"""Which class is which ``task.kind``."""

from __future__ import annotations

from privet.config import Config
from privet.kinds.base import TaskKind
from privet.kinds.captioning import Captioning
from privet.kinds.classification import Classification
from privet.kinds.generation import Generation
from privet.kinds.instructions import Instructions
from privet.kinds.visual_question import VisualQuestion

_KINDS: dict[str, type[TaskKind]] = {
    kind.name: kind for kind in (Classification, Generation, Instructions, Captioning, VisualQuestion)
}


def kind_of(config: Config) -> TaskKind:
    """Return what the task's kind does with rows."""
    return _KINDS[config.task.kind].of(config)
