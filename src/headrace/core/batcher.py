"""Makes batches: directly in the memory of the batch if nothing needs single samples, else from
samples. Both ways give the same batch, bit for bit (law 1).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from headrace.casting import as_array, cast_into, known_dtype
from headrace.collate import list_collate, stack_collate
from headrace.collate.stack import Step, stack_tree
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.held import Held
from headrace.core.reader import NotTogetherError
from headrace.core.values import as_rows
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import CollateError, ConfigError, FormatError, SampleError
from headrace.memory.ring import empty, outside_slot
from headrace.order.ranks import BatchRequest
from headrace.order.seeding import OF_COLLATE, SampleSeeder, preserved_rng

NameOf = Callable[[int], str]
"""Names the sample at a position of a batch."""

_log = logging.getLogger(__name__)
_HELD = "from memory"
_STORED = "straight from storage"
_DECODED = "decoded row by row"
_SAMPLES = "sample by sample"
_STACKED = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": torch.float64}
"""What numbers become as they are stacked, by the kind of their dtype."""


class MadeBatch(NamedTuple):
    """A finished batch."""

    batch: Any
    samples: int


Way = Callable[["Batcher", BatchRequest], MadeBatch | None]
"""Makes a batch; None: it has to be made in another way."""


class BatchReader(ABC):
    """A way of making batches that only one format has."""

    name: str
    """What `explain()` calls it."""
    writes_in_place: bool = True
    """True if samples are written straight into their batch."""

    @abstractmethod
    def read(self, request: BatchRequest) -> MadeBatch | None:
        """The batch of a request of at least one sample. None: it has to be made sample by sample.

        Raises:
            NotTogetherError: the samples can't be read together.
        """


class Collating:
    """Calls a collate function, with random numbers keyed by the batch, and with the samples' names
    in its errors.

    Args:
        function: the collate function. None: the one sample is the batch.
        of_one: True if the dataset yields batches, each of which the function receives.
    """

    def __init__(self, function: Callable[[Any], Any] | None, of_one: bool = False) -> None:
        self.function = function
        self._of_one = of_one
        self.stacks: bool = self.calls(stack_collate)
        """True if samples are stacked."""
        self._is_random = function not in (None, stack_collate, list_collate)
        # another may have chosen among them
        self._names_samples = getattr(function, "__module__", "").startswith("headrace.")
        self._seeder: SampleSeeder | None = None
        self.seconds: float = 0.0
        """Seconds that the function took since somebody set this to 0."""

    @property
    def is_users(self) -> bool:
        """True if the function is the user's own."""
        return self.function is not None and not self._names_samples

    def calls(self, function: Callable[[Any], Any] | None) -> bool:
        """True if this is the function, and it receives the samples of each batch."""
        return self.function is function and not self._of_one

    def __call__(self, samples: Any, request: BatchRequest, name_of: NameOf) -> Any:
        """Collates samples. Seed, epoch and step of the request key the random numbers; `name_of`
        names samples in errors.
        """
        if self.function is None:
            return samples[0]
        if self._of_one:
            samples = samples[0]
        start = time.perf_counter()
        try:
            if not self._is_random:
                return self.function(samples)
            if self._seeder is None:
                self._seeder = SampleSeeder(self.function)
            # a collate function may draw too (MixUp): keyed by the batch's step
            with preserved_rng(self._seeder):
                self._seeder(request.seed, request.epoch, OF_COLLATE, request.step)
                return self.function(samples)
        except CollateError as error:
            raise CollateError(
                error.naming(name_of if self._names_samples else "sample {} of the batch".format)
            ) from None
        finally:
            self.seconds += time.perf_counter() - start

    def batch_of(
        self, dataset: Any, samples: list[Any], indices: Sequence[int], request: BatchRequest
    ) -> MadeBatch:
        """Collates finished samples of a headrace dataset, which names them by their indices."""
        return MadeBatch(
            self(samples, request, functools.partial(named, dataset, indices)), len(samples)
        )

    def __getstate__(self) -> dict[str, Any]:
        # found anew: the copy holds copies of the generators
        return {**self.__dict__, "_seeder": None}


def with_targets(dataset: BaseDataset, inputs: Any, indices: Sequence[int]) -> MadeBatch:
    """Adds targets to a batch of inputs if samples have any, as stacking the samples would."""
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
    if targets is None and not dataset.sample_decoder.always_pairs:
        return MadeBatch(inputs, len(indices))
    each = [dataset.split_target(index, None)[1] for index in indices]
    try:
        stacked = stack_tree(each, path=(Step("[1]", ("1",)),))
    except CollateError as error:
        raise CollateError(error.naming(functools.partial(named, dataset, indices))) from None
    return MadeBatch((inputs, stacked), len(indices))


def named(dataset: Any, indices: Sequence[Any] | None, position: int) -> str:
    """Names a sample by its index, and by its file or row if they are known."""
    if indices is None or position >= len(indices):
        return f"sample {position} of the batch"
    index = indices[position]
    try:
        return f"sample {index} ({dataset.source_of(index)})"
    # a foreign dataset has no such method; and this must not hide the error that is reported
    except Exception:
        return f"sample {index}"


