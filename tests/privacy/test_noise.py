"""Noise has the stated covariance in every way to clip; two nodes' noise and draws have nothing in common.

All bounds are p-values of the exact law under correct code, with Bonferroni's correction: each test raises a false
alarm less than once in a million runs, though its noise is the real one and different every time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

import client_app.trainer
from privet.privacy.engine import GradientEngine
from privet.privacy.low_rank import WeightProduct
from privet.privacy.parts import THETA, ProjectedParameters
from privet.privacy.rng import FastRandomness, SecureRandomness
from privet.wire import unpack_reply
from tests.conftest import Outcome

ALARM = 1e-8  # of one of the handful of statistics of a test
SIGMA, CLIP, BATCH, SCALING, DRAWS = 1.7, 0.6, 5, 2.5, 1500
STD = SIGMA * CLIP / BATCH


def assert_standard_normal(z: NDArray[np.float64]) -> None:
    """Rows are draws and columns coordinates: variances one, no two coordinates and no two draws related."""
    draws, size = z.shape
    total = stats.chi2(z.size).cdf((z**2).sum())
    assert ALARM < total < 1 - ALARM, "the scale of the whole"
    each = stats.chi2(draws).cdf((z**2).sum(0))
    assert ALARM / size < each.min(), "the scale of one coordinate"
    assert each.max() < 1 - ALARM / size, "the scale of one coordinate"
    pairs = size * (size - 1) // 2
    largest = np.abs(np.corrcoef(z.T)[np.triu_indices(size, 1)]).max()
    assert p_of_correlation(largest, draws) > ALARM / pairs, "two coordinates are related"
    after = abs(np.corrcoef(z[:-1].ravel(), z[1:].ravel())[0, 1])
    assert p_of_correlation(after, z[1:].size) > ALARM, "two steps are related"
    assert abs(z.mean()) * np.sqrt(z.size) < stats.norm.isf(ALARM), "the mean"


def p_of_correlation(r: float, n: int) -> float:
    """Chance of a correlation as large between n independent pairs of normals."""
    return float(2 * stats.t(n - 2).sf(abs(r) * np.sqrt((n - 2) / (1 - r**2))))


class Layers(nn.Module):
    """Two LoRA pairs and a head; noise needs no forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a1, self.b1 = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.a2, self.b2 = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(3, 2)
        self.to(dtype)


def identity(model: Layers) -> tuple[dict[str, Any], Callable[[str], Tensor | None]]:
    return {}, lambda name: None


def b_only(model: Layers) -> tuple[dict[str, Any], Callable[[str], Tensor | None]]:
    model.a1.requires_grad_(False)
    model.a2.requires_grad_(False)
    return {}, lambda name: None


def theta(model: Layers) -> tuple[dict[str, Any], Callable[[str], Tensor | None]]:
    order = tuple(n for n, _ in model.named_parameters() if not n.startswith("head"))
    size = sum(model.get_parameter(n).numel() for n in order)
    return {
        "projection": ProjectedParameters(torch.arange(size) % 7, torch.ones(size), 7, order)
    }, lambda n: None


def whole_weight(model: Layers) -> tuple[dict[str, Any], Callable[[str], Tensor | None]]:
    """Rows of B have covariance s^2 A A^T; one pair by its weight, the other by its B."""
    b_only(model)
    a = model.a1.weight.detach().double()
    return (
        {"products": [WeightProduct("a1.weight", "b1.weight", SCALING)]},
        lambda name: SCALING**2 * a @ a.t() if name == "b1.weight" else None,
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "source"),
    [
        (identity, torch.float32, SecureRandomness),
        (b_only, torch.float32, SecureRandomness),
        (theta, torch.float32, SecureRandomness),
        (whole_weight, torch.float32, SecureRandomness),
        (whole_weight, torch.bfloat16, SecureRandomness),
        (identity, torch.float32, FastRandomness),
    ],
)
def test_noise_has_the_stated_covariance(kind: Any, dtype: torch.dtype, source: Any) -> None:
    """N(0, (sigma C / b)^2 S) with S the identity but where W is clipped, jointly over everything that is released."""
    model = Layers(dtype)
    geometry, shape_of = kind(model)
    engine, randomness = GradientEngine(model, clip=CLIP, **geometry), source()
    with engine.attached():
        draws = [engine.private_sum(randomness, SIGMA, BATCH) for _ in range(DRAWS)]
    names = list(draws[0])
    expected = {n for n, p in model.named_parameters() if p.requires_grad}
    if kind is theta:
        expected = {THETA, "head.weight", "head.bias"}
    assert set(names) == expected
    columns = []
    for name in names:
        released = torch.stack([d[name] for d in draws]).double()
        covariance = shape_of(name)
        if covariance is not None:
            released = torch.linalg.solve_triangular(
                torch.linalg.cholesky(covariance), released.mT, upper=False
            ).mT
        columns.append(released.flatten(1) / STD)
    assert_standard_normal(torch.cat(columns, 1).numpy())


