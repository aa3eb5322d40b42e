"""Many runs from one command: ``privet run -m method=fedavg,fedhsip privacy.epsilon=1,3 seed=range(1,4)``.

Values are swept in Hydra's own syntax: comma lists, ``range(1,4)`` (1, 2, 3), ``choice(a,b)``; ``[a,b]`` is one
value. Every combination is one run in its own folder, named after the swept values, and one child process:
``privet run --resume FOLDER``. The same command again therefore skips what is finished, goes on with what was
broken off, and starts what is missing.

Where ``privacy`` itself is swept, a combination without privacy loses all other ``privacy.*`` settings, which have
no effect on it: ``privacy=dp,none privacy.epsilon=3,6`` is three runs, epsilon 3, epsilon 6 and not private.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from privet import runner
from privet.atomic import write_atomic
from privet.config import Bounds, Config, compose, parse, quoted
from privet.environment import available_cpus
from privet.errors import ConfigError, PrivetError
from privet.experiments import Block, unfold

SWEEP_FILE = "sweep.json"
PREFIX = "sweep."

_NAME_LIMIT = 120
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


class SweepError(PrivetError):
    """What is wrong with the combinations of a sweep: one line each."""


@dataclass(frozen=True)
class SweepSettings:
    """The settings of the sweep itself, ``sweep.*``; they never reach a run.

    Parameters
    ----------
    parallel : int
        Runs side by side, each with its share of the CPU cores and, where there are several, a GPU of its own.
    """

    parallel: Annotated[int, Bounds(ge=1)] = 1


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: `values` are the swept ones as a person writes them, `overrides` are all, absolute."""

    name: str
    values: dict[str, str]
    overrides: list[str]
    config: Config


@dataclass(frozen=True)
class _Choice:
    """One setting of the command line and the overrides that it stands for."""

    key: str
    overrides: list[str]
    swept: bool


# --- which runs ----------------------------------------------------------------------------------


def is_own(override: str) -> bool:
    """Whether an override is a setting of the sweep itself."""
    return override.startswith(PREFIX)


def read_settings(overrides: Sequence[str]) -> tuple[SweepSettings, list[str]]:
    """Split the sweep's own settings from those of its runs.

    Raises
    ------
    ConfigError
        For an unknown setting, or more runs side by side than there are CPU cores.
    """
    given = {}
    for choice in (_read(text) for text in overrides if is_own(text)):
        if choice.swept:
            raise ConfigError(f"{choice.key} is not allowed to be swept: it is a setting of the sweep")
        given[choice.key.removeprefix(PREFIX)] = _parse(choice.overrides[0]).value()
    settings = parse(SweepSettings, {"parallel": SweepSettings.parallel, **given}, PREFIX.rstrip("."))
    cores = available_cpus()
    if settings.parallel > cores:
        raise ConfigError(
            f"sweep.parallel = {settings.parallel} is not allowed: at most {cores}, one for each CPU core"
        )
    return settings, [text for text in overrides if not is_own(text)]


def expand(blocks: Sequence[Block]) -> tuple[list[Combination], list[str]]:
    """Return every combination of the blocks' values in a stable order, and a line for each that is wrong.

    The values of the last setting change first. Combinations that come to the same configuration are one run.

    Raises
    ------
    ConfigError
        Where an override cannot be read at all, or nothing is swept.
    """
    drawn: dict[tuple[str, ...], dict[str, str]] = {}
    for block in blocks:
        for texts, values in _product(block):
            drawn.setdefault(texts, values)
    found: dict[str, Combination] = {}
    errors: list[tuple[str, str]] = []
    for texts, values in drawn.items():
        name = run_name(values)
        try:
            absolute, config = runner.absolute(texts, compose(texts))
        except PrivetError as error:
            errors.append((name, str(error)))
        else:
            found.setdefault(config.hash, Combination(name, values, absolute, config))
    return list(found.values()), _error_lines(errors, len(drawn))


def _product(block: Block) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield the overrides of every combination of a block's values, and the values that tell it from others."""
    choices = [_read(text, block.named) for text in block.overrides]
    swept = [c.key for c in choices if c.swept]
    if not swept:
        raise ConfigError("-m needs something to sweep: a list with commas, for example seed=1,2,3")
    for key in swept:
        if sum(c.key == key for c in choices) > 1:
            raise ConfigError(f"{key} is set twice: once is enough, with all its values")
    public = _non_private_options(choices)
    for texts in itertools.product(*(c.overrides for c in choices)):
        pairs = list(zip(choices, texts, strict=True))
        if any(c.key == "privacy" and text in public for c, text in pairs):
            pairs = [(c, text) for c, text in pairs if not c.key.startswith("privacy.")]
        yield tuple(text for _, text in pairs), {c.key: _shown(text) for c, text in pairs if c.swept}


