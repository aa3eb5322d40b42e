"""Tiny random models of every family that users bring, ragged batches for them, and gradients the slow way.

One table for all tests of the engine. Nothing here knows how the engine works: per-example gradients come from
batches of one without padding, and from merged weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    CLIPVisionConfig,
    DistilBertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MPNetConfig,
    OPTConfig,
    Qwen2Config,
    RobertaConfig,
    T5Config,
)
from transformers.pytorch_utils import Conv1D

from privet.losses import IGNORE, causal, classification, seq2seq
from privet.privacy.engine import GradientEngine
from privet.privacy.low_rank import WeightProduct
from privet.privacy.parts import ProjectedParameters

Batch = dict[str, Tensor]
Gradients = dict[str, Tensor]
Loss = Callable[..., Tensor]

VOCAB, LENGTHS = 50, (7, 3, 5, 1)
IMAGE, PATCHES = VOCAB - 1, 4  # the placeholder token of an image, and how many of them an image has
SCALING = 3.0  # alpha 6, r 2

ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {**DECODER, "head_dim": 6}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": VOCAB, "dim": 12, "hidden_dim": 20, "n_layers": 2, "n_heads": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
OPT = {
    "vocab_size": VOCAB, "hidden_size": 12, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16, "word_embed_proj_dim": 12, "dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 4, "relative_attention_max_distance": 6, "dropout_rate": 0.0,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
LLAVA = {
    "vision_config": CLIPVisionConfig(
        hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=8,
        patch_size=4, attention_dropout=0.0,
    ),
    "text_config": LlamaConfig(**DECODER),
    "image_token_id": IMAGE,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A base model, what its adapter is on, and what it is trained for.

    Attributes
    ----------
    config : PretrainedConfig
        Tiny.
    head : class
        With ``from_config`` or, of a class of its own, a constructor.
    kind : str
        Key of `BATCHES` and `LOSSES`.
    targets : list of str or str
        LoRA's target modules.
    whole : list of str
        Layers trained whole.
    """

    config: Any
    head: Any
    kind: str
    targets: list[str] | str
    whole: list[str] = field(default_factory=list)


CLASSIFY, CAUSAL, SEQ2SEQ = (
    AutoModelForSequenceClassification,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)
LINEARS = ["q_proj", "v_proj", "down_proj"]
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"

FAMILIES: dict[str, Family] = {
    "bert": Family(BertConfig(**ENCODER), CLASSIFY, "class", ["query", "value"], ["classifier"]),
    "roberta": Family(RobertaConfig(**ENCODER), CLASSIFY, "class", ["query", "value"], ["classifier"]),
    "mpnet": Family(MPNetConfig(**ENCODER), CLASSIFY, "class", ["q", "v", "o"], ["classifier"]),
    "distilbert": Family(
        DistilBertConfig(**DISTILBERT), CLASSIFY, "class", ["q_lin", "v_lin"], ["pre_classifier", "classifier"]
    ),
    # One layer that is run twice, adapter included.
    "albert": Family(AlbertConfig(**ENCODER, embedding_size=8, classifier_dropout_prob=0.0), CLASSIFY, "class",
                     ["query", "ffn"], ["classifier"]),
    "gpt2": Family(GPT2Config(**GPT2), CAUSAL, "causal", ["c_attn", "c_proj"]),
    "gpt2-conv1d": Family(GPT2Config(**GPT2), CLASSIFY, "class", ["c_fc"], ["c_attn", "score"]),
    "llama": Family(LlamaConfig(**DECODER), CAUSAL, "causal", LINEARS),
    "llama-classifier": Family(LlamaConfig(**DECODER, num_labels=3), CLASSIFY, "class",
                               ["q_proj", "v_proj"], ["score"]),
    "qwen2": Family(Qwen2Config(**DECODER), CAUSAL, "causal", LINEARS, ["lm_head"]),
    "gemma": Family(GemmaConfig(**GEMMA), CAUSAL, "causal", LINEARS),
    "gemma2": Family(Gemma2Config(**GEMMA, sliding_window=4), CAUSAL, "causal", LINEARS),
    "gemma3": Family(Gemma3TextConfig(**GEMMA, sliding_window=4), CAUSAL, "causal", LINEARS),
    "opt": Family(OPTConfig(**OPT), CAUSAL, "causal", ["q_proj", "v_proj", "fc1", "fc2"]),
    "t5": Family(T5Config(**T5), SEQ2SEQ, "seq2seq", ["q", "v", "o", "wi"]),
    "llava": Family(LlavaConfig(**LLAVA), LlavaForConditionalGeneration, "vision", LANGUAGE),
    "llava-projector": Family(LlavaConfig(**LLAVA), LlavaForConditionalGeneration, "vision", LANGUAGE,
                              ["multi_modal_projector"]),
}  # fmt: skip


