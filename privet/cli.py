"""The ``privet`` command: run, check, methods, experiments, ledger, compare, eval, audit; operators' are in operate.py.

This is where the parts meet, so it is the one module of this package that knows the apps; heavy imports wait
until a command needs them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from privet import experiments, operate
from privet.config import compose
from privet.environment import quiet_libraries
from privet.errors import PrivetError


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
        # One line, but for a sweep: there it is one for each wrong combination.
        for line in str(error).splitlines():
            print(f"privet: {line}", file=sys.stderr)
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

    run = commands.add_parser("run", help="train, through Flower", description=_run.__doc__, epilog=_SWEEPS)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="for example method=ffa_lora seed=1")
    run.add_argument(
        "-m", "--multirun", action="store_true", help="sweep: run every combination of the lists"
    )
    run.add_argument("--resume", type=Path, default=None, metavar="RUN", help="go on with a run broken off")
    run.add_argument("--dry-run", action="store_true", help="print the plan (-m: the runs), train nothing")
    run.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    run.add_argument("--runs", type=Path, default=None, help="folder of runs (default: ./runs)")
    run.add_argument(
        "--name", default=None, help="name of the folder (default: time and settings, or swept keys)"
    )
    run.add_argument("--cpus", type=int, default=None, help=argparse.SUPPRESS)
    run.add_argument("--parent", type=int, default=None, help=argparse.SUPPRESS)
    run.set_defaults(handler=_run)

    check = commands.add_parser("check", help="print the plan of a run", description=_check.__doc__)
    check.add_argument("overrides", nargs="*", metavar="key=value")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)
    check.set_defaults(handler=_check)

    methods = commands.add_parser("methods", help="list the methods", description=_methods.__doc__)
    methods.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example model=roberta_base_random privacy=none"
    )
    methods.add_argument("--json", action="store_true", help="print JSON")
    methods.set_defaults(handler=_methods)

    recipes = commands.add_parser("experiments", help="list the recipes", description=_experiments.__doc__)
    recipes.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")
    recipes.add_argument("--json", action="store_true", help="print JSON")
    recipes.set_defaults(handler=_experiments)

    ledger = commands.add_parser("ledger", help="print a node's ledger", description=_ledger.__doc__)
    ledger.add_argument("path", type=Path, help="a run's directory, or one node's store")
    ledger.add_argument("--json", action="store_true", help="print JSON")
    ledger.set_defaults(handler=_ledger)

    compare = commands.add_parser("compare", help="compare runs", description=_compare.__doc__)
    compare.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs")
    compare.add_argument("--out", type=Path, default=Path("comparison"), help="default: ./comparison")
    compare.set_defaults(handler=_compare)

    scores = commands.add_parser("eval", help="score a run's model elsewhere", description=_eval.__doc__)
    scores.add_argument("run", type=Path, metavar="RUN", help="a completed run")
    scores.add_argument("overrides", nargs="*", metavar="task.key=value", help="for example task=sst2")
    scores.add_argument("--runs", type=Path, default=None, help="folder of runs (default: ./runs)")
    scores.add_argument("--json", action="store_true", help="print JSON")
    scores.add_argument(
        "--personal", action="store_true", help="score the nodes' own models, too (simulations)"
    )
    harness = scores.add_argument_group("lm-evaluation-harness", "instead of a task; needs the extra `eval`")
    harness.add_argument("--harness", default=None, metavar="TASKS", help="its tasks: gsm8k,mmlu")
    harness.add_argument(
        "--harness-tasks", type=Path, default=None, metavar="FOLDER", help="task definitions of yours"
    )
    harness.add_argument("--shots", type=int, default=None, help="worked examples (default: the task's)")
    harness.add_argument("--limit", type=int, default=None, help="first questions of every task only")
    harness.add_argument("--batch", type=int, default=8, help="questions computed at once (default: 8)")
    harness.add_argument("--chat", action="store_true", help="ask by the tokenizer's chat template")
    harness.add_argument(
        "--run-code", action="store_true", help="run programs that the model writes (HumanEval)"
    )
    scores.set_defaults(handler=_eval)

    audit = commands.add_parser("audit", help="measure what a model gives away", description=_audit.__doc__)
    audit.add_argument("run", type=Path, metavar="RUN", help="a completed simulation")
    audit.add_argument(
        "--rows", type=int, default=1000, help="training and test rows to compare (1000 of each)"
    )
    audit.add_argument("--guesses", type=int, default=None, help="canaries to guess (default: half of them)")
    audit.add_argument("--runs", type=Path, default=None, help="folder of runs (default: ./runs)")
    audit.add_argument("--json", action="store_true", help="print JSON")
    audit.set_defaults(handler=_audit)
    operate.add_commands(commands)
    return parser


# --- run -----------------------------------------------------------------------------------------


_SWEEPS = (
    "A sweep, -m, takes lists in Hydra's syntax (seed=1,2,3 or seed=range(1,4)) and runs every combination in a "
    "folder of its own; sweep.parallel=2 runs two side by side. The same command again skips finished runs, goes on "
    "with those broken off and starts the missing ones. privacy=dp,none privacy.epsilon=3,6 is three runs: without "
    "privacy, the other privacy settings have no effect and are left out."
)


def _run(arguments: argparse.Namespace) -> int:
    """Train through Flower's own `flwr run`, on a SuperLink of its own, and wait for the end."""
    if arguments.json and not arguments.dry_run:
        raise PrivetError("--json goes with --dry-run: a run shows its progress, its results are JSON files")
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.multirun:
        return _sweep(arguments)
    for override in arguments.overrides:
        if override.startswith("sweep."):
            raise PrivetError(f"'{override}' is a setting of a sweep: it goes with -m")
    if arguments.dry_run:
        return _plan(arguments)
    from privet import runner

    given = experiments.single(arguments.overrides)
    # Everything that can be refused is refused here, before Flower starts.
    overrides, config = runner.absolute(given, compose(given))
    (plan,) = runner.check([overrides]).plans
    if plan.error is not None:
        raise PrivetError(plan.error)
    _print_notes(plan.warnings)
    return runner.start(runner.new_run_dir(arguments.runs, arguments.name, config), overrides)


