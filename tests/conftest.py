"""Factories shared by all tests: a small real table, tiny configurations and whole runs in this process."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from tests.grid import InProcessGrid, Killed


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _little_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assign slots in tenths of a second; which slots it are matters to few tests."""
    monkeypatch.setattr("privet.hsip.solver.ANNEALED_PASSES", 50)


def write_table(path: Path, rows: int, *, seed: int = 0) -> Path:
    """Write a learnable two-label table: the label is whether a good word stands in the text."""
    import random

    rng = random.Random(seed)
    good, bad = ["lovely", "great", "superb"], ["awful", "dreadful", "poor"]
    filler = ["the", "food", "was", "staff", "room", "today", "quite", "and", "view", "again"]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label", "site"])
        for i in range(rows):
            label = i % 2
            words = [*rng.sample(filler, 4), rng.choice(good if label else bad), str(i)]
            rng.shuffle(words)
            writer.writerow([" ".join(words), ["no", "yes"][label], f"site{i % 3}"])
    return path


@dataclass
class Outcome:
    """What a run in this process left behind."""

    path: Path
    grid: InProcessGrid
    error: BaseException | None

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return self.lines("rounds.jsonl")


def state_of(outcome: Outcome) -> dict[str, torch.Tensor]:
    """The method's state in the run's last checkpoint."""
    (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data") / "rows.csv", 180)


@pytest.fixture
def settings(table: Path) -> list[str]:
    """Overrides of a run that takes a second: a tiny model on a small real table, three clients."""
    return [
        "model=tiny_random",
        "task=csv",
        f"task.path={table}",
        "task.labels=[no,yes]",
        "task.test_rows=30",
        "federation.clients=3",
        "federation.rounds=2",
        "evaluate_every=1",
        "train.local_steps=2",
        "train.batch_size=16",
        "train.optimizer=sgd",
        "train.lr=0.5",
        "train.head_lr=null",
    ]


@pytest.fixture
def run(tmp_path: Path, settings: list[str]) -> Callable[..., Outcome]:
    """Run the real ServerApp over the real ClientApp, in this process."""
    from client_app.app import app as client_app
    from server_app.app import app as server_app

    count = iter(range(1000))

    def start(
        *overrides: str,
        nodes: int = 3,
        path: Path | None = None,
        resume: bool = False,
        bare: bool = False,
        **grid: Any,
    ) -> Outcome:
        import shlex

        path = path or tmp_path / f"run{next(count)}"
        world = InProcessGrid(client_app, nodes, **grid)
        context = Context(
            run_id=int.from_bytes(path.name.encode()[-6:], "big"),
            node_id=1,
            node_config={},
            state=RecordDict(),
            run_config={"run-dir": str(path), "resume": True}
            if resume
            else {"run-dir": str(path), "overrides": shlex.join([*([] if bare else settings), *overrides])},
        )
        error: BaseException | None = None
        try:
            server_app(world, context)
        except (Exception, Killed) as caught:
            error = caught
        return Outcome(path, world, error)

    return start


@pytest.fixture
def quick_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run wait for missing nodes and replies for a moment only."""
    import server_app.run

    monkeypatch.setattr(server_app.run, "CONNECT_WAIT", 0.3)
