"""FedASK: exact aggregation of low-rank products in two message phases (arXiv abstract and released code).

A round asks the same nodes twice. ``sketch``: a node trains and sends ``Y_k = B_k (A_k Omega)`` for a random
Omega that both sides draw from the run's seed; the server takes an orthonormal basis Q of the mean. ``project``:
the node sends ``Z_k = A_k^T (B_k^T Q)``, and the server splits ``Q (mean Z)^T``, the mean of the products
``B_k A_k`` as far as Q covers it, into new factors by an SVD cut to the rank.

Under DP only B trains, so the mean product has at most the rank r: it is aggregated exactly, with any
oversampling. Without DP both factors train, and what lies beyond rank r is cut off; a sketch of r + p columns is
then narrower than the mean of several products, unless ``sketch=exact`` makes it wide enough for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from privet.adapters import AdapterSpec, Shapes, TargetModule
from privet.config import Bounds, Config
from privet.errors import ConfigError, Refusal
from privet.lowrank import (
    basis,
    checksum,
    narrow_basis,
    omega,
    project,
    sketch,
    split,
    split_product,
    tail,
    vanished,
)
from privet.trainables import Factors
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy, Session
from strategies.merging import KeptMean, Merger, WeightedMean
from strategies.rounds import check_payload

_CHECKSUM = "omega"


@dataclass(frozen=True)
class FedASKParams:
    """Settings of FedASK.

    Attributes
    ----------
    clip : {"B", "W"}
        What the clip bounds under DP: the gradient of the factors that train (the released code), or of the
        full weight, dl/dW, with noise ``N(0, sigma^2 C^2)`` on dl/dW too (the paper). Same epsilon.
    transport : {"sketch", "factor"}
        ``factor``, under DP only: nodes send B_k itself in one phase, which with a common A comes to the same.
    sketch : {"fixed", "exact"}
        ``exact``, without DP only: a sketch is wide enough for the products of all nodes of a round, K' r + p
        columns, and the basis is cut to the rank that the replies turn out to have. The aggregate is then the best
        approximation of rank r of the mean product. ``fixed``: r + p columns.
    sketch_oversampling : int
        p.
    omega : {"fresh", "fixed"}
        A new Omega every round, or one for the whole run.
    sigma_split : float
        Power of the singular values that goes to B: 0.5 is the paper's balanced split, 1 is FedSVD's.
    stage2_dropout : {"requery", "accept", "void"}
        When a node sends Y_k and then no Z_k, Q spans what it no longer should: make Q again from the rest and ask
        them once more, go on and note the loss, or void the round.
    """

    clip: Literal["B", "W"]
    transport: Literal["sketch", "factor"]
    sketch: Literal["fixed", "exact"]
    sketch_oversampling: Annotated[int, Bounds(ge=0)]
    omega: Literal["fresh", "fixed"]
    sigma_split: Annotated[float, Bounds(ge=0)]
    stage2_dropout: Literal["requery", "accept", "void"]

    def __post_init__(self) -> None:
        if self.sigma_split > 1:
            raise ConfigError(f"method.sigma_split = {self.sigma_split} is not allowed: 0 to 1")


class FedASK(LoraStrategy):
    """Train (under DP: B), sketch, project, split; or under DP send B and split the product."""

    paper = "FedASK (PrivacyFedLLM)"
    stays = "its factors, between the two phases"
    Params = FedASKParams
    releases: ClassVar[Mapping[str, str]] = {
        "sketch": "dp-sgd",
        "project": "post-processing",
        "train": "dp-sgd",
    }

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        self.private = config.privacy.private
        for name, neutral in (("transport", "sketch"), ("clip", "B")):
            value = getattr(self.params, name)
            if value != neutral and not self.private:
                raise ConfigError(f"method.{name} = {value} is not allowed with privacy=none: {neutral}")
        if self.params.sketch == "exact" and self.private:
            raise ConfigError(
                "method.sketch = exact is not allowed with privacy=dp: a common A makes every width exact"
            )
        sketches = self.params.transport == "sketch"
        self.phases = ("sketch", "project") if sketches else ("train",)
        self.dropout = self.params.stage2_dropout
        self._ranks: dict[str, int] = {}  # columns of each basis of this round
        self._drawn: tuple[int, dict[str, Tensor]] = (-1, {})  # the last Omegas and their round

    @property
    def exchanged(self) -> Shapes:
        """Both factors: the download of a round."""
        return self.spec.lora

    @property
    def trained(self) -> Shapes:
        """B under DP, else both factors."""
        return self.spec.b if self.private else self.spec.lora

    # --- server half -----------------------------------------------------------------------------

    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Send the factors, and in the second phase the basis."""
        if phase == "project":
            return Payload(adapter={_q(t): state[_q(t)] for t in self.spec.targets})
        sent = super().download(phase, state, once)
        if phase == "train":
            return sent
        return Payload(
            sent.adapter, sent.head, {_CHECKSUM: checksum(self._omegas(self.round_number).values())}
        )

    def download_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Factors and head, or the basis."""
        if phase == "project":
            return {_q(t): (t.out, self._width(t)) for t in self.spec.targets}, {}
        return self.spec.lora, self.shared_head

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """A sketch and the head, or a projection; with ``transport=factor`` B and the head."""
        targets = self.spec.targets
        if phase == "project":
            return {_z(t): (t.inp, self._width(t)) for t in targets}, {}
        if phase == "train":
            return self.spec.b, self.shared_head
        return {_y(t): (t.out, self._width(t)) for t in targets}, self.shared_head

    def check_upload(self, phase: str, payload: Payload) -> None:
        """Accept a projection on the basis that was sent, however narrow."""
        adapter, head = self.upload_shapes(phase)
        if phase == "project":
            adapter = {_z(t): (t.inp, self._ranks[t.name]) for t in self.spec.targets}
        check_payload(payload, adapter, head)

    def merger(self, phase: str, state: Arrays) -> Merger:
        """Sketches are kept until the round is closed, for a basis without a node that drops out."""
        return KeptMean() if phase == "sketch" else WeightedMean()

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Make the basis of the mean sketch, or new factors of the mean product."""
        state = {**state, **merged.head}
        if phase == "sketch":
            find = narrow_basis if self.params.sketch == "exact" else basis
            bases = {_q(t): find(merged.adapter[_y(t)]).float() for t in self.spec.targets}
            self._ranks = {t.name: bases[_q(t)].shape[1] for t in self.spec.targets}
            self.figure(basis_columns=max(self._ranks.values()))
            return {**state, **bases}
        share, losses = self.params.sigma_split, {}
        for t in self.spec.targets:
            if phase == "train":
                b, a, values = split_product(merged.adapter[t.b], state[t.a], share)
            else:
                b, a, values = split(state.pop(_q(t)), merged.adapter[_z(t)], self.spec.rank, share)
            if vanished(values, float(state[t.a].norm())):
                # Zero factors would stay zero for good: with A = 0, B has no gradient.
                self.run.recorder.event(
                    "note", text=f"round {self.round_number}: {t.name} keeps its factors, their product is 0"
                )
                continue
            losses[t.name] = values
            state |= {t.b: b.float(), t.a: a.float()}
        lost = tail(losses, self.spec.rank)
        self.figure(truncation=lost)
        if lost > 1e-6:
            text = f"round {self.round_number}: rank {self.spec.rank} cuts off {100 * lost:.2g} % of the mean product"
            self.run.recorder.event("note", text=text)
        return state

    def accepted_loss(self, phase: str, state: Arrays, earlier: KeptMean, left: Sequence[str]) -> str:
        """Estimate what the old basis misses of the mean product of the nodes that are left.

        ``E ||X Omega||^2 = s ||X||^2`` for the part X beyond Q.
        """
        missed = total = 0.0
        mean = earlier.only(left).mean().adapter
        for t in self.spec.targets:
            y, q = mean[_y(t)].double(), state[_q(t)].double()
            missed += float((y - q @ (q.T @ y)).square().sum()) / y.shape[1]
            total += float(y.square().sum()) / y.shape[1]
        share = (missed / total) ** 0.5 if total else 0.0
        return f"accepted without {phase} of a node: the basis misses about {100 * share:.2g} % of the mean product"

    # --- client half -----------------------------------------------------------------------------

    def once_names(self, phase: str) -> Collection[str]:
        """The checksum of Omega, for a sketch."""
        return (_CHECKSUM,) if phase == "sketch" else ()

    def check_download(self, phase: str, payload: Payload) -> None:
        """With ``sketch=exact`` accept any basis up to the sketch's own width."""
        if phase != "project" or self.params.sketch == "fixed":
            return super().check_download(phase, payload)
        adapter = dict(self.download_shapes(phase)[0])
        for name, (rows, width) in adapter.items():
            sent = payload.adapter.get(name)
            if sent is not None and sent.dim() == 2:
                adapter[name] = (rows, min(max(1, sent.shape[1]), width))
        check_payload(payload, adapter, {})

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Train and send a sketch (or B); in the second phase project what was kept."""
        if phase == "project":
            return self._project(received, session)
        if phase == "sketch":
            self._check_omega(received, session.round)
        model = session.model
        model.load({**received.adapter, **self.client_head(received, session)})
        session.train(self._trainables(session))
        self.keep_head(session)
        head = model.read(self.shared_head)
        factors = model.read(self.spec.lora)
        if phase == "train":
            return Payload({t.b: factors[t.b] for t in self.spec.targets}, head)
        session.keep("factors", factors)
        tests = self._omegas(session.round)
        sketches = {_y(t): sketch(factors[t.b], factors[t.a], tests[t.name]) for t in self.spec.targets}
        return Payload({name: y.float() for name, y in sketches.items()}, head)

    def _project(self, received: Payload, session: Session) -> Payload:
        factors = session.recall("factors", this_round=True)
        if factors is None:
            raise Refusal("factors-lost", "this node has no factors of this round to project")
        found = {
            _z(t): project(factors[t.b], factors[t.a], received.adapter[_q(t)]) for t in self.spec.targets
        }
        return Payload({name: z.float() for name, z in found.items()})

    def _trainables(self, session: Session) -> Factors:
        names = [*self.trained, *self.trained_head]
        return Factors(session.model, names, clip_products=self.params.clip == "W")

    # --- pieces for both -------------------------------------------------------------------------

    def _width(self, target: TargetModule) -> int:
        """s: columns of a sketch of this module."""
        products = self.config.federation.sample_size if self.params.sketch == "exact" else 1
        columns = products * self.spec.rank + int(self.params.sketch_oversampling)
        return min(columns, target.out, target.inp)

    def _omegas(self, round_number: int) -> dict[str, Tensor]:
        number = round_number if self.params.omega == "fresh" else 0
        if self._drawn[0] != number:
            seed, targets = self.config.seed, self.spec.targets
            self._drawn = (
                number,
                {t.name: omega(seed, number, t.name, t.inp, self._width(t)) for t in targets},
            )
        return self._drawn[1]

    def _check_omega(self, received: Payload, round_number: int) -> None:
        """Refuse, before anything is charged, to sketch with another Omega than the server's."""
        sent = received.once.get(_CHECKSUM)
        if sent is None or not torch.equal(sent, checksum(self._omegas(round_number).values())):
            raise Refusal("omega", "this node draws another Omega than the server: other NumPy versions?")


def _y(target: TargetModule) -> str:
    return f"{target.name}.sketch"


def _q(target: TargetModule) -> str:
    return f"{target.name}.basis"


def _z(target: TargetModule) -> str:
    return f"{target.name}.projection"
