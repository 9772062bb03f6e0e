"""Packs a dataset into one file: reads and checks samples in threads, writes them in order, and
verifies the file.

Threads read and check (or decode) the samples, a few groups ahead of the one that is written; the
calling thread writes them in order into a part file, reads everything back, and only then gives the
file its name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset
from headrace.datasets.episodes import EpisodeDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.datasets.open import open_dataset
from headrace.errors import ConfigError, FormatError, SampleError, WriteError
from headrace.io.local.checksums import replaced
from headrace.io.paths import redact
from headrace.io.resolve.expressions import DataPath
from headrace.memory.whole import write_full
from headrace.packing.beside.pairs import boxes_of, check_size, checked, has_masks, row_of
from headrace.packing.formats.hdf5 import PackedWriter
from headrace.packing.formats.layout import laid_out
from headrace.packing.jpeg import plan_of_files, plan_reencoded
from headrace.packing.options import Check, StoreOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.part import PartFile
from headrace.packing.plan import (
    Packing,
    Plan,
    Rows,
    files_of,
    is_packed_as_stored,
    make_plan,
    not_encoded,
    packed_info_of,
)
from headrace.packing.samples import (
    GROUP_SAMPLES,
    UNKNOWN_SAMPLES,
    each_sample,
    groups_of,
    threads_for,
    with_progress,
    without,
)
from headrace.packing.texts import is_of_texts, packed_texts
from headrace.packing.values import Look, ValuesPlanner, as_stored
from headrace.packing.verify import seal_of, verify_samples
from headrace.storage.arrays.packed import MASK_STARTS, OFFSETS, TARGETS, crc_of
from headrace.storage.hdf5.files import locked_by_caller
from headrace.storage.source import PackPart

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
        store: "encoded", "decoded", "ragged" or "tokens".
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


def pack_dataset(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    options: StoreOptions = StoreOptions(),  # noqa: B008 (frozen)
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> PackResult:
    """`pack`, with the figures."""
    threads, start, part = threads_for(workers), time.perf_counter(), PartFile(dst, overwrite)
    with opened_dataset(dataset) as opened:
        refuse_own_source(opened, part.target)
        with part:
            plan, left_out = write_file(part, opened, options, threads, progress)
            read_back(part, threads, progress)
            part.commit()
    path, seconds = Path(part.target), time.perf_counter() - start
    classes = len(plan.info.classes or ())
    return PackResult(
        path,
        plan.info.count,
        classes,
        plan.info.store,
        path.stat().st_size,
        seconds,
        tuple(left_out),
    )


@contextlib.contextmanager
def opened_dataset(dataset: Any) -> Iterator[BaseDataset]:
    """What is packed: a dataset of headrace's; or as one a path, or a map-style dataset that is
    not headrace's, closed at the end.
    """
    opened = dataset
    if not isinstance(dataset, BaseDataset):
        is_path = isinstance(dataset, (str, bytes, os.PathLike, list, tuple)) or not hasattr(
            dataset, "__getitem__"
        )
        if is_path:
            opened = open_source(dataset)
        else:
            opened = MemoryEfficientDataset(dataset, loading_mode="lazy")
    try:
        yield opened
    finally:
        if opened is not dataset:
            opened.close()


def left_out_message(result: PackResult) -> str:
    """Which samples are not in the file, in one line."""
    count = len(result.left_out)
    more = f"; and {count - _SHOWN:,} more" if count > _SHOWN else ""
    return (
        f"{redact(result.path)}: {count:,} of {result.samples + count:,} samples can't be read "
        "and were left out: "
        f"{'; '.join(result.left_out[:_SHOWN])}{more}"
    )


def open_source(path: DataPath, **options: Any) -> BaseDataset:
    """`open_dataset`, and packed arrays with their targets: a copy of them must not lose these."""
    dataset = open_dataset(path, **options)
    if isinstance(dataset, ArrayDataset) and dataset.targets is None:
        files = files_of(dataset.sample_source)
        if packed_info_of(files) is not None and all(one.has_column(TARGETS) for one in files):
            dataset.close()
            return open_dataset(path, target_name=TARGETS, **options)
    return dataset


def write_file(
    part: PartFile,
    dataset: BaseDataset,
    options: StoreOptions,
    workers: int,
    progress: bool | None,
    rows: Rows | None = None,
    whole: PackPart | None = None,
    planned: Packing | None = None,
) -> tuple[Plan, list[str]]:
    """Writes all samples; or, where some can't be read and may be left out, a view without these.
    Arguments: see `plan_file`; `whole` says which part of a pack the file is, and `planned` is what
    `plan_file` gave already.
    """
    left_out: list[str] = []
    workers = workers if dataset.sample_source.thread_safe else 0
    while True:
        if options.is_jpeg:
            with part.explained():
                packing = plan_reencoded(
                    dataset, options, os.path.dirname(part.path), workers, progress, planned
                )
        else:
            packing = planned or plan_file(dataset, options, workers, progress, rows)
        planned = None  # it is of all samples
        if whole is not None:
            info = replace(
                packing.plan.info,
                part=(whole.number, whole.of, whole.fingerprint, whole.samples),
                version=max(2, packing.plan.info.version),
            )
            packing = packing._replace(plan=replace(packing.plan, info=info))
        left_out += packing.left_out.values()
        with packing.spool or contextlib.nullcontext():
            failures = _write(part, packing, workers, progress)
        if not failures:
            return packing.plan, left_out
        left_out += map(str, failures.values())
        dataset = without(packing.dataset, failures)


def plan_file(
    dataset: BaseDataset,
    options: StoreOptions,
    workers: int,
    progress: bool | None,
    rows: Rows | None = None,
    read_sizes: npt.NDArray[np.int64] | None = None,
) -> Packing:
    """What is written of a dataset, and how.

    Args:
        dataset: whose samples a file gets.
        options: of re-encoded images this is the plan of the files as they are.
        workers, progress: as `pack` has them.
        rows: what its samples have in common with those of other files.
        read_sizes: see `make_plan`.

    Raises:
        ConfigError: it can't be packed, or not with this store.
        SampleError: see `pack`.
    """
    if options.is_jpeg:
        return plan_of_files(dataset, read_sizes)
    if is_of_texts(dataset):
        refuse_for_texts(options)
        return packed_texts(dataset, options.end_token)
    if options.end_token is not None:
        raise ConfigError("end_token is for texts: leave it out")
    packing = _planned(dataset, options, workers, progress, rows, read_sizes)
    return packing._replace(plan=laid_out(packing.plan, options))


def _planned(
    dataset: BaseDataset,
    options: StoreOptions,
    workers: int,
    progress: bool | None,
    rows: Rows | None,
    read_sizes: npt.NDArray[np.int64] | None,
) -> Packing:
    """`plan_file` of images as they are, and arrays, not in chunks."""
    if is_packed_as_stored(dataset):
        plan = make_plan(dataset, options.store, read_sizes=read_sizes, rows=rows)
        _refuse_check(options, plan)
        common = (
            Rows(plan.info.store, plan.dtype, ())
            if plan.dtype.names and has_masks(dataset)
            else None
        )
        return Packing(
            dataset, plan, functools.partial(_prepare, dataset, plan, options.check), {}, common
        )
    _refuse_check(options)
    workers = workers if dataset.sample_source.thread_safe else 0
    readable, plan, unreadable = _plan_values(dataset, options.store, workers, progress, rows)
    common = Rows(plan.info.store, plan.dtype, plan.shape[1:], plan.info.values)
    return Packing(
        readable,
        plan,
        functools.partial(_prepare, readable, plan, options.check),
        unreadable,
        common,
    )


def _refuse_check(options: StoreOptions, plan: Plan | None = None) -> None:
    """Raises a ConfigError where the samples are no encoded images, and `check` says how to look
    at them.
    """
    if options.check != "decode" and (
        plan is None or (plan.info.kind, plan.info.store) != ("image", "encoded")
    ):
        raise ConfigError(f"check={options.check!r} is for encoded images: leave it out")


def refuse_for_texts(options: StoreOptions) -> None:
    """Raises a ConfigError where it is said how samples are stored: of texts there is one way."""
    if options.is_jpeg:
        raise ConfigError("store='jpeg' is for images: open them with ImageDataset")
    if options.store is not None:
        raise ConfigError(
            f"store={options.store!r} is for images and arrays: texts are packed as tokens"
        )
    if options.is_chunked:
        raise ConfigError(
            f"{options.layout}: tokens lie flat, and are read as they are: leave it out"
        )
    _refuse_check(options)


def _refuse_unlike_episodes(dataset: EpisodeDataset) -> None:
    """Raises a ConfigError for whole episodes of different lengths, before they are all read."""
    lengths = dataset.lengths()
    if lengths is not None and len(lengths) and lengths.min() < lengths.max():
        raise ConfigError(
            f"whole episodes of {lengths.min():,} to {lengths.max():,} steps can't be packed, "
            "since rows have one shape: pack windows "
            "(EpisodeDataset(..., window=)), or read the files where they lie"
        )


def _plan_values(
    dataset: BaseDataset, store: str | None, workers: int, progress: bool | None, rows: Rows | None
) -> tuple[BaseDataset, Plan, dict[int, str]]:
    """The plan for samples that have to be decoded to know their shapes; the dataset without those
    that can't be read, and what is wrong with them, by their numbers.

    Raises:
        ConfigError: samples or targets are no arrays, or not alike; the message names one.
    """
    if store == "encoded":
        raise not_encoded()
    if isinstance(dataset, EpisodeDataset):
        _refuse_unlike_episodes(dataset)
    planner, unreadable = ValuesPlanner(len(dataset), dataset.budget, rows), dict[int, str]()
    groups = (
        range(start, min(start + UNKNOWN_SAMPLES, len(dataset)))
        for start in range(0, len(dataset), UNKNOWN_SAMPLES)
    )
    with with_progress(
        functools.partial(_looks, dataset),
        groups,
        workers,
        progress,
        len(dataset),
        "looking at samples",
    ) as results:
        for group, looks in results:
            for index, look in zip(group, looks, strict=True):
                if isinstance(look, SampleError):
                    unreadable[index] = str(look)
                else:
                    planner.add(index, look)
    dataset = without(dataset, unreadable)
    return dataset, planner.plan(dataset), unreadable


class _Group(NamedTuple):
    """What is written of a group of samples: nothing where one can't be read."""

    blocks: Sequence[Any]
    checksums: Sequence[int]
    failures: dict[int, SampleError]


