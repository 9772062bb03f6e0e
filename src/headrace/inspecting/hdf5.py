"""Inspects HDF5 files, local or remote."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from typing import Any, NamedTuple

import h5py
import numpy as np

from headrace.errors import FormatError, HeadraceError, MissingNameError, RemoteError
from headrace.inspecting import advice, costs
from headrace.inspecting.episodes import Episodes, replay_in, tell_episodes
from headrace.inspecting.nodes.hdf5 import (
    episodes_in,
    is_index,
    node_of,
    walked,
    writer_of,
)
from headrace.inspecting.report import (
    NO_SAMPLES,
    OBJECTS_ARE,
    Access,
    Node,
    Report,
    columns_of_pack,
    largest_of,
    samples_of_pack,
)
from headrace.inspecting.sizes import stored_in
from headrace.inspecting.sparse import FoundMatrix, find_matrix, tell
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.storage.arrays.chunks import Grid
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.arrays.packed import BOXES, DATA, LABELS, TARGETS, PackedInfo
from headrace.storage.arrays.rows import layout_fingerprint
from headrace.storage.arrays.values import cast_of_long_doubles, long_doubles_in
from headrace.storage.hdf5.chunks import ObjectRows, holds_objects, obstacle_of, rows_of
from headrace.storage.hdf5.conventions import check_matlab, packing_of
from headrace.storage.hdf5.files import HDF5Files
from headrace.storage.hdf5.filters import codecs_of
from headrace.storage.hdf5.packed import packed_info
from headrace.storage.hdf5.rows import HDF5Source, Interpretation, OpenHDF5, open_files
from headrace.storage.hdf5.times import check_has_values, readable, value_dtype
from headrace.storage.hdf5.tree import HDF5Tree
from headrace.storage.source import fingerprint_of_files

_LISTED = 20_000  # chunks up to which a table of them is made, as for reading
_OPENED = 32  # arrays of which it is made
_TARGETS = ("targets", "labels", "target", "label", "y")
_MOST_CLASSES, _TARGET_BYTES = 1000, 64 << 20
_PARTS = 256  # of a pack, whose targets are all looked at
_SAID_ELSEWHERE = ("targets", "class_ids")
_CLASSES = {"image": "ImageDataset", "text": "TextDataset"}


class _Found(NamedTuple):
    """What is found out about one file."""

    nodes: list[Node]
    details: dict[str, Any]
    access: list[Access]
    info: PackedInfo | None
    primary: Node | None
    rows: int | None
    kind: str
    height: int
    classes: tuple[dict[str, int], str] | None
    fingerprint: str | None
    notes: list[str]
    episodes: Episodes | None = None
    matrix: FoundMatrix | None = None
    problem: str = ""
    """Why the files can't be one dataset."""
    cast: str = ""
    """The dtype that long doubles must be cast to."""
    decoded: str = ""
    """The dtype of packed values of netCDF when they are unpacked; "": values are what is
    stored.
    """


