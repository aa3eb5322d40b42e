"""What an assignment of coordinates to slots is worth (FedHSIP, eq. 12)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Coefficients = tuple[float, float, float, float, float]


def unit_profiles(profiles: Floats, tol: float = 1e-12) -> Floats:
    """Return the rows of `profiles` (D x K) at length one; rows shorter than `tol` become zero."""
    norms = np.linalg.norm(profiles, axis=1, keepdims=True)
    return np.where(norms > tol, profiles / np.maximum(norms, tol), 0.0)


def normalise(load: Floats) -> Floats:
    """Scale a non-negative load to mean one, so that s, e, h and the count weigh alike in eq. 12.

    A load of zeros stays: no slot differs from the mean.
    """
    mean = float(load.mean())
    return load / mean if mean > 0 else load


def objective(
    slots: NDArray[np.int64],
    signs: Floats,
    profiles: Floats,
    sensitivity: Floats,
    energy: Floats,
    heterogeneity: Floats,
    d: int,
    coefficients: Coefficients = (1, 1, 1, 1, 1),
) -> float:
    """Return FedHSIP's assignment objective (eq. 12).

    Sum over slots of alpha x conflict + beta (S - mean S)^2 + gamma (E - mean E)^2 + eta (H - mean H)^2
    + lambda (n - D/d)^2. The conflict of a slot is the sum over its pairs of ``1 - cos``, by the closed form
    ``C(n, 2) - (||sum x||^2 - sum ||x||^2) / 2`` with x the signed unit profiles.

    Parameters
    ----------
    slots, signs : arrays (D,)
        The assignment.
    profiles : array (D, K)
        Update direction of each coordinate over the K clients; scaled to length one here.
    sensitivity, energy, heterogeneity : arrays (D,)
        Loads s, e, h, already on the scale in which they are to count.
    d : int
        Number of slots.
    coefficients : tuple of float
        alpha (conflict), beta (sensitivity), gamma (energy), eta (heterogeneity), lambda (count).
    """
    alpha, beta, gamma, eta, lam = coefficients
    x = unit_profiles(profiles) * signs[:, None]
    n = np.bincount(slots, minlength=d).astype(np.float64)
    length = np.bincount(slots, weights=(x * x).sum(1), minlength=d)
    total = np.zeros(d)
    for k in range(x.shape[1]):
        total += np.bincount(slots, weights=x[:, k], minlength=d) ** 2
    value = alpha * float((n * (n - 1) / 2 - (total - length) / 2).sum())
    for weight, load in ((beta, sensitivity), (gamma, energy), (eta, heterogeneity)):
        sums = np.bincount(slots, weights=load, minlength=d)
        value += weight * float(((sums - sums.mean()) ** 2).sum())
    return value + lam * float(((n - len(slots) / d) ** 2).sum())