def _write(
    part: PartFile, packing: Packing, workers: int, progress: bool | None
) -> dict[int, SampleError]:
    """Write all samples; those that can't be read, by position. After the first of these nothing
    more is written.
    """
    plan, failures = packing.plan, dict[int, SampleError]()
    most = GROUP_TEXTS if plan.info.kind == "text" else GROUP_SAMPLES
    groups = groups_of(plan.sizes + plan.read_sizes, most, plan.chunks or 1)
    with PackedWriter(part, plan) as writer:
        task = functools.partial(_encoded, packing, writer)
        with with_progress(task, groups, workers, progress, plan.info.count, "packing") as results:
            for _, made in results:
                failures.update(made.failures)
                if not failures:
                    writer.append(made.blocks, made.checksums)
        if not failures:
            writer.finish()
    return failures


def _encoded(packing: Packing, writer: PackedWriter, group: range) -> _Group:
    samples, checksums = zip(*packing.prepare(group), strict=True)
    failures = {
        index: sample
        for index, sample in zip(group, samples, strict=True)
        if isinstance(sample, SampleError)
    }
    return _Group([] if failures else writer.encode(samples), checksums, failures)


def _looks(dataset: BaseDataset, group: range) -> list[Look | SampleError]:
    """What a plan needs of each sample of a group."""

    def look(position: int, index: int, record: Any) -> Look | SampleError:
        value = _value(dataset, position, index, record)
        if isinstance(value, SampleError):
            return value
        return Look.of(
            f"sample {position}",
            value[0],
            value[1] if dataset.sample_decoder.splits_targets else None,
        )

    return [made for _, made in each_sample(dataset, group, look)]


