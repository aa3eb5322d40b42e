"""Losses against their definition, one token after the other, and against every neighbour they could depend on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from privet.losses import IGNORE, causal, classification, seq2seq, tokens

B, T, V = 4, 6, 5


def logits(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def labels() -> Tensor:
    """A full row, one with a prompt and padding, one with a single token, one with none."""
    out = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
    out[1, :2] = out[1, 4:] = IGNORE
    out[2, :3] = out[2, 4:] = IGNORE
    out[3] = IGNORE
    return out


def by_hand(values: Tensor, wanted: Tensor, shift: int) -> list[float]:
    """Minus log of the probability of each counted label, averaged over the row, in plain Python."""
    means = []
    for row in range(len(values)):
        found = []
        for t in range(shift, wanted.shape[1]):
            label = int(wanted[row, t])
            if label != IGNORE:
                scores = values[row, t - shift].tolist()
                found.append(math.log(sum(math.exp(s) for s in scores)) - scores[label])
        means.append(sum(found) / len(found) if found else 0.0)
    return means


def test_classification_is_one_cross_entropy_a_row() -> None:
    values, wanted = logits(B, V), torch.tensor([0, 4, 2, 2])
    want = by_hand(values[:, None], wanted[:, None], 0)
    assert classification(values, wanted).tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("loss", "shift"), [(tokens, 0), (seq2seq, 0), (causal, 1)])
def test_mean_over_the_rows_own_tokens(loss: Callable[..., Tensor], shift: int) -> None:
    """Causal models predict the next token; for the others the decoder's input is shifted already."""
    values, wanted = logits(B, T, V), labels()
    got = loss(values, wanted)
    assert got.shape == (B,)
    assert got.tolist() == pytest.approx(by_hand(values, wanted, shift), rel=1e-12)
    assert float(got[3]) == 0
    assert float(got[2]) > 0


@pytest.mark.parametrize("loss", [tokens, causal])
def test_a_row_depends_on_itself_alone(loss: Callable[..., Tensor]) -> None:
    """Rule 1: neither on its neighbours' lengths, nor on the padding of the batch."""
    values, wanted = logits(B, T, V), labels()
    together = loss(values, wanted)
    for row in range(B):
        assert torch.equal(loss(values[row : row + 1], wanted[row : row + 1])[0], together[row])
    padded = torch.nn.functional.pad(wanted, (0, 3), value=IGNORE)
    assert torch.allclose(loss(torch.cat([values, logits(B, 3, V)], 1), padded), together, rtol=1e-14)
    jacobian = torch.autograd.functional.jacobian(lambda v: loss(v, wanted), values)
    for row in range(B):
        others = [i for i in range(B) if i != row]
        assert not bool(jacobian[row, others].any())


@pytest.mark.parametrize("loss", [tokens, causal, seq2seq])
def test_a_row_without_a_token_is_zero_with_a_zero_gradient(loss: Callable[..., Tensor]) -> None:
    values = logits(B, T, V).requires_grad_()
    got = loss(values, torch.full((B, T), IGNORE))
    assert got.tolist() == [0.0] * B
    (gradient,) = torch.autograd.grad(got.sum(), values)
    assert not bool(gradient.any())


def test_a_causal_row_of_one_token_has_nothing_to_predict() -> None:
    values = logits(B, 1, V).requires_grad_()
    got = causal(values, torch.zeros(B, 1, dtype=torch.int64))
    assert got.tolist() == [0.0] * B
    got.sum().backward()
    assert not bool(values.grad.any())


def test_another_label_may_be_the_ignored_one() -> None:
    wanted = labels()
    other = wanted.where(wanted != IGNORE, -1)
    values = logits(B, T, V)
    assert torch.equal(causal(values, other, ignore=-1), causal(values, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Exactly the float32 result on the logits as they are: nothing is rounded to their type again."""
    values, wanted = logits(B, T, V, dtype=dtype), labels()
    for got, want in (
        (causal(values, wanted), causal(values.double(), wanted)),
        (classification(values[:, 0], wanted[:, 3].clamp_min(0)),
         classification(values[:, 0].double(), wanted[:, 3].clamp_min(0))),
    ):  # fmt: skip
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(causal(values, wanted), causal(values.float(), wanted))
    assert causal(values.double(), wanted).dtype == torch.float64