class Batcher:
    """Makes the batches of a dataset, in its mode, with a collate function.

    `_ways` are the ways of making a whole batch, by name, in the order in which they are tried. A
    batch that none of them makes is made sample by sample.

    Args:
        dataset: the dataset.
        collating: the collate function.
        decoder: a variant of the dataset's `sample_decoder`, with the same values. None: this one.

    Attributes:
        writes_in_place: True if samples are written straight into their batch, also where they are
            read and decoded.
    """

    def __init__(
        self, dataset: BaseDataset, collating: Collating, decoder: Decoder | None = None
    ) -> None:
        self._dataset = dataset
        self._collating = collating
        self._variant = decoder
        self._decoder = decoder or dataset.sample_decoder
        own = self._decoder.own_reader(dataset, collating)
        # called with this batcher: its bound methods would be a cycle, and keep what is held alive
        self._ways: dict[str, Way]
        if own is not None:
            self._ways = {own.name: lambda _, request: own.read(request)}
            self.writes_in_place: bool = own.writes_in_place
        else:
            self._ways = self._ways_of_rows()
            self.writes_in_place = not self._ways.keys().isdisjoint((_STORED, _DECODED))

    def _ways_of_rows(self) -> dict[str, Way]:
        decoder = self._decoder
        if not decoder.makes_plain_samples:
            return {}
        pair = decoder.pair_rows(self._collating)
        if pair is not None:
            return {_DECODED: functools.partial(Batcher._row_by_row, specs=pair)}
        if decoder.splits_targets or not self._collating.stacks:
            return {}
        ways: dict[str, Way] = {}
        source = self._dataset.value_source
        if isinstance(source, Held):
            ways[_HELD] = Batcher._from_memory
        stored = source.row_spec(decoder)
        value = stored or decoder.value_spec()
        row = None if value is None else decoder.input_spec(value)
        if is_known(row):
            is_copied = decoder.copies and not decoder.draws
            if is_copied and row == stored and not ways:
                ways[_STORED] = functools.partial(Batcher._from_storage, row=row)
            else:
                ways[_DECODED] = functools.partial(Batcher._row_by_row, specs=(row,))
        return ways

    def __reduce__(self) -> tuple[Any, ...]:
        return Batcher, (self._dataset, self._collating, self._variant)

    def explain(self) -> str:
        """The ways of making a batch, in words."""
        if self._dataset.return_index or self._dataset.is_transformed:
            return _SAMPLES
        ways = [*self._ways, _SAMPLES]
        if ways[0] == _HELD:
            return f"{_HELD}; until all samples of a batch are held, {ways[1]}"
        return ways[0]

    def make(self, request: BatchRequest) -> MadeBatch:
        """The batch of a request, inside the ring slot that is open.

        Raises:
            SampleError: a sample can't be read; or, where such are skipped, none can.
            CollateError: the samples make no batch.
        """
        dataset = self._dataset
        # a user may have single samples looked at, at any time
        if not request or dataset.return_index or dataset.is_transformed:
            return self.of_samples(request)
        try:
            for way in self._ways.values():
                made = way(self, request)
                if made is not None:
                    return made
        except NotTogetherError as error:
            # as text: a record may be held, and an error holds frames
            _log.debug("%s: %s", self.explain(), repr(error.__cause__))
            dataset.sample_reader.counts["fallbacks"] += 1
        return self.of_samples(request)

    def of_samples(self, request: BatchRequest) -> MadeBatch:
        """The same batch, of samples that are made one by one and collated."""
        with outside_slot():
            samples, indices = self._dataset.make_samples(request, self._variant)
        return self._collating.batch_of(self._dataset, samples, indices, request)

    # -- the ways of rows

    def _from_memory(self, request: BatchRequest) -> MadeBatch | None:
        """Copies or converts rows, if all are cached."""
        dataset = self._dataset
        decoder = self._decoder
        rows = dataset.value_source.rows(dataset.whole_indices(request))
        spec = None if rows is None else decoder.input_spec(rows.spec)
        if rows is None or not is_known(spec):
            return None
        out = empty_rows(len(request), spec)
        failures: list[SampleError | None] = []
        if decoder.copies and not decoder.draws:
            rows.copy_to(out)
        else:
            write = self._writer(request, out, None)

            def present(position: int) -> SampleError | None:
                return write(position, rows[position])

            with dataset.restoring(decoder.draws):
                failures = dataset.sample_reader.threads.map(present, len(request), out.nbytes)
        if any(failures) or not rows.are_held():  # some were given back meanwhile
            return None
        dataset.sample_reader.counts["cache_hits"] += len(request)
        return with_targets(dataset, out, request)

    def _from_storage(self, request: BatchRequest, row: ArraySpec) -> MadeBatch:
        """Reads records into their rows of the batch."""
        dataset = self._dataset
        out = empty_rows(len(request), row)
        indices = dataset.whole_indices(request).tolist()
        try:
            dataset.value_source.read_into(indices, as_rows(as_array(out)), dataset.access())
        except Exception as error:
            raise NotTogetherError from error
        return with_targets(dataset, out, request)

    def _row_by_row(
        self, request: BatchRequest, specs: tuple[ArraySpec] | tuple[ArraySpec, ArraySpec | None]
    ) -> MadeBatch | None:
        """Decodes each record, and writes its input into its row. Of a pair it writes the target
        too, into a row of the second spec; with None, into a list.

        None: some can't be read, and are skipped or replaced.
        """
        dataset = self._dataset
        counts = dataset.sample_reader.counts
        errors = counts["errors"]
        out = empty_rows(len(request), specs[0])
        beside: Any = None
        if len(specs) == 2:
            beside = [None] * len(request)
            if specs[1] is not None:
                beside = empty_rows(len(request), specs[1])
        indices = dataset.whole_indices(request).tolist()
        write = self._writer(request, out, beside)
        with dataset.restoring(self._decoder.draws):
            failures = dataset.value_source.each(indices, write, dataset.access())
        if any(failures):  # those are read, and counted, again
            counts["errors"] = errors
            return None
        if beside is None:
            return with_targets(dataset, out, request)
        return MadeBatch((out, beside), len(request))

    def _writer(
        self, request: BatchRequest, out: torch.Tensor, beside: Any
    ) -> Callable[[int, Any], SampleError | None]:
        """A function that writes a value into its row, and its target beside it. It returns None,
        or the error of a sample that can't be decoded.
        """
        dataset = self._dataset
        decoder = self._decoder
        spec = None if beside is not None else decoder.value_spec()
        rows = as_array(out)
        targets = as_array(beside) if isinstance(beside, torch.Tensor) else beside
        lock = threading.Lock()

        def write(position: int, value: Any) -> SampleError | None:
            index = request[position]
            is_array = isinstance(value, np.ndarray)
            if spec is not None and is_array and (value.shape, value.dtype) != spec:
                raise ConfigError(  # NumPy would make it fit
                    f"{type(dataset).__name__}: decode returns {value.dtype} {list(value.shape)} "
                    f"for sample {index}, but value_spec() says {spec.dtype} {list(spec.shape)}: "
                    "fix one of them"
                )
            target = drawn = None
            try:
                if targets is not None:
                    value, target = dataset.split_target(index, value)
                if decoder.draws:
                    with lock:  # threads have the random generators in common
                        dataset.seeder()(*dataset.key_of(request, position))
                        drawn = decoder.draw(value)
                decoder.write_input(value, drawn, rows[position, ...])
                if targets is not None:
                    targets[position] = decoder.placed(target, drawn)
            except FormatError as error:
                return dataset.undecodable(index, error)
            except Exception as error:
                error.add_note(
                    f"headrace: while making sample {index} ({dataset.source_of(index)})"
                )
                raise
            return None

        return write


