"""The bytes of a shard: its chunks one behind the other, and then its index, as Zarr's codec
`sharding_indexed` has them.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.memory.per_process import PerProcess
from headrace.memory.whole import read_full, write_full_from
from headrace.packing.part import PartFile
from headrace.packing.zarr.layout import BLOSC_LEVEL, ArrayLayout
from headrace.storage.arrays.codecs import GZIP, Pipeline
from headrace.storage.arrays.compressors import LEVELS, compress, shuffles
from headrace.storage.zarr.layout import layout_of

_ABSENT = (1 << 64) - 1
_SUM = 4  # bytes of a checksum


def with_checksum(data: npt.NDArray[np.uint8]) -> bytes:
    """Bytes with their crc32c behind them."""
    return data.tobytes() + int(google_crc32c.value(data)).to_bytes(_SUM, "little")


def shard_nbytes(array: ArrayLayout, nbytes: int) -> int:
    """Bytes of a shard that has so many bytes of items, and is not compressed."""
    return sum(_plain_sizes(array, nbytes)) + 16 * array.chunks_each + _SUM


def _plain_sizes(array: ArrayLayout, nbytes: int) -> list[int]:
    """Bytes of each chunk that is not compressed."""
    return [array.chunk_bytes + _SUM * array.checked] * -(-nbytes // array.chunk_bytes)


def index_of(array: ArrayLayout, sizes: Sequence[int]) -> bytes:
    """The index of a shard whose chunks lie one behind the other from its start on, and have
    these sizes.
    """
    index = np.full((array.chunks_each, 2), _ABSENT, "<u8")
    stored = np.array(sizes, np.uint64)
    index[: len(sizes), 0] = np.cumsum(stored) - stored
    index[: len(sizes), 1] = stored
    return with_checksum(index.reshape(-1).view(np.uint8))


def encoded(chunk: npt.NDArray[np.uint8], array: ArrayLayout) -> bytes:
    """The bytes that are stored of a chunk that is compressed."""
    assert array.compression is not None
    if array.compression == "gzip":
        stream = zlib.compressobj(LEVELS["gzip"], wbits=GZIP)
        data = stream.compress(chunk.data) + stream.flush()
    elif array.compression == "lz4":
        data = _blosc(chunk, array.dtype)
    else:
        data = compress(array.compression, chunk)
    return with_checksum(np.frombuffer(data, np.uint8)) if array.checked else data


class _OneThread:
    """numcodecs' Blosc without threads of its own, which write blocks in the order in which they
    finish, as long as some thread encodes.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._before: bool | None = None

    def __enter__(self) -> None:
        from numcodecs import blosc

        with self._lock:
            if not self._count:
                self._before, blosc.use_threads = blosc.use_threads, False
            self._count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from numcodecs import blosc

        with self._lock:
            self._count -= 1
            if not self._count:
                blosc.use_threads = self._before


_ONE_THREAD = PerProcess(_OneThread)


