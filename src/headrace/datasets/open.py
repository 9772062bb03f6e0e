"""Opens a path as the dataset of its format."""

from __future__ import annotations

from typing import Any

from headrace.arguments import check_names, synonyms
from headrace.core.dataset import BaseDataset
from headrace.core.options import OF_LOADERS, keywords_of
from headrace.datasets.arrays import HDF5Dataset, ZarrDataset
from headrace.datasets.columns import ColumnsDataset
from headrace.datasets.dialects import EPISODES, PACK, SPARSE, class_by_dialect
from headrace.datasets.episodes import EpisodeDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.sparse import SparseDataset
from headrace.datasets.streaming import StreamingDataset
from headrace.datasets.table import TableDataset
from headrace.datasets.text.text import TextDataset
from headrace.errors import ConfigError
from headrace.formats.episodes.rlds import features_beside
from headrace.formats.hdf5 import HDF5
from headrace.formats.registry import detect
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import DataPath, entries_of
from headrace.formats.tfrecord import TFRECORD
from headrace.formats.zarr.stores import ZARR
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

_KINDS: dict[type[BaseDataset], str] = {
    ImageDataset: "images",
    TextDataset: "texts",
    HDF5Dataset: "HDF5 arrays",
    ZarrDataset: "Zarr arrays",
    SparseDataset: "sparse matrices",
    StreamingDataset: "shards",
    EpisodeDataset: "episodes",
    TableDataset: "tables",
    ColumnsDataset: "files of named columns",
}
_BY_NAME = {cls.__name__: cls for cls in _KINDS}
_KEYWORDS = {cls: keywords_of(cls) for cls in _KINDS}
KNOWN_KEYWORDS = frozenset[str]().union(*_KEYWORDS.values())
"""The keywords of all datasets that `open_dataset` opens."""
_OF_EPISODES = _KEYWORDS[EpisodeDataset].difference(
    *(keywords for cls, keywords in _KEYWORDS.items() if cls is not EpisodeDataset)
)
"""Keywords that only episodes have."""
_OF_IMAGES = _KEYWORDS[ImageDataset] - _KEYWORDS[TextDataset]
"""Keywords that tell a column of images from one of texts."""
_OF_ARRAYS = (_KEYWORDS[HDF5Dataset] | _KEYWORDS[ZarrDataset]) - _KEYWORDS[SparseDataset]
"""Keywords that tell arrays from a sparse matrix."""


def open_dataset(data_path: DataPath, **options: Any) -> BaseDataset:
    """Opens a path as the dataset class of its format.

    The format is detected from file names (HDF5: .h5, .hdf5, .he5, .h5ad, .nc, .mat; Zarr: .zarr;
    shards: .tar, .mds, .tfrecord, and LitData's chunks; tables: .parquet, .pq, .arrow, .feather,
    .npy, .npz; and those of images and texts), for local files also from their content. Folders are
    searched; of a folder behind a URL only the first files count. A path without any recognised
    file is opened as images. Tar shards are opened as a `StreamingDataset`, those of other
    libraries as a `ColumnsDataset`.

    HDF5 files and Zarr stores are episodes if "data" is a group of numbered groups with several
    arrays each (robomimic, LIBERO), if they have "meta/episode_ends" next to a group "data"
    (Diffusion Policy), or if an option is given that only episodes have, such as `window`. So are
    TFRecord files, if a "features.json" in their folder describes "steps" (RLDS).

    An HDF5 file or a Zarr store with a sparse matrix of AnnData ("X", or nothing else) is opened as
    a `SparseDataset`, unless `dataset_name` is given.

    If a folder contains several formats, the first of these is opened: images, .tar shards, MDS,
    texts, HDF5 files or Zarr stores, tables. HDF5 files next to Zarr stores are
    an error. The metadata files that HuggingFace's `datasets` writes next to tables do not count as
    texts.

    With `column` any container is opened as a `TextDataset`; or as an `ImageDataset`, if an option
    is given that only images have, such as `targets`.

    Args:
        data_path: as in `ImageDataset`, `TextDataset`, `HDF5Dataset`, `EpisodeDataset`,
            `ZarrDataset`, `SparseDataset`, `TableDataset` or `StreamingDataset`.
        **options: passed to the dataset class.

    Raises:
        ConfigError: an option belongs to another format; or HDF5 files and Zarr stores are in one
            folder.
        DataNotFoundError: the path does not exist, or contains no file of a known format.
        FormatError: a file has another format.
    """
    check_names("open_dataset", options, KNOWN_KEYWORDS, OF_LOADERS)
    files: FileSet | None = None
    cls: type[BaseDataset] = TextDataset
    if options.get("column") is None:
        remote, _ = RemoteOptions.split(options)
        files = detect(data_path, remote)
        cls = _BY_NAME.get(files.kind.dataset, ColumnsDataset)
    elif options.keys() & _OF_IMAGES:
        cls = ImageDataset
    try:
        if files is not None and files.kind in (HDF5, ZARR):
            cls = _class_of_arrays(files, remote, options)
        elif files is not None and files.kind == TFRECORD:
            reader = files.server or LocalFiles(remote.cache_dir)
            if _OF_EPISODES & options.keys() or (
                _KEYWORDS[EpisodeDataset].issuperset(options)
                and features_beside(files, reader) is not None
            ):
                cls = EpisodeDataset
        if not _KEYWORDS[cls].issuperset(options):
            _refuse_options(data_path, cls, options)
        opens: Any = cls
        dataset: BaseDataset = opens(data_path if files is None else files, **options)
    except BaseException:
        if files is not None and files.server is not None:
            files.server.close()
        raise
    return dataset


def _class_of_arrays(
    files: FileSet, remote: RemoteOptions, options: dict[str, Any]
) -> type[BaseDataset]:
    """The class that opens HDF5 files or Zarr stores. For a sparse matrix, sets the group in
    `options`.
    """
    if _OF_EPISODES & options.keys():
        return EpisodeDataset
    dialects = [PACK]
    if options.get("dataset_name") is None:
        dialects.append(EPISODES)
    if not options.keys() & _OF_ARRAYS:
        dialects.append(SPARSE)
    cls, what = class_by_dialect(files, files.kind, remote, dialects)
    if cls is SparseDataset:
        options.setdefault("group", what)
    return cls


def _refuse_options(data_path: DataPath, cls: type[BaseDataset], options: dict[str, Any]) -> None:
    """Raises a ConfigError for the first option that the class does not have."""
    for name in options:
        if name in _KEYWORDS[cls]:
            continue
        takers = [_KINDS[other] for other in _KINDS if name in _KEYWORDS[other]]
        remedy = "leave it out"
        instead = synonyms(name, _KEYWORDS[cls])
        if instead:
            remedy = f"use {instead}"
        raise ConfigError(
            f"{redact(entries_of(data_path)[0])} holds {_KINDS[cls]}, but {name}= is an option for "
            f"{' and '.join(takers)}: {remedy}"
        )
