"""Entropies, separations and the bound on epsilon against independent calculations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, mannwhitneyu
from sklearn.metrics import roc_auc_score, roc_curve

from privet.audit.lower_bound import guess, lower_bound, p_value
from privet.audit.membership import auroc, roc, separation, tpr_at
from privet.audit.renyi import max_renyi, renyi_entropies

# --- entropies -----------------------------------------------------------------------------------


def test_a_uniform_distribution_has_log_v_and_a_certain_one_zero() -> None:
    alphas = (0.5, 1.0, 2.0, math.inf, 7.0)
    uniform = renyi_entropies(torch.zeros(3, 17), alphas)
    torch.testing.assert_close(uniform, torch.full((5, 3), math.log(17), dtype=torch.float64))
    certain = renyi_entropies(torch.tensor([[0.0, -1e4, -1e4]]), alphas)
    assert certain.shape == (5, 1)
    assert float(certain.abs().max()) == 0.0


def test_entropies_are_those_of_the_definition_and_fall_with_alpha() -> None:
    logits = torch.randn(50, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    p = logits.softmax(-1)
    alphas = (0.25, 0.5, 1.0, 2.0, 5.0, math.inf)
    found = renyi_entropies(logits, alphas)
    for row, alpha in zip(found, alphas, strict=True):
        if alpha == 1:
            expected = -(p * p.log()).sum(-1)
        elif alpha == math.inf:
            expected = -p.max(-1).values.log()
        else:
            expected = (p**alpha).sum(-1).log() / (1 - alpha)
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)
    assert bool((found[:-1] >= found[1:]).all())


def test_alpha_one_is_the_limit_and_nothing_overflows() -> None:
    logits = torch.tensor([[1.0, 2.0, -300.0, 4.0], [900.0, 899.0, 0.0, -900.0]])
    below, at, above = renyi_entropies(logits, (1 - 1e-7, 1.0, 1 + 1e-7))
    torch.testing.assert_close(below, at, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(above, at, rtol=1e-6, atol=1e-6)
    assert bool(renyi_entropies(logits).isfinite().all())
    with pytest.raises(ValueError, match="above 0"):
        renyi_entropies(logits, (0.0,))


def test_the_share_that_counts() -> None:
    values = torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0])
    assert max_renyi(values, 0) == 5.0
    assert max_renyi(values, 100) == 3.0
    assert max_renyi(values, 39) == 5.0  # floor(1.95) = 1
    assert max_renyi(values, 40) == 4.5
    assert max_renyi(values[:1], 10) == 1.0
    with pytest.raises(ValueError, match="per cent"):
        max_renyi(values, 101)


# --- separation ----------------------------------------------------------------------------------


def scores(ties: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    members, others = rng.normal(-0.4, 1, 130), rng.normal(0, 1, 370)
    return (members.round(1), others.round(1)) if ties else (members, others)


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_and_rates_are_the_librarys(ties: bool) -> None:
    members, others = scores(ties)
    labels = np.r_[np.ones(len(members)), np.zeros(len(others))]
    values = -np.r_[members, others]
    assert auroc(members, others) == pytest.approx(roc_auc_score(labels, values), abs=1e-12)
    u = mannwhitneyu(-members, -others).statistic
    assert auroc(members, others) == pytest.approx(u / len(members) / len(others), abs=1e-12)
    false, true, _ = roc_curve(labels, values, drop_intermediate=False)
    for limit in (0.0, 0.01, 0.05, 0.5):
        assert tpr_at(members, others, limit) == pytest.approx(true[false <= limit].max(), abs=1e-12)
    ours = roc(members, others)
    np.testing.assert_allclose(ours[0], false, atol=1e-12)
    np.testing.assert_allclose(ours[1], true, atol=1e-12)


def test_low_scores_speak_for_members_and_chance_is_a_half() -> None:
    low, high = np.zeros(20), np.ones(30)
    assert (auroc(low, high), auroc(high, low), auroc(low, low)) == (1.0, 0.0, 0.5)
    assert (tpr_at(low, high), tpr_at(high, low), tpr_at(low, low)) == (1.0, 0.0, 0.0)


def test_intervals_hold_the_figure_and_cover_the_truth() -> None:
    rng = np.random.default_rng(0)
    truth = 0.6103  # P(N(-0.395, 1) < N(0, 1)) = Phi(0.395 / sqrt 2) = 0.6100
    inside = 0
    for _ in range(8):
        found = separation(rng.normal(-0.3955, 1, 100), rng.normal(0, 1, 100), seed=1)
        assert found.auroc.low <= found.auroc.value <= found.auroc.high
        assert found.tpr.low <= found.tpr.value <= found.tpr.high
        inside += found.auroc.low <= truth <= found.auroc.high
    assert inside >= 6
    members, others = scores(True)
    assert separation(members, others, 4) == separation(members, others, 4)


def test_scores_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        separation(np.zeros(0), np.ones(3))
    with pytest.raises(ValueError, match="not a number"):
        separation(np.array([np.nan]), np.ones(3))


# --- the bound on epsilon ------------------------------------------------------------------------


def test_without_delta_the_p_value_is_a_binomial_tail() -> None:
    for epsilon, guesses, right in itertools.product((0.0, 0.5, 2.0), (10, 40), (0, 1, 7, 10)):
        share = math.exp(epsilon) / (1 + math.exp(epsilon))
        expected = sum(
            math.comb(guesses, k) * share**k * (1 - share) ** (guesses - k) for k in range(right, guesses + 1)
        )
        assert p_value(epsilon, 0.0, 50, guesses, right) == pytest.approx(expected, rel=1e-9)


def test_delta_adds_the_steepest_slope() -> None:
    """By the definition, term for term."""
    m, r, v, epsilon, delta = 60, 30, 24, 1.0, 1e-4
    share = math.e / (1 + math.e)
    slopes = [sum(binom.pmf(v - j, r, share) for j in range(1, i + 1)) / i for i in range(1, v + 1)]
    expected = binom.sf(v - 1, r, share) + 2 * m * delta * max(slopes)
    assert p_value(epsilon, delta, m, r, v) == pytest.approx(expected, rel=1e-9)
    assert p_value(epsilon, 1.0, m, r, v) == 1.0


def test_all_right_of_r_refutes_what_the_formula_says() -> None:
    """share^r < 0.05 exactly where epsilon < logit(0.05^(1 / r))."""
    for guesses in (5, 20, 100):
        share = 0.05 ** (1 / guesses)
        found = lower_bound(0.0, 100, guesses, guesses)
        assert found.epsilon == pytest.approx(math.log(share / (1 - share)), abs=1e-6)
        assert found.refutable == found.epsilon
    assert lower_bound(0.0, 100, 20, 10).epsilon == 0.0
    assert lower_bound(0.0, 100, 20, 10).refutable > 1.8
    assert lower_bound(0.0, 100, 0, 0).refutable == 0.0


def test_more_right_guesses_refute_more_and_more_delta_less() -> None:
    bounds = [lower_bound(1e-5, 200, 100, right).epsilon for right in range(50, 101)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 3
    deltas = [lower_bound(delta, 200, 100, 90).epsilon for delta in (0.0, 1e-5, 1e-4, 1e-3)]
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[0] > deltas[-1]


def test_randomised_response_is_refuted_no_more_often_than_the_confidence_says() -> None:
    """The tightest mechanism there is: every coin is told right with probability e^eps / (1 + e^eps)."""
    epsilon, rng = 1.0, np.random.default_rng(5)
    right = rng.binomial(200, math.e / (1 + math.e), 400)
    bounds = {int(v): lower_bound(0.0, 200, 200, int(v)).epsilon for v in set(right.tolist())}
    wrong = sum(bounds[int(v)] > epsilon for v in right)
    assert wrong <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)
    assert np.mean([bounds[int(v)] for v in right]) > 0.5  # and it says something


def test_guesses_are_the_lowest_and_the_highest() -> None:
    values = np.array([0.3, 0.1, 0.9, 0.5, 0.7, 0.2])
    assert guess(values, 4).tolist() == [0, 1, -1, 0, -1, 1]
    assert guess(values, 0).tolist() == [0] * 6
    assert guess(values, 6).tolist() == [1, 1, -1, -1, -1, 1]
    for wrong in (3, 8, -2):
        with pytest.raises(ValueError, match="even number"):
            guess(values, wrong)
    with pytest.raises(ValueError, match="not possible"):
        p_value(1.0, 0.0, 5, 6, 3)
