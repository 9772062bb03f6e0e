"""Opens shards: finds their kind, and the dataset that decodes their samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.budgeting import DatasetBudget
from headrace.datasets.core.format import SampleFormat
from headrace.datasets.hdf5 import HDF5Dataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.shards.members import Decoders, TarFormat
from headrace.datasets.text.text import TextDataset
from headrace.datasets.zarr import ZarrDataset
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import cache_folder, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import resolve
from headrace.memory.budget import MemoryBudget
from headrace.order import detect_world
from headrace.storage.class_folders import warn_of_splits
from headrace.storage.hdf5.rows import packed_kind
from headrace.storage.tar.source import TARS, TarSource
from headrace.storage.text import records
from headrace.storage.text.files import local_texts, remote_texts
from headrace.storage.text.plain import COMPRESSED, Room
from headrace.storage.text.records import JSON_LINES
from headrace.storage.text.source import LinesSource
from headrace.storage.zarr.kind import ZARR, is_zarr
from headrace.storage.zarr.packed import packed_zarr_kind

_ENDINGS: dict[str, tuple[str, ...]] = {
    "tar": TARS.endings,
    "jsonl": tuple(ending + packed for ending in JSON_LINES for packed in ("", *COMPRESSED)),
    "txt": tuple(".txt" + packed for packed in ("", *COMPRESSED)),
    "h5": (".h5", ".hdf5", ".he5"),
    "zarr": ZARR.stores,
}
"""The endings of shards."""
_SHARDS = Kind(
    "shards",
    tuple(ending for kind, endings in _ENDINGS.items() if kind != "zarr" for ending in endings),
    stores=ZARR.stores,
    recognizes=ZARR.recognizes,
)
_OF_READING = ("cache_dir", "progress", "max_memory_usage")


def open_shards(
    urls: DataPath,
    decode: bool | Decoders,
    dataset_name: Any,
    target_name: str | None,
    of_loading: Mapping[str, Any],
    reach: RemoteOptions,
) -> tuple[str, BaseDataset]:
    """The kind of some shards, and a lazy dataset over them.

    Args:
        urls: of shards, all of one kind.
        decode: of members of .tar, see `TarFormat`.
        dataset_name, target_name: of .h5 and .zarr.
        of_loading: transforms, and options of `BaseDataset` that concern reading.
        reach: how URLs are reached.

    Raises:
        ConfigError: shards of several kinds, or an option that these shards don't know.
        DataNotFoundError, FormatError, AccessError: there are none; one can't be read.
    """
    files = resolve(urls, _SHARDS, reach, name="urls")
    warn_of_splits(files)
    kind = _kind_of(files)
    given = {
        "decode": (decode is not True, "tar"),
        "dataset_name": (dataset_name is not None, "h5 or zarr"),
        "target_name": (target_name is not None, "h5 or zarr"),
    }
    for name, (is_given, kinds) in given.items():
        if is_given and kind not in kinds.split(" or "):
            raise ConfigError(
                f"{name} is for .{kinds.replace(' or ', ' and .')} shards, and these are .{kind}: "
                "leave it out"
            )
    reading: dict[str, Any] = {name: of_loading[name] for name in _OF_READING if name in of_loading}
    if kind == "tar":
        source: Any = TarSource(
            files, cache_dir=reading.get("cache_dir"), progress=reading.get("progress"), reach=reach
        )
        left = DatasetBudget(reading.get("max_memory_usage", 0.8))
        return kind, BaseDataset(source, sample_format=TarFormat(decode, left), **of_loading)
    if kind in ("jsonl", "txt"):
        source = _lines(files, kind, reading, reach)
        return kind, BaseDataset(source, sample_format=LineFormat(source), **of_loading)
    options: dict[str, Any] = {**of_loading, **reach.keywords()}
    if kind == "zarr":
        stores: Any = resolve(urls, ZARR, reach, name="urls", server=files.server)
        is_named = dataset_name is not None or target_name is not None
        if (
            not is_named
            and ZARR.fits(os.fsdecode(stores.names[0]))
            and packed_zarr_kind(stores, reach) == "image"
        ):
            return kind, ImageDataset(stores, **options)
        return kind, ZarrDataset(stores, dataset_name, target_name=target_name, **options)
    return kind, _hdf5(files, dataset_name, target_name, options, reach)


def _lines(
    files: FileSet, kind: str, reading: Mapping[str, Any], reach: RemoteOptions
) -> LinesSource:
    cache_dir, progress = reading.get("cache_dir"), reading.get("progress")
    room = Room(
        MemoryBudget(
            reading.get("max_memory_usage", 0.8), local_world_size=detect_world().local_world_size
        )
    )
    folder = cache_folder(cache_dir)
    unit = "record" if kind == "jsonl" else "line"
    texts = remote_texts(files, _ENDINGS[kind], reach) if files.is_remote else local_texts(files)
    return LinesSource(
        texts,
        unit,
        None,
        "utf-8",
        "strict",
        folder,
        is_kept=cache_dir is not None or texts.files.is_remote,
        room=room,
        progress=progress,
    )


def _hdf5(
    files: Any,
    dataset_name: Any,
    target_name: str | None,
    options: Mapping[str, Any],
    reach: RemoteOptions,
) -> BaseDataset:
    """What was packed of images or texts as it was packed; else rows of arrays."""
    kind = packed_kind(files, reach) if dataset_name is None and target_name is None else ""
    if kind == "image":
        return ImageDataset(files, **options)
    if kind == "text":
        return TextDataset(files, **options)
    return HDF5Dataset(files, dataset_name, target_name=target_name, **options)


class LineFormat(SampleFormat):
    """The lines of texts as str, or the objects of JSON Lines."""

    stores_values = False

    def __init__(self, source: LinesSource) -> None:
        self._codec, self._is_json = source.codec, source.has_records

    def decode(self, record: bytes) -> Any:
        text = record.decode(*self._codec)
        return records.json_record(text, False) if self._is_json else text


def _kind_of(files: FileSet) -> str:
    """The kind of all shards.

    Raises:
        ConfigError: they are of several.
        FormatError: a name does not say.
    """
    first: dict[str, str] = {}
    for number, name in enumerate(map(os.fsdecode, files.names)):
        kind = next(
            (kind for kind, endings in _ENDINGS.items() if name.lower().endswith(endings)), None
        )
        if kind is None:
            path = files.url(number)
            if files.is_remote or not is_zarr(path):
                known = ", ".join(endings[0] for endings in _ENDINGS.values())
                raise FormatError(
                    f"{redact(path)}: its name does not say which kind of shard it is; known are "
                    f"{known}"
                )
            kind = "zarr"
        if kind not in first:
            first[kind] = files.url(number)
    if len(first) > 1:
        listed = ", ".join(map(redact, first.values()))
        raise ConfigError(
            f"urls name shards of several kinds ({listed}): make one dataset of each, and join "
            "them by MultiDataLoader; of a folder that "
            "holds other files too, name the shards by a glob, such as 'folder/*.tar'"
        )
    return next(iter(first))
