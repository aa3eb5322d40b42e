"""FedRand: every node keeps one half of its LoRA, chosen anew each round, to itself (FedRand, eq. 6 to 10).

Each round a node tosses a coin for all modules together: it starts from the server's A and its own B of its
last participation, or the other way round, trains both, keeps both, and sends the half that it took from the
server. The server never sees both halves of one client in one round. That is no formal privacy; under DP both
halves are in the clipped and noised vector, also the one that stays.

``subset=layers``, beyond the paper: every module tosses a coin of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from privet.adapters import Shapes, TargetModule, count
from privet.config import Bounds
from privet.seeding import child_seed
from privet.trainables import Factors
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy, Memory, Session
from strategies.merging import Merger, WeightedMean
from strategies.rounds import check_payload

_FACTORS = "factors"


@dataclass(frozen=True)
class FedRandParams:
    """Settings of FedRand.

    Attributes
    ----------
    rho : float
        Probability that a node takes and sends A (the randomly initialised factor).
    round0 : {"server", "local"}
        The first round starts from the server's common factors, or, literally as Algorithm 2, from a random A of
        each node's own and B = 0; averages of B then mix bases.
    normalise : bool
        Divide each half's sum by its own weight (eq. 8 to 10). Without (ablation), by all replies' weight.
    past_parameters : bool
        Start the kept half from the node's last participation. Without (ablation), from the server's.
    subset : {"all", "layers"}
        One coin for all modules together, or one for each.
    """

    rho: Annotated[float, Bounds(gt=0, lt=1)]
    round0: Literal["server", "local"]
    normalise: bool
    past_parameters: bool
    subset: Literal["all", "layers"]


class FedRand(LoraStrategy):
    """Train A and B, keep both, send a random one (D numbers down, about D / 2 up)."""

    uploads_are_parameters = True
    paper = "FedRand"
    stays = "both factors of its last round"
    Params = FedRandParams

    @property
    def exchanged(self) -> Shapes:
        """Both factors: the download, and what trains."""
        return self.spec.lora

    @property
    def _groups(self) -> list[tuple[TargetModule, ...]]:
        """Modules that share a coin."""
        targets = self.spec.targets
        return [targets] if self.params.subset == "all" else [(t,) for t in targets]

    def _half(self, group: tuple[TargetModule, ...], *, sends_a: bool) -> Shapes:
        """Return one half of some modules."""
        half = self.spec.a if sends_a else self.spec.b
        return {n: half[n] for n in (t.a if sends_a else t.b for t in group)}

    # --- server half -----------------------------------------------------------------------------

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """The most that a reply carries and the head, for the plan; smaller halves come as well."""
        most: Shapes = {}
        for group in self._groups:
            a, b = (self._half(group, sends_a=sends_a) for sends_a in (True, False))
            most |= a if count(a) >= count(b) else b
        return most, self.shared_head

    def check_upload(self, phase: str, payload: Payload) -> None:
        """Accept exactly one half of all modules, or of each."""
        half: Shapes = {}
        for group in self._groups:
            half |= self._half(group, sends_a=any(t.a in payload.adapter for t in group))
        check_payload(payload, half, self.shared_head)

    def merger(self, phase: str, state: Arrays) -> Merger:
        """Average each array over those who sent it."""
        return WeightedMean() if self.params.normalise else UnnormalisedMean()

    # An empty half needs nothing: `update` leaves what was not sent as it is (the "otherwise" of eq. 9 and 10).

    # --- client half -----------------------------------------------------------------------------

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Mix the server's half with the kept one, train both, keep both, send one."""
        half = self._toss(session)
        other = {n: s for n, s in self.spec.lora.items() if n not in half}
        start = {**received.adapter, **self._own_half(other, session)}
        session.model.load({**start, **self.client_head(received, session)})
        session.train(Factors(session.model, [*self.trained, *self.trained_head]))
        self.keep_head(session)
        session.keep(_FACTORS, session.model.read(self.spec.lora))
        return Payload(session.model.read(half), session.model.read(self.shared_head))

    def _toss(self, session: Session) -> Shapes:
        """Return what comes from the server and goes back to it: a half of all modules, or of each."""
        half: Shapes = {}
        for group in self._groups:
            purpose = "fedrand-half" if self.params.subset == "all" else f"fedrand-half/{group[0].name}"
            half |= self._half(group, sends_a=session.chance(purpose) < self.params.rho)
        return half

    def _own_half(self, other: Shapes, session: Session) -> Arrays:
        """Return what replaces the server's values: the kept half, in round 0 perhaps both, or nothing."""
        if session.round == 1 and self.params.round0 == "local":
            return self._local_start(session)
        if not self.params.past_parameters:
            return {}
        kept = session.recall(_FACTORS)
        if kept is not None:
            return {name: kept[name] for name in other}
        if session.round > 1:
            session.flag("no-past-half")
        return {}

    def _local_start(self, session: Session) -> Arrays:
        """A of this node's own and B = 0, as at the beginning of Algorithm 2."""
        start = {name: torch.zeros(shape) for name, shape in self.spec.b.items()}
        for name, (rank, width) in self.spec.a.items():
            secret = int(session.chance(f"fedrand-start/{name}") * 2**53)
            generator = torch.Generator().manual_seed(child_seed(secret, name))
            start[name] = torch.empty(rank, width).uniform_(-(width**-0.5), width**-0.5, generator=generator)
        return start

    def personal(self, received: Payload, memory: Memory) -> Arrays | None:
        """The node's own factors of its last participation, with the server's head or its own."""
        factors = memory.recall(_FACTORS)
        if factors is None:
            return None
        return {**received.adapter, **self.scored_head(received, memory), **factors}


class UnnormalisedMean(WeightedMean):
    """The ablation without normalisation: an array shrinks by the weight of those who did not send it."""

    def __init__(self) -> None:
        super().__init__()
        self._all: list[float] = []

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Add one reply."""
        super().add(node, payload, weight)
        self._all.append(weight)

    def mean(self) -> Payload:
        """Return the sums over the weight of all replies; an array that nobody sent is not there."""
        merged, total = super().mean(), math.fsum(self._all)
        arrays = {n: v * (math.fsum(self._weights["adapter", n]) / total) for n, v in merged.adapter.items()}
        return Payload(adapter=arrays, head=merged.head)
