"""Compiled inner loops of the assignment solver; imported only when it runs, as loading numba takes time.

Every kernel works through the independent pieces ``first <= piece < last`` and releases the interpreter's lock:
threads share the pieces out, and what a piece yields does not depend on which thread had it. Compiled code goes
to disk only where ``NUMBA_CACHE_DIR`` names a folder, as an installed app may be read-only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

kernel: Callable[[Any], Any] = njit(
    nogil=True, fastmath=True, error_model="numpy", cache=bool(os.environ.get("NUMBA_CACHE_DIR"))
)


@kernel
def mixed(state: np.uint64) -> np.uint64:
    """Return a well-mixed 64-bit number for every input (splitmix64)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
