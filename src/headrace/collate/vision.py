"""Collates images, and normalises them while they are stacked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from headrace.arguments import checks_keywords
from headrace.casting import DTypeArgument, known_dtype, normalized_dtype
from headrace.collate.fields import Field, FieldPath, Fields, at_path
from headrace.collate.normalization import STATISTICS, WHITE, Normalization, check_normalize
from headrace.collate.stack import USUAL, from_array, is_numeric, owned, shape_of, stack_tree
from headrace.display import short_call
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty

_IMAGES = ("image", "images", "pixel_values", "img")
_BOXES = ("boxes", "bboxes")
_OF_OBJECTS = {*_BOXES, "labels", "class_labels", "scores", "masks", "keypoints", "area", "iscrowd"}


class VisionCollator:
    """Stacks images and normalises them.

    Each image is converted, scaled and shifted in one go while it is in the processor's cache; no
    other float image is created.

    An image is a tensor or array [C, H, W], [H, W, C] or [H, W], of uint8 or of floats in [0, 1].
    The batch is float32, or `dtype`, [batch, C, H, W]: ``(pixel / 255 - mean) / std``, or ``(pixel
    - mean) / std`` for floats. All other fields are stacked like `stack_collate` does, with their
      dtype; masks are not normalised. Fields with one entry per object differ in length between
      samples and stay lists of
    tensors: in a dict with "boxes" or "bboxes" these are that field and "labels", "class_labels",
    "scores", "masks", "keypoints", "area" and "iscrowd".

    Args:
        statistics: "imagenet" or "cifar10". A greyscale image uses the mean over the three
            channels, as in `ImageDataset`.
        mean, std: custom statistics instead: one number for all channels, or one per channel (also
            as an array), for pixels in [0, 1].
        fields: keys or positions of the images ("outer.inner" for a nested field); all arrays in
            such a field are images. None: the sample itself, the first item of a tuple or list, or
            the first of "image", "images", "pixel_values" and "img" in a dict.
        normalize: True: normalise on the device if the loader has an accelerator as `device=` and
            images are uint8, else on the host. "host": always on the host. False: images of any
            dtype keep dtype and values and are stacked to [batch, C, H, W].
        dtype: dtype of normalised images. torch.float16 and torch.bfloat16 halve the bytes of a
            batch; values are rounded once, from float32. None: float32.
        channels: position of the channel axis, "first" or "last". None: the axis with as many
            entries as the statistics (or 1).
        lists: keys or positions of fields that stay lists. None: as described above.

    Raises:
        ConfigError: an argument is invalid. In a call, a CollateError: an image has another dtype;
            floats are outside of [0, 1] (they may already be normalised, and nothing is normalised
            twice); an image differs from the first in shape or dtype or has the wrong number of
            channels; or there is no image. The message names sample, field and remedy.
    """

    @checks_keywords
    def __init__(
        self,
        statistics: str | None = "imagenet",
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        normalize: bool | Literal["host"] = True,
        fields: Field | Iterable[Field] | None = None,
        dtype: DTypeArgument | None = None,
        channels: str | None = None,
        lists: Field | Iterable[Field] | None = None,
    ) -> None:
        self._text = short_call("VisionCollator", VisionCollator, locals())
        if channels not in ("first", "last", None):
            raise ConfigError(f"channels must be 'first', 'last' or None, not {channels!r}")
        check_normalize(normalize)
        if not normalize and (mean is not None or std is not None):
            raise ConfigError(
                "normalize=False leaves values as they are: pass it without mean= and std="
            )
        if not normalize and dtype is not None:
            raise ConfigError("normalize=False leaves values as they are: pass it without dtype=")
        self._normalizes = bool(normalize)
        made_as = known_dtype(normalized_dtype(dtype)) or torch.float32
        self._normalization = dataclasses.replace(_statistics(statistics, mean, std), dtype=made_as)
        self.device_normalization: Normalization | str | None = (
            self._normalization if normalize is True else None
        )
        """How a device normalises uint8 images; a str: the reason why the host does it. None:
        nothing is normalised.
        """
        if normalize == "host":
            self.device_normalization = "normalize='host'"
        self._pixels: list[torch.Tensor] | None = None
        self._fields = None if fields is None else Fields(fields, "fields")
        self._lists = None if lists is None else Fields(lists, "lists")
        self._channels = channels

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch."""
        samples = list(samples)
        names = _path_to_image(samples[0]) if self._fields is None and samples else []
        met: set[str] = set()
        with_boxes: set[FieldPath] = set()

        def special(values: list[Any], path: FieldPath) -> Any:
            first = values[0]
            if isinstance(first, Mapping) and any(name in first for name in _BOXES):
                with_boxes.add(path)
            if self._is_a_list(path, with_boxes, met):
                return [owned(value) for value in values]
            if (isinstance(first, torch.Tensor) or is_numeric(first)) and self._is_image(
                path, names, met
            ):
                return self._images(values, path)
            return USUAL

        batch = stack_tree(
            samples,
            special,
            "Give all one shape, or name the field in lists= to keep it as a list of tensors",
        )
        for fields in (self._fields, self._lists):
            if fields is not None:
                fields.check(met, samples[0])
        return batch

    def __repr__(self) -> str:
        return self._text

    @contextlib.contextmanager
    def leaving_pixels(self) -> Iterator[list[torch.Tensor]]:
        """Context in which batches of uint8 images stay uint8 and are collected in the yielded
        list. The receiver normalises them, by `device_normalization`.
        """
        pixels: list[torch.Tensor] = []
        self._pixels = pixels
        try:
            yield pixels
        finally:
            self._pixels = None

    def _is_image(self, path: FieldPath, names: list[str], met: set[str]) -> bool:
        if self._fields is None:
            return len(path) >= len(names) and all(
                name in step.names for name, step in zip(names, path, strict=False)
            )
        return self._fields.find(path, met, around=True) is not None

    def _is_a_list(self, path: FieldPath, with_boxes: set[FieldPath], met: set[str]) -> bool:
        if self._lists is None:
            return bool(path) and path[:-1] in with_boxes and path[-1].names[0] in _OF_OBJECTS
        return self._lists.find(path, met) is not None

    def _images(self, values: list[Any], path: FieldPath) -> torch.Tensor:
        images = [self._channels_first(value, number, path) for number, value in enumerate(values)]
        first = images[0]
        for number, image in enumerate(images):
            if image.shape != first.shape:
                remedy = (
                    "give all one shape (ImageDataset: image_size=), or keep them apart with "
                    'collate_fn="list"'
                )
                raise _unfit(
                    number, path, remedy, f"is {list(image.shape)}, ", 0, f" is {list(first.shape)}"
                )
            if image.dtype != first.dtype:
                raise _unfit(
                    number,
                    path,
                    "give all images one dtype",
                    f"is {shape_of(image)}, ",
                    0,
                    f" is {shape_of(first)}",
                )
        is_left = not self._normalizes or (self._pixels is not None and first.dtype == torch.uint8)
        batch = empty(
            (len(images), *first.shape), first.dtype if is_left else self._normalization.dtype
        )
        if self._normalizes:
            scale, shift = self._factors(
                len(first), WHITE if first.dtype == torch.uint8 else 1, path
            )
        if is_left:
            for to, image in zip(batch, images, strict=True):
                to.copy_(image)
            if self._normalizes and self._pixels is not None:
                self._pixels.append(batch)
            return batch
        beside = None
        if batch.dtype != torch.float32:
            beside = torch.empty(first.shape, dtype=torch.float32, device="cpu")
        for to, image in zip(batch, images, strict=True):
            (to if beside is None else beside).copy_(image).mul_(scale).add_(shift)
            if beside is not None:
                to.copy_(beside)
        return batch

    def _channels_first(self, value: Any, number: int, path: FieldPath) -> torch.Tensor:
        """[C, H, W] of an image, over the same memory where that can be."""
        if not isinstance(value, torch.Tensor) and not is_numeric(value):
            raise _unfit(number, path, "an image is a tensor or an array", f"is {shape_of(value)}")
        image = (
            value.as_subclass(torch.Tensor)
            if isinstance(value, torch.Tensor)
            else from_array(value)
        )
        if self._normalizes and image.dtype != torch.uint8:
            _check_range(image, number, path)
        if image.ndim == 2:
            return image[None]
        if image.ndim != 3:
            raise _unfit(
                number, path, "an image is [C, H, W], [H, W, C] or [H, W]", f"is {shape_of(image)}"
            )
        means = self._normalization.means
        counts = {1, 3} if self._normalization.fits_grey or len(means) == 1 else {len(means)}
        is_first, is_last = (image.shape[axis] in counts for axis in (0, 2))
        if self._channels is None and is_first == is_last:
            known = " or ".join(map(str, sorted(counts)))
            may = (
                ""
                if is_first or not self._normalizes
                else ", or mean= and std= for as many channels"
            )
            end = "either end" if is_first else "neither end"
            is_ = f"is {shape_of(image)}, where {end} may be the {known} channels"
            raise _unfit(number, path, f"pass channels='first' or 'last'{may}", is_)
        return (
            image.permute(2, 0, 1)
            if self._channels == "last" or (self._channels is None and is_last)
            else image
        )

    def _factors(
        self, channels: int, white: int, path: FieldPath
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What pixels from 0 to `white` are multiplied with, and what is added then."""
        factors = self._normalization.factors(channels, white)
        if factors is None:
            raise ConfigError(
                f"images{at_path(path)} have {channels} channels, and the statistics have "
                f"{len(self._normalization.means)}: convert them "
                "(ImageDataset: color=) or pass mean= and std= for as many channels"
            )
        return factors


def _statistics(
    statistics: str | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> Normalization:
    """The statistics of that name, or those of the user."""
    if (mean is None) != (std is None):
        raise ConfigError(
            f"{'std' if std is None else 'mean'} is missing: pass mean= and std= together"
        )
    if mean is None or std is None:
        if not isinstance(statistics, str) or statistics not in STATISTICS:
            names = ", ".join(map(repr, STATISTICS))
            raise ConfigError(
                f"statistics must be one of {names}, not {statistics!r:.60}; or pass mean= and std="
            )
        means, stds = STATISTICS[statistics]
        return Normalization(means, stds, fits_grey=True)
    both = []
    for name, given in (("mean", mean), ("std", std)):
        try:
            numbers = np.asarray(given, np.float64).reshape(-1).tolist()
        except (TypeError, ValueError):
            numbers = []
        if (
            not numbers
            or not all(0 <= x <= 1 for x in numbers)
            or (name == "std" and min(numbers) == 0)
        ):
            above = "above 0" if name == "std" else "from 0"
            raise ConfigError(
                f"{name} must hold numbers {above} to 1, of pixels in [0, 1], not {given!r}: "
                "divide those of 0..255 by 255"
            )
        both.append(numbers)
    means_, stds_ = both
    if len(means_) != len(stds_):
        raise ConfigError(
            f"mean has {len(means_)} numbers and std has {len(stds_)}: pass one of each for every "
            "channel"
        )
    return Normalization(tuple(means_), tuple(stds_))


def _path_to_image(sample: Any) -> list[str]:
    """The names of the steps to the image, or to the images, where nobody named a field."""
    names: list[str] = []
    while not isinstance(sample, (torch.Tensor, np.ndarray)):
        if isinstance(sample, Mapping):
            name = next((name for name in _IMAGES if name in sample), None)
            has: Any = None if name is None else sample[name]
        elif dataclasses.is_dataclass(sample):
            name = next((name for name in _IMAGES if hasattr(sample, name)), None)
            has = None if name is None else getattr(sample, name)
        elif isinstance(sample, (tuple, list)) and sample and names:
            break  # of several images
        elif isinstance(sample, (tuple, list)) and sample:
            name, has = "0", sample[0]
        else:
            remedy = (
                "an image is a tensor or an array (of a PIL image numpy.asarray, or torchvision's "
                "PILToTensor)"
            )
            raise _unfit(0, (), remedy, f"has a {type(sample).__name__} where its image should be")
        if name is None:
            raise _unfit(
                0,
                (),
                "pass fields= with the field that is the image",
                f"has no field {', '.join(map(repr, _IMAGES))}",
            )
        names.append(name)
        sample = has
    return names


def _check_range(image: torch.Tensor, number: int, path: FieldPath) -> None:
    """Raises where an image that is not uint8 has other values than floats in [0, 1]: it may be
    normalised already.
    """
    if not image.dtype.is_floating_point:
        raise _unfit(
            number,
            path,
            "have the dataset give uint8, or floats in [0, 1]",
            f"is {shape_of(image)}, not uint8 or floats",
        )
    least, most = (image.min().item(), image.max().item()) if image.numel() else (0, 1)
    if least >= 0 and most <= 1:
        return
    if least >= 0 and most <= 255:
        remedy = "divide pixels by 255"
    else:
        remedy = (
            "it may be normalised already, and nothing is normalised twice: have the dataset give "
            "uint8 or floats in [0, 1] "
        )
        remedy += (
            "(ImageDataset: normalize=False), or stack what is finished with "
            "VisionCollator(normalize=False)"
        )
    raise _unfit(
        number,
        path,
        remedy,
        f"is {shape_of(image)} with values from {least:.3g} to {most:.3g}, not in [0, 1]",
    )


def _unfit(number: int, path: FieldPath, remedy: str, *what: str | int) -> CollateError:
    return CollateError("VisionCollator: ", number, f"{at_path(path)} ", *what, f": {remedy}")
