"""A node's training rows as a phase needs them: tokenised once, and kept in the node's store until something changes.

What is kept is private data of the node. It is found again by a hash of everything that it follows from: the table's
bytes, the tokenizer's files, the settings, the code and its packages; whatever differs, it is made anew, and so it is
where a file is damaged. A phase that trains on nothing, such as FedASK's second, reads no row at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client_app.node_config import NodeConfig
from client_app.store import TOKENS, NodeStore
from privet.code import code_hash
from privet.config import Config, ModelConfig
from privet.data.collate import Tokenised, padding_id
from privet.data.sources import resolve_path
from privet.errors import ConfigError, StoreError

log = logging.getLogger("privet")

_FORM = 1
_MOST_KEPT = 4  # tables or settings; older ones are in nobody's use
_MAKERS = ("transformers", "tokenizers", "pandas", "pyarrow", "datasets", "numpy")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".gguf"}
_COMMIT_LENGTH = 40

Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class RowFacts:
    """What is said of the rows without reading them.

    Attributes
    ----------
    snapshot : str
        Hash of the rows that train; equal for equal rows.
    usable : int
        How many they are.
    table : int or None
        Rows of the node's own table, whatever the task selects; None where nobody asks.
    """

    snapshot: str
    usable: int
    table: int | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """Tokenised rows and the id of the padding."""

    rows: Tokenised
    pad_id: int


Tokenise = Callable[[Any, Any, int], Tokenised]
"""From a tokenizer, examples and the most tokens of a row to tokenised rows."""

Memory = dict[str, Prepared]
"""Rows that a process has read already, by their key."""


class Rows:
    """One node's training rows for one configuration.

    Parameters
    ----------
    node : NodeConfig
        Where they lie.
    config : Config
        The run's configuration as the node carries it out.
    store : NodeStore
        The node's open store.
    memory : Memory
        What this process has read for earlier messages.
    """

    def __init__(self, node: NodeConfig, config: Config, store: NodeStore, memory: Memory) -> None:
        self._node = node
        self._config = config
        self._store = store
        self._memory = memory
        self._stamp = _stamp(node.data_path)
        self._key = _key(node, config, self._stamp)

    @cached_property
    def facts(self) -> RowFacts:
        """Snapshot and counts; read from the store where they are known."""
        if self._key is not None:
            try:
                known = self._store.load_json(self._key, folder=TOKENS)
                if known is not None:
                    return RowFacts(**known["facts"])
            except (StoreError, TypeError, KeyError):
                log.warning("what was kept of this node's tokenised rows is damaged: it is made again")
        return self._read_facts()

    @property
    def declared(self) -> int:
        """The row count that crosses the wire; see :meth:`NodeConfig.declared`."""
        facts = self.facts
        if self._node.public_examples is not None:
            return self._node.public_examples
        return facts.usable if facts.table is None else facts.table

    def prepared(self, tokenise: Tokenise) -> Prepared:
        """Return the tokenised rows: of an earlier message, from the store, or made now by the task's `tokenise`."""
        key = self._key
        if key is None:
            return self._make(tokenise)
        if key not in self._memory:
            found = self._load(key)
            if found is None:
                found = self._make(tokenise)
                self._save(key, found)
            self._memory.clear()
            self._memory[key] = found
        return self._memory[key]

    # --- made anew -------------------------------------------------------------------------------

    @cached_property
    def _examples(self) -> Any:
        from privet.data.holdout import split_holdout

        return split_holdout(self._config, self._node.examples(self._config))[0]

    def _read_facts(self) -> RowFacts:
        from privet.data.tasks import count_rows, snapshot

        examples, node = self._examples, self._node
        counted = node.data_path is not None and node.public_examples is None
        table = count_rows(str(node.data_path)) if counted else None
        return RowFacts(snapshot(examples), len(examples), table)

    def _make(self, tokenise: Tokenise) -> Prepared:
        from privet.adapters import load_tokenizer

        tokenizer = load_tokenizer(self._config.model)
        rows = tokenise(tokenizer, self._examples, self._config.model.max_length)
        return Prepared(rows, padding_id(tokenizer))

    # --- kept in the store -----------------------------------------------------------------------

    def _load(self, key: str) -> Prepared | None:
        try:
            known = self._store.load_json(key, folder=TOKENS)
            tensors = self._store.load_tensors(key, folder=TOKENS)
            if known is None or tensors is None:
                return None
            rows = _unflatten({name: tensor.numpy() for name, tensor in tensors.items()})
            if len(rows) != self.facts.usable:
                raise StoreError("another number of rows")
            self._touch(key)
            return Prepared(rows, int(known["pad_id"]))
        except (StoreError, KeyError, TypeError, ValueError):
            log.warning("what was kept of this node's tokenised rows is damaged: it is made again")
            return None

    def _save(self, key: str, made: Prepared) -> None:
        """Keep rows for later messages, if that is possible: nothing depends on it."""
        if _stamp(self._node.data_path) != self._stamp:
            return  # the table changed while it was read
        try:
            tensors = {name: torch.from_numpy(values) for name, values in _flatten(made.rows).items()}
            self._store.save_tensors(key, tensors, folder=TOKENS)
            value = {"facts": dataclasses.asdict(self.facts), "pad_id": made.pad_id}
            self._store.save_json(key, value, folder=TOKENS)
            self._prune()
        except (StoreError, OSError):
            log.exception("this node's tokenised rows cannot be kept")
            for file in self._store.files(TOKENS):
                if key in file.name:
                    file.unlink(missing_ok=True)

    def _touch(self, key: str) -> None:
        """Say that the rows are in use, so that they do not go as old."""
        for file in self._store.files(TOKENS):
            if file.name.partition(".")[0] == key:
                os.utime(file)

    def _prune(self) -> None:
        files = self._store.files(TOKENS)
        newest: dict[str, float] = {}
        for file in files:
            key = file.name.lstrip(".").partition(".")[0]
            newest[key] = max(newest.get(key, 0.0), file.stat().st_mtime)
        kept = sorted(newest, key=newest.__getitem__, reverse=True)[:_MOST_KEPT]
        for file in files:
            if file.name.lstrip(".").partition(".")[0] not in kept:
                file.unlink(missing_ok=True)


