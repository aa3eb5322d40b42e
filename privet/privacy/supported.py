"""Which models the engine takes: everything that it would get wrong is refused by name, before anything trains.

What an engine cannot know in advance it checks while it works: one row per example in every layer that trains,
and that no gradient went past the layer that owns it (:mod:`privet.privacy.engine`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from privet.errors import ConfigError
from privet.privacy.per_sample import is_linear

_EXPERTS = re.compile(r"(^|\.)(experts?|router|moe|block_sparse_moe)$")
_EXPERT_CLASS = re.compile(r"Moe|MoE|MOE|Experts|Router")
_SPREADERS = re.compile(r"^(DataParallel|DistributedDataParallel|FullyShardedDataParallel|FSDP.*)$")
#: Adapter layers of PEFT that read their factors without calling them.
_FUNCTIONAL = ("MultiheadAttention", "ParamWrapper", "LoraParallelLinear")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse models whose examples see each other, and adapters that are more than linear layers.

    Raises
    ------
    ConfigError
        For a mixture of experts, a wrapper that spreads a batch, a compiled module, 8-bit layers with an outlier
        threshold, or an adapter other than plain LoRA; the message names it.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name or 'the model'} ({kind})"
        if _EXPERTS.search(name) or _EXPERT_CLASS.search(kind):
            raise ConfigError(
                f"{where}: a mixture of experts may route the examples of a batch together, "
                "which is not supported under DP"
            )
        if _SPREADERS.search(kind):
            raise ConfigError(f"{where} spreads the examples of a batch, which is not supported under DP")
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(f"{where} is compiled, which is not supported under DP: use the plain module")
        if getattr(module, "lora_variant", None):
            variant = type(next(iter(module.lora_variant.values()))).__name__
            raise ConfigError(
                f"{name}: the adapter variant {variant} is not supported under DP, only plain LoRA"
            )
        if getattr(getattr(module, "state", None), "threshold", 0.0) > 0:
            raise ConfigError(
                f"{where}: picks its outlier columns over the whole batch, so that an example's output depends on "
                "the others, which is not supported under DP: llm_int8_threshold=0.0"
            )
        if kind in _FUNCTIONAL and hasattr(module, "lora_A"):
            raise ConfigError(f"{where}: an adapter of this layer is not supported under DP")


def refuse_cutting_checkpoints(model: nn.Module) -> None:
    """Refuse re-entrant checkpointing of layers whose inputs have no gradient: theirs would be lost.

    Raises
    ------
    ConfigError
        If a model of transformers checkpoints that way and nothing makes its embeddings' output require grad.
    """
    cutting = [
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False)
        and module.training
        and getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get(
            "use_reentrant"
        )
    ]
    if cutting and not any(_embeddings_require_grad(m) for m in model.modules()):
        raise ConfigError(
            f"{cutting[0]}: re-entrant checkpointing loses the gradients of layers whose inputs do not require "
            "grad: call model.enable_input_require_grads(), or use use_reentrant=False"
        )


def _embeddings_require_grad(module: nn.Module) -> bool:
    """Whether the token embeddings of a model of transformers have a hook, as `enable_input_require_grads` sets."""
    if not isinstance(module, PreTrainedModel):
        return False
    try:
        embeddings = module.get_input_embeddings()
    except NotImplementedError:
        return False
    return isinstance(embeddings, nn.Module) and bool(embeddings._forward_hooks)


def owners(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Module]:
    """Return the linear layers that own the trainable parameters, by layer name.

    Raises
    ------
    ConfigError
        For a parameter that no linear layer owns, or two, or whose values are not in memory.
    """
    if not parameters:
        raise ConfigError("the model has no trainable parameter")
    modules = dict(model.named_modules())
    holders: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    found: dict[str, nn.Module] = {}
    for name, parameter in parameters.items():
        first, *others = holders[id(parameter)]
        if others:
            raise ConfigError(
                f"{name} is shared by {first} and {others[0]}: no per-example rule for tied weights"
            )
        if not is_linear(modules[first]):
            kind = type(modules[first]).__name__
            raise ConfigError(f"{name} trains, but there is no per-example rule for {kind}: freeze it")
        if parameter.is_meta:
            raise ConfigError(f"{name} trains, but is offloaded: keep it on a device")
        found[first] = modules[first]
    return found


class ImageGuard:
    """Lets layers that see images train only while every example has exactly one image.

    A vision-language model gives these layers one row per *image* and hands their output to the examples in the
    order of the placeholder tokens. With two images in one example and none in the next, the row count would fit
    and gradients would be counted for the wrong example.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    layers : iterable of str
        Names of the layers that train.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self._guarded = [(m, token, name) for m, token, name in _image_readers(model, tuple(layers))]
        self._hooks: list[RemovableHandle] = []

    def insert(self) -> None:
        """Begin to look at inputs."""
        for module, token, name in self._guarded:
            self._hooks.append(module.register_forward_pre_hook(_OneImage(token, name), with_kwargs=True))

    def remove(self) -> None:
        """Stop looking."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _image_readers(model: nn.Module, layers: tuple[str, ...]) -> Iterator[tuple[nn.Module, int, str]]:
    """Yield every module that merges images into texts, its placeholder token, and a trained layer that sees images."""
    for name, module in model.named_modules():
        token = getattr(getattr(module, "config", None), "image_token_id", None)
        if token is None or not isinstance(getattr(module, "language_model", None), nn.Module):
            continue
        prefix = f"{name}." if name else ""
        inside = [n for n in layers if n.startswith(prefix)]
        seeing = [n for n in inside if not n.startswith(f"{prefix}language_model.")]
        if seeing:
            yield module, int(token), seeing[0]


class _OneImage:
    """A forward pre-hook: as many placeholder tokens in every example."""

    def __init__(self, token: int, layer: str) -> None:
        self._token = token
        self._layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor):
            raise ConfigError(f"{self._layer} sees images and trains: the model needs input_ids under DP")
        counts = (ids == self._token).sum(1)
        if bool((counts != counts[0]).any()):
            raise ConfigError(
                f"{self._layer} sees images and trains: under DP every example must have exactly one image"
            )
