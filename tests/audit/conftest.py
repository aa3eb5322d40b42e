"""Runs that are audited."""

from __future__ import annotations

import pytest


@pytest.fixture
def planted() -> list[str]:
    """Overrides of a run that trains on few rows and many canaries until it knows them."""
    return [
        "method=fedavg",
        "task.canaries=64",
        "task.train_rows=30",
        "federation.rounds=6",
        "train.local_steps=20",
        "train.batch_size=16",
        "evaluation=none",
    ]
