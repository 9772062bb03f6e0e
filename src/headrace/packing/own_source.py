"""Refuses a pack onto the data that it is made from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
from torch.utils.data import Dataset

from headrace.errors import ConfigError
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import MANIFEST, PLAN, expand_braces
from headrace.formats.source import Source
from headrace.io.paths import chain_of, redact
from headrace.packing.destination import local_path

_DATA = {"data_path", "urls", "targets", "path", "paths", "root", "root_dir", "folder", "data_dir"}
"""Arguments and attributes that name data: a folder in one is a folder of data."""


def refuse_own_source(dataset: Any, dst: str | os.PathLike[Any]) -> None:
    """Compares where a pack goes with the files and folders that a dataset reads.

    Args:
        dataset: of any library; the paths in its attributes count.
        dst: the file, or the folder of the parts; or its URL.

    Raises:
        ConfigError: `dst` is one of them, by whatever name, or lies in one of the folders.
    """
    target = local_path(dst)
    for source, is_data in _sources_of(dataset):
        for link in chain_of(source):  # of an archive's member the archive, too
            path = local_path(link)
            if target is None:
                is_own = path is None and _is_own_url(link, os.fspath(dst))
            else:
                is_own = path is not None and _is_own(path, target, is_data)
            if is_own:
                raise ConfigError(
                    f"{redact(dst)} is a part of what is packed ({redact(source)}), which a pack "
                    "must not change: write it elsewhere"
                )


def _is_own(source: Path, target: Path, is_data: bool) -> bool:
    """True if a pack to `target` would replace a path of this machine, or lie in it."""
    is_folder = is_data and os.path.isdir(source)  # `source` may be any text
    if is_folder and _is_below(os.path.realpath(source), os.path.realpath(target)):
        return True
    if not target.exists() or not os.path.exists(source):
        return False
    if not target.is_dir():
        return source.samefile(target)
    folder = os.path.realpath(target)
    path = os.path.realpath(source)
    return _is_below(folder, path) and _is_of_pack(os.path.relpath(path, folder).split(os.sep)[0])


def _is_own_url(source: str, target: str) -> bool:
    """True if a pack to a URL would replace a URL, or lie in it."""
    if _is_below(source, target):
        return True
    name = source.removeprefix(f"{target.rstrip('/')}/")
    return name != source and _is_of_pack(name.partition("/")[0])


def _is_of_pack(name: str) -> bool:
    """True of the names that a pack of parts writes, replaces and removes."""
    return name in (PLAN, MANIFEST) or (name.startswith("part-") and "-of-" in name)


def _is_below(folder: str, path: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def _sources_of(dataset: Any) -> Iterator[tuple[str, bool]]:
    """The paths and URLs in the attributes of a dataset, of its source and of datasets inside;
    and whether each surely is one of data.
    """
    seen = set[int]()
    left: list[tuple[str, Any]] = [("dataset", dataset)]
    while left:
        name, value = left.pop()
        if isinstance(value, (str, bytes, os.PathLike)):
            text = os.fsdecode(value)
            if name in _DATA:
                yield from ((path, True) for path in expand_braces(text))
            elif os.sep in text or "." in text:  # else it is a name in a file
                yield text, False
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FileSet):
            for root in value.searched:
                yield (root if value.server is None else value.server.url_of(root)), True
            are_stores = len(value) > 0 and os.path.isdir(value.url(0))
            yield from ((value.url(index), are_stores) for index in range(len(value)))
        elif isinstance(value, h5py.HLObject):
            if value:  # it is open
                yield value.file.filename, True
        elif isinstance(value, Mapping):
            left += ((key if isinstance(key, str) else name, one) for key, one in value.items())
        elif isinstance(value, (list, tuple, set)):
            name = "" if name == "targets" else name  # these are the targets themselves
            left += ((name, one) for one in value)
        elif hasattr(value, "__dict__") and (
            isinstance(value, (Dataset, Source))
            or name in ("dataset", "datasets")
            or type(value).__module__.startswith("headrace.")
        ):
            left += ((one.strip("_"), inner) for one, inner in vars(value).items())
