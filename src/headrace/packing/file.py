"""Packs a dataset into one file: reads and checks samples in threads, writes them in order, and
verifies the file.

Threads read and check (or decode) the samples, a few groups ahead of the one that is written; the
calling thread writes them in order into a part file, reads everything back, and only then gives the
file its name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.datasets.open import open_dataset
from headrace.errors import ConfigError, SampleError, WriteError
from headrace.formats.arrays.packed import MASK_STARTS, OFFSETS, TARGETS, crc_of
from headrace.formats.hdf5.files import locked_by_caller
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.source import PackPart
from headrace.io.local.checksums import replaced
from headrace.io.paths import redact
from headrace.memory.whole import write_full
from headrace.packing.columns import files_of, has_masks
from headrace.packing.hdf5 import PackedWriter
from headrace.packing.images import checked, pixels_of, reencode_group
from headrace.packing.options import PackOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.part import PartFile
from headrace.packing.plan import (
    Made,
    Packing,
    Plan,
    Rows,
    is_packed_as_stored,
    laid_out,
    make_plan,
    not_encoded,
    packed_info_of,
)
from headrace.packing.stream import (
    GROUP_SAMPLES,
    UNKNOWN_SAMPLES,
    Spool,
    each_sample,
    groups_of,
    stream,
    without,
)
from headrace.packing.texts import Documents, documents_of, is_of_texts, packed_texts
from headrace.packing.values import Look, ValuesPlanner, as_stored, look_at
from headrace.packing.verify import seal_of, verify_samples

GROUP_TEXTS = 4096  # which are tokens already
_Array = npt.NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class PackResult:
    """What was packed into one file.

    Attributes:
        path: the packed file.
        samples: number of samples in it.
        classes: number of classes.
        kind: "image", "text", or "array".
        store: "encoded", "decoded", "ragged" or "tokens".
        nbytes: size of the file.
        left_out: what is wrong with each sample that could not be read and was left out.
    """

    path: Path
    samples: int
    classes: int
    kind: str
    store: str
    nbytes: int
    left_out: list[str]


def pack_file(
    dataset: BaseDataset, dst: str | os.PathLike[Any], options: PackOptions
) -> PackResult:
    """`pack` into one file."""
    part = PartFile(dst, options.overwrite)
    refuse_own_source(dataset, part.target)
    with part:
        plan, left_out = FilePacker(dataset, options).write(part)
        read_back(part, options.threads, options.progress)
        part.commit()
    path = Path(part.target)
    info = plan.info
    classes = len(info.classes or ())
    nbytes = path.stat().st_size
    return PackResult(path, info.count, classes, info.kind, info.store, nbytes, left_out)


@contextlib.contextmanager
def opened_dataset(dataset: Any) -> Iterator[BaseDataset]:
    """What is packed: a dataset of headrace's; or as one a path, or a map-style dataset that is
    not headrace's, closed at the end.
    """
    opened = dataset
    if not isinstance(dataset, BaseDataset):
        is_path = isinstance(dataset, (str, bytes, os.PathLike, list, tuple))
        is_path = is_path or not hasattr(dataset, "__getitem__")
        if is_path:
            opened = open_source(dataset)
        else:
            opened = MemoryEfficientDataset(dataset, loading_mode="lazy")
    try:
        yield opened
    finally:
        if opened is not dataset:
            opened.close()


def open_source(path: DataPath, **options: Any) -> BaseDataset:
    """`open_dataset`, and packed arrays with their targets: a copy of them must not lose these."""
    dataset = open_dataset(path, **options)
    if isinstance(dataset, ArrayDataset) and dataset.targets is None:
        files = files_of(dataset.sample_source)
        if packed_info_of(files) is not None and all(one.has_column(TARGETS) for one in files):
            dataset.close()
            return open_dataset(path, target_name=TARGETS, **options)
    return dataset


class _Group(NamedTuple):
    """What is written of a group of samples: nothing where one can't be read."""

    blocks: Sequence[Any]
    checksums: Sequence[int]
    failures: dict[int, SampleError]


