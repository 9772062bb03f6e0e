"""Reads episodes, whole or in windows over time: arrays with a row per step, or ranges of the rows
of longer arrays.

NOTE [ from windows to arrays ]

* A key, such as "obs/image", has an array in each episode, or one for many episodes. Its rows, of
  one shape and dtype, are the steps.
* Windows of one length begin `stride` steps apart. They may begin before the first step of an
  episode, and end after its last one. They follow from the lengths of the episodes by arithmetic:
  there is no list of windows.
* Of a contiguous, uncompressed array only the file and the first byte are held. The steps that a
  batch needs, of all keys and episodes, are read by one call.
* Each other array has a reader. The steps that a batch needs of an array are read together, so that
  each chunk is decoded once; several arrays are read in threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray, ArraySpec, IntArray, distinct
from headrace.errors import FormatError
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ReadersSource, layout_fingerprint
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.source import Column, Description, one_after_the_other
from headrace.formats.tree import StoredArray
from headrace.io.local_files import bytes_of
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

# bytes of a band at least, and at most if it consists of whole chunks
_BAND = 64 << 10
_MOST_BAND = 4 << 20
MASK = "mask"
"""The key of the mask of a window: which steps are inside the episode."""


class WindowOptions(NamedTuple):
    """The windows of an episode.

    Attributes:
        window: steps of a window. None: samples are whole episodes.
        stride: steps from the start of one window to the start of the next.
        before: steps by which the first window starts before the episode.
        after: steps by which windows may reach past the end of the episode.
        pad: values of steps outside the episode: "edge": the first or last step; "constant": zeros.
    """

    window: int | None = None
    stride: int = 1
    before: int = 0
    after: int = 0
    pad: str = "edge"


class Windows:
    """The windows of some episodes; or, without a window, the episodes themselves.

    Args:
        lengths: number of steps of each episode, at least one ([episodes] int64).
        options: length, stride and padding of the windows.
    """

    def __init__(self, lengths: IntArray, options: WindowOptions) -> None:
        self.options = options
        counts = np.ones(len(lengths), np.int64)
        if options.window is not None:
            free = lengths - options.window + options.after + options.before
            counts = np.maximum(0, free // options.stride + 1)
        self._lengths = SharedArray(lengths)
        self._first = SharedArray(np.concatenate([[0], np.cumsum(counts)]))

    def __len__(self) -> int:
        return int(self._first.array[-1])

    @property
    def lengths(self) -> IntArray:
        """Number of steps of each episode ([episodes] int64)."""
        return self._lengths.array

    @property
    def counts(self) -> IntArray:
        """Number of windows of each episode ([episodes] int64)."""
        return np.diff(self._first.array)

    def places(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """The episode of each window, and the step at which it begins, which may be negative."""
        episodes = np.searchsorted(self._first.array, indices, side="right") - 1
        numbers = indices - self._first.array[episodes]
        return episodes, numbers * self.options.stride - self.options.before

    def inside(
        self, episodes: IntArray, starts: IntArray, window: int | None
    ) -> tuple[IntArray, IntArray]:
        """The first step to read of each window, and one past the last: at least one step."""
        lengths = self.lengths[episodes]
        if window is None:
            return np.zeros(len(episodes), np.int64), lengths
        firsts = np.clip(starts, 0, lengths - 1)
        return firsts, np.minimum(np.maximum(starts + window, firsts + 1), lengths)

    def holding(self, episodes: IntArray, firsts: IntArray, ends: IntArray) -> list[range]:
        """The numbers of the windows that contain each span of steps, for windows that don't
        overlap and begin at the first step.
        """
        begins = self._first.array[episodes]
        stride = self.options.stride
        return [*map(range, begins + firsts // stride, begins + -(-ends // stride))]

    def masks(self, episodes: IntArray, starts: IntArray) -> npt.NDArray[np.bool_]:
        """True for steps inside their episode ([windows, window] bool)."""
        steps = starts[:, None] + np.arange(self.options.window or 0)
        inside: npt.NDArray[np.bool_] = (steps >= 0) & (steps < self.lengths[episodes][:, None])
        return inside

    def blocks(self, height: int, begins: IntArray, edges: IntArray) -> IntArray:
        """Numbers of consecutive samples that begin in the same block of rows ([blocks] int64).

        Args:
            height: rows of a block.
            begins: the row of the first step of each episode ([episodes] int64).
            edges: the first row of each array, and one past the last ([arrays + 1] int64).
        """
        counts = -(-np.diff(edges) // height)
        firsts = np.cumsum(counts) - counts
        inside = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        borders = np.repeat(edges[:-1], counts) + inside * height
        episodes = np.searchsorted(begins, borders, side="right") - 1
        is_before = episodes < 0  # the first chosen episode may begin later
        episodes[is_before] = 0
        # windows of earlier episodes, and of this one; the first ones begin before its first step
        steps = borders - begins[episodes]
        own = -(-(steps + self.options.before) // self.options.stride)
        own = np.where(steps > 0, np.minimum(own, self.counts[episodes]), 0)
        begun = self._first.array[episodes] + own
        begun[is_before] = 0
        sizes: IntArray = np.diff(begun, prepend=0, append=len(self))
        return sizes[sizes > 0]


class Episode(NamedTuple):
    """An episode of a file.

    Attributes:
        path: path of the file.
        name: name of the episode: the path of its group, if it is one.
        arrays: its arrays by key.
        static: its values without a time axis, by name.
        first: the row of its arrays that is its first step.
        length: number of steps.
    """

    path: str
    name: str
    arrays: dict[str, StoredArray]
    static: dict[str, Any]
    first: int
    length: int

    @property
    def where(self) -> str:
        return f"{redact(self.path)}: {self.name or '/'}"


class StepKey:
    """One key of the steps.

    Args:
        name: the key.
        row_shape, dtype: shape and dtype of a step, in all episodes.
        window: steps of a window of this key. None: whole episodes.

    Attributes:
        readers: the readers of its arrays.
    """

    readers: Sequence[ArrayReader] = ()

    def __init__(
        self, name: str, row_shape: tuple[int, ...], dtype: np.dtype[Any], window: int | None
    ) -> None:
        self.name = name
        self.row_shape = row_shape
        self.dtype = dtype
        self.window = window
        self.row_bytes: int = math.prod(row_shape) * dtype.itemsize

    def empty(self, *steps: int) -> AnyArray:
        """An empty array of some steps, or of [windows, steps]."""
        return np.empty((*steps, *self.row_shape), self.dtype)

    def describe(self, way: str, steps: float) -> Column:
        """The cost of consecutive steps. `way`: how contiguous arrays are read."""
        nbytes = int(steps * self.row_bytes)
        sample = f"{self.dtype} {[round(steps), *self.row_shape]}"
        return Column(self.name, way, sample, nbytes=nbytes, read=nbytes)


class EpisodeArrays(StepKey):
    """The arrays of one key.

    Args:
        name, window: see `StepKey`.
        episodes: all episodes, at least one.
        numbers: numbers of the files by path.

    Attributes:
        readers: the readers of arrays that are chunked or compressed.

    Raises:
        FormatError: steps of two episodes differ in shape or dtype.
    """

    def __init__(
        self,
        name: str,
        episodes: Sequence[Episode],
        numbers: Mapping[str, int],
        window: int | None,
    ) -> None:
        first = episodes[0].arrays[name]
        super().__init__(name, first.shape[1:], first.dtype, window)
        readers: dict[int, Any] = {}
        # File and first byte of the first step, if the array is contiguous (else -1, -1); number of
        # its reader, and the row that is the first step, if it is not (else -1, -1).
        table = np.full((4, len(episodes)), -1)
        for at, episode in enumerate(episodes):
            array = episode.arrays[name]
            if (array.shape[1:], array.dtype) != (self.row_shape, self.dtype):
                raise FormatError(
                    f"{episode.where}: steps of {name!r} are {array.dtype} "
                    f"{list(array.shape[1:])}, and in {episodes[0].where} {self.dtype} "
                    f"{list(self.row_shape)}: name the episodes that are alike as episodes=, or "
                    "leave the key out of keys="
                )
            if array.reader is None:
                begin = array.begin + episode.first * self.row_bytes
                table[:2, at] = numbers[array.path], begin
            else:
                number, _ = readers.setdefault(id(array.reader), (len(readers), array.reader))
                table[2:, at] = number, episode.first
        self.readers = [reader for _, reader in readers.values()]
        self._table = SharedArray(table)

    def located(
        self, episodes: IntArray, firsts: IntArray, ends: IntArray
    ) -> tuple[IntArray, IntArray, list[tuple[ArrayReader, IntArray, IntArray]]]:
        """Locates spans of steps.

        Returns:
            The numbers of the spans in contiguous arrays; their files, first bytes and ends ([3,
            n]); and for each reader of other spans their numbers, and first rows and ends in its
            array ([2, n]).
        """
        files, begins, readers, rows = self._table.array[:, episodes]
        numbers = np.flatnonzero(begins >= 0)
        starts = begins + firsts * self.row_bytes
        stops = begins + ends * self.row_bytes
        found = []
        spans = np.stack([firsts + rows, ends + rows])
        for reader in distinct(readers[begins < 0]).tolist():
            own = (readers == reader).nonzero()[0]
            found.append((self.readers[reader], own, spans[:, own]))
        return numbers, np.stack([files, starts, stops])[:, numbers], found

    def stored_nbytes(self, lengths: IntArray) -> int:
        """Stored bytes of the arrays; `lengths`: the number of steps of each episode."""
        located = int(lengths[self._table.array[1] >= 0].sum()) * self.row_bytes
        return located + sum(reader.chunks.stored_nbytes for reader in self.readers)

    def describe(self, way: str, steps: float) -> Column:
        column = super().describe(way, steps)
        ways = [reader.how for reader in self.readers]
        if self.readers:
            column = self.readers[0].describe(self.name, [steps, *self.row_shape])
        if (self._table.array[1] >= 0).any():
            ways.insert(0, way)
        column.read_by = "; or ".join(dict.fromkeys(ways))
        return column


class _Spans(NamedTuple):
    """Spans of steps of a key, and the arrays that they are read into."""

    key: EpisodeArrays
    episodes: IntArray
    firsts: IntArray
    ends: IntArray
    outs: Sequence[AnyArray]


Fetch = Callable[[Sequence[_Spans]], None]
"""Reads spans of steps into their arrays."""


class EpisodeSource(ReadersSource):
    """Episodes, or windows over their steps: dicts of an array [steps, ...] for each key, and for
    windows of `MASK`, bool [window].

    Args:
        paths: paths of the files: first those of episodes, then others that contain arrays.
        file_of: number of the file of each episode ([episodes] int64).
        names: names of the episodes.
        windows: the windows of the episodes.
        keys: the keys and their arrays.
        static: by name, the value of each episode without a time axis.
        opened: open files and decoded chunks.
        rows: for replay buffers, in the concatenated rows of all files: the first row of each
            episode ([episodes] int64), and of each file, with the end ([files + 1] int64).
    """

    def __init__(
        self,
        paths: Sequence[str],
        file_of: IntArray,
        names: Iterable[str],
        windows: Windows,
        keys: Sequence[EpisodeArrays],
        static: dict[str, Sequence[Any] | SharedArray],
        opened: OpenArrays[Any],
        rows: tuple[IntArray, IntArray] | None = None,
    ) -> None:
        readers = [reader for key in keys for reader in key.readers]
        super().__init__("", opened, readers)
        self.paths: list[str] = list(paths)
        self.names: PackedNames = PackedNames(map(str.encode, names))
        self.windows = windows
        self.keys: tuple[EpisodeArrays, ...] = tuple(keys)
        self.static = static
        self._file_of = SharedArray(file_of)
        self._rows = None if rows is None else tuple(map(SharedArray, rows))

    def __len__(self) -> int:
        return len(self.windows)

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return None

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self._records(np.asarray(indices, np.int64), self._fetch)

    def read_windows(self, indices: IntArray, outs: Mapping[str, AnyArray]) -> None:
        """Writes windows into arrays [windows, window, ...] by key, of the dtypes of the keys, and
        their masks into that of `MASK`.
        """
        episodes, starts = self.windows.places(indices)
        self._columns(episodes, starts, self._fetch, outs)
        outs[MASK][...] = self.windows.masks(episodes, starts)

    def _records(self, indices: IntArray, fetch: Fetch) -> list[dict[str, Any]]:
        """A dict per sample: its keys, its static values, and its mask."""
        episodes, starts = self.windows.places(indices)
        columns = self._columns(episodes, starts, fetch, {})
        for name, values in self.static.items():
            of_episodes = values.array if isinstance(values, SharedArray) else values
            columns[name] = [of_episodes[episode] for episode in episodes.tolist()]
        if self.windows.options.window is not None:
            columns[MASK] = self.windows.masks(episodes, starts)
        return _by_sample(columns)

    def _columns(
        self,
        episodes: IntArray,
        starts: IntArray,
        fetch: Fetch,
        into: Mapping[str, AnyArray],
    ) -> dict[str, Any]:
        """For each key the padded windows that begin at these steps: [windows, window, ...], in the
        array of `into` if there is one. Without a window a list of whole episodes.
        """
        columns: dict[str, Any] = {}
        spans: list[_Spans] = []
        cut: list[tuple[AnyArray, int, int]] = []
        for key in self.keys:
            firsts, ends = self.windows.inside(episodes, starts, key.window)
            if key.window is None:
                outs = [key.empty(count) for count in (ends - firsts).tolist()]
                columns[key.name] = outs
                spans.append(_Spans(key, episodes, firsts, ends, outs))
                continue
            windows = into.get(key.name)
            if windows is None:
                windows = key.empty(len(episodes), key.window)
            outs = list(windows)
            # of a window outside its episode, the nearest step is read, to the nearest end
            begins = np.clip(firsts - starts, 0, key.window - 1)
            for number in np.flatnonzero(ends - firsts < key.window).tolist():
                begin = int(begins[number])
                end = begin + int(ends[number] - firsts[number])
                cut.append((outs[number], begin, end))
                outs[number] = outs[number][begin:end]
            columns[key.name] = windows
            spans.append(_Spans(key, episodes, firsts, ends, outs))
        fetch(spans)
        for window, begin, end in cut:
            window[:begin] = window[begin]
            window[end:] = window[end - 1]
        if self.windows.options.pad == "constant" and self.windows.options.window is not None:
            is_outside = ~self.windows.masks(episodes, starts)
            for key in self.keys:
                windows = columns[key.name]
                windows[is_outside[:, : key.window]] = np.zeros((), windows.dtype)
        return columns

    def _fetch(self, spans: Sequence[_Spans], overlap: bool | None = None) -> None:
        """Reads spans of steps. `overlap`: other spans share their steps. None: if windows do."""
        if overlap is None:
            overlap = self.windows.options.stride < (self.windows.options.window or 0)
        ranges = [np.zeros((3, 0), np.int64)]
        buffers: list[memoryview] = []
        waiting: list[tuple[ArrayReader, IntArray, list[AnyArray]]] = []
        for key, episodes, firsts, ends, outs in spans:
            if not key.row_bytes:
                continue
            numbers, places, others = key.located(episodes, firsts, ends)
            ranges.append(places)
            buffers += [bytes_of(outs[number]) for number in numbers.tolist()]
            for reader, own, (rows, _) in others:
                waiting.append((reader, rows, [outs[number] for number in own.tolist()]))
        if buffers:
            self.files.read_into(ByteRanges(self.paths, *np.concatenate(ranges, 1)), buffers)

        def read(number: int) -> None:
            reader, rows, outs = waiting[number]
            reader.read_spans(rows, outs, one_after_the_other, overlap)

        self.run(read, len(waiting))

    # -- windows out of bands of steps

    def bands(self) -> Windows:
        """Bands of steps that are cached together: as long as a window, 64 KiB, or the tallest
        chunk.
        """
        tallest = self._tallest
        height = max(self.windows.options.window or 1, _BAND // max(1, self.step_bytes))
        if tallest * self.step_bytes <= _MOST_BAND:
            height = -(-height // tallest) * tallest
        lengths = self.windows.lengths
        height = max(1, min(height, int(lengths.max(initial=1))))
        return Windows(lengths, WindowOptions(height, height, 0, height - 1))

    def bands_of(self, indices: IntArray, bands: Windows) -> list[range]:
        """The numbers of the bands of each window."""
        episodes, starts = self.windows.places(indices)
        firsts, ends = self.windows.inside(episodes, starts, self.windows.options.window)
        return bands.holding(episodes, firsts, ends)

    def read_bands(self, numbers: Sequence[int], bands: Windows) -> list[dict[str, AnyArray]]:
        """The steps of some bands: a dict by key for each."""
        episodes, starts = bands.places(np.asarray(numbers, np.int64))
        firsts, ends = bands.inside(episodes, starts, bands.options.window)
        spans: list[_Spans] = []
        for key in self.keys:
            outs = [key.empty(count) for count in (ends - firsts).tolist()]
            spans.append(_Spans(key, episodes, firsts, ends, outs))
        self._fetch(spans, overlap=False)
        return _by_sample({span.key.name: span.outs for span in spans})

    def cut(
        self,
        indices: IntArray,
        bands: Windows,
        held: Mapping[int, Mapping[str, AnyArray]],
    ) -> list[dict[str, Any]]:
        """Windows, as `read` returns them, from bands that contain all of their steps."""

        def copy(spans: Sequence[_Spans]) -> None:
            for key, episodes, firsts, ends, outs in spans:
                numbers = bands.holding(episodes, firsts, ends)
                spans_of = zip(outs, firsts.tolist(), ends.tolist(), numbers, strict=True)
                for out, first, end, needed in spans_of:
                    begin = first - first % bands.options.stride
                    for number in needed:
                        rows = held[number][key.name]
                        low = max(first, begin)
                        high = min(end, begin + len(rows))
                        out[low - first : high - first] = rows[low - begin : high - begin]
                        begin += len(rows)

        return self._records(indices, copy)

    # -- byte ranges

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        episodes, starts = self.windows.places(distinct(indices))
        parts = [ByteRanges.of([])]
        for key in self.keys:
            spans = self.windows.inside(episodes, starts, key.window)
            _, ranges, others = key.located(episodes, *spans)
            parts.append(ByteRanges(self.paths, *ranges))
            for reader, _, rows in others:
                parts.append(reader.span_ranges(rows[0], rows[1], missing))
        return parts

    @property
    def stored_nbytes(self) -> int:
        return sum(key.stored_nbytes(self.windows.lengths) for key in self.keys)

    # -- blocks

    @property
    def cut_nbytes(self) -> int:
        if self.windows.options.window is None or self._tallest > 1:
            return 0
        return self.steps_nbytes

    def blocks_of(self, nbytes: int) -> IntArray | None:
        """Numbers of windows that begin in the same chunk of an episode, or in the same `nbytes`.
        None: whole episodes. For replay buffers, of windows or episodes that begin in one chunk.
        """
        height = self._tallest
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
        steps += self._tallest
        total = 0
        for key in self.keys:
            decoded = [reader.chunks for reader in key.readers if reader.caches_chunks]
            sizes = [
                chunks.nbytes * chunks.grid.inner * (-(-steps // chunks.grid.chunks[0]) + 1)
                for chunks in decoded
            ]
            total += max(sizes, default=0)
        return total

    # -- what it is

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of all keys."""
        return sum(key.row_bytes for key in self.keys)

    @property
    def steps_nbytes(self) -> int:
        """Bytes of all steps of all keys."""
        return int(self.windows.lengths.sum()) * self.step_bytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of the arrays of all samples."""
        if self.windows.options.window is None:
            return self.steps_nbytes
        return len(self) * sum(key.row_bytes * (key.window or 0) for key in self.keys)

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
        columns = [key.describe(way, float(key.window or mean)) for key in self.keys]
        return Description(columns, {"episodes": "; ".join(parts)}, stored=self.stored_nbytes)

    def fingerprint(self) -> str:
        """A hash of names, lengths, keys, dtypes, shapes, and the options of windows."""
        keys = [[key.name, key.row_shape, key.dtype.str, key.window] for key in self.keys]
        layout = [
            [name.decode() for name in self.names],
            self.windows.lengths.tolist(),
            keys,
            sorted(self.static),
            self.windows.options,
        ]
        return layout_fingerprint(layout)

    def location(self, index: int) -> str:
        episodes, starts = self.windows.places(np.array([index]))
        episode = int(episodes[0])
        path = self.paths[int(self._file_of.array[episode])]
        where = f"{redact(path)}, {self.names[episode].decode() or '/'}"
        window = self.windows.options.window
        if window is None:
            return where
        return f"{where}, steps {starts[0]} to {starts[0] + window - 1}"


def _by_sample(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Turns a list per key into a dict per sample."""
    records = zip(*columns.values(), strict=True)
    return [dict(zip(columns, record, strict=True)) for record in records]
