"""From stored records to decoded values: a chain of sources, each of which stands over another one.

    Records -> Decoded              lazy
    Ahead -> Decoded                streaming
    Records -> Decoded -> Held      eager and cached
    Records -> Held -> Decoded      the same, where encoded records are held

All of them number samples as the storage does. A dataset and its views read from one chain, and so
share what is held.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headrace.casting import cast_into
from headrace.core.decoder import Decoder
from headrace.core.reader import SampleReader
from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import SampleError
from headrace.formats.source import Rows, RowSource, Source, row_at
from headrace.memory.budget import size_of
from headrace.memory.store import HeldRows

T = TypeVar("T")
Use = Callable[[int, Any], Any]
"""Receives the position of a sample among those that were asked for, and its value."""


class Access(NamedTuple):
    """The reader and decoder of the dataset or view that reads from a shared chain."""

    reader: SampleReader
    decoder: Decoder


class Coming(NamedTuple):
    """The batches of an epoch that a process has not yet read, the next one first."""

    key: Any
    """Identifies the epoch; equal keys mean the same epoch."""
    steps: range
    """Steps of the batches."""
    batches: Callable[[Sequence[int]], list[IntArray]]
    """From steps to the indices of each batch."""
    segments: Callable[[], IntArray | None] | None
    """The edges of runs of stored samples that are all used soon after their first one (see
    `EpochOrder.segments`). None: there is no memory for the open runs.
    """
    whole: Callable[[IntArray], IntArray]
    """From indices in the batches to numbers of records."""


class ValueSource(ABC):
    """Numbered values over a `parent`.

    `announce`, `find` and `close` go on to the parent. `row_spec`, `read_into` and `is_direct`
    don't: without them each value is read by `each`. `rows` is asked of `Held` alone.
    """

    is_direct = False
    """True if values are read straight from the storage, so that a batch may be read there past
    this source: they are neither cached nor read ahead by threads.
    """
    holds: str = ""
    """What a mode of one's own holds, in words, for `explain()`; "": what the loading mode says."""

    def __init__(self, parent: ValueSource) -> None:
        self.parent = parent

    @abstractmethod
    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        """Calls `use` for each value as soon as it is available, perhaps in threads.

        Returns:
            What `use` returned for each; a SampleError for each sample that can't be read and may
            be skipped.

        Raises:
            SampleError: a sample can't be read and may not be skipped.
        """

    def read(self, indices: Sequence[int], access: Access) -> list[Any]:
        """Returns the values; a SampleError for each that can't be read and may be skipped."""
        return self.each(indices, as_it_is, access)

    def row_spec(self, decoder: Decoder) -> ArraySpec | None:
        """Shape and dtype of all values, if `read_into` can read them. None: it can't."""
        return None

    def read_into(self, indices: Sequence[int], rows: Rows, access: Access) -> None:
        """Writes values into arrays of `row_spec`, which are undefined if anything is raised."""
        raise NotImplementedError

    def rows(self, indices: IntArray) -> HeldRows | None:
        """Values that are held as arrays of one shape and dtype, without a copy. None: not all
        are.
        """
        return None

    def announce(self, coming: Coming) -> None:
        """Announces the next batches, which a streaming dataset prefetches."""
        self.parent.announce(coming)

    def find(self, kind: type[T]) -> T | None:
        """The source of that class in the chain, if there is one."""
        return self if isinstance(self, kind) else self.parent.find(kind)

    def close(self) -> None:
        """Frees what is held or was read ahead."""
        self.parent.close()


def as_it_is(position: int, value: Any) -> Any:
    """The `Use` of `ValueSource.read`."""
    return value


def used(values: list[Any], use: Use, access: Access) -> list[Any]:
    """Calls `use` with each value, and returns the results; errors as they are."""
    if use is as_it_is:
        return values

    def one(position: int) -> Any:
        value = values[position]
        return value if isinstance(value, SampleError) else use(position, value)

    return access.reader.threads.map(one, len(values))


