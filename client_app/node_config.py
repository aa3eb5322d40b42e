"""What a node says about itself: Flower's ``--node-config``, or the simulation's partition."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privet.config import Config, options, unknown
from privet.data.partition import client_examples
from privet.data.tasks import Examples, OwnNames, count_rows, load_node_file
from privet.errors import ConfigError, Refusal

_OWN_KEYS = (
    "name",
    "data-path",
    "public-path",
    "text-column",
    "pair-column",
    "label-column",
    "labels",
    "image-column",
    "image-folder",
    "store",
    "retention-days",
    "worker",
    "worker-optional",
    "public-examples",
    "max-epsilon",
    "max-delta",
    "min-clip",
    "methods",
    "allow-non-private",
    "code-hash",
    "device",
    "model-path",
)
_FLOWER_KEYS = ("partition-id", "num-partitions")
_TABLE_KEYS = ("text-column", "pair-column", "label-column", "labels", "image-column", "image-folder")
_MOST_ROWS = 10**12
_LONGEST_SOCKET = 107

DEFAULT_MAX_DELTA = 1e-5
"""Largest delta that a node with a lifetime cap accepts: an epsilon means nothing beside a delta near 1."""


@dataclass(frozen=True)
class NodeConfig:
    """One node's own settings; a server cannot change them.

    Attributes
    ----------
    name : str
        Everything that lasts is keyed by it (``name``; default: the partition or the machine's name).
    partition : int or None
        Index of this client in a simulation; None on a real node.
    data_path : str or None
        The node's own table (``data-path``); None in a simulation.
    public_path : str or None
        A table that the owner calls public (``public-path``), in the form of the node's own: models of DP runs
        are scored on it.
    own : OwnNames
        The table's own names (``text-column``, ``pair-column``, ``label-column``, ``labels``, ``image-column``), and
        where its image files lie (``image-folder``; default: beside the table).
    store : Path or None
        The node's own folder (``store``; default ``~/.privet/nodes/NAME``); None: below the simulation's run.
    public_examples : int or None
        Row count that the node declares public (``public-examples``); None: the rows of its table.
    max_epsilon, max_delta : float or None
        Lifetime budget of this node's rows (``max-epsilon``, ``max-delta``); None: no cap.
    allow_non_private : bool
        Whether the node trains without DP when a run asks for it (``allow-non-private``; default: only in a
        simulation without a cap).
    min_clip : float or None
        Smallest ``privacy.clip`` that this node takes part with (``min-clip``).
    methods : tuple of str or None
        The methods that this node takes part in (``methods``); None: all.
    code_hash : str or None
        Beginning of the one code hash that this node runs (``code-hash``); None: the server's.
    device : str or None
        Where this node computes (``device``); it goes before the run's ``train.device``.
    model_path : str or None
        Where the base model of every run lies on this node (``model-path``), in place of ``model.path``.
    retention_days : int or None
        Days after which what an ended run left in the store is removed (``retention-days``); None: kept.
    worker : Path or None
        Socket of this node's ``privet worker``, through which every message goes (``worker``); None: none.
    worker_optional : bool
        Whether the ClientApp's process does the work where no worker listens (``worker-optional``; default: no).
    """

    name: str
    partition: int | None
    data_path: str | None
    public_path: str | None
    own: OwnNames
    store: Path | None
    public_examples: int | None
    max_epsilon: float | None
    max_delta: float | None
    allow_non_private: bool
    min_clip: float | None
    methods: tuple[str, ...] | None
    code_hash: str | None
    device: str | None
    model_path: str | None
    retention_days: int | None
    worker: Path | None
    worker_optional: bool

    @property
    def simulated(self) -> bool:
        """Whether this is a simulation's client: rows from a partition, and no setting of a real node."""
        return self.data_path is None and self.store is None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> NodeConfig:
        """Read Flower's node configuration.

        Raises
        ------
        Refusal
            Kind ``"node-config"`` for a missing or unknown key or a value that cannot be.
        """
        for key in raw:
            if key not in (*_OWN_KEYS, *_FLOWER_KEYS):
                raise _wrong(unknown("key", str(key)[:60], _OWN_KEYS))
        partition, path = _count(raw, "partition-id", 0), _text(raw, "data-path")
        if partition is None and path is None:
            raise _wrong("the node was started without data: its --node-config needs data-path (and name)")
        default = f"client-{partition}" if partition is not None else platform.node() or "node"
        name = _text(raw, "name") or default
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise _wrong("name may hold letters, digits, '.', '_' and '-' only: set one in --node-config")
        own = _own_names(raw)
        if path is None and own != OwnNames():
            key = next(k for k in _TABLE_KEYS if k in raw)
            raise _wrong(f"{key} has no effect without data-path: it is for a node's own table")
        root = _folder(_text(raw, "store"), name if path is not None else None)
        cap, declared = _number(raw, "max-epsilon"), _count(raw, "public-examples", 1)
        simulated = path is None and root is None
        return cls(
            name=name,
            partition=partition,
            data_path=path,
            public_path=_text(raw, "public-path"),
            own=own,
            store=root,
            public_examples=declared,
            max_epsilon=cap,
            max_delta=_number(raw, "max-delta", below=1.0)
            or (DEFAULT_MAX_DELTA if cap is not None else None),
            allow_non_private=_switch(raw, "allow-non-private", simulated and cap is None),
            min_clip=_number(raw, "min-clip"),
            methods=_methods(_text(raw, "methods")),
            code_hash=_pattern(raw, "code-hash", r"[0-9a-f]{16,64}", "16 to 64 hexadecimal digits"),
            device=_pattern(raw, "device", r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N"),
            model_path=_model_path(_text(raw, "model-path")),
            retention_days=_count(raw, "retention-days", 1),
            worker=_socket(_text(raw, "worker")),
            worker_optional=_switch(raw, "worker-optional", False),
        )

    def adapt(self, config: Config) -> Config:
        """Return a run's configuration as this node carries it out: its own device, its own copy of the model.

        What the run's hash covers stays as it was; whether the copy holds the same weights is for the server to see.
        """
        train, model = config.train, config.model
        if self.device is not None:
            train = dataclasses.replace(train, device=self.device)
        if self.model_path is not None and model.path is not None:
            model = dataclasses.replace(model, path=self.model_path, revision=None)
        return dataclasses.replace(config, train=train, model=model)

    def root(self, request_store: str) -> Path:
        """Folder of this node's store: its own, else below the simulation's run directory."""
        if self.store is not None:
            return self.store
        if not request_store:
            raise _wrong("the node was started without a store")
        folder = Path(request_store)
        if not request_store.isprintable() or not folder.is_absolute() or ".." in folder.parts:
            raise Refusal("malformed", "the store of a simulation is an absolute path without '..'")
        return folder / self.name

    def examples(self, config: Config, *, tell: bool = False) -> Examples:
        """Load this node's usable rows; a real node may have none for what the task selects.

        With `tell`, rows that are left out go to the node's own log, by reason and number.
        """
        if self.data_path is not None:
            return load_node_file(config.task, self.data_path, self.own, tell=tell)
        if self.partition is None:
            raise _wrong("the node was started without data: its --node-config needs data-path")
        return client_examples(config, self.partition)

    def declared(self, usable: int) -> int:
        """Row count that crosses the wire and sets q.

        On a real node it never depends on what the server's task selects, or each task would be a free exact
        count query: it is `public_examples`, else the table's rows. In a simulation it is the usable rows.
        """
        if self.public_examples is not None:
            return self.public_examples
        return usable if self.data_path is None else count_rows(self.data_path)


# --- values ----------------------------------------------------------------------------------------


def parse_node_config(text: str) -> dict[str, Any]:
    """Read ``key=value ...`` or the path of a TOML file as ``flower-supernode --node-config`` does.

    Raises
    ------
    ConfigError
        If the file or the text cannot be read.
    """
    from flwr.common.config import parse_config_args

    try:
        return parse_config_args([text])
    except OSError as error:
        raise ConfigError(f"the node configuration {text} cannot be read: {error.strerror}") from None
    except Exception as error:  # whatever the TOML reader or Flower's command line raises
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"the node configuration is not key=value with texts in quotes: {reason}") from None


def _number(raw: Mapping[str, Any], key: str, *, below: float = math.inf) -> float | None:
    """Return a finite number above 0 and below `below`; None where the key is not set."""
    value = raw.get(key)
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < below or not math.isfinite(value):
        limit = f" and less than {below:g}" if below < math.inf else ""
        raise _wrong(f"{key} is not allowed as it is: a number greater than 0{limit}")
    return float(value)


def _count(raw: Mapping[str, Any], key: str, least: int) -> int | None:
    """Return a whole number; None where the key is not set."""
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_ROWS:
        raise _wrong(f"{key} is not allowed as it is: a whole number, at least {least}")
    return value


def _switch(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(f"{key} is not allowed as it is: true or false, without quotes")
    return value


def _text(raw: Mapping[str, Any], key: str) -> str | None:
    """Return a text that is not blank; None where the key is not set. A column may be called 0."""
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool) or "\0" in str(value):
        raise _wrong(f"{key} is not allowed as it is: a text, in quotes")
    if not str(value).strip():
        raise _wrong(f"{key} is empty")
    return str(value)


def _pattern(raw: Mapping[str, Any], key: str, pattern: str, allowed: str) -> str | None:
    value = _text(raw, key)
    if value is not None and not re.fullmatch(pattern, value):
        raise _wrong(f"{key} is not allowed as it is: {allowed}")
    return value


def _methods(text: str | None) -> tuple[str, ...] | None:
    """Read names of methods between spaces or commas; a name that no method has would refuse every run."""
    if text is None:
        return None
    names = tuple(name for name in re.split(r"[\s,]+", text) if name)
    known = options("method")
    if not names or not set(names) <= set(known):
        raise _wrong(
            f'methods is not allowed as it is: names such as "fedask fedhsip", of {", ".join(known)}'
        )
    return names


def _model_path(text: str | None) -> str | None:
    if text is not None and not text.startswith(("/", "~", "package:")):
        raise _wrong("model-path must be an absolute path: the model's folder on this machine")
    return text


def _socket(text: str | None) -> Path | None:
    if text is not None and (not text.startswith("/") or len(text.encode()) > _LONGEST_SOCKET):
        raise _wrong(f"worker must be an absolute path of at most {_LONGEST_SOCKET} bytes: a Unix socket's")
    return None if text is None else Path(text)


def _own_names(raw: Mapping[str, Any]) -> OwnNames:
    try:
        return OwnNames(
            text_column=_text(raw, "text-column"),
            pair_column=_text(raw, "pair-column"),
            label_column=_text(raw, "label-column"),
            labels=_labels(_text(raw, "labels")),
            image_column=_text(raw, "image-column"),
            image_folder=_text(raw, "image-folder"),
        )
    except ConfigError as error:
        raise _wrong(str(error)) from None


def _labels(text: str | None) -> tuple[str, ...] | None:
    """Read label values: ``0,1``, or a JSON list where a value holds a comma: ``["a, b", "c"]``.

    They are compared with the table's cells without spaces around them, so they have none here.
    """
    if text is None:
        return None
    values: list[Any] = text.split(",")
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise _wrong('labels begins with \'[\' but is no JSON list, such as ["a, b", "c"]') from None
    if any(not isinstance(value, (str, int)) or isinstance(value, bool) for value in values):
        raise _wrong('labels is not allowed as it is: texts, such as 0,1 or ["a, b", "c"]')
    labels = tuple(str(value).strip() for value in values)
    if "" in labels:
        raise _wrong("labels is not allowed as it is: a value is empty")
    return labels


def _folder(store: str | None, name: str | None) -> Path | None:
    """Return the node's own store; the default one where it has a `name` and sets none."""
    try:
        if store is not None:
            root = Path(store).expanduser()
        elif name is not None:
            root = Path.home() / ".privet" / "nodes" / name
        else:
            return None
    except RuntimeError:
        raise _wrong("store is not allowed as it is: there is no such home folder") from None
    if not root.is_absolute():
        raise _wrong("store must be an absolute path: a relative one would start a new ledger elsewhere")
    return root


def _wrong(text: str) -> Refusal:
    return Refusal("node-config", text)
