"""FedAvg / FedIT: both factors are trained and averaged (methods of McMahan et al. 2017, Zhang et al. 2023).

The factors are averaged, not their products: ``mean(B) mean(A)`` differs from ``mean(B A)`` by the covariance of
the factors over clients, which is what FedASK and FFA-LoRA avoid.
"""

from __future__ import annotations

from privet.adapters import Shapes
from strategies.base import LoraStrategy


class FedAvg(LoraStrategy):
    """Train A and B, send both, average both (D numbers up and down)."""

    uploads_are_parameters = True
    paper = "FedIT, Zhang et al. 2023 (FedAvg: McMahan et al. 2017)"

    @property
    def exchanged(self) -> Shapes:
        """Both factors of every module."""
        return self.spec.lora
