"""Epsilon, calibration and the lifetime filter against calculations that share no code with them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis import rdp as opacus_rdp
from opacus.accountants.utils import get_noise_multiplier
from scipy import integrate, optimize, stats

from privet.errors import ConfigError
from privet.privacy import accounting
from privet.privacy.accounting import (
    MIN_SIGMA,
    Step,
    calibrate,
    combined_sigma,
    epsilon,
    filter_order,
    keeps,
    lifetime_epsilon,
    rdp,
)

BOTH = ("rdp", "prv")
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + list(accounting._HIGH_ORDERS)


def balle(order: float, divergence: float, delta: float) -> float:
    """Theorem 21 of Balle et al. (2020), written out."""
    return divergence + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact, for a Gaussian mechanism with sensitivity / sigma = mu (Balle and Wang, 2018, theorem 8)."""

    def excess(eps: float) -> float:
        tail = stats.norm.logcdf(-mu / 2 - eps / mu)
        return float(stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps + tail) - delta)

    return float(optimize.brentq(excess, 0, 1000, xtol=1e-10))


def one_step_delta(q: float, sigma: float, eps: float) -> float:
    """The exact delta of one step: P = (1 - q) N(0, sigma^2) + q N(1, sigma^2) against Q = N(0, sigma^2)."""
    x = sigma**2 * math.log((math.expm1(eps) + q) / q) + 0.5
    p = (1 - q) * stats.norm.sf(x / sigma) + q * stats.norm.sf((x - 1) / sigma)
    return float(p - math.exp(eps) * stats.norm.sf(x / sigma))


# --- RDP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "sigma"), [(0.1, 1.0), (0.016, 0.8), (0.5, 2.0)])
def test_rdp_by_hand_at_orders_two_and_three(q: float, sigma: float) -> None:
    e = math.exp(1 / sigma**2)
    assert rdp([Step(q, sigma, 1)], 2) == pytest.approx(math.log(1 + q * q * (e - 1)), rel=1e-9)
    a3 = (1 - q) ** 3 + 3 * (1 - q) ** 2 * q + 3 * (1 - q) * q**2 * e + q**3 * e**3
    assert rdp([Step(q, sigma, 1)], 3) == pytest.approx(math.log(a3) / 2, rel=1e-9)


@pytest.mark.parametrize("order", [1.1, 2.5, 7.3])
@pytest.mark.parametrize(("q", "sigma"), [(0.3, 0.5), (0.016, 0.8), (0.9, 3.0)])
def test_rdp_by_numerical_integration_at_fractional_orders(q: float, sigma: float, order: float) -> None:
    def integrand(x: float) -> float:
        ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))
        return float(stats.norm.pdf(x, 0, sigma)) * ratio**order

    moment, _ = integrate.quad(integrand, -12 * sigma, order + 12 * sigma, epsabs=0, epsrel=1e-11, limit=400)
    assert rdp([Step(q, sigma, 1)], order) == pytest.approx(math.log(moment) / (order - 1), rel=1e-6)


def test_rdp_without_subsampling_is_analytic_and_adds_up() -> None:
    entries = [Step(1.0, 2.0, 3), Step(1.0, 5.0, 10), Step(1.0, 5.0, 0)]
    assert rdp(entries, 4.0) == pytest.approx(4 * (3 / 8 + 10 / 50), rel=1e-12)
    assert rdp([], 4.0) == 0


@pytest.mark.parametrize("steps", [1, 60, 1000])
@pytest.mark.parametrize("sigma", [0.8, 10.0, 100.0])
def test_rdp_epsilon_without_subsampling(sigma: float, steps: int) -> None:
    want = min(balle(a, a * steps / (2 * sigma**2), 1e-5) for a in ORDERS)
    assert epsilon([Step(1.0, sigma, steps)], 1e-5, "rdp") == pytest.approx(want, rel=1e-9)


# --- both accountants ----------------------------------------------------------------------------


