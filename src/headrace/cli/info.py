"""Shows what a file, a folder or a URL holds, and what a random sample costs."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.cli.flags import PATH, Verb, data_options
from headrace.cli.output import Output, fields_of, shortened, visible
from headrace.errors import FormatError, MissingNameError, warn
from headrace.io.paths import is_url, redact

if TYPE_CHECKING:
    from headrace.core.dataset import BaseDataset
    from headrace.formats.source import Column, Description

_BAR = 16  # columns
_CLASSES, _ARRAYS = 12, 60  # that are shown; all of them by --json
_COUNTED = 100_000  # files of a folder whose sizes are looked at
_FETCHED = 64 << 20  # bytes of remote texts that are read to count their records
_MAGIC = (
    (0, b"\x89HDF", "HDF5 file"),
    (0, b"CDF", "netCDF-3 file, of which `nccopy -k nc4` makes HDF5"),
    (0, b"MATLAB 5.0", "MATLAB 5 file: save it with -v7.3, which is HDF5"),
    (257, b"ustar", "tar"),
    (0, b"\x89PNG", "PNG image"),
    (0, b"\xff\xd8\xff", "JPEG image"),
    (0, b"PAR1", "Parquet table"),
    (0, b"ARROW1", "Arrow table"),
    (0, b"PK", "zip"),
    (0, b"\x1f\x8b", "gzip file"),
    (0, b"<!DOCTYPE html", "web page"),
    (0, b"<html", "web page"),
    (0, b"version https://git-lfs", "Git LFS pointer, in place of the file: git lfs pull"),
)
"""Formats by their first bytes: offset, bytes, name."""


def info_verb(given: argparse.Namespace, output: Output) -> int:
    """Shows what a file, a folder or a URL holds, and what a random sample costs.

    Open a path as a dataset, and show its samples, arrays, classes and sizes, how headrace reads
    it, and what a random sample costs. Of images, only some headers are read.

    examples:
      %(prog)s train.h5                 an HDF5 file, Zarr store, tar, text, image, or folder
      %(prog)s s3://bucket/volume.zarr  the same by URL
      %(prog)s --json photos | jq .classes

    Exit code 1: the data are damaged, empty, or not what their name says.
    """
    import headrace

    try:
        dataset, arrays = _opened(given)
        with dataset:
            found = dataset.describe()
            found.stored = found.stored or _stored(given.path)
    except FormatError as error:
        content = sniffed(given.path)
        if content is None:
            raise
        raise FormatError(f"{error} (its first bytes are those of a {content})") from error
    path = redact(given.path)
    value = {"headrace": headrace.__version__, "path": path, **fields_of(found)}
    value["arrays"] = arrays
    output.show(value, _lines(path, found, arrays, output))
    return int(not found.samples)


def _opened(given: argparse.Namespace) -> tuple[BaseDataset, list[Column]]:
    """The dataset, and the arrays of its (first) file; where one must be named, the largest."""
    from headrace import EpisodeDataset, HDF5Dataset, SparseDataset, ZarrDataset, open_dataset
    from headrace.formats.episodes.rlds import RecordEpisodes

    options = data_options(given)
    if is_url(given.path) and "unit" not in options:
        options |= _unit_of(given.path)
    try:
        dataset = open_dataset(given.path, **options)
    except MissingNameError:
        arrays = _arrays(given.path)
        if "dataset_name" in options or not arrays:
            raise
        name = max(arrays, key=lambda array: array.total).name
        others = "--dataset-name NAME opens another one"
        warn(f"{name!r} is the largest of {len(arrays):,} arrays: {others}")
        return open_dataset(given.path, dataset_name=name, **options), arrays
    is_of_arrays = isinstance(dataset, HDF5Dataset | ZarrDataset | SparseDataset | EpisodeDataset)
    if not is_of_arrays or isinstance(dataset.sample_source, RecordEpisodes):
        return dataset, []
    return dataset, _arrays(given.path)


def _unit_of(path: str) -> dict[str, str]:
    """Of large texts on a server whole files, since all bytes are read to count their lines."""
    from headrace.formats.files import FilesSource
    from headrace.formats.registry import detect
    from headrace.formats.resolve.file_set import TEXT_EXTENSIONS, TEXTS
    from headrace.io.remote.options import RemoteOptions
    from headrace.memory.budget import format_size

    reach = RemoteOptions()
    files = detect(path, reach)
    if files.kind is not TEXTS:
        return {}
    source = FilesSource(files, TEXT_EXTENSIONS, reach)
    nbytes = int(source.sizes().sum())
    source.close()
    if nbytes <= _FETCHED:
        return {}
    warn(f"{format_size(nbytes)} of text are shown as files: pass --unit record to count records")
    return {"unit": "file"}


def _arrays(path: str) -> list[Column]:
    from headrace.formats.trees import look_into
    from headrace.io.remote.options import RemoteOptions

    (arrays,), _ = look_into(path, RemoteOptions(), None, lambda tree: tree.arrays(), first=1)
    return arrays


def _stored(path: str) -> int:
    """Bytes of the files in a local folder; 0: there are too many, or none."""
    sizes: list[int] = []
    for folder, _, names in os.walk(path):
        if len(sizes) + len(names) > _COUNTED:
            return 0
        sizes += [os.lstat(os.path.join(folder, name)).st_size for name in names]
    return sum(sizes)


def sniffed(path: str) -> str | None:
    """The format of a local file by its first bytes. None: unknown."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        head = file.read(1024)
    for place, magic, name in _MAGIC:
        if head[place:].startswith(magic):
            return name
    return None


