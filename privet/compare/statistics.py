"""The numbers of a comparison: means and deviations over runs, standard errors, and how a metric is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SHARES = ("accuracy", "f1", "precision", "recall")
_LOWER_IS_BETTER = ("loss", "perplexity", "error")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divisor n - 1) of n values; no deviation for one value."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of some values, None for no values."""
        if not values:
            return None
        n = len(values)
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, None, 1)
        return cls(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)), n)


@dataclass(frozen=True)
class Metric:
    """A score by its name, for example ``accuracy`` or ``personal accuracy``."""

    name: str

    @property
    def counts(self) -> bool:
        """Whether it is a score at all: rows, nodes and spreads over clients stand beside scores and are none."""
        last = self.name.rpartition(" ")[2]
        return last not in ("examples", "nodes") and not last.endswith("_std")

    @property
    def share(self) -> bool:
        """Whether it is a share of test rows, written in per cent."""
        return self.name.rpartition(" ")[2] in _SHARES

    @property
    def lower_is_better(self) -> bool:
        """Whether the smaller score is the better one."""
        return any(word in self.name for word in _LOWER_IS_BETTER)

    @property
    def title(self) -> str:
        """Name with its unit, for a column or an axis."""
        return f"{self.name} %" if self.share else self.name

    @property
    def unit(self) -> str:
        """What follows a value in a sentence."""
        return " %" if self.share else ""

    def scaled(self, value: float) -> float:
        """Return a value in the unit it is written in."""
        return 100 * value if self.share else value

    def text(self, value: float) -> str:
        """Write a value, without its unit."""
        return f"{100 * value:.2f}" if self.share else f"{value:.4g}"

    def spread_text(self, spread: Spread) -> str:
        """Write a mean and, where there are several runs, its deviation."""
        if spread.deviation is None:
            return self.text(spread.mean)
        return f"{self.text(spread.mean)} ± {self.text(spread.deviation)}"


def standard_error(metric: Metric, spread: Spread, test_rows: int | None) -> float | None:
    """Return the standard error of a mean score, None where nothing is known about it.

    Two parts add up: the test rows are a sample (binomial, for shares; the same rows for every seed, so more seeds
    do not shrink it), and so are the runs (s^2 / k).

    Parameters
    ----------
    spread : Spread
        Of k runs.
    test_rows : int or None
        Number of rows that were scored.
    """
    parts = []
    if metric.share and test_rows and 0 <= spread.mean <= 1:
        parts.append(spread.mean * (1 - spread.mean) / test_rows)
    if spread.deviation is not None:
        parts.append(spread.deviation**2 / spread.count)
    return math.sqrt(math.fsum(parts)) if parts else None
