"""Cost of one private local step as a ratio to the same model's non-private LoRA step, on the CPU.

    python -m benchmarks.step [--json FILE] [--markdown FILE] [--layers 2] [--turns 11] [--only NAME]
    python -m benchmarks.step --check        compare all gradients, time nothing
    python -m benchmarks.step --profile      where the time above the non-private step goes

What is measured. Time: process CPU time and wall time of whole steps (forward, backward, clip, noise, update) on
one torch thread. The variants take turns on the same batch in one process, in a new order every turn; a ratio is taken
within a turn, and the median and the quartiles over the turns are shown. Memory: the resident high-water mark of one
process a variant (benchmarks/memory.py), as ratio of the peaks and, behind the slash, of the peaks above the loaded
model. Noise: the time of the step's noise alone over that of the step.

Why it is fair. All variants share the frozen weights, the batch, the loss per example, SGD and the expected batch
size; the private ones share C and sigma. Each is compared with the non-private step that trains the same parameters,
FedHSIP with two factors, so that its expansion counts as cost. Privet draws its noise from its cryptographic generator,
Opacus from PyTorch's. Before anything is timed, all gradients are compared (benchmarks/check.py). Models are cut to a
few layers, the output layer of causal ones likewise (benchmarks/models.py): the cost of privacy is per layer, as is the
rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import profiling, suite, table, targets
from benchmarks.check import check
from benchmarks.measure import CpuClock
from benchmarks.memory import process_peaks
from benchmarks.models import GPT2_SMALL, LLAMA_512, ROBERTA_BASE, Case, make_workload
from benchmarks.variants import ABSENT, BY_KEY, VARIANTS

CASES = (
    Case(ROBERTA_BASE, 16, 128),
    Case(ROBERTA_BASE, 32, 64),
    Case(ROBERTA_BASE, 16, 128, head=True),
    Case(GPT2_SMALL, 8, 128),
    Case(LLAMA_512, 16, 128),
)


def main(argv: list[str] | None = None, cases: tuple[Case, ...] = CASES) -> None:
    """Measure and print one table."""
    args = _arguments(argv)
    torch.set_num_threads(1)
    chosen = [case for case in cases if args.only.lower() in case.name.lower()]
    if args.check:
        for case in chosen:
            _say(f"{case.name}: gradients agree to {check(make_workload(case, args.layers)):.0e}")
        return
    if args.profile:
        for case in chosen:
            _profile(case, args.layers)
        return
    found = [row for case in chosen for row in _measure(case, args)]
    notes = [f"{engine}: {why}" for engine, why in ABSENT.items()]
    missed = targets.misses(found)
    print(table.text(found))
    print(*notes, *((missed and ["above target:", *missed]) or ["all targets are met"]), sep="\n")
    write(args.json, json.dumps(_report(args, found, notes, missed), indent=1))
    write(args.markdown, table.markdown(found))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=2, help="cut deeper models to so many; default 2")
    parser.add_argument("--turns", type=int, default=11, help="steps of every variant; default 11")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name contains NAME")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peaks of memory")
    parser.add_argument("--check", action="store_true", help="compare all gradients at full size and stop")
    parser.add_argument("--profile", action="store_true", help="profile the private steps and stop")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _measure(case: Case, args: argparse.Namespace) -> list[table.Row]:
    began = time.monotonic()
    check(make_workload(replace(case, rows=4, tokens=16), 1))
    steps = suite.build_steps(make_workload(case, args.layers))
    times = suite.measure(steps, args.turns, CpuClock())
    del steps
    peaks = {} if args.no_memory else process_peaks(case, args.layers, list(BY_KEY))
    _say(f"{case.name}: {time.monotonic() - began:.0f} s")
    return suite.rows(case.name, case.layers(args.layers), times, peaks)


def _profile(case: Case, layers: int) -> None:
    steps = suite.build_steps(make_workload(case, layers))
    for variant in VARIANTS:
        if variant.engine == "Privet":
            print(f"{case.name}, {variant.method}: ms a step against the non-private step")
            print(profiling.difference(steps[variant.key], steps[variant.base_key]), end="\n\n")


def _report(
    args: argparse.Namespace, rows: list[table.Row], notes: list[str], missed: list[str]
) -> dict[str, Any]:
    return {
        "machine": machine(),
        "settings": {"layers": args.layers, "turns": args.turns, "threads": torch.get_num_threads()},
        "rows": table.as_json(rows),
        "notes": notes,
        "above_target": missed,
    }


def machine() -> dict[str, str]:
    """Return the processor and the versions that the numbers depend on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.partition(":")[2].strip() for x in info.read_text().splitlines() if x.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    packages = ("torch", "transformers", "peft", "opacus", "numpy")
    return {"processor": model, "system": platform.platform(), **{p: version(p) for p in packages}}


def write(path: Path | None, content: str) -> None:
    """Write a file where one is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
