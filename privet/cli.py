"""The ``privet`` command: run, check, methods, ledger.

This is where the parts meet, so it is the one module of this package that knows the apps; heavy imports wait
until a command needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privet.config import CONF_DIR, Config, compose, quoted
from privet.errors import PrivetError

APP_DIR = CONF_DIR.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (0 done, 1 failed, 2 wrong input, 130 interrupted)."""
    parser = _parser()
    arguments, extra = parser.parse_known_args(argv)
    # argparse ends a list of settings at the first option; settings after it are settings all the same.
    if any(e.startswith("-") for e in extra) or (extra and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    if extra:
        arguments.overrides = [*arguments.overrides, *extra]
    try:
        return int(arguments.handler(arguments))
    except PrivetError as error:
        print(f"privet: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("PRIVET_TRACEBACK"):
            raise
        text = " ".join(str(error).split())[:300]
        print(f"privet: {type(error).__name__}: {text} (PRIVET_TRACEBACK=1 shows where)", file=sys.stderr)
        return 1


def entry() -> None:
    """Console script."""
    sys.exit(main())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="privet", description="Private federated LoRA fine-tuning on Flower."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train, through Flower", description=_run.__doc__)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="for example method=ffa_lora seed=1")
    run.add_argument("--dry-run", action="store_true", help="print the plan and train nothing")
    run.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    run.add_argument("--runs", type=Path, default=None, help="folder of runs (default: ./runs)")
    run.add_argument("--name", default=None, help="name of this run's folder (default: time and settings)")
    run.set_defaults(handler=_run)

    check = commands.add_parser("check", help="print the plan of a run", description=_check.__doc__)
    check.add_argument("overrides", nargs="*", metavar="key=value")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(handler=_check)

    methods = commands.add_parser("methods", help="list the methods", description=_methods.__doc__)
    methods.set_defaults(handler=_methods)

    ledger = commands.add_parser("ledger", help="print a node's ledger", description=_ledger.__doc__)
    ledger.add_argument("path", type=Path, help="a run's directory, or one node's store")
    ledger.add_argument("--json", action="store_true", help="print JSON")
    ledger.set_defaults(handler=_ledger)

    compare = commands.add_parser("compare", help="compare runs", description=_compare.__doc__)
    compare.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs")
    compare.add_argument("--out", type=Path, default=Path("comparison"), help="default: ./comparison")
    compare.set_defaults(handler=_compare)
    return parser


# --- run -----------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    """Train through Flower's own `flwr run`, on a SuperLink of its own, and wait for the end."""
    if arguments.dry_run:
        return _check(arguments)
    if arguments.json:
        raise PrivetError("--json goes with --dry-run: a run shows its progress, its results are JSON files")
    config = compose(arguments.overrides)
    # Everything that can be refused is refused here, before Flower starts. The plan is made in a process of its
    # own, so that this one, which only waits, does not hold PyTorch in memory.
    command = [sys.executable, "-m", "privet.cli", "check", "--json", *arguments.overrides]
    checked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if checked.returncode:
        return checked.returncode
    for text in json.loads(checked.stdout)["warnings"]:
        print(f"note: {text}", file=sys.stderr)

    from privet.launcher import launch
    from privet.progress import EVENTS_FILE, Progress

    run_dir = _new_run_dir(arguments.runs, arguments.name, config)
    federation = {
        "num-supernodes": config.federation.clients,
        "client-resources-num-cpus": config.federation.cpus_per_client,
        "client-resources-num-gpus": config.federation.gpus_per_client,
    }
    run_config: dict[str, str | int] = {
        "run-dir": str(run_dir),
        "overrides": shlex.join([*arguments.overrides, *_absolute_paths(config)]),
    }
    with Progress(run_dir / EVENTS_FILE) as progress:
        outcome = launch(
            run_config=run_config,
            run_dir=run_dir,
            federation=federation,
            app_dir=APP_DIR,
            on_tick=progress.tick,
            on_stopping=progress.stopping,
        )
    if outcome.status != "completed":
        print(f"privet: the run {outcome.status}: {outcome.detail}", file=sys.stderr)
        print(f"run directory: {run_dir}", file=sys.stderr)
        return int(outcome.exit_code)
    return 0


def _new_run_dir(runs: Path | None, name: str | None, config: Config) -> Path:
    """Make a fresh folder; a run never writes into another run's."""
    base = (runs or Path("runs")).expanduser().resolve()
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise PrivetError(f"--name {name} is not allowed: letters, digits, '.', '_' and '-'")
    budget = f"eps{config.privacy.epsilon:g}" if config.privacy.epsilon is not None else "nonprivate"
    stem = name or time.strftime(
        f"%Y%m%d-%H%M%S-{config.method.name}-{config.task.name}-{budget}-s{config.seed}"
    )
    for attempt in range(100):
        path = base / (stem if not attempt else f"{stem}-{attempt + 1}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if name:
                raise PrivetError(f"{path} exists already: name another run, or remove it") from None
        except OSError as error:
            raise PrivetError(f"{path} cannot be made: {error.strerror}") from None
        else:
            return path
    raise PrivetError(f"{base / stem} exists 100 times: name this run with --name")


def _absolute_paths(config: Config) -> list[str]:
    """Return overrides that make local paths absolute: a run's processes do not start in the user's folder.

    Data paths are always local; a model's path is, where such a folder exists, and else a hub name.
    """
    data = {"task.path": config.task.path, "task.test_path": config.task.test_path}
    model = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    local = {k: v for k, v in data.items() if v is not None}
    local |= {k: v for k, v in model.items() if v is not None and Path(v).expanduser().exists()}
    return [
        quoted(key, str(Path(value).expanduser().resolve()))
        for key, value in local.items()
        if not value.startswith("package:")
    ]


# --- check ---------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    """Print what a run would do - privacy, messages, memory - and train nothing."""
    config = compose(arguments.overrides)
    _quiet_libraries()
    from server_app.plan import make_plan

    plan = make_plan(config).to_dict()
    print(json.dumps(plan, indent=2) if arguments.json else _plan_text(plan))
    return 0


def _plan_text(plan: dict[str, Any]) -> str:
    budget = (
        f"epsilon {plan['epsilon']:g}, delta {plan['delta']:g}, clip {plan['clip']:g}, {plan['accountant']}"
        if plan["private"]
        else "NOT PRIVATE"
    )
    warm = f" after {plan['warmup_rounds']} warm-up rounds" if plan["warmup_rounds"] else ""
    rows = [("client", "rows n", "rate q", "steps", "sigma", "epsilon")]
    for c in plan["clients"]:
        spent = "-" if c["epsilon"] is None else f"{c['epsilon']:.3f}"
        sigma = f"{c['sigma']:.3f}" if plan["private"] else "-"
        rows.append((c["node"], str(c["n"]), f"{c['q']:.4f}", str(c["steps"]), sigma, spent))
    each = plan["per_round"]
    lines = [
        f"{plan['method']} on {plan['task']} with {plan['model']}, seed {plan['seed']}: {budget}",
        f"{len(plan['clients'])} clients, {plan['rounds']} rounds{warm}",
        "",
        *_table(rows),
        "",
        f"upload a round    {each['upload_numbers']:>12,} numbers  {_size(each['upload_bytes'])}",
        f"download a round  {each['download_numbers']:>12,} numbers  {_size(each['download_bytes'])}",
        f"head, each way    {each['head_numbers']:>12,} numbers  {_size(each['head_bytes'])}",
    ]
    if plan["warmup_rounds"]:
        warm_up = plan["warmup_per_round"]
        lines.append(f"warm-up, each way {warm_up['upload_numbers']:>12,} numbers a warm-up round")
    if plan["one_off"]["download_numbers"]:
        once = plan["one_off"]
        lines.append(
            f"one-off download  {once['download_numbers']:>12,} numbers  {_size(once['download_bytes'])}"
        )
    lines += [
        f"trained           {plan['trained']:>12,} numbers of a base of {plan['base_parameters']:,}",
        f"memory            {_size(plan['memory_bytes'])} a worker process, estimated",
        *(f"note: {text}" for text in plan["warnings"]),
    ]
    return "\n".join(lines)


def _size(amount: float) -> str:
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} GB"


# --- the rest ------------------------------------------------------------------------------------


def _methods(_: argparse.Namespace) -> int:
    """List the methods, one line each."""
    from privet.config import options

    for name in options("method"):
        first = (CONF_DIR / "method" / f"{name}.yaml").read_text().splitlines()[0]
        print(f"{name:12} {first.removeprefix('# ')}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    """Compare runs: a table here; table.csv, plots and report.html in a folder."""
    from privet.compare.report import report

    return report(arguments.paths, arguments.out)


def _ledger(arguments: argparse.Namespace) -> int:
    """Print what nodes have spent: budget, spent, what still fits."""
    from privet.privacy.ledger import Ledger, describe

    found = [describe(Ledger.load(path)) for path in _ledger_files(arguments.path)]
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n\n".join(_ledger_text(ledger) for ledger in found))
    return 0


def _ledger_files(path: Path) -> list[Path]:
    """Return the ledgers of a run's directory, of one node's store, or the file itself."""
    if path.is_file():
        return [path]
    found = [p for p in (path / "ledger.jsonl", *sorted(path.glob("nodes/*/ledger.jsonl"))) if p.is_file()]
    if not found:
        raise PrivetError(f"{path} holds no ledger: a run's directory, a node's store or a ledger.jsonl")
    return found


def _ledger_text(ledger: dict[str, Any]) -> str:
    cap = ledger["max_epsilon"]
    life = (
        f"lifetime epsilon {ledger['lifetime_epsilon']:.3f} of {cap:g}, {ledger['lifetime_left']:.3f} left"
        if cap is not None
        else f"lifetime epsilon {ledger['lifetime_epsilon']:.3f} (no max-epsilon set)"
    )
    rows = [("run", "rounds", "steps", "q", "sigma", "clip", "epsilon", "budget", "steps that still fit")]
    for r in ledger["runs"]:
        rows.append(
            (
                r["run"],
                str(r["rounds"]),
                str(r["steps"]),
                f"{r['q']:.4f}",
                f"{r['sigma']:.3f}",
                f"{r['clip']:g}",
                f"{r['epsilon']:.3f}",
                f"{r['budget']:g}",
                str(r["fits"]),
            )
        )
    return "\n".join([f"{ledger['node']}: {life}, delta {ledger['delta']:g}", *_table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows in columns, the first one to the left."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in rows
    ]


def _quiet_libraries() -> None:
    """Keep library chatter out of a command's output."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


if __name__ == "__main__":
    entry()
