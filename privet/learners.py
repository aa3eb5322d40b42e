"""What trains: a base model of transformers, and how its outputs become logits.

Each knows which of its modules LoRA is injected into (`backbone`) and which train whole (:meth:`head_modules`): a
classifier behind the base model, or the projector of images in front of a language model.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from privet.captioner import Captioner
from privet.errors import ConfigError


class MeanPooledClassifier(nn.Module):
    """An encoder, the mean of its token vectors, one linear head (float32)."""

    def __init__(self, backbone: PreTrainedModel, labels: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, labels)

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """Return logits (batch x labels)."""
        hidden = self.backbone(attention_mask=attention_mask, **inputs).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        return cast(Tensor, self.head(pooled.to(self.head.weight.dtype)))

    def head_modules(self) -> dict[str, nn.Module]:
        """Modules outside the backbone."""
        return {"head": self.head}


class _WholeModel(nn.Module):
    """A class of transformers that computes logits itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def backbone(self) -> PreTrainedModel:
        """The module that LoRA is injected into and whose names the targets have."""
        return self.model


class ModelClassifier(_WholeModel):
    """The model's own sequence-classification class, with its own pooling and head."""

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return logits (batch x labels)."""
        return cast(Tensor, self.model(**inputs).logits)

    def head_modules(self) -> dict[str, nn.Module]:
        """Modules outside the base model, for example ``classifier``."""
        inner = self.model.base_model_prefix
        children = self.model.named_children()
        return {n: m for n, m in children if n != inner and next(m.parameters(), None) is not None}


class Writer(Protocol):
    """A model that writes."""

    def generate(self, input_ids: Tensor, **settings: Any) -> Tensor:
        """Return the tokens that follow each prompt, without the prompt; settings are those of transformers."""
        ...


class Seer(Writer, Protocol):
    """A model that sees one image an example: ``pixel_values`` beside ``input_ids``, where it has placeholders."""

    @property
    def image_token(self) -> int:
        """The placeholder's id."""
        ...

    @property
    def image_tokens(self) -> int:
        """How many of them an image has."""
        ...

    @property
    def image_size(self) -> int:
        """Height and width of ``pixel_values``."""
        ...


class LanguageModel(_WholeModel):
    """A causal language model, which has no head besides its own output layer."""

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return logits (batch x tokens x vocabulary)."""
        return cast(Tensor, self.model(**inputs, use_cache=False).logits)

    def head_modules(self) -> dict[str, nn.Module]:
        """No module: nothing but the adapter trains."""
        return {}

    def generate(self, input_ids: Tensor, **settings: Any) -> Tensor:
        """Return what follows each prompt; see :class:`Writer`."""
        written = cast(Any, self.model).generate(input_ids=input_ids, **settings)
        return cast(Tensor, written[:, input_ids.shape[1] :])


class VisionLanguageModel(LanguageModel):
    """A model of LLaVA's make: a vision tower, a projector, a language model.

    Parameters
    ----------
    model : PreTrainedModel
        Of ``AutoModelForImageTextToText``.
    trained : bool
        Whether the projector trains, as the head.

    Raises
    ------
    ConfigError
        If the model is made otherwise, or its projector has layers that cannot train here.
    """

    def __init__(self, model: PreTrainedModel, trained: bool) -> None:
        super().__init__(model)
        self.tower = self._part("vision_tower")
        self.language = self._part("language_model")
        self.projector = self._part("multi_modal_projector")
        self._trained = trained
        settings = model.config
        vision: Any = getattr(settings, "vision_config", None)
        if settings.model_type not in _MADE_SO or vision.model_type not in _OWN_TOKENS:
            raise ConfigError(
                f"a model of the type {settings.model_type} is not supported with images: every image must be as many "
                f"tokens, as with {' and '.join(_MADE_SO)} on a tower of CLIP's or SigLIP's make"
            )
        self.image_token, self.image_size = int(settings.image_token_id), int(vision.image_size)
        drops = getattr(settings, "vision_feature_select_strategy", "default") == "default"
        self.image_tokens = (
            (self.image_size // vision.patch_size) ** 2 + _OWN_TOKENS[vision.model_type] - drops
        )
        if trained:
            self._train_projector()

    def _part(self, leaf: str) -> str:
        found = [n for n, _ in self.model.named_modules() if n.rpartition(".")[2] == leaf]
        if not found:
            raise ConfigError(
                f"a model of the type {self.model.config.model_type} has no {leaf}: task.kind needs one of LLaVA's make"
            )
        return found[0]

    def _train_projector(self) -> None:
        projector = self.model.get_submodule(self.projector)
        for name, module in projector.named_modules():
            if next(module.parameters(recurse=False), None) is not None and not isinstance(module, nn.Linear):
                raise ConfigError(
                    f"model.projector = trained is not possible: {self.projector}.{name} is no linear layer (frozen)"
                )
        # What trains is float32 also behind a bfloat16 tower; its output is cast by the model itself.
        projector.register_forward_pre_hook(_as_its_weights)

    def head_modules(self) -> dict[str, nn.Module]:
        """The projector where it trains."""
        return {self.projector: self.model.get_submodule(self.projector)} if self._trained else {}


def _as_its_weights(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in inputs)


_MADE_SO = ("llava", "vipllava")
_OWN_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Tokens that a tower puts before those of an image's patches."""

Learner = MeanPooledClassifier | ModelClassifier | LanguageModel | Captioner
