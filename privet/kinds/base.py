"""What a kind of task is to everything that trains or scores: tokens, batches, one loss an example, scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from privet.adapters import AdaptedModel
from privet.answers import Answers
from privet.config import Config
from privet.data.collate import Tokenised, pad_batch
from privet.data.examples import Examples

_MADE_UP = 8  # tokens of a row that nobody wrote


def made_up_rows(model: AdaptedModel) -> Tokenised:
    """Return two rows of equal length of tokens drawn from all that the model knows; the first of a row is given."""
    ids = np.random.default_rng(0).integers(model.vocabulary, size=(2, _MADE_UP))
    if (end := model.end_of_text) is not None:  # some classifiers look for the one that ends a text
        ids[ids == end] = (end + 1) % model.vocabulary
        ids[:, -1] = end
    return Tokenised(list(ids), np.zeros(2, dtype=np.int64), prompts=np.ones(2, dtype=np.int64))


class TaskKind(ABC):
    """One kind of task, as ``task.kind`` names it.

    Attributes
    ----------
    name : str
        The value of ``task.kind``.
    """

    name: ClassVar[str]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the kind with what it needs of a run's settings."""
        return cls()

    @abstractmethod
    def tokenise(self, tokenizer: Any, examples: Examples, max_length: int) -> Tokenised:
        """Return every row's tokens, at most `max_length`; no row's depend on another's."""

    def collate(
        self, rows: Tokenised, indices: np.ndarray, pad_id: int, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Return the rows at `indices` as one padded batch: the model's inputs and ``labels``."""
        return pad_batch(rows, indices, pad_id, device)

    def made_up(self, model: AdaptedModel) -> dict[str, Tensor]:
        """Return a batch of two rows that nobody wrote, each with something to learn: to try the model itself."""
        return self.collate(made_up_rows(model), np.arange(2), 0, model.device)

    @abstractmethod
    def losses(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return one loss an example, (b,), that depends on no other example of the batch."""

    @abstractmethod
    def predictions(self, module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits of every prediction, (b, t, v), and by name which of them an audit looks at, (b, t)."""

    def learns(self, rows: Tokenised) -> bool:
        """Whether any row has something to learn."""
        return len(rows) > 0

    def check(self) -> None:
        """Raise ConfigError where this machine lacks something that :meth:`judge` needs."""
        return

    def judge(
        self, model: AdaptedModel, tokenizer: Any, examples: Examples, max_length: int, answers: Answers
    ) -> dict[str, float]:
        """Return scores that take longer, for a run's final model, whose `answers` are kept; none here."""
        return {}

    @abstractmethod
    def score(self, model: AdaptedModel, rows: Tokenised, pad_id: int, size: int) -> dict[str, float]:
        """Return the model's scores over the rows, computed `size` rows at a time."""
