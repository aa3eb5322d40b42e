"""The table of benchmarks/step.py on one CUDA GPU, and two clients that share it. Under five minutes.

    python -m benchmarks.device [--json FILE] [--markdown FILE] [--turns 9]

Times are device events around whole steps, memory is the most that PyTorch had allocated; the base model is in
bfloat16, its LoRA in float32, as in `privet run`. Sizes fill a large GPU; whole models. Then `privet run` trains two
clients on the GPU in Ray, side by side (federation.gpus_per_client=0.5) and one after the other (1). Without a GPU it
says so and is done.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import suite, table, targets
from benchmarks.check import check
from benchmarks.measure import Clock, CpuClock
from benchmarks.memory import Peak, take_steps
from benchmarks.models import LLAMA_512, LLAMA_2048, ROBERTA_LARGE, Case, Workload, make_workload
from benchmarks.step import machine, write
from benchmarks.variants import BY_KEY, Key

CASES = (Case(ROBERTA_LARGE, 64, 256), Case(ROBERTA_LARGE, 64, 256, head=True), Case(LLAMA_2048, 8, 512))


class DeviceClock:
    """Device time between two events, and wall time until the device is done."""

    names: tuple[str, ...] = ("device", "wall")

    def time(self, call: Callable[[], None]) -> tuple[float, ...]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        wall = time.perf_counter()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, time.perf_counter() - wall


def device_peaks(work: Workload, keys: Sequence[Key]) -> dict[Key, Peak]:
    """Measure what each variant has allocated at most, with one loaded model and no other variant about."""
    found = {}
    for key in keys:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated()
        take_steps(work, key, 2)
        found[key] = Peak(torch.cuda.max_memory_allocated(), loaded)
    return found


@dataclass(frozen=True)
class Place:
    """Where the table is measured, and how."""

    device: str
    dtype: torch.dtype
    clock: Clock
    peaks: Callable[[Workload, Sequence[Key]], dict[Key, Peak]]
    cases: tuple[Case, ...]
    layers: int | None
    shares: tuple[float, ...]  # of the GPU, for a client of `privet run`
    overrides: tuple[str, ...]


GPU = Place(
    device="cuda",
    dtype=torch.bfloat16,
    clock=DeviceClock(),
    peaks=device_peaks,
    cases=CASES,
    layers=None,
    shares=(0.5, 1.0),
    overrides=(
        "task.train_rows=4000",
        "train.local_steps=20",
        "train.batch_size=256",
        "train.micro_batch=256",
    ),
)
#: The same code without a GPU, small.
REHEARSAL = Place(
    device="cpu",
    dtype=torch.bfloat16,
    clock=CpuClock(),
    peaks=lambda work, keys: {},
    cases=(Case(LLAMA_512, 4, 16),),
    layers=1,
    shares=(0.0,),
    overrides=("model=tiny_random", "task.train_rows=200", "train.local_steps=2", "train.batch_size=16"),
)


def main(argv: list[str] | None = None) -> None:
    """Measure and print one table and the time of two clients."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=9, help="steps of every variant; default 9")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--cpu-rehearsal", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not (torch.cuda.is_available() or args.cpu_rehearsal):
        print("benchmarks.device: no CUDA GPU here, nothing to measure")
        return
    place = REHEARSAL if args.cpu_rehearsal else GPU
    found = [row for case in place.cases for row in _measure(case, place, args.turns)]
    missed = targets.misses(found)
    print(table.text(found))
    print(*(["above target:", *missed] if missed else ["all targets are met"]), sep="\n", flush=True)
    seconds = {share: two_clients(share, place.overrides) for share in place.shares}
    for share, spent in seconds.items():
        print(f"two clients, federation.gpus_per_client={share:g}: {spent:.2f} s a round of training")
    report = {
        "machine": {**machine(), "device": _device_name(place)},
        "settings": {"turns": args.turns, "dtype": str(place.dtype)},
        "rows": table.as_json(found),
        "above_target": missed,
        "two_clients_seconds": seconds,
    }
    write(args.json, json.dumps(report, indent=1))
    write(args.markdown, table.markdown(found))


def _measure(case: Case, place: Place, turns: int) -> list[table.Row]:
    small = replace(case, rows=4, tokens=16)
    check(make_workload(small, 1, device=place.device), tolerance=1e-3)
    check(make_workload(small, 1, device=place.device, dtype=place.dtype), tolerance=5e-2)
    work = make_workload(case, place.layers, device=place.device, dtype=place.dtype)
    peaks = place.peaks(work, list(BY_KEY))
    times = suite.measure(suite.build_steps(work), turns, place.clock)
    return suite.rows(case.name, case.layers(place.layers), times, peaks)


def two_clients(share: float, overrides: Sequence[str]) -> float:
    """Train two clients through `privet run`; returns the seconds of the last round's training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "privet.cli",
            "run",
            "method=fedavg",
            "--runs",
            folder,
            "--name",
            "run",
        ]
        command += ["federation.clients=2", "federation.rounds=3", f"federation.gpus_per_client={share}"]
        done = subprocess.run(
            [*command, *overrides], capture_output=True, text=True, timeout=240, check=False
        )
        if done.returncode:
            raise SystemExit(f"privet run failed: {(done.stderr or done.stdout).strip()[-500:]}")
        rounds = (Path(folder) / "run" / "rounds.jsonl").read_text().splitlines()
    # The first round loads the model; a later one shows what sharing costs.
    phases: list[dict[str, Any]] = json.loads(rounds[-1])["phases"]
    return float(sum(phase["seconds"] for phase in phases))


def _device_name(place: Place) -> str:
    return torch.cuda.get_device_name() if place.device == "cuda" else place.device


if __name__ == "__main__":
    main()
