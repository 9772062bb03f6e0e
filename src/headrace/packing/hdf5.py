"""Writes the bytes of a packed HDF5 file.

h5py lays out the file: an attribute, and datasets of their final sizes, with nothing in them yet.
The rest is `pwrite` at the places that HDF5 names: errors come as the system's own, and the writer
holds no more than the samples in its hands. Chunks that are not compressed lie one behind the other
like contiguous rows. The sizes of compressed ones are known when they are made: HDF5 appends them,
and writes through an object of ours, so that its errors are the system's own too.

The bytes of the file follow from the samples alone: no times, no versions, one fixed format of
HDF5, whose metadata have checksums. It is that of 1.8; and with chunks that of 1.10, whose index is
an array of 14 bytes a chunk that lies together, and none at all of chunks that are not compressed.
"""

from __future__ import annotations

import io
import itertools
import os
import zlib
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t

from headrace.dtypes import AnyArray
from headrace.formats.arrays import packed
from headrace.formats.arrays.codecs import compress, shuffled, shuffles
from headrace.formats.hdf5.chunks import add_filters
from headrace.memory.processes import read_full, write_full_from
from headrace.packing.destination import PartFile
from headrace.packing.plan import Plan

_SLACK = 1 << 16  # for HDF5's own headers
_ALIGNED = 64  # bytes
_FLUSHED = 8 << 20  # bytes


class PackedWriter:
    """Writes the samples of a plan, in order, into an empty part file. Close it at the end.

    Args:
        part: entered, and not committed.
        plan: what will be written.

    Raises:
        WriteError, AccessError: the disk is too small, or the file can't be written.
    """

    def __init__(self, part: PartFile, plan: Plan) -> None:
        self._part = part
        self._plan = plan
        self._crc = np.zeros(len(plan.sizes), np.uint32)
        self._done = 0
        self._is_compressed = plan.compression is not None and all(plan.shape)
        text = packed.info_text(plan.info)
        needed = sum(column.nbytes for column in plan.columns.values()) + self._crc.nbytes
        needed += len(text) + _SLACK
        if not self._is_compressed:
            needed += int(plan.sizes.sum())
        part.reserve(needed)
        self._written = _Written(part.fd)
        with part.explained():
            os.ftruncate(part.fd, 0)
            self._file = _created(part.path, self._written if self._is_compressed else None, plan)
            try:
                self._offsets = _lay_out(self._file, plan, text)
                if not self._is_compressed:
                    self.close()
                self._written.check()
                for name, column in plan.columns.items():
                    part.write(packed.bytes_of(column).data, self._offsets[name])
            except BaseException:
                # HDF5 would write what it has in memory later, to whatever has the descriptor then
                self.close()
                raise
        self._at = self._offsets[packed.DATA]
        self._flushed = self._at
        if not self._is_compressed:
            part.sum_ahead(np.concatenate([[self._at], self._at + np.cumsum(plan.sizes)]))

    def close(self) -> None:
        """Closes the HDF5 file, which writes what HDF5 has in memory."""
        self._file.close()

    def encode(self, samples: Sequence[AnyArray]) -> list[Any]:
        """The bytes to write for the next samples: as they are, or whole chunks, except for the
        last one of all. Thread-safe.
        """
        plan = self._plan
        if plan.compression is None:
            return [packed.bytes_of(sample).data for sample in samples]
        rows = min(plan.chunks or 1, plan.shape[0])
        blocks = list[Any]()
        for start in range(0, len(samples), rows):
            parts = [packed.bytes_of(sample) for sample in samples[start : start + rows]]
            # a chunk at the edge is whole, too
            parts += [np.zeros_like(parts[0])] * (rows - len(parts))
            data = np.concatenate(parts)
            if shuffles(plan.rows.dtype):
                data = shuffled(data, plan.rows.dtype.itemsize)
            blocks.append(compress(plan.compression, data))
        return blocks

    def append(self, blocks: Sequence[Any], checksums: Sequence[int]) -> None:
        """Writes what `encode` returned for the next samples, whose checksums are these."""
        with self._part.explained():
            if self._is_compressed:
                data = self._file[packed.DATA]
                rows = data.chunks[0]
                for row, block in zip(itertools.count(self._done, rows), blocks, strict=False):
                    data.id.write_direct_chunk((row, *[0] * (data.ndim - 1)), block)
                    self._written.check()
            else:
                write_full_from(self._part.fd, blocks, self._at)
                self._at += sum(map(len, blocks))
                if self._at - self._flushed >= _FLUSHED:
                    self._part.forget(self._flushed, self._at - self._flushed)
                    self._flushed = self._at
                    assert self._part.ahead is not None
                    self._part.ahead.written(self._at)
        self._crc[self._done : self._done + len(checksums)] = checksums
        self._done += len(checksums)

    def finish(self) -> None:
        """Writes the checksums of the samples."""
        assert self._done == len(self._plan.sizes), "samples are missing"
        with self._part.explained():
            self.close()
            self._written.check()
        self._part.write(packed.bytes_of(self._crc).data, self._offsets[packed.CRC])


