"""What the tests of a lying server share: a real node, requests that an honest server sends, and ways to spoil them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app.app import app
from privet.config import Config, compose
from privet.privacy.ledger import Entry, Ledger
from privet.wire import PARTS, Arrays, Failed, Payload, Request, pack_request, unpack_failure, unpack_reply
from server_app.app import app as server_app
from tests.conftest import write_table
from tests.grid import InProcessGrid

ROWS = 40
HUGE = (1 << 20, 1 << 20)  # 4 TiB of float32
Lie = tuple[str, RecordDict]


class RealNode:
    """The real ClientApp with a node's own table and store; answers messages in this process."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture, **keys: Any) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.store = folder / "store"
        table = write_table(folder / "own.csv", ROWS)
        own = {k.replace("_", "-"): v for k, v in keys.items()}
        self.config = {"name": "north", "data-path": str(table), "store": str(self.store), **own}
        self.context = Context(1, 1000, self.config, RecordDict(), {})
        self._log = caplog

    def answer(self, content: RecordDict, kind: str = "train") -> RecordDict:
        message = Message(content, 1000, kind)
        message.metadata.__dict__["_message_id"] = str(uuid4())
        return app(message, self.context).content

    def refuses(self, content: RecordDict, kind: str = "train") -> Failed:
        """One line to the server, one in the node's own log, and nothing else."""
        self._log.clear()
        with self._log.at_level(logging.WARNING, "privet"):
            reply = self.answer(content, kind)
        failed = unpack_failure(reply)
        assert failed is not None, "the node answered"
        assert list(reply) == ["failed"]
        assert failed.kind != "error", self._log.text
        said = reply["failed"]["reason"]
        assert isinstance(said, str)
        assert said.isprintable()
        assert 0 < len(said) <= 500
        (line,) = (r.getMessage() for r in self._log.records if r.name == "privet")
        assert line.isprintable()
        assert f"{failed.node or 'a node without a name'} refuses: " in line
        return failed

    def refuses_and_stays(self, content: RecordDict, kind: str = "train") -> Failed:
        """As :meth:`refuses`, and not a byte of the store is another."""
        before = self.contents()
        failed = self.refuses(content, kind)
        assert self.contents() == before
        assert failed.uncharged or self.entries
        return failed

    def trains(self, request: Request) -> Payload:
        content = self.answer(pack_request(request))
        assert unpack_failure(content) is None, unpack_failure(content)
        return unpack_reply(content).payload

    def contents(self) -> dict[str, bytes]:
        """Return the files of the store, but for its lock and whose it is: opening an empty one makes these."""
        files = (p for p in self.store.rglob("*") if p.is_file() and p.name not in ("lock", "node.json"))
        return {str(p.relative_to(self.store)): p.read_bytes() for p in files}

    @property
    def entries(self) -> tuple[Entry, ...]:
        path = self.store / "ledger.jsonl"
        return Ledger.load(path).entries if path.exists() else ()


