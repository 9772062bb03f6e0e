"""Reads and decodes samples, in threads, and says what becomes of those that can't be read
(law 6).
"""

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
from headrace.formats.source import Source, is_prefetched, map_in
from headrace.io.library_errors import is_of_machine
from headrace.memory.limits import usable_cpus
from headrace.order import detect_world

OnError = Literal["raise", "skip"] | Callable[[int, str, Exception], Any]
SHARE = 0.75
"""The part of a machine's cores that loads data; the rest is the training's."""
_MOST = 8
_WORTH = 1 << 20  # bytes to copy for each thread that is to take part


def threads_of(workers: int, cores: int, ranks: int) -> int:
    """Threads for each of so many workers, on a machine of so many cores and ranks."""
    return max(1, min(_MOST, int(SHARE * cores / ranks) // workers))


class WorkerThreads:
    """Threads that decode in a worker, as many as its share of the cores: decoders let go of the
    interpreter's lock, and threads share the worker's memory. In the training's process, whose
    cores the training needs, threads that copy what is held, and no more. Started at first use.

    Not shared by processes: a fork, a copy and a pickle begin without.
    """

    _process = 0  # that has looked: threads don't survive a fork
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
        if self._copying > 1:
            self._pool = ThreadPoolExecutor(self._copying, "headrace-samples")
        self._process = os.getpid()

    def map(
        self, function: Callable[[int], Any], count: int, copied: int | None = None
    ) -> list[Any]:
        """What a function gives for 0 to count - 1; raises what it raises for the first of them
        that fails, when all are done.

        Args:
            function: what is called.
            count: how often.
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
        return map_in(self._pool, threads, function, count)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerThreads, ()


class NotTogetherError(Exception):
    """The samples of a batch could not be read together, for its cause; they are read one by one
    then, which names the one at fault.
    """


class SampleReader:
    """Reads the samples of a source, by their number there, for one dataset or view.

    Args:
        source: where the records are.
        on_error: what becomes of a sample that can't be read.
        threads: those of a worker that decode.
        is_view: True if the dataset numbers its samples in another way than the source.
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
        """Counts the samples, and the time, of a batch that is read as a whole inside; gives the
        counters.

        Raises:
            NotTogetherError: whatever is raised inside is its cause.
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

    def decode_together(self, items: list[tuple[int, Any]], decoder: Decoder) -> list[Any]:
        """Values of records, some of which may be a SampleError already."""
        sound = [item for item in items if not isinstance(item[1], SampleError)]

        def failed(position: int, what: str, error: Exception) -> SampleError:
            return self.failed(sound[position][0], what, error)

        values = iter(decoder.decode_batch(sound, failed))
        return [record if isinstance(record, SampleError) else next(values) for _, record in items]

    # -- records

    def records(self, indices: list[int], read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
        """The records of samples that `read` reads together; a SampleError for each that can't be
        read and may be left out.

        Before a sample is blamed for what its server did not give, the next ones are asked for:
        where nothing comes of them either, it is the server's fault.
        """
        try:
            return read(indices)
        except Exception as error:
            first = error
        # to name the one at fault, and to have the others
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
        """The record of a sample that was to be read before, with others, when there was an
        error.
        """
        source = self.source
        try:
            try:
                return source.read([index])[0]
            except FormatError:
                if not is_prefetched(source):
                    raise
            # a wrong checksum may be due to the network or to a cache
            self.counts["refetched"] += 1
            return source.read_afresh([index])[0]
        except Exception as error:
            if isinstance(first, RemoteError) and isinstance(error, RemoteError):
                if error.is_of_server:
                    raise first from None
                error = first  # which had more patience
            return self.failed(index, "can't be read", error)

    # -- samples that can't be read

    def failed(self, index: int, what: str, error: Exception) -> SampleError:
        """Raises the error of a sample, or gives it where the sample may be left out.

        Memory, file descriptors or disk space that ran out, or data that were replaced or are
        denied as a whole, are no fault of a sample: that error is raised as it is.
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
        """What stands in a batch for the sample of that index in the dataset or view: nothing,
        or what the user's callable makes of it.
        """
        if callable(self.on_error):
            cause = failure.__cause__
            return [self.on_error(index, path, cause if isinstance(cause, Exception) else failure)]
        self.counts["skipped"] += 1
        self.skipped.append((index, path, str(failure)))
        return []


def _forget_frames(error: BaseException) -> None:
    """Of an error that is kept: its tracebacks, and those of its causes, hold the frames that
    decoded, and with them bytes and pixels.
    """
    one: BaseException | None = error
    while one is not None and (one.__traceback__ or one.__context__ or one is error):
        # a context may also be an error that the caller is handling
        one.__traceback__ = one.__context__ = None
        one = one.__cause__
