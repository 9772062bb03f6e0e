"""Samples of an image and its bounding boxes, which follow resizing, cropping and mirroring of
the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate import DetectionCollator
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.coco import CocoTargets, Objects, instance_masks
from headrace.datasets.image.joint import JointFormat, cut_mask
from headrace.datasets.image.masks import resize_nearest
from headrace.datasets.image.pixels import image_shape
from headrace.dtypes import ArraySpec

_LEAST = 1.0  # pixels, of what a crop leaves of a box


class Found(NamedTuple):
    """The objects in one image."""

    objects: Objects
    size: tuple[int, int]
    """Height and width that they are in pixels of."""
    shape: tuple[int, int]
    """Those of the image as it is stored, upright."""


@dataclass(kw_only=True, eq=False)
class BoxFormat(JointFormat):
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
        return value, np.array(
            record.shape[:2] if self.is_stored_decoded else image_shape(record, self.left), np.int64
        )

    def pixels(self, value: Any) -> npt.NDArray[np.uint8]:
        return super().pixels(value if self.is_encoded else value[0])

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, None] | None:
        row = self._row()
        function = collating.function
        if row is None or type(function) is not DetectionCollator or not function.stack:
            return None
        return (row, None) if collating.calls(function) else None

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        value, shape = (value, image_shape(value, self.left)) if self.is_encoded else value
        shape, targets = (int(shape[0]), int(shape[1])), dataset.targets
        assert isinstance(targets, CocoTargets)
        return value, Found(targets.objects(index), targets.size_of(index, shape), shape)

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        drawn = self.draw(value)
        return self.shown(value, drawn), self.placed(target, drawn)

    def placed(self, target: Found, drawn: Drawn | None) -> dict[str, Any]:
        """The objects where they are in the input."""
        objects, size, shape = target
        frame = shape if self.image_size is None else self.image_size
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
            masks = [
                cut_mask(resize_nearest(mask, frame), drawn, self.crop_size)
                for mask in instance_masks(wanted, *size)
            ]
            made["masks"] = torch.from_numpy(
                np.stack(masks) if masks else np.zeros((0, *(self.crop_size or frame)), np.uint8)
            )
        return made

    def sample_nbytes(self) -> None:
        return None


def _areas(boxes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    sides = boxes[:, 2:].astype(np.float64) - boxes[:, :2]
    areas: npt.NDArray[np.float64] = sides[:, 0] * sides[:, 1]
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
    part, flip = (None, False) if drawn is None else drawn
    top, left, height, width = (0, 0, *frame) if part is None else part
    shape = crop_size or (height, width)
    moved = boxes.astype(np.float64)
    moved[:, 0::2] = (moved[:, 0::2] * (frame[1] / size[1]) - left) * (shape[1] / width)
    moved[:, 1::2] = (moved[:, 1::2] * (frame[0] / size[0]) - top) * (shape[0] / height)
    least = np.minimum(moved[:, 2:] - moved[:, :2], _LEAST)  # of what was smaller before, all
    moved[:, 0::2] = moved[:, 0::2].clip(0, shape[1])
    moved[:, 1::2] = moved[:, 1::2].clip(0, shape[0])
    sides = moved[:, 2:] - moved[:, :2]
    kept = np.asarray(((sides >= least * (1 - 1e-6)) & (sides > 0)).all(axis=1))
    if flip:
        moved[:, [0, 2]] = shape[1] - moved[:, [2, 0]]
    return moved[kept].astype(np.float32), kept
