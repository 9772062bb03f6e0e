"""Arrays on disk: written atomically with a checksum, loaded to memory or read by ranges.

NOTE [ life of an array file ]

* It is in `cache_dir`, named by a hash of the key it belongs to, which is also stored inside. Its
  owner decides whether it is still valid.
* Its head, a line of JSON, has this hash, dtypes and sizes, and a checksum of these and of
  everything that follows: the arrays, each aligned. The first array may be long: it is written in
  pieces, and read by ranges.
* It is written under a temporary name and renamed when it is on disk. A file that is damaged, has
  another version, belongs to another user, or is writable by others is not trusted, and written
  again.
* A writer that is killed leaves its temporary file. The next writer removes such files after an
  hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import AccessError, FormatError, HeadraceError, warn
from headrace.io.atomic import is_ours, make_folder, user_id, written_to
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray, is_spawning, up

T = TypeVar("T")

_log = logging.getLogger(__name__)

HEAD = 4096
"""Bytes before the first array: a whole page."""
_FORMAT = "headrace-mapped 2"
_PIECE = 1 << 20
_IN_MEMORY = 64 << 20  # bytes of a long array that is not left in the file

Arrays = list[npt.NDArray[Any]]


class UntrustedError(Exception):
    """Why an array file is not used."""


class Unkept:
    """A context in which an array file is made: if the system or the file's own check is in the
    way, it warns, and what follows the context does without the file. Headrace's errors, which are
    of what the arrays are made of, pass.

    Args:
        folder: of the file.
        what, instead: of the warning: "the table of lines is", and what is done without the file.
    """

    def __init__(self, folder: str, what: str, instead: str) -> None:
        self._folder = folder
        self._what = what
        self._instead = instead

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, HeadraceError) or not isinstance(error, OSError | UntrustedError):
            return False
        cause = getattr(error, "strerror", None) or error
        warn(f"cache_dir={self._folder!r}: {self._what} not kept ({cause}), so {self._instead}")
        return True


class Contents(NamedTuple):
    """What a file must hold to be used.

    Attributes:
        meta: what it is about.
        kind: of what: one word.
        version: of the arrays' meaning, where `meta` does not say; None: it does.
        types: dtypes of the arrays; none: whatever the file says.
    """

    meta: bytes
    kind: str
    version: int | None = None
    types: Sequence[str] = ()

    @property
    def about(self) -> str:
        """The hash that stands in the file."""
        return _hash(self.meta if self.version is None else self.meta + b" %d" % self.version)


class ArrayFile:
    """Some arrays in a file of `cache_dir`: see NOTE [ life of an array file ].

    Args:
        cache_dir: the folder.
        kind: of what: one word, part of the file's name.
        about: what tells this file from others of its kind (JSON values); the user is added.
        version: of the arrays' meaning, so that another version takes the file's place; None:
            `about` says it.
        types: dtypes of the arrays; none: whatever was written.
    """

    def __init__(
        self,
        cache_dir: str,
        kind: str,
        about: dict[str, Any],
        version: int | None = None,
        types: Sequence[str] = (),
    ) -> None:
        meta = json.dumps({**about, "user": user_id()}, sort_keys=True).encode()
        self._contents = Contents(meta, kind, version, types)
        self.path: str = os.path.join(
            os.path.abspath(cache_dir), f"{_prefix(kind)}{_hash(meta)}.bin"
        )

    def load(self) -> Arrays:
        """The arrays, in memory and in this machine's byte order.

        Raises:
            FileNotFoundError, OSError: there is no such file; it can't be read.
            UntrustedError: it is not ours, or not whole.
        """
        with self._opened() as (file, size):
            return load_arrays(file, size, self._contents)

    def open(self) -> FileArrays:
        """The arrays, of which the long one stays in the file, after their checksum was compared.

        Raises:
            OSError, UntrustedError: as `load`.
        """
        with self._opened() as (file, size):
            head = _known_head(file.read(HEAD), self._contents)
            crc = 0
            while piece := file.read(_PIECE):
                crc = _checksum(crc, piece)
            _compare(head, crc, size, self._contents)
            first, *others = _ranges_of(head)
            long = _array_at(file, *first) if first[2] - first[1] <= _IN_MEMORY else None
            return FileArrays(self.path, head, [_array_at(file, *one) for one in others], long)

    def found(self) -> FileArrays | None:
        """What `open` gives; None where there is nothing that can be used."""
        return self._usable(self.open)

    def loaded(self) -> Arrays | None:
        """What `load` gives; None where there is nothing that can be used."""
        return self._usable(self.load)

    def _usable(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except FileNotFoundError:
            return None
        except (UntrustedError, OSError) as error:
            _log.info("%s is not used: %s", redact(self.path), error)
            return None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO, int]]:
        fd = os.open(
            self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        )
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not is_ours(status):
                raise UntrustedError("it is another user's, or others may write to it")
            yield file, status.st_size

    def write(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Makes the folder and the file.

        Raises:
            OSError: it can't be written.
        """
        arrays = _typed(arrays, self._contents.types)
        with self.writing(arrays[0].dtype.str) as writer:
            writer.write(arrays[0])
            writer.short(arrays[1:])

    @contextlib.contextmanager
    def writing(self, dtype: str) -> Iterator[ArrayWriter]:
        """A writer of a long first array; the file has its name when the context is left without an
        error.

        Raises:
            OSError: it can't be written.
        """
        make_folder(os.path.dirname(self.path), f"headrace-{self._contents.kind}-")
        with written_to(self.path) as file:
            writer = ArrayWriter(file, dtype)
            yield writer
            writer.finish(self._contents.about)


