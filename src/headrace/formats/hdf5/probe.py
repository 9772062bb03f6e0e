"""Compares how headrace and h5py read a dataset, before headrace reads it by itself."""

from __future__ import annotations

import logging
import math
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.errors import (
    AccessError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceError,
    RemoteError,
)
from headrace.formats.arrays.chunks import DirectChunks
from headrace.formats.arrays.codecs import Fletcher32, TooLongError
from headrace.io.library_errors import asking

_log = logging.getLogger(__name__)

# decoded bytes of a chunk up to which it is read in both ways when the file is opened
_PROBE = 16 << 20
_OF_THE_WAY = (RemoteError, FileChangedError, DataNotFoundError, AccessError)


def place_of(dataset: h5py.h5d.DatasetID) -> int | None:
    """The first byte in its file of a dataset in one piece; None: nothing has been written.

    Of a file with a user block, `get_offset` gives a number then too.
    """
    if dataset.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return None
    place: int | None = dataset.get_offset()
    return place


def is_as_stored(kind: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """True if elements are stored with the very bytes that h5py gives; not so integers of 12
    bits in two bytes, say.
    """
    if isinstance(kind, h5py.h5t.TypeBitfieldID):  # whole bytes of bits are an unsigned integer
        number = h5py.h5t.py_create(dtype)
        order = "BE" if number.get_order() == h5py.h5t.ORDER_BE else "LE"
        bits = getattr(h5py.h5t, f"STD_B{8 * number.get_size()}{order}", None)
        return dtype.kind == "u" and bits is not None and bool(kind.equal(bits))
    if (
        isinstance(kind, h5py.h5t.TypeArrayID)
        and dtype.subdtype is not None
        and kind.get_array_dims() == dtype.shape
    ):
        return is_as_stored(kind.get_super(), dtype.base)
    if isinstance(kind, h5py.h5t.TypeCompoundID) and dtype.fields is not None:
        for number in range(kind.get_nmembers()):
            name = kind.get_member_name(number).decode("utf-8", "surrogateescape")
            inner, offset, *_ = dtype.fields.get(name, (dtype, -1))
            if offset != kind.get_member_offset(number):
                return False
            if not is_as_stored(kind.get_member_type(number), inner):
                return False
        return int(kind.get_size()) == dtype.itemsize
    return bool(kind.equal(h5py.h5t.py_create(dtype, logical=True)))


def doubt_of(
    dataset: h5py.Dataset, chunks: DirectChunks, written: npt.NDArray[np.int64]
) -> str | None:
    """What speaks against the direct path when one chunk, and one at an edge, are read in both
    ways.

    HDF5 says nowhere whether chunks at the edge are filtered, and filters may have options that we
    don't know. What h5py can't read either is damaged, and leaves no doubt.
    """
    grid = chunks.grid
    if not len(written):
        return None
    if dataset.file.userblock_size and not _lies_there(dataset, chunks, int(written[0])):
        return "HDF5 lists its chunks without the file's user block"
    if not chunks.pipeline:
        return None
    probed = {int(written[0])}
    for axis, (extent, chunk, count) in enumerate(zip(*grid, grid.counts, strict=True)):
        if extent % chunk:
            at_edge = written // math.prod(grid.counts[axis + 1 :]) % count == count - 1
            probed.update(written[np.flatnonzero(at_edge)[:1]].tolist())
    # which takes long: of these only such as may not have been filtered, by their sizes
    if chunks.nbytes > _PROBE:
        numbers = np.array(list(probed), np.int64)
        probed = set(numbers[chunks.byte_ranges(numbers).nbytes == chunks.nbytes].tolist())
    for number in sorted(probed):
        part = grid.part(number)
        problem: Exception | None = None
        whole: npt.NDArray[Any] | None = None
        try:
            whole = chunks.decode(number, chunks.read([number])[0])
        except TooLongError:  # nor should h5py try that: it makes room for all that comes
            continue
        except _OF_THE_WAY:
            raise
        except (HeadraceError, OSError) as error:
            problem = error
        try:
            with asking("h5py", chunks.where(number)):
                expected = np.ascontiguousarray(dataset[part[: len(dataset.shape)]])
        except _OF_THE_WAY:
            raise
        # h5py lacks the filter, say; damaged chunks are found when they are read
        except Exception as error:
            _log.info("%s: chunk %s can't be compared: %s", dataset.name, grid.place(number), error)
            continue
        if whole is not None:
            ours = whole[tuple(slice(0, cut.stop - cut.start) for cut in part)]
            if ours.tobytes() != expected.tobytes():
                return f"chunk {grid.place(number)} is another one when it is read directly"
        elif _is_sound(chunks, number, expected):
            return f"chunk {grid.place(number)} can't be read directly ({problem})"
    return None


def _lies_there(dataset: h5py.Dataset, chunks: DirectChunks, number: int) -> bool:
    """True if HDF5 itself reads the same stored bytes of a chunk: earlier versions counted
    offsets from the end of a user block.
    """
    corner = tuple(cut.start for cut in chunks.grid.part(number))
    _, expected = dataset.id.read_direct_chunk(corner[: len(dataset.shape)])
    try:
        stored = chunks.files.read(chunks.byte_ranges(np.array([number])))[0]
    except FormatError:
        return False
    return bytes(stored or b"") == bytes(expected)


def _is_sound(chunks: DirectChunks, number: int, expected: npt.NDArray[Any]) -> bool:
    """True if what h5py gives of a chunk that can't be decoded here is more than what lay in
    memory, which it gives of damaged ones too.

    So it is where h5py checks a checksum, or where the chunk lies in the file as it is.
    """
    if any(isinstance(codec, Fletcher32) for codec in chunks.pipeline.codecs):
        return True
    stored = chunks.read([number])[0][0]
    if len(stored) != chunks.nbytes:
        return False
    whole = np.frombuffer(stored, chunks.dtype).reshape(chunks.grid.chunks)
    return whole[tuple(map(slice, expected.shape))].tobytes() == expected.tobytes()
