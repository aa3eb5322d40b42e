"""What a request says of its own place in the run, held against the configuration that it carries.

An honest server cannot send anything else than what passes here. What depends on the node's rows, its store or
its ledger is checked where those are.
"""

from __future__ import annotations

from privet.config import Config
from privet.errors import Refusal
from privet.privacy.accounting import MAX_SIGMA
from privet.schedule import is_scored
from privet.wire import Request
from strategies.base import LoraStrategy
from strategies.rounds import EVALUATE


def check_training(request: Request, config: Config, method: LoraStrategy) -> None:
    """Refuse a phase that the method does not have in this round, and numbers that no schedule leads to.

    Raises
    ------
    Refusal
        Kind ``"phase"``, ``"round"`` or ``"sigma"``.
    """
    warmup = range(1, method.warmup_rounds + 1)
    if request.phase not in (*method.phases, *(method.warmup_phases if warmup else ())):
        raise Refusal("phase", "the method has no such phase")
    _check_round(request, config)
    if (request.phase in method.warmup_phases) != (request.round in warmup):
        raise Refusal("phase", f"the method has no such phase in round {request.round}")
    _check_sigma(request, config)


def check_scoring(request: Request, config: Config, method: LoraStrategy) -> None:
    """Refuse to score where the configuration has no scores on nodes, or none after this round.

    Raises
    ------
    Refusal
        Kind ``"phase"``, ``"round"`` or ``"sigma"``.
    """
    if not config.scores_on_clients:
        raise Refusal("phase", f"evaluation={config.evaluation}: nodes score nothing in this run")
    _check_round(request, config)
    if not is_scored(config, method.warmup_rounds, request.round):
        raise Refusal("phase", f"no scores are due after round {request.round}")
    _check_sigma(request, config)


def _check_round(request: Request, config: Config) -> None:
    rounds = config.federation.rounds
    if not 1 <= request.round <= rounds:
        raise Refusal("round", f"round {request.round} is not in 1 to {rounds}, the run's rounds")
    last = request.round if request.phase == EVALUATE else request.round - 1
    if not 0 <= request.acknowledged <= last:
        raise Refusal(
            "round", f"no reply of round {request.acknowledged} can be in the state of round {request.round}"
        )
    if request.acknowledged and not request.met:
        raise Refusal("round", "a reply of this node cannot count if the node has never answered")


def _check_sigma(request: Request, config: Config) -> None:
    """Hold the noise to what can be calibrated; whether it is enough is a matter of the node's own q."""
    largest = MAX_SIGMA if config.privacy.private else 0.0
    if not 0.0 <= request.sigma <= largest:
        raise Refusal("sigma", f"sigma {request.sigma:.4g} is not in 0 to {largest:g}")
