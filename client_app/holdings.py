"""What a node's process holds between messages: nothing, or with ``privet worker`` the open store and the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from client_app.node_config import NodeConfig
from client_app.rows import Memory, Rows
from client_app.store import NodeStore
from privet.config import Config
from privet.errors import StoreError
from privet.wire import Request


@dataclass
class Holdings:
    """What one process holds.

    Attributes
    ----------
    store : NodeStore or None
        A store that is open for as long as the process lives; None: every message opens its own.
    memory : Memory
        Tokenised rows by their key. The base model is kept by :func:`privet.adapters.load_model`.
    """

    store: NodeStore | None = None
    memory: Memory = field(default_factory=dict)

    @contextmanager
    def opened(self, node: NodeConfig, request: Request) -> Iterator[NodeStore]:
        """Yield the node's open store."""
        root = node.root(request.store)
        if self.store is None:
            with NodeStore(root, node.name) as store:
                yield store
            return
        if self.store.root != root or self.store.node != node.name:
            raise StoreError("the store that this process holds is another one")
        yield self.store

    def rows(self, node: NodeConfig, config: Config, store: NodeStore) -> Rows:
        """Return the node's training rows for a configuration."""
        return Rows(node, config, store, self.memory)
