"""Episodes: arrays whose rows are the steps of one recording, or runs of rows of longer ones, read
as a whole or in windows over time.

NOTE [ from windows to arrays ]

* A key, such as "obs/image", has one array in each episode, or one for many; its rows, all of one
  shape and dtype, are the steps.
* Where arrays lie in their file as they are, in one piece, nothing is held of each but file and
  first byte, and the steps that a batch needs of all keys and episodes are read by one call.
* Other arrays have a reader each. What a batch needs of one is read together, so that a chunk is
  decoded once; several in threads.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import HeadraceError
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct
from headrace.storage.arrays.reader import ArrayReader, OpenArrays
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.blocks import block_length
from headrace.storage.describe import Description
from headrace.storage.episodes.steps import EpisodeArrays, PendingSteps
from headrace.storage.episodes.windows import Bands, Windows
from headrace.storage.source import Locatable, one_after_the_other

# bytes of a band that is worth caching, and that chunks may make it
_BAND, _MOST_BAND = 64 << 10, 4 << 20
MASK = "mask"
"""Of windows: which steps lie inside of the episode."""


class EpisodeSource(Locatable):
    """Episodes, or windows over their steps: dicts of an array [steps, ...] for each key; with
    windows also `MASK`, bool [window].

    Args:
        paths: of the files; those at the front are numbered as `files_of` has them, others may hold
            arrays.
        files_of: the number of the file of each episode.
        names: of the episodes: the paths of their groups, if each is one.
        windows: which steps a sample has.
        keys: the arrays.
        static: by name the value of each episode that has no axis of time.
        opened: what is open and decoded.
        left_out: names of episodes that have no steps.
        rows: of replay buffers, with the rows of all files one after the other: [episodes] those of
            the first steps, and [files + 1] where those of each file begin.
    """

    def __init__(
        self,
        paths: Sequence[str],
        files_of: Sequence[int],
        names: Sequence[str],
        windows: Windows,
        keys: Sequence[EpisodeArrays],
        static: dict[str, Sequence[Any] | SharedArray],
        opened: OpenArrays[Any],
        left_out: Sequence[str] = (),
        rows: tuple[IntArray, IntArray] | None = None,
    ) -> None:
        self.paths, self.names = list(paths), PackedNames(name.encode() for name in names)
        self._file_of = SharedArray(np.array(files_of, np.int64))
        self.windows, self.keys, self.static, self.left_out = (
            windows,
            tuple(keys),
            static,
            tuple(left_out),
        )
        self._opened, self.files = opened, opened.files
        self._rows = None if rows is None else tuple(map(SharedArray, rows))
        self._to_count: list[ArrayReader] = []

    def __len__(self) -> int:
        return len(self.windows)

    # -- reading

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        episodes, starts = self.windows.places(np.asarray(indices, np.int64))
        return self._records(self.read_steps(episodes, starts), episodes, starts)

    def read_windows(
        self,
        indices: IntArray,
        outs: Mapping[str, npt.NDArray[Any]],
        cast_into: Callable[[npt.NDArray[Any], npt.NDArray[Any]], None],
    ) -> None:
        """Writes windows into arrays [windows, window, ...] by key, and their masks into that of
        `MASK`. Those of another dtype than the key's are written by `cast_into`, which gets a
        window and its place.
        """
        episodes, starts = self.windows.places(indices)
        found = self.read_steps(episodes, starts, outs)
        for key in self.keys:
            if outs[key.name].dtype != key.dtype:
                for number, window in enumerate(found[key.name]):
                    cast_into(window, outs[key.name][number])
        outs[MASK][...] = self.windows.masks(episodes, starts)

    def _records(
        self, columns: dict[str, list[Any]], episodes: IntArray, starts: IntArray
    ) -> list[dict[str, Any]]:
        """Of each sample a dict of its keys, of what is static, and of the mask."""
        for name, values in self.static.items():
            columns[name] = [_of(values, episode) for episode in episodes.tolist()]
        if self.windows.options.window is not None:
            columns[MASK] = list(self.windows.masks(episodes, starts))
        return [
            dict(zip(columns, record, strict=True))
            for record in zip(*columns.values(), strict=True)
        ]

    def read_steps(
        self,
        episodes: IntArray,
        starts: IntArray,
        into: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, list[Any]]:
        """For each key the windows that begin at some steps of episodes, padded; without windows
        whole episodes.

        Args:
            into: where windows are to be, [windows, window, ...] by key; not where it has another
                dtype.
        """
        pending, found, lengths = (
            PendingSteps(self.paths),
            dict[str, list[Any]](),
            self.windows.lengths[episodes],
        )
        padded: list[tuple[npt.NDArray[Any], npt.NDArray[Any], int, int, int]] = []
        for key in self.keys:
            firsts, ends = self.windows.inside(episodes, starts, key.window)
            if key.holds_objects:
                found[key.name] = self._objects(key, episodes, starts, firsts, ends)
                continue
            if key.window is None:
                outs = [
                    np.empty((count, *key.row_shape), key.dtype)
                    for count in (ends - firsts).tolist()
                ]
                found[key.name] = list(outs)
            else:
                given = None if into is None else into[key.name]
                if given is None or given.dtype != key.dtype:
                    given = np.empty((len(episodes), key.window, *key.row_shape), key.dtype)
                whole = given
                found[key.name] = list(whole)
                outs = list(whole)
                for number in np.flatnonzero(
                    (firsts != starts) | (ends != starts + key.window)
                ).tolist():
                    outs[number] = np.empty(
                        (int(ends[number] - firsts[number]), *key.row_shape), key.dtype
                    )
                    padded.append(
                        (
                            whole[number],
                            outs[number],
                            int(starts[number]),
                            int(firsts[number]),
                            int(lengths[number]),
                        )
                    )
            pending.add(key, episodes, firsts, ends, outs)
        self._fetch(pending)
        for missing in padded:
            self._pad(*missing)
        return found

    # -- windows out of bands of steps

    def bands(self) -> Bands:
        """Bands as large as a window, or 64 KiB, or the tallest chunk that is decoded: what is
        worth caching together.
        """
        window, tallest = self.windows.options.window or 1, self._tallest()
        height = max(window, _BAND // max(1, self.step_bytes))
        if tallest * self.step_bytes <= _MOST_BAND:
            height = -(-height // tallest) * tallest
        return Bands(
            self.windows.lengths, max(1, min(height, int(self.windows.lengths.max(initial=1))))
        )

    def bands_of(self, indices: IntArray, bands: Bands) -> list[IntArray]:
        """The numbers of the bands that each window needs."""
        episodes, starts = self.windows.places(indices)
        firsts, ends = self.windows.inside(episodes, starts, self.windows.options.window)
        return [
            bands.of(*place)
            for place in zip(episodes.tolist(), firsts.tolist(), ends.tolist(), strict=True)
        ]

    def read_bands(self, numbers: Sequence[int], bands: Bands) -> list[dict[str, npt.NDArray[Any]]]:
        """All keys of the steps of some bands."""
        pending, (episodes, firsts, ends) = (
            PendingSteps(self.paths),
            bands.runs(np.asarray(numbers, np.int64)),
        )
        columns: dict[str, list[npt.NDArray[Any]]] = {}
        for key in self.keys:
            columns[key.name] = [
                np.empty((count, *key.row_shape), key.dtype) for count in (ends - firsts).tolist()
            ]
            pending.add(key, episodes, firsts, ends, columns[key.name])
        self._fetch(pending)
        return [
            dict(zip(columns, band, strict=True)) for band in zip(*columns.values(), strict=True)
        ]

    def cut(
        self, indices: IntArray, bands: Bands, held: Mapping[int, Mapping[str, npt.NDArray[Any]]]
    ) -> list[dict[str, Any]]:
        """Windows, as `read` gives them, out of bands of steps that have all of them."""
        episodes, starts = self.windows.places(indices)
        columns: dict[str, list[Any]] = {}
        for key in self.keys:
            firsts, ends = self.windows.inside(episodes, starts, key.window)
            columns[key.name] = [
                self._cut(key, place, bands, held)
                for place in zip(
                    episodes.tolist(), starts.tolist(), firsts.tolist(), ends.tolist(), strict=True
                )
            ]
        return self._records(columns, episodes, starts)

    def _cut(
        self,
        key: EpisodeArrays,
        place: tuple[int, int, int, int],
        bands: Bands,
        held: Mapping[int, Mapping[str, npt.NDArray[Any]]],
    ) -> npt.NDArray[Any]:
        episode, start, first, end = place
        window = np.empty((key.window or 0, *key.row_shape), key.dtype)
        is_whole = first == start and end == start + len(window)
        part = window if is_whole else np.empty((end - first, *key.row_shape), key.dtype)
        for number in bands.of(episode, first, end).tolist():
            rows, begin = held[number][key.name], bands.begin(number, episode)
            low, high = max(first, begin), min(end, begin + len(rows))
            part[low - first : high - first] = rows[low - begin : high - begin]
        if not is_whole:
            self._pad(window, part, start, first, int(self.windows.lengths[episode]))
        return window

    def _pad(
        self, window: npt.NDArray[Any], part: npt.NDArray[Any], start: int, first: int, length: int
    ) -> None:
        """Fills a window that begins at a step, of an episode that has `part` of it from another
        step on.
        """
        steps = np.arange(start, start + len(window))
        window[...] = part[np.clip(steps - first, 0, len(part) - 1)]
        if self.windows.options.pad == "constant":
            window[(steps < 0) | (steps >= length)] = np.zeros((), window.dtype)

    def _fetch(self, pending: PendingSteps) -> None:
        ranges, buffers = pending.ranges()
        if buffers:
            self.files.read_into(ranges, buffers)
        groups = list(pending.by_reader.values())

        def read(number: int) -> None:
            reader, firsts, outs = groups[number]
            reader.read_spans(np.array(firsts, np.int64), outs, one_after_the_other)

        self.run(read, len(groups))
        self._to_count += [reader for reader, _, _ in groups]

    def _objects(
        self,
        key: EpisodeArrays,
        episodes: IntArray,
        starts: IntArray,
        firsts: IntArray,
        ends: IntArray,
    ) -> list[list[Any]]:
        """Windows of strings, or of arrays of any length, as lists; those at the ends have the
        first or last one again.
        """
        found: list[list[Any]] = []
        columns = (key.reader_numbers(episodes), key.first_rows(episodes), starts, firsts, ends)
        for number, row, start, first, end in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            reader = key.readers[number]
            assert isinstance(reader, LibraryRows)
            values = reader.read(range(row + first, row + end))
            steps = (
                range(end - first)
                if key.window is None
                else range(start - first, start - first + key.window)
            )
            found.append([values[min(max(step, 0), len(values) - 1)] for step in steps])
        return found

    # -- where bytes lie

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        episodes, starts = self.windows.places(distinct(indices))
        parts: list[ByteRanges] = []
        try:
            for key in self.keys:
                firsts, ends = self.windows.inside(episodes, starts, key.window)
                is_there, *columns = key.located(episodes, firsts, ends)
                parts.append(ByteRanges(self.paths, *columns))
                numbers, rows = key.reader_numbers(episodes), key.first_rows(episodes)
                for number in distinct(numbers[~is_there]).tolist():
                    reader = key.readers[number]
                    if isinstance(reader, ArrayReader):
                        mine = numbers == number
                        parts.append(
                            reader.span_ranges(firsts[mine] + rows[mine], ends[mine] + rows[mine])
                        )
        # to know it something had to be read, which failed: reading the samples will say so
        except HeadraceError:
            return ByteRanges.of([])
        return ByteRanges.joined(parts) if parts else ByteRanges.of([])

    @property
    def locating_needs_io(self) -> bool:
        return any(reader.chunks.needs_io for key in self.keys for reader in key.array_readers)

    @property
    def is_remote(self) -> bool:
        is_direct = not self.holds_objects and all(
            reader.chunks.is_direct for key in self.keys for reader in key.array_readers
        )
        return is_direct and super().is_remote

    @property
    def stored_nbytes(self) -> int:
        by_readers = sum(
            reader.chunks.stored_nbytes for key in self.keys for reader in key.array_readers
        )
        return by_readers + sum(key.located_nbytes(self.windows.lengths) for key in self.keys)

    # -- blocks

    def _block_steps(self, nbytes: int) -> int:
        """Steps of a block: of chunks that are decoded as a whole those of the tallest; else as
        many as take `nbytes`.
        """
        tallest = self._tallest()
        return tallest if tallest > 1 else max(1, nbytes // max(1, self.step_bytes))

    def _tallest(self) -> int:
        """Steps of the tallest chunk that is decoded as a whole; 1: there are none."""
        heights = (
            reader.chunks.grid.chunks[0]
            for key in self.keys
            for reader in key.array_readers
            if reader.caches_chunks
        )
        return max(heights, default=1)

    @property
    def cut_nbytes(self) -> int:
        if self.windows.options.window is None or self._tallest() > 1:
            return 0
        return int(self.windows.lengths.sum()) * self.step_bytes

    def blocks(self) -> IntArray | None:
        return self.blocks_of(block_length(self.cut_nbytes))

    def blocks_of(self, nbytes: int) -> IntArray | None:
        """Windows that begin in the same chunk of an episode, or within `nbytes` of it; whole
        episodes lie each by itself. Of replay buffers, windows or episodes that begin in the same
        chunk.
        """
        if self._rows is not None and self._tallest() > 1:
            begins, edges = (shared.array for shared in self._rows)
            return self.windows.blocks(self._tallest(), begins, edges)
        if self.windows.options.window is None:
            return None
        edges = np.concatenate([[0], np.cumsum(self.windows.lengths)])
        return self.windows.blocks(self._block_steps(nbytes), edges[:-1], edges)

    @property
    def block_nbytes(self) -> int:
        window = self.windows.options.window
        if window is None and self._rows is not None:
            window = int(self.windows.lengths.max(initial=0))
        return 0 if window is None else self._chunk_bytes(window)

    def _chunk_bytes(self, window: int) -> int:
        """Bytes of the decoded chunks of a block, whose samples have at most so many steps."""
        steps, total = self._block_steps(0), 0
        for key in self.keys:
            sizes = [
                chunks.nbytes
                * chunks.grid.inner
                * (-(-(steps + window) // chunks.grid.chunks[0]) + 1)
                for chunks in (
                    reader.chunks for reader in key.array_readers if reader.caches_chunks
                )
            ]
            total += max(sizes, default=0)
        return total

    def hold_chunks(self, nbytes: int) -> None:
        self._opened.chunks.resize(nbytes)

    # -- what it is

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of all keys; of objects nobody knows them."""
        return sum(key.row_bytes for key in self.keys if not key.holds_objects)

    def sizes(self) -> IntArray:
        """Bytes of the arrays of each sample ([n] int64)."""
        if self.windows.options.window is None:
            return self.windows.lengths * self.step_bytes
        nbytes = sum(
            key.row_bytes * (key.window or 0) for key in self.keys if not key.holds_objects
        )
        return np.full(len(self), nbytes, np.int64)

    @property
    def holds_objects(self) -> bool:
        """True if there are values of any size."""
        return any(key.holds_objects for key in self.keys)

    def describe(self) -> Description:
        way = "ranges" if self.is_remote else "pread"
        lengths, options = self.windows.lengths, self.windows.options
        told = (
            f"{len(lengths):,}, of {int(lengths.min()):,} to {int(lengths.max()):,} steps"
            if len(lengths)
            else "none"
        )
        if options.window is not None:
            none = int((self.windows.counts == 0).sum())
            told += f"; windows of {options.window:,} steps, {options.stride:,} apart"
            told += f"; {none:,} are too short for one" if none else ""
        told += (
            f"; left out, since they have no steps: {', '.join(self.left_out[:3])}"
            if self.left_out
            else ""
        )
        mean = float(lengths.mean()) if len(lengths) else 0.0
        columns = [key.describe(way, float(key.window or mean)) for key in self.keys]
        return Description(columns, {"episodes": told}, stored=self.stored_nbytes)

    def fingerprint(self) -> str:
        """A hash of names, lengths, keys, dtypes, shapes, and of how windows lie."""
        keys = [[key.name, key.row_shape, key.dtype.str, key.window] for key in self.keys]
        layout = [
            [name.decode() for name in self.names],
            self.windows.lengths.tolist(),
            keys,
            sorted(self.static),
            self.windows.options,
        ]
        return hashlib.blake2b(json.dumps(layout).encode(), digest_size=16).hexdigest()

    def place(self, index: int) -> tuple[str, str, int]:
        """The file, the group and the first step of a sample, which may be below 0."""
        episodes, starts = self.windows.places(np.array([index]))
        episode = int(episodes[0])
        return (
            self.paths[int(self._file_of.array[episode])],
            self.names[episode].decode(),
            int(starts[0]),
        )

    def location(self, index: int) -> str:
        path, name, start = self.place(index)
        window = self.windows.options.window
        steps = "" if window is None else f", steps {start} to {start + window - 1}"
        return f"{redact(path)}, {name or '/'}{steps}"

    # -- the rest

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        self._opened.chunks.close()
        return super().read_afresh(indices)

    def take_counts(self) -> Counter[str]:
        counts, readers = super().take_counts(), self._to_count
        self._to_count = []
        for reader in readers:
            counts.update(reader.counts)
            reader.counts.clear()
        return counts

    def close(self) -> None:
        """Closes what this process has open; decoded chunks are forgotten."""
        self._opened.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_to_count": []}


def _of(values: Sequence[Any] | SharedArray, episode: int) -> Any:
    return values.array[episode] if isinstance(values, SharedArray) else values[episode]
