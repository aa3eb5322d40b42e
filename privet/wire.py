"""Everything that crosses the wire: record keys, packing, strict unpacking, counts of numbers and bytes.

A message carries one :class:`Request` or one :class:`Reply`. Arrays travel as float32 (or unsigned integers for
FedHSIP's rule) in three records: ``adapter`` (what the papers count), ``head`` (counted apart) and ``once``
(one-off material). Nothing here is ever unpickled, and no text from a data row has a field to travel in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from torch import Tensor

from privet.code import code_hash as code_hash
from privet.errors import Refusal

Arrays = dict[str, Tensor]
PARTS: tuple[Literal["adapter", "head", "once"], ...] = ("adapter", "head", "once")
_FLOATS = ("adapter", "head")
_DTYPES = {"float32", "uint8", "uint16", "uint32"}
_FORM = "numpy.ndarray"  # the one serialisation of Flower's that is read
_FLAG = re.compile(r"[a-z][a-z-]{0,31}")
_MOST_FLAGS = 8
_LARGEST_SCORE = 1e9
_LARGEST_VALUE = 1e12  # beyond it products of factors overflow, and one reply would end every later round
_SCORE = re.compile(r"(global|personal)\.[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class Payload:
    """Arrays of one message: the adapter's, the head's, and one-off material."""

    adapter: Arrays = field(default_factory=dict)
    head: Arrays = field(default_factory=dict)
    once: Arrays = field(default_factory=dict)

    def numbers(self) -> dict[str, int]:
        """Count numbers by part."""
        return {p: sum(v.numel() for v in getattr(self, p).values()) for p in PARTS}

    def bytes(self) -> dict[str, int]:
        """Count bytes of array data by part, as they are packed."""
        return {p: sum(_to_numpy(v).nbytes for v in getattr(self, p).values()) for p in PARTS}


@dataclass(frozen=True)
class Request:
    """One phase of one round, asked of one node.

    `sigma` is the noise multiplier that the server planned for this node (0 without privacy) and `planned_steps`
    the largest number of local steps that the schedule gives any node with its rows over the whole run.
    `store` is a folder for the node's store; a node that has its own configured ignores it. `met` says that the
    node has answered in this run before, so that a node whose store was lost knows it, and `acknowledged` which was
    the last round whose reply of this node is in the server's state (0: none), for what a node may keep for good.
    """

    run: str
    round: int
    phase: str
    node: str
    config: str
    config_hash: str
    code_hash: str
    store: str
    sigma: float
    planned_steps: int
    met: bool = False
    acknowledged: int = 0
    payload: Payload = field(default_factory=Payload)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what decides the answer: a repeated request has the same one."""
        digest = hashlib.sha256()
        for name in (
            "run",
            "round",
            "phase",
            "node",
            "config_hash",
            "code_hash",
            "sigma",
            "planned_steps",
            "acknowledged",
        ):
            digest.update(f"{name}={getattr(self, name)!r}\n".encode())
        _update(digest, self.payload)
        return digest.hexdigest()


@dataclass(frozen=True)
class Reply:
    """What a node answers. Under DP this is the whitelist: arrays and public constants, nothing else.

    `train_loss` and `grad_norm` are NaN unless the run is non-private or has diagnostics on.
    """

    node: str
    request: str
    config_hash: str
    code_hash: str
    examples: int
    steps: int
    q: float
    sigma: float
    flags: tuple[str, ...] = ()
    train_loss: float = math.nan
    grad_norm: float = math.nan
    payload: Payload = field(default_factory=Payload)


@dataclass(frozen=True)
class Scores:
    """What a node's evaluation came to: public numbers only, keyed ``global.accuracy``, ``personal.loss``, ...

    `examples` is the number of rows that were scored.
    """

    node: str
    request: str
    config_hash: str
    code_hash: str
    examples: int
    values: dict[str, float]


@dataclass(frozen=True)
class Description:
    """A node's public self-description: its name, declared rows, versions and which base weights it has."""

    node: str
    examples: int
    code_hash: str
    versions: dict[str, str]
    weights: str


@dataclass(frozen=True)
class Failed:
    """A refusal or an error of a node: a kind and one line of our own, never an exception's text.

    `uncharged` is true where the node declined before it charged its ledger.
    """

    node: str
    kind: str
    reason: str
    uncharged: bool = False


# --- packing -------------------------------------------------------------------------------------


def pack_request(request: Request) -> RecordDict:
    """Return the content of a request message."""
    return _pack("request", request)


def pack_reply(reply: Reply) -> RecordDict:
    """Return the content of a reply message."""
    return _pack("reply", reply, metrics=("examples", "steps", "q", "sigma", "train_loss", "grad_norm"))


def pack_description(description: Description) -> RecordDict:
    """Return the content of a self-description."""
    names, values = list(description.versions), list(description.versions.values())
    record = ConfigRecord(
        {
            "node": description.node,
            "examples": description.examples,
            "code_hash": description.code_hash,
            "weights": description.weights,
            "version_names": names,
            "version_values": values,
        }
    )
    return RecordDict({"description": record})


