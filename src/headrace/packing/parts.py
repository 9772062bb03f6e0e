"""The files of a pack beside its parts: the plan, a sidecar for each part, and the manifest. Shows
how far a pack is, joins its parts, and verifies the checksums of a packed file or of all parts.

The plan is a pure function of the dataset and the options, frozen in `plan.json`. Each process that
packs some of the parts makes the plan anew and compares it with the one that is there, so no
process needs to tell another what to do. A part is finished if its sidecar names this plan. The
manifest is written when all are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.arguments import checks_keywords
from headrace.display import Lines, progress_bar
from headrace.dtypes import IntArray
from headrace.errors import DataNotFoundError, FormatError, HeadraceError, TargetExistsError
from headrace.formats.arrays.packed import FILE_CRC, NAME_OFFSETS, NAMES, OFFSETS
from headrace.formats.hdf5.files import packed_info, reading
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.resolve import manifests
from headrace.formats.resolve.manifests import MANIFEST, OF_PART, PLAN, checked_text
from headrace.io.checksums import NOTHING, FileSums, SumsAhead, replaced, sum_file
from headrace.io.paths import check_regular, is_url, redact
from headrace.packing.destination import Destination, absolute, destination_of
from headrace.packing.plan import PackOptions, PackPlan, groups_of, stream

_LISTED = 1000  # samples that were left out
_THREADS = 32
Damage = tuple[int, str, str]
"""``(index, location, error)`` of a sample that is not what was packed; -1: of a file."""
_READ_AT_ONCE = {OFFSETS, NAMES, NAME_OFFSETS}
"""What opening a packed file compares with its checksum."""


def read_plan(folder: Destination) -> PackPlan | None:
    """The plan of a pack, or None if there is none.

    Raises:
        FormatError: it is damaged, or no plan of headrace.
    """
    data = folder.read(PLAN)
    name = folder.shown_name(PLAN)
    if data is None:
        return None
    try:
        plan = PackPlan(**manifests.checked_json(data))
        if plan.version != PackPlan.version:
            raise ValueError(f"its layout is {plan.version!r}")
        return plan
    except (ValueError, TypeError) as error:
        raise FormatError(
            f"{name} is damaged, or not a plan of headrace ({error}): use another folder or, if "
            "it is a pack, remove it and pack again with overwrite=True (--overwrite), which "
            "keeps finished parts"
        ) from error


def freeze(folder: Destination, frozen: PackPlan | None, plan: PackPlan, overwrite: bool) -> None:
    """Writes the plan in place of `frozen`, and removes the parts of that one.

    Raises:
        TargetExistsError: there is another one, and it may not be replaced; the message shows how
            they differ.
        WriteError, AccessError: it can't be written.
    """
    replaces = frozen is not None and frozen.digest != plan.digest
    if frozen is None or replaces:
        # another process may have planned meanwhile
        with contextlib.suppress(TargetExistsError):
            folder.write(PLAN, plan.text, overwrite)
        check_same(folder, read_plan(folder), plan)
    if replaces:
        remove_other(folder, plan)


def check_same(folder: Destination, there: PackPlan | None, plan: PackPlan) -> None:
    """Raises a TargetExistsError if the existing plan is another one; the message shows the
    differences.
    """
    if there is not None and there.digest == plan.digest:
        return
    before = {} if there is None else _flat(there)
    after = _flat(plan)
    different = list[str]()
    for name in dict.fromkeys([*before, *after]):
        one = before.get(name)
        other = after.get(name)
        if one == other:
            continue
        if isinstance(one, list) or len(f"{one}{other}") >= 80:
            different.append(f"other {name}")
        else:
            different.append(f"{name}: {one} there, {other} now")
    raise TargetExistsError(
        f"{folder.shown} holds the plan of another pack ({'; '.join(different[:4])}): pack to "
        "another folder, or pass overwrite=True (--overwrite) to plan anew"
    )


def _flat(plan: PackPlan) -> dict[str, Any]:
    """The fields of a plan by name, the most telling ones first."""
    said = manifests.checked_json(plan.text)
    options = said.pop("options")
    return {**options, **options.get("versions", {}), **said}


@dataclass(frozen=True)
class Sidecar:
    """The file beside a finished part that describes it.

    Attributes:
        plan: the digest of the plan that it is of.
        part: its number.
        samples: how many it has.
        nbytes, crc32: of its file.
        left_out: the error of each sample that could not be read.
    """

    plan: str
    part: int
    samples: int
    nbytes: int
    crc32: int
    left_out: list[str] = field(default_factory=list)

    @property
    def text(self) -> bytes:
        """The content of the file."""
        return checked_text(asdict(self))

    def entry(self, plan: PackPlan) -> dict[str, Any]:
        """The entry of the part in the manifest."""
        return {
            "name": plan.name(self.part),
            "samples": self.samples,
            "nbytes": self.nbytes,
            "crc32": self.crc32,
        }


@dataclass(frozen=True)
class PackStatus:
    """The state of a pack of several parts.

    Attributes:
        folder: of the pack; or its URL.
        parts: how many there are.
        done: numbers of the finished parts.
        stale: numbers of parts of another plan, or whose file differs from its sidecar.
        missing: numbers of parts that do not exist yet.
        joined: True if the manifest is written: the pack is complete.
    """

    folder: Path | str
    parts: int
    done: list[int]
    stale: list[int]
    missing: list[int]
    joined: bool

    @property
    def is_finished(self) -> bool:
        """True if all parts are finished."""
        return len(self.done) == self.parts

    def __str__(self) -> str:
        lines = [
            f"{redact(self.folder)}: {len(self.done):,} of {self.parts:,} parts "
            f"done{', joined' if self.joined else ''}"
        ]
        for what, numbers in (("stale", self.stale), ("missing", self.missing)):
            if numbers:
                lines.append(f"{what}: {_ranges(numbers)}")
        return Lines("\n".join(lines))


def _read_sidecar(folder: Destination, plan: PackPlan, part: int) -> Sidecar | None:
    """The sidecar of a part, or None if there is no readable one of this plan."""
    data = folder.read(plan.sidecar_name(part)) or b""
    try:
        sidecar = Sidecar(**manifests.checked_json(data))
    except (ValueError, TypeError):
        return None
    is_of_plan = (sidecar.plan, sidecar.part) == (plan.digest, part)
    return sidecar if is_of_plan and sidecar.text == data else None


def pack_status(
    path: str | os.PathLike[Any], *, storage_options: dict[str, Any] | None = None
) -> PackStatus:
    """Shows which parts of a pack are finished, stale (of another plan) or missing. Reads sidecars,
    and no samples.

    Args:
        path: the folder of the pack; or its URL.
        storage_options: of the URL.

    Raises:
        DataNotFoundError: there is no plan.
        FormatError: the plan is damaged.
    """
    folder = destination_of(path, storage_options)
    return finished_in(folder, planned(folder))[0]


def finished_in(folder: Destination, plan: PackPlan) -> tuple[PackStatus, dict[int, Sidecar]]:
    """The state of a pack, and the sidecars of its finished parts by number."""
    sizes = folder.sizes()
    parts = range(plan.parts)
    there = [part for part in parts if plan.sidecar_name(part) in sizes]
    with ThreadPoolExecutor(_THREADS, "headrace-sidecars") as pool:
        read = list(pool.map(lambda part: _read_sidecar(folder, plan, part), there))
    finished = {
        sidecar.part: sidecar
        for sidecar in read
        if sidecar is not None and sidecar.nbytes == sizes.get(plan.name(sidecar.part))
    }
    left = [part for part in parts if part not in finished]
    joined = False
    if not left:
        with contextlib.suppress(FormatError):
            manifest = read_manifest(folder)
            joined = manifest is not None and manifest["plan"] == plan.digest
    status = PackStatus(
        folder.path,
        plan.parts,
        list(finished),
        [part for part in left if plan.name(part) in sizes],
        [part for part in left if plan.name(part) not in sizes],
        joined,
    )
    return status, finished


def planned(folder: Destination) -> PackPlan:
    """The plan of a pack.

    Raises:
        DataNotFoundError, FormatError: there is none; it is damaged.
    """
    plan = read_plan(folder)
    if plan is None:
        raise DataNotFoundError(
            f"{folder.shown} was not packed by headrace, since it has no {PLAN}: name the folder "
            "that headrace.pack(..., shard_size=...) writes to"
        )
    return plan


def read_manifest(folder: Destination) -> dict[str, Any] | None:
    """The manifest of a pack, or None if there is none.

    Raises:
        FormatError: it is damaged.
    """
    data = folder.read(MANIFEST)
    return None if data is None else manifests.parse_manifest(data, folder.shown_name(MANIFEST))


def join(
    path: str | os.PathLike[Any], *, storage_options: dict[str, Any] | None = None
) -> Path | str:
    """Writes the manifest of a pack whose parts are all finished; `pack` does so by itself where it
    packs the last one.

    Checks that each part has a sidecar of this plan and the size that it tells, and removes what
    killed processes left. `verify` reads the samples too.

    Args:
        path: the folder of the pack; or its URL.
        storage_options: of the URL.

    Returns:
        The path of the manifest; or its URL.

    Raises:
        DataNotFoundError: there is no plan, or a part is missing.
        FormatError: the plan is damaged.
        WriteError, AccessError: the manifest can't be written.
    """
    folder = destination_of(path, storage_options)
    plan = planned(folder)
    status, sidecars = finished_in(folder, plan)
    if not status.is_finished:
        raise DataNotFoundError(f"{status}: pack these first, by the same command")
    return join_in(folder, plan, sidecars)


def join_in(folder: Destination, plan: PackPlan, sidecars: Mapping[int, Sidecar]) -> Path | str:
    """`join` for a pack whose parts are all finished, with these sidecars."""
    left_out = list[str]()
    parts = list[dict[str, Any]]()
    for part in range(plan.parts):
        left_out += sidecars[part].left_out
        parts.append(sidecars[part].entry(plan))
    said: dict[str, Any] = {
        "version": plan.version,
        "plan": plan.digest,
        "kind": plan.kind,
        "store": plan.store,
        "fingerprint": plan.fingerprint,
        "samples": sum(part["samples"] for part in parts),
        "classes": plan.classes,
        "parts": parts,
        "left_out": len(left_out),
        "left_out_first": left_out[:_LISTED],
    }
    remove_other(folder, plan)
    folder.remove_abandoned()
    folder.write(MANIFEST, checked_text(said))
    return folder.at(MANIFEST)


def remove_other(folder: Destination, plan: PackPlan) -> None:
    """Removes the parts and sidecars of other plans."""
    parts = range(plan.parts)
    ours = {*map(plan.sidecar_name, parts), *map(plan.name, parts)}
    for name in folder.sizes():
        if OF_PART.fullmatch(name) and name not in ours:
            folder.remove(name)


def refuse_foreign(folder: Destination) -> None:
    """Raises a TargetExistsError if a pack into a folder that has no plan would replace or remove
    files.
    """
    replaced = [name for name in folder.sizes() if name == MANIFEST or OF_PART.fullmatch(name)]
    if replaced:
        raise TargetExistsError(
            f"{folder.shown_name(replaced[0])} is not of a pack with a {PLAN}, and would be "
            "replaced or removed: pack to another folder, or pass overwrite=True (--overwrite), "
            "which keeps finished parts"
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: ``0-3, 7, 9-12``."""
    array = np.asarray(numbers)
    groups = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1)
    shown = [str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups[:20]]
    return ", ".join(shown) + (f" and {len(groups) - 20:,} more ranges" if len(groups) > 20 else "")


