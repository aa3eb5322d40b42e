"""The rows of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from privet.data.images import Picture


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows of a task, in a fixed order.

    Attributes
    ----------
    texts : list of str
        n texts, none of them blank; all empty where the task has images and no texts to read.
    pairs : list of str or None
        The second text of every row, for tasks over pairs.
    labels : numpy.ndarray
        (n,) int64, indices into ``task.labels``; 0 where the answer is a text.
    columns : numpy.ndarray or None
        (n,) texts of the column that a partition asked for.
    targets : list of str or None
        The text that answers every row, for tasks in which a model writes.
    images : list of Picture or None
        The image of every row, for tasks that have them.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: np.ndarray
    columns: np.ndarray | None = None
    targets: list[str] | None = None
    images: list[Picture] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def keys(self) -> list[str]:
        """What a row is told by when rows are set apart, (n,): its image, else its text; equal ones stay together."""
        return self.texts if self.images is None else [image.key for image in self.images]

    def take(self, indices: Sequence[int] | np.ndarray) -> Examples:
        """Return the rows at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Examples(
            texts=[self.texts[i] for i in chosen],
            pairs=None if self.pairs is None else [self.pairs[i] for i in chosen],
            labels=self.labels[chosen],
            columns=None if self.columns is None else self.columns[chosen],
            targets=None if self.targets is None else [self.targets[i] for i in chosen],
            images=None if self.images is None else [self.images[i] for i in chosen],
        )

    def join(self, other: Examples) -> Examples:
        """Return the rows of both, of one task, without the column of a partition."""
        return Examples(
            texts=[*self.texts, *other.texts],
            pairs=None if self.pairs is None else [*self.pairs, *(other.pairs or [])],
            labels=np.concatenate([self.labels, other.labels]),
            targets=None if self.targets is None else [*self.targets, *(other.targets or [])],
            images=None if self.images is None else [*self.images, *(other.images or [])],
        )
