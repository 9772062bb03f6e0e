"""Locates the members of zip files, so that they are read by ranges."""

from __future__ import annotations

import zipfile

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.files import Files, HeldBytes
from headrace.io.library_errors import asking
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges

_TAIL = 64 << 10  # bytes at the end of a file that are read first
_HEAD = 30


def members_of(path: str, files: Files) -> tuple[list[zipfile.ZipInfo], IntArray]:
    """The members of a zip file, and the byte that the content of each begins at.

    The directory at the end of the file tells where a member's head begins, and not how long that
    head is. If the members follow one another without gaps, as nearly always, the next one's
    beginning tells; other heads are read.

    Raises:
        FormatError: it is no zip file, or damaged.
        DataNotFoundError, AccessError, RemoteError: see `Files.version`.
    """
    size = files.version(path).size

    def read(start: int, stop: int) -> bytes:  # zipfile looks for the comment by `rfind`
        return files.read_joined(ByteRanges.of([(path, start, stop)]))

    tail = max(0, size - _TAIL)
    file = HeldBytes(size, [(tail, read(tail, size))], read)
    with asking("zipfile", redact(path)), zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        end = archive.start_dir
    for info in infos:
        if not 0 <= info.header_offset <= size - info.compress_size:
            raise FormatError(
                f"{redact(path)} is damaged: {info.filename!r} would lie beyond its {size:,} bytes"
            )
    heads: IntArray = np.array([info.header_offset for info in infos], np.int64)
    edges = np.append(np.sort(heads), end)
    following = edges[np.searchsorted(edges, heads, side="right").clip(max=len(heads))]
    begins = heads + _HEAD
    for number, info in enumerate(infos):
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        begins[number] += len(name) + len(info.extra)
        if info.flag_bits & 8 or begins[number] + info.compress_size != following[number]:
            begins[number] = -1
    unknown = np.flatnonzero(begins < 0)
    starts = heads[unknown]
    found = files.read(ByteRanges.in_file(path, starts, starts + _HEAD))
    for number, data in zip(unknown.tolist(), found, strict=True):
        head = bytes(data or b"")
        if head[:4] != b"PK\x03\x04":
            raise FormatError(
                f"{redact(path)} is damaged: {infos[number].filename!r} does not begin where it "
                "should"
            )
        begins[number] = heads[number] + _HEAD + int(np.frombuffer(head[26:30], "<u2").sum())
    return infos, begins
