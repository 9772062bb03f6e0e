"""Inspects Zarr stores: folders and zip files, local or remote."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import FormatError, HeadraceError, MissingNameError
from headrace.inspecting import advice, costs
from headrace.inspecting.episodes import replay_in, tell_episodes
from headrace.inspecting.nodes.zarr import episodes_in, node_of, zarr_nodes
from headrace.inspecting.report import (
    CUT_OFF,
    MOST_NODES,
    NO_SAMPLES,
    Access,
    Node,
    Report,
    largest_of,
)
from headrace.inspecting.sparse import find_matrix, tell
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.storage.arrays.chunks import Grid, shown_array
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import layout_fingerprint
from headrace.storage.source import fingerprint_of_files
from headrace.storage.zarr.kind import ZARR
from headrace.storage.zarr.layout import Layout, UnknownLayout, layout_of
from headrace.storage.zarr.library import holds_strings
from headrace.storage.zarr.ome import Image, image_at
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.store import Store
from headrace.storage.zarr.tree import ZarrTree

_STORES = 256  # whose metadata are all looked at
_IMAGES = 8  # of OME-NGFF, whose levels are told
_OPENED = 32  # arrays of which it is found out by which path they are read
_PATCH = {2: 256, 3: 64}  # extents of a patch along the axes of space, by their number
_SPACE = ("x", "y", "z")


def inspect_zarr(data_path: Any, reach: RemoteOptions, name: str | None = None) -> Report:
    """What Zarr stores hold. Of several the first is looked at.

    Args:
        data_path: as `ZarrDataset` takes it; or its stores.
        reach: how URLs are reached.
        name: of the array that is of interest; None: the only one, the finest level of an image of
            OME-NGFF, else the largest.

    Raises:
        DataNotFoundError, AccessError, FormatError, MissingNameError, RemoteError: see
            `ZarrDataset`.
    """
    files = resolve(data_path, ZARR, reach)
    paths = files.urls()
    opened = OpenZarr(files.server)
    try:
        store = opened.store(paths[0], [name])
        shown = redact(data_path if isinstance(data_path, (str, os.PathLike)) else paths[0])
        report = _report(store, opened, name, shown, len(paths) > 1)
        if len(paths) > 1:
            _join(report, opened, paths)
    finally:
        opened.close()
        if files.server is not None and not isinstance(data_path, FileSet):
            files.server.close()
    report.files = len(paths)
    if len(paths) > 1:
        report.notes.append(
            f"{len(paths):,} stores: what is told is that of the first, "
            f"{redact(os.path.basename(paths[0]))}"
        )
    return report


def _join(report: Report, opened: OpenZarr, paths: list[str]) -> None:
    """Samples and fingerprint of several local stores, which have the array of the first; None
    where that is not known.
    """
    name, first = (report.access[0].name if report.access else ""), report.samples
    report.samples, report.fingerprint, report.stored = None, None, None
    if first is None or opened.files.is_remote or len(paths) > _STORES:
        return
    rows, prints, alike = 0, list[str](), ""
    for path in paths:
        layout = _layout(opened.store(path).metadata(name) or {})
        if layout is None or not layout.shape:
            return
        rows_are = f"{layout.dtype} {list(layout.shape[1:])}"
        alike = alike or rows_are
        if rows_are != alike:
            report.opens_as = None
            report.tell_opening(
                "",
                f"{redact(path)} and {redact(paths[0])} can't be one dataset: rows of {rows_are} "
                f"here, and of {alike} there",
            )
            return
        rows += layout.shape[0]
        prints.append(layout_fingerprint([name, layout.shape, layout.dtype.str, layout.chunks]))
    report.samples, report.fingerprint = (
        rows,
        fingerprint_of_files([None] * len(prints), rows, prints),
    )


def _report(store: Store, opened: OpenZarr, name: str | None, shown: str, many: bool) -> Report:
    notes: list[str] = []
    metadata = dict(itertools.islice(zarr_nodes(store, name), MOST_NODES + 1))
    if len(metadata) > MOST_NODES:
        metadata.popitem()
        notes.append(CUT_OFF)
    nodes = [node_of(store, path, one) for path, one in metadata.items()]
    images = _images(store, metadata, notes)
    arrays = [node for node in nodes if node.kind == "array" and node.shape]
    tree = ZarrTree(store, opened)
    of_interest = name is None and not images
    episodes = (replay_in(tree, notes) or episodes_in(tree, nodes)) if of_interest else None
    matrix = find_matrix(tree, name) if not images and episodes is None else None
    wanted = (
        name if matrix is None else None if matrix.problem else f"{matrix.group}/data".strip("/")
    )
    if episodes is not None:  # a step costs as much in all of them
        arrays = [node for node in arrays if node.path.startswith(f"{episodes.first}/")]
    primary = _primary(store, arrays, images, wanted, notes) if episodes is None else None
    with_primary = (
        arrays if primary is None or any(node is primary for node in arrays) else [*arrays, primary]
    )
    by_patch = with_primary if episodes is None else []
    patches = {
        node.path: patch for node in by_patch if (patch := _patch(store, node, images)) is not None
    }
    version = (metadata.get("") or next(iter(metadata.values()), {})).get("zarr_format", 2)
    report = Report(shown, f"Zarr {version}", nodes=nodes, notes=notes)
    report.stored = (
        sum(node.stored or 0 for node in nodes)
        if all(node.stored is not None for node in arrays)
        else None
    )
    report.is_estimate = any(node.is_estimate for node in arrays)
    for path, image in images.items():
        node = next(node for node in nodes if node.path == path)
        node.details["axes"] = "".join(axis.name for axis in image.axes)
        if len(report.details) < _IMAGES:
            report.details[f"image {path}".strip()] = {
                "axes": node.details["axes"],
                "levels": _levels(image, nodes),
            }
    for node in sorted(with_primary, key=lambda node: (node is not primary, -node.nbytes))[
        :_OPENED
    ]:
        report.access.append(
            _cost(store, node, store.metadata(node.path) or {}, opened, patches.get(node.path))
        )
    if episodes is not None:
        tell_episodes(report, episodes, many)
    elif matrix is None:
        _tell_samples(report, store, primary, patches, images, arrays)
    else:
        if store.attributes("").get("encoding-type") == "anndata":
            report.format = f"AnnData {report.format}"
        tell(report, matrix)
    return report


def _tell_samples(
    report: Report,
    store: Store,
    primary: Node | None,
    patches: dict[str, list[int]],
    images: dict[str, Image],
    arrays: list[Node],
) -> None:
    """What a sample is, how it is opened, and what would make it faster."""
    shown = report.path
    if images:
        report.format = f"OME-NGFF, {report.format}"
    if primary is None:
        report.notes.append(NO_SAMPLES)
        return
    path, shape = primary.path, primary.shape
    assert shape is not None
    cost = next((one for one in report.access if one.name == path), None)
    group = next((name for name, image in images.items() if path == image.levels[0].path), None)
    argument = group if group is not None else path
    named = f", {argument!r}" if argument else ""
    problem = "" if cost is None else cost.problem
    if path in patches:
        assert primary.chunks is not None
        report.samples_are = (
            f"patches of {_quoted(path)}, {primary.dtype} {list(shape)}, as large as you say"
        )
        report.tell_opening(
            f"headrace.ZarrDataset({shown!r}{named}, patch_shape={tuple(patches[path])})", problem
        )
        report.advice = advice.for_patches(cost, primary.chunks) if cost is not None else []
        return
    report.samples = shape[0]
    report.samples_are = f"rows of {_quoted(path)}, {primary.dtype} {list(shape[1:])}"
    report.tell_opening(f"headrace.ZarrDataset({shown!r}{named})", problem)
    report.fingerprint = _fingerprint(store, primary)
    if cost is not None and primary.chunks is not None:
        kind = "O" if primary.dtype is None else _kind(primary.dtype)
        report.advice = advice.for_rows(
            cost, shown, kind, names_array=bool(path) and len(arrays) > 1, height=primary.chunks[0]
        )


def _quoted(name: str) -> str:
    return repr(name) if name else "the array"


def _kind(dtype: str) -> str:
    try:
        return np.dtype(dtype.partition(" ")[0]).kind
    except TypeError:
        return "O"


def _fingerprint(store: Store, node: Node) -> str | None:
    """That of a `ZarrSource` of the array; None where only zarr-python knows its dtype."""
    layout = _layout(store.metadata(node.path) or {})
    return (
        None
        if layout is None
        else layout_fingerprint([node.path, layout.shape, layout.dtype.str, layout.chunks])
    )


# -- what is of interest


def _images(
    store: Store, metadata: dict[str, dict[str, Any]], notes: list[str]
) -> dict[str, Image]:
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
    return [
        f"{level.path}: {_voxel(level.scale)} {unit}".rstrip()
        + f", {list(shapes.get(level.path) or [])}"
        for level in image.levels
    ]


def _voxel(scale: Sequence[float]) -> str:
    return " x ".join(f"{extent:g}" for extent in scale)


def _primary(
    store: Store,
    arrays: list[Node],
    images: dict[str, Image],
    name: str | None,
    notes: list[str],
) -> Node | None:
    """The array that is of interest."""
    wanted: str | None = None
    if name is not None:
        image = images.get(name.strip("/"))
        wanted = image.levels[0].path if image is not None else name
    elif images:
        wanted = next(iter(images.values())).levels[0].path
    if wanted is None:
        return largest_of(arrays, notes) if arrays else None
    path, metadata = store.array(wanted)
    known = next((node for node in arrays if node.path == path), None)
    if known is not None:
        return known
    node = node_of(store, path, metadata)  # of a store of many, it was not looked at
    if not node.shape:
        raise FormatError(
            f"{shown_array(store.path, path)} is a single value, it has no axis of samples"
        )
    return node


def _patch(store: Store, node: Node, images: dict[str, Image]) -> list[int] | None:
    """The extents of a patch of a volume; None: it is none, and its first axis is that of the
    samples.

    A volume is an image of OME-NGFF, an array whose axes are named x, y and z, or one of three axes
    that is cut along all of them.
    """
    if node.shape is None or node.chunks is None or not all(node.shape):
        return None
    image = next(
        (one for one in images.values() if any(level.path == node.path for level in one.levels)),
        None,
    )
    if image is not None and len(image.axes) == len(node.shape):
        space = [number for number, axis in enumerate(image.axes) if axis.kind == "space"]
    else:
        attributes = store.attributes(node.path)
        names = (
            (store.metadata(node.path) or {}).get("dimension_names")
            or attributes.get("_ARRAY_DIMENSIONS")
            or []
        )
        space = (
            [number for number, name in enumerate(names) if str(name).lower() in _SPACE]
            if isinstance(names, list)
            else []
        )
        is_cut = len(node.shape) == 3 and all(
            0 < chunk < extent for chunk, extent in zip(node.chunks, node.shape, strict=True)
        )
        space = space if len(space) >= 2 else [0, 1, 2] if is_cut else []
    if not space:
        return None
    extent = _PATCH.get(len(space), 64)
    return [min(extent, full) if axis in space else 1 for axis, full in enumerate(node.shape)]


def _cost(
    store: Store, node: Node, metadata: dict[str, Any], opened: OpenZarr, patch: list[int] | None
) -> Access:
    """What a random row or patch costs: as it will be read; of a remote array as its metadata
    say, for more must be asked for.
    """
    try:
        if holds_strings(metadata):
            return Access(node.path, "a row", "zarr-python: strings of any length", by_library=True)
        layout = _layout(metadata)
        if store.files.is_remote and layout is not None:
            return _planned(store, node, layout, patch)
        reader = (
            opened.rows(store, node.path, metadata)
            if patch is None
            else opened.reader(store, node.path, metadata, by_row=False)
        )
    except MissingNameError:
        raise
    except (HeadraceError, OSError) as error:
        return Access.impossible(node.path, error)
    assert isinstance(reader, ArrayReader)
    chunks, stored = reader.chunks, _stored_chunk(node, reader.chunks.grid)
    if patch is None:
        return costs.of_row(node.path, chunks, stored)
    return costs.patch_cost(
        node.path, chunks.how, chunks.grid, chunks.dtype.itemsize, stored, chunks.is_direct, patch
    )


def _layout(metadata: dict[str, Any]) -> Layout | None:
    try:
        return layout_of(metadata)
    except UnknownLayout:
        return None


def _planned(store: Store, node: Node, layout: Layout, patch: list[int] | None) -> Access:
    grid, pipeline = Grid(layout.shape, layout.chunks), Pipeline(layout.codecs)
    is_sharded = layout.index_at is not None
    in_parts = patch is None and not pipeline and layout.order == "C" and layout.chunks[0] > 1
    way = (
        "files fetched whole" if store.reads_whole and not is_sharded and not in_parts else "ranges"
    )
    way = (f"{way} + {pipeline}" if pipeline else way) + (" out of shards" if is_sharded else "")
    itemsize, stored = layout.dtype.itemsize, _stored_chunk(node, grid)
    if patch is not None:
        return costs.patch_cost(node.path, way, grid, itemsize, stored, True, patch)
    return costs.row_cost(
        node.path,
        way,
        grid,
        itemsize,
        stored,
        True,
        not pipeline and layout.order == "C" and way.startswith("ranges"),
    )


def _stored_chunk(node: Node, grid: Grid) -> float:
    """Bytes of a chunk, on average."""
    return (node.stored or 0) / max(1, math.prod(grid.counts))
