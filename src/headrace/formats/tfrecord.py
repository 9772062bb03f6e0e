"""Reads TFRecord files of `tf.train.Example` and `SequenceExample`, with random access.

A record is its length, a CRC of that, its bytes, and a CRC of them. Where each begins is found by
going from one length to the next, once, and is kept. Sources: TensorFlow's `record_writer.cc` and
`example.proto`; the encoding of Protocol Buffers.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import posixpath
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.columns import Columns
from headrace.formats.headers import Headers, indices_of
from headrace.formats.resolve.file_set import Format
from headrace.formats.source import Locatable
from headrace.io.files import Files
from headrace.io.index import IndexKind
from headrace.io.paths import named_part, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

_HEAD, _TAIL = 12, 4
"""Bytes before and behind the contents of a record."""
_BITS = (1 << 64) - 1
_PIECE = 1 << 20  # bytes of numbers that are decoded at once
_LOOKED_AT = 16
"""Records by which the columns of the first file are found."""
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png"}
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x9c", b"\x78\xda")  # by gzip and zlib


# -- records


def _is_sound(data: Any, crc: int) -> bool:
    """Compares bytes with their masked CRC32C."""
    value: int = google_crc32c.value(bytes(data))
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF == crc


def scanned(files: Files, path: str) -> list[npt.NDArray[Any]]:
    """The byte at which each record begins, and the last one ends ([records + 1]); and as JSON the
    features that the first records have: an extension by name, or "".

    Raises:
        FormatError: it is no TFRecord file, compressed, damaged, or cut short.
    """
    headers = Headers(files, path)
    starts = array("q")
    at = 0
    while at < headers.size:
        headers.seek(at)
        head = headers.read(_HEAD)
        length, crc = struct.unpack("<QI", head)
        is_sound = _is_sound(head[:8], crc)
        if at == 0 and head[:2] in _COMPRESSED and not is_sound:
            raise FormatError(
                f"{redact(path)} is compressed as a whole, so no record in it can be read without "
                "all that come before: unpack it"
            )
        if not is_sound:
            raise FormatError(
                f"{redact(path)} has no record at byte {at:,}: it is no TFRecord file, or damaged"
            )
        starts.append(at)
        at += _HEAD + length + _TAIL
    if at != headers.size:
        raise FormatError(
            f"{redact(path)} ends at byte {headers.size:,}, and its last record at {at:,}: it is "
            "cut short, copy or write it again"
        )
    starts.append(at)
    edges = np.array(starts, np.int64)
    first = edges[: _LOOKED_AT + 1]
    names = dict[str, str]()
    for data in files.read_each(ByteRanges.in_file(path, first[:-1], first[1:])):
        with contextlib.suppress(FormatError):  # said when it is read
            for name, value in _features(memoryview(data), None).items():
                names.setdefault(name, "")
                for magic, kind in _MAGIC.items():
                    if isinstance(value, bytes) and value.startswith(magic):
                        names[name] = kind
    return [edges, np.frombuffer(json.dumps(names).encode(), np.uint8)]


INDEX = IndexKind("tfrecord", 1, ("<i8", "|u1"), scanned)
"""The index of a file."""


# -- Protocol Buffers


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message: number, and bytes, an integer, or 4 or 8 bytes."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        if kind == 0:
            value: Any
            value, at = _number(data, at)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _number(data, at)
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError(f"a field of {size:,} bytes is cut short")
        else:
            raise ValueError(f"a field of the wire type {kind}")
        yield key >> 3, value


def _integers(data: memoryview) -> npt.NDArray[np.int64]:
    """Numbers of variable length, one behind the other."""
    parts = [np.zeros(0, np.int64)]
    start = 0
    while start < len(data):
        stop = min(start + _PIECE, len(data))
        longest = min(stop + 10, len(data))
        while stop < longest and data[stop - 1] >= 0x80:
            stop += 1
        parts.append(_piece(data[start:stop]))
        start = stop
    return np.concatenate(parts)


def _piece(data: memoryview) -> npt.NDArray[np.int64]:
    """Numbers of variable length, all at once: it takes 40 times their bytes."""
    flat = np.frombuffer(data, np.uint8)
    is_last = flat < 0x80
    if not is_last[-1]:
        raise ValueError("a number is cut short")
    starts = np.flatnonzero(np.concatenate([[True], is_last[:-1]]))
    places = np.arange(len(flat)) - np.repeat(starts, np.diff(starts, append=len(flat)))
    if places.max() > 9:
        raise ValueError("a number of more than 10 bytes")
    parts = (flat & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)


def _feature(data: memoryview) -> Any:
    """The values of a feature: float32 [n], int64 [n], a list of bytes, or None if it has none."""
    for kind, values in _fields(data):
        fields = [value for number, value in _fields(values) if number == 1]
        if kind == 1:
            return [one.tobytes() for one in fields]
        if kind == 2:  # packed, or each in a field of its own
            return np.frombuffer(b"".join(fields), "<f4").copy()
        if kind == 3:
            parts = [np.zeros(0, np.int64)]
            for one in fields:
                if isinstance(one, int):
                    parts.append(np.array([one & _BITS], np.uint64).view(np.int64))
                else:
                    parts.append(_integers(one))
            return np.concatenate(parts)
    return None


def _entries(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Names and values of a map."""
    for number, entry in _fields(data):
        if number == 1:
            parts = dict(_fields(entry))
            yield str(parts[1], "utf-8"), parts.get(2, memoryview(b""))


