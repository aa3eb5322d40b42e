"""What a deployment needs besides data: a CA, a server certificate, node keys, systemd units and their settings.

One folder for every machine: ``superlink/``, ``nodes/NAME/``, ``submit/`` for whoever starts runs, and ``ca/``, whose
key signs further certificates and belongs on none of them. Keys are readable by their owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import shlex
import shutil
import string
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privet.environment import FLOWER
from privet.errors import ConfigError, PrivetError
from privet.versions import installed
from privet.wire import code_hash

BUNDLE = "bundle.json"
"""Code hash and package versions of the side that submits; ``privet doctor --bundle`` compares a node with it."""

ENVIRONMENT = {
    **FLOWER,
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Settings of every process of a deployment."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,40}")
_FIRST_RUNTIME_PORT = 9094
_CA_DAYS = 3650


@dataclass(frozen=True)
class Deployment:
    """What to write.

    Attributes
    ----------
    server_name : str
        Name or address under which the nodes reach the SuperLink.
    sans : tuple of str
        Further names and addresses in its certificate.
    nodes : tuple of str
        Names of the nodes.
    port : int
        The SuperLink's port.
    gpus : int or None
        One SuperNode for each of so many GPUs of every node's machine; None: one SuperNode a node.
    days : int
        Validity of the server's certificate.
    etc, state, bin : Path
        Where the folders, the state and the commands will lie on the machines.
    user : str
        The account that the services run under.
    worker : str or None
        The account of ``privet worker``, one a SuperNode, which alone can read rows and store; None: no workers.
    """

    server_name: str
    nodes: tuple[str, ...]
    sans: tuple[str, ...] = ()
    port: int = 8000
    gpus: int | None = None
    days: int = 365
    etc: Path = Path("/etc/privet")
    state: Path = Path("/var/lib/privet")
    bin: Path = field(default_factory=lambda: Path(sysconfig.get_path("scripts")))
    user: str = "privet"
    worker: str | None = None

    def __post_init__(self) -> None:
        for name in (self.server_name, *self.sans):
            if not _is_address(name) and not re.fullmatch(
                r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", name
            ):
                raise ConfigError(f"'{name}' is not allowed in a certificate: a host name or an IP address")
        if not self.nodes:
            raise ConfigError("--nodes is missing: names such as north,south")
        for name in self.nodes:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"node name '{name}' is not allowed: letters, digits and '-', at most 41")
        if len(set(self.nodes)) != len(self.nodes):
            raise ConfigError("--nodes names a node twice")
        for option, value, most in (("--port", self.port, 65535), ("--days", self.days, _CA_DAYS)):
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value} is not allowed: 1 to {most}")
        if self.gpus is not None and not 1 <= self.gpus <= 64:
            raise ConfigError(f"--gpus {self.gpus} is not allowed: 1 to 64")
        for option, account in (("--user", self.user), ("--worker", self.worker or "privet-worker")):
            if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", account):
                raise ConfigError(f"{option} {account} is not allowed: an account's name")
        if self.worker == self.user:
            raise ConfigError(
                f"--worker {self.worker} is not allowed: the services' own account could read the rows"
            )
        for option, path in (("--etc", self.etc), ("--state", self.state), ("--bin", self.bin)):
            # Units and environment files have quoting rules of their own; such paths need none of them.
            if not path.is_absolute() or not re.fullmatch(r"[A-Za-z0-9/._+-]+", str(path)):
                raise ConfigError(
                    f"{option} {path} is not allowed: an absolute path of letters, digits and /._+-"
                )

    @property
    def supernodes(self) -> list[SuperNode]:
        """Every SuperNode, in the order of the nodes and their GPUs."""
        out: list[SuperNode] = []
        for node in self.nodes:
            for gpu in range(self.gpus or 1):
                name = node if self.gpus is None else f"{node}-gpu{gpu}"
                port = _FIRST_RUNTIME_PORT + len(out)  # nodes may share a machine
                out.append(SuperNode(name, node, None if self.gpus is None else gpu, port))
        return out

    def settings(self, supernode: SuperNode) -> Path:
        """Folder of a node's ``node.toml`` on its machine."""
        return self.etc / ("nodes" if self.worker is None else "workers") / supernode.name

    def node_state(self, supernode: SuperNode) -> Path:
        """Folder below which a node's store lies."""
        return self.state / supernode.name if self.worker is None else self.state / "workers" / supernode.name

    def socket(self, supernode: SuperNode) -> Path:
        """Where a node's worker listens."""
        return Path("/run/privet") / supernode.name / "worker.sock"

    @property
    def address(self) -> str:
        """The SuperLink's address as Flower wants it."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class SuperNode:
    """One SuperNode: its name, its machine, its GPU (None: all that are there) and the port of its local API."""

    name: str
    node: str
    gpu: int | None
    port: int


def init(folder: Path, deployment: Deployment) -> str:
    """Write everything into a new `folder`; return the commands that a person goes on with.

    Nothing is overwritten: a folder that holds anything is refused, and where writing fails, what was written goes.

    Raises
    ------
    PrivetError
        If `folder` is not empty or cannot be written.
    """
    folder = folder.expanduser().resolve()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PrivetError(f"{folder} exists already and is not empty: its keys are not overwritten")
        created = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        try:
            text = _write_all(folder, deployment)
        except BaseException:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if created:
                folder.rmdir()
            raise
    except OSError as error:
        raise PrivetError(f"{folder} cannot be written: {error.strerror}") from None
    return text


def _write_all(folder: Path, deployment: Deployment) -> str:
    ca_key, ca = _make_ca(deployment)
    server_key, server = _make_server(deployment, ca_key, ca)
    ca_pem = ca.public_bytes(serialization.Encoding.PEM)
    bundle = json.dumps({"code_hash": code_hash(), "versions": installed()}, indent=2).encode() + b"\n"

    _write(folder / "ca" / "ca.key", _pem(ca_key), private=True)
    _write(folder / "ca" / "ca.crt", ca_pem)
    superlink = folder / "superlink"
    _write(superlink / "server.key", _pem(server_key), private=True)
    _write(superlink / "server.crt", server.public_bytes(serialization.Encoding.PEM) + ca_pem)
    _write(superlink / "ca.crt", ca_pem)
    _write(
        superlink / "superlink.env",
        _environment(deployment, deployment.state / "superlink", None).encode(),
        private=True,
    )
    _write(superlink / "privet-superlink.service", superlink_unit(deployment).encode())
    for supernode in deployment.supernodes:
        place = folder / "nodes" / supernode.name
        key = ec.generate_private_key(ec.SECP384R1())
        _write(place / "node.key", _openssh(key), private=True)
        _write(folder / "submit" / "keys" / f"{supernode.name}.pub", _openssh_public(key))
        _write(place / "ca.crt", ca_pem)
        _write(place / "node.toml", _node_config(deployment, supernode).encode(), private=True)
        _write(
            place / "node.env",
            _environment(deployment, deployment.state / supernode.name, supernode.gpu).encode(),
            private=True,
        )
        _write(
            place / f"privet-supernode-{supernode.name}.service",
            supernode_unit(deployment, supernode).encode(),
        )
        _write(place / BUNDLE, bundle)
        if deployment.worker is not None:
            _write_worker(place, deployment, supernode)
    submit = folder / "submit"
    _write(submit / "ca.crt", ca_pem)
    _write(submit / "config.toml", _connection(deployment, submit).encode())
    text = commands(folder, deployment)
    _write(folder / "COMMANDS.md", text.encode())
    return text


def _write_worker(place: Path, deployment: Deployment, supernode: SuperNode) -> None:
    name, state = supernode.name, deployment.node_state(supernode)
    environment = _environment(deployment, state, supernode.gpu)
    _write(place / "worker.env", environment.encode(), private=True)
    _write(place / f"privet-worker-{name}.service", worker_unit(deployment, supernode).encode())
    _write(place / f"privet-worker-{name}.socket", worker_socket(deployment, supernode).encode())
    folder = deployment.socket(supernode).parent
    lines = [
        f"d {folder.parent} 0755 root root -",
        f"d {folder} 0700 {deployment.user} {deployment.user} -",
        "",
    ]
    _write(place / f"privet-worker-{name}.conf", "\n".join(lines).encode())


# --- keys and certificates -----------------------------------------------------------------------


def _make_ca(deployment: Deployment) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Privet CA of {deployment.server_name}"[:64])])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _certificate(name, key.public_key(), name, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, builder.sign(key, hashes.SHA384())


def _make_server(
    deployment: Deployment, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, deployment.server_name[:64])])
    # The ServerApp's process reaches its own SuperLink over loopback.
    names = dict.fromkeys((deployment.server_name, *deployment.sans, "localhost", "127.0.0.1", "::1"))
    sans = [x509.IPAddress(ipaddress.ip_address(n)) if _is_address(n) else x509.DNSName(n) for n in names]
    builder = (
        _certificate(name, key.public_key(), ca.subject, deployment.days)
        .add_extension(x509.SubjectAlternativeName(sans), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    return key, builder.sign(ca_key, hashes.SHA384())


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    now = current_time()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other machines differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def current_time() -> datetime.datetime:
    """Return when certificates are made."""
    return datetime.datetime.now(datetime.UTC)


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a node's key as Flower reads it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def _openssh_public(key: ec.EllipticCurvePrivateKey) -> bytes:
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public + b"\n"


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a new file; its folders are their owner's alone."""
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600 if private else 0o644)
        file.write(data)


