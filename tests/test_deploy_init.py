"""What ``privet deploy init`` writes: certificates that verify, keys that Flower reads, modes, units that parse."""

from __future__ import annotations

import configparser
import contextlib
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from client_app.node_config import NodeConfig
from privet.cli import main
from privet.deploy import Deployment, init
from privet.errors import ConfigError, PrivetError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "site"
    options = [
        "--server-name",
        "hub.example.org",
        "--san",
        "10.0.0.5",
        "--san",
        "hub",
        "--nodes",
        "north,south",
    ]
    assert main(["deploy", "init", str(folder), *options]) == 0
    return folder


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(path)
    return parser


def options(command: str) -> dict[str, str | None]:
    words = shlex.split(command)[1:]
    out: dict[str, str | None] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            follows = words[i + 1] if i + 1 < len(words) else "--"
            out[word] = None if follows.startswith("--") else follows
    return out


def test_only_owners_read_keys_and_settings(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.suffix in (".key", ".env") or path.name == "node.toml":
            assert mode == 0o600, path
        else:
            assert mode == 0o644, path
    assert "PRIVATE KEY" not in "".join(p.read_text() for p in (folder / "submit").rglob("*") if p.is_file())


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "ca" / "ca.key").read_bytes()
    assert main(["deploy", "init", str(folder), "--server-name", "x", "--nodes", "a"]) == 2
    assert "not empty: its keys are not overwritten" in capsys.readouterr().err
    assert (folder / "ca" / "ca.key").read_bytes() == before


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from privet import deploy

    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deploy, "commands", fail)
    with pytest.raises(PrivetError, match="No space left"):
        init(tmp_path / "new", Deployment("hub", ("north",)))
    assert not (tmp_path / "new").exists()


