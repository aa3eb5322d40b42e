"""What DP-SGD steps cost: epsilon of a list of steps, the noise that meets a budget, and the lifetime filter.

Everything is composed by Opacus' accountants for the Poisson-subsampled Gaussian mechanism; this module only
chooses their settings, composes what differs in (q, sigma), and keeps to where their numerics hold.

``rdp``
    Renyi DP of the sampled Gaussian (Mironov, Talwar and Zhang, 2019, section 3.3), converted to epsilon by
    Balle et al. (2020, theorem 21). It is an upper bound at every order, hence also at the best one.
``prv``
    Numerical composition of privacy loss random variables (Gopi, Lee and Wutschitz, 2021), the upper end of
    its error interval. Tighter and slower. Where it is not the lower of the two bounds, or its mesh would not
    fit in memory, the result is the ``rdp`` bound, which holds as well.

Adjacency is add/remove one row, so the sensitivity of a clipped sum is the clip C, and `sigma` is the noise's
standard deviation divided by C.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from privet.errors import ConfigError

ACCOUNTANTS = ("rdp", "prv")
MIN_SIGMA = 0.1  # calibration adds at least this much noise, also where the budget would allow less
MAX_SIGMA = 1e6

# Opacus' orders, and higher ones: with the former alone no epsilon below 0.12 can be expressed at delta 1e-5.
# The binomial coefficients overflow above order 1029.
_HIGH_ORDERS = (64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
_OPACUS_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
_ORDERS = tuple(float(order) for order in (*_OPACUS_ORDERS, *_HIGH_ORDERS))
# The series of a fractional order takes some ten times sigma terms (minutes at sigma 1e4), and low orders are
# the best ones only for large epsilons. The PRV accountant computes them inside, so it has the same limit.
_FRACTIONAL_UP_TO = 50.0

# What the filter's order must serve: rates and noise of DP-SGD in practice, and no sampling at all.
_REFERENCES = (
    *((q, s) for q in (0.005, 0.02, 0.1) for s in (0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 3.0)),
    (1.0, 10.0),
)
_WORTH_RUNNING = 20  # steps; a reference of which fewer fit at any order does not count

_PRV_ERROR = 0.01  # absolute error of epsilon, Opacus' default; at most a fiftieth of the RDP bound
_PRV_POINTS = 1 << 20  # mesh points: at this number some 150 MiB and a second


@dataclass(frozen=True)
class Step:
    """`steps` runs of the Poisson-subsampled Gaussian mechanism at rate `q` and noise multiplier `sigma`."""

    q: float
    sigma: float
    steps: int

    def __post_init__(self) -> None:
        if not 0.0 < self.q <= 1.0:
            raise ConfigError(f"q = {self.q} is not allowed: greater than 0 and at most 1")
        if not 0.0 < self.sigma < math.inf:
            raise ConfigError(f"sigma = {self.sigma} is not allowed: a finite number greater than 0")
        if self.steps < 0:
            raise ConfigError(f"steps = {self.steps} is not allowed: at least 0")


def epsilon(entries: Sequence[Step], delta: float, accountant: str) -> float:
    """Return the epsilon that `entries` cost together at `delta`.

    Parameters
    ----------
    entries : sequence of Step
        In any order; without any step the result is 0.
    delta : float
        In (0, 1).
    accountant : {"rdp", "prv"}
        One accountant composes all steps; epsilons of parts neither add up to this number nor replace it.

    Raises
    ------
    ConfigError
        If an argument is out of range.
    """
    _check(delta, accountant)
    merged = _merge(entries)
    if not merged:
        return 0.0
    bound = _rdp_epsilon(merged, delta)
    return bound if accountant == "rdp" else min(bound, _prv_epsilon(merged, delta, bound))


@lru_cache(maxsize=1024)
def calibrate(q: float, steps: int, epsilon: float, delta: float, accountant: str) -> float:
    """Return the smallest noise multiplier found that keeps `steps` steps at rate `q` within `epsilon`.

    It has five significant digits, is never below `MIN_SIGMA`, and the accountant has confirmed that exactly
    this value keeps to the budget.

    Raises
    ------
    ConfigError
        If an argument is out of range, or no noise that the accountant can handle meets the budget.
    """
    _check(delta, accountant)
    if steps < 1:
        raise ConfigError(f"steps = {steps} is not allowed: at least 1 to calibrate noise for")
    if not 0.0 < epsilon < math.inf:
        raise ConfigError(f"privacy.epsilon = {epsilon} is not allowed: a finite number greater than 0")
    from scipy.optimize import brentq

    cost = _cost(q, steps, delta, accountant)
    if cost(MIN_SIGMA) <= epsilon:
        return MIN_SIGMA
    guess = 1.0
    if accountant == "prv" and epsilon > 2 * _floor(delta):
        guess = calibrate(q, steps, epsilon, delta, "rdp")
    low, high = _bracket(cost, epsilon, guess)
    if high > MAX_SIGMA:
        raise ConfigError(
            f"privacy.epsilon = {epsilon:g} is not allowed: out of reach of the {accountant} accountant for "
            f"{steps} steps at q = {q:.3g}; at delta = {delta:g} it takes more than {_floor(delta):.2g}"
        )

    def excess(log_sigma: float) -> float:
        return math.log(max(cost(math.exp(log_sigma)), 1e-12) / epsilon)

    # Brent's last step is far more exact than xtol; where it is not, the loop below goes up in small steps.
    root = math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-4, rtol=1e-9))
    sigma, further = _five_digits(root), 1e-5
    while cost(sigma) > epsilon:
        sigma, further = _five_digits(sigma * (1 + further)), 2 * further
    return sigma


def keeps(q: float, sigma: float, steps: int, budget: float, delta: float, accountant: str) -> bool:
    """Whether `steps` steps at rate `q` with this noise keep to a budget: :func:`calibrate` without a search.

    A sigma below `MIN_SIGMA`, and one that is no number, never does.
    """
    if not MIN_SIGMA <= sigma < math.inf:
        return False
    return epsilon([Step(q, sigma, steps)], delta, accountant) <= budget


def rdp(entries: Sequence[Step], order: float) -> float:
    """Return the Renyi divergence bound of `entries` at one `order` above 1; at one order they add up."""
    if not 1.0 < order < math.inf:
        raise ConfigError(f"order = {order} is not allowed: a finite number greater than 1")
    return float(
        sum(step.steps * _rdp_of_one(step.q, step.sigma, _feasible(step, order)) for step in entries)
    )


@lru_cache(maxsize=64)
def filter_order(max_epsilon: float, delta: float) -> float:
    """Choose the Renyi order at which a node's lifetime is accounted.

    A privacy filter must fix its order before the first step: the best order in hindsight is not covered by
    the proof when parameters depend on earlier results (Feldman and Zrnic, 2021, "Individual privacy
    accounting via a Renyi filter"; Lecuyer, 2021, "Practical privacy filters and odometers").

    Which runs will come is unknown, so the order is the one with the least regret over `_REFERENCES`: it
    maximises the smallest share, over those mechanisms, of the steps that fit at the mechanism's own best
    order. The Gaussian mechanism's best order alone would be a bad choice: there the divergence of DP-SGD at
    little noise and a small rate has begun to explode, and next to no step would fit.

    Raises
    ------
    ConfigError
        If no order can express so small a `max_epsilon` at `delta`.
    """
    _check(delta, "rdp")
    if not 0.0 < max_epsilon < math.inf:
        raise ConfigError(f"max-epsilon = {max_epsilon} is not allowed: a finite number greater than 0")
    if max_epsilon <= _floor(delta):
        raise ConfigError(
            f"max-epsilon = {max_epsilon:g} is not allowed: more than {_floor(delta):.2g} at delta {delta:g}"
        )
    room = np.array([max(0.0, max_epsilon - _conversion(order, delta)) for order in _ORDERS])
    shares = []
    for q, sigma in _REFERENCES:
        steps = room / _rdp_curve(q, sigma)
        if steps.max() >= _WORTH_RUNNING or q == 1.0:  # without sampling the shares do not depend on sigma
            shares.append(steps / steps.max())
    return _ORDERS[int(np.argmax(np.min(shares, axis=0)))]


def lifetime_epsilon(entries: Sequence[Step], order: float, delta: float) -> float:
    """Return the epsilon of `entries` at `delta`, seen through the one `order` of the filter.

    Without any step it is 0; at the orders of :func:`epsilon` it is never below the RDP accountant's number.
    """
    _check(delta, "rdp")
    total = rdp(entries, order)
    if not any(step.steps for step in entries):
        return 0.0
    return max(0.0, total + _conversion(order, delta))


def combined_sigma(sigma: float, sigma_s: float) -> float:
    """Return the noise multiplier at which two Gaussian releases on one batch are charged as one step.

    Together they are one Gaussian mechanism with ``sigma_eff = (sigma^-2 + sigma_s^-2)^(-1/2)``: the squared
    signal-to-noise ratios add.
    """
    for name, value in (("sigma", sigma), ("sigma_s", sigma_s)):
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{name} = {value} is not allowed: a finite number greater than 0")
    return 1.0 / math.hypot(1.0 / sigma, 1.0 / sigma_s)


# --- composition ---------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _analysis() -> ModuleType:
    """Return Opacus' RDP analysis, from its file alone where it is in its place.

    ``import opacus`` brings in its optimisers and with them PyTorch's distributed runtime: seconds, which every
    message to a node would pay.
    """
    name = "opacus.accountants.analysis.rdp"
    if name not in sys.modules:
        package = importlib.util.find_spec("opacus")
        for place in package.submodule_search_locations or () if package else ():
            file = Path(place, "accountants", "analysis", "rdp.py")
            spec = importlib.util.spec_from_file_location("privet_opacus_rdp", file)
            if file.is_file() and spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    return importlib.import_module(name)


def _check(delta: float, accountant: str) -> None:
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"privacy.delta = {delta} is not allowed: greater than 0 and less than 1")
    if accountant not in ACCOUNTANTS:
        raise ConfigError(
            f"privacy.accountant = {accountant} is not allowed (allowed: {', '.join(ACCOUNTANTS)})"
        )


def _merge(entries: Sequence[Step]) -> list[Step]:
    """Add up equal mechanisms: every one that the PRV accountant is told apart costs it a convolution."""
    totals: dict[tuple[float, float], int] = {}
    for step in entries:
        if step.steps:
            totals[step.q, step.sigma] = totals.get((step.q, step.sigma), 0) + step.steps
    return [Step(q, sigma, steps) for (q, sigma), steps in sorted(totals.items())]


def _slow(q: float, sigma: float, order: float) -> bool:
    return q < 1.0 and sigma > _FRACTIONAL_UP_TO and not order.is_integer()


def _feasible(step: Step, order: float) -> float:
    """Return `order` or, where that takes too long, the next whole one: divergences grow with the order."""
    return float(math.ceil(order)) if _slow(step.q, step.sigma, float(order)) else float(order)


@lru_cache(maxsize=4096)
def _rdp_of_one(q: float, sigma: float, order: float) -> float:
    """Return the Renyi divergence bound of one step; infinite where Opacus cannot compute it."""
    try:
        with np.errstate(all="ignore"):
            value = float(_analysis().compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order))
    except (ValueError, ArithmeticError):
        return math.inf
    # Rounding may leave a tiny negative number where the divergence is below 1e-16.
    return math.inf if math.isnan(value) else max(0.0, value)


@lru_cache(maxsize=1024)
def _rdp_curve(q: float, sigma: float) -> NDArray[np.float64]:
    """Return the Renyi divergence bounds of one step, shape ``(len(_ORDERS),)``."""
    return np.array([math.inf if _slow(q, sigma, a) else _rdp_of_one(q, sigma, a) for a in _ORDERS])


def _rdp_epsilon(merged: Sequence[Step], delta: float) -> float:
    curve = sum(step.steps * _rdp_curve(step.q, step.sigma) for step in merged)
    return max(0.0, _convert(_ORDERS, curve, delta))


def _convert(orders: Sequence[float], divergences: object, delta: float) -> float:
    with warnings.catch_warnings():
        # "Optimal order is the smallest / largest": a looser bound, not a wrong one.
        warnings.simplefilter("ignore")
        value, _ = _analysis().get_privacy_spent(orders=list(orders), rdp=divergences, delta=delta)
    return float(value)


@lru_cache(maxsize=1024)
def _conversion(order: float, delta: float) -> float:
    """Return what the conversion to epsilon adds to a divergence at `order`."""
    return _convert([order], [0.0], delta)


@lru_cache(maxsize=64)
def _floor(delta: float) -> float:
    """Return the smallest epsilon that RDP can express at `delta`, that of infinite noise."""
    return min(_conversion(order, delta) for order in _ORDERS)


def _prv_epsilon(merged: Sequence[Step], delta: float, bound: float) -> float:
    """Return the PRV accountant's upper bound, or infinity where its numerics do not reach.

    `bound` is the RDP bound of the same steps; it scales the error that is asked for.
    """
    if any(step.q < 1.0 and step.sigma > _FRACTIONAL_UP_TO for step in merged):
        return math.inf
    delta_error = delta / 1000
    total = sum(step.steps for step in merged)
    # The half-width of the mesh and its spacing, as the accountant chooses them (Gopi et al., remark 5.6).
    width = 3.0 + max(
        _rdp_epsilon(merged, delta_error / 4),
        *(_rdp_epsilon([Step(s.q, s.sigma, 1)], delta_error / (8 * total)) for s in merged),
    )
    spacing = 1.0 / math.sqrt(total * math.log(12 / delta_error) / 2)
    error = max(min(_PRV_ERROR, bound / 50), 2 * width / (spacing * _PRV_POINTS))
    if error > 0.5:
        return math.inf
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(step.sigma, step.q, step.steps) for step in merged]
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(accountant.get_epsilon(delta, eps_error=error, delta_error=delta_error))
    except (RuntimeError, ValueError, ArithmeticError, IndexError, MemoryError):
        return math.inf
    return value if value >= 0.0 else math.inf


# --- calibration ---------------------------------------------------------------------------------


def _cost(q: float, steps: int, delta: float, accountant: str) -> Callable[[float], float]:
    @cache  # bracketing and root finding ask for the same ends
    def cost(sigma: float) -> float:
        return epsilon([Step(q, sigma, steps)], delta, accountant)

    return cost


def _bracket(cost: Callable[[float], float], target: float, guess: float) -> tuple[float, float]:
    """Return (low, high) with ``cost(low) > target >= cost(high)``, or a high beyond `MAX_SIGMA`."""
    low = high = guess
    factor = 1.25  # the guess of the PRV accountant is close; others need larger steps after the first ones
    if cost(guess) <= target:
        while cost(low) <= target:
            low, high, factor = max(MIN_SIGMA, low / factor), low, min(2.0, 1.25 * factor)
    else:
        while high <= MAX_SIGMA and cost(high) > target:
            low, high, factor = high, high * factor, min(2.0, 1.25 * factor)
    return low, high


def _five_digits(sigma: float) -> float:
    """Round up to five significant digits, so that the number printed is the number used."""
    places = 4 - math.floor(math.log10(sigma))
    return round(math.ceil(sigma * 10.0**places - 1e-6) / 10.0**places, places)