class _Written(io.FileIO):
    """The file object that HDF5 writes to. HDF5 can't close a file that it can't write, so after an
    error this object pretends to write; `check` raises the error.
    """

    error: BaseException | None = None

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "r+", closefd=False)

    def check(self) -> None:
        """Raises the first error of writing, or an interruption."""
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        count = len(data)
        place = self.tell()
        if self.error is None:
            try:
                write_full_from(self.fileno(), [memoryview(data)], place)
            except BaseException as error:  # an interruption too
                self.error = error
        self.seek(place + count)
        return count

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        got = read_full(self.fileno(), [view], self.tell())
        view[got:] = bytes(len(view) - got)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        if self.error is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self.error = error
        return self.tell() if size is None else size


def _created(path: str, written: _Written | None, plan: Plan) -> h5py.File:
    """Creates an empty file, which HDF5 writes by itself, or through `written`."""
    access = h5p.create(h5p.FILE_ACCESS)
    version = h5f.LIBVER_V18 if plan.chunks is None else h5f.LIBVER_V110
    access.set_libver_bounds(version, version)
    if plan.info.kind == "text":
        access.set_alignment(1, _ALIGNED)  # of arrays that are read by ranges
    if written is None:
        access.set_file_locking(False, True)  # ours is on the file already
    else:
        access.set_fileobj_driver(h5py.h5fd.fileobj_driver, written)
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5py.File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, access))


def _lay_out(file: h5py.File, plan: Plan, text: bytes) -> dict[str, int]:
    """Creates the attributes and datasets. Returns the offset of the content of each dataset."""
    file.attrs.create(packed.PACKED_ATTRIBUTE, np.bytes_(text))
    file.attrs.create(packed.PACKED_CHECKSUM, zlib.crc32(text), dtype=np.uint32)
    datasets = {name: (column.shape, column.dtype) for name, column in sorted(plan.columns.items())}
    datasets[packed.CRC] = ((plan.info.count,), np.dtype(np.uint32))
    datasets[packed.FILE_CRC] = ((1,), np.dtype("<u4"))  # zeros until the file is read back
    offsets = {
        name: _allocate(file, name, shape, dtype) for name, (shape, dtype) in datasets.items()
    }
    # last: all that a reader needs first lies together
    offsets[packed.DATA] = _allocate(
        file, packed.DATA, plan.shape, plan.rows.dtype, plan.chunks, plan.compression
    )
    return offsets


def _allocate(
    file: h5py.File,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: int | None = None,
    compression: str | None = None,
) -> int:
    """Creates a dataset, and returns the offset of its content; 0 if it is empty or HDF5 appends
    it.
    """
    layout = h5p.create(h5p.DATASET_CREATE)
    if chunks is None or not all(shape):
        chunks = compression = None
        layout.set_layout(h5d.CONTIGUOUS)
    else:
        layout.set_chunk((min(chunks, shape[0]), *shape[1:]))
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    if compression is not None:
        add_filters(layout, compression, dtype)
        layout.set_alloc_time(h5d.ALLOC_TIME_INCR)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    stored = h5t.py_create(dtype, logical=True)
    dataset = h5d.create(file.id, name.encode(), stored, h5s.create_simple(shape), layout)
    if compression is not None:
        return 0
    if chunks is not None:
        return int(dataset.get_chunk_info(0).byte_offset)
    return dataset.get_offset() or 0
