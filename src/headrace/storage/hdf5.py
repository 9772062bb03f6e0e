"""How is a sample read that is a row of an HDF5 file?

Rows of fixed shape, and the flat bytes with offsets that `headrace.pack` writes. A contiguous layout is read with `pread` at the
offset that HDF5 names: no lock, fork-safe. Everything else goes through h5py, opened once in each process; `direct=False` takes
that path for everything, and gives the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError, HeadraceError, MissingNameError
from headrace.memory.anonymous import SharedArray
from headrace.storage.handles import WorkerHandle
from headrace.storage.names import PackedNames
from headrace.storage.paths import is_url, redact
from headrace.storage.source import Source

SIGNATURE = b"\x89HDF\r\n\x1a\n"
BLOCK_BYTES = 2 << 20
"""Layouts without chunks are cut into blocks of about so many bytes: a long read, and still hundreds of them stay below 2 GiB."""

PACKED_VERSION = 1
PACKED_ATTRIBUTE = "headrace"  # root attribute of a packed file: the JSON text of a PackedInfo
PACKED_CHECKSUM = "headrace_crc32"  # root attribute: the CRC of that text (HDF5 has none for texts beyond 64 kB)
DATA, OFFSETS, TARGETS, CRC, NAMES, NAME_OFFSETS = "data", "offsets", "targets", "crc32", "names", "name_offsets"


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """What a file that `headrace.pack` wrote says about itself.

    Attributes:
        kind: "image", or "array" where the samples are arrays of any kind.
        store: "encoded" (flat bytes and offsets) or "decoded" (one row a sample).
        count: number of samples.
        fingerprint: of the dataset that was packed.
        classes: class names, or None.
        image: for images: their `image_size` and `color` when decoded.
        checksums: CRCs of the datasets beside the samples (offsets, names, targets), by name.
        version: of this layout.
    """

    kind: str
    store: str
    count: int
    fingerprint: str
    classes: list[str] | None = None
    image: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    version: int = PACKED_VERSION


def is_hdf5(path: str | os.PathLike[Any]) -> bool:
    """Does the file begin as HDF5 files do?"""
    try:
        with open(path, "rb") as file:
            return file.read(len(SIGNATURE)) == SIGNATURE
    except OSError:
        return False


def refuse_remote_hdf5(path: Any) -> None:
    """Raises a ConfigError for a URL of an HDF5 file: they are read from local disks by now."""
    if is_url(path) and str(path).partition("?")[0].lower().endswith((".h5", ".hdf5", ".he5")):
        raise ConfigError(f"{redact(path)}: HDF5 files are read from local disks only by now: copy it, or mount the bucket")


def open_hdf5(path: str) -> h5py.File:
    """The file, opened for reading without HDF5's file locks.

    Raises:
        DataNotFoundError, AccessError, FormatError: not there; not readable for this user; no (whole) HDF5 file.
    """
    try:
        return h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})") from error
    except PermissionError as error:
        raise AccessError(f"{redact(path)}: this user may not read the file") from error
    except OSError as error:
        if "flag values don't match" in str(error):
            raise AccessError(f"{redact(path)} is open for writing in this process: close it first") from error
        cause = " ".join(str(error).split())
        raise FormatError(f"{redact(path)} is no HDF5 file, or not a whole one: {cause}") from error


@contextlib.contextmanager
def reading_hdf5(path: str) -> Iterator[h5py.File]:
    """The file, open for reading: whatever h5py raises becomes an error that names the file.

    Raises:
        DataNotFoundError, AccessError, FormatError: as `open_hdf5`; also a FormatError for what is damaged inside.
    """
    with open_hdf5(path) as file:
        try:
            yield file
        except HeadraceError:
            raise
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:  # whatever h5py makes of it
            raise FormatError(f"{redact(path)} is damaged, or holds what h5py can't read: {error}") from error


def packed_info(path: str | os.PathLike[Any]) -> PackedInfo | None:
    """What a packed file says about itself; None for any other HDF5 file.

    Raises:
        FormatError: the file is of a later version of headrace, or damaged.
    """
    with reading_hdf5(os.fspath(path)) as file:
        text, checksum = file.attrs.get(PACKED_ATTRIBUTE), file.attrs.get(PACKED_CHECKSUM)
    if text is None:
        return None
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
        if checksum is not None and zlib.crc32(data) != int(checksum):
            raise ValueError("wrong checksum")
        said = json.loads(data)
        if said["version"] > PACKED_VERSION:
            raise FormatError(
                f"{redact(path)} was packed by a later headrace (layout {said['version']}, this one reads up to "
                f"{PACKED_VERSION}): upgrade headrace, or pack again"
            )
        return PackedInfo(**said)
    except FormatError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{redact(path)}: the attribute {PACKED_ATTRIBUTE!r} is damaged: {error}") from error


class HDF5Source(Source):
    """Rows of one dataset of an HDF5 file, or the samples of a packed file.

    Records are arrays of one row (its shape and dtype), or 1-D uint8 arrays where a packed file holds encoded samples. Samples of
    packed files are checked against their CRC.

    Args:
        path: a local file.
        name: dataset inside the file.
        direct: read contiguous layouts with `pread`; False: through h5py alone.

    Raises:
        MissingNameError: no dataset of that name; the message lists those there are.
        FormatError: a dtype that has no fixed size, or a file that is shorter than it says.
    """

    def __init__(self, path: str | os.PathLike[Any], name: str = DATA, *, direct: bool = True) -> None:
        self.path, self.name = os.path.abspath(os.path.expanduser(os.fspath(path))), name
        self.info = packed_info(self.path)
        packed = self.info if name == DATA else None
        self._offsets: SharedArray | None = None
        self._crc: SharedArray | None = None
        self.names: PackedNames | None = None
        with reading_hdf5(self.path) as file:
            dataset = dataset_named(file, name, self.path)
            self.shape, self.dtype = tuple(dataset.shape), dataset.dtype
            if not self.shape:
                raise FormatError(f"{redact(self.path)}: {name!r} is a single value, it has no axis of samples")
            if self.dtype.hasobject or self.dtype.kind not in "biufc":
                raise FormatError(f"{redact(self.path)}: {name!r} holds {self.dtype}; only numbers are read by now")
            self._chunks = dataset.chunks
            self._direct_at = plain_offset(dataset) if direct else None
            if packed is not None:
                self._read_index(file, packed)
        size = os.path.getsize(self.path)
        if self._direct_at is not None and size < self._direct_at + self._row_bytes * self.shape[0]:
            raise FormatError(f"{redact(self.path)} is cut short: {size:,} bytes are not enough for {name!r}")
        self._fd = WorkerHandle(functools.partial(os.open, self.path, os.O_RDONLY), os.close)
        self._file = WorkerHandle(functools.partial(open_hdf5, self.path))

    def _read_index(self, file: h5py.File, packed: PackedInfo) -> None:
        """Offsets, checksums and names of a packed file, which must fit each other."""
        if packed.store == "encoded":
            self._offsets = SharedArray(self._column(file, OFFSETS).astype(np.int64, copy=False))
        self._crc = SharedArray(self._column(file, CRC)) if CRC in file else None
        ends: list[tuple[str, npt.NDArray[Any], int]] = []
        if self._offsets is not None:
            ends.append((OFFSETS, self._offsets.array, self.shape[0]))
        if NAMES in file:
            self.names = PackedNames.from_arrays(self._column(file, NAMES), self._column(file, NAME_OFFSETS))
            ends.append((NAME_OFFSETS, self.names.arrays[1], len(self.names.arrays[0])))
        wrong = [name for name, offsets, end in ends if not are_offsets(offsets, packed.count, end)]
        if self._offsets is None and self.shape[0] != packed.count:
            wrong.append(DATA)
        if self._crc is not None and self._crc.array.shape != (packed.count,):
            wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{redact(self.path)} is damaged: {', '.join(wrong)} don't fit the {packed.count:,} samples it should hold: pack it again"
            )

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        column = np.asarray(dataset_named(file, name, self.path))
        expected = self.info.checksums.get(name) if self.info is not None else None
        if expected is not None and crc_of(column) != expected:
            raise FormatError(f"{redact(self.path)}: {name!r} has a wrong checksum, the file is damaged: pack it again")
        return column

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * int(self.dtype.itemsize)

    @property
    def is_direct(self) -> bool:
        """Are samples read with `pread`?"""
        return self._direct_at is not None

    @property
    def has_checksums(self) -> bool:
        """Is each sample checked when it is read?"""
        return self._crc is not None

    def close(self) -> None:
        """Close what this process has open; the next `read` opens again."""
        self._fd.close()
        self._file.close()

    def __len__(self) -> int:
        return int(self.shape[0]) if self._offsets is None else len(self._offsets) - 1

    def read(self, indices: Sequence[int]) -> list[npt.NDArray[Any]]:
        return [self._checked(i, self._read_one(i)) for i in indices]

    def _span(self, index: int) -> tuple[int, int]:
        """First and last-plus-one row of a sample."""
        if self._offsets is None:
            return index, index + 1
        return int(self._offsets.array[index]), int(self._offsets.array[index + 1])

    def _read_one(self, index: int) -> npt.NDArray[Any]:
        start, stop = self._span(index)
        shape = (stop - start, *self.shape[1:]) if self._offsets is not None else self.shape[1:]
        if self._direct_at is None:
            return np.ascontiguousarray(self._file.get()[self.name][start:stop]).reshape(shape)
        nbytes = (stop - start) * self._row_bytes
        buffer = np.empty(nbytes, np.uint8)
        got = read_into(self._fd.get(), buffer.data, self._direct_at + start * self._row_bytes)
        if got != nbytes:
            raise FormatError(f"{self.location(index)}: only {got} of {nbytes} bytes are there: the file is cut short")
        rows: npt.NDArray[Any] = buffer.view(self.dtype).reshape(shape)
        return rows

    def _checked(self, index: int, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._crc is not None and crc_of(array) != int(self._crc.array[index]):
            raise FormatError(f"{self.location(index)}: wrong checksum, the file is damaged: pack it again")
        return array

    def blocks(self) -> npt.NDArray[np.int64]:
        if self._offsets is not None:
            ids = self._offsets.array[:-1] * self._row_bytes // BLOCK_BYTES
        else:
            rows = self._chunks[0] if self._chunks else max(1, BLOCK_BYTES // max(1, self._row_bytes))
            ids = np.arange(len(self), dtype=np.int64) // rows
        return np.unique(ids, return_counts=True)[1].astype(np.int64)

    def fingerprint(self) -> str:
        """The one of the packed dataset; else a hash of shape, dtype and chunk grid."""
        if self.info is not None and self.name == DATA:
            return self.info.fingerprint
        said = json.dumps([self.name, self.shape, self.dtype.str, self._chunks])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        name = f" ({redact(self.names[index])})" if self.names is not None else ""
        return f"{redact(self.path)}, {self.name}, row {index}{name}"

    @property
    def has_samples_of_any_size(self) -> bool:
        """Are the samples encoded, so that each has a size of its own?"""
        return self._offsets is not None

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each sample in bytes ([n] int64)."""
        if self._offsets is not None:
            return np.diff(self._offsets.array) * self._row_bytes
        return np.full(len(self), self._row_bytes, np.int64)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole dataset with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such dataset; another number of rows.
        """
        with reading_hdf5(self.path) as file:
            column = self._column(file, name)
        if column.ndim == 0 or len(column) != len(self):
            raise FormatError(f"{redact(self.path)}: {name!r} has shape {column.shape}, not one row for each of {len(self)} samples")
        return column


def plain_offset(dataset: h5py.Dataset) -> int | None:
    """Where in the file the rows begin, if they may be read with `pread`; else None.

    They may where they lie in one piece, in a byte order that NumPy takes as it is, and in the very type that h5py would give
    (not so for integers of 12 bits in two bytes, say).
    """
    if dataset.chunks is not None or dataset.is_virtual or dataset.external or not hasattr(os, "preadv"):
        return None
    same = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True))
    offset: int | None = dataset.id.get_offset() if same and dataset.dtype.isnative else None
    return offset


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer (of bytes) from a file; the number of bytes is smaller than the buffer only where the file ends."""
    got = 0
    while got < len(buffer):  # one call gives 2 GiB at most
        more = os.preadv(fd, [buffer[got:]], offset + got)
        if more == 0:
            break
        got += more
    return got


def are_offsets(offsets: npt.NDArray[Any], count: int, end: int) -> bool:
    """Do `count + 1` offsets lead from 0 to `end`, never backwards?"""
    if offsets.shape != (count + 1,) or offsets[0] != 0 or offsets[-1] != end:
        return False
    return bool(np.all(offsets[1:] >= offsets[:-1]))


def dataset_named(file: h5py.File, name: str, path: str) -> h5py.Dataset:
    """A dataset of the file.

    Raises:
        MissingNameError: there is none; the message lists those there are.
    """
    found = file.get(name)
    if isinstance(found, h5py.Dataset):
        return found
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise MissingNameError(f"{redact(path)} has no dataset {name!r}; it has: {', '.join(sorted(names)) or 'none'}")


def crc_of(data: Any) -> int:
    """The CRC-32 (zlib's) of a sample's bytes."""
    return zlib.crc32(bytes_of(np.asarray(data)).data)


def bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array's bytes, flat; in any byte order and any dtype of numbers, for which a memoryview has no cast."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
