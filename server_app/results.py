"""The run directory: what a run leaves behind, written as it happens.

``config.yaml``, ``events.jsonl`` (live), ``rounds.jsonl``, ``privacy.json``, ``communication.json``,
``summary.json``, ``checkpoints/`` and ``adapter/``. Every file is either appended to a line at a time or replaced
whole, so that a killed run leaves readable files and can go on.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from privet.adapters import adapter_spec, export
from privet.atomic import write_atomic
from privet.config import Config
from privet.errors import ConfigError, StoreError
from privet.plan import NodePlan, warnings
from privet.privacy.spending import Spending
from privet.wire import PARTS, Arrays, Failed, Payload
from server_app.card import privacy_card
from server_app.tracking import Tracking
from server_app.uploads import keep_upload
from strategies.base import load_method
from strategies.checkpoint import Checkpoint

WAYS = ("upload", "download", "requery", "evaluate")


class RunDirectory:
    """Writes a run's files; the round loop's recorder.

    Parameters
    ----------
    path : Path
        The directory; made where it does not exist.

    Raises
    ------
    ConfigError
        If it holds a run already: two runs never share their files.
    """

    def __init__(self, path: Path) -> None:
        if (path / "config.yaml").exists() or (path / "rounds.jsonl").exists():
            raise ConfigError(f"run-dir = {path} holds a run already: name another")
        self._start(path)

    def _start(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.after_round: Callable[[], object] = lambda: None
        self._absent: list[dict[str, Any]] = []
        self._rounds: list[dict[str, Any]] = []
        self._traffic: list[dict[str, Any]] = []
        self._started = datetime.now(UTC)
        self._totals = dict.fromkeys(WAYS, 0)
        self.tracking = Tracking(lambda text: self.event("note", text=text))

    @classmethod
    def reopen(cls, path: Path, checkpoint: Checkpoint | None) -> RunDirectory:
        """Open the directory of a run that was stopped, as it was after its checkpoint.

        What was being written when it stopped is dropped; the checkpoint holds it.

        Raises
        ------
        StoreError
            If a finished round is missing.
        """
        self = cls.__new__(cls)
        self._start(path)
        done = checkpoint.round if checkpoint else 0
        rounds = {r["round"]: r for r in _lines(path / "rounds.jsonl")}
        traffic: dict[int, dict[str, Any]] = {}
        if (path / "communication.json").exists():
            raw = json.loads((path / "communication.json").read_text(encoding="utf-8"))
            traffic = {r["round"]: r for r in raw["rounds"]}
        for number in range(1, done + 1):
            if number in rounds and number in traffic:
                self._rounds.append(rounds[number])
                self._add_traffic(traffic[number])
            elif number < done:
                raise StoreError(f"{path} has lost the record of round {number}")
        _write(path / "rounds.jsonl", "".join(json.dumps(r, allow_nan=False) + "\n" for r in self._rounds))
        events = path / "events.jsonl"
        if events.exists() and not events.read_bytes().endswith(b"\n"):
            with events.open("a", encoding="utf-8") as stream:
                stream.write("\n")  # a torn line stays a line of its own
        if checkpoint is not None:
            self._started -= timedelta(seconds=checkpoint.seconds)
        (path / "failure.json").unlink(missing_ok=True)
        return self

    @property
    def void_rounds(self) -> list[int]:
        """Numbers of the rounds that changed nothing."""
        return [r["round"] for r in self._rounds if r["void"]]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Every refused or missing reply so far: round (0: before the first), phase, node and reason."""
        return self._absent + [
            {"round": r["round"], "phase": p["name"], **f}
            for r in self._rounds
            for p in r["phases"]
            for f in p["failed"]
        ]

    # --- live ------------------------------------------------------------------------------------

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to ``events.jsonl``."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **fields}
        _append(self.path / "events.jsonl", line)

    def round(self, record: dict[str, Any], traffic: Mapping[str, Mapping[str, Any]]) -> None:
        """Append a finished round, and its traffic by node."""
        _append(self.path / "rounds.jsonl", record, durable=True)
        self._rounds.append(record)
        self._add_traffic({"round": record["round"], "nodes": dict(traffic)})
        self._write_communication()
        self.after_round()
        self.event(
            "round",
            round=record["round"],
            eval=record["eval"],
            epsilon_max=record["epsilon_max"],
            upload_bytes=self._totals["upload"],
            download_bytes=self._totals["download"],
            seconds=record["seconds"],
            void=record["void"],
        )
        self.tracking.round(record, self._totals)

    def has_round(self, number: int) -> bool:
        """Whether a round's record is there already."""
        return any(r["round"] == number for r in self._rounds)

    def upload(self, number: int, phase: str, node: str, payload: Payload) -> None:
        """Keep what one valid reply carried; a repeated round replaces it."""
        keep_upload(self.path, number, phase, node, payload)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the run's checkpoint."""
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        name = f"round-{checkpoint.round:05d}.safetensors"
        seconds = (datetime.now(UTC) - self._started).total_seconds()
        write_atomic(folder / name, dataclasses.replace(checkpoint, seconds=seconds).to_bytes())
        for old in folder.glob("round-*.safetensors"):
            if old.name != name:
                old.unlink()

    def _add_traffic(self, traffic: dict[str, Any]) -> None:
        self._traffic.append(traffic)
        for way in WAYS:
            self._totals[way] += sum(
                sum(node[way]["bytes"].values()) for node in traffic["nodes"].values() if way in node
            )

    # --- start and end ---------------------------------------------------------------------------

    def exclude(self, absent: Sequence[Failed]) -> None:
        """Record the nodes that cannot take part at all."""
        for failed in absent:
            reason = f"{failed.kind}: {failed.reason}"
            self._absent.append({"round": 0, "phase": "describe", "node": failed.node, "reason": reason})
            self.event("note", text=f"{failed.node or 'a node'} takes no part: {failed.reason}")

    def begin(self, config: Config, run_id: str) -> None:
        """Write the resolved configuration."""
        header = f"# Resolved configuration of run {run_id}; hash {config.hash}\n"
        _write(self.path / "config.yaml", header + OmegaConf.to_yaml(OmegaConf.create(config.to_dict())))

    def finish(
        self,
        config: Config,
        run_id: str,
        plans: Mapping[str, NodePlan],
        spending: Spending,
        values: Arrays,
    ) -> dict[str, Any]:
        """Write the results of a completed run; return the summary."""
        privacy = self.write_privacy(config, plans, spending)
        export(config, values, self.path / "adapter")
        summary = self._summary(config, run_id, "completed", privacy)
        _write(self.path / "adapter" / "README.md", privacy_card(config, summary, privacy))
        _write_json(self.path / "summary.json", summary)
        self.event(
            "end",
            status="completed",
            metrics=summary["metrics"],
            epsilon=summary["epsilon"],
            run_dir=str(self.path),
        )
        self.tracking.end(summary)
        return summary

    def fail(self, reason: str) -> None:
        """Leave the reason of a failure where the launcher and a person look for it."""
        _write_json(self.path / "failure.json", {"reason": reason})
        summary = {
            "status": "failed",
            "reason": reason,
            "rounds": len(self._rounds),
            "void_rounds": self.void_rounds,
            "failures": self.failures,
        }
        _write_json(self.path / "summary.json", summary)
        self.event("end", status="failed", metrics=None, epsilon=None, run_dir=str(self.path))
        self.tracking.end(summary)

    def write_privacy(
        self, config: Config, plans: Mapping[str, NodePlan], spending: Spending
    ) -> dict[str, Any]:
        """Write ``privacy.json``: what was promised, and what was spent, composed from what happened."""
        private = config.privacy.private
        raw = sorted(load_method(config, adapter_spec(config)).raw_phases) if private else []
        loud = [f"not private: the {phase} rounds trained on private rows without noise" for phase in raw]
        open_run = config.privacy.randomness == "seeded" or config.privacy.diagnostics or bool(raw)
        privacy = {
            "private": private and not open_run,
            "mechanism": "DP-SGD: Poisson-subsampled Gaussian, flat clipping" if private else None,
            "adjacency": "add or remove one row" if private else None,
            "accountant": config.privacy.accountant if private else None,
            "delta": config.privacy.delta,
            "target_epsilon": config.privacy.epsilon,
            "max_epsilon": spending.largest(),
            "excludes_tuning": True,
            "randomness": config.privacy.randomness if private else None,
            "warnings": [*loud, *warnings(config, plans)],
            "nodes": [
                {
                    "node": node,
                    "examples": plan.examples,
                    "epsilon": spending.epsilon(node),
                    "steps": spending.steps(node),
                    "entries": spending.entries(node),
                }
                for node, plan in sorted(plans.items())
            ],
        }
        _write_json(self.path / "privacy.json", privacy)
        return privacy

    def _summary(self, config: Config, run_id: str, status: str, privacy: dict[str, Any]) -> dict[str, Any]:
        scored = [r["eval"] for r in self._rounds if r["eval"]]
        return {
            "status": status,
            "run": run_id,
            "method": config.method.name,
            "task": config.task.name,
            "model": config.model.name,
            "seed": config.seed,
            "private": privacy["private"],
            "rounds": len(self._rounds),
            "void_rounds": self.void_rounds,
            "failures": self.failures,
            "metrics": scored[-1] if scored else None,
            "client_metrics": self._client_metrics(),
            "epsilon": privacy["max_epsilon"],
            "upload_numbers": self._numbers_per_client("upload"),
            "download_numbers": self._numbers_per_client("download"),
            "seconds": round((datetime.now(UTC) - self._started).total_seconds(), 1),
            "config_hash": config.hash,
            "versions": {
                p: version(p) for p in ("privet", "flwr", "torch", "transformers", "peft", "opacus")
            },
        }

    def _client_metrics(self) -> dict[str, Any] | None:
        """Means over the clients of their last scores."""
        scored = [r["eval_clients"] for r in self._rounds if r.get("eval_clients")]
        return {k: scored[-1][k] for k in ("rows", "global", "personal")} if scored else None

    def _numbers_per_client(self, way: str) -> int:
        """Adapter numbers of one client in the last round that was not void and had any."""
        void = set(self.void_rounds)
        for entry in reversed([t for t in self._traffic if t["round"] not in void]):
            counts = [n[way]["numbers"]["adapter"] for n in entry["nodes"].values() if way in n]
            if counts:
                return int(max(counts))
        return 0

    def _write_communication(self) -> None:
        totals = {
            f"{way}_{what}_{part}": sum(
                node[way][what].get(part, 0)
                for r in self._traffic
                for node in r["nodes"].values()
                if way in node
            )
            for way in WAYS
            for what in ("numbers", "bytes")
            for part in PARTS
        }
        _write_json(self.path / "communication.json", {"rounds": self._traffic, "totals": totals})


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file; the last one may be torn."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _append(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(value, allow_nan=False) + "\n")
        if durable:
            stream.flush()
            os.fsync(stream.fileno())


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode())


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=2) + "\n")
