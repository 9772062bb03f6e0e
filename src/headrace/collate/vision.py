"""How do images of uint8 become a normalised batch?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.collate.fields import Field, Fields, Place, shown
from headrace.collate.stack import USUAL, from_array, is_numeric, shape_of, stack_tree
from headrace.errors import ConfigError
from headrace.memory.ring import empty

STATISTICS = {  # mean and standard deviation of red, green and blue, where pixels are in [0, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
_IMAGES = ("image", "images", "pixel_values", "img")
_BOXES = ("boxes", "bboxes")
_OF_OBJECTS = {*_BOXES, "labels", "class_labels", "scores", "masks", "keypoints", "area", "iscrowd"}


class VisionCollator:
    """Stacks images of uint8 and normalises them on their way into the batch: each is converted, scaled and shifted while it is in the
    processor's cache, and no float image is made before.

    An image is a uint8 tensor or array [C, H, W], [H, W, C] or [H, W], and the batch float32 [batch, C, H, W]:
    ``(pixel / 255 - mean) / std``. All else is stacked as `stack_collate` does it, with its dtype: a mask is not normalised. What has one
    entry an object has another length in each sample, and stays a list of tensors: in a dict with "boxes" or "bboxes" these are that
    field and "labels", "class_labels", "scores", "masks", "keypoints", "area" and "iscrowd".

    Args:
        statistics: "imagenet" or "cifar10"; a grey image takes the means of the three channels' numbers, as `ImageDataset` does.
        mean, std: statistics of one's own, instead: a number for all channels, or one for each (an array will do); of pixels in [0, 1].
        fields: keys or positions of the images ("outer.inner" for one inside of another); all arrays in such a field are images. None:
            the sample itself, the first item of a tuple or list, the first of "image", "images", "pixel_values" and "img" in a dict.
        channels: "first" or "last", where images have them; None: where there are as many as the statistics have (or 1).
        lists: keys or positions of what stays a list; None: see above.

    Raises:
        ConfigError: an argument makes no sense; in a call: an image is not uint8 (floats may be normalised already: nothing is
            normalised twice), has another shape than the first, or the wrong number of channels; there is no image. The message names
            sample, place and remedy.
    """

    def __init__(
        self,
        statistics: str | None = "imagenet",
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        fields: Field | Iterable[Field] | None = None,
        channels: str | None = None,
        lists: Field | Iterable[Field] | None = None,
    ) -> None:
        if channels not in ("first", "last", None):
            raise ConfigError(f"channels must be 'first', 'last' or None, not {channels!r}")
        self._means, self._stds, self._is_named = _statistics(statistics, mean, std)
        self._fields = None if fields is None else Fields(fields, "fields")
        self._lists = None if lists is None else Fields(lists, "lists")
        self._channels = channels

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch of the samples."""
        samples = list(samples)
        way = _way_to_image(samples[0]) if self._fields is None and samples else None
        met: set[str] = set()
        with_boxes: set[Place] = set()

        def special(values: list[Any], place: Place) -> Any:
            first = values[0]
            if isinstance(first, Mapping) and any(name in first for name in _BOXES):
                with_boxes.add(place)
            if self._is_a_list(place, with_boxes, met):
                return [_own(value) for value in values]
            if (isinstance(first, torch.Tensor) or is_numeric(first)) and self._is_image(place, way, met):
                return self._images(values, place)
            return USUAL

        batch = stack_tree(samples, special)
        for fields in (self._fields, self._lists):
            if fields is not None:
                fields.check(met, samples[0])
        return batch

    def _is_image(self, place: Place, way: list[str] | None, met: set[str]) -> bool:
        if self._fields is None:
            return way is not None and len(place) >= len(way) and all(name in step.names for name, step in zip(way, place, strict=False))
        return _note(self._fields.find_around(place), met)

    def _is_a_list(self, place: Place, with_boxes: set[Place], met: set[str]) -> bool:
        if self._lists is None:
            return bool(place) and place[:-1] in with_boxes and place[-1].names[0] in _OF_OBJECTS
        return _note(self._lists.find(place), met)

    def _images(self, values: list[Any], place: Place) -> torch.Tensor:
        images = [self._channels_first(value, number, place) for number, value in enumerate(values)]
        first = images[0]
        for number, image in enumerate(images):
            if image.shape != first.shape:
                raise _unfit(
                    number, place, f"is {list(image.shape)}, the first is {list(first.shape)}",
                    'give all one shape (ImageDataset: image_size=), or keep them apart with collate_fn="list"',
                )  # fmt: skip
        scale, shift = self._factors(len(first), place)
        batch = empty((len(images), *first.shape), torch.float32)
        for to, image in zip(batch, images, strict=True):
            to.copy_(image).mul_(scale).add_(shift)
        return batch

    def _channels_first(self, value: Any, number: int, place: Place) -> torch.Tensor:
        """[C, H, W] of an image, over the same memory where that can be."""
        if not isinstance(value, torch.Tensor) and not is_numeric(value):
            raise _unfit(number, place, f"is {shape_of(value)}", "an image is a tensor or an array of uint8")
        image = value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else from_array(value)
        if image.dtype != torch.uint8:
            raise _unfit(
                number, place, f"is {shape_of(image)}, not uint8",
                "it may be normalised already, and nothing is normalised twice: have the dataset give uint8 (ImageDataset: "
                'normalize=False, torchvision: PILToTensor), or stack what is finished with collate_fn="default"',
            )  # fmt: skip
        if image.ndim == 2:
            return image[None]
        if image.ndim != 3:
            raise _unfit(number, place, f"is {shape_of(image)}", "an image is [C, H, W], [H, W, C] or [H, W]")
        counts = {1, 3} if self._is_named or len(self._means) == 1 else {len(self._means)}
        is_first, is_last = (image.shape[axis] in counts for axis in (0, 2))
        if self._channels is None and is_first == is_last:
            known = " or ".join(map(str, sorted(counts)))
            raise _unfit(
                number, place, f"is {shape_of(image)}, where {'either end' if is_first else 'neither end'} may be the {known} channels",
                "pass channels='first' or 'last'" + ("" if is_first else ", or mean= and std= for as many channels"),
            )  # fmt: skip
        return image.permute(2, 0, 1) if self._channels == "last" or (self._channels is None and is_last) else image

    def _factors(self, channels: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """What pixels are multiplied with, and what is added then: two roundings, as in `ImageDataset`."""
        means, stds = self._means, self._stds
        if len(means) == 1 or len(means) == channels:
            scale, shift = [1 / (255 * s) for s in stds], [-m / s for m, s in zip(means, stds, strict=True)]
        elif channels == 1 and self._is_named:
            scale, shift = [len(stds) / (255 * sum(stds))], [-sum(means) / sum(stds)]
        else:
            raise ConfigError(
                f"images{shown(place)} have {channels} channels, and the statistics have {len(means)}: convert them (ImageDataset: color=) "
                "or pass mean= and std= for as many channels"
            )
        return torch.tensor(scale).reshape(-1, 1, 1), torch.tensor(shift).reshape(-1, 1, 1)


def _statistics(
    statistics: str | None, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> tuple[list[float], list[float], bool]:
    """Means, standard deviations, and whether they have a name."""
    if (mean is None) != (std is None):
        raise ConfigError(f"{'std' if std is None else 'mean'} is missing: pass mean= and std= together")
    if mean is None or std is None:
        if not isinstance(statistics, str) or statistics not in STATISTICS:
            names = ", ".join(map(repr, STATISTICS))
            raise ConfigError(f"statistics must be one of {names}, not {statistics!r:.60}; or pass mean= and std=")
        means, stds = STATISTICS[statistics]
        return list(means), list(stds), True
    both = []
    for name, given in (("mean", mean), ("std", std)):
        try:
            numbers = np.asarray(given, np.float64).reshape(-1).tolist()
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(0 <= x <= 1 for x in numbers) or (name == "std" and min(numbers) == 0):
            above = "above 0" if name == "std" else "from 0"
            raise ConfigError(f"{name} must hold numbers {above} to 1, of pixels in [0, 1], not {given!r}: divide those of 0..255 by 255")
        both.append(numbers)
    means_, stds_ = both
    if len(means_) != len(stds_):
        raise ConfigError(f"mean has {len(means_)} numbers and std has {len(stds_)}: give one of each a channel")
    return means_, stds_, False


def _way_to_image(sample: Any) -> list[str]:
    """The names of the steps to the image, or to the images, where nobody named a field."""
    way: list[str] = []
    while not isinstance(sample, (torch.Tensor, np.ndarray)):
        if isinstance(sample, Mapping):
            name = next((name for name in _IMAGES if name in sample), None)
            has: Any = None if name is None else sample[name]
        elif dataclasses.is_dataclass(sample):
            name = next((name for name in _IMAGES if hasattr(sample, name)), None)
            has = None if name is None else getattr(sample, name)
        elif isinstance(sample, (tuple, list)) and sample and way:
            break  # of several images
        elif isinstance(sample, (tuple, list)) and sample:
            name, has = "0", sample[0]
        else:
            raise _unfit(
                0, (), f"has a {type(sample).__name__} where its image should be",
                "an image is a tensor or an array of uint8 (of a PIL image numpy.asarray, or torchvision's PILToTensor)",
            )  # fmt: skip
        if name is None:
            raise _unfit(0, (), f"has no field {', '.join(map(repr, _IMAGES))}", "say which field is the image, with fields=")
        way.append(name)
        sample = has
    return way


def _own(value: Any) -> Any:
    """A copy of a tensor or an array, as a tensor; else the value."""
    tensor = from_array(value) if is_numeric(value) else value
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _note(name: str | None, met: set[str]) -> bool:
    if name is not None:
        met.add(name)
    return name is not None


def _unfit(number: int, place: Place, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"VisionCollator: sample {number}{shown(place)} {what}: {remedy}")
