"""FedSA-LoRA: A is shared and averaged, B is each node's own (Guo et al., ICLR 2025).

A learns what is common and travels; B_k learns what is particular, starts at zero when a node first takes part and
stays in its store. What a run makes are models of the nodes, the server's A with a node's own B; the paper defines no
global model. Under DP both factors are in the clipped and noised vector, also the one that never leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from privet.adapters import Shapes
from privet.trainables import Factors
from privet.wire import Arrays, Payload, check_arrays
from strategies.base import LoraStrategy, Memory, Session
from strategies.merging import Merger, WeightedMean
from strategies.rounds import check_payload

_OWN = "own-b"


@dataclass(frozen=True)
class FedSAParams:
    """Settings of FedSA-LoRA.

    Attributes
    ----------
    global_b : {"none", "mean"}
        ``none``: B never leaves a node, and the server's model has B = 0. ``mean``: every reply shows its B as well,
        and the server's model has the mean B of the last round's replies, for scores and export only. Under DP what
        is shown is the output of DP-SGD, at no charge; without, it is the node's B itself.
    """

    global_b: Literal["none", "mean"]


class FedSA(LoraStrategy):
    """Train A and B, send and average A, keep B (half of D up and down)."""

    paper = "FedSA-LoRA, Guo et al., ICLR 2025"
    stays = "B"
    Params = FedSAParams

    @property
    def exchanged(self) -> Shapes:
        """A of every module."""
        return self.spec.a

    @property
    def trained(self) -> Shapes:
        """Both factors."""
        return self.spec.lora

    @property
    def shown(self) -> Shapes:
        """What a reply carries for the server's model alone, counted apart: B, or nothing."""
        return self.spec.b if self.params.global_b == "mean" else {}

    def remarks(self) -> list[str]:
        """Say whose models count, where only the server's would be scored."""
        if self.params.global_b == "mean" or self.config.evaluation != "server":
            return []
        return [
            "method.global_b=none: the server's model has B = 0; evaluation=client or both scores the nodes' own models"
        ]

    # --- server half -----------------------------------------------------------------------------

    def check_upload(self, phase: str, payload: Payload) -> None:
        """Accept A, the head, and B where it is shown."""
        check_payload(Payload(payload.adapter, payload.head), *self.upload_shapes(phase))
        check_arrays(payload.once, self.shown, "adapter")  # as strictly as what is shared

    def merger(self, phase: str, state: Arrays) -> Merger:
        """Average what is shown beside what is shared."""
        return ShownMean()

    # `update` takes the mean B into the state; `download` leaves it there.

    # --- client half -----------------------------------------------------------------------------

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Train the server's A with the node's own B; send the one, keep the other."""
        own = self._own_b(session)
        session.model.load({**received.adapter, **own, **self.client_head(received, session)})
        session.train(Factors(session.model, [*self.trained, *self.trained_head]))
        self.keep_head(session)
        read = session.model.read
        session.keep(_OWN, read(self.spec.b))
        return Payload(read(self.exchanged), read(self.shared_head), read(self.shown))

    def _own_b(self, session: Session) -> Arrays:
        """Return the kept B; nothing, which loads as zero, at a first participation."""
        kept = session.recall(_OWN)
        if kept is None and session.acknowledged:
            session.flag("own-b-lost")
        return kept or {}

    def personal(self, received: Payload, memory: Memory) -> Arrays | None:
        """The server's A with the node's own B, and the server's head or its own."""
        own = memory.recall(_OWN)
        if own is None:
            return None
        return {**received.adapter, **self.scored_head(received, memory), **own}


class ShownMean(WeightedMean):
    """A weighted mean that takes a reply's one-off arrays for adapter arrays."""

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Add one reply."""
        super().add(node, Payload({**payload.adapter, **payload.once}, payload.head), weight)
