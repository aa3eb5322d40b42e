"""``privet worker``: one process of a node that keeps base model, rows, store and ledger between messages.

A ClientApp is started for every message and is code that came with the run. It hands the message over on a Unix
socket; the worker, which is the node owner's own installed code, does everything else: the same checks, in the same
order, as without it, on a store that it holds locked for as long as it lives. One message at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from client_app.app import failure
from client_app.frames import HELLO, Call, FrameError, node_hash, receive, refusal, send
from client_app.node_config import NodeConfig
from privet.code import code_hash
from privet.errors import ConfigError, PrivetError

log = logging.getLogger("privet")

_BACKLOG = 16
_FIRST_PASSED = 3  # systemd's first file descriptor
_TAKE = 60.0  # seconds for a ClientApp to hand over a message, and to take the answer
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Answer = Callable[[str, RecordDict], RecordDict]


class Stopped(BaseException):
    """The worker must end now; whatever is under way is left as a killed process would leave it."""


# --- the socket -----------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Yield a listening socket at `path`, mode 0600 in a folder of mode 0700, or the one that systemd passed.

    Raises
    ------
    ConfigError
        If the folder is another account's or open to others, or another worker listens there.
    """
    passed = _passed()
    if passed is not None:
        with passed:
            yield passed
        return
    _make_folder(path.parent)
    _clear(path)
    before = os.umask(0o177)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"worker = {path} cannot be listened at: {error.strerror or error}") from None
    finally:
        os.umask(before)
    made = path.stat().st_ino
    try:
        with listener:
            yield listener
    finally:
        with contextlib.suppress(OSError):
            if path.stat().st_ino == made:
                path.unlink()


def _passed() -> socket.socket | None:
    """Return the socket of a systemd socket unit, if one started this process."""
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()):
        return None
    if os.environ.pop("LISTEN_FDS", "") != "1":
        raise ConfigError("systemd passed several sockets: a worker's unit has one ListenStream")
    listener = socket.socket(fileno=_FIRST_PASSED)
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM:
        raise ConfigError("systemd passed another kind of socket: ListenStream=/run/.../name.sock")
    listener.set_inheritable(False)
    return listener


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise ConfigError(f"the worker's folder {folder} cannot be made: {error.strerror}") from None
    if folder.is_symlink() or facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f"the worker's folder {folder} must be this account's own, mode 0700")


def _clear(path: Path) -> None:
    """Remove the socket of a worker that was killed."""
    if not path.is_symlink() and not path.exists():
        return
    if path.is_symlink() or not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"worker = {path} is there already and no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"worker = {path} cannot be looked at: {error.strerror or error}") from None
    raise ConfigError(f"another worker listens at {path}")