def _resume(arguments: argparse.Namespace) -> int:
    from privet import runner

    if arguments.overrides:
        raise PrivetError(
            f"'{arguments.overrides[0]}' does not go with --resume: a run keeps its configuration"
        )
    for option in ("multirun", "dry_run", "name"):
        if getattr(arguments, option):
            raise PrivetError(f"--{option.replace('_', '-')} does not go with --resume")
    run_dir = runner.find_run(arguments.resume, arguments.runs)
    return runner.resume(run_dir, cpus=arguments.cpus, parent=arguments.parent)


def _sweep(arguments: argparse.Namespace) -> int:
    from privet import slots, sweep

    found = sweep.prepare(arguments.overrides, arguments.runs, arguments.name)
    if arguments.dry_run:
        runs = found.to_list()
        print(json.dumps(runs, indent=2) if arguments.json else "\n".join(_table(sweep.state_rows(found))))
        return 0
    _print_notes(found.notes)
    code = slots.run(found)
    from privet.compare import text_table

    begun = [path for path in found.paths if (path / "config.yaml").exists()]
    table = text_table(begun) if begun else "no run has begun"
    print(f"\n{table}\nsweep directory: {found.folder}")
    return code


def _print_notes(texts: Sequence[str]) -> None:
    for text in texts:
        print(f"note: {text}", file=sys.stderr)


# --- check ---------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    """Print what a run would do - privacy, messages, memory - and train nothing."""
    return _check_batch() if arguments.batch else _plan(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    config = compose(experiments.single(arguments.overrides))
    quiet_libraries()
    from server_app.plan import make_plan

    plan = make_plan(config).to_dict()
    print(json.dumps(plan, indent=2) if arguments.json else _plan_text(plan))
    return 0


def _check_batch() -> int:
    """Plan every list of overrides on standard input; see :func:`privet.runner.check`."""
    quiet_libraries()
    import torch

    from server_app.plan import make_plan

    plans: list[dict[str, Any]] = []
    for overrides in json.load(sys.stdin):
        try:
            plans.append({"error": None, "warnings": make_plan(compose(overrides)).warnings})
        except PrivetError as error:
            plans.append({"error": str(error), "warnings": []})
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            plans.append({"error": f"{type(error).__name__}: {text}", "warnings": []})
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(json.dumps({"plans": plans, "gpus": gpus}))
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


def _methods(arguments: argparse.Namespace) -> int:
    """List the methods: messages and adapter numbers a round, what stays on a node, the paper."""
    quiet_libraries()
    from server_app.catalogue import catalogue

    found = catalogue(arguments.overrides)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in found], indent=2))
        return 0
    rows = [["method", "messages a round", "up", "down", "trained", "stays on a node", "paper"]]
    for e in found:
        numbers = [f"{n:,}" for n in (e.upload, e.download, e.trained)]
        facts = [", ".join(e.messages), *numbers, e.stays, e.paper]
        rows.append([e.name, *(["-"] * 4 + [e.refused, ""] if e.refused else facts)])
    print("\n".join(_table(rows, left=(0, 1, 5, 6))))
    return 0