# --- what the rows follow from --------------------------------------------------------------------


def _key(node: NodeConfig, config: Config, stamp: Stamp | None) -> str | None:
    """Return the name under which the rows are kept; None where they are not: in a simulation, or with images."""
    if stamp is None or config.task.sees:
        return None
    tokenizer = _tokenizer(config.model)
    if tokenizer is None:
        return None
    settings = config.to_dict()
    facts = [
        _FORM,
        code_hash(),
        [_version(package) for package in _MAKERS],
        _digest(stamp),
        tokenizer,
        settings["task"],
        config.model.max_length,
        [config.privacy.private, config.scores_on_clients, config.holdout],
        dataclasses.asdict(node.own),
        node.public_examples is None,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _stamp(path: str | None) -> Stamp | None:
    """Return path, size and times of a table's files; None where there is no such table of the node's own."""
    if path is None:
        return None
    try:
        place = resolve_path(path)
        files = sorted(f for f in place.rglob("*") if f.is_file()) if place.is_dir() else [place]
        facts = [(f, f.stat()) for f in files]
    except (OSError, ConfigError):
        return None  # whoever reads the table says what is wrong with it
    return tuple((str(f), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in facts)


@lru_cache(maxsize=8)
def _digest(stamp: Stamp) -> str:
    """Return the SHA-256 over files that are told by path, size and times."""
    digest = hashlib.sha256()
    for path, size, _, _ in stamp:
        digest.update(f"{path}:{size}\n".encode())
        with Path(path).open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _tokenizer(model: ModelConfig) -> str | None:
    """Return what a tokenizer is: its files' hash, or the hub's commit; None where that is not known."""
    path = model.tokenizer or model.path or ""
    if not path.startswith(("package:", "~", "/", ".")):
        revision = model.revision or ""
        return f"{path}@{revision}" if len(revision) == _COMMIT_LENGTH else None
    stamp = _stamp(path)
    if stamp is None:
        return None
    return _digest(tuple(file for file in stamp if Path(file[0]).suffix not in _WEIGHTS))


# --- rows as flat arrays --------------------------------------------------------------------------


def _flatten(rows: Tokenised) -> dict[str, np.ndarray]:
    """Return every field as an array; a list of arrays as its numbers and their lengths."""
    flat: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(rows):
        value = getattr(rows, field.name)
        if isinstance(value, list):
            lengths = np.array([len(row) for row in value], dtype=np.int64)
            flat[f"{field.name}.numbers"] = np.concatenate([*value, np.empty(0, np.int64)]).astype(np.int32)
            flat[f"{field.name}.lengths"] = lengths
        elif value is not None:
            flat[field.name] = np.ascontiguousarray(value)
    return flat


def _unflatten(flat: dict[str, np.ndarray]) -> Tokenised:
    fields: dict[str, Any] = {}
    for name, value in flat.items():
        base, _, part = name.partition(".")
        if part == "lengths":
            numbers = flat[f"{base}.numbers"].astype(np.int64)
            if int(value.sum()) != len(numbers) or (len(value) and int(value.min()) < 1):
                raise ValueError(f"{base} does not have its numbers")
            ends = np.cumsum(value)
            fields[base] = [numbers[end - length : end] for end, length in zip(ends, value, strict=True)]
        elif not part:
            fields[base] = value
    return Tokenised(**fields)
