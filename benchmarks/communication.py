"""What every method sends, counted from the messages of real rounds.

    python -m benchmarks.communication [--model roberta_base_random] [key=value ...]

Every method trains for a few tiny rounds over two clients, in this process but through the real server and client
apps and their packed messages; the numbers are those of one client in the last round, as the run's
``communication.json`` has them, and what it was sent once in the whole run. ``apart`` goes along for scores only.
Without privacy unless a row says otherwise; ``trained`` is the vector that is clipped under DP, head included. Prints
the table of docs/communication.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from client_app.app import app as client_app
from privet.config import options
from server_app.app import app as server_app
from server_app.catalogue import entry
from tests.grid import InProcessGrid

CLIENTS = 2
TINY = [
    f"federation.clients={CLIENTS}",
    "federation.rounds=3",
    "train.local_steps=1",
    "train.batch_size=2",
    "task.train_rows=16",
    "task.test_rows=4",
    "evaluation=none",
]
HEADER = (
    "method",
    "messages",
    "up",
    "down",
    "once, down",
    "apart, up",
    "head, each way",
    "up, bytes",
    "trained under DP",
    "stays on a node",
)
# Settings that change what a method sends.
VARIANTS = {
    "fedask": [["privacy=dp", "method.transport=factor"]],
    "fedper": [["method.shared_layers=4"]],
    "fedsa": [["method.global_b=mean"]],
    "fedavg": [["federation.upload=int8"]],
}


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Run a method; return one client's traffic of the last round, by way, and what it was sent once in all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        grid = InProcessGrid(client_app, CLIENTS)
        settings = {"run-dir": str(path), "overrides": shlex.join(overrides)}
        server_app(
            grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
        )
        rounds = json.loads((path / "communication.json").read_text())["rounds"]
    nodes = [r["nodes"]["client-0"] for r in rounds]
    return {**nodes[-1], "once": sum(n["download"]["numbers"]["once"] for n in nodes)}


def cells(name: str, common: Sequence[str], variant: Sequence[str]) -> list[str]:
    """Return a row of the table."""
    private = "privacy=dp" in variant
    found = measure([*common, f"method={name}", *([] if private else ["privacy=none"]), *variant])
    up, down = found["upload"], found["download"]
    facts = entry(name, [*common, *variant])
    numbers = (
        up["numbers"]["adapter"],
        down["numbers"]["adapter"],
        found["once"],
        up["numbers"]["once"],
        up["numbers"]["head"],
        up["bytes"]["adapter"],
        facts.trained,
    )
    return [
        " ".join(f"`{text}`" for text in (name, *variant)),
        ", ".join(facts.messages),
        *(f"{n:,}".replace(",", " ") for n in numbers),
        facts.stays,
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every method and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="roberta_base_random")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    common = [f"model={arguments.model}", *TINY, *arguments.overrides]
    print(f"| {' | '.join(HEADER)} |\n|---|---|{'---:|' * 7}---|")
    for name in options("method"):
        for variant in ([], *VARIANTS.get(name, [])):
            print(f"| {' | '.join(cells(name, common, variant))} |", flush=True)


if __name__ == "__main__":
    main()
