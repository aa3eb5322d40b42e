"""Run directories written by hand, so that a test knows every number in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from privet.config import compose

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run's directory.

    `scores` are the server's accuracies of the scored rounds, the last one the result; every round sends 1000 bytes
    each way by each of two nodes, a tenth of that for the head.
    """
    (tmp_path / "runs").mkdir()

    def make(
        name: str,
        *overrides: str,
        scores: Sequence[float] = (0.8,),
        examples: int = 400,
        epsilon: float | None = 5.9,
        numbers: int = 100,
        seconds: float = 10.0,
        summary: dict[str, Any] | None = None,
        privacy: dict[str, Any] | None = None,
        rounds: list[dict[str, Any]] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Path:
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        config = compose(["model=tiny_random", *overrides])
        raw = {**config.to_dict(), **(settings or {})}
        (path / "config.yaml").write_text("# Resolved configuration of run x; hash y\n" + yaml.safe_dump(raw))
        (path / "events.jsonl").write_text("")
        private = config.privacy.private
        lines = rounds or [
            {
                "round": i,
                "phases": [{"name": "train", "seconds": 1.0, "sent": 2, "replied": 2, "failed": []}],
                "train_loss": None,
                "eval": {"accuracy": score, "loss": 1 - score, "examples": examples},
                "upload_bytes": 1800,
                "download_bytes": 1800,
                "epsilon_max": epsilon and epsilon * i / len(scores) if private else None,
                "seconds": 1.0,
                "void": False,
            }
            for i, score in enumerate(scores, start=1)
        ]
        (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        way = {"numbers": {}, "bytes": {"adapter": 900, "head": 100}}
        traffic = [
            {"round": r["round"], "nodes": {n: {"upload": way, "download": way} for n in ("a", "b")}}
            for r in lines
        ]
        sent = 2 * len(lines)
        totals = {
            f"{w}_bytes_{p}": sent * b
            for w in ("upload", "download")
            for p, b in (("adapter", 900), ("head", 100))
        }
        totals["upload_numbers_adapter"] = 12345  # numbers are no bytes
        (path / "communication.json").write_text(json.dumps({"rounds": traffic, "totals": totals}))
        spent = {"examples": 50, "steps": 8, "entries": []}
        (path / "privacy.json").write_text(
            json.dumps(
                {
                    "private": private,
                    "mechanism": "DP-SGD" if private else None,
                    "adjacency": "add or remove one row" if private else None,
                    "accountant": "rdp" if private else None,
                    "delta": config.privacy.delta,
                    "target_epsilon": config.privacy.epsilon,
                    "max_epsilon": epsilon if private else None,
                    "excludes_tuning": True,
                    "warnings": [] if private else ["not private: privacy=none"],
                    "nodes": [
                        {"node": "a", "epsilon": epsilon if private else None, **spent},
                        {"node": "b", "epsilon": 1.25 if private else None, **spent},
                    ],
                    **(privacy or {}),
                }
            )
        )
        (path / "summary.json").write_text(
            json.dumps(
                {
                    "status": "completed",
                    "metrics": {"accuracy": scores[-1], "loss": 1 - scores[-1], "examples": examples},
                    "failures": [],
                    "upload_numbers": numbers,
                    "download_numbers": numbers + 1,
                    "seconds": seconds,
                    "versions": {"privet": "0.1.0"},
                    **(summary or {}),
                }
            )
        )
        return path

    return make
