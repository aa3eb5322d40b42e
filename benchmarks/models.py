"""The models that are measured: shapes, random weights, a LoRA of rank 8, one fixed batch and its losses.

Weights and tokens are random and dropout is off: neither changes what a step costs, and every variant then
computes the same numbers. Depth may be cut. The vocabulary of a causal model, whose output layer costs as much as
several of its blocks, shrinks with it, so that a shallow model spreads its time like the whole one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

RANK, ALPHA = 8, 16.0
_IGNORED = -100


@dataclass(frozen=True)
class Shape:
    """One architecture.

    Attributes
    ----------
    kind : str
        ``model_type`` in transformers.
    depth : int
        Layers of the whole model.
    depth_key, settings
        The name of the number of layers in the configuration, and the rest of it.
    targets : tuple of str
        Layers that get a LoRA.
    vocabulary : int
        Of the whole model.
    causal : bool
        A language model (the loss is the mean over an example's own tokens), not a classifier.
    """

    name: str
    kind: str
    depth: int
    targets: tuple[str, ...]
    vocabulary: int
    causal: bool = False
    depth_key: str = "num_hidden_layers"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, layers: int) -> int:
        """Size of the vocabulary at a depth."""
        return round(self.vocabulary * layers / self.depth) if self.causal else self.vocabulary

    def build(self, layers: int) -> nn.Module:
        """Return the bare model with random weights."""
        values = {**self.settings, self.depth_key: layers, "vocab_size": self.tokens(layers)}
        config = AutoConfig.for_model(self.kind, **values)
        factory = AutoModelForCausalLM if self.causal else AutoModelForSequenceClassification
        model: nn.Module = factory.from_config(config)
        return model


def _roberta(name: str, depth: int, hidden: int, heads: int) -> Shape:
    settings = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return Shape(name, "roberta", depth, ("query", "value"), 50_265, settings=settings)


def _llama(name: str, depth: int, hidden: int, heads: int, inner: int) -> Shape:
    settings = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
    }
    return Shape(name, "llama", depth, ("q_proj", "v_proj"), 32_000, causal=True, settings=settings)


ROBERTA_BASE = _roberta("RoBERTa-base", 12, 768, 12)
ROBERTA_LARGE = _roberta("RoBERTa-large", 24, 1024, 16)
GPT2_SMALL = Shape(
    "GPT-2-small",
    "gpt2",
    12,
    ("c_attn",),
    50_257,
    causal=True,
    depth_key="n_layer",
    settings={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)
LLAMA_512 = _llama("Llama 8 x 512", 8, 512, 8, 1376)
LLAMA_2048 = _llama("Llama 16 x 2048", 16, 2048, 16, 5504)


@dataclass(frozen=True)
class Case:
    """A shape with a batch: one block of rows of the table.

    Attributes
    ----------
    rows, tokens : int
        Examples of the batch, and tokens of each.
    head : bool
        Train the classification head too.
    """

    shape: Shape
    rows: int
    tokens: int
    head: bool = False

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{self.shape.name} {self.rows}x{self.tokens}" + (", head" if self.head else "")

    def layers(self, limit: int | None) -> int:
        """Depth under a limit; None: the whole model."""
        return min(self.shape.depth, limit or self.shape.depth)


@dataclass
class Workload:
    """A model with its LoRA and the batch that every step of every variant sees.

    Attributes
    ----------
    model : nn.Module
        Never trained itself, see :meth:`copy`; what trains with two factors requires grad.
    inputs, targets
        The batch; targets are labels (rows,) or the next tokens (rows, tokens).
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    targets: Tensor
    causal: bool

    @property
    def rows(self) -> int:
        """Examples of the batch, also the expected size of a draw."""
        return len(self.targets)

    def copy(self, *, train_a: bool = True) -> nn.Module:
        """Return a model of its own that shares the frozen weights; without `train_a`, A is frozen too."""
        frozen = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        model = copy.deepcopy(self.model, frozen)
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(train_a)
        return model

    def scores(self, model: nn.Module) -> Tensor:
        """Logits, one row for every entry of the flattened targets."""
        logits: Tensor = model(**self.inputs).logits
        return logits.flatten(0, -2).float()

    def losses(self, model: nn.Module) -> Tensor:
        """One loss per example: the mean over its own tokens."""
        flat = cross_entropy(
            self.scores(model), self.targets.flatten(), ignore_index=_IGNORED, reduction="none"
        )
        if not self.causal:
            return flat
        return flat.view_as(self.targets).sum(1) / (self.targets != _IGNORED).sum(1)


def make_workload(
    case: Case,
    layers: int | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """Build a case: the base model in `dtype`, LoRA factors and head in float32, on `device`."""
    torch.manual_seed(0)
    shape, depth = case.shape, case.layers(layers)
    model = shape.build(depth).to(dtype)
    lora = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,  # type: ignore[arg-type]
        target_modules=list(shape.targets),
        fan_in_fan_out=shape.kind == "gpt2",
    )
    inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        head = name.startswith("classifier")
        parameter.requires_grad_("lora_" in name or (head and case.head))
        if "lora_" in name or head:
            parameter.data = parameter.data.float()
        if "lora_B" in name:  # zero, and A would have no gradient
            nn.init.normal_(parameter, std=0.02)
    if dtype != torch.float32 and not shape.causal:
        model.get_submodule("classifier").register_forward_pre_hook(_to_float)
    ids = torch.randint(5, shape.tokens(depth), (case.rows, case.tokens))
    if shape.causal:
        targets = torch.cat([ids[:, 1:], torch.full((case.rows, 1), _IGNORED)], 1)
    else:
        targets = torch.randint(0, 2, (case.rows,))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Workload(
        model.train().to(device),
        {k: v.to(device) for k, v in inputs.items()},
        targets.to(device),
        shape.causal,
    )


def _to_float(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.float() for a in args)
