"""Rows that an audit plants: nobody's text, each trained on or not by the fall of a coin.

A simulation with ``task.canaries=m`` draws m rows of random words from the public test rows, with random answers. About
half of them, by fair coins from the run's seed, are dealt to the clients' training rows. A model that tells which has
remembered single rows; see :mod:`privet.audit.lower_bound`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from privet.config import Config
from privet.data.chats import write_chat
from privet.data.examples import Examples
from privet.data.tasks import load_test
from privet.seeding import child_seed

_WORDS = 8


@dataclass(frozen=True, eq=False)
class Canaries:
    """The canaries of a run.

    Attributes
    ----------
    examples : Examples
        m rows.
    included : numpy.ndarray
        (m,) bool, the coins.
    clients : numpy.ndarray
        (m,) int64, the client that trains on each that is included.
    """

    examples: Examples
    included: np.ndarray
    clients: np.ndarray


def draw_canaries(config: Config) -> Canaries:
    """Return the canaries of a simulation, the same in every process; of ``task.canaries=null`` none."""
    task, count = config.task, config.task.canaries or 0
    rng = np.random.default_rng(child_seed(config.seed, "canaries"))
    included = rng.random(count) < 0.5
    clients = rng.permutation(np.arange(count) % config.federation.clients)
    words = sorted({word for text in load_test(task).texts for word in text.split()}) if count else []

    def draw() -> list[str]:
        return [" ".join(rng.choice(words, _WORDS)) for _ in range(count)]

    texts, chats = draw(), task.generates and task.label_column is None
    examples = Examples(
        texts=[write_chat([{"role": "user", "content": text}]) for text in texts] if chats else texts,
        pairs=None if task.pair_column is None else draw(),
        labels=np.zeros(count, np.int64) if task.generates else rng.integers(0, len(task.labels), count),
        targets=draw() if task.generates else None,
    )
    return Canaries(examples, included, clients)


def plant(config: Config, parts: Mapping[int, Examples]) -> dict[int, Examples]:
    """Return simulated clients' rows, by client, with the canaries that each trains on behind them."""
    if config.task.canaries is None:
        return dict(parts)
    canaries = draw_canaries(config)
    out = {}
    for client, rows in parts.items():
        chosen = np.flatnonzero(canaries.included & (canaries.clients == client))
        out[client] = rows.join(canaries.examples.take(chosen))
    return out
