"""The seed tree: one run seed, one independent child for every (round, node, purpose).

Children drive initial weights, schedules, partitions and, without privacy, batches. DP noise and DP
sampling never come from here (design rule 6): the server knows the run seed.
"""

from __future__ import annotations

import hashlib

import torch


def child_seed(seed: int, *path: str | int) -> int:
    """Return a 63-bit seed for one purpose, independent of the order in which children are asked for.

    Parameters
    ----------
    seed : int
        The run's seed.
    *path : str or int
        Names of the branch, for example ``("batches", round, node)``.
    """
    text = "\x1f".join([str(seed), *(f"{type(p).__name__}:{p}" for p in path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def child_generator(seed: int, *path: str | int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`child_seed`; for public initial values only."""
    return torch.Generator().manual_seed(child_seed(seed, *path))
