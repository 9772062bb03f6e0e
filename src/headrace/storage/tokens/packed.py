"""Tokens that `headrace.pack` wrote, read from the file's flat array of them.

The array is read by byte ranges. Where each document begins is in memory that workers share. What
else a remote file holds is read when it is opened, by h5py, and is its index: a later start finds
that in `cache_dir`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import AccessError, FormatError
from headrace.io.local.files import LocalFiles, changed
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.packed import CRC, DATA, NAME_OFFSETS, NAMES, OFFSETS, TARGETS, crc_of
from headrace.storage.hdf5.files import HDF5Files, leads_out
from headrace.storage.hdf5.packed import are_offsets, packed_info
from headrace.storage.tokens.source import DocumentsSource, Tokens

KIND, STORE = "text", "tokens"
"""What a packed file of tokens says of itself."""
_SHOWN = 80  # characters of what a tokenizer is known by


class PackedTokens(Tokens):
    """Tokens of a packed file, local or remote.

    Args:
        path: a file that `headrace.pack` made of texts, or its URL.
        hdf5: opens it; None: a local file.

    Attributes: those of `Tokens`, and:
        info: what the file says of itself.
        targets: one for each document, or None.
        names: of the documents, or None.

    Raises:
        FormatError: the file holds no texts that were packed, is of a later version, damaged, or
            shorter than it says.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: it is not there, or can't be
            read; see `Files.read`.
    """

    path: str

    def __init__(self, path: str | os.PathLike[str], hdf5: HDF5Files | None = None) -> None:
        self._hdf5 = hdf5 = hdf5 or HDF5Files()
        self.files = hdf5.files
        self.path = (
            os.fspath(path)
            if self.files.is_remote
            else os.path.abspath(os.path.expanduser(os.fspath(path)))
        )
        self.shown: str = redact(self.path)
        info = packed_info(self.path, hdf5)
        if info is None or info.kind != KIND:
            raise FormatError(
                f"{self.shown} holds no texts that headrace packed: open it with "
                "HDF5Dataset(path, dataset_name)"
            )
        self.info = info
        made_with = str(
            info.text.get("tokenizer") or f"a {info.text.get('class')} that can't be known again"
        )
        self.made_with: str = made_with if len(made_with) <= _SHOWN else f"{made_with[:_SHOWN]}..."
        self._crc: npt.NDArray[Any] | None = None
        with hdf5.reading(self.path) as file:
            self.dtype, self.count, self._begin = self._layout(file, DATA)
            self._layout(file, OFFSETS)
            self._edges = SharedArray(self._column(file, OFFSETS))
            self.targets = self._column(file, TARGETS) if TARGETS in file else None
            self.names = (
                PackedNames.from_arrays(self._column(file, NAMES), self._column(file, NAME_OFFSETS))
                if NAMES in file
                else None
            )
            if self.files.is_remote:
                crc_shape = self._dataset(file, CRC).shape if CRC in file else None
            elif CRC in file:
                self._crc = self._column(file, CRC)
                crc_shape = self._crc.shape
            else:
                crc_shape = None
        self._check(self._edges.array, crc_shape)

    def _dataset(self, file: h5py.File, name: str) -> h5py.Dataset:
        return self._hdf5.dataset(file, name, self.path)

    def _layout(self, file: h5py.File, name: str) -> tuple[np.dtype[Any], int, int]:
        """Dtype, length, and first byte in the file of a dataset."""
        dataset = self._dataset(file, name)
        shape: tuple[int, ...] = dataset.shape or ()
        begin, dtype = dataset.id.get_offset(), dataset.dtype
        count = shape[0] if len(shape) == 1 else -1
        is_elsewhere = dataset.external or leads_out(file, name) is not None
        if (
            count < 0
            or dtype.kind not in "iu"
            or not dtype.isnative
            or (count and begin is None)
            or is_elsewhere
        ):
            raise FormatError(
                f"{self.shown}: {name!r} is no flat array of integers in one piece, as headrace "
                "writes it: pack it again"
            )
        if (begin or 0) + count * dtype.itemsize > (size := self.files.version(self.path).size):
            raise FormatError(
                f"{self.shown} is cut short: {size:,} bytes are not enough for {name!r}"
            )
        return dtype, count, begin or 0

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        column = np.asarray(self._dataset(file, name))
        self._compare(name, column)
        return column

    def _compare(self, name: str, column: npt.NDArray[Any]) -> None:
        expected = self.info.checksums.get(name)
        if expected is not None and crc_of(column) != expected:
            raise FormatError(
                f"{self.shown}: {name!r} has a wrong checksum, the file is damaged: pack it again"
            )

    def _check(self, edges: npt.NDArray[Any], crc_shape: tuple[int, ...] | None) -> None:
        """Compares the arrays with each other."""
        count, wrong = self.info.count, []
        if edges.dtype != np.int64 or not are_offsets(edges, count, self.count):
            wrong.append(OFFSETS)
        if self.names is not None and not are_offsets(
            self.names.arrays[1], count, len(self.names.arrays[0])
        ):
            wrong.append(NAME_OFFSETS)
        shapes = ((TARGETS, None if self.targets is None else self.targets.shape), (CRC, crc_shape))
        wrong += [name for name, shape in shapes if shape is not None and shape[:1] != (count,)]
        if wrong:
            raise FormatError(
                f"{self.shown} is damaged: {', '.join(wrong)} don't fit the {count:,} documents "
                "it should hold: pack it again"
            )

    # -- tokens

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        return [self._edges.array]

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        if not self.files.is_remote:
            joined, edges = self._joined(begins, ends), np.cumsum(ends - begins).tolist()
            return [joined[start:end] for start, end in zip([0, *edges], edges, strict=False)]
        parts = [np.empty(count, self.dtype) for count in (ends - begins).tolist()]
        filled = np.flatnonzero(ends > begins)
        for number, data in zip(
            filled.tolist(),
            self.files.read(self.byte_ranges(begins[filled], ends[filled])),
            strict=True,
        ):
            # a copy: what was fetched with it need not be held
            parts[number][:] = np.frombuffer(data or b"", self.dtype)
        return parts

    def blocks(self, numbers: IntArray, length: int) -> npt.NDArray[Any]:
        if self.files.is_remote:
            return super().blocks(numbers, length)
        return self._joined(numbers * length, (numbers + 1) * length).reshape(-1, length)

    def _joined(self, begins: IntArray, ends: IntArray) -> npt.NDArray[Any]:
        """Tokens of a local file, one range behind the other. They are read, and not mapped: a
        file may be cut short meanwhile.
        """
        files = cast(LocalFiles, self.files)
        try:
            # an open file does not show that another one has taken its name
            is_same = files.is_same(self.path)
        except OSError as error:
            raise AccessError(f"{self.shown} can't be read any more: {error.strerror}") from error
        if not is_same:
            raise changed(self.path)
        return np.frombuffer(files.read_joined(self.byte_ranges(begins, ends)), self.dtype)

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        first, size = self._begin, self.dtype.itemsize
        return ByteRanges.in_file(self.path, first + begins * size, first + ends * size)

    # -- documents

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        return f"{self.shown}, document {document:,}" + (
            "" if self.names is None else f" ({in_one_line(self.names[document])})"
        )

    def damaged(self, document: int) -> str:
        """What messages say of a document that is not what was packed."""
        return f"{self.location(document)}: wrong checksum, the file is damaged: pack it again"

    def edges(self) -> IntArray:
        """The first byte of each document in the file, and the end of the last ([n + 1])."""
        return self._begin + self.short[0] * self.dtype.itemsize

    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """The CRC of each document of a local file ([n]); None: there are none."""
        return self._crc


class PackedDocuments(DocumentsSource):
    """The documents of a packed file, of each its first `max_length` tokens, with the
    fingerprint of those that were packed.
    """

    def __init__(
        self, tokens: Tokens, fingerprint: str, where: Callable[[int], str], max_length: int | None
    ) -> None:
        super().__init__(tokens, "", where, max_length, None)
        self._packed_fingerprint = fingerprint

    def fingerprint(self) -> str:
        return self._packed_fingerprint