# -- verify


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
    file = absolute(path)
    if is_url(file) or os.path.isdir(file):
        return _verify_parts(destination_of(path, storage_options), threads, progress)
    if os.path.exists(file):
        check_regular(file)
    offset, seal = seal_of(file)
    info = packed_info(file)
    if info is None:
        raise _not_packed(file)
    sums = _sum(file, threads, progress)
    bad = list[Damage]()
    if replaced(sums, offset, seal, bytes(4)) != int.from_bytes(seal, "little"):
        bad = _damage(file, redact(file), threads, progress)
    return VerifyResult(Path(file), info.count, bad)


def _damage(path: str, name: str, workers: int, progress: bool | None) -> list[Damage]:
    """The damage of a file whose checksum is wrong, found by comparing each sample."""
    what = "wrong checksum of the file, though each sample is sound: pack it again"
    return verify_samples(path, workers, progress)[0] or [(-1, name, f"{name}: {what}")]


def verify_samples(
    path: str, workers: int, progress: bool | None, ahead: SumsAhead | None = None
) -> tuple[list[Damage], FileSums]:
    """Compares each sample of a file, and the arrays beside the samples, with its checksum. Returns
    also the sums of the whole file, which it does not compare. `ahead`: see `sum_file`.
    """
    with contextlib.closing(HDF5Source(path)) as source:
        if source.info is None or source.crc is None:
            raise _not_packed(path)
        for name in source.info.checksums.keys() - _READ_AT_ONCE:
            source.whole(name)  # checks it
        edges = source.edges()
        if edges is None:
            sums = _sum(path, workers, progress)
            return _decoded(source, workers, progress), sums
        sums = _sum(path, workers, progress, edges, ahead)
        different = np.flatnonzero(sums.crcs != source.crc.array).tolist()
        bad = [(index, source.location(index), source.damaged(index)) for index in different]
        return bad, sums


