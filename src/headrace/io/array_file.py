"""How do arrays that took long to find out survive until the next start?

NOTE [ life of a kept file ]

* It lies in `cache_dir`, named by a hash of what it is about, which also stands inside. Whether it still holds is for its owner to say.
* It is written under a temporary name, with a checksum, and gets its own name when it is on the disk. One that is damaged, of another
  version, another user's, or that others may write to, is not trusted, and written anew.
* A writer that is killed leaves its temporary file; the next one removes such files an hour later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

ABANDONED_S = 3600
"""A temporary file that has not been written to for so long has no writer any more."""
_PREFIX, _SUFFIX, TEMPORARY = "headrace-", ".bin", ".part"


class UntrustedError(Exception):
    """Why a kept file is not used."""


class KeptArrays:
    """Some arrays in a file of `cache_dir`.

    Args:
        cache_dir: the folder.
        kind: of what: one word, part of the file's name.
        version: of the arrays' meaning.
        about: what tells this file from others of its kind (JSON values); the user is added.
        types: of the arrays.
    """

    def __init__(self, cache_dir: str, kind: str, version: int, about: dict[str, Any], types: Sequence[str]) -> None:
        self._kind, self._version, self._types = kind, version, tuple(types)
        self._meta = json.dumps({**about, "user": user_id()}).encode()
        name = f"{_PREFIX}{kind}-{hashlib.blake2b(self._meta, digest_size=16).hexdigest()}{_SUFFIX}"
        self.path: str = os.path.join(cache_dir, name)

    def read(self) -> list[npt.NDArray[Any]]:
        """The arrays, in this machine's byte order.

        Raises:
            FileNotFoundError, OSError: there is no such file; it can't be read.
            UntrustedError: it is not ours, or not whole.
        """
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not is_ours(status):
                raise UntrustedError("it is another user's, or others may write to it")
            return read_arrays(file, status.st_size, self._magic, self._version, self._meta, self._types)

    def write(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Makes the folder if only that is missing, and the file.

        Raises:
            OSError: it can't be written.
        """
        make_folder(os.path.dirname(self.path), f"{_PREFIX}{self._kind}-")
        with written_to(self.path) as file:
            write_arrays(file, arrays, self._magic, self._version, self._meta, self._types)

    @property
    def _magic(self) -> bytes:
        return f"{_PREFIX}{self._kind}".encode()


def read_arrays(file: BinaryIO, size: int, magic: bytes, version: int, meta: bytes, types: Sequence[str]) -> list[npt.NDArray[Any]]:
    """What `write_arrays` wrote, in this machine's byte order.

    Args:
        file: at its beginning.
        size: its bytes.
        magic, version, meta, types: as they were given to `write_arrays`.

    Raises:
        UntrustedError: it is something else, or not whole.
    """
    head = file.readline(200).split()
    if head[:2] != [magic, b"%d" % version]:
        raise UntrustedError("it is of another version")
    if file.readline(len(meta) + 1) != meta + b"\n":
        raise UntrustedError("it is about something else")
    sizes = _read_array(file, 8 * len(types), "<i8").tolist()
    if min(sizes) < 0 or sum(sizes) != size - file.tell():
        raise UntrustedError("it is damaged")
    arrays = [_read_array(file, nbytes, dtype) for nbytes, dtype in zip(sizes, types, strict=True)]
    if head[2:] != [_digest(meta, arrays)]:
        raise UntrustedError("it is damaged")
    return [array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays]


def write_arrays(file: BinaryIO, arrays: Sequence[npt.NDArray[Any]], magic: bytes, version: int, meta: bytes, types: Sequence[str]) -> None:
    """Writes arrays with a checksum.

    Args:
        file: to be written to.
        arrays: as many as types.
        magic, version: of what they are.
        meta: what they are about, without a line end.
        types: of the arrays.
    """
    stored = [np.ascontiguousarray(array, dtype) for array, dtype in zip(arrays, types, strict=True)]
    file.write(b"%s %d %s\n%s\n" % (magic, version, _digest(meta, stored), meta))
    file.write(np.array([a.nbytes for a in stored], "<i8").tobytes())
    for array in stored:
        file.write(array.data)


def _digest(meta: bytes, arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    digest = hashlib.blake2b(meta, digest_size=16)
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest().encode()


def make_folder(folder: str, prefix: str) -> None:
    """Makes the folder if only that is missing, and removes the temporary files of that prefix whose writers are gone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    with os.scandir(folder) as listing:
        for item in listing:
            if item.name.startswith(prefix) and item.name.endswith(TEMPORARY):
                with contextlib.suppress(OSError):  # another user's, or gone
                    if item.stat(follow_symlinks=False).st_mtime < time.time() - ABANDONED_S:
                        os.unlink(item.path)


def user_id() -> int:
    """Who runs this process."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def is_ours(status: os.stat_result) -> bool:
    """Is it a plain file of this user, which nobody else may write to?"""
    private = not hasattr(os, "geteuid") or (status.st_uid == user_id() and not status.st_mode & 0o022)
    return private and stat.S_ISREG(status.st_mode)


def _read_array(file: BinaryIO, nbytes: int, dtype: str) -> npt.NDArray[Any]:
    array = np.empty(nbytes // np.dtype(dtype).itemsize, dtype)
    if array.nbytes != nbytes or file.readinto(array.view(np.uint8)) != nbytes:  # type: ignore[attr-defined]
        raise UntrustedError("it is damaged")
    return array


@contextlib.contextmanager
def written_to(path: str) -> Iterator[BinaryIO]:
    """A file that has its name, and is on the disk, when all of it was written; only its owner may read it."""
    folder, name = os.path.split(path)
    fd, temporary = tempfile.mkstemp(TEMPORARY, f"{name}.", folder)
    try:
        with open(fd, "wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
