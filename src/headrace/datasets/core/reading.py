"""How do the indices of a batch become decoded values?

What the mode holds, what the source must read, and what becomes of a sample that can't be read (law 6).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.core.warnings import NamedWarnings
from headrace.errors import AccessError, FileChangedError, FormatError, RemoteError, SampleError
from headrace.io.library_errors import is_of_machine
from headrace.memory.budget import size_of
from headrace.memory.store import MISSING
from headrace.modes.mode import Mode
from headrace.storage.source import Source

_NO_CONTEXT = nullcontext()
OnError = Literal["raise", "skip"] | Callable[[int, str, Exception], Any]


class SampleReading(ABC):
    """The part of a dataset that reads. Indices are those of the whole dataset, not of a view."""

    on_error: OnError
    names_warnings = False
    """True if the decoder warns of files without naming them, as Pillow does."""
    _source: Source
    _chosen: npt.NDArray[np.int64] | None  # of a view: the indices of the whole dataset
    _counts: Counter[str]
    _skipped: list[tuple[int, str, str]]
    _threads: WorkerThreads
    _refused: RemoteError | None = None
    """What a server refused of the batch that is being made, while it was read in another way."""

    def decode(self, record: Any) -> Any:
        """A record as the value that is held: deterministic, of its final size. Default: the record itself."""
        return record

    @property
    def decodes_together(self) -> bool:
        """Are the records of a batch decoded at once, by `decode_together`, and not by `decode`?"""
        return False

    def decode_together(self, found: Sequence[tuple[int, Any]], failed: Callable[[int, str, Exception], SampleError]) -> list[Any]:
        """The values of the records of a batch. Default: each by itself, by `decode`.

        Args:
            found: for each sample its index and its record.
            failed: to be called where one can't be decoded, with its place in `found`, a few words ("can't be decoded") and the error; what
                it returns then stands for the value.
        """
        values = []
        for number, (_, record) in enumerate(found):
            try:
                values.append(self.decode(record))
            except Exception as error:
                values.append(failed(number, "can't be decoded", error))
        return values

    @property
    def stores_values(self) -> bool:
        """Are records the values themselves, so that they may be read straight into a batch?"""
        return type(self).decode is SampleReading.decode and not self.decodes_together

    @property
    @abstractmethod
    def holds_encoded(self) -> bool:
        """Do eager and cached hold records, and decode at each access?"""

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """The loading mode at work."""

    def take_report(self) -> dict[str, Any]:
        """What was counted in this process since the last call."""
        self._counts.update(self._source.take_counts())
        report: dict[str, Any] = dict(self._counts)
        skipped = self._skipped
        self._reset_report()
        if skipped:
            report["skipped_samples"] = skipped
        return report

    def _reset_report(self) -> None:
        self._counts: Counter[str] = Counter()
        self._skipped: list[tuple[int, str, str]] = []

    def _whole_indices(self, indices: Any) -> npt.NDArray[np.int64]:
        """The samples of the whole dataset that indices of this view mean; negative ones count from the end.

        Raises:
            IndexError: one is outside of the dataset.
        """
        array = np.asarray(indices, np.int64)
        length = len(self._source) if self._chosen is None else len(self._chosen)
        if array.size and array.view(np.uint64).max() >= length:  # negative ones are the largest
            if array.min() < -length or array.max() >= length:
                raise IndexError(f"indices reach from {array.min()} to {array.max()}, which is outside of a dataset of {length:,} samples")
            array = array % length
        return array if self._chosen is None else self._chosen[array]

    def _load(self, indices: Sequence[int]) -> list[Any]:
        """What eager holds of some samples: values, or a SampleError each; raises where errors are to be raised."""
        records = self._records(list(indices), self._read_rows)
        if self.decodes_together and not self.holds_encoded:
            return self._together(list(zip(indices, records, strict=True)))
        return [self._kept(i, r) for i, r in zip(indices, records, strict=True)]

    def _read_rows(self, indices: Sequence[int]) -> list[Any]:
        """Records; those that are values as they lie, of one shape, by one call into one array."""
        like = self._source.rows_like() if self.stores_values and len(indices) > 1 else None
        if like is None:
            return self._source.read(indices)
        rows = np.empty((len(indices), *like[0]), like[1])
        each = [rows[number, ...] for number in range(len(rows))]
        self._source.read_into(indices, rows if rows.ndim > 1 else each)
        return each

    def _kept(self, index: int, record: Any) -> Any:
        return record if self.holds_encoded or isinstance(record, SampleError) else self._decoded(index, record)

    def _values(self, indices: npt.NDArray[np.int64]) -> list[Any]:
        """Decoded values of samples of the whole dataset; a SampleError for each that can't be read and may be left out."""
        found = self._fetched(indices.tolist())
        start = time.perf_counter()
        if self.decodes_together:
            values = self._values_together(found)
        else:
            values = self._threads.map(lambda number: self._value(*found[number]), len(found))
        self._counts["decode_seconds"] += time.perf_counter() - start  # type: ignore[assignment]
        return values

    def _values_together(self, found: list[tuple[int, Any, bool]]) -> list[Any]:
        """As `_value` for each."""
        values = [value for _, value, _ in found]
        todo = [number for number, (_, _, is_record) in enumerate(found) if is_record or self.holds_encoded]
        for number, made in zip(todo, self._together([found[number][:2] for number in todo]), strict=True):
            index, record, is_record = found[number]
            if is_record and not isinstance(made, SampleError):
                self.mode.keep(index, record if self.holds_encoded else made)
            values[number] = made
        return values

    def _together(self, found: list[tuple[int, Any]]) -> list[Any]:
        """Values of records, some of which may be a SampleError already."""
        values = [record for _, record in found]
        sound = [number for number, record in enumerate(values) if not isinstance(record, SampleError)]

        def failed(place: int, what: str, error: Exception) -> SampleError:
            index = found[sound[place]][0]
            raise_if_of_the_machine(error, index)
            return self._failed(index, what, error)

        for number, value in zip(sound, self.decode_together([found[number] for number in sound], failed), strict=True):
            values[number] = value
        return values

    def _fetched(self, wanted: list[int]) -> list[tuple[int, Any, bool]]:
        """For each index what is held of it, or else its record (or a SampleError), and whether it is that."""
        counts, mode = self._counts, self.mode
        held = mode.get(wanted)
        missing = [i for i, value in zip(wanted, held, strict=True) if value is MISSING]
        counts["cache_hits"] += len(wanted) - len(missing)
        counts["cache_misses"] += len(missing)
        start = time.perf_counter()
        got = self._records(missing, lambda some: mode.read(some, self._source.read)) if missing else []
        counts["read_seconds"] += time.perf_counter() - start  # type: ignore[assignment]
        counts["bytes_read"] += sum(size_of(record) for record in got if hasattr(record, "__len__"))
        records = iter(got)
        return [(i, next(records), True) if value is MISSING else (i, value, False) for i, value in zip(wanted, held, strict=True)]

    def _value(self, index: int, value: Any, is_record: bool) -> Any:
        """The decoded value of what `_fetched` found of a sample, which is held now if the mode wants it; or a SampleError."""
        if is_record:
            value = self._kept(index, value)
            if not isinstance(value, SampleError):
                self.mode.keep(index, value)
        encoded = self.holds_encoded and not isinstance(value, SampleError)
        return self._decoded(index, value) if encoded else value

    def _records(self, indices: list[int], read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
        try:
            return read(indices)
        except Exception as error:
            first = self._refused or error
        finally:
            self._refused = None
        try:
            return self._each_alone(indices, first)  # to name the one at fault, and to have the others
        finally:
            del first  # else it and this frame would hold one another

    def _each_alone(self, indices: list[int], first: Exception) -> list[Any]:
        """Records that were to be read together, when there was an error. Before a sample is blamed for what its server did not give, the
        next ones are asked for: where nothing comes of them either, it is the server's fault."""
        found, blamed = [], None
        try:
            for index in indices:
                try:
                    found.append(self._record(index, first))
                except SampleError as error:
                    if not isinstance(error.__cause__, RemoteError | AccessError):
                        raise
                    blamed = blamed or error
                else:
                    if blamed is not None:
                        raise blamed
            if blamed is not None:
                raise blamed
            return found
        finally:
            del blamed, first  # else they and this frame would hold one another

    def _record(self, index: int, first: Exception) -> Any:
        """The record of a sample that was to be read before, with others, when there was an error."""
        try:
            return self._read_twice(index)
        except Exception as error:
            if isinstance(first, RemoteError) and isinstance(error, RemoteError):
                if error.is_of_server:
                    raise first from None
                error = first  # which had more patience
            raise_if_of_the_machine(error, index)
            return self._failed(index, "can't be read", error)

    def _read_twice(self, index: int) -> Any:
        """Of what is far away, a wrong checksum may be of the way, or of what is kept of it here."""
        try:
            return self._source.read([index])[0]
        except FormatError:
            if self._source.far is None:
                raise
        self._counts["refetched"] += 1
        return self._source.read_afresh([index])[0]

    def _decoded(self, index: int, record: Any) -> Any:
        try:
            with self._naming(index):
                return self.decode(record)
        except Exception as error:
            raise_if_of_the_machine(error, index)
            return self._failed(index, "can't be decoded", error)

    def _naming(self, index: int) -> NamedWarnings | nullcontext[None]:
        """As a context: warnings of the decoder name the sample, if there may be some."""
        return NamedWarnings(self._source.location, index) if self.names_warnings else _NO_CONTEXT

    def _failed(self, index: int, what: str, error: Exception) -> SampleError:
        text = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            text = error.strerror  # its path, which may be bytes, is in `where`
        cause = " ".join(text.split()) or type(error).__name__
        where = self._source.location(index)
        message = cause if where in cause else f"{where}: {cause}"
        is_remedied = self.on_error == "raise" and not isinstance(error, RemoteError | AccessError)
        remedy = '; mend or remove it, or pass on_error="skip"' if is_remedied else ""
        of_what = "" if self._chosen is None else " of the whole dataset"
        failure = SampleError(f"sample {index}{of_what} {what}: {message}{remedy}")
        failure.__cause__ = error
        self._counts["errors"] += 1
        if self.on_error != "raise":
            _forget_frames(failure)
            return failure
        try:
            raise failure
        finally:
            del failure, error  # else they and this frame would hold one another, and the batch with them

    def _replacement(self, index: int, path: str, failure: SampleError) -> list[Any]:
        """What stands in a batch for a sample that can't be read: nothing, or what the user's callable makes of it."""
        if callable(self.on_error):
            cause = failure.__cause__
            return [self.on_error(index, path, cause if isinstance(cause, Exception) else failure)]
        self._counts["skipped"] += 1
        self._skipped.append((index, path, str(failure)))
        return []


def _forget_frames(error: BaseException) -> None:
    """Of an error that is kept: its tracebacks, and those of its causes, hold the frames that decoded, and with them bytes and pixels."""
    one: BaseException | None = error
    while one is not None and (one.__traceback__ or one.__context__ or one is error):
        one.__traceback__ = one.__context__ = None  # a context may also be an error that the caller is handling
        one = one.__cause__


def raise_if_of_the_machine(error: Exception, index: int) -> None:
    """Memory or file descriptors that ran out, or data that were replaced or are denied as a whole, are no fault of a sample, and no reason
    to leave it out."""
    if isinstance(error, FileChangedError) or (isinstance(error, AccessError) and error.is_of_server):
        raise error
    if is_of_machine(error):
        error.add_note(f"headrace: while reading sample {index}, which may be sound: the machine ran out of memory or file descriptors")
        raise error
