"""One run on the server, from the run configuration to the results."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid

from privet.adapters import adapter_spec, initial_values
from privet.config import Config, compose, split_overrides
from privet.errors import ConfigError, Refusal
from privet.plan import warnings
from privet.privacy.spending import Spending
from privet.runner import SERVER_LOCK, is_completed, locked
from privet.wire import (
    Description,
    Failed,
    Request,
    code_hash,
    error_of,
    pack_request,
    unpack_description,
)
from server_app.agreement import check_base_weights
from server_app.evaluation import Evaluator
from server_app.plan import plan_event, plan_rounds
from server_app.results import RunDirectory
from server_app.saved import SavedRun, last_checkpoint, load_config
from strategies.base import load_method
from strategies.checkpoint import Checkpoint
from strategies.rounds import Run, from_record, to_record

CONNECT_WAIT = 60.0
"""Seconds that a run waits for its nodes to connect."""

DESCRIBE_WAIT = 300.0
"""Seconds that nodes have to say who they are; they load their rows for it."""

GROUP_KEYS = ("method", "task", "model", "privacy")


def config_from(run_config: Mapping[str, object]) -> Config:
    """Compose the configuration from Flower's run configuration.

    Raises
    ------
    ConfigError
        For a wrong type, or as :func:`privet.config.compose` does.
    """
    overrides: list[str] = []
    for key in (*GROUP_KEYS, "overrides"):
        value = run_config.get(key, "")
        if not isinstance(value, str):
            raise ConfigError(f"{key} = {value!r} is not allowed: a text, in quotes for Flower")
        if key == "overrides":
            overrides += split_overrides(value)
        elif value:
            overrides.append(f"{key}={value}")
    seed = run_config.get("seed", -1)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed = {seed!r} is not allowed: a whole number")
    if seed != -1:
        overrides.append(f"seed={seed}")
    return compose(overrides)


def run_directory(context: Context) -> Path:
    """Return the run's directory: ``run-dir``, else one below ``PRIVET_RUNS`` or ``~/.privet/runs``."""
    given = context.run_config.get("run-dir", "")
    if given:
        return Path(str(given)).expanduser().resolve()
    base = Path(os.environ.get("PRIVET_RUNS", "~/.privet/runs")).expanduser()
    return (base / time.strftime(f"%Y%m%d-%H%M%S-{context.run_id}")).resolve()


@dataclass(frozen=True)
class Resumed:
    """A stopped run's configuration and last checkpoint (None before its first round's end)."""

    config: Config
    checkpoint: Checkpoint | None


@contextmanager
def open_run(context: Context) -> Iterator[tuple[RunDirectory, Resumed | None]]:
    """Hold the run's directory; gives it, and what was saved where the run is resumed.

    Raises
    ------
    PrivetError
        If a new run would write into another's directory, there is nothing to resume, or another server still
        drives the run: it may have outlived the command that started it.
    """
    resumes = _resumes(context.run_config)
    path = run_directory(context)
    if not resumes:
        path.mkdir(parents=True, exist_ok=True)
    elif not (path / "config.yaml").exists():
        raise Refusal("resume", f"{path} holds no run to resume")
    with locked(path, SERVER_LOCK):
        if not resumes:
            yield RunDirectory(path), None
            return
        config = load_config(path)
        if is_completed(path):
            raise Refusal("resume", f"{path} is complete already")
        checkpoint = last_checkpoint(path)
        yield RunDirectory.reopen(path, checkpoint), Resumed(config, checkpoint)


def _resumes(run_config: Mapping[str, object]) -> bool:
    """Whether a run is to be resumed; settings beside that are refused, since a run keeps its own."""
    value = run_config.get("resume", False)
    if not isinstance(value, bool):
        raise ConfigError(f"resume = {value!r} is not allowed: true or false, without quotes")
    if not value:
        return False
    if not run_config.get("run-dir"):
        raise ConfigError("resume = true needs run-dir: the absolute path of the run")
    for key in (*GROUP_KEYS, "overrides", "seed"):
        if run_config.get(key, "") not in ("", -1):
            raise ConfigError(f"{key} is not allowed with resume = true: a run keeps its configuration")
    return True


