"""Rows that a client keeps out of training to score models on."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from privet.config import Config
from privet.data.tasks import Examples


def split_holdout(config: Config, examples: Examples) -> tuple[Examples, Examples]:
    """Split a client's rows into those that train and those that are held out.

    Rows are held out only where something is scored on them: without DP, with ``evaluation`` on the clients.
    Under DP clients score on public rows. Which rows it are follows from their content, so that it does not
    change with their order.

    Returns
    -------
    train, held : Examples
        Both in the order of `examples`; at least one row trains.
    """
    if config.privacy.private or not config.scores_on_clients:
        return examples, examples.take(np.array([], dtype=np.int64))
    keys = [hashlib.sha256(b"holdout:" + key.encode()).digest() for key in examples.keys]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    size = min(math.ceil(config.holdout * len(order)), max(0, len(order) - 1))
    held, train = (
        np.sort(np.array(order[:size], dtype=np.int64)),
        np.sort(np.array(order[size:], dtype=np.int64)),
    )
    return examples.take(train), examples.take(held)
