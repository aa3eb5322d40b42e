"""``privet eval RUN task=...``: score the final model of a finished run on another task's public test rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privet.atomic import write_atomic
from privet.config import Config, TaskConfig, compose
from privet.errors import ConfigError, PrivetError
from server_app.evaluation import Evaluator
from server_app.saved import final_model
from strategies.rounds import to_record

FOLDER = "eval"


@dataclass(frozen=True)
class Rescored:
    """Scores of a run's final model on a task, and the file that has them."""

    task: str
    scores: dict[str, Any]
    file: Path


def rescore(run_dir: Path, overrides: Sequence[str]) -> Rescored:
    """Score a completed run's final model and write ``eval/TASK.json`` into its directory.

    Parameters
    ----------
    run_dir : Path
        A completed run.
    overrides : sequence of str
        The task, for example ``task=csv task.path=/data/other.csv``; without any, the run's own.

    Raises
    ------
    PrivetError
        If the run is not complete, its server has no whole model, or the task does not fit it.
    """
    config, _, values = final_model(run_dir)
    if config.task.head == "local":
        raise PrivetError(f"{run_dir} has task.head=local: its server has no head, so no whole model")
    task = _fitting(config, overrides)
    scores = dict(Evaluator(replace(config, task=task))(config.federation.rounds, to_record(values)))
    file = run_dir / FOLDER / f"{task.name}.json"
    file.parent.mkdir(exist_ok=True)
    record = {"task": task.name, "path": task.path, "test_path": task.test_path, "scores": scores}
    write_atomic(file, (json.dumps(record, indent=2) + "\n").encode())
    return Rescored(task.name, scores, file)


def _fitting(config: Config, overrides: Sequence[str]) -> TaskConfig:
    """Return the named task for the run's model; what it predicts stays as it was."""
    wrong = [text for text in overrides if not text.startswith(("task=", "task."))]
    if wrong:
        raise ConfigError(
            f"'{wrong[0]}' is not allowed: eval takes task= and task.*, the rest is the run's own"
        )
    if not overrides:
        return config.task
    task = compose(overrides).task
    if task.generates != config.task.generates:
        raise ConfigError(f"task.kind = {task.kind} is not allowed: the run's is {config.task.kind}")
    if len(task.labels) != len(config.task.labels):
        raise ConfigError(
            f"task.labels has {len(task.labels)} values and the run's {len(config.task.labels)}: "
            "one for each, in that order"
        )
    return replace(task, head=config.task.head, pooling=config.task.pooling)
