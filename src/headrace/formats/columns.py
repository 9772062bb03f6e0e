"""An opened container: rows of named columns."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.formats.source import Description, Source


class Columns(ABC):
    """An opened container: rows of named columns.

    It is opened in the parent process; its sources reach workers by fork or pickle.
    """

    names: Sequence[str]
    """Names of the columns, in order."""
    decoders: Mapping[str, str] = {}
    """For columns of encoded bytes, by name: the extension of a file with these bytes, such as
    "jpg", "json" or "txt", which selects the decoder.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def column(self, name: str) -> Source:
        """The values of one column; a `RowSource` if they are arrays of one shape and dtype."""

    def rows(self, names: Sequence[str]) -> Source:
        """Several columns, read together: a record is a dict of the values of a row."""
        return _Rows({name: self.column(name) for name in names})


class _Rows(Source):
    """Columns that are read one after the other."""

    def __init__(self, columns: Mapping[str, Source]) -> None:
        self._columns = dict(columns)
        self._first = next(iter(self._columns.values()))
        self.thread_safe = all(column.thread_safe for column in self._columns.values())

    def __len__(self) -> int:
        return len(self._first)

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        read = [column.read(indices) for column in self._columns.values()]
        return [dict(zip(self._columns, values, strict=True)) for values in zip(*read, strict=True)]

    def describe(self) -> Description:
        found = Description()
        for name, column in self._columns.items():
            described = column.describe()
            found.columns += [replace(part, name=name) for part in described.columns]
            found.stored += described.stored
        return found

    def fingerprint(self) -> str:
        said = [f"{name}:{column.fingerprint()}" for name, column in self._columns.items()]
        return hashlib.blake2b("\0".join(said).encode(), digest_size=16).hexdigest()

    def blocks(self) -> Any:
        return self._first.blocks()

    def location(self, index: int) -> str:
        return self._first.location(index)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()
