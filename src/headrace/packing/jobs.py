"""Plans the parts of a pack, and packs those that are not finished: by threads and processes of
this machine, or by any executor.

A part is written under a temporary name, read back and renamed, and its sidecar follows: who finds
the sidecar, finds the part whole. Packed twice, it has the same bytes. The manifest is written
last, by whoever finds all parts finished.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.core.dataset import BaseDataset
from headrace.datasets.text.text import TextDataset
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FileChangedError, WriteError
from headrace.formats.arrays.packed import TARGETS
from headrace.formats.hdf5.chunks import filter_versions
from headrace.formats.resolve.resolver import MANIFEST, PLAN
from headrace.formats.source import PackPart
from headrace.formats.tokens.packed import KIND
from headrace.io.packed_strings import PackedNames
from headrace.loader.worker.start import choose_context, forkserver_context
from headrace.memory.per_process import end_with_parent
from headrace.packing.columns import as_column, crc_of_columns, names_of
from headrace.packing.destination import Destination
from headrace.packing.file import FilePacker, read_back
from headrace.packing.images import ratio_of
from headrace.packing.options import PackOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.parts import (
    PackStatus,
    PartsPlan,
    Sidecar,
    checks_of,
    edges_of,
    finished_in,
    freeze,
    join_in,
    options_of,
    read_plan,
    refuse_foreign,
    remove_other,
    rows_as_json,
    sidecar_text,
)
from headrace.packing.plan import (
    Packing,
    are_files,
    chunks_for,
    is_packed_as_stored,
    versions_of,
)
from headrace.packing.texts import documents_of, estimate_tokens, is_of_texts

# -- the plan


def plan_parts(dataset: BaseDataset, folder: Destination | None, options: PackOptions) -> PartsPlan:
    """The plan for a dataset. Reads the plan that is in the folder, if there is one, and writes
    nothing.

    One of many jobs (`part`, `parts`), where the plan that is there is that of this dataset, does
    not ask for the size of each file again; those of the parts that it packs are compared then.

    Raises:
        ConfigError: the dataset can't be packed, or not into parts.
    """
    if is_of_texts(dataset):
        return _plan_texts(dataset, options)
    frozen = None if folder is None else read_plan(folder)
    if frozen is not None and frozen.fingerprint == dataset.fingerprint:
        if _is_same(frozen, dataset, options):
            return frozen  # all samples were looked at when it was made
        is_share = options.part is not None or options.parts is not None
        if is_share and are_files(dataset.sample_source):
            packer = FilePacker(dataset, options, frozen.rows)
            file = packer.plan(np.zeros(len(dataset), np.int64))
            plan = _plan_of(dataset, file, options, frozen.edges)
            if replace(plan, nbytes=frozen.nbytes, sources=frozen.sources) == frozen:
                return frozen
    file = FilePacker(dataset, options).plan()
    if not len(dataset):
        raise ConfigError("a dataset without samples can't be packed into parts")
    return _plan_of(dataset, file, options)


def _plan_of(
    dataset: BaseDataset, file: Packing, how: PackOptions, edges: list[int] | None = None
) -> PartsPlan:
    """The plan for a dataset, by that of one file of it. `edges` are those of another plan."""
    options = {**options_of(dataset, how), **file.plan.info.image}
    if file.plan.chunks is not None:
        options["compression"] = file.plan.compression
        options["chunks"] = file.plan.chunks
    versions = versions_of(dataset, file.plan, how)
    if versions:
        options["versions"] = versions
    if file.rows is not None:
        options["rows"] = rows_as_json(file.rows)
    sizes = np.zeros(len(dataset), np.int64)
    sizes[np.setdiff1d(np.arange(len(dataset)), list(file.left_out))] = file.plan.sizes
    if edges is None:
        if how.is_jpeg:
            # about: they are known when all are encoded
            sizes = (sizes * ratio_of(dataset, how, sizes)).astype(np.int64)
        edges = edges_of(sizes, how.part_nbytes)
    checks = list[int]()
    if is_packed_as_stored(dataset):
        checks = checks_of(names_of(dataset), file.plan.read_sizes, edges)
    return PartsPlan.of(file.plan.info, dataset.fingerprint, edges, sizes, checks, options)


def _is_same(frozen: PartsPlan, dataset: BaseDataset, how: PackOptions) -> bool:
    """True if a plan of samples that had to be looked at is what these options give of the same
    dataset.
    """
    rows = frozen.rows
    if (
        rows is None
        or is_packed_as_stored(dataset)
        or how.store not in (None, "decoded")
        or (how.check, how.end_token) != ("decode", None)
        or (rows.store != "decoded" and how.is_chunked)
    ):
        return False
    chunks = chunks_for(how, math.prod(rows.shape) * rows.dtype.itemsize)
    wanted = {**options_of(dataset, how), "compression": None, "chunks": chunks, "versions": None}
    if chunks is not None and how.compression is not None:
        wanted["compression"] = how.compression
        wanted["versions"] = filter_versions(how.compression)
    return all(frozen.options.get(name) == value for name, value in wanted.items())


def _plan_texts(dataset: TextDataset, how: PackOptions) -> PartsPlan:
    """`plan_parts` of texts: parts are cut by bytes of the texts, so that each job tokenises its
    own parts alone.
    """
    documents = documents_of(dataset, how)
    if not len(documents.chosen):
        raise ConfigError("a dataset without samples can't be packed into parts")
    info = documents.info()
    sizes = documents.sizes()
    read_sizes = sizes
    options = {**options_of(documents.dataset, how), **info.text}
    targets = documents.targets()
    if targets is not None and not documents.are_files:
        # of all: each part alone might seem to have targets of one kind
        options["annotations"] = crc_of_columns({TARGETS: as_column(targets)})
    if documents.tokens is None:
        estimate = estimate_tokens(documents, sizes)
        options["tokens"] = estimate.crc
        sizes = (sizes * estimate.tokens_per_byte).astype(np.int64)
    edges = edges_of(sizes, how.part_nbytes)
    checks = checks_of(documents.names, read_sizes, edges)
    return PartsPlan.of(info, documents.fingerprint, edges, sizes, checks, options)


# -- a part


@dataclass
class PackJob:
    """Packs single parts; a pickle of it can do so in any process that reaches the source and the
    destination.

    Attributes:
        dataset: what is packed.
        folder: where to.
        plan: of all parts.
        options: how.
    """

    dataset: BaseDataset
    folder: Destination
    plan: PartsPlan
    options: PackOptions

    def pack(self, part: int, is_cancelled: Callable[[], bool] = lambda: False) -> int:
        """Packs a part, whatever is there of it; returns how many samples it has.

        Args:
            part: its number.
            is_cancelled: asked before each step of writing; True: it ends there.

        Raises:
            FileChangedError: a sample is not as it was when the plan was made.
            SampleError, WriteError, AccessError: see `pack`.
            CancelledError: `is_cancelled` said so.
        """
        plan = self.plan
        try:
            packer, packing = self._planned(part)
            self.folder.remove(plan.sidecar_name(part))
            with self.folder.part(plan.name(part)) as file:
                file.is_cancelled = is_cancelled
                whole = PackPart(part, plan.parts, plan.fingerprint, plan.count)
                written, left_out = packer.write(file, whole, packing)
                nbytes, crc = read_back(file, self.options.threads, False)
            count = written.info.count
            sidecar = Sidecar(plan.digest, part, count, nbytes, crc, left_out)
            self.folder.write(plan.sidecar_name(part), sidecar_text(sidecar))
            return count
        except Exception as error:
            error.add_note(f"headrace: while packing {plan.name(part)}")
            raise

    def _planned(self, part: int) -> tuple[FilePacker, Packing | None]:
        """What writes a part; and of samples that are known without reading them what it writes."""
        dataset = self.dataset
        numbers = range(*self.plan.edges[part : part + 2])
        if is_of_texts(dataset):
            documents = documents_of(dataset, self.options).within(numbers)
            if documents.are_files:
                self._check_unchanged(part, documents.names, documents.sizes())
            return FilePacker(dataset, self.options, documents=documents), None
        view = dataset.subset(np.asarray(numbers))
        packer = FilePacker(view, self.options, self.plan.rows)
        if not is_packed_as_stored(view):
            return packer, None
        packing = packer.plan()
        self._check_unchanged(part, names_of(view), packing.plan.read_sizes)
        return packer, packing

    def _check_unchanged(self, part: int, names: PackedNames | None, sizes: IntArray) -> None:
        """Raises a FileChangedError where samples have other names or sizes than planned."""
        start, stop = self.plan.edges[part : part + 2]
        if checks_of(names, sizes, [0, len(sizes)]) != self.plan.sources[part : part + 1]:
            raise FileChangedError(
                f"one of the samples {start:,} to {stop - 1:,} has another name or size than when "
                f"{PLAN} was written: pack to another folder, or pass overwrite=True (--overwrite) "
                "to plan anew"
            )


# -- all parts


def pack_parts(dataset: BaseDataset, folder: Destination, options: PackOptions) -> PackStatus:
    """Packs the parts of a share which are not finished, and joins the pack if all are.

    Raises:
        See `pack`.
    """
    refuse_own_source(dataset, folder.path)
    folder.prepare()
    if not options.overwrite:
        refuse_foreign(folder)
    plan = plan_parts(dataset, folder, options)
    if freeze(folder, plan, options.overwrite):
        remove_other(folder, plan)
    status, sidecars = finished_in(folder, plan)
    numbers = options.share(plan.parts)
    left = sorted(set(numbers) - set(status.done))
    if left:
        folder.remove(MANIFEST)  # nobody is to open a pack whose parts are packed again
        # each part shows none
        job = PackJob(dataset, folder, plan, replace(options, executor=None, progress=False))
        done = len(numbers) - len(left)
        bar = progress_bar(
            options.progress, total=len(numbers), initial=done, desc="packing", unit="part"
        )
        with bar, contextlib.closing(_packed(job, left, options.executor)) as packed:
            for _ in packed:
                bar.update(1)
        status, sidecars = finished_in(folder, plan)
        lost = sorted(set(left).intersection(status.missing))
        if lost:
            raise WriteError(
                f"{folder.shown_name(plan.name(lost[0]))} was packed by another process, and is "
                "not there: pack to a folder that all processes share, or to a store"
            )
    if status.is_finished and not status.joined:
        join_in(folder, plan, sidecars)
        status = replace(status, joined=True)
    return status


def _packed(
    job: PackJob, numbers: Sequence[int], executor: Executor | None
) -> Generator[int, None, None]:
    """Packs parts; gives the number of samples of each when it is finished."""
    if executor is not None:
        yield from _packed_by(executor, job.pack, job, numbers)
        return
    processes = min(job.options.processes, len(numbers))
    if processes > 1:
        try:
            with open(os.devnull, "wb") as nowhere:
                pickle.dump(job, nowhere)
        except Exception as error:
            raise ConfigError(
                f"processes={processes}: {type(job.dataset).__name__} can't be sent to another "
                f"process ({error}): define what it holds, such as a tokenizer, in a module, or "
                "pack with processes=1"
            ) from error
        with _ended(ProcessPoolExecutor(processes, _context(job.dataset), _adopt, (job,))) as (
            pool,
            _,
        ):
            yield from _packed_by(pool, _pack_adopted, job, numbers)
        return
    # one part waits for the disk, and is read back, while the other is read and decoded
    threads = 1
    if job.dataset.sample_source.thread_safe and job.plan.kind != KIND:
        threads = min(2, job.options.threads, len(numbers))
    if threads == 1:
        yield from map(job.pack, numbers)
        return
    workers = -(-job.options.threads // threads)
    job = replace(job, options=replace(job.options, workers=workers))
    with _ended(ThreadPoolExecutor(threads, "headrace-pack-part")) as (pool, ended):
        yield from _packed_by(pool, lambda part: job.pack(part, ended.is_set), job, numbers)


@contextlib.contextmanager
def _ended(pool: Executor) -> Iterator[tuple[Executor, threading.Event]]:
    """A pool; after an error parts that have not begun are cancelled, and the event is set, by
    which threads end.
    """
    ended = threading.Event()
    try:
        yield pool, ended
    except BaseException:
        ended.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _packed_by(
    executor: Executor, task: Callable[[int], int], job: PackJob, numbers: Sequence[int]
) -> Iterator[int]:
    waiting = dict[Future[int], int]()
    number = numbers[0]
    try:
        for number in numbers:
            waiting[executor.submit(task, number)] = number
        for future in as_completed(waiting):
            number = waiting[future]
            yield future.result()
    except BrokenExecutor as error:
        raise WriteError(
            f"a process died while it packed {job.folder.shown_name(job.plan.name(number))} or "
            "another part (out of memory, or killed): run the same command again, finished parts "
            "are kept"
        ) from error
    finally:
        for future in waiting:
            future.cancel()


def _context(dataset: BaseDataset) -> Any:
    """Forks, as a loader's workers are, if no other thread of Python runs, headrace's included:
    another pack may hold locks.
    """
    if threading.active_count() == 1:
        return choose_context(None, dataset, [])[0]
    return forkserver_context()


# of a process of the pool: it gets its job once, and not with each part
_adopted: PackJob | None = None


def _adopt(job: PackJob) -> None:
    """In another process, which is forked where that is safe, as a loader's workers are: torch's
    threads stay behind then.
    """
    global _adopted
    end_with_parent()
    torch.set_num_threads(1)
    _adopted = job


def _pack_adopted(part: int) -> int:
    assert _adopted is not None
    return _adopted.pack(part)
