"""What the samples of an `ImageDataset` are: encoded images, or pixels, decoded, cropped,
resized and normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from headrace.casting import FLOAT32, DTypeArgument, known_dtype, normalized_dtype
from headrace.collate.normalization import check_normalize
from headrace.core.decoder import Decoder, Unnormalized
from headrace.datasets.image.augment import Augment, Drawn, split_augment
from headrace.datasets.image.claims import Left
from headrace.datasets.image.pixels import (
    IMAGENET,
    Pixels,
    decode_image,
    image_shape,
    load_image,
    normalize,
    normalize_into,
    resize_image,
    to_channels_first,
    to_channels_last,
    writable,
)
from headrace.dtypes import ArraySpec
from headrace.errors import ConfigError

DEFAULT_SIZE = (224, 224)
UNSET: Any = "default"
"""An `image_size` that was not given."""


def check_image_options(color: str, transform_input: str, decode: str, normalize: object) -> None:
    """Raises a ConfigError for options of images that make no sense."""
    check_normalize(normalize)
    if color not in ("RGB", "L"):
        raise ConfigError(f"color must be 'RGB' or 'L', not {color!r}")
    if transform_input not in ("pil", "tensor", "numpy"):
        raise ConfigError(
            f"transform_input must be 'pil', 'tensor' or 'numpy', not {transform_input!r}"
        )
    if decode not in ("fast", "exact"):
        raise ConfigError(f"decode must be 'fast' or 'exact', not {decode!r}")


def image_dtype(
    dtype: DTypeArgument | None, normalize: bool | Literal["host"], transformed: bool
) -> np.dtype[Any]:
    """The dtype of normalised images that a user asks for.

    Raises:
        ConfigError: it is another one than these may have, or images are not normalised.
    """
    named = normalized_dtype(dtype)
    if dtype is not None and (transformed or not normalize):
        raise ConfigError(
            f"dtype={dtype!r} is for images that are normalised, and here a transform or "
            "normalize=False gives them their dtype: leave one of both out"
        )
    return named


@dataclass(kw_only=True, eq=False)
class ImageDecoder(Decoder):
    """Images as values uint8 [C, H, W], or [H, W, C] where built-in augmentations or transforms of
    PIL images or arrays come next; or as the encoded records themselves, where an image is decoded
    only when it is known which part of it is wanted.

    Args:
        color: "RGB" or "L".
        image_size: (height, width) of values; None: an image's own.
        is_size_given: True if the user said so.
        exact: decode large JPEGs whole.
        normalize: scale and normalise inputs that nobody transforms; "host": never on a device.
        dtype: of normalised inputs: float32, float16, or bfloat16 (`BFLOAT16`).
        transform_input: "pil", "tensor" or "numpy".
        augment: the built-in crop and flip, if there are any.
        transformed: True if a transform gets the inputs.
        is_stored_decoded: True if records are pixels [H, W, C].
        hold: as the user gave it.
        left: says what the memory budget leaves for one image.
        is_joint: True if a transform gets input and target.
        channels_first: the layout of values; None: as inputs have it. The views of a dataset keep
            it, whatever their transform gets.
    """

    stores_values = False
    always_pairs = True

    color: str
    image_size: tuple[int, int] | None
    is_size_given: bool
    exact: bool
    normalize: bool | Literal["host"]
    transform_input: str
    augment: Augment | None
    transformed: bool
    is_stored_decoded: bool
    hold: str | None
    left: Left | None = None
    is_joint: bool = False
    dtype: np.dtype[Any] = FLOAT32
    channels_first: bool | None = None

    def __post_init__(self) -> None:
        self._shows_channels_first = not self.transformed or self.transform_input == "tensor"
        if self.channels_first is None:
            self.channels_first = self.augment is None and self._shows_channels_first
        self.crop_size: tuple[int, int] | None = None if self.augment is None else self.augment.size
        """The size of inputs, where they are cropped or resized once more."""
        is_cropped_first = self.crop_size is not None and self.image_size is None
        self.is_encoded: bool = (
            is_cropped_first and not self.is_stored_decoded and self.hold != "decoded"
        )
        """True if values are encoded images."""
        self.draws = any(self.random_steps())
        self.decodes_late = self.is_encoded
        self.copies: bool = (
            self.augment is None
            and self.channels_first
            and not self.normalize
            and not self.transformed
        )

    def with_transform(self, transform: Any) -> tuple[ImageDecoder, Callable[[Any], Any] | None]:
        """What is held stays as it is, so it may be held in another layout than the one that the
        transform gets.
        """
        augment, rest = split_augment(transform)
        if rest is None and augment is None and self.image_size is None and not self.is_size_given:
            augment = Augment(None, None, self.crop_size or DEFAULT_SIZE)
        return replace(self, augment=augment, transformed=rest is not None), rest

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return 3 if self.color == "RGB" else 1

    @property
    def input_dtype(self) -> np.dtype[Any]:
        """Of inputs that nobody transforms."""
        if self.normalize:
            return self.dtype
        return np.dtype(np.uint8)

    @property
    def held_as(self) -> str:
        """What decides the value of a record."""
        return (
            f"ImageDataset {self.color} {self.image_size} {self.channels_first} "
            f"{self.is_stored_decoded}{' exact' if self.exact else ''}"
        )

    def decode(self, record: Any) -> Any:
        if self.is_encoded:
            # no array: those are taken for pixels
            if isinstance(record, np.ndarray):
                return record.tobytes()
            return record
        if self.image_size is not None and not self.is_stored_decoded:
            first = bool(self.channels_first)
            return load_image(
                record, self.color, self.image_size, first, exact=self.exact, left=self.left
            )
        pixels = record
        if not self.is_stored_decoded:
            pixels = decode_image(record, self.color, self.left)
        pixels = resize_image(pixels, self.image_size)
        if self.channels_first:
            pixels = to_channels_first(pixels)
        return pixels

    def value_spec(self) -> ArraySpec | None:
        size = self.crop_size if self.is_encoded else self.image_size
        if size is None:
            return None
        shape = (*size, self.channels)
        if self.channels_first:
            shape = (self.channels, *size)
        return ArraySpec(shape, np.dtype(np.uint8))

    def pixels(self, value: Any) -> Pixels:
        """The decoded image, uint8 [H, W, C]."""
        if self.is_encoded:
            return decode_image(value, self.color, self.left)
        if self.channels_first:
            value = to_channels_last(value)
        return value  # type: ignore[no-any-return]

    def draw(self, value: Any) -> Drawn | None:
        if self.augment is None or not self.draws:
            return None
        if self.is_encoded:
            return self.augment.draw(*image_shape(value, self.left))
        return self.augment.draw(*(value.shape[1:] if self.channels_first else value.shape[:2]))

    def _drawn_pixels(self, value: Any, drawn: Drawn | None) -> Pixels:
        """What a value becomes by its draws: uint8 in the layout of inputs."""
        if self.augment is None and self.channels_first == self._shows_channels_first:
            return value  # type: ignore[no-any-return]
        box, flip = drawn or (None, False)
        size = self.crop_size
        if self.is_encoded and size is not None:
            first = self._shows_channels_first
            return load_image(value, self.color, size, first, box, flip, self.exact, self.left)
        pixels = value
        if self.channels_first:
            pixels = value.transpose(1, 2, 0)
        if box is not None:
            pixels = box.of(pixels)
        if size is not None:
            pixels = resize_image(np.ascontiguousarray(pixels), size)
        if flip:
            pixels = pixels[:, ::-1]
        if self._shows_channels_first:
            return to_channels_first(pixels)
        return np.ascontiguousarray(pixels)

    def to_input(self, value: Any) -> Any:
        return self.shown(value, self.draw(value))

    def shown(self, value: Any, drawn: Drawn | None) -> Any:
        """The input that a value becomes by its draws."""
        pixels = self._drawn_pixels(value, drawn)
        if not self.transformed:
            if self.normalize:
                return normalize(pixels, self.dtype)
            return _tensor(pixels)
        if self.transform_input == "pil":
            return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        if self.transform_input == "tensor":
            return _tensor(pixels)
        return writable(pixels)

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        if self.transformed:
            return None
        size = self.crop_size or (value.shape[1:] if self.channels_first else value.shape[:2])
        return ArraySpec((self.channels, *size), self.input_dtype)

    def write_input(self, value: Any, drawn: Drawn | None, out: np.ndarray[Any, Any]) -> None:
        pixels = self._drawn_pixels(value, drawn)
        if self.normalize:
            normalize_into(pixels, out)
        else:
            np.copyto(out, pixels)

    def sample_nbytes(self) -> int | None:
        size = self.crop_size or self.image_size
        if self.transformed or size is None:
            return None
        return size[0] * size[1] * self.channels * self.input_dtype.itemsize + 8

    def unnormalized(self) -> Unnormalized | str | None:
        if self.transformed:
            return "a transform makes them"
        if self.normalize is True:
            return Unnormalized(
                replace(self, normalize=False),
                replace(IMAGENET, dtype=known_dtype(self.dtype) or torch.float32),
            )
        return "normalize='host'" if self.normalize else None

    def random_steps(self) -> list[Any]:
        if self.augment is None:
            return []
        return [step for step in (self.augment.crop, self.augment.flip) if step is not None]


def _tensor(value: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(writable(value))
