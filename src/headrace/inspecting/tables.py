"""Inspects tables: Parquet and Arrow files, and NumPy's arrays."""

from __future__ import annotations

from pathlib import PurePosixPath
from statistics import median
from typing import Any

import numpy as np

from headrace.errors import FormatError, HeadraceError
from headrace.inspecting.report import Access, Advice, Node, Report
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.storage.arrays.values import cast_of_long_doubles
from headrace.storage.table.arrays import arrays_of, open_arrays
from headrace.storage.table.columns import holds_images, is_bytes, refused
from headrace.storage.table.files import TABLES, TableFile, classes_in, features_in, hold_arrays
from headrace.storage.table.parquet import ParquetTable
from headrace.storage.table.source import TableSource, open_tables

_LARGE = 8 << 20  # decoded bytes of a row group that are many for one row
_COUNTED = 10_000_000  # rows whose classes are counted


def inspect_tables(data_path: Any, reach: RemoteOptions) -> Report:
    """What tables hold: columns, row groups, and what a random row costs.

    Args:
        data_path: as `TableDataset` takes it.
        reach: how URLs are reached.

    Raises:
        ConfigError: pyarrow is missing.
        DataNotFoundError, AccessError, FormatError, RemoteError: see `TableDataset`.
    """
    files = resolve(data_path, TABLES, reach)
    shown = redact(data_path)
    try:
        return _arrays(files, shown) if hold_arrays(files, shown) else _tables(files, shown)
    finally:
        if files.server is not None:
            files.server.close()


# -- Parquet and Arrow


def _tables(files: FileSet, shown: str) -> Report:
    tables, reader = open_tables(files, shown)
    first = tables[0]
    kinds = {field.name: field.type for field in first.schema}
    repeated = sorted({name for name in kinds if first.schema.names.count(name) > 1})
    encrypted = first.encrypted if isinstance(first, ParquetTable) else []
    left_out = {name: kind for name, kind in kinds.items() if refused(kind) is not None}
    unusable = {*left_out, *repeated, *encrypted}
    names = [name for name in kinds if name not in unusable]
    report = Report(
        shown, " and ".join(sorted({table.kind for table in tables})), files=len(tables)
    )
    report.stored = sum(reader.version(table.path).size for table in tables)
    report.samples = sum(int(table.rows.sum()) for table in tables)
    report.samples_are = f"rows of {len(first.schema.names):,} columns"
    codecs = first.compression if isinstance(first, ParquetTable) else []
    rows = [int(count) for table in tables for count in table.rows]
    report.details[first.blocks_are] = {
        "count": len(rows),
        "rows of each": int(median(rows)) if rows else 0,
    }
    report.nodes = [Node("", "group")]
    for name, kind in kinds.items():
        report.nodes.append(
            Node(
                name.replace("/", "_"),
                "array",
                (report.samples,),
                str(kind),
                first.blocks_are,
                codecs=codecs,
            )
        )
    if left_out:
        listed = ", ".join(f"{name!r} ({kind})" for name, kind in left_out.items())
        report.notes.append(
            f"no tensor can hold {listed}: pass columns=[...] without "
            f"{'it' if len(left_out) == 1 else 'them'}"
        )
    if repeated:
        listed = ", ".join(map(repr, repeated))
        report.notes.append(
            f"several columns are named {listed}: write the table again with names that differ"
        )
    if encrypted:
        listed = ", ".join(map(repr, encrypted))
        report.notes.append(
            f"encrypted columns can't be read ({listed}): pass columns=[...] without them"
        )
    if not names:
        return report
    try:
        source = TableSource(tables, reader, names, False)
    # such as files that are not alike: what is wrong is told, and the rest is still so
    except HeadraceError as error:
        report.notes.append(str(error))
        return report
    for node, name in zip(report.nodes[1:], kinds, strict=True):
        if name in names:
            node.stored = (
                sum(table.stored_of(name) for table in tables if isinstance(table, ParquetTable))
                or None
            )
    report.opens_as, classes = _opens_as(shown, first, names if unusable else None)
    # with other options the dataset reads other columns, and has another fingerprint
    if report.opens_as == f"headrace.TableDataset({shown!r})":
        report.fingerprint = source.fingerprint()
    if classes is not None and report.samples <= _COUNTED and not files.is_remote:
        _tell_classes(report, source, first, classes)
    _tell_costs(report, source, tables)
    source.close()
    return report


