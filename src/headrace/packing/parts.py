"""The files of a pack beside its parts: the plan, a sidecar for each part, and the manifest.

The plan is a pure function of the dataset and the options, frozen in `plan.json`. Each process that
packs some of the parts makes the plan anew and compares it with the one that is there, so no
process needs to tell another what to do. Finished is a part whose sidecar names this plan. The
manifest is written when all are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import descr_to_dtype

from headrace.display import Lines
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, DataNotFoundError, FormatError, TargetExistsError
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.resolve.manifests import (
    MANIFEST,
    PLAN,
    checked_json,
    checked_text,
    parse_manifest,
)
from headrace.io.paths import redact
from headrace.io.remote_files import below
from headrace.memory.budget import format_size
from headrace.packing.destination import Destination, destination_of, is_of_part
from headrace.packing.plan import Rows
from headrace.sorting import distinct

VERSION = 1
"""Of the files of a pack beside its parts."""
_MOST_PARTS = 1_000_000


@dataclass(frozen=True)
class PartsPlan:
    """The plan of a pack of several files.

    Attributes:
        kind, store: as `PackedInfo` has them.
        fingerprint: of the dataset.
        count: number of samples.
        edges: [parts + 1], the first sample of each part, and `count`.
        nbytes: [parts], bytes of the samples of each part as they are stored.
        options: what else decides the bytes, by name; under "versions" those of the libraries that
            do.
        classes: class names, or None.
        sources: [parts], a CRC of the names and sizes of the samples where they come from, by which
            a changed source is noticed; []: they are known by the fingerprint alone.
        version: of this layout.
    """

    kind: str
    store: str
    fingerprint: str
    count: int
    edges: list[int]
    nbytes: list[int]
    sources: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    version: int = VERSION

    @functools.cached_property
    def text(self) -> bytes:
        """The content of `plan.json`: the same for the same plan."""
        return checked_text(self.said)

    @property
    def said(self) -> dict[str, Any]:
        """The fields by name. (`asdict` would copy each number.)"""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the plan: 16 hexadecimal digits."""
        return hashlib.blake2b(self.text, digest_size=8).hexdigest()

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.nbytes)

    @property
    def rows(self) -> Rows | None:
        """What the samples of all parts have in common, if finding out requires reading them."""
        rows = self.options.get("rows")
        if rows is None:
            return None
        dtype = descr_to_dtype(rows["dtype"])
        return Rows(rows["store"], dtype, tuple(rows["shape"]), rows.get("values"))

    def name(self, part: int, ending: str = ".h5") -> str:
        """The name of the file of a part."""
        return f"part-{part:05d}-of-{self.parts:05d}{ending}"

    def sidecar_name(self, part: int) -> str:
        """The name of the sidecar of a part."""
        return self.name(part, ".json")


