from __future__ import annotations

import itertools

import pytest
import torch

from privet.wire import Payload
from strategies.merging import WeightedMean


def test_weighted_mean_worked_out_by_hand() -> None:
    merger = WeightedMean()
    merger.add("a", Payload({"w": torch.tensor([1.0, 2.0])}, {"h": torch.tensor([0.0])}), 1.0)
    merger.add("b", Payload({"w": torch.tensor([5.0, -2.0])}, {"h": torch.tensor([4.0])}), 3.0)
    mean = merger.mean()
    assert mean.adapter["w"].tolist() == [4.0, -1.0]
    assert mean.head["h"].tolist() == [3.0]


def test_the_order_of_replies_does_not_matter_to_the_last_bit() -> None:
    torch.manual_seed(0)
    replies = [(torch.randn(2000) * 10.0**i, 0.1 + abs(i)) for i in (-3, 0, 3, 1)]
    results = []
    for order in itertools.permutations(range(4)):
        merger = WeightedMean()
        for i in order:
            merger.add(str(i), Payload({"w": replies[i][0]}), replies[i][1])
        results.append(merger.mean().adapter["w"])
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_memory_does_not_grow_with_the_number_of_clients() -> None:
    merger = WeightedMean()
    sizes = []
    for client in range(20):
        merger.add(str(client), Payload({"w": torch.ones(1000)}), 1.0)
        sizes.append(sum(t.numel() for pair in merger._sums.values() for t in pair))
    assert sizes == [2000] * 20


def test_equal_replies_are_a_fixed_point() -> None:
    value = torch.randn(100)
    merger = WeightedMean()
    for client in range(7):
        merger.add(str(client), Payload({"w": value}), 0.3)
    assert torch.equal(merger.mean().adapter["w"], value)


def test_weights_must_be_positive() -> None:
    with pytest.raises(ValueError, match="not positive"):
        WeightedMean().add("a", Payload(), 0.0)
