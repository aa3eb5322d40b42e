"""The nodes' own models after a simulation, from their stores in the run directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from client_app.memory import KeptArrays
from client_app.store import NodeStore
from privet.errors import PrivetError
from privet.wire import Arrays, Payload
from strategies.base import LoraStrategy


def personal_models(
    run_dir: Path, run: str, method: LoraStrategy, received: Payload
) -> Iterator[tuple[str, Arrays]]:
    """Yield each node that has a model of its own, and what that changes in the base model.

    Parameters
    ----------
    run_dir : Path
        A finished simulation.
    run : str
        Its id, under which nodes keep.
    method : LoraStrategy
        Knows what of it is a node's own.
    received : Payload
        The server's final model, as nodes are sent it to score.

    Raises
    ------
    PrivetError
        If the run was no simulation: its nodes' stores are elsewhere, and stay there.
    StoreError
        If a store is damaged or in use.
    """
    folder = run_dir / "nodes"
    if not folder.is_dir():
        raise PrivetError(f"{run_dir} was no simulation: its nodes' own models are with them, and stay there")
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        with NodeStore(path, path.name, timeout=5.0) as store:
            values = method.personal(received, KeptArrays(store, run, 0, "read"))
        if values is not None:
            yield path.name, values
