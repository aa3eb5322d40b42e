"""Who gets onto a SuperLink with TLS and node authentication, and who is kept out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from client_app.doctor import Bundle, examine
from privet.cli import main
from privet.deploy import Deployment, init
from tests.conftest import write_table
from tests.system.deployment import Site, deployed, until, without

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("system")]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with deployed(tmp_path, "north", "stranger") as site:
        yield site


def test_a_registered_node_comes_online_and_others_are_kept_out(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.superlink()

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

    site.register("north")
    node = site.ids["north"]
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
    until(lambda: site.statuses() == {node: "online"}, 120, north.read_text)
    assert "SuperNode ID" in north.read_text()

    reasons = {
        "unregistered key": "Failed to activate SuperNode",
        "no key": "SuperNode authentication is enabled",
        "wrong CA": "certificate verify failed",
        "no TLS": "Connection attempt failed",
    }
    for why, log in kept_out.items():
        until(lambda log=log, why=why: reasons[why] in log.read_text(), 120, log.read_text)
        assert "SuperNode ID" not in log.read_text(), why
    assert site.statuses() == {node: "online"}

    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no runs\n"
    assert main(["stop", "123"]) == 2
    assert "'flwr stop' failed" in capsys.readouterr().err
