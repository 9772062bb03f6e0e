"""Packs a dataset into several files: the parts of a plan, here or anywhere.

A part is written under a temporary name, read back and renamed, and its sidecar follows: who finds the sidecar, finds the part whole.
Packed twice, it has the same bytes. The manifest is written last, by whoever finds all parts finished.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.text.text import TextDataset
from headrace.display import progress_bar
from headrace.errors import ConfigError, WriteError
from headrace.memory.per_process import end_with_parent
from headrace.packing.destination import Destination
from headrace.packing.formats.layout import chunks_for
from headrace.packing.formats.versions import versions_of
from headrace.packing.jpeg import ratio_of
from headrace.packing.options import PackFormat, StoreOptions
from headrace.packing.part import PartFile
from headrace.packing.parts import PartsPlan, check_unchanged, checks_of, edges_of, freeze, read_plan, rows_as_json
from headrace.packing.plan import Packing, Plan, names_of
from headrace.packing.run import plan_file, read_back, refuse_for_texts, write_file
from headrace.packing.status import PackStatus, Sidecar, finished_in, join_in, remove_other, sidecar_text, unjoin
from headrace.packing.texts import check_targets, documents_of, measured, packed_part
from headrace.packing.zarr_parts import pack_zarr_part, plan_zarr
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.filters import filter_versions
from headrace.storage.source import PackPart


@dataclass
class PackJob:
    """Packs single parts; a pickle of it can do so in any process that reaches the source and the destination.

    Attributes:
        dataset: what is packed.
        folder: where to.
        plan: of all parts.
        workers: threads that read and decode.
    """

    dataset: BaseDataset
    folder: Destination
    plan: PartsPlan
    workers: int

    def pack(self, part: int) -> int:
        """Packs a part, whatever is there of it; returns how many samples it has.

        Raises:
            FileChangedError: a sample is not as it was when the plan was made.
            SampleError, WriteError, AccessError: see `pack`.
        """
        try:
            return self._pack(part)
        except Exception as error:
            error.add_note(f"headrace: while packing {self.plan.name(part)}")
            raise

    def _pack(self, part: int) -> int:
        plan = self.plan
        if plan.zarr is not None:
            sidecar = pack_zarr_part(self.dataset, self.folder, plan, part, _options_of(plan), self.workers)
        else:
            sidecar = self._hdf5(part)
        self.folder.write(plan.sidecar_name(part), sidecar_text(sidecar))
        return sidecar.samples

    def _hdf5(self, part: int) -> Sidecar:
        plan = self.plan
        write = self._texts(part, self.dataset) if isinstance(self.dataset, TextDataset) else self._samples(part)
        self.folder.remove(plan.sidecar_name(part))
        with self.folder.part(plan.name(part)) as file:
            written, left_out = write(file, whole=PackPart(part, plan.parts, plan.fingerprint, plan.count))
            nbytes, crc = read_back(file, self.workers, False)
        return Sidecar(plan.digest, part, written.info.count, nbytes, crc, left_out)

    def _samples(self, part: int) -> _Write:
        """What writes a part of images or arrays."""
        plan = self.plan
        start, stop = plan.edges[part : part + 2]
        view, options, planned = self.dataset.subset(np.arange(start, stop)), _options_of(plan), None
        if plan.rows is None:
            planned = plan_file(view, options, self.workers, False)
            check_unchanged(self.folder, plan, start, checks_of(names_of(view), planned.plan.read_sizes), self.dataset.source_of)
        return functools.partial(
            write_file, dataset=view, options=options, workers=self.workers, progress=False, rows=plan.rows, planned=planned
        )

    def _texts(self, part: int, dataset: TextDataset) -> _Write:
        """What writes a part of texts."""
        plan, everything = self.plan, documents_of(dataset, self.plan.options["end_token"])
        start, stop = plan.edges[part : part + 2]
        documents = everything.within(range(start, stop))
        if documents.are_files:
            check_unchanged(self.folder, plan, start, checks_of(documents.names, documents.sizes()), everything.dataset.source_of)

        def write(file: PartFile, whole: PackPart) -> tuple[Plan, list[str]]:
            with file.explained():
                planned = packed_part(documents, os.path.dirname(file.path))
            return write_file(file, dataset, StoreOptions(), self.workers, False, whole=whole, planned=planned)

        return write


class _Write(Protocol):
    """Writes a part into a file; gives what it holds, and what is wrong with the samples that were left out."""

    def __call__(self, file: PartFile, /, *, whole: PackPart) -> tuple[Plan, list[str]]: ...


def _options_of(plan: PartsPlan) -> StoreOptions:
    """How the parts of a plan are stored."""
    if jpeg := plan.options.get("jpeg"):
        return StoreOptions("jpeg", jpeg["max_size"], jpeg["quality"])
    said, store = plan.options, plan.store if plan.rows is None else None
    return StoreOptions(store, check=said.get("check", "decode"), compression=said.get("compression"), chunks=said.get("chunks"))  # type: ignore[arg-type]


def plan_parts(
    dataset: BaseDataset,
    folder: Destination | None,
    shard_size: int,
    how: StoreOptions,
    workers: int,
    progress: bool | None,
    is_share: bool = False,
) -> tuple[PartsPlan, npt.NDArray[np.uint32]]:
    """The plan for a dataset, and the CRCs of its samples. Reads the plan that is in the folder, if there is one, and writes nothing.

    Args:
        is_share: True for one of many jobs: where the plan that is there is that of this dataset, it does not ask for the size of each file
            again; those of the parts that it packs are compared then.

    Raises:
        ConfigError: the dataset can't be packed, or not into parts.
    """
    if isinstance(dataset, TextDataset):
        return _plan_texts(dataset, shard_size, how)
    frozen = None if folder is None else read_plan(folder)
    if frozen is not None and frozen.fingerprint == dataset.fingerprint and _is_same(frozen, shard_size, _on_error(dataset), how):
        return frozen, np.empty(0, np.uint32)  # all samples were looked at when it was made
    if is_share and frozen is not None and frozen.fingerprint == dataset.fingerprint and isinstance(dataset.sample_source, FilesSource):
        file = plan_file(dataset, how, workers, progress, read_sizes=np.zeros(len(dataset), np.int64))
        if replace(_plan_of(dataset, file, shard_size, how, frozen.edges), nbytes=frozen.nbytes, samples=frozen.samples) == frozen:
            return frozen, np.empty(0, np.uint32)
    file = plan_file(dataset, how, workers, progress)
    if not len(dataset):
        raise ConfigError("a dataset without samples can't be packed into parts")
    checks = checks_of(names_of(dataset), file.plan.read_sizes) if file.rows is None else np.empty(0, np.uint32)
    return replace(_plan_of(dataset, file, shard_size, how), samples=zlib.crc32(checks.astype("<u4").tobytes())), checks


def _plan_of(dataset: BaseDataset, file: Packing, shard_size: int, how: StoreOptions, edges: list[int] | None = None) -> PartsPlan:
    """The plan for a dataset, by that of one file of it; without the CRC of the samples' CRCs. `edges` are those of another plan."""
    options = {"shard_size": shard_size, "on_error": _on_error(dataset), **file.plan.info.image}
    if how.check != "decode":
        options["check"] = how.check
    if how.is_jpeg:
        options["jpeg"] = {"max_size": how.max_size, "quality": how.quality}
    if file.plan.chunks is not None:
        options["compression"], options["chunks"] = file.plan.compression, file.plan.chunks
    if versions := versions_of(dataset, file.plan, how):
        options["versions"] = versions
    if file.rows is not None:
        options["rows"] = rows_as_json(file.rows)
    sizes = np.zeros(len(dataset), np.int64)
    sizes[np.setdiff1d(np.arange(len(dataset)), list(file.unreadable))] = file.plan.sizes
    if edges is None:
        if how.is_jpeg:
            sizes = (sizes * ratio_of(dataset, how, sizes)).astype(np.int64)  # about: they are known when all are encoded
        edges = edges_of(sizes, shard_size)
    info = file.plan.info
    return PartsPlan(
        kind=info.kind, store=info.store, fingerprint=dataset.fingerprint, count=len(dataset), edges=edges,
        nbytes=np.add.reduceat(sizes, edges[:-1]).tolist(), samples=0, options=options, classes=info.classes,
    )  # fmt: skip


