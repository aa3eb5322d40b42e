"""`privet worker`: the same answers, ledger and refusals as without it, and nobody but the node's own ClientApp."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app.app import app
from client_app.doctor import check_worker
from client_app.frames import MOST_BYTES, Call, node_hash, receive, send
from client_app.node_config import NodeConfig
from client_app.worker import Server, listening, seconds, work
from privet.code import code_hash
from privet.errors import ConfigError, PrivetError
from privet.privacy.ledger import Ledger
from privet.wire import unpack_failure
from tests.conftest import Outcome, state_of, write_table

pytestmark = pytest.mark.xdist_group("worker")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["client_app.node", "client_app.worker"])  # one import for all workers


# --- processes -----------------------------------------------------------------------------------


def echo(path: str, log: str, idle: float | None, pause: float, fail: bool, grace: float) -> None:
    """A worker that does no work: it answers with what it was asked, after a pause."""
    logging.basicConfig(filename=log, level=logging.INFO, force=True)

    def answer(kind: str, content: RecordDict) -> RecordDict:
        logging.info("begins %s", kind)
        time.sleep(pause)
        if fail:
            raise MemoryError("secret row text")
        logging.info("ends %s", kind)
        return RecordDict({"asked": ConfigRecord({"kind": kind, **dict(content["request"])})})

    with listening(Path(path)) as listener:
        peers = frozenset({os.geteuid()})
        server = Server(listener, answer, node=node_hash({}), peers=peers, idle=idle, grace=grace)
        code = server.run()
    os._exit(code)


def real(raw: dict[str, Any], log: str) -> None:
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    torch.set_num_threads(1)
    os._exit(work(raw, idle=None))


class Started:
    """Worker processes that a test has started, and their logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []

    def _start(self, target: Callable[..., None], path: Path, *arguments: Any) -> Any:
        before = path.stat().st_mtime_ns if path.exists() else 0  # of a worker that was killed
        process = CONTEXT.Process(target=target, args=arguments)
        process.start()
        self.processes.append(process)
        limit = time.monotonic() + 120
        while not path.exists() or path.stat().st_mtime_ns == before:
            assert time.monotonic() < limit
            assert process.is_alive()
            time.sleep(0.02)
        return process

    def echo(
        self,
        *,
        idle: float | None = None,
        pause: float = 0.0,
        fail: bool = False,
        grace: float = 30.0,
        name: str = "w",
    ) -> Any:
        path = self.folder / "run" / f"{name}.sock"
        return self._start(echo, path, str(path), str(self.log), idle, pause, fail, grace)

    def real(self, raw: dict[str, Any]) -> Any:
        return self._start(real, Path(raw["worker"]), raw, str(self.log))

    @property
    def log(self) -> Path:
        return self.folder / "worker.log"

    @property
    def path(self) -> Path:
        return self.folder / "run" / "w.sock"


@pytest.fixture
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    found = Started(tmp_path_factory.mktemp("w"))  # a short name: a socket's path has 107 bytes
    yield found
    for process in found.processes:
        if process.is_alive():
            process.kill()
        process.join(10)


def until(what: Callable[[], bool], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- clients -------------------------------------------------------------------------------------


def call(path: Path, kind: str = "train", *, code: str | None = None, node: str | None = None) -> RecordDict:
    """Ask as the courier does."""
    with connect(path) as connection:
        send(connection, Call(kind, code or code_hash(), node or node_hash({})).pack(), 5)
        send(connection, RecordDict({"request": ConfigRecord({"round": 1})}), 5)
        return receive(connection, 60)


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    return connection


def kind_of_refusal(content: RecordDict) -> tuple[str, bool]:
    failed = unpack_failure(content)
    assert failed is not None
    assert "\n" not in failed.reason
    return failed.kind, failed.uncharged


def deliver(content: RecordDict, raw: dict[str, Any], kind: str = "train") -> RecordDict:
    """Give the ClientApp a message, as Flower does."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(content, 1, kind)
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(run_id=1, node_id=1, node_config=raw, state=RecordDict(), run_config={})
    return app(message, context).content


# --- the same as without it ----------------------------------------------------------------------


def nodes(folder: Path, tag: str, **more: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    found: list[dict[str, Any]] = []
    for i in range(2):
        table = write_table(folder / f"rows{i}.csv", 40, seed=i)
        node = {"name": f"n{i}", "data-path": str(table), "store": str(folder / tag / f"n{i}"), **more}
        if tag == "worker":
            node["worker"] = str(folder / "run" / f"n{i}.sock")
        found.append(node)
    return found


@pytest.mark.parametrize("privacy", ["none", "dp"])
def test_a_run_through_workers_is_the_run_without_them(
    run: Callable[..., Outcome], started: Started, privacy: str
) -> None:
    """FedASK, both phases, two rounds, two nodes: bit-equal without noise, the same charges with it."""
    folder = started.folder / "nodes"
    more = {"allow-non-private": True} if privacy == "none" else {"max-epsilon": 20.0}
    ends: dict[str, Outcome] = {}
    for tag in ("alone", "worker"):
        configs = nodes(folder, tag, **more)
        for node in configs if tag == "worker" else []:
            started.real(node)
        ends[tag] = run(
            "method=fedask",
            f"privacy={privacy}",
            "federation.clients=2",
            nodes=2,
            node_configs=configs,
            path=started.folder / tag,
        )
        assert ends[tag].error is None
        assert [r["void"] for r in ends[tag].rounds] == [False, False]
        assert [p["failed"] for r in ends[tag].rounds for p in r["phases"]] == [[]] * 4
    one, other = state_of(ends["alone"]), state_of(ends["worker"])
    assert list(one) == list(other)
    if privacy == "none":
        assert all(torch.equal(one[name], other[name]) for name in one)
        return
    for i in range(2):
        charges = [
            [
                (e.round, e.phase, e.q, e.sigma, e.clip, e.steps, e.declared)
                for e in Ledger.load(folder / tag / f"n{i}" / "ledger.jsonl").entries
            ]
            for tag in ends
        ]
        assert charges[0] == charges[1]
        assert len(charges[0]) == 2
    assert started.log.read_text().count("train took") == 8


def test_a_worker_killed_in_training_leaves_a_charge_and_the_next_one_goes_on(
    run: Callable[..., Outcome], started: Started
) -> None:
    (node, _) = nodes(started.folder / "nodes", "worker")
    first = started.real(node)
    ledger = Path(node["store"]) / "ledger.jsonl"

    def kill_it() -> None:
        until(lambda: ledger.exists() and len(Ledger.load(ledger).entries) == 1)
        first.kill()

    killer = threading.Thread(target=kill_it)

    def restart(message: Message, reply: Message) -> Message:
        if ledger.exists() and len(started.processes) == 1:
            killer.join()
            first.join(10)
            started.real(node)
        return reply

    killer.start()
    outcome = run(
        "method=ffa_lora",
        "federation.clients=1",
        "federation.min_replies=1",
        "train.local_steps=30",
        "federation.rounds=2",
        "train.batch_size=8",
        nodes=1,
        node_configs=[node],
        tamper=restart,
    )
    assert outcome.error is None
    lost, good = outcome.rounds
    assert (lost["void"], good["void"]) == (True, False)
    (failed,) = lost["phases"][0]["failed"]
    assert "worker-ended: this node's worker ended before it answered" in failed["reason"]
    assert [e.round for e in Ledger.load(ledger).entries] == [1, 2]


def test_another_node_configuration_is_refused(started: Started) -> None:
    started.echo()
    assert kind_of_refusal(call(started.path, node=node_hash({"max-epsilon": 99.0}))) == ("node-config", True)


def test_code_that_is_not_the_workers_is_refused(started: Started) -> None:
    started.echo()
    assert kind_of_refusal(call(started.path, code="0" * 64)) == ("code-hash", True)
    assert "0" * 64 in started.log.read_text()
    assert dict(call(started.path)["asked"]) == {"kind": "train", "round": 1}


def test_a_worker_whose_own_code_is_not_the_pinned_one_does_not_start(tmp_path: Path) -> None:
    raw = {
        "name": "n",
        "data-path": str(write_table(tmp_path / "t.csv", 4)),
        "store": str(tmp_path / "store"),
        "worker": str(tmp_path / "run" / "n.sock"),
        "code-hash": "0" * 16,
    }
    with pytest.raises(ConfigError, match="the owner pinned another"):
        work(raw, idle=1.0)
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "run").exists()


def test_a_worker_needs_a_node_of_its_own_and_its_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs worker, data-path and store"):
        work({"partition-id": 0, "num-partitions": 1, "worker": str(tmp_path / "s")}, idle=1.0)


# --- who may talk to it --------------------------------------------------------------------------


def test_the_socket_is_its_owners_alone_and_goes_with_the_worker(started: Started) -> None:
    process = started.echo()
    assert stat.S_IMODE(started.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(started.path.parent.stat().st_mode) == 0o700
    call(started.path)  # its socket is there before it serves: only then a stop ends it in order
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == 0
    assert not started.path.exists()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 0700"), listening(folder / "w.sock"):
        pass


def test_a_second_worker_is_refused_and_a_dead_ones_socket_replaced(started: Started) -> None:
    process = started.echo()
    with pytest.raises(ConfigError, match="another worker listens"), listening(started.path):
        pass
    process.kill()
    process.join(20)
    assert started.path.exists()
    with listening(started.path):
        assert connect(started.path)
    assert not started.path.exists()


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "w.sock").write_text("a file")
    with pytest.raises(ConfigError, match="no socket"), listening(folder / "w.sock"):
        pass
    assert (folder / "w.sock").read_text() == "a file"


def test_another_account_is_sent_away(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(kind: str, content: RecordDict) -> RecordDict:
        asked.append(kind)
        return content

    with listening(tmp_path / "run" / "w.sock") as listener, connect(tmp_path / "run" / "w.sock") as client:
        peers = frozenset({os.geteuid() + 1})
        server = Server(listener, answer, node=node_hash({}), peers=peers, idle=0.2, grace=1.0)
        send(client, Call("train", code_hash(), node_hash({})).pack(), 5)
        send(client, RecordDict({}), 5)
        assert server.run() == 0
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert asked == []


# --- frames that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (struct.pack(">4sQ", b"PVT1", MOST_BYTES + 1), "larger than"),
        (b"GET / HTTP/1.1\r\n\r\n", "no frame of this protocol"),
        (struct.pack(">4sQ", b"PVT1", 5) + b"\xff\xff\xff\xff\xff", "holds no records"),
        (struct.pack(">4sQ", b"PVT1", 100) + b"x" * 50, "cut off"),
        (b"PVT", "cut off"),
        (struct.pack(">4sQ", b"PVT1", 0), "other fields"),
    ],
)
def test_what_is_no_message_is_refused_and_logged(started: Started, raw: bytes, why: str) -> None:
    started.echo()
    with connect(started.path) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        assert kind_of_refusal(receive(connection, 20)) == ("malformed", True)
    assert why in started.log.read_text()
    assert dict(call(started.path)["asked"])["kind"] == "train"  # and it goes on


def test_a_kind_of_message_that_is_none_is_refused(started: Started) -> None:
    started.echo()
    assert kind_of_refusal(call(started.path, "__class__")) == ("malformed", True)


# --- one at a time, and the end ------------------------------------------------------------------


def test_two_at_once_are_served_one_after_the_other(started: Started) -> None:
    started.echo(pause=0.3)
    threads = [threading.Thread(target=call, args=(started.path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    lines = [line.split(":")[-1] for line in started.log.read_text().splitlines() if "train" in line]
    assert [line.split()[0] for line in lines if line.split()[0] in ("begins", "ends")] == [
        "begins",
        "ends",
        "begins",
        "ends",
    ]


def test_a_client_that_died_while_it_waited_is_not_worked_for(started: Started) -> None:
    started.echo(pause=0.5)
    first = threading.Thread(target=call, args=(started.path,))
    first.start()
    until(lambda: "begins" in started.log.read_text())
    with connect(started.path) as gone:
        send(gone, Call("evaluate", code_hash(), node_hash({})).pack(), 5)
        send(gone, RecordDict({"request": ConfigRecord({"round": 2})}), 5)
    first.join(30)
    call(started.path)
    assert "begins evaluate" not in started.log.read_text()
    assert "nothing is done for it" in started.log.read_text()


def test_a_client_that_dies_in_the_middle_leaves_the_worker_going(started: Started) -> None:
    started.echo(pause=0.3)
    with connect(started.path) as gone:
        send(gone, Call("train", code_hash(), node_hash({})).pack(), 5)
        send(gone, RecordDict({"request": ConfigRecord({"round": 1})}), 5)
        until(lambda: "begins" in started.log.read_text())
    assert dict(call(started.path)["asked"])["kind"] == "train"


def test_it_ends_after_its_idle_time(started: Started) -> None:
    process = started.echo(idle=0.5)
    call(started.path)
    process.join(20)
    assert process.exitcode == 0
    assert not started.path.exists()


def test_told_to_stop_it_finishes_the_message_under_way(started: Started) -> None:
    process = started.echo(pause=0.5)
    answers: list[RecordDict] = []
    client = threading.Thread(target=lambda: answers.append(call(started.path)))
    client.start()
    until(lambda: "begins" in started.log.read_text())
    os.kill(process.pid, signal.SIGTERM)
    client.join(20)
    process.join(20)
    assert dict(answers[0]["asked"])["kind"] == "train"
    assert process.exitcode == 0


def test_a_message_that_takes_longer_than_the_grace_is_broken_off(started: Started) -> None:
    process = started.echo(pause=60.0, grace=0.3)
    with connect(started.path) as client:
        send(client, Call("train", code_hash(), node_hash({})).pack(), 5)
        send(client, RecordDict({"request": ConfigRecord({"round": 1})}), 5)
        until(lambda: "begins" in started.log.read_text())
        os.kill(process.pid, signal.SIGTERM)
        assert client.recv(1) == b""
    process.join(20)
    assert process.exitcode == 0
    assert "not finished" in started.log.read_text()


def test_an_error_ends_the_worker_and_only_its_kind_is_told(started: Started) -> None:
    process = started.echo(fail=True)
    answer = call(started.path)
    assert kind_of_refusal(answer) == ("error", False)
    assert "secret" not in str(answer)
    process.join(20)
    assert process.exitcode == 1


# --- what else asks ------------------------------------------------------------------------------


def doctor(path: Path, raw: dict[str, Any] | None = None, **keys: Any) -> list[tuple[str, str]]:
    node = NodeConfig.read({"name": "n", "data-path": "/x.csv", "store": "/x", "worker": str(path), **keys})
    return [(f.level, f.text) for f in check_worker(node, raw or {})]


def test_the_doctor_asks_the_worker(started: Started) -> None:
    ((level, text),) = doctor(started.path)
    assert (level, "start privet worker" in text) == ("wrong", True)
    assert doctor(started.path, **{"worker-optional": True})[0][0] == "note"
    process = started.echo()
    assert doctor(started.path) == [("ok", f"{started.path}, with this code and this node configuration")]
    ((level, text),) = doctor(started.path, {"max-epsilon": 3.0})
    assert (level, text.partition(":")[0]) == ("wrong", "node-config")
    started.path.chmod(0o666)
    assert "mode 0666" in doctor(started.path)[0][1]
    process.kill()
    process.join(20)
    assert "left by a worker that is gone" in doctor(started.path)[-1][1]


def test_a_socket_that_systemd_made_is_used_and_left_there(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "from client_app.worker import listening\n"
        "with listening(Path('/nowhere/w.sock')) as listener:\n"
        "    listener.accept()[0].sendall(b'served')"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "w.sock"))
        listener.listen()

        def pass_it() -> None:
            os.dup2(listener.fileno(), 3, inheritable=True)

        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "LISTEN_FDS": "1"},
            preexec_fn=pass_it,
            close_fds=False,
        )
        with connect(tmp_path / "w.sock") as client:
            assert client.recv(6) == b"served"
        assert process.wait(20) == 0
    assert (tmp_path / "w.sock").exists()


# --- the ClientApp's side ------------------------------------------------------------------------


def test_without_a_listener_the_message_is_refused(tmp_path: Path) -> None:
    raw = {
        "name": "n",
        "data-path": "/x.csv",
        "store": str(tmp_path / "s"),
        "worker": str(tmp_path / "no.sock"),
    }
    assert kind_of_refusal(deliver(RecordDict({}), raw)) == ("no-worker", True)
    assert not (tmp_path / "s").exists()


def test_an_optional_worker_may_be_missing(tmp_path: Path) -> None:
    """The message then reaches the node's own code, which refuses this one for what it is."""
    raw: dict[str, Any] = {"name": "n", "data-path": "/x.csv", "store": str(tmp_path / "s")}
    raw |= {"worker": str(tmp_path / "no.sock"), "worker-optional": True}
    assert kind_of_refusal(deliver(RecordDict({}), raw)) == ("malformed", True)


@pytest.mark.parametrize("path", ["relative.sock", 5])
def test_a_worker_that_is_no_path_is_refused(path: Any) -> None:
    assert kind_of_refusal(deliver(RecordDict({}), {"name": "n", "worker": path})) == ("node-config", True)


def test_times() -> None:
    assert [seconds(t) for t in ("30m", "90s", "2h", "45", "0")] == [1800.0, 90.0, 7200.0, 45.0, None]
    with pytest.raises(PrivetError, match="no time"):
        seconds("soon")
