"""Language models' rows: which tokens are read and which are learnt, and a loss that is each example's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from client_app.trainer import Noise, Trainer
from privet.adapters import AdaptedModel, build_model, load_tokenizer
from privet.config import Config, compose
from privet.data.chats import write_chat
from privet.data.collate import Tokenised
from privet.data.examples import Examples
from privet.errors import ConfigError
from privet.kinds.catalogue import kind_of
from privet.kinds.generation import Generation, fill
from privet.kinds.instructions import Instructions
from privet.kinds.language import learnt
from privet.losses import IGNORE
from privet.trainables import Factors
from tests.kinds.conftest import TEMPLATE
from tests.kinds.per_row import Everything, clipped_sums

Make = Callable[..., PreTrainedTokenizerFast]


def rows(texts: list[str], targets: list[str], pairs: list[str] | None = None) -> Examples:
    return Examples(texts, pairs, np.zeros(len(texts), dtype=np.int64), targets=targets)


def parts(tokenizer: Any, tokens: Tokenised, row: int = 0) -> tuple[str, str]:
    """What is read and what is learnt, as text."""
    assert tokens.prompts is not None
    ids, given = tokens.ids[row], int(tokens.prompts[row])
    return tokenizer.decode(ids[:given]), tokenizer.decode(ids[given:])


def test_the_answer_and_its_end_are_learnt(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokens = Generation("{text} :").tokenise(tokenizer, rows(["name [ Aldo ]"], ["Aldo is near ."]), 32)
    assert parts(tokenizer, tokens) == ("name [ Aldo ] :", "Aldo is near . </s>")
    assert learnt(tokens).tolist() == [5]


def test_the_end_is_learnt_where_it_is_the_padding_too(make_tokenizer: Make, small_model: list[str]) -> None:
    config = compose([*small_model, "task=e2e", "task.path=x", "task.test_path=y"])
    tokenizer = load_tokenizer(config.model)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    kind = kind_of(config)
    tokens = kind.tokenise(tokenizer, rows(["name", "Where is Aldo"], ["Aldo", "near the river ."]), 32)
    batch = kind.collate(tokens, np.array([0, 1]), int(tokenizer.pad_token_id), "cpu")
    end = tokenizer.eos_token_id
    assert batch["labels"][0].tolist() == [IGNORE, *tokenizer.encode("Aldo"), end, *[IGNORE] * 5]
    assert batch["labels"][1].tolist() == [*[IGNORE] * 3, *tokenizer.encode("near the river ."), end]
    assert batch["attention_mask"].sum(1).tolist() == [3, 8]
    assert (batch["input_ids"][0, 3:] == end).all()


def test_what_is_too_long_loses_the_end_of_its_answer(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    data = rows(["the the the", "the the the the the"], ["Aldo Bibo Cora", "Aldo"])
    tokens = Generation(None).tokenise(tokenizer, data, 5)
    assert parts(tokenizer, tokens) == ("the the the", "Aldo Bibo")
    assert parts(tokenizer, tokens, 1) == ("the the the the the", "")
    assert learnt(tokens).tolist() == [2, 0]
    kind = Generation(None)
    assert kind.learns(tokens)
    assert not kind.learns(kind.tokenise(tokenizer, data, 3))


def test_texts_go_into_the_prompt_as_they_are() -> None:
    data = rows(["a {pair} {text}", "b"], ["", ""], ["x {text}", ""])
    assert fill("{text} / {pair}!", data) == ["a {pair} {text} / x {text}!", "b / !"]
    assert fill(None, rows(["a"], [""])) == ["a"]


def test_a_chat_is_written_by_the_tokenizers_template(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = [
        {"role": "system", "content": "name"},
        {"role": "user", "content": "Where is Aldo ?"},
        {"role": "assistant", "content": "Near ."},
        {"role": "user", "content": "Where is Bibo ?"},
    ]
    tokens = Instructions(None, chats=True).tokenise(tokenizer, rows([write_chat(chat)], ["there"]), 64)
    asked, learned = parts(tokenizer, tokens)
    assert asked == (
        "<|system|> name <|user|> Where is Aldo ? <|assistant|> Near . </s> <|user|> Where is Bibo ? <|assistant|>"
    )
    assert learned == "there </s>"  # the last answer alone


def test_a_tokenizer_without_a_template_gets_a_plain_one(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    prompts, answers = Instructions("{text}").texts(tokenizer, rows(["Where is Aldo ?"], ["near"]))
    assert prompts == ["<s>### Instruction:\nWhere is Aldo ?\n\n### Response:\n"]
    assert answers == ["near</s>"]


def test_a_chat_that_the_template_cannot_write_teaches_nothing_and_refuses_nothing(
    make_tokenizer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Or whoever chooses the task could ask by it whether some row has a system message."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('secret') }}{% endif %}" + TEMPLATE
    )
    system = write_chat([{"role": "system", "content": "secret"}, {"role": "user", "content": "hello"}])
    plain = write_chat([{"role": "user", "content": "hello"}])
    kind = Instructions(None, chats=True)
    data = kind.tokenise(tokenizer, rows([system, plain], ["world", "world"]), 64)
    assert learnt(data).tolist()[0] == 0
    assert learnt(data).tolist()[1] > 0
    assert "1 of 2 chats" in caplog.text
    assert "secret" not in caplog.text


def test_a_template_that_rewrites_the_question_is_refused(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ConfigError, match="writes a question differently once it is answered"):
        Instructions(None).texts(tokenizer, rows(["a"], ["b"]))
    tokenizer.chat_template = "{{ raise_exception('secret ' + messages[0].content) }}"
    with pytest.raises(ConfigError, match=r"cannot write a chat \(TemplateError\)") as caught:
        Instructions(None).texts(tokenizer, rows(["a"], ["b"]))
    assert "secret" not in str(caught.value)


# --- the loss ---------------------------------------------------------------------------------------


def language_model(small_model: list[str], *overrides: str) -> tuple[Config, AdaptedModel]:
    config = compose([*small_model, "task=e2e", "task.path=x", "task.test_path=y", *overrides])
    model = build_model(config)
    model.module.double()
    generator = torch.Generator().manual_seed(1)
    shapes = {n: torch.randn(v.shape, generator=generator) * 0.3 for n, v in model.initial().items()}
    model.load(shapes)
    return config, model


def ragged(count: int = 9) -> Tokenised:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 30, size=rng.integers(3, 14)) for _ in range(count)]
    prompts = np.array([rng.integers(0, len(row)) for row in ids])
    prompts[0] = len(ids[0])  # nothing to learn
    return Tokenised(ids, np.zeros(count, dtype=np.int64), prompts=prompts)


def loss_by_hand(model: AdaptedModel, data: Tokenised, row: int) -> torch.Tensor:
    """Minus the mean log-probability of one row's answer, alone and unpadded."""
    ids, given = torch.from_numpy(data.ids[row]), int(data.prompts[row])  # type: ignore[index]
    logits = model.module(input_ids=ids[None], attention_mask=torch.ones(1, len(ids), dtype=torch.int64))[0]
    scores = logits.log_softmax(-1)
    places = [t for t in range(1, len(ids)) if t >= given]
    if not places:
        return logits.sum() * 0
    return -sum(scores[t - 1, ids[t]] for t in places) / len(places)  # type: ignore[return-value]


