"""FedSVD: B alone is trained, and the server turns A between rounds by an SVD (Lee et al., NeurIPS 2025).

After the mean ``B = sum_k p_k B_k`` the server takes ``U S V^T = SVD(B A)`` and goes on with ``B = U S`` and
``A = V^T``: the product is the same, A follows what was learnt, and its rows are orthonormal, so that they never
amplify a gradient or DP noise. QR of both factors and an SVD of r x r numbers do it; nothing m x n is formed. As A is
common to all nodes of a round, averaging B averages the products exactly, as in FFA-LoRA, which is ``period=0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from privet.adapters import AdapterSpec, Shapes
from privet.config import Bounds, Config
from privet.errors import ConfigError
from privet.lowrank import split_product
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy


@dataclass(frozen=True)
class FedSVDParams:
    """Settings of FedSVD.

    Attributes
    ----------
    period : int
        Rounds between two refactorisations; 0: never, which is FFA-LoRA, and A then does not travel.
    warmup : int
        First rounds that keep the initial A.
    """

    period: Annotated[int, Bounds(ge=0)]
    warmup: Annotated[int, Bounds(ge=0)]


class FedSVD(LoraStrategy):
    """Train and send B, average it, refactorise the product (D numbers down, half of them up)."""

    paper = "FedSVD, Lee et al., NeurIPS 2025"
    Params = FedSVDParams

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        period, warmup, rounds = self.params.period, self.params.warmup, config.federation.rounds
        if warmup and not period:
            raise ConfigError(
                f"method.warmup = {warmup} has no effect with method.period = 0: nothing is refactorised"
            )
        if period and warmup + period > rounds:
            raise ConfigError(
                f"method.warmup = {warmup} and method.period = {period} are not allowed with {rounds} rounds: "
                "nothing would be refactorised (method.period=0 says so)"
            )

    @property
    def exchanged(self) -> Shapes:
        """Both factors: the download of a round; B alone where A is never turned."""
        return self.spec.lora if self.params.period else self.spec.b

    @property
    def trained(self) -> Shapes:
        """B."""
        return self.spec.b

    # --- server half -----------------------------------------------------------------------------

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """B and the head."""
        return self.spec.b, self.shared_head

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Take the mean B, and in every `period`-th round the factors of the SVD of the product."""
        state = super().update(phase, state, merged)
        if not self._turns(self.round_number):
            return state
        for t in self.spec.targets:
            b, a, _ = split_product(state[t.b], state[t.a], share=1.0)
            state |= {t.b: b.float(), t.a: a.float()}
        return state

    def _turns(self, round_number: int) -> bool:
        """Whether a round ends with a refactorisation."""
        period, past = self.params.period, round_number - self.params.warmup
        return bool(period and past > 0 and past % period == 0)
