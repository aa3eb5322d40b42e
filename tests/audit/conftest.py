"""Runs that are audited."""

from __future__ import annotations

import hashlib
from itertools import count

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from privet.privacy.rng import SecureRandomness


@pytest.fixture
def known_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws and noise in every repetition.

    Of other draws about one run in ten teaches the model too few of its canaries to be refuted: these it knows.
    """
    numbers = count(2000)

    def key(self: SecureRandomness) -> None:
        digest = hashlib.sha256(b"key %d" % next(numbers)).digest()
        self._stream = Cipher(algorithms.AES(digest), modes.CTR(bytes(16))).encryptor()

    monkeypatch.setattr(SecureRandomness, "_fresh_key", key)


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
