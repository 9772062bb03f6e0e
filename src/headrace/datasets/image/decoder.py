"""Decodes the samples of an `ImageDataset`: images, alone or with a mask, a class number or boxes,
which are cropped, resized and normalised by the same draws.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from headrace.casting import FLOAT32, as_tensor, known_dtype
from headrace.collate import DetectionCollator
from headrace.collate.vision import Normalization
from headrace.core.batcher import Collating
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.datasets.image.augment import Augment, Drawn, split_augment
from headrace.datasets.image.coco import CocoTargets, Objects, instance_masks
from headrace.datasets.image.labels import Labels
from headrace.datasets.pixels import (
    IMAGENET,
    SIXTEEN_BIT,
    Left,
    Pixels,
    arranged,
    claimed,
    decode_image,
    decoding,
    image_shape,
    open_image,
    resize_image,
    writable,
)
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError

Mask = npt.NDArray[Any]
"""[H, W] uint8, uint16 or int32."""
_WIDEST = 8  # bytes per pixel: Pillow's image and the array
_MASK_DTYPES: dict[str, type] = {
    **dict.fromkeys(("1", "L", "P"), np.uint8),
    **dict.fromkeys(SIXTEEN_BIT, np.uint16),
    "I": np.int32,
}
"""The dtypes of masks by the mode of Pillow's image."""


@decoding()
def decode_mask(data: Any, left: Left | None = None) -> Mask:
    """Decodes a mask to the class numbers as stored: palette indices, greyscale of 8, 16 or 32
    bits, or 0 and 1 for one bit.

    EXIF is ignored. (A TIFF's own orientation tag is part of its format and is applied by Pillow.)
    Greyscale PNGs of 2 and 4 bits are scaled to 0..255, as the format defines. GIF and TIFF files
    yield their first frame.

    Args:
        data: bytes of the file (bytes-like).
        left: returns the remaining memory budget; see
            `headrace.datasets.pixels.decode_image`.

    Returns:
        [H, W] uint8, uint16 or int32, in memory of its own.

    Raises:
        FormatError: the file is not an image, is broken or too large, or has colours, floats or
            alpha.
    """
    with (
        open_image(data) as image,
        claimed(left, image.height, image.width, image.height * image.width * _WIDEST),
    ):
        image.load()
        if image.mode not in _MASK_DTYPES:
            raise FormatError(
                f"an image of mode {image.mode!r} is not a mask of class numbers: save it as PNG, "
                "in grey or with a palette"
            )
        return np.array(image).astype(_MASK_DTYPES[image.mode])


def encode_mask(mask: Mask) -> bytes:
    """A file that `decode_mask` decodes to the same mask: a PNG, or a TIFF for int32."""
    stream = io.BytesIO()
    if mask.dtype == np.int32:
        mask_image(mask).save(stream, "TIFF", compression="tiff_adobe_deflate")
    else:
        mask_image(mask).save(stream, "PNG")
    return stream.getvalue()


def resize_nearest(mask: Mask, size: tuple[int, int] | None) -> Mask:
    """[H, W] -> [size[0], size[1]] by the nearest pixel; the aspect ratio is not kept. None:
    unchanged.
    """
    if size is None or mask.shape == size:
        return mask
    rows, columns = (
        (2 * np.arange(wanted) + 1) * stored // (2 * wanted)
        for wanted, stored in zip(size, mask.shape, strict=True)
    )
    # two takes are faster than a gather of pixels
    picked: Mask = mask.take(rows, axis=0).take(columns, axis=1)
    return picked


def mask_image(mask: Mask) -> Image.Image:
    """A mask as a PIL image of mode "L", "I;16" or "I"."""
    return Image.fromarray(np.ascontiguousarray(mask))


DEFAULT_SIZE = (224, 224)


