"""What keeps a node from taking part: one small check for each thing, one line for each finding.

It changes nothing and leaves the store closed. What it says of the node's rows is for the node's own terminal.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509.oid import NameOID
from packaging.requirements import Requirement

from client_app.frames import FrameError, ask
from client_app.node_config import NodeConfig
from client_app.store import read_facts
from privet.config import Config
from privet.data.sources import read_table, resolve_path
from privet.data.tasks import read_node_table
from privet.devices import pick_device
from privet.errors import ConfigError, PrivetError, StoreError
from privet.privacy.ledger import Ledger
from privet.privacy.ledger import describe as describe_ledger
from privet.versions import installed
from privet.weights import base_weights
from privet.wire import code_hash, unpack_failure

AHEAD, BEHIND = 5.0, 305.0
"""Seconds by which a node's clock may differ from the SuperLink's before Flower refuses the node's signature."""

SOON_DAYS = 30
"""A certificate that ends within so many days is worth a note."""

_NETWORK_WAIT = 10.0
_WORKER_WAIT = 60.0  # it may have to start, or a message may be under way
_SMALLEST_GPU = 2**30


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is right, and what there is to say."""

    what: str
    level: Literal["ok", "note", "wrong"]
    text: str

    def __str__(self) -> str:
        return f"{self.level.upper() if self.level == 'wrong' else self.level:<5}  {self.what}: {self.text}"


def _ok(what: str, text: str) -> Finding:
    return Finding(what, "ok", text)


def _note(what: str, text: str) -> Finding:
    return Finding(what, "note", text)


def _wrong(what: str, text: str) -> Finding:
    return Finding(what, "wrong", text)


# --- code and packages ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Bundle:
    """What the side that submits has: its code hash, and its packages where they are known."""

    code_hash: str
    versions: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Read ``bundle.json``; raises ConfigError."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            versions = {str(k): str(v) for k, v in raw["versions"].items()}
            return cls(str(raw["code_hash"]), versions)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{path} is no bundle.json of privet deploy init") from None


def check_code(node: NodeConfig | None, bundle: Bundle | None) -> list[Finding]:
    """Compare this installation's code with the server's bundle and with the owner's pin."""
    own = code_hash()
    findings = []
    if bundle is None:
        findings.append(_note("code", f"{own} (not compared: give --bundle or --bundle-hash)"))
    elif not re.fullmatch("[0-9a-f]{16,64}", bundle.code_hash):
        findings.append(_wrong("code", "the bundle's hash is none: 16 to 64 hexadecimal digits"))
    elif own.startswith(bundle.code_hash):
        findings.append(_ok("code", f"{own}, as in the server's bundle"))
    else:
        text = f"this installation has {own[:16]}..., the server's bundle {bundle.code_hash[:16]}...: install the same"
        findings.append(_wrong("code", text))
    if node is not None and node.code_hash is not None:
        # Flower runs the code that comes with a run, so it is the bundle that the pin will meet.
        meets = own if bundle is None else bundle.code_hash
        if meets.startswith(node.code_hash) or node.code_hash.startswith(meets):
            findings.append(_ok("code-hash", "the owner's pin fits"))
        else:
            findings.append(
                _wrong("code-hash", f"the owner pinned {node.code_hash[:16]}...: it would refuse this code")
            )
    return findings


def check_packages(bundle: Bundle | None) -> list[Finding]:
    """Compare installed packages with what the project needs and with the server's."""
    wrong = []
    for text in _requirements():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(need.name)
        except PackageNotFoundError:
            wrong.append(_wrong("packages", f"{need.name} is not installed"))
            continue
        if not need.specifier.contains(have, prereleases=True):
            wrong.append(
                _wrong("packages", f"{need.name} {have} is installed, {need.name}{need.specifier} is needed")
            )
    own = installed()
    for package, theirs in sorted((bundle.versions if bundle else {}).items()):
        # A local part, such as the CUDA build, may differ.
        if package in own and own[package].partition("+")[0] != theirs.partition("+")[0]:
            wrong.append(
                _wrong("packages", f"{package} is {own[package]} here and {theirs} where runs are submitted")
            )
    said = ", ".join(f"{k} {v}" for k, v in own.items())
    return wrong or [
        _ok("packages", said if bundle and bundle.versions else f"{said} (the server's are not known)")
    ]


