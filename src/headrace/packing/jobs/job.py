"""Packs single parts of a plan, here or in any process.

A part is written under a temporary name, read back and renamed, and its sidecar follows: who finds
the sidecar, finds the part whole. Packed twice, it has the same bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.core.dataset import BaseDataset
from headrace.datasets.text.text import TextDataset
from headrace.dtypes import IntArray
from headrace.packing.destination import Destination
from headrace.packing.options import StoreOptions
from headrace.packing.part import PartFile
from headrace.packing.parts import PartsPlan, check_unchanged, checks_of
from headrace.packing.plan import Plan, is_packed_as_stored, names_of
from headrace.packing.run import plan_file, read_back, write_file
from headrace.packing.status import Sidecar, sidecar_text
from headrace.packing.texts import documents_of, is_of_texts, packed_part
from headrace.storage.source import PackPart


@dataclass
class PackJob:
    """Packs single parts; a pickle of it can do so in any process that reaches the source and the
    destination.

    Attributes:
        dataset: what is packed.
        folder: where to.
        plan: of all parts.
        workers: threads that read and decode.
        read_sizes: [n] int64, bytes of each sample where it comes from, in the process that made
            the plan; None: asked for, and compared with the plan, part by part.
    """

    dataset: BaseDataset
    folder: Destination
    plan: PartsPlan
    workers: int
    read_sizes: IntArray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "read_sizes": None}

    def pack(self, part: int, is_cancelled: Callable[[], bool] = lambda: False) -> int:
        """Packs a part, whatever is there of it; returns how many samples it has.

        Args:
            part: its number.
            is_cancelled: asked before each step of writing; True: it ends there.

        Raises:
            FileChangedError: a sample is not as it was when the plan was made.
            SampleError, WriteError, AccessError: see `pack`.
            CancelledError: `is_cancelled` said so.
        """
        try:
            return self._pack(part, is_cancelled)
        except Exception as error:
            error.add_note(f"headrace: while packing {self.plan.name(part)}")
            raise

    def _pack(self, part: int, is_cancelled: Callable[[], bool]) -> int:
        plan = self.plan
        write = (
            self._texts(part, self.dataset) if is_of_texts(self.dataset) else self._samples(part)
        )
        self.folder.remove(plan.sidecar_name(part))
        with self.folder.part(plan.name(part)) as file:
            file.is_cancelled = is_cancelled
            written, left_out = write(
                file, whole=PackPart(part, plan.parts, plan.fingerprint, plan.count)
            )
            nbytes, crc = read_back(file, self.workers, False)
        sidecar = Sidecar(plan.digest, part, written.info.count, nbytes, crc, left_out)
        self.folder.write(plan.sidecar_name(part), sidecar_text(sidecar))
        return sidecar.samples

    def _samples(self, part: int) -> _Write:
        """What writes a part of images or arrays."""
        plan = self.plan
        start, stop = plan.edges[part : part + 2]
        view, options, planned = (
            self.dataset.subset(np.arange(start, stop)),
            plan.store_options,
            None,
        )
        if self.read_sizes is not None:
            planned = plan_file(
                view, options, self.workers, False, plan.rows, self.read_sizes[start:stop]
            )
        elif is_packed_as_stored(view):
            planned = plan_file(view, options, self.workers, False, plan.rows)
            check_unchanged(
                self.folder,
                plan,
                start,
                checks_of(names_of(view), planned.plan.read_sizes),
                self.dataset.source_of,
            )
        return functools.partial(
            write_file,
            dataset=view,
            options=options,
            workers=self.workers,
            progress=False,
            rows=plan.rows,
            planned=planned,
        )

    def _texts(self, part: int, dataset: TextDataset) -> _Write:
        """What writes a part of texts."""
        plan, everything = self.plan, documents_of(dataset, self.plan.options["end_token"])
        start, stop = plan.edges[part : part + 2]
        documents = everything.within(range(start, stop))
        if documents.are_files:
            check_unchanged(
                self.folder,
                plan,
                start,
                checks_of(documents.names, documents.sizes()),
                everything.dataset.source_of,
            )

        def write(file: PartFile, whole: PackPart) -> tuple[Plan, list[str]]:
            with file.explained():
                planned = packed_part(documents, os.path.dirname(file.path))
            return write_file(
                file, dataset, StoreOptions(), self.workers, False, whole=whole, planned=planned
            )

        return write


class _Write(Protocol):
    """Writes a part into a file; gives what it holds, and what is wrong with the samples that
    were left out.
    """

    def __call__(self, file: PartFile, /, *, whole: PackPart) -> tuple[Plan, list[str]]: ...
