"""The algebra of sketches and splits, against dense products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from privet.lowrank import (
    basis,
    checksum,
    factorise,
    narrow_basis,
    omega,
    project,
    sketch,
    split,
    split_product,
    tail,
    vanished,
)

M, N, R = 30, 24, 4


def factors(count: int, *, common_a: bool, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(R, N, generator=generator, dtype=torch.float64)
    return [
        (
            torch.randn(M, R, generator=generator, dtype=torch.float64),
            a if common_a else torch.randn(R, N, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def two_phases(
    clients: list[tuple[Tensor, Tensor]],
    size: int,
    rank: int,
    *,
    stale: list[tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both phases with equal weights; Q from `stale` where given."""
    test = omega(7, 1, "module", N, size)
    first = stale or clients
    q = basis(sum(sketch(b, a, test) for b, a in first) / len(first))
    z = sum(project(b, a, q) for b, a in clients) / len(clients)
    return split(q, z, rank)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_narrow_basis_has_the_rank_of_what_was_sketched(rank: int) -> None:
    """Also with the rounding of messages: float32 sketches of a product over many magnitudes."""
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.linalg.qr(torch.randn(n, rank, generator=generator).double()).Q for n in (M, N))
    values = torch.logspace(0, -4, rank, dtype=torch.float64)
    dense = 1e-3 * (left * values) @ right.T
    sketched = (dense @ omega(7, 1, "module", N, 12)).float()
    q = narrow_basis(sketched)
    assert q.shape == (M, rank)
    assert relative(q @ (q.T @ dense), dense) < 1e-5
    torch.testing.assert_close(q.T @ q, torch.eye(rank, dtype=torch.float64))
    assert narrow_basis(torch.zeros(M, 5)).shape == (M, 1)


