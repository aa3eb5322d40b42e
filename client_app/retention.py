"""What ended runs left in a node's store, and how it goes: everything but the ledger and a mark that it was there.

A run's state is never quietly begun anew: what is purged leaves a mark, and a request of that run is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from client_app.memory import RUN_PREFIX, forget, index_name, kept_files, run_name, secret_name
from client_app.store import TOKENS, NodeStore
from privet.atomic import write_atomic
from privet.errors import PrivetError
from privet.privacy.ledger import utc_now

RECENT_DAYS = 1.0
"""A run whose last message is younger may still be going on."""

_DAY = 86400.0


@dataclass(frozen=True)
class Purged:
    """What a purge removed, or would remove.

    Attributes
    ----------
    runs : dict of str to int
        Bytes by run.
    recent : list of str
        Runs that were left alone because they may still be going on.
    tokens, leftovers : int
        Bytes of tokenised rows, and of files that no run needs any more.
    """

    runs: dict[str, int]
    recent: list[str]
    tokens: int
    leftovers: int


def purge(
    store: NodeStore,
    *,
    run: str | None = None,
    older_than: float | None = None,
    spare: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Purged:
    """Remove kept arrays, secrets, stored replies and tokenised rows of ended runs from an open store.

    Parameters
    ----------
    store : NodeStore
        The node's open store.
    run : str or None
        This run only; tokenised rows, which belong to no run, then stay.
    older_than : float or None
        Only what was last touched more than so many days ago.
    spare : str or None
        A run that is going on.
    force : bool
        Also remove runs that may still be going on.
    dry_run : bool
        Say what would go, and leave it.

    Raises
    ------
    PrivetError
        If `run` is not in the store.
    StoreError
        If the store is damaged.
    """
    now = time.time()
    known = sorted(_open_runs(store))
    if run is not None and run not in known:
        raise PrivetError(f"{store.root} keeps nothing of a run '{run}' (runs: {', '.join(known) or 'none'})")
    least = max(older_than or 0.0, 0.0 if force else RECENT_DAYS) * _DAY

    removed: dict[str, int] = {}
    recent: list[str] = []
    for name in known if run is None else [run]:
        files = _files_of(store, name)
        age = now - max((f.stat().st_mtime for f in files), default=0.0)
        if name == spare:
            continue
        if age < least:
            if not force and age < RECENT_DAYS * _DAY:
                recent.append(name)
            continue
        removed[name] = sum(f.stat().st_size for f in files)
        if not dry_run:
            _remove(store, name)

    old = [f for f in _unneeded(store) if now - f.stat().st_mtime >= least]
    tokens = [f for f in store.files(TOKENS) if now - f.stat().st_mtime >= least] if run is None else []
    found = Purged(removed, recent, sum(f.stat().st_size for f in tokens), sum(f.stat().st_size for f in old))
    if not dry_run:
        for file in (*old, *tokens):
            file.unlink(missing_ok=True)
    return found


def is_purged(frozen: object) -> bool:
    """Whether what a store keeps of a run is only the mark that a purge left."""
    return isinstance(frozen, dict) and "purged" in frozen


def _open_runs(store: NodeStore) -> Iterator[str]:
    """Yield the runs of which more than a mark is kept."""
    for name in store.names("json"):
        if name.startswith(RUN_PREFIX) and not is_purged(store.load_json(name)):
            yield name.removeprefix(RUN_PREFIX)


def _files_of(store: NodeStore, run: str) -> list[Path]:
    facts = {f"{name(run)}.json" for name in (run_name, index_name, secret_name)}
    kept = {f"{name}.safetensors" for name in kept_files(store, run)}
    return [
        *(f for f in store.files("json") if f.name in facts),
        *(f for f in store.files("tensors") if f.name in kept),
        *(f for f in store.files("replies") if f.parent.name == run),
    ]


def _remove(store: NodeStore, run: str) -> None:
    """Remove a run's state. The mark comes first: a crash in between must not make it a run that never was."""
    frozen = store.load_json(run_name(run)) or {}
    mark = {key: frozen[key] for key in ("config", "code", "round") if key in frozen}
    store.save_json(run_name(run), {**mark, "purged": utc_now()})
    forget(store, run)
    store.remove_json(secret_name(run))
    folder = store.root / "replies" / run
    for file in folder.glob("*"):
        file.unlink()
    if folder.is_dir():
        folder.rmdir()
    log = store.root / "log.jsonl"
    if log.is_file():
        _cut_log(log, run)


def _cut_log(log: Path, run: str) -> None:
    """Leave out a run's lines of the node's own log: losses and draws are about its rows."""
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line).get("run") == run:
                continue
        except (ValueError, AttributeError):
            pass
        kept.append(line)
    write_atomic(log, "".join(kept).encode())


def _unneeded(store: NodeStore) -> Iterator[Path]:
    """Yield what an interrupted phase or write left: arrays in no index and no stored reply, temporary files."""
    needed = {f"{n}.safetensors" for run in _open_runs(store) for n in kept_files(store, run)}
    for reply in store.files("replies"):
        loaded = store.load_reply(reply.name.removesuffix(".safetensors"))
        if loaded is not None:
            needed |= {f"{n}.safetensors" for n in loaded[1].get("kept", {}).get("files", {}).values()}
    yield from (f for f in store.files("tensors") if f.name not in needed and not f.name.startswith("."))
    for folder in ("json", "tensors", "replies"):
        yield from (f for f in store.files(folder) if f.name.startswith(".") and f.name.endswith(".tmp"))
