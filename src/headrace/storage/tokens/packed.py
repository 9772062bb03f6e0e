"""Tokens that `headrace.pack` wrote, mapped.

Where they lie: the file's flat array of tokens is mapped, and where each document begins too. Nothing is copied, whatever the size.
"""

from __future__ import annotations

import itertools
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import AccessError, FileChangedError, FormatError
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.version import Stamp
from headrace.memory.whole import read_full
from headrace.storage.hdf5.files import HDF5Files, leads_out
from headrace.storage.hdf5.packed import CRC, DATA, NAME_OFFSETS, NAMES, OFFSETS, TARGETS, are_offsets, crc_of, packed_info
from headrace.storage.tokens.source import AnyTokens, DocumentsSource

KIND, STORE = "text", "tokens"
"""What a packed file of tokens says of itself."""
_PIECE = 4 << 20
_SHOWN = 80  # characters of what a tokenizer is known by


@dataclass(frozen=True, slots=True)
class Place:
    """Where a contiguous dataset lies."""

    begin: int
    count: int
    dtype: np.dtype[Any]


class TokensFile:
    """A packed file of tokens, local or remote, as far as it says what is in it.

    Args:
        path: of the file, absolute; or its URL.
        hdf5: opens it.

    Attributes:
        path: the same.
        info: what the file says of itself.
        targets: one for each document, or None.
        names: of the documents, or None.

    Raises:
        FormatError: the file holds no texts that were packed, is of a later version, or damaged.
        DataNotFoundError, AccessError, RemoteError: it is not there, or can't be read.
    """

    targets: npt.NDArray[Any] | None = None
    names: PackedNames | None = None

    def __init__(self, path: str, hdf5: HDF5Files) -> None:
        self.path: str = path
        self._hdf5 = hdf5
        self._shown = redact(path)
        info = packed_info(path, hdf5)
        if info is None or info.kind != KIND:
            raise FormatError(f"{self._shown} holds no texts that headrace packed: open it with HDF5Dataset(path, dataset_name)")
        self.info = info

    def _dataset(self, file: h5py.File, name: str) -> h5py.Dataset:
        return self._hdf5.dataset(file, name, self.path)

    def _place(self, file: h5py.File, name: str, size: int) -> Place:
        """Where a dataset lies in the file, which has so many bytes."""
        dataset = self._dataset(file, name)
        shape: tuple[int, ...] = dataset.shape or ()
        begin, dtype = dataset.id.get_offset(), dataset.dtype
        count = shape[0] if len(shape) == 1 else -1
        is_elsewhere = dataset.external or leads_out(file, name) is not None
        if count < 0 or dtype.kind not in "iu" or not dtype.isnative or (count and begin is None) or is_elsewhere:
            raise FormatError(f"{self._shown}: {name!r} is no flat array of integers in one piece, as headrace writes it: pack it again")
        if (begin or 0) + count * dtype.itemsize > size:
            raise FormatError(f"{self._shown} is cut short: {size:,} bytes are not enough for {name!r}")
        return Place(begin or 0, count, dtype)

    def _read_columns(self, file: h5py.File) -> None:
        """Targets and names."""
        self.targets = self._column(file, TARGETS) if TARGETS in file else None
        self.names = PackedNames.from_arrays(self._column(file, NAMES), self._column(file, NAME_OFFSETS)) if NAMES in file else None

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        column = np.asarray(self._dataset(file, name))
        self._compare(name, column)
        return column

    def _compare(self, name: str, column: npt.NDArray[Any]) -> None:
        expected = self.info.checksums.get(name)
        if expected is not None and crc_of(column) != expected:
            raise FormatError(f"{self._shown}: {name!r} has a wrong checksum, the file is damaged: pack it again")

    def _check(self, edges: npt.NDArray[Any], end: int, crc_shape: tuple[int, ...] | None) -> None:
        """Compares the parts with each other.

        Args:
            edges: where documents begin.
            end: the number of tokens.
            crc_shape: of the documents' checksums, if there are any.
        """
        count, wrong = self.info.count, []
        if edges.dtype != np.int64 or not are_offsets(edges, count, end):
            wrong.append(OFFSETS)
        if self.names is not None and not are_offsets(self.names.arrays[1], count, len(self.names.arrays[0])):
            wrong.append(NAME_OFFSETS)
        shapes = ((TARGETS, None if self.targets is None else self.targets.shape), (CRC, crc_shape))
        wrong += [name for name, shape in shapes if shape is not None and shape[:1] != (count,)]
        if wrong:
            raise FormatError(
                f"{self._shown} is damaged: {', '.join(wrong)} don't fit the {count:,} documents it should hold: pack it again"
            )

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        return f"{self._shown}, document {document:,}" + ("" if self.names is None else f" ({redact(self.names[document])})")

    def made_with(self) -> str:
        """The tokenizer, in words."""
        text = self.info.text
        said = str(text.get("tokenizer") or f"a {text.get('class')} that can't be known again")
        return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."


