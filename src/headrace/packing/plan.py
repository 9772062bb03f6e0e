"""Plans what a packed file holds before its first sample is read: the sizes of all samples, and
thus their places; names, targets, classes, fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
import torch

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset, HDF5Dataset
from headrace.datasets.image.image import ImageDataset
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.packed import (
    BOXES,
    IMAGE,
    MASK_STARTS,
    MASKS,
    TARGETS,
    PackedInfo,
    crc_of,
)
from headrace.formats.files import FilesSource, PairedSource
from headrace.formats.hdf5.chunks import filter_versions
from headrace.formats.hdf5.rows import HDF5Source
from headrace.memory.budget import format_size
from headrace.packing.columns import (
    COLUMNS_LAYOUT,
    PAIRS_LAYOUT,
    Column,
    box_columns,
    boxes_of,
    columns_of,
    files_of,
    has_masks,
    names_of,
    target_columns_of,
)
from headrace.packing.images import row_dtype
from headrace.packing.options import PackOptions
from headrace.packing.stream import Spool

_CHUNK_BYTES = 1 << 20
"""Decoded bytes of a compressed chunk, at most: random access decodes no more for a sample, a block
shuffle decodes a chunk once for all its samples, and the cost of a chunk (a read, a call, an entry
of the index) is small beside that of decoding it.
"""
# some of them are in memory while they are packed, and while they are read
_MOST_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What a packed file will hold.

    Attributes:
        info: what it will say about itself.
        shape, dtype: of the dataset of samples: [bytes] uint8 when encoded, [n, *row] when decoded,
            [tokens] of texts.
        sizes: [n] int64, bytes of each sample in the file.
        read_sizes: [n] int64, bytes of each sample where it comes from.
        columns: the datasets beside the samples and their checksums, by name.
        compression: of the chunks of samples that are rows; None: they are as they are.
        chunks: samples a chunk, of the last one fewer; None: there are no chunks.
    """

    info: PackedInfo
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: IntArray
    read_sizes: IntArray
    columns: dict[str, Column]
    compression: str | None = None
    chunks: int | None = None


class Rows(NamedTuple):
    """What the arrays of all samples have in common."""

    store: str
    """ "decoded": one shape; "ragged": the first axis differs."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of a sample; of "ragged" ones without the first axis."""
    values: str | None = None
    """ "bytes" or "str": what the samples are, if they are no arrays."""


class Packing(NamedTuple):
    """What is written, and how.

    Attributes:
        dataset: that is packed; a view where samples are left out.
        plan: of the file.
        prepare: gives the samples of a group as they will be stored; a SampleError for one that may
            be left out.
        left_out: what is wrong with each sample that can't be read, by its number; of samples that
            are read when they are written none.
        rows: what the samples have in common; None: the dataset says so, and none had to be looked
            at.
        spool: what `prepare` reads, to be closed when all is written.
    """

    dataset: BaseDataset
    plan: Plan
    prepare: Callable[[range], Sequence[npt.NDArray[Any] | SampleError]]
    left_out: dict[int, str]
    rows: Rows | None = None
    spool: Spool | None = None


def is_packed_as_stored(dataset: BaseDataset) -> bool:
    """True if a plan follows from the dataset alone: its samples are image files, or rows of a
    file as they are.
    """
    source = dataset.sample_source
    if are_files(source):
        return isinstance(dataset, ImageDataset)
    files = files_of(source)
    if not files or isinstance(dataset, ImageDataset):
        return bool(files)
    decoder = dataset.sample_decoder
    is_plain = (
        isinstance(dataset, HDF5Dataset) and decoder.stores_values and not decoder.splits_targets
    )
    spec = files[0].array_spec
    have_one_spec = spec is not None and all(one.array_spec == spec for one in files)
    return is_plain and (have_one_spec or is_encoded(dataset))


def are_files(source: Any) -> bool:
    """True if samples are files, or pairs of files."""
    return isinstance(source, FilesSource | PairedSource)


def is_encoded(dataset: BaseDataset) -> bool:
    """True if samples are encoded images where they come from, and not arrays."""
    packed = packed_info_of(files_of(dataset.sample_source))
    return are_files(dataset.sample_source) or (packed is not None and packed.store == "encoded")


def packed_info_of(files: Sequence[HDF5Source]) -> PackedInfo | None:
    """What packed files say of themselves, as the first of them does; None: some are none, or
    were packed in another way.
    """
    infos = [one.of_samples for one in files]
    ways = {None if info is None else (info.kind, info.store, info.values) for info in infos}
    return infos[0] if len(ways) == 1 else None


