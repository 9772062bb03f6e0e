"""The ways of making a batch, and the choice among them, made once when dataset, mode and
collate function are known.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from headrace.casting import as_array, cast_into, known_dtype
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch, stacked_targets
from headrace.datasets.core.reader import nothing_readable
from headrace.datasets.core.warnings import naming
from headrace.dtypes import ArraySpec
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.memory.recycled import RecycledBuffers
from headrace.memory.ring import empty, outside_slot
from headrace.memory.store import MISSING
from headrace.order.request import BatchRequest
from headrace.storage.source import RowSource

_log = logging.getLogger(__name__)

_STACKED = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": torch.float64}
"""What numbers become as they are stacked, by the kind of their dtype."""


def choose_way(dataset: BaseDataset, collating: Collating) -> BatchWay:
    """The way to the batches of a dataset, in its mode, with a collate function."""
    slow = SampleBySample(dataset, collating)
    own = dataset.sample_format.own_way(dataset, collating)
    if own is not None:
        return own
    if not (collating.stacks and is_bare(dataset)):
        return slow
    way: BatchWay = slow
    format_ = dataset.sample_format
    stored = _stored_inputs(dataset)
    value = format_.value_spec()
    if stored is not None:
        way = StraightFromStorage(dataset, slow, stored, format_.casts_to)
    elif value is not None:
        row = format_.input_spec(value)
        if row is not None and _is_known(row):
            way = RowByRow(dataset, slow, value, row)
    if dataset.mode.caches_samples and not dataset.holds_encoded:
        return FromMemory(dataset, slow, way)
    return way


def _stored_inputs(dataset: BaseDataset) -> ArraySpec | None:
    """Shape and dtype of the records, if they are inputs as they are stored, or cast, and are
    read for one batch at a time.
    """
    format_ = dataset.sample_format
    source = dataset.sample_source
    is_stored = format_.stores_values or format_.casts_to is not None
    if not (is_stored and format_.copies) or format_.draws:
        return None
    if dataset.mode.prefetches_records(source) or not isinstance(source, RowSource):
        return None
    spec = source.array_spec
    if spec is None or not _is_known(spec) or format_.input_spec(spec) != spec:
        return None
    return spec


def is_bare(dataset: BaseDataset) -> bool:
    """True if samples are inputs, or pairs of an input and an entry of `targets`, and nobody
    transforms them.
    """
    format_ = dataset.sample_format
    is_plain = format_.makes_plain_samples and not format_.splits_targets
    return is_plain and not (dataset.return_index or dataset.is_transformed)


class SampleBySample(BatchWay):
    """Makes each sample by itself, and collates them. It fits everything."""

    name = "sample by sample"

    def __init__(self, dataset: BaseDataset, collating: Collating) -> None:
        self._dataset = dataset
        self.collating = collating

    def make(self, request: BatchRequest, error: Exception | None = None) -> MadeBatch:
        with outside_slot():
            samples, indices = self._dataset.make_samples(request, error=error)
        return self.collated(samples, indices, request)

    def collated(
        self, samples: list[Any], indices: Sequence[int], request: BatchRequest
    ) -> MadeBatch:
        """The batch of finished samples."""
        return self.collating.batch_of(self._dataset, samples, indices, request)


class FastWay(BatchWay):
    """Writes inputs straight into their batch, where nobody transforms them.

    Args:
        dataset: whose batches it makes.
        slow: makes what no fast way can make.
        rest: makes the batches that this way can't make; None: `slow`.
    """

    def __init__(
        self, dataset: BaseDataset, slow: SampleBySample, rest: BatchWay | None = None
    ) -> None:
        self._dataset = dataset
        self._slow = slow
        self._rest = rest or slow
        self.writes_in_place: bool = self._rest.writes_in_place

    def make(self, request: BatchRequest, error: Exception | None = None) -> MadeBatch:
        if not request or not self._fits():  # a user may set a transform at any time
            return self._slow.make(request, error)
        return self._attempt(request, error)

    def _fits(self) -> bool:
        """True if samples still are what this way makes."""
        return is_bare(self._dataset)

    @abstractmethod
    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch: ...

    def fall_back(self, request: BatchRequest, error: Exception) -> MadeBatch:
        """The same batch by the slower way, which names the sample at fault. It is counted."""
        # as text: a record may be held, and an error holds frames
        _log.debug("%s: %s", self.name, repr(error))
        self._dataset.sample_reader.counts["fallbacks"] += 1
        # whose frames hold the batch's memory
        return self._rest.make(request, error.with_traceback(None))

    def with_targets(self, inputs: Any, indices: Sequence[int]) -> MadeBatch:
        """The batch of inputs, with targets if samples have any: as stacking the samples makes
        it.
        """
        dataset = self._dataset
        targets = dataset.targets
        if (
            isinstance(targets, np.ndarray)
            and targets.ndim == 1
            and targets.dtype.kind in _STACKED
            and targets.dtype != np.uint64
        ):
            picked = targets[np.asarray(indices, np.int64)]
            out = empty(picked.shape, _STACKED[targets.dtype.kind])
            np.copyto(out.numpy(), picked)
            return MadeBatch((inputs, out), len(indices))
        if targets is None and not dataset.sample_format.always_pairs:
            return MadeBatch(inputs, len(indices))
        each = [dataset.split_target(index, None)[1] for index in indices]
        return MadeBatch((inputs, stacked_targets(dataset, each, indices)), len(indices))


class FromMemory(FastWay):
    """Copies, or presents, what the mode holds; a batch that is not held wholly is made by
    another way.
    """

    name = "from memory"

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        dataset = self._dataset
        format_ = dataset.sample_format
        rows = dataset.mode.rows(dataset.whole_indices(request))
        if rows is None:
            return self._rest.make(request, error)
        spec = format_.input_spec(rows.spec)
        if spec is None or not _is_known(spec):
            return self._rest.make(request, error)
        out = empty_rows(len(request), spec)
        if format_.copies and not format_.draws:
            rows.copy_to(out)
        else:
            drawn = dataset.draw(request, rows.__getitem__)
            made = as_array(out)

            def write(number: int) -> None:
                format_.write_input(rows[number], drawn[number], made[number, ...])

            dataset.sample_reader.threads.copy(write, len(request), made.nbytes)
        if not rows.are_held():  # some were given back meanwhile
            return self._rest.make(request, error)
        dataset.sample_reader.counts["cache_hits"] += len(request)
        return self.with_targets(out, request)

    def explain(self) -> str:
        return f"{self.name}; until all samples of a batch are held, {self._rest.explain()}"


class StraightFromStorage(FastWay):
    """Reads records into their rows of the batch; those that are cast are read beside it first.

    Args:
        dataset, slow: see `FastWay`.
        spec: of the records.
        cast_to: the dtype of inputs; None: that of the records.
    """

    name = "straight from storage"

    def __init__(
        self,
        dataset: BaseDataset,
        slow: SampleBySample,
        spec: ArraySpec,
        cast_to: np.dtype[Any] | None = None,
    ) -> None:
        super().__init__(dataset, slow)
        self.writes_in_place = True
        self._stored = spec
        self._spec = ArraySpec(spec.shape, cast_to or spec.dtype)
        self._buffers = None if self._spec == spec else RecycledBuffers()

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        dataset = self._dataset
        mode = dataset.mode
        reader = dataset.sample_reader
        source = cast(RowSource, dataset.sample_source)
        wanted = dataset.whole_indices(request).tolist()
        out = empty_rows(len(wanted), self._spec)
        rows = as_array(out)
        held = mode.get(wanted)
        missing = [number for number, value in enumerate(held) if value is MISSING]
        start = time.perf_counter()
        try:
            if self._buffers is None and len(missing) == len(wanted) and rows.ndim > 1:
                source.read_into(wanted, rows)
            else:
                indices = [wanted[number] for number in missing]
                targets = [rows[number, ...] for number in missing]
                if self._buffers is None:
                    source.read_into(indices, targets)
                else:
                    self._read_and_cast(source, self._buffers, indices, targets)
        except Exception as caught:
            return self.fall_back(request, caught)
        reader.count_seconds("read_seconds", start)
        if mode.caches_samples or len(missing) < len(wanted):
            for number, value in enumerate(held):
                if value is MISSING:
                    mode.admit(wanted[number], rows[number, ...])
                else:
                    rows[number] = value
        reader.counts["cache_hits"] += len(wanted) - len(missing)
        reader.counts["cache_misses"] += len(missing)
        reader.counts["bytes_read"] += len(missing) * self._stored.nbytes
        return self.with_targets(out, request)

    def _read_and_cast(
        self,
        source: RowSource,
        buffers: RecycledBuffers,
        indices: list[int],
        rows: list[npt.NDArray[Any]],
    ) -> None:
        """Reads records into memory that is used again, and casts each into its row of the
        batch.
        """
        count = len(indices)
        if not count:
            return
        stored = self._stored
        nbytes = count * stored.nbytes
        read = np.frombuffer(buffers.take(nbytes), stored.dtype).reshape(count, *stored.shape)
        if stored.shape:
            source.read_into(indices, read)
        else:
            source.read_into(indices, [read[number, ...] for number in range(count)])
        self._dataset.sample_reader.threads.copy(
            lambda number: cast_into(read[number, ...], rows[number]), count, nbytes
        )


class RowByRow(FastWay):
    """Decodes each record, and writes its input into its row of the batch. What lies beside the
    inputs, such as masks, other ways add.
    """

    name = "decoded row by row"

    def __init__(
        self, dataset: BaseDataset, slow: SampleBySample, value: ArraySpec | None, row: ArraySpec
    ) -> None:
        super().__init__(dataset, slow)
        self.writes_in_place = True
        self._value = value
        self._row = row

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        dataset = self._dataset
        reader = dataset.sample_reader
        access = dataset.sample_access
        count = len(request)
        out = empty_rows(count, self._row)
        rows = as_array(out)
        beside = self._beside(count)
        fetched = reader.fetch(dataset.whole_indices(request).tolist(), access, error)
        drawn = dataset.draw(request, lambda number: self._drawn_from(fetched[number].value))

        def write(number: int) -> SampleError | None:
            value = drawn[number]
            if not isinstance(value, SampleError):
                value = reader.value(fetched[number], access)
            if isinstance(value, SampleError):
                return value
            index, whole = request[number], fetched[number].number
            return self._write(
                index, whole, value, drawn[number], rows[number, ...], beside, number
            )

        start = time.perf_counter()
        failures = reader.timed("decode", write, count)
        reader.count_seconds("decode_seconds", start)
        if any(failures):
            return self._readable(failures, request, out, beside)
        return self._batch(out, beside, request)

    def _beside(self, count: int) -> Any:
        """Room for what lies beside the inputs of so many samples."""
        return None

    def _drawn_from(self, value: Any) -> Any:
        """What `draw` gets of a value or record."""
        return value

    def _write_sample(
        self, index: int, value: Any, drawn: Any, row: npt.NDArray[Any], beside: Any, number: int
    ) -> None:
        """Writes a sample of a decoded value; `number` is its place in the batch."""
        self._dataset.sample_format.write_input(value, drawn, row)

    def _target(self, index: int, beside: Any, number: int) -> Any:
        """The target of a sample, by itself."""
        return self._dataset.split_target(index, None)[1]

    def _batch(self, out: torch.Tensor, beside: Any, indices: Sequence[int]) -> MadeBatch:
        """The batch of inputs, and what lies beside them."""
        return self.with_targets(out, indices)

    def _moved(self, beside: Any, good: list[int]) -> Any:
        """What lies beside the inputs, of some of the samples."""
        return beside

    def _write(
        self,
        index: int,
        whole: int,
        value: Any,
        drawn: Any,
        row: npt.NDArray[Any],
        beside: Any,
        number: int,
    ) -> SampleError | None:
        """Writes a sample into its row; or gives its error. (`whole`: its number in the source.)"""
        dataset = self._dataset
        format_ = dataset.sample_format
        if (
            self._value is not None
            and isinstance(value, np.ndarray)
            and (value.shape, value.dtype) != self._value
        ):  # NumPy would make it fit
            raise ConfigError(
                f"{type(dataset).__name__}: decode gives {value.dtype} {list(value.shape)} for "
                f"sample {index}, and value_spec() says "
                f"{self._value.dtype} {list(self._value.shape)}: fix the one or the other"
            )
        try:
            with naming(format_.decodes_late, dataset.sample_source.location, whole):
                self._write_sample(index, value, drawn, row, beside, number)
        except Exception as error:
            if not (format_.decodes_late and isinstance(error, FormatError)):
                error.add_note(
                    f"headrace: while making sample {index} ({dataset.source_of(index)})"
                )
                raise
            return dataset.sample_reader.failed(whole, "can't be decoded", error)
        return None

    def _readable(
        self,
        failures: list[SampleError | None],
        request: BatchRequest,
        out: torch.Tensor,
        beside: Any,
    ) -> MadeBatch:
        """The batch without the samples that can't be read, or with stand-ins for them."""
        dataset = self._dataset
        stand_ins: dict[int, list[Any]] = {}
        for number, failure in enumerate(failures):
            if failure is not None:
                index = request[number]
                stand_ins[number] = dataset.sample_reader.replacement(
                    index, dataset.source_of(index), failure
                )
        if callable(dataset.on_error):
            samples = []
            for number, index in enumerate(request):
                if number in stand_ins:
                    samples += stand_ins[number]
                else:
                    target = self._target(index, beside, number)
                    samples.append(dataset.make_sample(out[number], target))
            return self._slow.collated(samples, request, request)
        good = [number for number in range(len(request)) if number not in stand_ins]
        if not good:
            first = next(failure for failure in failures if failure is not None)
            raise nothing_readable(first, len(request))
        rows = as_array(out)
        for to, number in enumerate(good):
            if to != number:
                rows[to] = rows[number]
        indices = [request[number] for number in good]
        return self._batch(out[: len(good)], self._moved(beside, good), indices)


def _is_known(spec: ArraySpec) -> bool:
    """True if torch has such arrays, and they are not empty."""
    return 0 not in spec.shape and known_dtype(spec.dtype) is not None


def empty_rows(count: int, spec: ArraySpec) -> torch.Tensor:
    """Room for so many rows of a batch, in its buffer."""
    dtype = known_dtype(spec.dtype)
    assert dtype is not None
    return empty((count, *spec.shape), dtype)
