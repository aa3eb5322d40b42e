"""What an operator types: ``privet deploy init``, ``doctor``, ``worker``, ``purge``, ``status`` and ``stop``.

``status`` and ``stop`` ask the SuperLink that the user's Flower configuration names, by Flower's own commands.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from privet.environment import FLOWER, quiet_libraries
from privet.errors import ConfigError, PrivetError

_COMMAND_LIMIT = 60.0


def add_commands(commands: Any) -> None:
    """Add the operator's commands to the parser's."""
    deploy = commands.add_parser("deploy", help="set up real nodes", description=_deploy_init.__doc__)
    verbs = deploy.add_subparsers(required=True, metavar="VERB")
    init = verbs.add_parser(
        "init", help="write keys, certificates and units", description=_deploy_init.__doc__
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    init.add_argument("--server-name", required=True, help="host name or address of the SuperLink")
    init.add_argument(
        "--san", action="append", default=[], metavar="NAME", help="a further one; may be repeated"
    )
    init.add_argument("--nodes", required=True, metavar="A,B", help="names of the nodes")
    init.add_argument(
        "--gpus", type=int, default=None, help="one SuperNode for each of so many GPUs a machine"
    )
    init.add_argument("--port", type=int, default=8000, help="of the SuperLink (default: 8000)")
    init.add_argument("--days", type=int, default=365, help="validity of the certificate (default: 365)")
    init.add_argument(
        "--etc", type=Path, default=None, help="settings on the machines (default: /etc/privet)"
    )
    init.add_argument(
        "--state", type=Path, default=None, help="state on the machines (default: /var/lib/privet)"
    )
    init.add_argument("--bin", type=Path, default=None, help="commands on the machines (default: as here)")
    init.add_argument("--user", default="privet", help="account of the services (default: privet)")
    init.add_argument(
        "--worker",
        nargs="?",
        const="privet-worker",
        default=None,
        metavar="USER",
        help="a privet worker for every SuperNode, under this account (default: privet-worker)",
    )
    init.set_defaults(handler=_deploy_init)

    doctor = commands.add_parser(
        "doctor", help="say what keeps a node from working", description=_doctor.__doc__
    )
    doctor.add_argument(
        "overrides", nargs="*", metavar="key=value", help="a run's settings, such as task=csv ..."
    )
    doctor.add_argument(
        "--node-config", required=True, metavar="KEYS", help="as for flower-supernode, or a .toml file"
    )
    doctor.add_argument(
        "--bundle-hash", default=None, metavar="HASH", help="code hash of the submitting side"
    )
    doctor.add_argument(
        "--bundle", type=Path, default=None, metavar="FILE", help="bundle.json of privet deploy init"
    )
    doctor.add_argument(
        "--superlink", default=None, metavar="HOST:PORT", help="look at its certificate and clock"
    )
    doctor.add_argument(
        "--root-certificates", type=Path, default=None, metavar="FILE", help="the CA's certificate"
    )
    doctor.add_argument("--private-key", type=Path, default=None, metavar="FILE", help="this node's key")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(handler=_doctor)

    worker = commands.add_parser(
        "worker", help="keep model and rows between messages", description=_worker.__doc__
    )
    worker.add_argument(
        "--node-config", required=True, metavar="KEYS", help="as for flower-supernode, or a .toml file"
    )
    worker.add_argument(
        "--idle",
        default="30m",
        metavar="TIME",
        help="end after so long without a message; 0: never (default: 30m)",
    )
    worker.add_argument(
        "--grace", default="25s", metavar="TIME", help="for the message under way on SIGTERM (default: 25s)"
    )
    worker.add_argument(
        "--peer", default=None, metavar="USER", help="the SuperNode's account (default: this one)"
    )
    worker.set_defaults(handler=_worker)

    purge = commands.add_parser("purge", help="remove what ended runs left", description=_purge.__doc__)
    purge.add_argument("store", nargs="?", type=Path, default=None, metavar="STORE", help="a node's store")
    purge.add_argument("--node-config", default=None, metavar="KEYS", help="the store of this node")
    purge.add_argument("--run", default=None, help="this run only")
    purge.add_argument(
        "--older-than", type=float, default=None, metavar="DAYS", help="untouched for so long only"
    )
    purge.add_argument("--force", action="store_true", help="also runs that may still be going on")
    purge.add_argument("--dry-run", action="store_true", help="say what would go")
    purge.set_defaults(handler=_purge)

    status = commands.add_parser(
        "status", help="say how deployed runs are doing", description=_status.__doc__
    )
    status.add_argument(
        "run", nargs="?", default=None, metavar="RUN", help="Flower's id of a run, or a run's directory"
    )
    status.add_argument(
        "--superlink", default=None, metavar="NAME", help="connection (default: Flower's default one)"
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(handler=_status)

    stop = commands.add_parser("stop", help="stop a deployed run", description=_stop.__doc__)
    stop.add_argument("run", metavar="RUN", help="Flower's id of the run")
    stop.add_argument(
        "--superlink", default=None, metavar="NAME", help="connection (default: Flower's default one)"
    )
    stop.set_defaults(handler=_stop)


# --- deploy, doctor, purge -----------------------------------------------------------------------


def _deploy_init(arguments: argparse.Namespace) -> int:
    """Write a CA, a server certificate, node keys, systemd units and their settings; print what to do next."""
    from privet import deploy

    places = {n: getattr(arguments, n) for n in ("etc", "state", "bin") if getattr(arguments, n) is not None}
    deployment = deploy.Deployment(
        server_name=arguments.server_name,
        sans=tuple(arguments.san),
        nodes=tuple(name for name in arguments.nodes.replace(",", " ").split()),
        port=arguments.port,
        gpus=arguments.gpus,
        days=arguments.days,
        user=arguments.user,
        worker=arguments.worker,
        **places,
    )
    print(deploy.init(arguments.folder, deployment), end="")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    """Check this node - code, packages, device, data, model, store, ledger, key, certificate, clock - and change
    nothing. A line each; exit code 1 where anything is wrong."""
    from client_app.doctor import Bundle, examine
    from client_app.node_config import parse_node_config
    from privet.config import compose

    if (arguments.superlink is None) != (arguments.root_certificates is None):
        raise ConfigError("--superlink and --root-certificates go together")
    if arguments.bundle is not None and arguments.bundle_hash is not None:
        raise ConfigError("--bundle and --bundle-hash do not go together")
    quiet_libraries()
    bundle = None
    if arguments.bundle is not None:
        bundle = Bundle.read(arguments.bundle)
    elif arguments.bundle_hash is not None:
        bundle = Bundle(arguments.bundle_hash.lower(), {})
    findings = examine(
        parse_node_config(arguments.node_config),
        config=compose(arguments.overrides) if arguments.overrides else None,
        bundle=bundle,
        superlink=arguments.superlink,
        roots=arguments.root_certificates,
        key=arguments.private_key,
    )
    if arguments.json:
        print(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    else:
        print("\n".join(str(f) for f in findings))
    return int(any(f.level == "wrong" for f in findings))


def _worker(arguments: argparse.Namespace) -> int:
    """Answer a node's messages in one process that keeps base model, rows, store and ledger between them.

    The ClientApp hands messages over at the socket that `worker` in the node configuration names. Code other than this
    installation's is refused, and so are other accounts.
    """
    import logging
    import pwd

    from client_app.node_config import parse_node_config
    from client_app.worker import seconds, work

    peers = None
    if arguments.peer is not None:
        try:
            peers = frozenset({pwd.getpwnam(arguments.peer).pw_uid})
        except KeyError:
            raise ConfigError(f"--peer {arguments.peer}: there is no such account") from None
    idle, grace = seconds(arguments.idle), seconds(arguments.grace)
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    return work(parse_node_config(arguments.node_config), idle=idle, grace=grace or 0.0, peers=peers)


def _purge(arguments: argparse.Namespace) -> int:
    """Remove kept arrays, secrets, stored replies, tokenised rows and log lines of ended runs from a node's store.

    Never the ledger; and no run that had a message within a day, without --force. A purged run cannot go on.
    Files are unlinked, not overwritten.
    """
    from client_app.retention import purge
    from client_app.store import NodeStore, read_facts

    if (arguments.store is None) == (arguments.node_config is None):
        raise ConfigError("name the store: STORE or --node-config")
    if arguments.older_than is not None and not 0 <= arguments.older_than < 1e6:
        raise ConfigError(f"--older-than {arguments.older_than:g} is not allowed: days, 0 or more")
    root = _store_of(arguments)
    facts = read_facts(root)
    with NodeStore(root, facts.node, timeout=5.0) as store:
        found = purge(
            store,
            run=arguments.run,
            older_than=arguments.older_than,
            force=arguments.force,
            dry_run=arguments.dry_run,
        )
    verb = "would remove" if arguments.dry_run else "removed"
    for run, size in found.runs.items():
        print(f"{verb} run {run}: {size:,} bytes")
    for run in found.recent:
        print(f"left run {run}: it may still be going on (--force removes it all the same)")
    for what, size in (
        ("tokenised rows", found.tokens),
        ("leftovers of interrupted phases", found.leftovers),
    ):
        if size:
            print(f"{verb} {what}: {size:,} bytes")
    if not (found.runs or found.recent or found.tokens or found.leftovers):
        print(f"{root}: nothing to remove")
    return 0


def _store_of(arguments: argparse.Namespace) -> Path:
    from client_app.node_config import NodeConfig, parse_node_config

    if arguments.store is not None:
        return Path(arguments.store).expanduser()
    root = NodeConfig.read(parse_node_config(arguments.node_config)).store
    if root is None:
        raise ConfigError("the node configuration names no store: give its folder")
    return root


# --- status, stop --------------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    """Print how runs are doing: by Flower's id from the SuperLink, by directory from what the run has written."""
    if arguments.run is not None and not arguments.run.isdigit():
        return _status_of_folder(Path(arguments.run).expanduser(), as_json=arguments.json)
    connection = _connection(arguments.superlink)
    chosen = ["--run-id", arguments.run] if arguments.run is not None else []
    runs = flwr("list", connection, *chosen).get("runs", [])
    if arguments.json:
        print(json.dumps(runs, indent=2))
        return 0
    if not runs:
        print("no runs")
    for run in runs:
        details = str(run.get("status-details") or "").replace("N/A", "").strip()
        line = f"{run.get('run-id')}  {run.get('status')}  {run.get('elapsed')}  {run.get('fab-id')}"
        print(line + (f"  {' '.join(details.split())}" if details else ""))
    return 0


