"""Everything that a run needs to go on after its last finished round, in one file.

The file is safetensors: the method's state as it is, bit by bit, and the rest as JSON in its metadata, so that
state and bookkeeping can never be from different rounds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from privet.errors import StoreError
from privet.wire import Arrays


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round.

    Attributes
    ----------
    round : int
        The finished round.
    state : dict of str to Tensor
        The method's state.
    met : list of str
        Nodes that have answered.
    informed : list of [phase, node]
        Who has had a phase's one-off material.
    acknowledged : dict of node to round
        The last round whose reply of a node is in the state.
    spent : dict
        The server's view of what was spent (:meth:`privet.privacy.spending.Spending.to_json`).
    record, traffic : dict
        The round's line and its traffic, without a score: a run that was stopped while it scored has not lost it.
    seconds : float
        How long the run had taken by then.
    """

    round: int
    state: Arrays
    met: list[str]
    informed: list[tuple[str, str]]
    acknowledged: dict[str, int]
    spent: dict[str, Any]
    record: dict[str, Any]
    traffic: dict[str, Any]
    seconds: float = 0.0

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        facts = {
            "round": self.round,
            "met": self.met,
            "informed": self.informed,
            "acknowledged": self.acknowledged,
            "spent": self.spent,
            "record": self.record,
            "traffic": self.traffic,
            "seconds": self.seconds,
        }
        tensors = {name: value.contiguous() for name, value in self.state.items()}
        return save(tensors, metadata={"checkpoint": json.dumps(facts, allow_nan=False)})

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a checkpoint; raises StoreError where the file is damaged."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["checkpoint"])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            facts["informed"] = [(phase, node) for phase, node in facts["informed"]]
            return cls(state=state, **facts)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            raise StoreError(f"{path} is not a checkpoint that can be read") from None
