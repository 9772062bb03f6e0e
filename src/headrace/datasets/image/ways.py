"""Ways of making batches of images with masks or boxes: both are decoded by one thread, into
their rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate import DetectionCollator
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch
from headrace.datasets.core.ways import RowByRow, SampleBySample
from headrace.dtypes import ArraySpec
from headrace.errors import SampleError
from headrace.memory.ring import empty

if TYPE_CHECKING:
    from headrace.datasets.image.joint import JointFormat


def way_of_pairs(
    dataset: BaseDataset,
    collating: Collating,
    format_: JointFormat,
    row: ArraySpec,
    has_masks: bool,
) -> BatchWay | None:
    """The way to batches of images of one size with their masks or boxes; None: samples are made
    one by one.

    Args:
        dataset: of images.
        collating: the collate function.
        format_: of the dataset.
        row: shape and dtype of an input.
        has_masks: True of masks, False of boxes.
    """
    if not _is_bare(dataset):
        return None
    if has_masks:
        return MasksInRows(dataset, collating, format_, row) if collating.stacks else None
    function = collating.function
    if not (
        isinstance(function, DetectionCollator)
        and type(function) is DetectionCollator
        and function.stack
    ):
        return None
    return BoxesBesideRows(dataset, collating, format_, row) if collating.calls(function) else None


def _is_bare(dataset: BaseDataset) -> bool:
    return dataset.sample_format.makes_plain_samples and not (
        dataset.return_index or dataset.is_transformed
    )


class _Pairs(RowByRow):
    """Images in their rows, and what lies in them."""

    def __init__(
        self, dataset: BaseDataset, collating: Collating, format_: JointFormat, row: ArraySpec
    ) -> None:
        super().__init__(dataset, SampleBySample(dataset, collating), None, row)
        self._format = format_

    def _fits(self) -> bool:
        return _is_bare(self._dataset)

    def _drawn_from(self, value: Any) -> Any:
        return value if isinstance(value, SampleError) else self._format.image_in(value)


class MasksInRows(_Pairs):
    """Masks as int64 [batch, H, W] beside the images."""

    name = "images and masks decoded row by row"

    def _beside(self, count: int) -> torch.Tensor:
        return empty((count, *self._row.shape[1:]), torch.int64)

    def _write_sample(
        self,
        index: int,
        value: Any,
        drawn: Any,
        row: npt.NDArray[Any],
        beside: torch.Tensor,
        number: int,
    ) -> None:
        image, mask = self._dataset.split_target(index, value)
        self._format.write_input(image, drawn, row)
        np.copyto(beside.numpy()[number], self._format.placed(mask, drawn))

    def _target(self, index: int, beside: torch.Tensor, number: int) -> torch.Tensor:
        return beside[number]

    def _batch(self, out: torch.Tensor, beside: torch.Tensor, indices: Sequence[int]) -> MadeBatch:
        return MadeBatch((out, beside), len(indices))

    def _moved(self, beside: torch.Tensor, good: list[int]) -> torch.Tensor:
        rows = beside.numpy()
        for to, number in enumerate(good):
            if to != number:
                rows[to] = rows[number]
        return beside[: len(good)]


class BoxesBesideRows(_Pairs):
    """Dicts of boxes, in a list beside the images."""

    name = "images decoded row by row, boxes beside them"

    def _beside(self, count: int) -> list[Any]:
        return [None] * count

    def _write_sample(
        self,
        index: int,
        value: Any,
        drawn: Any,
        row: npt.NDArray[Any],
        beside: list[Any],
        number: int,
    ) -> None:
        image, found = self._dataset.split_target(index, value)
        self._format.write_input(image, drawn, row)
        beside[number] = self._format.placed(found, drawn)

    def _target(self, index: int, beside: list[Any], number: int) -> Any:
        return beside[number]

    def _batch(self, out: torch.Tensor, beside: list[Any], indices: Sequence[int]) -> MadeBatch:
        return MadeBatch((out, beside), len(indices))

    def _moved(self, beside: list[Any], good: list[int]) -> list[Any]:
        return [beside[number] for number in good]
