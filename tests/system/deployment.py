"""A deployment on loopback for tests: SuperLink and SuperNodes as the generated units start them, TLS and keys on."""

from __future__ import annotations

import configparser
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from privet.deploy import Deployment, init
from privet.errors import PrivetError
from privet.operate import flwr
from privet.privacy.ledger import Ledger
from tests.conftest import write_table

ROOT = Path(__file__).resolve().parents[2]
APP = ("pyproject.toml", "README.md", "LICENSE", "privet", "strategies", "server_app", "client_app", "conf")
"""What goes into the bundle; Flower walks all of a folder, virtual environments included, before it filters."""
ENDS = ("summary.json", "failure.json")
Edit = Callable[[list[str]], list[str]]
"""A change of a command line."""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def without(option: str, values: int = 1) -> Edit:
    def edit(command: list[str]) -> list[str]:
        at = command.index(option)
        return command[:at] + command[at + 1 + values :]

    return edit


def until(what: Callable[[], Any], seconds: float, tell: Callable[[], str]) -> Any:
    """Return what `what` returns as soon as that is true; fail with what `tell` says after `seconds`."""
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < limit, tell()
        time.sleep(0.2)
    return found


def is_over(process: psutil.Process) -> bool:
    """Whether a process has ended; Flower does not collect all of its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def kill(process: psutil.Process) -> None:
    """Kill -9 a process and wait until it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    until(lambda: is_over(process), 60, lambda: f"{process} is still there")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines that may still be written to."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _age(path: Path) -> float:
    """Seconds since a file was written; infinite where there is none."""
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return math.inf


