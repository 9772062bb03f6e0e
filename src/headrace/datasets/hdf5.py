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
from headrace.datasets.arrays import ArrayDataset, ArrayFormat, joined_rows, labelled_targets
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

    def __init__(self, columns: Sequence[Column], dtype: np.dtype[Any] | None, encoding: str | None) -> None:
        super().__init__(dtype, encoding)
        self._columns, self._strings = tuple(columns), encoding

    def decode(self, record: Any) -> Any:
        values = {column.name: column.of(record, self._strings) for column in self._columns}
        return {name: self._decoded_row(np.asarray(one) if isinstance(one, np.generic) else one) for name, one in values.items()}


class HDF5Dataset(ArrayDataset):
    """Samples are the rows of a dataset of HDF5 files, as tensors of its dtype; with `target_name` ``(row, target)``.

    With several dataset names a sample is a dict of a row of each. Compound rows (tables of PyTables) are dicts of their fields, and so are
    rows of a table that pandas wrote, without its index; strings are str, rows of any length (vlen) are arrays. A file that `headrace.pack`
    wrote is recognised: its samples are counted, encoded ones come as 1-D uint8 tensors, and ``bytes`` and ``str`` as they were packed.

    Args:
        data_path: an HDF5 file; or several, as a folder (searched for .h5, .hdf5, .he5, .h5ad, .nc, .mat), a glob, a pattern in braces or a
            list, whose rows follow one another: a list's in its order, others sorted. Or fsspec URLs of such, all of one server.
        dataset_name: path of the dataset inside the files, or a list of such; their first axis counts the samples. Or path of a table of
            pandas (``to_hdf``, formats "fixed" and "table"). None: "data", or the only dataset there is beside the targets, or the only
            table.
        target_name: path of a dataset with one row a sample; of a table also the name of a column, which samples then lack. Of a file of
            AnnData also a column of `obs` that is categorical ("obs/kind"): targets are class numbers (-1 where there is none).
        transform: called with the row as a tensor (or the dict, or the str).
        loading_mode: see `LoadingMode`.
        dtype: numbers are cast to this NumPy or torch dtype, also torch.bfloat16; None: they stay as they are.
        axis: along which samples lie, if not along the first one: its number, from the end too, or, where axes have names (netCDF-4), its
            name. Whatever chunks a sample crosses are read for it.
        reverse_axes: axes are given in reverse, as MATLAB shows its arrays of version 7.3; `axis` counts so too, and is its first one.
        decode_cf: numbers of netCDF are unpacked, by ``scale_factor`` and ``add_offset``, and ``_FillValue`` and ``missing_value`` become
            NaN, with the dtypes of xarray; characters along a last axis are joined to strings.
        encoding: of strings; None: they, and packed ``str``, come as bytes.
        direct: read the files themselves where their layout is known, which is faster; False: through h5py alone. Both give the same;
            `explain()` names the path that each dataset takes, and why.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: names of the classes of a categorical target; None: it is none.

    Raises:
        ConfigError: paths and URLs together, a dtype or an encoding that is none, an axis that is not there.
        DataNotFoundError, FormatError: no such file; no HDF5 file, or what can't be a sample (a single value, references, a cell array of
            MATLAB, Python objects that pandas pickled).
        AccessError, RemoteError: a file may not be read; a server does not give it.
        MissingNameError: no such dataset, or several and no name; the message lists those there are.
        FileChangedError: a file has been changed since it was opened.
        BudgetError: a chunk of the file does not fit the memory budget when it is decoded.
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
        wanted: Any = dataset_name if dataset_name is None or isinstance(dataset_name, str) else tuple(dataset_name)
        if isinstance(wanted, tuple) and not (wanted and all(isinstance(name, str) for name in wanted)):
            raise ConfigError(f"dataset_name must be the name of a dataset, or a list of such, not {dataset_name!r}")
        codec = _encoding_named(encoding)
        axis = checked_axis(axis)
        check_flag("reverse_axes", reverse_axes)
        check_flag("decode_cf", decode_cf)
        how = Interpretation(axis, reverse_axes, decode_cf)
        reach, common = split_options(options)
        paths, opened = open_files(data_path, reach)

        def one(path: str) -> tuple[HDF5Source, Any, list[Column] | None]:  # of a remote file perhaps called again
            nonlocal wanted
            if wanted is None:
                with opened.hdf5.reading(path) as file:
                    wanted = _only_name(file, path, target_name)
            table = None if isinstance(wanted, tuple) else _table_of(opened, path, wanted)
            names = wanted if table is None else tuple(dict.fromkeys(column.array for column in table))
            if table is not None and how != Interpretation():
                raise ConfigError(f"{redact(path)}: {wanted!r} is a table of pandas: axis, reverse_axes and decode_cf are for arrays")
            source = HDF5Source(path, names, direct=direct, cache_dir=reach.cache_dir, opened=opened, how=how)
            return source, None if target_name is None else _targets(source, table, target_name, path, opened), table

        sources, columns, tables = _by_layouts(opened, paths, one, [wanted, target_name, direct, *how], reach.cache_dir)
        source, rows = joined_rows(sources, dtype, codec)
        _check_alike(paths, tables)
        if tables[0] is not None:
            rows = TableFormat([column for column in tables[0] if column.name != target_name], rows.dtype, codec)
        targets = None
        if target_name is not None:
            targets, self.classes = labelled_targets(columns, target_name, codec)
        super().__init__(source, sample_format=rows, targets=targets, transform=transform, loading_mode=loading_mode, **common)

    def coordinates(self) -> dict[str, npt.NDArray[Any]]:
        """The coordinates of the axes of the (first) array, such as "time" and "lat", as netCDF-4 keeps them: by name arrays of one axis,
        decoded with `decode_cf`. Of several files those of the axis of samples follow one another, others are the first file's."""
        source: Any = self.sample_source
        sources: list[HDF5Source] = source.sources if isinstance(source, ConcatSource) else [source]
        first = sources[0].name if isinstance(sources[0].name, str) else sources[0].name[0]
        each = [source.coordinates(first) for source in sources]
        along = [len(source) for source in sources]
        joined: dict[str, npt.NDArray[Any]] = {}
        for axis, values in each[0].items():
            is_of_samples = [len(one.get(axis, ())) for one in each] == along and axis == sources[0].sample_axis
            joined[axis] = np.concatenate([one[axis] for one in each]) if is_of_samples else values
        return joined


