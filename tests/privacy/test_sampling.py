"""Poisson draws and shuffled batches."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest

from privet.errors import ConfigError, DataError
from privet.privacy.rng import SecureRandomness, SeededRandomness
from privet.privacy.sampling import poisson_draw, sampling_rate, shuffled_batches


def test_rate_is_batch_over_declared_rows() -> None:
    assert sampling_rate(128, 6000) == 128 / 6000
    assert sampling_rate(6, 6) == 1.0


def test_rate_of_a_batch_larger_than_the_data_is_one() -> None:
    assert sampling_rate(64, 6) == 1.0


@pytest.mark.parametrize(("batch", "declared"), [(0, 5), (-1, 5), (4, 0), (4, -3)])
def test_rate_refuses_counts_below_one(batch: int, declared: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        sampling_rate(batch, declared)


def test_every_row_is_drawn_independently_with_probability_q() -> None:
    rng, rows, q, draws = SecureRandomness(), 50, 0.2, 8000
    hits = np.zeros((draws, rows), dtype=bool)
    for i in range(draws):
        hits[i, poisson_draw(rows, q, rng)] = True
    # 6.1 standard deviations: false alarms about 1e-9 a row.
    assert np.abs(hits.mean(0) - q).max() < 6.1 * np.sqrt(q * (1 - q) / draws)
    # The sizes are binomial: their variance is the sum of the rows', which no fixed-size batch has.
    sizes = hits.sum(1)
    assert abs(sizes.var() / (rows * q * (1 - q)) - 1) < 6.1 * np.sqrt(2 / draws)
    correlation = np.corrcoef(hits.T) - np.eye(rows)
    assert np.abs(correlation).max() < 6.5 / np.sqrt(draws)


def test_draws_are_sorted_unique_and_in_range() -> None:
    drawn = poisson_draw(1000, 0.3, SecureRandomness())
    assert drawn.dtype == np.int64
    assert (np.diff(drawn) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < 1000


def test_q_one_takes_every_row() -> None:
    assert poisson_draw(1000, 1.0, SecureRandomness()).tolist() == list(range(1000))


def test_draws_of_a_tiny_client_may_be_empty() -> None:
    rng = SeededRandomness(0)
    sizes = [len(poisson_draw(6, 1 / 6, rng)) for _ in range(60)]
    assert sizes.count(0) > 5
    assert poisson_draw(0, 0.5, rng).tolist() == []


@pytest.mark.parametrize("q", [0.0, -0.1, 1.0001, float("nan")])
def test_draw_refuses_a_rate_outside_its_range(q: float) -> None:
    with pytest.raises(ConfigError, match="q = "):
        poisson_draw(5, q, SeededRandomness(0))


def test_draw_refuses_negative_rows() -> None:
    with pytest.raises(ConfigError, match="rows = -1"):
        poisson_draw(-1, 0.5, SeededRandomness(0))


def test_an_epoch_uses_every_row_once() -> None:
    batches = list(shuffled_batches(10, 4, 6, seed=1))
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(10))
    assert np.concatenate(batches[:3]).tolist() != np.concatenate(batches[3:]).tolist()


def test_batches_follow_the_seed_and_do_not_depend_on_the_number_of_steps() -> None:
    short, long = list(shuffled_batches(10, 4, 3, seed=1)), list(shuffled_batches(10, 4, 7, seed=1))
    assert all(np.array_equal(a, b) for a, b in zip(short, long, strict=False))
    assert not np.array_equal(long[0], next(shuffled_batches(10, 4, 1, seed=2)))


def test_a_batch_larger_than_the_data_is_all_of_it() -> None:
    batches = list(shuffled_batches(3, 8, 2, seed=0))
    assert [sorted(b) for b in batches] == [[0, 1, 2], [0, 1, 2]]


def test_no_steps_no_batches() -> None:
    assert list(shuffled_batches(3, 2, 0, seed=0)) == []


def test_bad_requests_are_refused_before_the_first_batch() -> None:
    with pytest.raises(DataError, match="no rows"):
        shuffled_batches(0, 2, 1, seed=0)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        shuffled_batches(3, 0, 1, seed=0)
    with pytest.raises(ConfigError, match="steps = -1"):
        shuffled_batches(3, 1, -1, seed=0)
    with pytest.raises(ConfigError, match="seed = -1"):
        shuffled_batches(3, 1, 1, seed=-1)


def test_a_row_is_drawn_exactly_when_its_uniform_is_below_q() -> None:
    class Fixed:
        def uniform(self, n: int) -> np.ndarray:
            return np.array([0.0, 0.1999999, 0.2, 0.2000001, 1 - 2.0**-53])[:n]

        def normal(self, *args: object, **kwargs: object) -> NoReturn:
            raise AssertionError("sampling draws no normals")

    assert poisson_draw(5, 0.2, Fixed()).tolist() == [0, 1]
    assert poisson_draw(5, 1.0, Fixed()).tolist() == [0, 1, 2, 3, 4]
