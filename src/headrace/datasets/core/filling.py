"""How does a batch come into its buffer without having lain anywhere else?

Where samples are of one shape and nobody transforms them, each is written into its row of the batch as it is decoded, or is copied
there from the memory that holds it. What comes of it is, bit for bit, what collating the single samples gives (law 1).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from headrace.datasets.core.reading import SampleReading
from headrace.datasets.core.transforming import SampleTransforming
from headrace.errors import ConfigError, RemoteError, SampleError
from headrace.memory.ring import empty
from headrace.memory.store import MISSING
from headrace.modes.mode import Mode
from headrace.order.request import BatchRequest
from headrace.order.seeding import preserved_rng, warn_off_main_thread

Like = tuple[tuple[int, ...], np.dtype[Any]]
"""A shape and a dtype."""

Join = Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], Any]

_STACKED = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": torch.float64}
"""What numbers become as they are stacked, by the kind of their dtype."""


class Filled(NamedTuple):
    """A batch whose inputs lie in its buffer already."""

    inputs: Any
    """[samples, ...] tensors, in any structure."""
    targets: Any
    """A tensor; or a list of a target for each sample, which are still to be stacked; None: samples have none."""
    samples: int


class BatchFilling(SampleReading, SampleTransforming):
    """The part of a dataset that writes whole batches. Where it can't, or what it would write isn't what a format's own methods make,
    samples are made one by one."""

    # -- what a format overrides

    def value_like(self) -> Like | None:
        """Shape and dtype of what `decode` gives, if they are the same for all samples and known beforehand."""
        return None

    def input_like(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Like | None:
        """Shape and dtype of what `present_into` makes of a value of that shape and dtype; None: it can't be used.

        Default: the same, where `present` is not overridden.
        """
        return (shape, dtype) if type(self).present is SampleTransforming.present else None

    def draw(self, value: Any) -> Any:
        """What is drawn at random for a value before it is presented; called in the order of the samples, with generators that are
        seeded for this one."""
        return None

    def present_into(self, value: Any, drawn: Any, out: npt.NDArray[Any]) -> None:
        """Writes what `present` makes of a value into its row of a batch. Default: a copy. May run in several threads at once."""
        np.copyto(out, value)

    # -- inside

    @property
    def _copies(self) -> bool:
        """Is an input what is held, bit for bit?"""
        return type(self).present_into is BatchFilling.present_into

    @property
    def _is_fillable(self) -> bool:
        is_plain = self._pairs_plainly and type(self).assemble is SampleTransforming.assemble
        return is_plain and not (self.return_index or self._is_transformed)

    @property
    def _pairs_plainly(self) -> bool:
        """Is a sample its value, with its target if there are any?"""
        return type(self).pair is SampleTransforming.pair

    @property
    def writes_batches(self) -> bool:
        """Are samples written straight into their batch, also when they are read and decoded?"""
        like = self.value_like() if self._is_fillable else None
        return like is not None and self.input_like(*like) is not None

    def fill(self, request: BatchRequest) -> Filled | list[Any] | None:
        """The samples of a batch in its buffer; or in a list, where some are stand-ins for what can't be read; or None: make them one by
        one.

        Raises:
            SampleError: one can't be read; or, where such are skipped, none can.
        """
        if not self._is_fillable or not request:
            return None
        whole = self._whole_indices(request)
        inputs = self._from_memory(request, whole)
        if inputs is None:
            inputs = self._from_storage(request, whole)
        if inputs is not None:
            return Filled(inputs, self._stacked_targets(request), len(request))
        value = self.value_like()
        like = None if value is None else self.input_like(*value)
        return None if value is None or like is None else self._one_by_one(request, whole.tolist(), value, like)

    def fill_joined(self, request: BatchRequest, join: Join) -> Filled | list[Any] | None:
        """As `fill`, where samples are sequences of ids that `join` makes a batch of. Default: not so.

        Args:
            request: says what belongs to the batch.
            join: makes a batch of ids that lie one behind the other, and of their lengths; None: it must see the samples.
        """
        return None

    def _from_memory(self, request: BatchRequest, whole: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """All inputs from where they are held; None where one is not."""
        rows = None if self.holds_encoded else self.mode.rows(whole)
        like = None if rows is None else self.input_like(rows.shape, rows.dtype)
        out = None if like is None else _empty(len(request), like)
        if rows is None or out is None:
            return None
        if self._copies and not self._is_random:
            rows.copy_to(out)
        else:
            drawn, made = self._draws(request, lambda number: rows[number]), out.numpy()

            def present(number: int) -> None:
                self.present_into(rows[number], drawn[number], made[number, ...])

            self._threads.copy(present, len(request), made.nbytes)
        if not rows.are_held():
            return None
        self._counts["cache_hits"] += len(request)
        return out

    def _from_storage(self, request: BatchRequest, whole: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """All inputs, those that are not held straight from the source; None where it can't, or a sample can't be read."""
        reads_records_ahead = self.mode.window and self._source.far is None
        record = self._source.rows_like() if self.stores_values and not reads_records_ahead else None
        if record is None or not self._copies or self._is_random or self.input_like(*record) != record:
            return None
        out = _empty(len(request), record)
        if out is None:
            return None
        rows, counts, wanted = out.numpy(), self._counts, whole.tolist()
        held = self.mode.get(wanted)
        missing = [number for number, value in enumerate(held) if value is MISSING]
        start = time.perf_counter()
        try:
            if len(missing) == len(wanted) and rows.ndim > 1:
                self._source.read_into(wanted, rows)
            else:
                self._source.read_into([wanted[number] for number in missing], [rows[number, ...] for number in missing])
        except RemoteError as error:  # asked for with more patience than what follows it
            self._refused = error.with_traceback(None)
            return None
        except Exception:
            return None  # they are read one by one, which names the one at fault
        counts["read_seconds"] += time.perf_counter() - start  # type: ignore[assignment]
        if type(self.mode).keep is not Mode.keep or len(missing) < len(wanted):
            for number, value in enumerate(held):
                if value is MISSING:
                    self.mode.keep(wanted[number], rows[number, ...])
                else:
                    rows[number] = value
        counts["cache_hits"] += len(wanted) - len(missing)
        counts["cache_misses"] += len(missing)
        counts["bytes_read"] += len(missing) * int(rows[:1].nbytes)
        return out

    def _one_by_one(self, request: BatchRequest, whole: list[int], wanted: Like, like: Like) -> Filled | list[Any] | None:
        out = _empty(len(whole), like)
        if out is None:
            return None
        found, rows = self._fetched(whole), out.numpy()
        drawn = self._draws(request, lambda number: found[number][1])

        def make(number: int) -> SampleError | None:
            draws = drawn[number]
            value = draws if isinstance(draws, SampleError) else self._value(*found[number])
            if isinstance(value, SampleError):
                return value
            if isinstance(value, np.ndarray) and (value.shape, value.dtype) != wanted:  # else NumPy would make it fit
                raise ConfigError(
                    f"{type(self).__name__}: decode gives {value.dtype} {list(value.shape)} for sample {request[number]}, and value_like() "
                    f"says {wanted[1]} {list(wanted[0])}: mend the one or the other"
                )
            try:
                with self._naming(whole[number]):
                    self.present_into(value, draws, rows[number, ...])
            except Exception as error:
                if not self.is_late(error):
                    error.add_note(f"headrace: while making sample {request[number]} ({self.source_of(request[number])})")
                    raise
                return self._failed(whole[number], "can't be decoded", error)
            return None

        start = time.perf_counter()
        failures = self._threads.map(make, len(whole))
        self._counts["decode_seconds"] += time.perf_counter() - start  # type: ignore[assignment]
        if any(failures):
            return self._without(failures, request, out)
        return Filled(out, self._stacked_targets(request), len(whole))

    def _draws(self, request: BatchRequest, value: Callable[[int], Any]) -> Sequence[Any]:
        """What is drawn for each sample, or the SampleError that it met."""
        if not self._is_random:
            return [None] * len(request)
        seeder, drawn = self._get_seeder(), []
        in_training = get_worker_info() is None
        if in_training:
            warn_off_main_thread()
        with preserved_rng(seeder) if in_training else nullcontext():
            for number, index in enumerate(request):
                given = value(number)
                if isinstance(given, SampleError):
                    drawn.append(given)
                    continue
                seeder(request.seed, request.epoch, self._whole(index), 0 if request.draws is None else request.draws[number])
                try:
                    with self._naming(self._whole(index)):
                        drawn.append(self.draw(given))
                except Exception as error:
                    if not self.is_late(error):
                        raise
                    drawn.append(self._failed(self._whole(index), "can't be decoded", error))
        return drawn

    def _without(self, failures: list[SampleError | None], request: BatchRequest, out: torch.Tensor) -> Filled | list[Any]:
        """The batch without the samples that can't be read, or with stand-ins for them."""
        rows, good = out.numpy(), [number for number, failure in enumerate(failures) if failure is None]
        if callable(self.on_error):
            samples = []
            for number, (index, failure) in enumerate(zip(request, failures, strict=True)):
                if failure is not None:
                    samples.extend(self._replacement(index, self.source_of(index), failure))
                else:
                    samples.append(self.assemble(out[number], self.pair(index, None)[1]))
            return samples
        for index, failure in zip(request, failures, strict=True):
            if failure is not None:
                self._replacement(index, self.source_of(index), failure)
        if not good:
            raise self._nothing_readable(next(failure for failure in failures if failure is not None), len(request))
        for place, number in enumerate(good):
            if place != number:
                rows[place] = rows[number]
        return Filled(out[: len(good)], self._stacked_targets([request[number] for number in good]), len(good))

    def _nothing_readable(self, failure: SampleError, samples: int) -> SampleError:
        remedy = "; take a larger batch_size, or an on_error=callable that returns a stand-in" if self.on_error == "skip" else ""
        error = SampleError(f"none of the {samples} samples of a batch can be read; the first: {failure}{remedy}")
        error.may_be_skipped = self.on_error == "skip"
        return error

    def _stacked_targets(self, indices: Sequence[int]) -> Any:
        """The targets as stacking the samples' own makes them; or as a list, where that is left to be done."""
        targets = self.targets
        if isinstance(targets, np.ndarray) and targets.ndim == 1 and targets.dtype.kind in _STACKED and targets.dtype != np.uint64:
            picked = targets[np.asarray(indices, np.int64)]
            out = empty(picked.shape, _STACKED[targets.dtype.kind])
            np.copyto(out.numpy(), picked)
            return out
        return [self.pair(index, None)[1] for index in indices] if targets is not None or self.always_pairs else None


def _empty(samples: int, like: Like) -> torch.Tensor | None:
    """Room for a batch in its buffer; None where torch has no such dtype, or samples are empty."""
    shape, dtype = like
    known = _torch_dtype(dtype)
    return None if known is None or 0 in shape else empty((samples, *shape), known)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    if not dtype.isnative or dtype.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None
