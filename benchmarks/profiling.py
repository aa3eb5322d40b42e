"""Where a private step spends what it costs more: a profile of it less one of the non-private step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def difference(step: Callable[[], None], base: Callable[[], None], *, steps: int = 3, lines: int = 12) -> str:
    """Return a table of the operators whose own CPU time differs most, in milliseconds a step."""
    own, plain = _self_times(step, steps), _self_times(base, steps)
    total = sum(plain.values())
    gaps = {name: own[name] - plain[name] for name in own.keys() | plain.keys()}
    shown = sorted(gaps, key=lambda name: -abs(gaps[name]))[:lines]
    out = [f"{'operator':44s} {'step':>9s} {'plain':>9s} {'more':>9s} {'of plain':>9s}"]
    for name in ["all", *shown]:
        a, b = (sum(own.values()), total) if name == "all" else (own[name], plain[name])
        out.append(f"{name[:44]:44s} {a:9.2f} {b:9.2f} {a - b:+9.2f} {(a - b) / total:+9.2%}")
    return "\n".join(out)


def _self_times(step: Callable[[], None], steps: int) -> Counter[str]:
    """Milliseconds a step that each operator takes by itself."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
    averages = recorded.key_averages()
    return Counter({event.key: event.self_cpu_time_total / 1e3 / steps for event in averages})