class Records(ValueSource):
    """The records of a storage source."""

    is_direct = True

    def __init__(self, source: Source) -> None:
        self.source = source

    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        reader = access.reader
        start = time.perf_counter()
        records = reader.records(list(indices), self.read_records)
        reader.count_seconds("read_seconds", start)
        reader.counts["cache_misses"] += len(records)
        reader.counts["bytes_read"] += sum(
            size_of(record) for record in records if hasattr(record, "__len__")
        )
        return used(records, use, access)

    def read_records(self, indices: Sequence[int]) -> list[Any]:
        """Returns records; raises if one of them can't be read."""
        return self.source.read(indices)

    def row_spec(self, decoder: Decoder) -> ArraySpec | None:
        if not self.is_direct or not isinstance(self.source, RowSource):
            return None
        return self.source.array_spec

    def read_into(self, indices: Sequence[int], rows: Rows, access: Access) -> None:
        assert isinstance(self.source, RowSource)
        start = time.perf_counter()
        self.source.read_into(indices, rows)
        reader = access.reader
        reader.count_seconds("read_seconds", start)
        reader.counts["cache_misses"] += len(rows)
        reader.counts["bytes_read"] += len(rows) * row_at(rows, 0).nbytes

    def announce(self, coming: Coming) -> None:
        pass

    def find(self, kind: type[T]) -> T | None:
        return self if isinstance(self, kind) else None

    def close(self) -> None:
        pass


class Decoded(ValueSource):
    """Values that the decoder of the reading dataset makes of records."""

    @property
    def is_direct(self) -> bool:  # type: ignore[override]
        return self.parent.is_direct

    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        reader = access.reader
        decoder = access.decoder
        records = self.parent.read(indices, access)
        start = time.perf_counter()
        if decoder.decodes_batches:
            pairs = zip(indices, records, strict=True)
            sound = [pair for pair in pairs if not isinstance(pair[1], SampleError)]

            def failed(position: int, what: str, error: Exception) -> SampleError:
                return reader.failed(sound[position][0], what, error)

            decoded = iter(decoder.decode_batch(sound, failed))
            values = [each if isinstance(each, SampleError) else next(decoded) for each in records]
            made = used(values, use, access)
        else:

            def one(position: int) -> Any:
                value = reader.decoded(indices[position], records[position], decoder)
                return value if isinstance(value, SampleError) else use(position, value)

            made = reader.threads.map(one, len(records))
        reader.count_seconds("decode_seconds", start)
        return made

    def row_spec(self, decoder: Decoder) -> ArraySpec | None:
        spec = self.parent.row_spec(decoder)
        if spec is None or decoder.stores_values:
            return spec
        if decoder.casts_to is None:
            return None
        return ArraySpec(spec.shape, decoder.casts_to)

    def read_into(self, indices: Sequence[int], rows: Rows, access: Access) -> None:
        stored = self.parent.row_spec(access.decoder)
        assert stored is not None
        count = len(rows)
        if access.decoder.stores_values or not count or row_at(rows, 0).dtype == stored.dtype:
            self.parent.read_into(indices, rows, access)
            return
        records = np.empty((count, *stored.shape), stored.dtype)
        self.parent.read_into(indices, as_rows(records), access)

        def cast_row(number: int) -> None:
            cast_into(records[number, ...], row_at(rows, number))

        access.reader.threads.map(cast_row, count, records.nbytes)


def read_many(source: ValueSource, indices: Sequence[int], access: Access) -> list[Any] | AnyArray:
    """Returns the values of many samples, as `ValueSource.read` does; those that are rows as they
    are stored as one array [samples, ...].
    """
    spec = source.row_spec(access.decoder)
    if spec is None or len(indices) == 1:
        return source.read(indices, access)
    rows = np.empty((len(indices), *spec.shape), spec.dtype)
    try:
        source.read_into(indices, as_rows(rows), access)
    except Exception:  # the other way names the sample at fault
        return source.read(indices, access)
    return rows


def as_rows(array: AnyArray) -> Rows:
    """The rows of an array [samples, ...], as `read_into` takes them."""
    if array.ndim > 1:
        return array
    return [array[number, ...] for number in range(len(array))]
