"""What every method sends, counted from the messages of real rounds.

    python -m benchmarks.communication [--model roberta_base_random] [key=value ...]

Every method trains for a few tiny rounds over two clients, in this process but through the real server and client
apps and their packed messages; the numbers are those of one client in the last round, as the run's
``communication.json`` has them. Prints the table of docs/communication.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from client_app.app import app as client_app
from privet.config import options
from server_app.app import app as server_app
from server_app.catalogue import catalogue
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
# Settings that change what a method sends.
VARIANTS = {
    "fedask": [["privacy=dp", "method.transport=factor"]],
    "fedper": [["method.shared_layers=4"]],
    "fedsa": [["method.global_b=mean"]],
    "fedavg": [["federation.upload=int8"]],
}


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Run a method and return one client's traffic of the last round, by way."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        grid = InProcessGrid(client_app, CLIENTS)
        settings = {"run-dir": str(path), "overrides": shlex.join(overrides)}
        server_app(
            grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
        )
        rounds = json.loads((path / "communication.json").read_text())["rounds"]
    traffic: dict[str, Any] = rounds[-1]["nodes"]["client-0"]
    once = sum(
        entry["numbers"]["once"]
        for r in rounds
        for way, entry in r["nodes"].get("client-0", {}).items()
        if way == "download"
    )
    return {**traffic, "once": once}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every method and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="roberta_base_random")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    common = [f"model={arguments.model}", *TINY, *arguments.overrides]
    facts = {entry.name: entry for entry in catalogue(common)}
    print(
        "| method | messages | up | down | once, down | head, each way | up, bytes | trained | stays on a node |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    for name in options("method"):
        for variant in ([], *VARIANTS.get(name, [])):
            privacy = [] if any(v.startswith("privacy=") for v in variant) else ["privacy=none"]
            found = measure([*common, f"method={name}", *privacy, *variant])
            up, down = found["upload"], found["download"]
            cells = [
                " ".join([f"`{name}`", *(f"`{v}`" for v in variant)]),
                ", ".join(facts[name].messages),
                *(f"{n:,}".replace(",", " ") for n in (up["numbers"]["adapter"], down["numbers"]["adapter"])),
                f"{found['once']:,}".replace(",", " "),
                str(up["numbers"]["head"]),
                f"{up['bytes']['adapter']:,}".replace(",", " "),
                f"{facts[name].trained:,}".replace(",", " "),
                facts[name].stays,
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(
        f"\nOne client and round, {arguments.model}; `trained` is the clipped vector, head included.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