def array_bytes(arrays: Sequence[npt.NDArray[Any]], contents: Contents) -> bytes:
    """The same file as bytes, to be put beside other files."""
    file = io.BytesIO()
    arrays = _typed(arrays, contents.types)
    writer = ArrayWriter(file, arrays[0].dtype.str)
    writer.write(arrays[0])
    writer.short(arrays[1:])
    writer.finish(contents.about)
    return file.getvalue()


def load_arrays(file: BinaryIO, size: int, contents: Contents) -> Arrays:
    """The arrays of a file, in memory and in this machine's byte order.

    Args:
        file: at its beginning.
        size: its bytes.
        contents: what it must hold.

    Raises:
        UntrustedError: it is something else, or not whole.
    """
    first = file.read(HEAD)
    head = _known_head(first, contents)
    body = bytearray(max(0, size - HEAD))
    if file.readinto(body) != len(body):  # type: ignore[attr-defined]
        raise UntrustedError("it is damaged")
    crc = 0
    for start in range(0, len(body), _PIECE):
        crc = _checksum(crc, bytes(body[start : start + _PIECE]))
    _compare(head, crc, size, contents)
    arrays = _split(memoryview(body), head)
    return [array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays]


class FileArrays:
    """A long array, read from its file by ranges, and some short ones, in memory that workers
    share.

    A long array of few bytes is in memory too. Nothing is mapped: if somebody cuts the file short
    while it is read, that is an error, and no signal that ends the process (SIGBUS). The file was
    checked when it was opened; a process that opens it anew compares its head.

    Args:
        path: of the file.
        head: its first line.
        short: the short arrays; None: they are read at first use.
        long: the long array; None: it is read by ranges.

    Attributes:
        path: of the file.
        dtype: of the long array.
        count: its elements.
    """

    def __init__(
        self, path: str, head: bytes, short: Arrays | None, long: npt.NDArray[Any] | None
    ) -> None:
        self.path: str = path
        self._head = head
        self.dtype, nbytes = _parts(head)[0]
        self.count: int = nbytes // self.dtype.itemsize
        self._short = None if short is None else list(map(SharedArray, short))
        self._long = None if long is None else SharedArray(long)
        self._files = LocalFiles()
        self._compared_in = 0  # the process that has compared the head

    @property
    def long(self) -> npt.NDArray[Any]:
        """The whole long array, read-only.

        Raises:
            AccessError: the file is gone, cut short, or another one.
        """
        return (
            self._long.array
            if self._long is not None
            else self.read(np.array([0]), np.array([self.count]))
        )

    @property
    def short(self) -> Arrays:
        """The short arrays, read-only.

        Raises:
            AccessError: as `long`.
        """
        if self._short is None:
            with self._reading():
                self._short = list(map(SharedArray, self._read_short()))
        return [short.array for short in self._short]

    def read(self, begins: IntArray, ends: IntArray) -> npt.NDArray[Any]:
        """Elements ``begins[i]`` to ``ends[i] - 1`` of the long array, one range behind the other.

        Returns:
            A read-only array of one axis.

        Raises:
            AccessError: as `long`.
        """
        return self._read(begins * self.dtype.itemsize, ends * self.dtype.itemsize, self.dtype)

    def parts(self, begins: IntArray, ends: IntArray) -> Arrays:
        """The same ranges as an array each, read-only."""
        if self._long is not None:
            return parts_of(self._long.array, begins, ends)
        joined = self.read(begins, ends)
        edges = np.cumsum(ends - begins).tolist()
        return [joined[begin:end] for begin, end in itertools.pairwise([0, *edges])]

    def rows(self, dtype: npt.DTypeLike, length: int, numbers: IntArray) -> npt.NDArray[Any]:
        """Rows by number, where the bytes of the long array are rows of so many elements.

        Returns:
            [len(numbers), length] of `dtype`, read-only.

        Raises:
            AccessError: as `long`.
        """
        if self._long is not None:
            return rows_of(self._long.array, dtype, length, numbers)
        nbytes = np.dtype(dtype).itemsize * length
        return self._read(numbers * nbytes, (numbers + 1) * nbytes, dtype).reshape(-1, length)

    def _read(self, begins: IntArray, ends: IntArray, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        ranges = ByteRanges.in_file(self.path, HEAD + begins, HEAD + ends)
        with self._reading():
            return np.frombuffer(self._files.read_joined(ranges), dtype)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Compares the head, once a process; errors name the file."""
        try:
            if self._compared_in != os.getpid():
                with self._files.opened(self.path) as fd:
                    head = os.pread(fd, HEAD, 0).split(b"\n", 1)[0]
                    size = os.fstat(fd).st_size
                if head != self._head or size != _size(_parts(self._head)):
                    raise AccessError(
                        f"{redact(self.path)} has been replaced since it was opened: open the "
                        "dataset again"
                    )
                self._compared_in = os.getpid()
            yield
        except OSError as error:
            if isinstance(error, HeadraceError):
                raise
            message = (
                f"{redact(self.path)}, an index of this dataset, can't be read any more: "
                f"{error.strerror or error}"
            )
            raise AccessError(message) from error
        except FormatError as error:
            raise AccessError(f"{error}; open the dataset again") from error

    def _read_short(self) -> Arrays:
        ranges = _ranges_of(self._head)[1:]
        data = self._files.read_each(
            ByteRanges.of((self.path, start, stop) for _, start, stop in ranges)
        )
        return [np.frombuffer(one, dtype) for one, (dtype, _, _) in zip(data, ranges, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_files": LocalFiles(), "_compared_in": 0}
        return state if is_spawning() else {**state, "_short": None, "_long": None}


def parts_of(long: npt.NDArray[Any], begins: IntArray, ends: IntArray) -> Arrays:
    """Views of ranges of an array."""
    return [long[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def rows_of(
    long: npt.NDArray[Any], dtype: npt.DTypeLike, length: int, numbers: IntArray
) -> npt.NDArray[Any]:
    """See `FileArrays.rows`."""
    elements = long.view(dtype)
    return elements[: len(elements) // length * length].reshape(-1, length).take(numbers, axis=0)


class ArrayWriter:
    """Writes a long array a piece at a time, and short ones behind it.

    Args:
        file: new, and open for reading too.
        dtype: of the long array.
    """

    def __init__(self, file: BinaryIO, dtype: str) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)
        self._nbytes = 0
        self._crc = 0
        self._short: list[npt.NDArray[Any]] = []
        file.write(b"\0" * HEAD)

    def write(self, values: npt.NDArray[Any]) -> None:
        """The next values of the long array."""
        array = np.ascontiguousarray(values, self._dtype)
        self._put(_bytes_of(array))
        self._nbytes += array.nbytes

    def _put(self, data: npt.NDArray[np.uint8]) -> None:
        self._file.write(data.data)
        for start in range(0, data.size, _PIECE):
            self._crc = _checksum(self._crc, data[start : start + _PIECE].tobytes())

    def narrow(self, dtype: str) -> None:
        """Rewrites the long array in a smaller dtype, which must hold its values."""
        old = self._dtype
        new = np.dtype(dtype)
        count = self._nbytes // old.itemsize
        read = HEAD
        put = HEAD
        self._file.flush()
        self._dtype = new
        self._nbytes = 0
        self._crc = 0
        for start in range(0, count, _PIECE):
            wanted = min(_PIECE, count - start) * old.itemsize
            self._file.seek(read)
            piece = np.frombuffer(self._file.read(wanted), old).astype(new)
            self._file.seek(put)
            self.write(piece)
            read = read + wanted
            put = put + piece.nbytes
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
        parts = [
            [self._dtype.str, self._nbytes],
            *([array.dtype.str, array.nbytes] for array in self._short),
        ]
        said = {"format": _FORMAT, "about": about, "parts": parts}
        head = _line({**said, "checksum": _checksum(self._crc, _line(said))})
        if len(head) >= HEAD:
            raise ValueError(f"{len(parts)} arrays are too many for one file")
        self._file.seek(0)
        self._file.write(head + b"\n")


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _typed(arrays: Sequence[npt.NDArray[Any]], types: Sequence[str]) -> Arrays:
    dtypes = list(map(np.dtype, types)) if types else [array.dtype for array in arrays]
    return [np.ascontiguousarray(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _prefix(kind: str) -> str:
    return f"headrace-{kind}-"


def _hash(meta: bytes) -> str:
    return hashlib.blake2b(meta, digest_size=16).hexdigest()


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True).encode()


def _parts(head: bytes) -> list[tuple[np.dtype[Any], int]]:
    """Dtype and bytes of each array."""
    return [(np.dtype(dtype), int(nbytes)) for dtype, nbytes in json.loads(head)["parts"]]


def _size(parts: Sequence[tuple[np.dtype[Any], int]]) -> int:
    """Bytes of a file of such arrays."""
    return HEAD + sum(up(nbytes) for _, nbytes in parts[:-1]) + parts[-1][1]


def _ranges_of(head: bytes) -> list[tuple[np.dtype[Any], int, int]]:
    """Dtype, first byte and end of each array in the file."""
    ranges = []
    start = HEAD
    for dtype, nbytes in _parts(head):
        ranges.append((dtype, start, start + nbytes))
        start += up(nbytes)
    return ranges


def _array_at(file: BinaryIO, dtype: np.dtype[Any], start: int, stop: int) -> npt.NDArray[Any]:
    file.seek(start)
    data = file.read(stop - start)
    if len(data) < stop - start:
        raise UntrustedError("it is damaged")
    return np.frombuffer(data, dtype)


def _known_head(first: bytes, contents: Contents) -> bytes:
    """The head line of a file that begins so. What else it says may be damaged, until it is
    compared with the checksum.
    """
    head = first.split(b"\n", 1)[0]
    try:
        said = json.loads(head)
        known = said["format"], said["about"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UntrustedError("it is damaged, or of another version") from None
    if known != (_FORMAT, contents.about):
        raise UntrustedError("it is of another version, or about something else")
    return head


def _compare(head: bytes, crc: int, size: int, contents: Contents) -> None:
    """Compares a head with the checksum of what follows it, and, since it is right then, with the
    file's bytes and the dtypes that are wanted.
    """
    said = json.loads(head)
    if said.pop("checksum", None) != _checksum(crc, _line(said)):
        raise UntrustedError("it is damaged")
    parts = _parts(head)
    wanted = [np.dtype(dtype) for dtype in contents.types]
    if _size(parts) != size or (wanted and [dtype for dtype, _ in parts] != wanted):
        raise UntrustedError("it is damaged")


def _split(body: memoryview, head: bytes) -> Arrays:
    """The arrays out of what follows the head."""
    arrays = Arrays()
    at = 0
    for dtype, nbytes in _parts(head):
        arrays.append(np.frombuffer(body[at : at + nbytes], dtype))
        at += up(nbytes)
    return arrays


def _checksum(begin: int, data: bytes) -> int:
    return int(google_crc32c.extend(begin, data))
