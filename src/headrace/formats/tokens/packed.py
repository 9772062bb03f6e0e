"""Tokens that `headrace.pack` wrote, read from the files' flat arrays of them.

The arrays are read by byte ranges. Where each document begins is in memory that workers share. What
else a remote file holds is read when it is opened, by h5py, and is its index: a later start finds
that in `cache_dir`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import AccessError, FormatError
from headrace.formats.arrays.packed import (
    CRC,
    DATA,
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    TARGETS,
    PackedInfo,
    are_offsets,
    crc_of,
)
from headrace.formats.hdf5.files import HDF5Files, leads_out, packed_info
from headrace.formats.source import PackPart, fingerprint_of_files
from headrace.formats.tokens.source import Tokens
from headrace.io.local.files import LocalFiles, changed
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

KIND = "text"
STORE = "tokens"
"""What a packed file of tokens says of itself."""
_SHOWN = 80  # characters of what a tokenizer is known by


class PackedFile:
    """A packed file of tokens, local or remote.

    Args:
        path: a file that `headrace.pack` made of texts, or its URL.
        hdf5: opens it; None: a local file.

    Attributes:
        info: what the file says of itself.
        dtype, count: of the tokens.
        begin: where they begin in the file.
        offsets: where each document begins among the tokens, and the last one ends.
        targets: one for each document, or None.
        names: of the documents, or None.
        checksums: the CRC of each document of a local file ([n]); None: there are none.

    Raises:
        FormatError: the file holds no texts that were packed, is of a later version, damaged, or
            shorter than it says.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: it is not there, or can't be
            read; see `Files.read`.
    """

    def __init__(self, path: str | os.PathLike[str], hdf5: HDF5Files | None = None) -> None:
        self._hdf5 = hdf5 = hdf5 or HDF5Files()
        self.files = hdf5.files
        self.path = os.fspath(path)
        if not self.files.is_remote:
            self.path = os.path.abspath(os.path.expanduser(self.path))
        self.shown: str = redact(self.path)
        info = packed_info(self.path, hdf5)
        if info is None or info.kind != KIND:
            raise FormatError(
                f"{self.shown} holds no texts that headrace packed: open it with "
                "HDF5Dataset(path, dataset_name)"
            )
        self.info: PackedInfo = info
        self.targets: npt.NDArray[Any] | None = None
        self.names: PackedNames | None = None
        self.checksums: npt.NDArray[np.uint32] | None = None
        with hdf5.reading(self.path) as file:
            self.dtype, self.count, self.begin = self._layout(file, DATA)
            self._layout(file, OFFSETS)
            self.offsets: IntArray = self._column(file, OFFSETS)
            if TARGETS in file:
                self.targets = self._column(file, TARGETS)
            if NAMES in file:
                names = self._column(file, NAMES)
                self.names = PackedNames.from_arrays(names, self._column(file, NAME_OFFSETS))
            crc_shape = self._dataset(file, CRC).shape if CRC in file else None
            if crc_shape is not None and not self.files.is_remote:
                self.checksums = self._column(file, CRC)
        self._check(crc_shape)

    def _dataset(self, file: h5py.File, name: str) -> h5py.Dataset:
        return self._hdf5.dataset(file, name, self.path)

    def _layout(self, file: h5py.File, name: str) -> tuple[np.dtype[Any], int, int]:
        """Dtype, length, and first byte in the file of a dataset."""
        dataset = self._dataset(file, name)
        shape: tuple[int, ...] = dataset.shape or ()
        begin = dataset.id.get_offset()
        dtype = dataset.dtype
        is_flat = len(shape) == 1 and dtype.kind in "iu" and dtype.isnative
        is_elsewhere = dataset.external or leads_out(file, name) is not None
        if not is_flat or (shape[0] and begin is None) or is_elsewhere:
            raise FormatError(
                f"{self.shown}: {name!r} is no flat array of integers in one piece, as headrace "
                "writes it: pack it again"
            )
        size = self.files.version(self.path).size
        if (begin or 0) + shape[0] * dtype.itemsize > size:
            raise FormatError(
                f"{self.shown} is cut short: {size:,} bytes are not enough for {name!r}"
            )
        return dtype, shape[0], begin or 0

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        column = np.asarray(self._dataset(file, name))
        if crc_of(column) != self.info.checksums.get(name, crc_of(column)):
            raise FormatError(
                f"{self.shown}: {name!r} has a wrong checksum, the file is damaged: pack it again"
            )
        return column

    def _check(self, crc_shape: tuple[int, ...] | None) -> None:
        """Compares the arrays with each other."""
        count = self.info.count
        wrong = []
        if self.offsets.dtype != np.int64 or not are_offsets(self.offsets, count, self.count):
            wrong.append(OFFSETS)
        if self.names is not None:
            data, offsets = self.names.arrays
            if not are_offsets(offsets, count, len(data)):
                wrong.append(NAME_OFFSETS)
        if self.targets is not None and self.targets.shape[:1] != (count,):
            wrong.append(TARGETS)
        if crc_shape is not None and crc_shape[:1] != (count,):
            wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{self.shown} is damaged: {', '.join(wrong)} don't fit the {count:,} documents "
                "it should hold: pack it again"
            )

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        name = ""
        if self.names is not None:
            name = f" ({in_one_line(self.names[document])})"
        return f"{self.shown}, document {document:,}{name}"

    def damaged(self, document: int) -> str:
        """What messages say of a document that is not what was packed."""
        return f"{self.location(document)}: wrong checksum, the file is damaged: pack it again"

    def edges(self) -> IntArray:
        """The first byte of each document in the file, and the end of the last ([n + 1])."""
        return self.begin + self.offsets * self.dtype.itemsize


class PackedTokens(Tokens):
    """Tokens of packed files, local or of one server, each file's behind those of the file before
    it. Windows are parts of documents, and so of one file; blocks go on from file to file.

    Args:
        each: the files, one at least.

    Attributes: those of `Tokens`, and:
        info: what the files say of themselves, as if they were one.
        targets: one for each document, or None.
        names: of the documents, or None.

    Raises:
        FormatError: the files were packed in different ways.
    """

    def __init__(self, each: Sequence[PackedFile]) -> None:
        first = each[0]
        for file in each[1:]:
            _check_alike(first, file)
        self.files = first.files
        self.shown: str = first.shown
        made_with = first.info.text.get("tokenizer")
        made_with = str(made_with or f"a {first.info.text.get('class')} that can't be known again")
        self.made_with: str = made_with
        if len(made_with) > _SHOWN:
            self.made_with = f"{made_with[:_SHOWN]}..."
        self.dtype = np.result_type(*(file.dtype for file in each))
        # of each file: the first token, the first document, the first byte, bytes of a token
        self._starts: IntArray = np.cumsum([0, *(file.count for file in each)])
        self._documents: IntArray = np.cumsum([0, *(file.info.count for file in each)])
        self._begins = np.array([file.begin for file in each])
        self._dtypes = [file.dtype for file in each]
        self._sizes = np.array([dtype.itemsize for dtype in self._dtypes])
        self._paths = [file.path for file in each]
        self._shown = [file.shown for file in each]
        self.count: int = int(self._starts[-1])
        edges = [file.offsets[:-1] + start for file, start in zip(each, self._starts, strict=False)]
        self._edges = SharedArray(np.concatenate([*edges, self._starts[-1:]]))
        self.targets: npt.NDArray[Any] | None = None
        if first.targets is not None:
            self.targets = np.concatenate([cast(Any, file.targets) for file in each])
        self.names: PackedNames | None = PackedNames.joined([file.names for file in each])
        self.info: PackedInfo = first.info
        if len(each) > 1:
            self.shown += f" and {len(each) - 1:,} more"
            infos = [file.info for file in each]
            parts = [None if info.part is None else PackPart(*info.part) for info in infos]
            count = int(self._documents[-1])
            fingerprint = fingerprint_of_files(parts, count, [info.fingerprint for info in infos])
            self.info = replace(
                first.info, count=count, fingerprint=fingerprint, checksums={}, part=None
            )

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        return [self._edges.array]

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        edges = np.cumsum(ends - begins)
        if len(edges):
            return np.split(self._joined(begins, ends), edges[:-1])
        return []

    def blocks(self, numbers: IntArray, length: int) -> npt.NDArray[Any]:
        return self._joined(numbers * length, (numbers + 1) * length).reshape(-1, length)

    def _joined(self, begins: IntArray, ends: IntArray) -> npt.NDArray[Any]:
        """Tokens, one range behind the other. They are read, and not mapped: a file may be cut
        short meanwhile.
        """
        ranges = self.byte_ranges(begins, ends)
        if not self.files.is_remote:
            for number in set(ranges.file.tolist()):
                self._check_same(self._paths[number])
        if len(self._paths) == 1:
            return np.frombuffer(self.files.read_joined(ranges), self.dtype)
        # copies: what was fetched with them need not be held
        found = [np.empty(0, self.dtype)]
        for data, number in zip(self.files.read_each(ranges), ranges.file.tolist(), strict=True):
            found.append(np.frombuffer(data, self._dtypes[number]))
        return np.concatenate(found, dtype=self.dtype)

    def _check_same(self, path: str) -> None:
        """An open file does not show that another one has taken its name."""
        try:
            is_same = cast(LocalFiles, self.files).is_same(path)
        except OSError as error:
            raise AccessError(f"{redact(path)} can't be read any more: {error.strerror}") from error
        if not is_same:
            raise changed(path)

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        first = np.zeros(len(begins), np.int64)
        if len(self._paths) > 1:  # ranges are cut where files end; empty ones have none
            first = np.searchsorted(self._starts, begins, side="right") - 1
            last = np.searchsorted(self._starts, ends, side="left") - 1
            counts = np.where(ends > begins, last - first + 1, 0)
            of = np.repeat(np.arange(len(begins)), counts)
            first = first[of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
            begins = np.maximum(begins[of], self._starts[first])
            ends = np.minimum(ends[of], self._starts[first + 1])
            filled = ends > begins
            first = first[filled]
            begins = begins[filled]
            ends = ends[filled]
        heads = self._begins[first] - self._starts[first] * self._sizes[first]
        sizes = self._sizes[first]
        return ByteRanges(self._paths, first, heads + begins * sizes, heads + ends * sizes)

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        number = int(np.searchsorted(self._documents, document, side="right")) - 1
        name = ""
        if self.names is not None:
            name = f" ({in_one_line(self.names[document])})"
        inside = document - int(self._documents[number])
        return f"{self._shown[number]}, document {inside:,}{name}"


def _check_alike(first: PackedFile, other: PackedFile) -> None:
    """Raises a FormatError where two files can't be one dataset."""

    def said(file: PackedFile) -> dict[str, Any]:
        targets = None
        if file.targets is not None:
            targets = f"{file.targets.dtype} {list(file.targets.shape[1:])}"
        names = ("tokenizer", "class", "end_token", "unit")
        of_text = {name: file.info.text.get(name) for name in names}
        return {**of_text, "classes": file.info.classes, "targets": targets}

    ours = said(first)
    different = [name for name, value in said(other).items() if value != ours[name]]
    if different:
        raise FormatError(
            f"{redact(other.path)} and {redact(first.path)} can't be one dataset: they were "
            f"packed with other {', '.join(different)}: pack them from one dataset"
        )