def edges_of(sizes: IntArray, shard_size: int) -> list[int]:
    """Cuts samples into parts of about `shard_size` bytes (at most one sample more), as equal as
    possible.

    Args:
        sizes: [n] int64, bytes of each sample.
        shard_size: bytes.

    Raises:
        ConfigError: there would be too many parts.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(sizes.sum())
    count = max(1, -(-total // shard_size))
    if count > _MOST_PARTS:
        raise ConfigError(
            f"shard_size={shard_size:,} cuts {format_size(total)} into {count:,} parts: use a "
            "larger shard_size"
        )
    wanted = np.arange(1, count) * (total / count)
    inner = np.searchsorted(ends, wanted, side="left") + 1
    edges = distinct(np.concatenate([[0], np.minimum(inner, len(sizes)), [len(sizes)]]))
    numbers: list[int] = edges.tolist()
    return numbers


def checks_of(names: PackedNames | None, sizes: IntArray, edges: list[int]) -> list[int]:
    """Computes `PartsPlan.sources` from the names (None: there are none) and sizes of samples ([n]
    bytes).
    """
    texts = (b"%d " % size for size in sizes.tolist())
    if names is not None:
        texts = (b"%s%s " % pair for pair in zip(texts, names, strict=True))
    checks = []
    for start, stop in itertools.pairwise(edges):
        crc = 0
        for text in itertools.islice(texts, stop - start):
            crc = zlib.crc32(text, crc)
        checks.append(crc)
    return checks


def read_plan(folder: Destination) -> PartsPlan | None:
    """The plan of a pack, or None if there is none.

    Raises:
        FormatError: it is damaged, of a later headrace, or no plan of headrace.
    """
    data = folder.read(PLAN)
    name = folder.shown_name(PLAN)
    if data is None:
        return None
    try:
        said = checked_json(data)
        if said.get("version") != VERSION:
            raise FormatError(
                f"{name} was written by another headrace (layout {said.get('version')}, this one "
                f"reads {VERSION})"
            )
        return PartsPlan(**said)
    except (ValueError, TypeError) as error:
        raise FormatError(
            f"{name} is damaged, or no plan of headrace ({error}): use another folder or, if it is "
            "a pack, remove it and pack again with overwrite=True (--overwrite), which keeps "
            "finished parts"
        ) from error


def freeze(folder: Destination, plan: PartsPlan, overwrite: bool) -> bool:
    """Writes the plan if there is none yet. True if it replaces another one.

    Raises:
        TargetExistsError: there is another one, and it may not be replaced; the message shows how
            they differ.
        WriteError, AccessError: it can't be written.
    """
    there = read_plan(folder)
    replaces = there is not None and there.digest != plan.digest
    if there is None or (overwrite and replaces):
        # another process made a plan at the same moment
        with contextlib.suppress(TargetExistsError):
            folder.write(PLAN, plan.text, overwrite)
        there = read_plan(folder)
    check_same(folder, there, plan)
    return replaces


def check_same(folder: Destination, there: PartsPlan | None, plan: PartsPlan) -> None:
    """Raises a TargetExistsError if the existing plan is another one; the message shows the
    differences.
    """
    if there is None or there.digest != plan.digest:
        how = "" if there is None else f" ({differences(there, plan)})"
        raise TargetExistsError(
            f"{folder.shown} holds the plan of another pack{how}: pack to another folder, or pass "
            "overwrite=True (--overwrite) to plan anew"
        )


def differences(there: PartsPlan, now: PartsPlan) -> str:
    """The differences of two plans, for a message."""
    before = _flat(there)
    after = _flat(now)
    said = []
    for name in dict.fromkeys([*before, *after]):
        one = before.get(name)
        other = after.get(name)
        if one == other:
            continue
        if isinstance(one, list) or len(f"{one}{other}") >= 80:
            said.append(f"other {name}")
        else:
            said.append(f"{name}: {one} there, {other} now")
    return "; ".join(said[:4]) or "another layout"


def _flat(plan: PartsPlan) -> dict[str, Any]:
    """The fields of a plan by name, the most telling ones first."""
    said = plan.said
    options = said.pop("options")
    return {**options, **options.get("versions", {}), **said}


Damage = tuple[int, str, str]
"""``(index, location, error)`` of a sample that is not what was packed; -1: of a file."""
_LISTED = 1000
_THREADS = 32


@dataclass(frozen=True)
class Sidecar:
    """The file beside a finished part that describes it.

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

    @property
    def text(self) -> bytes:
        """The content of the file."""
        return checked_text(asdict(self))

    def entry(self, plan: PartsPlan) -> dict[str, Any]:
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


def _read_sidecar(folder: Destination, plan: PartsPlan, part: int) -> Sidecar | None:
    """The sidecar of a part, or None if there is no readable one of this plan."""
    data = folder.read(plan.sidecar_name(part)) or b""
    try:
        sidecar = Sidecar(**checked_json(data))
    except (ValueError, TypeError):
        return None
    is_of_plan = (sidecar.plan, sidecar.part) == (plan.digest, part)
    return sidecar if is_of_plan and sidecar.text == data else None


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
    """The manifest of a pack, or None if there is none.

    Raises:
        FormatError: it is damaged.
    """
    data = folder.read(MANIFEST)
    return None if data is None else parse_manifest(data, folder.shown_name(MANIFEST))


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
    """`join` for a pack whose parts are all finished, with these sidecars."""
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
    folder.write(MANIFEST, checked_text(said))
    return manifest_of(folder.path)


def manifest_of(folder: Path | str) -> Path | str:
    """The path or URL of the manifest in a folder."""
    return folder / MANIFEST if isinstance(folder, Path) else below(folder, MANIFEST)


def remove_other(folder: Destination, plan: PartsPlan) -> None:
    """Removes the parts and sidecars of other plans."""
    parts = range(plan.parts)
    ours = {*map(plan.sidecar_name, parts), *map(plan.name, parts)}
    for name in folder.sizes():
        if is_of_part(name) and name not in ours:
            folder.remove(name)


def refuse_foreign(folder: Destination) -> None:
    """Raises a TargetExistsError if a pack into a folder without a plan would replace or remove
    files.
    """
    replaced = [name for name in folder.sizes() if name == MANIFEST or is_of_part(name)]
    if replaced and folder.read(PLAN) is None:
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