def _requirements() -> Sequence[str]:
    try:
        return requires("privet") or []
    except PackageNotFoundError:
        return []


# --- device, data, model -------------------------------------------------------------------------


def check_device(node: NodeConfig, config: Config | None) -> list[Finding]:
    """Say where this node would compute, and whether that is there and free."""
    import torch

    setting = node.device or (config.train.device if config is not None else "auto")
    try:
        device = pick_device(setting)
        if not device.startswith("cuda"):
            text = (
                "the CPU" if torch.cuda.is_available() or setting == "cpu" else "the CPU (no GPU is visible)"
            )
            return [_ok("device", text)]
        index = torch.device(device).index or 0
        free, total = torch.cuda.mem_get_info(index)
        text = f"{device}: {torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        return (
            [_note("device", f"{text}: something else uses it")]
            if free < _SMALLEST_GPU
            else [_ok("device", text)]
        )
    except ConfigError:
        have = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [_wrong("device", f"device = {setting} is not here: {have} GPUs are visible")]
    except RuntimeError as error:
        return [_wrong("device", f"{setting} cannot be used: {type(error).__name__}")]


def check_data(node: NodeConfig, config: Config | None) -> list[Finding]:
    """Read the node's table as a run would: columns, rows kept, rows left out and why."""
    if node.data_path is None:
        return [_wrong("data", "data-path is not set: a SuperNode needs a table of its own")]
    findings = _check_table("data", node, config, node.data_path)
    if node.public_path is not None:
        findings += _check_table("public data", node, config, node.public_path)
    if node.public_examples is not None:
        findings.append(
            _ok("public-examples", f"{node.public_examples} rows are declared, whatever the table holds")
        )
    return findings


def _check_table(what: str, node: NodeConfig, config: Config | None, path: str) -> list[Finding]:
    own = node.own
    try:
        if config is None:
            columns = [
                c for c in (own.text_column or "text", own.label_column or "label", own.pair_column) if c
            ]
            frame = read_table(resolve_path(path), columns)
            labels = Counter(str(v).strip() for v in frame[columns[1]])
            if own.labels is None:
                text = (
                    f"{len(frame)} rows, {len(labels)} label values (no task given: labels are not compared)"
                )
                return [_ok(what, text)]
            known = sum(labels[v] for v in own.labels)
            found = [
                _ok(what, f"{len(frame)} rows, {known} with one of this node's {len(own.labels)} labels")
            ]
            if known < len(frame):
                text = f"{len(frame) - known} of {len(frame)} rows have another label and would be left out"
                found.append(_note(what, text))
            return (
                found
                if known
                else [_wrong(what, f"none of the {len(frame)} rows has one of this node's labels")]
            )
        table = read_node_table(config.task, path, own)
    except PrivetError as error:
        return [_wrong(what, str(error))]
    kept = len(table.examples)
    if kept == 0:
        return [_wrong(what, f"none of the {table.rows} rows is usable: {'; '.join(table.lines())}")]
    counts = Counter(table.examples.labels.tolist())
    split = ", ".join(f"{label} {counts[i]}" for i, label in enumerate(config.task.labels))
    shares = f" ({split})" if split else ""
    return [
        _ok(what, f"{kept} of {table.rows} rows are usable{shares}"),
        *(_note(what, t) for t in table.lines()),
    ]


def check_model(node: NodeConfig, config: Config | None) -> list[Finding]:
    """Look for the base model and its tokenizer, load neither's weights, and say their hash."""
    if config is None:
        return [_note("model", "not looked at: give the run's settings, such as task=... model=...")]
    from privet.adapters import check_model as check

    try:
        check(config)
        weights = base_weights(config, fetch=True)
    except PrivetError as error:
        return [_wrong("model", str(error))]
    return [_ok("model", f"{config.model.path or 'random weights'}, {weights}")]


