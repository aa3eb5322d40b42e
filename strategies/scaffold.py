"""SCAFFOLD: local steps corrected by the difference of control variates (Karimireddy et al., ICML 2020, alg. 1).

Server (x, c), client c_k, all zero controls at first. A step of a client moves y by the gradient and by the correction,

    y <- y - lr g,        y <- y - lr (c - c_k)

and after E steps the client has (option II) and sends

    c_k+ = c_k - c + (x - y) / sum(lr),        y and c_k+ - c_k

The server averages y and adds (1 / K) sum (c_k+ - c_k) to c, K being all clients: c is always the mean of the c_k that
it knows of. A reply that is lost or a round that is void must not move c_k alone, so a node keeps the old and the
new c_k, and the next request says which of its replies count (``acknowledged``).

Under DP c_k is made of x, c and the noised iterate y, all of which the node releases or was sent: post-processing of
DP-SGD, no charge. (x - y) / sum(lr) is a mean gradient for plain SGD only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from privet.adapters import AdapterSpec, Shapes
from privet.config import Config
from privet.errors import ConfigError
from privet.quantise import decode, encode
from privet.trainables import Factors
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy, Session
from strategies.merging import Merger, WeightedMean

_CONTROL = "control/"  # on the wire and in the state: c down, c_k+ - c_k up
_OLD, _NEW, _ROUND = "old/", "new/", "round"  # in a node's store


class Scaffold(LoraStrategy):
    """Train A and B, send both and the change of their control variates (2 D numbers up and down)."""

    paper = "SCAFFOLD, Karimireddy et al., ICML 2020"
    stays = "its control variates c_k"

    def __init__(self, config: Config, spec: AdapterSpec) -> None:
        super().__init__(config, spec)
        train = config.train
        if train.optimizer != "sgd" or train.momentum:
            name = "optimizer" if train.optimizer != "sgd" else "momentum"
            raise ConfigError(
                f"train.{name} = {getattr(train, name)} is not allowed with method=scaffold: its control variates "
                "are mean gradients with plain SGD only"
            )
        # A local head has no counterpart on other nodes, so it has no control variates either.
        self.controlled: Shapes = {**spec.lora, **self.shared_head}
        self.shared_head = {**self.shared_head, **_controls(self.shared_head)}

    @property
    def exchanged(self) -> Shapes:
        """Both factors and their control variates."""
        return {**self.spec.lora, **_controls(self.spec.lora)}

    @property
    def trained(self) -> Shapes:
        """Both factors."""
        return self.spec.lora

    # --- server half -----------------------------------------------------------------------------

    def initial(self, tensors: Arrays) -> Arrays:
        """Return the initial values and c = 0."""
        zeros = {n: torch.zeros(s) for n, s in _controls(self.controlled).items()}
        return {**{n: tensors[n] for n in self.controlled}, **zeros}

    def merger(self, phase: str, state: Arrays) -> Merger:
        """Average the models by p_k, and the changes of control variates over all clients."""
        return ControlledMean(len(self.run.nodes))

    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Replace x, and add to c."""
        arrays = {**merged.adapter, **merged.head}
        moved = {n: state[n] + v for n, v in arrays.items() if n.startswith(_CONTROL)}
        return {**state, **arrays, **moved}

    # --- client half -----------------------------------------------------------------------------

    def client(self, phase: str, received: Payload, session: Session) -> Payload:
        """Take corrected steps; send where they led and how c_k changed."""
        model = session.model
        sent = {**received.adapter, **self.client_head(received, session)}
        model.load({n: v for n, v in sent.items() if not n.startswith(_CONTROL)})
        common = {n: sent[_CONTROL + n] for n in self.controlled}
        own = self._own_controls(session)
        drift = Drift({n: common[n] - own[n] for n in self.controlled})
        session.train(Factors(model, [*self.trained, *self.trained_head]), correction=drift)
        self.keep_head(session)
        end = model.read(self.controlled)
        changes = {}
        for name, value in end.items():
            gradient = (sent[name].double() - value.double()) / drift.rates[name]
            changes[_CONTROL + name] = (gradient - common[name].double()).float()  # c_k+ - c_k
        if self.config.federation.upload == "int8":
            changes = decode(encode(Payload(changes))).adapter  # c_k moves by what the server will read
        new = {_NEW + n: own[n] + changes[_CONTROL + n] for n in self.controlled}
        old = {_OLD + n: own[n] for n in self.controlled}
        session.keep("controls", {**old, **new, _ROUND: torch.tensor(session.round)})
        reply = {**end, **changes}
        head = {n: reply.pop(n) for n in self.shared_head}
        return Payload(reply, head)

    def _own_controls(self, session: Session) -> Arrays:
        """Return c_k as the server's c holds it: after the last reply of this node that counts."""
        kept = session.recall("controls")
        if kept is None:
            if session.acknowledged:
                session.flag("controls-lost")  # c goes on holding their share
            return {n: torch.zeros(s) for n, s in self.controlled.items()}
        made = int(kept[_ROUND])
        if made < session.acknowledged:  # an older store came back: a later reply counts, and is not in it
            session.flag("controls-lost")
        return {n: kept[(_NEW if made <= session.acknowledged else _OLD) + n] for n in self.controlled}


class Drift:
    """The correction ``c - c_k`` in every step; keeps the sum of the learning rates of each leaf.

    Parameters
    ----------
    difference : mapping of str to Tensor
        c - c_k by leaf; leaves without one are left alone.
    """

    def __init__(self, difference: Mapping[str, Tensor]) -> None:
        self._difference = dict(difference)
        self.rates = dict.fromkeys(difference, 0.0)

    def before_step(self, leaves: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        """Add the difference to the gradients: for SGD the same as a step of its own."""
        for name, difference in self._difference.items():
            leaf = leaves[name]
            moved = difference.to(leaf.device, leaf.dtype)
            leaf.grad = moved.clone() if leaf.grad is None else leaf.grad.add_(moved)
            self.rates[name] += rates[name]


class ControlledMean:
    """The weighted mean of models, and ``(1 / K) sum`` of the changes of control variates.

    Parameters
    ----------
    clients : int
        K: all clients of the run, whoever replied.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._replies = 0
        self._models, self._changes = WeightedMean(), WeightedMean()

    def add(self, node: str, payload: Payload, weight: float) -> None:
        """Take one reply."""
        self._models.add(node, _part(payload, controls=False), weight)
        self._changes.add(node, _part(payload, controls=True), 1.0)
        self._replies += 1

    def mean(self) -> Payload:
        """Return both."""
        models, changes = self._models.mean(), self._changes.mean()
        share = self._replies / self._clients
        return Payload(
            {**models.adapter, **{n: v * share for n, v in changes.adapter.items()}},
            {**models.head, **{n: v * share for n, v in changes.head.items()}},
        )


def _controls(shapes: Shapes) -> Shapes:
    return {_CONTROL + n: s for n, s in shapes.items()}


def _part(payload: Payload, *, controls: bool) -> Payload:
    """The models of a reply, or the changes of its control variates."""

    def chosen(arrays: Mapping[str, Any]) -> Arrays:
        return {n: v for n, v in arrays.items() if n.startswith(_CONTROL) == controls}

    return Payload(chosen(payload.adapter), chosen(payload.head))
