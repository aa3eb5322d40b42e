"""MaxRenyi-K%: how uncertain a model is where it is most uncertain (Li et al., *VL-MIA*, NeurIPS 2024).

    H_a(p) = log(sum_i p_i^a) / (1 - a)

is Shannon's entropy at a = 1 and -log max p at a = infinity. A model is surer of texts that it was trained on, so a low
score speaks for a member. The published code clamps probabilities; here everything is computed from logits in log
space, where nothing has to be clamped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALPHAS = (0.5, 1.0, 2.0, math.inf)
SHARES = (0, 10, 100)
"""K: per cent of the positions, the most uncertain ones, that count; 0 is the single most uncertain one."""


def renyi_entropies(logits: Tensor, alphas: Sequence[float] = ALPHAS) -> Tensor:
    """Return the Renyi entropies of the distributions that logits stand for, in nats.

    Parameters
    ----------
    logits : Tensor
        (..., v).
    alphas : sequence of float
        Orders, above 0; ``inf`` is allowed.

    Returns
    -------
    Tensor
        (len(alphas), ...), float64, between 0 and log v.
    """
    logs = torch.log_softmax(logits.double(), -1)
    return torch.stack([_entropy(logs, alpha) for alpha in alphas])


def _entropy(logs: Tensor, alpha: float) -> Tensor:
    if not alpha > 0:
        raise ValueError(f"alpha = {alpha}: above 0")
    if math.isinf(alpha):
        found = -logs.amax(-1)
    elif alpha == 1:
        found = torch.special.entr(logs.exp()).sum(-1)
    else:
        found = torch.logsumexp(alpha * logs, -1) / (1 - alpha)
    return found.clamp_min(0.0)


def max_renyi(entropies: Tensor, share: float) -> float:
    """Return the mean of the largest entropies of a sequence.

    Parameters
    ----------
    entropies : Tensor
        (t,), one for each predicted token, t >= 1.
    share : float
        K: max(1, floor(t K / 100)) of them count.
    """
    if not 0 <= share <= 100:
        raise ValueError(f"share = {share}: 0 to 100 per cent")
    count = max(1, math.floor(len(entropies) * share / 100))
    return float(entropies.topk(count).values.mean())
