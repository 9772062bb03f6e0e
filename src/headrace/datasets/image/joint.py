"""Samples of an image and what lies in it, a mask or boxes: both are resized, cropped and
mirrored by the same draw.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.claims import Left
from headrace.datasets.image.format import ImageFormat
from headrace.datasets.image.masks import Mask, decode_mask, mask_image, mask_spec, resize_nearest
from headrace.datasets.image.pixels import image_shape
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError


@dataclass(kw_only=True, eq=False)
class JointFormat(ImageFormat):
    """Images and something that lies in them: values are the pixels and that, or the encoded record
    where an image is cropped first.

    Args:
        is_joint: True if a transform gets input and target.
    """

    splits_targets = True
    decodes_late = True

    is_joint: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.copies, self.decodes_late = False, True

    @property
    def held_as(self) -> str:
        return f"{super().held_as} {type(self).__name__}"

    def value_spec(self) -> None:
        return None

    @abstractmethod
    def placed(self, target: Any, drawn: Drawn | None) -> Any:
        """What becomes of a target by the draws for its image."""

    def _row(self) -> ArraySpec | None:
        """Shape and dtype of images of one size."""
        size = self.crop_size or self.image_size
        if size is None or not (self.is_encoded or self.image_size is not None):
            return None
        return ArraySpec((self.channels, *size), self.input_dtype)


@dataclass(kw_only=True, eq=False)
class MaskFormat(JointFormat):
    """Pairs of an image and a mask of its size, which is resized to the nearest pixel. Records hold
    the bytes of both.

    A target is an int64 tensor [H, W]; a joint transform gets it as it gets the image: as a PIL
    image, an array or a tensor.
    """

    def decode(self, record: Any) -> Any:
        image, mask = record
        if self.is_encoded:
            # no arrays: those are taken for pixels
            return record if isinstance(image, bytes) else (image.tobytes(), mask.tobytes())
        decoded = mask if self.is_stored_decoded else mask_of(image, mask, self.left)
        return super().decode(image), decoded if self.image_size is None else resize_nearest(
            decoded, self.image_size
        )

    def pixels(self, value: Any) -> Mask:
        return super().pixels(value[0])

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        if not self.is_encoded:
            return value[0], value[1]
        image, mask = value
        return image, mask_of(image, mask, self.left)

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        drawn = self.draw(value)
        return self.shown(value, drawn), self._shown_mask(self.placed(target, drawn))

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, ArraySpec] | None:
        row = self._row()
        if row is None or not collating.stacks:
            return None
        return row, ArraySpec(row.shape[1:], np.dtype(np.int64))

    def placed(self, target: Mask, drawn: Drawn | None) -> Mask:
        return cut_mask(target, drawn, self.crop_size)

    def _shown_mask(self, mask: Mask) -> Any:
        if self.is_joint and self.transformed and self.transform_input != "tensor":
            return mask_image(mask) if self.transform_input == "pil" else np.array(mask)
        return torch.from_numpy(mask.astype(np.int64))

    def sample_nbytes(self) -> int | None:
        nbytes, size = super().sample_nbytes(), self.crop_size or self.image_size
        return None if nbytes is None or size is None else nbytes + 8 * size[0] * size[1]


def mask_of(image: Any, data: Any, left: Left | None = None) -> Mask:
    """The mask of an encoded image, as large as that.

    Args:
        image: the bytes of the image.
        data: those of the mask.
        left: as for `decode_mask`.

    Raises:
        FormatError: it is of another size, or can't be decoded.
    """
    shape = image_shape(image, left)
    with _named():
        mask = decode_mask(data, left)
    _check_shape(mask.shape, shape)
    return mask


def check_mask_header(image: Any, data: Any, left: Left | None = None) -> None:
    """Raises the FormatError of `mask_of` where the headers tell it."""
    shape = image_shape(image, left)
    with _named():
        spec = mask_spec(data, left)
    _check_shape(spec.shape, shape)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise FormatError(f"the mask: {error}") from error


def _check_shape(mask: tuple[int, ...], image: tuple[int, int]) -> None:
    if mask != image:
        turned = (
            "; its EXIF orientation turns the image, and not the mask"
            if mask == image[::-1]
            else ""
        )
        raise FormatError(
            f"the image is {image[1]:,} x {image[0]:,} pixels, and its mask {mask[1]:,} x "
            f"{mask[0]:,}{turned}"
        )


def cut_mask(mask: Mask, drawn: Drawn | None, size: tuple[int, int] | None) -> Mask:
    """What becomes of a mask [H, W] where its image is cropped, resized to `size`, and mirrored."""
    box, flip = (None, False) if drawn is None else drawn
    mask = mask if box is None else box.of(mask)
    mask = mask if size is None else resize_nearest(mask, size)
    return mask[:, ::-1] if flip else mask