@dataclass(kw_only=True, eq=False)
class ImageDecoder(Decoder):
    """Decodes images. Values are uint8 [C, H, W]; or [H, W, C] if built-in augmentations, or
    transforms of PIL images or arrays, come next; or the encoded records, which are decoded when
    the crop is drawn.

    Args:
        color: "RGB" or "L".
        image_size: (height, width) of values. None: images keep their size.
        is_size_given: True if the user gave a size.
        exact: decode large JPEGs at full size.
        normalize: scale and normalise inputs without transforms; "host": never on a device.
        dtype: dtype of normalised inputs: float32, float16, or bfloat16 (`BFLOAT16`).
        transform_input: "pil", "tensor" or "numpy".
        augment: the built-in crop and flip.
        transformed: True if a transform receives the inputs.
        is_stored_decoded: True if records are pixels [H, W, C].
        hold: see `BaseDataset`.
        left: returns the remaining memory budget.
        is_joint: True if a transform receives input and target.
        channels_first: layout of values. None: that of inputs. Views keep the layout of their
            dataset, whatever their transform.
    """

    stores_values = False
    always_pairs = True

    color: str
    image_size: tuple[int, int] | None
    is_size_given: bool
    exact: bool
    normalize: bool | Literal["host"]
    transform_input: str
    augment: Augment
    transformed: bool
    is_stored_decoded: bool
    hold: str | None
    left: Left | None = None
    is_joint: bool = False
    dtype: np.dtype[Any] = FLOAT32
    channels_first: bool | None = None

    def __post_init__(self) -> None:
        self._shows_channels_first = not self.transformed or self.transform_input == "tensor"
        is_augmented = any(self.augment)
        if self.channels_first is None:
            self.channels_first = self._shows_channels_first and not is_augmented
        self.crop_size: tuple[int, int] | None = self.augment.size
        """The size of inputs, if they are cropped or resized once more."""
        self.is_encoded: bool = (
            self.crop_size is not None
            and self.image_size is None
            and not self.is_stored_decoded
            and self.hold != "decoded"
        )
        """True if values are encoded images."""
        self.draws = any(self.augment[:2])
        self.copies: bool = self.channels_first and not (
            is_augmented or self.normalize or self.transformed or self.splits_targets
        )

    def with_transform(self, transform: Any) -> tuple[ImageDecoder, Callable[[Any], Any] | None]:
        """See `Decoder`. Cached values keep their layout, whatever the transform receives."""
        augment, rest = split_augment(transform)
        has_size = self.image_size is not None or self.is_size_given
        if rest is None and not any(augment) and not has_size:
            augment = Augment(size=self.crop_size or DEFAULT_SIZE)
        return replace(self, augment=augment, transformed=rest is not None), rest

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return 3 if self.color == "RGB" else 1

    @property
    def held_as(self) -> str:
        """Identifies how records become values."""
        return (
            f"{type(self).__name__} {self.color} {self.image_size} {self.channels_first} "
            f"{self.is_stored_decoded} {self.exact}"
        )

    def decode(self, record: Any) -> Any:
        if isinstance(record, np.ndarray) and not self.is_stored_decoded:
            record = record.tobytes()  # arrays would be taken for pixels
        if self.is_encoded:
            return record
        first = bool(self.channels_first)
        if not self.is_stored_decoded:
            return decode_image(
                record, self.color, self.image_size, first, exact=self.exact, left=self.left
            )
        return arranged(resize_image(record, self.image_size), False, first)

    def value_spec(self) -> ArraySpec | None:
        size = self.crop_size if self.is_encoded else self.image_size
        if size is None:
            return None
        shape = (*size, self.channels)
        if self.channels_first:
            shape = (self.channels, *size)
        return ArraySpec(shape, np.dtype(np.uint8))

    def draw(self, value: Any) -> Drawn | None:
        if not self.draws:
            return None
        if self.is_encoded:
            return self.augment.draw(*image_shape(value, self.left))
        return self.augment.draw(*(value.shape[1:] if self.channels_first else value.shape[:2]))

    def _drawn_pixels(self, value: Any, drawn: Drawn | None) -> Pixels:
        """Applies draws to a value: uint8 in the layout of inputs."""
        if not any(self.augment) and self.channels_first == self._shows_channels_first:
            return value  # type: ignore[no-any-return]
        box, flip = drawn or (None, False)
        size = self.crop_size
        if self.is_encoded and size is not None:
            first = self._shows_channels_first
            return decode_image(value, self.color, size, first, box, flip, self.exact, self.left)
        pixels = value
        if self.channels_first:
            pixels = value.transpose(1, 2, 0)
        if box is not None:
            pixels = box.of(pixels)
        if size is not None:
            pixels = resize_image(np.ascontiguousarray(pixels), size)
        return arranged(pixels, flip, self._shows_channels_first)

    def to_input(self, value: Any) -> Any:
        return self.shown(value, self.draw(value))

    def shown(self, value: Any, drawn: Drawn | None) -> Any:
        """The input of a value with these draws."""
        pixels = self._drawn_pixels(value, drawn)
        if not self.transformed:
            if self.normalize:
                out = np.empty(pixels.shape, self.dtype)
                IMAGENET.write(pixels, out)
                return as_tensor(out)
            return torch.from_numpy(writable(pixels))
        if self.transform_input == "pil":
            return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        if self.transform_input == "tensor":
            return torch.from_numpy(writable(pixels))
        return writable(pixels)

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        return self._row(value.shape[1:] if self.channels_first else value.shape[:2])

    def _row(self, size: tuple[int, ...] | None) -> ArraySpec | None:
        """Shape and dtype of inputs without transforms, for values of that size."""
        size = self.crop_size or size
        if self.transformed or size is None:
            return None
        dtype = self.dtype if self.normalize else np.dtype(np.uint8)
        return ArraySpec((self.channels, *size), dtype)

    def write_input(self, value: Any, drawn: Drawn | None, out: np.ndarray[Any, Any]) -> None:
        pixels = self._drawn_pixels(value, drawn)
        if self.normalize:
            IMAGENET.write(pixels, out)
        else:
            np.copyto(out, pixels)

    def _target_row(self, size: tuple[int, ...]) -> ArraySpec | None:
        """Shape and dtype of the target of an image of that size. None: targets are listed."""
        return ArraySpec((), np.dtype(np.int64))

    def sample_nbytes(self) -> int | None:
        row = self._row(self.image_size)
        if row is None:
            return None
        target = self._target_row(row.shape[1:])
        return None if target is None else row.nbytes + target.nbytes

    def unnormalized(self) -> tuple[Decoder, Normalization] | None:
        if self.transformed or self.normalize is not True:
            return None
        normalization = replace(IMAGENET, dtype=known_dtype(self.dtype) or torch.float32)
        return replace(self, normalize=False), normalization


