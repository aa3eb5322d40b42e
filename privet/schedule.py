"""Who takes part in which round: drawn once from the seed, before anything trains.

Fixing participation in advance makes the number of local steps of every node a constant that sigma can be
calibrated for (design rule 9).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from privet.config import Config, FederationConfig
from privet.errors import ConfigError
from privet.seeding import child_seed


@dataclass(frozen=True)
class Round:
    """One round: its number (from 1, warm-up included), its phases and the nodes that are asked.

    `charged` is false where its steps are no DP-SGD although the run is private: such rounds have no noise to plan.
    """

    number: int
    phases: tuple[str, ...]
    nodes: tuple[str, ...]
    warmup: bool = False
    charged: bool = True


@dataclass(frozen=True)
class Schedule:
    """All rounds of a run."""

    rounds: tuple[Round, ...]

    @property
    def warmup_rounds(self) -> int:
        """Rounds before the first training round."""
        return sum(r.warmup for r in self.rounds)

    def participations(self, node: str) -> int:
        """Rounds in which a node trains and is charged for it."""
        return sum(node in r.nodes for r in self.rounds if r.charged)

    def most_participations(self) -> int:
        """Largest number of rounds that any node trains in and is charged for."""
        nodes = {n for r in self.rounds for n in r.nodes}
        return max((self.participations(n) for n in nodes), default=0)


def draw_schedule(
    nodes: Sequence[str],
    federation: FederationConfig,
    seed: int,
    *,
    phases: tuple[str, ...],
    warmup_rounds: int = 0,
    warmup_phases: tuple[str, ...] = ("warmup",),
    warmup_charged: bool = True,
) -> Schedule:
    """Draw the schedule: warm-up rounds with every node, then rounds of `federation.sampled` nodes.

    `federation.rounds` counts them all, so that methods with and without a warm-up take as many steps. The draw
    depends on the node names and the seed only, not on the order in which nodes connect.

    Raises
    ------
    ConfigError
        If the warm-up leaves no round to train in.
    """
    if warmup_rounds >= federation.rounds:
        raise ConfigError(
            f"federation.rounds = {federation.rounds} is not allowed: more than the {warmup_rounds} warm-up rounds"
        )
    names = sorted(nodes)
    rounds = [
        Round(i + 1, warmup_phases, tuple(names), warmup=True, charged=warmup_charged)
        for i in range(warmup_rounds)
    ]
    size = min(federation.sample_size, len(names))
    for i in range(federation.rounds - warmup_rounds):
        number = warmup_rounds + i + 1
        chosen = random.Random(child_seed(seed, "schedule", i)).sample(names, size)
        rounds.append(Round(number, phases, tuple(sorted(chosen))))
    return Schedule(tuple(rounds))


def is_scored(config: Config, warmup_rounds: int, number: int) -> bool:
    """Whether a round is followed by a score: every few training rounds, and the last one."""
    trained = number - warmup_rounds
    last = number == config.federation.rounds
    return trained > 0 and (trained % config.evaluate_every == 0 or last)
