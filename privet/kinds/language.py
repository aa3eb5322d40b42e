"""What the kinds that train a language model have in common: a prompt that is read, an answer that is learnt."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from privet.adapters import AdaptedModel
from privet.answers import Answers
from privet.config import Config, WritingConfig
from privet.data.collate import Tokenised, microbatches, pad_batch
from privet.data.examples import Examples
from privet.kinds.base import TaskKind
from privet.kinds.writing import by_prompt, write
from privet.losses import IGNORE, causal
from privet.measures.texts import check_measures, measure

if TYPE_CHECKING:
    from privet.reader import RowImages

_MOST_LOGITS = 1 << 26
_MOST_NATS = 20.0


class LanguageKind(TaskKind):
    """Rows of a prompt and an answer; the loss is the mean over the answer's own tokens, its end included.

    Parameters
    ----------
    prompt : str or None
        ``task.prompt``.
    chats : bool
        Whether a row is a whole chat, see :mod:`privet.data.chats`.
    writing : WritingConfig or None
        ``task.writing``.
    """

    def __init__(self, prompt: str | None, chats: bool = False, writing: WritingConfig | None = None) -> None:
        self._prompt = prompt
        self._chats = chats
        self._writing = writing

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the kind with the task's prompt and writing."""
        task = config.task
        return cls(task.prompt, task.label_column is None, task.writing)

    @abstractmethod
    def texts(self, tokenizer: Any, examples: Examples) -> tuple[list[str], list[str]]:
        """Return every row's prompt, and what follows it, as the model reads them."""

    @property
    @abstractmethod
    def specials(self) -> bool:
        """Whether the tokenizer puts its own special tokens around; a chat template has them already."""

    def prompt_ids(self, tokenizer: Any, prompts: list[str]) -> list[list[int]]:
        """Return the tokens of prompts: the same while training and while writing."""
        return _encode(tokenizer, prompts, self.specials)

    def tokenise(self, tokenizer: Any, examples: Examples, max_length: int) -> Tokenised:
        """Return prompt and answer of every row as one sequence that is cut on the right."""
        prompts, answers = self.texts(tokenizer, examples)
        given = self.prompt_ids(tokenizer, prompts)
        whole = _encode(tokenizer, [p + a for p, a in zip(prompts, answers, strict=True)], self.specials)
        alone = _encode(tokenizer, answers, specials=False)
        ids, lengths = [], []
        for before, joined, after in zip(given, whole, alone, strict=True):
            # Some tokenizers write a text's first word differently. Where the prompt's tokens stand unchanged in front,
            # what follows them is the answer as the model would write it.
            fits = joined[: len(before)] == before and len(joined) > len(before)
            row = [*before, *(joined[len(before) :] if fits else after)]
            if self.specials:
                row += end_of_text(tokenizer)
            row = row[:max_length] or [0]
            ids.append(np.array(row, dtype=np.int64))
            lengths.append(min(len(before), len(row)))
        return Tokenised(ids, examples.labels, prompts=np.array(lengths, dtype=np.int64))

    def collate(
        self, rows: Tokenised, indices: np.ndarray, pad_id: int, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Return a batch whose labels are its own tokens, without prompt and padding.

        Both are told by their lengths: a tokenizer may pad with the token that ends a text, which is learnt.
        """
        assert rows.prompts is not None
        batch = pad_batch(rows, indices, pad_id, device)
        ids = batch["input_ids"]
        place = torch.arange(ids.shape[1], device=ids.device)
        given = torch.from_numpy(rows.prompts[indices]).to(ids.device)
        counts = (place >= given[:, None]) & batch["attention_mask"].bool()
        batch["labels"] = ids.where(counts, IGNORE)
        return batch

    def losses(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross entropy over every example's own answer."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return causal(module(**inputs), batch["labels"])

    def predictions(self, module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the predictions of every token but the first: those of the answer, and those of the whole sequence."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        answer, whole = batch["labels"][:, 1:] != IGNORE, batch["attention_mask"][:, 1:].bool()
        return module(**inputs)[:, :-1], {"answer": answer, "sequence": whole}

    def learns(self, rows: Tokenised) -> bool:
        """Whether any row has a token of an answer behind at least one other token."""
        return bool((learnt(rows) > 0).any())

    @torch.no_grad()
    def score(self, model: AdaptedModel, rows: Tokenised, pad_id: int, size: int) -> dict[str, float]:
        """Return the mean cross entropy over all tokens of all answers, and its exponential."""
        tokens = learnt(rows)
        widest = int(rows.lengths.max(initial=1)) * model.vocabulary
        total = 0.0
        for batch in microbatches(
            rows.lengths, np.arange(len(rows)), max(1, min(size, _MOST_LOGITS // widest))
        ):
            losses = self.losses(model.module, self.collate(rows, batch, pad_id, model.device))
            total += float(losses.double().cpu() @ torch.from_numpy(tokens[batch]).double())
        loss = total / max(1, int(tokens.sum()))
        return {"loss": loss, "perplexity": math.exp(min(loss, _MOST_NATS))}

    def check(self) -> None:
        """Raise ConfigError where a measure cannot be computed here."""
        if self._writing is not None:
            check_measures(self._writing.measures)

    def judge(
        self, model: AdaptedModel, tokenizer: Any, examples: Examples, max_length: int, answers: Answers
    ) -> dict[str, float]:
        """Let the model answer every distinct prompt, and measure that against all of the prompt's answers."""
        if self._writing is None:
            return {}
        prompts = self.texts(tokenizer, examples)[0]
        asked = self.asked(prompts, examples)
        distinct, references = by_prompt(asked, examples.targets or [], self._writing.rows)
        first = {key: row for row, key in reversed(list(enumerate(asked)))}
        rows = [first[key] for key in distinct]
        given, images = self.given(tokenizer, [prompts[i] for i in rows], examples.take(rows), max_length)
        ends = end_of_text(tokenizer)
        written = write(
            model,
            tokenizer,
            given,
            ends,
            beams=self._writing.beams,
            most=self._writing.max_tokens,
            images=images,
            answers=answers,
        )
        return measure(self._writing.measures, written, references)

    def asked(self, prompts: list[str], examples: Examples) -> list[Hashable]:
        """Return what rows share that ask the same: the prompt."""
        return list(prompts)

    def given(
        self, tokenizer: Any, prompts: list[str], examples: Examples, max_length: int
    ) -> tuple[list[list[int]], RowImages | None]:
        """Return the tokens of prompts, and the images of their rows; None where there are none."""
        return [ids[:max_length] for ids in self.prompt_ids(tokenizer, prompts)], None


def learnt(rows: Tokenised) -> np.ndarray:
    """Return how many tokens of every row count in its loss, (n,); a first token is never predicted."""
    assert rows.prompts is not None
    return np.maximum(rows.lengths - np.maximum(rows.prompts, 1), 0)


def end_of_text(tokenizer: Any) -> list[int]:
    """Return the token that ends a text, in a list; none where the tokenizer has none."""
    known = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return [next(token for token in known if token is not None)] if any(t is not None for t in known) else []


def _encode(tokenizer: Any, texts: list[str], specials: bool) -> list[list[int]]:
    if not texts:
        return []
    return list(
        tokenizer(
            texts,
            add_special_tokens=specials,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    )
