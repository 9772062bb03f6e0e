"""Plans a pack without writing: what it would hold, the room it needs and the time it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.dataset import BaseDataset
from headrace.display import Lines
from headrace.errors import ConfigError
from headrace.io.paths import redact
from headrace.memory.budget import format_size
from headrace.packing.destination import Destination, room_of
from headrace.packing.formats.layout import reason_for
from headrace.packing.jobs.planning import plan_parts
from headrace.packing.jobs.running import parts_at_once, parts_of
from headrace.packing.options import StoreOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.part import PartFile
from headrace.packing.parts import PartsPlan, check_same, read_plan
from headrace.packing.status import finished_in, refuse_foreign

_ONE_PART = 1 << 62  # bytes


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
        part_nbytes: bytes of the smallest and the largest part, about.
        nbytes: of all parts together, about: re-encoded and compressed samples and tokens are known
            when they are made.
        layout: how the samples lie in a file, and why so.
        left: parts that this call would pack: those of its share that are not finished.
        needed: bytes of room that these need, about.
        room: the folder that needs it, and the bytes that are free there; None: nobody knows.
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
    needed: int
    room: tuple[str, int] | None

    def __str__(self) -> str:
        counts = _range(*(f"{count:,}" for count in self.part_samples))
        numbers = f"{counts} samples, {_range(*map(format_size, self.part_nbytes))} each"
        lines = [
            f"{redact(self.path)}: {self.samples:,} samples, about {format_size(self.nbytes)}, "
            f"store {self.store}",
            f"parts:  {self.parts:,}, {numbers}; {self.left:,} to be packed"
            if self.parts > 1
            else "parts:  one",
            f"layout: {self.layout}",
            f"room:   about {format_size(self.needed)} needed" + self._free(),
            "nothing was written",
        ]
        return Lines("\n".join(lines))

    def _free(self) -> str:
        if self.room is None:
            return ""
        folder, free = self.room
        return f", {format_size(free)} free in {folder}" + (
            ": too little" if free < self.needed else ""
        )


def plan_file_pack(
    dataset: BaseDataset,
    dst: str | os.PathLike[Any],
    options: StoreOptions,
    workers: int,
    overwrite: bool,
    progress: bool | None,
) -> PackPlan:
    """What `pack` would do without `shard_size`.

    Raises:
        As `pack`: what it would find wrong before it writes.
    """
    target = PartFile(dst, overwrite).target
    refuse_own_source(dataset, target)
    plan = _planned(dataset, None, _ONE_PART, options, workers, progress)
    nbytes = plan.nbytes
    # all are encoded before the first is written
    needed = sum(nbytes) * (2 if options.is_jpeg else 1)
    return _pack_plan(
        Path(target),
        plan,
        options,
        nbytes,
        1,
        needed,
        room_of(os.path.dirname(target)),
    )


def plan_folder_pack(
    dataset: BaseDataset,
    folder: Destination,
    *,
    shard_size: int,
    options: StoreOptions,
    share: range | tuple[int, int] | None,
    workers: int,
    processes: int,
    overwrite: bool,
    progress: bool | None,
) -> PackPlan:
    """What `pack` would do with `shard_size`. Arguments: as `pack_parts` has them.

    Raises:
        As `pack`: what it would find wrong before it writes.
    """
    refuse_own_source(dataset, folder.path)
    folder.check()
    if not overwrite:
        refuse_foreign(folder)
    plan = _planned(dataset, folder, shard_size, options, workers, progress)
    there, done = read_plan(folder), list[int]()
    if there is not None and (there.digest == plan.digest or not overwrite):
        check_same(folder, there, plan)
        done = finished_in(folder, plan)[0].done
    left = sorted(set(parts_of(share, plan.parts)) - set(done))
    nbytes = plan.nbytes
    at_once = parts_at_once(dataset, plan, workers, processes, len(left))
    needed = (
        sum(nbytes[part] for part in left)
        if isinstance(folder.path, Path)
        else at_once * max(nbytes)
    )
    # what is re-encoded lies in a file of its own first
    needed += at_once * max(nbytes) if options.is_jpeg else 0
    return _pack_plan(
        folder.path,
        plan,
        options,
        nbytes,
        len(left),
        needed,
        folder.room(),
    )


def _planned(
    dataset: BaseDataset,
    folder: Destination | None,
    shard_size: int,
    options: StoreOptions,
    workers: int,
    progress: bool | None,
) -> PartsPlan:
    if not len(dataset):
        raise ConfigError("a dataset without samples: there is nothing to plan")
    return plan_parts(dataset, folder, shard_size, options, workers, progress)[0]


def _pack_plan(
    path: Path | str,
    plan: PartsPlan,
    options: StoreOptions,
    nbytes: list[int],
    left: int,
    needed: int,
    room: tuple[str, int] | None,
) -> PackPlan:
    counts = np.diff(plan.edges)
    compression, chunks = plan.options.get("compression"), plan.options.get("chunks")
    layout = reason_for(plan.store, compression, chunks, plan.nbytes[0] // int(counts[0]), options)
    return PackPlan(
        path,
        plan.kind,
        plan.store,
        plan.count,
        plan.parts,
        (int(counts.min()), int(counts.max())),
        (min(nbytes), max(nbytes)),
        sum(nbytes),
        layout,
        left,
        needed,
        room,
    )


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"
