"""The assignment solver of FedHSIP at full size: objective, seconds and memory.

    python -m benchmarks.assignment [--quick] [--json FILE] [--only NAME ...]

Every case runs in a process of its own, so that seconds include compilation and memory is the process's peak. The
objective is given as a fraction of what a random balanced assignment with random signs has, all coefficients 1.
``wall`` and ``cpu`` are the seconds of ``assign_slots``: on a machine that does other work too, only the second,
summed over threads, means much. ``hard`` is the objective with balance=hard over that with balance=soft, ``annealed``
the objective over that of long simulated annealing (benchmarks/anneal.py). A case is a miss where it is worse than
its target; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privet.projection import assign_slots, normalise, objective

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """One instance, and the most that its figures may be.

    Attributes
    ----------
    kind : {"isotropic", "clustered"}
        Profiles in all directions alike, or around 50 lines.
    fraction, seconds, megabytes, hard, annealed : float or None
        Targets, on two cores.
    steps : int
        Proposals of the annealing; 0: none.
    """

    D: int
    d: int
    K: int
    kind: str = "isotropic"
    fraction: float | None = None
    seconds: float | None = None
    megabytes: float | None = None
    hard: float | None = None
    annealed: float | None = None
    steps: int = 0


CASES = {
    "annealed": Case(1280, 200, 6, annealed=1.1, hard=1.3, steps=1_000_000_000),
    "full-6": Case(294_912, 46_080, 6, fraction=0.085, seconds=30, hard=1.3),
    "full-20-clustered": Case(294_912, 46_080, 20, "clustered", fraction=0.141, seconds=30),
    "full-20": Case(294_912, 46_080, 20, fraction=0.297, seconds=30),
    "4M-6": Case(4_000_000, 625_000, 6, fraction=0.046, seconds=180, megabytes=4096),
    "4M-6-wide": Case(4_000_000, 46_080, 6, seconds=480),
}
QUICK = {
    "annealed": Case(640, 100, 6, annealed=1.1, hard=1.3, steps=20_000_000),
    "quick-6": Case(29_491, 4_608, 6, fraction=0.12, seconds=30),
}


def instance(case: Case, seed: int = 0) -> tuple[Floats, list[Floats]]:
    """Draw profiles and loads; s and e are related, as the sensitivity of a coordinate and its energy are."""
    rng = np.random.default_rng(seed)
    D, K = case.D, case.K
    u = rng.standard_normal((D, K))
    if case.kind == "clustered":
        u *= 0.5
        u += rng.standard_normal((50, K))[rng.integers(0, 50, D)]
        u *= rng.choice([-1.0, 1.0], D)[:, None]
    u *= np.exp(rng.standard_normal(D))[:, None]
    common = rng.standard_normal(D)
    s = np.exp(0.7 * common + 0.3 * rng.standard_normal(D))
    e = np.exp(0.5 * common + 0.5 * rng.standard_normal(D))
    return u, [normalise(v) for v in (s, e, rng.gamma(2.0, 1.0, D))]


def random_objective(u: Floats, loads: list[Floats], d: int) -> float:
    """Objective of a random balanced assignment with random signs."""
    rng = np.random.default_rng(1)
    return objective(rng.permutation(len(u)) % d, rng.choice([-1.0, 1.0], len(u)), u, *loads, d)


def measure(case: Case) -> dict[str, float]:
    """Solve one case in this process."""
    u, loads = instance(case)
    wall, cpu = time.perf_counter(), time.process_time()
    slots, signs = assign_slots(u, *loads, case.d)
    found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    found["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    soft = objective(slots, signs.astype(np.float64), u, *loads, case.d)
    found["fraction"] = soft / random_objective(u, loads, case.d)
    if case.hard:
        slots, signs = assign_slots(u, *loads, case.d, balance="hard")
        found["hard"] = objective(slots, signs.astype(np.float64), u, *loads, case.d) / soft
    if case.steps:
        from benchmarks.anneal import anneal

        found["annealed"] = soft / objective(*anneal(u, loads, case.d, case.steps), u, *loads, case.d)
    return found


def misses(case: Case, found: dict[str, float]) -> list[str]:
    """Name the figures that are above their target."""
    targets = {
        "fraction": case.fraction,
        "wall": case.seconds,
        "megabytes": case.megabytes,
        "hard": case.hard,
        "annealed": case.annealed,
    }
    return [f"{k} {found[k]:.3f} > {t}" for k, t in targets.items() if t is not None and found[k] > t]


def in_a_child(name: str, quick: bool) -> dict[str, float]:
    """Run one case in a process of its own, without compiled code from an earlier one."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.assignment",
        "--child",
        name,
        *(["--quick"] if quick else []),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cases, under a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these cases")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = QUICK if args.quick else CASES
    if args.child:
        print(json.dumps(measure(cases[args.child])))
        return 0
    unknown = set(args.only) - set(cases)
    if unknown:
        parser.error(f"no case {sorted(unknown)[0]!r}: {', '.join(cases)}")
    columns = ("fraction", "wall", "cpu", "megabytes", "hard", "annealed")
    print(f"{'case':18s} {'D':>8s} {'d':>7s} {'K':>3s} " + " ".join(f"{c:>9s}" for c in columns), flush=True)
    table: list[dict[str, Any]] = []
    for name in args.only or cases:
        case = cases[name]
        found = in_a_child(name, args.quick)
        missed = misses(case, found)
        table.append({"case": name, "D": case.D, "d": case.d, "K": case.K, **found, "misses": missed})
        digits = {"wall": 1, "cpu": 1, "megabytes": 0}
        cells = [f"{found[c]:9.{digits.get(c, 4)}f}" if c in found else f"{'':9s}" for c in columns]
        print(f"{name:18s} {case.D:8d} {case.d:7d} {case.K:3d} {' '.join(cells)}", *missed, flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    return int(any(row["misses"] for row in table))


if __name__ == "__main__":
    sys.exit(main())
