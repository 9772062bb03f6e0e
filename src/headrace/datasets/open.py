"""Which format has a path?"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any, Unpack

from headrace.arguments import check_names
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.checks import HINTS, keywords_of
from headrace.datasets.hdf5 import HDF5Dataset, far_kind
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.pixels import EXTENSIONS
from headrace.datasets.options import OpenOptions
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.datasets.text.text import TEXT_EXTENSIONS, TextDataset
from headrace.datasets.zarr import ZarrDataset
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import without_query
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.contents import names_below
from headrace.io.resolve.scan import DataPath, entries_of, is_url, redact
from headrace.storage.hdf5.files import is_far_hdf5, is_hdf5
from headrace.storage.hdf5.packed import packed_info
from headrace.storage.tar.source import COMPRESSED_TARS, ENDINGS
from headrace.storage.zarr.stores import is_zarr

_OF_KIND: dict[str, type[BaseDataset]] = {"image": ImageDataset, "text": TextDataset}
"""What `headrace.pack` made of images and texts, by the kind that the file says."""
_KINDS: dict[type[BaseDataset], str] = {
    ImageDataset: "images", TextDataset: "texts", HDF5Dataset: "HDF5 arrays", ZarrDataset: "Zarr arrays", StreamingDataset: "shards",
}  # fmt: skip
_TARS = (*ENDINGS, *COMPRESSED_TARS)


def open_dataset(data_path: DataPath, **options: Unpack[OpenOptions]) -> BaseDataset:
    """The dataset for a path, its format found by content (an HDF5 file, a Zarr store, or a folder, glob or list of images, texts or .tar
    shards), or by the ending of a URL (of HDF5: .h5, .hdf5, .he5, .h5ad, .nc, .mat; .tar; those of texts; else images). Shards are a
    `StreamingDataset`.

    Where there are images, texts and shards beside them are not looked at, and where there are shards, texts beside them are not.

    Args:
        data_path: what `ImageDataset`, `TextDataset`, `HDF5Dataset`, `ZarrDataset` or `StreamingDataset` take.
        **options: passed to the dataset's class.

    Raises:
        DataNotFoundError: nothing there, or no file of a known format.
        FormatError: a file of another format; or a folder of tables (Arrow, Parquet) that HuggingFace's `datasets` saved.
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


def _class_of(data_path: DataPath, options: Mapping[str, Any]) -> type[BaseDataset]:
    entries = entries_of(data_path)
    if all(map(is_far_hdf5, entries)):
        reach = RemoteOptions.taken_from(dict(options))
        return _OF_KIND.get(far_kind(entries, reach), HDF5Dataset)
    if isinstance(data_path, (str, os.PathLike)) and is_zarr(data_path):  # of a URL the name decides
        return ZarrDataset
    if isinstance(data_path, (str, os.PathLike)) and os.path.isfile(data_path):
        if is_hdf5(data_path):
            info = packed_info(data_path)
            return _OF_KIND.get(info.kind if info is not None else "", HDF5Dataset)
        if not os.fsdecode(data_path).lower().endswith((*EXTENSIONS, *TEXT_EXTENSIONS, *_TARS)):
            raise FormatError(f"{redact(data_path)}: the format is not known; headrace reads images, texts, HDF5, Zarr and .tar")
    return _class_for(entries)


def _class_for(entries: list[Any]) -> type[BaseDataset]:
    """By the names of the files: the walk ends at the first image, and is through all folders only where there is none. Of URLs only those
    of files are known by their names, and of shards a pattern in braces too."""
    names = [without_query(os.fsdecode(entry)).lower() for entry in entries]
    if all(name.endswith(_TARS) for name in names):
        return StreamingDataset
    if any(map(is_url, entries)):
        return TextDataset if all(name.endswith(TEXT_EXTENSIONS) for name in names) else ImageDataset
    found: type[BaseDataset] = ImageDataset  # which says what is there, where nothing is known
    for entry in entries:
        path = os.path.expanduser(os.fsdecode(entry))
        for start in [path] if os.path.exists(path) else glob.iglob(path, recursive=True):
            for name in names_below(start) if os.path.isdir(start) else [start]:
                if name.lower().endswith(EXTENSIONS):
                    return ImageDataset
                if name.lower().endswith(_TARS):
                    found = StreamingDataset
                elif found is ImageDataset and name.lower().endswith(TEXT_EXTENSIONS):
                    found = TextDataset
    return found
