"""Finds episodes in groups of Zarr stores, as hdmf-zarr writes the time series of NWB.

Links are attributes of groups there (``zarr_link``), and single values are arrays of one element
(``zarr_dtype``: "scalar").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from headrace.errors import FormatError, MissingNameError
from headrace.io.paths import redact
from headrace.storage.episodes.look import (
    GROUP,
    EpisodeArray,
    EpisodeLook,
    EpisodeOptions,
    check_static,
)
from headrace.storage.source import one_after_the_other
from headrace.storage.zarr.library import StringRows
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.store import Store


class _Group(NamedTuple):
    """A group of a store."""

    store: Store
    name: str

    def path(self, key: str) -> str:
        """The path of what lies in it."""
        return f"{self.name}/{key.strip('/')}".strip("/")


class ZarrLook(EpisodeLook[Store, _Group]):
    """Looks into Zarr stores.

    Args:
        opened: what is open of them.
        options: what is read.
    """

    def __init__(self, opened: OpenZarr, options: EpisodeOptions) -> None:
        super().__init__(options)
        self._opened = opened

    def children(self, file: Store, parent: str) -> list[str]:
        return _children(file, parent)

    def kind(self, file: Store, name: str) -> str | None:
        return _kind(file, name)

    def group_names(self, file: Store) -> list[str]:
        return [name for name in _nodes(file) if name and _kind(file, name) == GROUP]

    def listed(self, file: Store, path: str, name: str) -> list[str]:
        return [
            one.decode() if isinstance(one, bytes) else str(one)
            for one in self._whole(file, name).reshape(-1).tolist()
        ]

    def group(self, file: Store, name: str) -> _Group:
        return _Group(file, name)

    def arrays(self, group: _Group) -> Collection[str]:
        below = f"{group.name}/".lstrip("/")
        names = [
            name
            for name in _nodes(group.store)
            if name.startswith(below) and _kind(group.store, name) == "array"
        ]
        return [
            name.removeprefix(below)
            for name in names
            if group.store.array(name)[1]["shape"] and not _is_single(group.store, name)
        ]

    def attributes(self, group: _Group) -> Mapping[str, Any]:
        return group.store.attributes(group.name)

    def array(self, group: _Group, path: str, name: str, key: str) -> EpisodeArray:
        place = _followed(group, key)
        if place is None:
            raise self.absent(group, path, name, key)
        where = f"{redact(path)}: {place!r}"
        reader: Any = self._opened.rows(group.store, *group.store.array(place))
        if not reader.shape:
            raise FormatError(
                f"{where} is a single value, it has no axis of time: name it as static="
            )
        return EpisodeArray(tuple(reader.shape), reader.dtype, path, -1, reader)

    def value(self, group: _Group, key: str) -> Any:
        place = _followed(group, key)
        if place is None:
            return None
        metadata = group.store.array(place)[1]
        reader = self._opened.rows(group.store, place, metadata, is_column=True)
        check_static(
            key, math.prod(reader.shape) * (1 if reader.dtype.hasobject else reader.dtype.itemsize)
        )
        value = self._whole(group.store, place)
        return (
            value.reshape(())[()]
            if _is_single(group.store, place) and value.size == 1
            else value[()]
        )

    def _whole(self, store: Store, name: str) -> Any:
        reader = self._opened.rows(store, *store.array(name), is_column=True)
        return (
            reader.whole() if isinstance(reader, StringRows) else reader.whole(one_after_the_other)
        )


def _nodes(store: Store) -> list[str]:
    """The paths of all nodes; [] where a server does not list them."""
    try:
        return list(store.nodes())
    except MissingNameError:
        return []


def _kind(store: Store, name: str) -> str | None:
    return (store.metadata(name) or {}).get("node_type")


def _children(store: Store, parent: str) -> list[str]:
    below = f"{parent}/".lstrip("/")
    found = (
        name.removeprefix(below).partition("/")[0]
        for name in _nodes(store)
        if name and name.startswith(below)
    )
    return list(dict.fromkeys(found))


def _is_single(store: Store, name: str) -> bool:
    return store.attributes(name).get("zarr_dtype") == "scalar"


def _followed(group: _Group, key: str) -> str | None:
    """The path of an array of a group, which may be a link to another one of the store; None: there
    is none.

    Raises:
        FormatError: the link leads out of the store.
    """
    path = group.path(key)
    if _kind(group.store, path) == "array":
        return path
    parent, _, last = path.rpartition("/")
    for link in group.store.attributes(parent).get("zarr_link") or ():
        if isinstance(link, Mapping) and link.get("name") == last:
            target = str(link.get("path", "")).strip("/")
            if ".." in target.split("/"):
                raise FormatError(
                    f"{redact(group.store.path)}: {path!r} is a link to {target!r}, which leads "
                    "out of the store"
                )
            if link.get("source") not in (".", "", None):
                raise FormatError(
                    f"{redact(group.store.path)}: {path!r} is a link into "
                    f"{redact(link['source'])!r}: open that store, or leave the key "
                    "out of keys="
                )
            return target if _kind(group.store, target) == "array" else None
    return None
