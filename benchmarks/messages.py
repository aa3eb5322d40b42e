"""What one message costs a real node, where every message is a process of its own: seconds by what they go to.

    python -m benchmarks.messages [--model minilm] [--turns 5] [--rows 4000] [--steps 4] [--worker] [--json FILE]

The requests are those that FedASK's own server half makes (private, both phases of a round), the process does what
`flwr-clientapp` does: it imports Flower's runner, reads the message, loads the ClientApp and calls it. That much is
"Flower's own start" and not counted; everything after it is. With --worker the same messages go through
`privet worker`, whose CPU time is the last column. Wall time is that of the whole message; the parts are CPU time of
its process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHASES = ("sketch", "project")
PARTS = ("imports", "base model", "data, tokens", "store, ledger", "local steps", "other")
_ROOT = Path(__file__).resolve().parents[1]
_WAIT = 120.0


# --- the process of one message: nothing but Flower is imported before the ClientApp -------------------


class Stopwatch:
    """CPU time by part; what happens inside a part that is measured itself counts there only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._stack = ["other"]
        self._since = time.process_time()

    def switch(self, push: str | None) -> None:
        now = time.process_time()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now
        if push is None:
            self._stack.pop()
        else:
            self._stack.append(push)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.switch(name)
        try:
            yield
        finally:
            self.switch(None)


WATCHED: Mapping[str, Mapping[str, str]] = {
    "privet.adapters": {
        "build_model": "base model",
        "adapter_spec": "base model",
        "load_tokenizer": "data, tokens",
    },
    "privet.data.tasks": {
        "load_node_file": "data, tokens",
        "count_rows": "data, tokens",
        "snapshot": "data, tokens",
    },
    "privet.data.collate": {"tokenise": "data, tokens"},
    "client_app.rows": {"find_rows": "data, tokens"},
    "client_app.store": {"NodeStore.__enter__": "store, ledger", "NodeStore.save_reply": "store, ledger"},
    "privet.privacy.ledger": {"Ledger.__init__": "store, ledger", "Ledger.charge": "store, ledger"},
    "privet.plan": {"required_sigma": "store, ledger"},
    "client_app.trainer": {"Trainer.train_private": "local steps", "Trainer.train_plain": "local steps"},
}


def _watch(watch: Stopwatch) -> None:
    """Measure every import that loads something, and the functions of WATCHED from when their module is there."""
    from importlib import _bootstrap as machinery

    load = machinery._find_and_load  # type: ignore[attr-defined]

    def measured(name: str, import_: Any) -> Any:
        if name in sys.modules and not getattr(sys.modules[name], "__spec__", None):
            return load(name, import_)
        known = name in sys.modules
        with watch.part("imports"):
            module = load(name, import_)
        if not known:
            for place, part in WATCHED.get(name, {}).items():
                _replace(sys.modules[name], place, part)
        return module

    def _replace(module: Any, place: str, part: str) -> None:
        owner, _, name = place.rpartition(".")
        holder = getattr(module, owner) if owner else module
        function = getattr(holder, name, None)
        if function is None:
            return

        def timed(*values: Any, **named: Any) -> Any:
            with watch.part(part):
                return function(*values, **named)

        setattr(holder, name, timed)

    machinery._find_and_load = measured  # type: ignore[attr-defined]


def answer(request: Path, reply: Path, node_config: Mapping[str, Any]) -> None:
    """Be the process of one message; write the reply and print the times."""
    import flwr.supernode.runtime.run_clientapp  # noqa: F401
    from flwr.app import Context, Message, RecordDict
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as Proto
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    proto = Proto()
    proto.ParseFromString(request.read_bytes())
    message = Message(recorddict_from_proto(proto), 1, "train")
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(run_id=1, node_id=1, node_config=dict(node_config), state=RecordDict(), run_config={})

    watch, cpu, start = Stopwatch(), time.process_time(), time.perf_counter()
    _watch(watch)
    from client_app.app import app

    content = app(message, context).content
    watch.switch("other")
    seconds = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu, **watch.seconds}
    reply.write_bytes(recorddict_to_proto(content).SerializeToString())
    print(json.dumps(seconds))


# --- the server's side -------------------------------------------------------------------------------


