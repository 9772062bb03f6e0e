"""Reads and writes .mill files: rows of arrays, each column by itself."""

import json
import os
import struct

import numpy as np

from headrace.dtypes import ArraySpec
from headrace.formats.registry import Format
from headrace.formats.source import Columns, Locatable, RowSource
from headrace.io.ranges import ByteRanges


class MillColumn(RowSource, Locatable):
    """The rows of one column of several files."""

    def __init__(self, paths, files, headers, name):
        self.files, self.paths, self.name = files, list(paths), name
        columns = [header["columns"][name] for header in headers]
        self._spec = ArraySpec(tuple(columns[0]["shape"]), np.dtype(columns[0]["dtype"]))
        self._starts = np.array([column["start"] for column in columns])
        self._first = np.cumsum([0] + [header["rows"] for header in headers])

    array_spec = property(lambda self: self._spec)
    stored_nbytes = property(lambda self: len(self) * self._spec.nbytes)

    def __len__(self):
        return int(self._first[-1])

    def byte_ranges(self, indices):
        indices = np.asarray(indices, np.int64)
        file = np.searchsorted(self._first, indices, side="right") - 1
        start = self._starts[file] + (indices - self._first[file]) * self._spec.nbytes
        return ByteRanges(self.paths, file, start, start + self._spec.nbytes)

    def read(self, indices):
        read = self.files.read_each(self.byte_ranges(indices))
        rows = [np.frombuffer(data, self._spec.dtype) for data in read]
        return [row.reshape(self._spec.shape).copy() for row in rows]

    def location(self, index):
        file = int(np.searchsorted(self._first, index, side="right")) - 1
        return f"{self.paths[file]}, row {index - self._first[file]}"

    def fingerprint(self):
        return f"mill:{self.name}:{len(self)}:{self._spec.dtype}:{self._spec.shape}"


class MillColumns(Columns):
    """Opened .mill files."""

    def __init__(self, paths, files):
        self.paths, self.files = paths, files
        self.headers = [self._header(path) for path in paths]
        self.names = list(self.headers[0]["columns"])

    def _header(self, path):
        start = bytes(self.files.read_each(ByteRanges.of([(path, 0, 8)]))[0])
        (length,) = struct.unpack("<4xI", start)
        return json.loads(self.files.read_each(ByteRanges.of([(path, 8, 8 + length)]))[0])

    def __len__(self):
        return sum(header["rows"] for header in self.headers)

    def column(self, name):
        return MillColumn(self.paths, self.files, self.headers, name)


def is_mill(path):
    """True if a local path is a file that begins as .mill files do."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"MILL"


FORMAT = Format("mill files", (".mill",), recognizes=is_mill, open=MillColumns)


def write_mill(path, columns):
    """Writes arrays [rows, ...] of equal length."""
    start, header = 8 + 4096, {}
    for name, array in columns.items():
        header[name] = {"dtype": str(array.dtype), "shape": array.shape[1:], "start": start}
        start += array.nbytes
    text = json.dumps({"rows": len(array), "columns": header}).encode().ljust(4096)
    with open(path, "wb") as file:
        file.write(struct.pack("<4sI", b"MILL", len(text)) + text)
        for array in columns.values():
            file.write(array.tobytes())
