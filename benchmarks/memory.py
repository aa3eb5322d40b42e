"""Peak memory of a variant: the resident high-water mark of a process of its own.

Every variant gets a fresh process, forked from one that has imported everything and built nothing. It takes a tiny
step, so that code which is loaded at its first use is there, builds the model, resets the high-water mark, builds the
step (so that whatever an engine keeps counts) and takes some steps. All processes have glibc hand every block of
128 KiB or more back as soon as it is freed: otherwise its threshold grows with use, and the mark shows the heap's holes
rather than what a step needs.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.models import Case, Workload, make_workload
from benchmarks.steps import Mechanism
from benchmarks.variants import BY_KEY, Key

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class Peak:
    """Bytes in use.

    Attributes
    ----------
    total : int
        The most that was ever in use, the loaded model included.
    loaded : int
        What was in use before the step was built.
    """

    total: int
    loaded: int

    @property
    def above(self) -> int:
        """The most that was in use above the loaded model."""
        return self.total - self.loaded


def process_peaks(
    case: Case, layers: int | None, keys: Sequence[Key], *, steps: int = 2, parallel: int = 2
) -> dict[Key, Peak]:
    """Measure variants of a case, each in a process of its own, `parallel` at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.variants"])
    with (
        _environment(_ALLOCATOR),  # read when the fork server starts, with the first process
        ProcessPoolExecutor(parallel, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        waiting = {key: pool.submit(_peak, case, layers, key, steps) for key in keys}
        return {key: future.result() for key, future in waiting.items()}


def _peak(case: Case, layers: int | None, key: Key, steps: int) -> Peak:
    torch.set_num_threads(1)
    take_steps(make_workload(replace(case, rows=2, tokens=8), 1), key, 1)
    work = make_workload(case, layers)
    gc.collect()
    with suppress(
        OSError, AttributeError
    ):  # another C library: then `loaded` holds some of what building freed
        ctypes.CDLL(None).malloc_trim(0)
    loaded = _reset_peak()
    take_steps(work, key, steps)
    return Peak(_high_water(), loaded)


def take_steps(work: Workload, key: Key, steps: int) -> None:
    """Build a step and take it so many times."""
    step = BY_KEY[key].build(work, Mechanism())
    for _ in range(steps):
        step()


def _reset_peak() -> int:
    """Forget the high-water mark where the system lets us, and return what is resident now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") or _high_water()


def _high_water() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int | None:
    """Read a size from the kernel's account of this process; None where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