def _blosc(chunk: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> bytes:
    from numcodecs import blosc

    shuffle = blosc.SHUFFLE if shuffles(dtype) else blosc.NOSHUFFLE
    with _ONE_THREAD.get():
        made: bytes = blosc.compress(chunk.view(f"V{dtype.itemsize}"), b"lz4", BLOSC_LEVEL, shuffle)
    return made


class ShardWriter:
    """Writes the items of a shard, in order, into an empty file. Of chunks that are not compressed
    it holds none.

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
        self._sizes: list[int] = []
        if array.compression is None:
            file.reserve(shard_nbytes(array, nbytes))

    def encode(self, items: Sequence[npt.NDArray[np.uint8]]) -> list[Any]:
        """What `append` takes of some items' bytes (flat), at least one; of whole chunks where they
        are compressed, but for the last one of all. For any thread.
        """
        if self._array.compression is None:
            return list(items)
        size, blocks, joined = self._array.chunk_bytes, list[Any](), np.concatenate(items)
        for start in range(0, len(joined), size):
            chunk = joined[start : start + size]
            if len(chunk) < size:
                chunk = np.concatenate([chunk, np.zeros(size - len(chunk), np.uint8)])
            blocks.append(encoded(chunk, self._array))
        return blocks

    def append(self, blocks: Sequence[Any]) -> None:
        """Writes what `encode` gave of the next items."""
        if self._array.compression is None and not self._array.checked:
            self._done += sum(map(len, blocks))
            self._put(*(block.data for block in blocks))
            return
        for block in blocks:
            if self._array.compression is not None:
                self._sizes.append(len(block))
                self._put(block)
                continue
            self._done += len(block)
            while len(block):
                piece = block[: self._array.chunk_bytes - self._in_chunk]
                self._write_checked(piece)
                block = block[len(piece) :]

    def _write_checked(self, piece: npt.NDArray[np.uint8]) -> None:
        """Writes what lies in one chunk; and at its end its checksum."""
        self._put(piece.data)
        self._in_chunk, self._crc = (
            self._in_chunk + len(piece),
            google_crc32c.extend(self._crc, piece),
        )
        if self._in_chunk == self._array.chunk_bytes:
            self._put(int(self._crc).to_bytes(_SUM, "little"))
            self._in_chunk = self._crc = 0

    def finish(self) -> None:
        """Fills the last chunk up with zeros, and writes the index."""
        if self._array.compression is not None:
            assert len(self._sizes) == -(-self._nbytes // self._array.chunk_bytes), (
                "samples are missing"
            )
            self._put(index_of(self._array, self._sizes))
            return
        assert self._done == self._nbytes, "samples are missing"
        self.append([np.zeros(-self._nbytes % self._array.chunk_bytes, np.uint8)])
        self._put(index_of(self._array, _plain_sizes(self._array, self._nbytes)))

    def _put(self, *data: Any) -> None:
        with self._file.explained():
            write_full_from(self._file.fd, data, self._at)
        self._at += sum(map(len, data))
        self._file.begin_flush(self._at)


def chunk_sizes(fd: int, array: ArrayLayout, nbytes: int) -> list[int]:
    """The bytes of each chunk of a shard, as its index has them: the first begins the file, each
    other one follows the one before.

    Args:
        fd: of the file.
        array: whose shard it is.
        nbytes: of all items in it.

    Raises:
        FormatError: the file has another size, or its index is damaged.
    """
    size, length = os.fstat(fd).st_size, 16 * array.chunks_each + _SUM
    if array.compression is None and size != shard_nbytes(array, nbytes):
        raise FormatError(
            f"it has {size:,} bytes, not {shard_nbytes(array, nbytes):,}: the file is damaged"
        )
    if size < length:
        raise FormatError(
            f"it has {size:,} bytes, which is less than its index has: the file is damaged"
        )
    index = _bytes(fd, size - length, length).tobytes()
    count = -(-nbytes // array.chunk_bytes)
    sizes = np.frombuffer(index, "<u8", 2 * count)[1::2]
    if (
        (sizes > size).any()
        or int(sizes.sum()) + length != size
        or index_of(array, sizes.tolist()) != index
    ):
        raise FormatError("the index of the shard is damaged")
    return [int(nbytes) for nbytes in sizes]


def chunks_in(
    fd: int, array: ArrayLayout, nbytes: int
) -> Iterator[npt.NDArray[np.uint8] | FormatError]:
    """The decoded bytes of each chunk of a shard, what is padded included; or what is wrong with
    it. Arguments and errors: see `chunk_sizes`.
    """
    pipeline, start = Pipeline(layout_of(array.metadata()).codecs), 0
    for size in chunk_sizes(fd, array, nbytes):
        try:
            yield pipeline.decode(_bytes(fd, start, size), array.chunk_bytes)
        except FormatError as error:
            yield error
        start += size


def _bytes(fd: int, start: int, count: int) -> npt.NDArray[np.uint8]:
    data = np.empty(count, np.uint8)
    if read_full(fd, [data.data], start) != count:
        raise FormatError("the file is cut short")
    return data