def _example(data: memoryview) -> dict[str, tuple[bool, memoryview]]:
    """The features of an Example, or the context and the lists of features of a SequenceExample: by
    name whether it is a list, and its bytes.
    """
    found = dict[str, tuple[bool, memoryview]]()
    for number, part in _fields(data):
        for name, value in _entries(part):
            found[name] = (number == 2, value)
    return found


def _value(is_list: bool, data: memoryview) -> Any:
    if not is_list:
        value = _feature(data)
        if isinstance(value, list) and len(value) == 1:
            return value[0]
        return value
    steps = [_value(False, step) for number, step in _fields(data) if number == 1]
    lengths = {step.shape for step in steps if isinstance(step, np.ndarray)}
    if len(lengths) == 1 and all(isinstance(step, np.ndarray) for step in steps):
        return np.stack(steps)
    return steps


def _features(data: memoryview, names: Sequence[str] | None) -> dict[str, Any]:
    """The values of some features of a record; None: of all.

    Raises:
        FormatError: it is damaged, no Example, or lacks one of them.
    """
    content = data[_HEAD:-_TAIL]
    if not _is_sound(content, int.from_bytes(data[-_TAIL:], "little")):
        raise FormatError("wrong checksum: the file is damaged, copy or write it again")
    try:
        found = _example(content)
        if names is None:
            names = list(found)
        values = {name: _value(*found[name]) for name in names if name in found}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"it is no tf.train.Example ({error})") from error
    for name in names:
        if name not in values:
            raise FormatError(
                f"it has no feature {name!r} (it has {', '.join(found) or 'none'}): choose others "
                "by columns="
            )
    return values


# -- files


class TFRecordColumns(Columns):
    """The features of the records of some files.

    The features that the first records have are the columns. Numbers are float32 [n] and int64
    [n]; a list of one bytes value is that.

    Raises:
        FormatError: see `scanned`.
    """

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self._source = TFRecordSource(paths, files)
        names = self._source.features
        self.names: list[str] = sorted(names)
        self.decoders: dict[str, str] = {name: kind for name, kind in names.items() if kind}

    def __len__(self) -> int:
        return len(self._source)

    def column(self, name: str) -> TFRecordSource:
        return self._source.of([name], True)

    def rows(self, names: Sequence[str]) -> TFRecordSource:
        return self._source.of(names, False)


