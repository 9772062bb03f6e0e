"""Says how far a pack of several files is, and completes it: sidecars of finished parts, and the
manifest of all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.display import Lines
from headrace.errors import DataNotFoundError, FormatError, TargetExistsError
from headrace.io.paths import redact
from headrace.io.remote_files import below
from headrace.io.resolve.packs import (
    MANIFEST,
    PLAN,
    are_counts,
    are_texts,
    manifest_text,
    parse_manifest,
)
from headrace.packing.destination import Destination, destination_of
from headrace.packing.parts import PartsPlan, read_plan

Damage = tuple[int, str, str]
"""``(index, location, error)`` of a sample that is not what was packed; -1: of a file."""
_LISTED = 1000
_THREADS = 32
_CHECK = b', "check": '


@dataclass(frozen=True)
class Sidecar:
    """What a finished part says of itself, in the file beside it.

    Attributes:
        plan: the digest of the plan that it is of.
        part: its number.
        samples: how many it has.
        nbytes, crc32: of its file.
        left_out: what is wrong with each sample that could not be read.
    """

    plan: str
    part: int
    samples: int
    nbytes: int
    crc32: int
    left_out: list[str] = field(default_factory=list)

    def entry(self, plan: PartsPlan) -> dict[str, Any]:
        """What the manifest says of the part."""
        return {
            "name": plan.name(self.part),
            "samples": self.samples,
            "nbytes": self.nbytes,
            "crc32": self.crc32,
        }


@dataclass(frozen=True)
class PackStatus:
    """Where a pack of several parts stands.

    Attributes:
        folder: of the pack; or its URL.
        parts: how many there are.
        done: the numbers of those that are finished.
        stale: of those that are of another plan, or whose file is not the one that the sidecar
            tells of.
        missing: of those that are not there yet.
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


def sidecar_text(sidecar: Sidecar) -> bytes:
    """The content of a sidecar: a line of JSON, and last in it the checksum of what comes
    before.
    """
    text = json.dumps(asdict(sidecar), sort_keys=True).encode("ascii")[:-1]
    return text + _CHECK + b"%d}\n" % zlib.crc32(text)


def _read_sidecar(folder: Destination, plan: PartsPlan, part: int) -> Sidecar | None:
    """The sidecar of a part; None: there is none of this plan that can be read."""
    try:
        data = folder.read(plan.sidecar_name(part)) or b""
        text, _, check = data.rpartition(_CHECK)
        if check != b"%d}\n" % zlib.crc32(text):
            return None
        sidecar = Sidecar(**json.loads(text + b"}"))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    numbers = [sidecar.part, sidecar.samples, sidecar.nbytes, sidecar.crc32]
    is_sound = are_counts(numbers) and are_texts(sidecar.left_out)
    is_of_plan = (sidecar.plan, sidecar.part) == (plan.digest, part)
    return sidecar if is_sound and is_of_plan else None


def pack_status(
    path: str | os.PathLike[Any], *, storage_options: dict[str, Any] | None = None
) -> PackStatus:
    """Where a pack of several parts stands: which are finished, stale (of another plan) or missing.
    Reads sidecars, and no samples.

    Args:
        path: the folder of the pack; or its URL.
        storage_options: of the URL.

    Raises:
        DataNotFoundError: there is no plan.
        FormatError: the plan is damaged.
    """
    folder = destination_of(path, storage_options)
    return finished_in(folder, planned(folder))[0]


def finished_in(folder: Destination, plan: PartsPlan) -> tuple[PackStatus, dict[int, Sidecar]]:
    """Where a pack stands, and the sidecars of the finished parts, by number."""
    sizes = folder.sizes()
    there = [part for part in range(plan.parts) if plan.sidecar_name(part) in sizes]
    # a folder of this machine answers at once
    threads = _THREADS if isinstance(folder.path, str) else 1
    with ThreadPoolExecutor(threads, "headrace-sidecars") as pool:
        sidecars = pool.map(lambda part: _read_sidecar(folder, plan, part), there)
    finished = dict[int, Sidecar]()
    for part, sidecar in zip(there, sidecars, strict=True):
        if sidecar is not None and sidecar.nbytes == sizes.get(plan.name(part)):
            finished[part] = sidecar
    stale = list[int]()
    missing = list[int]()
    for part in range(plan.parts):
        if part not in finished:
            (stale if plan.name(part) in sizes else missing).append(part)
    joined = False
    if len(finished) == plan.parts:
        with contextlib.suppress(FormatError):
            manifest = read_manifest(folder)
            joined = manifest is not None and manifest["plan"] == plan.digest
    status = PackStatus(folder.path, plan.parts, list(finished), stale, missing, joined)
    return status, finished


