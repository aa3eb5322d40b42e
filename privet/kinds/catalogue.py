"""Which class is which ``task.kind``."""

from __future__ import annotations

from privet.config import TaskConfig
from privet.kinds.base import TaskKind
from privet.kinds.classification import Classification
from privet.kinds.generation import Generation
from privet.kinds.instructions import Instructions

_KINDS: dict[str, type[TaskKind]] = {kind.name: kind for kind in (Classification, Generation, Instructions)}


def kind_of(task: TaskConfig) -> TaskKind:
    """Return what the task's kind does with rows."""
    return _KINDS[task.kind].of(task)
