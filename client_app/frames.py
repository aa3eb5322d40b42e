"""What goes over the worker's socket: frames with a length, filled with Flower's own serialisation of records.

One call is three frames: what is asked and by whom, the message's content, and the answer. Imports nothing but
Flower, whose ClientApp is waiting, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

MOST_BYTES = 1 << 30
"""Largest frame; nothing is set aside for a frame before its bytes are there."""

HELLO = "hello"
"""The kind of a call without a message, answered by what the worker is: see :func:`ask`."""

KINDS = ("train", "evaluate", "describe", HELLO)

_HEADER = struct.Struct(">4sQ")
_MAGIC = b"PVT1"
_BLOCK = 1 << 20


class FrameError(Exception):
    """A frame that is none, too large or cut off; one line."""


@dataclass(frozen=True)
class Call:
    """What a ClientApp says before the message.

    Attributes
    ----------
    kind : str
        One of KINDS.
    code : str
        Hash of the code that came with the run, as its ClientApp tells it.
    node : str
        Hash of the node configuration that the SuperNode was started with.
    """

    kind: str
    code: str
    node: str

    def pack(self) -> RecordDict:
        """Return it as records."""
        return RecordDict({"call": ConfigRecord({"kind": self.kind, "code": self.code, "node": self.node})})

    @classmethod
    def unpack(cls, content: RecordDict) -> Call:
        """Read it; raises FrameError."""
        record = content.get("call")
        values = dict(record) if isinstance(record, ConfigRecord) else {}
        if set(values) != {"kind", "code", "node"} or not all(isinstance(v, str) for v in values.values()):
            raise FrameError("the call has other fields")
        if values["kind"] not in KINDS:
            raise FrameError("the call asks for no known kind of message")
        return cls(**{name: str(value) for name, value in values.items()})


def node_hash(raw: Mapping[str, Any]) -> str:
    """Return a hash of a node configuration, so that SuperNode and worker can tell that they have the same."""
    return hashlib.sha256(json.dumps(dict(raw), sort_keys=True, default=str).encode()).hexdigest()


def refusal(kind: str, reason: str, *, uncharged: bool, node: str = "") -> RecordDict:
    """Return a refusal as :func:`privet.wire.pack_failure` does, which would import PyTorch."""
    failed = ConfigRecord({"node": node, "kind": kind, "reason": reason, "uncharged": uncharged})
    return RecordDict({"failed": failed})


def ask(path: str, code: str, raw: Mapping[str, Any], limit: float) -> RecordDict:
    """Ask the worker at `path` who it is; return its word ``worker``, or its refusal.

    Raises
    ------
    FrameError, OSError
        If nobody listens there or nothing comes back within `limit` seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit)
        connection.connect(path)
        send(connection, Call(HELLO, code, node_hash(raw)).pack(), limit)
        return receive(connection, limit)


# --- sending and receiving ------------------------------------------------------------------------


def send(connection: socket.socket, content: RecordDict, seconds: float) -> None:
    """Send records as one frame; raises FrameError where it is too large, OSError where nobody listens."""
    body = recorddict_to_proto(content).SerializeToString()
    if len(body) > MOST_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is larger than {MOST_BYTES}")
    connection.settimeout(seconds)
    connection.sendall(_HEADER.pack(_MAGIC, len(body)) + body)


def receive(connection: socket.socket, seconds: float) -> RecordDict:
    """Return the records of one frame that is complete within `seconds`.

    Raises
    ------
    FrameError
        If it is no frame, too large, cut off or not there in time.
    """
    deadline = time.monotonic() + seconds
    magic, length = _HEADER.unpack(_read(connection, _HEADER.size, deadline))
    if magic != _MAGIC:
        raise FrameError("what came is no frame of this protocol")
    if length > MOST_BYTES:
        raise FrameError(f"a frame of {length} bytes is larger than {MOST_BYTES}")
    proto = Proto()
    try:
        proto.ParseFromString(bytes(_read(connection, length, deadline)))
        return recorddict_from_proto(proto)
    except FrameError:
        raise
    except Exception:  # any fault of foreign bytes is the same fault
        raise FrameError("a frame holds no records") from None


def _read(connection: socket.socket, length: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise FrameError(f"a frame was not complete in time: {len(data)} of {length} bytes")
        connection.settimeout(left)
        try:
            block = connection.recv(min(_BLOCK, length - len(data)))
        except TimeoutError:
            continue
        except OSError as error:
            raise FrameError(f"the connection broke: {error.strerror}") from None
        if not block:
            raise FrameError(f"a frame was cut off: {len(data)} of {length} bytes")
        data += block
    return data