class Made(NamedTuple):
    """Images that were encoded anew: bytes of each with its mask, and without ([n])."""

    sizes: IntArray
    image_sizes: IntArray
    jpeg: list[Any]


def make_plan(
    dataset: BaseDataset,
    store: str | None = None,
    *,
    read_sizes: IntArray | None = None,
    made: Made | None = None,
    rows: Rows | None = None,
) -> Plan:
    """The plan for a dataset that `is_packed_as_stored`.

    Args:
        dataset: an `ImageDataset` or `HDF5Dataset`, or a view of one.
        store: "encoded" or "decoded"; None: encoded where the samples are encoded now, else
            decoded.
        read_sizes: [n] int64, bytes of each sample where it comes from; None: these are asked for,
            which reads the inode of each file.
        made: what became of images; None: they are packed as they are.
        rows: what pixels and masks have in common with those of other files; None: the first ones
            say it.

    Raises:
        ConfigError: this dataset can't be packed, or not with this store; the message says what can
            be done.
        SampleError: no mask can be read.
    """
    source = dataset.sample_source
    files = files_of(source)
    whole = dataset.whole_indices(np.arange(len(dataset)))
    packed = packed_info_of(files)
    is_image = isinstance(dataset, ImageDataset)
    if packed is not None and "targets" in packed.image and not is_image:
        raise ConfigError(
            f"{files[0].path} holds images with {packed.image['targets']}: open it with "
            "ImageDataset, and pack that"
        )
    encoded_now = is_encoded(dataset)
    if store is None:
        store = "encoded" if encoded_now and rows is None else "decoded"
    if store == "encoded" and not encoded_now:
        raise not_encoded()
    if read_sizes is None:
        read_sizes = _read_sizes(source, files, whole)
    sizes = read_sizes if made is None else made.sizes
    dtype = np.dtype(np.uint8)
    shape: tuple[int, ...] = (int(sizes.sum()),)
    if store == "decoded":
        row, dtype = _row(dataset, files, encoded_now, rows)
        shape = (len(whole), *row)
        sizes = np.full(len(whole), math.prod(row) * dtype.itemsize, np.int64)
    targets = dataset.targets if boxes_of(dataset) is None else None
    columns = columns_of(sizes if store == "encoded" else None, names_of(dataset), targets)
    columns |= box_columns(dataset, store == "decoded" or made is not None)
    if has_masks(dataset) and store == "encoded":
        image_sizes = read_sizes  # where no sizes are wanted, none are asked for
        if made is not None:
            image_sizes = made.image_sizes
        elif isinstance(source, PairedSource) and read_sizes.any():
            image_sizes = source.files.sizes(whole)
        elif read_sizes.any():
            image_sizes = np.concatenate([one.image_sizes() for one in files])[whole]
        columns[MASK_STARTS] = np.cumsum(sizes) - sizes + image_sizes
    image: dict[str, Any] = {}
    if made is not None:
        image = {"jpeg": made.jpeg}
    elif store == "decoded" and isinstance(dataset, ImageDataset):
        row_type: Any = np.dtype((dtype, shape[1:]))
        pixels = row_type[IMAGE] if has_masks(dataset) else row_type
        image = {"color": dataset.color, "image_size": list(pixels.shape[:2])}
    elif store == "decoded" and packed is not None:
        image = packed.image
    paired = _of_pairs(dataset)
    # of arrays of a pack: the pack's, if its targets are the dataset's
    its_pack = packed if dataset._arguments.get("target_name") == TARGETS else None
    target_columns = target_columns_of(dataset, targets, its_pack)
    version = PAIRS_LAYOUT if paired else 1
    info = PackedInfo(
        "image" if is_image or (packed is not None and packed.kind == "image") else "array",
        store,
        len(dataset),
        dataset.fingerprint,
        _classes(dataset, its_pack),
        {**image, **paired},
        checksums=checksums_of(columns),
        target_columns=target_columns,
        version=version if target_columns is None else COLUMNS_LAYOUT,
    )
    return Plan(info, shape, dtype, sizes, read_sizes, columns)


def _read_sizes(source: Any, files: Sequence[HDF5Source], whole: IntArray) -> IntArray:
    if isinstance(source, FilesSource | PairedSource):
        return source.sizes(whole)
    sizes = [one.image_sizes() if one.gives_images else one.sizes() for one in files]
    return np.concatenate(sizes)[whole]


