"""From texts to tensors: tokenise once, then cut a draw into micro-batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from privet.data.tasks import Examples

if TYPE_CHECKING:
    from privet.reader import RowImages


@dataclass(frozen=True, eq=False)
class Tokenised:
    """Token ids of n rows, without padding.

    Attributes
    ----------
    ids : list of numpy.ndarray
        n arrays of int64, at least one and at most `max_length` tokens each.
    labels : numpy.ndarray
        (n,) int64.
    types : list of numpy.ndarray or None
        Segment ids of pairs, for models that tell the two texts apart by them.
    prompts : numpy.ndarray or None
        (n,) int64, for language models: how many of a row's first tokens are given and not to be learnt.
    images : RowImages or None
        The image of every row, decoded when a batch asks for it.
    """

    ids: list[np.ndarray]
    labels: np.ndarray
    types: list[np.ndarray] | None = None
    prompts: np.ndarray | None = None
    images: RowImages | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, (n,) int64."""
        return np.fromiter((len(row) for row in self.ids), dtype=np.int64, count=len(self.ids))


def padding_id(tokenizer: Any) -> int:
    """Return the token id that fills up a batch; masked, so any will do where the tokenizer has none."""
    return int(tokenizer.pad_token_id or 0)


def tokenise(tokenizer: Any, examples: Examples, max_length: int) -> Tokenised:
    """Tokenise every row, cut to `max_length` tokens.

    Each row is tokenised by itself: its ids do not depend on which others there are.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The base model's tokenizer.
    examples : Examples
        n rows.
    max_length : int
        Most tokens of a row, special tokens included; of a pair, the longer text loses tokens first.

    Returns
    -------
    Tokenised
        n rows in the same order.
    """
    if len(examples) == 0:
        return Tokenised([], examples.labels)
    typed = examples.pairs is not None and "token_type_ids" in tokenizer.model_input_names
    encoded = tokenizer(
        examples.texts,
        examples.pairs,
        truncation=True,
        max_length=max_length,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=typed,
        verbose=False,
    )
    # A text of nothing but ignored characters has no token where a model adds none of its own. It keeps its
    # place with one: the number of rows is declared, and a row without tokens has no representation.
    known = (tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    blank = [next((token for token in known if token is not None), 0)]
    ids = [np.array(row or blank, dtype=np.int64) for row in encoded["input_ids"]]
    types = [np.array(row or [0], dtype=np.int64) for row in encoded["token_type_ids"]] if typed else None
    return Tokenised(ids, examples.labels, types)


def microbatches(lengths: np.ndarray, indices: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut a draw into micro-batches of rows of similar length, the longest first.

    Padding is most of an encoder's cost, and a batch that does not fit should fail at once.

    Parameters
    ----------
    lengths : numpy.ndarray
        (n,) tokens of every row.
    indices : numpy.ndarray
        (m,) rows of the draw; may be empty.
    size : int
        Most rows of a micro-batch.

    Returns
    -------
    list of numpy.ndarray
        ceil(m / size) index arrays that hold every drawn row exactly once.
    """
    if size < 1:
        raise ValueError(f"size = {size}: at least 1")
    indices = np.asarray(indices, dtype=np.int64)
    order = indices[np.argsort(-np.asarray(lengths)[indices], kind="stable")]
    return [order[start : start + size] for start in range(0, len(order), size)]


def pad_batch(
    tokenised: Tokenised,
    indices: Sequence[int] | np.ndarray,
    pad_id: int,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """Pad the rows at `indices` on the right to the longest of them.

    Parameters
    ----------
    tokenised : Tokenised
        All rows.
    indices : sequence of int
        b >= 1 rows, in the order wanted.
    pad_id : int
        Token id of the padding; the attention mask is 0 there.
    device : torch.device or str
        Where the tensors go.

    Returns
    -------
    dict of str to torch.Tensor
        ``input_ids`` (b, t), ``attention_mask`` (b, t), ``labels`` (b,), all int64, and ``token_type_ids``
        (b, t) for pairs where the model has them.
    """
    rows = np.asarray(indices, dtype=np.int64)
    if len(rows) == 0:
        raise ValueError("a batch needs at least one row")
    width = max(len(tokenised.ids[i]) for i in rows)
    arrays = {
        "input_ids": _padded(tokenised.ids, rows, width, pad_id),
        "attention_mask": (
            np.arange(width) < np.array([len(tokenised.ids[i]) for i in rows])[:, None]
        ).astype(np.int64),
        "labels": tokenised.labels[rows],
    }
    if tokenised.types is not None:
        arrays["token_type_ids"] = _padded(tokenised.types, rows, width, 0)
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _padded(values: Sequence[np.ndarray], rows: np.ndarray, width: int, fill: int) -> np.ndarray:
    out = np.full((len(rows), width), fill, dtype=np.int64)
    for place, row in enumerate(rows):
        out[place, : len(values[row])] = values[row]
    return out