def _not_packed(path: str) -> FormatError:
    return FormatError(
        f"{redact(path)} was not packed by headrace: there are no checksums to compare it with"
    )


def _sum(
    path: str,
    workers: int,
    progress: bool | None,
    edges: IntArray = NOTHING,
    ahead: SumsAhead | None = None,
) -> FileSums:
    size = os.path.getsize(path)
    with (
        open(path, "rb") as file,
        progress_bar(progress, total=size, desc="verifying", unit="B", unit_scale=True) as bar,
    ):
        return sum_file(file.fileno(), edges, workers, bar.update, ahead)


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


def seal_of(path: str) -> tuple[int, bytes]:
    """The offset of the checksum of the whole file, and its bytes.

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
        return int(offset), dataset[:].tobytes()


def _verify_parts(folder: Destination, workers: int, progress: bool | None) -> VerifyResult:
    """Verifies a folder of parts. Samples are numbered through all; -1 stands for a file."""
    plan = planned(folder)
    manifest = read_manifest(folder)
    status, sidecars = finished_in(folder, plan)
    if manifest is None or not status.joined:
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
    folder: Destination, plan: PackPlan, sidecar: Sidecar, entry: dict[str, Any], workers: int
) -> list[Damage]:
    """The damage of a part, of which the manifest says `entry`."""
    bad = list[Damage]()
    name = folder.shown_name(plan.name(sidecar.part))
    if entry != sidecar.entry(plan):
        where = folder.shown_name(plan.sidecar_name(sidecar.part))
        why = f"{where} differs from {MANIFEST}: one of both is damaged, pack again"
        bad.append((-1, name, why))
    found = list[Damage]()
    with folder.fetched(plan.name(sidecar.part)) as path:
        try:
            sums = _sum(path, workers, False)
            if (sums.size, sums.crc) != (entry["nbytes"], entry["crc32"]):
                found = _damage(path, name, workers, False)
        except (HeadraceError, OSError) as error:
            found = [(-1, name, str(error))]
        copy = redact(path)  # of a remote part, which is gone when messages are read
    for index, where, why in found:
        bad.append((index, where.replace(copy, name), why.replace(copy, name)))
    return bad
