"""Writes the bytes of a packed HDF5 file.

h5py lays out the file: an attribute, and contiguous datasets of their final sizes, with nothing in them yet. The rest is `pwrite` at
the places that HDF5 names: errors come as the system's own, and the writer holds no more than the samples in its hands. The bytes
of the file follow from the samples alone: no times, no versions, one fixed format of HDF5 (that of 1.8: its metadata have checksums).
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5f, h5p, h5s, h5t

from headrace.errors import WriteError
from headrace.io.paths import redact
from headrace.memory.budget import format_size
from headrace.memory.whole import write_full
from headrace.packing.part import PartFile
from headrace.packing.plan import Plan
from headrace.storage.arrays.packed import CRC, DATA, FILE_CRC, PACKED_ATTRIBUTE, PACKED_CHECKSUM, bytes_of, info_text

_SLACK = 1 << 16  # for HDF5's own headers
_ALIGNED = 64  # bytes


class PackedWriter:
    """Writes the samples of a plan, in order, into an empty part file.

    Args:
        part: entered, and not committed.
        plan: what will be written.

    Raises:
        WriteError, AccessError: the disk is too small, or the file can't be written.
    """

    def __init__(self, part: PartFile, plan: Plan) -> None:
        self._part, self._plan = part, plan
        self._crc = np.zeros(len(plan.sizes), np.uint32)
        self._done = 0
        text = info_text(plan.info)
        needed = plan.nbytes + len(text) + _SLACK
        with part.explained():
            free = shutil.disk_usage(os.path.dirname(part.path)).free
            if needed > free:
                raise WriteError(
                    f"{redact(part.target)} can't be written, the disk is full: it needs {format_size(needed)}, and "
                    f"{format_size(free)} are free: free some space, or use another disk"
                )
            os.ftruncate(part.fd, needed)  # a limit of the file system or the user shows here, not in the middle of it all
            self._offsets = lay_out(part.path, plan, text)
        for name, column in plan.columns.items():
            self._write(column, self._offsets[name])
        self._at = self._offsets[DATA]

    def append(self, samples: Sequence[npt.NDArray[Any]], checksums: Sequence[int]) -> None:
        """Write the next samples, at least one, whose sizes are those of the plan, and which have these CRCs."""
        data = np.concatenate([bytes_of(s) for s in samples])
        self._write(data, self._at)
        self._at += len(data)
        self._crc[self._done : self._done + len(samples)] = checksums
        self._done += len(samples)

    def finish(self) -> None:
        """Write what is known only now: the samples' CRCs."""
        assert self._done == len(self._plan.sizes), "samples are missing"
        self._write(self._crc, self._offsets[CRC])

    def _write(self, array: npt.NDArray[Any], offset: int) -> None:
        with self._part.explained():
            write_full(self._part.fd, bytes_of(array).data, offset)


def lay_out(path: str, plan: Plan, text: bytes) -> dict[str, int]:
    """Make the HDF5 file, its datasets still without content; where the content of each goes (0 where it has none)."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
    access.set_file_locking(False, True)  # ours is on the file already
    if plan.info.kind == "text":
        access.set_alignment(1, _ALIGNED)  # these arrays are mapped
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    datasets = {name: (column.shape, column.dtype) for name, column in sorted(plan.columns.items())}
    datasets[CRC] = ((len(plan.sizes),), np.dtype(np.uint32))
    datasets[FILE_CRC] = ((1,), np.dtype("<u4"))  # zeros until the file is read back
    datasets[DATA] = (plan.shape, plan.dtype)  # last: all that a reader needs first lies together
    with h5py.File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, access)) as file:
        file.attrs.create(PACKED_ATTRIBUTE, np.bytes_(text))
        file.attrs.create(PACKED_CHECKSUM, zlib.crc32(text), dtype=np.uint32)
        return {name: _allocate(file, name, shape, dtype) for name, (shape, dtype) in datasets.items()}


def _allocate(file: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_layout(h5d.CONTIGUOUS)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    stored = h5t.py_create(dtype, logical=True)
    dataset = h5d.create(file.id, name.encode(), stored, h5s.create_simple(shape), layout)
    return dataset.get_offset() or 0
