"""Runs that are audited."""

from __future__ import annotations

import pytest


@pytest.fixture
def planted() -> list[str]:
    """Overrides of a run that trains on few rows and many canaries until it knows them."""
    return [
        "method=fedavg",
        "model.lora.rank=16",
        "model.lora.targets=[query,value,dense]",
        "task.canaries=128",
        "task.train_rows=30",
        "federation.clients=1",
        "federation.rounds=3",
        "train.local_steps=60",
        "train.optimizer=adamw",
        "train.lr=0.01",
        "train.head_lr=0.02",
        "privacy.epsilon=0.5",
        "privacy.clip=10",
        "evaluation=none",
    ]