def _prepare(
    dataset: BaseDataset, plan: Plan, check: Check, group: range
) -> list[tuple[_Array | SampleError, int]]:
    """The samples of a group as they will be stored, and their CRCs; a SampleError for one that
    may be left out.
    """
    prepared: list[tuple[_Array | SampleError, int]] = []
    for position, sample in each_sample(
        dataset, group, functools.partial(_stored, dataset, plan, check)
    ):
        if isinstance(sample, SampleError):
            prepared.append((sample, 0))
            continue
        if sample.nbytes != plan.sizes[position] or sample.dtype != plan.dtype:
            raise SampleError(
                f"{dataset.source_of(position)} changed while it was packed: "
                f"{plan.sizes[position]:,} bytes ({plan.dtype}) at the "
                f"start, {sample.nbytes:,} ({sample.dtype}) now: pack again when nobody writes "
                "there"
            )
        prepared.append((sample, crc_of(sample)))
    return prepared


def _value(
    dataset: BaseDataset, position: int, index: int, record: Any
) -> tuple[Any, Any] | SampleError:
    """Input and target of a record by the dataset's own steps, not transformed."""
    value = dataset.sample_reader.decoded(index, record, dataset.sample_decoder)
    if isinstance(value, SampleError):
        return value
    try:
        value, target = dataset.split_value(position, value)
        return dataset.sample_decoder.packed_value(value), target
    except Exception as error:
        error.add_note(f"headrace: while packing sample {position} ({dataset.source_of(position)})")
        raise


