"""Reads the Zarr groups that `headrace.pack` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import DataNotFoundError, FormatError
from headrace.io.packed_strings import NamesBuilder, PackedNames
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.packed import (
    CRC,
    DATA,
    IMAGE,
    MASK,
    MASKS,
    NAME_STARTS,
    NAME_STOPS,
    NAMES,
    PACKED_ATTRIBUTE,
    PACKED_CHECKSUM,
    STARTS,
    STOPS,
    TARGETS,
    PackedInfo,
    edges_named,
    parse_info,
)
from headrace.storage.arrays.packed_rows import PackedSource
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.zarr.kind import ZARR
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.store import Store

_ARRAYS = (DATA, CRC, STARTS, STOPS, TARGETS, NAMES, NAME_STARTS, NAME_STOPS)
"""Of most packs, whose metadata are asked for together; the others lie in the consolidated ones."""


def packed_group(store: Store) -> PackedInfo | None:
    """What a group says about itself; None: `headrace.pack` did not write it.

    Raises:
        FormatError: it is of a later version of headrace, or damaged.
    """
    attributes = store.attributes("")
    text, checksum = attributes.get(PACKED_ATTRIBUTE), attributes.get(PACKED_CHECKSUM)
    return (
        parse_info(text, checksum, store.path)
        if isinstance(text, str) and isinstance(checksum, int)
        else None
    )


def packed_groups(
    data_path: DataPath | FileSet, options: RemoteOptions
) -> tuple[list[str], OpenZarr]:
    """The paths or URLs of Zarr stores, and what is open of them, so that chunks of packs that are
    missing are errors.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError: see
            `headrace.io.resolve.resolver.resolve`.
    """
    files = resolve(data_path, ZARR, options)
    return files.urls(), OpenZarr(files.server, missing="error")


def packed_zarr_kind(
    data_path: DataPath | FileSet,
    options: RemoteOptions,
    otherwise: Callable[[Store, OpenZarr], str] | None = None,
) -> str:
    """What `headrace.pack` made the first of some Zarr stores of ("image", "array"); if it did not
    make it, what `otherwise` says of the store, or ""; "": there is none.
    """
    paths, opened = packed_groups(data_path, options)
    try:
        info = packed_group(store := opened.store(paths[0]))
        return (
            info.kind if info is not None else "" if otherwise is None else otherwise(store, opened)
        )
    except DataNotFoundError:  # a dataset says what is missing
        return ""
    finally:
        if not isinstance(data_path, FileSet):
            opened.close()


class PackedGroup(PackedSource):
    """The samples of a Zarr group that `headrace.pack` wrote, checked against their CRC.

    Records are arrays of one row, or 1-D uint8 arrays where the group holds encoded images; of
    pixels with their masks rows of both, with the fields `IMAGE` and `MASK`.

    Args:
        path: a local folder, or a URL.
        opened: what is open and decoded, to be shared with other sources; for a URL it knows the
            server.

    Raises:
        DataNotFoundError, MissingNameError: see `open_store`, `Store.array`.
        FormatError: `headrace.pack` did not write it, or it is damaged.
    """

    _opened: OpenZarr

    def __init__(self, path: str | os.PathLike[Any], opened: OpenZarr | None = None) -> None:
        opened = opened or OpenZarr(missing="error")
        self._store = opened.store(path, _ARRAYS)
        self.info = info = packed_group(self._store)
        shown = redact(self._store.path)
        if info is None:
            raise FormatError(
                f"{shown} was not packed by headrace: open it with ZarrDataset(path, dataset_name)"
            )
        self._count = info.count
        names = (
            (DATA, MASK)
            if info.store == "decoded" and info.image.get("targets") == MASKS
            else (DATA,)
        )
        readers = {name: opened.reader(self._store, *self._store.array(name)) for name in names}
        super().__init__(
            shown, opened, DATA, readers, [reader.chunks.grid.chunks for reader in readers.values()]
        )
        if len(names) > 1:
            rows = [(reader.dtype, reader.shape[1:]) for reader in readers.values()]
            self.dtype = np.dtype(
                [(name, *row) for name, row in zip((IMAGE, MASK), rows, strict=True)]
            )
        self._edges: tuple[SharedArray, SharedArray] | None = None
        if info.is_flat:
            starts, stops = self._edges_named(STARTS, STOPS, self.shape[0])
            self._edges = SharedArray(starts), SharedArray(stops)
        elif self.shape[0] != info.count:
            raise self._damaged(DATA)
        self._crc = SharedArray(self.column(CRC))
        if self.has_column(NAMES):
            self.names = self._read_names()

    def _damaged(self, what: str) -> FormatError:
        return FormatError(
            f"{self.path} is damaged: {what} don't fit the {self._count:,} samples it should "
            "hold: pack it again"
        )

    def _edges_named(
        self, starts_name: str, stops_name: str, end: int
    ) -> tuple[IntArray, IntArray]:
        """Where samples or names begin and end: each where the one before ends, but for the
        first of a part.
        """
        starts, stops = self.column(starts_name), self.column(stops_name)
        fit = starts.dtype == stops.dtype == np.int64 and starts.ndim == stops.ndim == 1
        if (
            not fit
            or starts[0] != 0
            or (starts > stops).any()
            or (stops[:-1] > starts[1:]).any()
            or stops[-1] > end
        ):
            raise self._damaged(f"{starts_name}, {stops_name}")
        return starts, stops

    def _read_names(self) -> PackedNames:
        """The names of all samples, without what lies between those of two parts."""
        builder = NamesBuilder()
        for piece, lengths in self._pieces(NAMES, NAME_STARTS, NAME_STOPS):
            builder.add_joined(piece, lengths)
        return builder.build()

    def _pieces(
        self, name: str, starts_name: str, stops_name: str
    ) -> list[tuple[npt.NDArray[Any], IntArray]]:
        """What each part has of a ragged array, and how many items each of its samples has."""
        reader = self._reader(name)
        starts, stops = self._edges_named(starts_name, stops_name, reader.shape[0])
        firsts = np.flatnonzero(np.concatenate([[True], starts[1:] != stops[:-1]]))
        bounds = list(
            zip(firsts.tolist(), np.append(firsts[1:], len(starts)).tolist(), strict=True)
        )
        pieces = [
            np.empty((int(stops[b - 1] - starts[a]), *reader.shape[1:]), reader.dtype)
            for a, b in bounds
        ]
        reader.read_spans(starts[firsts], pieces, self.run)
        return [
            (piece, stops[a:b] - starts[a:b]) for piece, (a, b) in zip(pieces, bounds, strict=True)
        ]

    def ragged(self, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        pieces = self._pieces(name, *edges_named(name))
        lengths = np.concatenate([lengths for _, lengths in pieces])
        return np.concatenate([piece for piece, _ in pieces]), np.concatenate(
            [[0], np.cumsum(lengths, dtype=np.int64)]
        )

    def _reader(self, name: str) -> ArrayReader:
        return self._opened.reader(self._store, *self._store.array(name), required=True)

    @property
    def is_flat(self) -> bool:
        return self._edges is not None

    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        if self._edges is None:
            return None
        starts, stops = self._edges
        return starts.array[indices], stops.array[indices]

    @property
    def array_spec(self) -> ArraySpec | None:
        return None if self.dtype.names else super().array_spec

    def _read_rows(self, indices: Sequence[int]) -> list[Any]:
        if not self.dtype.names:
            return super()._read_rows(indices)
        rows = [np.empty((), self.dtype) for _ in indices]
        for name, reader in zip(self.dtype.names, self._readers, strict=True):
            reader.read_rows(indices, [row[name] for row in rows], self.run)
        return rows

    def stored_column(self, name: str) -> npt.NDArray[Any]:
        reader = self._reader(name)
        if reader.shape[:1] != (self._count,):
            raise FormatError(
                f"{self.path}: {name!r} has shape {reader.shape}, not one row for each of "
                f"{self._count:,} samples"
            )
        return reader.whole(self.run)

    def has_array(self, name: str) -> bool:
        return self._store.metadata(name) is not None

    @property
    def is_remote(self) -> bool:
        return self.is_direct and super().is_remote
