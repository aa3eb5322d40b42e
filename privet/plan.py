"""The plan of every node: sampling rate, steps, noise and epsilon, fixed before anything trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from privet.config import Config
from privet.errors import ConfigError
from privet.privacy.accounting import Step, calibrate, epsilon, keeps
from privet.privacy.sampling import sampling_rate
from privet.schedule import Schedule


@dataclass(frozen=True)
class NodePlan:
    """What one node will do.

    `planned_steps` is the largest number of local steps that the schedule gives any node with these rows, which
    sigma is calibrated for; `steps` are this node's own. `sigma` is 0 and `epsilon` None without privacy.
    """

    node: str
    examples: int
    q: float
    steps_per_round: int
    rounds: int
    planned_steps: int
    sigma: float
    epsilon: float | None

    @property
    def steps(self) -> int:
        """Local steps of this node over the whole run."""
        return self.steps_per_round * self.rounds


def plan_nodes(config: Config, schedule: Schedule, declared: Mapping[str, int]) -> dict[str, NodePlan]:
    """Plan every node from its declared rows.

    Raises
    ------
    ConfigError
        If no noise multiplier reaches the budget.
    """
    return {node: plan_node(config, schedule, node, rows) for node, rows in declared.items()}


def plan_node(config: Config, schedule: Schedule, node: str, rows: int) -> NodePlan:
    """Plan one node; see :func:`plan_nodes`."""
    privacy = config.privacy
    per_round = config.train.steps(rows)
    planned = per_round * schedule.most_participations()
    rounds = schedule.participations(node)
    q = sampling_rate(config.train.batch_size, rows)
    sigma, spent = 0.0, None
    if privacy.private:
        assert privacy.delta is not None
        sigma = required_sigma(config, q, planned)
        spent = epsilon([Step(q, sigma, per_round * rounds)], privacy.delta, privacy.accountant)
    return NodePlan(node, rows, q, per_round, rounds, planned, sigma, spent)


def required_sigma(config: Config, q: float, steps: int) -> float:
    """Smallest noise multiplier that keeps `steps` steps at rate `q` within the run's budget."""
    privacy = config.privacy
    if privacy.epsilon is None or privacy.delta is None:
        raise ConfigError("privacy.epsilon and privacy.delta are needed to calibrate the noise")
    return calibrate(q, steps, privacy.epsilon, privacy.delta, privacy.accountant)


def is_enough(config: Config, q: float, steps: int, sigma: float) -> bool:
    """Whether this noise keeps `steps` steps at rate `q` within the run's budget; quicker than to calibrate it."""
    privacy = config.privacy
    if privacy.epsilon is None or privacy.delta is None:
        return False
    return keeps(q, sigma, steps, privacy.epsilon, privacy.delta, privacy.accountant)


def warnings(config: Config, plans: Mapping[str, NodePlan]) -> list[str]:
    """Remarks on a plan that a person should read before running it."""
    out = []
    if config.task.head == "local" and config.scores_on_server:
        out.append("task.head=local: the server has no head, so it scores nothing; evaluation=client does")
    if config.task.validation_rows is not None:
        out.append(
            "task.validation_rows: scores are of training rows set apart; no epsilon covers what is chosen by them"
        )
    if config.task.canaries is not None:
        out.append("task.canaries: an audit's run, whose model has learnt rows of random words")
    if not config.privacy.private:
        return ["not private: privacy=none, the model may remember single rows", *out]
    if config.privacy.randomness == "seeded":
        out.append("not private: privacy.randomness=seeded draws noise that can be repeated")
    if config.privacy.diagnostics:
        out.append("not private: privacy.diagnostics=true releases losses and norms without noise")
    delta = config.privacy.delta or 0.0
    for plan in plans.values():
        if plan.examples and delta > 1 / plan.examples:
            out.append(f"{plan.node}: privacy.delta = {delta:g} is larger than 1/n = {1 / plan.examples:.2g}")
        if plan.examples < 10:
            out.append(f"{plan.node}: only {plan.examples} rows; its model will be mostly noise")
        if plan.q == 1.0 and plan.examples:
            out.append(
                f"{plan.node}: train.batch_size = {config.train.batch_size} takes all of its {plan.examples} rows "
                "at every step (q = 1, no amplification)"
            )
    return out
