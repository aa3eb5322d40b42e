"""Uploads in 8 bits a number (``federation.upload=int8``).

Every array x travels as whole numbers from 0 to 254 and one float32 scale a line:

    scale = max |x| / 127,    code = round(x / scale) + 127,    x^ = scale (code - 127)

so that ``|x - x^| <= scale / 2 = max |x| / 254`` for every number of the line (rounding is to the nearest). A
matrix has its lines along the longer side, r of them for a LoRA factor: the numbers of one rank-one component share a
scale. A vector is one line. What is coded is what would have been sent, so under DP the code is post-processing of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from privet.errors import Refusal
from privet.wire import Arrays, Payload

_SCALE = ":scale"  # no parameter of a model has a colon in its name
_LARGEST = 127


@dataclass(frozen=True)
class Decoded(Payload):
    """A payload that came in 8 bits: the numbers as they are read, the bytes as they were sent.

    Attributes
    ----------
    sent : Payload
        Codes and scales.
    error : float
        Bound on ``|x - x^| / |x^|`` over all numbers together, from the scales alone.
    """

    sent: Payload = field(default_factory=Payload)
    error: float = 0.0

    def bytes(self) -> dict[str, int]:
        """Count bytes of array data by part, as they were sent."""
        return self.sent.bytes()


def encode(payload: Payload) -> Payload:
    """Return codes (uint8, shaped as the arrays) and scales of the adapter and the head; one-off material as it is.

    Numbers must be finite.
    """
    return Payload(_encode(payload.adapter), _encode(payload.head), payload.once)


def decode(payload: Payload) -> Decoded:
    """Undo :func:`encode`, up to rounding.

    Raises
    ------
    Refusal
        Kind ``"malformed"`` where codes and scales do not belong together.
    """
    squares = errors = 0.0
    parts: list[Arrays] = []
    for arrays in (payload.adapter, payload.head):
        found: Arrays = {}
        for name in _names(arrays):
            codes, scale = arrays[name], arrays[name + _SCALE]
            _check(name, codes, scale)
            values = _spread(scale, codes.shape) * (codes.float() - _LARGEST)
            found[name] = values
            squares += float(values.double().square().sum())
            each = codes.numel() // max(1, scale.numel())
            errors += each * float((scale.double() / 2).square().sum())
        parts.append(found)
    error = math.sqrt(errors / squares) if squares else 0.0
    return Decoded(parts[0], parts[1], payload.once, sent=payload, error=error)


def coded_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes that arrays of these shapes take in 8 bits, scales included."""
    return sum(math.prod(s) + 4 * _lines(s) for s in shapes.values())


def _encode(arrays: Arrays) -> Arrays:
    out: Arrays = {}
    for name, value in arrays.items():
        value = value.detach().cpu().float()
        lines = _as_lines(value)
        scale = lines.abs().amax(1) / _LARGEST if lines.numel() else lines.new_zeros(len(lines))
        # A line of zeros, or of numbers so small that their scale is zero, is coded as zeros.
        divisor = _spread(scale.where(scale > 0, torch.inf), value.shape)
        codes = (value / divisor).round().clamp(-_LARGEST, _LARGEST) + _LARGEST
        out |= {name: codes.to(torch.uint8), name + _SCALE: scale}
    return out


def _names(arrays: Arrays) -> list[str]:
    names = [n for n, v in arrays.items() if v.dtype == torch.uint8]
    if set(arrays) != {*names, *(n + _SCALE for n in names)}:
        raise Refusal("malformed", "the upload is not made of 8-bit arrays, each with its scales")
    return names


def _check(name: str, codes: Tensor, scale: Tensor) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != (_lines(tuple(codes.shape)),):
        raise Refusal("malformed", f"array '{name[:80]}' has not one scale a line")
    if codes.numel() and int(codes.max()) > 2 * _LARGEST:
        raise Refusal("malformed", f"array '{name[:80]}' holds a code beyond {2 * _LARGEST}")
    if bool((scale < 0).any()):
        raise Refusal("malformed", f"array '{name[:80]}' has a negative scale")


def _turned(shape: tuple[int, ...]) -> bool:
    """Whether the lines of an array are its columns."""
    return len(shape) == 2 and shape[0] > shape[1]


def _lines(shape: tuple[int, ...]) -> int:
    return 1 if len(shape) < 2 else shape[1] if _turned(shape) else shape[0]


def _as_lines(value: Tensor) -> Tensor:
    """View an array as (lines, numbers of a line)."""
    shape = tuple(value.shape)
    return (value.t() if _turned(shape) else value).reshape(_lines(shape), -1)


def _spread(scale: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return the scale of every number, broadcastable to the array."""
    shape = tuple(shape)
    if len(shape) < 2:
        return scale.reshape([1] * len(shape))
    return scale if _turned(shape) else scale.reshape(-1, *[1] * (len(shape) - 1))
