"""Tokens that `headrace.pack` wrote, read by ranges of a URL.

By ranges of the file's flat array of tokens. Where documents begin, targets and names are read when the file is opened, by h5py, and are
its index with all else that this takes: a later start finds them in `cache_dir`. Nothing is mapped, and nothing is asked for to find out
whether the file is still the same: each read is of the version that was opened, or an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.hdf5.files import HDF5Files
from headrace.storage.hdf5.packed import CRC, DATA, OFFSETS
from headrace.storage.tokens.packed import TokensFile
from headrace.storage.tokens.source import RangedTokens


class FarTokens(TokensFile, RangedTokens):
    """Tokens of a remote packed file. Picklable: a worker reads on, and asks for nothing first.

    Args:
        url: of a file that `headrace.pack` made of texts.
        hdf5: the files of its server; what is read here becomes the file's index where its `read_each` calls.

    Attributes: those of `TokensFile` and `RangedTokens`.

    Raises:
        FormatError: no such file, a damaged one, or one that is shorter than it says.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: see `RemoteFiles.read`.
    """

    def __init__(self, url: str, hdf5: HDF5Files) -> None:
        super().__init__(url, hdf5)
        self.files = hdf5.files
        with hdf5.reading(url) as file:
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