_LEAST = 1.0  # pixels that a crop must leave of a box


@dataclass(kw_only=True, eq=False)
class JointDecoder(ImageDecoder):
    """Decodes pairs of an image and a target in it. Values are pairs, or the encoded record if the
    image is cropped first.
    """

    splits_targets = True

    def value_spec(self) -> None:
        return None

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        drawn = self.draw(value)
        return self.shown(value, drawn), self.placed(target, drawn)

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, ArraySpec | None] | None:
        row = self._row(self.image_size)
        if row is None or not collating.stacks:
            return None
        return row, self._target_row(row.shape[1:])


@dataclass(kw_only=True, eq=False)
class MaskDecoder(JointDecoder):
    """Decodes pairs of an image and a mask of the same size, which is resized to the nearest pixel.
    A record is the bytes of both.

    A target is an int64 tensor [H, W]. A joint transform receives it in the type of the image: PIL
    image, array or tensor.
    """

    def decode(self, record: Any) -> Any:
        image, mask = record
        if self.is_encoded:
            return bytes(image), bytes(mask)
        if not self.is_stored_decoded:
            mask = mask_of(image, mask, self.left)
        return super().decode(image), resize_nearest(mask, self.image_size)

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        image, mask = value
        if self.is_encoded:
            mask = mask_of(image, mask, self.left)
        return image, mask

    def _target_row(self, size: tuple[int, ...]) -> ArraySpec:
        return ArraySpec(size, np.dtype(np.int64))

    def placed(self, target: Mask, drawn: Drawn | None) -> Mask:
        return cut_mask(target, drawn, self.crop_size)

    def to_pair(self, value: Any, target: Mask) -> tuple[Any, Any]:
        image, mask = super().to_pair(value, target)
        if self.is_joint and self.transformed:
            if self.transform_input == "pil":
                return image, mask_image(mask)
            if self.transform_input == "numpy":
                return image, np.array(mask)
        return image, torch.from_numpy(mask.astype(np.int64))


@dataclass(kw_only=True, eq=False)
class LabelDecoder(JointDecoder):
    """Decodes pairs of an image and a class number. A record is a pair of bytes, or a dict."""

    def decode(self, record: Any) -> Any:
        if isinstance(record, dict):
            record = record.values()
        image, label = record
        return super().decode(image), label

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        image, label = value
        if isinstance(label, np.ndarray) and label.size == 1:
            label = label.item()
        try:
            return image, int(label)
        except (ValueError, TypeError) as error:
            raise FormatError(f"the class number must be an integer, not {label!r:.60}") from error


def mask_of(image: Any, data: Any, left: Left | None = None) -> Mask:
    """Decodes the mask of an encoded image, and checks that both have the same size.

    Args:
        image: bytes of the image.
        data: bytes of the mask.
        left: see `decode_mask`.

    Raises:
        FormatError: the mask has another size, or can't be decoded.
    """
    height, width = image_shape(image, left)
    try:
        mask = decode_mask(data, left)
    except FormatError as error:
        raise FormatError(f"the mask: {error}") from error
    if mask.shape != (height, width):
        raise FormatError(
            f"the image has {width:,} x {height:,} pixels (EXIF applied), and its mask "
            f"{mask.shape[1]:,} x {mask.shape[0]:,}"
        )
    return mask


def cut_mask(mask: Mask, drawn: Drawn | None, size: tuple[int, int] | None) -> Mask:
    """Crops a mask [H, W], resizes it to `size` and mirrors it, like its image."""
    part, flip = drawn or (None, False)
    if part is not None:
        mask = part.of(mask)
    mask = resize_nearest(mask, size)
    if flip:
        mask = mask[:, ::-1]
    return mask


@dataclass(kw_only=True, eq=False)
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


class Opened(NamedTuple):
    """Opened images.

    Attributes:
        source: reads their records.
        labels: their targets and classes.
        decoder: decodes them.
        color: "RGB" or "L", if records are pixels. None: they are encoded.
        size: (height, width) of these pixels.
    """

    source: Any
    labels: Labels = Labels(None, [])
    decoder: type[ImageDecoder] = ImageDecoder
    color: str | None = None
    size: tuple[int, int] | None = None
