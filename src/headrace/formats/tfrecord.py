"""Reads TFRecord files of `tf.train.Example` and `SequenceExample`, with random access.

A record is its length, a CRC of that, its bytes, and a CRC of them. The index of a file is made by
going from one length to the next, once, and is cached. The records of a compressed file are read
from a decompressed copy in the cache folder. Sources: TensorFlow's `record_writer.cc` and
`example.proto`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
import posixpath
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import google_crc32c
import numpy as np
from isal import isal_zlib

from headrace.dtypes import AnyArray, IntArray
from headrace.errors import FormatError
from headrace.formats.protobuf import bounds_in, fields, integers
from headrace.formats.resolve.file_set import Format
from headrace.formats.source import Columns, RecordsSource
from headrace.formats.text.plain import inflated
from headrace.io.array_file import HEAD, Arrays, ArrayWriter, FileArrays, copy_of
from headrace.io.files import Files
from headrace.io.index import Headers, IndexKind, indices_of
from headrace.io.local_files import LocalFiles
from headrace.io.paths import cache_folder, named_part, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

_HEAD, _TAIL = 12, 4
"""Bytes before and after the contents of a record."""
_BITS = (1 << 64) - 1
_PIECE = 1 << 20  # bytes of files that are read at once
_LOOKED_AT = 16
"""Records of each file whose features are its columns."""
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png"}
_NUMBERS = ("int64", "float32")
_KINDS = {"", "bytes", *_NUMBERS, *_MAGIC.values()}
"""Kinds of features, see `scanned`."""
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # gzip, zlib
_ANY = zlib.MAX_WBITS + 32  # zlib tells both by their headers
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError)
"""What reading the fields of a damaged record raises, besides a FormatError."""
FIRST = "steps/is_first"
"""The feature that all episodes of RLDS have, with a value a step."""
_COPIED = b"null"
"""The features in the index of a compressed file."""


# -- records


def _is_sound(data: Any, crc: int) -> bool:
    """Compares bytes with their masked CRC32C."""
    value: int = google_crc32c.value(bytes(data))
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF == crc


def _length_in(head: bytes, path: str, at: int) -> int:
    """The number of bytes of a record, from its header.

    Raises:
        FormatError: it is no header.
    """
    length, crc = struct.unpack("<QI", head)
    if not _is_sound(head[:8], crc):
        raise FormatError(
            f"{redact(path)} has no record at byte {at:,}: it is not a TFRecord file, or is damaged"
        )
    return _HEAD + int(length) + _TAIL


def _check_end(path: str, size: int, at: int) -> None:
    """Raises a FormatError if a file does not end with its last record."""
    if at != size:
        raise FormatError(
            f"{redact(path)} ends at byte {size:,}, and its last record at {at:,}: it is cut "
            "short, copy or write it again"
        )


def scanned(files: Files, path: str) -> Arrays:
    """The index of a file: the first byte of each record, and the end of the last ([records + 1]);
    as JSON the kinds of the features in the first records, by name: "int64", "float32", "bytes",
    the extension of images, or "" if there are no values; and the number of values of `FIRST` in
    each record, if it is among these. For a compressed file: no bytes, null, and no numbers.

    Raises:
        FormatError: it is no TFRecord file, damaged, or cut short.
    """
    headers = Headers(files, path)
    starts = array("q")
    at = 0
    while at < headers.size:
        headers.seek(at)
        head = headers.read(_HEAD)
        is_record = _is_sound(head[:8], int.from_bytes(head[8:], "little"))
        if at == 0 and head.startswith(_COMPRESSED) and not is_record:
            nothing = np.zeros(0, np.int64)
            return [nothing, np.frombuffer(_COPIED, np.uint8), nothing]
        starts.append(at)
        at += _length_in(head, path, at)
    _check_end(path, headers.size, at)
    starts.append(at)
    return _index_of(files, path, np.array(starts, np.int64))


def _index_of(files: Files, path: str, edges: IntArray) -> Arrays:
    """The index of a file with records between these edges, see `scanned`."""
    first = edges[: _LOOKED_AT + 1]
    kinds = dict[str, str]()
    for data in files.read_each(ByteRanges.in_file(path, first[:-1], first[1:])):
        with contextlib.suppress(FormatError):  # said when it is read
            for name, value in parsed(memoryview(data), None).items():
                _note(kinds, name, _kind_of(value))
    names = np.frombuffer(json.dumps(kinds).encode(), np.uint8)
    return [edges, names, _steps(files, path, edges if FIRST in kinds else edges[:1])]


def _steps(files: Files, path: str, edges: IntArray) -> IntArray:
    """The number of values of `FIRST` in each record between these edges, of which nothing else is
    read; -1: the record is damaged.
    """
    headers = Headers(files, path)
    counts = np.zeros(len(edges[1:]), np.int64)
    for number, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        try:
            counts[number] = len(values_in(headers, start, stop, [FIRST]).get(FIRST, ()))
        except FormatError:  # said when it is read
            counts[number] = -1
    return counts


def values_in(headers: Headers, start: int, stop: int, names: Sequence[str]) -> dict[str, Any]:
    """Values of features of a record in a file, of which nothing else is read; those that have
    none are left out.

    Raises:
        FormatError: it is damaged, or no Example.
    """
    found = dict[str, Any]()
    try:
        for _, features in bounds_in(headers, (start + _HEAD, stop - _TAIL)):
            for _, entry in bounds_in(headers, features):
                parts = dict(bounds_in(headers, entry))
                name = str(headers.read_at(*parts[1]), "utf-8")
                if name in names and 2 in parts:
                    value = _feature(memoryview(headers.read_at(*parts[2])))
                    if value is not None:
                        found[name] = value
    except _DAMAGE as error:
        raise FormatError(f"it is not a tf.train.Example ({error})") from error
    return found


def _note(kinds: dict[str, str], name: str, kind: str) -> None:
    """Notes the kind of a feature. Bytes may turn out to be images in a later record."""
    known = kinds.get(name, "")
    if known in ("", "bytes"):
        kinds[name] = kind or known


def _kind_of(value: Any) -> str:
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, np.ndarray):
        return str(value.dtype)
    if not isinstance(value, bytes):
        return ""
    return next((kind for magic, kind in _MAGIC.items() if value.startswith(magic)), "bytes")


INDEX = IndexKind("tfrecord", 3, ("<i8", "|u1", "<i8"), scanned)
"""The index of a TFRecord file."""


# -- compressed files


def _copied(files: Files, path: str, is_packed: bool) -> FileArrays:
    """A decompressed copy of a file, with the edges of its records (see `scanned`) as a short
    array.

    Raises:
        FormatError: it is damaged, or has no record where one should be: it is not read further.
        Exception: see `copy_of`.
    """

    def write(writer: ArrayWriter) -> None:
        starts = array("q")
        start = 0
        at = 0
        tail = b""
        with files.stream(path) as opened:
            pieces: Iterator[bytes] = iter(lambda: opened.read(_PIECE), b"")
            if is_packed:
                pieces = inflated(opened, path, lambda: isal_zlib.decompressobj(_ANY))
            for piece in pieces:
                writer.write(np.frombuffer(piece, np.uint8))
                begin = at - len(tail)
                window = tail + piece
                at += len(piece)
                while start + _HEAD <= at:
                    starts.append(start)
                    head = window[start - begin : start - begin + _HEAD]
                    start += _length_in(head, path, start)
                tail = window[-_HEAD:]
        _check_end(path, at, start)
        starts.append(start)
        writer.short([np.array(starts, np.int64)])

    folder = str(cache_folder(files.cache_dir))
    return copy_of(files, path, ["tfrecord-plain"], folder, write, "decompress it")


# -- examples


def _feature(data: memoryview) -> Any:
    """The values of a feature: float32 [n], int64 [n] or a list of bytes; None: it has none."""
    for kind, values in fields(data):
        items = [value for number, value in fields(values) if number == 1]
        if kind == 1:
            return [one.tobytes() for one in items]
        if kind == 2:  # packed, or each in a field of its own
            return np.frombuffer(b"".join(items), "<f4").copy()
        if kind == 3:
            parts = [np.zeros(0, np.int64)]
            for one in items:
                if isinstance(one, int):
                    parts.append(np.array([one & _BITS], np.uint64).view(np.int64))
                else:
                    parts.append(integers(one))
            return np.concatenate(parts)
    return None


def _example(data: memoryview) -> dict[str, tuple[bool, memoryview]]:
    """The features of an Example, or the context and the feature lists of a SequenceExample: by
    name, whether it is a list, and its bytes.
    """
    found = dict[str, tuple[bool, memoryview]]()
    for number, part in fields(data):
        for of_map, entry in fields(part):
            if of_map == 1:
                key_value = dict(fields(entry))
                name = str(key_value[1], "utf-8")
                found[name] = (number == 2, key_value.get(2, memoryview(b"")))
    return found


def _value(is_list: bool, data: memoryview) -> Any:
    if not is_list:
        value = _feature(data)
        if isinstance(value, list) and len(value) == 1:
            return value[0]
        return value
    steps = [_value(False, step) for number, step in fields(data) if number == 1]
    lengths = {step.shape for step in steps if isinstance(step, np.ndarray)}
    if len(lengths) == 1 and all(isinstance(step, np.ndarray) for step in steps):
        return np.stack(steps)
    return steps


def parsed(data: memoryview, kinds: Mapping[str, str] | None) -> dict[str, Any]:
    """The values of features of a record. A feature that is missing is an empty array for numbers,
    else None.

    Args:
        data: the record.
        kinds: kinds of the features by name. None: all features of the record.

    Raises:
        FormatError: it is damaged, or no Example.
    """
    content = data[_HEAD:-_TAIL]
    if not _is_sound(content, int.from_bytes(data[-_TAIL:], "little")):
        raise FormatError("wrong checksum: the file is damaged, copy or write it again")
    try:
        found = _example(content)
        if kinds is None:
            kinds = dict.fromkeys(found, "")
        values = {name: _value(*found[name]) if name in found else None for name in kinds}
    except _DAMAGE as error:
        raise FormatError(f"it is not a tf.train.Example ({error})") from error
    for name, kind in kinds.items():
        if values[name] is None and kind in _NUMBERS:
            values[name] = np.zeros(0, kind)
    return values


# -- files


def _checked_features(
    path: str, edges: IntArray, names: AnyArray, steps: IntArray
) -> dict[str, str]:
    """The features in the index of a file.

    Raises:
        FormatError: it is no index: anybody may have written the one next to the file.
    """
    try:
        features: dict[str, str] = json.loads(bytes(names))
        kinds = set(features.values())
    except (ValueError, AttributeError, TypeError, RecursionError):
        kinds = {"damaged"}
    is_sound = kinds <= _KINDS and len(edges) > 0 and len(steps) in (0, len(edges) - 1)
    if not is_sound or (np.diff(edges) < 0).any():
        raise FormatError(
            f"{redact(path)}: its index is damaged: write it again with headrace.write_index"
        )
    return features


class TFRecordSource(RecordsSource, Columns):
    """The records of some files, one file after the other: dicts of features, or the values of one.
    The columns are the features of the first records.

    Numbers are float32 [n] and int64 [n]; a list of one bytes value is that value. If one of
    several remote files is compressed, all are read from copies.

    Args:
        paths: absolute paths, or URLs.
        files: reads them.

    Attributes:
        features: kinds of the features in the first records of each file, by name.
        steps: [records] of episodes, see `FIRST`; else [0].

    Raises:
        FormatError: see `scanned`.
    """

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self.shown: list[str] = list(paths)
        self._paths = list(paths)
        indices = indices_of(files, self._paths, INDEX)
        copied = [bytes(names) == _COPIED for _, names, _ in indices]
        self.files: Files = files
        self._bases = np.zeros(len(paths), np.int64)
        if any(copied):
            self.files = LocalFiles()
            for number, path in enumerate(paths):
                if copied[number] or files.is_remote:
                    made = _copied(files, path, copied[number])
                    self._paths[number] = made.path
                    self._bases[number] = HEAD
                    indices[number] = _index_of(self.files, made.path, HEAD + made.short[0])
            files.close()
            self.files.close()  # each process opens what it reads
        self._first = np.cumsum([0, *(len(edges) - 1 for edges, _, _ in indices)])
        self._starts = SharedArray(np.concatenate([edges[:-1] for edges, _, _ in indices]))
        self._stops = SharedArray(np.concatenate([edges[1:] for edges, _, _ in indices]))
        self.features: dict[str, str] = {}
        for path, index in zip(self.shown, indices, strict=True):
            for name, kind in _checked_features(path, *index).items():
                _note(self.features, name, kind)
        self.names: list[str] = sorted(self.features)
        self.decoders: dict[str, str] = {
            name: kind for name, kind in self.features.items() if kind in _MAGIC.values()
        }
        self.steps: IntArray = np.concatenate([steps for _, _, steps in indices])
        self._names: list[str] = []
        self._is_one = False

    def column(self, name: str) -> TFRecordSource:
        return self.rows(name)

    def rows(self, names: str | Sequence[str]) -> TFRecordSource:
        """The same records with some of their features; of a str the values of that one."""
        source = copy.copy(self)
        source._is_one = isinstance(names, str)
        source._names = [names] if isinstance(names, str) else list(names)
        return source

    def bounds(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        return self._starts.array[rows], self._stops.array[rows]

    def read(self, indices: Sequence[int]) -> list[Any]:
        views = self.files.read(self.byte_ranges(np.asarray(indices, np.int64)))
        kinds = {name: self.features[name] for name in self._names}
        records = [parsed(cast(memoryview, view), kinds) for view in views]
        if self._is_one:
            return [record[self._names[0]] for record in records]
        return records

    def fingerprint(self) -> str:
        """A hash of the features, the names of the files, and the sizes of the records."""
        names = [posixpath.basename(named_part(path)) for path in self.shown]
        digest = hashlib.blake2b(repr((self._names, names)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self._stops.array - self._starts.array, "<i8").data)
        return digest.hexdigest()

    def location(self, index: int) -> str:
        number = int(self.file_of(np.array(index)))
        return f"{redact(self.shown[number])}, record {index - int(self._first[number])}"


def is_tfrecord(path: str) -> bool:
    """True if a local file begins with the header of a record."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return len(head) == _HEAD and _is_sound(head[:8], int.from_bytes(head[8:], "little"))


TFRECORD = Format(
    "TFRecord files",
    (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz"),
    recognizes=is_tfrecord,
    open=TFRecordSource,
)
