"""Collates images: normalised, on the host or on a device, or with the objects in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from headrace.arguments import check_choice, checks_keywords, described
from headrace.casting import DTypeArgument, as_array, cast_into, known_dtype, normalized_dtype
from headrace.collate.stack import (
    USUAL,
    Field,
    FieldPath,
    at_path,
    check_alike,
    field_at,
    field_names,
    from_array,
    is_numeric,
    named_paths,
    owned,
    shape_of,
    shown_fields,
    stack_inside,
    stack_tree,
)
from headrace.display import short_call
from headrace.dtypes import BFLOAT16, AnyArray
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import keys_of

STATISTICS = {  # mean and standard deviation of red, green and blue, for pixels in [0, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
WHITE = 255
"""The value of white in uint8."""


@dataclass(frozen=True)
class Normalization:
    """The statistics of a normalisation: ``(pixel - mean) / std`` of pixels in [0, 1].

    Attributes:
        means, stds: one number per channel, or one for all.
        fits_grey: True if images of one channel use the mean over the channels.
        dtype: dtype of the result.
    """

    means: tuple[float, ...]
    stds: tuple[float, ...]
    fits_grey: bool = False
    dtype: torch.dtype = torch.float32

    def write(self, pixels: AnyArray, out: AnyArray) -> None:
        """Normalises an image [C, H, W] of uint8, or of floats in [0, 1], into `out` (float32,
        float16 or `BFLOAT16`).

        Three passes over an image in the processor's cache, with two roundings, so that the result
        is the same everywhere; 16-bit results are rounded once more, from float32.

        Raises:
            ConfigError: the statistics have another number of channels.
        """
        scale, shift = _factors(self, len(out), WHITE if pixels.dtype == np.uint8 else 1)
        values = out
        if out.dtype != np.float32:
            values = np.empty(out.shape, np.float32)
        np.copyto(values, pixels, casting="unsafe")
        np.multiply(values, scale.numpy(), out=values)
        np.add(values, shift.numpy(), out=values)
        if values is out:
            return
        is_plain = out.dtype == BFLOAT16 and pixels.dtype == np.uint8
        if is_plain and _has_no_ties(self, len(out)):  # torch's threads would wait for each other
            bits = values.view(np.uint32)
            np.add(bits, np.uint32(1 << 15), out=bits)
            np.right_shift(bits, np.uint32(16), out=bits)
            np.copyto(out.view(np.uint16), bits, casting="unsafe")
        else:
            cast_into(values, out)

    def normalized(
        self, pixels: torch.Tensor, memory_format: torch.memory_format | None = None
    ) -> torch.Tensor:
        """Normalises uint8 images [C, H, W] or [batch, C, H, W] on their device, in two passes.

        Each pass rounds to float32, as on the host, so devices with IEEE arithmetic give the host's
        values. Only the first call on a device waits for it, to copy the factors.

        Args:
            pixels: images with as many channels as there are statistics.
            memory_format: memory format of a batch. None: contiguous.

        Returns:
            A tensor of the same shape and of this `dtype`.
        """
        scale, shift = _factors(self, pixels.shape[-3], device=pixels.device)
        if memory_format is None or pixels.ndim != 4:
            memory_format = torch.contiguous_format
        made = torch.empty(
            pixels.shape, dtype=torch.float32, device=pixels.device, memory_format=memory_format
        )
        torch.mul(pixels, scale, out=made)
        out = made
        if self.dtype is not torch.float32:
            out = torch.empty_like(made, dtype=self.dtype)
        return torch.add(made, shift, out=out)


@functools.lru_cache(64)
def _factors(
    normalization: Normalization,
    channels: int,
    white: int = WHITE,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of pixels from 0 to `white`: float32 [C, 1, 1] each. Cached, since copying
    them to a device from unpinned memory waits for earlier copies.

    Raises:
        ConfigError: the statistics have another number of channels.
    """
    means = normalization.means
    stds = normalization.stds
    if channels == 1 and normalization.fits_grey:
        means = (sum(means) / len(means),)
        stds = (sum(stds) / len(stds),)
    if len(means) not in (1, channels):
        have = f"images have {channels} channels, and the statistics {len(means)}"
        raise ConfigError(f"{have}: convert images (color=), or pass other mean= and std=")
    scale = [1 / (white * std) for std in stds]
    shift = [-mean / std for mean, std in zip(means, stds, strict=True)]
    both = torch.tensor([scale, shift], dtype=torch.float32, device=device)
    first, second = both.reshape(2, -1, 1, 1)
    return first, second


@functools.lru_cache(64)
def _has_no_ties(normalization: Normalization, channels: int) -> bool:
    """True if no normalised uint8 lies halfway between two numbers of bfloat16."""
    scale, shift = _factors(normalization, channels)
    numbers = np.arange(WHITE + 1, dtype=np.float32) * scale.numpy() + shift.numpy()
    dropped = numbers.view(np.uint32) & 0xFFFF
    return not (dropped == 0x8000).any()


