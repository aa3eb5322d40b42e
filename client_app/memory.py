"""Arrays that a method keeps on a node from one phase or round to a later one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from client_app.store import NodeStore
from privet.errors import Refusal
from privet.wire import Arrays, check_arrays

RUN_PREFIX = "run-"
"""With this begin the names of :func:`run_name`, and no others."""


class KeptArrays:
    """What one run keeps in a node's store, as one request sees it.

    New arrays are written beside the old ones and take their place by :func:`commit`, together with the stored
    reply: a phase that did not come to its end has kept nothing.

    Parameters
    ----------
    store : NodeStore
        The node's open store.
    run : str
        The run; another run's arrays are out of reach.
    round_number : int
        The round of the request.
    tag : str
        Makes the names of new files the request's own.
    """

    def __init__(self, store: NodeStore, run: str, round_number: int, tag: str) -> None:
        self._store = store
        self._run = run
        self._round = round_number
        self._tag = tag
        self._new: dict[str, str] = {}

    def recall(self, name: str, *, this_round: bool = False) -> Arrays | None:
        """Return the arrays of that name, or None; with `this_round` only those of this very round."""
        files = (self._store.load_json(index_name(self._run)) or {"files": {}})["files"]
        if name not in files:
            return None
        file, kept_in = files[name]
        if this_round and kept_in != self._round:
            return None
        return self._store.load_tensors(file)

    def keep(self, name: str, arrays: Arrays) -> None:
        """Write finite arrays, to be found under `name` once they are committed."""
        check_arrays(arrays, {n: tuple(v.shape) for n, v in arrays.items()}, name)
        file = f"{name}-{self._tag}"
        self._store.save_tensors(file, arrays)
        self._new[name] = file

    def pending(self) -> dict[str, Any]:
        """Return what :func:`commit` needs, for the stored reply."""
        return {"run": self._run, "round": self._round, "files": self._new}


def commit(store: NodeStore, pending: Mapping[str, Any]) -> None:
    """Put what a stored reply had kept in its place, unless a later round's is there already.

    Does nothing when it is repeated. What it replaces is removed.
    """
    if not pending["files"]:
        return
    index = index_name(pending["run"])
    before = store.load_json(index) or {"round": 0, "files": {}}
    if pending["round"] < before["round"] or not all(store.has_tensors(f) for f in pending["files"].values()):
        return
    placed = {name: [file, pending["round"]] for name, file in pending["files"].items()}
    store.save_json(index, {"round": pending["round"], "files": {**before["files"], **placed}})
    for name, (old, _) in before["files"].items():
        if name in placed and placed[name][0] != old:
            store.remove_tensors(old)


def kept_files(store: NodeStore, run: str) -> set[str]:
    """Return the names of the tensors that a run keeps now."""
    index = store.load_json(index_name(run)) or {"files": {}}
    return {file for file, _ in index["files"].values()}


def forget(store: NodeStore, run: str) -> None:
    """Remove all arrays that a run keeps; what a method recalls then is nothing."""
    files = kept_files(store, run)
    store.remove_json(index_name(run))
    for file in files:
        store.remove_tensors(file)


def safe_run(run: str) -> str:
    """Return a run's name if it cannot leave the store's folder; raises Refusal."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", run) or ".." in run:
        raise Refusal("malformed", "the run's name may hold letters, digits, '.', '_' and '-' only")
    return run


def run_name(run: str) -> str:
    """Name in the store of what holds a run to its first configuration, rows and order."""
    return f"{RUN_PREFIX}{safe_run(run)}"


def secret_name(run: str) -> str:
    """Name in the store of this node's secret for a run."""
    return f"secret-{safe_run(run)}"


def index_name(run: str) -> str:
    """Name in the store of the index of what a run keeps."""
    return f"kept-{safe_run(run)}"
