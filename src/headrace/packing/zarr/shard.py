"""The bytes of a shard: its chunks one behind the other, and then its index, as Zarr's codec `sharding_indexed` has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.memory.whole import read_full, write_full
from headrace.packing.part import PartFile
from headrace.packing.zarr.layout import ArrayLayout
from headrace.storage.arrays.codecs import Crc32c

_ABSENT = (1 << 64) - 1
_SUM = 4  # bytes of a checksum


def with_checksum(data: npt.NDArray[np.uint8]) -> bytes:
    """Bytes with their crc32c behind them."""
    return data.tobytes() + int(google_crc32c.value(data)).to_bytes(_SUM, "little")


def shard_nbytes(array: ArrayLayout, nbytes: int) -> int:
    """Bytes of a shard that has so many bytes of items."""
    chunks = -(-nbytes // array.chunk_bytes)
    return chunks * (array.chunk_bytes + _SUM * array.checked) + 16 * array.chunks_each + _SUM


def shard_index(array: ArrayLayout, nbytes: int) -> bytes:
    """The index of a shard that has so many bytes of items: where each chunk lies, and its bytes."""
    chunks, stored = -(-nbytes // array.chunk_bytes), array.chunk_bytes + _SUM * array.checked
    index = np.full((array.chunks_each, 2), _ABSENT, "<u8")
    index[:chunks, 0] = np.arange(chunks, dtype=np.uint64) * stored
    index[:chunks, 1] = stored
    return with_checksum(index.reshape(-1).view(np.uint8))


class ShardWriter:
    """Writes the items of a shard, in order, into an empty file; it holds no chunk.

    Args:
        file: entered, and not committed.
        array: whose shard it is.
        nbytes: of all items that will come.

    Raises:
        WriteError, AccessError: the disk is too small, or the file can't be written.
    """

    def __init__(self, file: PartFile, array: ArrayLayout, nbytes: int) -> None:
        self._file, self._array, self._nbytes = file, array, nbytes
        self._at = self._done = self._in_chunk = self._crc = 0
        file.reserve(shard_nbytes(array, nbytes))

    def append(self, items: npt.NDArray[np.uint8]) -> None:
        """Writes the bytes of the next items (flat)."""
        self._done += len(items)
        while len(items):
            piece = items[: self._array.chunk_bytes - self._in_chunk]
            self._write(piece)
            items = items[len(piece) :]

    def _write(self, piece: npt.NDArray[np.uint8]) -> None:
        self._put(piece.data)
        self._in_chunk += len(piece)
        if self._array.checked:
            self._crc = google_crc32c.extend(self._crc, piece)
        if self._in_chunk == self._array.chunk_bytes:
            if self._array.checked:
                self._put(int(self._crc).to_bytes(_SUM, "little"))
            self._in_chunk = self._crc = 0

    def finish(self) -> None:
        """Fills the last chunk up with zeros, and writes the index."""
        assert self._done == self._nbytes, "samples are missing"
        if self._in_chunk:
            self._write(np.zeros(self._array.chunk_bytes - self._in_chunk, np.uint8))
        self._put(shard_index(self._array, self._nbytes))

    def _put(self, data: Any) -> None:
        with self._file.explained():
            write_full(self._file.fd, data, self._at)
        self._at += len(data)


def check_index(fd: int, array: ArrayLayout, nbytes: int) -> None:
    """Compares the size of a shard and its index with what they must be.

    Args:
        fd: of the file.
        array: whose shard it is.
        nbytes: of all items in it.

    Raises:
        FormatError: the file has another size, or its index is damaged.
    """
    size, index = os.fstat(fd).st_size, shard_index(array, nbytes)
    if size != shard_nbytes(array, nbytes):
        raise FormatError(f"it has {size:,} bytes, not {shard_nbytes(array, nbytes):,}: the file is damaged")
    if _bytes(fd, size - len(index), len(index)).tobytes() != index:
        raise FormatError("the index of the shard is damaged")


def chunks_in(fd: int, array: ArrayLayout, nbytes: int) -> Iterator[npt.NDArray[np.uint8] | FormatError]:
    """The bytes of each chunk of a shard, what is padded included, without its checksum; or what is wrong with it.

    Args:
        fd: of the file.
        array: whose shard it is; its chunks have checksums.
        nbytes: of all items in it.
    """
    stored = array.chunk_bytes + _SUM
    for number in range(-(-nbytes // array.chunk_bytes)):
        try:
            yield np.frombuffer(Crc32c().decode(_bytes(fd, number * stored, stored), array.chunk_bytes), np.uint8)
        except FormatError as error:
            yield error


def _bytes(fd: int, start: int, count: int) -> npt.NDArray[np.uint8]:
    data = np.empty(count, np.uint8)
    if read_full(fd, [data.data], start) != count:
        raise FormatError("the file is cut short")
    return data