_IMAGES = ("image", "images", "pixel_values", "img")
_BOXES = ("boxes", "bboxes")
_OF_OBJECTS = {*_BOXES, "labels", "class_labels", "scores", "masks", "keypoints", "area", "iscrowd"}

_ONE_SHAPE = "Give all one shape (ImageDataset: image_size=)"


class DetectionCollator:
    """Collates pairs (image, dict of objects) to images and a list of dicts, for torchvision's
    detection models.

    Args:
        stack: True: stack the images, which must have equal shapes, to [batch, C, H, W]. False:
            return a list of tensors.
    """

    @checks_keywords
    def __init__(self, *, stack: bool = True) -> None:
        self.stack = stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch.

        Raises:
            CollateError: a sample is not such a pair; or images to be stacked differ in shape.
        """
        for number, sample in enumerate(samples):
            is_pair = isinstance(sample, (tuple, list)) and len(sample) >= 2
            if not is_pair or not isinstance(sample[1], Mapping):
                is_ = f" is {shape_of(sample)}, not a pair of an image and a dict"
                raise CollateError(number, f'{is_}: use collate_fn="list"')
        return stack_tree(
            list(samples),
            self._special,
            'Give images one shape (ImageDataset: image_size=), or pass collate_fn="list"',
        )

    def _special(self, values: list[Any], path: FieldPath) -> Any:
        if len(path) == 1 and path[0].names[0] == "1":
            return [{name: owned(value) for name, value in one.items()} for one in values]
        if len(path) == 1 and path[0].names[0] == "0" and not self.stack:
            return [owned(value) for value in values]
        return USUAL

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stack={self.stack})"


class VisionCollator:
    """Stacks images and normalises them.

    Each image is converted, scaled and shifted while it is in the processor's cache, without
    another float image.

    An image is a tensor or array [C, H, W], [H, W, C] or [H, W], of uint8 or of floats in [0, 1].
    The batch is float32, or `dtype`, [batch, C, H, W]: ``(pixel / 255 - mean) / std``, or
    ``(pixel - mean) / std`` for floats. All other fields are stacked by `stack_collate`, with their
    dtype; masks are not normalised. Fields with one entry per object stay lists of tensors: in a
    dict with "boxes" or "bboxes" these are that field and "labels", "class_labels", "scores",
    "masks", "keypoints", "area" and "iscrowd".

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

    Raises:
        ConfigError: an argument is invalid; in a call: images have another number of channels than
            the statistics.
        CollateError: in a call: an image has another dtype, or floats outside of [0, 1] (it may be
            normalised already); differs from the first in shape or dtype; or is missing. The
            message names sample, field and remedy.
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
    ) -> None:
        self._text = short_call("VisionCollator", VisionCollator, locals())
        check_choice("channels", channels, ("first", "last", None))
        if not isinstance(normalize, bool) and normalize != "host":
            what = described(normalize)
            raise ConfigError(f"normalize must be True, False or 'host', not {what}")
        if not normalize and not (mean is None and std is None and dtype is None):
            raise ConfigError("normalize=False excludes mean=, std= and dtype=: leave these out")
        means, stds, fits_grey = _statistics(statistics, mean, std)
        made_as = known_dtype(normalized_dtype(dtype)) or torch.float32
        self.normalization: Normalization = Normalization(means, stds, fits_grey, made_as)
        self.normalize: bool | Literal["host"] = normalize
        self._pixels: list[torch.Tensor] | None = None
        self._fields = None
        if fields is not None:
            self._fields = field_names(fields, "fields")
        self._channels = channels

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch."""
        samples = list(samples)
        fields: Collection[FieldPath] = ()
        for sample in samples[:1]:
            if self._fields is None:
                fields = [_path_to_image(sample)]
            else:
                fields = named_paths(sample, self._fields, "fields")
        return stack_tree(samples, functools.partial(self._special, fields, False), _ONE_SHAPE)

    def __repr__(self) -> str:
        return self._text

    @contextlib.contextmanager
    def leaving_pixels(self) -> Iterator[list[torch.Tensor]]:
        """Context in which batches of uint8 images stay uint8. The yielded list collects them for
        the caller to normalise.
        """
        pixels: list[torch.Tensor] = []
        self._pixels = pixels
        try:
            yield pixels
        finally:
            self._pixels = None

    def _special(
        self, fields: Collection[FieldPath], of_objects: bool, values: list[Any], path: FieldPath
    ) -> Any:
        """`fields`: paths of the images; `of_objects`: True inside a dict with boxes."""
        first = values[0]
        if of_objects and path[-1].names[0] in _OF_OBJECTS:
            return [owned(value) for value in values]
        if isinstance(first, Mapping):
            has_boxes = any(name in first for name in _BOXES)
            special = functools.partial(self._special, fields, has_boxes)
            return stack_inside(values, path, special, _ONE_SHAPE)
        is_array = isinstance(first, torch.Tensor) or is_numeric(first)
        lies_in_one = is_array and any(path[:end] in fields for end in range(len(path)))
        if lies_in_one or (path in fields and keys_of(first) is None):
            return self._images(values, path)
        return USUAL

    def _images(self, values: list[Any], path: FieldPath) -> torch.Tensor:
        images = [self._channels_first(value, number, path) for number, value in enumerate(values)]
        first = images[0]
        check_alike(images, path, _ONE_SHAPE)
        shape = (len(images), *first.shape)
        if self.normalize:
            _factors(self.normalization, len(first))  # checks the number of channels
        if not self.normalize or (first.dtype == torch.uint8 and self._pixels is not None):
            batch = torch.stack(images, out=empty(shape, first.dtype))
            if self.normalize and self._pixels is not None:
                self._pixels.append(batch)
            return batch
        batch = empty(shape, self.normalization.dtype)
        for to, image in zip(batch, images, strict=True):
            pixels = image if image.dtype == torch.uint8 else image.float()
            self.normalization.write(pixels.numpy(force=True), as_array(to))
        return batch

    def _channels_first(self, value: Any, number: int, path: FieldPath) -> torch.Tensor:
        """The image as [C, H, W], in the same memory if possible."""
        image = value
        if is_numeric(value):
            image = from_array(value)
        if not isinstance(image, torch.Tensor) or image.ndim not in (2, 3):
            remedy = "return a tensor or array [C, H, W], [H, W, C] or [H, W] (PIL: numpy.asarray)"
            raise _unfit(number, path, remedy, f"is {shape_of(value)}")
        image = image.as_subclass(torch.Tensor)
        if self.normalize and image.dtype != torch.uint8:
            _check_range(image, number, path)
        if image.ndim == 2:
            return image[None]
        channels = self._channels
        if channels is None:
            counts = {len(self.normalization.means)}
            if self.normalization.fits_grey or counts == {1}:
                counts = {1, 3}
            is_first = image.shape[0] in counts
            if is_first == (image.shape[2] in counts):
                end = "either" if is_first else "neither"
                remedy = "pass channels='first' or 'last', or mean= and std= for as many channels"
                is_ = f"is {shape_of(image)}, where {end} end may be the channels"
                raise _unfit(number, path, remedy, is_)
            channels = "first" if is_first else "last"
        if channels == "last":
            return image.permute(2, 0, 1)
        return image


def _statistics(
    statistics: str | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """The means and deviations, by name or from the user, and whether they fit greyscale images."""
    if mean is None and std is None:
        if not isinstance(statistics, str) or statistics not in STATISTICS:
            names = ", ".join(map(repr, STATISTICS))
            raise ConfigError(
                f"statistics must be one of {names}, not {statistics!r:.60}; or pass mean= and std="
            )
        return (*STATISTICS[statistics], True)
    means: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    with contextlib.suppress(TypeError, ValueError):
        means = tuple(np.asarray(mean, np.float64).reshape(-1).tolist())
        stds = tuple(np.asarray(std, np.float64).reshape(-1).tolist())
    are_in_range = all(0 <= one <= 1 for one in means) and all(0 < one <= 1 for one in stds)
    if not are_in_range or not len(means) == len(stds) > 0:
        raise ConfigError(
            "mean and std must be numbers from 0 to 1 (std: above 0), one per channel or one for "
            f"all, not mean={mean!r}, std={std!r}: divide those for 0..255 by 255"
        )
    return means, stds, False


def _path_to_image(sample: Any) -> FieldPath:
    """The path to the image, or to several images, if `fields` is None."""
    path: FieldPath = ()
    while not isinstance(sample, (torch.Tensor, np.ndarray)):
        wanted: Iterable[str] = _IMAGES
        if isinstance(sample, (tuple, list)):
            if path:
                break  # several images
            wanted = ("0",)
        found = next(filter(None, (field_at(sample, [name]) for name in wanted)), None)
        if found is None:
            remedy = "pass fields= with the image, a tensor or array (PIL: numpy.asarray)"
            has = f"has no field {', '.join(map(repr, _IMAGES))}, but {shown_fields(sample)}"
            raise _unfit(0, (), remedy, has)
        path += found[0]
        sample = found[1]
    return path


def _check_range(image: torch.Tensor, number: int, path: FieldPath) -> None:
    """Raises a CollateError unless the values of an image are floats in [0, 1]."""
    is_ = f"is {shape_of(image)}"
    if image.dtype.is_floating_point:
        least = most = 0.0
        if image.numel():
            least = image.min().item()
            most = image.max().item()
        if least >= 0 and most <= 1:
            return
        is_ = f"{is_} with values from {least:.3g} to {most:.3g}"
    remedy = (
        "return uint8, or floats in [0, 1] (ImageDataset: normalize=False); images that are "
        "normalised already need VisionCollator(normalize=False)"
    )
    raise _unfit(number, path, remedy, is_)


def _unfit(number: int, path: FieldPath, remedy: str, is_: str) -> CollateError:
    return CollateError("VisionCollator: ", number, f"{at_path(path)} {is_}: {remedy}")
