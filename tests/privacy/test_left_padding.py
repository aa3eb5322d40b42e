"""Language models padded on the left, as while they write: per-example gradients are still those of batches of one."""

from __future__ import annotations

import pytest
import torch

from privet.losses import IGNORE
from tests.privacy.families import (
    Batch,
    NoFloat32,
    assert_equal,
    batches_of_one,
    clipped_sum,
    engine_sum,
    loss_of,
    make_batch,
    make_model,
    norms_of,
)


def to_the_left(batch: Batch) -> Batch:
    """Move every row's padding in front of it; positions count from the row's first token."""
    width = batch["input_ids"].shape[1]
    out = {name: torch.full_like(value, IGNORE if name == "labels" else 0) for name, value in batch.items()}
    out["position_ids"] = torch.zeros_like(batch["input_ids"])
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        for name, value in batch.items():
            out[name][row, width - length :] = value[row, :length]
        out["position_ids"][row, width - length :] = torch.arange(length)
        out["labels"][row, width - length] = IGNORE  # else it would be predicted from padding
    return out


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma", "gemma2"])
def test_padding_on_the_left_changes_no_gradient(family: str) -> None:
    with NoFloat32():
        model, batch = make_model(family), make_batch(family=family)
        samples = batches_of_one(model, batch, loss_of(family))
        norms = norms_of(samples)
        clip = float(norms[norms > 0].median())
        got_norms, got = engine_sum(model, to_the_left(batch), clip, loss_of(family))
        torch.testing.assert_close(got_norms, norms, rtol=1e-9, atol=1e-9)
        assert_equal(got, clipped_sum(samples, clip), 1e-9)
