"""Packs datasets: the function that users call."""

from __future__ import annotations

import os
import re
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from torch.utils.data import Dataset

from headrace.arguments import checks_keywords
from headrace.errors import ConfigError, warn
from headrace.io.paths import is_url, redact
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.packs import MANIFEST
from headrace.memory.budget import parse_size
from headrace.packing.destination import destination_of
from headrace.packing.dry_run.plan import PackPlan, plan_file_pack, plan_folder_pack
from headrace.packing.jobs.running import pack_parts
from headrace.packing.options import Check, PackFormat, Store, StoreOptions
from headrace.packing.run import left_out_message, opened_dataset, pack_dataset
from headrace.packing.samples import threads_for
from headrace.packing.status import PackStatus, read_manifest

_ZARR_SHARD = "256MB"
"""What `shard_size` is where `format` is "zarr" and nothing is said."""


@overload
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    store: Store | None = ...,
    max_size: int | None = ...,
    quality: int = ...,
    check: Check = ...,
    end_token: int | None = ...,
    compression: str | None = ...,
    chunks: int | None = ...,
    format: PackFormat | None = ...,
    shard_size: int | str | None = ...,
    part: str | None = ...,
    parts: str | None = ...,
    workers: int | None = ...,
    processes: int = ...,
    executor: Executor | None = ...,
    storage_options: dict[str, Any] | None = ...,
    overwrite: bool = ...,
    progress: bool | None = ...,
    dry_run: Literal[False] = ...,
) -> Path | str: ...


@overload
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    store: Store | None = ...,
    max_size: int | None = ...,
    quality: int = ...,
    check: Check = ...,
    end_token: int | None = ...,
    compression: str | None = ...,
    chunks: int | None = ...,
    format: PackFormat | None = ...,
    shard_size: int | str | None = ...,
    part: str | None = ...,
    parts: str | None = ...,
    workers: int | None = ...,
    processes: int = ...,
    executor: Executor | None = ...,
    storage_options: dict[str, Any] | None = ...,
    overwrite: bool = ...,
    progress: bool | None = ...,
    dry_run: Literal[True],
) -> PackPlan: ...