def _is_same(frozen: PartsPlan, shard_size: int, on_error: str, how: StoreOptions) -> bool:
    """True if a plan of samples that had to be looked at is what these arguments give of the same dataset."""
    rows = frozen.rows
    if (
        rows is None
        or how.store not in (None, "decoded")
        or (how.check, how.end_token) != ("decode", None)
        or (rows.store != "decoded" and how.is_chunked)
    ):
        return False
    chunks = chunks_for(how, math.prod(rows.shape) * rows.dtype.itemsize)
    compression = None if chunks is None else how.compression
    wanted = {
        "shard_size": shard_size, "on_error": on_error, "compression": compression, "chunks": chunks,
        "versions": None if compression is None else filter_versions(compression),
    }  # fmt: skip
    return all(frozen.options.get(name) == value for name, value in wanted.items())


def _plan_texts(dataset: TextDataset, shard_size: int, how: StoreOptions) -> tuple[PartsPlan, npt.NDArray[np.uint32]]:
    """`plan_parts` of texts: parts are cut by bytes of the texts, so that each job tokenises its own parts alone."""
    refuse_for_texts(how)
    documents = documents_of(dataset, how.end_token)
    if not len(documents.chosen):
        raise ConfigError("a dataset without samples can't be packed into parts")
    info, sizes = documents.info(), documents.sizes()
    checks = checks_of(documents.names, sizes)
    options = {"shard_size": shard_size, "on_error": _on_error(documents.dataset), **info.text}
    if documents.tokens is None:
        check_targets(documents)
        sample = measured(documents, sizes)
        options["tokens"] = sample.crc
        sizes = (sizes * sample.tokens_per_byte).astype(np.int64)
    edges = edges_of(sizes, shard_size)
    plan = PartsPlan(
        kind=info.kind, store=info.store, fingerprint=documents.fingerprint, count=len(sizes), edges=edges,
        nbytes=np.add.reduceat(sizes, edges[:-1]).tolist(), samples=zlib.crc32(checks.astype("<u4").tobytes()), options=options,
        classes=info.classes,
    )  # fmt: skip
    return plan, checks


