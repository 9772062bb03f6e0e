"""Reads and decodes samples, in threads, and handles those that can't be read (law 6)."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch.utils.data import get_worker_info

from headrace.core.decoder import Decoder
from headrace.errors import (
    AccessError,
    FileChangedError,
    FormatError,
    RemoteError,
    SampleError,
)
from headrace.formats.source import Source, is_prefetched
from headrace.io.library_errors import is_of_machine
from headrace.memory.limits import usable_cpus
from headrace.order import detect_world

OnError = Literal["raise", "skip"] | Callable[[int, str, Exception], Any]
SHARE = 0.75
"""The part of a machine's cores that loads data; the rest is the training's."""
_MOST = 8
_WORTH = 1 << 20  # bytes to copy for each thread that is to take part


def threads_of(workers: int, cores: int, ranks: int) -> int:
    """Number of threads of each worker, on a machine with these cores and ranks."""
    return max(1, min(_MOST, int(SHARE * cores / ranks) // workers))


class WorkerThreads:
    """The threads of a process that decode and copy samples, started at first use.

    In a worker, as many as its share of the cores: decoders release the GIL, and threads share the
    worker's memory. In the main process, whose cores the training needs, threads only copy what is
    cached. Forks, copies and pickles start without threads.
    """

    _process = 0  # that these are for: threads don't survive a fork
    _decoding = 0  # threads
    _copying = 0
    _pool: ThreadPoolExecutor | None = None

    def _look(self) -> None:
        self._pool = None
        info = get_worker_info()
        if info is None:
            self._decoding = 1
            self._copying = min(_MOST, torch.get_num_threads())
        else:
            ranks = detect_world().local_world_size
            self._decoding = self._copying = threads_of(info.num_workers, usable_cpus(), ranks)
        if self._copying > 1:  # beside the one that calls
            self._pool = ThreadPoolExecutor(self._copying - 1, "headrace-samples")
        self._process = os.getpid()

    def map(
        self, function: Callable[[int], Any], count: int, copied: int | None = None
    ) -> list[Any]:
        """Calls a function with 0 to count - 1, in this thread too, and returns the results. Raises
        the error of the first that failed, when no call is going on any more.

        Args:
            function: a callable.
            count: number of calls.
            copied: bytes that all calls copy, if they do nothing else. Not in torch's threads,
                which wait for each other after every step of a conversion: measured, they gain 10 %
                where these gain 40.
        """
        if self._process != os.getpid():
            self._look()
        threads = self._decoding
        if copied is not None:
            threads = min(self._copying, copied // _WORTH)
        if threads < 2 or count < 2 or self._pool is None:
            return [function(number) for number in range(count)]
        results: list[Any] = [None] * count
        errors: dict[int, BaseException] = {}
        numbers = iter(range(count))  # from which each thread takes the next one

        def work() -> None:
            for number in numbers:
                try:
                    results[number] = function(number)
                except BaseException as error:
                    errors[number] = error
                if errors:  # of a number that was taken earlier it may still come
                    return

        others = [self._pool.submit(work) for _ in range(min(threads, count) - 1)]
        try:
            work()
        finally:
            for other in others:
                if not other.cancel():
                    other.exception()
        if errors:
            raise errors.pop(min(errors))
        return results

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerThreads, ()


class NotTogetherError(Exception):
    """The samples of a batch could not be read together. Reading them one by one names the one at
    fault.
    """


class SampleReader:
    """Reads the samples of a source, by their number there, for one dataset or view.

    Args:
        source: the source of the records.
        on_error: what to do with a sample that can't be read; see `BaseDataset`.
        threads: the threads that decode.
        is_view: True if the dataset's indices differ from those of the source.
    """

    def __init__(
        self, source: Source, on_error: OnError, threads: WorkerThreads, is_view: bool = False
    ) -> None:
        self.source = source
        self.on_error = on_error
        self.threads = threads
        self._is_view = is_view
        self.counts: Counter[str] = Counter()
        self.skipped: list[tuple[int, str, str]] = []

    def another(self, is_view: bool = False) -> SampleReader:
        """A reader of the same source that counts for itself."""
        return SampleReader(self.source, self.on_error, self.threads, is_view)

    # -- counts

    def take_report(self) -> dict[str, Any]:
        """What was counted in this process since the last call."""
        if self.counts["cache_misses"]:  # else nothing was read
            self.counts.update(self.source.take_counts())
        report: dict[str, Any] = dict(self.counts)
        if self.skipped:
            report["skipped_samples"] = self.skipped
        self.counts = Counter()
        self.skipped = []
        return report

    def count_seconds(self, name: str, start: float) -> None:
        """Adds the time since `start` (of `time.perf_counter`)."""
        self.counts[name] += time.perf_counter() - start  # type: ignore[assignment]

    @contextlib.contextmanager
    def reading_together(self, count: int) -> Iterator[Counter[str]]:
        """Context that reads `count` samples as a whole, and counts them and the time. Yields the
        counters.

        Raises:
            NotTogetherError: caused by any error inside.
        """
        start = time.perf_counter()
        try:
            yield self.counts
        except Exception as error:
            raise NotTogetherError from error
        self.count_seconds("read_seconds", start)
        self.counts["cache_misses"] += count

    # -- decoded values

    def decoded(self, index: int, record: Any, decoder: Decoder) -> Any:
        """The decoded value of a record; or a SampleError, which a record may be already."""
        if isinstance(record, SampleError):
            return record
        try:
            return decoder.decode(record)
        except Exception as error:
            return self.failed(index, "can't be decoded", error)

    # -- records

    def records(self, indices: list[int], read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
        """Returns the records that `read` reads together; a SampleError for each that can't be read
        and may be skipped.

        Before a sample is blamed for an error of its server, the next ones are requested: if they
        fail too, the server is at fault.
        """
        try:
            return read(indices)
        except Exception as error:
            first = error
        # one by one, to name the one at fault and to get the others
        records = []
        blamed: SampleError | None = None
        try:
            for index in indices:
                try:
                    records.append(self._record(index, first))
                except SampleError as failure:
                    if not isinstance(failure.__cause__, RemoteError | AccessError):
                        raise
                    blamed = blamed or failure
                else:
                    if blamed is not None:
                        break
            if blamed is not None:
                raise blamed
            return records
        finally:
            del blamed, first  # else they and this frame would hold one another

    def _record(self, index: int, first: Exception) -> Any:
        """Reads a record alone, after an error of reading several."""
        source = self.source
        try:
            try:
                return source.read([index])[0]
            except FormatError:
                if not is_prefetched(source):
                    raise
            # a wrong checksum may be due to the network or to a cache
            self.counts["refetched"] += 1
            return source.read_afresh(index)
        except Exception as error:
            if isinstance(first, RemoteError) and isinstance(error, RemoteError):
                if error.is_of_server:
                    raise first from None
                error = first  # which was retried longer
            return self.failed(index, "can't be read", error)

    # -- samples that can't be read

    def failed(self, index: int, what: str, error: Exception) -> SampleError:
        """Raises the error of a sample, or returns it if the sample may be skipped.

        An error that is not the sample's fault is raised as it is: the machine ran out of memory,
        file descriptors or disk space, or the data were replaced, or the server denies all of them.
        """
        if isinstance(error, FileChangedError):
            raise error
        if isinstance(error, AccessError) and error.is_of_server:
            raise error
        if is_of_machine(error):
            error.add_note(
                f"headrace: while reading sample {index}, which may be intact: the machine ran out "
                "of memory, file descriptors or disk space"
            )
            raise error
        text = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            text = error.strerror  # its path, which may be bytes, is in `where`
        cause = " ".join(text.split()) or type(error).__name__
        where = self.source.location(index)
        message = cause if where in cause else f"{where}: {cause}"
        is_remedied = self.on_error == "raise" and not isinstance(error, RemoteError | AccessError)
        remedy = '; fix or remove it, or pass on_error="skip"' if is_remedied else ""
        of_what = " of the whole dataset" if self._is_view else ""
        failure = SampleError(f"sample {index}{of_what} {what}: {message}{remedy}")
        failure.__cause__ = error
        self.counts["errors"] += 1
        if self.on_error != "raise":
            _forget_frames(failure)
            return failure
        try:
            raise failure
        finally:
            # else they and this frame would hold one another, and the batch with them
            del failure, error

    def replacement(self, index: int, path: str, failure: SampleError) -> list[Any]:
        """What replaces a sample in its batch: nothing, or the result of the user's callable."""
        if callable(self.on_error):
            cause = failure.__cause__
            return [self.on_error(index, path, cause if isinstance(cause, Exception) else failure)]
        self.counts["skipped"] += 1
        self.skipped.append((index, path, str(failure)))
        return []


def _forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and its causes, which keep the decoding frames alive, and
    with them bytes and pixels.
    """
    one: BaseException | None = error
    while one is not None and (one.__traceback__ or one.__context__ or one is error):
        # a context may also be an error that the caller is handling
        one.__traceback__ = one.__context__ = None
        one = one.__cause__
