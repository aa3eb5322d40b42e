"""Start a run in a fresh directory, or go on with one that was broken off; one process a directory.

``launch.json`` in a run's directory says with which overrides it was started, so that a run that died before
its server wrote anything can still be started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from privet.atomic import write_atomic
from privet.config import CONF_DIR, Config, compose, quoted
from privet.data.hub import HUB
from privet.errors import ConfigError, PrivetError

APP_DIR = CONF_DIR.parent
LAUNCH_FILE = "launch.json"
LOCK_FILE = "lock"
SERVER_LOCK = "server.lock"
"""Held by a run's server itself: it may outlive the command that started it."""

_LEFTOVERS = ("events.jsonl", "failure.json", "summary.json")

State = Literal["missing", "broken", "running", "finished"]


# --- before a run --------------------------------------------------------------------------------


def absolute(overrides: Sequence[str], config: Config) -> tuple[list[str], Config]:
    """Return the overrides and their configuration with local paths made absolute.

    A run's processes do not start in the user's folder. Data paths are always local; a model's path is, where
    such a folder exists, and else a hub name.
    """
    places = ("path", "test_path", "image_folder", "test_image_folder")
    data = {name: getattr(config.task, name) for name in places}
    model = {"path": config.model.path, "tokenizer": config.model.tokenizer}
    here = {k: v for k, v in model.items() if v is not None and Path(v).expanduser().exists()}
    data_paths, model_paths = _absolute(data), _absolute(here)
    moved = dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, **data_paths),
        model=dataclasses.replace(config.model, **model_paths),
    )
    added = [quoted(f"task.{k}", v) for k, v in data_paths.items()]
    added += [quoted(f"model.{k}", v) for k, v in model_paths.items()]
    return [*overrides, *added], moved


def _absolute(paths: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        key: str(Path(value).expanduser().resolve())
        for key, value in paths.items()
        if value is not None and not value.startswith(("package:", HUB))
    }


@dataclass(frozen=True)
class CheckedPlan:
    """What the plan of one run said: why it cannot run (None: it can), and what a person should know."""

    error: str | None
    warnings: list[str]


@dataclass(frozen=True)
class Checked:
    """The plans of some runs, and the CUDA devices that are visible."""

    plans: list[CheckedPlan]
    gpus: int


def check(runs: Sequence[Sequence[str]]) -> Checked:
    """Plan runs, each given by its overrides, without training.

    In a process of its own, so that this one, which only waits for runs, does not hold PyTorch in memory.

    Raises
    ------
    PrivetError
        If that process does not answer.
    """
    command = [sys.executable, "-m", "privet.cli", "check", "--batch"]
    asked = json.dumps([list(overrides) for overrides in runs])
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PrivetError(f"the settings could not be checked: 'privet check' ended with {done.returncode}")
    answer = json.loads(done.stdout)
    return Checked([CheckedPlan(p["error"], p["warnings"]) for p in answer["plans"]], answer["gpus"])


