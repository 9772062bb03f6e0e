"""Rows of HDF5 files as samples."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy.typing as npt

from headrace.arguments import check_flag
from headrace.casting import DTypeArgument
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, check_arguments, split_options
from headrace.datasets.arrays import (
    ArrayDataset,
    checked_names,
    joined_rows,
    joined_targets,
)
from headrace.errors import ConfigError
from headrace.formats.arrays.packed import DATA
from headrace.formats.hdf5.files import only_dataset
from headrace.formats.hdf5.rows import HDF5Source, OpenHDF5, open_files
from headrace.formats.hdf5.tree import HDF5Tree
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse.frames import Column, column_of_group
from headrace.io.paths import redact


class HDF5Dataset(ArrayDataset):
    """Rows of a dataset in HDF5 files, as tensors of its dtype. With `target_name` a sample is
    ``(row, target)``.

    With several dataset names, a sample is a dict with one row of each. Compound rows (PyTables)
    are dicts of their fields. Strings are str, rows of variable length (vlen) are arrays. Files
    that `headrace.pack` wrote are recognised: their samples are counted, encoded ones are 1-D uint8
    tensors, and ``bytes`` and ``str`` are returned as they were packed.

    Args:
        data_path: an HDF5 file; or several, as a folder (searched for .h5, .hdf5, .he5, .h5ad, .nc,
            .mat), a glob, a pattern with braces or a list. Their rows are concatenated: a list's in
            its order, others sorted. Or fsspec URLs of such files, all on one server.
        dataset_name: path of the dataset inside the files, or a list of paths. The first axis is
            the sample axis. None: "data", or the only dataset besides the targets.
        target_name: path of a dataset with one row per sample. For an AnnData file also a
            categorical column of `obs` ("obs/kind"): targets are class numbers (-1 for missing
            values).
        transform: a callable that is applied to the row as a tensor (or the dict, or the str).
        loading_mode: see `LoadingMode`.
        dtype: NumPy or torch dtype that numbers are cast to, also torch.bfloat16. None: unchanged.
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
        ConfigError: paths and URLs are mixed, or a dtype or encoding is invalid.
        DataNotFoundError, FormatError: a file does not exist; it is not an HDF5 file; or its data
            can't be samples (a single value, references).
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
        decode_cf: bool = False,
        direct: bool = True,
        encoding: str | None = "utf-8",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        names: Any = checked_names(dataset_name, target_name)
        codec = _encoding_named(encoding)
        check_flag("decode_cf", decode_cf)
        reach, common = split_options(options)
        paths, opened = open_files(data_path, reach)

        def source_of(path: str) -> tuple[HDF5Source, Any]:
            nonlocal names
            if names is None:
                with opened.hdf5.reading(path) as file:
                    names = only_dataset(file, path, DATA, target_name)
            source = HDF5Source(
                path,
                names,
                direct=direct,
                cache_dir=reach.cache_dir,
                opened=opened,
                decode_cf=decode_cf,
            )
            if target_name is None:
                return source, None
            return source, _targets(source, target_name, path, opened)

        found = opened.hdf5.read_each(paths, source_of, in_threads=True)
        sources, columns = zip(*found, strict=True)
        source, rows = joined_rows(sources, dtype, codec)
        targets = None
        if target_name is not None:
            shown = [redact(path) for path in paths]
            targets, self.classes = joined_targets(columns, shown, target_name, codec)
        super().__init__(
            source,
            sample_decoder=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )


def _targets(
    source: HDF5Source, name: str, path: str, opened: OpenHDF5
) -> npt.NDArray[Any] | Column:
    """The targets: a dataset, or a column of a table of AnnData."""
    if "/" not in name.strip("/"):  # in no table: the file need not be opened for it
        return source.column(name)
    with opened.hdf5.reading(path) as file:
        group = column_of_group(HDF5Tree(file, path, opened), name, len(source))
    if group is None:
        return source.column(name)
    return group


def _encoding_named(encoding: str | None) -> str | None:
    try:
        if encoding is None:
            return None
        return codecs.lookup(encoding).name
    except LookupError as error:
        raise ConfigError(
            f"encoding={encoding!r} is no encoding that Python knows: {error}"
        ) from error
