"""Makes batches whose images stay uint8, for a device that normalises them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.collate import DetectionCollator, VisionCollator, list_collate
from headrace.collate.vision import Normalization
from headrace.core.batcher import Batcher, Collating, MadeBatch
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.memory.tree import tensors_of
from headrace.order.ranks import BatchRequest

Make = Callable[[BatchRequest], MadeBatch]


class DevicePixels:
    """Makes batches whose images stay uint8: of a dataset that normalises, by the variant of its
    decoder that does not; or of any dataset with a `VisionCollator`.

    A user may set a transform or `on_error` at any time. The host normalises images that these may
    receive.

    Args:
        normalization: normalises the images later.
        source: the collator, or the dataset.
        collating: calls the collate function.
        decoder: the variant of the dataset's decoder.
    """

    def __init__(
        self, normalization: Normalization, source: Any, collating: Collating, decoder: Any = None
    ) -> None:
        self.normalization: Normalization = normalization
        self._source = source
        self._decoder = decoder
        self._lists_samples = collating.function is list_collate
        self._batcher: Batcher | None = None
        if decoder is not None:
            self._batcher = Batcher(source, collating, decoder)

    def sample_nbytes(self) -> int | None:
        """Bytes of a finished sample, if they are known and differ from the dataset's."""
        if self._batcher is None or self._source.is_transformed:
            return None
        nbytes: int | None = self._decoder.sample_nbytes()
        return nbytes

    def make(self, request: BatchRequest, on_host: Make) -> tuple[MadeBatch, tuple[int, ...]]:
        """A batch, and the numbers of its tensors that are to be normalised, in the order of
        `map_tensors`.

        Args:
            request: the indices of the samples.
            on_host: makes the batch of a request, normalised by the host.
        """
        if self._batcher is None:
            with self._source.leaving_pixels() as pixels:
                made = on_host(request)
        elif _may_look_at_images(self._source):
            return on_host(request), ()
        else:
            made = self._batcher.make(request)
            pixels = self._images_in(made.batch)
        return made, _numbers_of(made.batch, pixels)

    def _images_in(self, batch: Any) -> list[torch.Tensor]:
        dataset = self._source
        is_pair = dataset.targets is not None or self._decoder.always_pairs
        images = list[torch.Tensor]()
        for value in batch if self._lists_samples else [batch]:
            if is_pair or dataset.return_index:
                value = value[0]
            images += [value] if isinstance(value, torch.Tensor) else value
        return images


def pixels_of(dataset: Any, collating: Collating) -> DevicePixels | None:
    """What makes batches of images that a device normalises. None: nothing normalises images here,
    or the user's code may receive them.
    """
    left: tuple[Decoder, Normalization] | None = None
    if isinstance(dataset, BaseDataset):
        left = dataset.sample_decoder.unnormalized()
    function = collating.function
    if left is None:
        if type(function) is not VisionCollator or not collating.calls(function):
            return None
        if function.normalize is not True:
            return None
        return DevicePixels(function.normalization, function, collating)
    if _may_look_at_images(dataset):
        return None
    only_joins = function is list_collate or type(function) is DetectionCollator
    if not collating.stacks and not (only_joins and collating.calls(function)):
        return None
    decoder, normalization = left
    return DevicePixels(normalization, dataset, collating, decoder)


def _may_look_at_images(dataset: BaseDataset) -> bool:
    """True if the user's code may receive or return a normalised image."""
    is_transformed = dataset.transform is not None or dataset.transforms is not None
    return is_transformed or callable(dataset.on_error)


def _numbers_of(batch: Any, tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """The numbers of these tensors in a batch, in the order of `map_tensors`."""
    wanted = set(map(id, tensors))
    every = enumerate(tensors_of(batch))
    return tuple(number for number, tensor in every if id(tensor) in wanted)