class ColumnReader(BatchReader):
    """Reads the columns of a batch straight from the storage.

    Args:
        name: what `explain()` calls it.
        dataset: the dataset.
        columns: by name, shape and dtype of a row of each column of the batch; None: a list.
        read: writes the columns of samples, given by record number, into arrays or lists, and
            returns the number of bytes read.
        stored: dtypes as which `read` writes columns, which are cast to those of the batch.
    """

    def __init__(
        self,
        name: str,
        dataset: BaseDataset,
        columns: Mapping[str, ArraySpec | None],
        read: Callable[[IntArray, dict[str, Any]], int],
        stored: Mapping[str, np.dtype[Any]] | None = None,
    ) -> None:
        self.name = name
        self._dataset = dataset
        self._columns = columns
        self._read = read
        self._stored = stored or {}

    def read(self, request: BatchRequest) -> MadeBatch:
        dataset = self._dataset
        batch: dict[str, Any] = {}
        outs: dict[str, Any] = {}
        casts: dict[str, Any] = {}
        for name, spec in self._columns.items():
            if spec is None:
                batch[name] = outs[name] = [None] * len(request)
                continue
            batch[name] = empty_rows(len(request), spec)
            outs[name] = as_array(batch[name])
            dtype = self._stored.get(name, spec.dtype)
            if dtype != spec.dtype:
                casts[name] = outs[name]
                outs[name] = np.empty((len(request), *spec.shape), dtype)
        with dataset.sample_reader.reading_together(len(request)) as counts:
            counts["bytes_read"] += self._read(dataset.whole_indices(request), outs)
            for name, out in casts.items():
                cast_into(outs[name], out)
        return with_targets(dataset, batch, request)


def is_known(spec: ArraySpec | None) -> TypeGuard[ArraySpec]:
    """True if torch has the dtype, and the arrays are not empty."""
    return spec is not None and 0 not in spec.shape and known_dtype(spec.dtype) is not None


def empty_rows(count: int, spec: ArraySpec) -> torch.Tensor:
    """Uninitialised rows of a batch, in its buffer."""
    dtype = known_dtype(spec.dtype)
    assert dtype is not None
    return empty((count, *spec.shape), dtype)
