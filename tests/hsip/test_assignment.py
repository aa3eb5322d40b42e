"""The assignment solver against eq. 12 written out pair by pair, and against the best of all assignments."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

from privet.hsip import grouping
from privet.hsip.objective import Coefficients, normalise, unit_profiles
from privet.hsip.slots import Rules, Slots
from privet.projection import assign_slots, objective

Sample = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def sample(D: int, K: int, seed: int = 0) -> Sample:
    """Profiles, one in ten of them zero, and loads."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((D, K)) * np.exp(rng.standard_normal((D, 1)))
    u[::10] = 0.0
    return u, rng.gamma(0.5, size=D), rng.gamma(2.0, size=D), rng.gamma(0.3, size=D)


def terms(slots: np.ndarray, signs: np.ndarray, drawn: Sample, d: int) -> np.ndarray:
    """The five terms of eq. 12, each from its definition: cosines of pairs, then squares of sums."""
    u, *loads = drawn
    norms = np.linalg.norm(u, axis=1)
    found = np.zeros(5)
    for j in range(d):
        members = np.flatnonzero(slots == j)
        for i, k in itertools.combinations(members, 2):
            scale = norms[i] * norms[k]
            found[0] += 1 - (signs[i] * signs[k] * (u[i] @ u[k]) / scale if scale else 0.0)
        for term, load in enumerate(loads, 1):
            found[term] += (load[members].sum() / load.mean() - len(slots) / d) ** 2
        found[4] += (len(members) - len(slots) / d) ** 2
    return found


@cache
def solved(D: int, d: int, K: int, coefficients: Coefficients = (1, 1, 1, 1, 1), **named: Any) -> np.ndarray:
    """The five terms of what the solver finds, after checks that hold for every result."""
    drawn = sample(D, K)
    slots, signs = assign_slots(*drawn, d, coefficients=coefficients, **named)
    assert (slots.dtype, signs.dtype, slots.shape, signs.shape) == (np.int64, np.int8, (D,), (D,))
    assert np.array_equal(np.unique(slots), np.arange(d))  # none is empty
    assert set(signs) <= {-1, 1}
    if named.get("balance") == "hard":
        assert set(np.bincount(slots)) <= {D // d, -(-D // d)}
    return terms(slots, signs, drawn, d)


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficients", [(1, 1, 1, 1, 1), (0.7, 0.2, 1.9, 0.4, 3.0), (0, 1, 0, 2, 0)])
def test_the_objective_is_the_sum_of_its_terms(coefficients: Coefficients) -> None:
    drawn = sample(60, 4)
    rng = np.random.default_rng(1)
    slots, signs = rng.permutation(60) % 9, rng.choice([-1.0, 1.0], 60)
    loads = [normalise(v) for v in drawn[1:]]
    got = objective(slots, signs, drawn[0], *loads, 9, coefficients)
    assert got == pytest.approx(terms(slots, signs, drawn, 9) @ coefficients, rel=1e-12)


def two_slots(coefficients: Coefficients, sizes: tuple[int, int], K: int) -> tuple[Slots, Sample, np.ndarray]:
    """Two slots with places to spare, filled as the solver would, and the signs of the 12 coordinates."""
    drawn = sample(12, K, seed=3)
    signs = np.random.default_rng(4).choice([-1.0, 1.0], 12)
    alpha, *weights, _ = coefficients
    profiles = np.sqrt(alpha) * unit_profiles(drawn[0]) * signs[:, None]
    loads = np.stack([np.sqrt(w) * normalise(v) for w, v in zip(weights, drawn[1:], strict=True)], axis=1)
    rows, ids = np.zeros((2, 12, K + 3), np.float32), np.zeros((2, 12), np.int32)
    for slot, members in enumerate((range(sizes[0]), range(sizes[0], 12))):
        ids[slot, : sizes[slot]] = members
        rows[slot, : sizes[slot]] = np.concatenate([profiles, loads], axis=1)[members]
    return Slots(rows, ids, np.array(sizes), np.zeros((2, K), np.float32)), drawn, signs


@pytest.mark.parametrize("as_lines", [True, False])
@pytest.mark.parametrize("sizes", [(5, 7), (1, 11)])
def test_every_price_is_the_change_of_the_objective(as_lines: bool, sizes: tuple[int, int]) -> None:
    """All swaps and moves between two slots, in both precisions, against eq. 12 before and after."""
    from privet.hsip.kernels.exchanges import _add_up, _best_move, _best_swap, _exact, _leave

    coefficients = (0.7, 0.2, 1.9, 0.4, 3.0)
    slots, drawn, signs = two_slots(coefficients, sizes, 4)
    rules = Rules(1, 12, coefficients[0] + 2 * coefficients[4], as_lines, 1, 1)
    pair, sums, quiet = np.arange(2), np.zeros((2, 7)), np.zeros(5000, np.float32)
    for side in range(2):
        _add_up(slots, side, sums[side])

    def value(at: np.ndarray, with_signs: np.ndarray) -> float:
        return float(terms(at, with_signs, drawn, 2) @ coefficients)

    at = np.repeat([0, 1], sizes)
    before = value(at, signs)
    cost, pull = np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)
    for i, j in itertools.product(range(-1, sizes[0]), range(-1, sizes[1])):
        if i < 0 and j < 0:
            continue
        moved = at.copy()
        if i >= 0:
            moved[i] = 1
        if j >= 0:
            moved[sizes[0] + j] = 0
        went = [c for c in (i, sizes[0] + j if j >= 0 else -1) if c >= 0]
        best = np.inf
        for flips in itertools.product([1.0, -1.0] if as_lines else [1.0], repeat=len(went)):
            tried = signs.copy()
            tried[went] *= flips
            best = min(best, value(moved, tried) - before)
        exact, flip_i, flip_j = _exact(slots, rules, pair, i, j, sums)
        assert exact == pytest.approx(best, abs=1e-4)
        chosen = signs.copy()
        chosen[went] *= [-1.0 if f else 1.0 for c, f in ((i, flip_i), (j, flip_j)) if c >= 0]
        assert value(moved, chosen) - before == pytest.approx(best, abs=1e-9)
        # What is searched through: at heat 0 only a price below zero is told, so lower each by a great deal.
        for side, c in enumerate((i, j)):
            if c >= 0:
                _leave(slots, side, c, 1, sums[side], sums[1 - side], cost[side], pull[side])
        if i >= 0 and j >= 0:
            cost[0] -= 1000
            begin, ones = np.array([i, j]), np.array([1, 1])
            price, *_ = _best_swap(
                slots, pair, begin, ones, cost, pull, as_lines, quiet, np.float32(0), np.uint64(1)
            )
        else:
            side = 0 if i >= 0 else 1
            crowding = rules.crowding * (sizes[1 - side] - sizes[side] + 1)
            price, _ = _best_move(1, cost[side], pull[side], crowding - 1000, as_lines, quiet, np.float32(0))
        assert price + 1000 == pytest.approx(best, abs=2e-3)


