"""Tokens that `headrace.pack` wrote, read by ranges of a URL.

By ranges of the file's flat array of tokens. Where documents begin, targets and names are read when the file is opened, by h5py, and are
its index with all else that this takes: a later start finds them in `cache_dir`. Nothing is mapped, and nothing is asked for to find out
whether the file is still the same: each read is of the version that was opened, or an error.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.hdf5.files import reading_hdf5
from headrace.storage.hdf5.links import check_way
from headrace.storage.hdf5.packed import CRC, DATA, OFFSETS
from headrace.storage.hdf5.remote import FarHDF5
from headrace.storage.tokens.packed import TokensFile
from headrace.storage.tokens.source import RangedTokens


class FarTokens(TokensFile, RangedTokens):
    """Tokens of a remote packed file. Picklable: a worker reads on, and asks for nothing first.

    Args:
        url: of a file that `headrace.pack` made of texts.
        opened: of its server; it keeps what is read here as the file's index where `FarHDF5.read_each` calls.

    Attributes: those of `TokensFile` and `RangedTokens`.

    Raises:
        FormatError: no such file, a damaged one, or one that is shorter than it says.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: see `RemoteFiles.read`.
    """

    def __init__(self, url: str, opened: FarHDF5) -> None:
        super().__init__(url, opened)
        self.files = opened.files
        with reading_hdf5(url, opened) as file:
            size = self.files.version(url).size
            data, _ = (self._place(file, name, size) for name in (DATA, OFFSETS))
            self._read_columns(file)
            edges = self._column(file, OFFSETS)
            crc_shape = self._dataset(file, CRC).shape if CRC in file else None
        self._check(edges, data.count, crc_shape)
        self.count: int = data.count
        self.dtype: np.dtype[Any] = data.dtype
        self._begin = data.begin
        self._edges = SharedArray(edges)

    def _dataset(self, file: h5py.File, name: str) -> h5py.Dataset:
        check_way(file, name, self.path)  # a link may lead to a file of this machine
        return super()._dataset(file, name)

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        return [self._edges.array]

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        first, size = self._begin, self.dtype.itemsize
        return ByteRanges.in_file(self.path, first + begins * size, first + ends * size)

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        found = [np.empty(count, self.dtype) for count in (ends - begins).tolist()]
        there = np.flatnonzero(ends > begins)
        for number, data in zip(there.tolist(), self.files.read(self.byte_ranges(begins[there], ends[there])), strict=True):
            found[number][:] = np.frombuffer(data or b"", self.dtype)  # a copy: what was fetched with it need not be held
        return found