def test_twenty_rounds_of_one_accountant() -> None:
    # Case 4: 6.32 is RDP at delta 1e-5 over all 1240 steps; one round alone is 2.61 there, PRV says 5.63.
    rounds = [Step(0.016, 0.8, 62)] * 20
    assert epsilon(rounds, 1e-5, "rdp") == pytest.approx(6.3242, abs=1e-4)
    assert epsilon(rounds[:1], 1e-5, "rdp") == pytest.approx(2.61, abs=0.01)
    assert epsilon(rounds, 1e-5, "prv") == pytest.approx(5.633, abs=2e-3)


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.016, 0.8, 1240), (0.0213, 0.6, 40), (0.3, 2.0, 500)])
def test_same_as_opacus_where_its_orders_suffice(q: float, sigma: float, steps: int) -> None:
    opacus = RDPAccountant()
    opacus.history = [(sigma, q, steps)]
    assert epsilon([Step(q, sigma, steps)], 1e-5, "rdp") == pytest.approx(opacus.get_epsilon(1e-5), rel=1e-12)
    numerical = PRVAccountant()
    numerical.history = [(sigma, q, steps)]
    assert epsilon([Step(q, sigma, steps)], 1e-5, "prv") == pytest.approx(
        numerical.get_epsilon(1e-5), abs=0.011
    )


@pytest.mark.parametrize(
    ("sigma", "steps"), [(0.3, 1), (0.8, 60), (2.0, 1), (10.0, 60), (10.0, 1000), (300.0, 50)]
)
def test_bounds_of_the_gaussian_mechanism_hold_and_are_tight(sigma: float, steps: int) -> None:
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, 1e-5)
    by_rdp, by_prv = (epsilon([Step(1.0, sigma, steps)], 1e-5, a) for a in BOTH)
    assert exact < by_prv < exact + max(0.03, 0.03 * exact)
    assert by_prv <= by_rdp < 1.2 * exact + 0.05


@pytest.mark.parametrize(("q", "sigma"), [(0.001, 0.5), (0.016, 0.8), (0.3, 0.3), (0.99, 5.0)])
def test_bounds_of_one_subsampled_step_hold(q: float, sigma: float) -> None:
    exact = optimize.brentq(lambda e: one_step_delta(q, sigma, e) - 1e-5, 1e-9, 100)
    by_rdp, by_prv = (epsilon([Step(q, sigma, 1)], 1e-5, a) for a in BOTH)
    assert exact < by_prv < exact + 0.021
    assert by_prv <= by_rdp


def test_prv_against_sampled_privacy_losses() -> None:
    # delta(epsilon) = E[(1 - exp(epsilon - L))+] with L the summed privacy loss under P: simulate L.
    q, sigma, steps, delta = 0.2, 0.9, 12, 0.02
    rng = np.random.default_rng(0)
    loss = np.zeros(400_000)
    for _ in range(steps):
        x = sigma * rng.standard_normal(len(loss)) + (rng.random(len(loss)) < q)
        loss += np.log(1 - q + q * np.exp((2 * x - 1) / (2 * sigma**2)))
    eps = optimize.brentq(lambda e: np.maximum(0, -np.expm1(e - loss)).mean() - delta, 0, 20)
    assert eps - 0.02 < epsilon([Step(q, sigma, steps)], delta, "prv") < eps + 0.05


def test_prv_of_different_mechanisms_is_one_gaussian() -> None:
    entries = [Step(1.0, 2.0, 1), Step(1.0, 4.0, 3), Step(1.0, 2.0, 1)]
    exact = gaussian_epsilon(math.sqrt(2 / 4 + 3 / 16), 1e-5)
    assert exact < epsilon(entries, 1e-5, "prv") < exact + 0.03


@pytest.mark.parametrize("accountant", BOTH)
def test_nothing_costs_nothing(accountant: str) -> None:
    assert epsilon([], 1e-5, accountant) == 0.0
    assert epsilon([Step(0.5, 1.0, 0)], 1e-5, accountant) == 0.0


@pytest.mark.parametrize("accountant", BOTH)
def test_order_and_splitting_of_entries_do_not_matter(accountant: str) -> None:
    a, b = Step(0.02, 0.8, 30), Step(0.05, 1.5, 7)
    want = epsilon([a, b], 1e-5, accountant)
    assert epsilon([b, Step(0.02, 0.8, 10), Step(0.02, 0.8, 20)], 1e-5, accountant) == want


