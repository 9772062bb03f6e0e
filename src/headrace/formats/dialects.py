"""Conventions inside of HDF5 files and Zarr stores, asked in one order."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import DataNotFoundError
from headrace.formats.arrays.packed import info_in
from headrace.formats.episodes import find
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse import matrix
from headrace.formats.tree import Tree
from headrace.formats.trees import look_into
from headrace.io.remote.options import RemoteOptions


def _packed_kind(tree: Tree) -> str | None:
    """ "image", "text" or "array"."""
    info = info_in(tree.attrs(""), tree.path)
    return None if info is None else info.kind


PACK = "pack"
EPISODES = "episodes"
SPARSE = "sparse"
CLAIMS = {PACK: _packed_kind, EPISODES: find.claims, SPARSE: matrix.claims}
"""By the names of dialects what tells whether a file is written by one, and what it then holds;
None: it is not.
"""


def dialect_of(
    data_path: DataPath | FileSet, reach: RemoteOptions, kind: Format, among: Sequence[str]
) -> tuple[str, str] | None:
    """The name of the dialect that the first of some files is written by, and what that says of the
    file; None: none of these, or the file is missing.

    Args:
        data_path, reach, kind: see `look_into`.
        among: names of dialects, of which the first that claims it counts.
    """

    def look(tree: Tree) -> tuple[str, str] | None:
        for name in among:
            claimed = CLAIMS[name](tree)
            if claimed is not None:
                return name, claimed
        return None

    try:
        (found,), _ = look_into(data_path, reach, kind, look, nodes=["X"], first=1)
    except DataNotFoundError:  # a dataset says what is missing
        return None
    return found
