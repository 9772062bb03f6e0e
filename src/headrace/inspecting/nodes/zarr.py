"""The groups and arrays of a Zarr store, by their metadata and the sizes of their files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace.errors import AccessError, FormatError, MissingNameError
from headrace.inspecting.episodes import Episodes
from headrace.inspecting.report import Node
from headrace.inspecting.sizes import evenly
from headrace.io.paths import redact
from headrace.storage.episodes.find import groups_matching, numbered_groups
from headrace.storage.zarr.layout import UnknownLayout, layout_of
from headrace.storage.zarr.ome import image_at
from headrace.storage.zarr.shards import ArrayFiles
from headrace.storage.zarr.store import Store, key_of
from headrace.storage.zarr.stores import ZarrFolder
from headrace.storage.zarr.tree import ZarrTree

# files whose sizes are all looked at; of more; of remote ones
_COUNTED, _SAMPLED, _ASKED = 4096, 512, 32


def zarr_nodes(store: Store, wanted: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and metadata, a group before what is in it. What lies in the folder of an array is not
    listed: there may be millions of chunks.

    Raises:
        FormatError: metadata are damaged.
        MissingNameError: a server does not list, and the store doesn't say either.
    """
    if not isinstance(store, ZarrFolder):
        for name in _names(store, wanted):
            if (metadata := store.metadata(name)) is not None:
                yield name, metadata
        return
    waiting = [""]
    while waiting:
        name = waiting.pop()
        metadata = store.metadata(name)
        if metadata is not None:
            yield name, metadata
        if metadata is None or metadata["node_type"] == "group":
            place = store.path_of(name) if name else store.path
            try:
                with os.scandir(place) as listing:
                    inside = sorted(
                        entry.name
                        for entry in listing
                        if entry.is_dir() and not entry.name.startswith(".")
                    )
            except PermissionError as error:
                raise AccessError(f"{redact(place)}: this user may not list the folder") from error
            waiting += [key_of(name, one) for one in reversed(inside)]


def _names(store: Store, wanted: str | None) -> list[str]:
    """The paths of all nodes; where nobody can list them those that are named, or that an image
    of OME-NGFF at the root tells of.
    """
    try:
        return sorted(store.nodes(), key=lambda name: name.split("/"))
    except MissingNameError:
        image = None if wanted else image_at(store, "")
        if image is None and not wanted:
            raise
        names = (
            ["", *(level.path for level in image.levels)]
            if image is not None
            else ["", str(wanted).strip("/")]
        )
        store.fetch_metadata(names)
        return names


def node_of(store: Store, path: str, metadata: dict[str, Any]) -> Node:
    if metadata.get("node_type") != "array":
        return Node(path, "group")
    try:
        is_new = metadata.get("zarr_format") == 3
        shape = tuple(map(int, metadata["shape"]))
        dtype, itemsize = _dtype(metadata["data_type"] if is_new else metadata["dtype"])
        node = Node(path, "array", shape, dtype, "chunked", nbytes=math.prod(shape) * itemsize)
        (_describe_3 if is_new else _describe_2)(node, metadata)
        if not shape:
            node.layout = "scalar"
            return node
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{redact(store.path)}: the metadata of {path or 'the array'!r} are damaged: {error}"
        ) from error
    try:
        _measure(store, node, metadata)
    except (UnknownLayout, FormatError) as error:
        node.details["unusual"] = str(error)
    return node


def episodes_in(tree: ZarrTree, nodes: Sequence[Node]) -> Episodes | None:
    """The episodes of a store, of which these nodes were looked at; None: it holds something
    else.
    """
    if (pattern := numbered_groups(tree)) is None:
        return None
    names = groups_matching(tree, pattern)
    shapes = {
        node.path: (node.shape, node.dtype) for node in nodes if node.kind == "array" and node.shape
    }
    first = [path.removeprefix(names[0]) for path in shapes if path.startswith(f"{names[0]}/")]
    if not first:  # more nodes than were looked at
        return None
    lengths = [shapes[name + first[0]][0][0] for name in names if name + first[0] in shapes]
    told = [
        f"{key[1:]} {shapes[names[0] + key][1]} {list(shapes[names[0] + key][0][1:])}"
        for key in first
    ]
    return Episodes(
        pattern,
        len(names),
        names[0],
        told,
        min(lengths),
        max(lengths),
        sum(lengths),
        len(lengths) < len(names),
    )


def _dtype(told: Any) -> tuple[str, int]:
    """A name for people, and the bytes of an element."""
    if isinstance(told, dict):
        return str(told.get("name")), int(told.get("configuration", {}).get("length_bytes", 0))
    if isinstance(told, list):
        dtype = np.dtype([(str(field[0]), *field[1:]) for field in told])
        return "{" + ", ".join(
            f"{name}: {dtype[name]}" for name in dtype.names or ()
        ) + "}", dtype.itemsize
    try:
        dtype = np.dtype(told)
    except TypeError:
        return str(told), 0
    if dtype.kind == "O":
        return "str" if told == "|O" else str(told), 0
    return str(dtype.newbyteorder("=")) + (
        "" if dtype.isnative else " (other byte order)"
    ), dtype.itemsize


def _describe_2(node: Node, metadata: dict[str, Any]) -> None:
    node.chunks = tuple(map(int, metadata["chunks"]))
    steps = [*(metadata.get("filters") or []), *filter(None, [metadata.get("compressor")])]
    node.codecs = [_codec(str(one["id"]), one) for one in steps]
    if metadata.get("order") == "F":
        node.details["order"] = "F"


def _describe_3(node: Node, metadata: dict[str, Any]) -> None:
    grid = metadata["chunk_grid"]
    extents = grid.get("configuration", {}).get("chunk_shape")
    node.chunks = (
        tuple(map(int, extents))
        if isinstance(extents, list) and all(isinstance(one, int) for one in extents)
        else None
    )
    codecs = metadata["codecs"]
    if codecs and codecs[0]["name"] == "sharding_indexed":
        options = codecs[0]["configuration"]
        node.shards, node.chunks, node.layout = (
            node.chunks,
            tuple(map(int, options["chunk_shape"])),
            "sharded",
        )
        codecs = options["codecs"]
    node.codecs = [
        _codec(str(one["name"]), one.get("configuration") or {})
        for one in codecs
        if one["name"] != "bytes"
    ]
    if node.chunks is None:
        node.details["grid"] = grid.get("name")


def _codec(name: str, options: dict[str, Any]) -> str:
    """Such as "zstd 3", "blosc lz4 5", "crc32c"."""
    told = [name, options.get("cname"), options.get("level", options.get("clevel"))]
    return " ".join(str(one) for one in told if one is not None)


def _measure(store: Store, node: Node, metadata: dict[str, Any]) -> None:
    """Bytes of the files of an array: of all, of some of many, or, of a remote array, of a few."""
    layout = layout_of(metadata)
    files = ArrayFiles(store, node.path, layout)
    most = _ASKED if store.files.is_remote else _COUNTED if files.count <= _COUNTED else _SAMPLED
    numbers = evenly(files.count, most)
    if not len(numbers):
        node.stored = node.chunks_written = 0
        return
    ranges = store.ranges(files.keys(numbers), checked=False)
    written = ranges.is_written
    nbytes = int(ranges.nbytes[written].sum())
    node.is_estimate = len(numbers) < files.count
    node.stored = nbytes * files.count // len(numbers)
    if not node.is_estimate:
        node.chunks_written = int(written.sum())
    node.details["files"] = files.count if node.is_estimate else int(written.sum())
