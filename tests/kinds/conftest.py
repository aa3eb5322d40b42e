"""A tokenizer of a few dozen words, and tables for language models to learn from."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAMES, AREAS = ["Aldo", "Bibo", "Cora", "Dino"], ["river", "market", "station"]
WORDS = [
    "<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "name", "area", "is", "near", "Near", "the",
    "there", "Where", "of", "[", "]", ",", ".", "?", ":", "###", "Instruction", "Response", *NAMES, *AREAS,
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}"
    "{% if message.role == 'assistant' %} </s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Words between spaces, one token each; no token to pad with."""

    def make(**settings: str) -> PreTrainedTokenizerFast:
        core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **settings},
        )

    return make


@pytest.fixture
def small_model(tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> list[str]:
    """Overrides of a tiny language model with that tokenizer; its features are worth learning on."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return [
        "model=tiny_causal",
        f"model.tokenizer={tmp_path / 'tokenizer'}",
        "model.architecture.vocab_size=48",
        "model.max_length=32",
    ]


def write_restaurants(path: Path, rows: int) -> Path:
    """Attributes and a sentence that says them; most attribute sets have several sentences."""
    rng = random.Random(0)
    forms = ["{n} is near the {a} .", "Near the {a} there is {n} ."]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["mr", "ref"])
        for _ in range(rows):
            n, a = rng.choice(NAMES), rng.choice(AREAS)
            writer.writerow([f"name [ {n} ] , area [ {a} ]", rng.choice(forms).format(n=n, a=a)])
    return path


def write_chats(path: Path, rows: int) -> Path:
    """A question and its answer a row, and a column to split by."""
    rng = random.Random(0)
    with path.open("w") as stream:
        for _ in range(rows):
            n, a = rng.choice(NAMES), rng.choice(AREAS)
            messages = [
                {"role": "user", "content": f"Where is {n} of the {a} ?"},
                {"role": "assistant", "content": f"Near the {a} ."},
            ]
            stream.write(json.dumps({"messages": messages, "site": a}) + "\n")
    return path


@pytest.fixture
def language_tasks(tmp_path: Path, small_model: list[str]) -> dict[str, list[str]]:
    """Overrides of a run for every kind that trains a language model."""
    tables = {
        "generation": [
            "task=e2e",
            f"task.path={write_restaurants(tmp_path / 'train.csv', 150)}",
            f"task.test_path={write_restaurants(tmp_path / 'test.csv', 30)}",
            "task.writing=null",
        ],
        "instructions": [
            "task=instructions",
            f"task.path={write_chats(tmp_path / 'chats.jsonl', 150)}",
            f"task.test_path={write_chats(tmp_path / 'test.jsonl', 30)}",
            "task.text_column=messages",
            "task.label_column=null",
        ],
    }
    return {k: [*v, "task.labels=[]", "task.test_rows=null", *small_model] for k, v in tables.items()}
