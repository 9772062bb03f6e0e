"""Packs datasets, or says what would be packed: the function that users call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
from torch.utils.data import Dataset

from headrace.arguments import check_names
from headrace.core.dataset import BaseDataset
from headrace.display import Lines
from headrace.errors import ConfigError, warn
from headrace.formats.resolve.resolver import MANIFEST, DataPath
from headrace.io.paths import redact
from headrace.memory.budget import format_size
from headrace.packing.destination import Destination, destination_of
from headrace.packing.file import PackResult, opened_dataset, pack_file
from headrace.packing.jobs import pack_parts, plan_parts
from headrace.packing.options import PackKeywords, PackOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.part import PartFile
from headrace.packing.parts import (
    PackStatus,
    check_same,
    finished_in,
    read_manifest,
    read_plan,
    refuse_foreign,
)


@dataclass(frozen=True)
class PackPlan:
    """What `pack` would do; `print` shows it.

    Attributes:
        path: the file, or the folder of the parts, or its URL.
        kind: "image", "text", or "array".
        store: "encoded", "decoded", "ragged" or "tokens".
        samples: how many there are.
        parts: how many files they become.
        part_samples: the fewest and the most of a part.
        part_nbytes: bytes of the smallest and the largest part, about, before they are compressed.
        nbytes: of all parts together, about: those of re-encoded samples and tokens are known when
            they are made.
        layout: how the samples lie in a file.
        left: parts that this call would pack: those of its share that are not finished.
    """

    path: Path | str
    kind: str
    store: str
    samples: int
    parts: int
    part_samples: tuple[int, int]
    part_nbytes: tuple[int, int]
    nbytes: int
    layout: str
    left: int

    def __str__(self) -> str:
        counts = _range(*(f"{count:,}" for count in self.part_samples))
        sizes = _range(*map(format_size, self.part_nbytes))
        parts = "one"
        if self.parts > 1:
            parts = f"{self.parts:,}, {counts} samples, {sizes} each; {self.left:,} to be packed"
        lines = [
            f"{redact(self.path)}: {self.samples:,} samples, about {format_size(self.nbytes)}, "
            f"store {self.store}",
            f"parts:  {parts}",
            f"layout: {self.layout}",
            "nothing was written",
        ]
        return Lines("\n".join(lines))


def plan_pack(dataset: BaseDataset, dst: str | os.PathLike[Any], options: PackOptions) -> PackPlan:
    """What `pack` would do.

    Raises:
        As `pack`: what it would find wrong before it writes.
    """
    folder: Destination | None = None
    if options.shard_size is None:
        path: Path | str = Path(PartFile(dst, options.overwrite).target)
    else:
        folder = destination_of(dst, options.storage_options)
        path = folder.path
    refuse_own_source(dataset, path)
    if folder is not None:
        folder.check()
        if not options.overwrite:
            refuse_foreign(folder)
    if not len(dataset):
        raise ConfigError("a dataset without samples: there is nothing to plan")
    plan = plan_parts(dataset, folder, options)
    left = set(options.share(plan.parts))
    there = None if folder is None else read_plan(folder)
    if folder is not None and there is not None:
        if there.digest != plan.digest and not options.overwrite:
            check_same(folder, there, plan)
        left -= set(finished_in(folder, plan)[0].done)
    counts = np.diff(plan.edges)
    layout = "flat, one behind the other, with offsets: samples have sizes of their own"
    if plan.store == "decoded":
        layout = "contiguous: a random sample is one read, and nothing is decoded"
        chunks = plan.options.get("chunks")
        if chunks is not None:
            compression = plan.options.get("compression") or "not compressed"
            layout = f"{compression}, {chunks:,} sample{'s' * (chunks > 1)} a chunk"
    return PackPlan(
        path,
        plan.kind,
        plan.store,
        plan.count,
        plan.parts,
        (int(counts.min()), int(counts.max())),
        (min(plan.nbytes), max(plan.nbytes)),
        sum(plan.nbytes),
        layout,
        len(left),
    )


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


_SHOWN = 10


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
    ``bytes`` and ``str`` of any length keep their type. Each sample is decoded twice, first for its
    shape and target.

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
    result = run_pack(dataset, dst, PackOptions(**options), dry_run)
    if isinstance(result, PackStatus):
        return result.folder
    return result.path if isinstance(result, PackResult) else result


def run_pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    options: PackOptions,
    dry_run: bool,
) -> PackResult | PackStatus | PackPlan:
    """`pack`, with what it did: of a single file a `PackResult`. Warns of samples that were left
    out.
    """
    with opened_dataset(dataset) as opened:
        if dry_run:
            return plan_pack(opened, dst, options)
        if options.shard_size is None:
            result = pack_file(opened, dst, options)
            count = len(result.left_out)
            if count:
                more = f"; and {count - _SHOWN:,} more" if count > _SHOWN else ""
                warn(
                    f"{redact(result.path)}: {count:,} of {result.samples + count:,} samples can't "
                    f"be read and were left out: {'; '.join(result.left_out[:_SHOWN])}{more}"
                )
            return result
        folder = destination_of(dst, options.storage_options)
        status = pack_parts(opened, folder, options)
    manifest = read_manifest(folder) if status.joined else None
    if manifest is not None and manifest["left_out"]:
        warn(
            f"{folder.shown}: {manifest['left_out']:,} samples can't be read and were left out, "
            f"see {MANIFEST}"
        )
    return status
