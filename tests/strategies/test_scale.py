"""What the server holds at a time does not grow with the number of clients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from benchmarks.scale import Crowd, overrides_of
from privet.adapters import adapter_spec
from privet.config import compose
from privet.projection import random_projection
from privet.trainables import THETA
from privet.wire import Reply
from server_app.app import app
from strategies import exchange, rounds
from strategies.base import load_method
from strategies.fedhsip import FedHSIP


class Watch:
    """Counts how many of the objects that it was shown are alive at once."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []
        self.most = self.seen = 0

    def see(self, thing: Any) -> None:
        self.seen += 1
        self._refs = [ref for ref in self._refs if ref() is not None] + [weakref.ref(thing)]
        self.most = max(self.most, len(self._refs))


def serve(method: str, clients: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Watch]:
    """Run the real server against a crowd, and watch requests, messages with replies, and what is read of them."""
    watches = {name: Watch() for name in ("requests", "replies", "read")}

    class Watched(Crowd):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in messages:
                if message.metadata.message_type == "train":
                    watches["requests"].see(message)
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for message in super().pull_messages(message_ids):
                watches["replies"].see(message)
                yield message

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            return list(super().pull_messages(list(super().push_messages(messages))))

    real = rounds.unpack_reply

    def unpack(content: RecordDict) -> Reply:
        reply = real(content)
        watches["read"].see(next(iter(reply.payload.adapter.values())))
        return reply

    monkeypatch.setattr(rounds, "unpack_reply", unpack)
    settings = overrides_of(method, clients, rank=2, rounds=2)
    crowd = Watched(compose(settings), clients)
    app(crowd, Context(1, 1, {}, RecordDict(), {"run-dir": str(folder), "overrides": " ".join(settings)}))
    return watches


@pytest.mark.parametrize("method", ["ffa_lora", "fedrand"])
def test_sixty_clients_are_a_few_messages_and_one_reply_at_a_time(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = serve(method, 60, tmp_path / "run", monkeypatch)
    assert {name: watch.seen for name, watch in watches.items()} == dict.fromkeys(watches, 120)
    assert watches["requests"].most <= exchange._AT_ONCE
    assert watches["replies"].most <= exchange._AT_ONCE + 1
    assert watches["read"].most <= 2


def test_the_rule_of_fedhsip_is_packed_once_for_all_nodes() -> None:
    config = compose(["model=tiny_random", "method=fedhsip"])
    method = load_method(config, adapter_spec(config))
    assert isinstance(method, FedHSIP)
    rule = random_projection(method.total, method.dimension, 0)
    state = {THETA: torch.zeros(method.dimension), "slots": rule.slots.to(torch.int32), "signs": rule.signs}
    state |= {n: torch.zeros(s) for n, s in method.shared_head.items()}
    first, second = (method.download("train", state, True).once for _ in range(2))
    assert all(first[n] is second[n] for n in ("slots", "signs"))
    other = {**state, "slots": state["slots"].flip(0)}
    assert not torch.equal(method.download("train", other, True).once["slots"], first["slots"])


def test_a_method_that_keeps_the_replies_of_a_phase_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedASK may have to do without a node later, so it keeps a round's sketches, and not a second round's."""
    assert serve("fedask", 20, tmp_path / "run", monkeypatch)["read"].most in (20, 21, 22)
