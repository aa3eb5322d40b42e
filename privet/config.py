"""One configuration: composed by Hydra on the server, typed here, carried to every node with its hash.

The YAML files in ``conf/`` hold every default; the dataclasses below hold every type, range and rule and
have no defaults, so that no setting stands in two places. :func:`compose` is the only way in from text,
:meth:`Config.from_json` the only way in from the wire, and both end in the same checks.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from privet.errors import ConfigError

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
GROUPS = ("method", "task", "model", "privacy", "federation", "train")

LARGEST_RATE = 1e38
"""No number that multiplies float32 parameters may reach it: they would overflow, or the step would raise."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, as an annotation: ``rank: Annotated[int, Bounds(ge=1)]``."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None

    def check(self, value: Any, key: str) -> None:
        """Raise ConfigError where a number is out of bounds; None is not a number."""
        if value is None:
            return
        parts = []
        if self.gt is not None:
            parts.append((value > self.gt, f"greater than {self.gt:g}"))
        if self.ge is not None:
            parts.append((value >= self.ge, f"at least {self.ge:g}"))
        if self.lt is not None:
            parts.append((value < self.lt, f"less than {self.lt:g}"))
        if not all(holds for holds, _ in parts):
            raise ConfigError(f"{key} = {value} is not allowed: {' and '.join(text for _, text in parts)}")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: ``W = W0 + (alpha / rank) B A`` on every target module."""

    rank: Annotated[int, Bounds(ge=1)]
    alpha: Annotated[float, Bounds(gt=0)]
    targets: tuple[str, ...]
    dropout: Annotated[float, Bounds(ge=0, lt=1)]


@dataclass(frozen=True)
class ModelConfig:
    """The frozen base model.

    `path` is a hub name, a local folder or ``package:module/folder``; with `architecture` the weights are
    drawn from the seed instead. `sha256` (or a prefix of it) pins the weights file. `bits` quantises the frozen
    weights when they are loaded; what trains stays float32.

    A model that sees images has a `projector`, which stays as it came or trains like a shared head; text models have
    none (None). With `vision`, an encoder of that name is put before a language model, and the projector between
    them starts from the seed; None: the model has its own.
    """

    name: str
    path: str | None
    revision: str | None
    sha256: str | None
    tokenizer: str | None
    architecture: dict[str, Any] | None
    bits: Literal[4, 8] | None
    vision: Literal["efficientnet_lite0"] | None
    projector: Literal["frozen", "trained"] | None
    max_length: Annotated[int, Bounds(ge=2)]
    lora: LoraConfig

    def __post_init__(self) -> None:
        if self.vision is not None and self.projector != "trained":
            raise ConfigError(
                f"model.projector = {self.projector or 'null'} is not allowed with model.vision: a projector that "
                "starts from the seed has to be trained"
            )
        if self.bits is not None and self.architecture is not None:
            raise ConfigError(
                f"model.bits = {self.bits} has no effect with model.architecture: random weights are not quantised"
            )


@dataclass(frozen=True)
class WritingConfig:
    """What the final model writes for the test prompts, and the `measures` of it against their references.

    With one beam it is greedy. `rows` is how many prompts; None: all.
    """

    measures: tuple[str, ...]
    beams: Annotated[int, Bounds(ge=1)]
    max_tokens: Annotated[int, Bounds(ge=1)]
    rows: Annotated[int | None, Bounds(ge=1)]


@dataclass(frozen=True)
class TaskConfig:
    """A task over a table with a text column and a column of what to answer: a label, or a text to write.

    `kind` says what is learnt: ``classification`` (one of `labels`, which stand in order and come from the task, never
    from rows), ``generation`` (a text after a prompt) or ``instructions`` (a chat's answer; without `label_column`,
    `text_column` holds whole chats). The last two train a language model, which has no head; `prompt` is what it
    reads, with ``{text}`` and ``{pair}`` for the row's texts, and `writing` says how what it writes is judged.

    ``captioning`` and ``visual_question`` train one that sees images: `image_column` has the images or the names of
    their files below `image_folder` (None: the table's own folder; those of `test_path` are below `test_image_folder`
    where that is set), and ``{image}`` stands in `prompt`. Captioning has no text to read (`text_column` None).
    `choices_column` has lists of answers to choose from, ``{choices}`` in `prompt`; the answer is then a letter.

    `path` may hold ``{client}``, which then names one file a client. `minimum` drops rows whose column is present and
    lower. The public test set is `test_path`, or the `test_rows` rows of `path` that sort first by content hash.
    With `validation_rows`, so many training rows are set apart and scored in its place, to tune settings on. `canaries`
    rows are planted by an audit, each with probability 1/2 (:mod:`privet.data.canaries`).
    """

    name: str
    kind: Literal["classification", "generation", "instructions", "captioning", "visual_question"]
    path: str
    test_path: str | None
    test_rows: Annotated[int | None, Bounds(ge=1)]
    validation_rows: Annotated[int | None, Bounds(ge=1)]
    canaries: Annotated[int | None, Bounds(ge=1)]
    train_rows: Annotated[int | None, Bounds(ge=1)]
    text_column: str | None
    pair_column: str | None
    choices_column: str | None
    image_column: str | None
    image_folder: str | None
    test_image_folder: str | None
    label_column: str | None
    labels: tuple[str, ...]
    prompt: str | None
    writing: WritingConfig | None
    minimum: dict[str, float] | None
    deduplicate: bool
    head: Literal["frozen", "shared", "local"] | None
    pooling: Literal["mean", "model"] | None

    @property
    def generates(self) -> bool:
        """Whether the answer is a text, which a language model writes."""
        return self.kind != "classification"

    @property
    def sees(self) -> bool:
        """Whether every row has an image."""
        return self.kind in ("captioning", "visual_question")

    def __post_init__(self) -> None:
        if self.sees:
            self._check_images()
        else:
            self._check_no_images()
        if self.generates:
            self._check_texts()
        else:
            self._check_labels()
        if (self.test_path is None) == (self.test_rows is None):
            raise ConfigError("set exactly one of task.test_path and task.test_rows")
        if "{client}" in self.path and self.test_path is None:
            raise ConfigError("task.path with {client} needs task.test_path: a public test set")
        if "{client}" in self.path and self.validation_rows is not None:
            raise ConfigError(
                "task.validation_rows needs one table to set rows apart from, not a file for each client"
            )

    def _check_images(self) -> None:
        """Check what rows with images need; their texts are checked as all texts are."""
        if self.image_column is None:
            raise ConfigError(f"task.image_column is missing: task.kind={self.kind} needs images")
        if (self.prompt or "").count("{image}") != 1:
            raise ConfigError(f"task.prompt = {self.prompt!r} is not allowed: {{image}} stands in it once")
        if self.label_column is None:
            raise ConfigError("task.label_column = null is not allowed: the column of the texts to write")
        if (self.text_column is None) != (self.kind == "captioning"):
            needed = "has no text to read (null)" if self.text_column else "needs a question"
            raise ConfigError(
                f"task.text_column = {self.text_column or 'null'}: task.kind={self.kind} {needed}"
            )
        if self.choices_column is not None and self.pair_column is not None:
            raise ConfigError("task.choices_column and task.pair_column: only one of them")
        if self.canaries is not None:
            raise ConfigError("task.canaries is for texts: nothing is planted among images")

    def _check_no_images(self) -> None:
        for name in ("image_column", "image_folder", "test_image_folder", "choices_column"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"task.{name} has no effect with task.kind={self.kind}: captioning and visual_question have images"
                )
        if self.text_column is None:
            raise ConfigError("task.text_column = null is not allowed: the column of the texts")

    def _check_labels(self) -> None:
        if len(self.labels) < 2:
            raise ConfigError(f"task.labels = {list(self.labels)} is not allowed: at least two label values")
        if len(set(self.labels)) != len(self.labels):
            raise ConfigError(f"task.labels = {list(self.labels)} is not allowed: a label stands twice")
        for name in ("label_column", "head", "pooling"):
            if getattr(self, name) is None:
                raise ConfigError(f"task.{name} = null is not allowed with task.kind=classification")
        for name in ("prompt", "writing"):
            if getattr(self, name) is not None:
                raise ConfigError(f"task.{name} has no effect with task.kind=classification: null")

    def _check_texts(self) -> None:
        for name in ("head", "pooling"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"task.{name} = {value} has no effect with task.kind={self.kind}: "
                    "a language model has no head (null)"
                )
        if self.labels:
            raise ConfigError(
                f"task.labels has no effect with task.kind={self.kind}: the answers are texts ([])"
            )
        chats = self.label_column is None
        if chats and self.kind != "instructions":
            raise ConfigError("task.label_column = null is not allowed: the column of the texts to write")
        if chats and (self.prompt is not None or self.pair_column is not None):
            raise ConfigError(
                "task.prompt and task.pair_column have no effect without task.label_column: the chats are whole"
            )
        holes = {"{text}": self.text_column, "{pair}": self.pair_column, "{choices}": self.choices_column}
        for hole, column in holes.items():
            if not chats and (hole in (self.prompt or "{text}")) != (column is not None):
                raise ConfigError(
                    f"task.prompt = {self.prompt!r} is not allowed: {hole} stands in it exactly where the task "
                    "has that column"
                )


@dataclass(frozen=True)
class PartitionConfig:
    """How a simulation splits one training table over its clients."""

    kind: Literal["iid", "dirichlet", "natural"]
    column: str
    alpha: Annotated[float, Bounds(gt=0)]
    min_rows: Annotated[int, Bounds(ge=1)]


@dataclass(frozen=True)
class FederationConfig:
    """Who takes part, how often, and what a round needs to count."""

    clients: Annotated[int, Bounds(ge=1)]
    sampled: Annotated[int | None, Bounds(ge=1)]
    rounds: Annotated[int, Bounds(ge=1)]
    min_replies: Annotated[int, Bounds(ge=1)]
    timeout: Annotated[float, Bounds(gt=0)]
    weighting: Literal["auto", "uniform", "samples"]
    upload: Literal["float32", "int8"]
    cpus_per_client: Annotated[int, Bounds(ge=1)]
    gpus_per_client: Annotated[float, Bounds(ge=0)]
    partition: PartitionConfig

    @property
    def sample_size(self) -> int:
        """Clients in a round: `sampled`, or all of them."""
        return self.clients if self.sampled is None else self.sampled

    def __post_init__(self) -> None:
        if self.sample_size > self.clients:
            raise ConfigError(
                f"federation.sampled = {self.sampled} is not allowed: at most federation.clients = {self.clients}"
            )
        if self.min_replies > self.sample_size:
            raise ConfigError(
                f"federation.min_replies = {self.min_replies} is not allowed: "
                f"at most the {self.sample_size} clients of a round"
            )


@dataclass(frozen=True)
class TrainConfig:
    """The local steps. Under DP `batch_size` is the expected size of a Poisson draw.

    `head_lr` is the head's own learning rate; None: `lr`.
    """

    local_steps: Annotated[int | None, Bounds(ge=1)]
    local_epochs: Annotated[float | None, Bounds(gt=0)]
    batch_size: Annotated[int, Bounds(ge=1)]
    micro_batch: Annotated[int, Bounds(ge=1)]
    optimizer: Literal["sgd", "adamw"]
    lr: Annotated[float, Bounds(gt=0, lt=LARGEST_RATE)]
    head_lr: Annotated[float | None, Bounds(gt=0, lt=LARGEST_RATE)]
    momentum: Annotated[float, Bounds(ge=0, lt=1)]
    weight_decay: Annotated[float, Bounds(ge=0, lt=LARGEST_RATE)]
    device: str
    dtype: Literal["auto", "float32", "bfloat16"]
    threads: Annotated[int, Bounds(ge=1)]

    def __post_init__(self) -> None:
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ConfigError("set exactly one of train.local_steps and train.local_epochs (the other: null)")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(
                f"train.momentum = {self.momentum} is not allowed: only with train.optimizer=sgd"
            )

    def steps(self, examples: int) -> int:
        """Local steps of one round on a client that declares `examples` rows."""
        if self.local_steps is not None:
            return self.local_steps
        assert self.local_epochs is not None
        return max(1, math.ceil(self.local_epochs * examples / self.batch_size))


@dataclass(frozen=True)
class PrivacyConfig:
    """The budget of a run: sample-level (epsilon, delta)-DP for every client, add/remove-one row."""

    mode: Literal["dp", "none"]
    epsilon: Annotated[float | None, Bounds(gt=0)]
    delta: Annotated[float | None, Bounds(gt=0, lt=1)]
    clip: Annotated[float | None, Bounds(ge=1e-6, lt=1e6)]
    accountant: Literal["rdp", "prv"]
    randomness: Literal["secure", "fast", "seeded"]
    diagnostics: bool

    @property
    def private(self) -> bool:
        """Whether training is differentially private."""
        return self.mode == "dp"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "clip"):
            value = getattr(self, name)
            if self.private and value is None:
                raise ConfigError(f"privacy.{name} = null is not allowed: privacy=dp needs a number")
            if not self.private and value is not None:
                raise ConfigError(f"privacy.{name} = {value} has no effect with privacy=none: use privacy=dp")
        for name, neutral in (("accountant", "rdp"), ("randomness", "secure"), ("diagnostics", False)):
            value = getattr(self, name)
            if not self.private and value != neutral:
                raise ConfigError(f"privacy.{name} = {value} has no effect with privacy=none: use privacy=dp")


@dataclass(frozen=True)
class MethodConfig:
    """The federated method: `target` is its class below ``strategies.``, `params` what that class reads."""

    name: str
    target: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked.

    `evaluation` says who scores models: the server the global one on public rows, the clients the global and their
    own on their `holdout` share of rows (under DP on public rows), both, or nobody.
    """

    method: MethodConfig
    task: TaskConfig
    model: ModelConfig
    privacy: PrivacyConfig
    federation: FederationConfig
    train: TrainConfig
    evaluation: Literal["server", "client", "both", "none"]
    holdout: Annotated[float, Bounds(gt=0, lt=1)]
    evaluate_every: Annotated[int, Bounds(ge=1)]
    keep_uploads: bool
    tracking: Literal["none", "tensorboard", "wandb", "mlflow"]
    seed: Annotated[int, Bounds(ge=0)]

    @property
    def head(self) -> str | None:
        """Where what trains besides the adapter goes: `task.head`, or ``shared`` for a projector that trains."""
        return "shared" if self.model.projector == "trained" else self.task.head

    @property
    def scores_on_server(self) -> bool:
        """Whether the server scores the global model."""
        return self.evaluation in ("server", "both")

    @property
    def scores_on_clients(self) -> bool:
        """Whether the clients score models."""
        return self.evaluation in ("client", "both")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Type and check a resolved configuration.

        Raises
        ------
        ConfigError
            One line with the key, the value and what is allowed.
        """
        raw = dict(raw)
        method = raw.get("method")
        if not isinstance(method, Mapping) or "_target_" not in method:
            raise ConfigError("method is missing: name one, for example method=fedhsip")
        rest = {k: v for k, v in method.items() if k not in ("_target_", "name", "tuned")}
        raw["method"] = {"name": method.get("name"), "target": method["_target_"], "params": rest}
        return parse(cls, raw, "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``Config.from_dict`` of it gives an equal object."""
        out: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        method = out["method"]
        out["method"] = {"name": method["name"], "_target_": method["target"], **method["params"]}
        return out

    def to_json(self) -> str:
        """Return the canonical text that is hashed and sent to the nodes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read what :meth:`to_json` wrote, with all checks."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError("the configuration is not valid JSON") from None
        if not isinstance(raw, dict):
            raise ConfigError("the configuration is not a JSON object")
        try:
            return cls.from_dict(raw)
        except (OverflowError, RecursionError):
            raise ConfigError("the configuration holds a number or a group of settings without end") from None

    @property
    def hash(self) -> str:
        """SHA-256 of :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


