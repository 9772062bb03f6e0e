"""Rows of sparse matrices."""

from headrace.datasets.sparse.batches import SparseRow, SparseRows, sparse_collate

__all__ = ["SparseRow", "SparseRows", "sparse_collate"]
