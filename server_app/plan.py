"""The plan of a run, before anything trains: what ``privet check`` prints and the run itself starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from privet.adapters import AdapterSpec, adapter_spec, check_model, count
from privet.config import Config
from privet.data.partition import declared_rows
from privet.data.tasks import CLIENT, load_test
from privet.devices import pick_device, resources_warning
from privet.kinds.catalogue import kind_of
from privet.plan import NodePlan, plan_nodes, warnings
from privet.quantise import coded_bytes
from privet.schedule import Schedule, draw_schedule
from server_app.tracking import check_tracking
from strategies.base import LoraStrategy, load_method

BYTES = 4
"""Bytes of a number on the wire (float32)."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that follows from the configuration and the declared row counts."""

    config: Config
    spec: AdapterSpec
    method: LoraStrategy
    schedule: Schedule
    nodes: Mapping[str, NodePlan]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        config, method = self.config, self.method
        up, down = round_numbers(method)
        head = count(method.shared_head)
        once_numbers, once_bytes = method.once_cost()
        return {
            "method": config.method.name,
            "task": config.task.name,
            "model": config.model.name,
            "seed": config.seed,
            "config_hash": config.hash,
            "private": config.privacy.private,
            "epsilon": config.privacy.epsilon,
            "delta": config.privacy.delta,
            "clip": config.privacy.clip,
            "accountant": config.privacy.accountant if config.privacy.private else None,
            "clients": [
                {
                    "node": p.node,
                    "n": p.examples,
                    "q": p.q,
                    "steps": p.steps,
                    "planned_steps": p.planned_steps,
                    "sigma": p.sigma,
                    "epsilon": p.epsilon,
                }
                for p in self.nodes.values()
            ],
            "rounds": config.federation.rounds - method.warmup_rounds,
            "warmup_rounds": method.warmup_rounds,
            "per_round": {
                "upload_numbers": up,
                "download_numbers": down,
                "upload_bytes": upload_bytes(method),
                "download_bytes": down * BYTES,
                "head_numbers": head,
                "head_bytes": head * BYTES,
            },
            "warmup_per_round": warmup_numbers(method),
            "one_off": {"download_numbers": once_numbers, "download_bytes": once_bytes},
            "trained": method.trained_numbers,
            "lora_rank": self.spec.rank,
            "base_parameters": self.spec.base_parameters,
            "memory_bytes": memory_estimate(config, self.spec, method),
            "warnings": self.warnings,
        }


def make_plan(config: Config) -> RunPlan:
    """Plan a simulation: everything is checked and nothing is trained or downloaded.

    Raises
    ------
    PrivetError
        One line for a setting, a model, a data file or a partition that cannot work.
    """
    spec = adapter_spec(config)
    method = load_method(config, spec)
    check_model(config)
    if config.scores_on_server:
        kind_of(config).check()
    pick_device(config.train.device)
    check_tracking(config)
    notes = []
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    remark = resources_warning(config.train, config.federation.gpus_per_client, gpus)
    if remark:
        notes.append(remark)
    rows = {f"client-{i}": n for i, n in enumerate(declared_rows(config))}
    if CLIENT in config.task.path:
        load_test(
            config.task
        )  # one table was read just now; with a file each, nothing has looked at the test set
    schedule, nodes = plan_rounds(config, method, {n: r for n, r in rows.items() if r > 0})
    notes += [f"{n} has no rows and takes no part" for n, r in rows.items() if r < 1]
    notes += [*warnings(config, nodes), *method.remarks()]
    return RunPlan(config, spec, method, schedule, nodes, notes)


def plan_rounds(
    config: Config, method: LoraStrategy, declared: Mapping[str, int]
) -> tuple[Schedule, dict[str, NodePlan]]:
    """Draw the schedule of the nodes that have rows, and plan each of them."""
    schedule = draw_schedule(
        list(declared),
        config.federation,
        config.seed,
        phases=method.phases,
        warmup_rounds=method.warmup_rounds,
        warmup_phases=method.warmup_phases,
        warmup_charged=not set(method.warmup_phases) & {*method.raw_phases, *method.public_phases},
    )
    return schedule, plan_nodes(config, schedule, declared)


def round_numbers(method: LoraStrategy) -> tuple[int, int]:
    """Adapter numbers that one client sends and is sent in a training round, over all phases."""
    up = sum(count(method.upload_shapes(p)[0]) for p in method.phases)
    down = sum(count(method.download_shapes(p)[0]) for p in method.phases)
    return up, down


def upload_bytes(method: LoraStrategy) -> int:
    """Adapter bytes that one client sends in a training round, over all phases."""
    shapes = [method.upload_shapes(p)[0] for p in method.phases]
    if method.config.federation.upload == "int8":
        return sum(coded_bytes(s) for s in shapes)
    return sum(BYTES * count(s) for s in shapes)


def warmup_numbers(method: LoraStrategy) -> dict[str, int]:
    """Adapter numbers of one warm-up round; zeros without a warm-up."""
    phases = method.warmup_phases if method.warmup_rounds else ()
    return {
        "upload_numbers": sum(count(method.upload_shapes(p)[0]) for p in phases),
        "download_numbers": sum(count(method.download_shapes(p)[0]) for p in phases),
    }


def memory_estimate(config: Config, spec: AdapterSpec, method: LoraStrategy) -> int:
    """Estimate the bytes of one worker process during a private step.

    A Python process with its libraries (about 0.6 GB), the base weights, four copies of what trains (value,
    gradient sum, noise, message), the per-example gradients of one micro-batch, and activations: about 20
    numbers of the hidden size a token and layer for the backward pass, and the attention scores.
    """
    rows, tokens = config.train.micro_batch, config.model.max_length
    examples = rows * method.trained_numbers if config.privacy.private else 0
    activations = rows * tokens * spec.layers * (20 * spec.hidden_size + tokens * 4)
    numbers = spec.base_parameters + 4 * (count(spec.lora) + count(spec.head)) + examples + activations
    return 600_000_000 + BYTES * numbers


def plan_event(config: Config, method: LoraStrategy, nodes: Mapping[str, NodePlan]) -> dict[str, Any]:
    """Return the fields of the live ``plan`` event."""
    up, down = round_numbers(method)
    return {
        "method": config.method.name,
        "task": config.task.name,
        "model": config.model.name,
        "rounds": config.federation.rounds - method.warmup_rounds,
        "warmup_rounds": method.warmup_rounds,
        "clients": len(nodes),
        "epsilon_target": config.privacy.epsilon,
        "trained": method.trained_numbers,
        "upload_numbers": up,
        "download_numbers": down,
        "nodes": [dataclasses.asdict(p) for p in nodes.values()],
    }
