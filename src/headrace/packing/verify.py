"""Verifies the checksums of a packed file, or of all parts of a pack."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.arguments import checks_keywords
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import DataNotFoundError, FormatError, HeadraceError
from headrace.formats.arrays.packed import FILE_CRC, NAME_OFFSETS, NAMES, OFFSETS
from headrace.formats.hdf5 import is_hdf5
from headrace.formats.hdf5.files import packed_info, reading
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.resolve.manifests import MANIFEST, PLAN, checked_text
from headrace.io.checksums import NOTHING, FileSums, replaced, sum_file
from headrace.io.paths import check_regular, is_url, redact
from headrace.packing.destination import Destination, destination_of
from headrace.packing.options import PackOptions
from headrace.packing.parts import (
    Damage,
    PartsPlan,
    Sidecar,
    finished_in,
    planned,
    read_manifest,
)
from headrace.packing.plan import groups_of, stream

_READ_AT_ONCE = {OFFSETS, NAMES, NAME_OFFSETS}
"""What opening a packed file compares with its checksum."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of `verify`.

    Attributes:
        path: the file, or the folder of the parts, or its URL.
        samples: number of samples read.
        bad: ``(index, location, error)`` of each sample that differs from what was packed; empty if
            the pack is intact. For parts the index is that of the whole pack, and -1 if no single
            sample is the cause.
    """

    path: Path | str
    samples: int
    bad: list[Damage]

    @property
    def ok(self) -> bool:
        """True if all samples are as packed."""
        return not self.bad


@checks_keywords
def verify(
    path: str | os.PathLike[Any],
    *,
    workers: int | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: bool | None = None,
) -> VerifyResult:
    """Reads a whole pack and compares it with its checksums.

    Each file is compared as a whole. If that fails, all samples, the offsets, names and targets of
    the file are compared one by one. The checksum of a file was computed from the data read back,
    sample by sample, when it was packed.

    Args:
        path: a file that `pack` wrote, or a folder of parts, whose sidecars are compared with the
            manifest too. Parts at a URL are fetched one by one into the folder for temporary files.
        workers: number of threads that read. None: one per usable core.
        storage_options: options of fsspec for the URL.
        progress: show a progress bar. None: only on a terminal.

    Returns:
        A `VerifyResult`, which lists the damaged samples.

    Raises:
        DataNotFoundError, AccessError: the file does not exist, or is not readable.
        FormatError: it is not a packed file, is truncated, or has damage outside of its samples.
    """
    threads = PackOptions(workers=workers).threads
    if is_url(path) or os.path.isdir(os.path.expanduser(os.fspath(path))):
        return _verify_parts(destination_of(path, storage_options), threads, progress)
    file = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if os.path.exists(file):
        check_regular(file)
    return _verify_file(file, threads, progress)


def _verify_file(path: str, workers: int, progress: bool | None) -> VerifyResult:
    shown = redact(path)
    if os.path.isfile(path) and not is_hdf5(path):
        raise FormatError(
            f"{shown} is no HDF5 file, or not a whole one: it was not packed by headrace, or is "
            "damaged"
        )
    offset = seal_of(path)
    info = packed_info(path)
    if info is None:
        raise _not_packed(path)
    with open(path, "rb") as file:
        seal = os.pread(file.fileno(), 4, offset)

    def is_sound(sums: FileSums) -> bool:
        return replaced(sums, offset, seal, bytes(4)) == int.from_bytes(seal, "little")

    bad = _damage(path, shown, is_sound, workers, progress)
    return VerifyResult(Path(path), info.count, bad)


def _damage(
    path: str,
    name: str,
    is_sound: Callable[[FileSums], bool],
    workers: int,
    progress: bool | None,
) -> list[Damage]:
    """The damage of a file: none if its sums are right, else found by comparing each sample."""
    if is_sound(_sum(path, NOTHING, progress)):
        return []
    bad = verify_samples(path, workers, progress)[0]
    what = "wrong checksum of the file, though each sample is sound: pack it again"
    return bad or [(-1, name, f"{name}: {what}")]


def verify_samples(path: str, workers: int, progress: bool | None) -> tuple[list[Damage], FileSums]:
    """Compares each sample of a file, and the arrays beside the samples, with its checksum. Returns
    also the sums of the whole file, which it does not compare.
    """
    with contextlib.closing(HDF5Source(path)) as source:
        checksums = source.checksums
        if source.info is None or checksums is None:
            raise _not_packed(path)
        for name in source.info.checksums.keys() - _READ_AT_ONCE:
            source.whole(name)  # checks it
        edges = source.edges()
        sums = _sum(path, NOTHING if edges is None else edges, progress)
        if edges is None:
            return _decoded(source, workers, progress), sums
        different = np.flatnonzero(sums.crcs != checksums).tolist()
        bad = [(index, source.location(index), source.damaged(index)) for index in different]
        return bad, sums


def _not_packed(path: str) -> FormatError:
    return FormatError(
        f"{redact(path)} was not packed by headrace: there are no checksums to compare it with"
    )


def _sum(path: str, edges: IntArray, progress: bool | None) -> FileSums:
    size = os.path.getsize(path)
    with (
        open(path, "rb") as file,
        progress_bar(progress, total=size, desc="verifying", unit="B", unit_scale=True) as bar,
    ):
        return sum_file(file.fileno(), edges, bar.update)


def _decoded(source: HDF5Source, workers: int, progress: bool | None) -> list[Damage]:
    """The damage of samples that must be decoded."""

    def task(group: range) -> list[Damage]:
        bad = list[Damage]()
        try:
            source.read(group)
        except (HeadraceError, OSError) as error:
            if len(group) == 1:
                return [(group.start, source.location(group.start), str(error))]
            for index in group:
                bad += task(range(index, index + 1))
        return bad

    # a compressed chunk is decoded once
    blocks = source.blocks()
    together = 1
    if source.block_nbytes and blocks is not None and len(blocks):
        together = int(blocks[0])
    groups = groups_of(source.sizes(), together=together)
    bad = list[Damage]()
    for _, found in stream(task, groups, workers, progress, len(source), "verifying"):
        bad += found
    return bad


def seal_of(path: str) -> int:
    """The offset of the checksum of the whole file.

    Raises:
        FormatError: there is none, or it is damaged.
    """
    with reading(path) as file:
        if FILE_CRC not in file:
            raise _not_packed(path)
        dataset = file[FILE_CRC]
        offset = dataset.id.get_offset()
        if dataset.shape != (1,) or dataset.dtype != np.uint32 or offset is None:
            raise FormatError(f"{redact(path)}: {FILE_CRC!r} is damaged: pack it again")
        return int(offset)


def _verify_parts(folder: Destination, workers: int, progress: bool | None) -> VerifyResult:
    """Verifies a folder of parts. Samples are numbered through all; -1 stands for a file."""
    plan = planned(folder)
    manifest = read_manifest(folder)
    status, sidecars = finished_in(folder, plan)
    is_of_plan = manifest is not None and manifest["plan"] == plan.digest
    if manifest is not None and not is_of_plan and not status.done:
        raise FormatError(
            f"{folder.shown}: plan.json is not the plan that {MANIFEST} names: one of both is "
            "damaged, pack again"
        )
    if not status.is_finished or manifest is None or not is_of_plan:
        raise DataNotFoundError(f"{status}: it is not complete, pack the rest by the same command")
    samples = 0
    bad = list[Damage]()
    for name, text in {PLAN: plan.text, MANIFEST: checked_text(manifest)}.items():
        if folder.read(name) != text:
            name = folder.shown_name(name)
            why = f"{name} is damaged: remove it and pack again, parts are kept"
            bad.append((-1, name, why))
    entries = manifest["parts"]
    with progress_bar(progress, total=plan.parts, desc="verifying", unit="part") as bar:
        for part, entry in enumerate(entries):
            damaged = _damaged_part(folder, plan, sidecars[part], entry, workers)
            for index, location, error in damaged:
                bad.append((index if index < 0 else samples + index, location, error))
            samples += entry["samples"]
            bar.update(1)
    return VerifyResult(folder.path, samples, bad)


def _damaged_part(
    folder: Destination, plan: PartsPlan, sidecar: Sidecar, entry: dict[str, Any], workers: int
) -> list[Damage]:
    """The damage of a part, of which the manifest says `entry`."""
    bad = list[Damage]()
    name = folder.shown_name(plan.name(sidecar.part))
    if entry != sidecar.entry(plan):
        where = folder.shown_name(plan.sidecar_name(sidecar.part))
        why = f"{where} differs from {MANIFEST}: one of both is damaged, pack again"
        bad.append((-1, name, why))
    expected = (entry["nbytes"], entry["crc32"])
    with folder.fetched(plan.name(sidecar.part)) as path:
        try:
            found = _damage(path, name, lambda s: (s.size, s.crc) == expected, workers, False)
        except (HeadraceError, OSError) as error:
            found = [(-1, name, str(error))]
        copy = redact(path)  # of a remote part, which is gone when messages are read
    for index, where, why in found:
        bad.append((index, where.replace(copy, name), why.replace(copy, name)))
    return bad
