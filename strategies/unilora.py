"""Uni-LoRA, federated: FedHSIP's short vector behind a random projection (Li et al., NeurIPS 2025; FedHSIP's ablation).

Every LoRA coordinate belongs to one slot of ``theta_d``, drawn balanced at random from the run's seed with all signs
positive, so that both sides make the same rule and it is never sent. There is no warm-up. Everything else is
:class:`strategies.fedhsip.FedHSIP` with ``assignment=random``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from privet.config import Bounds
from strategies.fedhsip import FedHSIP


@dataclass(frozen=True)
class UniLoraParams:
    """Settings of Uni-LoRA.

    Attributes
    ----------
    dimension : int or None
        d; None: D / 6.4.
    init : {"offset", "uniform"}
        ``offset``: factors = LoRA's initial values + P theta, theta = 0. ``uniform``: factors = P theta with theta
        from U(-0.02, 0.02), as in the paper.
    """

    dimension: Annotated[int | None, Bounds(ge=1)]
    init: Literal["offset", "uniform"]
    assignment: ClassVar[str] = "random"


class UniLora(FedHSIP):
    """Train, send and average theta_d and the head (D / 6.4 numbers up and down)."""

    paper = "Uni-LoRA, Li et al., NeurIPS 2025, as FedHSIP compares with it"
    stays = "nothing"
    Params = UniLoraParams
    releases: ClassVar[Mapping[str, str]] = {"train": "dp-sgd"}
