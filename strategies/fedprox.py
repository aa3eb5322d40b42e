"""FedProx: FedAvg with a pull towards where the round began (Li et al., MLSys 2020, eq. 2).

A client minimises ``F_k(w) + (mu / 2) ||w - w_t||^2``, so that a step is

    w <- w - lr (g~ + mu (w - w_t))

with g~ the batch's gradient, clipped and noised under DP. The term depends on released values only and acts after the
noise: it costs no privacy, and it is not clipped away or lost in an optimiser that sets the gradient itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import nn

from privet.config import LARGEST_RATE, Bounds
from privet.corrections import Correction
from privet.trainables import Factors
from strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedProxParams:
    """Settings of FedProx.

    Attributes
    ----------
    mu : float
        Strength of the pull; 0 is FedAvg.
    """

    mu: Annotated[float, Bounds(ge=0, lt=LARGEST_RATE)]


class FedProx(FedAvg):
    """Train A and B near the server's, send both, average both (D numbers up and down)."""

    paper = "FedProx, Li et al., MLSys 2020"
    Params = FedProxParams

    def correction(self, factors: Factors) -> Correction | None:
        """The pull to where the factors and the head are; a local head began where the node had left it."""
        mu = float(self.params.mu)
        return Proximal(mu, factors.leaves, decoupled=self.config.privacy.private) if mu else None


class Proximal:
    """The pull ``mu (w - w_t)`` as a correction.

    Parameters
    ----------
    mu : float
        Its strength.
    leaves : mapping of str to Parameter
        What trains, at w_t.
    decoupled : bool
        Move w by ``-lr mu (w - w_t)`` before the optimiser's step, as decoupled weight decay does; else add the
        pull to the gradient, as a term in the loss would. For SGD without momentum the two are the same.
    """

    def __init__(self, mu: float, leaves: Mapping[str, nn.Parameter], *, decoupled: bool) -> None:
        self._mu = mu
        self._centre = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        self._decoupled = decoupled

    def before_step(self, leaves: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        """Pull every leaf, or its gradient."""
        for name, leaf in leaves.items():
            pull = leaf - self._centre[name]
            if self._decoupled:
                leaf.sub_(pull, alpha=rates[name] * self._mu)
            elif leaf.grad is None:
                leaf.grad = self._mu * pull
            else:
                leaf.grad.add_(pull, alpha=self._mu)
