"""Which shards do paths name, of which kind are they, and which dataset says what their samples are?"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.hdf5 import HDF5Dataset, far_kind
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.shards.members import Decoders, TarSamples
from headrace.datasets.text.text import TextDataset
from headrace.datasets.zarr import ZarrDataset
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import cache_folder
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.remote_list import list_far, name_of
from headrace.io.resolve.scan import DataPath, FileList, entries_of, is_url, redact, scan
from headrace.memory.budget import MemoryBudget
from headrace.order import detect_world
from headrace.storage.hdf5.files import is_hdf5
from headrace.storage.hdf5.packed import packed_info
from headrace.storage.tar.source import COMPRESSED_TARS, ENDINGS, TarSource
from headrace.storage.text import records
from headrace.storage.text.plain import COMPRESSED, Room
from headrace.storage.text.remote import FarLinesSource, far_texts
from headrace.storage.text.source import LinesSource
from headrace.storage.zarr.stores import is_zarr

_ZARR = ".zarr"
KINDS: dict[str, tuple[str, ...]] = {
    "tar": (*ENDINGS, *COMPRESSED_TARS),
    "jsonl": tuple(".jsonl" + packed for packed in ("", *COMPRESSED)),
    "txt": tuple(".txt" + packed for packed in ("", *COMPRESSED)),
    "h5": (".h5", ".hdf5", ".he5"),
    "zarr": (_ZARR, _ZARR + ".zip"),
}
"""The endings of shards."""
_FILES = tuple(ending for kind, endings in KINDS.items() if kind != "zarr" for ending in endings)
_MOST = 1_000_000  # names that one pattern in braces may stand for
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
        decode: of members of .tar, see `TarSamples`.
        dataset_name, target_name: of .h5 and .zarr.
        of_loading: transforms, and options of `BaseDataset` that concern reading.
        reach: how URLs are reached.

    Raises:
        ConfigError: shards of several kinds, or an option that these shards don't know.
        DataNotFoundError, FormatError, AccessError: there are none; one can't be read.
    """
    entries = [name for entry in entries_of(urls) for name in expand_braces(entry)]
    if len({is_url(entry) for entry in entries}) > 1:
        raise ConfigError("urls mixes URLs and local paths: make one dataset of each")
    kind, found = _found_far(entries, reach) if is_url(entries[0]) else _found(entries)
    given = {"decode": (decode is not True, "tar"), "dataset_name": (dataset_name is not None, "h5 or zarr"),
             "target_name": (target_name is not None, "h5 or zarr")}  # fmt: skip
    for name, (is_given, kinds) in given.items():
        if is_given and kind not in kinds.split(" or "):
            raise ConfigError(f"{name} is for .{kinds.replace(' or ', ' and .')} shards, and these are .{kind}: leave it out")
    reading: dict[str, Any] = {name: of_loading[name] for name in _OF_READING if name in of_loading}
    if kind == "tar":
        source = TarSource(entries, cache_dir=reading.get("cache_dir"), progress=reading.get("progress"), reach=reach)
        return kind, TarSamples(source, decode, **of_loading)
    if kind in ("jsonl", "txt"):
        return kind, LineSamples(_lines(entries if is_url(entries[0]) else found, kind, reading, reach), **of_loading)
    if is_url(entries[0]) and kind == "h5":
        return kind, _far_hdf5(entries, dataset_name, target_name, of_loading, reach)
    if is_url(entries[0]) and kind == "zarr":
        how = reach.keywords()
        return kind, ZarrDataset(entries, dataset_name, target_name=target_name, **how, **of_loading)
    paths: list[str] = _paths(found)
    if kind == "zarr":
        return kind, ZarrDataset(paths, dataset_name, target_name=target_name, **of_loading)
    return kind, _hdf5(paths, dataset_name, target_name, of_loading)


def _paths(found: FileList | list[str]) -> list[str]:
    return found if isinstance(found, list) else [os.fsdecode(found.path(number)) for number in range(len(found.names))]


def _lines(found: FileList | list[Any], kind: str, reading: Mapping[str, Any], reach: RemoteOptions) -> LinesSource:
    """Of files of this machine, or of URLs."""
    cache_dir, progress = reading.get("cache_dir"), reading.get("progress")
    room = Room(MemoryBudget(reading.get("max_memory_usage", 0.8), local_world_size=detect_world().local_world_size))
    folder = cache_folder(cache_dir)
    if cache_dir is None:  # the user's cache folder is made too; where it can't be, what needs it says so
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
    unit = "record" if kind == "jsonl" else "line"
    if isinstance(found, FileList):
        return LinesSource(found, unit, None, "utf-8", "strict", cache_dir, folder, room, progress)
    return FarLinesSource(far_texts(found, KINDS[kind], reach), unit, None, "utf-8", "strict", folder, room, progress)


def _hdf5(paths: Sequence[str], dataset_name: Any, target_name: str | None, of_loading: Mapping[str, Any]) -> BaseDataset:
    """What was packed of images or texts as it was packed; else rows of arrays."""
    info = packed_info(paths[0]) if dataset_name is None and target_name is None and is_hdf5(paths[0]) else None
    if info is not None and info.kind == "image":
        return ImageDataset(list(paths), **of_loading)
    if info is not None and info.kind == "text" and len(paths) == 1:
        return TextDataset(paths[0], **of_loading)
    return HDF5Dataset(list(paths), dataset_name, target_name=target_name, **of_loading)


