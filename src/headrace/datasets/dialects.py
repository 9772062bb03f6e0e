"""Chooses the dataset class of HDF5 files and Zarr stores by the convention that they follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import HDF5Dataset, ZarrDataset
from headrace.datasets.episodes import EpisodeDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.sparse import SparseDataset
from headrace.datasets.text.text import TextDataset
from headrace.errors import DataNotFoundError
from headrace.formats.episodes import find
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse import matrix
from headrace.formats.tree import Tree
from headrace.formats.trees import look_into
from headrace.formats.zarr.stores import ZARR
from headrace.io.remote.options import RemoteOptions


def _packed_kind(tree: Tree) -> str | None:
    """ "image", "text" or "array"."""
    info = tree.info()
    return None if info is None else info.kind


PACK = "pack"
EPISODES = "episodes"
SPARSE = "sparse"
CLAIMS: dict[str, Callable[[Tree], str | None]] = {
    PACK: _packed_kind,
    EPISODES: find.claims,
    SPARSE: matrix.claims,
}
"""By the names of dialects, in the order in which they are asked, what tells whether a file is
written by one, and what it then holds; None: it is not. Images of OME-NGFF are asked for last, by
`ZarrDataset` itself (`headrace.formats.ome.claims`).
"""
_CLASSES: dict[tuple[str, str], type[BaseDataset]] = {
    (PACK, "image"): ImageDataset,
    (PACK, "text"): TextDataset,
}


def class_by_dialect(
    where: DataPath | FileSet, kind: Format, reach: RemoteOptions, among: Sequence[str]
) -> tuple[type[BaseDataset], str]:
    """The class that opens HDF5 files or Zarr stores, by the first dialect that claims the first of
    them; and what the dialect says of it. A dataset says what is missing.

    Args:
        where, kind, reach: see `look_into`.
        among: names of dialects.
    """

    def look(tree: Tree) -> tuple[str, str]:
        for name, claims in CLAIMS.items():
            claimed = claims(tree) if name in among else None
            if claimed is not None:
                return name, claimed
        return "", ""

    dialect = what = ""
    with contextlib.suppress(DataNotFoundError):
        [(dialect, what)], _ = look_into(where, reach, kind, look, nodes=["X"], first=1)
    if dialect == EPISODES:
        return EpisodeDataset, what
    if dialect == SPARSE:
        return SparseDataset, what
    return _CLASSES.get((dialect, what), ZarrDataset if kind == ZARR else HDF5Dataset), what