def _status_of_folder(folder: Path, *, as_json: bool) -> int:
    """Say how far a run's directory is; results lie where the ServerApp runs."""
    from privet import runner

    if not (folder / "config.yaml").is_file() and not (folder / runner.LAUNCH_FILE).is_file():
        raise PrivetError(f"{folder} is neither Flower's id of a run nor a run's directory on this machine")
    last: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        last = json.loads((folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    facts: dict[str, Any] = {
        "state": runner.state_of(folder),
        "round": last.get("round"),
        "void": last.get("void"),
        "eval": last.get("eval"),
        "epsilon": last.get("epsilon_max"),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    told = [f"{folder.name}: {facts['state']}"]
    if last:
        told.append(f"round {facts['round']}{' (void)' if facts['void'] else ''}")
        told += [f"{k} {v:.4g}" for k, v in (facts["eval"] or {}).items() if isinstance(v, (int, float))]
        if facts["epsilon"] is not None:
            told.append(f"epsilon {facts['epsilon']:.3f}")
    print(", ".join(told))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    """Stop a deployed run. What its nodes have spent stays spent; `privet status` says how far it came."""
    if not arguments.run.isdigit():
        raise ConfigError(f"{arguments.run} is not Flower's id of a run: privet status lists them")
    flwr("stop", arguments.run, _connection(arguments.superlink))
    print(f"run {arguments.run} is stopped")
    return 0


def _connection(name: str | None) -> str:
    """Return a connection of the user's Flower configuration that leads to a real SuperLink.

    Flower answers a question about the built-in local connection by starting a SuperLink of its own.
    """
    home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser()
    path = home / "config.toml"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: it names the SuperLink (privet deploy init writes one)"
        ) from None
    except (OSError, ValueError):
        raise ConfigError(f"{path} cannot be read") from None
    chosen = name or known.get("default")
    entry = known.get(chosen) if isinstance(chosen, str) else None
    real = [
        n for n, v in known.items() if isinstance(v, dict) and not str(v.get("address", ":")).startswith(":")
    ]
    if not isinstance(entry, dict) or chosen not in real:
        raise ConfigError(
            f"{path}: '{chosen}' is no connection to a deployed SuperLink (there: {', '.join(real) or 'none'})"
        )
    return str(chosen)


def flwr(*arguments: str) -> dict[str, Any]:
    """Run one of Flower's own commands and return its JSON answer; raises PrivetError with its reason."""
    from privet.launcher import command_path, json_object, reply_error

    env = {**os.environ, **FLOWER}
    try:
        done = subprocess.run(
            [command_path("flwr"), *arguments, "--format", "json"],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PrivetError(f"'flwr {arguments[0]}' did not answer within {_COMMAND_LIMIT:.0f} s") from None
    answer = json_object(done.stdout)
    if done.returncode or answer is None or not answer.get("success"):
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = reply_error(answer) if answer else " ".join(" ".join(lines[-3:]).split())[:300]
        raise PrivetError(f"'flwr {arguments[0]}' failed: {reason or 'no reason given'}")
    return answer