def write_rows(path: Path, rows: int) -> None:
    """Write a table of short notes with two labels."""
    rng = random.Random(0)
    words = "the food was staff room today quite and view again lovely awful great poor service price door"
    lines = ["text,label"]
    lines += [
        f"{' '.join(rng.choices(words.split(), k=rng.randint(8, 30)))} {i},{('no', 'yes')[i % 2]}"
        for i in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")


class Server:
    """FedASK's server half for one node, as far as requests and replies need it."""

    def __init__(self, overrides: Sequence[str], rows: int, run: str) -> None:
        from privet.adapters import adapter_spec, initial_tensors
        from privet.config import compose
        from privet.plan import required_sigma
        from privet.privacy.sampling import sampling_rate
        from strategies.base import load_method

        self.config = compose(overrides)
        spec = adapter_spec(self.config)
        self.method: Any = load_method(self.config, spec)
        self.state = self.method.initial(initial_tensors(spec, self.config.seed, self.config.task.head))
        self.planned = self.config.train.steps(rows) * self.config.federation.rounds
        q = sampling_rate(self.config.train.batch_size, rows)
        self.sigma = required_sigma(self.config, q, self.planned) if self.config.privacy.private else 0.0
        self.run = run

    def request(self, number: int, phase: str) -> bytes:
        from flwr.common.serde import recorddict_to_proto

        from privet.wire import Request, code_hash, pack_request

        self.method.round_number = number
        request = Request(
            run=self.run,
            round=number,
            phase=phase,
            node="north",
            config=self.config.to_json(),
            config_hash=self.config.hash,
            code_hash=code_hash(),
            store="",
            sigma=self.sigma,
            planned_steps=self.planned,
            met=number > 1,
            payload=self.method.download(phase, self.state, number == 1),
        )
        return recorddict_to_proto(pack_request(request)).SerializeToString()

    def take(self, phase: str, raw: bytes) -> None:
        from flwr.common.serde import recorddict_from_proto
        from flwr.proto.recorddict_pb2 import RecordDict as Proto

        from privet.wire import unpack_failure, unpack_reply

        proto = Proto()
        proto.ParseFromString(raw)
        content = recorddict_from_proto(proto)
        failed = unpack_failure(content)
        if failed is not None:
            raise SystemExit(f"the node refused {phase}: {failed.kind}: {failed.reason}")
        self.state = self.method.update(phase, self.state, unpack_reply(content).payload)


def measure(
    server: Server, number: int, phase: str, node: Mapping[str, Any], folder: Path, pid: int | None
) -> dict[str, float]:
    """Let a fresh process answer one message; `pid` is the worker's."""
    before = _cpu(pid)
    request, reply = folder / "request", folder / "reply"
    request.write_bytes(server.request(number, phase))
    reply.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.messages",
        "--answer",
        str(request),
        str(reply),
        json.dumps(node),
    ]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=False)
    if not reply.exists():
        raise SystemExit(f"the process of a message ended without a reply:\n{done.stderr[-3000:]}")
    server.take(phase, reply.read_bytes())
    return {**json.loads(done.stdout.splitlines()[-1]), "worker": _cpu(pid) - before}


def _cpu(pid: int | None) -> float:
    if pid is None:
        return 0.0
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextmanager
def worker(node: Mapping[str, Any], folder: Path) -> Iterator[int]:
    """Run `privet worker` for the node; yield its process id."""
    settings = folder / "node.toml"
    settings.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in node.items()))
    command = [sys.executable, "-m", "privet.cli", "worker", "--node-config", str(settings)]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + _WAIT
        while not Path(str(node["worker"])).exists():
            if process.poll() is not None or time.monotonic() > limit:
                raise SystemExit((folder / "worker.log").read_text())
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return medians as a table in Markdown."""
    columns = ("wall", "cpu", *PARTS, "worker")
    lines = [f"| message | {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
    for name, turns in found.items():
        medians = [statistics.median(turn[c] for turn in turns) for c in columns]
        lines.append(f"| {name} | {' | '.join(f'{m:.2f}' for m in medians)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--answer"]:
        answer(Path(arguments[1]), Path(arguments[2]), json.loads(arguments[3]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="minilm", help="of conf/model, or settings such as 'pretrained model.path=DIR'"
    )
    parser.add_argument(
        "--turns", type=int, default=5, help="rounds that are measured, after one that is not"
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=4, help="local steps")
    parser.add_argument("--worker", action="store_true", help="through privet worker")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers there too")
    parser.add_argument("overrides", nargs="*", help="further settings")
    options = parser.parse_args(arguments)

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.csv", options.rows)
        node: dict[str, Any] = {
            "name": "north",
            "data-path": str(folder / "rows.csv"),
            "store": str(folder / "store"),
        }
        if options.worker:
            node["worker"] = str(folder / "run" / "north.sock")
        overrides = [
            *("method=fedask", "task=csv", "task.path=none", "task.test_path=none", "task.labels=[no,yes]"),
            *(f"model={options.model}".split()),
            *(
                "federation.clients=1",
                f"federation.rounds={options.turns + 1}",
                f"train.local_steps={options.steps}",
            ),
            *options.overrides,
        ]
        server = Server(overrides, options.rows, "bench")
        found: dict[str, list[dict[str, float]]] = {phase: [] for phase in PHASES}
        around = worker(node, folder) if options.worker else _nothing()
        with around as pid:
            for number in range(1, options.turns + 2):
                for phase in PHASES:
                    seconds = measure(server, number, phase, node, folder, pid)
                    if number > 1:
                        found[phase].append(seconds)
                    print(
                        phase,
                        json.dumps({k: round(v, 2) for k, v in seconds.items()}),
                        file=sys.stderr,
                        flush=True,
                    )
    load = os.getloadavg()
    print(table(found))
    print(f"\n{options.model}, {options.rows} rows, {options.steps} steps; load of the machine {load[0]:.1f}")
    if options.json is not None:
        options.json.write_text(
            json.dumps(dataclasses.asdict(_Facts(vars(options), found)), indent=2, default=str)
        )


@dataclasses.dataclass
class _Facts:
    options: dict[str, Any]
    seconds: dict[str, list[dict[str, float]]]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
