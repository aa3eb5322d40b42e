"""The interface of a method: both halves in one class, a Flower ``Strategy``.

A method states what a node is sent, what it trains and returns, and how replies are merged; the defaults below
are those of federated averaging. Each side makes its own instance from the same configuration, so that no
setting is written twice. The loop that drives the server half is in :mod:`strategies.rounds`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from privet.adapters import AdaptedModel, AdapterSpec, Shapes, count
from privet.config import Config, parse
from privet.corrections import Correction
from privet.errors import ConfigError, Refusal
from privet.trainables import Factors, Trainables
from privet.wire import Arrays, Payload, check_arrays
from strategies.merging import Merger, WeightedMean
from strategies.rounds import RoundStrategy, check_payload


@dataclass(frozen=True)
class NoParams:
    """For methods without settings of their own."""


class Memory(Protocol):
    """What a node has kept for a method."""

    def recall(self, name: str, *, this_round: bool = False) -> Arrays | None:
        """Return arrays that this node kept earlier in this run, or None.

        With `this_round`, only what an earlier phase of this very round kept.
        """
        ...


class Session(Memory, Protocol):
    """What a node offers a method's client half during one phase."""

    @property
    def model(self) -> AdaptedModel:
        """The node's model, at its initial values."""
        ...

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        ...

    @property
    def acknowledged(self) -> int:
        """Last round whose reply of this node is in the server's state; 0 for none."""
        ...

    def train(
        self, trainables: Trainables, *, lr: float | None = None, correction: Correction | None = None
    ) -> None:
        """Take the local steps of this phase, privately if the run is private; at most once a phase.

        `lr` replaces ``train.lr`` for everything but the head; `correction` acts in every step, after the noise.
        """
        ...

    def moments(self, trainables: Trainables, kind: str) -> Arrays:
        """Return means of squared per-example gradients over as many rows as a phase trains on; not private.

        Refused in every phase with privacy. `kind`: see :mod:`privet.privacy.moments`.
        """
        ...

    def chance(self, purpose: str) -> float:
        """Return a number from U(0, 1), the same for a repeated request.

        In a simulation it follows from the run's seed; on a real node from a secret of the node, so that the
        server cannot foresee it. It never depends on data.
        """
        ...

    def keep(self, name: str, arrays: Arrays) -> None:
        """Keep arrays in the node's store, durable once this phase's reply is stored."""
        ...

    def flag(self, text: str) -> None:
        """Put a public remark on the reply, for example that a kept state was lost."""
        ...


