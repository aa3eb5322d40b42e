"""Carries a message from the ClientApp's process to the node's worker and brings the answer back.

The ClientApp's code came with the run; the worker's code, rows and store are the node owner's. So nothing here decides
anything: where the worker does not answer, the message is refused, unless the owner has said that it may be worked on
in this process (``worker-optional``).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from client_app.frames import Call, FrameError, node_hash, receive, refusal, send
from privet.code import code_hash

log = logging.getLogger("privet")

LONGEST_PHASE = 24 * 3600.0
"""Seconds that a message may take, its wait for others included; a worker that ends is noticed at once."""

_CONNECT = 10.0
_SEND = 120.0


def carry(kind: str, content: RecordDict, raw: Mapping[str, Any]) -> RecordDict | None:
    """Return the worker's answer, or None where there is no worker and none is needed.

    Parameters
    ----------
    kind : str
        ``train``, ``evaluate`` or ``describe``.
    content : RecordDict
        The message's content.
    raw : mapping
        The node configuration, with ``worker``.
    """
    path, name = raw.get("worker"), str(raw.get("name", ""))[:64]
    if not isinstance(path, str) or not Path(path).is_absolute():
        return _refuse("node-config", "worker is not allowed as it is: an absolute path, in quotes", name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(_CONNECT)
            connection.connect(path)
        except OSError as error:
            if raw.get("worker-optional") is True and isinstance(
                error, (FileNotFoundError, ConnectionRefusedError)
            ):
                log.warning("no worker listens at %s: this process does its work", path)
                return None
            log.error("no worker listens at %s: %s", path, error.strerror or error)
            return _refuse(
                "no-worker", "this node's worker does not listen, and the node works through it only", name
            )
        sent = False
        try:
            send(connection, Call(kind, code_hash(), node_hash(raw)).pack(), _SEND)
            send(connection, content, _SEND)
            sent = True
            return receive(connection, LONGEST_PHASE)
        except (FrameError, OSError) as error:
            early = _last_words(connection) if not sent else None
            if early is not None:
                return early
            log.error("the worker at %s ended before it answered: %s", path, error)
            # It may have charged the ledger; its own log says.
            return _refuse(
                "worker-ended", "this node's worker ended before it answered", name, uncharged=not sent
            )


def _last_words(connection: socket.socket) -> RecordDict | None:
    """Return what a worker answered that did not want to hear the whole message."""
    try:
        return receive(connection, 1.0)
    except FrameError:
        return None


def _refuse(kind: str, reason: str, node: str, *, uncharged: bool = True) -> RecordDict:
    return refusal(kind, reason, uncharged=uncharged, node=node)
