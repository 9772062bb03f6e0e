"""What is stored of images: their checked bytes, smaller JPEGs, or pixels; with their masks.

The bytes of an image and of its mask lie one behind the other, and are one sample, with one
checksum. Pixels and their mask are the fields of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from headrace.core.dataset import BaseDataset
from headrace.datasets.image.decoder import (
    decode_mask,
    encode_mask,
    mask_of,
    mask_spec,
    resize_nearest,
)
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.pixels import decode_image, image_shape, load_image
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.formats.arrays.packed import IMAGE, MASK
from headrace.formats.hdf5.rows import HDF5Source
from headrace.packing.columns import Column, boxes_of, has_masks
from headrace.packing.options import LARGEST_SIDE, Check, PackOptions
from headrace.packing.stream import each_sample, some_of


def checked(dataset: BaseDataset, position: int, record: Any, check: Check) -> list[Column]:
    """The bytes of a record that is an encoded image, or of such a one and its mask; they are
    looked at first.

    Raises:
        FormatError: they are damaged, don't fit each other, or the image is not as large as its
            annotations say.
    """
    left = dataset.budget.left
    image, *masks = record if has_masks(dataset) else (record,)
    if check == "header":
        image_shape(image, left)
    else:
        decode_image(image, getattr(dataset, "color", "RGB"), left)
    for mask in masks:
        mask_of(image, mask, left, mask_spec if check == "header" else decode_mask)
    if boxes_of(dataset) is not None:
        check_size(dataset, position, image_shape(image, left))
    return [np.frombuffer(data, np.uint8) for data in (image, *masks)]


def check_size(dataset: BaseDataset, position: int, shape: Sequence[int]) -> None:
    """Raises a FormatError where annotations say another size than the height and width that an
    image has.
    """
    boxes = boxes_of(dataset)
    if boxes is not None:
        boxes.size_of(position, (int(shape[0]), int(shape[1])))


# -- re-encoded images


def reencode_group(
    dataset: BaseDataset, options: PackOptions, group: range
) -> list[tuple[bytes, ...] | SampleError]:
    """The images of a group as JPEG, each with its mask where they have masks; a SampleError for
    one that may be left out.
    """

    def make(position: int, index: int, record: Any) -> tuple[bytes, ...] | SampleError:
        image, *masks = record if has_masks(dataset) else (record,)
        try:
            if boxes_of(dataset) is not None:
                check_size(dataset, position, image_shape(image, dataset.budget.left))
            made = _reencoded(dataset, options, image)
            return _with_mask(dataset, image, masks[0], made) if masks else (made,)
        except Exception as error:  # as the dataset itself would meet it
            return dataset.sample_reader.failed(index, "can't be decoded", error)

    return each_sample(dataset, group, make)


def _reencoded(dataset: BaseDataset, options: PackOptions, data: Any) -> bytes:
    """An encoded image as JPEG, its longer side at most `max_size`; the image as it is, if that is
    not larger.

    Raises:
        FormatError: it can't be decoded.
    """
    left = dataset.budget.left
    color = getattr(dataset, "color", "RGB")
    height, width = image_shape(data, left)
    scale = 1.0
    if options.max_size is not None:
        scale = options.max_size / max(height, width)
    if scale < 1:
        size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = load_image(data, color, size, False, left=left)
    else:
        pixels = decode_image(data, color, left)
    if max(pixels.shape) > LARGEST_SIDE:
        return bytes(data)
    space = {"colorspace": "RGB", "colorsubsampling": "420"}
    if color == "L":
        space = {"colorspace": "GRAY", "colorsubsampling": "Gray"}
    pixels = np.ascontiguousarray(pixels)
    made: bytes = simplejpeg.encode_jpeg(pixels, quality=options.quality, **space)
    return made if len(made) < len(data) else bytes(data)


def _with_mask(dataset: BaseDataset, image: Any, mask: Any, made: bytes) -> tuple[bytes, bytes]:
    """An image that was encoded anew, and its mask: as it is or, where the image has fewer pixels
    now, of its size, without loss. Both as they were, where together they would not become smaller.

    Raises:
        FormatError: they don't fit each other.
    """
    numbers = mask_of(image, mask, dataset.budget.left)
    size = image_shape(made, dataset.budget.left)
    fitted = bytes(mask)
    if size != numbers.shape:
        fitted = encode_mask(resize_nearest(numbers, size))
    if len(made) + len(fitted) < len(image) + len(mask):
        return made, fitted
    return bytes(image), bytes(mask)


def ratio_of(dataset: BaseDataset, options: PackOptions, sizes: IntArray) -> float:
    """About how large re-encoded images are beside what they were, by some of them, evenly
    spread.
    """
    before = after = 0
    for index in some_of(len(dataset)):
        with contextlib.suppress(SampleError):  # said when it is packed
            image = reencode_group(dataset, options, range(index, index + 1))[0]
            if not isinstance(image, SampleError):
                before += int(sizes[index])
                after += sum(map(len, image))
    return after / before if before else 1.0


# -- pixels


def row_dtype(
    dataset: ImageDataset, files: Sequence[HDF5Source], size: tuple[int, int]
) -> np.dtype[Any]:
    """The dtype of a row of pixels and their mask: that of masks is the first one's.

    Raises:
        SampleError: no mask can be read.
    """
    channels = 3 if dataset.color == "RGB" else 1
    stored = files[0].dtype if files else None
    kind = stored[MASK].base if stored is not None and stored.names else _mask_dtype(dataset)
    return np.dtype([(IMAGE, np.uint8, (*size, channels)), (MASK, kind, size)])


def _mask_dtype(dataset: ImageDataset) -> np.dtype[Any]:
    reader = dataset.sample_reader
    failure = SampleError("there are no samples")
    for index in dataset.whole_indices(np.arange(len(dataset))).tolist():
        record: Any = reader.records([index], dataset.sample_source.read)[0]
        if not isinstance(record, SampleError):
            try:
                return mask_spec(record[1], dataset.budget.left).dtype
            except FormatError as error:
                record = reader.failed(index, "can't be decoded", error)
        failure = record
        if dataset.on_error != "skip":
            break
    raise failure


def pixels_of(
    dataset: ImageDataset, dtype: np.dtype[Any], position: int, index: int, record: Any
) -> npt.NDArray[Any] | SampleError:
    """The pixels of an image; or the row of these and their mask.

    Raises:
        ConfigError: the mask has another dtype than the first one.
    """
    value = dataset.sample_reader.decoded(index, record, dataset.pixel_format)
    if isinstance(value, SampleError):
        return value
    if has_masks(dataset):
        pixels, mask = value
        if mask.dtype != dtype[MASK].base:
            raise ConfigError(
                f"store='decoded': the mask of {dataset.source_of(position)} is {mask.dtype}, and "
                f"the first one {dtype[MASK].base}, and rows have one dtype: pack with "
                "store='encoded', or save all masks with the same number of bits"
            )
        row = np.zeros((), dtype)
        row[IMAGE] = pixels
        row[MASK] = mask
        return row
    if boxes_of(dataset) is not None:
        pixels, size = value
        try:
            check_size(dataset, position, size)
        except FormatError as error:
            return dataset.sample_reader.failed(index, "can't be packed", error)
        value = pixels
    return np.ascontiguousarray(value)