def _read(text: str, named: Collection[str] = ()) -> _Choice:
    """Read one override as Hydra does; a value that its grammar does not know is a text.

    The keys in `named` count as swept where they have one value, too.
    """
    from hydra.errors import HydraException

    name, equals, value = text.partition("=")
    try:
        override = _parse(text)
    except HydraException:
        text = quoted(name, value)
        try:
            if not equals:
                raise
            override = _parse(text)
        except HydraException:
            raise ConfigError(
                f"'{name}{equals}{value}' is not allowed: a setting reads key=value, for example train.lr=0.5"
            ) from None
    if not override.is_sweep_override():
        return _Choice(override.key_or_group, [text], override.key_or_group in named)
    if getattr(override.value(), "shuffle", False):
        raise ConfigError(f"'{text}' is not allowed: a sweep has a fixed order")
    try:
        values = list(override.sweep_string_iterator())
    except HydraException:
        raise ConfigError(
            f"'{text}' is not allowed: name the values, {name}=a,b or {name}=range(1,4)"
        ) from None
    if not values:
        raise ConfigError(f"'{text}' is not allowed: it has no values")
    return _Choice(override.key_or_group, [f"{name}={v}" for v in values], True)


def _parse(text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


def _shown(text: str) -> str:
    """Return the value of an override as a person thinks of it, without quotes."""
    value = _parse(text).value()
    return value if isinstance(value, str) else text.partition("=")[2]


def _non_private_options(choices: Sequence[_Choice]) -> set[str]:
    """Return the overrides of a swept ``privacy`` that choose a run without privacy."""
    found = set()
    for text in (text for c in choices if c.swept and c.key == "privacy" for text in c.overrides):
        # A wrong name is told for each of its combinations.
        with contextlib.suppress(PrivetError):
            if not compose([text]).privacy.private:
                found.add(text)
    return found


def _error_lines(errors: Sequence[tuple[str, str]], combinations: int) -> list[str]:
    """One line an error, or a single one where all combinations have the same."""
    if len(errors) == combinations > 1 and len({text for _, text in errors}) == 1:
        return [f"every combination: {errors[0][1]}"]
    return [f"{name}: {text}" for name, text in errors]


# --- names ---------------------------------------------------------------------------------------


def run_name(values: Mapping[str, str]) -> str:
    """Return a combination's folder name: its swept values in the order of their keys, safe in any shell."""
    return _bounded(",".join(f"{k}={_UNSAFE.sub('-', v)}" for k, v in sorted(values.items())), values)


def sweep_name(keys: Sequence[str]) -> str:
    """Return the default name of a sweep's folder, from what it sweeps."""
    return _bounded("-".join(["sweep", *sorted(keys)]), dict.fromkeys(keys, ""))


def _bounded(name: str, values: Mapping[str, str]) -> str:
    """Bound a name's length; where it then does not tell all of `values`, a hash of them tells it apart."""
    if len(name) <= _NAME_LIMIT and not any(_UNSAFE.search(v) for v in values.values()):
        return name
    digest = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[: _NAME_LIMIT - 9]}-{digest}"


# --- the folder ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Parameters
    ----------
    folder : Path
        Its folder, made when it runs.
    given : list of str
        The overrides as they were given.
    combinations : list of Combination
        Its runs, in order.
    states : dict of str to str
        ``missing``, ``broken``, ``running`` or ``finished`` by name.
    settings : SweepSettings
        How it runs.
    gpus : int
        CUDA devices that are visible.
    notes : list of str
        What a person should know before the runs start.
    """

    folder: Path
    given: list[str]
    combinations: list[Combination]
    states: dict[str, runner.State]
    settings: SweepSettings
    gpus: int
    notes: list[str]

    def path(self, combination: Combination) -> Path:
        """Return a combination's run directory."""
        return self.folder / combination.name

    @property
    def paths(self) -> list[Path]:
        """All run directories, in order."""
        return [self.path(c) for c in self.combinations]

    def to_list(self) -> list[dict[str, Any]]:
        """Return plain JSON values: every combination with its state."""
        return [
            {
                "name": c.name,
                "values": c.values,
                "state": self.states[c.name],
                "path": str(self.path(c)),
                "config_hash": c.config.hash,
                "overrides": c.overrides,
            }
            for c in self.combinations
        ]