@checks_keywords
def pack(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    store: Store | None = None,
    max_size: int | None = None,
    quality: int = 90,
    check: Check = "decode",
    end_token: int | None = None,
    compression: str | None = None,
    chunks: int | None = None,
    format: PackFormat | None = None,
    shard_size: int | str | None = None,
    part: str | None = None,
    parts: str | None = None,
    workers: int | None = None,
    processes: int = 1,
    executor: Executor | None = None,
    storage_options: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    dry_run: bool = False,
) -> Path | str | PackPlan:
    """Write a dataset into an HDF5 file, or into several, which open as the same dataset: ``ImageDataset(dst)``, ``TextDataset(dst)``.

    The file holds the samples, their targets, names, class names and a CRC each, and the fingerprint of the dataset. It appears
    under its name when it is written, read back and verified, and not before: interrupted at any moment, `pack` leaves at most a
    temporary file beside it, which the next run takes over. The same dataset gives the same bytes.

    Texts are packed as the tokens of whole documents, whatever `max_length`, `stride` and `packing` say: these are said again when the file
    is opened. Tokens of a tokenizer that can be known again are kept in `cache_dir`, so an interrupted run does not make them twice.

    Other datasets are packed as arrays of one dtype, which ``HDF5Dataset(dst, target_name="targets")`` opens: what `decode` and
    `split_target` give, not transformed. Of a map-style dataset that is not headrace's they are its samples, where (input, target) tuples
    have targets; random ones are drawn once. Shapes are equal, but for the length of the first axis; a dict of arrays, each of one
    shape, becomes a row of named fields; ``bytes`` and ``str`` of any length come back as such. Each sample is decoded twice: the first
    time for its shape and target.

    With `shard_size`, `dst` is a folder, and the samples become parts in it (``part-00042-of-01024.h5``). They are planned before the
    first is written (``plan.json``): which samples a part has follows from the dataset and these arguments alone, and so do its bytes. The
    same call again goes on where the last one ended, however that was, and several calls with a `part` of their own share the work
    without knowing of each other. A part is written like a single file, and has a sidecar (``part-00042-of-01024.json``) when it is
    finished; the call that finds all finished writes ``manifest.json``. `pack_status` says what is missing.

    Args:
        dataset: a dataset of headrace's, or one of your own: a `BaseDataset`, any map-style dataset of torch's kind, or a view; or a path
            as `open_dataset` takes it.
        dst: the file to write, or the folder of the parts; the folder that it is in must be there. Parts may go to a URL that fsspec can
            write to, such as ``s3://bucket/packed``: each is written and verified in the folder for temporary files, and then uploaded.
        store: "encoded": the bytes of the image files, each of which must pass `check`; "jpeg": the images re-encoded as JPEG, where that
            makes them smaller; "decoded": the images at the dataset's `image_size` (uint8 [n, H, W, C]), or arrays as they are
            ([n, ...]). None: as the dataset has them, so encoded for a folder of images. Texts have one way only.
        max_size: with "jpeg": pixels that the longer side has at most; larger images are made smaller, of equal aspect.
        quality: with "jpeg": 1 to 100.
        check: of encoded images: "decode": each is decoded once, so that no damaged one is packed; "header": its header is read alone,
            which takes a tenth of the time and finds files that are empty or no image.
        end_token: of texts: an id that is put behind each document; None: none, or what the tokens of the dataset have already.
        compression: of arrays: "gzip", which h5py reads without more; "lz4" or "zstd", for which h5py needs the package `hdf5plugin`, here
            and to read them. headrace reads all three by itself. The bytes of numbers of several bytes are shuffled before. None: they
            stay as they are.
        chunks: of arrays: samples a chunk; 1: each sample by itself. None: contiguous or, with `compression`, the power of two that
            stays below 1 MiB (at least 1).
        format: "hdf5" or "zarr" (None: "hdf5"). With "zarr" `dst` is always a folder of parts, which are the shards of one Zarr 3 group
            (``data.zarr``): samples of one shape, or encoded images. Which are left out is found out before the first part is packed.
        shard_size: bytes of samples a part ("1GB"), about, before they are compressed; None: one file, and with format="zarr" "256MB".
        part: "i/N": pack each N-th part from i on, 0 to N - 1: one of N jobs of a cluster, such as ``SLURM_ARRAY_TASK_ID`` of so many.
        parts: "a:b": pack the parts a to b - 1.
        workers: threads that read and decode; None: one for each usable core, shared out over `processes`. A source that is not
            thread-safe is read by the calling thread.
        processes: that pack parts at the same time, this one included.
        executor: packs parts, in place of `processes`: any of `concurrent.futures`, whose processes can read the dataset (which is pickled)
            and write to `dst`.
        storage_options: of the URL, as fsspec takes them.
        overwrite: replace `dst` where it is there already; of a folder the plan and what belongs to another one.
        progress: show progress bars; None: only on a terminal.
        dry_run: plan, write nothing, and return the plan, which `print` shows: parts, layout, the room that they need, and about how long
            they take, by some samples that are packed in memory for a second or two. Samples that have to be decoded to know their
            shapes are, as `pack` does before it writes.

    Returns:
        The path of the file or the folder; or its URL. With `dry_run` a `PackPlan`.

    Raises:
        SampleError: a sample can't be read, and the dataset's `on_error` is not "skip" (where it is, the sample is left out, with a
            warning, and the fingerprint is that of a view without it).
        TargetExistsError, WriteError, AccessError: `dst` is there already; it can't be written, or another job is packing to it.
            Of parts: `dst` holds the plan of another pack.
        FileChangedError: a sample of a part is not as it was when the parts were planned.
        DataNotFoundError, ConfigError: the folder of `dst` is missing; an argument makes no sense.
    """
    options = StoreOptions(store, max_size, quality, check, end_token, compression, chunks)
    if format not in (None, "hdf5", "zarr"):
        raise ConfigError(f"format must be 'hdf5' or 'zarr', not {format!r}")
    if shard_size is None and format != "zarr":
        if is_url(dst):
            raise ConfigError(
                f"{redact(dst)}: a single file is written on this machine: pass shard_size, such as '1GB', to pack into a store"
            )
        if part is not None or parts is not None or executor is not None or processes != 1:
            raise ConfigError("part, parts, processes and executor are for packs of several parts: pass shard_size, such as '1GB'")
        if dry_run:
            with opened_dataset(dataset) as opened:
                return plan_file_pack(opened, dst, options, threads_for(workers), overwrite, progress)
        result = pack_dataset(dataset, dst, options=options, workers=workers, overwrite=overwrite, progress=progress)
        if result.left_out:
            warn(left_out_message(result))
        return result.path
    if dry_run:
        share = _share(shard_size, part, parts, workers, processes)
        with opened_dataset(dataset) as opened:
            return plan_folder_pack(
                opened, destination_of(dst, storage_options), format=format or "hdf5", shard_size=share.nbytes, options=options,
                share=share.parts, workers=share.workers, processes=processes, overwrite=overwrite, progress=progress,
            )  # fmt: skip
    return pack_folder(
        dataset, dst, options=options, format=format or "hdf5", shard_size=shard_size,
        part=part, parts=parts, workers=workers, processes=processes, executor=executor, storage_options=storage_options,
        overwrite=overwrite, progress=progress,
    ).folder  # fmt: skip


