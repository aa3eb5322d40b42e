"""Run the app through Flower's own ``flwr run`` on a private local SuperLink, and leave nothing behind.

Flower 1.42 by itself reuses any SuperLink that answers on its port, starts one that outlives the run, and
says nothing about success in its exit codes. So every launch gets its own Flower home, loopback ports and
working directory below one temporary folder, starts the SuperLink that ``flwr run`` then finds, and asks
``flwr list`` how the run ended. Every process inherits one environment marker, by which it is found again
and stopped, whoever its parent is by then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

import psutil

from privet.environment import FLOWER, available_cpus
from privet.errors import ConfigError, PrivetError

MARKER = "PRIVET_LAUNCH"
"""Environment variable that all processes of one launch share; its value is unique to the launch."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Upper limit of Ray's shared-memory store: messages hold adapters, never base models."""

FAILURE_FILE = "failure.json"
"""Written by the ServerApp into the run directory: ``{"reason": "one line"}``."""

_TICK = 0.1
_STARTUP_LIMIT = 60.0
_COMMAND_LIMIT = 120.0
_POLITE_LIMIT = 5.0
_LIST_EVERY = 60.0
_FAILURE_GRACE = 2.0
_SIMULATION = "flwr-simulation"
_BUNDLED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
_FLOWER_CONFIG = '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local-in-memory:"\n'
_NOT_THE_APP = {"__pycache__", "build", "dist", "node_modules", "runs"}

