"""Decodes the samples of an `ImageDataset`: images, alone or with a mask, a class number or boxes,
which are cropped, resized and normalised by the same draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from headrace.casting import FLOAT32, as_tensor, known_dtype
from headrace.collate.vision import Normalization
from headrace.core.batcher import Collating
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.datasets.image.augment import Augment, Drawn, split_augment
from headrace.datasets.image.labels import Labels
from headrace.datasets.resizing import IMAGENET, Box, Pixels, arranged, resize_image, writable
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError

if TYPE_CHECKING:
    from headrace.datasets.pixels import Left

DEFAULT_SIZE = (224, 224)


@dataclass(kw_only=True, eq=False)
class ImageDecoder(Decoder):
    """Decodes images. Values are uint8 [C, H, W]; or [H, W, C] if built-in augmentations, or
    transforms of PIL images or arrays, come next; or the encoded records, which are decoded when
    the crop is drawn.

    Args:
        color: "RGB" or "L".
        image_size: (height, width) of values. None: images keep their size.
        is_size_given: True if the user gave a size.
        exact: decode large JPEGs at full size.
        normalize: scale and normalise inputs without transforms; "host": never on a device.
        dtype: dtype of normalised inputs: float32, float16, or bfloat16 (`BFLOAT16`).
        transform_input: "pil", "tensor" or "numpy".
        augment: the built-in crop and flip.
        transformed: True if a transform receives the inputs.
        is_stored_decoded: True if records are pixels [H, W, C].
        hold: see `BaseDataset`.
        left: returns the remaining memory budget.
        is_joint: True if a transform receives input and target.
        channels_first: layout of values. None: that of inputs. Views keep the layout of their
            dataset, whatever their transform.
    """

    stores_values = False
    always_pairs = True

    color: str
    image_size: tuple[int, int] | None
    is_size_given: bool
    exact: bool
    normalize: bool | Literal["host"]
    transform_input: str
    augment: Augment
    transformed: bool
    is_stored_decoded: bool
    hold: str | None
    left: Left | None = None
    is_joint: bool = False
    dtype: np.dtype[Any] = FLOAT32
    channels_first: bool | None = None

    def __post_init__(self) -> None:
        self._shows_channels_first = not self.transformed or self.transform_input == "tensor"
        is_augmented = any(self.augment)
        if self.channels_first is None:
            self.channels_first = self._shows_channels_first and not is_augmented
        self.crop_size: tuple[int, int] | None = self.augment.size
        """The size of inputs, if they are cropped or resized once more."""
        self.is_encoded: bool = (
            self.crop_size is not None
            and self.image_size is None
            and not self.is_stored_decoded
            and self.hold != "decoded"
        )
        """True if values are encoded images."""
        self.draws = any(self.augment[:2])
        self.copies: bool = self.channels_first and not (
            is_augmented or self.normalize or self.transformed or self.splits_targets
        )

    def with_transform(self, transform: Any) -> tuple[ImageDecoder, Callable[[Any], Any] | None]:
        """See `Decoder`. Cached values keep their layout, whatever the transform receives."""
        augment, rest = split_augment(transform)
        has_size = self.image_size is not None or self.is_size_given
        if rest is None and not any(augment) and not has_size:
            augment = Augment(size=self.crop_size or DEFAULT_SIZE)
        return replace(self, augment=augment, transformed=rest is not None), rest

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return 3 if self.color == "RGB" else 1

    def decode(self, record: Any) -> Any:
        if isinstance(record, np.ndarray) and not self.is_stored_decoded:
            record = record.tobytes()  # arrays would be taken for pixels
        if self.is_encoded:
            return record
        first = bool(self.channels_first)
        if not self.is_stored_decoded:
            return self._decoded(record, self.image_size, first)
        return arranged(resize_image(record, self.image_size), False, first)

    def _decoded(
        self,
        record: Any,
        size: tuple[int, int] | None,
        channels_first: bool,
        box: Box | None = None,
        flip: bool = False,
    ) -> Pixels:
        # imported here: importing headrace takes less time without Pillow and simplejpeg
        from headrace.datasets.pixels import decode_image

        return decode_image(
            record, self.color, size, channels_first, box, flip, self.exact, self.left
        )

    def value_spec(self) -> ArraySpec | None:
        size = self.crop_size if self.is_encoded else self.image_size
        if size is None:
            return None
        shape = (*size, self.channels)
        if self.channels_first:
            shape = (self.channels, *size)
        return ArraySpec(shape, np.dtype(np.uint8))

    def value_nbytes(self) -> int | None:
        """Bytes of a value that is pixels, if its size is known."""
        if self.image_size is None:
            return None
        return self.image_size[0] * self.image_size[1] * self.channels

    def draw(self, value: Any) -> Drawn | None:
        if not self.draws:
            return None
        if self.is_encoded:
            from headrace.datasets.pixels import image_shape  # see `_decoded`

            return self.augment.draw(*image_shape(value, self.left))
        return self.augment.draw(*(value.shape[1:] if self.channels_first else value.shape[:2]))

    def _drawn_pixels(self, value: Any, drawn: Drawn | None) -> Pixels:
        """Applies draws to a value: uint8 in the layout of inputs."""
        if not any(self.augment) and self.channels_first == self._shows_channels_first:
            return value  # type: ignore[no-any-return]
        box, flip = drawn or (None, False)
        size = self.crop_size
        if self.is_encoded and size is not None:
            return self._decoded(value, size, self._shows_channels_first, box, flip)
        pixels = value
        if self.channels_first:
            pixels = value.transpose(1, 2, 0)
        if box is not None:
            pixels = box.of(pixels)
        if size is not None:
            pixels = resize_image(np.ascontiguousarray(pixels), size)
        return arranged(pixels, flip, self._shows_channels_first)

    def to_input(self, value: Any) -> Any:
        return self.shown(value, self.draw(value))

    def shown(self, value: Any, drawn: Drawn | None) -> Any:
        """The input of a value with these draws."""
        pixels = self._drawn_pixels(value, drawn)
        if not self.transformed:
            if self.normalize:
                out = np.empty(pixels.shape, self.dtype)
                IMAGENET.write(pixels, out)
                return as_tensor(out)
            return torch.from_numpy(writable(pixels))
        if self.transform_input == "pil":
            from PIL import Image  # see `_decoded`

            return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        if self.transform_input == "tensor":
            return torch.from_numpy(writable(pixels))
        return writable(pixels)

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        return self._row(value.shape[1:] if self.channels_first else value.shape[:2])

    def _row(self, size: tuple[int, ...] | None) -> ArraySpec | None:
        """Shape and dtype of inputs without transforms, for values of that size."""
        size = self.crop_size or size
        if self.transformed or size is None:
            return None
        dtype = self.dtype if self.normalize else np.dtype(np.uint8)
        return ArraySpec((self.channels, *size), dtype)

    def write_input(self, value: Any, drawn: Drawn | None, out: np.ndarray[Any, Any]) -> None:
        pixels = self._drawn_pixels(value, drawn)
        if self.normalize:
            IMAGENET.write(pixels, out)
        else:
            np.copyto(out, pixels)

    def _target_row(self, size: tuple[int, ...]) -> ArraySpec | None:
        """Shape and dtype of the target of an image of that size. None: targets are listed."""
        return ArraySpec((), np.dtype(np.int64))

    def sample_nbytes(self) -> int | None:
        row = self._row(self.image_size)
        if row is None:
            return None
        target = self._target_row(row.shape[1:])
        return None if target is None else row.nbytes + target.nbytes

    def unnormalized(self) -> tuple[Decoder, Normalization] | None:
        if self.transformed or self.normalize is not True:
            return None
        normalization = replace(IMAGENET, dtype=known_dtype(self.dtype) or torch.float32)
        return replace(self, normalize=False), normalization


class JointDecoder(ImageDecoder):
    """Decodes pairs of an image and a target in it. Values are pairs, or the encoded record if the
    image is cropped first.
    """

    splits_targets = True

    def value_spec(self) -> None:
        return None

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        drawn = self.draw(value)
        return self.shown(value, drawn), self.placed(target, drawn)

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, ArraySpec | None] | None:
        row = self._row(self.image_size)
        if row is None or not collating.stacks:
            return None
        return row, self._target_row(row.shape[1:])


class LabelDecoder(JointDecoder):
    """Decodes pairs of an image and a class number. A record is a pair of bytes, or a dict."""

    def decode(self, record: Any) -> Any:
        if isinstance(record, dict):
            record = record.values()
        image, label = record
        return super().decode(image), label

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        image, label = value
        if isinstance(label, np.ndarray) and label.size == 1:
            label = label.item()
        try:
            return image, int(label)
        except (ValueError, TypeError) as error:
            raise FormatError(f"the class number must be an integer, not {label!r:.60}") from error


class Opened(NamedTuple):
    """Opened images.

    Attributes:
        source: reads their records.
        labels: their targets and classes.
        decoder: decodes them.
        color: "RGB" or "L", if records are pixels. None: they are encoded.
        size: (height, width) of these pixels.
    """

    source: Any
    labels: Labels = Labels(None, [])
    decoder: type[ImageDecoder] = ImageDecoder
    color: str | None = None
    size: tuple[int, int] | None = None