_Opened = tuple[HDF5Source, Any, list[Column] | None]


def _by_layouts(
    opened: OpenHDF5, paths: list[str], one: Callable[[str], _Opened], asked: list[Any], cache_dir: str | os.PathLike[str] | None
) -> Any:
    """The sources of some files, their targets and tables: by their layouts where these are kept, else as `one` gives them of each."""
    if not opened.files.is_remote:
        return zip(*opened.hdf5.read_each(paths, one), strict=True)
    kept = KeptLayouts(opened.files, paths, asked, cache_dir)
    opened.hdf5.learn(paths, unless=kept.are_kept)
    if (found := kept.load()) is not None:
        layouts, columns = found
        is_one = not isinstance(asked[0], tuple)
        sources = [HDF5Source.of_layouts(path, each, is_one, opened) for path, each in zip(paths, layouts, strict=True)]
        nothing = [None] * len(paths)
        return sources, nothing if columns is None else columns, nothing
    made = opened.hdf5.read_each(paths, one)
    if all(table is None and not isinstance(column, frames.Column) for _, column, table in made):
        kept.keep([source.layouts() for source, *_ in made], [column for _, column, _ in made])
    return zip(*made, strict=True)


def _only_name(file: Any, path: str, targets: str | None) -> str:
    """The name of the samples where nobody has said it: that of the only table of pandas, if there are such."""
    tables = [] if DATA in file else tables_in(file)
    if len(tables) == 1:
        return tables[0]
    if tables:
        raise MissingNameError(
            f"{redact(path)} has {len(tables)} tables of pandas: name one of them as dataset_name: {listed_names(tables)}"
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
    """Raises a FormatError for tables of several files that have other columns, or other categories."""
    first = tables[0]
    for path, table in zip(paths, tables, strict=True):
        if table != first:
            one, other = ([] if columns is None else [column.name for column in columns] for columns in (table, first))
            what = f"columns {one} here, and {other} there" if one != other else "the same columns, kept or categorised in another way"
            raise FormatError(
                f"{redact(path)} and {redact(paths[0])} can't be one dataset: {what}: write them alike, or open them one by one"
            )


def _targets(source: HDF5Source, table: list[Column] | None, name: str, path: str, opened: OpenHDF5) -> npt.NDArray[Any] | frames.Column:
    """The targets: a column of the table, or a dataset; or a column of a table of AnnData."""
    column = next((column for column in table or () if column.name == name), None)
    if table is not None and column is None and not source.has_column(name):
        names = listed_names([column.name for column in table], name)
        raise MissingNameError(f"{source.path}: {name!r} is no column of the table, and no dataset; its columns are: {names}")
    if column is not None:
        return source.table_column(column)
    with opened.hdf5.reading(path) as file:
        group = frames.column_of_group(HDF5Groups(file, path, opened), name, len(source))
    return source.column(name) if group is None else group


def _encoding_named(encoding: str | None) -> str | None:
    try:
        return None if encoding is None else codecs.lookup(encoding).name
    except LookupError as error:
        raise ConfigError(f"encoding={encoding!r} is no encoding that Python knows: {error}") from error
