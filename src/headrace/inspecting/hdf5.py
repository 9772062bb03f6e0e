"""Inspects HDF5 files, local or remote."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np

from headrace.errors import HeadraceError, RemoteError
from headrace.inspecting import advice, costs
from headrace.inspecting.report import Access, Node, Report
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.storage.arrays.chunks import Grid
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.arrays.packed import DATA, TARGETS, PackedInfo
from headrace.storage.arrays.rows import layout_fingerprint
from headrace.storage.hdf5.chunks import ObjectRows, holds_objects, obstacle_of, rows_of
from headrace.storage.hdf5.filters import codecs_of, name_of
from headrace.storage.hdf5.packed import packed_info
from headrace.storage.hdf5.rows import OpenHDF5, open_files

MOST_NODES = 2000
"""Groups and arrays that are looked at."""
_COUNTED = 200_000  # chunks up to which those that were written are counted
_LISTED = 20_000  # chunks up to which a table of them is made, as for reading
_OPENED = 32  # arrays of which it is made
_TARGETS = ("targets", "labels", "target", "label", "y")
_MOST_CLASSES, _TARGET_BYTES = 1000, 64 << 20
_PARTS = 256  # of a pack, whose targets are all looked at
_SAMPLED = 256  # chunks of a remote file whose sizes are looked at
_CLASSES = {"image": "ImageDataset", "text": "TextDataset"}


class _Found(NamedTuple):
    """What is found out about one file."""

    nodes: list[Node]
    details: dict[str, Any]
    access: list[Access]
    info: PackedInfo | None
    primary: str | None
    rows: int | None
    kind: str
    height: int
    classes: tuple[dict[str, int], str] | None
    fingerprint: str | None
    notes: list[str]


def inspect_hdf5(data_path: Any, reach: RemoteOptions, name: str | None = None) -> Report:
    """What HDF5 files hold. Of several the first is looked at, and of the others their sizes.

    Args:
        data_path: as `HDF5Dataset` takes it; or its files.
        reach: how URLs are reached.
        name: of the array that is of interest; None: the one that `HDF5Dataset` takes, else the largest.

    Raises:
        DataNotFoundError, AccessError, FormatError, MissingNameError, RemoteError: see `HDF5Dataset`.
    """
    paths, opened = open_files(data_path, reach)
    try:
        found = opened.hdf5.read_each(paths[:1], functools.partial(_look_into, opened, name))[0]
        if len(paths) > 1:
            found = found._replace(classes=None if opened.hdf5.files.is_remote else _classes_together(opened, paths, found))
        sizes = [opened.hdf5.files.version(path).size for path in paths[: 1 if opened.hdf5.files.is_remote else None]]
    finally:
        if not isinstance(data_path, FileSet):
            opened.close()
    shown = redact(paths[0] if len(paths) == 1 else data_path if isinstance(data_path, (str, os.PathLike)) else paths[0])
    report = Report(shown, "HDF5", found.details, len(paths), sum(sizes), nodes=found.nodes, notes=found.notes)
    if len(sizes) < len(paths):
        report.stored, report.is_estimate = sum(sizes) * len(paths) // len(sizes), True
    if found.classes is not None:
        report.classes, report.classes_are = found.classes
    report.fingerprint = found.fingerprint if len(paths) == 1 else None
    report.access = found.access
    _tell_samples(report, found, paths)
    main = next((one for one in found.access if one.name == found.primary), None)
    if main is not None and found.info is None:
        names_array = found.primary != DATA and len([node for node in found.nodes if node.kind == "array" and node.shape]) > 1
        of = paths[0] if len(paths) == 1 else shown
        report.advice = advice.for_rows(main, of, found.kind, names_array=names_array, height=found.height)
    if len(paths) > 1:
        report.notes.append(f"{len(paths):,} files: what is told of arrays is that of the first, {redact(os.path.basename(paths[0]))}")
    return report


def _classes_together(opened: OpenHDF5, paths: list[str], found: _Found) -> tuple[dict[str, int], str] | None:
    """The classes of all parts of a pack."""
    if found.info is None or found.classes is None or len(paths) > _PARTS:
        return None
    together = Counter[str](found.classes[0])
    for path in paths[1:]:
        with opened.hdf5.reading(path) as file:
            of_part = _classes(file, found.info, None)
        if of_part is None:
            return None
        together.update(of_part[0])
    return dict(together), found.classes[1]


def _tell_samples(report: Report, found: _Found, paths: list[str]) -> None:
    """What a sample is, and how it is opened."""
    many = len(paths) > 1
    if found.info is not None:
        info = found.info
        report.format = "HDF5, packed by headrace"
        report.samples = (info.part[3] if many else info.count) if info.part is not None else (None if many else info.count)
        if many:
            report.details.pop("part", None)
        report.samples_are = {"image": "images", "text": "texts as tokens"}.get(info.kind, "arrays") + f", stored {info.store}"
        if info.part is not None and many:
            report.fingerprint = info.part[2]
        report.opens_as = f"headrace.{_CLASSES.get(info.kind, 'HDF5Dataset')}({report.path!r})"
        return
    report.format = str(report.details.pop("written by", "")) + "HDF5"
    if found.primary is None:
        report.notes.append("there is no array with an axis of samples")
        return
    node = next(node for node in found.nodes if node.path == found.primary)
    assert node.shape is not None
    report.samples = None if many else found.rows
    report.samples_are = f"rows of {found.primary!r}, {node.dtype} {list(node.shape[1:])}"
    named = "" if found.primary == DATA else f", {found.primary!r}"
    report.opens_as = f"headrace.HDF5Dataset({report.path!r}{named})"


def _look_into(opened: OpenHDF5, name: str | None, path: str) -> _Found:
    hdf5, is_remote = opened.hdf5, opened.hdf5.files.is_remote
    info = packed_info(path, hdf5)
    notes: list[str] = []
    with hdf5.reading(path) as file:
        nodes = [_node(item, where, is_remote) for where, item in _walk(file, notes)]
        arrays = [node for node in nodes if node.kind == "array" and node.shape and node.dtype is not None]
        primary = _primary(file, arrays, name, info, hdf5, path, notes)
        access, kind, height, fingerprint, rows = list[Access](), "O", 1, None, None
        largest = sorted(arrays, key=lambda node: (node.path != primary, -node.nbytes))
        for number, node in enumerate(largest[: _OPENED if info is None else 1]):
            dataset = hdf5.dataset(file, node.path, path)
            with contextlib.suppress(RemoteError):
                cost = _cost(dataset, node, path, opened, is_planned=is_remote or number >= _OPENED)
                if info is not None and node.path == DATA and info.is_flat:
                    cost = _of_flat(cost, dataset, info)
                if cost is not None:
                    access.append(cost)
            if node.path == primary:
                kind, height, rows = dataset.dtype.kind, (dataset.chunks or (1,))[0], int(dataset.shape[0])
                fingerprint = layout_fingerprint([node.path, _grid_shape(dataset), _dtype(dataset).str, dataset.chunks])
        if info is not None:
            fingerprint = info.fingerprint
        classes = _classes(file, info, rows)
        details = _details(file, info)
    return _Found(nodes, details, access, info, primary, rows, kind, height, classes, fingerprint, notes)


def _walk(file: h5py.File, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """Paths and what lies there, a group before what is in it: groups and datasets each once, and links as such."""
    waiting: list[tuple[str, Any]] = [("", file["/"])]
    seen, count = dict[int, str](), 0
    while waiting:
        where, item = waiting.pop()
        count += 1
        if count > MOST_NODES:
            notes.append(f"the first {MOST_NODES:,} groups and arrays are shown, there are more")
            return
        if not isinstance(item, h5py.Group):
            yield where, item
            continue
        first = seen.setdefault(h5py.h5o.get_info(item.id).addr, where)
        if first != where:  # a second name of the same group, perhaps inside of itself
            yield where, h5py.SoftLink(f"/{first}")
            continue
        yield where, item
        inside = list[tuple[str, Any]]()
        for key in item:
            link = item.get(key, getlink=True)
            place = f"{where}/{key}" if where else key
            inside.append((place, link if isinstance(link, h5py.SoftLink | h5py.ExternalLink) else item[key]))
            if len(inside) > MOST_NODES:
                break
        waiting += inside[::-1]


def _node(item: Any, where: str, is_remote: bool) -> Node:
    if isinstance(item, h5py.SoftLink):
        return Node(where, "link", details={"to": item.path})
    if isinstance(item, h5py.ExternalLink):
        return Node(where, "link", details={"to": f"{item.filename}:{item.path}"})
    if not isinstance(item, h5py.Dataset):
        return Node(where, "group" if isinstance(item, h5py.Group) else "type")
    layout, plist = _layout_of(item), item.id.get_create_plist()
    codecs = [_codec(plist.get_filter(number)) for number in range(plist.get_nfilters())]
    node = Node(where, "array", item.shape, None, layout, item.chunks, codecs=codecs)
    try:
        node.dtype, node.nbytes = dtype_name(item.dtype), int(item.nbytes)
    except TypeError as error:  # a time of PyTables, say
        node.details["unusual"] = " ".join(str(error).split())
    if item.shape is None:
        node.layout, node.nbytes = "empty", 0
    elif layout == "chunked" and is_remote:
        node.stored, node.is_estimate = _sampled(item), True
    elif layout in ("chunked", "contiguous", "compact", "scalar"):
        node.stored = int(item.id.get_storage_size())
        if layout == "chunked" and item.size <= _COUNTED * math.prod(item.chunks):
            node.chunks_written = int(item.id.get_num_chunks())
    if layout == "virtual":
        node.details["sources"] = len({source.file_name for source in item.virtual_sources()})
    elif layout == "external":
        node.details["files"] = [name for name, *_ in item.external]
    if item.dims and any(dim.label for dim in item.dims):
        node.details["axes"] = [dim.label for dim in item.dims]
    return node


def _layout_of(dataset: h5py.Dataset) -> str:
    if dataset.is_virtual:
        return "virtual"
    if dataset.external:
        return "external"
    if dataset.chunks is not None:
        return "chunked"
    if not dataset.shape:
        return "scalar"
    return "compact" if dataset.id.get_create_plist().get_layout() == h5py.h5d.COMPACT else "contiguous"


def _codec(told: tuple[int, int, tuple[int, ...], bytes]) -> str:
    code, _, values, _ = told
    return f"{name_of(code)} {values[0]}" if code in (1, 32015) and values else name_of(code)


def _sampled(dataset: h5py.Dataset) -> int | None:
    """Bytes of all chunks, by some of them: to list them all may take thousands of requests."""
    sizes: list[int] = []
    if not hasattr(dataset.id, "chunk_iter") or not dataset.size:
        return None

    def look(info: Any) -> int | None:
        sizes.append(info.size)
        return 1 if len(sizes) >= _SAMPLED else None

    dataset.id.chunk_iter(look)
    count = math.prod(-(-extent // chunk) for extent, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return int(count * sum(sizes) / len(sizes)) if len(sizes) >= _SAMPLED else sum(sizes)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype in a few words: "uint8", "str", "float32 of any length", "enum of int8", "{a: int32, b: float64 [2]}"."""
    if h5py.check_ref_dtype(dtype) is not None:
        return "reference"
    if (string := h5py.check_string_dtype(dtype)) is not None:
        return "str" if string.length is None else f"str of {string.length} bytes"
    if (inner := h5py.check_vlen_dtype(dtype)) is not None:
        return f"{dtype_name(inner)} of any length"
    if h5py.check_enum_dtype(dtype) is not None:
        return f"enum of {np.dtype(dtype.str)}"
    if dtype.subdtype is not None:
        return f"{dtype_name(dtype.subdtype[0])} {list(dtype.subdtype[1])}"
    if dtype.names is not None:
        return "{" + ", ".join(f"{one}: {dtype_name(dtype[one])}" for one in dtype.names) + "}"
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else " (other byte order)")