def honest(
    node: RealNode, folder: Path, *overrides: str, on_message: Callable[[Message], None] = lambda _: None
) -> list[Message]:
    """Run the real server with this one node; `on_message` sees each message before the node does."""

    class Wire(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            ids = []
            for message in messages:
                on_message(message)
                ids += super().push_messages([message])
            return ids

    world = Wire(app, 1, node_configs=[node.config])
    settings = ["model=tiny_random", "task=csv", "task.path=none", "task.labels=[no,yes]"]
    settings += ["federation.clients=1", "train.local_steps=1", "train.batch_size=8", "train.lr=0.5"]
    if not any(o.startswith("evaluation=") for o in overrides):
        settings.append("evaluation=none")
    test = write_table(folder / "test.csv", 8, seed=9)
    settings += [f"task.test_path={test}", "task.test_rows=null"]
    run = folder / f"run-{uuid4().hex[:8]}"
    context = Context(
        7, 1, {}, RecordDict(), {"run-dir": str(run), "overrides": " ".join([*settings, *overrides])}
    )
    server_app(world, context)
    return world.sent


# --- lies about arrays -----------------------------------------------------------------------------


def spoilt_arrays(content: RecordDict) -> Iterator[Lie]:
    """Yield the message with one array of each part spoilt, missing or too many, in every way."""
    for part in PARTS:
        record = content[part]
        assert isinstance(record, ArrayRecord)
        names = list(record)
        yield f"{part}: extra", _with(content, part, {**record, "row.17": Array(np.zeros(2, np.float32))})
        for name in dict.fromkeys([*names[:1], *names[-1:]]):
            whole = record[name]
            for what, array in _spoilt(whole):
                yield f"{part}/{name}: {what}", _with(content, part, {**record, name: array})
            rest = {n: a for n, a in record.items() if n != name}
            if rest or part != "once":
                yield f"{part}/{name}: missing", _with(content, part, rest)
            yield f"{part}/{name}: renamed", _with(content, part, {**rest, name + "x": whole})


def _spoilt(whole: Array) -> Iterator[tuple[str, Array]]:
    values = whole.numpy()
    if values.dtype == np.float32:
        for bad in (math.nan, math.inf, -math.inf, 2e12):
            spoilt = values.copy()
            spoilt.flat[-1] = bad
            yield f"{bad}", Array(spoilt)
    other = np.uint8 if values.dtype == np.float32 else np.float32
    yield "another type", Array(np.zeros(values.shape, other))
    yield "float64", Array(values.astype(np.float64))
    yield "shorter", Array(values.reshape(-1)[:-1].copy())
    yield "one more axis", Array(values[None].copy())
    yield "as text", Array(np.full(values.shape, "x"))
    yield (
        "its bytes declare 4 TiB",
        Array(whole.dtype, tuple(whole.shape), whole.stype, header(whole.dtype, HUGE)),
    )


def bombs(whole: Array) -> Iterator[tuple[str, Array]]:
    """Yield arrays whose bytes are not what they declare."""
    kind, shape = whole.dtype, tuple(whole.shape)
    yield "declares 4 TiB, here and in its bytes", Array(kind, HUGE, "numpy.ndarray", header(kind, HUGE))
    yield "declares 4 TiB", Array(kind, HUGE, "numpy.ndarray", whole.data)
    yield "its bytes declare 4 TiB", Array(kind, shape, "numpy.ndarray", header(kind, HUGE))
    yield "a negative side", Array(kind, (-1, *shape[1:]), "numpy.ndarray", header(kind, (-1, *shape[1:])))
    yield "cut short", Array(kind, shape, "numpy.ndarray", whole.data[:-1])
    yield "too long", Array(kind, shape, "numpy.ndarray", whole.data + b"\0" * 4)
    yield "no bytes", Array(kind, shape, "numpy.ndarray", b"")
    yield "an archive", Array(kind, shape, "numpy.ndarray", _archive())
    yield "a pickle", Array(kind, shape, "numpy.ndarray", pickle.dumps(whole.numpy()))
    yield "another serialisation", Array(kind, shape, "pickle", pickle.dumps(whole.numpy()))


def header(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return the beginning of NumPy's format, with no values after it."""
    stream = BytesIO()
    facts = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, facts)  # type: ignore[no-untyped-call]
    return stream.getvalue()


def _archive() -> bytes:
    stream = BytesIO()
    np.savez_compressed(stream, np.zeros(10_000_000, np.float32))
    return stream.getvalue()


def _with(content: RecordDict, part: str, arrays: dict[str, Array]) -> RecordDict:
    changed = RecordDict(dict(content.items()))
    changed[part] = ArrayRecord(arrays)
    return changed


# --- lies about fields -----------------------------------------------------------------------------


def spoilt_fields(content: RecordDict, rounds: int, phases: set[str]) -> Iterator[Lie]:
    """Yield the message with one field of its request that no honest server sends."""
    request = content["request"]
    number, phase, sigma = request["round"], request["phase"], request["sigma"]
    lies: dict[str, list[Any]] = {
        "round": [0, -1, rounds + 1, 1 << 62, 1.0, "1", True],
        "phase": ["", "describe", "evaluate", "../train", "\0", *sorted(phases - {phase})],
        "node": ["", "south", "north\0", "../north"],
        "run": ["", "..", "../other", "/etc/run", "a/b", "a\0b", "x" * 82, ".hidden", "a\nb"],
        "sigma": [math.nan, math.inf, -math.inf, -1.0, 0.0, sigma * 0.99, 1e300, "1"],
        "planned_steps": [0, -1, rounds + 1, 1 << 62, 1.5],
        "acknowledged": [-1, number, 1 << 62],
        "met": [0, "true"],
        "config_hash": ["", "0" * 64],
        "code_hash": ["", "0" * 64],
        "config": ["", "{}", "[1]", "[" * 100_000, "nan"],
    }
    for field, values in lies.items():
        for value in (v for v in values if v != request[field]):
            yield f"{field} = {value!r}"[:60], with_field(content, field, value)
        yield f"no {field}", with_field(content, field, None)
    yield "one field more", with_field(content, "extra", 1)


def with_field(content: RecordDict, field: str, value: Any) -> RecordDict:
    """Return the message with one field replaced, or without it."""
    request = content["request"]
    assert isinstance(request, ConfigRecord)
    fields = {**request, field: value}
    changed = RecordDict(dict(content.items()))
    changed["request"] = ConfigRecord({k: v for k, v in fields.items() if v is not None})
    return changed


def with_config(content: RecordDict, change: Callable[[dict[str, Any]], None]) -> RecordDict:
    """Return the message with another configuration, and the hash that belongs to it."""
    raw = json.loads(content["request"]["config"])
    change(raw)
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return with_field(with_field(content, "config", text), "config_hash", digest)


def config_of(*overrides: str) -> Config:
    """Compose the configuration of a run of a real node."""
    settings = ["model=tiny_random", "task=csv", "task.path=none", "task.labels=[no,yes]"]
    settings += ["federation.clients=1", "train.local_steps=1", "train.batch_size=8", "train.lr=0.5"]
    settings += ["task.test_path=none", "task.test_rows=null"]
    return compose([*settings, *overrides])


def same_arrays(first: Arrays, second: Arrays) -> bool:
    return first.keys() == second.keys() and all(bool((v == second[n]).all()) for n, v in first.items())
