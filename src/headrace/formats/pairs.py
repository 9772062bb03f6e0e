"""Samples that are two files each, such as an image and its mask."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.dtypes import IntArray
from headrace.formats.describe import Description
from headrace.formats.files import FilesSource
from headrace.formats.source import Source


class PairedSource(Source):
    """Files, and for each another one that belongs to it: a record is the bytes of both.

    Args:
        files: one a sample.
        others: those that belong to them, perhaps on another server.
        numbers: [n] int64, for each sample the number of its file among `others`.
    """

    def __init__(self, files: FilesSource, others: FilesSource, numbers: IntArray) -> None:
        self.files = files
        self.others = others
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """The bytes of both files of each sample."""
        others = self.others.read(self.numbers[np.asarray(indices, np.int64)].tolist())
        return list(zip(self.files.read(indices), others, strict=True))

    def describe(self) -> Description:
        files = self.files.describe()
        others = self.others.describe()
        files.columns.append(replace(others.columns[0], name="beside"))
        files.files += others.files
        files.stored += others.stored
        return files

    def take_counts(self) -> Counter[str]:
        return self.files.take_counts() + self.others.take_counts()

    def fingerprint(self) -> str:
        """A hash of the names of both."""
        both = f"{self.files.fingerprint()}\0{self.others.fingerprint()}"
        return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        return f"{self.files.location(index)} with {self.others.location(int(self.numbers[index]))}"

    def other_path(self, index: int) -> str:
        """The path of the file that belongs to a sample's."""
        return os.fsdecode(self.others.listing.path(int(self.numbers[index])))

    def sizes(self, indices: IntArray | None = None) -> IntArray:
        """Bytes of both files, of all samples or of some ([n] int64)."""
        if indices is None:
            return self.files.sizes() + self.others.sizes()[self.numbers]
        return self.files.sizes(indices) + self.others.sizes(self.numbers[indices])
