"""A SuperLink and SuperNodes on loopback, started as the generated units say: who gets in and who is kept out."""

from __future__ import annotations

import configparser
import contextlib
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from client_app.doctor import Bundle, examine
from privet.cli import main
from privet.deploy import Deployment, init
from tests.conftest import write_table

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system")]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


class Site:
    """The generated files of one deployment, and the processes that a test has started from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site"
        self.state = folder / "state"
        (self.port,) = free_ports(1)
        self.deployment = Deployment(
            "127.0.0.1", ("north", "stranger"), port=self.port, etc=self.folder, state=self.state
        )
        init(self.folder, self.deployment)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, unit: Path, log: str, *change: Callable[[list[str]], list[str]]) -> Path:
        """Start what the unit starts: its command, with its environment only, in its folder."""
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(unit)
        service = parser["Service"]
        lines = Path(service["EnvironmentFile"]).read_text().splitlines()
        env = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        command = shlex.split(service["ExecStart"])
        command[command.index("--port") + 1] = str(
            self.port if "superlink" in unit.name else free_ports(1)[0]
        )
        if "0.0.0.0" in command:
            command[command.index("0.0.0.0")] = "127.0.0.1"
        for edit in change:
            command = edit(command)
        place = Path(service["WorkingDirectory"])
        place.mkdir(parents=True, exist_ok=True)
        path = self.state / log
        with path.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=place,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self.started.append(process)
        return path

    def node(self, name: str, log: str, *change: Callable[[list[str]], list[str]]) -> Path:
        return self.start(self.folder / "nodes" / name / f"privet-supernode-{name}.service", log, *change)

    def flwr(self, *arguments: str) -> dict[str, Any]:
        from privet.operate import flwr

        return flwr(*arguments)

    def statuses(self) -> dict[str, str]:
        nodes = self.flwr("supernode", "list", "privet")["nodes"]
        return {str(n["node-id"]): str(n["status"]) for n in nodes}

    def close(self) -> None:
        """End the started processes and their children, by their ids."""
        family: list[psutil.Process] = []
        for process in self.started:
            with contextlib.suppress(psutil.Error):
                family += psutil.Process(process.pid).children(recursive=True)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            if process.poll() is None:
                process.kill()
                process.wait(5)
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()


def until(what: Callable[[], bool], seconds: float, tell: Callable[[], str]) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, tell()
        time.sleep(0.3)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(site.folder / "submit"))
    site.state.mkdir()
    try:
        yield site
    finally:
        site.close()


def without(option: str, values: int = 1) -> Callable[[list[str]], list[str]]:
    def edit(command: list[str]) -> list[str]:
        at = command.index(option)
        return command[:at] + command[at + 1 + values :]

    return edit


def test_a_registered_node_comes_online_and_others_are_kept_out(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    superlink = site.start(site.folder / "superlink" / "privet-superlink.service", "superlink.log")

    def reachable() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", site.port), timeout=1):
            return True
        return False

    until(reachable, 30, superlink.read_text)

    # A node on its own: what the doctor sees of the running SuperLink.
    table = write_table(tmp_path / "own.csv", 12)
    own = {"name": "north", "data-path": str(table), "store": str(tmp_path / "store"), "device": "cpu"}
    place = site.folder / "nodes" / "north"
    findings = examine(
        own,
        bundle=Bundle.read(place / "bundle.json"),
        superlink=f"127.0.0.1:{site.port}",
        roots=place / "ca.crt",
        key=place / "node.key",
    )
    assert [str(f) for f in findings if f.level == "wrong"] == []
    assert {"CA", "certificate", "clock", "key"} <= {f.what for f in findings if f.level == "ok"}

    answer = site.flwr("supernode", "register", str(site.folder / "submit" / "keys" / "north.pub"), "privet")
    node = str(answer["node-id"])
    assert site.statuses() == {node: "registered"}

    # Started from its unit: this one alone may come online.
    other = Path(tmp_path / "other")
    init(other, Deployment("127.0.0.1", ("north",)))
    north = site.node("north", "north.log")
    kept_out = {
        "unregistered key": site.node("stranger", "stranger.log"),
        "no key": site.node("stranger", "nokey.log", without("--auth-supernode-private-key")),
        "wrong CA": site.node(
            "stranger",
            "ca.log",
            lambda c: [str(other / "ca" / "ca.crt") if w.endswith("ca.crt") else w for w in c],
        ),
        "no TLS": site.node(
            "stranger",
            "plain.log",
            without("--root-certificates"),
            without("--auth-supernode-private-key"),
            lambda c: [*c, "--insecure"],
        ),
    }
    until(lambda: site.statuses() == {node: "online"}, 30, north.read_text)
    assert "SuperNode ID" in north.read_text()

    reasons = {
        "unregistered key": "Failed to activate SuperNode",
        "no key": "SuperNode authentication is enabled",
        "wrong CA": "certificate verify failed",
        "no TLS": "Connection attempt failed",
    }
    for why, log in kept_out.items():
        until(lambda log=log, why=why: reasons[why] in log.read_text(), 20, log.read_text)
        assert "SuperNode ID" not in log.read_text(), why
    assert site.statuses() == {node: "online"}

    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no runs\n"
    assert main(["stop", "123"]) == 2
    assert "'flwr stop' failed" in capsys.readouterr().err