def inspect_hdf5(data_path: Any, reach: RemoteOptions, name: str | None = None) -> Report:
    """What HDF5 files hold. Of several the first is looked at, and of the others their sizes.

    Args:
        data_path: as `HDF5Dataset` takes it; or its files.
        reach: how URLs are reached.
        name: of the array that is of interest; None: the one that `HDF5Dataset` takes, else the
            largest.

    Raises:
        DataNotFoundError, AccessError, FormatError, MissingNameError, RemoteError: see
            `HDF5Dataset`.
    """
    paths, opened = open_files(data_path, reach)
    try:
        found = opened.hdf5.read_each(paths[:1], functools.partial(_look_into, opened, name))[0]
        if len(paths) > 1 and found.matrix is None:
            try:
                rows, prints = _rows_together(opened, paths, found)
            except (FormatError, MissingNameError) as error:  # they are no dataset together
                rows, prints = None, []
                found = found._replace(problem=str(error))
            found = found._replace(
                rows=rows,
                fingerprint=fingerprint_of_files([None] * len(prints), rows or 0, prints)
                if prints
                else None,
            )
            found = found._replace(
                classes=None
                if opened.hdf5.files.is_remote
                else _classes_together(opened, paths, found)
            )
        sizes = [
            opened.hdf5.files.version(path).size
            for path in paths[: 1 if opened.hdf5.files.is_remote else None]
        ]
    finally:
        if not isinstance(data_path, FileSet):
            opened.close()
    shown = redact(
        paths[0]
        if len(paths) == 1
        else data_path
        if isinstance(data_path, (str, os.PathLike))
        else paths[0]
    )
    report = Report(
        shown,
        "HDF5",
        found.details,
        len(paths),
        *stored_in(len(paths), sizes),
        nodes=found.nodes,
        notes=found.notes,
    )
    if found.classes is not None:
        report.classes, report.classes_are = found.classes
    report.fingerprint = found.fingerprint
    report.access = found.access
    if found.matrix is not None:
        report.format = str(report.details.pop("written by", "")) + "HDF5"
        tell(report, found.matrix)
        if len(paths) > 1:
            report.samples, report.fingerprint = None, None
    else:
        _tell_samples(report, found, paths)
    primary, main = found.primary, _main(found)
    if primary is not None and main is not None and found.info is None and found.matrix is None:
        names_array = (
            primary.path != DATA
            and len([node for node in found.nodes if node.kind == "array" and node.shape]) > 1
        )
        of = paths[0] if len(paths) == 1 else shown
        opens = report.opens_as if found.decoded else None
        report.advice = advice.for_rows(
            main, of, found.kind, names_array=names_array, height=found.height, opens_as=opens
        )
    if len(paths) > 1:
        report.notes.append(
            f"{len(paths):,} files: what is told of arrays is that of the first, "
            f"{redact(os.path.basename(paths[0]))}"
        )
    return report


def _rows_together(
    opened: OpenHDF5, paths: list[str], found: _Found
) -> tuple[int | None, list[str]]:
    """The rows of several local files, and the fingerprint of each; (None, []) where there are too
    many.

    Raises:
        FormatError, MissingNameError: they can't be one dataset.
    """
    if (
        found.primary is None
        or found.info is not None
        or opened.hdf5.files.is_remote
        or len(paths) > _PARTS
    ):
        return None, []
    rows, prints, first = 0, list[str](), ""
    for path in paths:
        with opened.hdf5.reading(path) as file:
            dataset = opened.hdf5.dataset(file, found.primary.path, path)
            rows_are = f"{value_dtype(dataset)} {list((dataset.shape or ())[1:])}"
            first = first or rows_are
            if not dataset.shape or rows_are != first:
                raise FormatError(
                    f"{redact(path)} and {redact(paths[0])} can't be one dataset: rows of "
                    f"{rows_are} here, and of {first} there"
                )
            rows += int(dataset.shape[0])
            prints.append(_fingerprint(opened, path, found.primary.path, dataset))
    return rows, prints


def _classes_together(
    opened: OpenHDF5, paths: list[str], found: _Found
) -> tuple[dict[str, int], str] | None:
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


def _main(found: _Found) -> Access | None:
    """What a row of the array of interest costs."""
    return next(
        (
            one
            for one in found.access
            if found.primary is not None and one.name == found.primary.path
        ),
        None,
    )


def _tell_samples(report: Report, found: _Found, paths: list[str]) -> None:
    """What a sample is, and how it is opened."""
    many = len(paths) > 1
    if found.info is not None:
        info = found.info
        report.format = "HDF5, packed by headrace"
        report.samples = (
            (info.part[3] if many else info.count)
            if info.part is not None
            else (None if many else info.count)
        )
        if many:
            report.details.pop("part", None)
        report.samples_are = samples_of_pack(info)
        if info.part is not None and many:
            report.fingerprint = info.part[2]
        report.opens_as = f"headrace.{_CLASSES.get(info.kind, 'HDF5Dataset')}({report.path!r})"
        return
    report.format = str(report.details.pop("written by", "")) + "HDF5"
    if found.episodes is not None:
        tell_episodes(report, found.episodes, many)
        return
    node = found.primary
    if node is None:
        report.notes.append(NO_SAMPLES)
        return
    assert node.shape is not None
    report.samples = found.rows
    report.samples_are = f"rows of {node.path!r}, {node.dtype} {list(node.shape[1:])}"
    options = [] if node.path == DATA else [repr(node.path)]
    if found.decoded:
        report.samples_are += f", unpacked {found.decoded}"
        options.append("decode_cf=True")
    if found.cast:
        options.append(f"dtype={found.cast!r}")
    main = _main(found)
    problem = "" if main is None else main.problem
    report.tell_opening(
        f"headrace.HDF5Dataset({', '.join([repr(report.path), *options])})",
        problem or found.problem,
    )


