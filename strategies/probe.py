"""The linear probe: only the head is trained, on the frozen base model's features.

A control, not a method of the papers: LoRA has to earn its keep against it under the same budget.
"""

from __future__ import annotations

from privet.adapters import AdapterSpec, Shapes
from privet.config import Config
from privet.errors import ConfigError
from strategies.base import LoraStrategy


class Probe(LoraStrategy):
    """Train, send and average the head alone."""

    paper = "linear probe, a control"

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        if not self.trained_head:
            raise ConfigError(
                f"method=probe trains the head alone, which a language model (task.kind={config.task.kind}) has not"
                if config.task.generates
                else "method=probe trains the head alone, so task.head = frozen is not allowed: shared or local"
            )

    @property
    def exchanged(self) -> Shapes:
        """No adapter array."""
        return {}
