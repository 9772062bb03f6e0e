"""How do arrays that are too large for memory survive until the next start, and how are they read where they lie?

A file of `cache_dir` (NOTE [ life of a kept file ]) with one long array, which is written a piece at a time and mapped by all processes
that read it, and some short ones. Its head, a line of JSON, holds what it is about, dtypes, sizes, and a checksum of these and of all
that follows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.errors import AccessError
from headrace.io.array_file import UntrustedError, is_ours, make_folder, user_id, written_to
from headrace.io.paths import redact
from headrace.memory.anonymous import up

_log = logging.getLogger(__name__)

HEAD = 4096
"""Bytes before the long array: whole pages, so that it is mapped aligned."""
_FORMAT = "headrace-mapped 2"
_PIECE = 1 << 20
_EARLY = 4 << 20  # bytes that begin their way to the disk while more are made


class MappedArrays:
    """A long array and some short ones, in a file that was checked when it was opened.

    Workers map the file anew where they don't inherit the mapping.

    Args:
        path: of the file.
        head: its first line.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: str, head: bytes) -> None:
        self.path: str = path
        self._head = head
        self._long: npt.NDArray[Any] | None = None
        self._short: list[npt.NDArray[Any]] | None = None

    @property
    def long(self) -> npt.NDArray[Any]:
        """The long array, read-only.

        Raises:
            AccessError: the file is gone, or another one.
        """
        if self._long is None:
            self._map()
        assert self._long is not None
        return self._long

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        """The short arrays, read-only."""
        if self._short is None:
            self._map()
        assert self._short is not None
        return self._short

    def _map(self) -> None:
        try:
            with open(self.path, "rb") as file:
                head = file.read(HEAD).split(b"\n", 1)[0]
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # the latter of an empty file
            said = getattr(error, "strerror", None) or error
            raise AccessError(f"{redact(self.path)}, an index of this dataset, can't be read any more: {said}") from error
        parts = _parts(self._head)
        if head != self._head or len(view) != _size(parts):
            raise AccessError(f"{redact(self.path)} has been replaced since it was opened: open the dataset again")
        arrays, at = [], HEAD
        for dtype, nbytes in parts:
            arrays.append(np.frombuffer(view[at : at + nbytes], dtype))
            at += up(nbytes)
        self._long, self._short = arrays[0], arrays[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_head": self._head, "_long": None, "_short": None}


class MappedFile:
    """Where `MappedArrays` are kept.

    Args:
        cache_dir: the folder.
        kind: of what: one word, part of the file's name.
        about: what tells this file from others of its kind (JSON values); the user is added.
    """

    def __init__(self, cache_dir: str, kind: str, about: dict[str, Any]) -> None:
        meta = json.dumps({**about, "user": user_id()}, sort_keys=True).encode()
        self._about = hashlib.blake2b(meta, digest_size=16).hexdigest()
        self._kind = kind
        self.path: str = os.path.join(os.path.abspath(cache_dir), f"headrace-{kind}-{self._about}.bin")

    def kept(self) -> MappedArrays | None:
        """What `open` gives; None where there is nothing that can be used."""
        try:
            return self.open()
        except FileNotFoundError:
            pass
        except (UntrustedError, OSError) as error:
            _log.info("%s is not used: %s", redact(self.path), error)
        return None

    def open(self) -> MappedArrays:
        """The arrays, after their checksum was compared.

        Raises:
            OSError: there is no such file, or it can't be read.
            UntrustedError: it is not ours, or not whole.
        """
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not is_ours(status):
                raise UntrustedError("it is another user's, or others may write to it")
            head = file.read(HEAD).split(b"\n", 1)[0]
            try:
                said = json.loads(head)
                known = said["format"], said["about"]
                checksum, line = said.pop("checksum"), _line(said)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise UntrustedError("it is damaged, or of another version") from None
            if known != (_FORMAT, self._about):
                raise UntrustedError("it is of another version, or about something else")
            if checksum != _checksum(_checksum_of(file), line) or _size(_parts(head)) != status.st_size:
                raise UntrustedError("it is damaged")
        return MappedArrays(self.path, head)

    @contextlib.contextmanager
    def writing(self, dtype: str) -> Iterator[MappedWriter]:
        """A writer of the long array; the file has its name when the context is left without an error.

        Raises:
            OSError: it can't be written.
        """
        make_folder(os.path.dirname(self.path), f"headrace-{self._kind}-")
        with written_to(self.path) as file, ThreadPoolExecutor(1, "headrace-write-back") as pool:
            writer = MappedWriter(file, dtype, pool)
            yield writer
            writer.finish(self._about)


class MappedWriter:
    """Writes a long array a piece at a time. What is written is on its way to the disk while more is made, so that little is left to be
    waited for at the end.

    Args:
        file: new, and open for reading too.
        dtype: of the long array.
        pool: of a thread that waits for the disk.
    """

    def __init__(self, file: BinaryIO, dtype: str, pool: ThreadPoolExecutor) -> None:
        self._file, self._dtype, self._pool = file, np.dtype(dtype), pool
        self._nbytes, self._crc = 0, 0
        self._short: list[npt.NDArray[Any]] = []
        self._flushed = 0  # bytes that are on their way, or there
        self._flush: Future[None] | None = None
        file.write(b"\0" * HEAD)

    def write(self, values: npt.NDArray[Any]) -> None:
        """The next values of the long array."""
        array = np.ascontiguousarray(values, self._dtype)
        self._put(_bytes_of(array))
        self._nbytes += array.nbytes
        if self._nbytes - self._flushed >= _EARLY and self._flush_ended():
            self._file.flush()
            self._flushed, self._flush = self._nbytes, self._pool.submit(_to_disk, self._file.fileno())

    def _flush_ended(self) -> bool:
        """Has what began to be written been written? Raises where it could not be: the system says so once."""
        if self._flush is not None and self._flush.done():
            self._flush.result()
            self._flush = None
        return self._flush is None

    def _put(self, data: npt.NDArray[np.uint8]) -> None:
        self._file.write(data.data)
        for start in range(0, data.size, _PIECE):
            self._crc = _checksum(self._crc, data[start : start + _PIECE].tobytes())

    def narrow(self, dtype: str) -> None:
        """Rewrites the long array in a smaller dtype, which must hold its values."""
        old, new = self._dtype, np.dtype(dtype)
        count, read, put = self._nbytes // old.itemsize, HEAD, HEAD
        self._file.flush()
        self._dtype, self._nbytes, self._crc, self._flushed = new, 0, 0, 0
        for start in range(0, count, _PIECE):
            wanted = min(_PIECE, count - start) * old.itemsize
            self._file.seek(read)
            piece = np.frombuffer(self._file.read(wanted), old).astype(new)
            self._file.seek(put)
            self.write(piece)
            read, put = read + wanted, put + piece.nbytes
        self._file.seek(put)
        self._file.truncate()

    def short(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """The short arrays, once the long one is through."""
        self._short = [np.ascontiguousarray(array) for array in arrays]
        before = self._nbytes
        for array in self._short:  # each begins aligned
            self._put(np.zeros(up(before) - before, np.uint8))
            self._put(_bytes_of(array))
            before = array.nbytes

    def finish(self, about: str) -> None:
        """Writes the head."""
        if self._flush is not None:
            self._flush.result()
        parts = [[self._dtype.str, self._nbytes], *([array.dtype.str, array.nbytes] for array in self._short)]
        said = {"format": _FORMAT, "about": about, "parts": parts}
        head = _line({**said, "checksum": _checksum(self._crc, _line(said))})
        if len(head) >= HEAD:
            raise ValueError(f"{len(parts)} arrays are too many for one file")
        self._file.seek(0)
        self._file.write(head + b"\n")


def _to_disk(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True).encode()


def _parts(head: bytes) -> list[tuple[np.dtype[Any], int]]:
    """Dtype and bytes of each array."""
    return [(np.dtype(dtype), int(nbytes)) for dtype, nbytes in json.loads(head)["parts"]]


def _size(parts: Sequence[tuple[np.dtype[Any], int]]) -> int:
    """Bytes of a file of such arrays."""
    return HEAD + sum(up(nbytes) for _, nbytes in parts[:-1]) + parts[-1][1]


def _checksum(begin: int, data: bytes) -> int:
    return int(google_crc32c.extend(begin, data))


def _checksum_of(file: Any) -> int:
    """Of all that follows in a file."""
    crc = 0
    while piece := file.read(_PIECE):
        crc = _checksum(crc, piece)
    return crc
