"""The arrays and groups of a Zarr store, and their metadata.

They are read here, without zarr-python: only what isn't understood is left to that.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import FormatError, MissingNameError
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact
from headrace.storage.zarr.keys import V2_ARRAY, V2_ATTRIBUTES, V2_GROUP, V3_NODE, parsed
from headrace.storage.zarr.stores import Store


def metadata_of(store: Store, name: str) -> dict[str, Any] | None:
    """The metadata of a node as its file says them; None: there is no node of that name.

    Raises:
        FormatError: the file is damaged.
    """
    for file in (V3_NODE, V2_ARRAY, V2_GROUP):
        key = f"{name}/{file}" if name else file
        data = store.read(key)
        if data is not None:
            said = parsed(data, f"{redact(store.path)}: {key}")
            if file == V2_ARRAY:
                _attributes_2(store, name)  # which must not be damaged either
            if file != V3_NODE:
                return {**said, "node_type": "array" if file == V2_ARRAY else "group"}
            if said.get("node_type") not in ("array", "group"):
                raise FormatError(f"{redact(store.path)}: {key} is damaged: it has node_type {said.get('node_type')!r}")
            return said
    return None


def attributes_of(store: Store, name: str) -> dict[str, Any]:
    """The attributes of a node."""
    said = metadata_of(store, name) or {}
    found = said.get("attributes", {}) if said.get("zarr_format") == 3 else _attributes_2(store, name)
    return found if isinstance(found, dict) else {}


def _attributes_2(store: Store, name: str) -> dict[str, Any]:
    key = f"{name}/{V2_ATTRIBUTES}" if name else V2_ATTRIBUTES
    data = store.read(key)
    return {} if data is None else parsed(data, f"{redact(store.path)}: {key}")


def array_names(store: Store) -> list[str]:
    """The arrays of a store; "" is the root."""
    return [name for name in store.nodes() if (metadata_of(store, name) or {}).get("node_type") == "array"]


def array_named(store: Store, name: str | None) -> tuple[str, dict[str, Any]]:
    """An array and its metadata; without a name the only one there is.

    Raises:
        MissingNameError: there is none of that name, or several and no name; the message lists them, where they are known.
    """
    wanted = "" if name is None else name.strip("/")
    said = metadata_of(store, wanted)
    if said is not None and said["node_type"] == "array":
        return wanted, said
    try:
        names = array_names(store)
    except MissingNameError as why:
        has_not = f"{redact(store.path)} has no array {name!r}; " if name is not None else f"{redact(store.path)}: "
        raise MissingNameError(f"{has_not}{why}") from None
    if name is None and len(names) == 1:
        return names[0], metadata_of(store, names[0]) or {}
    if name is None:
        has = listed_names(names, show=repr)
        raise MissingNameError(f"{redact(store.path)} has {len(names)} arrays, name one of them as dataset_name: {has}")
    raise MissingNameError(f"{redact(store.path)} has no array {name!r}; it has: {listed_names(names, wanted, repr)}")