class FilePacker:
    """Plans and writes the file of a dataset.

    Args:
        dataset: whose samples a file gets.
        options: how.
        rows: what its samples have in common with those of other files.
        documents: of a part of texts; None: all of the dataset's.
    """

    def __init__(
        self,
        dataset: BaseDataset,
        options: PackOptions,
        rows: Rows | None = None,
        documents: Documents | None = None,
    ) -> None:
        self._dataset = dataset
        self._options = options
        self._rows = rows
        self._documents = documents
        self._workers = options.threads if dataset.sample_source.thread_safe else 0

    def write(
        self, part: PartFile, whole: PackPart | None = None, planned: Packing | None = None
    ) -> tuple[Plan, list[str]]:
        """Writes all samples; or, where some can't be read and may be left out, a view without
        these. Gives what the file holds, and what is wrong with the others.

        Args:
            part: entered.
            whole: which part of a pack the file is.
            planned: what `plan` gave already.
        """
        left_out: list[str] = []
        folder = os.path.dirname(part.path)
        while True:
            if self._options.is_jpeg or self._documents is not None:
                with part.explained():
                    packing = self.plan(planned.plan.read_sizes if planned else None, folder)
            else:
                packing = planned or self.plan()
            planned = None  # it is of all samples
            if whole is not None:
                of_part = (whole.number, whole.of, whole.fingerprint, whole.samples)
                info = packing.plan.info
                info = replace(info, part=of_part, version=max(2, info.version))
                packing = packing._replace(plan=replace(packing.plan, info=info))
            left_out += packing.left_out.values()
            with contextlib.closing(packing.spool) if packing.spool else contextlib.nullcontext():
                failures = self._written(part, packing)
            if not failures:
                return packing.plan, left_out
            left_out += map(str, failures.values())
            self._dataset = without(packing.dataset, failures)

    def plan(
        self, read_sizes: npt.NDArray[np.int64] | None = None, folder: str | None = None
    ) -> Packing:
        """What is written, and how.

        Args:
            read_sizes: see `make_plan`.
            folder: where a temporary file may be, for samples whose sizes are not known before they
                are made; None: images that are re-encoded are planned as they are.

        Raises:
            ConfigError: the dataset can't be packed, or not with this store.
            SampleError: see `pack`.
        """
        dataset = self._dataset
        options = self._options
        if is_of_texts(dataset):
            documents = self._documents or documents_of(dataset, options)
            return packed_texts(documents, folder if self._documents else None)
        if options.end_token is not None:
            raise ConfigError("end_token is for texts: leave it out")
        if options.is_jpeg:
            if not isinstance(dataset, ImageDataset):
                raise ConfigError("store='jpeg' is for images: open them with ImageDataset")
            plan = make_plan(dataset, "encoded", read_sizes=read_sizes)
            if folder is None:
                return Packing(dataset, plan, lambda group: [], {})
            return self._reencoded(plan, folder)
        if not is_packed_as_stored(dataset):
            self._refuse_check()
            packing = self._looked_at()
        else:
            plan = make_plan(dataset, options.store, read_sizes=read_sizes, rows=self._rows)
            if (plan.info.kind, plan.info.store) != ("image", "encoded"):
                self._refuse_check()
            packing = self._packing(dataset, plan)
            if plan.dtype.names and has_masks(dataset):
                packing = packing._replace(rows=Rows(plan.info.store, plan.dtype, ()))
        return packing._replace(plan=laid_out(packing.plan, options))

    def _packing(self, dataset: BaseDataset, plan: Plan) -> Packing:
        return Packing(dataset, plan, lambda group: self._prepared(dataset, plan, group), {})

    def _refuse_check(self) -> None:
        check = self._options.check
        if check != "decode":
            raise ConfigError(f"check={check!r} is for encoded images: leave it out")

    def _reencoded(self, plan: Plan, folder: str) -> Packing:
        """Re-encodes all images into a spool, since their sizes must be known before a file is laid
        out.
        """
        dataset = self._dataset
        options = self._options
        unreadable = dict[int, str]()
        image_sizes = list[int]()
        spool = Spool(folder)
        try:
            groups = groups_of(plan.read_sizes)
            with self._readable(
                lambda group: reencode_group(dataset, options, group),
                groups,
                "re-encoding",
                unreadable,
            ) as images:
                for _, image in images:
                    spool.append(b"".join(image))
                    image_sizes.append(len(image[0]))
            jpeg = [options.max_size, options.quality]
            made = Made(spool.sizes, np.array(image_sizes, np.int64), jpeg)
            readable = without(dataset, unreadable)
            plan = make_plan(readable, "encoded", read_sizes=made.sizes, made=made)
            return Packing(readable, plan, spool.reader(), unreadable, spool=spool)
        except BaseException:
            spool.close()
            raise

    def _looked_at(self) -> Packing:
        """The packing of samples that have to be decoded to know their shapes.

        Raises:
            ConfigError: samples or targets are no arrays, or not alike; the message names one.
        """
        dataset = self._dataset
        if self._options.store == "encoded":
            raise not_encoded()
        planner = ValuesPlanner(dataset, self._rows)
        unreadable = dict[int, str]()
        count = len(dataset)
        groups = (
            range(start, min(start + UNKNOWN_SAMPLES, count))
            for start in range(0, count, UNKNOWN_SAMPLES)
        )
        what = "looking at samples"
        with self._readable(self._looks, groups, what, unreadable) as looks:
            for index, look in looks:
                planner.add(index, look)
        readable = without(dataset, unreadable)
        plan = planner.plan(readable)
        rows = Rows(plan.info.store, plan.dtype, plan.shape[1:], plan.info.values)
        return self._packing(readable, plan)._replace(left_out=unreadable, rows=rows)

    @contextlib.contextmanager
    def _readable(
        self,
        task: Callable[[range], Sequence[T | SampleError]],
        groups: Iterator[range],
        what: str,
        unreadable: dict[int, str],
    ) -> Iterator[Iterator[tuple[int, T]]]:
        """What a task makes of each sample that can be read, by number; what is wrong with others
        is added to `unreadable`.
        """
        count = len(self._dataset)
        results = stream(task, groups, self._workers, self._options.progress, count, what)

        def readable() -> Iterator[tuple[int, T]]:
            for group, samples in results:
                for index, sample in zip(group, samples, strict=True):
                    if isinstance(sample, SampleError):
                        unreadable[index] = str(sample)
                    else:
                        yield index, sample

        with contextlib.closing(results):
            yield readable()

    def _looks(self, group: range) -> list[Look | SampleError]:
        dataset = self._dataset

        def look(position: int, index: int, record: Any) -> Look | SampleError:
            value = _value(dataset, position, index, record)
            if isinstance(value, SampleError):
                return value
            target = value[1] if dataset.sample_decoder.splits_targets else None
            return look_at(f"sample {position}", value[0], target)

        return each_sample(dataset, group, look)

    def _written(self, part: PartFile, packing: Packing) -> dict[int, SampleError]:
        """Write all samples; those that can't be read, by position. After the first of these
        nothing more is written.
        """
        plan = packing.plan
        failures = dict[int, SampleError]()
        most = GROUP_TEXTS if plan.info.kind == "text" else GROUP_SAMPLES
        groups = groups_of(plan.sizes + plan.read_sizes, most, plan.chunks or 1)
        count = plan.info.count

        def encoded(group: range) -> _Group:
            samples = packing.prepare(group)
            failed = dict[int, SampleError]()
            sound = list[_Array]()
            for index, sample in zip(group, samples, strict=True):
                if isinstance(sample, SampleError):
                    failed[index] = sample
                else:
                    sound.append(sample)
            if failed:
                return _Group([], [], failed)
            return _Group(writer.encode(sound), [crc_of(sample) for sample in sound], {})

        with PackedWriter(part, plan) as writer:
            with contextlib.closing(
                stream(encoded, groups, self._workers, self._options.progress, count, "packing")
            ) as results:
                for _, group in results:
                    failures.update(group.failures)
                    if not failures:
                        writer.append(group.blocks, group.checksums)
            if not failures:
                writer.finish()
        return failures

    def _prepared(
        self, dataset: BaseDataset, plan: Plan, group: range
    ) -> list[_Array | SampleError]:
        """The samples of a group as they will be stored."""

        def stored(position: int, index: int, record: Any) -> _Array | SampleError:
            sample = self._stored(dataset, plan, position, index, record)
            if isinstance(sample, SampleError):
                return sample
            if sample.nbytes != plan.sizes[position] or sample.dtype != plan.dtype:
                raise SampleError(
                    f"{dataset.source_of(position)} changed while it was packed: "
                    f"{plan.sizes[position]:,} bytes ({plan.dtype}) at the start, "
                    f"{sample.nbytes:,} ({sample.dtype}) now: pack again when nobody writes there"
                )
            return sample

        return each_sample(dataset, group, stored)

    def _stored(
        self, dataset: BaseDataset, plan: Plan, position: int, index: int, record: Any
    ) -> _Array | SampleError:
        """A record as the plan stores it."""
        if plan.info.store != "encoded":
            if isinstance(dataset, ImageDataset):
                return pixels_of(dataset, plan.dtype, position, index, record)
            value = _value(dataset, position, index, record)
            if isinstance(value, SampleError):
                return value
            return np.ascontiguousarray(as_stored(f"sample {position}", value[0]))
        if plan.info.kind != "image":
            return np.frombuffer(record, np.uint8)
        try:
            pieces = checked(dataset, position, record, self._options.check)
        except Exception as error:  # as the dataset itself would meet it
            return dataset.sample_reader.failed(index, "can't be decoded", error)
        if MASK_STARTS in plan.columns:
            begin = plan.columns[OFFSETS][position]
            if begin + len(pieces[0]) != plan.columns[MASK_STARTS][position]:
                raise SampleError(f"{dataset.source_of(position)} changed while it was packed")
        return np.concatenate(pieces)


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
            f"written, the first is number {result.bad[0][0]}: the disk or the memory of this "
            "machine is faulty"
        )
    seal = sums.crc.to_bytes(4, "little")
    with part.explained():
        write_full(part.fd, seal, offset)
    return sums.size, replaced(sums, offset, bytes(4), seal)