# --- typed parsing -------------------------------------------------------------------------------


def parse(cls: type[T], raw: Any, path: str) -> T:
    """Build the dataclass `cls` from a mapping; every key must be there, none may be left over.

    Parameters
    ----------
    cls : type
        A dataclass whose annotations name the allowed types and whose fields may carry bounds.
    raw : Any
        The mapping to read.
    path : str
        Dotted key of this section, for messages.

    Raises
    ------
    ConfigError
        For an unknown or missing key, a wrong type or a value out of bounds.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} = {raw!r} is not allowed: a group of settings")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in raw:
        if key not in fields:
            raise ConfigError(unknown("key", _join(path, str(key)), [_join(path, f) for f in fields]))
    values = {}
    for name in fields:
        key = _join(path, name)
        if name not in raw:
            raise ConfigError(f"{key} is missing")
        values[name] = _convert(hints[name], raw[name], key)
    return cls(**values)


def unknown(kind: str, value: str, allowed: Iterable[str]) -> str:
    """One line for a name that does not exist, with the nearest match and what is allowed."""
    allowed = sorted(allowed)
    return f"unknown {kind} '{value}'{nearest(value, allowed)} (allowed: {', '.join(allowed)})"


def nearest(value: str, allowed: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `` - did you mean 'x'?`` for the closest name, or nothing where none is close."""
    near = difflib.get_close_matches(value, list(allowed), n=1, cutoff=cutoff)
    return f" - did you mean '{near[0]}'?" if near else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Return `value` as the annotated type; numbers widen from int to float and nothing else changes type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        inner, bounds = args
        typed = _convert(inner, value, key)
        bounds.check(typed, key)
        return typed
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [a for a in args if a is not type(None)]
        return _convert(inner, value, key)
    if dataclasses.is_dataclass(hint):
        return parse(typing.cast(type, hint), value, key)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            choices = [str(a) for a in args]
            hint = nearest(str(value), choices)
            raise ConfigError(f"{key} = {value} is not allowed{hint} (allowed: {', '.join(choices)})")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{key} = {value!r} is not allowed: a list, for example {key}=[a,b]")
        return tuple(_convert(args[0], v, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} = {value!r} is not allowed: a mapping, for example {key}={{a: 1}}")
        return {str(k): _convert(args[1], v, _join(key, str(k))) for k, v in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if (isinstance(value, bool) and hint is not bool) or not isinstance(value, hint):
        text = (
            'a text (YAML reads a bare yes or no as true or false: write "yes")'
            if isinstance(value, bool)
            else "a text"
        )
        names = {int: "a whole number", float: "a number", str: text, bool: "true or false"}
        raise ConfigError(f"{key} = {'null' if value is None else repr(value)} is not allowed: {names[hint]}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{key} = {value} is not allowed: a finite number")
    return value


# --- composition ---------------------------------------------------------------------------------


def options(group: str) -> list[str]:
    """Names that a group accepts, for example every method."""
    return sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml"))


def split_overrides(text: str) -> list[str]:
    """Split the ``overrides`` setting of the run configuration as a shell would."""
    try:
        return shlex.split(text)
    except ValueError as err:
        raise ConfigError(f"overrides = {text!r} is not allowed: {err}") from None


def compose(overrides: Sequence[str] = ()) -> Config:
    """Compose and check the configuration from Hydra overrides such as ``train.lr=0.5``.

    Raises
    ------
    ConfigError
        One line with the value, what is allowed and, for names, the nearest match.
    """
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides, chosen, values = _check_overrides(overrides)
    try:
        with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
            known = _known_keys(tuple(f"{g}={v}" for g, v in chosen.items()))
            for key in values:
                if key not in known:
                    raise ConfigError(unknown("key", key, _siblings(key, known)))
            full = hydra_compose("config", overrides=overrides)
            raw = OmegaConf.to_container(full, resolve=True, throw_on_missing=False)
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"one of the files {_files(chosen)} is not valid YAML{where}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"one of the files {_files(chosen)} is not UTF-8 text") from None
    except (HydraException, OmegaConfBaseException) as err:
        text = " ".join(str(err).split())
        if "Could not override" in text:
            text = text.partition(". To append")[0].partition(" To append")[0] + ": it takes no new keys here"
        raise ConfigError(text) from None
    missing = [k for k, v in _leaves(raw) if v == "???"]
    if missing:
        raise ConfigError(f"{missing[0]} is missing: set it, for example {missing[0]}=VALUE")
    return Config.from_dict(typing.cast(dict[str, Any], raw))


def quoted(key: str, value: str) -> str:
    """Return the override ``key='value'`` for any text."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def _files(chosen: Mapping[str, str]) -> str:
    return ", ".join(["conf/config.yaml", *(f"conf/{group}/{name}.yaml" for group, name in chosen.items())])


def _check_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the overrides as Hydra reads them, the chosen group options, and the keys of all others.

    A value that Hydra's grammar does not read as it stands (``~/rows.csv``, ``a(1).csv``) is quoted for it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    readable: list[str] = []
    chosen: dict[str, str] = {}
    keys: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        try:
            override = parser.parse_override(text)
        except HydraException:
            text = quoted(name, value)
            try:
                if not equals:
                    raise
                override = parser.parse_override(text)
            except HydraException:
                raise ConfigError(
                    f"'{name}{equals}{value}' is not allowed: a setting reads key=value, for example train.lr=0.5"
                ) from None
        readable.append(text)
        key = override.key_or_group
        if override.type is None or override.type.name != "CHANGE" or override.package is not None:
            raise ConfigError(f"'{text}' is not allowed: every key exists already, write {key}=VALUE")
        if override.is_sweep_override():
            raise ConfigError(
                f"'{text}' is not allowed: one value a run; privet run -m takes several (for a list write {key}=[a,b])"
            )
        if key in GROUPS:
            option = str(override.value())
            if option not in options(key):
                raise ConfigError(unknown(key, option, options(key)))
            chosen[key] = option
        else:
            keys.append(key)
    return readable, chosen, keys


@lru_cache(maxsize=64)
def _known_keys(chosen: tuple[str, ...]) -> frozenset[str]:
    """Return the keys that the chosen files have; a sweep asks for the same ones again and again."""
    from hydra import compose as hydra_compose
    from omegaconf import OmegaConf

    plain = hydra_compose("config", overrides=list(chosen))
    return frozenset(_dotted(OmegaConf.to_container(plain, resolve=False)))


def _dotted(node: Any, path: str = "") -> Iterator[str]:
    if path:
        yield path
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _dotted(value, _join(path, str(key)))


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, _join(path, str(key)))
    else:
        yield path, node


def _siblings(key: str, known: Iterable[str]) -> list[str]:
    """Keys worth naming next to a wrong one: those of its own section, else every section's."""
    parent = key.rpartition(".")[0]
    known = list(known)
    same = [k for k in known if k.rpartition(".")[0] == parent]
    if parent and same:
        return same
    leaf = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == leaf]
    return near or [k for k in known if "." not in k]