def mean_product(clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum(b @ a for b, a in clients) / len(clients)


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("oversampling", [0, 2, 4])
def test_a_common_a_is_aggregated_exactly_at_any_oversampling(oversampling: int) -> None:
    clients = factors(5, common_a=True)
    b, a, values = two_phases(clients, R + oversampling, R)
    assert relative(b @ a, mean_product(clients)) < 1e-12
    assert float(values[R:].sum() if oversampling else 0) < 1e-12


def test_different_a_is_exact_where_the_sketch_covers_the_rank() -> None:
    clients = factors(3, common_a=False)
    b, a, _ = two_phases(clients, 3 * R, 3 * R)
    assert relative(b @ a, mean_product(clients)) < 1e-12
    b, a, _ = two_phases(clients, 3 * R - 1, 3 * R - 1)
    assert relative(b @ a, mean_product(clients)) > 1e-3  # one column short


def test_truncation_loses_exactly_the_eckart_young_tail() -> None:
    clients = factors(5, common_a=False)
    b, a, values = two_phases(clients, 5 * R, R)
    dense = torch.linalg.svdvals(mean_product(clients))
    lost = float((b @ a - mean_product(clients)).norm())
    assert lost == pytest.approx(float(dense[R:].square().sum().sqrt()), rel=1e-10)
    assert tail({"m": values}, R) == pytest.approx(lost / float(mean_product(clients).norm()), rel=1e-10)


def test_a_stale_basis_is_wrong_and_a_new_one_repairs_it() -> None:
    """A client is lost between the phases: even with a common A, Q spans what it no longer should."""
    everyone = factors(3, common_a=True)
    survivors = everyone[:2]
    b, a, _ = two_phases(survivors, R + 2, R, stale=everyone)
    assert relative(b @ a, mean_product(survivors)) > 0.1
    b, a, _ = two_phases(survivors, R + 2, R)
    assert relative(b @ a, mean_product(survivors)) < 1e-12


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_split_of_a_product_keeps_it_and_places_the_singular_values(share: float) -> None:
    ((b, a),) = factors(1, common_a=True)
    new_b, new_a, values = split_product(b, a, share)
    assert relative(new_b @ new_a, b @ a) < 1e-12
    dense = torch.linalg.svdvals(b @ a)[:R]
    torch.testing.assert_close(values, dense, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(new_b.T @ new_b, torch.diag(dense ** (2 * share)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(new_a @ new_a.T, torch.diag(dense ** (2 - 2 * share)), rtol=1e-9, atol=1e-9)


def test_the_private_protocol_is_the_svd_of_the_mean_b_times_a() -> None:
    """Private FedASK equals FedSVD's refactorisation up to how the singular values are split."""
    clients = factors(5, common_a=True)
    b, a, _ = two_phases(clients, R + 4, R)
    mean_b = sum(x for x, _ in clients) / len(clients)
    direct_b, direct_a, values = split_product(mean_b, clients[0][1], 1.0)
    assert relative(b @ a, direct_b @ direct_a) < 1e-12
    # The same directions: A's rows have the square roots, FedSVD's have norm 1.
    cosine = ((a / a.norm(dim=1, keepdim=True)) * direct_a).sum(1).abs()
    torch.testing.assert_close(cosine, torch.ones(R, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(a.norm(dim=1) ** 2, values[:R], rtol=1e-9, atol=1e-9)


def test_a_rank_deficient_sketch_does_no_harm() -> None:
    (b, a), *_ = factors(1, common_a=True)
    b[:, 1:] = 0  # rank one
    new_b, new_a, values = two_phases([(b, a)], R + 4, R)
    assert relative(new_b @ new_a, b @ a) < 1e-12
    assert float(values[1]) < 1e-12 * float(values[0])


def test_a_zero_product_is_noticed_whatever_its_factors() -> None:
    (_, a), *_ = factors(1, common_a=True)
    zero = torch.zeros(M, R, dtype=torch.float64)
    _, _, values = two_phases([(zero, a)], R + 4, R)
    assert vanished(values, float(a.norm()))
    _, _, values = two_phases([(zero + 1e-9, a)], R + 4, R)
    assert not vanished(values, float(a.norm()))
    b, right, _ = split_product(zero, a, 1.0)  # FedSVD's split survives it
    assert float(b.norm()) == 0
    torch.testing.assert_close(right @ right.T, torch.eye(R, dtype=torch.float64))


def test_only_sums_of_replies_are_needed() -> None:
    """Both phases are linear, so pre-scaled replies under secure summation give the same."""
    clients = factors(3, common_a=False)
    weights = [0.2, 0.5, 0.3]
    test = omega(7, 1, "module", N, 3 * R)
    q = basis(sum(w * sketch(b, a, test) for w, (b, a) in zip(weights, clients, strict=True)))
    z = sum(w * project(b, a, q) for w, (b, a) in zip(weights, clients, strict=True))
    b, a, _ = split(q, z, 3 * R)
    dense = sum(w * (b @ a) for w, (b, a) in zip(weights, clients, strict=True))
    assert relative(b @ a, dense) < 1e-12


def test_omega_follows_from_seed_round_and_module_alone() -> None:
    first = omega(1, 2, "layer.0.query", 64, 12)
    assert first.shape == (64, 12)
    assert first.dtype == torch.float64
    assert torch.equal(first, omega(1, 2, "layer.0.query", 64, 12))
    for other in ((2, 2, "layer.0.query"), (1, 3, "layer.0.query"), (1, 2, "layer.0.value")):
        assert not torch.equal(first, omega(*other, 64, 12))
    many = omega(1, 1, "m", 20_000, 5)
    assert abs(float(many.mean())) < 0.02
    assert float(many.var()) == pytest.approx(1, abs=0.03)


def test_omega_does_not_change_between_versions() -> None:
    """Nodes of another release must draw the same; a change needs a new version number."""
    expected = [
        [-1.539898587042, 0.05360783694, 1.09760911495],
        [0.699901277036, -0.575265331913, -1.503506551584],
    ]
    np.testing.assert_allclose(omega(0, 1, "m", 2, 3).numpy(), expected, rtol=0, atol=1e-11)


def test_the_checksum_is_over_every_modules_first_row() -> None:
    tests = [omega(0, 1, name, 8, 3) for name in "ab"]
    first = checksum(tests)
    assert first.shape == (2,)
    assert torch.equal(first, checksum([t.clone() for t in tests]))
    for index in (0, 1):
        changed = [t.clone() for t in tests]
        changed[index][0, 2] += 1e-12
        assert not torch.equal(first, checksum(changed))


@pytest.mark.parametrize("rank", [0, 2, N])
def test_a_matrix_falls_into_factors_of_its_rank(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(M, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, N, generator=generator, dtype=torch.float64)
    matrix = left @ right
    b, a = factorise(matrix.float())
    assert b.shape[1] == a.shape[0] == max(1, min(rank, M, N))
    assert float((b @ a - matrix).norm()) <= 1e-6 * float(matrix.norm())