def test_the_bounds_see_what_they_are_for() -> None:
    z = np.random.default_rng(0).standard_normal((DRAWS, 30))
    assert_standard_normal(z)
    for spoiled, match in (
        (z * 1.04, "whole"),
        (np.where(np.arange(30) == 3, z * 1.3, z), "one coordinate"),
        (np.where(np.arange(30) == 3, 0.9 * z + 0.436 * z[:, :1], z), "two coordinates"),
        (np.where(np.arange(DRAWS)[:, None] % 2 == 1, np.roll(z, 1, 0), z), "two steps"),
        (z + 0.04, "mean"),
    ):
        with pytest.raises(AssertionError, match=match):
            assert_standard_normal(spoiled)


# --- two nodes, two runs ----------------------------------------------------------------------------

Run = Callable[..., Outcome]


@pytest.fixture
def inclusions(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.float64]]:
    """For every step of every node, in order: which of its rows were drawn."""
    plain, seen = client_app.trainer.poisson_draw, []

    def spy(n: int, q: float, randomness: Any) -> Any:
        rows = plain(n, q, randomness)
        seen.append(np.bincount(rows, minlength=n).astype(float))
        return rows

    monkeypatch.setattr(client_app.trainer, "poisson_draw", spy)
    return seen


def one_round(run: Run, inclusions: list[Any], where: Path, *settings: str) -> tuple[list[Any], list[Any]]:
    """Every node's update, which is all but noise at this epsilon, and its draws.

    Global generators are seeded before, and a run has the same name as every other, hence the same id.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    inclusions.clear()
    updates: list[NDArray[np.float64]] = []

    def look(message: Message, reply: Message) -> Message:
        if "reply" in reply.content:
            arrays = unpack_reply(reply.content).payload.adapter
            updates.append(torch.cat([v.double().flatten() for v in arrays.values()]).numpy())
        return reply

    outcome = run(
        "method=ffa_lora", "federation.rounds=1", "train.local_steps=24", "privacy.epsilon=0.05", *settings,
        tamper=look, path=where / "the-run",
    )  # fmt: skip
    assert outcome.error is None
    assert len(updates) == 3
    return updates, [d - d.mean() for d in np.array(inclusions).reshape(3, -1)]


def related(vectors: list[NDArray[np.float64]]) -> list[bool]:
    pairs = list(combinations(vectors, 2))
    return [
        p_of_correlation(float(np.corrcoef(a, b)[0, 1]) * (1 - 1e-12), len(a)) < ALARM / len(pairs)
        for a, b in pairs
    ]


def test_nodes_and_runs_of_one_seed_have_nothing_in_common(
    run: Run, inclusions: list[Any], tmp_path: Path
) -> None:
    """Rule 6: neither the noise nor the draws of two nodes are related, nor those of two runs with equal seeds."""
    found = [one_round(run, inclusions, tmp_path / where) for where in ("first", "second")]
    updates, draws = ([*first, *second] for first, second in zip(*found, strict=True))
    assert not any(related(updates))
    assert not any(related(draws))


def test_the_same_comparison_sees_noise_and_draws_that_follow_from_the_seed(
    run: Run, inclusions: list[Any], tmp_path: Path
) -> None:
    """Seeded runs, not private and marked so: node by node the same, and yet no two nodes alike."""
    seeded = "privacy.randomness=seeded"
    found = [one_round(run, inclusions, tmp_path / where, seeded) for where in ("first", "second")]
    for before, after in zip(*found, strict=True):
        assert all(related([a, b])[0] for a, b in zip(before, after, strict=True))
        assert not any(related(before))