def _dtype(dataset: h5py.Dataset) -> np.dtype[Any]:
    dtype: np.dtype[Any] = dataset.dtype if dataset.dtype.subdtype is None else dataset.dtype.subdtype[0]
    return dtype


def _grid_shape(dataset: h5py.Dataset) -> tuple[int, ...]:
    return tuple(dataset.shape) + (() if dataset.dtype.subdtype is None else dataset.dtype.subdtype[1])


# -- what is of interest


def _primary(
    file: h5py.File, arrays: list[Node], name: str | None, info: PackedInfo | None, hdf5: Any, path: str, notes: list[str]
) -> str | None:
    """The array whose rows are the samples."""
    if name is not None:
        hdf5.dataset(file, name, path)  # says which there are, if this is none
        return name.strip("/")
    if info is not None or any(node.path == DATA for node in arrays):
        return DATA
    if len(arrays) > 1:
        known = {node.path for node in arrays}
        largest = max(arrays, key=lambda node: node.nbytes).path
        notes.append(f"there are {len(known):,} arrays: {largest!r} is the largest; name another one by --dataset-name")
        return largest
    return arrays[0].path if arrays else None


def _cost(dataset: h5py.Dataset, node: Node, path: str, opened: OpenHDF5, is_planned: bool) -> Access | None:
    """What a random row costs; as it will be read, where a table of the chunks is made in no time, else as its header says."""
    grid = Grid(tuple(dataset.shape), dataset.chunks or (1, *dataset.shape[1:]))
    count = math.prod(grid.counts)
    chunk = math.prod(grid.chunks) * dataset.dtype.itemsize
    stored = chunk if node.stored is None else node.stored / max(1, node.chunks_written or count)
    try:
        if holds_objects(dataset.dtype, node.path):
            return Access(node.path, "a row", "h5py: elements of any size", read=int(stored), by_library=True)
        if not is_planned and count <= _LISTED:
            rows = rows_of(dataset, path, node.path, opened.hdf5, opened.library)
            return None if isinstance(rows, ObjectRows) else costs.of_row(node.path, rows, stored)
        if (why := obstacle_of(dataset)) is not None:
            return costs.row_cost(node.path, f"h5py: {why}", grid, dataset.dtype.itemsize, stored, False, False)
        pipeline = Pipeline(codecs_of(dataset) if dataset.chunks is not None else [])
    except (HeadraceError, OSError, ValueError) as error:
        return Access(node.path, "a row", f"not at all: {' '.join(str(error).split())}", by_library=True)
    start = "ranges" if opened.hdf5.files.is_remote else "pread"
    way = f"{start} + {pipeline}" if pipeline else start
    return costs.row_cost(node.path, way, grid, dataset.dtype.itemsize, stored, True, not pipeline)


