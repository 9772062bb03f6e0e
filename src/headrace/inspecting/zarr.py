"""Inspects Zarr stores: folders and zip files, local or remote."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace.errors import AccessError, FormatError, HeadraceError, MissingNameError
from headrace.inspecting import advice, costs
from headrace.inspecting.report import Access, Node, Report
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.storage.arrays.chunks import Grid
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.arrays.packed import DATA, PACKED_ATTRIBUTE, PACKED_CHECKSUM, PackedInfo, parse_info
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import layout_fingerprint
from headrace.storage.zarr.layout import Layout, UnknownLayout, layout_of
from headrace.storage.zarr.library import holds_strings
from headrace.storage.zarr.ome import Image, image_at
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.shards import ArrayFiles
from headrace.storage.zarr.store import Store, key_of
from headrace.storage.zarr.stores import ZARR, ZarrFolder

MOST_NODES = 2000
_COUNTED, _SAMPLED, _ASKED = 4096, 512, 32  # files whose sizes are all looked at; of more; of remote ones
_IMAGES = 8  # of OME-NGFF, whose levels are told
_OPENED = 32  # arrays of which it is found out by which path they are read
_PATCH = {2: 256, 3: 64}  # extents of a patch along the axes of space, by their number
_SPACE = ("x", "y", "z")


def inspect_zarr(data_path: Any, reach: RemoteOptions, name: str | None = None) -> Report:
    """What Zarr stores hold. Of several the first is looked at.

    Args:
        data_path: as `ZarrDataset` takes it; or its stores.
        reach: how URLs are reached.
        name: of the array that is of interest; None: the only one, the finest level of an image of OME-NGFF, else the largest.

    Raises:
        DataNotFoundError, AccessError, FormatError, MissingNameError, RemoteError: see `ZarrDataset`.
    """
    files = resolve(data_path, ZARR, reach)
    paths = files.urls()
    opened = OpenZarr(files.server)
    try:
        store = opened.store(paths[0], [name])
        shown = redact(data_path if isinstance(data_path, (str, os.PathLike)) else paths[0])
        report = _report(store, opened, name, shown)
    finally:
        opened.close()
        if files.server is not None and not isinstance(data_path, FileSet):
            files.server.close()
    report.files = len(paths)
    if len(paths) > 1:
        report.notes.append(f"{len(paths):,} stores: what is told is that of the first, {redact(os.path.basename(paths[0]))}")
        report.samples, report.fingerprint, report.stored = None, None, None
    return report


def _report(store: Store, opened: OpenZarr, name: str | None, shown: str) -> Report:
    notes: list[str] = []
    metadata = dict(itertools.islice(_nodes(store, name), MOST_NODES))
    if len(metadata) == MOST_NODES:
        notes.append(f"the first {MOST_NODES:,} groups and arrays are shown, there are more")
    nodes = [_node(store, path, one) for path, one in metadata.items()]
    images = _images(store, metadata, notes)
    info = _packed(store)
    arrays = [node for node in nodes if node.kind == "array" and node.shape]
    primary, patches = _primary(store, arrays, images, name, info, notes)
    version = (metadata.get("") or next(iter(metadata.values()), {})).get("zarr_format", 2)
    report = Report(shown, f"Zarr {version}", nodes=nodes, notes=notes)
    report.stored = sum(node.stored or 0 for node in nodes) if all(node.stored is not None for node in arrays) else None
    report.is_estimate = any(node.is_estimate for node in arrays)
    for path, image in images.items():
        node = next(node for node in nodes if node.path == path)
        node.details["axes"] = "".join(axis.name for axis in image.axes)
        if len(report.details) < _IMAGES:
            report.details[f"image {path}".strip()] = {"axes": node.details["axes"], "levels": _levels(image, nodes)}
    largest = sorted(arrays, key=lambda node: (node.path != primary, -node.nbytes))
    for node in largest[:_OPENED]:
        is_patch = patches and node.path in patches
        report.access.append(_cost(store, node, metadata[node.path], opened, patches[node.path] if is_patch else None))
    _tell_samples(report, store, primary, patches, images, info, arrays)
    return report


def _tell_samples(
    report: Report, store: Store, primary: str | None, patches: dict[str, list[int]], images: dict[str, Image],
    info: PackedInfo | None, arrays: list[Node],
) -> None:  # fmt: skip
    """What a sample is, how it is opened, and what would make it faster."""
    shown = report.path
    if info is not None:
        report.format += ", packed by headrace"
        report.samples, report.fingerprint = info.count, info.fingerprint
        report.samples_are = {"image": "images", "text": "texts as tokens"}.get(info.kind, "arrays") + f", stored {info.store}"
        report.opens_as = f"headrace.open_dataset({shown!r})"
        return
    if images:
        report.format = f"OME-NGFF, {report.format}"
    if primary is None:
        report.notes.append("there is no array with an axis of samples")
        return
    node = next(node for node in arrays if node.path == primary)
    assert node.shape is not None and node.chunks is not None
    cost = next((one for one in report.access if one.name == primary), None)
    group = next((path for path, image in images.items() if primary == image.levels[0].path), None)
    argument = group if group is not None else primary
    named = f", {argument!r}" if argument else ""
    if primary in patches:
        extents = [extent for extent, full in zip(patches[primary], node.shape, strict=True)]
        report.samples_are = f"patches of {_quoted(primary)}, {node.dtype} {list(node.shape)}, as large as you say"
        report.opens_as = f"headrace.ZarrDataset({shown!r}{named}, patch_shape={tuple(extents)})"
        report.advice = advice.for_patches(cost, node.chunks) if cost is not None else []
        return
    report.samples = node.shape[0]
    report.samples_are = f"rows of {_quoted(primary)}, {node.dtype} {list(node.shape[1:])}"
    report.opens_as = f"headrace.ZarrDataset({shown!r}{named})"
    report.fingerprint = _fingerprint(store, node)
    if cost is not None:
        kind = "O" if node.dtype is None else _kind(node.dtype)
        height = node.chunks[0]
        report.advice = advice.for_rows(cost, shown, kind, names_array=bool(primary) and len(arrays) > 1, height=height)


def _quoted(name: str) -> str:
    return repr(name) if name else "the array"


def _kind(dtype: str) -> str:
    try:
        return np.dtype(dtype.partition(" ")[0]).kind
    except TypeError:
        return "O"


def _fingerprint(store: Store, node: Node) -> str | None:
    """That of a `ZarrSource` of the array; None where only zarr-python knows its dtype."""
    metadata = store.metadata(node.path) or {}
    try:
        layout = layout_of(metadata)
    except UnknownLayout:
        return None
    return layout_fingerprint([node.path, layout.shape, layout.dtype.str, layout.chunks])


# -- nodes


def _nodes(store: Store, wanted: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and metadata, a group before what is in it. What lies in the folder of an array is not listed: there may be millions of chunks.

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
                    inside = sorted(entry.name for entry in listing if entry.is_dir() and not entry.name.startswith("."))
            except PermissionError as error:
                raise AccessError(f"{redact(place)}: this user may not list the folder") from error
            waiting += [key_of(name, one) for one in reversed(inside)]


def _names(store: Store, wanted: str | None) -> list[str]:
    """The paths of all nodes; where nobody can list them those that are named, or that an image of OME-NGFF at the root tells of."""
    try:
        return sorted(store.nodes(), key=lambda name: name.split("/"))
    except MissingNameError:
        image = None if wanted else image_at(store, "")
        if image is None and not wanted:
            raise
        names = ["", *(level.path for level in image.levels)] if image is not None else ["", str(wanted).strip("/")]
        store.fetch_metadata(names)
        return names


def _node(store: Store, path: str, metadata: dict[str, Any]) -> Node:
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
        raise FormatError(f"{redact(store.path)}: the metadata of {path or 'the array'!r} are damaged: {error}") from error
    try:
        _measure(store, node, metadata)
    except (UnknownLayout, FormatError) as error:
        node.details["unusual"] = str(error)
    return node


def _dtype(told: Any) -> tuple[str, int]:
    """A name for people, and the bytes of an element."""
    if isinstance(told, dict):
        return str(told.get("name")), int(told.get("configuration", {}).get("length_bytes", 0))
    if isinstance(told, list):
        dtype = np.dtype([(str(field[0]), *field[1:]) for field in told])
        return "{" + ", ".join(f"{name}: {dtype[name]}" for name in dtype.names or ()) + "}", dtype.itemsize
    try:
        dtype = np.dtype(told)
    except TypeError:
        return str(told), 0
    if dtype.kind == "O":
        return "str" if told == "|O" else str(told), 0
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else " (other byte order)"), dtype.itemsize


def _describe_2(node: Node, metadata: dict[str, Any]) -> None:
    node.chunks = tuple(map(int, metadata["chunks"]))
    steps = [*(metadata.get("filters") or []), *filter(None, [metadata.get("compressor")])]
    node.codecs = [_codec(str(one["id"]), one) for one in steps]
    if metadata.get("order") == "F":
        node.details["order"] = "F"


def _describe_3(node: Node, metadata: dict[str, Any]) -> None:
    grid = metadata["chunk_grid"]
    extents = grid.get("configuration", {}).get("chunk_shape")
    node.chunks = tuple(map(int, extents)) if isinstance(extents, list) and all(isinstance(one, int) for one in extents) else None
    codecs = metadata["codecs"]
    if codecs and codecs[0]["name"] == "sharding_indexed":
        options = codecs[0]["configuration"]
        node.shards, node.chunks, node.layout = node.chunks, tuple(map(int, options["chunk_shape"])), "sharded"
        codecs = options["codecs"]
    node.codecs = [_codec(str(one["name"]), one.get("configuration") or {}) for one in codecs if one["name"] != "bytes"]
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
    numbers = np.arange(files.count) if files.count <= most else np.unique(np.linspace(0, files.count - 1, most).astype(np.int64))
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


# -- what is of interest


def _images(store: Store, metadata: dict[str, dict[str, Any]], notes: list[str]) -> dict[str, Image]:
    """The images of OME-NGFF, by the paths of their groups."""
    found: dict[str, Image] = {}
    for path, one in metadata.items():
        if one.get("node_type") == "group":
            try:
                image = image_at(store, path)
            except FormatError as error:
                notes.append(str(error))
                continue
            if image is not None:
                found[path] = image
    return found


def _levels(image: Image, nodes: Sequence[Node]) -> list[str]:
    """What there is of each level: its array, the extents of a voxel, and shape."""
    shapes = {node.path: node.shape for node in nodes}
    unit = next((axis.unit for axis in image.axes if axis.unit), "")
    return [f"{level.path}: {_voxel(level.scale)} {unit}".rstrip() + f", {list(shapes.get(level.path) or [])}" for level in image.levels]


def _voxel(scale: Sequence[float]) -> str:
    return " x ".join(f"{extent:g}" for extent in scale)


def _packed(store: Store) -> PackedInfo | None:
    attributes = store.attributes("")
    text = attributes.get(PACKED_ATTRIBUTE)
    if text is not None and not isinstance(text, str):
        return None
    return parse_info(text, attributes.get(PACKED_CHECKSUM), store.path)


def _primary(
    store: Store, arrays: list[Node], images: dict[str, Image], name: str | None, info: PackedInfo | None, notes: list[str]
) -> tuple[str | None, dict[str, list[int]]]:
    """The array that is of interest, and for each volume the extents of a patch along its axes."""
    patches = {node.path: patch for node in arrays if (patch := _patch(store, node, images)) is not None}
    if name is not None:
        wanted = name.strip("/")
        if wanted in images:
            return images[wanted].levels[0].path, patches
        return store.array(name)[0], patches
    if info is not None:
        return DATA, patches
    if images:
        return next(iter(images.values())).levels[0].path, patches
    if not arrays:
        return None, patches
    largest = max(arrays, key=lambda node: node.nbytes).path
    if len(arrays) > 1:
        notes.append(f"there are {len(arrays):,} arrays: {largest!r} is the largest; name another one by --dataset-name")
    return largest, patches


def _patch(store: Store, node: Node, images: dict[str, Image]) -> list[int] | None:
    """The extents of a patch of a volume; None: it is none, and its first axis is that of the samples.

    A volume is an image of OME-NGFF, an array whose axes are named x, y and z, or one of three axes that is cut along all of them.
    """
    if node.shape is None or node.chunks is None or not all(node.shape):
        return None
    image = next((one for one in images.values() if any(level.path == node.path for level in one.levels)), None)
    if image is not None and len(image.axes) == len(node.shape):
        space = [number for number, axis in enumerate(image.axes) if axis.kind == "space"]
    else:
        attributes = store.attributes(node.path)
        names = (store.metadata(node.path) or {}).get("dimension_names") or attributes.get("_ARRAY_DIMENSIONS") or []
        space = [number for number, name in enumerate(names) if str(name).lower() in _SPACE] if isinstance(names, list) else []
        is_cut = len(node.shape) == 3 and all(0 < chunk < extent for chunk, extent in zip(node.chunks, node.shape, strict=True))
        space = space if len(space) >= 2 else [0, 1, 2] if is_cut else []
    if not space:
        return None
    extent = _PATCH.get(len(space), 64)
    return [min(extent, full) if axis in space else 1 for axis, full in enumerate(node.shape)]


def _cost(store: Store, node: Node, metadata: dict[str, Any], opened: OpenZarr, patch: list[int] | None) -> Access:
    """What a random row or patch costs: as it will be read; of a remote array as its metadata say, for more must be asked for."""
    try:
        if holds_strings(metadata):
            return Access(node.path, "a row", "zarr-python: strings of any length", by_library=True)
        layout = _layout(metadata)
        if store.files.is_remote and layout is not None:
            return _planned(store, node, layout, patch)
        reader = opened.rows(store, node.path, metadata) if patch is None else opened.reader(store, node.path, metadata, by_row=False)
    except MissingNameError:
        raise
    except (HeadraceError, OSError) as error:
        return Access(node.path, "a row", f"not at all: {' '.join(str(error).split())}", by_library=True)
    assert isinstance(reader, ArrayReader)
    chunks, stored = reader.chunks, _stored_chunk(node)
    if patch is None:
        return costs.of_row(node.path, chunks, stored)
    return costs.patch_cost(node.path, chunks.how, chunks.grid, chunks.dtype.itemsize, stored, chunks.is_direct, patch)


def _layout(metadata: dict[str, Any]) -> Layout | None:
    try:
        return layout_of(metadata)
    except UnknownLayout:
        return None


def _planned(store: Store, node: Node, layout: Layout, patch: list[int] | None) -> Access:
    grid, pipeline = Grid(layout.shape, layout.chunks), Pipeline(layout.codecs)
    is_sharded = layout.index_at is not None
    in_parts = patch is None and not pipeline and layout.order == "C" and layout.chunks[0] > 1
    way = "files fetched whole" if store.reads_whole and not is_sharded and not in_parts else "ranges"
    way = (f"{way} + {pipeline}" if pipeline else way) + (" out of shards" if is_sharded else "")
    itemsize, stored = layout.dtype.itemsize, _stored_chunk(node)
    if patch is not None:
        return costs.patch_cost(node.path, way, grid, itemsize, stored, True, patch)
    return costs.row_cost(node.path, way, grid, itemsize, stored, True, not pipeline and layout.order == "C" and way.startswith("ranges"))


def _stored_chunk(node: Node) -> float:
    """Bytes of a chunk, on average."""
    assert node.shape is not None and node.chunks is not None
    count = math.prod(-(-extent // chunk) for extent, chunk in zip(node.shape, node.chunks, strict=True))
    return (node.stored or 0) / max(1, count)
