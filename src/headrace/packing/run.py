"""Packs a dataset: reads and checks samples in threads, writes them in order, and verifies the file.

Threads read and check (or decode) the samples, a few groups ahead of the one that is written; the calling thread writes them in
order into a part file, reads everything back, and only then gives the file its name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.arguments import checks_keywords
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.pixels import decode_image
from headrace.datasets.open import open_dataset
from headrace.datasets.text.text import TextDataset
from headrace.display import progress_bar
from headrace.errors import ConfigError, SampleError, WriteError, warn
from headrace.io.paths import redact
from headrace.io.resolve.expressions import DataPath
from headrace.memory.limits import usable_cpus
from headrace.packing.hdf5 import PackedWriter
from headrace.packing.part import PartFile
from headrace.packing.plan import Plan, make_plan
from headrace.packing.texts import packed_texts
from headrace.packing.verify import verify
from headrace.storage.hdf5.files import is_hdf5, locked_by_caller
from headrace.storage.hdf5.packed import TARGETS, crc_of, packed_info

GROUP_SAMPLES, GROUP_BYTES = 16, 4 << 20
"""A task reads so many samples, or fewer where they are large: what is read ahead stays small whatever the dataset's size."""
GROUP_TEXTS = 4096  # which are tokens already
_SHOWN = 10
_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PackResult:
    """What `pack_dataset` did.

    Attributes:
        path: the packed file.
        samples: number of samples in it.
        classes: number of classes.
        store: "encoded", "decoded" or "tokens".
        nbytes: size of the file.
        seconds: how long it took.
        left_out: what is wrong with each sample that could not be read and was left out.
    """

    path: Path
    samples: int
    classes: int
    store: str
    nbytes: int
    seconds: float
    left_out: tuple[str, ...]


