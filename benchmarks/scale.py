"""What many clients cost the server: its memory at 50 and at 500 clients, and its time for a reply.

``python -m benchmarks.scale --clients 500``

The real ServerApp runs, from the nodes' self-descriptions to the results, with every check of every reply. Only the
clients are not real: a crowd in this process answers each request with arrays of the right shapes, made when they are
fetched, as Flower's SuperLink would hand them over. Its own time is taken off; all time is CPU time. Each number of
clients is a process of its own, and memory is the largest resident size above that at the start of the first round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from privet.adapters import adapter_spec
from privet.config import Config, compose
from privet.privacy.sampling import sampling_rate
from privet.weights import base_weights
from privet.wire import (
    Description,
    Payload,
    Reply,
    Request,
    code_hash,
    pack_description,
    pack_reply,
    unpack_request,
)
from strategies.base import LoraStrategy, load_method

ROWS = 1000
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}  # what is freed is given back
METHODS = ("ffa_lora", "fedavg", "fedrand", "fedask")


@dataclass
class Asked:
    """What is left of a request until its reply is fetched: no array."""

    message: Message
    reply: Callable[[], RecordDict]


@dataclass
class Crowd(Grid):
    """A Flower ``Grid`` whose nodes answer at once, each reply made when it is fetched.

    Attributes
    ----------
    seconds : float
        CPU time that it took itself.
    first : float
        When the first training request came.
    before : float
        Resident size in MB when the nodes had described themselves.
    largest : int
        Most replies that were fetched at once.
    """

    config: Config
    nodes: int
    seconds: float = 0.0
    first: float = 0.0
    largest: int = 0
    before: float = 0.0
    asked: dict[str, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.method: LoraStrategy = load_method(self.config, adapter_spec(self.config))
        self.weights = base_weights(self.config, fetch=False) or ""
        self._count = 0

    def set_run(self, run: Any) -> None:
        """Not needed here."""

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(1000, 1000 + self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        started = time.process_time()
        ids = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = str(self._count)
            request = unpack_request(message.content)
            if request.phase != "describe" and not self.first:
                self.first = started
            self.asked[str(self._count)] = Asked(_without_arrays(message), self._answer(message, request))
            ids.append(str(self._count))
        self.seconds += time.process_time() - started
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        started = time.process_time()
        found = [self.asked.pop(i) for i in message_ids]
        self.largest = max(self.largest, len(found))
        replies = [Message(asked.reply(), reply_to=asked.message) for asked in found]
        self.seconds += time.process_time() - started
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        found = self.pull_messages(list(self.push_messages(messages)))
        self.before, self.largest = resident(), 0
        return found

    def _answer(self, message: Message, request: Request) -> Callable[[], RecordDict]:
        name = f"client-{message.metadata.dst_node_id - 1000}"
        if request.phase == "describe":
            described = Description(name, ROWS, code_hash(), {}, self.weights)
            return lambda: pack_description(described)
        train = self.config.train
        trains = self.method.releases.get(request.phase) == "dp-sgd"
        facts = {
            "node": request.node,
            "request": request.fingerprint,
            "config_hash": request.config_hash,
            "code_hash": request.code_hash,
            "examples": ROWS,
            "steps": train.steps(ROWS) if trains else 0,
            "q": sampling_rate(train.batch_size, ROWS),
            "sigma": request.sigma,
        }
        # A projection has as many columns as the basis that it is on.
        columns = {
            n.removesuffix("basis") + "projection": v.shape[-1] for n, v in request.payload.adapter.items()
        }
        phase, seed = request.phase, self._count

        def reply() -> RecordDict:
            adapter, head = self.method.upload_shapes(phase)
            generator = torch.Generator().manual_seed(seed)
            sized = {
                n: (s[0], columns.get(n, s[1])) if len(s) == 2 and phase == "project" else s
                for n, s in adapter.items()
            }
            payload = Payload(
                *(
                    {n: torch.randn(s, generator=generator) * 0.01 for n, s in p.items()}
                    for p in (sized, head)
                )
            )
            return pack_reply(Reply(**facts, payload=payload))

        return reply


def _without_arrays(message: Message) -> Message:
    """Return a message that can be replied to."""
    kept = Message(RecordDict(), message.metadata.dst_node_id, message.metadata.message_type)
    kept.metadata.__dict__.update(message.metadata.__dict__)
    return kept


def resident() -> float:
    """Resident size of this process in MB."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 1e6


def peak() -> float:
    """Largest resident size of this process so far in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def overrides_of(method: str, clients: int, rank: int, rounds: int) -> list[str]:
    """Return the settings of a run without data, without scores, with a tiny model."""
    return [
        f"method={method}",
        "model=tiny_random",
        f"model.lora.rank={rank}",
        "task=csv",
        "task.path=none",
        "task.test_path=none",
        "task.test_rows=null",
        "task.labels=[no,yes]",
        "evaluation=none",
        f"federation.clients={clients}",
        f"federation.rounds={rounds}",
        "train.local_steps=2",
        *(["method.warmup_rounds=1"] if method == "fedhsip" else []),
    ]


def measure(method: str, clients: int, rank: int, rounds: int) -> dict[str, Any]:
    """Run once in this process and return figures."""
    from server_app.app import app

    overrides = overrides_of(method, clients, rank, rounds)
    config = compose(overrides)
    crowd = Crowd(config, clients)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        context = Context(1, 1, {}, RecordDict(), {"run-dir": str(run), "overrides": " ".join(overrides)})
        app(crowd, context)
        ended = time.process_time()
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    replies = sum(p["replied"] for r in lines for p in r["phases"])
    assert replies
    assert not any(p["failed"] for r in lines for p in r["phases"])
    served = ended - crowd.first - crowd.seconds
    return {
        "method": method,
        "clients": clients,
        "rounds": rounds,
        "replies": replies,
        "reply_kb": lines[-1]["upload_bytes"] / clients / 1e3,
        "memory_mb": peak() - crowd.before,
        "ms_per_reply": 1e3 * served / replies,
        "at_once": crowd.largest,
    }


def table(found: list[dict[str, Any]], few: int, many: int) -> str:
    """Return the figures as a Markdown table."""
    by = {(f["method"], f["clients"]): f for f in found}
    lines = [
        f"| method | sent by a client in a round, kB | MB above the start, {few} clients | {many} clients "
        f"| ms a reply, {few} | {many} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in dict.fromkeys(f["method"] for f in found):
        a, b = by[method, few], by[method, many]
        lines.append(
            f"| {method} | {b['reply_kb']:.0f} | {a['memory_mb']:.0f} | {b['memory_mb']:.0f} "
            f"| {a['ms_per_reply']:.1f} | {b['ms_per_reply']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--few", type=int, default=50, help="number of clients to compare with")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rank", type=int, default=128, help="of the adapter, on a model of width 32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "CLIENTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.rank, args.rounds)))
        return
    found = []
    for method in args.methods:
        for clients in (args.few, args.clients):
            command = [sys.executable, "-m", "benchmarks.scale", "--one", method, str(clients)]
            command += ["--rank", str(args.rank), "--rounds", str(args.rounds)]
            done = subprocess.run(
                command, env={**os.environ, **ALLOCATOR}, stdout=subprocess.PIPE, text=True, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found, args.few, args.clients))


if __name__ == "__main__":
    main()
