"""The rows of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows of a task, in a fixed order.

    Attributes
    ----------
    texts : list of str
        n texts, none of them blank.
    pairs : list of str or None
        The second text of every row, for tasks over pairs.
    labels : numpy.ndarray
        (n,) int64, indices into ``task.labels``; 0 where the answer is a text.
    columns : numpy.ndarray or None
        (n,) texts of the column that a partition asked for.
    targets : list of str or None
        The text that answers every row, for tasks in which a model writes.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: np.ndarray
    columns: np.ndarray | None = None
    targets: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int] | np.ndarray) -> Examples:
        """Return the rows at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Examples(
            texts=[self.texts[i] for i in chosen],
            pairs=None if self.pairs is None else [self.pairs[i] for i in chosen],
            labels=self.labels[chosen],
            columns=None if self.columns is None else self.columns[chosen],
            targets=None if self.targets is None else [self.targets[i] for i in chosen],
        )

    def join(self, other: Examples) -> Examples:
        """Return the rows of both, of one task, without the column of a partition."""
        return Examples(
            texts=[*self.texts, *other.texts],
            pairs=None if self.pairs is None else [*self.pairs, *(other.pairs or [])],
            labels=np.concatenate([self.labels, other.labels]),
            targets=None if self.targets is None else [*self.targets, *(other.targets or [])],
        )