def _look_into(opened: OpenHDF5, name: str | None, path: str) -> _Found:
    hdf5, is_remote = opened.hdf5, opened.hdf5.files.is_remote
    info = packed_info(path, hdf5)
    notes: list[str] = []
    with hdf5.reading(path) as file:
        nodes = [node_of(item, where, is_remote) for where, item in walked(file, notes)]
        arrays = [
            node for node in nodes if node.kind == "array" and node.shape and node.dtype is not None
        ]
        of_interest = name is None and info is None
        tree = HDF5Tree(file, path, opened)
        episodes = (replay_in(tree, notes) or episodes_in(tree)) if of_interest else None
        matrix = find_matrix(tree, name) if info is None and episodes is None else None
        wanted = (
            name
            if matrix is None
            else None
            if matrix.problem
            else f"{matrix.group}/data".strip("/")
        )
        primary = (
            None
            if episodes is not None
            else _primary(file, arrays, wanted, info, hdf5, path, notes)
        )
        access, kind, height, fingerprint, rows, cast = list[Access](), "O", 1, None, None, ""
        if episodes is not None:  # a step costs as much in all of them
            arrays = [node for node in arrays if node.path.startswith(f"{episodes.first}/")]
        others = sorted(
            (node for node in arrays if node is not primary), key=lambda node: -node.nbytes
        )
        for node in [*([primary] if primary is not None else []), *others][
            : _OPENED if info is None else 1
        ]:
            dataset = hdf5.dataset(file, node.path, path)
            cost = _cost(dataset, node, path, opened)
            if cost is not None:
                access.append(
                    costs.of_flat(cost, info)
                    if info is not None and node.path == DATA and info.is_flat
                    else cost
                )
            if node is primary:
                kind, height, rows = (
                    _dtype(dataset).kind,
                    (dataset.chunks or (1,))[0],
                    int(dataset.shape[0]),
                )
                cast = cast_of_long_doubles(_dtype(dataset))
                fingerprint = _fingerprint(opened, path, node.path, dataset)
        packing = None if primary is None else packing_of(hdf5.dataset(file, primary.path, path))
        if primary is not None and packing is not None:
            notes.append(
                f"{primary.path!r} is packed as CF has it: decode_cf=True unpacks its values"
            )
        if info is not None:
            fingerprint = info.fingerprint
        try:
            classes = _classes(file, info, rows)
        except FormatError as error:
            notes.append(str(error))
            classes = None
        details = _details(file, info)
    decoded = "" if packing is None else "strings" if packing.joins else str(packing.dtype)
    found = _Found(
        nodes,
        details,
        access,
        info,
        primary,
        rows,
        kind,
        height,
        classes,
        fingerprint,
        notes,
        episodes,
        matrix,
    )
    return found._replace(cast=cast, decoded=decoded)


def _fingerprint(opened: OpenHDF5, path: str, name: str, dataset: h5py.Dataset) -> str:
    """That of the rows of an array; of packed values of netCDF when they are unpacked."""
    if packing_of(dataset) is not None:
        return HDF5Source(
            path, name, opened=opened, how=Interpretation(decode_cf=True)
        ).fingerprint()
    return layout_fingerprint([name, _grid_shape(dataset), _dtype(dataset).str, dataset.chunks])


def _dtype(dataset: h5py.Dataset) -> np.dtype[Any]:
    return value_dtype(dataset).base


def _grid_shape(dataset: h5py.Dataset) -> tuple[int, ...]:
    return tuple(dataset.shape) + (
        () if dataset.dtype.subdtype is None else dataset.dtype.subdtype[1]
    )


# -- what is of interest


def _primary(
    file: h5py.File,
    arrays: list[Node],
    name: str | None,
    info: PackedInfo | None,
    hdf5: HDF5Files,
    path: str,
    notes: list[str],
) -> Node | None:
    """The array whose rows are the samples."""
    if name is None and info is None and not any(node.path == DATA for node in arrays):
        return (
            largest_of([node for node in arrays if not is_index(node)] or arrays, notes)
            if arrays
            else None
        )
    wanted = DATA if name is None else name.strip("/")
    known = next((node for node in arrays if node.path == wanted), None)
    if known is not None:
        return known
    # a link leads to it, or it was not looked at; or the error says which there are
    dataset = hdf5.dataset(file, wanted, path)
    check_has_values(dataset, f"{redact(path)}: {wanted!r}")
    if not dataset.shape:
        raise FormatError(
            f"{redact(path)}: {wanted!r} is a single value, it has no axis of samples"
        )
    return node_of(dataset, wanted, hdf5.files.is_remote)


