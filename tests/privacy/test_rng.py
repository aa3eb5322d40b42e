"""Randomness: distributions, unpredictability, no repeated noise, bad input."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from privet.errors import ConfigError
from privet.privacy import rng
from privet.privacy.rng import FastRandomness, Randomness, SecureRandomness, SeededRandomness, make_randomness

SOURCES = [SecureRandomness, FastRandomness, lambda: SeededRandomness(7)]
IDS = ["secure", "fast", "seeded"]

torch.set_num_threads(1)


def normal(source: Randomness, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return source.normal(shape, device="cpu", dtype=dtype)


@pytest.mark.parametrize("make", SOURCES, ids=IDS)
def test_normals_are_standard_normal(make: Callable[[], Randomness]) -> None:
    x = normal(make(), 200_000).numpy()
    # Each bound has a probability of about 1e-9 of failing by chance.
    assert abs(x.mean()) < 6.1 / np.sqrt(len(x))
    assert abs(x.var() - 1) < 6.1 * np.sqrt(2 / len(x))
    assert stats.kstest(x, "norm").pvalue > 1e-9
    # Tails are what a wrong transform loses first: P(|x| > 4) = 6.3e-5.
    assert 1 <= (np.abs(x) > 4).sum() <= 45


@pytest.mark.parametrize("make", SOURCES, ids=IDS)
def test_normals_are_independent_of_each_other(make: Callable[[], Randomness]) -> None:
    x = normal(make(), 131_072).numpy()
    # Box-Muller makes the two of a pair from one radius and one angle; their squares would show it first. The
    # halves of a pair lie 32 768 apart.
    for lag in (1, 2, 32_768, 65_536):
        for y in (x, x**2):
            assert abs(np.corrcoef(y[:-lag], y[lag:])[0, 1]) < 6.1 / np.sqrt(len(x) - lag)


@pytest.mark.parametrize("make", SOURCES, ids=IDS)
def test_uniforms_are_uniform(make: Callable[[], Randomness]) -> None:
    u = make().uniform(200_000)
    assert u.dtype == np.float64
    assert u.shape == (200_000,)
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-9


def test_secure_uniforms_have_53_bits() -> None:
    k = SecureRandomness().uniform(10_000) * 2.0**53
    assert (k == np.floor(k)).all()
    # Also the lowest of the 53 bits is a fair coin; a 32-bit uniform has zeros there.
    assert abs((k.astype(np.uint64) & np.uint64(1)).mean() - 0.5) < 6.1 * 0.5 / 100


def test_secure_is_aes_256_ctr_and_box_muller(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    monkeypatch.setattr(rng.os, "urandom", lambda n: key[:n])
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(64))
    ints = np.frombuffer(stream, "<u8") >> 11
    assert SecureRandomness().uniform(8).tolist() == (ints / 2**53).tolist()
    u1, u2 = (ints[:4].astype(float) + 1) / 2**53, ints[4:] / 2**53
    want = np.concatenate([np.sqrt(-2 * np.log(u1)) * f(2 * np.pi * u2) for f in (np.cos, np.sin)])
    np.testing.assert_allclose(normal(SecureRandomness(), 8).numpy(), want, rtol=1e-12)


def test_extreme_bits_give_finite_normals(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SecureRandomness()
    for bits in (0, 2**53 - 1):
        monkeypatch.setattr(source, "_integers", lambda n, bits=bits: np.full(n, bits, dtype=np.uint64))
        x = normal(source, 4)
        assert torch.isfinite(x).all()
        assert x.abs().max() < 8.6


@pytest.mark.parametrize("make", SOURCES[:2], ids=IDS[:2])
def test_instances_and_calls_never_repeat(make: Callable[[], Randomness]) -> None:
    a, b = make(), make()
    drawn = torch.cat([normal(a, 500), normal(a, 500), normal(b, 500), normal(make(), 500)])
    assert len(torch.unique(drawn)) == 2000


@pytest.mark.parametrize("make", SOURCES[:2], ids=IDS[:2])
def test_seeding_numpy_and_torch_changes_nothing(make: Callable[[], Randomness]) -> None:
    def draw() -> list[float]:
        torch.manual_seed(0)
        np.random.seed(0)
        return [*normal(make(), 4).tolist(), *make().uniform(4)]

    assert not set(draw()) & set(draw())


def test_torch_generator_is_not_consumed() -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    for make in SOURCES:
        normal(make(), 10)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("make", SOURCES[:2], ids=IDS[:2])
def test_a_forked_process_does_not_repeat_the_noise(make: Callable[[], Randomness]) -> None:
    source = make()
    source.uniform(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, source.uniform(16).tobytes())
        os._exit(0)
    os.waitpid(pid, 0)
    child = np.frombuffer(os.read(read, 128))
    os.close(read)
    os.close(write)
    assert len(child) == 16
    assert not set(child) & set(source.uniform(16))


@pytest.mark.parametrize("make", SOURCES[:2], ids=IDS[:2])
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_private_source_cannot_be_copied(
    make: Callable[[], Randomness], clone: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError, match="must not be copied"):
        clone(make())


@pytest.mark.parametrize("make", SOURCES, ids=IDS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5, 1), (65_537,), (3, 0)])
def test_every_shape(make: Callable[[], Randomness], shape: tuple[int, ...]) -> None:
    x = normal(make(), *shape)
    assert x.shape == shape
    assert torch.isfinite(x).all()
    assert len(torch.unique(x)) == x.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_are_rounded_once_from_float64(dtype: torch.dtype) -> None:
    wide, narrow = normal(SeededRandomness(1), 64), normal(SeededRandomness(1), 64, dtype=dtype)
    assert narrow.dtype == dtype
    assert torch.equal(wide.to(dtype), narrow)


@pytest.mark.parametrize("make", SOURCES, ids=IDS)
def test_noise_of_an_integer_type_is_refused(make: Callable[[], Randomness]) -> None:
    with pytest.raises(TypeError, match=r"torch\.int64"):
        normal(make(), 2, dtype=torch.int64)


def test_seeded_follows_the_seed() -> None:
    assert torch.equal(normal(SeededRandomness(5), 9), normal(SeededRandomness(5), 9))
    assert not torch.equal(normal(SeededRandomness(5), 9), normal(SeededRandomness(6), 9))


def test_seeds_beyond_32_bits_differ() -> None:
    # PyTorch's CPU generator would give the same numbers for both.
    assert not torch.equal(normal(SeededRandomness(5), 9), normal(SeededRandomness(5 + 2**32), 9))


def test_make_randomness() -> None:
    assert isinstance(make_randomness("secure"), SecureRandomness)
    assert isinstance(make_randomness("fast", None), FastRandomness)
    assert torch.equal(normal(make_randomness("seeded", 5), 3), normal(SeededRandomness(5), 3))


@pytest.mark.parametrize(
    ("kind", "seed", "match"),
    [
        ("seeded", None, "needs a seed"),
        ("seeded", -1, "seed = -1"),
        ("secure", 1, "takes no seed"),
        ("fast", 0, "takes no seed"),
        ("torch", None, "privacy.randomness = torch is not allowed .*secure, fast, seeded"),
    ],
)
def test_bad_requests(kind: str, seed: int | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_randomness(kind, seed)
