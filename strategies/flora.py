"""FLoRA: the clients' factors are stacked, their product goes into the base weight (Wang et al., NeurIPS 2024).

    W <- W + [B_1 ... B_K] [p_1 A_1; ...; p_K A_K] = W + sum_k p_k B_k A_k

is the mean of the clients' models, exactly. Every round starts from B = 0 and a new random A, which all sides draw from
the run's seed and the round: it is never sent, and never the same twice. Nodes are sent the stack; see
:mod:`strategies.folding`.

Under DP both factors are clipped and noised; the stack is made of what nodes release and adds no charge.
"""

from __future__ import annotations

import torch

from privet.adapters import Shapes
from privet.seeding import child_generator
from privet.wire import Arrays, Payload
from strategies.folding import Folding


class FLoRA(Folding):
    """Train A and B from a fresh start, stack both, fold the product (D up, K' D down for K' clients a round)."""

    paper = "FLoRA, Wang et al., NeurIPS 2024"

    @property
    def sent(self) -> Shapes:
        """No factor: the next round starts from new ones."""
        return {}

    def start_factors(self, received: Payload, round_number: int) -> Arrays:
        """A as LoRA starts it, U(-1/sqrt(n), 1/sqrt(n)), drawn for this round; B is zero."""
        out: Arrays = {}
        for name, (rank, inp) in self.spec.a.items():
            generator = child_generator(self.config.seed, "flora", round_number, name)
            out[name] = torch.empty(rank, inp).uniform_(-(inp**-0.5), inp**-0.5, generator=generator)
        return out
