"""FedHSIP: every client trains one short vector theta_d; a fixed signed projection expands it to all factors.

Two or more warm-up rounds of FedIT give each LoRA coordinate a profile over clients; coordinates that move alike
share a slot (eq. 12), and from then on only theta_d (d = D / 6.4 numbers) and the head travel. The rule - slot
and sign of each coordinate - is sent once and cached on the node. Under DP the warm-up is DP-SGD like any other
round, charged in the same budget; all statistics are post-processing of its noised updates.

``assignment=random`` is the ablation without warm-up (Uni-LoRA's balanced random projection). Beyond the paper, and off
by default: a warm-up on public rows, at no charge (``warmup_privacy=public``), or without noise in a private run, which
marks the run as not private and shows how much the noise costs the assignment (``none``); other sensitivities from
such warm-ups; slots that B and A do not share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privet.adapters import AdapterSpec, Shapes, count, initial_tensors, initial_values
from privet.config import LARGEST_RATE, Bounds, Config
from privet.errors import ConfigError, Refusal
from privet.projection import (
    Projection,
    assign_slots,
    default_dimension,
    flatten,
    profile_sketch,
    random_projection,
    unflatten,
)
from privet.seeding import child_generator, child_seed
from privet.trainables import THETA, Factors, Projected
from privet.wire import Arrays, Payload, check_arrays
from strategies.base import LoraStrategy, Session
from strategies.merging import Merger, WeightedMean
from strategies.rounds import NEEDS_ONCE

Floats = NDArray[np.float64]

_DELTA, _SUM, _SQUARE, _COUNT = "delta/", "warmup-sum/", "warmup-square/", "warmup-count/"
_MOMENT = ":moment"
_MOST_COLUMNS = 32  # of the profiles: with more clients they are mixed into as many


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
        Learning rate of the factors in the warm-up; None: ``train.lr``. While steps are small the statistics do not
        depend on its size, but the head, which stays, is trained beside the factors, which do not: small steps keep
        it fitting. With AdamW it is how far every coordinate goes in a step: a rate of SGD's size ruins the model,
        and the statistics with it.
    warmup_privacy : {"dp", "public", "none"}
        ``dp``: warm-up rounds are DP-SGD, charged. ``public``: they train on public rows without noise and without a
        charge: on a real node on its owner's ``public-path``, in a simulation on a share of the task's test rows for
        each node. ``none`` in a private run: they train on private rows without noise and without a charge, and the
        run is not private and says so. Of what the last two trained only the rule is used.
    sensitivity : {"update", "moment", "clipped_moment", "clip_rate"}
        s of eq. 12: from the updates, or, where the warm-up has no noise, a mean over examples of squared gradients
        (:mod:`privet.privacy.moments`; the last two need a clip, so a private run).
    balance : {"soft", "hard"}
        ``hard``: every slot holds floor or ceil of D / d coordinates; ``soft``: that is left to lambda.
    align_signs : bool
        Choose signs, so that coordinates which move against each other may share a slot; without, all are +1.
    separate_AB_slots : bool
        Give the coordinates of B and of A slots of their own, d in proportion. Where a coordinate of B[a, k] and one
        of A[k, b] share a slot, the square of one noise enters the product: a bias.
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
    warmup_lr: Annotated[float | None, Bounds(gt=0, lt=LARGEST_RATE)]
    warmup_privacy: Literal["dp", "public", "none"]
    sensitivity: Literal["update", "moment", "clipped_moment", "clip_rate"]
    balance: Literal["soft", "hard"]
    align_signs: bool
    separate_AB_slots: bool  # noqa: N815 - the matrices' names
    dimension: Annotated[int | None, Bounds(ge=1)]
    init: Literal["offset", "uniform", "warm"]
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.coefficients) != 5 or min(self.coefficients) < 0:
            raise ConfigError(
                f"method.coefficients = {list(self.coefficients)} is not allowed: five numbers of at least 0"
            )
        if self.assignment == "hsip":
            return
        if self.init == "warm":
            raise ConfigError("method.init = warm is not allowed: only method.assignment=hsip has a warm-up")
        for name, neutral in (
            ("sensitivity", "update"),
            ("balance", "soft"),
            ("align_signs", True),
            ("separate_AB_slots", False),
        ):
            if getattr(self, name) != neutral:
                raise ConfigError(
                    f"method.{name} = {getattr(self, name)} has no effect with method.assignment={self.assignment}: "
                    "use hsip"
                )


class FedHSIP(LoraStrategy):
    """Train, send and average theta_d and the head (D / 6.4 numbers up and down)."""

    paper = "FedHSIP, arXiv 2609.26091"
    stays = "the projection rule"
    Params: ClassVar[type] = FedHSIPParams
    releases: ClassVar[Mapping[str, str]] = {"warmup": "dp-sgd", "train": "dp-sgd"}

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        self.total = count(spec.lora)
        self.dimension: int = self.params.dimension or default_dimension(self.total)
        if self.dimension > self.total:
            raise ConfigError(
                f"method.dimension = {self.dimension} is not allowed: at most the {self.total} LoRA numbers"
            )
        self._packed: tuple[Tensor, Arrays] | None = None
        if self._learns_rule:
            self._check_warmup(config)

    def _check_warmup(self, config: Config) -> None:
        """Refuse warm-ups that make no sense under the run's privacy."""
        params, private = self.params, config.privacy.private
        if params.warmup_privacy == "dp" and not private:
            raise ConfigError("method.warmup_privacy = dp has no effect with privacy=none: none")
        noisy = params.warmup_privacy == "dp"
        if params.sensitivity != "update" and noisy:
            raise ConfigError(
                f"method.sensitivity = {params.sensitivity} is not allowed: squared gradients are a release of their "
                "own, so only where the warm-up has no noise (method.warmup_privacy=public or none)"
            )
        if params.sensitivity in ("clipped_moment", "clip_rate") and not private:
            raise ConfigError(
                f"method.sensitivity = {params.sensitivity} is not allowed with privacy=none: there is no clip"
            )
        if params.init == "warm" and self._only_rule:
            raise ConfigError(
                f"method.init = warm is not allowed with method.warmup_privacy={params.warmup_privacy}: only the rule "
                "may come from it"
            )
        if params.separate_AB_slots and self.dimension < 2:
            raise ConfigError("method.separate_AB_slots = true is not allowed with method.dimension = 1")

    @property
    def exchanged(self) -> Shapes:
        """theta_d."""
        return {THETA: (self.dimension,)}

    @property
    def _learns_rule(self) -> bool:
        return bool(self.params.assignment == "hsip")

    @property
    def raw_phases(self) -> Collection[str]:  # type: ignore[override]
        """The warm-up, where it has no noise although the run is private."""
        raw = self._learns_rule and self.config.privacy.private and self.params.warmup_privacy == "none"
        return ("warmup",) if raw else ()

    @property
    def public_phases(self) -> Collection[str]:  # type: ignore[override]
        """The warm-up, where it trains on public rows."""
        return ("warmup",) if self._learns_rule and self.params.warmup_privacy == "public" else ()

    @property
    def _only_rule(self) -> bool:
        """Does nothing but the rule come out of the warm-up?"""
        return bool(self.raw_phases or self.public_phases)

    def remarks(self) -> list[str]:
        """Say loudly that a raw warm-up makes the run one that is not private, and what public rows a warm-up sees."""
        if self.public_phases:
            return [
                "method.warmup_privacy=public: in a simulation the rule has seen the test rows that scores are on"
            ]
        if not self.raw_phases:
            return []
        return ["not private: method.warmup_privacy=none trains the warm-up on private rows without noise"]

    @property
    def _moments(self) -> Shapes:
        """What a warm-up reply carries besides: a squared gradient for every LoRA number, or nothing."""
        if not self._learns_rule or self.params.sensitivity == "update":
            return {}
        return {name + _MOMENT: shape for name, shape in self.spec.lora.items()}

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
            packed = self._packed_rule(state)
            material = {"rule_digest": _digest(packed), **(packed if once else {})}
        return Payload(adapter={THETA: state[THETA]}, head=self.head_of(state), once=material)

    def _packed_rule(self, state: Arrays) -> Arrays:
        """Return the rule as it travels; the same arrays for every node."""
        if self._packed is None or self._packed[0] is not state["slots"]:
            self._packed = state["slots"], _pack_rule(state, self.dimension)
        return self._packed[1]

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Factors in a warm-up, else the change of theta."""
        return (self.spec.lora if phase == "warmup" else self.exchanged), self.shared_head

    def download_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """As the uploads."""
        return self.upload_shapes(phase)

    def check_upload(self, phase: str, payload: Payload) -> None:
        """In a warm-up accept the squared gradients that were asked for."""
        check_arrays(payload.once, self._moments if phase == "warmup" else {}, "once")
        if any(v.dtype != torch.float32 or bool((v < 0).any()) for v in payload.once.values()):
            raise Refusal("malformed", "a squared gradient is negative or no float32")
        super().check_upload(phase, Payload(payload.adapter, payload.head))

    def merger(self, phase: str, state: Arrays) -> Merger:
        """A warm-up also keeps every client's update: u_i is a profile over clients."""
        return WarmupMerger(state, self.spec.lora) if phase == "warmup" else WeightedMean()

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Average the warm-up model and add to its sums, or move theta by the mean change."""
        if phase != "warmup":
            return {**state, **merged.head, THETA: state[THETA] + merged.adapter[THETA]}
        sums: Arrays = {}
        for name, value in merged.once.items():
            if name == _MOMENT:  # of all nodes together
                sums[name] = state.get(name, torch.zeros_like(value)) + value
                continue
            node = name.removeprefix(_DELTA)
            for prefix, term in ((_SUM, value), (_SQUARE, value.square()), (_COUNT, torch.ones(()))):
                sums[prefix + node] = state.get(prefix + node, torch.zeros_like(term)) + term
        return {**state, **merged.adapter, **merged.head, **sums}

    def finish_warmup(self, state: Arrays) -> Arrays:
        """Turn the sums into profiles and loads, solve eq. 12, and start theta.

        The warm-up's head stays, unless only the rule may come from the warm-up.
        """
        profiles, sensitivity, energy, heterogeneity = self.statistics(state)
        slots, signs = np.empty(self.total, np.int64), np.empty(self.total, np.float32)
        for where, first, dimension in self._blocks():
            found = assign_slots(
                profiles[where],
                sensitivity[where],
                energy[where],
                heterogeneity[where],
                dimension,
                coefficients=self.params.coefficients,
                balance=self.params.balance,
                align_signs=self.params.align_signs,
                seed=child_seed(self.config.seed, "hsip"),
            )
            slots[where], signs[where] = found[0] + first, found[1]
        rule = Projection(torch.from_numpy(slots), torch.from_numpy(signs), self.dimension)
        theta = self._initial_theta(state, rule)
        head = self.head_of(state)
        if self._only_rule:
            initial = initial_values(self.config)
            head = {name: initial[name] for name in head}
        return {THETA: theta, "slots": rule.slots.to(torch.int32), "signs": rule.signs, **head}

    def _blocks(self) -> Iterator[tuple[NDArray[np.int64], int, int]]:
        """Yield coordinates, first slot and number of slots of what is assigned by itself: all, or B and then A."""
        if not self.params.separate_AB_slots:
            yield np.arange(self.total), 0, self.dimension
            return
        of = {n: torch.full(s, float(n in self.spec.b)) for n, s in self.spec.lora.items()}
        in_b = flatten(of, self.spec.lora).numpy()
        of_b, of_a = np.flatnonzero(in_b == 1), np.flatnonzero(in_b == 0)
        share = round(self.dimension * len(of_b) / self.total)
        share = min(max(share, 1, self.dimension - len(of_a)), self.dimension - 1, len(of_b))
        yield of_b, 0, share
        yield of_a, share, self.dimension - share

    def statistics(self, state: Arrays) -> tuple[Floats, Floats, Floats, Floats]:
        """Return u (D x K), s, e and h (D) from the warm-up's sums (FedHSIP, eq. 9 to 11).

        u is the mean change over its root mean square, e the mean square over clients, h the variance over
        clients of the mean change. s is the mean square less the floor that DP-SGD's own noise puts there
        (lr^2 E sigma^2 C^2 / b^2 with SGD), at least zero: post-processing, no charge (design rule 12). Or it is a
        mean of squared gradients, where those were collected.

        Clients are gone through one at a time; of more than 32 the profiles' columns are mixed into 32 by a seeded
        random matrix, which keeps the inner products of rows up to about 1 / sqrt 32 of their norms.
        """
        nodes = sorted(n.removeprefix(_SUM) for n in state if n.startswith(_SUM))
        if not nodes:
            raise Refusal("warmup", "no warm-up round had a valid reply, so there is nothing to assign by")
        width = min(len(nodes), _MOST_COLUMNS)
        profiles = np.zeros((self.total, width))
        sensitivity, energy, mean, spread = (np.zeros(self.total) for _ in range(4))
        for seen, node in enumerate(nodes):
            # A node that missed a round is averaged over those it took part in.
            rounds = float(state[_COUNT + node])
            change = state[_SUM + node].double().numpy() / rounds
            square = state[_SQUARE + node].double().numpy() / rounds
            profile = change / np.sqrt(square + 1e-12)
            if width == len(nodes):
                profiles[:, seen] = profile
            else:
                for column, weight in enumerate(profile_sketch(self.config.seed, width, node)):
                    profiles[:, column] += weight * profile
            sensitivity += np.maximum(square - self._noise_floor(node), 0) / len(nodes)
            energy += square / len(nodes)
            step = change - mean  # Welford: the variance of changes that are nearly equal
            mean += step / (seen + 1)
            spread += step * (change - mean)
        if _MOMENT in state:
            sensitivity = state[_MOMENT].double().numpy()
        return profiles, sensitivity, energy, spread / len(nodes)

    def _noise_floor(self, node: str) -> float:
        """Mean square that DP noise alone gives one coordinate's change in a round; 0 where it is not known."""
        train, privacy = self.config.train, self.config.privacy
        if not privacy.private or self._only_rule or train.optimizer != "sgd" or train.momentum:
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

    def once_names(self, phase: str) -> Collection[str]:
        """The rule and its digest, for a training round."""
        return ("rule_digest", "slots", "signs") if phase == "train" and self._learns_rule else ()

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Train the factors in a warm-up, else theta through the cached rule."""
        head = self.client_head(received, session)
        if phase == "warmup":
            session.model.load({**received.adapter, **head})
            factors = Factors(session.model, [*self.spec.lora, *self.trained_head])
            session.train(factors, lr=self.params.warmup_lr)
            moments: Arrays = {}
            if self._moments:
                found = session.moments(factors, self.params.sensitivity)
                moments = {name + _MOMENT: found[name] for name in self.spec.lora}
            if not self._only_rule:
                self.keep_head(session)
            return Payload(session.model.read(self.spec.lora), session.model.read(self.shared_head), moments)
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
        if digest is None or not kept or not torch.equal(_digest(kept), digest):
            raise Refusal(NEEDS_ONCE, "the projection rule is not in this node's store")
        rule = _unpack_rule(kept, self.total, self.dimension)
        if material:
            session.keep("rule", material)
        return rule

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
        tensors = initial_tensors(self.spec, self.config.seed, self.config.head)
        return flatten(tensors, self.spec.lora)

    def _initial_theta(self, state: Arrays, rule: Projection) -> Tensor:
        if self.params.init == "uniform":
            generator = child_generator(self.config.seed, "init", THETA)
            return torch.empty(self.dimension).uniform_(-0.02, 0.02, generator=generator)
        if self.params.init == "warm":
            return rule.project(flatten(state, self.spec.lora))
        return torch.zeros(self.dimension)


class WarmupMerger(WeightedMean):
    """The weighted mean of the factors, each node's change of them as one vector (D,), and the mean of any moments."""

    def __init__(self, state: Arrays, shapes: Shapes) -> None:
        super().__init__()
        self._shapes = shapes
        self._before = flatten(state, shapes)
        self._deltas: Arrays = {}
        self._moments = WeightedMean()

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Take one reply."""
        super().add(node, payload, weight)
        self._deltas[_DELTA + node] = flatten(payload.adapter, self._shapes) - self._before
        if payload.once:
            names = {n + _MOMENT: s for n, s in self._shapes.items()}
            self._moments.add(node, Payload({_MOMENT: flatten(payload.once, names)}), weight)

    def mean(self) -> Payload:
        """Return the mean, with the changes as one-off material for the server itself."""
        merged = super().mean()
        once = {**self._deltas, **self._moments.mean().adapter}
        return Payload(adapter=merged.adapter, head=merged.head, once=once)


# --- the rule on the wire: one index a coordinate and one bit for its sign ----------------------


def _pack_rule(state: Arrays, dimension: int) -> Arrays:
    slots = state["slots"].numpy().astype(_kind(dimension))
    return {
        "slots": torch.from_numpy(slots),
        "signs": torch.from_numpy(np.packbits(state["signs"].numpy() < 0)),
    }


def _kind(dimension: int) -> np.dtype[Any]:
    """Return the type of a slot's index on the wire."""
    return np.dtype(np.uint16 if dimension <= 1 << 16 else np.uint32)


def _unpack_rule(material: Arrays, total: int, dimension: int) -> Projection:
    """Read a rule from the wire; raises Refusal where it is not one."""
    expected = {"slots": (_kind(dimension), (total,)), "signs": (np.dtype(np.uint8), ((total + 7) // 8,))}
    packed = {name: value.numpy() for name, value in material.items()}
    if {n: (v.dtype, v.shape) for n, v in packed.items()} != expected:
        raise Refusal(
            "rule", f"the projection rule is not a slot and a sign bit for each of {total} coordinates"
        )
    bits = np.unpackbits(packed["signs"], count=total)
    slots, signs = (
        torch.from_numpy(packed["slots"].astype(np.int64)),
        1.0 - 2.0 * torch.from_numpy(bits).float(),
    )
    try:
        return Projection(slots, signs, dimension)
    except ValueError as err:
        raise Refusal("rule", f"the projection rule is not valid: {err}") from None


def _digest(material: Arrays) -> Tensor:
    """SHA-256 of a packed rule, as 32 numbers."""
    digest = hashlib.sha256()
    for name in sorted(material):
        digest.update(name.encode() + material[name].numpy().tobytes())
    return torch.from_numpy(np.frombuffer(digest.digest(), dtype=np.uint8).copy())