def planned(folder: Destination) -> PartsPlan:
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
    """The manifest of a pack; None: there is none.

    Raises:
        FormatError: it is damaged.
    """
    data = folder.read(MANIFEST)
    return None if data is None else parse_manifest(data, folder.shown_name(MANIFEST))


def damaged_plan(folder: Destination, plan: PartsPlan, manifest: dict[str, Any]) -> list[Damage]:
    """What is wrong with the files beside the parts and their sidecars."""
    expected = {PLAN: plan.text, MANIFEST: manifest_text(manifest)}
    wrong = [name for name, text in expected.items() if folder.read(name) != text]
    shown = map(folder.shown_name, wrong)
    return [
        (-1, name, f"{name} is damaged: remove it and pack again, parts are kept") for name in shown
    ]


def join(
    path: str | os.PathLike[Any], *, storage_options: dict[str, Any] | None = None
) -> Path | str:
    """Writes the manifest of a pack whose parts are all finished; `pack` does so by itself where it
    packs the last one.

    Checks that each part has a sidecar of this plan and the size that it tells, and that the parts
    have all samples. What killed processes left is removed. `verify` reads the samples too.

    Args:
        path: the folder of the pack; or its URL.
        storage_options: of the URL.

    Returns:
        The path of the manifest; or its URL.

    Raises:
        DataNotFoundError: there is no plan, or a part is missing.
        FormatError: the plan is damaged, or a part has other samples than planned.
        WriteError, AccessError: the manifest can't be written.
    """
    folder = destination_of(path, storage_options)
    plan = planned(folder)
    status, sidecars = finished_in(folder, plan)
    if not status.is_finished:
        raise DataNotFoundError(f"{status}: pack these first, by the same command")
    return join_in(folder, plan, sidecars)


def join_in(folder: Destination, plan: PartsPlan, sidecars: Mapping[int, Sidecar]) -> Path | str:
    """See `join`; of a pack whose parts are all finished, and have these sidecars."""
    left_out = list[str]()
    parts = list[dict[str, Any]]()
    for part, (start, stop) in enumerate(itertools.pairwise(plan.edges)):
        sidecar = sidecars[part]
        if sidecar.samples + len(sidecar.left_out) != stop - start:
            name = folder.shown_name(plan.name(sidecar.part))
            raise FormatError(
                f"{name} has {sidecar.samples:,} samples, not {stop - start:,}: remove it, and "
                "pack again"
            )
        left_out += sidecar.left_out
        parts.append(sidecar.entry(plan))
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
    folder.write(MANIFEST, manifest_text(said))
    return manifest_of(folder.path)


def manifest_of(folder: Path | str) -> Path | str:
    """Where the manifest of a pack lies; ``folder`` is its folder, or its URL."""
    return folder / MANIFEST if isinstance(folder, Path) else below(folder, MANIFEST)


def remove_other(folder: Destination, plan: PartsPlan) -> None:
    """Removes parts and sidecars that are of another plan."""
    parts = range(plan.parts)
    ours = {*map(plan.sidecar_name, parts), *map(plan.name, parts)}
    for name in folder.sizes():
        if _is_of_part(name) and name not in ours:
            folder.remove(name)


def refuse_foreign(folder: Destination) -> None:
    """Raises a TargetExistsError where a pack into a folder without a plan would replace or remove
    files: no pack has written them, or one that has lost its plan.
    """
    if folder.read(PLAN) is not None:
        return
    replaced = [name for name in folder.sizes() if name == MANIFEST or _is_of_part(name)]
    if replaced and folder.read(PLAN) is None:  # else another job has just begun
        raise TargetExistsError(
            f"{folder.shown_name(replaced[0])} is not of a pack with a {PLAN}, and would be "
            "replaced or removed: pack to another folder, or pass overwrite=True (--overwrite), "
            "which keeps finished parts"
        )


def _is_of_part(name: str) -> bool:
    return name.startswith("part-") and "-of-" in name and name.endswith((".h5", ".json"))


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: ``0-3, 7, 9-12``."""
    array = np.asarray(numbers)
    groups = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1)
    shown = [str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups[:20]]
    return ", ".join(shown) + (f" and {len(groups) - 20:,} more ranges" if len(groups) > 20 else "")
