"""Images in columns of tables and tars, in arrays, and in the formats of other packages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.datasets.image.decoder import pixels_are
from headrace.datasets.image.labels import FOLDERS, Labels, Wanted, encoded
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.rows import ArraysSource
from headrace.formats.hdf5.kind import HDF5
from headrace.formats.registry import look_up, open_columns
from headrace.formats.resolve.file_set import EXTENSIONS
from headrace.formats.resolve.resolver import DataPath, entries_of, resolve
from headrace.formats.source import Source
from headrace.formats.table.columns import holds_images
from headrace.formats.table.files import TABLES
from headrace.formats.table.source import TableSource, open_tables
from headrace.formats.tar import TARS, TarSource
from headrace.formats.zarr.stores import ZARR
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

_CLASSES = "cls"


def encoded_image(value: Any, column: str) -> bytes:
    """The encoded image in a value of a column: the value itself, or its field "bytes".

    Raises:
        FormatError: there is none.
    """
    data = value
    if isinstance(value, dict):
        data = value.get("bytes")
    if isinstance(data, bytes):
        return data
    path = value.get("path") if isinstance(value, dict) else None
    if path:
        raise FormatError(
            f"column {column!r} holds the path of an image and not its bytes ({path!r}): open the "
            "folder with ImageDataset"
        )
    raise FormatError(f"column {column!r} has no image (null) there")


class TableImages(TableSource):
    """The encoded images of the one column of a table."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [encoded_image(value, self.names[0]) for value in super().read(indices)]


class TarImages(TarSource):
    """The encoded images of tars; or pairs of image and class number, both as their bytes.

    Args:
        data_path: see `TarSource`.
        column: the extension of the images; None: any of images.
        target: that of the class numbers; None: there are none. UNSET: "cls", if the first sample
            has it.
    """

    def __init__(
        self, data_path: DataPath, column: str | None, wanted: Wanted, reach: RemoteOptions
    ) -> None:
        super().__init__(data_path, reach=reach)
        self._column = column
        self.target: Any = wanted.targets
        if not wanted.is_outright:
            first = super().read([0])[0] if len(self) else {}
            self.target = _CLASSES if _CLASSES in first else None

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self._picked(record) for record in super().read(indices)]

    def _picked(self, record: dict[str, Any]) -> Any:
        image = self._column
        if image is None:
            endings = [name for name in record if f".{name.rpartition('.')[2]}" in EXTENSIONS]
            image = "jpg"
            if endings:
                image = endings[0]
        for name in (image, self.target):
            if name is not None and name not in record:
                raise FormatError(f"the sample has no member {name!r}; it has {', '.join(record)}")
        if self.target is None:
            return record[image]
        return record[image], record[self.target]


def _are_encoded(source: Any) -> bool:
    """True if the rows of an array are bytes: uint8 [n] of any or of one length, or opaque."""
    if len(source.shape) == 1:
        of_any_length = (source.dtype.metadata or {}).get("vlen")
        is_opaque = source.dtype.kind in "SV" and source.dtype.names is None
        return is_opaque or of_any_length == np.uint8
    return source.dtype == np.uint8 and len(source.shape) == 2


def _open_arrays(dataset: Any, column: str) -> tuple[Source, Labels]:
    """The images in the rows of arrays, and their targets.

    Args:
        dataset: of the arrays.
        column: their name.

    Raises:
        FormatError: they are no images.
    """
    source = dataset.sample_source
    if source.block_nbytes:
        dataset.block_memory.hold_chunks(0)  # the dataset of images reserves memory for them
    first: ArraysSource = getattr(source, "sources", [source])[0]
    if not (pixels_are(first) or _are_encoded(first) or getattr(first, "is_flat", False)):
        raise FormatError(
            f"{first.path}: column={column!r}: the rows are {first.rows_are}, and no images, as "
            f"bytes or as uint8 [height, width, 3]: open them with {type(dataset).__name__}"
        )
    targets = dataset.targets
    classes = list(dataset.classes or [])
    if isinstance(targets, list):
        targets, classes = encoded(targets)
    return source, Labels(targets, classes)


def open_column(
    data_path: DataPath, column: str | None, wanted: Wanted, reach: RemoteOptions
) -> tuple[Source, Labels]:
    """The images of a column, and their targets.

    Args:
        data_path: of tables, tars, HDF5 files, Zarr stores, or files of another package's format.
        column: its name; of tars the extension of the images, or None.
        wanted: the name of the column of the targets.
        reach: how URLs are read.

    Raises:
        ConfigError, FormatError, MissingNameError: see `ImageDataset`.
    """
    shown = redact(entries_of(data_path)[0])
    name = wanted.targets
    wanted.refuse_options("those of a column")
    if not (name is None or isinstance(name, (str, os.PathLike))) or (
        wanted.targets == FOLDERS and wanted.is_outright
    ):
        raise ConfigError(
            f"targets must name a column of {shown}, or be None, not {name!r}: the images have no "
            "names to find other targets by"
        )
    format_, files = look_up(data_path, reach)
    if format_ is TARS:
        return TarImages(data_path, column, wanted, reach), Labels(None, [])
    assert column is not None
    if format_ is TABLES:
        tables, reader = open_tables(resolve(files or data_path, TABLES, reach), shown)
        source = TableImages(tables, reader, [column], True)
        kind = source.first.schema.field(column).type
        if not holds_images(kind):
            raise FormatError(
                f"{source.first.shown}: column={column!r}: the column is of type {kind}, and "
                "holds no images, as bytes or structs of them"
            )
        if name is None or not wanted.is_outright:
            return source, Labels(None, [])
        targets, classes = source.targets(str(name))
        if not classes and isinstance(targets, list):
            targets, classes = encoded(targets)
        return source, Labels(targets, classes)
    if format_ in (HDF5, ZARR):
        from headrace.datasets.arrays import HDF5Dataset, ZarrDataset  # which import h5py

        opens = HDF5Dataset if format_ is HDF5 else ZarrDataset
        target_name = str(name) if wanted.is_outright and name is not None else None
        arrays = opens(data_path, column, target_name=target_name, **vars(reach))
        return _open_arrays(arrays, column)
    if format_.open is None:
        raise ConfigError(f"{shown} holds {format_.name}, which have no columns: leave out column=")
    if wanted.is_outright and name is not None:
        raise ConfigError(f"targets can't be given for a column of {format_.name} yet")
    columns = open_columns(files or data_path, format_, reach, [column])
    return columns.column(column), Labels(None, [])
