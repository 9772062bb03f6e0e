"""The format of samples in the log of a sample store, and copies of many of one shape by one call.

An entry is a header of eight integers (index, bytes of the entry, of the pickle, number of buffers,
bytes of each buffer), the pickle, and the buffers that it left out (pickle protocol 5), each at a
multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.dtypes import ArraySpec
from headrace.memory.anonymous import up
from headrace.memory.tree import is_dense, reduced

HEADER = 64
"""Bytes of an entry's header."""
BUFFERS = 4
"""Buffers outside of the pickle that fit into a header."""
MIXED = -1
"""In place of a signature: no array, or none that lies in one piece."""
# buffers of less bytes stay in the pickle, but that of a single array, which is to be copied
# without one
_INLINE = 512
_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Layout(NamedTuple):
    """What all entries of a store have in common."""

    entry: int
    """Bytes from one to the next."""
    at: int
    """Bytes of an entry before the array's own."""
    nbytes: int
    """Bytes of an array."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def table(self, log: memoryview) -> npt.NDArray[Any]:
        """All entries of a log as one array [entries, ...], read-only."""
        inner = np.empty(self.shape, self.dtype).strides
        shape = (len(log) // self.entry, *self.shape)
        table: npt.NDArray[Any] = np.ndarray(shape, self.dtype, log, self.at, (self.entry, *inner))
        table.flags.writeable = False
        return table


def encode(index: int, value: Any) -> tuple[list[int], list[memoryview]]:
    """Header and pieces of a sample: its pickle, and the buffers outside of it."""
    buffers: list[memoryview] = []
    least = 1 if type(value) is np.ndarray else _INLINE

    def take(buffer: pickle.PickleBuffer) -> bool:
        """Takes a large buffer out of the pickle (False); leaves the others inside (True)."""
        raw = buffer.raw()
        if len(buffers) == BUFFERS or raw.nbytes < least:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=take).dump(value)
    head = stream.getvalue()
    sizes = [b.nbytes for b in buffers]
    nbytes = HEADER + up(len(head)) + sum(map(up, sizes))
    return [index, nbytes, len(head), len(sizes), *sizes, *[0] * (BUFFERS - len(sizes))], [
        memoryview(head),
        *buffers,
    ]


class _Pickler(pickle.Pickler):
    """Takes the bytes of plain tensors out of the pickle, as NumPy's arrays do by themselves. A
    tensor takes its own bytes, and not those of the storage that it is a view of.
    """

    def reducer_override(self, value: Any) -> Any:
        if not is_dense(value):
            return reduced(value)
        # a size of 1 keeps any stride
        flat = value.resolve_conj().resolve_neg().contiguous().as_strided((value.numel(),), (1,))
        data = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def copied(value: Any) -> Any:
    """A copy of a value, which shares no memory with it; its arrays may be written to."""
    buffers: list[bytearray] = []
    stream = io.BytesIO()

    def take(buffer: pickle.PickleBuffer) -> None:
        buffers.append(bytearray(buffer.raw()))

    _Pickler(stream, protocol=5, buffer_callback=take).dump(value)
    return pickle.loads(stream.getvalue(), buffers=buffers)


def header_at(log: memoryview, start: int) -> list[int]:
    """The header of the entry that begins at a byte of the log."""
    header: list[int] = np.frombuffer(log, np.int64, 8, start).tolist()
    return header


def copies_at(log: memoryview, start: int, header: list[int]) -> list[bytearray]:
    """Copies of an entry's pieces."""
    at, copies = start + HEADER, []
    for nbytes in [header[2], *header[4 : 4 + header[3]]]:
        copies.append(bytearray(log[at : at + nbytes]))
        at += up(nbytes)
    return copies


def decode(pieces: list[bytearray]) -> Any:
    """The sample, over the memory of its pieces."""
    return pickle.loads(pieces[0], buffers=pieces[1:])


def signature_of(value: Any, header: list[int], pieces: list[memoryview]) -> int:
    """A positive number that all arrays of one shape and dtype have in common, and no others;
    MIXED for everything else.
    """
    if type(value) is not np.ndarray or not value.flags.c_contiguous or header[3] != 1:
        return MIXED
    identity = b"%d %d %s" % (header[1], header[4], pieces[0])
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1 or 1


def layout_of(header: list[int], pieces: list[bytearray]) -> Layout:
    """What an entry of an array shares with all others of its signature."""
    array = decode(pieces)
    return Layout(header[1], HEADER + up(header[2]), array.nbytes, array.shape, array.dtype)


class Rows:
    """Cached samples of one shape, whose entries begin at `starts` of a log: read them, and then
    ask whether they were cached all the while (`are_held`).
    """

    def __init__(
        self,
        log: memoryview,
        layout: Layout,
        starts: npt.NDArray[np.int64],
        are_held: Callable[[], bool],
    ) -> None:
        self._log, self._layout = log, layout
        self.are_held: Callable[[], bool] = are_held
        self.spec: ArraySpec = ArraySpec(layout.shape, layout.dtype)
        self._numbers = starts // layout.entry  # of the entries in the log
        self._whole: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> npt.NDArray[Any]:
        """A sample as it lies in the store, read-only; as an array, of whatever shape."""
        if self._whole is None:  # not where all are copied by one call
            self._whole = self._layout.table(self._log)
        sample: npt.NDArray[Any] = self._whole[self._numbers[number], ...]
        return sample

    def copy_to(self, out: torch.Tensor) -> None:
        """Copies all of them into a contiguous [samples, ...] tensor of their dtype by one call,
        in torch's own threads.
        """
        layout = self._layout
        # the fewest elements: torch deals rows out whole
        dtype = next(d for d in _WIDE if layout.nbytes % d.itemsize == 0)
        width, rows = dtype.itemsize, len(self._log) // layout.entry
        whole = torch.frombuffer(self._log, dtype=dtype, count=rows * layout.entry // width)
        table = whole.as_strided(
            (rows, layout.nbytes // width), (layout.entry // width, 1), layout.at // width
        )
        flat = out.view(len(self), -1)
        torch.index_select(
            table,
            0,
            torch.from_numpy(self._numbers),
            out=flat if out.dtype == dtype else flat.view(dtype),
        )
