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
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import LibraryRows, ReadersSource
from headrace.formats.describe import Column, Description
from headrace.formats.episodes.windows import WindowOptions, Windows
from headrace.formats.source import one_after_the_other
from headrace.io.local.files import bytes_of
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct

# bytes of a band that is worth caching, and that chunks may make it
_BAND = 64 << 10
_MOST_BAND = 4 << 20
MASK = "mask"
"""Of windows: which steps lie inside of the episode."""


class EpisodeArrays:
    """The arrays of one key.

    Args:
        name: the key.
        row_shape, dtype: of a step; all arrays have the same.
        begins: for each episode the file that the array lies in and its first byte, if it lies
            there as it is; else (-1, -1).
        readers: read the others.
        reader_of: for each episode the number of its reader; -1: it has none.
        first_rows: for each episode the row of its reader's array that is its first step.
        window: steps of a window of this key; None: whole episodes.
    """

    def __init__(
        self,
        name: str,
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        begins: Sequence[tuple[int, int]],
        readers: Sequence[ArrayReader | LibraryRows],
        reader_of: Sequence[int],
        first_rows: IntArray,
        window: int | None,
    ) -> None:
        self.name = name
        self.row_shape = row_shape
        self.dtype = dtype
        self.window = window
        self.row_bytes: int = math.prod(row_shape) * dtype.itemsize
        self.holds_objects: bool = dtype.hasobject
        self.readers = list(readers)
        columns = np.array(begins, np.int64).reshape(-1, 2)
        self._files = SharedArray(columns[:, 0].copy())
        self._begins = SharedArray(columns[:, 1].copy())
        self._reader_of = SharedArray(np.array(reader_of, np.int64))
        self._first_rows = SharedArray(first_rows)

    def located(
        self, episodes: IntArray, firsts: IntArray, ends: IntArray
    ) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray, IntArray]:
        """Which spans of steps lie in files as they are, and of these file, first byte and end."""
        begins = self._begins.array[episodes]
        is_there = begins >= 0
        begins = begins[is_there]
        return (
            is_there,
            self._files.array[episodes[is_there]],
            begins + firsts[is_there] * self.row_bytes,
            begins + ends[is_there] * self.row_bytes,
        )

    def located_nbytes(self, lengths: IntArray) -> int:
        """Bytes of the arrays that lie in files as they are, by the steps of each episode."""
        return int(lengths[self._begins.array >= 0].sum()) * self.row_bytes

    def in_readers(self, episodes: IntArray) -> tuple[IntArray, IntArray]:
        """For each of some episodes the number of its reader, -1 if it has none, and the row of the
        reader's array that is its first step.
        """
        return self._reader_of.array[episodes], self._first_rows.array[episodes]

    @property
    def array_readers(self) -> list[ArrayReader]:
        """Those of `readers` that read numbers."""
        return [reader for reader in self.readers if isinstance(reader, ArrayReader)]

    def empty(self, count: int) -> npt.NDArray[Any]:
        """An array of so many steps."""
        return np.empty((count, *self.row_shape), self.dtype)

    def describe(self, way: str, steps: float) -> Column:
        """What so many steps in a row cost; `way`: by which what lies in files as it is is read."""
        ways = [reader.how for reader in self.readers]
        if (self._begins.array >= 0).any():
            ways.insert(0, way)
        sample = f"{self.dtype} {[round(steps), *self.row_shape]}"
        nbytes = int(steps * self.row_bytes)
        column = Column(self.name, "", sample, nbytes=nbytes, read=nbytes)
        if self.array_readers and not (self._begins.array >= 0).all():
            column = self.array_readers[0].describe(self.name, [steps, *self.row_shape])
        column.read_by = "; or ".join(dict.fromkeys(ways))
        return column


class _Spans(NamedTuple):
    """Spans of steps of a key, and where they go."""

    key: EpisodeArrays
    episodes: IntArray
    firsts: IntArray
    ends: IntArray
    outs: Sequence[npt.NDArray[Any]]


