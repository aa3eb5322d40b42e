"""What a run fixed before its first round, so that it can go on later: ``run.json`` in the run directory.

Schedule and plans are saved and not made again: a node that is away when a run is resumed must not change who
takes part when, nor how much noise anybody adds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privet.adapters import adapter_spec
from privet.atomic import write_atomic
from privet.config import Config
from privet.errors import PrivetError, Refusal, StoreError
from privet.plan import NodePlan
from privet.runner import is_completed, saved_config
from privet.schedule import Round, Schedule
from privet.wire import Arrays, Failed, code_hash
from strategies.base import LoraStrategy, load_method
from strategies.checkpoint import Checkpoint

FILE = "run.json"


@dataclass(frozen=True)
class SavedRun:
    """A run as it was planned.

    Attributes
    ----------
    id : str
        Keys everything that nodes keep for the run.
    absent : list of Failed
        Nodes that could not take part from the beginning.
    """

    id: str
    config_hash: str
    code_hash: str
    schedule: Schedule
    nodes: Mapping[str, NodePlan]
    absent: list[Failed]

    def save(self, run_dir: Path) -> None:
        """Write ``run.json``, atomically."""
        write_atomic(run_dir / FILE, (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, run_dir: Path) -> SavedRun | None:
        """Read ``run.json``; None where the run was stopped before it had a plan.

        Raises
        ------
        StoreError
            If the file is damaged.
        """
        path = run_dir / FILE
        if not path.exists():
            return None
        try:
            raw: dict[str, Any] = json.loads(path.read_bytes())
            rounds = [
                {**r, "phases": tuple(r["phases"]), "nodes": tuple(r["nodes"])}
                for r in raw["schedule"]["rounds"]
            ]
            return cls(
                id=raw["id"],
                config_hash=raw["config_hash"],
                code_hash=raw["code_hash"],
                schedule=Schedule(tuple(Round(**r) for r in rounds)),
                nodes={name: NodePlan(**plan) for name, plan in raw["nodes"].items()},
                absent=[Failed(**f) for f in raw["absent"]],
            )
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{path} is not a plan that can be read") from None

    def check(self, config: Config) -> None:
        """Refuse to go on with another configuration or other code."""
        if self.config_hash != config.hash:
            raise Refusal("changed", "config.yaml was changed after the run began; a change needs a new run")
        if self.code_hash != code_hash():
            raise Refusal("changed", "the code was changed after the run began; a change needs a new run")


def load_config(run_dir: Path) -> Config:
    """Read the resolved configuration of a run that a server has begun.

    Raises
    ------
    PrivetError
        If there is none, or it is not a valid one.
    """
    config = saved_config(run_dir) if (run_dir / "config.yaml").exists() else None
    if config is None:
        raise Refusal("resume", f"{run_dir} holds no run to resume")
    return config


def final_model(run_dir: Path) -> tuple[Config, LoraStrategy, Arrays]:
    """Return a completed run's configuration, its method, and what its server's model changes.

    Raises
    ------
    PrivetError
        If the run is not complete.
    """
    config, checkpoint = load_config(run_dir), last_checkpoint(run_dir)
    if not is_completed(run_dir) or checkpoint is None:
        raise PrivetError(f"{run_dir} is not complete: only a completed run has a final model")
    method = load_method(config, adapter_spec(config))
    return config, method, method.model_values(checkpoint.state)


def last_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run directory; None before the first round's end."""
    files = sorted((run_dir / "checkpoints").glob("round-*.safetensors"))
    return Checkpoint.load(files[-1]) if files else None
