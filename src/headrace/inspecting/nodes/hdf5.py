"""The groups and arrays of an HDF5 file, and which library wrote it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from headrace.errors import FormatError
from headrace.inspecting.episodes import Episodes
from headrace.inspecting.report import CUT_OFF, MOST_NODES, Node
from headrace.storage.episodes.find import arrays_in, groups_matching, numbered_groups
from headrace.storage.hdf5.filters import name_of
from headrace.storage.hdf5.times import readable, value_dtype
from headrace.storage.hdf5.tree import HDF5Tree

_COUNTED = 200_000  # chunks up to which those that were written are counted
_SAMPLED = 256  # chunks of a remote file whose sizes are looked at
_LOOKED_AT = 32  # arrays that may say which library wrote them


def walked(file: h5py.File, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """Paths and what lies there, a group before what is in it: groups and datasets each once,
    and links as such.
    """
    waiting: list[tuple[str, Any]] = [("", file["/"])]
    seen, count = dict[int, str](), 0
    while waiting:
        where, item = waiting.pop()
        count += 1
        if count > MOST_NODES:
            notes.append(CUT_OFF)
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
            inside.append(
                (place, link if isinstance(link, h5py.SoftLink | h5py.ExternalLink) else item[key])
            )
            if len(inside) > MOST_NODES:
                break
        waiting += inside[::-1]


def node_of(item: Any, where: str, is_remote: bool) -> Node:
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
        item = readable(item, "")
        node.dtype, node.nbytes = dtype_name(value_dtype(item)), int(item.nbytes)
    except (TypeError, FormatError) as error:  # of a type that h5py lacks
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
    return (
        "compact"
        if dataset.id.get_create_plist().get_layout() == h5py.h5d.COMPACT
        else "contiguous"
    )


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
    count = math.prod(
        -(-extent // chunk) for extent, chunk in zip(dataset.shape, dataset.chunks, strict=True)
    )
    return int(count * sum(sizes) / len(sizes)) if len(sizes) >= _SAMPLED else sum(sizes)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype in a few words: "uint8", "str", "float32 of any length", "enum of int8", "{a:
    int32, b: float64 [2]}".
    """
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


# -- episodes


def episodes_in(tree: HDF5Tree) -> Episodes | None:
    """The episodes of a file; None: it holds something else."""
    if (pattern := numbered_groups(tree)) is None:
        return None
    file, names = tree.file, groups_matching(tree, pattern)
    arrays = {key: file[names[0]][key] for key in arrays_in(tree, names[0])}
    key = next(iter(arrays))
    shapes = [
        one.shape
        for name in names[:MOST_NODES]
        if isinstance(one := file[name].get(key), h5py.Dataset) and one.shape
    ]
    lengths = [shape[0] for shape in shapes]
    told = [f"{name} {dtype_name(one.dtype)} {list(one.shape[1:])}" for name, one in arrays.items()]
    return Episodes(
        pattern,
        len(names),
        names[0],
        told,
        min(lengths),
        max(lengths),
        sum(lengths),
        len(names) > MOST_NODES,
    )


def is_index(node: Node) -> bool:
    """True for what PyTables keeps beside a table to find rows."""
    return any(part.startswith("_i_") for part in node.path.split("/"))


# -- what wrote it


def writer_of(file: h5py.File) -> dict[str, Any]:
    """Which library, or convention, the file is of."""
    attributes = {}
    for name in (
        "encoding-type",
        "encoding-version",
        "_NCProperties",
        "PYTABLES_FORMAT_VERSION",
        "CLASS",
        "Conventions",
        "keras_version",
    ):
        with contextlib.suppress(OSError, TypeError, ValueError):
            value = file.attrs.get(name)
            attributes[name] = (
                value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            )
    if attributes.get("encoding-type") == "anndata":
        return {
            "written by": "AnnData ",
            "AnnData": str(attributes.get("encoding-version") or ""),
            **_of_anndata(file),
        }
    if attributes.get("_NCProperties") is not None or _has_dimensions(file):
        properties = str(attributes.get("_NCProperties") or "")
        axes = {
            key: len(item)
            for key, item in file.items()
            if isinstance(item, h5py.Dataset) and item.is_scale
        }
        return {
            "written by": "netCDF-4 ",
            **({"netCDF": properties} if properties else {}),
            **({"dimensions": axes} if axes else {}),
        }
    if attributes.get("PYTABLES_FORMAT_VERSION") is not None:
        return {"written by": "PyTables ", "PyTables": str(attributes["PYTABLES_FORMAT_VERSION"])}
    if file.userblock_size >= 512 and any("MATLAB_class" in item.attrs for item in file.values()):
        return {
            "written by": "MATLAB 7.3 ",
            "MATLAB": (
                "its arrays have their axes in reverse: reverse_axes=True shows them as MATLAB does"
            ),
        }
    if attributes.get("keras_version") is not None:
        return {"written by": "Keras "}
    return {}


def _has_dimensions(file: h5py.File) -> bool:
    return any(
        isinstance(item, h5py.Dataset) and "_Netcdf4Dimid" in item.attrs
        for item in list(file.values())[:_LOOKED_AT]
    )


def _of_anndata(file: h5py.File) -> dict[str, Any]:
    """Cells, genes, and how X is stored."""
    told: dict[str, Any] = {}
    for axis in ("obs", "var"):
        index = (
            file.get(f"{axis}/{file[axis].attrs.get('_index', '_index')}")
            if isinstance(file.get(axis), h5py.Group)
            else None
        )
        if isinstance(index, h5py.Dataset):
            told[axis] = len(index)
    matrix = file.get("X")
    if isinstance(matrix, h5py.Group) and isinstance(matrix.get("data"), h5py.Dataset):
        told["X"] = f"{matrix.attrs.get('encoding-type', 'sparse')}, {len(matrix['data']):,} values"
    return told
