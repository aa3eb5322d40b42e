"""What a language model writes after a prompt: batches of prompts of similar length, greedily or by beams."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from privet.adapters import AdaptedModel
from privet.answers import Answers
from privet.data.collate import microbatches, padding_id

if TYPE_CHECKING:
    from privet.learners import Writer
    from privet.reader import RowImages

_BATCH = 32

Asked = TypeVar("Asked", bound=Hashable)


def by_prompt(
    prompts: Sequence[Asked], answers: Sequence[str], most: int | None = None
) -> tuple[list[Asked], list[list[str]]]:
    """Return the distinct prompts in their order, at most so many, and the answers of each."""
    found: dict[Asked, list[str]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        found.setdefault(prompt, []).append(answer)
    kept = list(found)[:most]
    return kept, [found[prompt] for prompt in kept]


@torch.no_grad()
def write(
    model: AdaptedModel,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    *,
    beams: int,
    most: int,
    images: RowImages | None = None,
    answers: Answers | None = None,
) -> list[str]:
    """Return a text after every prompt.

    Parameters
    ----------
    model : AdaptedModel
        A language model.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    prompts : sequence of sequence of int
        Tokens of every prompt, at least one each.
    ends : sequence of int
        Tokens that end a text, besides those that the model itself names.
    beams : int
        Beams of the search; 1: greedy.
    most : int
        Most tokens of a text.
    images : RowImages or None
        The image of every prompt, for models that see.
    answers : Answers or None
        What this very model has written before, where the rest is kept, too.
    """
    own = cast(Any, model.module.backbone).generation_config.eos_token_id
    stops = sorted({*ends, *(own if isinstance(own, list) else [own] if own is not None else [])})
    pad = padding_id(tokenizer)
    lengths = np.array([len(ids) for ids in prompts], dtype=np.int64)

    def written(places: list[int]) -> list[str]:
        out = dict.fromkeys(places, "")
        for rows in microbatches(lengths, np.array(places), max(1, _BATCH // beams)):
            width = int(lengths[rows].max())
            ids = torch.full((len(rows), width), pad)
            mask = torch.zeros_like(ids)
            for place, row in enumerate(rows):  # on the left, so that every text begins at the same place
                ids[place, width - lengths[row] :] = torch.tensor(prompts[row])
                mask[place, width - lengths[row] :] = 1
            seen = (
                {}
                if images is None
                else {"pixel_values": torch.from_numpy(images.pixels(rows)).to(model.device)}
            )
            texts = cast("Writer", model.module).generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=False,
                num_beams=beams,
                max_new_tokens=most,
                eos_token_id=stops or None,
                pad_token_id=pad,
                **seen,
            )
            for row, text in zip(rows, texts.cpu(), strict=True):
                out[int(row)] = tokenizer.decode(text, skip_special_tokens=True).strip()
        return list(out.values())

    questions = [
        [list(ids), stops, beams, most, images and images.stamp(row)] for row, ids in enumerate(prompts)
    ]
    return (answers or Answers()).ask(questions, written, at_once=4 * _BATCH, what="writing")