def handshake(folder: Path, ca: Path, name: str) -> str:
    """Return the subject of the certificate as a client of that `name` accepts it, over loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "superlink" / "server.crt", folder / "superlink" / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                context.wrap_socket(listener.accept()[0], server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=5) as plain:
                client = ssl.create_default_context(cafile=str(ca))
                with client.wrap_socket(plain, server_hostname=name) as secure:
                    return str(dict(pair[0] for pair in secure.getpeercert()["subject"])["commonName"])  # type: ignore
        finally:
            thread.join(5)


@pytest.mark.parametrize("name", ["hub.example.org", "10.0.0.5", "hub", "localhost", "127.0.0.1", "::1"])
def test_the_server_is_known_by_each_of_its_names(folder: Path, name: str) -> None:
    assert handshake(folder, folder / "nodes" / "north" / "ca.crt", name) == "hub.example.org"


def test_another_name_and_another_ca_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(folder, folder / "ca" / "ca.crt", "other.example.org")
    init(tmp_path / "other", Deployment("hub.example.org", ("north",)))
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        handshake(folder, tmp_path / "other" / "ca" / "ca.crt", "hub.example.org")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_accepts_the_chain(folder: Path) -> None:
    command = [
        "openssl",
        "verify",
        "-x509_strict",
        "-purpose",
        "sslserver",
        "-verify_hostname",
        "hub.example.org",
    ]
    ca, server = folder / "ca" / "ca.crt", folder / "superlink" / "server.crt"
    done = subprocess.run([*command, "-CAfile", ca, server], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_node_keys_are_what_flower_reads(folder: Path) -> None:
    from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

    publics = []
    for node in ("north", "south"):
        place = folder / "nodes" / node
        private = load_ssh_private_key((place / "node.key").read_bytes(), None)
        public = load_ssh_public_key((folder / "submit" / "keys" / f"{node}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert uses_nist_ec_curve(public)
        assert private.public_key() == public
        publics.append(public)
    assert publics[0] != publics[1]


def test_the_superlinks_unit(folder: Path) -> None:
    service = unit(folder / "superlink" / "privet-superlink.service")["Service"]
    given = options(service["ExecStart"])
    assert given["--database"] == "/var/lib/privet/superlink/state.db"
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(given)
    assert given["--ssl-keyfile"] == "/etc/privet/superlink/server.key"
    assert "--insecure" not in given
    assert (service["Restart"], service["UMask"]) == ("always", "0077")
    environment = (folder / "superlink" / "superlink.env").read_text().splitlines()
    assert {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1",
        "FLWR_DISABLE_UPDATE_CHECK=1",
        "FLWR_TELEMETRY_ENABLED=0",
    } <= set(environment)
    assert all(re.fullmatch(r"#.*|[A-Z_]+=[A-Za-z0-9/:._+-]+", line) for line in environment)


def test_a_supernodes_unit_and_its_configuration(folder: Path) -> None:
    parsed = unit(folder / "nodes" / "south" / "privet-supernode-south.service")
    service = parsed["Service"]
    given = options(service["ExecStart"])
    assert given["--superlink"] == "hub.example.org:8000"
    assert given["--auth-supernode-private-key"] == "/etc/privet/nodes/south/node.key"
    assert given["--root-certificates"] == "/etc/privet/nodes/south/ca.crt"
    assert "--insecure" not in given
    # Flower refuses a killed node for about 60 s; the unit must still be trying then.
    assert service["Restart"] == "always"
    assert parsed["Unit"]["StartLimitIntervalSec"] == "0"
    assert 5 <= int(service["RestartSec"]) <= 60
    node = NodeConfig.read(tomllib.loads((folder / "nodes" / "south" / "node.toml").read_text()))
    assert (node.name, str(node.store)) == ("south", "/var/lib/privet/south/store")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_units(folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.service"):
        # What is not installed here is not what is looked for.
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", path.read_text())
        (tmp_path / path.name).write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert path.name not in said, said


def test_every_commented_setting_of_a_node_is_one(folder: Path) -> None:
    text = (
        (folder / "nodes" / "north" / "node.toml")
        .read_text()
        .replace('code-hash = ""', f'code-hash = "{"0" * 64}"')
    )
    on = re.sub(r"(?m)^#(?=[a-z-]+ = )", "", text)
    node = NodeConfig.read(tomllib.loads(on))
    assert (node.max_epsilon, node.methods, node.retention_days) == (8.0, ("fedask", "fedhsip"), 30)


def test_one_supernode_a_gpu(tmp_path: Path) -> None:
    init(tmp_path / "gpus", Deployment("hub", ("north",), gpus=2))
    seen = []
    for gpu in range(2):
        place = tmp_path / "gpus" / "nodes" / f"north-gpu{gpu}"
        assert f"CUDA_VISIBLE_DEVICES={gpu}\n" in (place / "node.env").read_text()
        node = NodeConfig.read(tomllib.loads((place / "node.toml").read_text()))
        service = unit(place / f"privet-supernode-north-gpu{gpu}.service")["Service"]
        seen.append((node.device, node.store, node.data_path, options(service["ExecStart"])["--port"]))
    (first, second) = seen
    assert first[0] == second[0] == "cuda:0"
    assert all(a != b for a, b in zip(first[1:], second[1:], strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_name": "no host"}, "in a certificate"),
        ({"sans": ("a\nb",)}, "in a certificate"),
        ({"nodes": ()}, "--nodes is missing"),
        ({"nodes": ("a/b",)}, "node name 'a/b' is not allowed"),
        ({"nodes": ("a", "a")}, "names a node twice"),
        ({"port": 0}, "--port 0"),
        ({"gpus": 0}, "--gpus 0"),
        ({"etc": Path("etc")}, "--etc etc is not allowed: an absolute path"),
        ({"state": Path("/a b")}, "--state /a b is not allowed"),
        ({"user": "root; id"}, "--user"),
    ],
)
def test_what_cannot_stand_in_a_unit_or_certificate_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Deployment(**{"server_name": "hub", "nodes": ("north",), **changes})  # type: ignore[arg-type]


def test_the_printed_commands_name_every_file_that_they_install(folder: Path) -> None:
    text = (folder / "COMMANDS.md").read_text()
    for place in ("superlink", "nodes/north", "nodes/south"):
        for path in (folder / place).iterdir():
            assert path.name in text, path
    assert "flwr supernode register $FLWR_HOME/keys/north.pub privet --name north" in text


@pytest.fixture(scope="module")
def site_with_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers") / "site"
    options = ["--server-name", "hub", "--nodes", "north", "--worker"]
    assert main(["deploy", "init", str(folder), *options]) == 0
    return folder


def test_a_worker_has_an_account_of_its_own_and_a_socket_for_the_supernodes(site_with_workers: Path) -> None:
    place = site_with_workers / "nodes" / "north"
    node = NodeConfig.read(tomllib.loads((place / "node.toml").read_text()))
    assert str(node.store) == "/var/lib/privet/workers/north/store"
    assert str(node.worker) == "/run/privet/north/worker.sock"

    socket_unit = unit(place / "privet-worker-north.socket")["Socket"]
    assert socket_unit["ListenStream"] == str(node.worker)
    assert (socket_unit["SocketUser"], socket_unit["SocketMode"]) == ("privet", "0600")
    service = unit(place / "privet-worker-north.service")["Service"]
    assert service["User"] == "privet-worker"
    assert service["Restart"] == "on-failure"  # not after an idle end: its socket starts it again
    asked = options(service["ExecStart"])
    assert asked["--peer"] == "privet"
    assert asked["--node-config"] == "/etc/privet/workers/north/node.toml"
    supernode = unit(place / "privet-supernode-north.service")["Service"]
    assert supernode["User"] == "privet"
    assert options(supernode["ExecStart"])["--node-config"] == asked["--node-config"]
    assert "d /run/privet/north 0700 privet privet -" in (place / "privet-worker-north.conf").read_text()
    assert stat.S_IMODE((place / "worker.env").stat().st_mode) == 0o600


def test_the_commands_of_a_worker_keep_rows_and_store_from_the_supernode(site_with_workers: Path) -> None:
    text = (site_with_workers / "COMMANDS.md").read_text()
    assert "install -d -m 0700 -o privet-worker -g privet-worker /var/lib/privet/workers/north" in text
    assert "install -m 0640 -o privet-worker -g privet node.toml /etc/privet/workers/north/" in text
    assert not re.search(r"-o privet -g privet [^\n]*node\.toml", text)


def test_the_services_account_cannot_be_the_workers() -> None:
    with pytest.raises(ConfigError, match="could read the rows"):
        Deployment("hub", ("north",), worker="privet")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_a_workers_units(site_with_workers: Path, tmp_path: Path) -> None:
    names = ("privet-worker-north.service", "privet-worker-north.socket")
    for name in names:
        text = (site_with_workers / "nodes" / "north" / name).read_text()
        (tmp_path / name).write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in names)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "privet-worker" not in said, said