def _of_flat(cost: Access | None, dataset: h5py.Dataset, info: PackedInfo) -> Access | None:
    """Of samples that lie flat one is not a row, but as many as it has."""
    if cost is None or not info.count:
        return cost
    mean = int(dataset.nbytes // info.count)
    sample = "a document" if info.kind == "text" else "a sample"
    return Access(cost.name, sample, cost.way, mean, 0, 0, mean, 1, cost.by_library, int(dataset.nbytes), 0)


def _classes(file: h5py.File, info: PackedInfo | None, rows: int | None) -> tuple[dict[str, int], str] | None:
    """Samples of each class, and what says so: the targets of a pack, or an array of whole numbers whose name says that it is one of
    targets."""
    for name in [TARGETS] if info is not None else _TARGETS:
        targets = file.get(name)
        if not isinstance(targets, h5py.Dataset) or targets.ndim != 1 or targets.nbytes > _TARGET_BYTES:
            continue
        if targets.dtype.kind not in "iub" or (info is None and len(targets) != rows):
            continue
        values, counts = np.unique(np.asarray(targets[...]), return_counts=True)
        if len(values) > _MOST_CLASSES:
            return None
        told = f"values of {name!r}"
        if info is not None and info.classes:
            return {one: int(counts[values == number].sum()) for number, one in enumerate(info.classes)}, told
        return {str(value): int(count) for value, count in zip(values.tolist(), counts.tolist(), strict=True)}, told
    return None


# -- what wrote it


def _details(file: h5py.File, info: PackedInfo | None) -> dict[str, Any]:
    if info is not None:
        details: dict[str, Any] = {"store": info.store}
        if info.part is not None:
            details["part"] = f"{info.part[0]} of {info.part[1]}"
        details |= {what: value for what, value in (info.image | info.text).items() if value is not None}
        return details
    found = _writer(file)
    if file.userblock_size:
        found["user block"] = f"{file.userblock_size:,} bytes"
    return found


def _writer(file: h5py.File) -> dict[str, Any]:
    """Which library, or convention, the file is of."""
    attributes = {}
    for name in ("encoding-type", "encoding-version", "_NCProperties", "PYTABLES_FORMAT_VERSION", "CLASS", "Conventions", "keras_version"):
        with contextlib.suppress(OSError, TypeError, ValueError):
            value = file.attrs.get(name)
            attributes[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if attributes.get("encoding-type") == "anndata":
        return {"written by": "AnnData ", "AnnData": str(attributes.get("encoding-version") or ""), **_of_anndata(file)}
    if attributes.get("_NCProperties") is not None or _has_dimensions(file):
        properties = str(attributes.get("_NCProperties") or "")
        axes = {key: len(item) for key, item in file.items() if isinstance(item, h5py.Dataset) and item.is_scale}
        return {"written by": "netCDF-4 ", **({"netCDF": properties} if properties else {}), **({"dimensions": axes} if axes else {})}
    if attributes.get("PYTABLES_FORMAT_VERSION") is not None:
        return {"written by": "PyTables ", "PyTables": str(attributes["PYTABLES_FORMAT_VERSION"])}
    if file.userblock_size >= 512 and any("MATLAB_class" in item.attrs for item in file.values()):
        return {"written by": "MATLAB 7.3 ", "MATLAB": "its arrays have their axes in reverse"}
    if attributes.get("keras_version") is not None:
        return {"written by": "Keras "}
    return {}


def _has_dimensions(file: h5py.File) -> bool:
    return any(isinstance(item, h5py.Dataset) and "_Netcdf4Dimid" in item.attrs for item in list(file.values())[:_OPENED])


def _of_anndata(file: h5py.File) -> dict[str, Any]:
    """Cells, genes, and how X is stored."""
    told: dict[str, Any] = {}
    for axis in ("obs", "var"):
        index = file.get(f"{axis}/{file[axis].attrs.get('_index', '_index')}") if isinstance(file.get(axis), h5py.Group) else None
        if isinstance(index, h5py.Dataset):
            told[axis] = len(index)
    matrix = file.get("X")
    if isinstance(matrix, h5py.Group) and isinstance(matrix.get("data"), h5py.Dataset):
        told["X"] = f"{matrix.attrs.get('encoding-type', 'sparse')}, {len(matrix['data']):,} values"
    return told
