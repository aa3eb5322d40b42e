"""FedPara: a shared and a private LoRA pair multiplied element by element (FedRand's adaptation of FedPara).

Every module has a global pair (A_g, B_g), which is averaged, and a private pair (A_p, B_p), which stays in the node's
store:

    dW = (alpha / r) (B_g A_g) o (B_p A_p + 1)    plus_one
    dW = (alpha / r) (B_g A_g) o (B_p A_p)        literal

The literal product with both B at zero, as LoRA starts, gives every factor the gradient zero and stays there for
ever; its private pair therefore starts from random numbers that all nodes share. With "+ 1" (the personalised FedPara
of Hyeon-Woo et al., ICLR 2022) the private pair starts neutral and the server's model is B_g A_g itself. Under DP both
pairs are in the clipped and noised vector, also the one that never leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from privet.adapters import AdapterSpec, Shapes
from privet.config import Config
from privet.hadamard import Hadamard, dense, private_a, private_b
from privet.seeding import child_generator
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy, Memory, Session

_PRIVATE = "private-pair"


@dataclass(frozen=True)
class FedParaParams:
    """Settings of FedPara.

    Attributes
    ----------
    variant : {"plus_one", "literal"}
        ``(B_g A_g) o (B_p A_p + 1)``, or without the 1 and with a random private start.
    """

    variant: Literal["plus_one", "literal"]


class FedPara(LoraStrategy):
    """Train both pairs, send and average the global one (D numbers up and down)."""

    paper = "FedPara, Hyeon-Woo et al., ICLR 2022, as FedRand adapts it"
    stays = "the private pair"
    Params = FedParaParams

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        self._plus_one = self.params.variant == "plus_one"

    @property
    def exchanged(self) -> Shapes:
        """The global pair of every module."""
        return self.spec.lora

    @property
    def private(self) -> Shapes:
        """The private pair of every module."""
        out: Shapes = {}
        for t in self.spec.targets:
            out[private_b(t)] = (t.out, self.spec.rank)
            out[private_a(t)] = (self.spec.rank, t.inp)
        return out

    @property
    def trained(self) -> Shapes:
        """Both pairs."""
        return {**self.spec.lora, **self.private}

    # --- server half -----------------------------------------------------------------------------

    def model_values(self, state: Arrays) -> Arrays:
        """The global pair; literally, changes that make it the product with the common private start."""
        values = super().model_values(state)
        if self._plus_one:
            return values
        start = self.private_start()
        for t in self.spec.targets:
            pair = values[t.b], values[t.a]
            whole = dense(*pair, start[private_b(t)], start[private_a(t)], plus_one=False)
            # B_g and A_g stay as they are, for a node that scores its own model with them.
            values[t.delta] = (whole - pair[0].double() @ pair[1].double()).float()
        return values

    # --- client half -----------------------------------------------------------------------------

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Train the server's pair with the node's own; keep this, send that."""
        model = session.model
        model.load(self.client_head(received, session))
        start = {**received.adapter, **self._own_pair(session)}
        pairs = Hadamard(model, start, list(self.trained_head), plus_one=self._plus_one)
        session.train(pairs)
        self.keep_head(session)
        session.keep(_PRIVATE, pairs.read(list(self.private)))
        return Payload(pairs.read(list(self.exchanged)), model.read(self.shared_head))

    def _own_pair(self, session: Session) -> Arrays:
        kept = session.recall(_PRIVATE)
        if kept is not None:
            return kept
        if session.acknowledged:
            session.flag("private-pair-lost")
        return self.private_start()

    def private_start(self) -> Arrays:
        """Return the private pair that every node begins with, from the run's seed.

        plus_one: B_p = 0 and A_p as LoRA's own A. literal: normal numbers such that the entries of B_p A_p have mean
        0 and variance 1, so that the gradients of the global pair are as large as plain LoRA's.
        """
        start: Arrays = {}
        for name, shape in self.private.items():
            generator = child_generator(self.config.seed, "private-pair", name)
            if not self._plus_one:
                start[name] = torch.randn(shape, generator=generator) * self.spec.rank**-0.25
            elif name.endswith("A"):
                bound = 1 / math.sqrt(shape[1])
                start[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            else:
                start[name] = torch.zeros(shape)
        return start

    def personal(self, received: Payload, memory: Memory) -> Arrays | None:
        """The server's pair with the node's own, and the server's head or its own."""
        kept = memory.recall(_PRIVATE)
        if kept is None:
            return None
        values = {**received.adapter, **self.scored_head(received, memory)}
        for t in self.spec.targets:
            pair = values[t.b], values[t.a]
            whole = dense(*pair, kept[private_b(t)], kept[private_a(t)], plus_one=self._plus_one)
            values[t.delta] = (whole - pair[0].double() @ pair[1].double()).float()
        return values
