"""All methods that share a global model, and the probe, under one protocol: tuned alike, three seeds, private and not.

    python -m benchmarks.comparison [--runs runs/comparison] [--minutes 55] [--table] [key=value ...]

Stage 1: every method trains at the private budget with its learning rate times 1/3, 1 and 3 (the probe's head rate),
scored on rows set apart from the training rows. The best rate is kept; no epsilon covers this choice. Stage 2: three
other seeds with that rate at the private budget, and with the method's own untuned rate without privacy, scored on
the public test rows. Pairs that the papers compare are also compared seed by seed: both have the same rows and start.
``key=value`` changes the setting of all runs.

Every run is the real server and the real clients in a folder of its own, in this process and without Ray, whose start
would take half of the time. The same command again goes on where the last one stopped, and may run beside it, once for
each core. ``--minutes`` starts no run after that time; ``--table`` starts none at all. Prints the tables of
docs/results.md from the runs that are there, and leaves a cell open whose runs are not.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, RecordDict

from client_app.app import app as client_app
from privet import runner
from privet.config import compose
from privet.environment import quiet_libraries
from privet.sweep import main_metric
from server_app.app import app as server_app
from tests.grid import InProcessGrid

METHODS = (
    "fedavg",
    "fedprox",
    "scaffold",
    "fedex",
    "flora",
    "ffa_lora",
    "fedsvd",
    "fedask",
    "fedhsip",
    "unilora",
    "fedrand",
    "probe",
)
FACTORS = (1 / 3, 1.0, 3.0)
SEEDS = (1, 2, 3)
BUDGETS = ("dp", "none")
PAIRS = (("fedhsip", "unilora"), ("fedask", "fedavg"))
PROTOCOL = ["train.local_steps=2", "train.batch_size=64", "evaluate_every=6"]
VALIDATION = ["task.validation_rows=1300", "privacy=dp", "seed=0"]


@dataclass(frozen=True)
class Trial:
    """One run: where it is kept, and its settings."""

    path: Path
    overrides: list[str]

    def accuracy(self) -> float | None:
        """Its last score; None: it is not finished."""
        found = main_metric(runner.read_summary(self.path)) if runner.is_completed(self.path) else None
        return None if found is None else found[1]

    @property
    def is_open(self) -> bool:
        """Whether it is neither finished nor under way in another process."""
        return runner.state_of(self.path) in ("missing", "broken")

    def launch(self) -> None:
        """Run it, or go on with it, to its end."""
        begun = runner.state_of(self.path) == "broken"
        how = {"resume": True} if begun else {"overrides": shlex.join(self.overrides)}
        print(f"{time.strftime('%H:%M')} {self.path.name}", file=sys.stderr, flush=True)
        grid = InProcessGrid(client_app, compose(self.overrides).federation.clients)
        settings = {"run-dir": str(self.path), **how}
        server_app(
            grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
        )


class Comparison:
    """The plan of all runs; each knows whether it is done."""

    def __init__(self, folder: Path, methods: Sequence[str], common: Sequence[str]) -> None:
        self.folder, self.methods, self.common = folder, methods, [*PROTOCOL, *common]

    def tuning(self, method: str) -> dict[float, Trial]:
        """The trials of stage 1, by learning rate."""
        name = "head_lr" if method == "probe" else "lr"
        rate = getattr(compose([f"method={method}", *self.common, "privacy=dp"]).train, name)
        trials = {}
        for value in (float(f"{rate * factor:.2g}") for factor in FACTORS):
            settings = [f"method={method}", f"train.{name}={value}", *VALIDATION, *self.common]
            trials[value] = Trial(self.folder / f"tune-{method}-{value:g}", settings)
        return trials

    def rate(self, method: str) -> float | None:
        """The rate that stage 1 found; None: it is not finished. Of equal scores the smallest rate."""
        scores = {rate: trial.accuracy() for rate, trial in self.tuning(method).items()}
        found = {rate: score for rate, score in scores.items() if score is not None}
        return max(found, key=lambda rate: found[rate]) if len(found) == len(scores) else None

    def final(self, method: str, budget: str, seed: int) -> Trial | None:
        """A run of stage 2; None: its rate is not known yet."""
        settings = [f"method={method}", f"privacy={budget}", f"seed={seed}", *self.common]
        if budget == "dp":
            rate = self.rate(method)
            if rate is None:
                return None
            settings.append(f"train.{'head_lr' if method == 'probe' else 'lr'}={rate}")
        return Trial(self.folder / f"{method}-{budget}-{seed}", settings)

    def todo(self) -> Iterator[Trial]:
        """Every run that is open, in an order that leaves whole rows first."""
        for method in self.methods:
            yield from (t for t in self.tuning(method).values() if t.is_open)
        for seed in SEEDS:
            for budget in BUDGETS:
                for method in self.methods:
                    trial = self.final(method, budget, seed)
                    if trial is not None and trial.is_open:
                        yield trial

    def tables(self) -> str:
        """All tables in Markdown, accuracies in per cent, differences in points."""
        lines = ["| method | rates tried, and the accuracy on validation rows | rate |", "|---|---|---|"]
        for method in self.methods:
            tried = [f"{rate:g}: {_cell([t])}" for rate, t in self.tuning(method).items()]
            rate = self.rate(method)
            lines.append(f"| `{method}` | {', '.join(tried)} | {'' if rate is None else f'{rate:g}'} |")
        epsilon = compose([*self.common, "privacy=dp"]).privacy.epsilon
        lines += ["", f"| method | epsilon {epsilon:g} | not private |", "|---|---|---|"]
        for method in self.methods:
            cells = [_cell([self.final(method, b, s) for s in SEEDS]) for b in BUDGETS]
            lines.append(f"| `{method}` | {' | '.join(cells)} |")
        lines += [
            "",
            f"| difference of a seed's two runs | epsilon {epsilon:g} | not private |",
            "|---|---|---|",
        ]
        for one, other in PAIRS:
            cells = [_mean(self.differences(one, other, budget), len(SEEDS)) for budget in BUDGETS]
            lines.append(f"| `{one}` less `{other}` | {' | '.join(cells)} |")
        return "\n".join(lines)

    def differences(self, one: str, other: str, budget: str) -> list[float]:
        """By how much one method's accuracy is above the other's, for every seed that both have finished."""
        scores = [[_accuracy(self.final(method, budget, s)) for s in SEEDS] for method in (one, other)]
        return [a - b for a, b in zip(*scores, strict=True) if a is not None and b is not None]


def _accuracy(trial: Trial | None) -> float | None:
    return None if trial is None else trial.accuracy()


def _cell(trials: Sequence[Trial | None]) -> str:
    """Mean and standard deviation of the finished runs' accuracies."""
    return _mean([s for t in trials if (s := _accuracy(t)) is not None], len(trials))


def _mean(values: Sequence[float], planned: int) -> str:
    """Mean and standard deviation times 100, with the number of values where some are open."""
    if not values:
        return "open"
    scaled = [100 * v for v in values]
    spread = f" ± {statistics.stdev(scaled):.2f}" if len(scaled) > 1 else ""
    part = f" ({len(scaled)} of {planned})" if len(scaled) < planned else ""
    return f"{statistics.mean(scaled):.2f}{spread}{part}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is open, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--table", action="store_true", help="print the tables only")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    comparison = Comparison(arguments.runs.absolute(), arguments.methods, arguments.overrides)
    until = time.monotonic() + 60 * arguments.minutes
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_libraries()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    while not arguments.table and time.monotonic() < until:
        trial = next(comparison.todo(), None)
        if trial is None:
            break
        trial.launch()
    print(comparison.tables())


if __name__ == "__main__":
    main()
