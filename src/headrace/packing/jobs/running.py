"""Packs the parts of a plan that are not finished: by threads and processes of this machine, or by
any executor.

The manifest is written last, by whoever finds all parts finished.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import replace
from typing import Any

import torch

from headrace.core.dataset import BaseDataset
from headrace.display import progress_bar
from headrace.errors import ConfigError, WriteError
from headrace.io.resolve.packs import MANIFEST
from headrace.loader.worker.start import choose_context, forkserver_context
from headrace.memory.per_process import end_with_parent
from headrace.packing.destination import Destination
from headrace.packing.jobs.job import PackJob
from headrace.packing.jobs.planning import plan_parts
from headrace.packing.options import StoreOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.parts import PartsPlan, freeze
from headrace.packing.status import (
    PackStatus,
    finished_in,
    join_in,
    refuse_foreign,
    remove_other,
)
from headrace.storage.tokens.packed import KIND


def pack_parts(
    dataset: BaseDataset,
    folder: Destination,
    *,
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
        share: the numbers of the parts; or (i, N): each N-th one from i on; None: all.

    Raises:
        See `pack`.
    """
    refuse_own_source(dataset, folder.path)
    folder.prepare()
    if not overwrite:
        refuse_foreign(folder)
    plan, checks, read_sizes = plan_parts(
        dataset, folder, shard_size, options, workers, progress, share is not None
    )
    if freeze(folder, plan, checks, overwrite):
        remove_other(folder, plan)
    status, sidecars = finished_in(folder, plan)
    numbers = parts_of(share, plan.parts)
    left = sorted(set(numbers) - set(status.done))
    if left:
        # nobody is to open a pack whose parts are packed again
        folder.remove(MANIFEST)
        job = PackJob(dataset, folder, plan, workers, read_sizes)
        with progress_bar(
            progress,
            total=len(numbers),
            initial=len(numbers) - len(left),
            desc="packing",
            unit="part",
        ) as bar:
            for _ in _packed(job, left, processes, executor):
                bar.update(1)
        status, sidecars = finished_in(folder, plan, sidecars)
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


def parts_at_once(
    dataset: BaseDataset, plan: PartsPlan, workers: int, processes: int, count: int
) -> int:
    """How many of so many parts are packed at a time: one by each process; by a single process two,
    where they may be read so, for one waits for the disk, and is read back, while the other is read
    and decoded.
    """
    if min(processes, count) > 1:
        return min(processes, count)
    return (
        min(2, workers, count)
        if dataset.sample_source.thread_safe and plan.kind != KIND
        else min(1, count)
    )


def _packed(
    job: PackJob, numbers: Sequence[int], processes: int, executor: Executor | None
) -> Iterator[int]:
    """Packs parts; gives the number of samples of each when it is finished."""
    if executor is not None:
        yield from _packed_by(executor, job, numbers)
        return
    lanes = parts_at_once(job.dataset, job.plan, job.workers, processes, len(numbers))
    if processes <= 1 or lanes <= 1:
        yield from _packed_here(job, numbers, lanes)
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            pickle.dump(job, nowhere)
    except Exception as error:
        raise ConfigError(
            f"processes={processes}: {type(job.dataset).__name__} can't be sent to another "
            f"process ({error}): define what it holds, such "
            "as a tokenizer, in a module, or pack with processes=1"
        ) from error
    ended = threading.Event()
    with (
        # this process packs too, from the first moment on
        ThreadPoolExecutor(1, "headrace-pack-part") as own,
        ProcessPoolExecutor(lanes - 1, _context(job.dataset), _adopt, (job,)) as others,
    ):
        try:
            mine, theirs = (
                (own, functools.partial(job.pack, is_cancelled=ended.is_set)),
                (others, _pack_adopted),
            )
            # theirs first: they may be forks
            yield from _packed_in_lanes([*[theirs] * (lanes - 1), mine], job, numbers)
        except BaseException:
            ended.set()
            for pool in (own, others):
                # the others finish what they are packing
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def _context(dataset: BaseDataset) -> Any:
    """Forks, as a loader's workers are, if no other thread of Python runs, headrace's included:
    another pack may hold locks.
    """
    return (
        choose_context(None, dataset, [])[0]
        if threading.active_count() == 1
        else forkserver_context()
    )


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


def _packed_here(job: PackJob, numbers: Sequence[int], lanes: int) -> Iterator[int]:
    """By threads of this process."""
    if lanes <= 1:
        yield from map(job.pack, numbers)
        return
    job, ended = replace(job, workers=-(-job.workers // lanes)), threading.Event()
    with ThreadPoolExecutor(lanes, "headrace-pack-part") as pool:
        try:
            yield from _packed_in_lanes(
                [(pool, functools.partial(job.pack, is_cancelled=ended.is_set))] * lanes,
                job,
                numbers,
            )
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_Lane = tuple[Executor, Callable[[int], int]]


def _packed_in_lanes(lanes: Sequence[_Lane], job: PackJob, numbers: Sequence[int]) -> Iterator[int]:
    """Each lane, an executor and what it calls, packs one part at a time, and gets the next when
    it has done so.
    """
    left, waiting = iter(numbers), dict[Future[int], tuple[_Lane, int]]()

    def submit(lane: _Lane) -> None:
        number = next(left, None)
        if number is not None:
            with _naming_deaths(job, number):
                waiting[lane[0].submit(lane[1], number)] = lane, number

    for lane in lanes:
        submit(lane)
    while waiting:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            lane, number = waiting.pop(future)
            with _naming_deaths(job, number):
                result = future.result()
            submit(lane)
            yield result


def _packed_by(executor: Executor, job: PackJob, numbers: Sequence[int]) -> Iterator[int]:
    waiting: dict[Future[int], int] = {}
    try:
        for number in numbers:
            with _naming_deaths(job, number):
                waiting[executor.submit(job.pack, number)] = number
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                number = waiting.pop(future)
                with _naming_deaths(job, number):
                    result = future.result()
                yield result
    finally:
        for future in waiting:
            future.cancel()


@contextlib.contextmanager
def _naming_deaths(job: PackJob, number: int) -> Iterator[None]:
    """Raises a WriteError where a process has died when a part is submitted or waited for."""
    try:
        yield
    except BrokenExecutor as error:
        raise WriteError(
            f"a process died while it packed {job.folder.shown_name(job.plan.name(number))} or "
            "another part (out of memory, or killed): "
            "run the same command again, finished parts are kept"
        ) from error
