"""Plain simulated annealing of eq. 12: an independent yardstick for the solver on small cases.

One proposal at a time, the swap of two random coordinates or the move of one to a random slot, taken by
Metropolis' rule at a temperature that falls geometrically. Nothing is shared with ``privet.hsip``.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from privet.projection import normalise, unit_profiles


@njit
def _anneal(unit, load, weight, slots, sign, d, steps, hot, cold, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    D, K = unit.shape
    total, held, n = np.zeros((d, K)), np.zeros((d, 3)), np.zeros(d)
    for i in range(D):
        total[slots[i]] += sign[i] * unit[i]
        held[slots[i]] += load[i]
        n[slots[i]] += 1
    heat = hot
    for step in range(steps):
        if step % 1000 == 0:
            heat = hot * (cold / hot) ** (step / steps)
        i = np.random.randint(D)
        j = np.random.randint(D) if np.random.random() < 0.7 else -1
        a, b = slots[i], slots[j] if j >= 0 else np.random.randint(d)
        if a == b or (j < 0 and n[a] < 2):
            continue
        out_a, out_b, in_a, in_b = 0.0, 0.0, 0.0, 0.0
        for k in range(K):
            p = sign[i] * unit[i, k]
            q = sign[j] * unit[j, k] if j >= 0 else 0.0
            out_a += p * (total[a, k] - p)
            out_b += q * (total[b, k] - q)
            in_a += q * (total[a, k] - p)
            in_b += p * (total[b, k] - q)
        change = weight[0] * (out_a + out_b - abs(in_a) - abs(in_b))
        for c in range(3):
            more = (load[j, c] if j >= 0 else 0.0) - load[i, c]
            change += 2 * weight[1 + c] * more * (held[a, c] - held[b, c] + more)
        if j < 0:
            change += (weight[0] + 2 * weight[4]) * (n[b] - n[a] + 1)
        if change >= 0 and np.random.random() >= np.exp(-change / heat):
            continue
        for k in range(K):
            p = sign[i] * unit[i, k]
            q = sign[j] * unit[j, k] if j >= 0 else 0.0
            total[a, k] += (q if in_a >= 0 else -q) - p
            total[b, k] += (p if in_b >= 0 else -p) - q
        for c in range(3):
            more = (load[j, c] if j >= 0 else 0.0) - load[i, c]
            held[a, c] += more
            held[b, c] -= more
        slots[i] = b
        if in_b < 0:
            sign[i] = -sign[i]
        if j >= 0:
            slots[j] = a
            if in_a < 0:
                sign[j] = -sign[j]
        else:
            n[a] -= 1
            n[b] += 1


def anneal(
    profiles: NDArray[np.float64],
    loads: list[NDArray[np.float64]],
    d: int,
    steps: int,
    hot: float = 1.0,
    cold: float = 0.07,
    coefficients: tuple[float, float, float, float, float] = (1, 1, 1, 1, 1),
    seed: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return slots and signs after so many proposals from a random balanced start."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(len(profiles)) % d
    sign = rng.choice([-1.0, 1.0], len(profiles))
    load = np.stack([normalise(v) for v in loads], axis=1)
    weight = np.array(coefficients, float)
    _anneal(unit_profiles(profiles), load, weight, slots, sign, d, steps, hot, cold, seed)
    return slots, sign