def _lines(
    path: str, found: Description, arrays: Sequence[Column], output: Output
) -> Iterator[str]:
    """What is printed for people."""
    from headrace.memory.budget import format_size

    size = ""
    if found.stored:
        size = f", {format_size(found.stored)}"
    if found.files > 1:
        size = f"{size} in {found.files:,} files"
    yield f"{output.paint(visible(path), 'bold')}: {found.samples:,} samples{size}"
    facts = {"opens as": found.opens_as, **found.facts}
    if found.held is not None:
        facts["in memory"] = format_size(found.held)
    facts["fingerprint"] = found.fingerprint
    for name, text in facts.items():
        yield from _wrapped(name, text, output)
    if arrays:
        yield from _table(arrays, output)
    if found.classes:
        yield from _bars(found.classes, output)
    if found.columns:
        yield from ["", output.paint("a random sample", "bold")]
    for column in found.columns:
        yield from _wrapped(column.name, _cost(column), output)


def _wrapped(name: str, text: str, output: Output) -> Iterator[str]:
    """A name and its text, on as many lines as the terminal needs."""
    room = max(20, (output.width or 10**6) - 14)
    lines = textwrap.wrap(visible(text), room, break_long_words=False, break_on_hyphens=False)
    head = output.paint(f"{shortened(visible(name), 11):<11}", "dim")
    for line in lines:
        yield f"  {head} {line}"
        head = " " * 11


def _table(arrays: Sequence[Column], output: Output) -> Iterator[str]:
    """The arrays of a file, with the bytes that are stored of each."""
    from headrace.memory.budget import format_size

    yield from ["", output.paint("arrays", "bold")]
    rows = []
    for array in arrays[:_ARRAYS]:
        row = [array.name or "/", array.sample, "", array.read_by]
        if array.stored:
            row[2] = format_size(array.stored)
        if array.chunk:
            row[3] = f"{array.read_by}, chunks {list(array.chunk)}"
        rows.append(list(map(visible, row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, sample, stored, way in rows:
        text = f"  {name:<{widths[0]}}  {sample:<{widths[1]}}  {stored:>{widths[2]}}  {way}"
        yield text.rstrip()
    if len(arrays) > len(rows):
        yield f"  ... and {len(arrays) - len(rows):,} more: --json shows them"


def _bars(classes: dict[str, int], output: Output) -> Iterator[str]:
    """The classes, those with most samples first."""
    yield from ["", output.paint(f"{len(classes):,} classes", "bold")]
    shown = sorted(classes.items(), key=lambda item: (-item[1], item[0]))[:_CLASSES]
    room = min(max(len(visible(name)) for name, _ in shown), 24)
    for name, count in shown:
        bar = output.paint("█" * round(_BAR * count / max(1, shown[0][1])), "cyan")
        yield f"  {shortened(visible(name), room):<{room}} {count:>9,} {bar}".rstrip()
    if len(classes) > len(shown):
        yield f"  ... and {len(classes) - len(shown):,} more: --json shows them"


def _cost(column: Column) -> str:
    """The size of a column of a sample, and what reading it costs."""
    from headrace.memory.budget import format_size

    sample = [column.sample]
    if column.nbytes:
        sample.append(format_size(column.nbytes))
    costs = [column.read_by]
    if column.decoded:
        decoded = f"decodes {format_size(column.decoded)}"
        if column.chunk:
            count = f"{column.chunks:,.1f}".removesuffix(".0")
            decoded = f"{decoded} ({count} x chunk {list(column.chunk)})"
        if column.decoded >= 2 * column.nbytes > 0:
            decoded = f"{decoded}, {column.decoded / column.nbytes:,.0f} times its bytes"
        costs.append(decoded)
    if column.read:
        costs.append(f"reads about {format_size(column.read)}")
    return ": ".join(filter(None, [", ".join(filter(None, sample)), "; ".join(costs)]))


VERBS = {"info": Verb(info_verb, {"path": PATH}, opens_data=True)}
