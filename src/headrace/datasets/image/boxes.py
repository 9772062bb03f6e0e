"""Decodes pairs of an image and the objects in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate import DetectionCollator
from headrace.core.batcher import Collating
from headrace.core.dataset import BaseDataset
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.coco import CocoTargets, Objects, instance_masks
from headrace.datasets.image.decoder import JointDecoder
from headrace.datasets.image.masks import cut_mask, resize_nearest
from headrace.datasets.pixels import image_shape
from headrace.dtypes import ArraySpec

_LEAST = 1.0  # pixels that a crop must leave of a box


class BoxDecoder(JointDecoder):
    """Decodes pairs of an image and a dict of the objects in it. Values are the pixels and the size
    of the stored image.

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

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, None] | None:
        row = self._row(self.image_size)
        function = collating.function
        if row is None or type(function) is not DetectionCollator:
            return None
        return (row, None) if function.stack and collating.calls(function) else None

    def _target_row(self, size: tuple[int, ...]) -> None:
        return None

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        """See `Decoder`. The target is the objects, the (height, width) that boxes refer to, and
        the upright (height, width) of the stored image.
        """
        if self.is_encoded:
            shape = image_shape(value, self.left)
        else:
            value, sides = value
            shape = tuple(sides.tolist())
        targets = dataset.targets
        assert isinstance(targets, CocoTargets)
        return value, (targets.objects(index), targets.size_of(index, shape), shape)

    def placed(
        self, target: tuple[Objects, tuple[int, int], tuple[int, int]], drawn: Drawn | None
    ) -> dict[str, Any]:
        """The objects in coordinates of the input."""
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


def _areas(boxes: npt.NDArray[Any]) -> Any:
    return np.prod(boxes[:, 2:].astype(np.float64) - boxes[:, :2], axis=1)


def place_boxes(
    boxes: npt.NDArray[np.float32],
    size: tuple[int, int],
    frame: tuple[int, int],
    drawn: Drawn | None,
    crop_size: tuple[int, int] | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Moves boxes to where they are after a crop, a resize and a flip of their image.

    Args:
        boxes: left, top, right, bottom in pixels of the image ([N, 4]).
        size: (height, width) of the image.
        frame: (height, width) of the image before the crop.
        drawn: the part that is cropped, and whether it is mirrored.
        crop_size: size to which the part is resized. None: it is not resized.

    Returns:
        The boxes, clipped to the result (float32 [M, 4]); and which of the N are kept ([N] bool):
        those with at least a pixel left each way, or with all of their size.
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