def make_base(family: str) -> nn.Module:
    config, head = copy.deepcopy(FAMILIES[family].config), FAMILIES[family].head
    torch.manual_seed(0)
    if hasattr(head, "from_config"):
        base = head.from_config(config, attn_implementation="eager")
    else:
        config._attn_implementation = "eager"
        base = head(config)
    for parameter in base.parameters():  # at the usual 0.02 attention is flat and hardly has a gradient
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.4)
    return base


def make_model(family: str = "bert", dtype: torch.dtype = torch.float64, **lora: Any) -> Any:
    """The family's tiny model in training mode, with an adapter as after some training."""
    entry = FAMILIES[family]
    options = {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": entry.targets,
        "modules_to_save": entry.whole or None,
        "fan_in_fan_out": isinstance(entry.config, GPT2Config),
        **lora,
    }
    model = get_peft_model(make_base(family), LoraConfig(**options)).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # at B = 0 every gradient of A is zero
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def freeze_a(model: Any) -> Any:
    """Let only B train, and what trains whole."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def products_of(model: nn.Module, scaling: float = SCALING) -> list[WeightProduct]:
    """Every adapted layer, to be clipped by the gradient of its whole weight."""
    names = [n for n, _ in model.named_parameters() if "lora_B" in n]
    return [WeightProduct(n.replace("lora_B", "lora_A"), n, scaling) for n in names]


def random_projection(model: nn.Module, d: int, order: tuple[str, ...]) -> ProjectedParameters:
    named = dict(model.named_parameters())
    size = sum(named[n].numel() for n in order)
    generator = torch.Generator().manual_seed(5)
    slots = torch.arange(size)[torch.randperm(size, generator=generator)] % d
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return ProjectedParameters(
        slots, signs.double() / torch.bincount(slots, minlength=d)[slots].sqrt(), d, order
    )


class Known:
    """A Randomness for tests: reproducible or given normals; it remembers the shapes that it was asked for."""

    def __init__(self, seed: int = 0, draws: Sequence[Tensor] = ()) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.draws = list(draws)
        self.shapes: list[tuple[int, ...]] = []

    def normal(self, shape: Sequence[int], *, device: Any, dtype: torch.dtype) -> Tensor:
        self.shapes.append(tuple(shape))
        if not self.draws:
            return torch.randn(tuple(shape), generator=self.generator, dtype=dtype)
        draw = self.draws.pop(0)
        assert draw.shape == tuple(shape)
        return draw.to(dtype, copy=True)

    def uniform(self, n: int) -> Any:
        import numpy as np

        return np.zeros(n)


class NoFloat32(TorchFunctionMode):
    """Keeps float64 models in float64 where they turn to float32 inside: norm layers, and softmax in attention.

    In float32 the order of additions shows, and with it the padding, in the eighth digit.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


# --- batches --------------------------------------------------------------------------------------


def _texts(lengths: tuple[int, ...], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        ids[row, :n] = torch.randint(2, IMAGE, (n,), generator=generator)
        mask[row, :n] = 1
    return ids, mask


def _class_batch(lengths: tuple[int, ...]) -> Batch:
    ids, mask = _texts(lengths)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths)) % 3}


def _causal_batch(lengths: tuple[int, ...]) -> Batch:
    """Neither the padding nor a prompt, of another length in every row, counts."""
    ids, mask = _texts(lengths)
    labels = ids.where(mask.bool(), IGNORE)
    for row, n in enumerate(lengths):
        labels[row, : row % max(1, n - 1)] = IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _seq2seq_batch(lengths: tuple[int, ...]) -> Batch:
    ids, mask = _texts(lengths)
    targets, counted = _texts(tuple(2 + (3 * n) % 5 for n in lengths), seed=2)
    return {"input_ids": ids, "attention_mask": mask, "labels": targets.where(counted.bool(), IGNORE)}


def _vision_batch(lengths: tuple[int, ...]) -> Batch:
    """One image in front of every text."""
    batch = _causal_batch(lengths)
    rows = len(lengths)
    image = torch.full((rows, PATCHES), IMAGE)
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": torch.cat([image, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(image), batch["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(image, IGNORE), batch["labels"]], 1),
        "pixel_values": pixels,
    }


BATCHES = {
    "class": _class_batch, "causal": _causal_batch, "seq2seq": _seq2seq_batch, "vision": _vision_batch,
}  # fmt: skip
LOSSES = {"class": classification, "causal": causal, "seq2seq": seq2seq, "vision": causal}


def make_batch(lengths: tuple[int, ...] = LENGTHS, family: str = "bert") -> Batch:
    """A ragged batch, padded on the right."""
    return BATCHES[FAMILIES[family].kind](lengths)


def rows_of(batch: Batch, rows: Any) -> Batch:
    return {k: v[rows] for k, v in batch.items()}


