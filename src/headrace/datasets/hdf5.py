"""Rows of HDF5 files as samples."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import h5py
import numpy as np
import numpy.typing as npt

from headrace.arguments import check_flag
from headrace.casting import DTypeArgument
from headrace.datasets.arrays import (
    ArrayDataset,
    ArrayFormat,
    checked_names,
    joined_rows,
    labelled_targets,
)
from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.options import PathOptions, split_options
from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact
from headrace.io.resolve.expressions import DataPath
from headrace.modes import LoadingMode, ModeName
from headrace.storage.arrays.axes import checked_axis
from headrace.storage.arrays.packed import DATA
from headrace.storage.concat import ConcatSource
from headrace.storage.hdf5.files import only_dataset
from headrace.storage.hdf5.layouts import KeptLayouts
from headrace.storage.hdf5.rows import HDF5Source, Interpretation, OpenHDF5, open_files
from headrace.storage.hdf5.tables import Column, columns_of, tables_in
from headrace.storage.sparse import frames
from headrace.storage.sparse.hdf5 import HDF5Groups


class TableFormat(ArrayFormat):
    """Rows of a table of pandas: dicts of the values by column.

    Args:
        columns: where each is in a record.
        dtype, encoding: see `ArrayFormat`.
    """

    def __init__(
        self, columns: Sequence[Column], dtype: np.dtype[Any] | None, encoding: str | None
    ) -> None:
        super().__init__(dtype, encoding)
        self._columns, self._strings = tuple(columns), encoding

    def decode(self, record: Any) -> Any:
        values = {column.name: column.of(record, self._strings) for column in self._columns}
        return {
            name: self._decoded_row(np.asarray(one) if isinstance(one, np.generic) else one)
            for name, one in values.items()
        }


class HDF5Dataset(ArrayDataset):
    """Rows of a dataset in HDF5 files, as tensors of its dtype. With `target_name` a sample is
    ``(row, target)``.

    With several dataset names, a sample is a dict with one row of each. Compound rows (PyTables)
    are dicts of their fields, and rows of tables that pandas wrote are dicts of their columns,
    without the index. Strings are str, rows of variable length (vlen) are arrays. Files that
    `headrace.pack` wrote are recognised: their samples are counted, encoded ones are 1-D uint8
    tensors, and ``bytes`` and ``str`` are returned as they were packed.

    Args:
        data_path: an HDF5 file; or several, as a folder (searched for .h5, .hdf5, .he5, .h5ad, .nc,
            .mat), a glob, a pattern with braces or a list. Their rows are concatenated: a list's in
            its order, others sorted. Or fsspec URLs of such files, all on one server.
        dataset_name: path of the dataset inside the files, or a list of paths. The first axis is
            the sample axis. Or path of a pandas table (``to_hdf``, formats "fixed" and "table").
            None: "data", the only dataset besides the targets, or the only table.
        target_name: path of a dataset with one row per sample. For a table also the name of a
            column, which is removed from the samples. For an AnnData file also a categorical column
            of `obs` ("obs/kind"): targets are class numbers (-1 for missing values).
        transform: a callable that is applied to the row as a tensor (or the dict, or the str).
        loading_mode: see `LoadingMode`.
        dtype: NumPy or torch dtype that numbers are cast to, also torch.bfloat16. None: unchanged.
        axis: the sample axis: its number, negative from the end, or, if the axes have names
            (netCDF-4), its name. All chunks that a sample crosses are read. Default: the first
            axis.
        reverse_axes: reverse the order of the axes, as MATLAB shows arrays of version 7.3. `axis`
            then refers to the reversed order, and its default is the first of these axes.
        decode_cf: unpack netCDF numbers with ``scale_factor`` and ``add_offset``, and replace
            ``_FillValue`` and ``missing_value`` by NaN, with the dtypes of xarray. Characters along
            a last axis are joined to strings.
        encoding: encoding of strings. None: strings, and packed ``str``, are returned as bytes.
        direct: True: read the files directly if their layout is supported, which is faster. False:
            always use h5py. Samples are the same; `explain()` names the path of each dataset and
            the reason.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: class names of a categorical target. None: targets are not categories.

    Raises:
        ConfigError: paths and URLs are mixed, or a dtype, encoding or axis is invalid.
        DataNotFoundError, FormatError: a file does not exist; it is not an HDF5 file; or its data
            can't be samples (a single value, references, a MATLAB cell array, Python objects
            pickled by pandas).
        AccessError, RemoteError: a file is not readable; a request to a server failed.
        MissingNameError: there is no such dataset, or there are several and no name was given; the
            message lists them.
        FileChangedError: a file changed since it was opened.
        BudgetError: a decoded chunk does not fit the memory budget.
    """

    def __init__(
        self,
        data_path: DataPath,
        dataset_name: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        axis: int | str = 0,
        reverse_axes: bool = False,
        decode_cf: bool = False,
        direct: bool = True,
        encoding: str | None = "utf-8",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        wanted: Any = checked_names(dataset_name, target_name)
        codec = _encoding_named(encoding)
        axis = checked_axis(axis)
        check_flag("reverse_axes", reverse_axes)
        check_flag("decode_cf", decode_cf)
        how = Interpretation(axis, reverse_axes, decode_cf)
        reach, common = split_options(options)
        paths, opened = open_files(data_path, reach)

        # of a remote file perhaps called again
        def one(path: str) -> tuple[HDF5Source, Any, list[Column] | None]:
            nonlocal wanted
            if wanted is None:
                with opened.hdf5.reading(path) as file:
                    wanted = _only_name(file, path, target_name)
            table = None if isinstance(wanted, tuple) else _table_of(opened, path, wanted)
            names = (
                wanted if table is None else tuple(dict.fromkeys(column.array for column in table))
            )
            if table is not None and how != Interpretation():
                raise ConfigError(
                    f"{redact(path)}: {wanted!r} is a table of pandas: axis, reverse_axes and "
                    "decode_cf are for arrays"
                )
            source = HDF5Source(
                path, names, direct=direct, cache_dir=reach.cache_dir, opened=opened, how=how
            )
            return (
                source,
                None if target_name is None else _targets(source, table, target_name, path, opened),
                table,
            )

        sources, columns, tables = _by_layouts(
            opened, paths, one, [wanted, target_name, direct, *how], reach.cache_dir
        )
        source, rows = joined_rows(sources, dtype, codec)
        _check_alike(paths, tables)
        if tables[0] is not None:
            rows = TableFormat(
                [column for column in tables[0] if column.name != target_name], rows.dtype, codec
            )
        targets = None
        if target_name is not None:
            targets, self.classes = labelled_targets(
                columns, [redact(path) for path in paths], target_name, codec
            )
        super().__init__(
            source,
            sample_format=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def coordinates(self) -> dict[str, npt.NDArray[Any]]:
        """Coordinate arrays of the axes of the (first) array in netCDF-4, such as "time" and "lat",
        by name.

        Each array has one axis and is decoded with `decode_cf`. With several files, the coordinates
        of the sample axis are concatenated; the others are those of the first file.
        """
        source: Any = self.sample_source
        sources: list[HDF5Source] = source.sources if isinstance(source, ConcatSource) else [source]
        first = sources[0].name if isinstance(sources[0].name, str) else sources[0].name[0]
        each = [source.coordinates(first) for source in sources]
        along = [len(source) for source in sources]
        joined: dict[str, npt.NDArray[Any]] = {}
        for axis, values in each[0].items():
            is_of_samples = [len(one.get(axis, ())) for one in each] == along and axis == sources[
                0
            ].sample_axis
            joined[axis] = np.concatenate([one[axis] for one in each]) if is_of_samples else values
        return joined


_Opened = tuple[HDF5Source, Any, list[Column] | None]


def _by_layouts(
    opened: OpenHDF5,
    paths: list[str],
    one: Callable[[str], _Opened],
    asked: list[Any],
    cache_dir: str | os.PathLike[str] | None,
) -> Any:
    """The sources of some files, their targets and tables: by their layouts where these are
    kept, else as `one` gives them of each.
    """
    if not opened.files.is_remote:
        return zip(*opened.hdf5.read_each(paths, one), strict=True)
    kept = KeptLayouts(opened.files, paths, asked, cache_dir)
    opened.hdf5.learn(paths, unless=kept.are_kept)
    if (found := kept.load()) is not None:
        layouts, columns = found
        is_one = not isinstance(asked[0], tuple)
        sources = [
            HDF5Source.of_layouts(path, each, is_one, opened)
            for path, each in zip(paths, layouts, strict=True)
        ]
        nothing = [None] * len(paths)
        return sources, nothing if columns is None else columns, nothing
    made = opened.hdf5.read_each(paths, one)
    if all(table is None and not isinstance(column, frames.Column) for _, column, table in made):
        kept.keep([source.layouts() for source, *_ in made], [column for _, column, _ in made])
    return zip(*made, strict=True)


def _only_name(file: Any, path: str, targets: str | None) -> str:
    """The name of the samples where nobody has said it: that of the only table of pandas, if
    there are such.
    """
    tables = [] if DATA in file else tables_in(file)
    if len(tables) == 1:
        return tables[0]
    if tables:
        raise MissingNameError(
            f"{redact(path)} has {len(tables)} tables of pandas: name one of them as "
            f"dataset_name: {listed_names(tables)}"
        )
    return only_dataset(file, path, DATA, targets)


def _table_of(opened: OpenHDF5, path: str, name: str) -> list[Column] | None:
    """The columns of a table of pandas; None: the name is none of such."""
    with opened.hdf5.reading(path) as file:
        group = file.get(name)
        if not isinstance(group, h5py.Group) or "pandas_type" not in group.attrs:
            return None
        return columns_of(group, path, name)


def _check_alike(paths: Sequence[str], tables: Sequence[list[Column] | None]) -> None:
    """Raises a FormatError for tables of several files that have other columns, or other
    categories.
    """
    first = tables[0]
    for path, table in zip(paths, tables, strict=True):
        if table != first:
            one, other = (
                [] if columns is None else [column.name for column in columns]
                for columns in (table, first)
            )
            what = (
                f"columns {one} here, and {other} there"
                if one != other
                else "the same columns, kept or categorised in another way"
            )
            raise FormatError(
                f"{redact(path)} and {redact(paths[0])} can't be one dataset: {what}: write them "
                "alike, or open them one by one"
            )


def _targets(
    source: HDF5Source, table: list[Column] | None, name: str, path: str, opened: OpenHDF5
) -> npt.NDArray[Any] | frames.Column:
    """The targets: a column of the table, or a dataset; or a column of a table of AnnData."""
    column = next((column for column in table or () if column.name == name), None)
    if table is not None and column is None and not source.has_column(name):
        names = listed_names([column.name for column in table], name)
        raise MissingNameError(
            f"{source.path}: {name!r} is no column of the table, and no dataset; its columns are: "
            f"{names}"
        )
    if column is not None:
        return source.table_column(column)
    if "/" not in name.strip("/"):  # in no table: the file need not be opened for it
        return source.column(name)
    with opened.hdf5.reading(path) as file:
        group = frames.column_of_group(HDF5Groups(file, path, opened), name, len(source))
    return source.column(name) if group is None else group


def _encoding_named(encoding: str | None) -> str | None:
    try:
        return None if encoding is None else codecs.lookup(encoding).name
    except LookupError as error:
        raise ConfigError(
            f"encoding={encoding!r} is no encoding that Python knows: {error}"
        ) from error
