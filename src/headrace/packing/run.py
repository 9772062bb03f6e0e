"""Packs a dataset into one file, or into several parts by threads and processes of this machine or
by any executor.

Threads read and check (or decode) the samples, a few groups ahead of the one that is written; one
thread writes them in order under a temporary name, reads everything back, and only then gives the
file its name. The sidecar of a part follows: who finds it, finds the part whole. Packed twice, a
part has the same bytes. The manifest is written last, by whoever finds all parts finished.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ThreadPoolExecutor,
    as_completed,
)
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.arguments import check_names
from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.datasets.open import open_dataset
from headrace.datasets.text.text import TextDataset
from headrace.display import Lines, progress_bar
from headrace.errors import ConfigError, FileChangedError, SampleError, WriteError, warn
from headrace.formats.arrays.packed import TARGETS, PackedInfo, crc_of
from headrace.formats.hdf5.files import locked_by_caller
from headrace.formats.resolve.manifests import MANIFEST, PLAN
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.source import PackPart
from headrace.formats.tokens import KIND
from headrace.io.checksums import replaced
from headrace.io.paths import redact
from headrace.loader.fetch import RemoteTraceback, pickled
from headrace.loader.start import choose_context, forkserver_context
from headrace.memory.budget import format_size
from headrace.memory.processes import end_with_parent
from headrace.packing.contents import Contents
from headrace.packing.destination import Destination, destination_of, refuse_own_source
from headrace.packing.hdf5 import PackedWriter
from headrace.packing.options import PackKeywords, PackOptions
from headrace.packing.part import PartFile
from headrace.packing.parts import (
    PartsPlan,
    Sidecar,
    check_same,
    checks_of,
    finished_in,
    freeze,
    join_in,
    read_manifest,
    read_plan,
    refuse_foreign,
    remove_other,
)
from headrace.packing.plan import GROUP_SAMPLES, Packing, files_of, groups_of, stream
from headrace.packing.stored import StoredContents, are_stored, packed_info_of
from headrace.packing.texts import TextContents
from headrace.packing.verify import seal_of, verify_samples

GROUP_TEXTS = 4096  # which are tokens already
_SHOWN = 10


@dataclass(frozen=True)
class PackPlan:
    """What `pack` would do; `print` shows it.

    Attributes:
        path: the file, or the folder of the parts, or its URL.
        kind: "image", "text", or "array".
        store: "encoded", "decoded", "ragged" or "tokens".
        samples: how many there are.
        parts: how many files they become.
        nbytes: of all parts together, about, before they are compressed: those of re-encoded
            samples and tokens are known when they are made.
        layout: how the samples lie in a file.
        left: parts that this call would pack: those of its share that are not finished.
    """

    path: Path | str
    kind: str
    store: str
    samples: int
    parts: int
    nbytes: int
    layout: str
    left: int

    def __str__(self) -> str:
        parts = "one"
        if self.parts > 1:
            samples = f"about {round(self.samples / self.parts):,} samples"
            nbytes = format_size(self.nbytes // self.parts)
            parts = f"{self.parts:,}, {samples}, {nbytes} each; {self.left:,} to be packed"
        return Lines(
            f"{redact(self.path)}: {self.samples:,} samples, about {format_size(self.nbytes)}, "
            f"store {self.store}\n"
            f"parts:  {parts}\n"
            f"layout: {self.layout}\n"
            "nothing was written"
        )


@overload
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    dry_run: Literal[True],
    **options: Unpack[PackKeywords],
) -> PackPlan: ...


@overload
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    dry_run: Literal[False] = ...,
    **options: Unpack[PackKeywords],
) -> Path | str: ...


def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    dry_run: bool = False,
    **options: Unpack[PackKeywords],
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
        parts: "a:b": pack the parts a to b - 1.
        workers: number of threads that read and decode. None: one per usable core, divided by
            `processes`. A source that is not thread-safe is read by the calling thread.
        processes: number of processes that pack parts at the same time; 1: this one.
        executor: any `concurrent.futures` executor, which packs the parts instead of `processes`.
            Its processes must be able to read the dataset (which is pickled) and to write to `dst`.
        storage_options: options of fsspec for the URL.
        overwrite: replace `dst` if it exists; in a folder, replace the plan and the parts of
            another plan.
        progress: show progress bars. None: only on a terminal.
        dry_run: write nothing, and return the plan, which prints parts and layout. Samples that
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
    check_names("pack", options, {*PackKeywords.__annotations__, "dataset", "dst", "dry_run"})
    how = PackOptions(**options)
    with _opened(dataset) as opened:
        if dry_run:
            return _dry_run(opened, dst, how)
        if how.shard_size is None:
            return _pack_file(opened, dst, how)
        return _pack_parts(opened, destination_of(dst, how.storage_options), how)


@contextlib.contextmanager
def _opened(dataset: Any) -> Iterator[BaseDataset]:
    """The dataset to pack: as given, or opened from a path or a map-style dataset, and then closed
    at the end.
    """
    opened = dataset
    if not isinstance(dataset, BaseDataset):
        is_path = isinstance(dataset, (str, bytes, os.PathLike, list, tuple))
        if is_path or not hasattr(dataset, "__getitem__"):
            opened = open_source(dataset)
        else:
            opened = MemoryEfficientDataset(dataset, loading_mode="lazy")
    try:
        yield opened
    finally:
        if opened is not dataset:
            opened.close()


def open_source(path: DataPath, **options: Any) -> BaseDataset:
    """`open_dataset`, which opens packed arrays with their targets, so that a copy keeps them."""
    dataset = open_dataset(path, **options)
    if isinstance(dataset, ArrayDataset) and dataset.targets is None:
        files = files_of(dataset.sample_source)
        if packed_info_of(files) is not None and all(one.has_column(TARGETS) for one in files):
            dataset.close()
            return open_dataset(path, target_name=TARGETS, **options)
    return dataset


def _contents_of(dataset: BaseDataset, options: PackOptions) -> Contents:
    contents: Contents
    if isinstance(dataset, TextDataset):
        contents = TextContents(dataset, options)
    elif are_stored(dataset):
        contents = StoredContents(dataset, options)
    else:
        contents = Contents(dataset, options)
    contents.check_options()
    return contents


# -- one file


def _pack_file(dataset: BaseDataset, dst: str | os.PathLike[Any], options: PackOptions) -> Path:
    part = PartFile(dst, options.overwrite)
    refuse_own_source(dataset, part.target)
    with part:
        info, left_out = _write(part, _contents_of(dataset, options))
        _read_back(part, options.threads, options.progress)
        part.commit()
    count = len(left_out)
    if count:
        more = f"; and {count - _SHOWN:,} more" if count > _SHOWN else ""
        warn(
            f"{redact(part.target)}: {count:,} of {info.count + count:,} samples can't be read and "
            f"were left out: {'; '.join(left_out[:_SHOWN])}{more}"
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
        packing = contents.packing(part)
        left_out += packing.left_out.values()
        failures = _write_samples(part, contents, packing)
        if not failures:
            return packing.plan.info, left_out
        left_out += map(str, failures.values())
        contents = contents.without(failures)


def _write_samples(part: PartFile, contents: Contents, packing: Packing) -> dict[int, SampleError]:
    """Writes all samples. Returns the errors of unreadable ones by position; nothing is written
    after the first.
    """
    plan = packing.plan
    failures = dict[int, SampleError]()
    most = GROUP_TEXTS if plan.info.kind == KIND else GROUP_SAMPLES
    groups = groups_of(plan.sizes + plan.read_sizes, most, plan.chunks or 1)
    progress = contents.options.progress

    def encoded(group: range) -> tuple[dict[int, SampleError], list[Any], list[int]]:
        samples: Sequence[Any] = packing.prepare(group)
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
        bad, sums = verify_samples(part.path, workers, progress)
        offset = seal_of(part.path)
    if bad:
        raise WriteError(
            f"{redact(part.target)}: {len(bad):,} samples read back are not what was written, the "
            f"first is number {bad[0][0]}: the disk or the memory of this machine is faulty"
        )
    seal = sums.crc.to_bytes(4, "little")
    part.write(seal, offset)
    return sums.size, replaced(sums, offset, bytes(4), seal)


# -- the plan of several parts


def _plan_parts(dataset: BaseDataset, folder: Destination, options: PackOptions) -> PartsPlan:
    """Plans the parts. Reads the plan in the folder, if there is one, and writes nothing.

    One of many jobs (`part`, `parts`), where the plan that is there is that of this dataset, does
    not ask for the size of each file again; those of the parts that it packs are compared then.

    Raises:
        ConfigError: the dataset can't be packed, or not into parts.
        TargetExistsError: there are files that no pack has written.
    """
    if not options.overwrite:
        refuse_foreign(folder)
    contents = _contents_of(dataset, options)
    frozen = read_plan(folder)
    if frozen is not None and frozen.fingerprint == contents.fingerprint:
        if contents.is_plan(frozen):
            return frozen  # all samples were looked at when it was made
        is_share = options.part is not None or options.parts is not None
        if is_share and isinstance(contents, StoredContents):
            contents.source_sizes = np.zeros(frozen.count, np.int64)
            plan = contents.plan_parts(frozen.edges)
            if replace(plan, nbytes=frozen.nbytes, sources=frozen.sources) == frozen:
                return frozen
            del contents.source_sizes
    return contents.plan_parts()


def _dry_run(dataset: BaseDataset, dst: str | os.PathLike[Any], options: PackOptions) -> PackPlan:
    """Plans a pack, and raises the errors that `pack` would raise before it writes."""
    left = {0}
    if options.shard_size is None:
        path: Path | str = Path(PartFile(dst, options.overwrite).target)
        refuse_own_source(dataset, path)
        plan = _contents_of(dataset, options).plan_parts()
    else:
        folder = destination_of(dst, options.storage_options)
        path = folder.path
        refuse_own_source(dataset, path)
        folder.check()
        plan = _plan_parts(dataset, folder, options)
        left = set(options.share(plan.parts))
        there = read_plan(folder)
        if there is not None:
            if not options.overwrite:
                check_same(folder, there, plan)
            left -= set(finished_in(folder, plan)[0].done)
    layout = "flat, one behind the other, with offsets: samples have sizes of their own"
    if plan.store == "decoded":
        layout = "contiguous: a random sample is one read, and nothing is decoded"
        chunks = plan.options.get("chunks")
        if chunks is not None:
            compression = plan.options.get("compression") or "not compressed"
            layout = f"{compression}, {chunks:,} sample{'s' * (chunks > 1)} a chunk"
    nbytes = sum(plan.nbytes)
    return PackPlan(path, plan.kind, plan.store, plan.count, plan.parts, nbytes, layout, len(left))


# -- a part


@dataclass
class PackJob:
    """Packs single parts. A pickle can do so in any process that reaches the source and the
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

    def pack(self, part: int, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Packs a part, whatever is there of it.

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
            start, stop = plan.edges[part : part + 2]
            contents = _contents_of(self.dataset, self.options).view(np.arange(start, stop))
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
                file.is_cancelled = is_cancelled
                info, left_out = _write(file, contents)
                nbytes, crc = _read_back(file, self.options.threads, False)
            sidecar = Sidecar(plan.digest, part, info.count, nbytes, crc, left_out)
            self.folder.write(plan.sidecar_name(part), sidecar.text)
        except Exception as error:
            error.add_note(f"headrace: while packing {plan.name(part)}")
            raise


# -- all parts


def _pack_parts(dataset: BaseDataset, folder: Destination, options: PackOptions) -> Path | str:
    """Packs the unfinished parts of a share, and joins the pack if all are finished."""
    refuse_own_source(dataset, folder.path)
    folder.prepare()
    plan = _plan_parts(dataset, folder, options)
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
    manifest = read_manifest(folder) if status.is_finished else None
    if manifest is not None and manifest["left_out"]:
        warn(
            f"{folder.shown}: {manifest['left_out']:,} samples can't be read and were left out, "
            f"see {MANIFEST}"
        )
    return folder.path


def _packed(
    job: PackJob, numbers: Sequence[int], executor: Executor | None
) -> Generator[None, None, None]:
    """Packs parts, and yields after each. After an error, parts that have not begun are cancelled,
    and threads end.
    """
    options = job.options
    if executor is None and min(options.processes, len(numbers)) > 1:
        yield from _packed_by_processes(job, numbers)
        return
    # one part waits for the disk, and is read back, while the other is read and decoded
    threads = 1
    if job.dataset.sample_source.thread_safe and job.plan.kind != KIND:
        threads = min(2, options.threads, len(numbers))
    if executor is None and threads == 1:
        for part in numbers:
            job.pack(part)
            yield
        return
    ended = threading.Event()
    arguments: tuple[Any, ...] = ()
    pool = contextlib.ExitStack()
    if executor is None:
        executor = pool.enter_context(ThreadPoolExecutor(threads, "headrace-pack-part"))
        arguments = (ended.is_set,)
        job = replace(job, options=replace(options, workers=-(-options.threads // threads)))
    waiting = dict[Future[None], int]()
    number = numbers[0]
    try:
        for number in numbers:
            waiting[executor.submit(job.pack, number, *arguments)] = number
        for future in as_completed(waiting):
            number = waiting[future]
            future.result()
            yield
    except BrokenExecutor as error:
        raise _died(job, number) from error
    finally:
        ended.set()
        for future in waiting:
            future.cancel()
        pool.close()


def _packed_by_processes(job: PackJob, numbers: Sequence[int]) -> Generator[None, None, None]:
    """Packs each part in a process of its own, and yields after each. After an error, running
    processes still finish their parts.

    NOTE [ No ProcessPoolExecutor ]: that of Python 3.11 may forget a future, or never end, if one
    of its processes is killed during a `submit`.
    """
    processes = job.options.processes
    try:
        with open(os.devnull, "wb") as nowhere:
            pickle.dump(job, nowhere)
    except Exception as error:
        raise ConfigError(
            f"processes={processes}: {type(job.dataset).__name__} can't be sent to another "
            f"process ({error}): define what it holds, such as a tokenizer, in a module, or "
            "pack with processes=1"
        ) from error
    # a fork, as of a loader's workers, if no other thread of Python runs, headrace's included:
    # another pack may hold locks
    context = forkserver_context()
    if threading.active_count() == 1:
        context = choose_context(None, job.dataset, [])[0]
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
                    raise pickle.loads(data) from RemoteTraceback(text)
                del running[receiver]
                process.join()
                receiver.close()
                yield
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