# --- what the search finds ------------------------------------------------------------------------


def best_of_all(drawn: Sample, d: int, sizes: set[int], align: bool) -> float:
    """The least value of eq. 12 over all assignments and signs, by dynamic programming over sets."""
    D = len(drawn[0])
    x = unit_profiles(drawn[0])
    loads = np.stack([v / v.mean() for v in drawn[1:]] + [np.ones(D)], axis=1)
    one = np.full(1 << D, np.inf)  # the part of one slot that holds the set
    for held in range(1, 1 << D):
        members = [i for i in range(D) if held >> i & 1]
        if len(members) not in sizes:
            continue
        pairs = len(members) * (len(members) - 1) / 2
        choices = np.array(list(itertools.product([1, -1] if align else [1], repeat=len(members) - 1)))
        signs = np.concatenate([np.ones((len(choices), 1)), choices.reshape(len(choices), -1)], axis=1)
        total = signs @ x[members]
        inner = ((total**2).sum(1).max() - (x[members] ** 2).sum()) / 2
        one[held] = pairs - inner + ((loads[members].sum(0) - D / d) ** 2).sum()
    full = (1 << D) - 1
    least = one.copy()  # of so many slots that hold the set together
    for _ in range(d - 1):
        more = np.full(1 << D, np.inf)
        for held in range(1, 1 << D):
            part = (held - 1) & held
            while part:
                more[held] = min(more[held], one[part] + least[held ^ part])
                part = (part - 1) & held
        least = more
    return float(least[full])


@pytest.mark.parametrize(
    ("balance", "align", "sizes"),
    [("soft", True, set(range(1, 10))), ("soft", False, set(range(1, 10))), ("hard", True, {3})],
)
def test_a_small_instance_is_solved_nearly_to_the_optimum(balance: Any, align: bool, sizes: set[int]) -> None:
    for seed in range(3):
        drawn = sample(9, 2, seed)
        slots, signs = assign_slots(*drawn, 3, balance=balance, align_signs=align)
        assert align or (signs == 1).all()
        assert set(np.bincount(slots, minlength=3)) <= sizes
        best = best_of_all(drawn, 3, sizes, align)
        assert best * (1 - 1e-9) <= terms(slots, signs, drawn, 3).sum() <= 1.05 * best


@pytest.mark.parametrize("term", range(5))
def test_a_coefficient_of_ten_lowers_its_own_term(term: int) -> None:
    heavy = tuple(10.0 if c == term else 1.0 for c in range(5))
    assert solved(200, 31, 3, heavy)[term] < 0.95 * solved(200, 31, 3)[term]  # type: ignore[arg-type]


