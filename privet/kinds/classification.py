"""One label a row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from privet.adapters import AdaptedModel
from privet.data.collate import Tokenised, tokenise
from privet.data.examples import Examples
from privet.kinds.base import TaskKind
from privet.losses import classification
from privet.predict import score


class Classification(TaskKind):
    """Texts or pairs of texts, each with one of the task's labels."""

    name: ClassVar[str] = "classification"

    def tokenise(self, tokenizer: Any, examples: Examples, max_length: int) -> Tokenised:
        """Return the tokens of every text or pair."""
        return tokenise(tokenizer, examples, max_length)

    def losses(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of every example's label."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return classification(module(**inputs), batch["labels"])

    def predictions(self, module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the one prediction of every example."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = module(**inputs)[:, None]
        return logits, {"label": logits.new_ones(logits.shape[:2], dtype=torch.bool)}

    def score(self, model: AdaptedModel, rows: Tokenised, pad_id: int, size: int) -> dict[str, float]:
        """Return accuracy, mean cross entropy and macro F1."""
        return score(model, rows, pad_id, size)
