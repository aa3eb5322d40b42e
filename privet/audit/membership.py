"""How well scores tell members from non-members: AUROC and the true-positive rate where few are accused wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FALSE_POSITIVES = 0.01
LEVEL = 0.95
_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A figure with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Separation:
    """How far apart the scores of members and non-members are.

    Attributes
    ----------
    auroc : Interval
        P(member scores lower) + P(equal) / 2; 0.5 is chance.
    tpr : Interval
        Share of members that score below all but 1 % of the non-members.
    members, others : int
        How many there were of each.
    """

    auroc: Interval
    tpr: Interval
    members: int
    others: int

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return asdict(self)


def separation(members: Floats, others: Floats, seed: int = 0) -> Separation:
    """Measure how well a low score tells a member.

    Intervals are percentiles of 1 000 resamplings of both groups, 95 %.

    Parameters
    ----------
    members, others : arrays (n,), (m,)
        Scores; low for what was trained on.
    seed : int
        Of the resampling.

    Raises
    ------
    ValueError
        If a group is empty or a score is not a number.
    """
    one, other = (np.asarray(v, np.float64) for v in (members, others))
    if not (len(one) and len(other)):
        raise ValueError("members and non-members: at least one of each")
    if np.isnan(one).any() or np.isnan(other).any():
        raise ValueError("a score is not a number")
    return Separation(
        _interval(auroc, one, other, seed), _interval(tpr_at, one, other, seed), len(one), len(other)
    )


def auroc(members: Floats, others: Floats) -> float:
    """Return P(member < non-member) + P(equal) / 2, the area under the ROC curve of ``-score``."""
    from scipy.stats import rankdata

    size = len(others)  # the rank sum of the non-members, less its smallest value, is Mann and Whitney's U
    ranks = rankdata(np.concatenate([members, others]))[len(members) :]
    return float((ranks.sum() - size * (size + 1) / 2) / size / len(members))


def tpr_at(members: Floats, others: Floats, false_positives: float = FALSE_POSITIVES) -> float:
    """Return the share of members below the highest threshold that accuses at most that share of non-members.

    No threshold splits equal scores: of non-members that score alike, all are accused or none.
    """
    ranked = np.sort(others)
    allowed = int(np.floor(false_positives * len(ranked)))
    if allowed >= len(ranked):
        return 1.0
    return float((members < ranked[allowed]).mean())


def roc(members: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Return false and true positive rates at every threshold, both rising from 0 to 1."""
    thresholds = np.unique(np.concatenate([members, others]))
    false = np.searchsorted(np.sort(others), thresholds, "right") / len(others)
    true = np.searchsorted(np.sort(members), thresholds, "right") / len(members)
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def _interval(
    figure: Callable[[Floats, Floats], float], members: Floats, others: Floats, seed: int
) -> Interval:
    from scipy.stats import bootstrap

    value = figure(members, others)
    if min(len(members), len(others)) < 2:  # nothing to resample
        return Interval(value, 0.0, 1.0)
    found = bootstrap(
        (members, others),
        figure,
        n_resamples=_RESAMPLES,
        vectorized=False,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))
