"""Is a packed file whole?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from headrace.errors import FormatError, HeadraceError
from headrace.storage.hdf5 import HDF5Source
from headrace.storage.packed import TARGETS
from headrace.storage.scan import redact


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What `verify` found.

    Attributes:
        path: the file.
        samples: number of samples read.
        bad: ``(index, location, error)`` of each sample that is not what was packed; empty for a sound file.
    """

    path: Path
    samples: int
    bad: list[tuple[int, str, str]]

    @property
    def ok(self) -> bool:
        """Is every sample what was packed?"""
        return not self.bad


def verify(path: str | os.PathLike[Any], progress: bool | None = None) -> VerifyResult:
    """Read all of a packed file, and compare every sample, the offsets, names and targets with their checksums.

    Args:
        path: a file that `pack` wrote.
        progress: show a progress bar; None: only on a terminal.

    Returns:
        The samples that are damaged, one by one.

    Raises:
        DataNotFoundError, AccessError: there is no such file; this user may not read it.
        FormatError: no packed file, a truncated one, or one in which more is damaged than samples.
    """
    source = HDF5Source(path)  # checks what lies beside the samples
    try:
        if source.info is None or not source.has_checksums:
            raise FormatError(f"{redact(source.path)} was not packed by headrace: there are no checksums to compare it with")
        if TARGETS in source.info.checksums:
            source.column(TARGETS)
        bad: list[tuple[int, str, str]] = []
        hidden = None if progress is None else not progress
        for index in tqdm(range(len(source)), desc="verifying", unit="sample", disable=hidden, leave=False):
            try:
                source.read([index])
            except (HeadraceError, OSError) as error:
                bad.append((index, source.location(index), str(error)))
        return VerifyResult(Path(source.path), len(source), bad)
    finally:
        source.close()