def pack_scores(scores: Scores) -> RecordDict:
    """Return the content of a node's scores."""
    facts = {n: getattr(scores, n) for n in ("node", "request", "config_hash", "code_hash", "examples")}
    return RecordDict({"scores": ConfigRecord(facts), "values": MetricRecord(dict(scores.values))})


def pack_failure(failed: Failed) -> RecordDict:
    """Return the content of a refusal."""
    return RecordDict({"failed": ConfigRecord(dataclasses.asdict(failed))})


def _pack(key: str, value: Any, metrics: tuple[str, ...] = ()) -> RecordDict:
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(value):
        if f.name != "payload" and f.name not in metrics:
            item = getattr(value, f.name)
            fields[f.name] = list(item) if isinstance(item, tuple) else item
    content = RecordDict({key: ConfigRecord(fields)})
    if metrics:
        content["metrics"] = MetricRecord({m: getattr(value, m) for m in metrics})
    for part in PARTS:
        arrays = getattr(value.payload, part)
        content[part] = ArrayRecord({n: Array(_to_numpy(v)) for n, v in arrays.items()})
    return content


# --- unpacking -----------------------------------------------------------------------------------


def unpack_request(content: RecordDict) -> Request:
    """Read a request.

    Raises
    ------
    Refusal
        Kind ``"malformed"`` where a record or a field is missing, of another type, or an array is unreadable.
    """
    fields = _fields(content, "request", Request)
    return Request(**fields, payload=_payload(content))


def unpack_reply(content: RecordDict) -> Reply:
    """Read a reply; raises Refusal ``"malformed"`` as :func:`unpack_request` does, and for a flag that is no word."""
    fields = _fields(content, "reply", Reply, also="metrics")
    if len(fields["flags"]) > _MOST_FLAGS or not all(_FLAG.fullmatch(flag) for flag in fields["flags"]):
        raise Refusal("malformed", "a flag is not a short word")
    return Reply(**fields, payload=_payload(content))


def unpack_description(content: RecordDict) -> Description:
    """Read a self-description; raises Refusal ``"malformed"``."""
    record = content.get("description")
    if not isinstance(record, ConfigRecord):
        raise Refusal("malformed", "the description is missing")
    try:
        names, values = record["version_names"], record["version_values"]
        versions = dict(zip(map(str, names), map(str, values), strict=True))  # type: ignore[arg-type]
        return Description(
            node=_typed(record["node"], str, "node"),
            examples=_typed(record["examples"], int, "examples"),
            code_hash=_typed(record["code_hash"], str, "code_hash"),
            versions=versions,
            weights=_typed(record["weights"], str, "weights"),
        )
    except (KeyError, TypeError, ValueError):
        raise Refusal("malformed", "the description lacks a field") from None


def unpack_scores(content: RecordDict) -> Scores:
    """Read a node's scores; raises Refusal ``"malformed"``, and ``"non-finite"`` for a value that is not."""
    record, values = content.get("scores"), content.get("values")
    if not isinstance(record, ConfigRecord) or not isinstance(values, MetricRecord):
        raise Refusal("malformed", "the scores are missing")
    types: dict[str, Any] = dict.fromkeys(("node", "request", "config_hash", "code_hash"), str)
    try:
        facts = {n: _typed(record[n], kind, n) for n, kind in {**types, "examples": int}.items()}
    except KeyError:
        raise Refusal("malformed", "the scores lack a field") from None
    numbers = {str(n): _typed(v, float, "values") for n, v in values.items()}
    if not all(_SCORE.fullmatch(name) for name in numbers):
        raise Refusal("malformed", "a score has a name that is none")
    if not all(math.isfinite(v) for v in numbers.values()):
        raise Refusal("non-finite", "a score is not finite")
    limits = {n: 1.0 if n.endswith("accuracy") else _LARGEST_SCORE for n in numbers}
    if not all(abs(v) <= limits[n] for n, v in numbers.items()):
        raise Refusal("malformed", "a score is larger than it can be")
    return Scores(**facts, values=numbers)


def unpack_failure(content: RecordDict) -> Failed | None:
    """Return the refusal in a reply, or None where there is none."""
    record = content.get("failed")
    if not isinstance(record, ConfigRecord):
        return None
    node, kind, reason = (str(record.get(k, ""))[:500] for k in ("node", "kind", "reason"))
    return Failed(node, kind, " ".join(reason.split()), record.get("uncharged") is True)


_FLOWER_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "the node could not load the app",
    ErrorCode.MESSAGE_UNAVAILABLE: "the message is gone",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "the reply came too late",
    ErrorCode.NODE_UNAVAILABLE: "the node is gone",
    ErrorCode.CLIENT_APP_CRASHED: "the node's client process ended before it answered",
}


