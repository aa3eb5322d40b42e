"""FedEx-LoRA: FedAvg of the factors, made exact by a residual in the base weight (Singhal et al., ACL 2025).

The mean of the factors is not the mean of the products. What lies between,

    dW_res = sum_k p_k B_k A_k - mean(B) mean(A)

is folded into the frozen weight, so that the server's model W0 + sum of residuals + mean(B) mean(A) is the mean of the
clients' models. Nodes are sent the mean factors and the clients' factors as a stack, from which they make the
residual as the server does; see :mod:`strategies.folding`.

Under DP both factors are clipped and noised; the residual is made of what nodes release and adds no charge.
"""

from __future__ import annotations

import torch

from privet.adapters import Shapes
from privet.wire import Arrays, Payload
from strategies.folding import Folding, stack_a, stack_b


class FedEx(Folding):
    """Train A and B, average both, fold the residual (D up, (K' + 1) D down for K' clients a round)."""

    paper = "FedEx-LoRA, Singhal et al., ACL 2025"

    @property
    def sent(self) -> Shapes:
        """The mean factors."""
        return self.spec.lora

    def addend(self, stack: Arrays, sent: Arrays) -> Arrays:
        """Append the mean's factors with the sign turned: ``[B_1 ... -mean(B)] [p_1 A_1; ...; mean(A)]``."""
        out: Arrays = {}
        for t in self.spec.targets:
            out[stack_b(t)] = torch.cat([stack[stack_b(t)], -sent[t.b]], 1)
            out[stack_a(t)] = torch.cat([stack[stack_a(t)], sent[t.a]])
        return out

    def start_factors(self, received: Payload, round_number: int) -> Arrays:
        """The mean factors."""
        return {n: received.adapter[n] for n in self.sent}
