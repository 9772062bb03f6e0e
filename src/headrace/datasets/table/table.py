"""Rows of Parquet, Arrow and NumPy files as samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np

from headrace.casting import DTypeArgument, dtype_named
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, chained
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, check_arguments, split_options
from headrace.datasets.arrays import joined_rows, joined_targets
from headrace.datasets.image.augment import image_sides, split_augment
from headrace.datasets.image.format import DEFAULT_SIZE, UNSET, ImageDecoder, check_image_options
from headrace.datasets.table.format import ColumnImage, ColumnImages, TableDecoder
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import redact
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.resolver import resolve
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks
from headrace.storage.class_folders import warn_of_splits
from headrace.storage.table.arrays import open_arrays
from headrace.storage.table.columns import (
    holds_images,
    is_categorical,
    what_is,
)
from headrace.storage.table.files import TABLES, classes_in, hold_arrays
from headrace.storage.table.source import TableSource, open_tables

_IMAGE_OPTIONS: dict[str, Any] = {
    "image_size": UNSET,
    "color": "RGB",
    "normalize": True,
    "transform_input": "pil",
    "decode": "fast",
}


class TableDataset(BaseDataset):
    """Rows of a table as dicts of its columns. With `target_name` a sample is ``(row, target)``.

    Numbers are tensors of their dtype, lists of numbers 1-D tensors, texts str, and bytes bytes;
    lists and structs of these are lists and dicts. Row groups of Parquet files and record batches
    of Arrow files are the blocks of ``shuffle="block"``; each is decoded once for all rows of a
    batch. Of local, uncompressed Arrow files only the rows are read. A table that
    HuggingFace's `datasets` saved is opened in place.

    In NumPy files the rows of each array are samples: tensors for .npy, dicts of the arrays for
    .npz.

    Parquet and Arrow files need the package pyarrow: ``pip install 'headrace[arrow]'``.

    Args:
        data_path: a file; or several with equal columns, as a folder (searched for .parquet, .pq,
            .arrow, .feather, .npy, .npz), a glob, a pattern with braces or a list. Their rows are
            concatenated: a list's in its order, others sorted. Or fsspec URLs of such files, all on
            one server. The splits of a HuggingFace data set are separate tables.
        columns: list of column names: samples are dicts of these. One name as a str: samples are
            the values of that column. None: all columns except the targets, or, with
            `image_column`, only that.
        target_name: column of the targets, which is read when the table is opened.
            Dictionary-encoded texts, such as pandas categoricals, become class numbers (int64), in
            sorted order of the texts; other texts stay str.
        image_column: column of encoded images, as bytes or as structs {"bytes", "path"}, which are
            decoded as in `ImageDataset`. If no other column is read, the image itself is the
            sample's input.
        transform: a callable that is applied to the row (or the value, or the image).
        loading_mode: see `LoadingMode`.
        dtype: dtype that numbers are cast to in all columns, also inside lists and structs, but not
            targets and images. None: unchanged.
        image_size, color, normalize, transform_input, decode: for `image_column`: see
            `ImageDataset`. If other columns are read too, `transform` receives the dict, with the
            image as a tensor.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes, class_to_idx: class names, and their numbers, if targets are dictionary-encoded
            texts, or if HuggingFace's `datasets` stored them for `target_name` (`ClassLabel`).

    Raises:
        ConfigError: an argument is invalid, or pyarrow is missing.
        DataNotFoundError, FormatError: a file does not exist; it is damaged, or its values can't be
            samples.
        MissingNameError: there is no such column; the message lists the columns.
        AccessError, RemoteError: a file is not readable; a request to a server failed.
        FileChangedError: a file changed since it was opened.
        BudgetError: a decoded row group does not fit the memory budget.
    """

    reads_urls = True
    collate: Callable[[list[Any]], Any] | str | None = None

    def __init__(
        self,
        data_path: DataPath,
        columns: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        image_column: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        image_size: int | tuple[int, int] | None = UNSET,
        color: Literal["RGB", "L"] = "RGB",
        normalize: bool | Literal["host"] = True,
        transform_input: Literal["pil", "tensor", "numpy"] = "pil",
        decode: Literal["fast", "exact"] = "fast",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        for name, column in (
            ("image_column", image_column),
            ("target_name", target_name),
        ):
            if not isinstance(column, (str, type(None))):
                raise ConfigError(f"{name} must be the name of one column, or None, not {column!r}")
        images: dict[str, Any] = {
            "image_size": image_size,
            "color": color,
            "normalize": normalize,
            "transform_input": transform_input,
            "decode": decode,
        }
        if image_column is None:
            for name, usual in _IMAGE_OPTIONS.items():
                if images[name] is not usual and images[name] != usual:
                    raise ConfigError(f"{name} is for image_column: name the column")
        check_image_options(color, transform_input, decode, normalize)
        reach, common = split_options(options)
        self.classes: list[str] = []
        cast_to = dtype_named(dtype)
        names, is_one = _names_of(columns, image_column)
        image: ColumnImage | None = None
        if image_column is not None:
            augment = None
            if is_one:
                augment, transform = split_augment(transform)
            else:
                transform = chained(transform)
            has_transform = transform is not None or options.get("transforms") is not None
            images["augment"] = augment
            images["transformed"] = is_one and has_transform
            images["hold"] = common.get("hold")
            usage = common.get("max_memory_usage", 0.8)
            images["left"] = MemoryBudget(usage, local_world_size=local_ranks).left
            image = ColumnImage(image_column, _image_format(images, image_column, is_one))
        files = resolve(data_path, TABLES, reach)
        warn_of_splits(files)
        shown = redact(
            data_path if isinstance(data_path, (str, bytes, os.PathLike)) else files.url(0)
        )
        source: Any
        rows: Decoder
        targets: Any = None
        if hold_arrays(files, shown):
            if image_column is not None:
                raise ConfigError(f"{shown} holds NumPy arrays, which have no columns of images")
            chosen = names[0] if names is not None and is_one else names
            arrays = open_arrays(files, chosen, target_name)
            source, rows = joined_rows(arrays, cast_to)
            if target_name is not None:
                of_arrays = [array.column(target_name) for array in arrays]
                paths = [array.path for array in arrays]
                targets, _ = joined_targets(of_arrays, paths, target_name)
        else:
            tables, reader = open_tables(files, shown)
            if names is None:
                names = tuple(name for name in tables[0].schema.names if name != target_name)
            if not names:
                raise FormatError(f"{tables[0].shown} has no column beside the targets")
            source = TableSource(tables, reader, names, is_one)
            kinds = {name: source.first.schema.field(name).type for name in names}
            if image_column is not None and not holds_images(kinds[image_column]):
                raise FormatError(
                    f"{source.first.shown}: image_column={image_column!r}: the column is of type "
                    f"{kinds[image_column]}, and holds no images, as bytes or structs of them"
                )
            if target_name is not None:
                targets, self.classes = _targets(source, target_name)
            if is_one and image is not None:
                rows = image.format
            else:
                lists = [name for name, kind in kinds.items() if what_is(kind) in ("text", "bytes")]
                rows = TableDecoder(source.specs, lists, is_one, image, cast_to)
        super().__init__(
            source,
            sample_decoder=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def _layout_nbytes(self) -> int:
        source = self.sample_source
        return source.layout_nbytes if isinstance(source, TableSource) else source.block_nbytes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Numbers of the classes by name."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def holds_encoded(self) -> bool:
        """True if modes "eager" and "cached" cache encoded images. Default: True if images keep
        their own size.
        """
        if self._hold is not None:
            return self._hold == "encoded"
        return isinstance(self._decoder, ImageDecoder) and self._decoder.image_size is None

    def held_nbytes(self) -> int | None:
        if self.holds_encoded or self._overridden:
            return None
        each = self._decoder.sample_nbytes()
        if isinstance(self._decoder, ImageDecoder):
            size = self._decoder.image_size
            each = None if size is None else size[0] * size[1] * self._decoder.channels
        return None if each is None else each * len(self.sample_source)


def _names_of(columns: Any, image_column: str | None) -> tuple[tuple[str, ...] | None, bool]:
    """The columns that samples have (None: all), and whether samples are the values of the one
    column.
    """
    special = [] if image_column is None else [image_column]
    if columns is None or isinstance(columns, str):
        named = [] if columns is None else [columns]
        names = tuple(dict.fromkeys([*named, *special]))
        return names or None, len(names) == 1
    is_list = isinstance(columns, Sequence) and not isinstance(columns, bytes)
    if not is_list or not columns or not all(isinstance(name, str) for name in columns):
        raise ConfigError(
            f"columns must be the name of a column, or a list of such, not {columns!r}"
        )
    if len(set(columns)) < len(columns):
        raise ConfigError(f"columns names a column twice: {list(columns)!r}")
    return tuple(dict.fromkeys([*columns, *special])), False


def _targets(source: TableSource, name: str) -> tuple[Any, list[str]]:
    """The targets, and the names of their classes."""
    values = source.column(name)
    if isinstance(values, list):
        for row, value in enumerate(values):
            if value is None:
                raise FormatError(
                    f"{source.location(row)}: target_name={name!r}: there is no value (null)"
                )
    if not is_categorical(source.first.schema.field(name).type):
        return values, classes_in(source.first.schema, name)
    classes = sorted(set(values))
    numbers = {text: number for number, text in enumerate(classes)}
    return np.array([numbers[text] for text in values], np.int64), classes


def _image_format(given: dict[str, Any], column: str, is_alone: bool) -> ImageDecoder:
    """The format of a column of images, beside which nothing is read where it `is_alone`."""
    options = dict(given)
    size = options.pop("image_size")
    augment = options["augment"]
    if size is UNSET:
        is_cropped = augment is not None and augment.size is not None
        options["image_size"] = None if options["transformed"] or is_cropped else DEFAULT_SIZE
    else:
        options["image_size"] = size and image_sides(size, "image_size", ", or None")
    options["is_size_given"] = size is not UNSET
    options["exact"] = options.pop("decode") == "exact"
    options["is_stored_decoded"] = False
    return ColumnImages(**options, column=column) if is_alone else ImageDecoder(**options)
