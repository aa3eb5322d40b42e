"""``privet eval RUN task=...``: score the final model of a finished run on another task's public test rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from privet.answers import Answers
from privet.atomic import write_atomic
from privet.config import Config, TaskConfig, compose
from privet.errors import ConfigError, PrivetError
from privet.wire import Arrays, Payload
from server_app.evaluation import Evaluator
from server_app.saved import SavedRun, final_model
from strategies.base import LoraStrategy
from strategies.rounds import spread

FOLDER = "eval"

Personal = Callable[[Path, str, LoraStrategy, Payload], Iterable[tuple[str, Arrays]]]
"""Returns what the nodes' own models change, from a run's directory and id, its method and the server's model."""


@dataclass(frozen=True)
class Rescored:
    """Scores of a run's final model on a task, and the file that has them.

    `personal` has the nodes' own models, by node, and `spread` their means and standard deviations.
    """

    task: str
    scores: dict[str, Any]
    file: Path
    personal: dict[str, dict[str, Any]] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)


def rescore(run_dir: Path, overrides: Sequence[str], personal: Personal | None = None) -> Rescored:
    """Score a completed run's final model and write ``eval/TASK.json`` into its directory.

    Parameters
    ----------
    run_dir : Path
        A completed run.
    overrides : sequence of str
        The task, for example ``task=csv task.path=/data/other.csv``; without any, the run's own.
    personal : callable, optional
        Where the nodes' own models come from; without it they are not scored.

    Raises
    ------
    PrivetError
        If the run is not complete, there is no whole model to score, or the task does not fit it.
    """
    config, method, values = final_model(run_dir)
    whole = config.task.head != "local"
    if not whole and personal is None:
        raise PrivetError(f"{run_dir} has task.head=local: its server has no head, so no whole model")
    task = _fitting(config, overrides)
    judge = Evaluator(replace(config, task=task))

    def written(model: str) -> Answers:
        # Another version of the task asks other questions, which are told apart.
        return Answers(run_dir / FOLDER / f"{task.name}-{model}.answers.jsonl")

    scores = judge.scores(values, written("server")) if whole else {}
    own: dict[str, dict[str, Any]] = {}
    if personal is not None:
        saved = SavedRun.load(run_dir)
        assert saved is not None, "a completed run had a plan"
        for node, changed in personal(run_dir, saved.id, method, method.scored_payload(values)):
            own[node] = judge.scores(changed, written(node))
        if not own:
            raise PrivetError(f"{run_dir}: no node of a {config.method.name} run has a model of its own")
    flat = {
        node: {f"personal.{k}": v for k, v in found.items() if k != "examples"} for node, found in own.items()
    }
    found = Rescored(
        task.name, scores, run_dir / FOLDER / f"{task.name}.json", own, spread(flat, "personal") or {}
    )
    found.file.parent.mkdir(exist_ok=True)
    record: dict[str, Any] = {
        "task": task.name,
        "path": task.path,
        "test_path": task.test_path,
        "scores": scores,
    }
    if own:
        record |= {"personal": found.spread, "nodes": own}
    write_atomic(found.file, (json.dumps(record, indent=2) + "\n").encode())
    return found


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