def _far_hdf5(
    urls: Sequence[str], dataset_name: Any, target_name: str | None, of_loading: Mapping[str, Any], reach: RemoteOptions
) -> BaseDataset:
    """The same of URLs, in the order in which local shards would be."""
    files = RemoteFiles(urls[0], reach)
    found = list_far(urls, KINDS["h5"], files)[1]
    files.close()
    options: dict[str, Any] = {**of_loading, **reach.keywords()}
    kind = far_kind(found, reach) if dataset_name is None and target_name is None else ""
    if kind == "image":
        return ImageDataset(found, **options)
    if kind == "text" and len(found) == 1:
        return TextDataset(found[0], **options)
    return HDF5Dataset(found, dataset_name, target_name=target_name, **options)


class LineSamples(BaseDataset):
    """The lines of texts as str, or the objects of JSON Lines."""

    def __init__(self, source: LinesSource, **options: Any) -> None:
        self._codec, self._is_json = source.codec, source.has_records
        super().__init__(source, **options)

    def decode(self, record: bytes) -> Any:
        """A line's text, or what it says as JSON."""
        text = record.decode(*self._codec)
        return records.json_record(text, False) if self._is_json else text


# -- which there are


def _found(entries: Sequence[Any]) -> tuple[str, FileList | list[str]]:
    """The kind of the shards, and the shards: as files; or as paths, of Zarr stores, which are folders."""
    stores, others = list[str](), list[Any]()
    for entry in entries:
        found, has_files = _stores(os.path.expanduser(os.fsdecode(entry)))
        stores += found
        if has_files:
            others.append(entry)
    files = scan(others, _FILES) if others else None
    kinds: dict[str, str] = {"zarr": stores[0]} if stores else {}
    for number in range(0 if files is None else len(files.names)):
        assert files is not None
        path = os.fsdecode(files.path(number))
        kinds.setdefault(_kind(path), path)
    return _only_kind(kinds), files if files is not None else stores


def _found_far(urls: Sequence[str], reach: RemoteOptions) -> tuple[str, list[str]]:
    """The same of URLs; only where they don't say which kind it is, files are listed."""
    files, kinds = None, dict[str, str]()
    for url in urls:
        name = name_of(url)
        if name.lower().endswith((*_FILES, *KINDS["zarr"])):
            kinds.setdefault(_kind(name), url)
            continue
        files = files or RemoteFiles(urls[0], reach)
        names, _ = list_far([url], _FILES, files)
        for listed in names:
            kinds.setdefault(_kind(os.fsdecode(listed)), f"{url.rstrip('/')}/{os.fsdecode(listed)}")
    if files is not None:
        files.close()
    return _only_kind(kinds), list(urls)


def _only_kind(kinds: Mapping[str, str]) -> str:
    if len(kinds) > 1:
        said = ", ".join(map(redact, kinds.values()))
        raise ConfigError(
            f"urls name shards of several kinds ({said}): make one dataset of each, and join them by MultiDataLoader; of a folder that "
            "holds other files too, name the shards by a glob, such as 'folder/*.tar'"
        )
    return next(iter(kinds))


def _kind(path: str) -> str:
    kind = next((kind for kind, endings in KINDS.items() if path.lower().endswith(endings)), None)
    if kind is None:
        known = ", ".join(endings[0] for endings in KINDS.values())
        raise FormatError(f"{redact(path)}: its name does not say which kind of shard it is; known are {known}")
    return kind


def _stores(path: str) -> tuple[list[str], bool]:
    """The Zarr stores that a path, a folder or a glob names, and whether it is to be searched for files too."""
    if os.path.isdir(path) and not is_zarr(path):
        names = [os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith(".")]
    elif os.path.exists(path):
        names = [path]
    else:
        names = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    stores = [name for name in names if name.lower().endswith(KINDS["zarr"]) or (name == path and is_zarr(name))]
    return stores, not stores or any(name.lower().endswith(_FILES) for name in names)


def expand_braces(entry: Any) -> list[Any]:
    """``a-{000..003}.tar`` and ``{train,val}.tar`` as shells, and WebDataset, write them: all names. What is there as it stands, and what
    has no such braces, stays as it is.

    Raises:
        ConfigError: they stand for too many names.
    """
    if not isinstance(entry, str) or "{" not in entry or (not is_url(entry) and os.path.exists(os.path.expanduser(entry))):
        return [entry]
    found = [entry]
    while True:
        matches = [_BRACES.search(name) for name in found]
        if not any(matches):
            return list(dict.fromkeys(found))  # braces in braces give some twice
        of = {inside: _parts(inside) for inside in {match[1] for match in matches if match is not None}}
        parts = [[""] if match is None else of[match[1]] for match in matches]
        if sum(map(len, parts)) > _MOST:
            raise ConfigError(f"{redact(entry)} stands for more than {_MOST:,} names")
        made = []
        for name, match, some in zip(found, matches, parts, strict=True):
            made += [name] if match is None else [name[: match.start()] + part + name[match.end() :] for part in some]
        found = made


_BRACES = re.compile(r"\{(\d+\.\.\d+(?:\.\.\d+)?|[^{}]*,[^{}]*)\}")


def _parts(inside: str) -> Sequence[str]:
    if ".." not in inside or "," in inside:
        return inside.split(",")
    first, last, *by = inside.split("..")
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width, step = max(len(first), len(last)) if is_padded else 0, max(1, int(by[0])) if by else 1
    if abs(int(last) - int(first)) // step > _MOST:
        raise ConfigError(f"{{{inside}}} stands for more than {_MOST:,} names")
    way = 1 if int(first) <= int(last) else -1
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + way, way * step)]
