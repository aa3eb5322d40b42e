"""Rows with images: placeholders, losses and private gradients of every row alone, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from client_app.trainer import Noise, Trainer
from privet.adapters import AdaptedModel, build_model, check_model, load_tokenizer
from privet.answers import Answers
from privet.config import Config, compose
from privet.data.collate import Tokenised
from privet.data.holdout import split_holdout
from privet.data.tasks import load_task
from privet.errors import ConfigError
from privet.kinds.catalogue import kind_of
from privet.kinds.seeing import SeeingKind
from privet.trainables import Factors
from tests.kinds.per_row import Everything, clipped_sums
from tests.kinds.vision import TOKENS, captions_task, questions_task, small_vision

Seen = tuple[Config, AdaptedModel, Tokenised, SeeingKind]


@pytest.fixture
def seen(tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> Callable[..., Seen]:
    """A task's training rows, read by a tiny LLaVA of random weights in float64."""

    def make(*overrides: str, task: list[str] | None = None) -> Seen:
        base = small_vision(tmp_path, make_tokenizer())
        config = compose([*base, *(task or captions_task(tmp_path)), *overrides])
        model = build_model(config)
        model.module.double()
        generator = torch.Generator().manual_seed(1)
        model.load({n: torch.randn(v.shape, generator=generator) * 0.3 for n, v in model.initial().items()})
        kind = kind_of(config)
        assert isinstance(kind, SeeingKind)
        tokenizer = load_tokenizer(config.model)
        rows = kind.tokenise(tokenizer, load_task(config.task).train, config.model.max_length)
        return config, model, rows, kind

    return make


def loss_by_hand(model: AdaptedModel, data: Tokenised, row: int) -> torch.Tensor:
    """Minus the mean log-probability of one row's answer: alone, unpadded, features put in place by hand."""
    assert data.images is not None
    assert data.prompts is not None
    ids, given = torch.from_numpy(data.ids[row]), int(data.prompts[row])
    whole = model.module.backbone
    pixels = torch.from_numpy(data.images.pixels([row])).double()
    tower = whole.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
    projector = whole.model.multi_modal_projector
    features = projector.linear_2(torch.nn.functional.gelu(projector.linear_1(tower)))[0]
    words = whole.get_input_embeddings()(ids.clamp_max(48))
    places = (ids == 48).nonzero()[:, 0]
    assert len(places) == TOKENS
    embedded = words.clone()
    embedded[places] = features
    hidden = whole.model.language_model(inputs_embeds=embedded[None]).last_hidden_state
    scores = whole.lm_head(hidden)[0].log_softmax(-1)
    learnt = [t for t in range(1, len(ids)) if t >= given]
    return -sum(scores[t - 1, ids[t]] for t in learnt) / len(learnt)  # type: ignore[return-value]


def test_an_image_is_its_placeholders_and_the_answer_is_learnt(seen: Callable[..., Seen]) -> None:
    config, _, rows, _ = seen()
    tokenizer = load_tokenizer(config.model)
    assert rows.prompts is not None
    for ids, given in zip(rows.ids, rows.prompts, strict=True):
        assert ids[:TOKENS].tolist() == [48] * TOKENS
        assert tokenizer.decode(ids[TOKENS:given]).split() == ["Where", ":"]
        assert tokenizer.decode(ids[given:]).split()[-2:] == [".", "</s>"]
    assert len(rows) == 24


def test_losses_are_each_rows_own(seen: Callable[..., Seen]) -> None:
    _, model, rows, kind = seen()
    chosen = np.arange(len(rows))
    assert len({len(row) for row in rows.ids}) > 1
    with torch.no_grad():
        got = kind.losses(model.module, kind.collate(rows, chosen, 0, "cpu"))
        want = torch.stack([loss_by_hand(model, rows, i) for i in chosen])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # norm layers work in float32
    assert len({round(float(v), 4) for v in got}) > 12  # of as many images


def test_another_image_in_the_batch_changes_nothing(seen: Callable[..., Seen]) -> None:
    _, model, rows, kind = seen()
    batch = kind.collate(rows, np.arange(6), 0, "cpu")
    other = {**batch, "pixel_values": batch["pixel_values"].clone()}
    other["pixel_values"][3] = torch.randn(3, 16, 16)
    with torch.no_grad():
        one, two = kind.losses(model.module, batch), kind.losses(model.module, other)
    kept = [0, 1, 2, 4, 5]
    torch.testing.assert_close(one[kept], two[kept], rtol=1e-9, atol=0)
    assert float(one[3]) != pytest.approx(float(two[3]))


