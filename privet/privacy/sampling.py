"""Which rows a local step uses: Poisson draws under DP, seeded permutations without it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from privet.errors import ConfigError, DataError
from privet.privacy.rng import Randomness


def sampling_rate(batch_size: int, declared: int) -> float:
    """Return the Poisson rate ``q = min(1, batch_size / declared)``.

    Parameters
    ----------
    batch_size : int
        The expected batch b, at least 1. It stays the divisor of the noised sum also when q is capped.
    declared : int
        The row count n that the node declares public, at least 1. It fixes q whatever the true count is:
        a rate that followed the true count would itself reveal whether a row is there.

    Raises
    ------
    ConfigError
        If either number is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"train.batch_size = {batch_size} is not allowed: at least 1")
    if declared < 1:
        raise ConfigError(f"declared rows = {declared} is not allowed: at least 1")
    return min(1.0, batch_size / declared)


def poisson_draw(rows: int, q: float, rng: Randomness) -> NDArray[np.int64]:
    """Draw every one of `rows` rows independently with probability `q`.

    The batch size varies and may be zero; the accountants' amplification holds for exactly this draw
    (Mironov, Talwar and Zhang, 2019, "Renyi differential privacy of the sampled Gaussian mechanism") and for
    no shuffle or fixed-size batch.

    Returns
    -------
    ndarray of int64, shape (drawn,)
        Row indices in increasing order.

    Raises
    ------
    ConfigError
        If `rows` is negative or `q` is not in (0, 1].
    """
    if rows < 0:
        raise ConfigError(f"rows = {rows} is not allowed: at least 0")
    if not 0.0 < q <= 1.0:
        raise ConfigError(f"q = {q} is not allowed: greater than 0 and at most 1")
    return np.flatnonzero(rng.uniform(rows) < q).astype(np.int64, copy=False)


def shuffled_batches(rows: int, batch_size: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield `steps` batches of row indices for training without DP.

    Every epoch is a new permutation of all rows, cut into batches without replacement; the last batch of an
    epoch holds what is left. The batches follow from `seed` alone, and a longer sequence starts with the
    shorter one.

    Raises
    ------
    DataError
        If there are no rows.
    ConfigError
        If `batch_size` is below 1 or `steps` or `seed` is negative.
    """
    if rows < 1:
        raise DataError("there are no rows to train on")
    if batch_size < 1:
        raise ConfigError(f"train.batch_size = {batch_size} is not allowed: at least 1")
    if steps < 0:
        raise ConfigError(f"steps = {steps} is not allowed: at least 0")
    if seed < 0:
        raise ConfigError(f"seed = {seed} is not allowed: at least 0")
    return _epochs(rows, batch_size, steps, seed)


def _epochs(rows: int, batch_size: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    while steps > 0:
        order = generator.permutation(rows).astype(np.int64, copy=False)
        for start in range(0, rows, batch_size):
            if steps == 0:
                return
            yield order[start : start + batch_size]
            steps -= 1
