"""Chooses the dataset class of HDF5 files and Zarr stores by what is written in them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import HDF5Dataset, ZarrDataset
from headrace.datasets.episodes import EpisodeDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.sparse import SparseDataset
from headrace.datasets.text.text import TextDataset
from headrace.formats.dialects import EPISODES, SPARSE, dialect_of
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.zarr.stores import ZARR
from headrace.io.remote.options import RemoteOptions

_OF_KIND: dict[str, type[BaseDataset]] = {
    "image": ImageDataset,
    "text": TextDataset,
}
"""What `headrace.pack` made of images and texts, by the kind that the pack says."""


def class_by_dialect(
    where: DataPath | FileSet, kind: Format, remote: RemoteOptions, dialects: Sequence[str]
) -> tuple[type[BaseDataset], str]:
    """The class that opens HDF5 files or Zarr stores, by the first dialect that claims them; and
    what the dialect says of them.
    """
    arrays: type[BaseDataset] = HDF5Dataset
    if kind == ZARR:
        arrays = ZarrDataset
    dialect, what = dialect_of(where, remote, kind, dialects) or ("", "")
    if dialect == EPISODES:
        return EpisodeDataset, what
    if dialect == SPARSE:
        return SparseDataset, what
    return _OF_KIND.get(what, arrays), what
