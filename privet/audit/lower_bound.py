"""A lower bound on epsilon from one training run (Steinke, Nasr and Jagielski, NeurIPS 2023).

m canaries are each included by a fair coin. Of the trained model an auditor guesses r of the coins and abstains from
the others. If training is (epsilon, delta)-DP for adding or removing a row, the number of right guesses is no larger,
but for delta, than that of r coins which fall right with probability e^epsilon / (1 + e^epsilon) (their Theorem 5.2).
An epsilon under which as many right guesses as there were have a probability below 5 % is refuted.

The bound holds for any way of guessing that does not look at the coins. It is no estimate: it says what the run is
*not*, and few canaries can refute small epsilons only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_LARGEST = 50.0
_STEPS = 60


@dataclass(frozen=True)
class Bound:
    """What the guesses say.

    Attributes
    ----------
    epsilon : float
        Every smaller epsilon is refuted with that confidence; 0: none is.
    guesses, right, canaries : int
        r, v and m.
    refutable : float
        The largest epsilon that r guesses could refute, had all been right.
    """

    epsilon: float
    guesses: int
    right: int
    canaries: int
    refutable: float


def p_value(epsilon: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """Return an upper bound on the probability of at least `right` right guesses under (epsilon, delta)-DP.

    With W ~ Binomial(r, e^eps / (1 + e^eps)): P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i, at most 1.
    """
    from scipy.stats import binom

    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses of {canaries} canaries is not possible")
    if right == 0:
        return 1.0
    share = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, share))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, share))
    steepest = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * steepest)


def lower_bound(
    delta: float, canaries: int, guesses: int, right: int, confidence: float = CONFIDENCE
) -> Bound:
    """Return the largest epsilon that this many right guesses refute.

    Parameters
    ----------
    delta : float
        That of the claim.
    canaries, guesses, right : int
        m, r and v.
    confidence : float
        1 minus the probability that a run as private as claimed is refuted.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: between 0 and 1")
    return Bound(
        epsilon=_refuted(delta, canaries, guesses, right, confidence),
        guesses=guesses,
        right=right,
        canaries=canaries,
        refutable=_refuted(delta, canaries, guesses, guesses, confidence),
    )


def _refuted(delta: float, canaries: int, guesses: int, right: int, confidence: float) -> float:
    """Return the supremum of the refuted epsilons by halving; the p-value rises with epsilon."""

    def refutes(epsilon: float) -> bool:
        return p_value(epsilon, delta, canaries, guesses, right) < 1 - confidence

    if not guesses or not refutes(0.0):
        return 0.0
    low, high = 0.0, _LARGEST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low


def guess(scores: np.ndarray, guesses: int) -> np.ndarray:
    """Guess the coins of the canaries that are easiest to tell.

    Parameters
    ----------
    scores : array (m,)
        Low for what was trained on.
    guesses : int
        r, even and at most m: the r / 2 lowest are taken for included and the r / 2 highest for left out.

    Returns
    -------
    array (m,) of int
        1 included, -1 left out, 0 no guess.
    """
    if guesses % 2 or not 0 <= guesses <= len(scores):
        raise ValueError(f"guesses = {guesses}: an even number up to {len(scores)}")
    order = np.argsort(scores, kind="stable")
    out = np.zeros(len(scores), np.int64)
    if guesses:
        out[order[: guesses // 2]] = 1
        out[order[-(guesses // 2) :]] = -1
    return out
