"""Opens a path as the dataset of its format."""

from __future__ import annotations

import os
from typing import Any, Unpack

from headrace.arguments import check_names
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.checks import HINTS, keywords_of
from headrace.datasets.episodes.episodes import EpisodeDataset
from headrace.datasets.hdf5 import HDF5Dataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.options import OpenOptions
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.datasets.sparse.sparse import SparseDataset
from headrace.datasets.table.table import TableDataset
from headrace.datasets.text.text import TextDataset
from headrace.datasets.zarr import ZarrDataset
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import Kind
from headrace.io.resolve.resolver import kind_of
from headrace.storage.episodes.look import EPISODES
from headrace.storage.hdf5.files import HDF5
from headrace.storage.hdf5.rows import packed_kind
from headrace.storage.kinds import IMAGES, TEXTS
from headrace.storage.replay import kind_of_hdf5, kind_of_store
from headrace.storage.sparse.opening import find_matrix
from headrace.storage.table.files import TABLES
from headrace.storage.tar.source import TARS
from headrace.storage.zarr.packed import packed_zarr_kind
from headrace.storage.zarr.stores import ZARR

_OF_KIND: dict[str, type[BaseDataset]] = {"image": ImageDataset, "text": TextDataset, EPISODES: EpisodeDataset}
"""What `headrace.pack` made of images and texts, by the kind that the pack says; and episodes."""
_OF_EPISODES = {"keys", "groups", "episodes", "window", "static", "pad_before", "pad_after", "decode_nwb"}
"""Options that episodes alone have."""
_KINDS: dict[type[BaseDataset], str] = {
    ImageDataset: "images", TextDataset: "texts", HDF5Dataset: "HDF5 arrays", ZarrDataset: "Zarr arrays",
    SparseDataset: "sparse matrices", StreamingDataset: "shards", EpisodeDataset: "episodes", TableDataset: "tables",
}  # fmt: skip
_CLASSES: dict[Kind, type[BaseDataset]] = {
    IMAGES: ImageDataset, TARS: StreamingDataset, TEXTS: TextDataset, HDF5: HDF5Dataset, ZARR: ZarrDataset,
    TABLES: TableDataset,
}  # fmt: skip
"""By what there is; what comes first here is read where several kinds lie side by side."""

_OF_ARRAYS = (keywords_of(HDF5Dataset) | keywords_of(ZarrDataset)) - keywords_of(SparseDataset)
"""Keywords by which arrays are meant, also where there is a sparse matrix."""


def open_dataset(data_path: DataPath, **options: Unpack[OpenOptions]) -> BaseDataset:
    """The dataset for a path: its format is found by the names of files (of HDF5: .h5, .hdf5, .he5, .h5ad, .nc, .mat; .zarr; .tar; of
    tables: .parquet, .pq, .arrow, .feather, .npy, .npz; those of images and texts), of a local file by its content too. Folders are
    searched, of a URL the first ones in it; what nothing is known of counts as images. Shards are a `StreamingDataset`.

    HDF5 files and Zarr stores in which "data" is a group of numbered groups with several arrays each (robomimic, LIBERO) are episodes, and
    so are those with "meta/episode_ends" beside a group "data" (Diffusion Policy), and others where an option says so that episodes alone
    have, such as `window`.

    An HDF5 file or a Zarr store with a sparse matrix as AnnData writes it ("X", or nothing else) is a `SparseDataset`, unless a
    `dataset_name` is given.

    Where several kinds lie side by side, the first of these is read: images, .tar shards, texts, HDF5 files or Zarr stores, tables. HDF5
    files beside Zarr stores are an error. What HuggingFace's `datasets` writes beside tables is no text.

    Args:
        data_path: what `ImageDataset`, `TextDataset`, `HDF5Dataset`, `EpisodeDataset`, `ZarrDataset`, `SparseDataset`, `TableDataset` or
            `StreamingDataset` take.
        **options: passed to the dataset's class.

    Raises:
        ConfigError: an option is for other data; HDF5 files and Zarr stores lie side by side.
        DataNotFoundError: nothing there, or no file of a known format.
        FormatError: a file of another format.
    """
    return _opened(data_path, {**options})


def _opened(data_path: DataPath, options: dict[str, Any]) -> BaseDataset:
    check_names("open_dataset", options, known_keywords(), HINTS)
    cls: Any = _class_of(data_path, options)
    for name in options:
        if name not in keywords_of(cls):
            takers = " and ".join(kind for other, kind in _KINDS.items() if name in keywords_of(other))
            first = redact(entries_of(data_path)[0])
            raise ConfigError(f"{first}: {name} is an option for {takers}, and here are {_KINDS[cls]}: leave it out")
    dataset: BaseDataset = cls(data_path, **options)
    return dataset


def known_keywords() -> frozenset[str]:
    """The keywords that the datasets take which `open_dataset` opens."""
    return frozenset[str]().union(*map(keywords_of, _KINDS))


def _class_of(data_path: DataPath, options: dict[str, Any]) -> type[BaseDataset]:
    """The class that opens a path; of a sparse matrix that lies elsewhere than usual `options` get the group."""
    remote = RemoteOptions.taken_from(dict(options))
    kind = kind_of(data_path, tuple(_CLASSES), remote, searches=True, is_alone=True)
    if (kind is HDF5 or kind is ZARR) and _OF_EPISODES & options.keys():
        return EpisodeDataset
    if kind is HDF5 or kind is ZARR:
        is_named = options.get("dataset_name") is not None
        told = (
            packed_kind(data_path, remote, None if is_named else kind_of_hdf5)
            if kind is HDF5
            else packed_zarr_kind(data_path, remote, None if is_named else kind_of_store)
        )
        if not told and not options.keys() & _OF_ARRAYS and (group := find_matrix(data_path, remote, kind)) is not None:
            options.setdefault("group", group)
            return SparseDataset
        return _OF_KIND.get(told, _CLASSES[kind])
    if kind is None and isinstance(data_path, (str, os.PathLike)) and os.path.isfile(data_path):
        raise FormatError(
            f"{redact(data_path)}: the format is not known; headrace reads images, texts, HDF5, Zarr, .tar, Parquet, Arrow and .npy"
        )
    return ImageDataset if kind is None else _CLASSES[kind]  # which says what is there, where nothing is known