def execute(grid: Grid, context: Context, directory: RunDirectory, resumed: Resumed | None = None) -> None:
    """Run to the end and write the results; with what was saved, go on where the run stopped."""
    config = resumed.config if resumed else config_from(context.run_config)
    torch.set_num_threads(config.train.threads)
    saved = SavedRun.load(directory.path) if resumed else None
    checkpoint = resumed.checkpoint if resumed and saved else None
    if saved is not None:
        saved.check(config)
    run_id = saved.id if saved else f"{config.method.name}-{context.run_id}"
    if saved is None:
        directory.begin(config, run_id)
    directory.tracking.begin(config, directory.path, run_id)
    spec = adapter_spec(config)
    method = load_method(config, spec)
    store = str(directory.path / "nodes")

    # A run that goes on can do without nodes that are away: who takes part when is fixed.
    least = config.federation.min_replies if saved else config.federation.clients
    found, absent = discover(grid, config, run_id, store, least)
    directory.exclude(saved.absent if saved else absent)
    if len(found) < config.federation.min_replies:
        reasons = [f"{f.node or 'a node'}: {f.reason}" for f in absent]
        needed = config.federation.min_replies
        raise Refusal(
            "nodes", f"{len(found)} of {needed} needed nodes can take part; {(reasons or ['-'])[0]}"
        )
    check_base_weights(config, {n: d for n, (_, d) in found.items()})
    if saved is None:
        rounds, nodes = plan_rounds(config, method, {n: d.examples for n, (_, d) in found.items()})
        saved = SavedRun(run_id, config.hash, code_hash(), rounds, nodes, absent)
        saved.save(directory.path)
    schedule, plans = saved.schedule, saved.nodes
    for text in [*warnings(config, plans), *method.remarks()]:
        directory.event("note", text=text)
    directory.event("plan", **plan_event(config, method, plans))
    spending = Spending(config.privacy)
    if checkpoint is not None:
        spending.restore(checkpoint.spent)
        directory.event("note", text=f"resumed after round {checkpoint.round}")
    method.bind(
        Run(
            id=run_id,
            schedule=schedule,
            nodes=plans,
            addresses={n: address for n, (address, _) in found.items()},
            store=store,
            recorder=directory,
            spending=spending,
            resumed=checkpoint,
        )
    )
    evaluator = Evaluator(config) if config.scores_on_server and config.task.head != "local" else None
    initial = initial_values(config)
    directory.after_round = lambda: directory.write_privacy(config, plans, spending)
    try:
        result = method.start(
            grid,
            to_record(method.initial(initial)),
            timeout=config.federation.timeout,
            evaluate_fn=evaluator,
        )
    finally:
        directory.write_privacy(config, plans, spending)
    if result.arrays is None:
        raise Refusal("rounds", "no round was run")
    if len(directory.void_rounds) == len(schedule.rounds):
        reasons = [f"{f['node']}: {f['reason']}" for f in directory.failures]
        raise Refusal("void", f"every round was void; last reason: {(reasons or ['no reply'])[-1]}")
    values = {**initial, **method.model_values(from_record(result.arrays))}
    directory.finish(config, run_id, plans, spending, values)


def discover(
    grid: Grid, config: Config, run_id: str, store: str, least: int
) -> tuple[dict[str, tuple[int, Description]], list[Failed]]:
    """Wait for the nodes, after a while for `least` of them, and ask each who it is.

    Returns
    -------
    found : dict of str to (int, Description)
        Flower's node id and the self-description of every node that can take part, by name.
    absent : list of Failed
        Why the others cannot: an error, silence, other code, no rows.

    Raises
    ------
    Refusal
        If too few nodes connect, or two have one name.
    """
    ids = _wait_for_nodes(grid, config.federation.clients, least)
    request = Request(
        run=run_id,
        round=0,
        phase="describe",
        node="",
        config=config.to_json(),
        config_hash=config.hash,
        code_hash=code_hash(),
        store=store,
        sigma=0.0,
        planned_steps=0,
    )
    messages = [
        Message(pack_request(request), dst_node_id=i, message_type=f"{MessageType.QUERY}.describe")
        for i in ids
    ]
    silent = set(ids)
    found: dict[str, tuple[int, Description]] = {}
    absent: list[Failed] = []
    for message in grid.send_and_receive(messages, timeout=DESCRIBE_WAIT):
        address = message.metadata.src_node_id
        silent.discard(address)
        answer = _description(message)
        if isinstance(answer, Failed):
            absent.append(answer)
        elif answer.node in found:
            raise Refusal("name", f"two nodes have this name: {answer.node}")
        else:
            found[answer.node] = (address, answer)
    absent += [
        Failed(f"node {i}", "timeout", f"no answer within {DESCRIBE_WAIT:g} s") for i in sorted(silent)
    ]
    return found, absent


def _description(message: Message) -> Description | Failed:
    """Return who a node says it is, or why it cannot take part."""
    name = f"node {message.metadata.src_node_id}"
    failed = error_of(message)
    if failed is not None:
        return dataclasses.replace(failed, node=failed.node or name)
    try:
        description = unpack_description(message.content)
    except Refusal as refusal:
        return Failed(name, refusal.kind, str(refusal))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", description.node):
        return Failed(name, "malformed", "the node's name is none")
    if description.code_hash != code_hash():
        return Failed(description.node, "code-hash", "the node runs other code than the server")
    if description.examples < 1:
        return Failed(description.node, "zero-rows", "the node has no rows")
    return description


def _wait_for_nodes(grid: Grid, wanted: int, least: int) -> list[int]:
    """Return the ids of the connected nodes once all are there, or `least` when the time is up."""
    deadline = time.monotonic() + CONNECT_WAIT
    while True:
        ids = sorted(grid.get_node_ids())
        if len(ids) > wanted:
            raise Refusal("nodes", f"{len(ids)} nodes are connected: set federation.clients={len(ids)}")
        if len(ids) == wanted:
            return ids
        if time.monotonic() > deadline:
            if len(ids) >= least:
                return ids
            raise Refusal(
                "nodes",
                f"{len(ids)} of {wanted} nodes connected within {CONNECT_WAIT:g} s: set federation.clients={len(ids)}, "
                f"or give a simulation --federation-config num-supernodes={wanted}",
            )
        time.sleep(0.2)