@pytest.mark.parametrize("projector", ["frozen", "trained"])
def test_a_private_step_clips_every_rows_own_gradient(projector: str, seen: Callable[..., Seen]) -> None:
    """Micro-batches of several lengths against one row at a time; the projector is inside the one clip."""
    config, model, rows, kind = seen(
        f"model.projector={projector}", "train.optimizer=sgd", "train.lr=0.5", "train.head_lr=0.5",
        "train.batch_size=16", "privacy.clip=0.5", "train.micro_batch=5",
    )  # fmt: skip
    names = [*model.spec.lora, *model.spec.head]
    assert len(model.spec.head) == (4 if projector == "trained" else 0)
    assert all("language_model" in t.name for t in model.spec.targets)
    parameters = [model.parameter(n).requires_grad_(True) for n in names]
    losses = (loss_by_hand(model, rows, row) for row in range(len(rows)))
    sums, norms = clipped_sums(losses, parameters, 0.5)
    assert max(norms) > 0.5
    before = [p.detach().clone() for p in parameters]
    trainer = Trainer(model, rows, 0, config.train, config.privacy, kind)
    trainer.train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything(0)))
    for name, parameter, old, total in zip(names, parameters, before, sums, strict=True):
        torch.testing.assert_close(
            parameter.detach(),
            old - 0.5 * total / 16,
            rtol=2e-5,
            atol=1e-8,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_a_question_stands_in_the_prompt(seen: Callable[..., Seen], tmp_path: Path) -> None:
    config, _, rows, _ = seen(task=questions_task(tmp_path))
    assert rows.prompts is not None
    text = load_tokenizer(config.model).decode(rows.ids[0][TOKENS : rows.prompts[0]])
    assert text.split() == ["Where", "is", "there", "?", ":"]


def test_a_text_that_holds_the_mark_is_no_second_image(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    base = small_vision(tmp_path, make_tokenizer())
    config = compose([*base, *questions_task(tmp_path, 2), "task.prompt='Where {image} {text} :'"])
    kind, data = kind_of(config), load_task(config.task).train
    data.texts[0] = "<image> is <image> there {image}"
    assert data.targets is not None
    data.targets[1] = "near <image> ."
    rows = kind.tokenise(load_tokenizer(config.model), data, 24)
    assert [int((ids == 48).sum()) for ids in rows.ids] == [TOKENS, TOKENS]
    assert rows.ids[0][0] != 48
    assert (rows.ids[0][1 : 1 + TOKENS] == 48).all()


def test_no_placeholder_is_cut(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    base = small_vision(tmp_path, make_tokenizer())
    config = compose([*base, *questions_task(tmp_path, 2), "task.prompt='{text} {image} :'"])
    kind, data = kind_of(config), load_task(config.task).train
    data.texts[0] = "is there " * 40
    rows = kind.tokenise(load_tokenizer(config.model), data, 9)
    assert [len(ids) for ids in rows.ids] == [9, 9]
    assert [int((ids == 48).sum()) for ids in rows.ids] == [TOKENS, TOKENS]
    assert not kind.learns(Tokenised(rows.ids[:1], rows.labels[:1], prompts=rows.prompts[:1]))  # type: ignore[index]


def test_all_texts_of_an_image_are_references_for_what_is_written(
    seen: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model, _, kind = seen("task.writing={measures: [bleu], beams: 1, max_tokens: 3, rows: 5}")
    found: list[Any] = []
    monkeypatch.setattr("privet.kinds.language.measure", lambda names, *texts: found.extend(texts) or {})
    data = load_task(config.task).train
    kind.judge(model, load_tokenizer(config.model), data, 24, Answers())
    written, references = found
    assert data.targets is not None
    assert references == [data.targets[2 * i : 2 * i + 2] for i in range(5)]
    alone = data.take([4, 5])  # the third image, whatever stands beside it
    found.clear()
    kind.judge(model, load_tokenizer(config.model), alone, 24, Answers())
    assert found[0] == [written[2]]
    assert len(set(written)) > 1


def test_held_out_rows_share_no_image_with_those_that_train(seen: Callable[..., Seen]) -> None:
    config, _, _, _ = seen("privacy=none", "evaluation=client", "holdout=0.28")
    train, held = split_holdout(config, load_task(config.task).train)
    assert (len(train), len(held)) == (16, 8)  # 7 of 24, and no image cut in two
    assert not set(train.keys) & set(held.keys)


def test_slices_of_an_audit(seen: Callable[..., Seen]) -> None:
    _, model, rows, kind = seen("task.prompt='Where {image} :'")
    batch = kind.collate(rows, np.arange(4), 0, "cpu")
    with torch.no_grad():
        logits, places = kind.predictions(model.module, batch)
    assert set(places) == {"image", "answer", "sequence"}
    assert rows.prompts is not None
    for row in range(4):
        length, given = len(rows.ids[row]), int(rows.prompts[row])
        wanted = {
            "image": range(1, 1 + TOKENS),  # what is predicted while an image is read
            "answer": range(given - 1, length - 1),
            "sequence": range(length - 1),
        }
        for name, mask in places.items():
            assert mask.shape == logits.shape[:2]
            assert mask[row].nonzero()[:, 0].tolist() == list(wanted[name])


def test_refusals(
    seen: Callable[..., Seen], tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    with pytest.raises(ConfigError, match=r"an image alone is 4 tokens"):
        seen("model.max_length=5")
    with pytest.raises(
        ConfigError, match=r"'fc1' of model.lora.targets is model.vision_tower\S+, outside of"
    ):
        seen("model.lora.targets=[q_proj,fc1]")
    with pytest.raises(ConfigError, match="unknown target module 'fc9'"):
        seen("model.lora.targets=[fc9]")
    with pytest.raises(
        ConfigError, match="the tokenizer makes 48 of <image>, and the model's placeholder is 47"
    ):
        seen("model.architecture.image_token_id=47")
    config = compose([*small_vision(tmp_path, make_tokenizer()), *captions_task(tmp_path)])
    check_model(config)
    architecture = {**(config.model.architecture or {}), "image_token_id": 47}
    with pytest.raises(ConfigError, match="the tokenizer makes 48 of <image>"):  # before anything is read
        check_model(replace(config, model=replace(config.model, architecture=architecture)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=tiny_causal"], "needs a model that sees images, for example model=llava"),
        (["model=tiny_causal", "model.projector=frozen"], "needs a model that sees images, which llama is not"),
        (["task=e2e", "task.path=x", "task.test_path=y"], "model.projector = trained has no effect with task.kind"),
        (["task.prompt='Where'"], "{image} stands in it once"),
        (["task.image_column=null"], "task.image_column is missing"),
        (["task.text_column=caption"], "task.kind=captioning has no text to read"),
        (["task.kind=visual_question"], "task.kind=visual_question needs a question"),
        (["task.canaries=4"], "task.canaries is for texts"),
        (["task=e2e", "task.path=x", "task.test_path=y", "task.image_folder=z"], "task.image_folder has no effect"),
        (["model.vision=efficientnet_lite0", "model.projector=frozen"], "has to be trained"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(
    overrides: list[str], words: str, tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    base = [*small_vision(tmp_path, make_tokenizer()), *captions_task(tmp_path, 3, 3)]
    if any(o.startswith(("task=", "model=")) for o in overrides):
        group = "model" if overrides[0].startswith("model=") else "task"
        base = [o for o in base if not o.startswith(f"{group}.") and o != f"{group}=tiny_vision"]
    with pytest.raises(ConfigError) as caught:
        build_model(compose([*base, *overrides]))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tower", "strategy", "tokens"),
    [("clip", "default", 4), ("clip", "full", 5), ("siglip", "default", 3), ("siglip", "full", 4)],
)
def test_how_many_tokens_an_image_is(
    tower: str, strategy: str, tokens: int, seen: Callable[..., Seen]
) -> None:
    """As LLaVA 1.5 has it, and LLaVA-interleave with a tower of SigLIP's make and a Qwen2: the model itself agrees."""
    whole = "model.architecture"
    _, model, rows, kind = seen(
        f"{whole}.vision_config.model_type={tower}_vision_model", f"{whole}.text_config.model_type=qwen2",
        f"{whole}.vision_feature_select_strategy={strategy}",
    )  # fmt: skip
    assert model.spec.image_tokens == tokens
    with torch.no_grad():
        losses = kind.losses(model.module, kind.collate(rows, np.arange(4), 0, "cpu"))
    assert bool(losses.isfinite().all())


def test_a_model_whose_images_differ_in_tokens_is_refused(seen: Callable[..., Seen]) -> None:
    with pytest.raises(ConfigError, match="a model of the type llava_next is not supported with images"):
        seen("model.architecture.model_type=llava_next")


def test_a_projector_with_a_norm_layer_does_not_train(seen: Callable[..., Seen]) -> None:
    vip = ["model.architecture.model_type=vipllava", "model.architecture.vision_feature_layer=[-2,-1]"]
    with pytest.raises(
        ConfigError, match=r"model.projector = trained is not possible: \S+ is no linear layer"
    ):
        seen(*vip)
    _, model, rows, kind = seen(*vip, "model.projector=frozen")
    with torch.no_grad():
        losses = kind.losses(model.module, kind.collate(rows, np.arange(4), 0, "cpu"))
    assert bool(losses.isfinite().all())


def test_rows_that_nobody_wrote_have_one_image_each_and_teach(seen: Callable[..., Seen]) -> None:
    _, model, _, kind = seen("model.projector=trained")
    batch = kind.made_up(model)
    assert (batch["input_ids"] == model.spec.image_token).sum(1).tolist() == [TOKENS, TOKENS]
    losses = kind.losses(model.module, batch)
    assert len(losses) == 2
    assert bool((losses > 0).all())
    assert float(losses[0]) != pytest.approx(float(losses[1]))
