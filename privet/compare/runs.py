"""Runs as they lie on disk: finding their directories and reading what each of them left.

A directory may come from another machine or another version, from a run that was killed, or from one that still goes
on. What cannot be read makes the run one with a problem, which is shown apart; it is never dropped and never fatal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from privet.errors import PrivetError

MARKS = ("events.jsonl", "rounds.jsonl", "failure.json", "logs/flwr.log", "logs/superlink.log")
"""A folder with one of these holds a run."""

COMPLETED = "completed"
SERVER = ""
"""Group of the scores that the server gave the global model; the clients' groups have names."""

_DEPTH = 4

Scores = dict[str, float]


@dataclass(frozen=True)
class RoundScore:
    """One round of a run: its number, scores (maybe none), epsilon spent and bytes sent until then."""

    number: int
    scores: Scores
    epsilon: float | None
    bytes_so_far: int
    void: bool


@dataclass(frozen=True)
class Run:
    """What one run left.

    Attributes
    ----------
    settings : dict
        Every setting of ``config.yaml`` by its dotted key.
    scores : dict
        The final scores: those of the server by their names, those of the clients as ``global accuracy`` or
        ``personal accuracy``.
    problem : str
        Why the run has no result; empty where it is complete.
    """

    path: Path
    config_text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: Sequence[RoundScore] = ()
    scores: Scores = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    upload_numbers: int | None = None
    download_numbers: int | None = None
    seconds: float | None = None
    void_rounds: int = 0
    failures: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.settings.get("method.name", "?"))

    @property
    def seed(self) -> Any:
        """The seed, None where the configuration has none."""
        return self.settings.get("seed")

    @property
    def private(self) -> bool:
        """Whether ``privacy.json`` says that the run was differentially private."""
        return self.privacy.get("private") is True

    @property
    def target(self) -> float | None:
        """The promised epsilon."""
        return _number(self.privacy.get("target_epsilon"))

    @property
    def epsilon(self) -> float | None:
        """The epsilon spent, the largest over the nodes."""
        return _number(self.privacy.get("max_epsilon"))

    @property
    def delta(self) -> float | None:
        """The delta of the budget."""
        return _number(self.privacy.get("delta"))

    @property
    def adjacency(self) -> str | None:
        """What neighbouring data sets are."""
        value = self.privacy.get("adjacency")
        return None if value is None else str(value)

    @property
    def bytes(self) -> int:
        """Bytes of all messages of all clients, head, one-off material and repeated requests included."""
        return sum(n for key, n in self.totals.items() if "_bytes_" in key)


def find_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the run directories that `paths` are or hold, in order and each once.

    Returns
    -------
    found : list of Path
        Run directories.
    remarks : list of str
        One line for every path that holds none.

    Raises
    ------
    PrivetError
        If a path does not exist, or none of them holds a run.
    """
    found: dict[Path, Path] = {}
    remarks = []
    for path in paths:
        if not path.exists():
            raise PrivetError(f"{path} does not exist: name a run's directory, or a folder that holds runs")
        below = list(_below(path, _DEPTH))
        if not below:
            remarks.append(f"{path} holds no run")
        for run in below:
            found.setdefault(run.resolve(), run)
    if not found:
        raise PrivetError(
            f"{remarks[0] if remarks else 'nothing named'}: name a run's directory, or a folder of runs"
        )
    return list(found.values()), remarks


def _below(path: Path, depth: int) -> Iterator[Path]:
    if not path.is_dir():
        return
    if any((path / mark).exists() for mark in MARKS):
        yield path
    elif depth:
        try:
            inner = sorted(e.name for e in os.scandir(path) if e.is_dir(follow_symlinks=False))
        except OSError:
            return
        for name in inner:
            if not name.startswith("."):
                yield from _below(path / name, depth - 1)


def read_run(path: Path) -> Run:
    """Read a run's directory; whatever is wrong with it becomes its problem."""
    try:
        return _read(path)
    except _Damaged as damage:
        return Run(path, problem=f"damaged: {damage}")


class _Damaged(Exception):  # noqa: N818 - not an error of ours
    """A file is there and cannot be read."""