@dataclass(frozen=True)
class Submitted:
    """A run on its way: Flower's id of it, its directory and when it was submitted."""

    id: str
    path: Path
    begun: float

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return lines_of(self.path / "rounds.jsonl")

    def events(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Live events of a kind whose fields have these values."""
        return [
            e
            for e in lines_of(self.path / "events.jsonl")
            if e["event"] == kind and all(e.get(k) == v for k, v in fields.items())
        ]


class Site:
    """The generated files of one deployment, and the processes that a test has started from them.

    Parameters
    ----------
    folder : Path
        A test's own folder.
    names : sequence of str
        The nodes.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.base = folder
        self.folder = folder / "site"
        self.state = folder / "state"
        self.app = folder / "app"
        (self.port,) = free_ports(1)
        self.deployment = Deployment(
            "127.0.0.1", tuple(names), port=self.port, etc=self.folder, state=self.state
        )
        init(self.folder, self.deployment)
        self.state.mkdir()
        self.ids: dict[str, str] = {}
        self.logs: list[Path] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._latest: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, tuple[Path, int]] = {}
        self._submitted = 0

    # --- processes -------------------------------------------------------------------------------

    def start(self, unit: Path, log: str, *change: Edit, **environment: str) -> Path:
        """Start what the unit starts: its command, with its environment only, in its folder; return its log."""
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(unit)
        service = parser["Service"]
        lines = Path(service["EnvironmentFile"]).read_text().splitlines()
        env = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        command = shlex.split(service["ExecStart"])
        if "--port" in command:
            port = self.port if "superlink" in unit.name else free_ports(1)[0]
            command[command.index("--port") + 1] = str(port)
        if "0.0.0.0" in command:
            command[command.index("0.0.0.0")] = "127.0.0.1"
        for edit in change:
            command = edit(command)
        place = Path(service["WorkingDirectory"])
        place.mkdir(parents=True, exist_ok=True)
        path = self.state / log
        before = path.stat().st_size if path.exists() else 0
        with path.open("ab") as sink:
            process = subprocess.Popen(
                command,
                cwd=place,
                env={**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self._started.append(process)
        self._latest[Path(log).stem] = process
        self._begun[Path(log).stem] = (path, before)
        if path not in self.logs:
            self.logs.append(path)
        return path

    def superlink(self, *change: Edit, seconds: float = 180) -> Path:
        """Start the SuperLink and wait until it answers."""
        log = self.start(self.folder / "superlink" / "privet-superlink.service", "superlink.log", *change)

        def reachable() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
            return False

        until(reachable, seconds, log.read_text)
        return log

    def node(self, name: str, log: str = "", *change: Edit, **environment: str) -> Path:
        """Start a node's SuperNode."""
        unit = self.folder / "nodes" / name / f"privet-supernode-{name}.service"
        return self.start(unit, log or f"{name}.log", *change, **environment)

    def process(self, name: str) -> psutil.Process:
        """The process that was started last under this name (``superlink`` or a node's)."""
        return psutil.Process(self._latest[name].pid)

    def running(self, name: str) -> bool:
        """Whether that process still runs."""
        return self._latest[name].poll() is None

    def workers(self, name: str, command: str) -> list[psutil.Process]:
        """Processes below a SuperLink or SuperNode that run a command such as ``flwr-clientapp``."""
        found = []
        with contextlib.suppress(psutil.Error):
            for child in self.process(name).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if any(Path(word).name == command for word in child.cmdline()[:2]):
                        found.append(child)
        return found

    def kill(self, name: str, *, family: bool = False) -> None:
        """Kill -9 a started process; with `family` what it started as well, as systemd does."""
        started = self._latest[name]
        children = psutil.Process(started.pid).children(recursive=True)
        started.kill()
        started.wait(10)
        for child in children:
            if family:
                kill(child)
        # What Flower starts looks whether its parent still lives.
        until(
            lambda: all(is_over(c) for c in children), 60, lambda: f"{name} is killed, not all of {children}"
        )

    def close(self) -> None:
        """End the started processes and their children, by their ids."""
        family: list[psutil.Process] = []
        for process in self._started:
            with contextlib.suppress(psutil.Error):
                family += psutil.Process(process.pid).children(recursive=True)
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            if process.poll() is None:
                process.kill()
                process.wait(5)
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()

    # --- nodes -----------------------------------------------------------------------------------

    def furnish(self, name: str, rows: int = 48, **settings: Any) -> Path:
        """Give a node a table of its own and settings (``max_epsilon=3.0``); return its store."""
        seed = [n.name for n in self.deployment.supernodes].index(name)
        table = write_table(self.base / f"{name}.csv", rows, seed=seed)
        store = self.state / name / "store"
        own = {"name": name, "data-path": str(table), "store": str(store), "device": "cpu"}
        own |= {key.replace("_", "-"): value for key, value in settings.items()}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in own.items())
        (self.folder / "nodes" / name / "node.toml").write_text(text)
        return store

    def register(self, *names: str) -> None:
        """Register nodes' keys."""
        for name in names:
            key = self.folder / "submit" / "keys" / f"{name}.pub"
            self.ids[name] = str(self.flwr("supernode", "register", str(key), "privet")["node-id"])

    def statuses(self) -> dict[str, str]:
        """Status of every node by Flower's id."""
        nodes = self.flwr("supernode", "list", "privet")["nodes"]
        return {str(n["node-id"]): str(n["status"]) for n in nodes}

    def online(self, *names: str, seconds: float = 240) -> None:
        """Wait until nodes have signed in, starting those again that exit, as their units do.

        The SuperLink calls a killed node online for another minute, so it is not what is asked.
        """

        def there() -> bool:
            for name in names:
                if not self.running(name):
                    self.node(name)
            return all(b"SuperNode ID" in self._said(name) for name in names)

        until(there, seconds, self.told)

    def _said(self, name: str) -> bytes:
        """What the process that was started last under a name has logged."""
        path, begin = self._begun[name]
        with path.open("rb") as stream:
            stream.seek(begin)
            return stream.read()

    def up(self, *names: str) -> None:
        """Start the SuperLink and furnished nodes, and wait for them."""
        self.superlink()
        self.register(*names)
        for name in names:
            self.node(name)
        self.online(*names)

    def ledger(self, name: str) -> Ledger:
        """A node's ledger, from its store."""
        return Ledger.load(self.state / name / "store" / "ledger.jsonl")

    # --- runs ------------------------------------------------------------------------------------

    def flwr(self, *arguments: str) -> dict[str, Any]:
        return flwr(*arguments)

    def settings(self, *overrides: str) -> list[str]:
        """Settings of a small private run over two nodes, and more."""
        test = self.base / "test.csv"
        if not test.exists():
            write_table(test, 30, seed=99)
        return [
            "model=tiny_random",
            "task=csv",
            "task.path=none",
            f"task.test_path={test}",
            "task.test_rows=null",
            "task.labels=[no,yes]",
            "federation.clients=2",
            "federation.rounds=2",
            *([] if "privacy=none" in overrides else ["privacy.epsilon=3"]),
            "train.local_steps=2",
            "train.batch_size=16",
            "train.optimizer=sgd",
            "train.lr=0.5",
            "train.head_lr=null",
            "evaluate_every=1",
            *overrides,
        ]

    def submit(self, *overrides: str, resume: Path | None = None) -> Submitted:
        """Submit a run with ``flwr run``, or go on with the one in `resume`."""
        self._submitted += 1
        if not self.app.exists():
            for name in APP:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
                (self.app / name).parent.mkdir(exist_ok=True)
                copy(ROOT / name, self.app / name)
        path = resume or self.state / "superlink" / "runs" / f"run{self._submitted}"
        config = {"run-dir": str(path)}
        lines = [f"{k} = {json.dumps(v)}" for k, v in config.items()]
        if resume is None:
            lines.append(f"overrides = {json.dumps(shlex.join(self.settings(*overrides)))}")
        else:
            lines.append("resume = true")
        file = self.base / f"run{self._submitted}.toml"
        file.write_text("\n".join(lines) + "\n")
        begun = time.time()
        answer = self.flwr("run", str(self.app), "privet", "--run-config", str(file))
        return Submitted(str(answer["run-id"]), path, begun)

    def status(self, run: Submitted) -> str:
        return str(self.flwr("list", "privet", "--run-id", run.id)["runs"][0]["status"])

    def wait(self, run: Submitted, seconds: float = 240) -> str:
        """Wait for a run's end and return Flower's status of it."""
        last, look = "", 0.0

        def ended() -> bool:
            nonlocal last, look
            over = any(_age(run.path / name) < time.time() - run.begun for name in ENDS)
            # A look takes seconds of CPU, so the run's own record is asked in between.
            if over or time.monotonic() > look:
                look = time.monotonic() + 30
                with contextlib.suppress(PrivetError):  # a SuperLink that starts again does not answer
                    last = self.status(run)
            return last.startswith("finished")

        until(ended, seconds, lambda: f"{last}\n{self.told()}")
        return last

    def told(self) -> str:
        """All logs, for a failure's message."""
        parts = []
        runs = self.state / "superlink" / "runs"
        for path in [*self.logs, *sorted(runs.glob("*/events.jsonl")), *sorted(runs.glob("*/failure.json"))]:
            with contextlib.suppress(OSError):
                parts.append(
                    f"--- {path.relative_to(self.state)}\n{path.read_text(errors='replace')[-6000:]}"
                )
        return "\n".join(parts)


@contextlib.contextmanager
def deployed(folder: Path, *names: str) -> Iterator[Site]:
    """Give a site of its own to a test; its processes end with the block, its logs are printed on a failure."""
    site = Site(folder, names)
    home = os.environ.get("FLWR_HOME")
    os.environ["FLWR_HOME"] = str(site.folder / "submit")
    try:
        yield site
    except BaseException:
        print(site.told())
        raise
    finally:
        site.close()
        if home is None:
            del os.environ["FLWR_HOME"]
        else:
            os.environ["FLWR_HOME"] = home
