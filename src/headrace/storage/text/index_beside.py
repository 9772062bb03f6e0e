"""Line indices beside remote texts: where lines begin, although nobody here has gone through the
text before.

From what lies beside it (NOTE [ life of an index ] in `headrace.io.index`): the distances from each
line to the next, in as few bytes as the longest takes. Lines of .txt and .md, records of .csv,
.tsv, .json and .jsonl, of UTF-8, as they are read where nothing else is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import warn
from headrace.io.array_file import Arrays, UntrustedError
from headrace.io.index import IndexKind, from_bytes
from headrace.io.paths import redact
from headrace.io.remote_files import RemoteFiles

_WIDTHS = ("<u1", "<u2", "<u4", "<i8")
_TOGETHER = 1 << 18  # places that are passed on at a time


class LineIndex:
    """Where the lines of one text begin.

    Args:
        arrays: of the index.

    Attributes:
        unit: of what: "line" or "record".
        header: names of the fields, of a CSV or TSV file.
        count: lines, blank ones too.
        blank: [n] numbers of lines that are no records.

    Raises:
        UntrustedError: they are something else.
    """

    def __init__(self, arrays: Arrays) -> None:
        head, distances, blank = arrays
        try:
            said = json.loads(head.tobytes())
            self.unit, self.header, self._begin = (
                str(said["unit"]),
                [str(name) for name in said["header"]],
                int(said["begin"]),
            )
            self._distances = distances.view(_WIDTHS[_WIDTHS.index(said["width"])])
        except (ValueError, TypeError, KeyError) as error:
            raise UntrustedError("it is damaged") from error
        self.count: int = len(self._distances)
        self.blank = blank.astype(np.int64, copy=False)

    def places(self) -> Iterator[IntArray]:
        """Where lines begin, and the last one ends; in pieces."""
        at = self._begin
        yield np.array([at], np.int64)
        for start in range(0, self.count, _TOGETHER):
            places = at + np.cumsum(self._distances[start : start + _TOGETHER], dtype=np.int64)
            at = int(places[-1])
            yield places


def arrays_of(
    unit: str, header: list[str], begin: int, distances: IntArray, blank: IntArray
) -> Arrays:
    """The arrays of an index.

    Args:
        unit, header, blank: see `LineIndex`.
        begin: where the first line begins.
        distances: from each line to the next, and from the last one to its end.
    """
    width = _WIDTHS[
        int(
            np.searchsorted([1 << 8, 1 << 16, 1 << 32], int(distances.max(initial=0)), side="right")
        )
    ]
    said = {"unit": unit, "header": header, "begin": begin, "width": width}
    return [
        np.frombuffer(json.dumps(said).encode(), np.uint8),
        distances.astype(width).view(np.uint8),
        blank,
    ]


def index_beside(files: RemoteFiles, url: str) -> LineIndex | None:
    """The index that lies beside a text, if there is one that can be used."""
    data = files.beside(url)
    if data is None:
        return None
    try:
        return LineIndex(from_bytes(data, KIND, files.version(url).size))
    except UntrustedError as error:
        warn(
            f"{redact(url)}: the index beside it is not used: {error}; write it again with "
            "headrace.write_index"
        )
        return None


def _not_made_here(*_: Any) -> Arrays:
    raise NotImplementedError


KIND = IndexKind("text", 1, ("u1", "u1", "<i8"), _not_made_here)
"""Of one text; `headrace.storage.text.index` makes it."""
