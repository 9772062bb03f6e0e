"""Verifies the checksums of a packed file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.arguments import checks_keywords
from headrace.display import progress_bar
from headrace.errors import DataNotFoundError, FormatError, HeadraceError
from headrace.io.paths import is_url, redact
from headrace.io.resolve.packs import MANIFEST
from headrace.packing.destination import Destination, destination_of
from headrace.packing.part import sum_of
from headrace.packing.status import finished_in, planned, read_manifest
from headrace.storage.arrays.packed import TARGETS
from headrace.storage.hdf5.packed import packed_info
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.tokens.packed import KIND, PackedTokens


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What `verify` found.

    Attributes:
        path: the file, or the folder of the parts, or its URL.
        samples: number of samples read.
        bad: ``(index, location, error)`` of each sample that is not what was packed; of parts the index is that of the whole pack, and
            -1 where no single sample is at fault; empty for a sound pack.
    """

    path: Path | str
    samples: int
    bad: list[tuple[int, str, str]]

    @property
    def ok(self) -> bool:
        """True if every sample is what was packed."""
        return not self.bad


@checks_keywords
def verify(path: str | os.PathLike[Any], *, storage_options: dict[str, Any] | None = None, progress: bool | None = None) -> VerifyResult:
    """Read all of a pack, and compare every sample, the offsets, names and targets with their checksums.

    Args:
        path: a file that `pack` wrote, or a folder of parts: each file as a whole is compared with its sidecar's checksum too, and the
            sidecars with the manifest. Parts at a URL are fetched one by one.
        storage_options: of the URL, as fsspec takes them.
        progress: show a progress bar; None: only on a terminal.

    Returns:
        The samples that are damaged, one by one.

    Raises:
        DataNotFoundError, AccessError: there is no such file; this user may not read it.
        FormatError: no packed file, a truncated one, or one in which more is damaged than samples.
    """
    if is_url(path) or os.path.isdir(os.path.expanduser(os.fspath(path))):
        return _verify_parts(destination_of(path, storage_options), progress)
    info = packed_info(os.path.expanduser(os.fspath(path)))
    if info is not None and info.kind == KIND:
        return _verify_tokens(PackedTokens(path), progress)
    source = HDF5Source(path)  # checks what lies beside the samples
    try:
        if source.info is None or not source.has_checksums:
            raise _unchecked(source.path)
        if TARGETS in source.info.checksums:
            source.column(TARGETS)
        bad: list[tuple[int, str, str]] = []
        for index in progress_bar(progress, iterable=range(len(source)), desc="verifying", unit="sample"):
            try:
                source.read([index])
            except (HeadraceError, OSError) as error:
                bad.append((index, source.location(index), str(error)))
        return VerifyResult(Path(source.path), len(source), bad)
    finally:
        source.close()


def _verify_parts(folder: Destination, progress: bool | None) -> VerifyResult:
    """The same of a folder of parts: samples are numbered through all of them; -1 stands for a file."""
    plan = planned(folder)
    manifest, (status, sidecars) = read_manifest(folder), finished_in(folder, plan)
    if not status.is_finished or manifest is None or manifest["plan"] != plan.digest:
        raise DataNotFoundError(f"{status}: it is not complete, pack the rest by the same command")
    samples, bad = 0, list[tuple[int, str, str]]()
    with progress_bar(progress, total=plan.parts, desc="verifying", unit="part") as bar:
        for part, entry in enumerate(manifest["parts"]):
            name, sidecar = folder.shown_name(plan.name(part)), sidecars[part]
            if entry != sidecar.entry(plan):
                bad.append((-1, name, f"{folder.shown_name(plan.sidecar_name(part))} differs from {MANIFEST}: one of both is damaged"))
            with folder.fetched(plan.name(part)) as path:
                damaged = _verify_part(path, (entry["nbytes"], entry["crc32"]), name)
            bad += [(index if index < 0 else samples + index, location, error) for index, location, error in damaged]
            samples += entry["samples"]
            bar.update(1)
    return VerifyResult(folder.path, samples, bad)


def _verify_part(path: Path, expected: tuple[int, int], name: str) -> list[tuple[int, str, str]]:
    """What is wrong with the file of a part; `expected` are its bytes and CRC."""
    try:
        if bad := verify(path, progress=False).bad:
            return bad
    except (HeadraceError, OSError) as error:
        return [(-1, name, str(error))]
    with open(path, "rb") as opened:
        if sum_of(opened.fileno()) == expected:
            return []
    return [(-1, name, f"{name}: wrong checksum of the file, though each sample is sound: pack it again")]


def _verify_tokens(tokens: PackedTokens, progress: bool | None) -> VerifyResult:
    """The same of texts, a piece of the file at a time: there may be many millions of them."""
    if not tokens.has_checksums:
        raise _unchecked(tokens.path)
    count, bad = tokens.info.count, list[tuple[int, str, str]]()
    with progress_bar(progress, total=count, desc="verifying", unit="document") as bar:
        for checked, damaged in tokens.damaged():
            for index in damaged:
                where = tokens.location(index)
                bad.append((index, where, f"{where}: wrong checksum, the file is damaged: pack it again"))
            bar.update(checked)
    return VerifyResult(Path(tokens.path), count, bad)


def _unchecked(path: str) -> FormatError:
    return FormatError(f"{redact(path)} was not packed by headrace: there are no checksums to compare it with")