Status = Literal["completed", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Parameters
    ----------
    status : {"completed", "failed", "stopped"}
        ``completed`` only if ``flwr list`` said ``finished:completed``.
    detail : str
        One line: the reason of a failure or stop, empty otherwise.
    flower_run_id : str or None
        Flower's id of the run; None if Flower never accepted it.
    signal : int
        Number of the signal that stopped the run, 0 if none did.
    """

    status: Status
    detail: str
    flower_run_id: str | None
    signal: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code for a command: 0, 1, or 128 + signal as shells count it."""
        if self.signal:
            return 128 + self.signal
        return 0 if self.status == "completed" else 1


class LaunchError(PrivetError):
    """Flower could not be started, or refused the run."""


class _StopError(Exception):
    """The person or the time limit ended the launch; carries the detail line."""


def launch(
    *,
    run_config: Mapping[str, str | int],
    run_dir: Path,
    federation: Mapping[str, str | int | float],
    app_dir: Path,
    on_tick: Callable[[], None] = lambda: None,
    on_stopping: Callable[[], None] = lambda: None,
    timeout: float | None = None,
) -> Outcome:
    """Run the Flower app in `app_dir` in simulation and wait for its end.

    Parameters
    ----------
    run_config : mapping
        Overrides of ``[tool.flwr.app.config]``; every key must stand there.
    run_dir : Path
        Where ``logs/`` goes and where the ServerApp may leave ``failure.json``. Made if missing; logs
        of an earlier launch become ``*.log.old``.
    federation : mapping
        Flower's simulation settings with dashes, for example ``{"num-supernodes": 4,
        "client-resources-num-cpus": 1, "client-resources-num-gpus": 0.5}``. ``init-args-num-cpus``
        defaults to what the machine has, but no more than all SuperNodes at once need: Flower
        starts a worker process for every CPU share.
    app_dir : Path
        The folder with the app's ``pyproject.toml``.
    on_tick : callable
        Called about ten times a second from the calling thread. What it raises ends the run.
    on_stopping : callable
        Called once when a signal or the time limit ends the run, before the seconds that this takes.
    timeout : float or None
        Limit for the whole launch in seconds.

    Returns
    -------
    Outcome
        Ctrl-C, SIGTERM and SIGHUP give ``stopped``, everything else that went wrong ``failed``.

    Raises
    ------
    ConfigError
        If `app_dir` holds no Flower app.
    """
    if not (app_dir / "pyproject.toml").is_file():
        raise ConfigError(f"'{app_dir}' is not allowed: a folder with the app's pyproject.toml")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for log in (run_dir / "logs").glob("*.log"):
        # A resumed run must not be explained by the errors of the one before.
        log.replace(log.with_suffix(".log.old"))
    (run_dir / FAILURE_FILE).unlink(missing_ok=True)
    with Signals() as signals, contextlib.closing(_Launch(run_dir, signals, on_tick, timeout)) as session:
        run_id: str | None = None
        try:
            session.start_superlink()
            run_id = session.submit(app_dir, run_config, federation)
            return session.wait(run_id)
        except _StopError as stop:
            on_stopping()
            session.stop_run(run_id)
            status: Status = "stopped" if signals.first else "failed"
            return Outcome(status, str(stop), run_id, signals.first)
        except LaunchError as err:
            return Outcome("failed", str(err), run_id)


# --- signals -------------------------------------------------------------------------------------


class Signals:
    """Records signals instead of raising anywhere, so that a stop always takes the same path.

    Signals that are ignored on entry (``nohup``, background jobs) stay ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)

    @property
    def first(self) -> int:
        """The signal that ended the run, 0 if none came."""
        return self.received[0] if self.received else 0

    @property
    def impatient(self) -> bool:
        """Whether the person asked twice: stop waiting for polite exits."""
        return len(self.received) > 1


# --- one launch ----------------------------------------------------------------------------------


class _Launch:
    """The processes and temporary files of one launch."""

    def __init__(
        self, run_dir: Path, signals: Signals, on_tick: Callable[[], None], timeout: float | None
    ) -> None:
        self.run_dir = run_dir.resolve()
        self.logs = self.run_dir / "logs"
        self.signals = signals
        self.on_tick = on_tick
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout is not None else None
        self.token = secrets.token_hex(16)
        self.root = Path(tempfile.mkdtemp(prefix="privet-", dir=_short_temp_dir()))
        for name in ("home", "cwd", "bin", "ray"):
            (self.root / name).mkdir()
        (self.root / "home" / "config.toml").write_text(_FLOWER_CONFIG)
        self.pid_file = self.root / "simulation.pid"
        self._write_simulation_shim()
        self.env = self._environment()
        self.superlink: subprocess.Popen[bytes] | None = None
        self._running: list[subprocess.Popen[bytes]] = []

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        env |= {
            **FLOWER,
            MARKER: self.token,
            # Ray renames its processes over their environment, which would wipe the marker out.
            "SPT_NOENV": "1",
            "PATH": os.pathsep.join(
                [str(self.root / "bin"), sysconfig.get_path("scripts"), env.get("PATH", os.defpath)]
            ),
            "FLWR_HOME": str(self.root / "home"),
            "RAY_TMPDIR": str(self.root / "ray"),
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(OBJECT_STORE_BYTES),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            # Workers started ahead lack the environment that Flower asks for, so they only cost time.
            "RAY_prestart_worker_first_driver": "0",
        }
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("TOKENIZERS_PARALLELISM", "false")
        return env

    def _write_simulation_shim(self) -> None:
        """Keep the simulation's output: SuperExec would send it to the null device.

        A script of the same name comes first in PATH. If it cannot run (a folder mounted noexec),
        the search goes on to the real command and only this log is lost.
        """
        real = command_path(_SIMULATION)
        shim = self.root / "bin" / _SIMULATION
        pid, program, log = (shlex.quote(str(p)) for p in (self.pid_file, real, self.logs / "simulation.log"))
        shim.write_text(f'#!/bin/sh\necho $$ >{pid}\nexec {program} "$@" >>{log} 2>&1\n')
        shim.chmod(0o700)

    # --- steps ---

    def start_superlink(self) -> None:
        """Start the SuperLink on a free port and wait until it answers."""
        for attempt in range(3):
            port, control_port = _free_ports(2)
            self.env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] = str(port)
            self.env["FLWR_LOCAL_CONTROL_API_PORT"] = str(control_port)
            log = self.logs / "superlink.log"
            # The same options as `flwr run` gives a SuperLink that it starts, with the state in memory.
            options = "--insecure --simulation --isolation subprocess --host 127.0.0.1"
            options += f" --port {port} --control-api-address 127.0.0.1:{control_port}"
            self.superlink = self._start(["flower-superlink", *options.split()], log)
            limit = time.monotonic() + _STARTUP_LIMIT
            while self.superlink.poll() is None:
                if _answers(f"http://127.0.0.1:{port}/health"):
                    return
                if time.monotonic() > limit:
                    raise LaunchError(
                        f"Flower's SuperLink did not answer within {_STARTUP_LIMIT:.0f} s, see {log}"
                    )
                self._tick()
            if os.strerror(errno.EADDRINUSE).lower() not in _read(log).lower() or attempt == 2:
                break
        raise LaunchError(f"Flower's SuperLink did not start: {_last_line(log) or 'no output'} (see {log})")

    def submit(
        self, app_dir: Path, run_config: Mapping[str, str | int], federation: Mapping[str, str | int | float]
    ) -> str:
        """Start the run with ``flwr run`` and return Flower's id of it."""
        staged = self.root / "app"
        _stage(app_dir.resolve(), staged, skip=self.run_dir)
        _check_keys(app_dir, run_config)
        config = self.root / "run-config.toml"
        config.write_text("".join(f"{k} = {_toml(v)}\n" for k, v in run_config.items()), encoding="utf-8")
        settings = " ".join(f"{k}={_toml(v)}" for k, v in _with_ray_cpus(federation).items())
        reply = self._flwr("run", str(staged), "--run-config", str(config), "--federation-config", settings)
        run_id = reply.get("run-id")
        if not reply.get("success") or not run_id:
            raise LaunchError(f"Flower refused the run: {reply_error(reply)}")
        return str(run_id)

    def wait(self, run_id: str) -> Outcome:
        """Wait for the run's end, tell it from ``flwr list``."""
        next_look = time.monotonic() + _LIST_EVERY
        gone_since: float | None = None
        failed_since: float | None = None
        while True:
            self._tick()
            now = time.monotonic()
            if failed_since is None and (self.run_dir / FAILURE_FILE).exists():
                failed_since = now
            if failed_since is not None and now - failed_since > _FAILURE_GRACE:
                # Flower first finishes starting Ray before it looks; that is not worth waiting for.
                return Outcome("failed", self._reason("") or f"no reason found, see {self.logs}", run_id)
            if self.superlink is None or self.superlink.poll() is not None:
                reason = self._reason("") or "Flower's SuperLink died"
                return Outcome("failed", f"{reason} (see {self.logs})", run_id)
            if gone_since is None and self._simulation_is_gone():
                gone_since = now
            # A look costs a CPU for two seconds, so it waits for a sign of the end.
            if gone_since is None and now < next_look:
                continue
            next_look = now + (1.0 if gone_since is not None else _LIST_EVERY)
            status, detail = self._status(run_id)
            if status == "finished:completed":
                return Outcome("completed", "", run_id)
            if status.startswith("finished:"):
                ended: Status = "stopped" if status == "finished:stopped" else "failed"
                return Outcome(ended, self._reason(detail) or f"no reason found, see {self.logs}", run_id)
            if gone_since is not None and now - gone_since > _POLITE_LIMIT:
                reason = self._reason("") or "the simulation process was killed (out of memory?)"
                return Outcome("failed", f"{reason} (see {self.logs})", run_id)

    def stop_run(self, run_id: str | None) -> None:
        """Ask Flower to stop the run; what does not listen is ended by :meth:`close`."""
        if run_id is None or self.signals.impatient:
            return
        with contextlib.suppress(LaunchError, _StopError):
            self._flwr("stop", run_id, limit=2 * _POLITE_LIMIT, stoppable=False)

    def close(self) -> None:
        """End every process of this launch, save Ray's logs, remove the temporary files."""
        try:
            end_processes(self.processes, lambda: self.signals.impatient)
            for process in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
            self._save_ray_logs()
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    # --- helpers ---

    def processes(self) -> list[psutil.Process]:
        """All living processes of this launch."""
        return list(find_processes(self.token, self.root))

    def _simulation_is_gone(self) -> bool:
        """Whether the simulation process has been seen and is no more."""
        try:
            pid = int(self.pid_file.read_text())
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except (OSError, ValueError):
            return False
        except psutil.NoSuchProcess:
            return True

    def _status(self, run_id: str) -> tuple[str, str]:
        """Status and details of the run as ``flwr list`` gives them."""
        reply = self._flwr("list", "--run-id", run_id)
        runs = reply.get("runs")
        if not runs:
            return "", ""
        return str(runs[0].get("status", "")), str(runs[0].get("status-details") or "").removeprefix("N/A")

    def _reason(self, detail: str) -> str:
        try:
            reason = json.loads((self.run_dir / FAILURE_FILE).read_text(encoding="utf-8"))["reason"]
            if isinstance(reason, str) and reason.strip():
                return _one_line(reason)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return failure_reason(
            detail, _read(self.logs / "simulation.log") or _read(self.logs / "superlink.log")
        )

    def _tick(self, *, stoppable: bool = True) -> None:
        if stoppable and self.signals.first:
            name = (
                "Ctrl-C" if self.signals.first == signal.SIGINT else signal.Signals(self.signals.first).name
            )
            raise _StopError(f"stopped by {name}")
        if stoppable and self.deadline is not None and time.monotonic() > self.deadline:
            raise _StopError(f"stopped: the run took longer than {self.timeout:g} s")
        self.on_tick()
        time.sleep(_TICK)

    def _start(
        self, command: list[str], log: Path, stdout: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command in the neutral folder and in its own session, out of reach of Ctrl-C."""
        with log.open("ab") as sink:
            try:
                process = subprocess.Popen(
                    [command_path(command[0]), *command[1:]],
                    cwd=self.root / "cwd",
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout or sink,
                    stderr=sink,
                    start_new_session=True,
                )
            except OSError as err:
                raise LaunchError(f"cannot start '{command[0]}': {err.strerror}") from None
        self._running.append(process)
        return process

    def _flwr(
        self, verb: str, *args: str, limit: float = _COMMAND_LIMIT, stoppable: bool = True
    ) -> dict[str, Any]:
        """Run a ``flwr`` command with JSON output while the display goes on ticking."""
        log = self.logs / "flwr.log"
        with tempfile.TemporaryFile(dir=self.root) as out:
            process = self._start(["flwr", verb, *args, "--format", "json"], log, out)
            end = time.monotonic() + limit
            while process.poll() is None:
                if time.monotonic() > end:
                    process.kill()
                    raise LaunchError(f"'flwr {verb}' did not answer within {limit:.0f} s")
                if not stoppable and self.signals.impatient:
                    raise _StopError("stopped")
                self._tick(stoppable=stoppable)
            out.seek(0)
            text = out.read().decode(errors="replace")
        with log.open("a", encoding="utf-8") as sink:
            sink.write(f"$ flwr {verb} {' '.join(args)}\n{text.rstrip()}\n")
        return json_object(text) or {"error-message": _last_line_of(text) or _last_line(log)}

    def _save_ray_logs(self) -> None:
        """Move what Ray logged to ``logs/ray``; Ray's own folder goes with the temporary files."""
        for source in sorted((self.root / "ray" / "ray").glob("session_2*/logs")):
            for path in source.rglob("*"):
                if path.is_file() and not path.is_symlink() and path.stat().st_size > 0:
                    target = self.logs / "ray" / path.relative_to(source)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(OSError):
                        shutil.move(path, target)


# --- processes -----------------------------------------------------------------------------------


def find_processes(token: str, root: Path | None = None) -> Iterator[psutil.Process]:
    """Living processes whose environment carries ``PRIVET_LAUNCH=token``.

    Parameters
    ----------
    token : str
        Value of the marker.
    root : Path or None
        Temporary folder of the launch: a process that works in it is found by that as well, should
        it have overwritten its environment.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == token or (
                root is not None and Path(process.cwd()).is_relative_to(root)
            ):
                yield process


def end_processes(find: Callable[[], list[psutil.Process]], hurry: Callable[[], bool]) -> None:
    """Ask all processes to end, then kill what is left until nothing is found any more."""
    asked: set[int] = set()
    limit = time.monotonic() + _POLITE_LIMIT
    while (left := find()) and time.monotonic() < limit and not hurry():
        for process in left:
            if process.pid not in asked:
                asked.add(process.pid)
                with contextlib.suppress(psutil.Error):
                    process.terminate()
        time.sleep(_TICK)
    # A killed parent can have started a child a moment before: look again until there is none.
    limit = time.monotonic() + 2 * _POLITE_LIMIT
    while (left := find()) and time.monotonic() < limit:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_TICK)


# --- what Flower gets ----------------------------------------------------------------------------


def _stage(app_dir: Path, target: Path, skip: Path) -> None:
    """Link or copy what may go into the bundle to `target`.

    Flower walks and resolves every file below the app's folder before it filters: with a virtual
    environment in there, that takes longer than starting the run.
    """
    for folder, names, files in os.walk(app_dir):
        here = Path(folder)
        names[:] = [
            n
            for n in names
            if not n.startswith(".")
            and n not in _NOT_THE_APP
            and here / n != skip
            and not (here / n / "pyvenv.cfg").exists()
        ]
        wanted = [f for f in files if Path(f).suffix in _BUNDLED or f in ("LICENSE", ".gitignore")]
        if not wanted:
            continue
        there = target / here.relative_to(app_dir)
        there.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            if (here / name).is_symlink():
                continue
            try:
                os.link(here / name, there / name)
            except OSError:
                shutil.copyfile(here / name, there / name)


def _check_keys(app_dir: Path, run_config: Mapping[str, str | int]) -> None:
    project = tomllib.loads((app_dir / "pyproject.toml").read_text(encoding="utf-8"))
    known = project.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    for key in run_config:
        if key not in known:
            raise LaunchError(
                f"unknown run-config key '{key}' (allowed: {', '.join(sorted(known)) or 'none'})"
            )


def _with_ray_cpus(federation: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    """Bound Ray's CPUs: Flower starts one worker per share at once, each with the whole base model.

    A cluster that is there already (``RAY_ADDRESS``) has the CPUs that it has: Ray refuses a number beside it.
    """
    settings = dict(federation)
    share = int(settings.get("client-resources-num-cpus", 1))
    settings["client-resources-num-cpus"] = share
    if os.environ.get("RAY_ADDRESS"):
        settings.pop("init-args-num-cpus", None)
        return settings
    useful = int(settings.get("num-supernodes", 2)) * share
    # At least one client must fit, or Flower would wait for ever with no worker.
    settings.setdefault("init-args-num-cpus", max(share, min(available_cpus(), useful)))
    return settings


def _toml(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- reading replies and logs --------------------------------------------------------------------

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(
    r"^(?P<path>(?:\w+\.)*)(?P<name>[A-Z]\w*(?:Error|Exception|Refusal|Exit)): (?P<text>.+)$"
)
# What Flower says when it only knows that something went wrong.
_VAGUE = ("An error was encountered. Ending simulation.", "Simulation Runtime crashed.", "unknown error")


def failure_reason(detail: str, log: str) -> str:
    """One line on why a run failed.

    Parameters
    ----------
    detail : str
        Flower's status details, empty if there are none.
    log : str
        Text of the simulation's log.

    Returns
    -------
    str
        The exception behind it: the message alone for Privet's own errors, else with its kind. Empty
        if neither source tells.
    """
    text = detail.removeprefix("Simulation failed with exception: ").strip()
    if any(vague in text for vague in _VAGUE):
        text = ""
    lines = [_COLOUR.sub("", line).strip() for line in log.splitlines()]
    raised = [m for line in lines if (m := _RAISED.match(line)) and m["text"] not in _VAGUE]
    if text:
        raised = [m for m in raised if m["text"] == text.splitlines()[0].strip()]
    if raised:
        last = raised[-1]
        own = last["path"].startswith("privet.errors")
        return _one_line(last["text"] if own else f"{last['name']}: {text or last['text']}")
    if text:
        return _one_line(text)
    errors = [line for line in lines if re.match(r"^(?:ERROR|\S+ ERROR)\b", line)]
    return _one_line(re.sub(r"^ERROR\s*:?\s*", "", errors[-1])) if errors else ""


def reply_error(reply: Mapping[str, Any]) -> str:
    """One line on why a ``flwr`` command with JSON output failed."""
    for key in ("error-message", "error", "message"):
        if reply.get(key):
            lines = [line.strip() for line in _COLOUR.sub("", str(reply[key])).splitlines() if line.strip()]
            return _one_line(" ".join(lines[-3:]))
    return "no reason given"


def json_object(text: str) -> dict[str, Any] | None:
    """Return the one JSON object in what a ``flwr`` command printed; None where there is none."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        value = json.loads(text[start : end + 1])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _one_line(text: str, limit: int = 500) -> str:
    text = " ".join(_COLOUR.sub("", text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _read(path: Path, limit: int = 2**20) -> str:
    """Text of the last `limit` bytes of a file, empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_line(path: Path) -> str:
    return _last_line_of(_read(path))


def _last_line_of(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _one_line(lines[-1]) if lines else ""


# --- the machine ---------------------------------------------------------------------------------


def command_path(name: str) -> str:
    """Path of a command of this environment, activated or not."""
    here = Path(sysconfig.get_path("scripts")) / name
    if here.exists():
        return str(here)
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def _short_temp_dir() -> str:
    """A temporary folder with a short name: Ray's socket paths must fit in 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 24 or not os.access("/tmp", os.W_OK) else "/tmp"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _answers(url: str) -> bool:
    # Without proxies: the address is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=0.4) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