def _on_error(dataset: BaseDataset) -> str:
    return "skip" if dataset.on_error == "skip" else "raise"


def pack_parts(
    dataset: BaseDataset,
    folder: Destination,
    *,
    format: PackFormat,
    shard_size: int,
    options: StoreOptions,
    share: range | tuple[int, int] | None,
    workers: int,
    processes: int,
    executor: Executor | None,
    overwrite: bool,
    progress: bool | None,
) -> PackStatus:
    """Packs the parts of a share which are not finished, and joins the pack if all are.

    Args:
        format: of the parts.
        share: the numbers of the parts; or (i, N): each N-th one from i on; None: all.

    Raises:
        See `pack`.
    """
    folder.prepare()
    if format == "zarr":
        plan, checks, dataset = plan_zarr(dataset, folder, shard_size, options, workers, progress)
    else:
        plan, checks = plan_parts(dataset, folder, shard_size, options, workers, progress, share is not None)
    if freeze(folder, plan, checks, overwrite):
        remove_other(folder, plan)
    status, sidecars = finished_in(folder, plan)
    numbers = parts_of(share, plan.parts)
    left = sorted(set(numbers) - set(status.done))
    if left:
        unjoin(folder, plan)
        job = PackJob(dataset, folder, plan, workers)
        with progress_bar(progress, total=len(numbers), initial=len(numbers) - len(left), desc="packing", unit="part") as bar:
            for _ in _packed(job, left, processes, executor):
                bar.update(1)
        status, sidecars = finished_in(folder, plan, sidecars)
    if status.is_finished and not status.joined:
        join_in(folder, plan, sidecars)
        status = replace(status, joined=True)
    return status


def parts_of(share: range | tuple[int, int] | None, parts: int) -> list[int]:
    """The numbers of the parts of a share, see `pack_parts`.

    Raises:
        ConfigError: there are fewer.
    """
    if share is None:
        return list(range(parts))
    if isinstance(share, range):
        if share.stop > parts:
            raise ConfigError(f"parts={share.start}:{share.stop}: the plan has {parts:,} parts")
        return list(share)
    first, step = share
    return list(range(first, parts, step))


def _packed(job: PackJob, numbers: Sequence[int], processes: int, executor: Executor | None) -> Iterator[int]:
    """Packs parts; gives the number of samples of each when it is finished."""
    if executor is None and processes <= 1:
        yield from map(job.pack, numbers)
        return
    if executor is not None:
        yield from _packed_by(executor, job, numbers)
        return
    processes = min(processes, len(numbers))
    try:
        pickle.dumps(job)
    except Exception as error:
        raise ConfigError(
            f"processes={processes}: {type(job.dataset).__name__} can't be sent to another process ({error}): define what it holds, such "
            "as a tokenizer, in a module, or pack with processes=1"
        ) from error
    with (
        ThreadPoolExecutor(1, "headrace-pack-part") as own,  # this process packs too, from the first moment on
        ProcessPoolExecutor(max(1, processes - 1), get_context("forkserver"), end_with_parent) as others,
    ):
        try:
            yield from _packed_in_lanes([own, *[others] * (processes - 1)], job, numbers)
        except BaseException:
            for pool in (own, others):
                pool.shutdown(wait=False, cancel_futures=True)  # parts that are being packed are finished
            raise


def _packed_in_lanes(lanes: Sequence[Executor], job: PackJob, numbers: Sequence[int]) -> Iterator[int]:
    """Each lane packs one part at a time, and gets the next when it has done so."""
    left, waiting = iter(numbers), dict[Future[int], tuple[Executor, int]]()

    def submit(lane: Executor) -> None:
        number = next(left, None)
        if number is not None:
            waiting[lane.submit(job.pack, number)] = lane, number

    for lane in lanes:
        submit(lane)
    while waiting:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            lane, number = waiting.pop(future)
            result = _result(future, job, number)
            submit(lane)
            yield result


def _packed_by(executor: Executor, job: PackJob, numbers: Sequence[int]) -> Iterator[int]:
    waiting: dict[Future[int], int] = {}
    try:
        for number in numbers:
            waiting[executor.submit(job.pack, number)] = number
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                number = waiting.pop(future)
                yield _result(future, job, number)
    finally:
        for future in waiting:
            future.cancel()


def _result(future: Future[int], job: PackJob, number: int) -> int:
    try:
        return future.result()
    except BrokenExecutor as error:
        raise WriteError(
            f"a process died while it packed {job.folder.shown_name(job.plan.name(number))} or another part (out of memory, or killed): "
            "run the same command again, finished parts are kept"
        ) from error