def _row(
    dataset: BaseDataset, files: Sequence[HDF5Source], encoded: bool, rows: Rows | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a decoded sample."""
    if rows is not None:
        return rows.shape, rows.dtype
    if not isinstance(dataset, ImageDataset):
        if encoded:
            raise ConfigError(
                "store='decoded': open the file with ImageDataset, which decodes the images, and "
                "pack that"
            )
        return files[0].shape[1:], files[0].dtype
    size: Any = dataset.image_size
    if size is None and encoded:
        raise ConfigError(
            "store='decoded' needs images of one size, and image_size is None: open the "
            "dataset with image_size=(height, width)"
        )
    if size is None:
        size = files[0].dtype[IMAGE].shape if files[0].dtype.names else files[0].shape[1:]
    height, width = int(size[0]), int(size[1])
    if has_masks(dataset):
        return (), row_dtype(dataset, files, (height, width))
    return (height, width, 3 if dataset.color == "RGB" else 1), np.dtype(np.uint8)


def _of_pairs(dataset: BaseDataset) -> dict[str, Any]:
    """What `PackedInfo.image` has of masks or boxes; {}: targets are numbers, or none."""
    if has_masks(dataset):
        return {"targets": MASKS}
    boxes = boxes_of(dataset)
    if boxes is None:
        return {}
    return {"targets": BOXES, "class_ids": list(boxes.class_to_idx.values())}


def _classes(dataset: BaseDataset, its_pack: PackedInfo | None) -> list[str] | None:
    if isinstance(dataset, ImageDataset):
        return dataset.classes or None
    if isinstance(dataset, ArrayDataset) and dataset.classes is not None:
        return dataset.classes
    return None if its_pack is None else its_pack.classes


def not_encoded() -> ConfigError:
    """The error of ``store="encoded"`` for arrays."""
    return ConfigError(
        "store='encoded': the samples of this dataset are arrays, not encoded images: pass "
        "store='decoded'"
    )


def checksums_of(columns: dict[str, Column]) -> dict[str, int]:
    """CRCs by name."""
    return {name: crc_of(column) for name, column in sorted(columns.items())}


# -- chunks


def laid_out(plan: Plan, options: PackOptions) -> Plan:
    """The plan with its samples in chunks.

    Raises:
        ConfigError: samples that lie flat have none; a chunk would be too large.
    """
    if not options.is_chunked:
        return plan
    if plan.info.store == "encoded":
        raise ConfigError(
            f"{options.layout}: encoded images are compressed already and lie one behind the "
            "other: pass store='decoded' for their pixels"
        )
    if plan.info.store != "decoded":
        raise ConfigError(
            f"{options.layout}: only samples that are arrays of one shape are cut into chunks, and "
            "arrays of several lengths lie flat: give all one shape"
        )
    row_bytes = math.prod(plan.shape[1:]) * plan.dtype.itemsize
    chunks = chunks_for(options, row_bytes)
    if chunks is None:
        return plan
    nbytes = min(chunks, plan.shape[0]) * row_bytes
    if nbytes > _MOST_CHUNK_BYTES:
        raise ConfigError(
            f"{options.layout}: a chunk of {chunks:,} samples has {format_size(nbytes)}, more "
            f"than {format_size(_MOST_CHUNK_BYTES)}: chunks are compressed and decoded whole, use "
            "fewer, or leave out chunks and compression"
        )
    return replace(plan, compression=options.compression, chunks=chunks)


def chunks_for(options: PackOptions, row_bytes: int) -> int | None:
    """Samples a chunk, where each has so many bytes: the largest power of two that stays below
    `_CHUNK_BYTES`, unless `chunks` says how many. None: contiguous, as samples of nothing are.
    """
    if not options.is_chunked or not row_bytes:
        return None
    return options.chunks or 1 << max(0, (_CHUNK_BYTES // row_bytes).bit_length() - 1)


def versions_of(dataset: BaseDataset, plan: Plan, options: PackOptions) -> dict[str, str]:
    """The versions of the libraries that decide the bytes of a pack, by name. Of texts the plan
    knows their tokenizer.
    """
    versions: dict[str, str] = {}
    is_resized = (
        isinstance(dataset, ImageDataset) and plan.info.store == "decoded" and is_encoded(dataset)
    )
    if options.is_jpeg or is_resized:
        versions |= {"Pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}
    if is_resized or options.max_size is not None:
        versions["torch"] = str(torch.__version__).partition("+")[0]  # resizes
    if plan.compression is not None:
        versions |= filter_versions(plan.compression)
    return versions
