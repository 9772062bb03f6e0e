"""Batches whose images stay uint8, for a device that normalises them: of which datasets and
collate functions, and how.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.collate import DetectionCollator, VisionCollator, list_collate
from headrace.collate.normalization import Normalization
from headrace.core.batcher import Batcher, Collating, MadeBatch
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Unnormalized
from headrace.core.views import parts_of
from headrace.memory.tree import map_tensors
from headrace.order.request import BatchRequest

Make = Callable[[BatchRequest], MadeBatch]
_EACH = object()
"""A step to all samples of a list."""


class PixelBatches(ABC):
    """Makes batches whose images stay uint8.

    Attributes:
        normalization: what is left to be done with the images.
    """

    normalization: Normalization

    @abstractmethod
    def make(self, request: BatchRequest, on_host: Make) -> tuple[MadeBatch, list[torch.Tensor]]:
        """A batch, and those of its tensors that are to be normalised: none where it can be made on
        the host alone now.

        Args:
            request: names the samples.
            on_host: makes the batch of a request, normalised.
        """

    def sample_nbytes(self) -> int | None:
        """Bytes of a finished sample, where they are known and other than the dataset says."""
        return None

    def dataset_of(self, dataset: Any) -> Any:
        """What makes the samples of the dataset's batches."""
        return dataset


class OfDataset(PixelBatches):
    """Of a dataset that normalises, by the variant of its format that doesn't.

    A user may set a transform or `on_error` at any time: where samples may be made of normalised
    images, the host normalises them.

    Args:
        dataset, collating: for which `look_at_images` finds no reason against it.
    """

    def __init__(self, dataset: BaseDataset, collating: Collating) -> None:
        left = dataset.sample_decoder.unnormalized()
        assert isinstance(left, Unnormalized)
        self._dataset = dataset
        self._decoder, self.normalization, self._path = left
        self._lists_samples = collating.function is list_collate
        self._batcher = Batcher(dataset, collating, self._decoder)

    def sample_nbytes(self) -> int | None:
        return None if self._dataset.is_transformed else self._decoder.sample_nbytes()

    def dataset_of(self, dataset: Any) -> Any:
        view = self._dataset.subset(np.arange(len(self._dataset)))
        view._decoder = self._decoder
        return view

    def make(self, request: BatchRequest, on_host: Make) -> tuple[MadeBatch, list[torch.Tensor]]:
        if _may_look_at_images(self._dataset) is not None:
            return on_host(request), []
        made = self._batcher.make(request)
        return made, list(_tensors_at(made.batch, self._steps()))

    def _steps(self) -> list[Any]:
        """The steps to the images in a batch."""
        dataset = self._dataset
        steps: list[Any] = list(self._path)
        is_pair = dataset.targets is not None or self._decoder.always_pairs
        if is_pair or (dataset.return_index and not steps):
            steps = [0, *steps]
        return [_EACH, *steps] if self._lists_samples else steps


class OfCollator(PixelBatches):
    """Of a `VisionCollator`, which gets uint8 images from any dataset."""

    def __init__(self, collator: VisionCollator, normalization: Normalization) -> None:
        self._collator, self.normalization = collator, normalization

    def make(self, request: BatchRequest, on_host: Make) -> tuple[MadeBatch, list[torch.Tensor]]:
        with self._collator.leaving_pixels() as pixels:
            return on_host(request), pixels


class Images(NamedTuple):
    """Where images are normalised, if it is on the way to a device.

    Attributes:
        pixels: makes batches whose images the device normalises.
        why_on_host: why the host makes images what they are. None for both: nobody here normalises
            images.
    """

    pixels: PixelBatches | None = None
    why_on_host: str | None = None

    @property
    def normalization(self) -> Normalization | None:
        """What the device is to do."""
        return None if self.pixels is None else self.pixels.normalization

    def dataset_of(self, dataset: Any) -> Any:
        """What makes the samples of the dataset's batches."""
        return dataset if self.pixels is None else self.pixels.dataset_of(dataset)


def look_at_images(dataset: Any, collating: Collating) -> Images:
    """Where the images of a dataset and a collate function are normalised, on their way to a
    device.
    """
    left, function = _left(dataset), collating.function
    if (
        type(function) is VisionCollator
        and collating.calls(function)
        and not isinstance(left, Unnormalized)
    ):
        found = function.device_normalization
        return (
            Images(OfCollator(function, found))
            if isinstance(found, Normalization)
            else Images(why_on_host=found or left)
        )
    if not isinstance(left, Unnormalized):
        return Images(why_on_host=left)
    if not isinstance(dataset, BaseDataset):
        return Images(
            why_on_host=(
                f"a {type(dataset).__name__} holds their dataset; headrace's own subset() and "
                "split() don't hinder it"
            )
        )
    if not (
        collating.stacks
        or (_only_joins(function) and function is not None and collating.calls(function))
    ):
        name = getattr(function, "__name__", type(function).__name__)
        return Images(why_on_host=f"the collate function ({name}) may look at them")
    why = _may_look_at_images(dataset)
    return Images(OfDataset(dataset, collating)) if why is None else Images(why_on_host=why)


def numbers_of(batch: Any, tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Which of all tensors of a batch, in the order of `map_tensors`, these are."""
    wanted, numbers, count = set(map(id, tensors)), list[int](), 0

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if id(tensor) in wanted:
            numbers.append(count)
        count += 1
        return tensor

    if wanted:
        map_tensors(batch, look)
    return tuple(numbers)


def _left(dataset: Any) -> Unnormalized | str | None:
    """What the dataset, or one that it holds, says of its images."""
    for part in parts_of(dataset, opaque=BaseDataset):
        if (
            isinstance(part, BaseDataset)
            and (left := part.sample_decoder.unnormalized()) is not None
        ):
            return left
    return None


def _only_joins(function: Any) -> bool:
    return function is list_collate or type(function) is DetectionCollator


def _may_look_at_images(dataset: BaseDataset) -> str | None:
    """What of the user's may get a sample's normalised image, or give one."""
    if dataset.transform is not None or dataset.transforms is not None:
        return "a transform gets them"
    return "on_error gives finished samples" if callable(dataset.on_error) else None


def _tensors_at(value: Any, steps: list[Any]) -> Iterator[torch.Tensor]:
    """The tensor that some steps lead to, or all in the list there."""
    if isinstance(value, torch.Tensor):
        yield value
    elif steps and steps[0] is not _EACH:
        yield from _tensors_at(value[steps[0]], steps[1:])
    else:
        for one in value:
            yield from _tensors_at(one, steps[1:])