# --- units and settings --------------------------------------------------------------------------

_UNIT = string.Template("""\
[Unit]
Description=$description
After=network-online.target
Wants=network-online.target
# Never give up: see RestartSec.
StartLimitIntervalSec=0

[Service]
Type=simple
User=$user
Group=$user
UMask=0077
EnvironmentFile=$environment
WorkingDirectory=$state
ExecStart=$command
Restart=always
RestartSec=$restart
# The processes of a message end with their SuperNode, the ServerApp with its SuperLink.
KillMode=control-group
TimeoutStopSec=30
$hardening

[Install]
WantedBy=multi-user.target
""")

_HARDENING = """\
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
ReadWritePaths={state}"""

_WORKER_UNIT = string.Template("""\
[Unit]
Description=Privet worker: $name
# Its socket starts it with the first message, and again after it ended because none came.
Requires=privet-worker-$name.socket
After=privet-worker-$name.socket
StartLimitIntervalSec=0

[Service]
Type=simple
User=$user
Group=$user
UMask=0077
EnvironmentFile=$environment
WorkingDirectory=$state
ExecStart=$command
Restart=on-failure
RestartSec=5
# A message under way has 25 s to end.
KillMode=mixed
TimeoutStopSec=40
$hardening
""")

_WORKER_SOCKET = string.Template("""\
[Unit]
Description=Socket of the Privet worker: $name

[Socket]
ListenStream=$socket
# The SuperNode's account alone; the folder is made by systemd-tmpfiles, mode 0700.
SocketUser=$user
SocketGroup=$user
SocketMode=0600
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
""")


