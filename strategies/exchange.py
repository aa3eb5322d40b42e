"""The messages of one phase: requests on their way, answers as they come, and the record of both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from privet.wire import Failed, Payload, Request, pack_request

_POLL = 0.1  # seconds between two looks for answers
_GRACE = 60.0  # seconds that Flower keeps a message beyond the phase's own limit
_AT_ONCE = 16  # messages in memory at a time on each way, however many nodes there are


class Mailbox:
    """Requests that are on their way to nodes.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.
    addresses : mapping of node name to Flower node id
        A node without an address is not connected; its request fails at once.
    timeout : float
        Seconds until what has not come is late, counted from now.
    message_type : str
        Flower's message type, for example ``MessageType.TRAIN``.
    """

    def __init__(self, grid: Grid, addresses: Mapping[str, int], timeout: float, message_type: str) -> None:
        self._grid = grid
        self._addresses = addresses
        self._timeout = timeout
        self._type = message_type
        self._started = time.monotonic()
        self._pending: dict[str, Request] = {}
        self._lost: list[tuple[Request, Failed]] = []

    def send(self, requests: Iterable[Request]) -> None:
        """Send requests, a few at a time; one that cannot even be sent fails like one that is not answered."""
        batch = []
        for request in requests:
            if request.node not in self._addresses:
                self._lose(request, "absent", "the node is not connected")
                continue
            batch.append(request)
            if len(batch) == _AT_ONCE:
                self._push(batch)
                batch = []
        self._push(batch)

    def _push(self, batch: Sequence[Request]) -> None:
        if not batch:
            return
        messages = [
            Message(
                content=pack_request(request),
                message_type=self._type,
                dst_node_id=self._addresses[request.node],
                group_id=f"{request.round}-{request.phase}",
                ttl=self._timeout + _GRACE,
            )
            for request in batch
        ]
        for request, identifier in zip(batch, self._grid.push_messages(messages), strict=True):
            if identifier:
                self._pending[identifier] = request
            else:
                self._lose(request, "undelivered", "Flower could not queue the message")

    def answers(self) -> Iterator[tuple[Request, Message | Failed]]:
        """Yield each request with its answer until none is open; more may be sent in between."""
        late = False
        while self._lost or self._pending:
            while self._lost:
                yield self._lost.pop(0)
            if not self._pending or late:
                break
            late = time.monotonic() - self._started >= self._timeout  # what is there by then still counts
            arrived, waiting = False, list(self._pending)
            for first in range(0, len(waiting), _AT_ONCE):
                for message in self._grid.pull_messages(waiting[first : first + _AT_ONCE]):
                    arrived = True
                    request = self._pending.pop(message.metadata.reply_to_message_id, None)
                    if request is not None:
                        yield request, message
            if self._pending and not arrived and not late:
                time.sleep(_POLL)
        for request in list(self._pending.values()):
            yield request, Failed(request.node, "timeout", f"no reply within {self._timeout:g} s")
        self._pending.clear()

    def _lose(self, request: Request, kind: str, reason: str) -> None:
        # Nothing was asked, so nothing was charged.
        self._lost.append((request, Failed(request.node, kind, reason, uncharged=True)))


@dataclass
class Exchange:
    """Running record of one phase.

    Attributes
    ----------
    shown : list of (float, float, int)
        Train loss, gradient norm and rows of each reply; the first two NaN under DP.
    rounding : list of float
        For each reply in 8 bits, the bound on its relative error.
    """

    phase: str
    sent: int
    replied: list[str] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    shown: list[tuple[float, float, int]] = field(default_factory=list)
    rounding: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the entry for ``rounds.jsonl``."""
        return {
            "name": self.phase,
            "seconds": round(self.seconds, 3),
            "sent": self.sent,
            "replied": len(self.replied),
            "failed": [{"node": f.node, "reason": f"{f.kind}: {f.reason}"} for f in self.failed],
            "flags": self.flags,
        }


class Traffic:
    """Numbers and bytes of one round, by node, way and part of the payload."""

    def __init__(self, nodes: dict[str, Any] | None = None) -> None:
        self.nodes: dict[str, dict[str, dict[str, dict[str, int]]]] = dict(nodes or {})

    def add(self, node: str, way: str, payload: Payload) -> None:
        """Count one payload; `way` is ``upload``, ``download``, ``requery`` or ``evaluate``."""
        entry = self.nodes.setdefault(node, {}).setdefault(way, {"numbers": {}, "bytes": {}})
        for what, counts in (("numbers", payload.numbers()), ("bytes", payload.bytes())):
            for part, amount in counts.items():
                entry[what][part] = entry[what].get(part, 0) + amount

    def total(self, way: str, what: str) -> int:
        """Adapter numbers or bytes of all nodes together."""
        return sum(ways[way][what]["adapter"] for ways in self.nodes.values() if way in ways)