class EpisodeSource(ReadersSource):
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
        readers = [reader for key in keys for reader in key.array_readers]
        super().__init__("", opened, readers)
        self.paths = list(paths)
        self.names = PackedNames(name.encode() for name in names)
        self.windows = windows
        self.keys = tuple(keys)
        self.static = static
        self._file_of = SharedArray(np.array(files_of, np.int64))
        self._left_out = left_out
        self._rows = None if rows is None else tuple(map(SharedArray, rows))
        self._to_count: list[ArrayReader] = []

    def __len__(self) -> int:
        return len(self.windows)

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return None

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self._records(np.asarray(indices, np.int64), self._fetch)

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
        found = self._columns(episodes, starts, self._fetch, outs)
        for key in self.keys:
            if outs[key.name].dtype != key.dtype:
                for number, window in enumerate(found[key.name]):
                    cast_into(window, outs[key.name][number])
        outs[MASK][...] = self.windows.masks(episodes, starts)

    def _records(
        self, indices: IntArray, fetch: Callable[[Sequence[_Spans]], None]
    ) -> list[dict[str, Any]]:
        """Of each sample a dict of its keys, of what is static, and of the mask."""
        episodes, starts = self.windows.places(indices)
        columns = self._columns(episodes, starts, fetch)
        for name, values in self.static.items():
            of_episodes = values.array if isinstance(values, SharedArray) else values
            columns[name] = [of_episodes[episode] for episode in episodes.tolist()]
        if self.windows.options.window is not None:
            columns[MASK] = list(self.windows.masks(episodes, starts))
        return _by_sample(columns)

    def _columns(
        self,
        episodes: IntArray,
        starts: IntArray,
        fetch: Callable[[Sequence[_Spans]], None],
        into: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, list[Any]]:
        """For each key the windows that begin at some steps of episodes, padded; without windows
        whole episodes.

        Args:
            fetch: writes spans of steps to where they go.
            into: where windows are to be, [windows, window, ...] by key; not where it has another
                dtype.
        """
        found: dict[str, list[Any]] = {}
        spans: list[_Spans] = []
        padded: list[tuple[npt.NDArray[Any], npt.NDArray[Any], int, int, int]] = []
        lengths = self.windows.lengths[episodes]
        for key in self.keys:
            firsts, ends = self.windows.inside(episodes, starts, key.window)
            if key.holds_objects:
                found[key.name] = self._objects(key, episodes, starts, firsts, ends)
                continue
            if key.window is None:
                outs = [key.empty(count) for count in (ends - firsts).tolist()]
                found[key.name] = list(outs)
                spans.append(_Spans(key, episodes, firsts, ends, outs))
                continue
            windows = None if into is None else into[key.name]
            if windows is None or windows.dtype != key.dtype:
                windows = np.empty((len(episodes), key.window, *key.row_shape), key.dtype)
            outs = list(windows)
            is_cut = (firsts != starts) | (ends != starts + key.window)
            for number in np.flatnonzero(is_cut).tolist():
                first = int(firsts[number])
                outs[number] = key.empty(int(ends[number]) - first)
                place = (int(starts[number]), first, int(lengths[number]))
                padded.append((windows[number], outs[number], *place))
            found[key.name] = list(windows)
            spans.append(_Spans(key, episodes, firsts, ends, outs))
        fetch(spans)
        for missing in padded:
            self._pad(*missing)
        return found

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

    def _fetch(self, spans: Sequence[_Spans]) -> None:
        """Reads spans of steps."""
        columns: list[Sequence[IntArray]] = []
        buffers: list[memoryview] = []
        groups: dict[tuple[str, int], tuple[ArrayReader, list[int], list[Any]]] = {}
        for key, episodes, firsts, ends, outs in spans:
            if not key.row_bytes:
                continue
            is_there, *ranges = key.located(episodes, firsts, ends)
            has_bytes = ranges[2] > ranges[1]
            columns.append([column[has_bytes] for column in ranges])
            numbers = np.flatnonzero(is_there)[has_bytes]
            buffers += [bytes_of(outs[number]) for number in numbers.tolist()]
            readers, rows = key.in_readers(episodes)
            for number in np.flatnonzero(~is_there).tolist():
                if not outs[number].size:
                    continue
                reader = key.readers[readers[number]]
                assert isinstance(reader, ArrayReader)
                group = groups.setdefault((key.name, int(readers[number])), (reader, [], []))
                group[1].append(int(firsts[number] + rows[number]))
                group[2].append(outs[number])
        if buffers:
            joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
            self.files.read_into(ByteRanges(self.paths, *joined), buffers)
        waiting = list(groups.values())

        def read(number: int) -> None:
            reader, firsts, outs = waiting[number]
            reader.read_spans(np.array(firsts, np.int64), outs, one_after_the_other)

        self.run(read, len(waiting))
        self._to_count += [reader for reader, _, _ in waiting]

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
        columns = (*key.in_readers(episodes), starts, firsts, ends)
        for number, row, start, first, end in np.stack(columns, axis=1).tolist():
            reader = key.readers[number]
            assert isinstance(reader, LibraryRows)
            values = reader.read(range(row + first, row + end))
            if key.window is not None:
                steps = np.arange(start, start + key.window) - first
                values = [values[step] for step in np.clip(steps, 0, len(values) - 1).tolist()]
            found.append(values)
        return found

    # -- windows out of bands of steps

    def bands(self) -> Windows:
        """Bands as large as a window, or 64 KiB, or the tallest chunk that is decoded: what is
        worth caching together.
        """
        tallest = self._tallest()
        height = max(self.windows.options.window or 1, _BAND // max(1, self.step_bytes))
        if tallest * self.step_bytes <= _MOST_BAND:
            height = -(-height // tallest) * tallest
        lengths = self.windows.lengths
        height = max(1, min(height, int(lengths.max(initial=1))))
        return Windows(lengths, WindowOptions(height, height, 0, height - 1))

    def bands_of(self, indices: IntArray, bands: Windows) -> list[IntArray]:
        """The numbers of the bands that each window needs."""
        episodes, starts = self.windows.places(indices)
        firsts, ends = self.windows.inside(episodes, starts, self.windows.options.window)
        places = np.stack((episodes, firsts, ends), axis=1).tolist()
        return [bands.holding(*place) for place in places]

    def read_bands(
        self, numbers: Sequence[int], bands: Windows
    ) -> list[dict[str, npt.NDArray[Any]]]:
        """All keys of the steps of some bands."""
        episodes, starts = bands.places(np.asarray(numbers, np.int64))
        firsts, ends = bands.inside(episodes, starts, bands.options.window)
        spans: list[_Spans] = []
        for key in self.keys:
            outs = [key.empty(count) for count in (ends - firsts).tolist()]
            spans.append(_Spans(key, episodes, firsts, ends, outs))
        self._fetch(spans)
        return _by_sample({span.key.name: span.outs for span in spans})

    def cut(
        self,
        indices: IntArray,
        bands: Windows,
        held: Mapping[int, Mapping[str, npt.NDArray[Any]]],
    ) -> list[dict[str, Any]]:
        """Windows, as `read` gives them, out of bands of steps that have all of them."""

        def copy(spans: Sequence[_Spans]) -> None:
            for key, episodes, firsts, ends, outs in spans:
                places = np.stack((episodes, firsts, ends), axis=1).tolist()
                for out, (episode, first, end) in zip(outs, places, strict=True):
                    numbers = bands.holding(episode, first, end)
                    begins = bands.places(numbers)[1]
                    for number, begin in zip(numbers.tolist(), begins.tolist(), strict=True):
                        rows = held[number][key.name]
                        low = max(first, begin)
                        high = min(end, begin + len(rows))
                        out[low - first : high - first] = rows[low - begin : high - begin]

        return self._records(indices, copy)

    # -- where bytes lie

    def _located(self, indices: npt.NDArray[np.int64]) -> list[ByteRanges]:
        episodes, starts = self.windows.places(distinct(indices))
        parts = [ByteRanges.of([])]
        for key in self.keys:
            firsts, ends = self.windows.inside(episodes, starts, key.window)
            is_there, *columns = key.located(episodes, firsts, ends)
            parts.append(ByteRanges(self.paths, *columns))
            numbers, rows = key.in_readers(episodes)
            for number in distinct(numbers[~is_there]).tolist():
                reader = key.readers[number]
                if isinstance(reader, ArrayReader):
                    own = numbers == number
                    parts.append(reader.span_ranges((firsts + rows)[own], (ends + rows)[own]))
        return parts

    @property
    def is_remote(self) -> bool:
        if self.holds_objects or not super().is_remote:
            return False
        return all(reader.chunks.is_direct for reader in self._readers)

    @property
    def stored_nbytes(self) -> int:
        by_readers = sum(reader.chunks.stored_nbytes for reader in self._readers)
        return by_readers + sum(key.located_nbytes(self.windows.lengths) for key in self.keys)

    # -- blocks

    def _tallest(self) -> int:
        """Steps of the tallest chunk that is decoded as a whole; 1: there are none."""
        readers = (reader for reader in self._readers if reader.caches_chunks)
        return max((reader.chunks.grid.chunks[0] for reader in readers), default=1)

    @property
    def cut_nbytes(self) -> int:
        if self.windows.options.window is None or self._tallest() > 1:
            return 0
        return int(self.windows.lengths.sum()) * self.step_bytes

    def blocks_of(self, nbytes: int) -> IntArray | None:
        """Windows that begin in the same chunk of an episode, or within `nbytes` of it; whole
        episodes lie each by itself. Of replay buffers, windows or episodes that begin in the same
        chunk.
        """
        height = self._tallest()
        if self._rows is not None and height > 1:
            begins, edges = (shared.array for shared in self._rows)
            return self.windows.blocks(height, begins, edges)
        if self.windows.options.window is None:
            return None
        if height == 1:
            height = max(1, nbytes // max(1, self.step_bytes))
        edges = np.concatenate([[0], np.cumsum(self.windows.lengths)])
        return self.windows.blocks(height, edges[:-1], edges)

    @property
    def block_nbytes(self) -> int:
        """Bytes of the decoded chunks of a block."""
        steps = self.windows.options.window
        if steps is None and self._rows is not None:
            steps = int(self.windows.lengths.max(initial=0))
        if steps is None:
            return 0
        steps += self._tallest()
        total = 0
        for key in self.keys:
            largest = 0
            for reader in key.array_readers:
                if reader.caches_chunks:
                    chunks = reader.chunks
                    count = -(-steps // chunks.grid.chunks[0]) + 1
                    largest = max(largest, chunks.nbytes * chunks.grid.inner * count)
            total += largest
        return total

    # -- what it is

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of all keys; of objects nobody knows them."""
        return sum(key.row_bytes for key in self.keys if not key.holds_objects)

    def sizes(self) -> IntArray:
        """Bytes of the arrays of each sample ([n] int64)."""
        if self.windows.options.window is None:
            return self.windows.lengths * self.step_bytes
        keys = [key for key in self.keys if not key.holds_objects]
        return np.full(len(self), sum(key.row_bytes * (key.window or 0) for key in keys), np.int64)

    @property
    def holds_objects(self) -> bool:
        """True if there are values of any size."""
        return any(key.holds_objects for key in self.keys)

    def describe(self) -> Description:
        way = "ranges" if self.is_remote else "pread"
        lengths = self.windows.lengths
        options = self.windows.options
        parts = ["none"]
        mean = 0.0
        if len(lengths):
            mean = float(lengths.mean())
            parts = [f"{len(lengths):,}, of {lengths.min():,} to {lengths.max():,} steps"]
        if options.window is not None:
            parts.append(f"windows of {options.window:,} steps, {options.stride:,} apart")
            without = int((self.windows.counts == 0).sum())
            if without:
                parts.append(f"{without:,} are too short for one")
        if self._left_out:
            parts.append(f"left out, since they have no steps: {', '.join(self._left_out[:3])}")
        columns = [key.describe(way, float(key.window or mean)) for key in self.keys]
        return Description(columns, {"episodes": "; ".join(parts)}, stored=self.stored_nbytes)

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

    def location(self, index: int) -> str:
        episodes, starts = self.windows.places(np.array([index]))
        episode = int(episodes[0])
        path = self.paths[int(self._file_of.array[episode])]
        where = f"{redact(path)}, {self.names[episode].decode() or '/'}"
        window = self.windows.options.window
        if window is None:
            return where
        return f"{where}, steps {starts[0]} to {starts[0] + window - 1}"

    # -- the rest

    def take_counts(self) -> Counter[str]:
        counts = self.files.take_counts()  # there may be many readers
        for reader in self._to_count:
            counts.update(reader.counts)
            reader.counts.clear()
        self._to_count = []
        return counts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_to_count": []}


def _by_sample(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A dict per sample, of a list per key."""
    records = zip(*columns.values(), strict=True)
    return [dict(zip(columns, record, strict=True)) for record in records]
