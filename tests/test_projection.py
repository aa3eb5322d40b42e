from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from privet.projection import (
    Projection,
    assign_slots,
    default_dimension,
    flatten,
    normalise,
    objective,
    random_projection,
    unflatten,
    unit_profiles,
)


def dense(rule: Projection) -> torch.Tensor:
    """P written out (D x d) from the definition."""
    matrix = torch.zeros(rule.slots.numel(), rule.d, dtype=torch.float64)
    for i, slot in enumerate(rule.slots.tolist()):
        size = int((rule.slots == slot).sum())
        matrix[i, slot] = float(rule.signs[i]) / size**0.5
    return matrix


def signed_rule(D: int = 37, d: int = 9) -> Projection:
    rule = random_projection(D, d, seed=3)
    signs = torch.from_numpy(np.random.default_rng(1).choice([-1.0, 1.0], D)).float()
    return Projection(rule.slots, signs, d)


def test_expand_and_project_are_the_dense_matrix() -> None:
    rule = signed_rule()
    P = dense(rule)
    theta = torch.randn(rule.d, dtype=torch.float64)
    g = torch.randn(rule.slots.numel(), dtype=torch.float64)
    torch.testing.assert_close(rule.expand(theta), P @ theta, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rule.project(g), P.T @ g, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(P.T @ P, torch.eye(rule.d, dtype=torch.float64))
    assert rule.project(g).norm() <= g.norm()


def test_adjoint_and_isometry() -> None:
    rule = signed_rule(1000, 156)
    theta, g = torch.randn(156), torch.randn(1000)
    assert float(rule.expand(theta) @ g) == pytest.approx(float(theta @ rule.project(g)), rel=1e-4)
    assert float(rule.expand(theta).norm()) == pytest.approx(float(theta.norm()), rel=1e-5)


def test_empty_slots_and_wrong_signs_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Projection(torch.tensor([0, 2]), torch.ones(2), 3)
    with pytest.raises(ValueError, match="outside"):
        Projection(torch.tensor([0, 3]), torch.ones(2), 3)
    with pytest.raises(ValueError, match="sign"):
        Projection(torch.tensor([0, 1]), torch.tensor([1.0, 0.5]), 2)


def test_slot_sizes_of_roberta_base() -> None:
    assert default_dimension(294_912) == 46_080
    sizes = torch.bincount(random_projection(294_912, 46_080, 0).counts)
    assert sizes[6] == 27_648
    assert sizes[7] == 18_432
    assert default_dimension(147_456) == 23_040


def test_random_projection_follows_its_seed() -> None:
    same = random_projection(50, 7, 1).slots.equal(random_projection(50, 7, 1).slots)
    other = random_projection(50, 7, 1).slots.equal(random_projection(50, 7, 2).slots)
    assert same
    assert not other


def test_flatten_is_row_by_row_in_order() -> None:
    values = {"b": torch.arange(4).view(2, 2), "a": torch.arange(10, 13).view(1, 3)}
    shapes = {"b": (2, 2), "a": (1, 3)}
    vector = flatten(values, shapes)
    assert vector.tolist() == [0, 1, 2, 3, 10, 11, 12]
    back = unflatten(vector, shapes)
    assert all(back[n].equal(values[n]) for n in values)


def brute_objective(slots, signs, profiles, s, e, h, d, w) -> float:  # type: ignore[no-untyped-def]
    """Eq. 12 term by term, pair by pair."""
    value = 0.0
    for j in range(d):
        members = [i for i in range(len(slots)) if slots[i] == j]
        for i, k in itertools.combinations(members, 2):
            ni, nk = np.linalg.norm(profiles[i]), np.linalg.norm(profiles[k])
            cosine = 0.0
            if ni > 1e-12 and nk > 1e-12:
                cosine = float(profiles[i] @ profiles[k]) / (ni * nk) * signs[i] * signs[k]
            value += w[0] * (1 - cosine)
        for weight, load in ((w[1], s), (w[2], e), (w[3], h)):
            value += weight * (sum(load[i] for i in members) - load.sum() / d) ** 2
        value += w[4] * (len(members) - len(slots) / d) ** 2
    return value


def sample(D: int, K: int, seed: int = 0):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(D, K))
    u[3] = 0.0  # a coordinate that never moved
    return u, rng.gamma(1.0, size=D), rng.gamma(1.0, size=D), rng.gamma(1.0, size=D)


def test_objective_is_the_definition() -> None:
    u, s, e, h = sample(40, 3)
    rng = np.random.default_rng(2)
    slots = rng.integers(0, 6, 40)
    signs = rng.choice([-1.0, 1.0], 40)
    weights = (1.5, 0.3, 0.7, 1.1, 2.0)
    fast = objective(slots, signs, u, s, e, h, 6, weights)
    assert fast == pytest.approx(brute_objective(slots, signs, u, s, e, h, 6, weights), rel=1e-10)


@pytest.mark.parametrize(
    ("D", "d", "K"), [(640, 100, 3), (1280, 200, 6), (100, 100, 2), (50, 1, 2), (97, 13, 5)]
)
def test_assignment_is_balanced_signed_and_better_than_random(D: int, d: int, K: int) -> None:
    u, s, e, h = sample(D, K)
    slots, signs = assign_slots(u, s, e, h, d, balance="hard")
    sizes = np.bincount(slots, minlength=d)
    assert set(sizes) <= {D // d, -(-D // d)}
    assert set(np.unique(signs)) <= {-1, 1}
    loads = [normalise(v) for v in (s, e, h)]
    ours = objective(slots, signs.astype(float), u, *loads, d)
    rule = random_projection(D, d, 0)
    theirs = objective(rule.slots.numpy(), np.ones(D), u, *loads, d)
    assert ours <= theirs * (0.35 if 1 < d < D else 1 + 1e-9)


def test_collinear_profiles_have_no_conflict() -> None:
    direction = np.array([1.0, -2.0, 0.5])
    scale = np.random.default_rng(0).normal(size=60)[:, None]
    u = scale * direction
    ones = np.ones(60)
    slots, signs = assign_slots(u, ones, ones, ones, 10)
    conflict = objective(slots, signs.astype(float), u, ones, ones, ones, 10, (1, 0, 0, 0, 0))
    assert conflict == pytest.approx(0.0, abs=1e-9)


def test_assignment_is_deterministic() -> None:
    first = assign_slots(*sample(200, 4), 30, seed=5)
    second = assign_slots(*sample(200, 4), 30, seed=5)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])


def test_unit_profiles_leave_zero_rows_zero() -> None:
    x = unit_profiles(np.array([[3.0, 4.0], [0.0, 0.0]]))
    assert x.tolist() == [[0.6, 0.8], [0.0, 0.0]]
