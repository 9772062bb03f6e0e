"""Samples of an image and what lies in it, a mask or boxes: both are resized, cropped and mirrored by the same draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.datasets.core.format import HasTargets
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.format import ImageFormat
from headrace.datasets.image.masks import Mask, decode_mask, mask_image, resize_nearest
from headrace.datasets.image.sizing import image_shape
from headrace.errors import FormatError


@dataclass(kw_only=True, eq=False)
class JointFormat(ImageFormat):
    """Images and something that lies in them: values are the pixels and that, or the encoded record where an image is cropped first.

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


@dataclass(kw_only=True, eq=False)
class MaskFormat(JointFormat):
    """Pairs of an image and a mask of its size, which is resized to the nearest pixel. Records hold the bytes of both.

    A target is an int64 tensor [H, W]; a joint transform gets it as it gets the image: as a PIL image, an array or a tensor.
    """

    def decode(self, record: Any) -> Any:
        image, mask = record
        if self.is_encoded:
            return record
        decoded = self._mask_of(image, mask)
        return super().decode(image), decoded if self.image_size is None else resize_nearest(decoded, self.image_size)

    def _mask_of(self, image: Any, data: Any) -> Mask:
        """The mask of an encoded image, as large as that.

        Raises:
            FormatError: it is of another size, or can't be decoded.
        """
        height, width = image_shape(image, self.left)
        try:
            mask = decode_mask(data, self.left)
        except FormatError as error:
            raise FormatError(f"the mask: {error}") from error
        if mask.shape != (height, width):
            turned = "; its EXIF orientation turns the image, and not the mask" if mask.shape == (width, height) else ""
            raise FormatError(f"the image is {width:,} x {height:,} pixels, and its mask {mask.shape[1]:,} x {mask.shape[0]:,}{turned}")
        return mask

    def pixels(self, value: Any) -> Mask:
        return super().pixels(value[0])

    def split_target(self, value: Any, index: int, dataset: HasTargets) -> tuple[Any, Any]:
        if not self.is_encoded:
            return value[0], value[1]
        image, mask = value
        return image, self._mask_of(image, mask)

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        drawn = self.draw(value)
        mask = cut_mask(target, drawn, self.crop_size)
        return self.shown(value, drawn), self._shown_mask(mask)

    def _shown_mask(self, mask: Mask) -> Any:
        if self.is_joint and self.transformed and self.transform_input != "tensor":
            return mask_image(mask) if self.transform_input == "pil" else np.array(mask)
        return torch.from_numpy(mask.astype(np.int64))

    def sample_nbytes(self) -> int | None:
        nbytes, size = super().sample_nbytes(), self.crop_size or self.image_size
        return None if nbytes is None or size is None else nbytes + 8 * size[0] * size[1]


def cut_mask(mask: Mask, drawn: Drawn | None, size: tuple[int, int] | None) -> Mask:
    """What becomes of a mask [H, W] where its image is cropped, resized to `size`, and mirrored."""
    box, flip = (None, False) if drawn is None else drawn
    mask = mask if box is None else box.of(mask)
    mask = mask if size is None else resize_nearest(mask, size)
    return mask[:, ::-1] if flip else mask