def _stored(
    dataset: BaseDataset, plan: Plan, check: Check, position: int, index: int, record: Any
) -> _Array | SampleError:
    """A record as the plan stores it."""
    if plan.info.store == "encoded":
        if plan.info.kind != "image":
            return np.frombuffer(record, np.uint8)
        try:
            pieces = checked(dataset, position, record, check)
        except Exception as error:  # as the dataset itself would meet it
            return dataset.sample_reader.failed(index, "can't be decoded", error)
        if MASK_STARTS in plan.columns and len(pieces[0]) != (
            planned := plan.columns[MASK_STARTS][position] - plan.columns[OFFSETS][position]
        ):
            raise SampleError(
                f"{dataset.source_of(position)} changed while it was packed: the image had "
                f"{planned:,} bytes at the start, and has "
                f"{len(pieces[0]):,} now: pack again when nobody writes there"
            )
        return np.concatenate(pieces)
    if isinstance(dataset, ImageDataset):
        return _pixels(dataset, plan, position, index, record)
    value = _value(dataset, position, index, record)
    return (
        value
        if isinstance(value, SampleError)
        else np.ascontiguousarray(as_stored(f"sample {position}", value[0]))
    )


def _pixels(
    dataset: ImageDataset, plan: Plan, position: int, index: int, record: Any
) -> _Array | SampleError:
    """The pixels of an image; or the row of these and their mask."""
    value = dataset.sample_reader.decoded(index, record, dataset.pixel_format)
    if isinstance(value, SampleError):
        return value
    if has_masks(dataset):
        return row_of(value[0], value[1], plan.dtype, lambda: dataset.source_of(position))
    if boxes_of(dataset) is None:
        return np.ascontiguousarray(value)
    try:
        check_size(dataset, position, value[1])
    except FormatError as error:
        return dataset.sample_reader.failed(index, "can't be packed", error)
    return np.ascontiguousarray(value[0])


def read_back(part: PartFile, workers: int, progress: bool | None) -> tuple[int, int]:
    """Verifies what was written, and writes the checksum of the whole file; returns its bytes and
    CRC.

    Raises:
        WriteError: a sample read back is another one.
    """
    part.reread()
    with part.explained(), locked_by_caller(part.path):
        result, sums = verify_samples(part.path, workers, progress, part.ahead)
        offset = seal_of(part.path)
    if result.bad:
        raise WriteError(
            f"{redact(part.target)}: {len(result.bad):,} samples read back are not what was "
            "written, the first is number "
            f"{result.bad[0][0]}: the disk or the memory of this machine is faulty"
        )
    assert offset is not None
    seal = sums.crc.to_bytes(4, "little")
    with part.explained():
        write_full(part.fd, seal, offset)
    return sums.size, replaced(sums, offset, bytes(4), seal)