class LoraStrategy(RoundStrategy):
    """A federated LoRA method.

    Parameters
    ----------
    config : Config
        The run's configuration.
    spec : AdapterSpec
        Names and shapes of the adapter and the head.

    Attributes
    ----------
    paper : str
        Where the method is from: authors, year, place.
    stays : str
        What of the training stays on a node from round to round.
    Params : type
        Frozen dataclass of the method's own settings (``conf/method/<name>.yaml`` without name and tuned).
    phases : tuple of str
        Message exchanges of one round, in order; those after the first go to the nodes that answered before.
    warmup_phases : tuple of str
        Message exchanges of one warm-up round.
    releases : mapping of str to str
        For each phase, what leaves a node under DP: ``"dp-sgd"`` (its arrays are post-processing of DP-SGD
        steps that the phase charges) or ``"post-processing"`` (of an earlier phase of the round; no charge).
    raw_phases : collection of str
        Phases that, in a private run, train on private rows without noise and without a charge. The run is then not
        private, which its results say, and a real node refuses it unless its owner allows that.
    public_phases : collection of str
        Phases that train on rows which are public, so without noise and without a charge.
    dropout : {"accept", "requery", "void"}
        What happens when a node answers a phase and not the next one: go on with the rest, repeat the phase with
        what the rest had sent before (their merger is then a :class:`KeptMean`), or void the round.
    """

    paper: ClassVar[str] = ""
    stays: ClassVar[str] = "nothing"
    # Whether replies hold parameters of the client's model, and clients have alike whatever is in no reply.
    uploads_are_parameters: ClassVar[bool] = False
    Params: ClassVar[type] = NoParams
    releases: ClassVar[Mapping[str, str]] = {"train": "dp-sgd"}

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config)
        self.spec = spec
        self.params: Any = parse(self.Params, config.method.params, "method")
        head = config.head
        self.trained_head: Shapes = dict(spec.head) if head != "frozen" else {}
        self.shared_head: Shapes = dict(spec.head) if head == "shared" else {}

    # --- what a method states: server half -------------------------------------------------------

    @property
    @abstractmethod
    def exchanged(self) -> Shapes:
        """Adapter arrays that travel in a ``train`` phase, by name and shape."""

    @property
    def warmup_rounds(self) -> int:
        """Rounds with every node before the first training round."""
        return 0

    def initial(self, tensors: Arrays) -> Arrays:
        """Return the server's first state from the seed's initial tensors."""
        return {n: tensors[n] for n in (*self.exchanged, *self.shared_head)}

    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Return what a node is sent; one-off material goes along at its first training phase."""
        return Payload(adapter={n: state[n] for n in self.exchanged}, head=self.head_of(state))

    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Return the adapter and head arrays that a valid reply carries."""
        return self.exchanged, self.shared_head

    def check_upload(self, phase: str, payload: Payload) -> None:
        """Raise Refusal unless a reply carries what it should."""
        check_payload(payload, *self.upload_shapes(phase))

    def merger(self, phase: str, state: Arrays) -> Merger:
        """Return a fresh merger for the replies of a phase."""
        return WeightedMean()

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Return the next state; `state` itself stays as it is."""
        return {**state, **merged.adapter, **merged.head}

    def finish_warmup(self, state: Arrays) -> Arrays:
        """Return the state with which training starts, after the last warm-up round."""
        return state

    def model_values(self, state: Arrays) -> Arrays:
        """Return the factors, head and changes of frozen weights that a state stands for; others are as they began."""
        known = (*self.spec.lora, *self.spec.head, *self.spec.deltas)
        return {n: state[n] for n in known if n in state}

    def once_cost(self) -> tuple[int, int]:
        """Numbers and bytes of one-off material that one node is sent in the whole run."""
        return 0, 0

    def remarks(self) -> list[str]:
        """Return what a person should read before a run with these settings, a line each."""
        return []

    # --- what a method states: client half -------------------------------------------------------

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Run one phase on a node and return what leaves it."""
        session.model.load({**received.adapter, **self.client_head(received, session)})
        factors = Factors(session.model, [*self.trained, *self.trained_head])
        session.train(factors, correction=self.correction(factors))
        self.keep_head(session)
        adapter, head = self.upload_shapes(phase)
        return Payload(session.model.read(adapter), session.model.read(head))

    def correction(self, factors: Factors) -> Correction | None:
        """Return what changes every local step besides its gradient, made before the first one."""
        return None

    def download_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Return the adapter and head arrays that a valid request carries."""
        return self.exchanged, self.shared_head

    def once_names(self, phase: str) -> Collection[str]:
        """Return the one-off arrays that a request may carry."""
        return ()

    def check_download(self, phase: str, payload: Payload) -> None:
        """Raise Refusal unless a request carries what it should; one-off material is checked where it is used."""
        adapter, head = self.download_shapes(phase)
        check_arrays(payload.adapter, adapter, "adapter")
        check_arrays(payload.head, head, "head")
        for name in payload.once:
            if name not in self.once_names(phase):
                raise Refusal("shape", f"unexpected array '{name[:80]}' in once")

    def personal(self, received: Payload, memory: Memory) -> Arrays | None:
        """Return the values of the node's own model, for scoring; None where it has none.

        Parameters
        ----------
        received : Payload
            The server's model.
        memory : Memory
            What the node has kept.
        """
        if self.config.task.head != "local" or memory.recall("head") is None:
            return None
        return {**received.adapter, **self.scored_head(received, memory)}

    # --- pieces for both ------------------------------------------------------------------------

    @property
    def trained(self) -> Shapes:
        """Adapter arrays in the clipped vector of a training step."""
        return self.exchanged

    def is_head(self, name: str) -> bool:
        """Whether an array belongs to the head."""
        return name in self.spec.head

    def head_of(self, state: Arrays) -> Arrays:
        """The shared head in a state."""
        return {n: state[n] for n in self.shared_head}

    def client_head(self, received: Payload, session: Session) -> Arrays:
        """Return the head to start from: the server's, or the node's own kept one."""
        if self.config.task.head != "local":
            return received.head
        kept = session.recall("head")
        if kept is None:
            session.flag("fresh-head")
            return {}
        return kept

    def scored_head(self, received: Payload, memory: Memory) -> Arrays:
        """Return the head of a node's own model: the server's, or the node's where heads are local."""
        local = memory.recall("head") if self.config.task.head == "local" else None
        return {**received.head, **(local or {})}

    def keep_head(self, session: Session) -> None:
        """Keep a local head on the node."""
        if self.config.task.head == "local":
            session.keep("head", session.model.read(self.trained_head))

    @property
    def trained_numbers(self) -> int:
        """Numbers in the clipped vector of a training step: the adapter's part and the head."""
        return count(self.trained) + count(self.trained_head)


_TARGET = re.compile(r"strategies\.[a-z][a-z0-9_]*\.[A-Z][A-Za-z0-9]*")


def load_method(config: Config, spec: AdapterSpec) -> LoraStrategy:
    """Make the method that the configuration names.

    Only a :class:`LoraStrategy` below ``strategies.`` is accepted: a configuration could otherwise name any
    callable.

    Raises
    ------
    ConfigError
        For a target elsewhere, one that does not exist, or settings that the method does not know.
    """
    target = config.method.target
    if not _TARGET.fullmatch(target):
        raise ConfigError(f"method._target_ = {target!r} is not allowed: a class below strategies.")
    module_name, _, class_name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError):
        raise ConfigError(f"method._target_ = {target!r} does not exist") from None
    if not (isinstance(cls, type) and issubclass(cls, LoraStrategy)) or inspect.isabstract(cls):
        raise ConfigError(f"method._target_ = {target!r} is not allowed: a LoraStrategy")
    return cls(config, spec)