@checks_keywords
def pack(
    dataset: BaseDataset | DataPath,
    dst: str | os.PathLike[Any],
    *,
    store: Literal["encoded", "decoded"] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Write a dataset into one HDF5 file, which opens as the same dataset: ``ImageDataset(dst)``, ``TextDataset(dst)``.

    The file holds the samples, their targets, names, class names and a CRC each, and the fingerprint of the dataset. It appears
    under its name when it is written, read back and verified, and not before: interrupted at any moment, `pack` leaves at most a
    temporary file beside it, which the next run takes over. The same dataset gives the same bytes.

    Texts are packed as the tokens of whole documents, whatever `max_length`, `stride` and `packing` say: these are said again when the file
    is opened. Tokens of a tokenizer that can be known again are kept in `cache_dir`, so an interrupted run does not make them twice.

    Args:
        dataset: an `ImageDataset`, a `TextDataset`, an `HDF5Dataset`, a view of one, or a path as `open_dataset` takes it.
        dst: the file to write; its folder must be there.
        store: "encoded": the bytes of the image files, each of which must decode; "decoded": the images at the dataset's
            `image_size` (uint8 [n, H, W, C]), or arrays as they are ([n, ...]). None: as the dataset has them, so encoded for a
            folder of images. Texts have one way only.
        workers: threads that read and decode; None: one for each usable core.
        overwrite: replace `dst` where it is there already.
        progress: show progress bars; None: only on a terminal.

    Returns:
        The path of the file.

    Raises:
        SampleError: a sample can't be read, and the dataset's `on_error` is not "skip" (where it is, the sample is left out, with a
            warning, and the fingerprint is that of a view without it).
        TargetExistsError, WriteError, AccessError: `dst` is there already; it can't be written, or another job is packing to it.
        DataNotFoundError, ConfigError: the folder of `dst` is missing; an argument makes no sense.
    """
    result = pack_dataset(dataset, dst, store=store, workers=workers, overwrite=overwrite, progress=progress)
    if result.left_out:
        warn(left_out_message(result))
    return result.path


def pack_dataset(
    dataset: BaseDataset | DataPath,
    dst: str | os.PathLike[Any],
    *,
    store: Literal["encoded", "decoded"] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> PackResult:
    """`pack`, with the figures."""
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers!r}")
    start, part = time.perf_counter(), PartFile(dst, overwrite)
    opened = None if isinstance(dataset, BaseDataset) else open_source(dataset)
    try:
        with part:
            plan, left_out = _write_readable(part, opened or dataset, store, workers or len(usable_cpus()), progress)  # type: ignore[arg-type]
            _read_back(part, progress)
            part.commit()
    finally:
        if opened is not None:
            opened.close()
    path, seconds = Path(part.target), time.perf_counter() - start
    classes = len(plan.info.classes or ())
    return PackResult(path, plan.info.count, classes, plan.info.store, path.stat().st_size, seconds, tuple(left_out))


def left_out_message(result: PackResult) -> str:
    """Which samples are not in the file, in one line."""
    count = len(result.left_out)
    more = f"; and {count - _SHOWN:,} more" if count > _SHOWN else ""
    return (
        f"{redact(result.path)}: {count:,} of {result.samples + count:,} samples can't be read and were left out: "
        f"{'; '.join(result.left_out[:_SHOWN])}{more}"
    )


def open_source(path: DataPath, **options: Any) -> BaseDataset:
    """`open_dataset`, and a packed file of arrays with its targets: a copy of it must not lose them."""
    if isinstance(path, (str, os.PathLike)) and is_hdf5(path):
        info = packed_info(path)
        if info is not None and info.kind == "array" and TARGETS in info.checksums:
            return open_dataset(path, target_name=TARGETS, **options)
    return open_dataset(path, **options)


def _write_readable(part: PartFile, dataset: BaseDataset, store: str | None, workers: int, progress: bool | None) -> tuple[Plan, list[str]]:
    """Write all samples; or, where some can't be read and may be left out, a view without these."""
    left_out: list[str] = []
    if isinstance(dataset, TextDataset):
        if store is not None:
            raise ConfigError(f"store={store!r} is for images and arrays: texts are packed as tokens")
        texts = packed_texts(dataset)
        plan = texts.plan()
        _write(part, plan, texts.prepare, workers, progress)
        return plan, texts.left_out
    while True:
        plan = make_plan(dataset, store)
        failures = _write(part, plan, functools.partial(_prepare, dataset, plan), workers, progress)
        if not failures:
            return plan, left_out
        left_out += map(str, failures.values())
        readable = np.setdiff1d(np.arange(len(dataset)), list(failures))
        if not len(readable):
            raise SampleError(f"none of {len(dataset):,} samples can be read; the first: {left_out[0]}")
        dataset = dataset.subset(readable)


def _write(
    part: PartFile, plan: Plan, prepare: Callable[[range], Sequence[Any]], workers: int, progress: bool | None
) -> dict[int, SampleError]:
    """Write the samples of a plan; those that can't be read, by position. After the first of these nothing more is written."""
    writer, failures = PackedWriter(part, plan), dict[int, SampleError]()
    results = _in_order(prepare, _groups(plan), workers)
    with (
        contextlib.closing(results),  # here: a traceback would keep its threads alive
        progress_bar(progress, total=plan.info.count, desc="packing", unit="sample") as bar,
    ):
        for group, samples in results:
            failures.update((i, s[0]) for i, s in zip(group, samples, strict=True) if isinstance(s[0], SampleError))
            if not failures:
                writer.append([s[0] for s in samples], [s[1] for s in samples])
            bar.update(len(group))
    if not failures:
        writer.finish()
    return failures


def _groups(plan: Plan) -> Iterator[range]:
    """The samples in pieces, by the memory that they take while they are read."""
    start, nbytes, most = 0, 0, GROUP_TEXTS if plan.info.kind == "text" else GROUP_SAMPLES
    for i, size in enumerate((plan.sizes + plan.read_sizes).tolist()):
        if i > start and (nbytes + size > GROUP_BYTES or i - start >= most):
            yield range(start, i)
            start, nbytes = i, 0
        nbytes += size
    if start < len(plan.sizes):
        yield range(start, len(plan.sizes))


def _in_order(
    task: Callable[[range], Sequence[Any]], groups: Iterator[range], workers: int
) -> Generator[tuple[range, Sequence[Any]], None, None]:
    """The results of a task for each group, in order; threads work at most `workers` + 1 groups ahead."""
    pool, waiting = ThreadPoolExecutor(workers, "headrace-pack"), deque[tuple[range, Future[Sequence[Any]]]]()
    try:
        for group in groups:
            waiting.append((group, pool.submit(task, group)))
            if len(waiting) > workers + 1:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _prepare(dataset: BaseDataset, plan: Plan, group: range) -> list[tuple[_Array | SampleError, int]]:
    """The samples of a group as they will be stored, and their CRCs; a SampleError for one that may be left out."""
    whole = dataset.whole_indices(group).tolist()
    records = dataset.sample_reader.records(whole, dataset.sample_source.read)
    prepared: list[tuple[_Array | SampleError, int]] = []
    for position, index, record in zip(group, whole, records, strict=True):
        sample = record if isinstance(record, SampleError) else _stored(dataset, plan, index, record)
        if isinstance(sample, SampleError):
            if dataset.on_error != "skip":  # a callable makes up a sample: that is no matter for a file
                raise sample
            prepared.append((sample, 0))
            continue
        if sample.nbytes != plan.sizes[position] or sample.dtype != plan.dtype:
            raise SampleError(
                f"{dataset.source_of(position)} changed while it was packed: {plan.sizes[position]:,} bytes ({plan.dtype}) at the "
                f"start, {sample.nbytes:,} ({sample.dtype}) now: pack again when nobody writes there"
            )
        prepared.append((sample, crc_of(sample)))
    return prepared


def _stored(dataset: BaseDataset, plan: Plan, index: int, record: Any) -> _Array | SampleError:
    """A record as the plan stores it."""
    if plan.info.store == "encoded":
        try:
            if plan.info.kind == "image":
                decode_image(record, getattr(dataset, "color", "RGB"), dataset.left_of_budget)
        except Exception as error:  # as the dataset itself would meet it
            return dataset.sample_reader.failed(index, "can't be decoded", error)
        return np.frombuffer(record, np.uint8)
    value = dataset.sample_reader.decoded(index, record, dataset.sample_format)
    if isinstance(value, SampleError):
        return value
    return np.ascontiguousarray(dataset.pixels_in(value) if isinstance(dataset, ImageDataset) else value)


def _read_back(part: PartFile, progress: bool | None) -> None:
    part.reread()
    with locked_by_caller(part.path):
        bad = verify(part.path, progress=progress).bad
    if bad:
        raise WriteError(
            f"{redact(part.target)}: {len(bad):,} samples read back are not what was written, the first is number {bad[0][0]}: "
            "the disk or the memory of this machine is faulty"
        )
