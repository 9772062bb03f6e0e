"""Reads images from columns of tables and tars, arrays, and formats of other packages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.options import UNSET
from headrace.datasets.image.decoder import ImageDecoder, LabelDecoder, Opened
from headrace.datasets.image.labels import FOLDERS, Labels, Wanted, encoded
from headrace.datasets.table import open_rows
from headrace.errors import ConfigError, FormatError
from headrace.formats.registry import detect, open_columns
from headrace.formats.resolve.file_set import EXTENSIONS, TARS, FileSet
from headrace.formats.resolve.resolver import DataPath, entries_of
from headrace.formats.source import sources_of
from headrace.formats.table.columns import holds_images
from headrace.formats.table.source import TableSource
from headrace.formats.tar import TarSource
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

_CLASSES = "cls"


class TableImages(TableSource):
    """The encoded images in one column of a table: its values, or their fields "bytes"."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        values = super().read(indices)
        images = [value.get("bytes") if isinstance(value, dict) else value for value in values]
        for value, image in zip(values, images, strict=True):
            if not isinstance(image, bytes):
                raise FormatError(
                    f"column {self.names[0]!r} must contain encoded images, not {value!r:.60}"
                )
        return images


class TarImages(TarSource):
    """The encoded images in tars; or pairs of image and class number, both as bytes.

    Args:
        data_path: see `TarSource`.
        column: extension of the images. None: any extension of images.
        wanted: its `targets` are the extension of the class numbers, or None; by default "cls", if
            the first sample has it.
        reach: how URLs are read.
    """

    def __init__(
        self,
        data_path: DataPath | FileSet,
        column: str | None,
        wanted: Wanted,
        reach: RemoteOptions,
    ) -> None:
        super().__init__(data_path, reach=reach)
        self._column = column
        self._target: Any = wanted.targets
        if wanted.targets is UNSET:
            first = super().read([0])[0] if len(self) else {}
            self._target = _CLASSES if _CLASSES in first else None
        self.decoder: type[ImageDecoder] = ImageDecoder if self._target is None else LabelDecoder

    def read(self, indices: Sequence[int]) -> list[Any]:
        picked = list[Any]()
        for record in super().read(indices):
            image = self._column
            if image is None:
                endings = (name for name in record if f".{name.rpartition('.')[2]}" in EXTENSIONS)
                image = next(endings, "jpg")
            for name in (image, self._target):
                if name is not None and name not in record:
                    has = ", ".join(record)
                    raise FormatError(f"the sample has no member {name!r}; it has {has}")
            sample = record[image]
            if self._target is not None:
                sample = (sample, record[self._target])
            picked.append(sample)
        return picked


def _are_encoded(source: Any) -> bool:
    """True if the rows of an array are bytes: uint8 [n] of any or one length, or opaque."""
    if len(source.shape) == 1:
        of_any_length = (source.dtype.metadata or {}).get("vlen")
        is_opaque = source.dtype.kind in "SV" and source.dtype.names is None
        return is_opaque or of_any_length == np.uint8
    return source.dtype == np.uint8 and len(source.shape) == 2


def open_column(
    data_path: DataPath, column: str | None, wanted: Wanted, reach: RemoteOptions
) -> Opened:
    """The images of a column, and their targets.

    Args:
        data_path: path of tables, tars, HDF5 files, Zarr stores, or another package's format.
        column: name of the column. Of tars: extension of the images, or None.
        wanted: its `targets` name the column of the targets.
        reach: how URLs are read.

    Raises:
        ConfigError, FormatError, MissingNameError: see `ImageDataset`.
    """
    shown = redact(entries_of(data_path)[0])
    name: Any = None if wanted.targets is UNSET else wanted.targets
    wanted.refuse_options()
    if name == FOLDERS or not isinstance(name, (str, os.PathLike, type(None))):
        raise ConfigError(f"targets must name a column of {shown}, or be None, not {name!r}")
    if name is not None:
        name = str(name)
    files = detect(data_path, reach)
    source: Any
    if files.kind is TARS:
        source = TarImages(files, column, wanted, reach)
        return Opened(source, decoder=source.decoder)
    assert column is not None
    rows: Any = open_rows(files, column, name, vars(reach))
    if rows is None:
        if name is None:
            return Opened(open_columns(files, reach, [column]).column(column))
        source = open_columns(files, reach, [column, name]).rows([column, name])
        return Opened(source, decoder=LabelDecoder)
    source = rows.sample_source
    first = sources_of(source)[0]
    color = size = None
    if isinstance(first, TableSource):
        kind = first.first.schema.field(column).type
        if not holds_images(kind):
            raise FormatError(
                f"{first.first.shown}: column={column!r} is of type {kind}, not bytes of images"
            )
        source = TableImages(first.tables, first.files, column)
    elif first.dtype == np.uint8 and len(first.shape) == 4 and first.shape[3] in (1, 3):
        color = "RGB" if first.shape[3] == 3 else "L"
        size = first.shape[1:3]
    elif not (_are_encoded(first) or getattr(first, "is_flat", False)):
        raise FormatError(
            f"{first.path}: column={column!r}: the rows are {first.rows_are}, not images "
            f"(bytes, or uint8 [H, W, 3]): use {type(rows).__name__}"
        )
    targets = rows.targets
    classes = list(rows.classes or [])
    if isinstance(targets, list) and not classes:
        targets, classes = encoded(targets)
    return Opened(source, Labels(targets, classes), color=color, size=size)