def _cost(dataset: h5py.Dataset, node: Node, path: str, opened: OpenHDF5) -> Access | None:
    """What a random row costs; as it will be read, where a table of the chunks is made in no
    time, else as its header says.
    """
    grid = Grid(tuple(dataset.shape), dataset.chunks or (1, *dataset.shape[1:]))
    count = math.prod(grid.counts)
    chunk = math.prod(grid.chunks) * dataset.dtype.itemsize
    stored = chunk if node.stored is None else node.stored / max(1, node.chunks_written or count)
    where = f"{redact(path)}: {node.path!r}"
    try:
        if dataset.file.userblock_size:
            check_matlab(dataset, where)
        if long_doubles_in(dataset.dtype):
            raise FormatError(
                f"{where} has fields of long doubles, which torch does not have: convert them"
            )
        if holds_objects(dataset.dtype, where):
            return Access(
                node.path, "a row", "h5py: elements of any size", read=int(stored), by_library=True
            )
        if not opened.hdf5.files.is_remote and count <= _LISTED:
            rows = rows_of(dataset, path, node.path, opened.hdf5, opened.library)
            return None if isinstance(rows, ObjectRows) else costs.of_row(node.path, rows, stored)
        if (why := obstacle_of(dataset)) is not None:
            return costs.row_cost(
                node.path, f"h5py: {why}", grid, dataset.dtype.itemsize, stored, False, False
            )
        pipeline = Pipeline(codecs_of(dataset) if dataset.chunks is not None else [])
    except RemoteError:
        raise
    except (HeadraceError, OSError, ValueError) as error:
        return Access.impossible(node.path, error)
    start = "ranges" if opened.hdf5.files.is_remote else "pread"
    way = f"{start} + {pipeline}" if pipeline else start
    return costs.row_cost(node.path, way, grid, dataset.dtype.itemsize, stored, True, not pipeline)


def _classes(
    file: h5py.File, info: PackedInfo | None, rows: int | None
) -> tuple[dict[str, int], str] | None:
    """Samples of each class, and what says so: the targets of a pack, or an array of whole numbers
    whose name says that it is one of targets.

    Raises:
        FormatError: the array is damaged; the message names it.
    """
    if info is not None and info.image.get("targets") == BOXES:
        labels, numbers = np.asarray(file[LABELS][...]), info.image["class_ids"]
        return {
            one: int((labels == number).sum())
            for one, number in zip(info.classes or [], numbers, strict=True)
        }, OBJECTS_ARE
    for name in [TARGETS] if info is not None else _TARGETS:
        try:
            targets = readable(file.get(name), name)
        except FormatError:  # times that nobody can read
            continue
        if (
            not isinstance(targets, h5py.Dataset)
            or targets.ndim != 1
            or targets.nbytes > _TARGET_BYTES
        ):
            continue
        if targets.dtype.kind not in "iub" or (info is None and len(targets) != rows):
            continue
        try:
            stored = np.asarray(targets[...])
        except RemoteError:
            raise
        except OSError as error:
            raise FormatError(f"the array {name!r} can't be read: {error}") from error
        values, counts = np.unique(stored, return_counts=True)
        if len(values) > _MOST_CLASSES:
            return None
        told = f"values of {name!r}"
        if info is not None and info.classes:
            return {
                one: int(counts[values == number].sum()) for number, one in enumerate(info.classes)
            }, told
        return {
            str(value): int(count)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True)
        }, told
    return None


def _details(file: h5py.File, info: PackedInfo | None) -> dict[str, Any]:
    if info is not None:
        details: dict[str, Any] = {"store": info.store}
        if info.part is not None:
            details["part"] = f"{info.part[0]} of {info.part[1]}"
        said = {
            what: value
            for what, value in (info.image | info.text).items()
            if what not in _SAID_ELSEWHERE
        }
        details |= {what: value for what, value in said.items() if value is not None}
        return details | columns_of_pack(info)
    found = writer_of(file)
    if file.userblock_size:
        found["user block"] = f"{file.userblock_size:,} bytes"
    return found
