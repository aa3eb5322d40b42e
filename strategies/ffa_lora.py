"""FFA-LoRA: A is frozen at its initial value and only B is trained (Sun et al., ICLR 2024).

With a common A the average of the products is exact: ``mean(B_k) A = mean(B_k A)``, and DP noise enters the
product linearly. A comes from the run's seed on both sides and is never sent.
"""

from __future__ import annotations

from privet.adapters import Shapes
from strategies.base import LoraStrategy


class FFALora(LoraStrategy):
    """Train B, send B, average B (half of D up and down)."""

    uploads_are_parameters = True
    paper = "FFA-LoRA, Sun et al., ICLR 2024"

    @property
    def exchanged(self) -> Shapes:
        """B of every module."""
        return self.spec.b