def test_losses_are_each_rows_own(small_model: list[str]) -> None:
    config, model = language_model(small_model)
    data, kind = ragged(), kind_of(config)
    batch = kind.collate(data, np.arange(len(data)), 2, "cpu")
    with torch.no_grad():
        got = kind.losses(model.module, batch)
        want = torch.stack([loss_by_hand(model, data, i) for i in range(len(data))])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # norm layers work in float32
    assert float(got[0]) == 0


def test_a_private_step_clips_every_rows_own_gradient(small_model: list[str]) -> None:
    """Micro-batches of several lengths against one row at a time."""
    config, model = language_model(
        small_model, "train.optimizer=sgd", "train.lr=0.5", "train.batch_size=16", "privacy.clip=0.05",
        "train.micro_batch=4",
    )  # fmt: skip
    data, names = ragged(), list(model.spec.lora)
    parameters = [model.parameter(n).requires_grad_(True) for n in names]
    losses = (loss_by_hand(model, data, row) for row in range(len(data)))
    sums, norms = clipped_sums(losses, parameters, 0.05)
    assert min(norms) == 0
    assert sum(norm > 0.05 for norm in norms) >= 2
    before = [p.detach().clone() for p in parameters]
    trainer = Trainer(model, data, 2, config.train, config.privacy, kind_of(config))
    trainer.train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything(0)))
    for parameter, old, total in zip(parameters, before, sums, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * total / 16, rtol=1e-5, atol=1e-8)


def test_scores_are_over_all_tokens_of_all_answers(small_model: list[str]) -> None:
    config, model = language_model(small_model)
    data, kind = ragged(), kind_of(config)
    with torch.no_grad():
        sums = [float(loss_by_hand(model, data, i)) * int(learnt(data)[i]) for i in range(len(data))]
    scores = kind.score(model, data, 2, 4)
    assert scores["loss"] == pytest.approx(sum(sums) / int(learnt(data).sum()), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(np.exp(scores["loss"]))


def test_an_encoder_is_no_language_model(small_model: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs a causal language model, which bert is not"):
        language_model(["model=tiny_random"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.head=shared"], "task.head = shared has no effect with task.kind=generation"),
        (["task.pooling=mean"], "task.pooling = mean has no effect"),
        (["task.labels=[a,b]"], "task.labels has no effect"),
        (["task.label_column=null"], "task.label_column = null is not allowed"),
        (["task.prompt=say it"], "{text} stands in it exactly where"),
        (["task.prompt='{text} {pair}'"], "{pair} stands in it exactly where"),
        (["task.pair_column=other"], "{pair} stands in it exactly where"),
        (["task=instructions", "task.label_column=null", "task.prompt='{text}'"], "the chats are whole"),
        (["task=sst2", "task.prompt='{text}'"], "task.prompt has no effect with task.kind=classification"),
        (
            ["task=sst2", "task.writing={beams: 1, max_tokens: 4, measures: [], rows: 1}"],
            "task.writing has no effect",
        ),
        (["task=sst2", "task.head=null"], "task.head = null is not allowed"),
    ],
)
def test_settings_that_do_not_fit_the_kind_are_named(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["task=e2e", "task.path=x", "task.test_path=y", *overrides])
    assert words in str(caught.value)
