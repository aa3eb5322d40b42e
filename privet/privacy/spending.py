"""What the server knows to have been spent: per node, every DP-SGD step that a request may have taken.

The nodes' own ledgers are the authority; this is the server's view for progress and results, composed from what
happened. A request without a valid reply counts in full, since its node may have trained: an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from privet.config import PrivacyConfig
from privet.privacy.accounting import Step, epsilon


@dataclass(frozen=True)
class Spent:
    """Steps of one node in one phase of one round."""

    round: int
    phase: str
    step: Step


class Spending:
    """The run's spending, node by node.

    Parameters
    ----------
    privacy : PrivacyConfig
        Gives delta and the accountant; without DP nothing is recorded.
    """

    def __init__(self, privacy: PrivacyConfig) -> None:
        self._privacy = privacy
        self._spent: dict[str, list[Spent]] = {}

    def add(self, node: str, round_number: int, phase: str, step: Step) -> None:
        """Record steps that a node took, or may have taken."""
        if self._privacy.private and step.steps:
            self._spent.setdefault(node, []).append(Spent(round_number, phase, step))

    def steps(self, node: str) -> int:
        """Steps of one node so far."""
        return sum(s.step.steps for s in self._spent.get(node, []))

    def epsilon(self, node: str) -> float | None:
        """Epsilon of one node over all its steps, composed by one accountant; None without DP."""
        if not self._privacy.private or self._privacy.delta is None:
            return None
        entries = [s.step for s in self._spent.get(node, [])]
        return epsilon(entries, self._privacy.delta, self._privacy.accountant)

    def largest(self) -> float | None:
        """The largest epsilon of any node (the nodes' rows are disjoint: a maximum, never a sum)."""
        values = [self.epsilon(n) for n in self._spent]
        known = [v for v in values if v is not None]
        return max(known, default=0.0 if self._privacy.private else None)

    def entries(self, node: str) -> list[dict[str, Any]]:
        """Entries of one node for ``privacy.json``."""
        return [
            {
                "round": s.round,
                "phase": s.phase,
                "q": s.step.q,
                "sigma": s.step.sigma,
                "clip": self._privacy.clip,
                "steps": s.step.steps,
            }
            for s in self._spent.get(node, [])
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything recorded as plain JSON, for a checkpoint."""
        return {node: [asdict(s) for s in spent] for node, spent in self._spent.items()}

    def restore(self, recorded: Mapping[str, Any]) -> None:
        """Take over what :meth:`to_json` returned."""
        self._spent = {
            node: [Spent(s["round"], s["phase"], Step(**s["step"])) for s in spent]
            for node, spent in recorded.items()
        }
