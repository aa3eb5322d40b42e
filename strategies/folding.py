"""What FedEx-LoRA and FLoRA share: exact sums of products that are folded into the base weights.

After a round the server holds, for every module, the clients' factors as a stack, B (m x w) and A (w x n), whose
product is the mean of theirs: exactly, because ``[B_1 ... B_K] [p_1 A_1; ...; p_K A_K] = sum_k p_k B_k A_k``. It adds
what the method folds to the dense change of the weight that it keeps (m x n, float32), and sends the stack with the
next round's requests. Every node adds it to a change of its own in the same way. A change has a version, the round
whose stack came last; a node whose change has another version than the stack builds on, because it missed a round or
lost its store, asks for the dense change once.

The server's memory grows with the clients of one round: their factors are kept until the round's stack is sent.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from privet.adapters import AdapterSpec, Shapes, TargetModule, count
from privet.config import Config
from privet.errors import ConfigError, Refusal
from privet.trainables import Factors
from privet.wire import Arrays, Payload, check_arrays
from strategies.base import LoraStrategy, Session
from strategies.merging import Merger, WeightedMean
from strategies.rounds import NEEDS_ONCE

_VERSIONS = "versions"  # of the change that the stack builds on, and of the change with it; 0: no change
_KEPT, _AT = "base-change", "at"  # in a node's store
_BYTES = 4  # of a number on the wire


class Folding(LoraStrategy):
    """A method that trains A and B and folds what the server makes of them into the base weights."""

    stays = "the change of the base weights"

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        if config.model.bits is not None:
            raise ConfigError(
                f"model.bits = {config.model.bits} is not allowed with method={config.method.name}, which changes the "
                "base weights: null"
            )
        self._stack_names = set(self.stacks(1))

    # --- what a method states --------------------------------------------------------------------

    @property
    @abstractmethod
    def sent(self) -> Shapes:
        """Factors that the server sends beside the stack."""

    def addend(self, stack: Arrays, sent: Arrays) -> Arrays:
        """Return the factors of what is folded, from the stack and the factors that are sent beside it."""
        return stack

    @abstractmethod
    def start_factors(self, received: Payload, round_number: int) -> Arrays:
        """Return the factors that a node starts a round from; those left out are the initial ones."""

    # --- shapes ----------------------------------------------------------------------------------

    @property
    def most_columns(self) -> int:
        """w of a round in which everybody replied: r columns a client."""
        return self.config.federation.sample_size * self.spec.rank

    @property
    def exchanged(self) -> Shapes:
        """Both factors: what trains and what is sent back."""
        return self.spec.lora

    def stacks(self, columns: int) -> Shapes:
        """Names and shapes of a stack with w columns."""
        out: Shapes = {}
        for t in self.spec.targets:
            out[stack_b(t)] = (t.out, columns)
            out[stack_a(t)] = (columns, t.inp)
        return out

    def download_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """With the widest stack, for the plan; after fewer replies it is narrower."""
        return {**self.sent, **self.stacks(self.most_columns)}, self.shared_head

    def once_cost(self) -> tuple[int, int]:
        """The dense change, once, where a node can miss a round."""
        numbers = count(self.spec.deltas) if self._samples else 0
        return numbers, _BYTES * numbers

    def remarks(self) -> list[str]:
        """What a choice of clients or a short base costs."""
        name, out = self.config.method.name, []
        if self._samples:
            numbers = f"{count(self.spec.deltas):,}".replace(",", " ")
            out.append(
                f"{name}: with federation.sampled a node that missed a round is sent the whole change of the base "
                f"weights, {numbers} numbers, whenever it takes part again"
            )
        if self.config.train.dtype == "bfloat16":
            out.append(f"{name}: a base model in bfloat16 rounds what is folded into it; float32 keeps it")
        return out

    @property
    def _samples(self) -> bool:
        return self.config.federation.sample_size < self.config.federation.clients

    # --- server half -----------------------------------------------------------------------------

    def initial(self, tensors: Arrays) -> Arrays:
        """Return the factors that are sent, the head, and no change."""
        sent = {n: tensors[n] for n in (*self.sent, *self.shared_head)}
        return {**sent, _VERSIONS: torch.zeros(2, dtype=torch.int32)}

    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Send the stack, or to a node that is new or has fallen behind the dense change in its place."""
        adapter = {n: state[n] for n in self.sent}
        material = {_VERSIONS: torch.from_numpy(state[_VERSIONS].numpy().astype(np.uint32))}
        if int(state[_VERSIONS][1]):
            if once:
                material |= {n: state[n] for n in self.spec.deltas}
            else:
                adapter |= {n: v for n, v in state.items() if n in self._stack_names}
        return Payload(adapter, self.head_of(state), material)

    def merger(self, phase: str, state: Arrays) -> Merger:
        """Average, and keep the factors of every reply."""
        return StackMerger(self.spec.targets)

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Fold the round's stack into the change."""
        stack, factors = dict(merged.once), {n: merged.adapter[n] for n in self.sent}
        changes = self._change(state, stack, factors)
        versions = torch.tensor([int(state[_VERSIONS][1]), self.round_number], dtype=torch.int32)
        return {**state, **factors, **merged.head, **stack, **changes, _VERSIONS: versions}

    # --- client half -----------------------------------------------------------------------------

    def check_download(self, phase: str, payload: Payload) -> None:
        """Accept a stack of up to the most columns, or a dense change, or neither before anything was folded."""
        columns = self._columns(payload.adapter)
        stack = self.stacks(columns) if columns else {}
        check_arrays(payload.adapter, {**self.sent, **stack}, "adapter")
        check_arrays(payload.head, self.shared_head, "head")
        dense = {n: v for n, v in payload.once.items() if n != _VERSIONS}
        if dense:
            check_arrays(dense, self.spec.deltas, "adapter")  # as strictly as what comes every round
        before, now = _versions(payload)
        if now and before >= now:
            raise Refusal("fold", f"a change of version {now} cannot build on version {before}")
        if bool(stack) + bool(dense) != bool(now):
            raise Refusal("fold", "a request carries a stack or the dense change, once there is one")

    def _columns(self, adapter: Mapping[str, Tensor]) -> int:
        """Return w of the stack in a request; 0 without one."""
        if not self._stack_names & set(adapter):
            return 0
        first = adapter.get(stack_a(self.spec.targets[0]))
        columns = first.shape[0] if first is not None and first.dim() else 0
        if columns % self.spec.rank or not 0 < columns <= self.most_columns:
            raise Refusal(
                "shape",
                f"a stack has {columns} columns: a multiple of {self.spec.rank} up to {self.most_columns}",
            )
        return columns

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Bring the base weights up to date, train both factors on them, and send the factors."""
        model = session.model
        # Before there is a change, one of zero: a base that cannot be changed is refused before it costs anything.
        changes = self._folded(received, session) or {n: torch.zeros(s) for n, s in self.spec.deltas.items()}
        factors = self.start_factors(received, session.round)
        model.load({**changes, **factors, **self.client_head(received, session)})
        session.train(Factors(model, [*self.trained, *self.trained_head]))
        self.keep_head(session)
        return Payload(model.read(self.exchanged), model.read(self.shared_head))

    def _folded(self, received: Payload, session: Session) -> Arrays:
        """Return the change that the server has, from what is kept and what came; keep it."""
        before, now = _versions(received)
        kept = session.recall(_KEPT)
        if kept is None:
            if session.acknowledged:
                session.flag("base-change-lost")
            kept = {_AT: torch.tensor(0)}
        changes = {n: received.once[n] for n in self.spec.deltas if n in received.once}
        if now and not changes:
            at = int(kept[_AT])
            if at == now:
                return {n: kept[n] for n in self.spec.deltas}  # the round since then was void
            if at != before:
                raise Refusal(
                    NEEDS_ONCE, "the change of the base weights in this node's store is another one"
                )
            changes = self._change(kept, received.adapter, received.adapter)
        session.keep(_KEPT, {**changes, _AT: torch.tensor(now)})
        return changes

    # --- both halves -----------------------------------------------------------------------------

    def _change(self, before: Mapping[str, Tensor], stack: Arrays, sent: Arrays) -> Arrays:
        """Return the change with this stack: the same arithmetic on both sides, so equal to the last bit."""
        factors = self.addend({n: stack[n] for n in self._stack_names}, sent)
        return {
            t.delta: fold(before.get(t.delta), factors[stack_b(t)], factors[stack_a(t)])
            for t in self.spec.targets
        }


class StackMerger(WeightedMean):
    """The weighted mean, and the factors of all replies side by side, in the order of the nodes' names.

    ``B = [B_1 ... B_K]``, ``A = [p_1 A_1; ...; p_K A_K]`` with weights that sum to one over the replies that came.
    Its memory grows with the number of clients; it lives for one round.
    """

    def __init__(self, targets: Sequence[TargetModule]) -> None:
        super().__init__()
        self._targets = targets
        self._replies: dict[str, tuple[Arrays, float]] = {}

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Add and keep one reply."""
        super().add(node, payload, weight)
        self._replies[node] = (payload.adapter, weight)

    def mean(self) -> Payload:
        """Return the mean, with the stack as material for the server itself."""
        replies = [self._replies[node] for node in sorted(self._replies)]
        total = math.fsum(weight for _, weight in replies)
        stack: Arrays = {}
        for t in self._targets:
            stack[stack_b(t)] = torch.cat([factors[t.b] for factors, _ in replies], 1)
            scaled = [factors[t.a].double() * (weight / total) for factors, weight in replies]
            stack[stack_a(t)] = torch.cat(scaled).float()
        merged = super().mean()
        return Payload(merged.adapter, merged.head, stack)


def fold(change: Tensor | None, b: Tensor, a: Tensor) -> Tensor:
    """Return ``change + B A`` (m x n, float32), summed in float64; None is no change."""
    product = b.double() @ a.double()
    return (product if change is None else change.double() + product).float()


def stack_b(target: TargetModule) -> str:
    """Name of the left factor of a stack (m x w)."""
    return f"{target.name}.stack_B"


def stack_a(target: TargetModule) -> str:
    """Name of the right factor of a stack (w x n)."""
    return f"{target.name}.stack_A"


def _versions(payload: Payload) -> tuple[int, int]:
    """Return the version that the stack builds on, and the version with it."""
    versions = payload.once.get(_VERSIONS)
    if versions is None or versions.dtype != torch.uint32 or tuple(versions.shape) != (2,):
        raise Refusal("fold", "the versions of the change of the base weights are missing")
    before, now = versions.tolist()
    return int(before), int(now)
