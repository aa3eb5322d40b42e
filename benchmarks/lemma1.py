"""FedASK's Lemma 1: how much noise reaches B A when both factors are noised, and when B alone is.

    python -m benchmarks.lemma1 [--width 768] [--rank 8] [--draws 50] [--json FILE]

With noise of deviation s on every number of B (m x r) and A (r x n), the expected squared norm of the change of B A is
s^2 (m |A|^2 + n |B|^2) + m n r s^4; with A fixed it is s^2 m |A|^2. The signal, |B A|^2, is that of factors as a round
leaves them, |A| = |B|. Prints what was drawn beside the formula, and the ratio of signal to noise, for several s.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

DEVIATIONS = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Noise:
    """Squared norms of the change of B A: drawn, expected, and without the noise in A."""

    deviation: float
    both: float
    both_expected: float
    one: float
    one_expected: float
    snr_both: float
    snr_one: float


def expected(b: Tensor, a: Tensor, s: float) -> tuple[float, float]:
    """Return the expected squared norms with both factors noised, and with B alone."""
    (m, r), n = b.shape, a.shape[1]
    energy_a, energy_b = float(a.square().sum()), float(b.square().sum())
    return s**2 * (m * energy_a + n * energy_b) + m * n * r * s**4, s**2 * m * energy_a


def draw(b: Tensor, a: Tensor, s: float, draws: int, generator: torch.Generator) -> tuple[float, float]:
    """Return the mean squared norms over so many draws."""
    both = one = 0.0
    for _ in range(draws):
        noise_b = torch.randn(b.shape, generator=generator, dtype=b.dtype) * s
        noise_a = torch.randn(a.shape, generator=generator, dtype=a.dtype) * s
        both += float(((b + noise_b) @ (a + noise_a) - b @ a).square().sum())
        one += float((noise_b @ a).square().sum())
    return both / draws, one / draws


def measure(width: int, rank: int, draws: int) -> list[Noise]:
    """Measure square matrices of that width, at a signal of |B A| = 1."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(width, rank, generator=generator, dtype=torch.float64)
    a = torch.randn(rank, width, generator=generator, dtype=torch.float64)
    scale = (b @ a).norm().sqrt()
    b, a = b / scale, a / scale
    found = []
    for s in DEVIATIONS:
        (both, one), (both_expected, one_expected) = draw(b, a, s, draws, generator), expected(b, a, s)
        found.append(Noise(s, both, both_expected, one, one_expected, 1 / both, 1 / one))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    found = measure(arguments.width, arguments.rank, arguments.draws)
    print("| s | both, drawn | both, formula | B alone, drawn | formula | SNR, both | SNR, B alone |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for noise in found:
        print("| " + " | ".join(f"{value:.4g}" for value in asdict(noise).values()) + " |")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(noise) for noise in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
