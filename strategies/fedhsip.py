"""FedHSIP: every client trains one short vector theta_d; a fixed signed projection expands it to all factors.

Two or more warm-up rounds of FedIT give each LoRA coordinate a profile over clients; coordinates that move alike
share a slot (eq. 12), and from then on only theta_d (d = D / 6.4 numbers) and the head travel. The rule - slot
and sign of each coordinate - is sent once and cached on the node. Under DP the warm-up is DP-SGD like any other
round, charged in the same budget; all statistics are post-processing of its noised updates.

``assignment=random`` is the ablation without warm-up (Uni-LoRA's balanced random projection).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from privet.adapters import AdapterSpec, Shapes, count, initial_tensors
from privet.config import Bounds, Config
from privet.errors import ConfigError, Refusal
from privet.projection import (
    Projection,
    assign_slots,
    default_dimension,
    flatten,
    random_projection,
    unflatten,
)
from privet.seeding import child_generator, child_seed
from privet.trainables import THETA, Factors, Projected
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy, Session
from strategies.merging import Merger, WeightedMean
from strategies.rounds import NEEDS_ONCE

_DELTA, _SUM, _SQUARE, _COUNT = "delta/", "warmup-sum/", "warmup-square/", "warmup-count/"


@dataclass(frozen=True)
class FedHSIPParams:
    """Settings of FedHSIP.

    Attributes
    ----------
    assignment : {"hsip", "random"}
        From warm-up statistics, or balanced at random without warm-up.
    warmup_rounds : int
        Rounds of FedIT with every node before the assignment; used with ``hsip`` only.
    warmup_lr : float or None
        Learning rate of the factors in the warm-up; None: ``train.lr``. The statistics do not depend on its size,
        but the head, which stays, is trained beside the factors, which do not: small steps keep it fitting.
    dimension : int or None
        d; None: D / 6.4.
    init : {"offset", "uniform", "warm"}
        ``offset``: factors = PEFT's initial values + P theta, theta = 0 (the base model's function at the start).
        ``uniform``: factors = P theta with theta from U(-0.02, 0.02), the paper's linear form. ``warm``:
        factors = P theta with theta = P^T of the warm-up model. theta = 0 without offset is an exact stationary
        point, so it does not exist as a choice.
    coefficients : tuple of float
        alpha (conflict), beta (sensitivity), gamma (energy), eta (heterogeneity), lambda (count) of eq. 12.
    """

    assignment: Literal["hsip", "random"]
    warmup_rounds: Annotated[int, Bounds(ge=1)]
    warmup_lr: Annotated[float | None, Bounds(gt=0)]
    dimension: Annotated[int | None, Bounds(ge=1)]
    init: Literal["offset", "uniform", "warm"]
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.coefficients) != 5 or min(self.coefficients) < 0:
            raise ConfigError(
                f"method.coefficients = {list(self.coefficients)} is not allowed: five numbers of at least 0"
            )
        if self.init == "warm" and self.assignment != "hsip":
            raise ConfigError("method.init = warm is not allowed: only method.assignment=hsip has a warm-up")


class FedHSIP(LoraStrategy):
    """Train, send and average theta_d and the head (D / 6.4 numbers up and down)."""

    paper = "FedHSIP, arXiv 2609.26091"
    stays = "the projection rule"
    Params = FedHSIPParams
    releases: ClassVar[Mapping[str, str]] = {"warmup": "dp-sgd", "train": "dp-sgd"}

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        self.total = count(spec.lora)
        self.dimension: int = self.params.dimension or default_dimension(self.total)
        if self.dimension > self.total:
            raise ConfigError(
                f"method.dimension = {self.dimension} is not allowed: at most the {self.total} LoRA numbers"
            )

    @property
    def exchanged(self) -> Shapes:
        """theta_d."""
        return {THETA: (self.dimension,)}

    @property
    def _learns_rule(self) -> bool:
        return bool(self.params.assignment == "hsip")

    @property
    def warmup_rounds(self) -> int:
        """Rounds of FedIT before the assignment."""
        return int(self.params.warmup_rounds) if self._learns_rule else 0

    # --- server half -----------------------------------------------------------------------------

    def initial(self, tensors: Arrays) -> Arrays:
        """Start the warm-up from PEFT's initial factors, or training at once with the random rule."""
        head = {n: tensors[n] for n in self.shared_head}
        if self._learns_rule:
            return {**{n: tensors[n] for n in self.spec.lora}, **head}
        return {THETA: self._initial_theta({}, self._random_rule()), **head}

    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Send the factors in a warm-up; after it theta, the rule's digest, and the rule where it is needed."""
        if phase == "warmup":
            return Payload(adapter={n: state[n] for n in self.spec.lora}, head=self.head_of(state))
        material: Arrays = {}
        if self._learns_rule:
            packed = _pack_rule(state, self.dimension)
            material = {"rule_digest": _digest(packed), **(packed if once else {})}
        return Payload(adapter={THETA: state[THETA]}, head=self.head_of(state), once=material)

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Factors in a warm-up, else the change of theta."""
        return (self.spec.lora if phase == "warmup" else self.exchanged), self.shared_head

    def download_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """As the uploads."""
        return self.upload_shapes(phase)

    def merger(self, phase: str, state: Arrays) -> Merger:
        """A warm-up also keeps every client's update: u_i is a profile over clients."""
        return WarmupMerger(state, self.spec.lora) if phase == "warmup" else WeightedMean()

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Average the warm-up model and add to its sums, or move theta by the mean change."""
        if phase != "warmup":
            return {**state, **merged.head, THETA: state[THETA] + merged.adapter[THETA]}
        sums: Arrays = {}
        for name, delta in merged.once.items():
            node = name.removeprefix(_DELTA)
            for prefix, value in ((_SUM, delta), (_SQUARE, delta.square()), (_COUNT, torch.ones(()))):
                sums[prefix + node] = state.get(prefix + node, torch.zeros_like(value)) + value
        return {**state, **merged.adapter, **merged.head, **sums}

    def finish_warmup(self, state: Arrays) -> Arrays:
        """Turn the sums into profiles and loads, solve eq. 12, and start theta; the warm-up's head stays."""
        profiles, sensitivity, energy, heterogeneity = self.statistics(state)
        slots, signs = assign_slots(
            profiles,
            sensitivity,
            energy,
            heterogeneity,
            self.dimension,
            coefficients=self.params.coefficients,
            seed=child_seed(self.config.seed, "hsip"),
        )
        rule = Projection(torch.from_numpy(slots), torch.from_numpy(signs).float(), self.dimension)
        theta = self._initial_theta(state, rule)
        return {
            THETA: theta,
            "slots": rule.slots.to(torch.int32),
            "signs": rule.signs,
            **self.head_of(state),
        }

    def statistics(self, state: Arrays) -> tuple[np.ndarray[Any, Any], ...]:
        """Return u (D x K), s, e and h (D) from the warm-up's sums (FedHSIP, eq. 9 to 11).

        u is the mean change over its root mean square, e the mean square over clients, h the variance over
        clients of the mean change. s is the mean square less the floor that DP-SGD's own noise puts there
        (lr^2 E sigma^2 C^2 / b^2 with SGD), at least zero: post-processing, no charge (design rule 12).
        """
        nodes = sorted(n.removeprefix(_SUM) for n in state if n.startswith(_SUM))
        if not nodes:
            raise Refusal("warmup", "no warm-up round had a valid reply, so there is nothing to assign by")
        # A node that missed a round is averaged over those it took part in.
        means = torch.stack([state[_SUM + n].double() / state[_COUNT + n] for n in nodes], 1)
        squares = torch.stack([state[_SQUARE + n].double() / state[_COUNT + n] for n in nodes], 1)
        profiles = means / (squares + 1e-12).sqrt()
        floors = torch.tensor([self._noise_floor(n) for n in nodes], dtype=torch.float64)
        sensitivity = (squares - floors).clamp_min(0).mean(1)
        heterogeneity = means.var(1, unbiased=False)
        return tuple(v.numpy() for v in (profiles, sensitivity, squares.mean(1), heterogeneity))

    def _noise_floor(self, node: str) -> float:
        """Mean square that DP noise alone gives one coordinate's change in a round; 0 where it is not known."""
        train, privacy = self.config.train, self.config.privacy
        if not privacy.private or train.optimizer != "sgd" or train.momentum:
            return 0.0
        plan = self.run.nodes[node]
        step = (self.params.warmup_lr or train.lr) * plan.sigma * (privacy.clip or 0.0) / train.batch_size
        return plan.steps_per_round * step**2

    def once_cost(self) -> tuple[int, int]:
        """The rule: an index and a sign bit a coordinate."""
        if not self._learns_rule:
            return 0, 0
        bits = (self.total + 7) // 8
        return self.total + bits, self.total * (2 if self.dimension <= 1 << 16 else 4) + bits

    def model_values(self, state: Arrays) -> Arrays:
        """Return offset + P theta and the head; in the warm-up, its factors."""
        if THETA not in state:
            return super().model_values(state)
        factors = self._offset_vector() + self._state_rule(state).expand(state[THETA])
        return {**unflatten(factors, self.spec.lora), **self.head_of(state)}

    # --- client half -----------------------------------------------------------------------------

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Train the factors in a warm-up, else theta through the cached rule."""
        head = self.client_head(received, session)
        if phase == "warmup":
            session.model.load({**received.adapter, **head})
            factors = Factors(session.model, [*self.spec.lora, *self.trained_head])
            session.train(factors, lr=self.params.warmup_lr)
            adapter = session.model.read(self.spec.lora)
        else:
            rule = self._client_rule(received, session)
            session.model.load(head)
            start = received.adapter[THETA]
            offset = unflatten(self._offset_vector(), self.spec.lora)
            trained = Projected(session.model, rule, start, offset, list(self.trained_head))
            session.train(trained)
            adapter = {THETA: trained.theta.detach().cpu() - start}
        self.keep_head(session)
        return Payload(adapter=adapter, head=session.model.read(self.shared_head))

    def _client_rule(self, received: Payload, session: Session) -> Projection:
        """Return the rule: from the seed, from this message, or from the cache if its digest is the server's."""
        if not self._learns_rule:
            return self._random_rule()
        material = dict(received.once)
        digest = material.pop("rule_digest", None)
        kept = material or session.recall("rule") or {}
        if set(material) - {"slots", "signs"}:
            raise Refusal("rule", "the projection rule comes with arrays that do not belong to it")
        if digest is None or not kept or not torch.equal(_digest(kept), digest):
            raise Refusal(NEEDS_ONCE, "the projection rule is not in this node's store")
        if material:
            session.keep("rule", material)
        return _unpack_rule(kept, self.total, self.dimension)

    # --- pieces for both -------------------------------------------------------------------------

    def _random_rule(self) -> Projection:
        return random_projection(self.total, self.dimension, child_seed(self.config.seed, "projection"))

    def _state_rule(self, state: Arrays) -> Projection:
        if not self._learns_rule:
            return self._random_rule()
        return Projection(state["slots"].long(), state["signs"], self.dimension)

    def _offset_vector(self) -> Tensor:
        """theta_D at theta_d = 0: the initial factors with ``init=offset``, else zero."""
        if self.params.init != "offset":
            return torch.zeros(self.total)
        tensors = initial_tensors(self.spec, self.config.seed, self.config.task.head)
        return flatten(tensors, self.spec.lora)

    def _initial_theta(self, state: Arrays, rule: Projection) -> Tensor:
        if self.params.init == "uniform":
            generator = child_generator(self.config.seed, "init", THETA)
            return torch.empty(self.dimension).uniform_(-0.02, 0.02, generator=generator)
        if self.params.init == "warm":
            return rule.project(flatten(state, self.spec.lora))
        return torch.zeros(self.dimension)


