"""Which code runs: server and nodes must run the same. Imports nothing, so that every process can say it at once."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

PACKAGES = ("client_app", "privet", "server_app", "strategies")


@lru_cache(maxsize=1)
def code_hash() -> str:
    """SHA-256 over the Python sources of the running app."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0")
            digest.update(file.read_bytes())
    return digest.hexdigest()
