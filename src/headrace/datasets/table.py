"""Reads rows of Parquet, Arrow and NumPy files: dicts of the columns, or values of one column."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from headrace.casting import DTypeArgument, cast, dtype_named
from headrace.core.batcher import BatchReader, Collating, ColumnReader, is_known
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.options import LoadingMode, ModeName, PathOptions, check_arguments
from headrace.datasets.arrays import (
    HDF5Dataset,
    ZarrDataset,
    as_input,
    checked_list,
    joined_rows,
    joined_targets,
)
from headrace.datasets.columns import BytesDecoder, Decoders, checked_decoders
from headrace.datasets.pixels import Left
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError
from headrace.formats.files import check_splits
from headrace.formats.hdf5 import HDF5
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.table.arrays import open_arrays
from headrace.formats.table.columns import holds_images, what_is
from headrace.formats.table.files import TABLES, hold_arrays
from headrace.formats.table.source import TableSource, open_tables
from headrace.formats.zarr.stores import ZARR
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks


class TableDecoder(BytesDecoder):
    """Decodes rows: numbers and arrays to tensors of their dtype, strings to str, bytes, and lists
    and dicts of these.

    Args:
        specs: shape and dtype of each column's values as stored, if all values are alike.
        lists: names of the columns whose values are str or bytes.
        one: name of the only column, whose values are samples. None: samples are dicts.
        decoders: decoders of bytes, by column.
        dtype: dtype that numbers are cast to. None: unchanged.
        left: returns the remaining memory budget.
    """

    def __init__(
        self,
        specs: Mapping[str, ArraySpec | None],
        lists: Sequence[str],
        one: str | None,
        decoders: Decoders,
        dtype: np.dtype[Any] | None,
        left: Left,
    ) -> None:
        super().__init__(decoders, one, left)
        self._specs = {name: _cast_spec(spec, dtype) for name, spec in specs.items()}
        self._lists = frozenset(lists)
        self._dtype = dtype
        self.stores_values: bool = dtype is None and not decoders

    def decode(self, record: Any) -> Any:
        if self._dtype is not None:
            record = _cast(record, self._dtype)
        return super().decode(record) if self.decoders else record

    def value_spec(self) -> ArraySpec | None:
        return None if self.column is None else self._specs[self.column]

    def to_input(self, value: Any) -> Any:
        return as_input(value)

    def sample_nbytes(self) -> int | None:
        sizes = [spec.nbytes for spec in self._specs.values() if spec is not None]
        if len(sizes) == len(self._specs):
            return sum(sizes)
        return None

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        """Makes stacked batches of dicts column by column, if nothing is cached."""
        source = dataset.sample_source
        decoder = dataset.sample_decoder
        if self.column is not None or self.decoders or not isinstance(source, TableSource):
            return None
        if not collating.stacks or not dataset.value_source.is_direct:
            return None
        if decoder.splits_targets or not decoder.makes_plain_samples:
            return None
        if not all(name in self._lists or is_known(spec) for name, spec in self._specs.items()):
            return None

        def read(indices: IntArray, outs: dict[str, Any]) -> int:
            source.read_columns(indices, outs)
            return sum(map(_nbytes, outs.values()))

        stored = {name: spec.dtype for name, spec in source.specs.items() if spec}
        way = "column by column, straight from storage"
        return ColumnReader(way, dataset, self._specs, read, stored)


def _nbytes(out: Any) -> int:
    if isinstance(out, list):
        return sum(map(len, filter(None, out)))
    return int(out.nbytes)


def _cast_spec(spec: ArraySpec | None, dtype: np.dtype[Any] | None) -> ArraySpec | None:
    if spec is None or dtype is None or spec.dtype.kind not in "biufc":
        return spec
    return ArraySpec(spec.shape, dtype)


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    """Casts the numbers in a value, also inside lists and dicts."""
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    if isinstance(value, list):
        return [_cast(one, dtype) for one in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return cast(value, dtype)
    return value


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
            one server. The splits of a HuggingFace dataset are separate tables.
        columns: list of column names: samples are dicts of these. One name as a str: samples are
            the values of that column. None: all columns except the targets.
        target_name: column of the targets, which is read when the table is opened.
            Dictionary-encoded texts, such as pandas categoricals, become class numbers (int64), in
            sorted order of the texts; other texts stay str.
        decode: what decodes columns of bytes, or of structs {"bytes", "path"}, by their names: a
            callable that takes bytes, or the extension of such files, as in tars
            (`StreamingDataset`): {"image": "jpg"} gives uint8 tensors [3, H, W]. None: they stay
            bytes. For a column of images alone see `ImageDataset`, for texts `TextDataset`.
        transform: a callable that is applied to the row (or the value).
        loading_mode: see `LoadingMode`.
        dtype: dtype that numbers are cast to in all columns, also inside lists and structs, but not
            targets. None: unchanged.
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
        decode: Mapping[str, str | Callable[[bytes], Any]] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        if not isinstance(target_name, (str, type(None))):
            raise ConfigError(f"target_name must be the name of a column, not {target_name!r}")
        reach, common = RemoteOptions.split(options)
        self.classes: list[str] = []
        cast_to = dtype_named(dtype)
        names = None if columns is None else checked_list("columns", columns)
        one = columns if isinstance(columns, str) else None
        decoders = checked_decoders(decode or {})
        files = resolve(data_path, TABLES, reach)
        shown = redact(
            data_path if isinstance(data_path, (str, bytes, os.PathLike)) else files.url(0)
        )
        source: Any
        rows: Decoder
        targets: Any = None
        if hold_arrays(files, shown):
            if decoders:
                raise ConfigError(f"{shown} holds NumPy arrays, not bytes: leave out decode")
            check_splits(files)
            arrays = open_arrays(files, one or names, target_name)
            source, rows = joined_rows(arrays, cast_to)
            if target_name is not None:
                of_arrays = [array.column(target_name) for array in arrays]
                targets, _ = joined_targets(of_arrays, arrays, target_name)
        else:
            tables, reader = open_tables(files, shown)
            check_splits(files)
            if names is None:
                names = tuple(name for name in tables[0].schema.names if name != target_name)
            if not names:
                raise FormatError(f"{tables[0].shown} has no column besides the targets")
            source = TableSource(tables, reader, one or names)
            kinds = {name: source.first.schema.field(name).type for name in names}
            for name in decoders:
                if name not in kinds or not holds_images(kinds[name]):
                    raise ConfigError(
                        f"decode[{name!r}]: no column of bytes of this name is read from "
                        f"{source.first.shown}"
                    )
            if target_name is not None:
                targets, self.classes = source.targets(target_name)
            lists = [name for name in names if what_is(kinds[name]) in ("text", "bytes")]
            budget = MemoryBudget(
                options.get("max_memory_usage", 0.8), local_world_size=local_ranks
            )
            rows = TableDecoder(source.specs, lists, one, decoders, cast_to, budget.left)
        super().__init__(
            source,
            sample_decoder=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Numbers of the classes by name."""
        return {name: number for number, name in enumerate(self.classes)}

    def held_nbytes(self) -> int | None:
        each = self._decoder.sample_nbytes()
        if each is None or self.holds_encoded or self._overridden:
            return None
        return each * len(self.sample_source)


_CLASSES: dict[Format, Any] = {TABLES: TableDataset, HDF5: HDF5Dataset, ZARR: ZarrDataset}


def open_rows(
    files: FileSet,
    column: str,
    target_name: str | None,
    options: Mapping[str, Any],
) -> BaseDataset | None:
    """One column of tables, HDF5 files or Zarr stores, for a dataset that decodes its records
    itself. None: files of that format have no such rows.

    Raises:
        Exception: as `TableDataset`, `HDF5Dataset` or `ZarrDataset`.
    """
    if files.kind not in _CLASSES:
        return None
    rows: BaseDataset = _CLASSES[files.kind](files, column, target_name=target_name, **options)
    rows.block_memory.hold_chunks(0)  # the other dataset reserves memory for them
    return rows
