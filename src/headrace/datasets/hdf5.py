"""Rows of HDF5 files as samples."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy.typing as npt

from headrace.datasets.arrays import ArrayDataset, joined_rows, joined_targets
from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.options import PathOptions, split_options
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import DataPath
from headrace.modes import LoadingMode, ModeName
from headrace.storage.arrays.packed import DATA
from headrace.storage.hdf5.files import only_dataset
from headrace.storage.hdf5.rows import HDF5Source, open_files


class HDF5Dataset(ArrayDataset):
    """Samples are the rows of a dataset of HDF5 files, as tensors of its dtype; with `target_name` ``(row, target)``.

    With several dataset names a sample is a dict of a row of each. Compound rows are dicts of their fields, strings are str, rows of
    any length (vlen) are arrays. A file that `headrace.pack` wrote is recognised: its samples are counted, encoded ones come as 1-D
    uint8 tensors, and ``bytes`` and ``str`` as they were packed.

    Args:
        data_path: an HDF5 file; or several, as a folder (searched for .h5, .hdf5, .he5, .h5ad, .nc, .mat), a glob, a pattern in braces or a
            list, whose rows follow one another: a list's in its order, others sorted. Or fsspec URLs of such, all of one server.
        dataset_name: path of the dataset inside the files, or a list of such; their first axis counts the samples. None: "data", or the
            only dataset there is beside the targets.
        target_name: path of a dataset with one row a sample.
        transform: called with the row as a tensor (or the dict, or the str).
        loading_mode: see `LoadingMode`.
        dtype: numbers are cast to this NumPy dtype (as ``ndarray.astype`` does); None: they stay as they are.
        encoding: of strings; None: they, and packed ``str``, come as bytes.
        direct: read the files themselves where their layout is known, which is faster; False: through h5py alone. Both give the same;
            `explain()` names the path that each dataset takes, and why.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Raises:
        ConfigError: paths and URLs together, a dtype or an encoding that is none.
        DataNotFoundError, FormatError: no such file; no HDF5 file, or what can't be a sample (a single value, references).
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
        dtype: npt.DTypeLike | None = None,
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
        reach, common = split_options(options)
        paths, opened = open_files(data_path, reach)

        def one(path: str) -> tuple[HDF5Source, Any]:
            nonlocal wanted
            if wanted is None:
                with opened.hdf5.reading(path) as file:
                    wanted = only_dataset(file, path, DATA, target_name)
            source = HDF5Source(path, wanted, direct=direct, cache_dir=reach.cache_dir, opened=opened)
            return source, None if target_name is None else source.column(target_name)

        sources, columns = zip(*opened.hdf5.read_each(paths, one), strict=True)
        source, rows = joined_rows(sources, dtype, codec)
        targets = None if target_name is None else joined_targets(columns, codec)
        super().__init__(source, sample_format=rows, targets=targets, transform=transform, loading_mode=loading_mode, **common)


def _encoding_named(encoding: str | None) -> str | None:
    try:
        return None if encoding is None else codecs.lookup(encoding).name
    except LookupError as error:
        raise ConfigError(f"encoding={encoding!r} is no encoding that Python knows: {error}") from error