def superlink_unit(deployment: Deployment) -> str:
    """Return the systemd unit of the SuperLink: TLS, node authentication, state in a database."""
    etc, state = deployment.etc / "superlink", deployment.state / "superlink"
    command = [
        str(deployment.bin / "flower-superlink"),
        *("--host", "0.0.0.0", "--port", str(deployment.port)),
        *("--ssl-ca-certfile", str(etc / "ca.crt")),
        *("--ssl-certfile", str(etc / "server.crt")),
        *("--ssl-keyfile", str(etc / "server.key")),
        "--enable-supernode-auth",
        *("--database", str(state / "state.db")),
        "--disable-runtime-dependency-installation",
    ]
    return _UNIT.substitute(
        description="Flower SuperLink of Privet",
        user=deployment.user,
        environment=etc / "superlink.env",
        state=state,
        command=shlex.join(command),
        restart=5,
        hardening=_HARDENING.format(state=state),
    )


def supernode_unit(deployment: Deployment, supernode: SuperNode) -> str:
    """Return the systemd unit of one SuperNode.

    Flower lets a node that was killed activate again only about 60 s later, and the SuperNode exits when it may not:
    so it is started every 20 s, without end.
    """
    etc, state = deployment.etc / "nodes" / supernode.name, deployment.state / supernode.name
    command = [
        str(deployment.bin / "flower-supernode"),
        *("--superlink", deployment.address),
        *("--root-certificates", str(etc / "ca.crt")),
        *("--auth-supernode-private-key", str(etc / "node.key")),
        *("--host", "127.0.0.1", "--port", str(supernode.port)),
        *("--node-config", str(deployment.settings(supernode) / "node.toml")),
    ]
    return _UNIT.substitute(
        description=f"Flower SuperNode of Privet: {supernode.name}",
        user=deployment.user,
        environment=etc / "node.env",
        state=state,
        command=shlex.join(command),
        restart=20,
        hardening=_HARDENING.format(state=state),
    )


