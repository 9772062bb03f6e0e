"""Arrays on disk: written atomically with a checksum, loaded to memory or read by ranges.

NOTE [ life of an array file ]

* It is in `cache_dir`, named by a hash of the key it belongs to, which is also stored inside. Its
  owner decides whether it is still valid.
* Its head, a line of JSON, has this hash, dtypes and sizes, and a checksum of these and of
  the arrays behind it, each aligned. The first array may be long: it is written in
  pieces, and read by ranges.
* It is written under a temporary name and renamed when it is on disk. A file that is damaged, has
  another version, belongs to another user, or is writable by others is not trusted, and written
  again.
* A writer that is killed leaves its temporary file. The next writer removes such files after an
  hour.
* Of several processes that need a missing file at once, one makes it, and the others wait for it
  (`ArrayFile.found_or_built`), by a kernel lock on a byte of another file, which ends with its
  process. A process that waits in vain (for a stopped process, for example) makes the file too.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray, IntArray
from headrace.errors import AccessError, FormatError, HeadraceError, warn
from headrace.io.atomic import TEMPORARY, is_ours, make_folder, user_id, written_to
from headrace.io.files import Files
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray, is_spawning, up
from headrace.memory.processes import HAS_LOCKS, try_lock, unlock

T = TypeVar("T")

_log = logging.getLogger(__name__)

HEAD = 4096
"""Bytes before the first array: a whole page."""
_FORMAT = "headrace-mapped 2"
_PIECE = 1 << 20
_IN_MEMORY = 64 << 20  # bytes of a long array that is not left in the file
_POLL_S = 0.02

Arrays = list[AnyArray]


class UntrustedError(OSError):
    """Why an array file is not used."""


@contextlib.contextmanager
def unkept(folder: str, what: str, instead: str) -> Iterator[None]:
    """A context for writing an array file. If that fails, it warns, and the caller goes on without
    the file. Errors of headrace, which concern the source of the arrays, pass.

    Args:
        folder: the folder of the file.
        what, instead: of the warning: "the table of lines is", and what is done without the file.
    """
    try:
        yield
    except HeadraceError:
        raise
    except OSError as error:
        cause = error.strerror or error
        warn(f"cache_dir={folder!r}: {what} not kept ({cause}), so {instead}")


class ArrayFile:
    """Some arrays in a file of `cache_dir`: see NOTE [ life of an array file ].

    Args:
        cache_dir: the folder.
        kind: one word, part of the file's name.
        about: the key that tells this file from others of its kind (JSON values). The user is
            added.
        version: of the arrays' meaning; another version replaces the file. None: `about` says it.
        types: dtypes of the arrays. Empty: any.
    """

    def __init__(
        self,
        cache_dir: str,
        kind: str,
        about: dict[str, Any],
        version: int | None = None,
        types: Sequence[str] = (),
    ) -> None:
        meta = {**about, "user": user_id()}
        self._kind = kind
        self._about = hash_of(meta if version is None else [meta, version])
        self._types = types
        name = f"headrace-{kind}-{hash_of(meta)}.bin"
        self.path: str = os.path.join(os.path.abspath(cache_dir), name)

    def open(self) -> FileArrays:
        """The arrays, of which the long one stays in the file, after their checksum was compared.

        Raises:
            FileNotFoundError, OSError: there is no such file; it can't be read.
            UntrustedError: it is not ours, or not whole.
        """
        fd = os.open(
            self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        )
        with open(fd, "rb") as file:
            if not is_ours(os.fstat(fd)):
                raise UntrustedError("it is another user's, or others may write to it")
            head = _checked_head(file, self._about, self._types)
            first, *others = _ranges_of(head)
            long = None
            if first[2] - first[1] <= _IN_MEMORY:
                long = _array_at(file, *first)
            return FileArrays(long, [_array_at(file, *one) for one in others], self.path, head)

    def found(self) -> FileArrays | None:
        """The result of `open`, or None if there is no file that can be used."""
        try:
            return self.open()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.info("%s is not used: %s", redact(self.path), error)
            return None

    def found_or_built(self, patience: float, build: Callable[[], T]) -> FileArrays | T:
        """The arrays, or the result of `build`, which runs in one process of this user at a time.

        Args:
            patience: seconds that the file may stay as it is while another process writes it.
            build: makes the arrays, and the file if it can be written.
        """
        found = self.found()
        if found is None:
            with self._one_builder(patience):
                found = self.found()  # another process may have built it meanwhile
                if found is None:
                    return build()
        return found

    @contextlib.contextmanager
    def _one_builder(self, patience: float) -> Iterator[None]:
        folder = os.path.dirname(self.path)
        lock_file = os.path.join(folder, f"headrace-making-{user_id()}.lock")
        key = int(hash_of(self.path)[:7], 16)
        fd = None
        # without permission to write nothing is cached, and nobody waits
        with contextlib.suppress(OSError):
            os.makedirs(folder, 0o700, exist_ok=True)
            if HAS_LOCKS:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(lock_file, flags, 0o600)
        parts = f"{glob.escape(self.path)}.*{TEMPORARY}"
        written: list[int] = []
        end = time.monotonic() + patience
        try:
            with contextlib.suppress(OSError):
                while fd is not None and not try_lock(fd, key) and time.monotonic() < end:
                    now = list(map(os.path.getsize, glob.glob(parts)))
                    if now != written:  # another process writes the file
                        written = now
                        end = time.monotonic() + patience
                    time.sleep(_POLL_S)
            yield
        finally:
            if fd is not None:
                unlock(fd)

    def write(self, arrays: Sequence[AnyArray]) -> None:
        """Writes the file, and creates its folder.

        Raises:
            OSError: it can't be written.
        """
        arrays = _typed(arrays, self._types)
        with self.writing(arrays[0].dtype.str) as writer:
            writer.write(arrays[0])
            writer.short(arrays[1:])

    @contextlib.contextmanager
    def writing(self, dtype: str) -> Iterator[ArrayWriter]:
        """A context with a writer for a long first array. The file gets its name at the end, unless
        there is an error.

        Raises:
            OSError: it can't be written.
        """
        make_folder(os.path.dirname(self.path), f"headrace-{self._kind}-")
        with written_to(self.path) as file:
            writer = ArrayWriter(file, dtype)
            yield writer
            writer.finish(self._about)


def copy_of(
    files: Files,
    path: str,
    about: Sequence[Any],
    cache_dir: str,
    write: Callable[[ArrayWriter], None],
    instead: str,
) -> FileArrays:
    """A copy of a file as plain bytes (uint8) in `cache_dir`. The file is read once, in order. If
    several processes need the copy, one makes it.

    Args:
        files: reads the file.
        path: path or URL of the file.
        about: the kind of the copy, and what else tells it from other copies of the file.
        cache_dir: the folder.
        write: writes the copy.
        instead: what users may do with the file, for messages.

    Raises:
        FormatError: the file is damaged, fetched a second time too.
        AccessError: the file can't be read; `cache_dir` can't be written to; or the server gives
            the file no version that a copy could be named by.
        RemoteError, FileChangedError, DataNotFoundError: see `Files.read`.
    """
    if files.version(path).tag is None:
        raise AccessError(
            f"{redact(path)} is read through a plain copy, and the server gives it neither an ETag "
            "nor a time, so an old copy can't be told from a new one: copy the file to this "
            f"machine, or {instead} where it lies"
        )
    identity = files.identity(path if files.is_remote else os.path.realpath(path))
    cached = ArrayFile(cache_dir, about[0], {"of": [*about[1:], *identity]})

    def copy() -> FileArrays:
        try:
            with cached.writing("u1") as writer:
                write(writer)
            return cached.open()
        except HeadraceError:
            raise
        except OSError as error:
            raise AccessError(
                f"{redact(path)} is read through a plain copy, in {redact(cache_dir)}, which can't "
                f"be made ({error.strerror or error}): pass another cache_dir=, or {instead}"
            ) from error

    def build() -> FileArrays:
        try:
            return copy()
        except FormatError:
            if not files.is_remote:
                raise
        with files.bypassing_cache():  # perhaps the transfer or a cached block was damaged
            return copy()

    return cached.found_or_built(files.patience, build)


def array_bytes(arrays: Sequence[AnyArray], about: str, types: Sequence[str]) -> bytes:
    """The bytes of an array file, to be written next to another file.

    Args:
        arrays: the first may be long.
        about: a hash of what they belong to.
        types: their dtypes.
    """
    file = io.BytesIO()
    arrays = _typed(arrays, types)
    writer = ArrayWriter(file, arrays[0].dtype.str)
    writer.write(arrays[0])
    writer.short(arrays[1:])
    writer.finish(about)
    return file.getvalue()


def arrays_of(data: bytes, about: str, types: Sequence[str]) -> Arrays:
    """The arrays in the bytes that `array_bytes` made.

    Raises:
        UntrustedError: it is something else, or not whole.
    """
    file = io.BytesIO(data)
    return [_array_at(file, *one) for one in _ranges_of(_checked_head(file, about, types))]


class FileArrays:
    """A long array and some short ones, in memory that workers share; a very long one is read from
    its file by ranges.

    Nothing is mapped: a file that is cut short while it is read is an error, not a signal that ends
    the process (SIGBUS). The file was checked when it was opened; a process that
    opens it anew compares its head.

    Args:
        long: the long array; None: it is read by ranges.
        short: the short arrays.
        path: path of the file; "": there is none, so that a pickle contains the arrays.
        head: first line of the file.
        reserved: their reservation in the budget of this process.

    Attributes:
        path: path of the file.
        dtype: dtype of the long array.
        count: number of its elements.
    """

    def __init__(
        self,
        long: AnyArray | None,
        short: Sequence[AnyArray],
        path: str = "",
        head: bytes = b"",
        reserved: object = None,
    ) -> None:
        self.path: str = path
        self._head = head
        self._reserved = reserved
        self._short: list[SharedArray] | None = list(map(SharedArray, short))
        self._long: SharedArray | None = None
        if long is None:
            self.dtype, first, stop = _ranges_of(head)[0]
            self.count: int = (stop - first) // self.dtype.itemsize
        else:
            self._long = SharedArray(long)
            self.dtype = long.dtype
            self.count = len(long)
        self._files = LocalFiles()
        self._compared_in = 0  # the process that has compared the head

    @property
    def long(self) -> AnyArray:
        """The whole long array, read-only.

        Raises:
            AccessError: the file is missing, cut short, or has been replaced.
        """
        if self._long is not None:
            return self._long.array
        return self.read(np.array([0]), np.array([self.count]))

    @property
    def short(self) -> Arrays:
        """The short arrays, read-only.

        Raises:
            AccessError: as `long`.
        """
        if self._short is None:
            others = _ranges_of(self._head)[1:]
            arrays = [self._read(np.array([a]), np.array([b]), dtype) for dtype, a, b in others]
            self._short = list(map(SharedArray, arrays))
        return [short.array for short in self._short]

    def read(self, begins: IntArray, ends: IntArray) -> AnyArray:
        """Elements ``begins[i]`` to ``ends[i] - 1`` of the long array, concatenated, from the file.

        Returns:
            A read-only array of one axis.

        Raises:
            AccessError: as `long`.
        """
        nbytes = self.dtype.itemsize
        return self._read(HEAD + begins * nbytes, HEAD + ends * nbytes, self.dtype)

    def parts(self, begins: IntArray, ends: IntArray) -> Arrays:
        """The same ranges, as one read-only array each."""
        if self._long is not None:
            long = self._long.array
            return [long[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
        joined = self.read(begins, ends)
        edges = np.cumsum(ends - begins).tolist()
        return [joined[begin:end] for begin, end in itertools.pairwise([0, *edges])]

    def rows(self, length: int, numbers: IntArray) -> AnyArray:
        """Rows by number, if the long array consists of rows of `length` elements.

        Returns:
            [len(numbers), length], read-only.

        Raises:
            AccessError: as `long`.
        """
        if self._long is not None:
            long = self._long.array[: self.count // length * length]
            return long.reshape(-1, length).take(numbers, axis=0)
        return self.read(numbers * length, (numbers + 1) * length).reshape(-1, length)

    def _read(self, starts: IntArray, stops: IntArray, dtype: npt.DTypeLike) -> AnyArray:
        """Ranges of bytes of the file, whose head is compared once a process."""
        try:
            if self._compared_in != os.getpid():
                with self._files.opened(self.path) as fd:
                    head = os.pread(fd, HEAD, 0).split(b"\n", 1)[0]
                    is_same = head == self._head and os.fstat(fd).st_size == _ranges_of(head)[-1][2]
                if not is_same:
                    raise AccessError(
                        f"{redact(self.path)} has been replaced since it was opened: open the "
                        "dataset again"
                    )
                self._compared_in = os.getpid()
            joined = self._files.read_joined(ByteRanges.in_file(self.path, starts, stops))
            return np.frombuffer(joined, dtype)
        except OSError as error:
            if isinstance(error, HeadraceError):
                raise
            raise AccessError(
                f"{redact(self.path)}, an index of this dataset, can't be read any more: "
                f"{error.strerror or error}"
            ) from error
        except FormatError as error:
            raise AccessError(f"{error}; open the dataset again") from error

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_files": LocalFiles(), "_compared_in": 0, "_reserved": None}
        if not self.path or is_spawning():
            return state
        return {**state, "_short": None, "_long": None}


class ArrayWriter:
    """Writes a long array in pieces, and short ones behind it.

    Args:
        file: a new file, open for reading too.
        dtype: dtype of the long array.
    """

    def __init__(self, file: BinaryIO, dtype: str) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)
        self._nbytes = 0
        self._crc = 0
        self._short: list[AnyArray] = []
        file.write(b"\0" * HEAD)

    def write(self, values: AnyArray) -> None:
        """Appends values to the long array."""
        self._nbytes += self._put(np.ascontiguousarray(values, self._dtype))

    def _put(self, array: AnyArray) -> int:
        data = array.reshape(-1).view(np.uint8)
        self._file.write(data.data)
        for start in range(0, data.size, _PIECE):
            self._crc = google_crc32c.extend(self._crc, data[start : start + _PIECE].tobytes())
        return data.size

    def narrow(self, dtype: str) -> None:
        """Rewrites the long array in a smaller dtype, which must hold its values."""
        old = self._dtype
        nbytes = self._nbytes
        self._file.flush()
        self._dtype = np.dtype(dtype)
        self._nbytes = 0
        self._crc = 0
        for start in range(0, nbytes, _PIECE):
            self._file.seek(HEAD + start)
            piece = np.frombuffer(self._file.read(min(_PIECE, nbytes - start)), old)
            self._file.seek(HEAD + self._nbytes)
            self.write(piece.astype(self._dtype))
        self._file.seek(HEAD + self._nbytes)
        self._file.truncate()

    def short(self, arrays: Sequence[AnyArray]) -> None:
        """Writes the short arrays, after the long one."""
        self._short = [np.ascontiguousarray(array) for array in arrays]
        before = self._nbytes
        for array in self._short:  # each begins aligned
            self._put(np.zeros(up(before) - before, np.uint8))
            before = self._put(array)

    def finish(self, about: str) -> None:
        """Writes the head."""
        short = [[array.dtype.str, array.nbytes] for array in self._short]
        parts = [[self._dtype.str, self._nbytes], *short]
        said = {"format": _FORMAT, "about": about, "parts": parts}
        head = _line({**said, "checksum": google_crc32c.extend(self._crc, _line(said))})
        if len(head) >= HEAD:
            raise ValueError(f"{len(parts)} arrays are too many for one file")
        self._file.seek(0)
        self._file.write(head + b"\n")


def _typed(arrays: Sequence[AnyArray], types: Sequence[str]) -> Arrays:
    if not types:
        return list(arrays)
    return [np.ascontiguousarray(array, dtype) for array, dtype in zip(arrays, types, strict=True)]


def hash_of(about: Any) -> str:
    """A hash of JSON values."""
    return hashlib.blake2b(_line(about), digest_size=16).hexdigest()


def _line(said: Any) -> bytes:
    return json.dumps(said, sort_keys=True).encode()


def _ranges_of(head: bytes) -> list[tuple[np.dtype[Any], int, int]]:
    """Dtype, first byte and end of each array in the file."""
    ranges = []
    start = HEAD
    for dtype, nbytes in json.loads(head)["parts"]:
        ranges.append((np.dtype(dtype), start, start + nbytes))
        start += up(nbytes)
    return ranges


def _array_at(file: BinaryIO, dtype: np.dtype[Any], start: int, stop: int) -> AnyArray:
    file.seek(start)
    data = file.read(stop - start)
    if len(data) < stop - start:
        raise UntrustedError("it is damaged")
    return np.frombuffer(data, dtype)


def _checked_head(file: BinaryIO, about: str, types: Sequence[str]) -> bytes:
    """The first line of a file, if it and the checksum of all bytes behind it are right."""
    head = file.read(HEAD).split(b"\n", 1)[0]
    try:
        said = json.loads(head)
        known = said["format"], said["about"]
        checksum = said.pop("checksum")
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        raise UntrustedError("it is damaged, or of another version") from None
    if known != (_FORMAT, about):
        raise UntrustedError("it is of another version, or about something else")
    crc = 0
    size = HEAD
    while piece := file.read(_PIECE):
        crc = google_crc32c.extend(crc, piece)
        size += len(piece)
    # what else the head says may be damaged until here
    if checksum != google_crc32c.extend(crc, _line(said)) or _ranges_of(head)[-1][2] != size:
        raise UntrustedError("it is damaged")
    wanted = list(map(np.dtype, types))
    if wanted and [dtype for dtype, _, _ in _ranges_of(head)] != wanted:
        raise UntrustedError("it is damaged")
    return head