class PackedTokens(TokensFile):
    """Tokens of a packed file, and where its documents begin. Picklable: workers map the file anew where they don't inherit it.

    Args:
        path: a file that `headrace.pack` made of texts.

    Attributes: those of `TokensFile`.

    Raises:
        FormatError: no such file, a damaged one, or one that is shorter than it says.
        DataNotFoundError, AccessError: it is not there, or can't be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.path.abspath(os.path.expanduser(os.fspath(path))), HDF5Files())
        self._views: tuple[npt.NDArray[Any], IntArray] | None = None
        with self._hdf5.reading(self.path) as file:
            self._stamp = Stamp(self.path)
            self._data, self._offsets = (self._place(file, name, self._stamp.size) for name in (DATA, OFFSETS))
            self._read_columns(file)
            self._crc = self._column(file, CRC) if CRC in file else None
        edges = self.short[0]
        self._compare(OFFSETS, edges)
        self._check(edges, self._data.count, None if self._crc is None else self._crc.shape)

    # -- what `Tokens` are

    @property
    def long(self) -> npt.NDArray[Any]:
        """The tokens, read-only.

        Raises:
            AccessError, FileChangedError: the file is gone, or has been changed.
        """
        return self._mapped()[0]

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        """Where documents begin, read-only.

        Raises:
            AccessError, FileChangedError: the file is gone, or has been changed.
        """
        return [self._mapped()[1]]

    def _mapped(self) -> tuple[npt.NDArray[Any], IntArray]:
        try:
            status = os.stat(self.path)  # each time: of a mapping alone nobody would see that the file is cut short, or another one
        except OSError as error:
            raise AccessError(f"{self._shown} can't be read any more: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (self._stamp.size, self._stamp.mtime):
            raise FileChangedError(f"{self._shown} has been changed since it was opened: open the dataset again")
        if self._views is None:
            with open(self.path, "rb") as file:
                self._stamp.check(file.fileno())
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            data, offsets = (self._array(view, place) for place in (self._data, self._offsets))
            self._views = data, np.require(offsets, requirements="A")  # searching arrays that are not aligned copies them each time
        return self._views

    @staticmethod
    def _array(view: memoryview, place: Place) -> npt.NDArray[Any]:
        return np.frombuffer(view[place.begin : place.begin + place.count * place.dtype.itemsize], place.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}

    # -- is it whole?

    @property
    def has_checksums(self) -> bool:
        """True if there is a checksum of each document."""
        return self._crc is not None

    def damaged(self) -> Iterator[tuple[int, list[int]]]:
        """Reads all tokens from the file; for each piece how many documents it has, and which documents are not what was packed.

        Raises:
            FileChangedError: the file has been changed.
            OSError: it can't be read.
        """
        edges, crc = self.short[0], self._crc
        assert crc is not None
        begin, size = self._data.begin, self._data.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            self._stamp.check(file.fileno())
            first = 0
            while first < len(crc):
                last = max(first + 1, int(np.searchsorted(edges, edges[first] + _PIECE // size, side="right")) - 1)
                last = min(last, first + _PIECE // 8)  # of empty ones any number begins at one place
                places = ((edges[first : last + 1] - edges[first]) * size).tolist()
                data = memoryview(bytearray(places[-1]))
                data = data[: read_full(file.fileno(), [data], begin + int(edges[first]) * size)]
                found = [zlib.crc32(data[a:b]) for a, b in itertools.pairwise(places)]
                yield last - first, (np.flatnonzero(np.array(found, np.uint32) != crc[first:last]) + first).tolist()
                first = last


class PackedDocuments(DocumentsSource):
    """The documents of a packed file, of each its first `max_length` tokens, with the fingerprint of those that were packed."""

    def __init__(self, tokens: AnyTokens, fingerprint: str, where: Callable[[int], str], max_length: int | None) -> None:
        super().__init__(tokens, "", where, max_length, None)
        self._packed_fingerprint = fingerprint

    def fingerprint(self) -> str:
        return self._packed_fingerprint
