"""What an attacker computes of a row with a model in hand: its loss, and how sure the model is of it."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray

from privet.adapters import AdaptedModel
from privet.audit.renyi import ALPHAS, SHARES, max_renyi, renyi_entropies
from privet.data.collate import Tokenised, microbatches
from privet.data.examples import Examples
from privet.kinds.base import TaskKind

LOSS = "loss"
_ROWS = 16


@torch.no_grad()
def signals(
    kind: TaskKind, model: AdaptedModel, rows: Tokenised, examples: Examples, pad_id: int
) -> dict[str, NDArray[np.float64]]:
    """Return the signals of every row; low for what was trained on.

    ``loss`` is the loss that training uses, ``loss/zlib`` the loss of a written answer over its compressed bytes, and
    ``max-renyi-K/PLACES/alpha=A`` the mean of the K per cent largest entropies of order A among a row's predictions.

    Parameters
    ----------
    kind : TaskKind
        The run's.
    model : AdaptedModel
        Loaded with the values to attack.
    rows, examples : Tokenised, Examples
        The same n rows as tokens and as texts.
    pad_id : int
        Token id of the padding.

    Returns
    -------
    dict of str to array (n,)
        NaN where a row has no such prediction.
    """
    n = len(rows)
    found = {LOSS: np.full(n, np.nan)}
    for chosen in microbatches(rows.lengths, np.arange(n), _ROWS):
        batch = kind.collate(rows, chosen, pad_id, model.device)
        found[LOSS][chosen] = kind.losses(model.module, batch).double().cpu().numpy()
        logits, places = kind.predictions(model.module, batch)
        for place, (row, row_logits) in enumerate(zip(chosen, logits, strict=True)):
            entropies = renyi_entropies(row_logits)
            for name, counts in places.items():
                some = entropies[:, counts[place]]
                for alpha, values in zip(ALPHAS, some, strict=True):
                    for share in SHARES:
                        key = f"max-renyi-{share}/{name}/alpha={alpha:g}"
                        found.setdefault(key, np.full(n, np.nan))
                        if len(values):
                            found[key][row] = max_renyi(values, share)
    if examples.targets is not None:
        size = np.array([len(zlib.compress(text.encode())) for text in examples.targets], np.float64)
        found[f"{LOSS}/zlib"] = found[LOSS] / size
    return found


def distinct(found: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Leave out signals that another one repeats for every row, as all K do where a row has one prediction."""
    kept: dict[str, NDArray[np.float64]] = {}
    for name, values in found.items():
        if not any(np.array_equal(values, other, equal_nan=True) for other in kept.values()):
            kept[name] = values
    return kept


def usable(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of the rows that have any."""
    return values[~np.isnan(values)]
