"""Samples of an image and what lies in it, a mask or boxes: both are resized, cropped and
mirrored by the same draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate import DetectionCollator
from headrace.core.batcher import Collating
from headrace.core.dataset import BaseDataset
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.claims import Left
from headrace.datasets.image.coco import CocoTargets, Objects, instance_masks
from headrace.datasets.image.format import ImageDecoder
from headrace.datasets.image.masks import Mask, decode_mask, mask_image, resize_nearest
from headrace.datasets.image.pixels import Pixels, image_shape
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError

_LEAST = 1.0  # pixels, of what a crop leaves of a box


@dataclass(kw_only=True, eq=False)
class JointDecoder(ImageDecoder):
    """Images and something that lies in them: values are the pixels and that, or the encoded record
    where an image is cropped first.
    """

    splits_targets = True
    decodes_late = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.copies = False
        self.decodes_late = True

    @property
    def held_as(self) -> str:
        return f"{super().held_as} {type(self).__name__}"

    def value_spec(self) -> None:
        return None

    def pixels(self, value: Any) -> Pixels:
        return super().pixels(value[0] if isinstance(value, tuple) else value)

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        drawn = self.draw(value)
        return self.shown(value, drawn), self.shown_target(self.placed(target, drawn))

    def placed(self, target: Any, drawn: Drawn | None) -> Any:
        """What becomes of a target by the draws for its image."""
        return target

    def shown_target(self, placed: Any) -> Any:
        """The target that a user gets."""
        return placed

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, ArraySpec | None] | None:
        size = self.crop_size or self.image_size
        is_of_one_size = self.is_encoded or self.image_size is not None
        if size is None or not is_of_one_size or not self._joins(collating):
            return None
        row = ArraySpec((self.channels, *size), self.input_dtype)
        return row, self._target_row(size)

    def _joins(self, collating: Collating) -> bool:
        """True if a batch is rows of images, beside what becomes of the targets."""
        return collating.stacks

    def _target_row(self, size: tuple[int, int]) -> ArraySpec | None:
        """Shape and dtype of the target of an image of that size; None: it has none."""
        return ArraySpec((), np.dtype(np.int64))


@dataclass(kw_only=True, eq=False)
class MaskDecoder(JointDecoder):
    """Pairs of an image and a mask of its size, which is resized to the nearest pixel. Records hold
    the bytes of both.

    A target is an int64 tensor [H, W]; a joint transform gets it as it gets the image: as a PIL
    image, an array or a tensor.
    """

    def decode(self, record: Any) -> Any:
        image, mask = record
        if self.is_encoded:
            # no arrays: those are taken for pixels
            if isinstance(image, bytes):
                return record
            return (image.tobytes(), mask.tobytes())
        if not self.is_stored_decoded:
            mask = mask_of(image, mask, self.left)
        return super().decode(image), resize_nearest(mask, self.image_size)

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        image, mask = value
        if self.is_encoded:
            mask = mask_of(image, mask, self.left)
        return image, mask

    def _target_row(self, size: tuple[int, int]) -> ArraySpec:
        return ArraySpec(size, np.dtype(np.int64))

    def placed(self, target: Mask, drawn: Drawn | None) -> Mask:
        return cut_mask(target, drawn, self.crop_size)

    def shown_target(self, placed: Mask) -> Any:
        if self.is_joint and self.transformed:
            if self.transform_input == "pil":
                return mask_image(placed)
            if self.transform_input == "numpy":
                return np.array(placed)
        return torch.from_numpy(placed.astype(np.int64))

    def sample_nbytes(self) -> int | None:
        nbytes = super().sample_nbytes()
        size = self.crop_size or self.image_size
        if nbytes is None or size is None:
            return None
        return nbytes + 8 * size[0] * size[1]


@dataclass(kw_only=True, eq=False)
class LabelDecoder(JointDecoder):
    """Pairs of an image and its class number. Records hold the bytes of both."""

    def decode(self, record: Any) -> Any:
        image, label = record
        if not self.is_encoded:
            return super().decode(image), np.array(_integer(label), np.int64)
        return image, label

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        return value[0], _integer(value[1])


def _integer(label: Any) -> int:
    try:
        return int(label)
    except ValueError as error:
        raise FormatError(f"the class number is none: {label!r:.60}") from error


def mask_of(
    image: Any, data: Any, left: Left | None = None, read: Callable[..., Any] = decode_mask
) -> Any:
    """The mask of an encoded image, as large as that.

    Args:
        image: the bytes of the image.
        data: those of the mask.
        left: as for `decode_mask`.
        read: `decode_mask`, or `mask_spec` of which the shape and dtype are enough.

    Raises:
        FormatError: it is of another size, or can't be decoded.
    """
    height, width = image_shape(image, left)
    try:
        mask = read(data, left)
    except FormatError as error:
        raise FormatError(f"the mask: {error}") from error
    if mask.shape != (height, width):
        raise FormatError(
            f"the image is {width:,} x {height:,} pixels (as its EXIF orientation turns it), and "
            f"its mask {mask.shape[1]:,} x {mask.shape[0]:,}"
        )
    return mask


def cut_mask(mask: Mask, drawn: Drawn | None, size: tuple[int, int] | None) -> Mask:
    """What becomes of a mask [H, W] where its image is cropped, resized to `size`, and mirrored."""
    part, flip = drawn or (None, False)
    if part is not None:
        mask = part.of(mask)
    mask = resize_nearest(mask, size)
    if flip:
        mask = mask[:, ::-1]
    return mask


@dataclass(kw_only=True, eq=False)
class BoxDecoder(JointDecoder):
    """Pairs of an image and a dict of its objects. Values are the pixels and the size of the stored
    image.

    A target has `boxes` (float32 [N, 4]: left, top, right, bottom in pixels of the input), `labels`
    (int64 [N]), `area` (float32 [N]), `iscrowd` (int64 [N]), `image_id` (int) and, on request,
    `masks` (uint8 [N, H, W]).
    """

    def decode(self, record: Any) -> Any:
        value = super().decode(record)
        if self.is_encoded:
            return value
        shape = record.shape[:2] if self.is_stored_decoded else image_shape(record, self.left)
        return value, np.array(shape, np.int64)

    def _joins(self, collating: Collating) -> bool:
        function = collating.function
        return type(function) is DetectionCollator and function.stack and collating.calls(function)

    def _target_row(self, size: tuple[int, int]) -> None:
        return None

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        """The target: the objects, height and width that they are in pixels of, and those of the
        image as it is stored, upright.
        """
        if self.is_encoded:
            shape = image_shape(value, self.left)
        else:
            value, sides = value
            shape = (int(sides[0]), int(sides[1]))
        targets = dataset.targets
        assert isinstance(targets, CocoTargets)
        return value, (targets.objects(index), targets.size_of(index, shape), shape)

    def placed(
        self, target: tuple[Objects, tuple[int, int], tuple[int, int]], drawn: Drawn | None
    ) -> dict[str, Any]:
        """The objects where they are in the input."""
        objects, size, shape = target
        frame = self.image_size or shape
        before = objects.arrays["boxes"]
        boxes, kept = place_boxes(before, size, frame, drawn, self.crop_size)
        arrays = {name: values[kept] for name, values in objects.arrays.items()}
        scales = _areas(boxes) / _areas(before[kept])
        arrays["area"] = (arrays["area"] * scales).astype(np.float32)
        arrays["boxes"] = boxes
        made: dict[str, Any] = {name: torch.from_numpy(one) for name, one in arrays.items()}
        made["image_id"] = objects.image_id
        if objects.segmentations is not None:
            wanted = [objects.segmentations[number] for number in np.flatnonzero(kept)]
            masks = np.zeros((len(wanted), *(self.crop_size or frame)), np.uint8)
            for number, mask in enumerate(instance_masks(wanted, *size)):
                masks[number] = cut_mask(resize_nearest(mask, frame), drawn, self.crop_size)
            made["masks"] = torch.from_numpy(masks)
        return made

    def sample_nbytes(self) -> None:
        return None


def _areas(boxes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    areas: npt.NDArray[np.float64]
    areas = np.prod(boxes[:, 2:].astype(np.float64) - boxes[:, :2], axis=1)
    return areas


def place_boxes(
    boxes: npt.NDArray[np.float32],
    size: tuple[int, int],
    frame: tuple[int, int],
    drawn: Drawn | None,
    crop_size: tuple[int, int] | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Boxes of an image where they are in what becomes of it.

    Args:
        boxes: [N, 4]: left, top, right, bottom, in pixels of the image.
        size: (height, width) of the image.
        frame: its size where it is cropped and mirrored.
        drawn: the part that is cropped, and whether it is mirrored.
        crop_size: to which the part is resized; None: it is not.

    Returns:
        [M, 4] float32 boxes, clipped to what is shown; and which are kept ([N] bool): those of
        which a pixel each way is left, or all that there was.
    """
    part, flip = drawn or (None, False)
    top, left, height, width = part or (0, 0, *frame)
    rows, columns = crop_size or (height, width)
    moved = boxes * np.array([frame[1] / size[1], frame[0] / size[0]] * 2)
    moved -= [left, top] * 2
    moved *= [columns / width, rows / height] * 2
    least = np.minimum(moved[:, 2:] - moved[:, :2], _LEAST)  # of what was smaller before, all
    moved = moved.clip(0, [columns, rows] * 2)
    sides = moved[:, 2:] - moved[:, :2]
    kept = np.asarray(((sides >= least * (1 - 1e-6)) & (sides > 0)).all(axis=1))
    if flip:
        moved[:, [0, 2]] = columns - moved[:, [2, 0]]
    return moved[kept].astype(np.float32), kept
