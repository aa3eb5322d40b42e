"""Each of the doctor's checks, given what is right and what is broken; it changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from client_app import doctor
from client_app.doctor import Bundle, Finding
from client_app.node_config import NodeConfig
from client_app.store import NodeStore
from privet import deploy
from privet.cli import main
from privet.config import compose
from privet.errors import ConfigError
from privet.privacy.ledger import MECHANISM, Entry
from privet.versions import installed
from privet.wire import code_hash
from tests.conftest import write_table

CLASSIFY = [
    "method=ffa_lora",
    "model=tiny_random",
    "task=csv",
    "task.labels=[no,yes]",
    "task.path=/x.csv",
    "task.test_rows=9",
]


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    table = write_table(tmp_path / "own.csv", 20)
    return {"name": "north", "data-path": str(table), "store": str(tmp_path / "store"), "device": "cpu"}


def node(raw: dict[str, Any], **keys: Any) -> NodeConfig:
    return NodeConfig.read({**raw, **{k.replace("_", "-"): v for k, v in keys.items()}})


def wrong(findings: list[Finding]) -> str:
    """Return the one thing that is wrong."""
    (text,) = [f.text for f in findings if f.level == "wrong"]
    assert "\n" not in text
    return text


def fine(findings: list[Finding]) -> str:
    assert all(f.level != "wrong" for f in findings), findings
    return "; ".join(f.text for f in findings)


def test_code(raw: dict[str, Any]) -> None:
    own = code_hash()
    assert "as in the server's bundle" in fine(doctor.check_code(node(raw), Bundle(own, {})))
    assert "as in the server's bundle" in fine(doctor.check_code(None, Bundle(own[:16], {})))
    assert "not compared" in fine(doctor.check_code(node(raw), None))
    assert "install the same" in wrong(doctor.check_code(node(raw), Bundle("0" * 64, {})))
    assert "hexadecimal" in wrong(doctor.check_code(node(raw), Bundle("", {})))
    pinned = node(raw, code_hash=own[:20])
    assert "pin fits" in fine(doctor.check_code(pinned, Bundle(own, {})))
    assert "would refuse" in wrong(doctor.check_code(node(raw, code_hash="0" * 16), None))


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    own = installed()
    local = {**own, "torch": own["torch"].partition("+")[0] + "+other"}
    assert "flwr" in fine(doctor.check_packages(Bundle("0" * 64, local)))  # another build of the same version
    assert "peft is " in wrong(doctor.check_packages(Bundle("0" * 64, {**own, "peft": "0.0.1"})))
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch<1", "numpy>=1", "nothing-of-that-name>=1"])
    texts = [f.text for f in doctor.check_packages(None) if f.level == "wrong"]
    assert [t.split(" ")[0] for t in texts] == ["torch", "nothing-of-that-name"]


def test_device(raw: dict[str, Any]) -> None:
    assert "CPU" in fine(doctor.check_device(node(raw), None))
    assert "cuda:77 is not here" in wrong(doctor.check_device(node(raw, device="cuda:77"), None))
    config = compose([*CLASSIFY, "train.device=cuda:77"])
    without = {k: v for k, v in raw.items() if k != "device"}
    assert "cuda:77 is not here" in wrong(doctor.check_device(node(without), config))


def test_data(raw: dict[str, Any]) -> None:
    config = compose(CLASSIFY)
    assert "20 of 20 rows are usable (no 10, yes 10)" in fine(doctor.check_data(node(raw), config))
    assert "20 rows, 2 label values" in fine(doctor.check_data(node(raw), None))
    said = fine(doctor.check_data(node(raw, labels="no,perhaps"), None))
    assert "10 of 20 rows have another label" in said
    assert "none of the 20 rows" in wrong(doctor.check_data(node(raw, labels="a,b"), None))
    assert "none of the 20 rows is usable: 20 of 20 rows with a label" in wrong(
        doctor.check_data(node(raw, labels="a,b"), config)
    )
    assert "unknown column 'note'" in wrong(doctor.check_data(node(raw, text_column="note"), None))
    assert "labels of this node are 3 values" in wrong(doctor.check_data(node(raw, labels="a,b,c"), config))
    assert "there is no file" in wrong(doctor.check_data(node(raw, data_path="/nowhere.csv"), None))
    assert "there is no file" in wrong(doctor.check_data(node(raw, public_path="/nowhere.csv"), config))


def test_model(raw: dict[str, Any], tmp_path: Path) -> None:
    assert "random:" in fine(doctor.check_model(node(raw), compose(CLASSIFY)))
    away = compose([*CLASSIFY, "model=pretrained", f"model.path={tmp_path / 'away'}"])
    assert "no folder" in wrong(doctor.check_model(node(raw), away))


def test_store(raw: dict[str, Any], tmp_path: Path) -> None:
    assert "is made at the first run" in fine(doctor.check_store(node(raw)))
    assert not (tmp_path / "store").exists()
    with NodeStore(tmp_path / "store", "north"):
        held = doctor.check_store(node(raw))
        assert "is held by a process right now" in fine(held)
    assert "mode 0700" in fine(doctor.check_store(node(raw)))
    assert "belongs to node 'north', not to 'south'" in wrong(doctor.check_store(node(raw, name="south")))
    (tmp_path / "store").chmod(0o755)
    assert "chmod 700" in wrong(doctor.check_store(node(raw)))
    (tmp_path / "store").chmod(0o700)
    (tmp_path / "store" / "node.json").write_text("{}")
    assert "damaged" in wrong(doctor.check_store(node(raw)))
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert "is a link" in wrong(doctor.check_store(node(raw, store=str(tmp_path / "link"))))


def test_a_store_of_another_account(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeStore(tmp_path / "store", "north"):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert "belongs to another account" in wrong(doctor.check_store(node(raw)))


def test_ledger(raw: dict[str, Any], tmp_path: Path) -> None:
    assert "nothing is spent" in fine(doctor.check_ledger(node(raw)))
    entry = Entry(
        "r", "m", 1, "train", MECHANISM, q=0.1, sigma=1.0, clip=1.0, steps=9, declared=20, request="x"
    )
    with NodeStore(tmp_path / "store", "north") as store:
        store.ledger(1e-5, 8.0).charge(entry, run_epsilon=8.0, accountant="rdp")
    assert "no max-epsilon is set" in fine(doctor.check_ledger(node(raw)))
    assert "of max-epsilon 8 is spent over 1 runs" in fine(doctor.check_ledger(node(raw, max_epsilon=8)))
    assert "nothing is left" in wrong(doctor.check_ledger(node(raw, max_epsilon=0.1)))
    path = tmp_path / "store" / "ledger.jsonl"
    whole = path.read_text()
    path.write_text(whole.replace('"steps":9', '"steps":1'))
    assert str(path) in wrong(doctor.check_ledger(node(raw)))
    path.unlink()
    assert "is missing" in wrong(doctor.check_ledger(node(raw)))


# --- keys, certificates, clocks ------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    deploy.init(folder, deploy.Deployment("127.0.0.1", ("north",)))
    return folder


def test_key(site: Path, tmp_path: Path) -> None:
    key = site / "nodes" / "north" / "node.key"
    assert "secp384r1" in fine(doctor.check_key(key))
    copy = tmp_path / "key"
    copy.write_bytes(key.read_bytes())
    copy.chmod(0o644)
    assert "chmod 600" in wrong(doctor.check_key(copy))
    copy.write_text("nothing")
    assert "no private key" in wrong(doctor.check_key(copy))
    assert "cannot be read" in wrong(doctor.check_key(tmp_path / "away"))


@contextlib.contextmanager
def superlink(site: Path | None, ahead: float = 0.0) -> Iterator[str]:
    """Answer one request as a SuperLink does, with its clock `ahead`; without a site, without TLS."""
    context = None
    if site is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(site / "superlink" / "server.crt", site / "superlink" / "server.key")
    date = (datetime.now(UTC) + timedelta(seconds=ahead)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                peer = listener.accept()[0]
                if context is not None:
                    peer = context.wrap_socket(peer, server_side=True)
                peer.recv(1000)
                peer.sendall(f"HTTP/1.1 200 OK\r\ndate: {date}\r\n\r\n{{}}".encode())
                peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(5)


def test_certificate_and_clock(site: Path) -> None:
    ca = site / "ca" / "ca.crt"
    with superlink(site) as address:
        findings = doctor.check_superlink(address, ca)
    assert [(f.what, f.level) for f in findings] == [("CA", "ok"), ("certificate", "ok"), ("clock", "ok")]
    for ahead, text in (
        (-20.0, "ahead of the SuperLink's: Flower refuses"),
        (400.0, "behind the SuperLink's: Flower"),
    ):
        with superlink(site, ahead) as address:
            assert text in wrong(doctor.check_superlink(address, ca))
    with superlink(site, 100.0) as address:
        assert "behind" in fine(doctor.check_superlink(address, ca))


def test_certificates_that_are_wrong(site: Path, tmp_path: Path) -> None:
    ca = site / "ca" / "ca.crt"
    deploy.init(tmp_path / "other", deploy.Deployment("hub.example.org", ("north",)))
    with superlink(site) as address:
        found = doctor.check_superlink(address, tmp_path / "other" / "ca" / "ca.crt")
        assert "not signed by the CA" in wrong(found)
    with superlink(None) as address:
        assert "without TLS" in wrong(doctor.check_superlink(address, ca))
    with superlink(site) as address:
        by_name = address.replace("127.0.0.1", "127.0.0.2")
        assert "cannot be reached" in wrong(doctor.check_superlink(by_name, ca))
        doctor.check_superlink(address, ca)  # lets the server end
    assert "HOST:PORT" in wrong(doctor.check_superlink("hub", ca))
    (tmp_path / "empty.crt").write_text("")
    assert "no certificate" in wrong(doctor.check_superlink("127.0.0.1:1", tmp_path / "empty.crt"))


def test_dates_of_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for days, words in ((-400, "has ended"), (10, "is not valid before")):
        shifted = datetime.now(UTC) + timedelta(days=days)
        monkeypatch.setattr(deploy, "current_time", lambda shifted=shifted: shifted)
        folder = tmp_path / f"at{days}"
        deploy.init(folder, deploy.Deployment("127.0.0.1", ("north",), days=30))
        with superlink(folder) if days < 0 else contextlib.nullcontext("127.0.0.1:1") as address:
            assert words in wrong(doctor.check_superlink(address, folder / "ca" / "ca.crt"))
    monkeypatch.undo()
    near = tmp_path / "near"
    deploy.init(near, deploy.Deployment("127.0.0.1", ("north",), days=10))
    with superlink(near) as address:
        levels = {f.what: f.level for f in doctor.check_superlink(address, near / "ca" / "ca.crt")}
    assert levels["certificate"] == "note"


def test_a_name_that_the_certificate_lacks(tmp_path: Path) -> None:
    error = ssl.SSLCertVerificationError("x")
    error.verify_message = "Hostname mismatch, certificate is not valid for 'hub'."
    assert "not made for 'hub'" in doctor._why(error, "hub")


# --- the command ---------------------------------------------------------------------------------


def test_the_command_says_a_line_each_and_ends_with_1_where_something_is_wrong(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = " ".join(f"{k}={json.dumps(v)}" for k, v in raw.items())
    assert main(["doctor", "--node-config", line, "--bundle-hash", code_hash(), *CLASSIFY]) == 0
    out = capsys.readouterr().out
    assert "ok     data: 20 of 20 rows are usable (no 10, yes 10)\n" in out
    assert "note   superlink: the certificate and the clock are not looked at" in out
    assert not (tmp_path / "store").exists()

    config = tmp_path / "node.toml"
    config.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in {**raw, "label-column": "labl"}.items()))
    assert main(["doctor", "--node-config", str(config), "--json"]) == 1
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["data"]["level"] == "wrong"

    assert main(["doctor", "--node-config", "max_epsilon=3"]) == 1
    assert (
        "WRONG  node-config: unknown key 'max_epsilon' - did you mean 'max-epsilon'?"
        in capsys.readouterr().out
    )
    assert main(["doctor", "--node-config", line, "--superlink", "hub:1"]) == 2
    assert "go together" in capsys.readouterr().err


def test_a_bundle_file(site: Path, tmp_path: Path) -> None:
    bundle = Bundle.read(site / "nodes" / "north" / "bundle.json")
    assert bundle == Bundle(code_hash(), installed())
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"no bundle\.json"):
        Bundle.read(tmp_path / "b.json")


def test_a_held_lock_is_seen_without_taking_it(raw: dict[str, Any], tmp_path: Path) -> None:
    with NodeStore(tmp_path / "store", "north"):
        pass
    doctor.check_store(node(raw))
    descriptor = os.open(tmp_path / "store" / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the doctor has let it go
    os.close(descriptor)