def error_of(message: Message) -> Failed | None:
    """Return why a reply message counts as failed, or None if it carries content to unpack."""
    if message.has_error():
        # Flower's own error text may hold an exception of the node, so only its code is kept.
        code = message.error.code
        means = f": {_FLOWER_ERRORS[code]}" if code in _FLOWER_ERRORS else ""
        return Failed("", "flower", f"Flower reports error code {code}{means}")
    return unpack_failure(message.content)


def _fields(content: RecordDict, key: str, cls: type, also: str = "") -> dict[str, Any]:
    record = content.get(key)
    if not isinstance(record, ConfigRecord):
        raise Refusal("malformed", f"the record '{key}' is missing")
    merged: dict[str, Any] = dict(record)
    if also:
        extra = content.get(also)
        if not isinstance(extra, MetricRecord):
            raise Refusal("malformed", f"the record '{also}' is missing")
        merged |= dict(extra)
    out: dict[str, Any] = {}
    types: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "tuple[str, ...]": tuple}
    for f in dataclasses.fields(cls):
        if f.name == "payload":
            continue
        if f.name not in merged:
            raise Refusal("malformed", f"the field '{f.name}' is missing")
        out[f.name] = _typed(merged.pop(f.name), types[str(f.type)], f.name)
    if merged:
        raise Refusal("malformed", f"unexpected field '{sorted(merged)[0][:40]}'")
    return out


def _typed(value: Any, kind: type, name: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, list):
        return tuple(str(v) for v in value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refusal("malformed", f"the field '{name}' is not of type {kind.__name__}")
    return value


def _payload(content: RecordDict) -> Payload:
    parts: dict[str, Arrays] = {}
    for part in PARTS:
        record = content.get(part)
        if not isinstance(record, ArrayRecord):
            raise Refusal("malformed", f"the record '{part}' is missing")
        parts[part] = {name: _to_tensor(name, array) for name, array in record.items()}
    return Payload(**parts)


def _to_numpy(value: Tensor) -> np.ndarray[Any, Any]:
    """Half-precision floats widen to float32, which NumPy has and which holds them exactly."""
    value = value.detach().cpu()
    if value.is_floating_point():
        value = value.float()
    return value.contiguous().numpy()


def _to_tensor(name: str, array: Array) -> Tensor:
    """Read an array; no memory is taken for more than the bytes that came, whatever a header declares."""
    name = name[:80]
    if array.dtype not in _DTYPES:
        raise Refusal("malformed", f"array '{name}' has type {array.dtype[:20]}")
    try:
        if array.stype != _FORM:
            raise ValueError
        stream = BytesIO(array.data)
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError
        shape, turned, kind = np.lib.format.read_array_header_1_0(stream)
        begin, numbers = stream.tell(), math.prod(shape)
    except Exception:  # any fault of foreign bytes is the same fault
        raise Refusal("malformed", f"array '{name}' cannot be read") from None
    if turned or str(kind) != array.dtype or tuple(shape) != tuple(array.shape) or min(shape, default=0) < 0:
        raise Refusal("malformed", f"array '{name}' does not have the declared type and shape")
    if len(array.data) - begin != numbers * kind.itemsize:
        raise Refusal("malformed", f"array '{name}' does not have as many bytes as it declares")
    values = np.frombuffer(array.data, kind, count=numbers, offset=begin)
    return torch.from_numpy(values.reshape(shape).copy())


# --- checks and hashes ---------------------------------------------------------------------------


def check_arrays(arrays: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], part: str) -> None:
    """Refuse missing, extra, misshapen or non-finite arrays by name.

    Raises
    ------
    Refusal
        Kind ``"shape"``, ``"non-finite"`` or ``"magnitude"``.
    """
    for name in arrays:
        if name not in shapes:
            raise Refusal("shape", f"unexpected array '{name[:80]}' in {part}")
    for name, shape in shapes.items():
        if name not in arrays:
            raise Refusal("shape", f"array '{name}' is missing from {part}")
        value = arrays[name]
        if tuple(value.shape) != tuple(shape):
            raise Refusal("shape", f"array '{name}' has shape {tuple(value.shape)}, expected {tuple(shape)}")
        if part in _FLOATS and value.dtype != torch.float32:
            raise Refusal("shape", f"array '{name}' has type {value.dtype}, expected float32")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise Refusal("non-finite", f"array '{name}' holds a value that is not finite")
        if part in _FLOATS and value.numel() and float(value.abs().max()) > _LARGEST_VALUE:
            raise Refusal("magnitude", f"array '{name}' holds a value beyond {_LARGEST_VALUE:g}")


def _update(digest: Any, payload: Payload) -> None:
    for part in PARTS:
        arrays = getattr(payload, part)
        for name in sorted(arrays):
            values = _to_numpy(arrays[name])
            digest.update(f"{part}/{name}/{values.dtype}/{values.shape}\n".encode())
            digest.update(values.tobytes())
