"""Who holds which rows: a simulation's split of one table by Flower Datasets' partitioners, or own files.

A split depends on the table, ``federation`` and the seed only, so every process that needs it draws the same.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from privet.config import Config, FederationConfig, unknown
from privet.data.canaries import plant
from privet.data.holdout import split_holdout
from privet.data.tasks import CLIENT, LABEL, Examples, load_client_file, load_task
from privet.errors import ConfigError, DataError

# A partitioner gives up after eleven draws of its own; each further one starts from a seed of its own.
_DIRICHLET_STREAMS = 20


def partition(cfg: FederationConfig, examples: Examples, seed: int) -> list[np.ndarray]:
    """Split rows over the clients of a simulation; every row goes to exactly one client.

    Parameters
    ----------
    cfg : FederationConfig
        How many clients, and how to split: ``iid`` (sizes differ by at most one), ``dirichlet`` (Dirichlet
        shares of every value of a column) or ``natural`` (one client a value, in the values' order).
    examples : Examples
        The training rows; `columns` holds the column that drives the split unless that is ``label``.
    seed : int
        Seed of the split; ``natural`` needs none.

    Returns
    -------
    list of numpy.ndarray
        For every client the row indices, ascending int64; none is empty.

    Raises
    ------
    DataError
        One line when the rows do not allow the split.
    """
    rows, clients = len(examples), cfg.clients
    if clients > rows:
        raise DataError(f"federation.clients = {clients} is not possible: there are {rows} training rows")
    split = {"iid": _iid, "dirichlet": _dirichlet, "natural": _natural}[cfg.partition.kind]
    parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in split(cfg, examples, seed)]
    _verify(parts, rows, clients)
    return parts


def client_examples(cfg: Config, client: int) -> Examples:
    """Load the training rows of one simulated client, with the canaries that it trains on.

    Parameters
    ----------
    cfg : Config
        The run's configuration; the split is drawn from its seed.
    client : int
        0 to ``federation.clients`` - 1; with ``{client}`` in ``task.path`` also the file's number.

    Raises
    ------
    ConfigError, DataError
        One line when client, table or split is impossible.
    """
    if not 0 <= client < cfg.federation.clients:
        raise ConfigError(f"client {client} is not allowed: 0 to {cfg.federation.clients - 1}")
    if _own_files(cfg):
        rows = load_client_file(cfg.task, client)
    else:
        train = _train(cfg)
        rows = train.take(partition(cfg.federation, train, cfg.seed)[client])
    return plant(cfg, {client: rows})[client]


def declared_rows(cfg: Config) -> list[int]:
    """Return every simulated client's number of rows that train; raises as :func:`client_examples` does."""
    if _own_files(cfg):
        parts = [load_client_file(cfg.task, client) for client in range(cfg.federation.clients)]
    else:
        train = _train(cfg)
        parts = [train.take(rows) for rows in partition(cfg.federation, train, cfg.seed)]
    return [len(split_holdout(cfg, part)[0]) for part in plant(cfg, dict(enumerate(parts))).values()]


def _own_files(cfg: Config) -> bool:
    if CLIENT not in cfg.task.path:
        return False
    kind = cfg.federation.partition.kind
    if kind != "iid":
        raise ConfigError(
            f"federation.partition.kind = {kind} has no effect with {{client}} in task.path: "
            "the files are the split"
        )
    return True


def _train(cfg: Config) -> Examples:
    split = cfg.federation.partition
    return load_task(cfg.task, None if split.kind == "iid" else split.column).train


# --- the three splits ----------------------------------------------------------------------------


def _iid(cfg: FederationConfig, examples: Examples, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import IidPartitioner

    # The partitioner cuts, it does not shuffle.
    order = np.random.default_rng(seed).permutation(len(examples))
    return _parts(IidPartitioner(cfg.clients), cfg.clients, row=order)


def _dirichlet(cfg: FederationConfig, examples: Examples, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import DirichletPartitioner

    rows, clients, least = len(examples), cfg.clients, cfg.partition.min_rows
    if least * clients > rows:
        raise DataError(
            f"federation.partition.min_rows = {least} is not possible: "
            f"{clients} clients need {least * clients} rows, there are {rows}"
        )
    _, codes = _groups(cfg, examples)
    for stream in np.random.SeedSequence(seed).spawn(_DIRICHLET_STREAMS):
        partitioner = DirichletPartitioner(
            num_partitions=clients,
            partition_by="group",
            alpha=cfg.partition.alpha,
            min_partition_size=least,
            seed=int(stream.generate_state(1, np.uint64)[0]),
        )
        with warnings.catch_warnings(), contextlib.suppress(ValueError):
            warnings.simplefilter("ignore")  # it warns at every draw that leaves a client too small
            return _parts(partitioner, clients, row=np.arange(rows), group=codes)
    raise DataError(
        f"federation.partition.min_rows = {least} was not met in {_DIRICHLET_STREAMS * 11} draws with "
        f"federation.partition.alpha = {cfg.partition.alpha:g}: lower min_rows or raise alpha"
    )


def _natural(cfg: FederationConfig, examples: Examples, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    values, codes = _groups(cfg, examples)
    if len(values) != cfg.clients:
        raise DataError(
            f"federation.clients = {cfg.clients} is not possible: federation.partition.column = "
            f"{cfg.partition.column} has {len(values)} values, one client each"
        )
    with contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar
        return _parts(NaturalIdPartitioner("group"), cfg.clients, row=np.arange(len(examples)), group=codes)


def _groups(cfg: FederationConfig, examples: Examples) -> tuple[list[Any], np.ndarray]:
    """Return the column's distinct values in order and every row's index into them, (n,) int64.

    Whole numbers sort as numbers, so that client 2 holds site 2 and not site 10.
    """
    if examples.columns is not None:
        cells = [str(value) for value in examples.columns]
    elif cfg.partition.column == LABEL:
        cells = [str(value) for value in examples.labels]
    else:
        raise DataError(unknown("federation.partition.column", cfg.partition.column, [LABEL]))
    numeric = all(cell.isdecimal() for cell in cells)
    values = sorted(set(cells), key=lambda cell: (int(cell) if numeric else 0, cell))
    index = {value: i for i, value in enumerate(values)}
    return values, np.array([index[cell] for cell in cells], dtype=np.int64)


def _parts(partitioner: Any, clients: int, **columns: np.ndarray) -> list[np.ndarray]:
    from datasets import Dataset

    # As numpy arrays in one read: iterating the library's column builds a Python object a row.
    partitioner.dataset = Dataset.from_dict(columns).with_format("numpy")
    return [partitioner.load_partition(i)[:]["row"] for i in range(clients)]


def _verify(parts: Sequence[np.ndarray], rows: int, clients: int) -> None:
    """Check the split itself, whichever library drew it."""
    if len(parts) != clients or any(len(part) == 0 for part in parts):
        raise DataError(f"the split gave rows to {sum(len(p) > 0 for p in parts)} of {clients} clients")
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows)):
        raise DataError(f"the split lost or doubled some of the {rows} training rows")