def _checked_features(path: str, edges: IntArray, names: npt.NDArray[Any]) -> dict[str, str]:
    """The features that the index of a file names.

    Raises:
        FormatError: it is none: it may lie beside the file, where anybody wrote it.
    """
    try:
        features: dict[str, str] = json.loads(bytes(names))
        kinds = set(features.values())
    except (ValueError, AttributeError, TypeError, RecursionError):
        kinds = {"damaged"}
    if not kinds <= {"", *_MAGIC.values()} or not len(edges) or (np.diff(edges) < 0).any():
        raise FormatError(
            f"{redact(path)}: its index is damaged: write it again with headrace.write_index"
        )
    return features


class TFRecordSource(Locatable):
    """The records of some files, one file after the other: dicts of features, or the values of one.

    Args:
        paths, files: local ones absolute, or URLs; and by which they are read.

    Attributes:
        features: of the first records of each file, see `scanned`.

    Raises:
        FormatError: see `scanned`.
    """

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self.files = files
        self._paths = list(paths)
        indices = indices_of(files, self._paths, INDEX)
        self._first = np.cumsum([0, *(len(edges) - 1 for edges, _ in indices)])
        self._starts = SharedArray(np.concatenate([edges[:-1] for edges, _ in indices]))
        self._stops = SharedArray(np.concatenate([edges[1:] for edges, _ in indices]))
        self.features: dict[str, str] = {}
        for path, (edges, names) in zip(self._paths, indices, strict=True):
            for name, kind in _checked_features(path, edges, names).items():
                if kind or name not in self.features:
                    self.features[name] = kind
        self._names: list[str] = []
        self._is_one = False

    def of(self, names: Sequence[str], is_one: bool) -> TFRecordSource:
        """The same records with some of their features; `is_one`: the values of one."""
        source = copy.copy(self)
        source._names = list(names)
        source._is_one = is_one
        return source

    def __len__(self) -> int:
        return int(self._first[-1])

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        rows = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._first, rows, side="right") - 1
        return ByteRanges(self._paths, numbers, self._starts.array[rows], self._stops.array[rows])

    def read(self, indices: Sequence[int]) -> list[Any]:
        views = self.files.read(self.byte_ranges(np.asarray(indices, np.int64)))
        records = [_features(cast(memoryview, view), self._names) for view in views]
        if self._is_one:
            return [record[self._names[0]] for record in records]
        return records

    @property
    def stored_nbytes(self) -> int:
        return int((self._stops.array - self._starts.array).sum())

    @property
    def cut_nbytes(self) -> int:
        return self.stored_nbytes

    def blocks_of(self, nbytes: int) -> IntArray:
        """Number of records that begin in each range of `nbytes` of a file."""
        files = np.repeat(np.arange(len(self._paths)), np.diff(self._first))
        places = self._starts.array // nbytes
        is_first = (np.diff(files, prepend=-1) != 0) | (np.diff(places, prepend=-1) != 0)
        return np.diff(np.flatnonzero(is_first), append=len(files)).astype(np.int64)

    def fingerprint(self) -> str:
        """A hash of the features, the names of the files, and the sizes of the records."""
        names = [posixpath.basename(named_part(path)) for path in self._paths]
        digest = hashlib.blake2b(repr((self._names, names)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self._stops.array - self._starts.array, "<i8").data)
        return digest.hexdigest()

    def location(self, index: int) -> str:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return f"{redact(self._paths[number])}, record {index - int(self._first[number])}"


def is_tfrecord(path: str) -> bool:
    """True if a local file begins with the header of a record."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return len(head) == _HEAD and _is_sound(head[:8], int.from_bytes(head[8:], "little"))


TFRECORD = Format(
    "TFRecord files", (".tfrecord", ".tfrecords"), recognizes=is_tfrecord, open=TFRecordColumns
)
