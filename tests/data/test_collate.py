"""Tokens: one row's ids are its own, a draw's micro-batches hold every row once, padding is masked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from privet.data.collate import Tokenised, microbatches, pad_batch, tokenise
from privet.data.tasks import Examples

WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{w: i for i, w in enumerate("abcdefgh", start=4)}}


def tokenizer(special: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def rows(texts: list[str], pairs: list[str] | None = None) -> Examples:
    return Examples(texts, pairs, np.arange(len(texts), dtype=np.int64) % 2)


def test_ids_are_cut_and_unpadded() -> None:
    tokens = tokenise(tokenizer(), rows(["a b c d e f", "b", "a z"]), max_length=5)
    assert [ids.tolist() for ids in tokens.ids] == [[2, 4, 5, 6, 3], [2, 5, 3], [2, 4, 1, 3]]
    assert tokens.labels.tolist() == [0, 1, 0]
    assert tokens.lengths.tolist() == [5, 3, 4]
    assert tokens.types is None


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    texts = ["a b", "c d e f g", "h"]
    together = tokenise(tokenizer(), rows(texts), max_length=16).ids
    alone = [tokenise(tokenizer(), rows([text]), max_length=16).ids[0] for text in texts]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


def test_pairs_keep_their_segments() -> None:
    tokens = tokenise(tokenizer(), rows(["a b c d", "a"], ["e", "f g"]), max_length=6)
    assert tokens.types is not None
    assert [ids.tolist() for ids in tokens.ids] == [[2, 4, 5, 3, 8, 3], [2, 4, 3, 9, 10, 3]]
    assert [kind.tolist() for kind in tokens.types] == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    batch = pad_batch(tokens, [1, 0], pad_id=0, device="cpu")
    assert batch["token_type_ids"].shape == batch["input_ids"].shape


def test_text_without_a_token_keeps_its_place() -> None:
    tokens = tokenise(tokenizer(special=False), rows(["a", "\u00a0 \u2003"]), max_length=4)
    assert [ids.tolist() for ids in tokens.ids] == [[4], [1]]


def test_no_rows() -> None:
    assert len(tokenise(tokenizer(), rows([]), max_length=4)) == 0


@pytest.mark.parametrize(("drawn", "size"), [(0, 4), (1, 4), (4, 4), (33, 4), (33, 100), (7, 1)])
def test_microbatches_hold_every_row_once(drawn: int, size: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, 200)
    indices = rng.choice(200, drawn, replace=False)
    batches = microbatches(lengths, indices, size)
    assert len(batches) == -(-drawn // size)
    assert all(1 <= len(batch) <= size for batch in batches)
    flat = np.concatenate(batches) if batches else np.array([], dtype=np.int64)
    assert sorted(flat.tolist()) == sorted(indices.tolist())
    assert (np.diff(lengths[flat]) <= 0).all()


def test_microbatches_of_no_size() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        microbatches(np.ones(3), np.arange(3), 0)


def test_padding_is_on_the_right_and_masked() -> None:
    tokens = Tokenised([np.array([5, 6, 7]), np.array([8]), np.array([0, 9])], np.array([1, 0, 1]))
    batch = pad_batch(tokens, np.array([2, 0]), pad_id=0, device=torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[0, 9, 0], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]  # by length, not by the pad id
    assert batch["labels"].tolist() == [1, 1]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert pad_batch(tokens, [1], 0, "cpu")["input_ids"].tolist() == [[8]]


def test_empty_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        pad_batch(Tokenised([np.array([1])], np.array([0])), [], 0, "cpu")


def test_batch_does_not_alias_the_rows() -> None:
    tokens = Tokenised([np.array([5, 6])], np.array([1]))
    batch = pad_batch(tokens, [0], 0, "cpu")
    batch["input_ids"].zero_()
    batch["labels"].zero_()
    assert tokens.ids[0].tolist() == [5, 6]
    assert tokens.labels.tolist() == [1]
