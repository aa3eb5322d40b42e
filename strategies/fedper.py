"""FedPer, as FedRand adapts it: the LoRA of the top layers is shared, that of the others is each node's own.

(Arivazhagan et al., 2019, personalise the top; FedRand shares it.) Round 0 is one round of FedAvg with every node. Its
result starts the private layers: it is sent to a node once, with its first training request, and again to one that
lost its store. The server keeps it too, as its own model's values of those layers. Under DP all layers are in the
clipped and noised vector, also those that never leave, and round 0 is charged like any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from privet.adapters import AdapterSpec, Shapes, TargetModule, count
from privet.config import Bounds, Config
from privet.errors import ConfigError, Refusal
from privet.trainables import Factors
from privet.wire import Arrays, Payload, check_arrays
from strategies.base import LoraStrategy, Memory, Session
from strategies.rounds import NEEDS_ONCE

_PRIVATE = "private-layers"
_BYTES = 4  # of a number on the wire


@dataclass(frozen=True)
class FedPerParams:
    """Settings of FedPer.

    Attributes
    ----------
    shared_layers : int
        N: top layers whose factors are shared.
    """

    shared_layers: Annotated[int, Bounds(ge=1)]


class FedPer(LoraStrategy):
    """Train all factors, send and average those of the top N layers, keep the others."""

    paper = "FedPer, Arivazhagan et al. 2019, as FedRand adapts it"
    stays = "the lower layers' factors"
    Params = FedPerParams
    releases: ClassVar[Mapping[str, str]] = {"warmup": "dp-sgd", "train": "dp-sgd"}

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        layers = layers_of(spec)
        shared = int(self.params.shared_layers)
        if shared > len(layers):
            raise ConfigError(
                f"method.shared_layers = {shared} is not allowed: 1 to {len(layers)}, the model's layers with LoRA"
            )
        self.shared = _factors(layers[-shared:], spec)
        self.private = _factors(layers[:-shared], spec)

    @property
    def exchanged(self) -> Shapes:
        """Both factors of the top layers."""
        return self.shared

    @property
    def trained(self) -> Shapes:
        """Both factors of every layer."""
        return self.spec.lora

    @property
    def warmup_rounds(self) -> int:
        """Round 0."""
        return 1

    # --- server half -----------------------------------------------------------------------------

    def initial(self, tensors: Arrays) -> Arrays:
        """Start from all factors; those of the private layers stay in the state as round 0 leaves them."""
        return {n: tensors[n] for n in (*self.spec.lora, *self.shared_head)}

    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Send what is shared, and to a node that has none yet the start of its private layers."""
        adapter = {n: state[n] for n in self.download_shapes(phase)[0]}
        private = self.private if once and phase == "train" else {}
        return Payload(adapter, self.head_of(state), {n: state[n] for n in private})

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Everything in round 0, then the top layers, and the head."""
        return (self.spec.lora if phase == "warmup" else self.shared), self.shared_head

    def download_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """As the uploads."""
        return self.upload_shapes(phase)

    def once_cost(self) -> tuple[int, int]:
        """The start of the private layers."""
        return count(self.private), _BYTES * count(self.private)

    # --- client half -----------------------------------------------------------------------------

    def once_names(self, phase: str) -> Collection[str]:
        """The start of the private layers, for a training round."""
        return self.private if phase == "train" else ()

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Train all layers; in a training round, start from the node's own private ones and keep them."""
        own = self._own_layers(received, session) if phase == "train" else {}
        session.model.load({**received.adapter, **own, **self.client_head(received, session)})
        session.train(Factors(session.model, [*self.trained, *self.trained_head]))
        self.keep_head(session)
        if phase == "train" and self.private:
            session.keep(_PRIVATE, session.model.read(self.private))
        return Payload(session.model.read(self.upload_shapes(phase)[0]), session.model.read(self.shared_head))

    def _own_layers(self, received: Payload, session: Session) -> Arrays:
        """Return the kept private layers; at a first training round, or where they are lost, round 0's."""
        if received.once:
            check_arrays(received.once, self.private, "adapter")  # as strictly as what comes every round
        kept = session.recall(_PRIVATE)
        if kept is not None or not self.private:
            return kept or {}
        if not received.once:
            raise Refusal(NEEDS_ONCE, "the private layers are not in this node's store")
        if session.acknowledged > self.warmup_rounds:
            session.flag("private-layers-lost")
        return received.once

    def personal(self, received: Payload, memory: Memory) -> Arrays | None:
        """The server's top layers with the node's own lower ones, and the server's head or its own."""
        kept = memory.recall(_PRIVATE)
        if kept is None:
            return super().personal(received, memory)
        return {**received.adapter, **self.scored_head(received, memory), **kept}


def layers_of(spec: AdapterSpec) -> list[tuple[TargetModule, ...]]:
    """Return the adapted modules by layer, in model order: the last one is the top.

    A module's layer is its name up to the first number, ``encoder.layer.3`` or ``decoder.block.0``; a module without a
    number is a layer by itself.
    """
    layers: dict[str, list[TargetModule]] = {}
    for target in spec.targets:
        found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", target.name)
        layers.setdefault(found.group() if found else target.name, []).append(target)
    return [tuple(targets) for targets in layers.values()]


def _factors(layers: list[tuple[TargetModule, ...]], spec: AdapterSpec) -> Shapes:
    names = {n for targets in layers for t in targets for n in (t.a, t.b)}
    return {n: s for n, s in spec.lora.items() if n in names}
