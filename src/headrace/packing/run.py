"""Packs a dataset into one file, or into several parts by processes of this machine or by any
executor.

Threads read and check (or decode) the samples, a few groups ahead of the one that is written; one
thread writes them in order under a temporary name, reads everything back, and only then gives the
file its name. The sidecar of a part is written after it, and marks it as complete. Packed twice, a
part has the same bytes. The manifest is written last, by the job that finds all parts finished.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.arguments import check_names
from headrace.core.dataset import BaseDataset
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.datasets.text.text import TextDataset
from headrace.display import progress_bar
from headrace.errors import ConfigError, FileChangedError, SampleError, WriteError, warn
from headrace.formats.arrays.packed import PackedInfo, PackPart, crc_of
from headrace.formats.hdf5.files import locked_by_caller
from headrace.formats.resolve.manifests import MANIFEST, PLAN
from headrace.formats.resolve.resolver import DataPath
from headrace.io.checksums import replaced
from headrace.io.paths import redact
from headrace.loader.fetch import RemoteTraceback, pickled, unpickled
from headrace.loader.start import choose_context, forkserver_context
from headrace.memory.processes import end_with_parent
from headrace.packing import parts
from headrace.packing.contents import Contents
from headrace.packing.destination import Destination, PartFile, destination_of, refuse_own_source
from headrace.packing.hdf5 import PackedWriter
from headrace.packing.plan import PackOptions, PackPlan, Plan, checks_of, groups_of, stream
from headrace.packing.stored import StoredContents, are_stored, open_source
from headrace.packing.texts import TextContents

_SHOWN = 10


@overload
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    dry_run: Literal[True],
    **options: Any,
) -> PackPlan: ...


@overload
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    dry_run: Literal[False] = ...,
    **options: Any,
) -> Path | str: ...


def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    dry_run: bool = False,
    **options: Any,
) -> Path | str | PackPlan:
    """Packs a dataset into one HDF5 file, or into several parts.

    The result opens as the same dataset: ``ImageDataset(dst)``, ``TextDataset(dst)``. A file
    contains the samples with a CRC each, their targets, names and class names, and the fingerprint
    of the dataset. It appears under its name only after it is written, read back and verified. If
    `pack` is interrupted at any moment, at most a temporary file is left next to it, which the next
    run reuses. The same dataset gives the same bytes.

    Texts are packed as the tokens of whole documents, regardless of `max_length`, `stride` and
    `packing`; pass these when you open the file. Tokens are cached in `cache_dir` if the tokenizer
    can be identified, so an interrupted run does not tokenise twice.

    Other datasets are packed as arrays of one dtype, which ``HDF5Dataset(dst,
    target_name="targets")`` opens. They are the results of `decode` and `split_target`, without
    transforms. For a map-style dataset of another library they are its samples, with targets for
    (input, target) tuples; random values are drawn once. Shapes must be equal, except for the
    length of the first axis. A dict of arrays, each of one shape, becomes a row of named fields.
    ``bytes`` and ``str`` of any length keep their type. Samples go through a temporary file of
    their size beside `dst`; for the plan of several parts each is decoded once more.

    With `shard_size`, `dst` is a folder of parts (``part-00042-of-01024.h5``). They are planned
    before the first one is written (``plan.json``): the samples and bytes of a part depend on the
    dataset and these arguments only. The same call resumes an interrupted pack, and calls with
    different `part` share the work without communication. A part is written like a single file and
    gets a sidecar (``part-00042-of-01024.json``) when it is finished. The call that finds all parts
    finished writes ``manifest.json``. `pack_status` lists what is missing.

    Args:
        dataset: a headrace dataset, your own `BaseDataset`, any map-style torch dataset, a view of
            one, or a path as in `open_dataset`.
        dst: the file to write, or the folder of the parts. Its parent folder must exist. Parts may
            be written to a URL that fsspec can write to, such as ``s3://bucket/packed``; each is
            written and verified in the folder for temporary files and then uploaded.
        store: "encoded": the bytes of the image files, each of which must pass `check`. "jpeg":
            images re-encoded as JPEG if that makes them smaller. "decoded": images at the dataset's
            `image_size` (uint8 [n, H, W, C]), or arrays unchanged ([n, ...]). None: as stored by
            the dataset, which is "encoded" for a folder of images. Texts have one form only.
        max_size: for "jpeg": maximum length of the longer side in pixels; larger images are
            reduced, with the same aspect ratio. None: no limit.
        quality: for "jpeg": 1 to 100.
        check: for encoded images: "decode": decode each image once, so that no damaged one is
            packed. "header": read only the header, which takes a tenth of the time and finds files
            that are empty or not images.
        end_token: for texts: id that is appended to each document. None: none, or the one that the
            dataset's tokens already have.
        compression: for arrays: "gzip", which h5py reads without plugins; "zstd", for which h5py
            needs the package `hdf5plugin`, both here and for reading. headrace reads both itself.
            Bytes of multi-byte numbers are shuffled first. None: no compression.
        chunks: for arrays: number of samples per chunk; 1: each sample separately. None: contiguous
            or, with `compression`, the largest power of two that stays below 1 MiB (at least 1).
        shard_size: approximate bytes of samples per part ("1GB"), before compression. None: one
            file.
        part: "i/N": pack every N-th part from i on, with i from 0 to N - 1: one of N jobs of a
            cluster, such as ``SLURM_ARRAY_TASK_ID``.
        workers: number of threads that read and decode. None: one per usable core, divided by
            `processes`. A source that is not thread-safe is read by the calling thread.
        processes: number of processes that pack parts at the same time; 1: this one.
        executor: any `concurrent.futures` executor, which packs the parts instead of `processes`.
            Its processes must be able to read the dataset (which is pickled) and to write to `dst`.
        storage_options: options of fsspec for the URL.
        overwrite: replace `dst` if it exists; in a folder, replace the plan and the parts of
            another plan.
        progress: show progress bars. None: only on a terminal.
        dry_run: write nothing, and return the plan, which can be printed. Samples that
            must be decoded to find their shapes are decoded, as `pack` does before it writes.

    Returns:
        The path of the file or folder, or its URL. With `dry_run` a `PackPlan`.

    Raises:
        SampleError: a sample can't be read, and the dataset's `on_error` is not "skip". With "skip"
            the sample is left out, with a warning, and the fingerprint is that of a view without
            it.
        TargetExistsError, WriteError, AccessError: `dst` already exists; it can't be written;
            another job is packing to it; or it contains the plan of another pack, or files that
            would be replaced and are of no pack.
        FileChangedError: a sample changed since the parts were planned.
        DataNotFoundError, ConfigError: the parent folder of `dst` does not exist; an argument is
            invalid; `dst` is a file of the dataset, by any name, or lies in a folder of it.
    """
    check_names("pack", options, {*PackOptions.__annotations__, "dataset", "dst", "dry_run"})
    how = PackOptions(**options)
    with contextlib.ExitStack() as opened:
        source: Any = dataset
        is_path = isinstance(source, (str, bytes, os.PathLike, list, tuple))
        if is_path or not hasattr(source, "__getitem__"):
            source = opened.enter_context(open_source(source))
        elif not isinstance(source, BaseDataset):
            source = opened.enter_context(MemoryEfficientDataset(source, loading_mode="lazy"))
        if how.shard_size is None:
            return _pack_file(source, dst, how, dry_run)
        return _pack_parts(source, destination_of(dst, how.storage_options), how, dry_run)


def _contents_of(dataset: BaseDataset, options: PackOptions) -> Contents:
    contents: Contents
    if isinstance(dataset, TextDataset):
        contents = TextContents(dataset, options)
    elif options.end_token is not None:
        raise ConfigError("end_token is for texts: leave it out")
    elif are_stored(dataset):
        contents = StoredContents(dataset, options)
    else:
        contents = Contents(dataset, options)
    contents.check_options()
    return contents


# -- one file


def _pack_file(
    dataset: BaseDataset, dst: str | os.PathLike[Any], options: PackOptions, dry_run: bool
) -> Path | PackPlan:
    part = PartFile(dst, options.overwrite)
    refuse_own_source(dataset, part.target)
    contents = _contents_of(dataset, options)
    if dry_run:
        return contents.plan_parts()
    with part:
        info, left_out = _write(part, contents)
        _read_back(part, options.threads, options.progress)
        part.commit()
    if left_out:
        count = info.count + len(left_out)
        warn(
            f"{redact(part.target)}: {len(left_out):,} of {count:,} samples can't be read and were "
            f"left out, such as: {'; '.join(left_out[:_SHOWN])}"
        )
    return Path(part.target)


def _write(part: PartFile, contents: Contents) -> tuple[PackedInfo, list[str]]:
    """Writes all samples, without those that can't be read and may be left out. Returns the
    description of the file, and the errors of the samples left out.

    Args:
        part: entered.
        contents: what is written.
    """
    left_out: list[str] = []
    while True:
        plan = contents.plan_file(part)
        left_out += plan.left_out.values()
        failures = _write_planned(part, contents, plan)
        if not failures:
            return plan.info, left_out
        left_out += map(str, failures.values())
        contents = contents.without(failures)


def _write_planned(part: PartFile, contents: Contents, plan: Plan) -> dict[int, SampleError]:
    """Writes all samples. Returns the errors of unreadable ones by position; nothing is written
    after the first.
    """
    failures = dict[int, SampleError]()
    sizes = plan.sizes * 2 if plan.read_sizes is None else plan.sizes + plan.read_sizes
    groups = groups_of(sizes, contents.group_samples, plan.chunks or 1)
    progress = contents.options.progress

    def encoded(group: range) -> tuple[dict[int, SampleError], list[Any], list[int]]:
        samples: Sequence[Any] = plan.prepare(group)
        numbered = zip(group, samples, strict=True)
        failed = {number: one for number, one in numbered if isinstance(one, SampleError)}
        if failed:
            return failed, [], []
        return failed, writer.encode(samples), list(map(crc_of, samples))

    with contextlib.closing(PackedWriter(part, plan)) as writer:
        results = stream(encoded, groups, contents.workers, progress, plan.info.count, "packing")
        with contextlib.closing(results):
            for _, (failed, blocks, checksums) in results:
                failures |= failed
                if not failures:
                    writer.append(blocks, checksums)
        if not failures:
            writer.finish()
    return failures


def _read_back(part: PartFile, workers: int, progress: bool | None) -> tuple[int, int]:
    """Verifies what was written, and writes the checksum of the whole file. Returns its bytes and
    CRC.

    Raises:
        WriteError: a sample read back is another one.
    """
    part.reread()
    with part.explained(), locked_by_caller(part.path):
        bad, sums = parts.verify_samples(part.path, workers, progress, part.ahead)
        offset, _ = parts.seal_of(part.path)
    if bad:
        raise WriteError(
            f"{redact(part.target)}: {len(bad):,} samples read back are not what was written, the "
            f"first is number {bad[0][0]}: the disk or the memory of this machine is faulty"
        )
    seal = sums.crc.to_bytes(4, "little")
    part.write(seal, offset)
    return sums.size, replaced(sums, offset, bytes(4), seal)


# -- a part


@dataclass
class PackJob:
    """Packs single parts. A pickle can do so in any process that reaches the source and the
    destination.

    Attributes:
        contents: what is packed.
        folder: where to.
        plan: of all parts.
    """

    contents: Contents
    folder: Destination
    plan: PackPlan

    def pack(self, part: int) -> int:
        """Packs a part, even if it exists. Returns its number.

        Raises:
            FileChangedError: a sample is not as it was when the plan was made.
            SampleError, WriteError, AccessError: see `pack`.
        """
        plan = self.plan
        try:
            start, stop = plan.edges[part : part + 2]
            contents = self.contents.view(np.arange(start, stop))
            contents.rows = plan.rows
            contents.part = PackPart(part, plan.parts, plan.fingerprint, plan.count)
            sizes = contents.source_sizes
            if sizes is not None and plan.sources[part : part + 1] != checks_of(
                contents.names, sizes, [0, len(sizes)]
            ):
                raise FileChangedError(
                    f"one of the samples {start:,} to {stop - 1:,} has another name or size than "
                    f"when {PLAN} was written: pack to another folder, or pass overwrite=True "
                    "(--overwrite) to plan anew"
                )
            self.folder.remove(plan.sidecar_name(part))
            with self.folder.part(plan.name(part)) as file:
                info, left_out = _write(file, contents)
                nbytes, crc = _read_back(file, contents.options.threads, False)
            sidecar = parts.Sidecar(plan.digest, part, info.count, nbytes, crc, left_out)
            self.folder.write(plan.sidecar_name(part), sidecar.text)
            return part
        except Exception as error:
            error.add_note(f"headrace: while packing {plan.name(part)}")
            raise


# -- all parts


def _pack_parts(
    dataset: BaseDataset, folder: Destination, options: PackOptions, dry_run: bool
) -> Path | str | PackPlan:
    """Packs the unfinished parts of a share, and joins the pack if all are finished."""
    refuse_own_source(dataset, folder.path)
    folder.prepare(dry_run)
    contents = _contents_of(dataset, options)
    frozen = parts.read_plan(folder)
    if frozen is None and not options.overwrite:
        parts.refuse_foreign(folder)
    plan = frozen
    if plan is None or not contents.is_plan(plan):
        plan = contents.plan_parts()
    if frozen is not None and not options.overwrite:
        parts.check_same(folder, frozen, plan)
    if dry_run:
        return plan
    parts.freeze(folder, frozen, plan, options.overwrite)
    status, sidecars = parts.finished_in(folder, plan)
    numbers = options.share(plan.parts)
    left = sorted(set(numbers) - set(status.done))
    if left:
        folder.remove(MANIFEST)  # nobody is to open a pack whose parts are packed again
        contents.options = replace(options, executor=None, progress=False)  # a part shows none
        job = PackJob(contents, folder, plan)
        packed = (job.pack(number) for number in left)
        if options.executor is not None:
            packed = _packed_by_executor(job, left, options.executor)
        elif min(options.processes, len(left)) > 1:
            packed = _packed_by_processes(job, left)
        done = len(numbers) - len(left)
        bar = progress_bar(
            options.progress, total=len(numbers), initial=done, desc="packing", unit="part"
        )
        with bar, contextlib.closing(packed):
            for _ in packed:
                bar.update(1)
        status, sidecars = parts.finished_in(folder, plan)
        lost = sorted(set(left).intersection(status.missing))
        if lost:
            raise WriteError(
                f"{folder.shown_name(plan.name(lost[0]))} was packed by another process, and is "
                "not there: pack to a folder that all processes share, or to a store"
            )
    if status.is_finished and not status.joined:
        parts.join_in(folder, plan, sidecars)
    left_out = sum(len(sidecar.left_out) for sidecar in sidecars.values())
    if status.is_finished and left_out:
        warn(
            f"{folder.shown}: {left_out:,} samples can't be read and were left out, see {MANIFEST}"
        )
    return folder.path


def _packed_by_executor(
    job: PackJob, numbers: Sequence[int], executor: Executor
) -> Generator[int, None, None]:
    """Packs parts, and yields the number of each. After an error, parts that have not begun are
    cancelled.
    """
    waiting = dict[Future[int], int]()
    number = numbers[0]
    try:
        for number in numbers:
            waiting[executor.submit(job.pack, number)] = number
        for future in as_completed(waiting):
            number = waiting[future]
            yield future.result()
    except BrokenExecutor as error:
        raise _died(job, number) from error
    finally:
        for future in waiting:
            future.cancel()


def _packed_by_processes(job: PackJob, numbers: Sequence[int]) -> Generator[int, None, None]:
    """Packs each part in a process of its own, and yields its number. After an error, running
    processes still finish their parts.

    NOTE [ No ProcessPoolExecutor ]: that of Python 3.11 may forget a future, or never end, if one
    of its processes is killed during a `submit`.
    """
    processes = job.contents.options.processes
    dataset = job.contents.dataset
    try:
        with open(os.devnull, "wb") as nowhere:
            pickle.dump(job, nowhere)
    except Exception as error:
        raise ConfigError(
            f"processes={processes}: {type(dataset).__name__} can't be sent to another "
            f"process ({error}): define what it holds, such as a tokenizer, in a module, or "
            "pack with processes=1"
        ) from error
    # a fork, as of a loader's workers, if no other thread of Python runs, headrace's included:
    # another pack may hold locks
    context = forkserver_context()
    if threading.active_count() == 1:
        context = choose_context(None, dataset, [])[0]
    left = list(reversed(numbers))
    running = dict[Any, tuple[Any, int]]()  # by the end of the pipe that is read
    try:
        while left or running:
            while left and len(running) < processes:
                number = left.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_pack_alone, args=(job, number, sender))
                process.start()
                sender.close()  # so that the process alone holds it, and its end is seen
                running[receiver] = (process, number)
            ended: list[Any] = connection.wait(list(running))
            for receiver in ended:
                process, number = running[receiver]
                try:
                    failure = receiver.recv()
                except (EOFError, OSError) as error:
                    raise _died(job, number) from error
                if failure is not None:
                    data, text, _ = failure
                    raise unpickled(data) from RemoteTraceback(text)
                del running[receiver]
                process.join()
                receiver.close()
                yield number
    finally:
        for receiver, (process, _) in running.items():
            process.join()
            receiver.close()


def _died(job: PackJob, number: int) -> WriteError:
    return WriteError(
        f"a process died while it packed {job.folder.shown_name(job.plan.name(number))} or "
        "another part (out of memory, or killed): run the same command again, finished parts "
        "are kept"
    )


def _pack_alone(job: PackJob, part: int, sender: Any) -> None:
    """The main function of a process that packs one part. Sends None, or the error."""
    end_with_parent()
    torch.set_num_threads(1)  # those that it inherited stay behind
    failure = None
    try:
        job.pack(part)
    except Exception as error:
        failure = pickled(error)
    sender.send(failure)
