"""Rows of sparse matrices in HDF5 and Zarr (AnnData) as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.casting import DTypeArgument, dtype_named
from headrace.core.checks import check_arguments
from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, split_options
from headrace.datasets.sparse.batches import LAYOUTS, sparse_collate
from headrace.datasets.sparse.format import SparseDecoder
from headrace.dtypes import BFLOAT16
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import DataPath
from headrace.storage.sparse.opening import open_rows
from headrace.storage.sparse.source import JoinedRows, SparseSource


class SparseDataset(BaseDataset):
    """Rows of a CSR matrix in HDF5 files or Zarr stores, such as AnnData writes (.h5ad, .zarr).

    For each batch only the needed parts of `indices` and `data` are read, each for all rows
    together. Modes "eager" and "cached" cache sparse rows. Several values of one column in a row
    are summed, as in SciPy. With `targets` a sample is ``(row, target)``.

    Args:
        data_path: an HDF5 file or a Zarr store; or several, as a folder, a glob, a pattern with
            braces or a list. Their rows are concatenated: a list's in its order, others sorted. Or
            fsspec URLs of such files, all on one server.
        group: path of the matrix in each file: "X", "layers/counts", "raw/X"; "/" is the file
            itself.
        targets: name of a column of `obs`, or a list of names, with which a target is a dict of one
            value each. Categories become class numbers (int64, -1 for missing values), and
            `classes` are their names. Or an array with one target per row.
        layout: "dense": a row is a tensor [columns], a batch a tensor [batch, columns]. "csr": a
            sample is a sparse CSR tensor [1, columns], a batch one of shape [batch, columns].
            "pairs": a sample is a `SparseRow` of column numbers and values, a batch a `SparseRows`.
        columns: names (in `var`) or numbers of the columns to read, in this order; or a boolean
            mask. None: all.
        join: how to join files whose columns differ, by name. "inner": the columns that all files
            have, in the order of the first file. "outer": the columns that any file has, in order
            of appearance, with zeros for missing ones. None: all files must have the same columns,
            in any order, or at least those in `columns`.
        transform: a callable that is applied to the row.
        loading_mode: see `LoadingMode`.
        dtype: NumPy dtype that values are cast to (as by ``ndarray.astype``). None: unchanged.
        direct: True: read the files directly if their layout is supported, which is faster. False:
            always use h5py and zarr-python.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        columns: column names of a row. None: the files have no names.
        classes: class names of a categorical target; a dict of these for several targets. None:
            targets are not categories.
        label_columns: all columns of `obs` by name, for the whole dataset. Each is read on access;
            categories are codes.

    Raises:
        ConfigError: an argument is invalid, or the group is not a sparse matrix.
        DataNotFoundError, AccessError, RemoteError: a file does not exist or is not readable; a
            request to a server failed.
        MissingNameError: there is no such group, or column of `obs` or `var`; the message lists the
            existing ones.
        FormatError: the matrix is CSC, data are damaged, or files can't be joined.
        FileChangedError: a file changed since it was opened.
        BudgetError: a decoded chunk does not fit the memory budget.
    """

    reads_urls = True
    _decoder: SparseDecoder

    def __init__(
        self,
        data_path: DataPath,
        group: str = "X",
        targets: str | Sequence[Any] | npt.NDArray[Any] | None = None,
        *,
        layout: Literal["dense", "csr", "pairs"] = "dense",
        columns: Sequence[str] | Sequence[int] | npt.NDArray[Any] | None = None,
        join: Literal["inner", "outer"] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        direct: bool = True,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        if not isinstance(group, str):
            raise ConfigError(
                "group must be the path of a group in the file, such as 'X' or 'layers/counts', "
                f"not {group!r}"
            )
        if layout not in LAYOUTS:
            raise ConfigError(
                f"layout must be one of {', '.join(map(repr, LAYOUTS))}, not {layout!r}"
            )
        cast_to = dtype_named(dtype)
        if cast_to == BFLOAT16:
            raise ConfigError(
                f"dtype={dtype!r}: sparse matrices have no bfloat16: pass dtype='float32' or "
                "'float16', or cast batches"
            )
        names: list[str] = []  # the columns of `obs` that are named
        if isinstance(targets, str):
            names = [targets]
        elif isinstance(targets, (list, tuple)) and all(isinstance(one, str) for one in targets):
            names = list(targets)
        if len(set(names)) < len(names):
            raise ConfigError(f"targets={names!r} names a column more than once")
        reach, common = split_options(options)
        opened = open_rows(
            data_path,
            reach,
            group,
            targets=names,
            columns=columns,
            join=join,
            dtype=cast_to,
            direct=direct,
        )
        source = opened.source
        self.columns = opened.columns.names
        self.label_columns = opened.table
        classes = {
            name: column.categories
            for name, column in opened.targets.items()
            if column.categories is not None
        }
        self.classes: list[str] | dict[str, list[str]] | None = classes or None
        given: Any = targets
        if isinstance(targets, str):
            self.classes = classes.get(targets)
            given = opened.targets[targets].values
            if given.dtype == object:
                given = given.tolist()
        elif names:  # an array of compounds
            values = {name: column.values for name, column in opened.targets.items()}
            given = np.empty(len(source), [(name, each.dtype) for name, each in values.items()])
            for name, each in values.items():
                given[name] = each
        if layout != "dense":
            self.collate = sparse_collate
        super().__init__(
            source,
            sample_decoder=SparseDecoder(opened.columns.width, _each(source)[0].dtype, layout),
            targets=given,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows of this dataset or view, and number of columns."""
        return len(self), self._decoder.columns

    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of stored values of each row ([n] int64), before columns are selected."""
        sizes: npt.NDArray[np.int64] = np.concatenate(
            [one.sizes() for one in _each(self.sample_source)]
        )
        return sizes if self._chosen is None else sizes[self._chosen]

    def held_nbytes(self) -> int | None:
        if "decode" in self._overridden:
            return None
        return sum(one.held_nbytes for one in _each(self.sample_source))

    def held_as(self) -> str:
        return (
            f"{type(self).__module__}.{type(self).__qualname__} "
            f"{self.sample_source.fingerprint()} {self._decoder.dtype.str}"
        )


def _each(source: Any) -> list[SparseSource]:
    return list(source.sources) if isinstance(source, JoinedRows) else [source]
