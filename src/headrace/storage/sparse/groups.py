"""Files of groups and arrays, as AnnData and replay buffers lay them out, while a dataset is
opened: HDF5 or Zarr alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError, MissingNameError
from headrace.io.nearest_names import listed_names
from headrace.storage.arrays.reader import ArrayReader, OpenArrays
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.arrays.spans import SpanReader


class GroupFile(ABC):
    """An HDF5 file or a Zarr store. Names are paths in it, without slashes at their ends; "" is its
    root.

    Attributes:
        path: of the file, as messages show it.
        opened: what each process has open of it.
        reader_name: the dataset of headrace that reads dense arrays of such files.
    """

    path: str
    opened: OpenArrays[Any]
    reader_name: str

    @abstractmethod
    def is_group(self, name: str) -> bool: ...

    @abstractmethod
    def is_array(self, name: str) -> bool: ...

    @abstractmethod
    def attribute(self, name: str, key: str) -> Any:
        """An attribute of a group or array: str, a number, an array or a list of these; None:
        there is none.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """All groups and arrays, for messages; [] where the server does not list them."""

    @abstractmethod
    def top_names(self) -> list[str]:
        """Those that lie in the root."""

    @abstractmethod
    def described(self, name: str) -> str:
        """Dtype and shape of an array, for messages."""

    @abstractmethod
    def spans(self, name: str) -> tuple[SpanReader, int | None]:
        """What reads an array of numbers, and how many of them a chunk has; None: there are no
        chunks.

        Raises:
            FormatError: it holds something else, or is damaged.
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array; () of a single value."""

    @abstractmethod
    def rows(self, name: str) -> ArrayReader | LibraryRows:
        """What reads the rows of an array.

        Raises:
            FormatError: it has none, or is damaged.
        """

    @abstractmethod
    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array; strings as objects that are str.

        Raises:
            FormatError: it is damaged, or its strings are no UTF-8.
        """

    def child(self, group: str, name: str) -> str:
        """The path of what lies in a group."""
        return f"{group}/{name}" if group else name

    def need(self, group: str, *names: str) -> None:
        """Raises a FormatError where a group lacks one of some arrays."""
        missing = [name for name in names if not self.is_array(self.child(group, name))]
        if missing:
            raise FormatError(
                f"{self.path}: {shown(group)} has no {' and no '.join(map(repr, missing))}: the "
                "file is damaged, or cut short"
            )

    def missing(self, what: str, name: str, others: list[str]) -> MissingNameError:
        """The error of a name that is not there, which lists those that are."""
        return MissingNameError(
            f"{self.path} has no {what} {name!r}; it has: {listed_names(others, name, repr)}"
        )


def shown(name: str) -> str:
    """The name of a group in messages."""
    return repr(name or "/")


def as_text(values: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """Strings, of a fixed length or any, as objects that are str; other arrays as they are.

    Raises:
        FormatError: they are no UTF-8.
    """
    if values.dtype.kind not in "SUO":
        return values
    texts = np.empty(len(values), object)
    for row, value in enumerate(values.tolist()):
        try:
            texts[row] = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise FormatError(f"{where}, row {row}: a string is not UTF-8: {error}") from error
    return texts