def test_hard_slots_are_even_and_cost_little() -> None:
    soft, hard = solved(200, 31, 3), solved(200, 31, 3, balance="hard")
    assert soft[4] > hard[4]  # lambda is weighed, not obeyed
    assert hard.sum() < 1.3 * soft.sum()
    rng = np.random.default_rng(0)
    chance = terms(rng.permutation(200) % 31, rng.choice([-1, 1], 200), sample(200, 3), 31)
    assert soft.sum() < 0.2 * chance.sum()
    assert solved(200, 31, 3, align_signs=False)[0] > soft[0]


@pytest.mark.parametrize("balance", ["soft", "hard"])
@pytest.mark.parametrize(("D", "d", "K"), [(7, 1, 3), (7, 7, 3), (50, 49, 2), (31, 4, 1), (400, 3, 2)])
def test_odd_shapes(D: int, d: int, K: int, balance: str) -> None:
    solved(D, d, K, balance=balance)


def test_without_movement_or_loads_only_the_counts_are_left() -> None:
    nothing = np.zeros(20)
    for soft in (True, False):
        slots, signs = assign_slots(np.zeros((20, 3)), *[nothing] * 3, 6, balance="soft" if soft else "hard")
        assert sorted(np.bincount(slots)) == [3, 3, 3, 3, 4, 4]
        assert (signs == 1).all()


def test_one_giant_load_shares_its_slot_with_light_ones() -> None:
    u, *loads = sample(200, 3)
    loads[1][17] = 100
    slots, _ = assign_slots(u, *loads, 30)
    energy = np.bincount(slots, weights=loads[1])
    assert energy[slots[17]] - 100 < 0.2 * np.median(energy)
    loads[1][17] = 1e12  # so large that nothing else in the load counts
    assert np.bincount(assign_slots(u, *loads, 30)[0], minlength=30).min() >= 1


def test_opposite_profiles_share_a_slot_only_where_signs_may_be_chosen() -> None:
    u = np.random.default_rng(0).choice([-1.0, 1.0], 60)[:, None] * np.array([[1.0, -2.0, 0.5]])
    ones = np.ones(60)
    slots, signs = assign_slots(u, ones, ones, ones, 10)
    assert all(len(np.unique((signs * u[:, 0])[slots == j])) == 1 for j in range(10))
    slots, signs = assign_slots(u, ones, ones, ones, 10, align_signs=False, coefficients=(100, 1, 1, 1, 1))
    assert (signs == 1).all()
    assert sum(len(np.unique(u[slots == j, 0])) == 1 for j in range(10)) >= 9


def test_the_result_depends_on_the_seed_and_not_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = sample(200, 3)

    def found(seed: int, threads: int) -> bytes:
        monkeypatch.setattr(grouping, "available_cpus", lambda: threads)
        return b"".join(a.tobytes() for a in assign_slots(*drawn, 31, seed=seed))

    first = found(5, 1)
    assert found(5, 1) == found(5, 2) == first
    assert found(6, 2) != first


def test_many_slots_are_gathered_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "BLOCK", 16)
    with grouping.Workers() as workers:
        lines = np.random.default_rng(0).standard_normal((100, 2)).astype(np.float32)
        order, starts, stops = grouping.bundle(lines, 4, True, np.random.default_rng(1), workers)
    assert sorted(order) == list(range(100))
    assert list(starts) == [0, *stops[:-1]]
    assert (stops[-1], (stops - starts).max() <= 8, (stops - starts).min() > 0) == (100, True, True)


# --- arguments and loading ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d": 0}, "d = 0 is not allowed"),
        ({"d": 21}, "between 1 and D = 20"),
        ({"profiles": np.zeros(20)}, "profiles of shape"),
        ({"profiles": np.zeros((20, 0))}, "profiles of shape"),
        ({"profiles": np.full((20, 2), np.nan)}, "profiles hold a value that is not finite"),
        ({"energy": np.ones(19)}, "energy of shape"),
        ({"sensitivity": -np.ones(20)}, "sensitivity holds a value that is negative"),
        ({"heterogeneity": np.full(20, np.inf)}, "heterogeneity holds"),
        ({"coefficients": (1, 1, 1, 1)}, "five numbers"),
        ({"coefficients": (1, 1, -1, 1, 1)}, "five numbers"),
        ({"balance": "even"}, "balance = 'even' is not allowed"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(change: dict[str, Any], words: str) -> None:
    names = ("profiles", "sensitivity", "energy", "heterogeneity")
    arguments = {**dict(zip(names, sample(20, 2), strict=True)), "d": 3}
    with pytest.raises(ValueError, match=words):
        assign_slots(**{**arguments, **change})


def test_numba_is_loaded_only_where_slots_are_assigned() -> None:
    code = "import sys, privet.hsip.solver; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
