"""What the kinds with images have in common: one image a row, which the prompt holds as placeholders."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from privet.adapters import IMAGE, AdaptedModel
from privet.config import Config
from privet.data.collate import Tokenised
from privet.data.examples import Examples
from privet.errors import ConfigError
from privet.kinds.base import made_up_rows
from privet.kinds.generation import fill
from privet.kinds.language import LanguageKind
from privet.losses import IGNORE
from privet.reader import Reader, RowImages, image_reader

_ENDLESS = 1 << 40


class SeeingKind(LanguageKind):
    """Rows of an image, a prompt and an answer; ``{image}`` in ``task.prompt`` is where the model sees the image.

    Parameters
    ----------
    config : Config
        The run's: how an image is read follows from the model.
    """

    specials: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        super().__init__(config.task.prompt, writing=config.task.writing)
        self._config = config

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the kind for a run."""
        return cls(config)

    def texts(self, tokenizer: Any, examples: Examples) -> tuple[list[str], list[str]]:
        """Return prompts, with one mark for the image, and answers."""
        form = (self._prompt or "").replace("{image}", IMAGE).replace("{choices}", "{pair}")
        return fill(form, examples), list(examples.targets or [])

    def tokenise(self, tokenizer: Any, examples: Examples, max_length: int) -> Tokenised:
        """Return every row as one sequence, cut on the right, in which an image has all its placeholders.

        Where a prompt is too long for that, what stands before the image is cut, and the row teaches nothing.
        """
        reader = image_reader(self._config, tokenizer)
        rows = super().tokenise(tokenizer, examples, _ENDLESS)
        assert rows.prompts is not None
        ids, lengths = [], []
        for row, length in zip(rows.ids, rows.prompts, strict=True):
            given = expand(row[:length], reader, max_length)
            whole = np.concatenate([given, row[length:][row[length:] != reader.mark]])[:max_length]
            ids.append(whole)
            lengths.append(min(len(given), len(whole)))
        images = RowImages(examples.images or [], reader)
        return Tokenised(ids, rows.labels, prompts=np.array(lengths, dtype=np.int64), images=images)

    def collate(
        self, rows: Tokenised, indices: np.ndarray, pad_id: int, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Return a batch as of any language model, and the images of its rows as ``pixel_values``."""
        assert rows.images is not None
        pixels = torch.from_numpy(rows.images.pixels(indices)).to(device)
        return {**super().collate(rows, indices, pad_id, device), "pixel_values": pixels}

    def made_up(self, model: AdaptedModel) -> dict[str, Tensor]:
        """Return a batch of two rows that nobody wrote, an image of noise in front of each."""
        spec, rows = model.spec, made_up_rows(model)
        image = np.full(spec.image_tokens, spec.image_token)
        other = (spec.image_token + 1) % model.vocabulary
        ids = [np.concatenate([image, np.where(row == spec.image_token, other, row)]) for row in rows.ids]
        assert rows.prompts is not None
        rows = replace(rows, ids=ids, prompts=rows.prompts + spec.image_tokens)
        shape = (2, 3, spec.image_size, spec.image_size)
        pixels = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
        batch = super().collate(rows, np.arange(2), 0, model.device)
        return {**batch, "pixel_values": pixels.to(model.device)}

    def predictions(self, module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the predictions behind every token but the last: behind those of the image, of the answer, of all."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        places: dict[str, Tensor] = {
            "image": batch["input_ids"][:, :-1] == cast(int, module.image_token),
            "answer": batch["labels"][:, 1:] != IGNORE,
            "sequence": batch["attention_mask"][:, 1:].bool(),
        }
        return module(**inputs)[:, :-1], places

    def asked(self, prompts: list[str], examples: Examples) -> list[Hashable]:
        """Return what rows share that ask the same: image and prompt."""
        assert examples.images is not None
        return [(image.key, prompt) for image, prompt in zip(examples.images, prompts, strict=True)]

    def given(
        self, tokenizer: Any, prompts: list[str], examples: Examples, max_length: int
    ) -> tuple[list[list[int]], RowImages | None]:
        """Return the tokens of prompts, images expanded, and the images themselves."""
        reader = image_reader(self._config, tokenizer)
        ids = [np.array(row, dtype=np.int64) for row in self.prompt_ids(tokenizer, prompts)]
        whole = [expand(row, reader, max_length)[:max_length].tolist() for row in ids]
        return whole, RowImages(examples.images or [], reader)


def expand(prompt: np.ndarray, reader: Reader, max_length: int) -> np.ndarray:
    """Return a prompt's tokens with all placeholders of its image in the place of the first mark, and no other mark.

    A text of a row may hold the mark too; what it says of an image is nothing that the model may see.

    Raises
    ------
    ConfigError
        If the tokenizer has not written the image as one token.
    """
    marks = np.flatnonzero(prompt == reader.mark)
    if not len(marks):
        raise ConfigError(f"the tokenizer does not write {IMAGE} as one token")
    before = prompt[: marks[0]][: max_length - reader.tokens]
    after = prompt[marks[0] + 1 :]
    return np.concatenate(
        [before, np.full(reader.tokens, reader.token, dtype=np.int64), after[after != reader.mark]]
    )
