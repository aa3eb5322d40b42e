"""Logits and scores of a model over many rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from privet.adapters import AdaptedModel
from privet.data.collate import Tokenised, microbatches, pad_batch


@torch.no_grad()
def predict(model: AdaptedModel, rows: Tokenised, pad_id: int, size: int) -> Tensor:
    """Return logits (rows x labels) in the order of the rows, float32 on the CPU."""
    out: Tensor | None = None
    for batch in microbatches(rows.lengths, np.arange(len(rows)), size):
        inputs = pad_batch(rows, batch, pad_id, model.device)
        inputs.pop("labels")
        logits = model.module(**inputs).float().cpu()
        if out is None:
            out = torch.zeros(len(rows), logits.shape[1])
        out[torch.from_numpy(batch)] = logits
    return torch.zeros(0, 0) if out is None else out


def score(model: AdaptedModel, rows: Tokenised, pad_id: int, size: int) -> dict[str, float]:
    """Return accuracy, mean cross-entropy and macro F1 over the rows."""
    logits = predict(model, rows, pad_id, size)
    labels = torch.from_numpy(rows.labels)
    return {
        "accuracy": float((logits.argmax(1) == labels).float().mean()),
        "loss": float(torch.nn.functional.cross_entropy(logits, labels)),
        "f1": macro_f1(logits.argmax(1).numpy(), rows.labels),
    }


def macro_f1(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over labels of F1, over those labels that stand in a row or a guess."""
    size = int(max(guesses.max(initial=0), labels.max(initial=0))) + 1
    hits = np.bincount(labels[guesses == labels], minlength=size)
    found = np.bincount(guesses, minlength=size) + np.bincount(labels, minlength=size)
    seen = found > 0
    return float((2 * hits[seen] / found[seen]).mean()) if seen.any() else 0.0
