"""Plans the contents of a packed file before the first sample is read.

Everything about a packed file that is known before its first sample is read: the sizes of all
samples, and thus their places; names, targets, classes, fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset
from headrace.datasets.hdf5 import HDF5Dataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.zarr import ZarrDataset
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, SampleError
from headrace.io.packed_strings import PackedNames
from headrace.packing.beside.pairs import (
    LAYOUT,
    box_columns,
    boxes_of,
    has_masks,
    image_sizes,
    mask_starts,
    row_dtype,
    said_of,
)
from headrace.packing.beside.targets import LAYOUT as COLUMNS_LAYOUT, said_of_columns, target_arrays
from headrace.storage.arrays.packed import (
    IMAGE,
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    TARGETS,
    PackedInfo,
    crc_of,
)
from headrace.storage.concat import ConcatSource
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.pairs import PairedSource

Column = npt.NDArray[Any]


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
    sizes: npt.NDArray[np.int64]
    read_sizes: npt.NDArray[np.int64]
    columns: dict[str, Column]
    compression: str | None = None
    chunks: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all datasets, CRCs included; before they are compressed."""
        return (
            int(self.sizes.sum())
            + sum(c.nbytes for c in self.columns.values())
            + 4 * len(self.sizes)
        )


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
        prepare: gives the samples of a group as they will be stored, and their CRCs; a SampleError
            for one that may be left out.
        left_out: what is wrong with each sample that can't be read, by its number; of samples that
            are read when they are written none.
        rows: what the samples have in common; None: the dataset says so, and none had to be looked
            at.
        spool: what `prepare` reads, to be closed when all is written.
    """

    dataset: BaseDataset
    plan: Plan
    prepare: Callable[[range], Sequence[tuple[Column | SampleError, int]]]
    left_out: dict[int, str]
    rows: Rows | None = None
    spool: IO[bytes] | None = None


def is_packed_as_stored(dataset: BaseDataset) -> bool:
    """True if a plan follows from the dataset alone: its samples are image files, or rows of a
    file as they are.
    """
    source, decoder = dataset.sample_source, dataset.sample_decoder
    if are_files(source):
        return isinstance(dataset, ImageDataset)
    files = files_of(source)
    if not files or isinstance(dataset, ImageDataset):
        return bool(files)
    is_plain = (
        isinstance(dataset, (HDF5Dataset, ZarrDataset))
        and decoder.stores_values
        and not decoder.splits_targets
    )
    return is_plain and (_spec_of(files) is not None or _are_encoded(files))


def are_files(source: Any) -> bool:
    """True if samples are files, or pairs of files."""
    return isinstance(source, FilesSource | PairedSource)


def files_of(source: Any) -> list[HDF5Source]:
    """The sources of rows, or of what was packed, that a source consists of; []: it is another
    one.
    """
    each = source.sources if isinstance(source, ConcatSource) else [source]
    return list(each) if all(isinstance(one, HDF5Source) for one in each) else []


def is_encoded(dataset: BaseDataset) -> bool:
    """True if the samples of a dataset that `is_packed_as_stored` are encoded images now, and
    not arrays.
    """
    source = dataset.sample_source
    return are_files(source) or _are_encoded(files_of(source))


def _are_encoded(files: Sequence[HDF5Source]) -> bool:
    packed = packed_info_of(files)
    return packed is not None and packed.store == "encoded"


def packed_info_of(files: Sequence[HDF5Source]) -> PackedInfo | None:
    """What packed files say of themselves, as the first of them does; None: some are none, or
    were packed in another way.
    """
    infos = [one.of_samples for one in files]
    first = infos[0] if infos else None
    ways = {None if info is None else (info.kind, info.store, info.values) for info in infos}
    return first if len(ways) == 1 else None


def _spec_of(files: Sequence[HDF5Source]) -> ArraySpec | None:
    specs = [one.array_spec for one in files]
    return specs[0] if all(spec == specs[0] for spec in specs) else None


def make_plan(
    dataset: BaseDataset,
    store: str | None = None,
    encoded_sizes: IntArray | None = None,
    image: dict[str, Any] | None = None,
    read_sizes: IntArray | None = None,
    *,
    made_images: IntArray | None = None,
    rows: Rows | None = None,
) -> Plan:
    """The plan for a dataset that `is_packed_as_stored`.

    Args:
        dataset: an `ImageDataset`, `HDF5Dataset` or `ZarrDataset`, or a view of one.
        store: "encoded" or "decoded"; None: encoded where the samples are encoded now, else
            decoded.
        encoded_sizes: of images that are encoded anew ([n] bytes), with their masks.
        image: what the file says of these.
        read_sizes: [n] int64, bytes of each sample where it comes from; None: these are asked for,
            which reads the inode of each file.
        made_images: of images that are encoded anew and have masks: bytes without these ([n]).
        rows: what pixels and masks have in common with those of other files; None: the first ones
            say it.

    Raises:
        ConfigError: this dataset can't be packed, or not with this store; the message says what can
            be done.
        SampleError: no mask can be read.
    """
    source, files = dataset.sample_source, files_of(dataset.sample_source)
    whole = dataset.whole_indices(np.arange(len(dataset)))
    packed = packed_info_of(files)
    if packed is not None and "targets" in packed.image and not isinstance(dataset, ImageDataset):
        raise ConfigError(
            f"{files[0].path} holds images with {packed.image['targets']}: open it with "
            "ImageDataset, and pack that"
        )
    encoded_now = is_encoded(dataset)
    store = store or ("encoded" if encoded_now and rows is None else "decoded")
    if store == "encoded" and not encoded_now:
        raise not_encoded()
    if read_sizes is None:
        read_sizes = (
            source.sizes(whole)
            if isinstance(source, FilesSource | PairedSource)
            else _packed_sizes(files)[whole]
        )
    sizes, dtype = read_sizes if encoded_sizes is None else encoded_sizes, np.dtype(np.uint8)
    shape: tuple[int, ...] = (int(sizes.sum()),)
    if store == "decoded":
        row, dtype = _row(dataset, files, encoded_now, rows)
        shape = (len(whole), *row)
        sizes = np.full(len(whole), int(np.prod(row, dtype=np.int64)) * dtype.itemsize, np.int64)
    targets = None if boxes_of(dataset) is not None else dataset.targets
    columns = columns_of(sizes if store == "encoded" else None, names_of(dataset), targets)
    columns |= box_columns(dataset, store == "decoded" or image is not None)
    if has_masks(dataset) and store == "encoded":
        if made_images is None:  # where no sizes are wanted, none are asked for
            made_images = image_sizes(dataset, files, whole) if read_sizes.any() else read_sizes
        columns |= mask_starts(sizes, made_images)
    is_image = isinstance(dataset, ImageDataset) or (packed is not None and packed.kind == "image")
    image = _image(dataset, packed, row, dtype) if is_image and store == "decoded" else image or {}
    said = said_of(dataset)
    of_columns = said_of_columns(
        dataset, targets, packed if _has_targets_of_pack(dataset) else None
    )
    info = info_of(
        dataset,
        columns,
        "image" if is_image else "array",
        store,
        classes=_classes(dataset, packed),
        image={**image, **said},
        version=COLUMNS_LAYOUT if of_columns else LAYOUT if said else 1,
        **of_columns,
    )
    return Plan(info, shape, dtype, sizes, read_sizes, columns)


def _packed_sizes(files: Sequence[HDF5Source]) -> IntArray:
    return np.concatenate([one.image_sizes() if one.gives_images else one.sizes() for one in files])


def not_encoded() -> ConfigError:
    """The error of ``store="encoded"`` for arrays."""
    return ConfigError(
        "store='encoded': the samples of this dataset are arrays, not encoded images: pass "
        "store='decoded'"
    )


def columns_of(
    lengths: npt.NDArray[np.int64] | None, names: PackedNames | None, targets: Any
) -> dict[str, Column]:
    """The datasets beside the samples and their checksums.

    Args:
        lengths: of samples that lie flat, one behind the other: items of the first axis; None: they
            are rows.
        names: of the samples, or None.
        targets: one a sample, or None.

    Raises:
        ConfigError: see `target_arrays`.
    """
    columns: dict[str, Column] = {}
    if lengths is not None:
        columns[OFFSETS] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if names is not None:
        columns[NAMES], columns[NAME_OFFSETS] = names.arrays
    return columns | target_arrays(targets)


def names_of(dataset: BaseDataset) -> PackedNames | None:
    """The names of a dataset's samples, where they are files or have been."""
    source = dataset.sample_source
    names = source.listing.names if isinstance(source, FilesSource) else None
    if isinstance(source, PairedSource):
        names = source.files.listing.names
    if files := files_of(source):
        names = PackedNames.joined([one.names for one in files])
    return None if names is None else names.take(dataset.whole_indices(np.arange(len(dataset))))


