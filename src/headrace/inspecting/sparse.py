"""Inspects sparse matrices in HDF5 files and Zarr stores."""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.inspecting.report import Access, Advice, Report
from headrace.storage.arrays.spans import SpanReader
from headrace.storage.sparse.matrix import Matrix, format_of, open_matrix
from headrace.storage.sparse.source import SparseSource
from headrace.storage.tree import Tree


class FoundMatrix(NamedTuple):
    """The sparse matrix of a file that is of interest."""

    group: str
    format: str
    """ "csr" or "csc"."""
    rows: int | None
    columns: int | None
    values: int | None
    dtype: str | None
    access: Access | None
    fingerprint: str | None
    problem: str | None
    """Why its rows can't be read."""


def find_matrix(tree: Tree, name: str | None) -> FoundMatrix | None:
    """The sparse matrix that is named, or X; None: there is none.

    Args:
        tree: that is open.
        name: of the group that is of interest; None: nobody has named one.
    """
    group = "X" if name is None else name.strip("/")
    kind = format_of(tree, group)
    if kind is None:
        return None
    try:
        matrix = open_matrix(tree, group)
    except HeadraceError as error:
        return FoundMatrix(
            group, kind, None, None, None, None, None, None, " ".join(str(error).split())
        )
    rows, columns = matrix.shape
    values, dtype = int(matrix.indptr[-1]), str(matrix.data.dtype.newbyteorder("="))
    source = SparseSource(tree.shown, tree.opened, matrix, columns)
    return FoundMatrix(
        group, kind, rows, columns, values, dtype, _cost(matrix), source.fingerprint(), None
    )


def _cost(matrix: Matrix) -> Access:
    """What a random row costs, of as many values as one has on average."""
    rows, values = max(1, matrix.shape[0]), int(matrix.indptr[-1])
    mean, readers = values / rows, (matrix.indices, matrix.data)
    costs = [_of_span(reader, mean) for reader in readers]
    nbytes, total = (
        int(count * sum(reader.dtype.itemsize for reader in readers)) for count in (mean, values)
    )
    ways = dict.fromkeys(reader.how for reader in readers)
    chunks, decoded, read = (sum(column) for column in zip(*costs, strict=True))
    return Access(
        matrix.group,
        "a row",
        "; ".join(ways),
        nbytes,
        chunks,
        int(decoded),
        int(read),
        max(2.0, chunks),
        not all(reader.chunks.is_direct for reader in readers),
        total,
    )


def _of_span(reader: SpanReader, mean: float) -> tuple[float, float, float]:
    """Chunks that are decoded, bytes that come of them, and bytes that are read."""
    chunks = reader.chunks
    if not chunks.decodes or not reader.shape[0]:
        return 0.0, 0.0, mean * reader.dtype.itemsize
    height = chunks.grid.chunks[0]
    crossed = min(float(chunks.grid.counts[0]), max(0.0, mean - 1) / height + 1)
    stored = chunks.stored_nbytes / max(1, chunks.grid.counts[0])
    return crossed, crossed * chunks.nbytes, crossed * stored


def tell(report: Report, found: FoundMatrix) -> None:
    """What a sample is, and how it is opened."""
    if found.problem is not None:
        report.notes.append(found.problem)
        return
    assert found.rows is not None and found.values is not None
    mean = found.values / max(1, found.rows)
    report.samples = found.rows
    report.samples_are = (
        f"rows of {found.group or '/'!r}, {found.dtype} [{found.columns}], sparse (CSR), "
        f"{mean:,.0f} values a row"
    )
    named = "" if found.group == "X" else f", {found.group or '/'!r}"
    report.opens_as = f"headrace.SparseDataset({report.path!r}{named})"
    report.fingerprint = found.fingerprint
    assert found.access is not None
    report.access = [found.access]  # a single value of its arrays is no sample
    if found.access.chunks:
        why = "all rows that lie in a chunk are used when it is decoded, once an epoch"
        report.advice = [Advice(why, code='create_dataloader(dataset, shuffle="block")')]
