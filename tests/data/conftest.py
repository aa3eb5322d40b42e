"""Small tables and configurations; every factory takes what a test changes as keywords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privet.config import FederationConfig, PartitionConfig, TaskConfig
from privet.data.tasks import Examples


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., TaskConfig]:
    def make(**changes: Any) -> TaskConfig:
        values: dict[str, Any] = {
            "name": "csv",
            "kind": "classification",
            "path": str(tmp_path / "table.csv"),
            "test_path": None,
            "test_rows": 2,
            "validation_rows": None,
            "canaries": None,
            "train_rows": None,
            "text_column": "text",
            "pair_column": None,
            "choices_column": None,
            "image_column": None,
            "image_folder": None,
            "test_image_folder": None,
            "label_column": "label",
            "labels": ("no", "yes"),
            "prompt": None,
            "writing": None,
            "minimum": {},
            "deduplicate": False,
            "head": "shared",
            "pooling": "mean",
        }
        return TaskConfig(**{**values, **changes})

    return make


@pytest.fixture
def federation() -> Callable[..., FederationConfig]:
    def make(clients: int = 3, **split: Any) -> FederationConfig:
        values: dict[str, Any] = {"kind": "iid", "column": "label", "alpha": 0.5, "min_rows": 1}
        return FederationConfig(
            clients=clients,
            sampled=None,
            rounds=1,
            min_replies=1,
            timeout=60.0,
            weighting="auto",
            upload="float32",
            cpus_per_client=1,
            gpus_per_client=0.0,
            partition=PartitionConfig(**{**values, **split}),
        )

    return make


@pytest.fixture
def examples() -> Callable[..., Examples]:
    def make(rows: int, columns: list[Any] | None = None) -> Examples:
        return Examples(
            texts=[f"text {i}" for i in range(rows)],
            pairs=None,
            labels=np.arange(rows, dtype=np.int64) % 2,
            columns=None if columns is None else np.array(columns, dtype=object),
        )

    return make


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Write CSV text (or bytes) below the test's folder."""

    def write(content: str | bytes, name: str = "table.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def numbered(table: Callable[..., Path]) -> Callable[..., Path]:
    """Write a table of distinct texts with alternating labels."""

    def write(rows: int, name: str = "table.csv", prefix: str = "note") -> Path:
        lines = [f"{prefix} {i},{('no', 'yes')[i % 2]}" for i in range(rows)]
        return table("text,label\n" + "\n".join(lines) + "\n", name)

    return write