def info_of(
    dataset: BaseDataset, columns: dict[str, Column], kind: str, store: str, **others: Any
) -> PackedInfo:
    """What a file of all samples of a dataset says about itself."""
    return PackedInfo(
        kind, store, len(dataset), dataset.fingerprint, checksums=checksums_of(columns), **others
    )


def checksums_of(columns: dict[str, Column]) -> dict[str, int]:
    """CRCs by name."""
    return {name: crc_of(column) for name, column in sorted(columns.items())}


def _row(
    dataset: BaseDataset, files: Sequence[HDF5Source], encoded: bool, rows: Rows | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a decoded sample."""
    if rows is not None:
        return rows.shape, rows.dtype
    if isinstance(dataset, ImageDataset):
        channels = 3 if dataset.color == "RGB" else 1
        if dataset.image_size is None and encoded:
            raise ConfigError(
                "store='decoded' needs images of one size, and image_size is None: open the "
                "dataset with image_size=(height, width)"
            )
        stored = files[0].dtype if files and files[0].dtype.names else None
        size = dataset.image_size or (files[0].shape[1:] if stored is None else stored[IMAGE].shape)
        if has_masks(dataset):
            return (), row_dtype(dataset, files, (int(size[0]), int(size[1])))
        return (int(size[0]), int(size[1]), channels), np.dtype(np.uint8)
    elif encoded:
        raise ConfigError(
            "store='decoded': open the file with ImageDataset, which decodes the images, and pack "
            "that"
        )
    return files[0].shape[1:], files[0].dtype


def _image(
    dataset: BaseDataset, packed: PackedInfo | None, row: tuple[int, ...], dtype: np.dtype[Any]
) -> dict[str, Any]:
    if isinstance(dataset, ImageDataset):
        return {"color": dataset.color, "image_size": list((row or dtype[IMAGE].shape)[:2])}
    return {} if packed is None else packed.image


def _classes(dataset: BaseDataset, packed: PackedInfo | None) -> list[str] | None:
    """Of arrays of a pack: the pack's, if its targets are the dataset's."""
    if isinstance(dataset, ImageDataset):
        return dataset.classes or None
    if isinstance(dataset, ArrayDataset) and dataset.classes is not None:
        return dataset.classes
    return packed.classes if packed is not None and _has_targets_of_pack(dataset) else None


def _has_targets_of_pack(dataset: BaseDataset) -> bool:
    """True if arrays of a pack come with the targets of that pack."""
    return dataset._arguments.get("target_name") == TARGETS