@pytest.mark.parametrize("accountant", BOTH)
def test_every_step_adds_and_more_noise_saves(accountant: str) -> None:
    by_steps = [epsilon([Step(0.016, 0.8, t)], 1e-5, accountant) for t in (1, 2, 62, 124, 1240)]
    assert by_steps == sorted(set(by_steps))
    by_noise = [epsilon([Step(0.016, s, 62)], 1e-5, accountant) for s in (0.4, 0.8, 1.6, 40.0)]
    assert by_noise == sorted(set(by_noise), reverse=True)


@pytest.mark.parametrize("accountant", BOTH)
def test_one_row_and_tiny_clients_are_charged(accountant: str) -> None:
    # Cases 2 and 3: 6 rows, batch 1, 10 epochs; 1 row, q = 0.1, 50 steps.
    for entry in (Step(1 / 6, 1.0, 60), Step(0.1, 1.0, 50)):
        assert 1 < epsilon([entry], 1e-5, accountant) < 20


def test_extreme_mechanisms_end_in_a_number() -> None:
    for accountant in BOTH:
        for step in (Step(1.0, 0.01, 1), Step(0.3, 0.05, 10**6), Step(0.5, 1e5, 10), Step(1e-9, 0.3, 10**9)):
            value = epsilon([step], 1e-5, accountant)
            assert 0 <= value < math.inf


def test_numerics_that_take_minutes_or_gigabytes_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("started")

    monkeypatch.setattr(PRVAccountant, "get_epsilon", never)
    monkeypatch.setattr(opacus_rdp, "_compute_log_a_for_frac_alpha", never)
    noisy = [Step(0.43, 2e4, 10)]  # a fractional order's series would have 200 000 terms
    assert epsilon(noisy, 1e-5, "prv") == epsilon(noisy, 1e-5, "rdp") < 0.01
    assert rdp(noisy, 2.8) == rdp(noisy, 3) > 0
    monkeypatch.undo()
    monkeypatch.setattr(PRVAccountant, "get_epsilon", never)
    loud = [Step(0.3, 0.3, 10**5)]  # a mesh of some 10**9 points
    assert epsilon(loud, 1e-5, "prv") == epsilon(loud, 1e-5, "rdp") > 1e4


def test_prv_falls_back_to_the_rdp_bound_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> float:
        raise RuntimeError("Discrete mean differs significantly from continuous mean.")

    monkeypatch.setattr(PRVAccountant, "get_epsilon", fail)
    entries = [Step(0.02, 0.8, 30)]
    assert epsilon(entries, 1e-5, "prv") == epsilon(entries, 1e-5, "rdp")


