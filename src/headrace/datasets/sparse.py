"""Reads rows of sparse matrices in HDF5 and Zarr (AnnData), and makes batches of them: dense,
sparse CSR tensors, or concatenated columns and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import torch

from headrace.arguments import check_choice
from headrace.casting import DTypeArgument, dtype_named, known_dtype
from headrace.collate.stack import USUAL, FieldPath, at_path, stack_tree
from headrace.core.batcher import BatchReader, Collating, MadeBatch, with_targets
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.options import LoadingMode, ModeName, PathOptions, check_arguments
from headrace.core.views import ColumnTargets
from headrace.datasets.arrays import checked_list
from headrace.dtypes import BFLOAT16, AnyArray, ArraySpec, IntArray
from headrace.errors import CollateError, ConfigError, SampleError
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.source import sources_of
from headrace.formats.sparse.matrix import open_rows
from headrace.formats.sparse.rows import CSRRows, Record, SparseSource
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import format_size
from headrace.memory.ring import empty
from headrace.memory.tree import rebuild_sparse
from headrace.order.ranks import BatchRequest

SparseLayout = Literal["dense", "csr", "pairs"]
LAYOUTS: tuple[SparseLayout, ...] = ("dense", "csr", "pairs")


class SparseRow(NamedTuple):
    """One row of a sparse matrix. It is a sample with ``layout="pairs"``.

    Attributes:
        indices: int64 [n], columns that have a value, in ascending order.
        values: [n], their values.
    """

    indices: torch.Tensor
    values: torch.Tensor


class SparseRows(NamedTuple):
    """A batch of sparse rows, concatenated.

    It fits ``torch.nn.functional.embedding_bag(indices, weight, offsets, per_sample_weights=values,
    mode="sum")``.

    Attributes:
        indices: int64 [n], columns.
        values: [n], their values.
        offsets: int64 [batch], start of each row.
    """

    indices: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor


def to_batch(rows: CSRRows, columns: int, layout: SparseLayout) -> Any:
    """The batch of rows, in the open ring slot.

    Returns:
        For "dense" a tensor [batch, columns]; for "csr" a sparse CSR tensor of that shape; for
        "pairs" `SparseRows`.
    """
    count = len(rows.indptr) - 1
    dtype = known_dtype(rows.values.dtype)
    assert dtype is not None
    if layout == "dense":
        out = empty((count, columns), dtype)
        rows.scatter(out.numpy())
        return out
    indices = _in_slot(rows.indices, torch.int64)
    values = _in_slot(rows.values, dtype)
    indptr = rows.indptr[:-1] if layout == "pairs" else rows.indptr
    edges = _in_slot(indptr, torch.int64)
    if layout == "pairs":
        return SparseRows(indices, values, edges)
    parts = (edges, indices, values)
    return rebuild_sparse(torch.sparse_csr, parts, (count, columns), None, False)


def _in_slot(array: AnyArray, dtype: torch.dtype) -> torch.Tensor:
    """A copy of an array in the open ring slot."""
    out = empty(array.shape, dtype)
    np.copyto(out.numpy(), array)
    return out


def to_sample(record: Record, columns: int, layout: SparseLayout) -> Any:
    """The input of one row, in its own memory: a tensor [columns] ("dense"), a sparse CSR tensor
    [1, columns] ("csr"), or a `SparseRow` ("pairs").
    """
    batch = to_batch(CSRRows.joined([record]), columns, layout)
    if layout == "dense":
        return batch[0]
    if layout == "pairs":
        return SparseRow(batch.indices, batch.values)
    return batch


def sparse_collate(samples: Sequence[Any]) -> Any:
    """Stacks samples into a batch.

    Like `stack_collate`, except that `SparseRow` become `SparseRows`, and sparse CSR tensors [rows,
    columns] are concatenated along the rows.

    Raises:
        CollateError: samples can't be stacked, or sparse tensors differ in dtype or number of
            columns.
    """
    return stack_tree(list(samples), _joined)


def _joined(values: list[Any], path: FieldPath) -> Any:
    first = values[0]
    is_csr = isinstance(first, torch.Tensor) and first.layout is torch.sparse_csr
    if not (is_csr or isinstance(first, SparseRow)):
        return USUAL
    kinds: list[tuple[Any, ...]] = []  # what all samples of a batch must have in common
    for value in values:
        if isinstance(value, SparseRow):
            kinds.append((value.values.dtype,))
        elif isinstance(value, torch.Tensor):
            kinds.append((value.layout, value.dtype, value.shape[1:]))
        else:
            kinds.append(())
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise CollateError(
                "samples of one batch can't be joined: ",
                number,
                f"{at_path(path)} differs in kind, shape or dtype from ",
                0,
            )
    if not is_csr:
        pairs = [(value.indices.numpy(), value.values.numpy()) for value in values]
        return to_batch(CSRRows.joined(pairs), 0, "pairs")
    sizes = np.concatenate([np.diff(value.crow_indices().numpy()) for value in values])
    rows = CSRRows.joined([(one.col_indices().numpy(), one.values().numpy()) for one in values])
    return to_batch(CSRRows.of(sizes, rows.indices, rows.values), first.shape[1], "csr")


class RowsTogether(BatchReader):
    """Reads the rows of a batch together, also cached ones, and lays them out at once.

    Args:
        dataset: the dataset.
        collating: the collate function.
        decoder: says how many columns rows have, and how batches are laid out.
    """

    name = "rows read together, and laid out at once"

    def __init__(self, dataset: BaseDataset, collating: Collating, decoder: SparseDecoder) -> None:
        self._dataset = dataset
        self._collating = collating
        self._decoder = decoder
        self._is_direct = dataset.value_source.is_direct

    def read(self, request: BatchRequest) -> MadeBatch:
        dataset = self._dataset
        reader = dataset.sample_reader
        if self._is_direct:
            source: Any = dataset.sample_source
            indices = dataset.whole_indices(request)
            with reader.reading_together(len(request)) as counts:
                if isinstance(source, SparseSource):
                    rows = source.read_rows(indices)
                else:
                    rows = CSRRows.joined(source.read(indices.tolist()))
                counts["bytes_read"] += rows.indices.nbytes + rows.values.nbytes
        else:
            numbers = dataset.whole_indices(request).tolist()
            values: list[Any] = dataset.value_source.read(numbers, dataset.access())
            if any(isinstance(value, SampleError) for value in values):
                samples, made_of = dataset.finish(request, values)
                return self._collating.batch_of(dataset, samples, made_of, request)
            rows = CSRRows.joined(values)
        start = time.perf_counter()
        batch = to_batch(rows, self._decoder.columns, self._decoder.layout)
        reader.count_seconds("collate_seconds", start)
        return with_targets(dataset, batch, request)


class SparseDecoder(Decoder):
    """Decodes rows to dense tensors, sparse CSR tensors, or pairs of columns and values. Values are
    the records, so modes cache sparse rows.

    Args:
        columns: number of columns of a row.
        dtype: dtype of its values.
        layout: layout of samples and batches.
    """

    copies = False

    def __init__(self, columns: int, dtype: np.dtype[Any], layout: SparseLayout) -> None:
        self.columns = columns
        self.dtype = dtype
        self.layout = layout

    def to_input(self, value: Any) -> Any:
        return to_sample(value, self.columns, self.layout)

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        return None

    def sample_nbytes(self) -> int | None:
        if self.layout == "dense":
            return self.columns * self.dtype.itemsize
        return None

    def packed_value(self, value: Any) -> Any:
        if self.layout != "dense":
            raise ConfigError(
                f"layout={self.layout!r}: sparse rows can't be packed. Leave the file as it is: "
                "SparseDataset reads it in place. Or pass layout='dense' to pack dense rows, of "
                f"{format_size(self.columns * self.dtype.itemsize)} each"
            )
        return to_sample(value, self.columns, "dense").numpy()

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        fits = collating.calls(sparse_collate)
        if self.layout == "dense":
            fits = collating.stacks
        if fits:
            return RowsTogether(dataset, collating, self)
        return None


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
        targets: str | Sequence[Any] | AnyArray | None = None,
        *,
        layout: Literal["dense", "csr", "pairs"] = "dense",
        columns: Sequence[str] | Sequence[int] | AnyArray | None = None,
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
        check_choice("layout", layout, LAYOUTS)
        cast_to = dtype_named(dtype)
        if cast_to == BFLOAT16:
            raise ConfigError(
                f"dtype={dtype!r}: sparse matrices have no bfloat16: pass dtype='float32' or "
                "'float16', or cast batches"
            )
        names: Sequence[str] = ()  # the columns of `obs` that are named
        listed = targets if isinstance(targets, (list, tuple)) else [targets]
        if all(isinstance(name, str) for name in listed):
            names = checked_list("targets", targets, 0)
        reach, common = RemoteOptions.split(options)
        source, self.columns, of_rows, self.label_columns = open_rows(
            data_path,
            reach,
            group,
            targets=names,
            columns=columns,
            join=join,
            dtype=cast_to,
            direct=direct,
        )
        classes = {
            name: column.categories
            for name, column in of_rows.items()
            if column.categories is not None
        }
        self.classes: list[str] | dict[str, list[str]] | None = classes or None
        given: Any = targets
        if isinstance(targets, str):
            self.classes = classes.get(targets)
            given = of_rows[targets].values
            if given.dtype == object:
                given = given.tolist()
        elif names:
            given = ColumnTargets({name: one.values for name, one in of_rows.items()})
        if layout != "dense":
            self.collate = sparse_collate
        first = sources_of(source)[0]
        super().__init__(
            source,
            sample_decoder=SparseDecoder(first.shape[1], first.dtype, layout),
            targets=given,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows of this dataset or view, and number of columns."""
        return len(self), self._decoder.columns

    def lengths(self) -> IntArray:
        """Number of stored values of each row ([n] int64), before columns are selected."""
        sizes: IntArray = np.concatenate([one.sizes() for one in sources_of(self.sample_source)])
        if self._chosen is None:
            return sizes
        return sizes[self._chosen]

    def held_nbytes(self) -> int | None:
        if "decode" in self._overridden:
            return None
        return int(sum(one.held_nbytes for one in sources_of(self.sample_source)))

    def held_as(self) -> str:
        return (
            f"{type(self).__module__}.{type(self).__qualname__} "
            f"{self.sample_source.fingerprint()} {self._decoder.dtype.str}"
        )