def check_name(name: str) -> str:
    """Return a folder's name that a person gave, if it is one that no shell trips over."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise PrivetError(f"--name {name} is not allowed: letters, digits, '.', '_' and '-'")
    return name


def new_run_dir(runs: Path | None, name: str | None, config: Config) -> Path:
    """Make a fresh folder; a run never writes into another run's."""
    base = runs_folder(runs)
    budget = f"eps{config.privacy.epsilon:g}" if config.privacy.epsilon is not None else "nonprivate"
    stem = (
        check_name(name)
        if name is not None
        else time.strftime(f"%Y%m%d-%H%M%S-{config.method.name}-{config.task.name}-{budget}-s{config.seed}")
    )
    for attempt in range(100):
        path = base / (stem if not attempt else f"{stem}-{attempt + 1}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if name:
                raise PrivetError(
                    f"{path} exists already: name another run, go on with privet run --resume {path}, or remove it"
                ) from None
        except OSError as error:
            raise PrivetError(f"{path} cannot be made: {error.strerror}") from None
        else:
            return path
    raise PrivetError(f"{base / stem} exists 100 times: name this run with --name")


def runs_folder(runs: Path | None) -> Path:
    """Return the folder of all runs: the given one, or ``./runs``."""
    return (runs or Path("runs")).expanduser().resolve()


def find_run(given: Path, runs: Path | None) -> Path:
    """Return an existing run's directory from its path, or from its name below the folder of runs.

    Raises
    ------
    PrivetError
        If there is none, or it belongs to a sweep or to nothing.
    """
    for path in (given.expanduser().resolve(), runs_folder(runs) / given):
        if path.is_dir():
            break
    else:
        raise PrivetError(f"{given}: there is no such directory")
    if (path / "sweep.json").exists():
        raise PrivetError(f"{path} is a sweep: give the sweep's own command again, it resumes what is broken")
    if not (path / "config.yaml").exists() and not (path / LAUNCH_FILE).exists():
        raise PrivetError(f"{path} is no run's directory: it has neither config.yaml nor {LAUNCH_FILE}")
    return path


# --- a run's directory ---------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold a folder's lock; two processes never drive the same run or sweep.

    The lock goes with the process, however that ends; its empty file stays.

    Raises
    ------
    PrivetError
        If another process holds it.
    """
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PrivetError(f"{folder / name} cannot be opened: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PrivetError(f"{folder} is being run by another process: wait for it, or stop it") from None
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a living process drives this folder."""
    for name in (LOCK_FILE, SERVER_LOCK):
        if not (folder / name).exists():
            continue
        try:
            with locked(folder, name):
                continue
        except PrivetError:
            return True
    return False


def state_of(run_dir: Path) -> State:
    """How far a run is: never started, broken off (or failed), going on right now, or completed."""
    if is_completed(run_dir):
        return "finished"
    if is_locked(run_dir):
        return "running"
    known = (run_dir / "config.yaml").exists() or (run_dir / LAUNCH_FILE).exists()
    return "broken" if known else "missing"


def is_completed(run_dir: Path) -> bool:
    """Whether a run reached its end."""
    return read_summary(run_dir).get("status") == "completed"


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return a run's ``summary.json``, empty if there is none."""
    return _read_object(run_dir / "summary.json")


def saved_config(run_dir: Path) -> Config | None:
    """Return the configuration that a run's directory stands for; None if it holds no run.

    Raises
    ------
    ConfigError
        If it holds one that this version cannot read.
    """
    import yaml

    path = run_dir / "config.yaml"
    try:
        if path.exists():
            return Config.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        path = run_dir / LAUNCH_FILE
        overrides = saved_overrides(run_dir)
        return None if overrides is None else compose(overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        raise ConfigError(f"{path} cannot be read") from None


def saved_overrides(run_dir: Path) -> list[str] | None:
    """Return the overrides with which a run was started, None if they were not written."""
    overrides = _read_object(run_dir / LAUNCH_FILE).get("overrides")
    if not isinstance(overrides, list) or not all(isinstance(o, str) for o in overrides):
        return None
    return overrides


def write_launch(run_dir: Path, overrides: Sequence[str]) -> None:
    """Leave in `run_dir` what it takes to start the run; paths in `overrides` must be absolute."""
    record = {"overrides": list(overrides), "created": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomic(run_dir / LAUNCH_FILE, (json.dumps(record, indent=2) + "\n").encode())


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# --- run -----------------------------------------------------------------------------------------


def start(
    run_dir: Path, overrides: Sequence[str], *, cpus: int | None = None, parent: int | None = None
) -> int:
    """Run in a directory that holds no run yet; return the exit code.

    Parameters
    ----------
    run_dir : Path
        An existing directory, absolute.
    overrides : sequence of str
        The run's settings, with absolute paths.
    cpus : int or None
        Most CPU cores for the run's workers; None: all of them.
    parent : int or None
        Process id of a sweep; the run stops when that is gone.
    """
    with locked(run_dir):
        write_launch(run_dir, overrides)
        return _begin(run_dir, cpus, parent)


def resume(run_dir: Path, *, cpus: int | None = None, parent: int | None = None) -> int:
    """Go on with the run in `run_dir`, from its beginning if the server never began; return the exit code.

    Parameters are those of :func:`start`. A completed run is left alone.
    """
    if is_completed(run_dir):
        print(f"{run_dir} is complete already")
        return 0
    with locked(run_dir):
        # The process that held the lock may have brought the run to its end.
        if is_completed(run_dir):
            print(f"{run_dir} is complete already")
            return 0
        if not (run_dir / "config.yaml").exists():
            return _begin(run_dir, cpus, parent)
        config = saved_config(run_dir)
        assert config is not None
        _mend_last_line(run_dir / "events.jsonl")
        return _launch(run_dir, config, {"resume": True}, cpus, parent)


def _begin(run_dir: Path, cpus: int | None, parent: int | None) -> int:
    """Launch from ``launch.json``. What an attempt left that died before the server began says nothing."""
    overrides = saved_overrides(run_dir)
    if overrides is None:
        raise ConfigError(f"{run_dir / LAUNCH_FILE} cannot be read: start the run anew")
    config = compose(overrides)
    for name in _LEFTOVERS:
        (run_dir / name).unlink(missing_ok=True)
    return _launch(run_dir, config, {"overrides": shlex.join(overrides)}, cpus, parent)


def _launch(
    run_dir: Path, config: Config, settings: dict[str, str | int], cpus: int | None, parent: int | None
) -> int:
    from privet.launcher import launch
    from privet.progress import EVENTS_FILE, Progress

    with Progress(run_dir / EVENTS_FILE) as progress:
        outcome = launch(
            run_config={"run-dir": str(run_dir), **settings},
            run_dir=run_dir,
            federation=federation_settings(config, cpus),
            app_dir=APP_DIR,
            on_tick=_watching(parent, progress.tick),
            on_stopping=progress.stopping,
        )
    if outcome.status != "completed":
        print(f"privet: the run {outcome.status}: {outcome.detail}", file=sys.stderr)
        print(f"run directory: {run_dir}", file=sys.stderr)
        print(f"to go on: privet run --resume {shlex.quote(str(run_dir))}", file=sys.stderr)
        return int(outcome.exit_code)
    return 0


def federation_settings(config: Config, cpus: int | None = None) -> dict[str, str | int | float]:
    """Return Flower's simulation settings; `cpus` bounds what the workers of this run take together."""
    share = config.federation.cpus_per_client
    settings: dict[str, str | int | float] = {
        "num-supernodes": config.federation.clients,
        "client-resources-num-cpus": share,
        "client-resources-num-gpus": config.federation.gpus_per_client,
    }
    if cpus is not None:
        # At least one client must fit, or the run would wait for ever.
        settings["init-args-num-cpus"] = max(share, min(cpus, share * config.federation.clients))
    return settings


def _watching(parent: int | None, tick: Callable[[], None]) -> Callable[[], None]:
    """Return a tick that also stops the run when the process `parent`, which started it, is gone."""
    told = False

    def watch() -> None:
        nonlocal told
        if parent is not None and os.getppid() != parent and not told:
            told = True
            os.kill(os.getpid(), signal.SIGTERM)
        tick()

    return watch


def _mend_last_line(path: Path) -> None:
    """End a line that a power failure cut, so that what is appended next stands on a line of its own."""
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
