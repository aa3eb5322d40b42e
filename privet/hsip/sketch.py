"""Profiles over many clients, compressed to a few columns by a seeded random projection."""

from __future__ import annotations

import math

import numpy as np

from privet.hsip.objective import Floats
from privet.seeding import child_seed

WIDTH = 32
"""Columns that profiles are compressed to where there are more clients."""


def profile_sketch(seed: int, width: int, client: int | str) -> Floats:
    """Return one client's row (width,) of the random matrix R (K x width): N(0, 1 / width).

    A server adds ``outer(u_k, profile_sketch(seed, width, k))`` client by client and ends with ``U R``, D x width,
    in whatever order they come and without holding U.

    ``E[R R^T] = I``, so inner products of U's rows, hence their cosines about, are kept in expectation; that of
    rows of length one has standard deviation ``sqrt((1 + cos^2) / width)``, at width 32 between 0.18 and 0.25.

    Parameters
    ----------
    seed : int
        The run's seed.
    width : int
        Columns that are kept.
    client : int or str
        Index or name of the client.
    """
    if width < 1:
        raise ValueError(f"width = {width} is not allowed: at least 1")
    bits = np.random.Philox(child_seed(seed, "profile-sketch", client))
    return np.random.Generator(bits).standard_normal(width) / math.sqrt(width)
