"""What a node keeps between messages: tensors, JSON values, replies and the privacy ledger, in one folder.

Nothing here is ever unpickled: files are safetensors and JSON, written atomically and checked by a SHA-256
when they are read. One process at a time holds the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from privet.atomic import sync_folder, write_atomic
from privet.errors import StoreError
from privet.privacy.ledger import Ledger

_VERSION = 1
_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # no leading dot: those are temporary files
_KEPT_REPLIES = 4
_CONTENTS = ("ledger.jsonl", "ledger.head", "tensors", "json", "replies")
TOKENS = "tokens"
"""Folder of tokenised rows: private data, which can be made again from the node's table."""
_POLL = 0.05  # seconds between two looks at a lock that another process holds


class NodeStore:
    """The folder of one node, held by one process at a time.

    Use it as a context manager; nothing is read or written outside of it::

        with NodeStore(root, node="hospital-a") as store:
            ledger = store.ledger(delta=1e-5, max_epsilon=8.0)

    Parameters
    ----------
    root : Path
        Folder; made (mode 0700) where it is missing. It must not be a link.
    node : str
        The node's own name. A folder that belongs to another node is refused.
    timeout : float
        Seconds to wait for a process that holds the store.

    Raises
    ------
    StoreError
        On entering: another node's folder, an unreadable one, or one that another process held too long.
    """

    def __init__(self, root: Path, node: str, *, timeout: float = 60.0) -> None:
        if not node or not node.isprintable():
            raise StoreError(f"node name {node!r} is not allowed: printable and not empty")
        self.root = Path(root)
        self.node = node
        self._timeout = timeout
        self._lock: int | None = None

    def __enter__(self) -> NodeStore:
        if self._lock is not None:
            raise StoreError(f"the store {self.root} is open already")
        try:
            self._make_folder()
            self._lock = self._acquire()
            try:
                self._identify()
            except BaseException:
                self._release()
                raise
        except OSError as err:
            raise StoreError(f"the store {self.root} cannot be used: {err.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    # --- ledger ----------------------------------------------------------------------------------

    def ledger(self, delta: float, max_epsilon: float | None) -> Ledger:
        """Open the node's ledger, or make it the first time; see :class:`privet.privacy.ledger.Ledger`.

        Raises
        ------
        StoreError
            If the ledger is damaged, or this store had one and it is gone: a lost ledger is not replaced,
            because what was spent would be forgotten.
        """
        path = self._inside("ledger.jsonl")
        marker = self._read_marker()
        if marker["ledger"] and not path.exists():
            raise StoreError(
                f"{path} is missing, and with it what this node has spent: restore it from a backup, or give "
                "the node new rows and a new store"
            )
        ledger = Ledger(path, delta=delta, max_epsilon=max_epsilon, node=self.node)
        if not marker["ledger"]:
            self._write_marker(ledger=True)
        return ledger

    # --- tensors and values ----------------------------------------------------------------------

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], *, folder: str = "tensors") -> None:
        """Replace the tensors kept under `name`, atomically; they are stored from the CPU, bit by bit."""
        self._write(self._path(folder, name, ".safetensors"), _encode(tensors, {}))

    def load_tensors(self, name: str, *, folder: str = "tensors") -> dict[str, Tensor] | None:
        """Return what :meth:`save_tensors` kept under `name`, on the CPU; None if there is nothing.

        Raises
        ------
        StoreError
            If the file is damaged.
        """
        path = self._path(folder, name, ".safetensors")
        raw = self._read(path)
        return None if raw is None else _decode(raw, path)[0]

    def names(self, folder: Literal["json", "tensors"]) -> list[str]:
        """Return the names under which JSON values or tensors are kept."""
        suffix = {"json": ".json", "tensors": ".safetensors"}[folder]
        found = self._inside(folder).glob(f"*{suffix}")
        return sorted(p.name.removesuffix(suffix) for p in found if not p.name.startswith("."))

    def files(self, folder: str) -> list[Path]:
        """Return the files of a folder of this store."""
        paths = self._inside(folder).rglob("*")
        return sorted(p for p in paths if p.is_file() and not p.is_symlink())

    def remove_json(self, name: str) -> None:
        """Forget the JSON value kept under `name`, if there is one."""
        self._path("json", name, ".json").unlink(missing_ok=True)

    def has_tensors(self, name: str) -> bool:
        """Whether tensors are kept under `name`."""
        return self._path("tensors", name, ".safetensors").exists()

    def remove_tensors(self, name: str) -> None:
        """Forget the tensors kept under `name`, if there are any."""
        self._path("tensors", name, ".safetensors").unlink(missing_ok=True)

    def save_json(self, name: str, value: Any, *, folder: str = "json") -> None:
        """Replace the JSON value kept under `name`, atomically.

        Raises
        ------
        StoreError
            If the value is not plain JSON; NaN and infinity are not.
        """
        try:
            text = _canonical(value)
        except (TypeError, ValueError) as err:
            raise StoreError(f"'{name}' cannot be kept as JSON: {err}") from None
        body = _canonical({"sha256": hashlib.sha256(text.encode()).hexdigest(), "value": value})
        self._write(self._path(folder, name, ".json"), body.encode())

    def load_json(self, name: str, *, folder: str = "json") -> Any | None:
        """Return what :meth:`save_json` kept under `name`; None if there is nothing.

        Raises
        ------
        StoreError
            If the file is damaged.
        """
        path = self._path(folder, name, ".json")
        raw = self._read(path)
        return None if raw is None else _open_envelope(raw, path)

    # --- replies ---------------------------------------------------------------------------------

    def save_reply(
        self,
        request: str,
        tensors: Mapping[str, Mapping[str, Tensor]],
        values: Mapping[str, Any],
        *,
        run: str = "run",
    ) -> None:
        """Keep the answer to a request, so that the same request gets the same answer and costs nothing.

        Only a run's latest 4 replies are kept; an older request is answered by new work, which is charged.

        Parameters
        ----------
        request : str
            The request's hash.
        tensors : mapping of mappings of tensors
            By record and name.
        values : mapping
            Plain JSON.
        run : str
            The run that the request belongs to.
        """
        path = self._inside("replies") / _safe(run) / f"{_safe(request)}.safetensors"
        layout = [[record, list(arrays)] for record, arrays in tensors.items()]
        flat = [tensor for arrays in tensors.values() for tensor in arrays.values()]
        try:
            metadata = {"layout": _canonical(layout), "values": _canonical(dict(values))}
        except (TypeError, ValueError) as err:
            raise StoreError(f"a reply's values cannot be kept as JSON: {err}") from None
        self._write(path, _encode({str(i): tensor for i, tensor in enumerate(flat)}, metadata))
        self._prune(path)

    def load_reply(self, request: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """Return (tensors, values) of the reply to a request; None if it is not, or no longer, kept.

        Raises
        ------
        StoreError
            If the reply is damaged.
        """
        name = f"{_safe(request)}.safetensors"
        for path in sorted(self._inside("replies").glob(f"*/{name}")):
            raw = self._read(path)
            if raw is None:
                continue
            flat, metadata = _decode(raw, path)
            try:
                order = iter(range(len(flat)))
                tensors = {
                    record: {key: flat[str(next(order))] for key in keys}
                    for record, keys in json.loads(metadata["layout"])
                }
                return tensors, json.loads(metadata["values"])
            except (KeyError, ValueError):
                raise StoreError(f"{path} is not a stored reply") from None
        return None

    def _prune(self, newest: Path) -> None:
        others = [p for p in newest.parent.glob("*.safetensors") if p != newest]
        others.sort(key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)
        for path in others[_KEPT_REPLIES - 1 :]:
            path.unlink()

    # --- folder, lock, marker --------------------------------------------------------------------

    def _make_folder(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.root.is_symlink():
            raise StoreError(f"the store {self.root} is a link: name the folder itself")
        if stat.S_IMODE(self.root.stat().st_mode) != 0o700:
            self.root.chmod(0o700)

    def _acquire(self) -> int:
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                # The kernel drops this lock when its process ends, however that ends.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise StoreError(
                        f"the store {self.root} is held by another process (waited {self._timeout:g} s)"
                    ) from None
                time.sleep(_POLL)
            except BaseException:
                os.close(descriptor)
                raise

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _identify(self) -> None:
        path = self.root / "node.json"
        if not path.exists():
            if any((self.root / name).exists() for name in _CONTENTS):
                raise StoreError(
                    f"{path} is missing but what it describes is there: restore it from a backup"
                )
            self._write_marker(ledger=False)
        marker = self._read_marker()
        if marker["version"] != _VERSION:
            raise StoreError(
                f"the store {self.root} has version {marker['version']}, this is version {_VERSION}"
            )
        if marker["node"] != self.node:
            raise StoreError(
                f"the store {self.root} belongs to node '{marker['node']}', not to '{self.node}'"
            )

    def _read_marker(self) -> dict[str, Any]:
        path = self._inside("node.json")
        raw = self._read(path)
        marker = None if raw is None else _open_envelope(raw, path)
        if not isinstance(marker, dict) or set(marker) != {"node", "version", "ledger"}:
            raise StoreError(f"{path} is damaged: restore it from a backup")
        return marker

    def _write_marker(self, *, ledger: bool) -> None:
        marker = {"node": self.node, "version": _VERSION, "ledger": ledger}
        digest = hashlib.sha256(_canonical(marker).encode()).hexdigest()
        self._write(self._inside("node.json"), _canonical({"sha256": digest, "value": marker}).encode())

    def _inside(self, name: str) -> Path:
        if self._lock is None:
            raise StoreError(f"the store {self.root} is not open: use it in a with statement")
        return self.root / name

    def _path(self, folder: str, name: str, suffix: str) -> Path:
        return self._inside(folder) / f"{_safe(name)}{suffix}"

    def _write(self, path: Path, data: bytes) -> None:
        try:
            for folder in reversed(path.relative_to(self.root).parents):
                target = self.root / folder
                if not target.exists():
                    target.mkdir(mode=0o700)
                    sync_folder(target.parent)
            write_atomic(path, data)
        except OSError as err:
            raise StoreError(f"{path} cannot be written: {err.strerror}") from None

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as err:
            raise StoreError(f"{path} cannot be read: {err.strerror}") from None


@dataclass(frozen=True)
class StoreFacts:
    """Whose store a folder is, of which version, and whether it has had a ledger."""

    node: str
    version: int
    ledger: bool


def read_facts(root: Path) -> StoreFacts:
    """Return whose store `root` is, without opening or changing it.

    Raises
    ------
    StoreError
        If it is no store or its marker is damaged.
    """
    path = Path(root) / "node.json"
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise StoreError(f"{root} is no node's store: node.json: {err.strerror}") from None
    marker = _open_envelope(raw, path)
    if not isinstance(marker, dict) or set(marker) != {"node", "version", "ledger"}:
        raise StoreError(f"{path} is damaged: restore it from a backup")
    return StoreFacts(**marker)


def _safe(name: str) -> str:
    """Return `name` if it can only mean a file in its own folder."""
    if not isinstance(name, str) or not _SAFE.fullmatch(name) or ".." in name:
        raise StoreError(
            f"the name {str(name)[:80]!r} is not allowed: letters, digits, '.', '_' and '-' only"
        )
    return name


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _open_envelope(raw: bytes, path: Path) -> Any:
    try:
        envelope = json.loads(raw)
        value, digest = envelope["value"], envelope["sha256"]
        intact = hashlib.sha256(_canonical(value).encode()).hexdigest() == digest
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise StoreError(f"{path} is damaged: restore it from a backup")
    return value


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256(_canonical(dict(metadata)).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    # Clones, because safetensors refuses tensors that share memory, as tied weights and views do.
    plain = {k: t.detach().cpu().clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
    stored = {**metadata, "sha256": _digest(plain, metadata)}
    return safetensors.torch.save(plain, metadata=stored)


def _decode(raw: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with contextlib.suppress(SafetensorError, ValueError, KeyError, TypeError, RecursionError, RuntimeError):
        tensors = safetensors.torch.load(raw)
        length = int.from_bytes(raw[:8], "little")
        metadata = dict(json.loads(raw[8 : 8 + length])["__metadata__"])
        if metadata.pop("sha256") == _digest(tensors, metadata):
            return tensors, metadata
    raise StoreError(f"{path} is damaged: restore it from a backup")