# --- store ---------------------------------------------------------------------------------------


def check_store(node: NodeConfig) -> list[Finding]:
    """Look at the store's folder, owner, mode, marker and lock, without opening it."""
    root = node.store
    if root is None:
        return [_wrong("store", "store is not set")]
    if not root.exists() and not root.is_symlink():
        parent = next(p for p in root.parents if p.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return [_wrong("store", f"{root} is missing and {parent} is not writable for this account")]
        return [_ok("store", f"{root} is made at the first run")]
    if root.is_symlink() or not root.is_dir():
        return [_wrong("store", f"{root} is a link or no folder: name the folder itself")]
    facts = root.stat()
    if facts.st_uid != os.geteuid():
        return [
            _wrong("store", f"{root} belongs to another account (uid {facts.st_uid}, this is {os.geteuid()})")
        ]
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return [_wrong("store", f"{root} is not readable and writable for this account")]
    findings = []
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o077:
        findings.append(_wrong("store", f"{root} has mode {mode:04o}: others can look in; chmod 700 {root}"))
    free = os.statvfs(root)
    if free.f_bavail * free.f_frsize < 2**30:
        findings.append(_wrong("store", f"less than 1 GiB is free below {root}"))
    if any(root.iterdir()):
        try:
            marker = read_facts(root)
            if marker.node != node.name:
                text = f"{root} belongs to node '{marker.node}', not to '{node.name}'"
                findings.append(_wrong("store", text))
        except StoreError as error:
            findings.append(_wrong("store", str(error)))
    if _is_held(root / "lock"):
        findings.append(
            _note("store", f"{root} is held by a process right now: a run's, or a second SuperNode's")
        )
    return findings or [_ok("store", f"{root}, mode {mode:04o}")]


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def check_ledger(node: NodeConfig) -> list[Finding]:
    """Read the ledger, which verifies every line, and say what is spent."""
    root = node.store
    if root is None or not (root / "node.json").is_file():
        return [_ok("ledger", "none yet: nothing is spent")]
    path = root / "ledger.jsonl"
    try:
        if not path.exists():
            if read_facts(root).ledger:
                return [
                    _wrong("ledger", f"{path} is missing, and with it what this node has spent: restore it")
                ]
            return [_ok("ledger", "none yet: nothing is spent")]
        ledger = Ledger.load(path)
        if ledger.node != node.name:
            return [_wrong("ledger", f"{path} is the ledger of node '{ledger.node}'")]
        facts = describe_ledger(ledger)
    except PrivetError as error:
        return [_wrong("ledger", str(error))]
    except OSError as error:
        return [_wrong("ledger", f"{path} cannot be read: {error.strerror}")]
    spent, runs = facts["lifetime_epsilon"], len(facts["runs"])
    if node.max_epsilon is None:
        return [_note("ledger", f"epsilon {spent:.3f} is spent over {runs} runs, and no max-epsilon is set")]
    text = f"epsilon {spent:.3f} of max-epsilon {node.max_epsilon:g} is spent over {runs} runs"
    return [
        _wrong("ledger", f"{text}: nothing is left") if spent >= node.max_epsilon else _ok("ledger", text)
    ]


# --- worker --------------------------------------------------------------------------------------


def check_worker(node: NodeConfig, raw: Mapping[str, Any]) -> list[Finding]:
    """Look at the worker's socket and ask the worker who it is; under systemd that starts it."""
    path = node.worker
    if path is None:
        return []
    missing = _note if node.worker_optional else _wrong
    try:
        facts, folder = path.lstat(), path.parent.stat()
    except FileNotFoundError:
        return [missing("worker", f"no worker listens at {path}: start privet worker or its socket unit")]
    except OSError as error:
        return [
            _note("worker", f"{path} cannot be looked at: {error.strerror}; ask as the SuperNode's account")
        ]
    if not stat.S_ISSOCK(facts.st_mode):
        return [_wrong("worker", f"{path} is no socket")]
    findings = []
    for what, found, allowed in ((path, facts, 0o600), (path.parent, folder, 0o700)):
        mode = stat.S_IMODE(found.st_mode)
        if mode & ~allowed:
            findings.append(
                _wrong("worker", f"{what} has mode {mode:04o}: others can reach it; {allowed:04o} is safe")
            )
    if facts.st_uid != os.geteuid():
        text = f"{path} is for another account (uid {facts.st_uid}): only that one can ask the worker"
        return [*findings, _note("worker", text)]
    try:
        answer = ask(str(path), code_hash(), raw, _WORKER_WAIT)
    except ConnectionRefusedError:
        return [*findings, missing("worker", f"{path} was left by a worker that is gone: start it again")]
    except (FrameError, OSError) as error:
        return [*findings, _wrong("worker", f"the worker at {path} does not answer: {error}")]
    failed = unpack_failure(answer)
    if failed is not None:
        return [*findings, _wrong("worker", f"{failed.kind}: {failed.reason}")]
    return findings or [_ok("worker", f"{path}, with this code and this node configuration")]


def _hidden(node: NodeConfig) -> bool:
    """Whether rows and store are another account's: the worker's, and this is the SuperNode's."""
    if node.worker is None or node.data_path is None:
        return False
    try:
        return not os.access(resolve_path(node.data_path), os.R_OK)
    except ConfigError:
        return False


def _of_the_worker() -> list[Finding]:
    text = "this account cannot read the table: ask as the worker's account for table, store and ledger"
    return [_note("data", text)]


# --- key, certificate, clock ---------------------------------------------------------------------


def check_key(path: Path) -> list[Finding]:
    """Look at the node's private key: its form, its mode, its curve."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        return [_wrong("key", f"{path} cannot be read: {error.strerror}")]
    except Exception:  # any fault of the file is the same fault
        return [_wrong("key", f"{path} is no private key in OpenSSH's form without a passphrase")]
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return [_wrong("key", f"{path} is no key on a NIST curve: privet deploy init makes such keys")]
    if mode & 0o077:
        return [_wrong("key", f"{path} has mode {mode:04o}: chmod 600 {path}")]
    return [_ok("key", f"{path}, {key.curve.name}")]


def check_superlink(address: str, roots: Path) -> list[Finding]:
    """Connect as a SuperNode does: the CA file, the chain, the name, the dates, and the clocks of both sides.

    The node's registration is not looked at: only the SuperNode itself can sign in with its key.
    """
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        return [_wrong("superlink", f"'{address}' is not allowed: HOST:PORT")]
    host, port = match[1], int(match[2])
    findings = check_authority(roots)
    if any(f.level == "wrong" for f in findings):
        return findings
    context = ssl.create_default_context(cafile=str(roots))
    try:
        with (
            socket.create_connection((host, port), timeout=_NETWORK_WAIT) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
            secure.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            head = secure.recv(4096).decode("latin-1")
            now = datetime.now(UTC)
    except ssl.SSLCertVerificationError as error:
        return [*findings, _wrong("certificate", _why(error, host))]
    except ssl.SSLError:
        return [
            *findings,
            _wrong("superlink", f"{address} answers without TLS, or with none that this side takes"),
        ]
    except (TimeoutError, socket.gaierror, OSError) as error:
        reason = getattr(error, "strerror", None) or "no answer"
        return [*findings, _wrong("superlink", f"{address} cannot be reached: {reason}")]
    findings.append(_lifetime("certificate", certificate, f"of {host}, signed by this CA, "))
    return [*findings, *check_clock(head, now)]


def check_authority(path: Path) -> list[Finding]:
    """Look at the file with the CA's certificate."""
    try:
        authorities = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        return [_wrong("CA", f"{path} cannot be read: {error.strerror}")]
    except ValueError:
        return [_wrong("CA", f"{path} holds no certificate in PEM form")]
    return [_lifetime("CA", c, f"'{_common_name(c)}', ") for c in authorities]


def check_clock(head: str, now: datetime) -> list[Finding]:
    """Compare this machine's clock with the date in the SuperLink's answer, which has a resolution of 1 s."""
    found = re.search(r"(?im)^date:\s*(.+?)\s*$", head)
    try:
        theirs = parsedate_to_datetime(found[1]) if found else None
    except (ValueError, TypeError):
        theirs = None
    if theirs is None:
        return [_note("clock", "the SuperLink names no date, so the clock is not compared")]
    ahead = (now - theirs).total_seconds()
    if -1 <= ahead <= 2:
        return [_ok("clock", "within 2 s of the SuperLink's")]
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    if ahead > AHEAD + 1 or ahead < -BEHIND:
        limit = f"Flower refuses nodes that are more than {AHEAD:g} s ahead or {BEHIND:g} s behind"
        return [_wrong("clock", f"{text}: {limit}")]
    return [_note("clock", text)]


def _lifetime(what: str, certificate: x509.Certificate, who: str) -> Finding:
    now = datetime.now(UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        return _wrong(
            what,
            f"{who}is not valid before {begins:%Y-%m-%d %H:%M} UTC; this clock says {now:%Y-%m-%d %H:%M}",
        )
    days = (ends - now).days
    if now > ends:
        return _wrong(what, f"{who}has ended on {ends:%Y-%m-%d}")
    text = f"{who}valid until {ends:%Y-%m-%d} ({days} days)"
    return _note(what, text) if days < SOON_DAYS else _ok(what, text)


def _why(error: ssl.SSLCertVerificationError, host: str) -> str:
    reason = error.verify_message or error.reason or ""
    if "mismatch" in reason.lower():
        return f"it is not made for '{host}': reach the SuperLink by a name in its certificate, or add a SAN"
    if "expired" in reason:
        return "it has ended, or this machine's clock runs ahead"
    if "not yet valid" in reason:
        now = datetime.now(UTC)
        return f"it is not valid yet: is this machine's clock right? It says {now:%Y-%m-%d %H:%M} UTC"
    return f"it is not signed by the CA of --root-certificates ({reason})"


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "CA"


# --- all of it -----------------------------------------------------------------------------------


def examine(
    raw: Mapping[str, Any],
    *,
    config: Config | None = None,
    bundle: Bundle | None = None,
    superlink: str | None = None,
    roots: Path | None = None,
    key: Path | None = None,
) -> list[Finding]:
    """Run every check that the given facts allow.

    Parameters
    ----------
    raw : mapping
        The node's configuration as Flower reads it.
    config : Config or None
        The settings of a run, for what depends on its task and model.
    bundle : Bundle or None
        The submitting side's code and packages.
    superlink : str or None
        ``HOST:PORT``; needs `roots`, the file with the CA's certificate.
    roots, key : Path or None
        The CA's certificate and this node's private key.
    """
    try:
        node = NodeConfig.read(raw)
    except PrivetError as error:
        findings = [_wrong("node-config", str(error)), *check_code(None, bundle), *check_packages(bundle)]
    else:
        own = None if config is None else node.adapt(config)
        findings = [
            _ok("node-config", f"node '{node.name}'"),
            *check_code(node, bundle),
            *check_packages(bundle),
            *check_device(node, own),
            *(_of_the_worker() if _hidden(node) else check_data(node, own)),
            *check_model(node, own),
            *([] if _hidden(node) else (*check_store(node), *check_ledger(node))),
            *check_worker(node, raw),
        ]
    if key is not None:
        findings += check_key(key)
    if superlink is None or roots is None:
        text = "the certificate and the clock are not looked at: give --superlink and --root-certificates"
        return [*findings, _note("superlink", text)]
    return [*findings, *check_superlink(superlink, roots)]
