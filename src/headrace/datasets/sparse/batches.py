"""Batches of sparse rows: dense, as sparse CSR tensors, or as columns and values one behind the
other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate.fields import FieldPath, at_path
from headrace.collate.stack import USUAL, stack_tree
from headrace.errors import CollateError
from headrace.memory.ring import empty
from headrace.memory.tree import rebuild_sparse
from headrace.storage.sparse.rows import CSRRows, Record

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


class SlotArrays:
    """Makes arrays in the ring slot that is open; a `Room`."""

    def __init__(self) -> None:
        self._made: list[tuple[npt.NDArray[Any], torch.Tensor]] = []

    def __call__(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        tensor = empty((count,), torch_dtype(dtype))
        array: npt.NDArray[Any] = tensor.numpy()
        self._made.append((array, tensor))
        return array

    def tensor_of(
        self, array: npt.NDArray[Any], dtype: np.dtype[Any] | None = None
    ) -> torch.Tensor:
        """The tensor over an array that was made here; of another one a copy in the slot,
        perhaps of another dtype.
        """
        for made, tensor in self._made:
            if made is array:
                return tensor
        out = empty(array.shape, torch_dtype(dtype or array.dtype))
        np.copyto(out.numpy(), array)
        return out


def to_batch(
    rows: CSRRows, columns: int, layout: SparseLayout, arrays: SlotArrays | None = None
) -> Any:
    """The batch of rows, in the ring slot that is open.

    Args:
        arrays: made those of the rows that lie there already; None: none do.

    Returns:
        For "dense" a tensor [batch, columns]; for "csr" a sparse CSR tensor of that shape; for
        "pairs" `SparseRows`.
    """
    count = len(rows.indptr) - 1
    if layout == "dense":
        out = empty((count, columns), torch_dtype(rows.values.dtype))
        rows.scatter(out.numpy())
        return out
    in_slot = (arrays or SlotArrays()).tensor_of
    indices = in_slot(rows.indices, np.dtype(np.int64))
    values = in_slot(rows.values)
    if layout == "pairs":
        return SparseRows(indices, values, in_slot(rows.indptr[:-1]))
    return rebuild_sparse(
        torch.sparse_csr, (in_slot(rows.indptr), indices, values), (count, columns), None, False
    )


def to_sample(record: Record, columns: int, layout: SparseLayout) -> Any:
    """The input of one row, in memory of its own: for "dense" a tensor [columns]; for "csr" a
    sparse CSR tensor [1, columns]; for "pairs" a `SparseRow`.
    """
    indices, values = record
    if layout == "dense":
        out = np.zeros(columns, values.dtype)
        out[indices] = values
        return torch.from_numpy(out)
    lies = torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(values.copy())
    if layout == "pairs":
        return SparseRow(*lies)
    indptr = torch.from_numpy(np.array([0, len(values)], np.int64))
    return rebuild_sparse(torch.sparse_csr, (indptr, *lies), (1, columns), None, False)


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Torch's dtype of that name; a TypeError where it has none."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


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
    kinds = [_kind_of(value) for value in values]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise CollateError(
                "samples of one batch can't be joined: ",
                number,
                f"{at_path(path)} is of another kind, shape or dtype than ",
                0,
            )
    if not is_csr:
        pairs = [(value.indices.numpy(), value.values.numpy()) for value in values]
        return to_batch(CSRRows.joined(pairs), 0, "pairs")
    sizes = np.concatenate([np.diff(value.crow_indices().numpy()) for value in values])
    rows = CSRRows.joined([(one.col_indices().numpy(), one.values().numpy()) for one in values])
    return to_batch(CSRRows.of(sizes, rows.indices, rows.values), first.shape[1], "csr")


def _kind_of(value: Any) -> tuple[Any, ...]:
    """What the samples of a batch must have in common."""
    if isinstance(value, SparseRow):
        return (value.values.dtype,)
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_csr:
        return value.shape[1:], value.values().dtype
    return ()
