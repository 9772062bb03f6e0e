"""Images with masks or boxes, as packs hold them.

The bytes of an image and of its mask lie one behind the other, and are one sample, with one
checksum; `MASK_STARTS` says where the mask begins. Pixels and their mask are the fields of a row.
Boxes lie beside the samples, as `CocoTargets.columns` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.datasets.image.coco import CocoTargets
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.joint import MaskDecoder, mask_of
from headrace.datasets.image.labels import FOLDERS
from headrace.datasets.image.masks import decode_mask, encode_mask, mask_spec, resize_nearest
from headrace.datasets.image.pixels import decode_image, image_shape
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.packing.beside.targets import crc_of_columns, target_arrays
from headrace.packing.options import Check
from headrace.storage.arrays.packed import BOXES, IMAGE, MASK, MASK_STARTS, MASKS
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.pairs import PairedSource

Column = npt.NDArray[Any]
LAYOUT = 4
"""The version of packs with masks or boxes."""


def has_masks(dataset: BaseDataset) -> bool:
    """True if samples are images and masks."""
    return isinstance(dataset.sample_decoder, MaskDecoder)


def boxes_of(dataset: BaseDataset) -> CocoTargets | None:
    """The annotations of objects, if these are the targets."""
    targets = dataset.targets
    return targets if isinstance(targets, CocoTargets) else None


def said_of(dataset: BaseDataset) -> dict[str, Any]:
    """What `PackedInfo.image` has of the targets; {}: they are numbers, or none."""
    if has_masks(dataset):
        return {"targets": MASKS}
    if (boxes := boxes_of(dataset)) is None:
        return {}
    return {"targets": BOXES, "class_ids": list(boxes.class_to_idx.values())}


def image_sizes(dataset: BaseDataset, files: Sequence[HDF5Source], chosen: IntArray) -> IntArray:
    """Bytes of each image without its mask ([n] int64).

    Args:
        dataset: of images with masks.
        files: that it is packed in; []: it is one of files.
        chosen: the numbers of its samples in its source.
    """
    source = dataset.sample_source
    if isinstance(source, PairedSource):
        return source.files.sizes(chosen)
    return np.concatenate([one.image_sizes() for one in files])[chosen]


def mask_starts(sizes: IntArray, images: IntArray) -> dict[str, Column]:
    """The column of where masks begin: of samples of so many bytes ([n]), and their images
    ([n]).
    """
    return {MASK_STARTS: np.cumsum(sizes) - sizes + images}


def box_columns(dataset: BaseDataset, are_resized: bool) -> dict[str, Column]:
    """The arrays of the boxes; {}: the dataset has none.

    Args:
        dataset: what is packed.
        are_resized: True if images are stored in other sizes than the boxes are in pixels of, which
            must be known then.

    Raises:
        SampleError: an image whose size is not known can't be read.
    """
    boxes = boxes_of(dataset)
    if boxes is None:
        return {}
    sizes = boxes.sizes.copy()
    for position in np.flatnonzero((sizes == 0).any(axis=1)).tolist() if are_resized else ():
        index = int(dataset.whole_indices(position))
        record = dataset.sample_reader.records([index], dataset.sample_source.read)[0]
        if not isinstance(record, SampleError):  # it is left out when it is packed
            sizes[position] = image_shape(record, dataset.budget.left)
    return boxes.columns(sizes)


# -- pixels


def row_dtype(
    dataset: ImageDataset, files: Sequence[HDF5Source], size: tuple[int, int]
) -> np.dtype[Any]:
    """The dtype of a row of pixels and their mask: that of masks is the first one's.

    Raises:
        SampleError: no mask can be read.
    """
    stored = files[0].dtype if files else None
    kind = stored[MASK].base if stored is not None and stored.names else _mask_dtype(dataset)
    return np.dtype(
        [(IMAGE, np.uint8, (*size, 3 if dataset.color == "RGB" else 1)), (MASK, kind, size)]
    )


def _mask_dtype(dataset: ImageDataset) -> np.dtype[Any]:
    reader, failure = dataset.sample_reader, SampleError("there are no samples")
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


def row_of(pixels: Column, mask: Column, dtype: np.dtype[Any], where: Callable[[], str]) -> Column:
    """The row of an image and its mask; `where` says where they are.

    Raises:
        ConfigError: the mask has another dtype than the first one.
    """
    if mask.dtype != dtype[MASK].base:
        raise ConfigError(
            f"store='decoded': the mask of {where()} is {mask.dtype}, and the first one "
            f"{dtype[MASK].base}, and rows have one dtype: pack "
            "with store='encoded', or save all masks with the same number of bits"
        )
    row = np.zeros((), dtype)
    row[IMAGE], row[MASK] = pixels, mask
    return row


# -- bytes


def checked(dataset: BaseDataset, position: int, record: Any, check: Check) -> list[Column]:
    """The bytes of a record that is an encoded image, or of such a one and its mask; they are
    looked at first.

    Raises:
        FormatError: they are damaged, don't fit each other, or the image is not as large as its
            annotations say.
    """
    left, color = dataset.budget.left, getattr(dataset, "color", "RGB")
    image, mask = record if has_masks(dataset) else (record, None)
    if check == "header":
        image_shape(image, left)
    else:
        decode_image(image, color, left)
    if mask is not None:
        mask_of(image, mask, left, mask_spec if check == "header" else decode_mask)
    if boxes_of(dataset) is not None:
        check_size(dataset, position, image_shape(image, left))
    return [np.frombuffer(data, np.uint8) for data in (image, mask) if data is not None]


def check_size(dataset: BaseDataset, position: int, shape: Sequence[int]) -> None:
    """Raises a FormatError where annotations say another size than the height and width that an
    image has.
    """
    if (boxes := boxes_of(dataset)) is not None:
        boxes.size_of(position, (int(shape[0]), int(shape[1])))


def annotations_check(dataset: BaseDataset) -> dict[str, int]:
    """What a plan has of targets that lie beside the samples, by which other ones are noticed; {}:
    there are none, or they follow from the names of the files.
    """
    boxes, targets = boxes_of(dataset), dataset.targets
    if boxes is not None:
        return {"annotations": crc_of_columns(boxes.columns(boxes.sizes))}
    given = dataset._arguments.get("targets", FOLDERS)
    by_folders = isinstance(dataset.sample_source, FilesSource) and (
        isinstance(given, str) and given == FOLDERS
    )
    if targets is None or by_folders or dataset.sample_decoder.splits_targets:
        return {}
    return {"annotations": crc_of_columns(target_arrays(targets))}


def with_mask(image: Any, mask: Any, made: bytes, dataset: BaseDataset) -> tuple[bytes, bytes]:
    """An image that was encoded anew, and its mask: as it is or, where the image has fewer pixels
    now, of its size, without loss. Both as they were, where together they would not become smaller.

    Args:
        image, mask: the bytes of both.
        made: those of the image now.
        dataset: that they are of.

    Raises:
        FormatError: they don't fit each other.
    """
    numbers = mask_of(image, mask, dataset.budget.left)
    size = image_shape(made, dataset.budget.left)
    fitted = bytes(mask) if size == numbers.shape else encode_mask(resize_nearest(numbers, size))
    return (
        (made, fitted)
        if len(made) + len(fitted) < len(image) + len(mask)
        else (bytes(image), bytes(mask))
    )
