"""The names of files in a Zarr store, and what of them is common to all kinds of stores."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from headrace.errors import FormatError

V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, V3_NODE = ".zarray", ".zgroup", ".zattrs", "zarr.json"
V2_ALL = ".zmetadata"
NODE_FILES = (V3_NODE, V2_GROUP, V2_ARRAY)
LARGEST = 64 << 20
"""Bytes of a metadata file, beyond which it is none."""


def nodes_among(keys: Iterable[str]) -> Iterator[str]:
    """The nodes whose metadata are among files."""
    seen = set()
    for key in sorted(keys):
        folder, _, file = key.rpartition("/")
        if file in NODE_FILES and folder not in seen:
            seen.add(folder)
            yield folder


def root_among(keys: Collection[str]) -> str:
    """Where in a zip file its store begins: "", or "a.zarr/" where a folder was packed with its name.

    Raises:
        FormatError: there is no store, or several.
    """
    if any(name in keys for name in NODE_FILES):
        return ""
    nodes = nodes_among(key for key in keys if not key.startswith("__MACOSX/"))
    tops = list[str]()
    for node in sorted(nodes, key=lambda node: node.count("/")):
        if not any(node.startswith(f"{top}/") for top in tops):
            tops.append(node)
        if len(tops) > 1:
            raise FormatError(f"it holds several Zarr stores, such as {tops[0]!r} and {tops[1]!r}: pack one of them alone")
    if not tops:
        raise FormatError(f"it is no Zarr store: it has neither of {', '.join(NODE_FILES)}")
    return f"{tops[0]}/"


def is_v3_array(data: bytes | None) -> bool:
    """True if a metadata file of version 3 is an array's."""
    return b'"array"' in (data or b"") and (parsed(data or b"{}", "") or {}).get("node_type") == "array"


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that a metadata file is.

    Raises:
        FormatError: it is none.
    """
    try:
        said = json.loads(data)
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        return said
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is damaged: {error}") from error