def worker_unit(deployment: Deployment, supernode: SuperNode) -> str:
    """Return the systemd unit of a node's worker, under an account of its own."""
    assert deployment.worker is not None
    etc, state = deployment.settings(supernode), deployment.node_state(supernode)
    command = [
        *(str(deployment.bin / "privet"), "worker", "--node-config", str(etc / "node.toml")),
        *("--peer", deployment.user, "--idle", "30m", "--grace", "25s"),
    ]
    return _WORKER_UNIT.substitute(
        name=supernode.name,
        user=deployment.worker,
        environment=etc / "worker.env",
        state=state,
        command=shlex.join(command),
        hardening=_HARDENING.format(state=state),
    )


def worker_socket(deployment: Deployment, supernode: SuperNode) -> str:
    """Return the systemd socket unit of a node's worker: the SuperNode's account alone may connect."""
    return _WORKER_SOCKET.substitute(
        name=supernode.name, user=deployment.user, socket=deployment.socket(supernode)
    )


def _environment(deployment: Deployment, state: Path, gpu: int | None) -> str:
    values = {
        **ENVIRONMENT,
        # Flower finds its own helper programs by PATH.
        "PATH": f"{deployment.bin}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(state),
        "FLWR_HOME": str(state / "flower"),
        "HF_HOME": str(state / "huggingface"),
        "PRIVET_CACHE": str(state / "cache"),
        "PRIVET_RUNS": str(state / "runs"),
    }
    if gpu is not None:
        values["CUDA_VISIBLE_DEVICES"] = str(gpu)
    lines = [f"{key}={value}" for key, value in values.items()]
    return "\n".join(
        [
            *lines,
            "# Without a way to a model hub (wheels and models were copied here):",
            "#HF_HUB_OFFLINE=1",
            "",
        ]
    )


def _node_config(deployment: Deployment, supernode: SuperNode) -> str:
    own = f"/data/{supernode.name}.parquet"
    lines = [
        "# What this node is and what its owner allows; no server can change it. See docs/deploy.md.",
        f"name = {json.dumps(supernode.name)}",
        f"data-path = {json.dumps(own)}  # a CSV, JSONL or Parquet table, or a datasets folder",
        f"store = {json.dumps(str(deployment.node_state(supernode) / 'store'))}",
        *([] if deployment.worker is None else [f"worker = {json.dumps(str(deployment.socket(supernode)))}"]),
        "",
        '#text-column = "text"          # what this table calls the task\'s columns and labels',
        '#label-column = "label"',
        '#labels = "no,yes"             # in the order of the task\'s labels',
        "#public-examples = 4000        # the row count that this node declares; default: the rows of its table",
        "",
        "#max-epsilon = 8.0             # over all runs, for ever",
        "#min-clip = 0.1",
        '#methods = "fedask fedhsip"',
        '#code-hash = ""                # `privet doctor` prints it',
        "#retention-days = 30",
        '#model-path = "/models/base"   # this machine\'s own copy of the base model',
    ]
    if supernode.gpu is not None:
        lines += ['device = "cuda:0"  # the one GPU of CUDA_VISIBLE_DEVICES']
    return "\n".join([*lines, ""])


def _connection(deployment: Deployment, submit: Path) -> str:
    return (
        '[superlink]\ndefault = "privet"\n\n[superlink.privet]\n'
        f"address = {json.dumps(deployment.address)}\nroot-certificates = {json.dumps(str(submit / 'ca.crt'))}\n"
    )


