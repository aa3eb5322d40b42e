"""How a model that sees reads its rows: which tokens stand for an image, and how an image becomes its pixels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoImageProcessor, CLIPImageProcessorPil

from privet.adapters import AdapterSpec, adapter_spec, image_mark, loading, location
from privet.captioner import ENCODERS
from privet.config import Config, ModelConfig
from privet.data.images import Picture
from privet.errors import ConfigError

Pixels = NDArray[np.float32]

_MOST_KEPT = 1 << 28  # bytes of prepared images that a process remembers


@dataclass(frozen=True, eq=False)
class Reader:
    """What turns a row's image into a model's inputs.

    Attributes
    ----------
    mark : int
        The token that the tokenizer makes of ``<image>``, once an image.
    token : int
        The model's placeholder.
    tokens : int
        How many placeholders an image has.
    size : int
        Height and width of the pixels.
    processor : Any
        An image processor of transformers that needs nothing but Pillow.
    """

    mark: int
    token: int
    tokens: int
    size: int
    processor: Any

    def pixels(self, picture: Picture) -> Pixels:
        """Return an image as the model reads it, (3, size, size).

        Raises
        ------
        ConfigError
            If the model's image processor makes another size than the model takes.
        DataError
            As :meth:`privet.data.images.Picture.open`.
        """
        made = np.asarray(self.processor(picture.open(), return_tensors="np")["pixel_values"], np.float32)
        if made.shape != (1, 3, self.size, self.size):
            raise ConfigError(
                f"the model's image processor makes {made.shape[1:]} of an image, and the model takes "
                f"{(3, self.size, self.size)}"
            )
        return made[0]


class RowImages:
    """The images of n rows, decoded when they are asked for; the last ones are remembered.

    Parameters
    ----------
    pictures : sequence of Picture
        One a row.
    reader : Reader
        The model's.
    """

    def __init__(self, pictures: Sequence[Picture], reader: Reader) -> None:
        self._pictures = pictures
        self._reader = reader
        self._known: OrderedDict[str, Pixels] = OrderedDict()
        self._most = max(1, _MOST_KEPT // (12 * reader.size**2))

    @property
    def reader(self) -> Reader:
        """What reads them."""
        return self._reader

    def pixels(self, rows: Sequence[int] | np.ndarray) -> Pixels:
        """Return the images of the rows, (b, 3, size, size)."""
        return np.stack([self._one(self._pictures[i]) for i in rows])

    def stamp(self, row: int) -> str:
        """Return what changes with a row's image."""
        return self._pictures[row].stamp

    def _one(self, picture: Picture) -> Pixels:
        key = picture.stamp
        if key not in self._known:
            self._known[key] = self._reader.pixels(picture)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def image_reader(config: Config, tokenizer: Any) -> Reader:
    """Return how the run's model reads images.

    Raises
    ------
    ConfigError
        If tokenizer and model do not agree on the placeholder, an image has more tokens than a row may have, or the
        model's image processor cannot be loaded.
    """
    spec, model = adapter_spec(config), config.model
    mark = image_mark(tokenizer, model, spec)
    return Reader(mark, spec.image_token, spec.image_tokens, spec.image_size, _processor(model, spec))


def _processor(model: ModelConfig, spec: AdapterSpec) -> Any:
    if model.vision is not None:
        return _plain(spec.image_size, ENCODERS[model.vision])
    if model.architecture is not None:
        return _plain(spec.image_size, None)
    with loading(model.path):
        return AutoImageProcessor.from_pretrained(
            location(model), revision=model.revision or "main", backend="pil", trust_remote_code=False
        )


def _plain(size: int, encoder: Any) -> Any:
    """Return a processor that resizes, crops the middle and scales."""
    scaling: dict[str, Any] = (
        {"image_mean": [encoder.mean] * 3, "image_std": [encoder.std] * 3} if encoder else {}
    )
    return CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, **scaling
    )