def _opens_as(shown: str, table: TableFile, names: list[str] | None) -> tuple[str, str | None]:
    """How it is opened in Python, and the column of classes."""
    features = features_in(table.schema)
    images = [
        name
        for name in names or table.schema.names
        if holds_images(kind := table.schema.field(name).type)
        and (not is_bytes(kind) or _type_of(features, name) == "Image")
    ]
    classes = next(
        (name for name in names or table.schema.names if classes_in(table.schema, name)), None
    )
    options = [] if not names or images else [f"columns={names!r}"]
    options += [f"image_column={images[0]!r}"] if images else []
    options += [f"target_name={classes!r}"] if classes else []
    return f"headrace.TableDataset({', '.join([repr(shown), *options])})", classes


def _type_of(features: dict[str, Any], name: str) -> Any:
    feature = features.get(name)
    return feature.get("_type") if isinstance(feature, dict) else None


def _tell_classes(report: Report, source: TableSource, table: TableFile, column: str) -> None:
    names, numbers = classes_in(table.schema, column), source.column(column)
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind in "iu" and numbers.ndim == 1:
        report.classes = {name: int((numbers == number).sum()) for number, name in enumerate(names)}
        report.classes_are = f"values of {column!r}"


def _tell_costs(report: Report, source: TableSource, tables: list[TableFile]) -> None:
    """What a random row costs, and what would make it cheaper."""
    if not report.samples:
        return
    sizes = np.concatenate([table.nbytes for table in tables])
    row, block = int(sizes.sum() // report.samples), int(np.median(sizes))
    way = source.describe().columns[0].read_by
    if source.is_in_place:
        report.access = [
            Access("", "a row", way, row, read=row, total=int(sizes.sum()), chunk_count=len(sizes))
        ]
        return
    read = int(source.stored_nbytes // max(1, len(sizes)))
    report.access = [
        Access(
            "", "a row", way, row, 1, block, read, total=int(sizes.sum()), chunk_count=len(sizes)
        )
    ]
    if block > _LARGE:
        count = max(1, int(_LARGE // 8 // max(1, row)))
        what = (
            f"row_group_size={count}"
            if isinstance(tables[0], ParquetTable)
            else f"chunksize={count}"
        )
        report.advice = [
            Advice(
                f"a random row decodes its whole {tables[0].block_is}: write smaller ones",
                code=what,
            )
        ]


# -- NumPy


def _arrays(files: FileSet, shown: str) -> Report:
    reader, path = files.server or LocalFiles(), files.url(0)
    try:
        found = arrays_of(path, reader)
        unreadable = [array for array in found.values() if isinstance(array, FormatError)]
        arrays = {
            name: array for name, array in found.items() if not isinstance(array, FormatError)
        }
        if unreadable and not arrays:
            raise unreadable[0]
        report = Report(shown, "NumPy arrays", files=len(files), nodes=[Node("", "group")])
        report.stored = sum(reader.version(files.url(number)).size for number in range(len(files)))
        for name, array in arrays.items():
            node_name = name or PurePosixPath(redact(path)).name
            report.nodes.append(
                Node(
                    node_name,
                    "array",
                    array.shape,
                    str(array.dtype),
                    "contiguous",
                    nbytes=array.nbytes,
                    stored=array.nbytes,
                )
            )
        report.notes += map(str, unreadable)
        if len({array.shape[0] for array in arrays.values()}) > 1:
            report.notes.append(
                "the arrays have different numbers of rows: name those that belong together with "
                "columns=[...]"
            )
            return report
        columns = list(arrays) if unreadable else None
        sources = open_arrays(files, columns, None)
    finally:
        reader.close()
    source = sources[0]
    report.samples, report.samples_are = sum(map(len, sources)), f"rows of {source.rows_are}"
    options = [f"columns={columns!r}"] if columns else []
    casts = {cast_of_long_doubles(dtype) for dtype in source.dtypes.values()} - {""}
    if casts:
        options.append(f"dtype={min(casts)!r}")
    other = next((one for one in sources if one.rows_are != source.rows_are), None)
    problem = ""
    if other is not None:
        problem = (
            f"{other.path} and {source.path} can't be one dataset: rows of {other.rows_are} here, "
            f"and of {source.rows_are} there"
        )
    report.tell_opening(f"headrace.TableDataset({', '.join([repr(shown), *options])})", problem)
    report.fingerprint = source.fingerprint() if len(sources) == 1 else None
    row = source.total_bytes // max(1, len(source))
    way = "; ".join(dict.fromkeys(column.read_by for column in source.describe().columns))
    report.access = (
        [Access("", "a row", way, row, read=row, reads=len(arrays), total=source.total_bytes)]
        if len(source)
        else []
    )
    return report