@pytest.mark.parametrize("value", [math.nan, -3.0])
def test_a_senseless_prv_result_is_not_believed(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(PRVAccountant, "get_epsilon", lambda *args, **kwargs: value)
    entries = [Step(0.02, 0.8, 30)]
    assert epsilon(entries, 1e-5, "prv") == epsilon(entries, 1e-5, "rdp")


# --- calibration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize(("q", "steps", "target"), [(0.0213, 40, 0.01), (0.0213, 40, 6.0), (1.0, 60, 50.0)])
def test_calibrated_noise_meets_the_budget_and_hardly_less_would(
    q: float, steps: int, target: float, accountant: str
) -> None:
    sigma = calibrate(q, steps, target, 1e-5, accountant)
    assert epsilon([Step(q, sigma, steps)], 1e-5, accountant) <= target
    assert epsilon([Step(q, sigma * (1 - 1e-3), steps)], 1e-5, accountant) > target
    assert float(f"{sigma:.5g}") == sigma


def test_calibration_agrees_with_opacus() -> None:
    theirs = get_noise_multiplier(
        target_epsilon=6.0, target_delta=1e-5, sample_rate=0.016, steps=1240, epsilon_tolerance=1e-4
    )
    assert calibrate(0.016, 1240, 6.0, 1e-5, "rdp") == pytest.approx(theirs, rel=1e-4)


def test_calibration_of_the_gaussian_mechanism() -> None:
    # Exact: sigma = sqrt(steps) / mu, where mu has exactly the target epsilon.
    mu = optimize.brentq(lambda m: gaussian_epsilon(m, 1e-5) - 2.0, 0.01, 5)
    exact = math.sqrt(50) / mu
    assert exact < calibrate(1.0, 50, 2.0, 1e-5, "prv") < 1.015 * exact
    assert exact < calibrate(1.0, 50, 2.0, 1e-5, "rdp") < 1.10 * exact


def test_calibration_never_goes_below_the_least_noise() -> None:
    # q below delta: without any noise the mechanism is already (0, delta)-private.
    assert calibrate(1e-7, 1, 6.0, 1e-5, "prv") == MIN_SIGMA
    assert calibrate(0.5, 1, 1e6, 1e-5, "rdp") == MIN_SIGMA


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_a_budget_below_the_floor_is_one_line(delta: float) -> None:
    with pytest.raises(
        ConfigError, match=r"privacy.epsilon = 0.001 is not allowed: out of reach of the rdp"
    ) as err:
        calibrate(0.01, 10, 0.001, delta, "rdp")
    assert "\n" not in str(err.value)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0.1, 0, 1.0, 1e-5, "rdp"), "steps = 0"),
        ((0.1, 5, 0.0, 1e-5, "rdp"), "privacy.epsilon = 0.0"),
        ((0.1, 5, math.inf, 1e-5, "rdp"), "privacy.epsilon = inf"),
        ((0.1, 5, math.nan, 1e-5, "rdp"), "privacy.epsilon = nan"),
        ((0.1, 5, 1.0, 0.0, "rdp"), "privacy.delta = 0.0"),
        ((0.1, 5, 1.0, 1.0, "prv"), "privacy.delta = 1.0"),
        ((0.1, 5, 1.0, 1e-5, "gdp"), r"privacy.accountant = gdp .*rdp, prv"),
        ((0.0, 5, 1.0, 1e-5, "rdp"), "q = 0.0"),
        ((1.5, 5, 1.0, 1e-5, "rdp"), "q = 1.5"),
    ],
)
def test_bad_settings_are_named(arguments: tuple[float, int, float, float, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        calibrate(*arguments)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "match"),
    [
        (0.0, 1.0, 1, "q = 0.0"),
        (math.nan, 1.0, 1, "q = nan"),
        (0.5, 0.0, 1, "sigma = 0.0"),
        (0.5, math.inf, 1, "sigma = inf"),
        (0.5, math.nan, 1, "sigma = nan"),
        (0.5, 1.0, -1, "steps = -1"),
    ],
)
def test_bad_steps_are_named(q: float, sigma: float, steps: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Step(q, sigma, steps)


# --- lifetime filter, combined releases ----------------------------------------------------------


def test_lifetime_epsilon_is_the_conversion_at_one_order() -> None:
    entries = [Step(1.0, 4.0, 8), Step(0.1, 1.0, 5)]
    divergence = 3 * 8 / 32 + 5 * math.log(0.9**3 + 3 * 0.081 + 0.027 * math.e + 0.001 * math.e**3) / 2
    assert lifetime_epsilon(entries, 3.0, 1e-5) == pytest.approx(balle(3.0, divergence, 1e-5), rel=1e-9)
    assert lifetime_epsilon([], 3.0, 1e-5) == 0.0
    assert lifetime_epsilon([Step(1.0, 4.0, 0)], 3.0, 1e-5) == 0.0


@pytest.mark.parametrize("cap", [0.5, 6.0, 30.0])
def test_the_filter_is_never_below_the_accountant(cap: float) -> None:
    entries = [Step(0.02, 0.8, 62), Step(0.05, 1.5, 7)]
    order = filter_order(cap, 1e-5)
    assert lifetime_epsilon(entries, order, 1e-5) >= epsilon(entries, 1e-5, "rdp")


def fitting(cost: Callable[[Step], float], q: float, sigma: float, cap: float) -> int:
    """Steps that fit, by doubling and halving."""
    low, high = 0, 1
    while cost(Step(q, sigma, high)) <= cap:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(Step(q, sigma, middle)) <= cap else (low, middle)
    return low


@pytest.mark.parametrize("cap", [2.0, 4.0, 8.0, 20.0])
@pytest.mark.parametrize(("q", "sigma"), [(0.0213, 0.6), (0.016, 0.8), (0.1, 2.0), (1.0, 20.0)])
def test_the_filter_order_lets_most_of_the_steps_through(q: float, sigma: float, cap: float) -> None:
    order = filter_order(cap, 1e-5)
    best = fitting(lambda s: epsilon([s], 1e-5, "rdp"), q, sigma, cap)
    through = fitting(lambda s: lifetime_epsilon([s], order, 1e-5), q, sigma, cap)
    # The best order for Gaussians lets 12 of 135 steps through at (0.0213, 0.6), cap 8.
    assert through <= best
    if best >= 20:
        assert through >= 0.55 * best


def test_the_filter_order_is_a_pure_choice_on_the_grid() -> None:
    orders = [filter_order(cap, 1e-5) for cap in (0.05, 0.5, 2.0, 8.0, 40.0)]
    assert orders == sorted(set(orders), reverse=True)
    assert set(orders) <= set(map(float, ORDERS))


@pytest.mark.parametrize("cap", [0.001, 0.0, -1.0, math.inf, math.nan])
def test_a_lifetime_that_no_order_can_express_is_refused(cap: float) -> None:
    with pytest.raises(ConfigError, match="max-epsilon = "):
        filter_order(cap, 1e-5)


@pytest.mark.parametrize("order", [1.0, 0.5, math.inf, math.nan])
def test_bad_orders_are_refused(order: float) -> None:
    with pytest.raises(ConfigError, match="order = "):
        rdp([Step(1.0, 1.0, 1)], order)


def test_two_releases_on_one_batch_are_one_step() -> None:
    # Rule 12. Without subsampling, two Gaussian steps are exactly one at the combined noise.
    assert combined_sigma(3.0, 4.0) == pytest.approx(2.4)
    two, one = [Step(1.0, 3.0, 1), Step(1.0, 4.0, 1)], [Step(1.0, 2.4, 1)]
    for order in (1.5, 2, 40):
        assert rdp(two, order) == pytest.approx(rdp(one, order), rel=1e-12)
    # With subsampling they share the draw: one combined step costs more than two independent ones.
    assert rdp([Step(0.1, 2.4, 1)], 20) > rdp([Step(0.1, 3.0, 1), Step(0.1, 4.0, 1)], 20)


@pytest.mark.parametrize(("sigma", "sigma_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, math.inf), (math.nan, 1.0)])
def test_combined_noise_refuses_senseless_values(sigma: float, sigma_s: float) -> None:
    with pytest.raises(ConfigError, match="sigma"):
        combined_sigma(sigma, sigma_s)


def test_the_orders_are_opacus_own_and_higher_ones() -> None:
    assert tuple(RDPAccountant.DEFAULT_ALPHAS) == accounting._OPACUS_ORDERS


def test_the_analysis_is_opacus_own_file_without_the_rest_of_opacus() -> None:
    """A message to a node must not pay for importing Opacus' optimisers."""
    code = (
        "import sys; from privet.privacy.accounting import Step, epsilon; "
        "print(epsilon([Step(0.01, 1.1, 500)], 1e-5, 'rdp').hex(), 'opacus' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    value, imported = done.stdout.split()
    assert imported == "False"
    assert float.fromhex(value) == epsilon([Step(0.01, 1.1, 500)], 1e-5, "rdp")


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_sigma_keeps_a_budget_exactly_where_its_cost_does(accountant: str) -> None:
    needed = calibrate(0.05, 40, 3.0, 1e-5, accountant)
    assert keeps(0.05, needed, 40, 3.0, 1e-5, accountant)
    assert keeps(0.05, 2 * needed, 40, 3.0, 1e-5, accountant)
    assert not keeps(0.05, needed * 0.999, 40, 3.0, 1e-5, accountant)
    assert not keeps(0.05, float("nan"), 40, 3.0, 1e-5, accountant)
    assert not keeps(0.05, float("inf"), 40, 3.0, 1e-5, accountant)


def test_noise_below_the_least_never_keeps_a_budget() -> None:
    assert not keeps(1e-4, MIN_SIGMA * 0.99, 1, 1e6, 1e-5, "rdp")