class _Share(NamedTuple):
    """What a call packs: parts of so many bytes, those of its share, by so many threads a process."""

    nbytes: int
    parts: tuple[int, int] | range | None
    workers: int


def _share(shard_size: int | str | None, part: str | None, parts: str | None, workers: int | None, processes: int) -> _Share:
    threads, nbytes = threads_for(workers, processes), parse_size(_ZARR_SHARD if shard_size is None else shard_size, "shard_size")
    if nbytes < 1:
        raise ConfigError("shard_size must be at least 1 byte")
    return _Share(nbytes, share_of(part, parts), threads)


def pack_folder(
    dataset: Dataset[Any] | DataPath,
    dst: str | os.PathLike[Any],
    *,
    options: StoreOptions,
    format: PackFormat,
    shard_size: int | str | None,
    part: str | None,
    parts: str | None,
    workers: int | None,
    processes: int,
    executor: Executor | None,
    storage_options: dict[str, Any] | None,
    overwrite: bool,
    progress: bool | None,
) -> PackStatus:
    """`pack` into several parts: where the pack stands then. Of a complete one that has left out samples it warns."""
    share, folder = _share(shard_size, part, parts, workers, processes), destination_of(dst, storage_options)
    with opened_dataset(dataset) as opened:
        status = pack_parts(
            opened, folder, format=format, shard_size=share.nbytes, options=options, share=share.parts, workers=share.workers,
            processes=processes, executor=executor, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    manifest = read_manifest(folder) if status.joined else None
    if manifest is not None and manifest["left_out"]:
        warn(f"{folder.shown}: {manifest['left_out']:,} samples can't be read and were left out, see {MANIFEST}")
    return status


def share_of(part: str | None, parts: str | None) -> tuple[int, int] | range | None:
    """Which parts `part` and `parts` of `pack` name; None: all.

    Raises:
        ConfigError: they make no sense, or both are given.
    """
    if part is not None and parts is not None:
        raise ConfigError("part and parts exclude each other")
    if part is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", part, re.ASCII)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"part must be 'i/N' with i from 0 to N - 1, such as '3/8', not {part!r}")
        return int(match[1]), int(match[2])
    if parts is not None:
        match = re.fullmatch(r"(\d+):(\d+)", parts, re.ASCII)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"parts must be 'a:b' with a < b, such as '0:16', not {parts!r}")
        return range(int(match[1]), int(match[2]))
    return None