def prepare(overrides: Sequence[str], runs: Path | None, name: str | None) -> Sweep:
    """Expand a sweep, look for its finished runs, and check the others; nothing is written.

    Raises
    ------
    SweepError
        One line for every combination that cannot run, or whose folder holds a run with other settings.
    ConfigError
        Where the sweep itself is wrong.
    """
    settings, given = read_settings(overrides)
    recipe, blocks = unfold(given)
    combinations, errors = expand(blocks)
    if name is None:
        default = recipe.name if recipe else sweep_name([c.key for c in map(_read, given) if c.swept])
    folder = runner.runs_folder(runs) / (runner.check_name(name) if name is not None else default)
    if (folder / "config.yaml").exists():
        raise PrivetError(f"{folder} is a single run's directory: name this sweep with --name")
    states: dict[str, runner.State] = {}
    for c in combinations:
        states[c.name] = runner.state_of(folder / c.name)
        try:
            _check_folder(folder / c.name, c)
        except PrivetError as error:
            errors.append(f"{c.name}: {error}")
    todo = [c for c in combinations if states[c.name] != "finished"]
    slots = min(settings.parallel, len(todo))
    # A run that began was checked then; going on with it is for its nodes to allow.
    fresh = [c for c in todo if not (folder / c.name / "config.yaml").exists()]
    gpus, notes = 0, []
    if fresh or slots > 1:
        checked = runner.check([c.overrides for c in fresh])
        gpus = checked.gpus
        wrong = [(c.name, p.error) for c, p in zip(fresh, checked.plans, strict=True) if p.error is not None]
        errors += _error_lines(wrong, len(fresh))
        errors += _device_errors(todo, devices(os.environ, gpus), slots)
        notes = list(dict.fromkeys(text for p in checked.plans for text in p.warnings))
    if errors:
        raise SweepError("\n".join(errors))
    return Sweep(folder, list(given), combinations, states, settings, gpus, notes)


def _check_folder(run_dir: Path, combination: Combination) -> None:
    """Refuse a folder whose run has another configuration."""
    config = combination.config
    begun = (run_dir / "config.yaml").exists()
    if not begun and runner.saved_overrides(run_dir) == combination.overrides:
        return
    held = runner.saved_config(run_dir)
    if held is None or held.hash == config.hash:
        return
    there, here = _flat(held.to_dict()), _flat(config.to_dict())
    differ = [k for k in sorted({*there, *here}) if there.get(k) != here.get(k)]
    texts = [f"{k} is {there.get(k)} there and {here.get(k)} here" for k in differ[:3]]
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    raise ConfigError(
        f"{run_dir} holds a run with other settings ({', '.join(texts)}{more}): name this sweep with --name"
    )


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {path: node}
    return {k: v for key, value in node.items() for k, v in _flat(value, f"{path}.{key}".lstrip(".")).items()}


def write_list(sweep: Sweep) -> None:
    """Write ``sweep.json``; runs of an earlier, smaller or other choice of values stay listed."""
    path = sweep.folder / SWEEP_FILE
    earlier: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
    now = {
        c.name: {
            "name": c.name,
            "values": c.values,
            "config_hash": c.config.hash,
            "overrides": c.overrides,
        }
        for c in sweep.combinations
    }
    listed = {r["name"]: r for r in earlier.get("runs", []) if isinstance(r, dict) and "name" in r}
    record = {
        "created": earlier.get("created", datetime.now(UTC).isoformat(timespec="seconds")),
        "overrides": sweep.given,
        "runs": list({**listed, **now}.values()),
    }
    write_atomic(path, (json.dumps(record, indent=2) + "\n").encode())


# --- the machine ---------------------------------------------------------------------------------


def devices(environment: Mapping[str, str], gpus: int) -> list[str]:
    """Return the visible CUDA devices as ``CUDA_VISIBLE_DEVICES`` names them, in its own order where it is set."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(i) for i in range(gpus)]
    # CUDA sees nothing from the first name on that is not a device.
    return list(itertools.takewhile(lambda d: d not in ("", "-1"), (d.strip() for d in given.split(","))))


def device_of(slot: int, visible: Sequence[str], slots: int) -> str | None:
    """Return the device that a slot's runs get for themselves; None: they see what the sweep sees."""
    return visible[slot % len(visible)] if slots > 1 and len(visible) > 1 else None


def cpus_of(slots: int) -> int | None:
    """Return the CPU cores of one slot; None: all of them."""
    return max(1, available_cpus() // slots) if slots > 1 else None


def _device_errors(combinations: Sequence[Combination], visible: Sequence[str], slots: int) -> list[str]:
    if device_of(0, visible, slots) is None:
        return []
    errors = []
    for c in combinations:
        share, device = c.config.federation.gpus_per_client, c.config.train.device
        if share > 1:
            errors.append((c.name, f"federation.gpus_per_client = {share:g} with sweep.parallel: at most 1"))
        elif re.fullmatch(r"cuda:0*[1-9]\d*", device):
            errors.append(
                (c.name, f"train.device = {device} with sweep.parallel: use cuda, a run has one GPU")
            )
    return _error_lines(errors, len(combinations))


# --- results -------------------------------------------------------------------------------------


def main_metric(summary: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the score that a run is judged by: its accuracy, else the first that it has."""
    metrics = summary.get("metrics") or {}
    name = "accuracy" if "accuracy" in metrics else next(iter(metrics), None)
    return None if name is None else (name, float(metrics[name]))


def state_rows(sweep: Sweep) -> list[list[str]]:
    """Return a table of all combinations and their states, a header first."""
    return [["run", "state"], *([c.name, sweep.states[c.name]] for c in sweep.combinations)]