def _experiments(arguments: argparse.Namespace) -> int:
    """List the recipes for the papers' tables and figures: privet run -m experiment=NAME."""
    if arguments.name is not None:
        print(experiments.source(arguments.name).read_text(encoding="utf-8"), end="")
        return 0
    found = [experiments.load(name) for name in experiments.names()]
    if arguments.json:
        keys = ("name", "title", "needs", "command")
        print(json.dumps([{key: getattr(recipe, key) for key in keys} for recipe in found], indent=2))
        return 0
    for recipe in found:
        print(f"{recipe.name}\n    {recipe.title}\n    Needs {recipe.needs}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    """Compare runs: a table here; table.csv, plots and report.html in a folder."""
    from privet.compare.report import report

    return report(arguments.paths, arguments.out)


def _eval(arguments: argparse.Namespace) -> int:
    """Score a finished run's model on another task's public test rows, or by lm-evaluation-harness.

    Without a task, on the run's own rows again.
    """
    if arguments.harness is not None:
        return _harness(arguments)
    for option in ("harness_tasks", "shots", "limit", "chat", "run_code"):
        given = getattr(arguments, option)
        if given is not None and given is not False:
            raise PrivetError(f"--{option.replace('_', '-')} goes with --harness")
    from privet.runner import find_run
    from server_app.rescore import rescore

    run_dir, own_models = find_run(arguments.run, arguments.runs), None
    if arguments.personal:
        from client_app.personal import personal_models

        own_models = personal_models
    found = rescore(run_dir, arguments.overrides, own_models)
    if arguments.json:
        own = {"personal": found.spread, "nodes": found.personal} if found.personal else {}
        print(json.dumps({"task": found.task, **found.scores, **own}, indent=2))
        return 0
    for name, value in found.scores.items():
        print(f"{name:12} {value:.4f}" if isinstance(value, float) else f"{name:12} {value}")
    if found.personal:
        print(f"\nnodes' own models, mean and standard deviation over {len(found.personal)}")
        for name in (n for n in found.spread if f"{n}_std" in found.spread):
            print(f"{name:12} {found.spread[name]:.4f} +- {found.spread[f'{name}_std']:.4f}")
    print(f"\nFile: {found.file}")
    return 0


def _harness(arguments: argparse.Namespace) -> int:
    from privet.runner import find_run
    from server_app.harness import Settings, benchmark

    if arguments.overrides:
        raise PrivetError(
            f"'{arguments.overrides[0]}' does not go with --harness: its tasks have data of their own"
        )
    if arguments.personal:
        raise PrivetError("--personal does not go with --harness: it asks the server's model")
    settings = Settings(
        tasks=tuple(arguments.harness.split(",")),
        folder=arguments.harness_tasks,
        shots=arguments.shots,
        limit=arguments.limit,
        batch=arguments.batch,
        chat=arguments.chat,
        run_code=arguments.run_code,
    )
    quiet_libraries()
    found = list(benchmark(find_run(arguments.run, arguments.runs), settings))
    if arguments.json:
        print(json.dumps({f.task: f.scores for f in found}, indent=2))
        return 0
    rows = [("task", "measure", "score")]
    for result in found:
        for part, scores in result.scores.items():
            rows += [(part, name, f"{value:.4f}") for name, value in scores.items()]
    print("\n".join(_table(rows, left=(0, 1))))
    if settings.limit is not None:
        print(f"note: the first {settings.limit} questions only: no benchmark's score")
    print("\nFiles: " + ", ".join(str(f.file) for f in found))
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    """Attack a finished run's model: membership inference, and with task.canaries a lower bound on epsilon.

    Ends with 1 where the run's epsilon is refuted.
    """
    from privet.compare.plots import MISSING, can_draw
    from privet.runner import find_run
    from server_app.audit import FOLDER, audit

    if arguments.rows < 1:
        raise PrivetError(f"--rows {arguments.rows} is not allowed: at least 1")
    run_dir = find_run(arguments.run, arguments.runs)
    found = audit(run_dir, rows=arguments.rows, guesses=arguments.guesses)
    if can_draw():
        from privet.atomic import write_atomic
        from privet.audit.plots import draw

        for name, data in draw(found.scores).items():
            write_atomic(run_dir / FOLDER / name, data)
    else:
        print(f"privet: {MISSING}", file=sys.stderr)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else "\n".join(found.lines()))
    if not arguments.json:
        print(f"\nFiles: {run_dir / FOLDER}")
    return int(found.refuted)


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


def _table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lay out rows in columns, those named to the `left`, the others to the right."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in rows
    ]


if __name__ == "__main__":
    entry()