def _read(path: Path) -> Run:
    text = _text(path / "config.yaml") or ""
    try:
        settings = dict(_leaves(yaml.safe_load(text) or {}))
    except yaml.YAMLError:
        raise _Damaged("config.yaml is not valid YAML") from None
    summary, privacy = _object(path / "summary.json"), _object(path / "privacy.json")
    traffic = _object(path / "communication.json")
    lines = _lines(path / "rounds.jsonl")
    status = summary.get("status")
    failures = summary.get("failures")
    if failures is None:  # a run that did not end: what its rounds say
        failures = [
            {"round": line.get("round"), "phase": phase.get("name"), **_mapping(f)}
            for line in lines
            for phase in map(_mapping, _list(line.get("phases")))
            for f in _list(phase.get("failed"))
        ]
    run = Run(
        path=path,
        config_text=text,
        settings=settings,
        rounds=_rounds(lines, traffic),
        scores=_scores(summary.get("metrics"), summary.get("client_metrics")),
        privacy=privacy,
        totals={str(k): int(v) for k, v in _mapping(traffic.get("totals")).items() if _number(v) is not None},
        upload_numbers=_whole(summary.get("upload_numbers")),
        download_numbers=_whole(summary.get("download_numbers")),
        seconds=_number(summary.get("seconds")),
        void_rounds=sum(bool(line.get("void")) for line in lines),
        failures=[f for f in _list(failures) if isinstance(f, Mapping)],
        versions={str(k): str(v) for k, v in _mapping(summary.get("versions")).items()},
        problem="" if status == COMPLETED else _problem(path, summary, settings, len(lines)),
    )
    if not run.problem:
        missing = [n for n, there in (("config.yaml", settings), ("privacy.json", privacy)) if not there]
        if missing:
            raise _Damaged(f"{missing[0]} is missing")
    return run


def _problem(path: Path, summary: Mapping[str, Any], settings: Mapping[str, Any], rounds: int) -> str:
    """Say why a run has no result."""
    failure = _object(path / "failure.json")
    if failure:
        return f"failed: {' '.join(str(failure.get('reason') or 'no reason given').split())}"
    if summary.get("status", "failed") != "failed":
        return f"its status is {summary.get('status')}"
    # A failed run without failure.json was taken up again.
    if not settings:
        return "it never began: see its logs"
    planned = settings.get("federation.rounds", "?")
    return f"unfinished: {rounds} of {planned} rounds are recorded; it still runs, or was stopped or killed"


# --- parts ---------------------------------------------------------------------------------------


def _rounds(lines: Sequence[Mapping[str, Any]], traffic: Mapping[str, Any]) -> list[RoundScore]:
    """Join the rounds' records with their traffic; without a traffic file, the record's own adapter bytes count."""
    by_round = {_mapping(r).get("round"): _bytes(_mapping(r)) for r in _list(traffic.get("rounds"))}
    out, so_far = [], 0
    for line in lines:
        number = _whole(line.get("round"))
        if number is None:
            raise _Damaged("rounds.jsonl has a line without a round")
        own = sum(_whole(line.get(f"{way}_bytes")) or 0 for way in ("upload", "download"))
        so_far += by_round.get(number, own)
        scores = _scores(line.get("eval"), line.get("eval_clients"))
        out.append(
            RoundScore(number, scores, _number(line.get("epsilon_max")), so_far, bool(line.get("void")))
        )
    return out


def _bytes(entry: Mapping[str, Any]) -> int:
    """Bytes of one round over all nodes, ways and parts."""
    return sum(
        _whole(amount) or 0
        for node in _mapping(entry.get("nodes")).values()
        for way in _mapping(node).values()
        for amount in _mapping(_mapping(way).get("bytes")).values()
    )


def _scores(server: Any, clients: Any) -> Scores:
    """Return finite scores by name; those of the clients under what they scored, and on which rows."""
    rows = _mapping(clients).get("rows")
    place = f" ({rows})" if isinstance(rows, str) else ""
    groups = {SERVER: server, **{f"{model}{place}": v for model, v in _mapping(clients).items()}}
    return {
        f"{group} {key}".strip(): number
        for group, values in groups.items()
        for key, value in _mapping(values).items()
        if (number := _number(value)) is not None
    }


# --- files ---------------------------------------------------------------------------------------


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise _Damaged(f"{path.name} cannot be read") from None


def _object(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where there is no file."""
    text = _text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise _Damaged(f"{path.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise _Damaged(f"{path.name} is not a JSON object")
    return value


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON lines file; a last line without its end is still being written."""
    text = _text(path) or ""
    whole = text[: text.rfind("\n") + 1]
    try:
        values = [json.loads(line) for line in whole.splitlines() if line.strip()]
    except ValueError:
        raise _Damaged(f"{path.name} is not valid JSON") from None
    if not all(isinstance(v, dict) for v in values):
        raise _Damaged(f"{path.name} has a line that is no JSON object")
    return values


# --- values of any type --------------------------------------------------------------------------


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its dotted key; lists and empty groups are values."""
    if isinstance(node, Mapping) and (node or not path):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []
