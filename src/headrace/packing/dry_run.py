"""What `pack` would do, without writing: parts and layout."""

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
from headrace.packing.destination import Destination, destination_of
from headrace.packing.jobs import plan_parts
from headrace.packing.options import PackOptions
from headrace.packing.own_source import refuse_own_source
from headrace.packing.part import PartFile
from headrace.packing.parts import check_same, read_plan
from headrace.packing.status import finished_in, refuse_foreign


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
