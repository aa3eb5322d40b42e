"""What changes a local step besides its gradient: proximal terms and control variates.

A correction acts after the noise. Under DP the clipped and noised sum is all that private rows may enter by; a
term in the loss would be clipped with them or, in an optimiser that sets the gradient itself, be lost without a
sign. What a correction adds depends on released values only, so it costs no privacy (design rule 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn


class Correction(Protocol):
    """Takes part in every local step of a phase."""

    def before_step(self, leaves: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        """Change values or gradients of the leaves just before the optimiser's step; called without autograd.

        Parameters
        ----------
        leaves : mapping of str to Parameter
            What the optimiser updates, by name; the gradients are final: summed, noised and divided.
        rates : mapping of str to float
            The learning rate of each leaf in this step.
        """
        ...
