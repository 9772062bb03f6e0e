"""Conventions inside of HDF5 files and Zarr stores, asked in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.errors import DataNotFoundError
from headrace.formats.arrays.packed import info_in
from headrace.formats.episodes import find
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse import matrix
from headrace.formats.tree import Tree
from headrace.formats.trees import look_into
from headrace.io.remote.options import RemoteOptions


class Dialect(NamedTuple):
    """A convention of what groups and arrays mean.

    Attributes:
        name: of it.
        claims: tells whether a file is written by it, and what it then holds; None: it is not.
    """

    name: str
    claims: Callable[[Tree], str | None]


def _packed_kind(tree: Tree) -> str | None:
    """ "image", "text" or "array"."""
    info = info_in(tree.attrs(""), tree.path)
    if info is None:
        return None
    return info.kind


PACK = Dialect("pack", _packed_kind)
EPISODES = Dialect("episodes", find.claims)
SPARSE = Dialect("sparse", matrix.claims)


def dialect_of(
    data_path: DataPath | FileSet, reach: RemoteOptions, kind: Format, among: Sequence[Dialect]
) -> tuple[Dialect, str] | None:
    """The dialect that the first of some files is written by, and what it says of the file; None:
    none of these, or the file is missing.

    Args:
        data_path, reach, kind: see `look_into`.
        among: the first that claims it counts.
    """

    def look(tree: Tree) -> tuple[Dialect, str] | None:
        for dialect in among:
            claimed = dialect.claims(tree)
            if claimed is not None:
                return dialect, claimed
        return None

    try:
        (found,), _ = look_into(data_path, reach, kind, look, nodes=["X"], first=1)
    except DataNotFoundError:  # a dataset says what is missing
        return None
    return found
