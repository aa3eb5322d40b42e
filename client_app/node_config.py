"""What a node says about itself: Flower's ``--node-config``, or the simulation's partition."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privet.config import Config, unknown
from privet.data.partition import client_examples
from privet.data.tasks import Examples, count_rows, load_node_file
from privet.errors import Refusal

_OWN_KEYS = (
    "name",
    "data-path",
    "store",
    "public-examples",
    "max-epsilon",
    "max-delta",
    "allow-non-private",
)
_FLOWER_KEYS = ("partition-id", "num-partitions")

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
    store : Path or None
        The node's own folder (``store``; default ``~/.privet/nodes/NAME``); None: below the simulation's run.
    public_examples : int or None
        Row count that the node declares public (``public-examples``); None: the rows of its table.
    max_epsilon, max_delta : float or None
        Lifetime budget of this node's rows (``max-epsilon``, ``max-delta``); None: no cap.
    allow_non_private : bool
        Whether the node trains without DP when a run asks for it (``allow-non-private``; default: only in a
        simulation without a cap).
    """

    name: str
    partition: int | None
    data_path: str | None
    store: Path | None
    public_examples: int | None
    max_epsilon: float | None
    max_delta: float | None
    allow_non_private: bool

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
        partition, path = _number(raw, "partition-id", 0), raw.get("data-path")
        if partition is None and path is None:
            raise _wrong("the node was started without data: its --node-config needs data-path (and name)")
        default = f"client-{partition:g}" if partition is not None else platform.node() or "node"
        name = str(raw.get("name", default))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise _wrong("the node's name may hold letters, digits, '.', '_' and '-' only")
        store = raw.get("store")
        if store is None and path is not None:
            store = str(Path.home() / ".privet" / "nodes" / name)
        root = Path(str(store)).expanduser() if store is not None else None
        if root is not None and not root.is_absolute():
            raise _wrong("store must be an absolute path: a relative one would start a new ledger elsewhere")
        cap, declared = _number(raw, "max-epsilon", 0.0), _number(raw, "public-examples", 1)
        simulated = path is None and root is None
        return cls(
            name=name,
            partition=int(partition) if partition is not None else None,
            data_path=str(Path(str(path)).expanduser()) if path is not None else None,
            store=root,
            public_examples=int(declared) if declared is not None else None,
            max_epsilon=cap,
            max_delta=_number(raw, "max-delta", 0.0) or (DEFAULT_MAX_DELTA if cap is not None else None),
            allow_non_private=raw.get("allow-non-private", simulated and cap is None) is True,
        )

    def root(self, request_store: str) -> Path:
        """Folder of this node's store: its own, else below the simulation's run directory."""
        if self.store is not None:
            return self.store
        if not request_store:
            raise _wrong("the node was started without a store")
        return Path(request_store) / self.name

    def examples(self, config: Config) -> Examples:
        """Load this node's usable rows; a real node may have none for what the task selects."""
        if self.data_path is not None:
            return load_node_file(config.task, self.data_path)
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


def _number(raw: Mapping[str, Any], key: str, least: float) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < least or (isinstance(least, float) and value <= least):
        above = "greater than" if isinstance(least, float) else "at least"
        raise _wrong(f"{key} is not allowed as it is: a number {above} {least:g}")
    return float(value)


def _wrong(text: str) -> Refusal:
    return Refusal("node-config", text)
