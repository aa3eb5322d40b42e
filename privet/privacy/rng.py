"""Where noise and sampling draws come from.

Differential privacy holds against everyone who cannot predict these numbers, so under DP they come from the
node's own entropy and never from a seed that another party knows. They do not come from PyTorch's CPU
generator either: it keeps only 32 bits of its seed, few enough to try them all.

All normals are drawn in float64 and rounded once to the type that is asked for. Rounding from the dense
float64 grid leaves no reachable-value gaps in the bulk of float32, which is what the attack of Mironov (2012,
"On significance of the least significant bits for differential privacy") looks for; it does not make
floating-point noise a discrete mechanism, and the accountants assume real numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from privet.errors import ConfigError

KINDS = ("secure", "fast", "seeded")

_UNIT = 2.0**-53  # spacing of the uniforms: every one of them is exact in float64
_BLOCK = 1 << 15  # pairs of normals made at a time, so that the work stays in the processor's cache


class Randomness(Protocol):
    """A source of the draws that privacy rests on."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Return independent standard normals of `shape` on `device`, drawn in float64, rounded once."""
        ...

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return `n` independent uniforms in [0, 1), shape ``(n,)``."""
        ...


class _OneProcess:
    """Keeps a generator's state in one process and in one object.

    A forked or copied generator repeats its numbers, and the difference of two releases that share their
    noise is exact. A fork therefore gets fresh entropy, and copying or pickling is refused.
    """

    def __init__(self, renew: Callable[[], None]) -> None:
        self._renew = renew
        self._pid = os.getpid()
        renew()

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._renew()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} must not be copied or pickled: a copy would repeat its noise")


class SecureRandomness(_OneProcess):
    """Cryptographic generator: AES-256 in counter mode under a fresh key from the operating system.

    Every instance draws its own 256-bit key and runs the counter from zero, so that no two instances share a
    block. Uniforms have 53 bits. Normals are Box-Muller in float64; the largest that 53 bits can express is
    8.57 standard deviations, beyond which a true normal falls with probability 1e-17.
    """

    def __init__(self) -> None:
        self._stream: CipherContext
        super().__init__(self._fresh_key)

    def _fresh_key(self) -> None:
        # The nonce may be constant because the key never serves a second stream.
        self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def _integers(self, n: int) -> NDArray[np.uint64]:
        """Return `n` uniform integers in [0, 2**53)."""
        words = np.frombuffer(self._stream.update(bytes(8 * n)), dtype=np.uint64)
        return words >> np.uint64(11)

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return `n` independent uniforms in [0, 1), multiples of 2**-53."""
        self._guard()
        return np.multiply(self._integers(n), _UNIT, dtype=np.float64)

    def normal(self, shape: Sequence[int], *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Return independent standard normals; see :class:`Randomness`."""
        self._guard()
        n = math.prod(shape)
        out = np.empty(n + n % 2)
        for start in range(0, len(out), 2 * _BLOCK):
            self._box_muller(out[start : start + 2 * _BLOCK])
        return _as_tensor(out[:n], shape, device, dtype)

    def _box_muller(self, out: NDArray[np.float64]) -> None:
        """Fill `out`, of even length, with standard normals."""
        pairs = len(out) // 2
        bits = self._integers(2 * pairs)
        # In (0, 1], so that the logarithm is finite: (k + 1) * 2**-53 is exact for every k < 2**53.
        radius = (bits[:pairs] + np.uint64(1)) * _UNIT
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        # PyTorch's vectorised sine and cosine are five times faster than NumPy's in float64.
        angle = torch.from_numpy(bits[pairs:] * (2.0 * math.pi * _UNIT))
        np.multiply(radius, torch.cos(angle).numpy(), out=out[:pairs])
        np.multiply(radius, torch.sin(angle).numpy(), out=out[pairs:])


class FastRandomness(_OneProcess):
    """NumPy's PCG64DXSM seeded with 256 fresh bits from the operating system.

    Unpredictable to those who do not hold its state, but not a cryptographic generator: someone who sees
    enough raw output may recover it. Choose it for speed, knowingly.
    """

    def __init__(self) -> None:
        self._generator: np.random.Generator
        super().__init__(self._fresh_seed)

    def _fresh_seed(self) -> None:
        seed = np.random.SeedSequence(int.from_bytes(os.urandom(32)), pool_size=8)
        self._generator = np.random.Generator(np.random.PCG64DXSM(seed))

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return `n` independent uniforms in [0, 1)."""
        self._guard()
        return self._generator.random(n)

    def normal(self, shape: Sequence[int], *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Return independent standard normals; see :class:`Randomness`."""
        self._guard()
        return _as_tensor(self._generator.standard_normal(math.prod(shape)), shape, device, dtype)


class SeededRandomness:
    """Reproducible draws for simulation: whoever knows the seed knows the noise, so nothing is private.

    Parameters
    ----------
    seed : int
        Not negative. Equal seeds give equal draws.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ConfigError(f"seed = {seed} is not allowed: at least 0")
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return `n` uniforms in [0, 1) that follow from the seed."""
        return self._generator.random(n)

    def normal(self, shape: Sequence[int], *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Return standard normals that follow from the seed; see :class:`Randomness`."""
        return _as_tensor(self._generator.standard_normal(math.prod(shape)), shape, device, dtype)


def make_randomness(kind: str, seed: int | None = None) -> Randomness:
    """Return a new source of randomness.

    Parameters
    ----------
    kind : {"secure", "fast", "seeded"}
        `seeded` is for simulation only; the caller marks such a run "not private".
    seed : int, optional
        For `seeded` only.

    Raises
    ------
    ConfigError
        For an unknown kind, for `seeded` without a seed, and for a seed where it would have no effect.
    """
    if kind not in KINDS:
        raise ConfigError(f"privacy.randomness = {kind} is not allowed (allowed: {', '.join(KINDS)})")
    if kind == "seeded":
        if seed is None:
            raise ConfigError("privacy.randomness = seeded needs a seed")
        return SeededRandomness(seed)
    if seed is not None:
        raise ConfigError(f"privacy.randomness = {kind} takes no seed: it uses the node's own entropy")
    return SecureRandomness() if kind == "secure" else FastRandomness()


def _as_tensor(
    values: NDArray[np.float64], shape: Sequence[int], device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    if not dtype.is_floating_point:
        raise TypeError(f"noise of type {dtype} is not allowed: a floating-point type")
    return torch.from_numpy(values).reshape(tuple(shape)).to(dtype).to(device)