def one_of(batch: Batch, row: int) -> Batch:
    """Row `row` alone, without its padding."""
    n = int(batch["attention_mask"][row].sum())
    one = {
        k: v[row : row + 1, :n] if v.shape == batch["input_ids"].shape else v[row : row + 1]
        for k, v in batch.items()
    }
    if one["labels"].dim() == 2 and batch["labels"].shape != batch["input_ids"].shape:
        one["labels"] = one["labels"][:, : int((one["labels"] != IGNORE).sum())]
    return one


def loss_of(family: str) -> Loss:
    """One loss per example, (b,), as a function of the model and a batch."""
    kind = FAMILIES[family].kind

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        if kind == "seq2seq":  # the model makes the decoder's input from the labels
            inputs["labels"] = batch["labels"]
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
        return LOSSES[kind](model(**inputs).logits, batch["labels"])

    return loss


losses = loss_of("bert")


# --- gradients the slow way -----------------------------------------------------------------------


def batches_of_one(model: nn.Module, batch: Batch, loss: Loss = losses) -> Gradients:
    """Per-example gradients from one unpadded row at a time: name -> (rows, *shape)."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: list[list[Tensor]] = []
    for row in range(len(batch["labels"])):
        found = torch.autograd.grad(
            loss(model, one_of(batch, row)).sum(), list(named.values()), allow_unused=True
        )
        rows.append(
            [torch.zeros_like(p) if g is None else g for g, p in zip(found, named.values(), strict=True)]
        )
    return {name: torch.stack(column) for name, column in zip(named, zip(*rows, strict=True), strict=True)}


def on_merged_weights(model: Any, batch: Batch, loss: Loss = losses) -> Gradients:
    """Per-example dl/dW by the name of lora_B (rows, m, n), and of what trains whole: one unpadded row at a time."""
    merged = copy.deepcopy(model).merge_and_unload().requires_grad_(False)
    wanted: dict[str, tuple[nn.Parameter, bool]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.default.weight")
        path = layer.replace(".modules_to_save.default", "").removesuffix(".weight").removesuffix(".bias")
        module = merged.get_submodule(path)
        own = module.bias if name.endswith(".bias") else module.weight
        wanted[name] = (own.requires_grad_(True), "lora_B" in name and isinstance(module, Conv1D))
    rows: list[list[Tensor]] = []
    for row in range(len(batch["labels"])):
        found = torch.autograd.grad(loss(merged, one_of(batch, row)).sum(), [p for p, _ in wanted.values()])
        rows.append([g.t() if t else g for g, (_, t) in zip(found, wanted.values(), strict=True)])
    return {name: torch.stack(column) for name, column in zip(wanted, zip(*rows, strict=True), strict=True)}


def norms_of(gradients: Gradients) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients.values()], 1).double().norm(dim=1)


def clipped_sum(gradients: Gradients, clip: float) -> Gradients:
    """``sum_i c_i g_i``."""
    factors = (clip / norms_of(gradients)).clamp(max=1)
    return {n: torch.einsum("b,b...->...", factors.to(g.dtype), g) for n, g in gradients.items()}


def clipped_products(
    model: nn.Module, gradients: Gradients, clip: float, scaling: float = SCALING
) -> Gradients:
    """``s (sum_i c_i G_i) A^T`` for the adapted layers, ``sum_i c_i g_i`` for what trains whole."""
    sums = clipped_sum({n: g.double() for n, g in gradients.items()}, clip)
    for name in sums:
        if "lora_B" in name:
            a = model.get_parameter(name.replace("lora_B", "lora_A")).detach().double()
            sums[name] = scaling * sums[name] @ a.t()
    return sums


def assert_equal(got: Gradients, want: Gradients, tolerance: float) -> None:
    """Each tensor by its own size, zeros by the others'."""
    assert got.keys() == want.keys()
    largest = max(float(w.abs().max()) for w in want.values())
    assert largest > 0
    for name, w in want.items():
        assert got[name].shape == w.shape, name
        scale = max(float(w.abs().max()), 1e-3 * largest)
        assert float((got[name] - w).abs().max()) <= tolerance * scale, name


def relative_error(got: Gradients, want: Gradients) -> float:
    """Norm of the difference by the norm of `want`, over everything."""
    assert got.keys() == want.keys()
    distance = sum(float((got[n] - w).double().square().sum()) for n, w in want.items())
    return (distance / sum(float(w.double().square().sum()) for w in want.values())) ** 0.5


# --- the engine -----------------------------------------------------------------------------------


def engine_sum(
    model: nn.Module, batch: Any, clip: float, loss: Loss = losses, **geometry: Any
) -> tuple[Tensor, Gradients]:
    """Norms and the clipped sum without noise, from one micro-batch."""
    engine = GradientEngine(model, clip=clip, **geometry)
    with engine.attached():
        values = loss(model, batch)
        values.sum().backward()
        clipped = engine.accumulate(len(values))
        return clipped.norms, engine.private_sum(Known(), 0.0, 1)