class WarmupMerger(WeightedMean):
    """The weighted mean of the factors, and each node's change of them as one vector (D,)."""

    def __init__(self, state: Arrays, shapes: Shapes) -> None:
        super().__init__()
        self._shapes = shapes
        self._before = flatten(state, shapes)
        self._deltas: Arrays = {}

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Take one reply."""
        super().add(node, payload, weight)
        self._deltas[_DELTA + node] = flatten(payload.adapter, self._shapes) - self._before

    def mean(self) -> Payload:
        """Return the mean, with the changes as one-off material for the server itself."""
        merged = super().mean()
        return Payload(adapter=merged.adapter, head=merged.head, once=self._deltas)


# --- the rule on the wire: one index a coordinate and one bit for its sign ----------------------


def _pack_rule(state: Arrays, dimension: int) -> Arrays:
    kind = np.uint16 if dimension <= 1 << 16 else np.uint32
    slots = state["slots"].numpy().astype(kind)
    return {
        "slots": torch.from_numpy(slots),
        "signs": torch.from_numpy(np.packbits(state["signs"].numpy() < 0)),
    }


def _unpack_rule(material: Arrays, total: int, dimension: int) -> Projection:
    """Read a rule from the wire; raises Refusal where it is not one."""
    try:
        slots = torch.from_numpy(material["slots"].numpy().astype(np.int64))
        bits = np.unpackbits(material["signs"].numpy(), count=total)
        rule = Projection(slots, 1.0 - 2.0 * torch.from_numpy(bits).float(), dimension)
    except (KeyError, ValueError, TypeError) as err:
        raise Refusal("rule", f"the projection rule is not valid: {err}") from None
    if rule.slots.numel() != total:
        raise Refusal("rule", f"the projection rule has {rule.slots.numel()} coordinates, expected {total}")
    return rule


def _digest(material: Arrays) -> Tensor:
    """SHA-256 of a packed rule, as 32 numbers."""
    digest = hashlib.sha256()
    for name in sorted(material):
        digest.update(name.encode() + material[name].numpy().tobytes())
    return torch.from_numpy(np.frombuffer(digest.digest(), dtype=np.uint8).copy())