def commands(folder: Path, deployment: Deployment) -> str:
    """Return what to do next, as commands."""
    user, etc, state = deployment.user, deployment.etc, deployment.state
    own = f"-o {user} -g {user}"
    every = deployment.supernodes
    first = every[0].name
    lines = [
        "# What to do next",
        "",
        f"`ca/ca.key` signs further server certificates: keep it away from all machines. It is in {folder}/ca.",
        "",
        f"## On the SuperLink's machine, {deployment.server_name}",
        "",
        "Copy `superlink/` there, then as root, in that folder:",
        "",
        "```bash",
        f"id {user} || useradd --system --home-dir {state} --shell /usr/sbin/nologin {user}",
        f"install -d -m 0755 {etc} {state}",
        f"install -d -m 0700 {own} {etc}/superlink {state}/superlink",
        f"install -m 0600 {own} server.key superlink.env {etc}/superlink/",
        f"install -m 0644 {own} server.crt ca.crt {etc}/superlink/",
        "install -m 0644 privet-superlink.service /etc/systemd/system/",
        "systemctl daemon-reload && systemctl enable --now privet-superlink",
        "```",
        "",
        "## Where runs are submitted",
        "",
        f"`submit/` holds no secret. Here it lies in {folder}/submit; elsewhere correct the path in its config.toml.",
        "",
        "```bash",
        f"export FLWR_HOME={shlex.quote(str(folder / 'submit'))} FLWR_DISABLE_UPDATE_CHECK=1 FLWR_TELEMETRY_ENABLED=0",
        *(f"flwr supernode register $FLWR_HOME/keys/{n.name}.pub privet --name {n.name}" for n in every),
        "```",
    ]
    for supernode in every:
        name = supernode.name
        alone, settings = deployment.worker is None, deployment.settings(supernode)
        lines += [
            "",
            f"## On the machine of {name}",
            "",
            f"Copy `nodes/{name}/` there, edit node.toml, then as root, in that folder:",
            "",
            "```bash",
            f"id {user} || useradd --system --home-dir {state} --shell /usr/sbin/nologin {user}",
            f"install -d -m 0755 {etc} {etc}/nodes {state}",
            f"install -d -m 0700 {own} {etc}/nodes/{name} {state}/{name}",
            f"install -m 0600 {own} node.key {'node.toml ' if alone else ''}node.env {etc}/nodes/{name}/",
            f"install -m 0644 {own} ca.crt {BUNDLE} {etc}/nodes/{name}/",
            f"install -m 0644 privet-supernode-{name}.service /etc/systemd/system/",
            *_worker_commands(deployment, supernode),
            f"sudo -u {user} {deployment.bin}/privet doctor --node-config {settings}/node.toml \\",
            f"  --bundle {etc}/nodes/{name}/{BUNDLE} --private-key {etc}/nodes/{name}/node.key \\",
            f"  --superlink {deployment.address} --root-certificates {etc}/nodes/{name}/ca.crt",
            f"systemctl daemon-reload && systemctl enable --now privet-supernode-{name}",
            "```",
        ]
    lines += [
        "",
        "## Submit, watch, stop",
        "",
        "```bash",
        "flwr supernode list privet          # who is online",
        'flwr run . privet --run-config \'method="fedask" overrides="federation.clients='
        + f"{len(every)}\"'",
        "privet status                       # every run of this SuperLink; privet status RUN_ID for one",
        "flwr log RUN_ID privet --stream",
        "privet stop RUN_ID",
        f"journalctl -u privet-supernode-{first}     # a node's own log: why it refused",
        "```",
        "",
    ]
    return "\n".join(lines)


def _worker_commands(deployment: Deployment, supernode: SuperNode) -> list[str]:
    """Return what sets a node's worker up: rows and store are its account's, node.toml the SuperNode may read."""
    if deployment.worker is None:
        return []
    name, account, user = supernode.name, deployment.worker, deployment.user
    etc, state = deployment.settings(supernode), deployment.node_state(supernode)
    unit = f"privet-worker-{name}"
    return [
        f"id {account} || useradd --system --home-dir {state.parent} --shell /usr/sbin/nologin {account}",
        f"install -d -m 0755 {etc.parent} {state.parent}",
        f"install -d -m 0750 -o {account} -g {user} {etc}",
        f"install -d -m 0700 -o {account} -g {account} {state}",
        f"install -m 0640 -o {account} -g {user} node.toml {etc}/",
        f"install -m 0600 -o {account} -g {account} worker.env {etc}/",
        f"install -m 0644 {unit}.service {unit}.socket /etc/systemd/system/",
        f"install -m 0644 {unit}.conf /etc/tmpfiles.d/ && systemd-tmpfiles --create {unit}.conf",
        f"systemctl daemon-reload && systemctl enable --now {unit}.socket",
        f"# The table of data-path: readable by {account} only. As that account the doctor looks at table and store:",
        f"sudo -u {account} {deployment.bin}/privet doctor --node-config {etc}/node.toml",
    ]