def peer_uid(connection: socket.socket) -> int:
    """Return the account on the other side, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


# --- one message after another ---------------------------------------------------------------------


class Server:
    """Answers messages on a listening socket, one at a time, until it is idle or told to stop.

    Parameters
    ----------
    listener : socket.socket
        Where ClientApps come.
    answer : callable of (kind, content)
        Does a message's work; its exceptions end the worker after an answer that names their kind.
    node : str
        Hash of the worker's node configuration, which the SuperNode's must be.
    peers : collection of int
        Accounts that may hand over messages.
    idle : float or None
        Seconds without a message after which the worker ends; None: never.
    grace : float
        Seconds that a message under way has when the worker is told to stop.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Answer,
        *,
        node: str,
        peers: frozenset[int],
        idle: float | None,
        grace: float,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._node = node
        self._peers = peers
        self._idle = idle
        self._grace = grace
        self._stopping = False
        self._broken = False
        self._busy = False
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def run(self) -> int:
        """Serve; return the exit code: 0 idle or stopped, 1 after an error that may have left something behind."""
        # A message is under way for seconds to hours: a stop waits for it, but not for ever.
        old = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}
        old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._stop_now)
        try:
            while not self._stopping and not self._broken:
                connection = self._next()
                if connection is None:
                    break
                with connection:
                    if not self._stopping:  # told to stop while it came: the message is left undone
                        self._serve(connection)
        except Stopped:
            log.warning("the message under way was not finished: its phase counts as cut off")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._woken)
        return int(self._broken)

    def _next(self) -> socket.socket | None:
        ready, _, _ = select.select([self._listener.fileno(), self._wake], [], [], self._idle)
        if self._stopping:
            return None
        if not ready:
            log.info("no message for %g s: the worker ends", self._idle)
            return None
        connection, _ = self._listener.accept()
        return connection

    def _serve(self, connection: socket.socket) -> None:
        self._busy = True
        try:
            uid = peer_uid(connection)
            if uid not in self._peers:
                log.error("account %d may not hand over messages", uid)
                return
            answer = self._work(connection)
            if answer is not None:
                send(connection, answer, _TAKE)
        except (FrameError, OSError) as error:
            # Whoever asked is gone. What was worked out is in the store and is sent when it is asked for again.
            log.error("the answer could not be handed over: %s", error)
        finally:
            self._busy = False

    def _work(self, connection: socket.socket) -> RecordDict | None:
        try:
            call = Call.unpack(receive(connection, _TAKE))
            if call.node != self._node:
                log.error("the SuperNode has another node configuration than this worker: restart both")
                return refusal(
                    "node-config",
                    "this node's worker was started with another node configuration",
                    uncharged=True,
                )
            if call.code != code_hash():
                log.error("the run's code has hash %s, this worker's is %s", call.code[:64], code_hash())
                return refusal("code-hash", "this node's worker runs other code than the run", uncharged=True)
            if call.kind == HELLO:
                return RecordDict({"worker": ConfigRecord({"code": code_hash()})})
            content = receive(connection, _TAKE)
        except FrameError as error:
            log.error("a message is refused: %s", error)
            return refusal("malformed", "this node's worker could not read the message", uncharged=True)
        if _gone(connection):
            log.warning("a ClientApp ended before its message's turn came: nothing is done for it")
            return None
        start = time.monotonic()
        try:
            answer = self._answer(call.kind, content)
        except Exception as error:
            # The traceback is for this node's own log, and what the error left behind ends with this process.
            log.exception("this node could not answer")
            self._broken = True
            return RecordDict({"failed": failure(error)})
        log.info("%s took %.2f s", call.kind, time.monotonic() - start)
        return answer

    # --- signals ---------------------------------------------------------------------------------

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopping and self._busy:
            raise Stopped
        self._stopping = True
        with contextlib.suppress(OSError):
            os.write(self._woken, b"x")
        if self._busy:
            log.info("the worker ends after the message under way, within %g s", self._grace)
            signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-3))

    def _stop_now(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            raise Stopped


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has closed while its message waited."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


# --- the node's side --------------------------------------------------------------------------------


def work(
    raw: Mapping[str, Any], *, idle: float | None, grace: float = 25.0, peers: frozenset[int] | None = None
) -> int:
    """Be the worker of the node that `raw` configures, until it is idle or told to stop; return the exit code.

    Raises
    ------
    PrivetError
        If the node's settings do not do for a worker, its code is not the pinned one, or its store or socket is taken.
    """
    from client_app.store import NodeStore

    node = NodeConfig.read(raw)
    if node.worker is None or node.data_path is None or node.store is None:
        raise ConfigError("the node configuration of a worker needs worker, data-path and store")
    if node.code_hash is not None and not code_hash().startswith(node.code_hash):
        raise ConfigError(
            f"this installation has code {code_hash()[:16]}..., the owner pinned another (code-hash)"
        )
    with NodeStore(node.store, node.name, timeout=5.0) as store, listening(node.worker) as listener:
        server = Server(
            listener,
            _answers(raw, store),
            node=node_hash(raw),
            peers=(peers or frozenset()) | {os.geteuid()},
            idle=idle,
            grace=grace,
        )
        log.info("node '%s', code %s: listening at %s", node.name, code_hash(), node.worker)
        return server.run()


def _answers(raw: Mapping[str, Any], store: Any) -> Answer:
    # What takes seconds to import is there before the first message.
    from client_app import node
    from client_app.holdings import Holdings

    holdings = Holdings(store)
    by_kind: dict[str, Callable[[RecordDict], RecordDict]] = {
        "train": lambda content: node.answer_train(content, raw, holdings),
        "evaluate": lambda content: node.answer_evaluate(content, raw, holdings),
        "describe": lambda content: node.answer_describe(content, raw),
    }

    def answer(kind: str, content: RecordDict) -> RecordDict:
        return by_kind[kind](content)

    return answer


def seconds(text: str) -> float | None:
    """Read a time such as ``30m``, ``90s``, ``2h`` or ``0`` (None: without end); raises PrivetError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    if not number.isdigit() or len(number) > 6:
        raise PrivetError(f"'{text}' is no time: 30m, 90s, 2h, or 0 for no end")
    return int(number) * units[unit] or None
