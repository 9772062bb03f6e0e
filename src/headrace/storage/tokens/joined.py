"""Tokens of several packed files as those of one, each file's behind those of the file before
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.packed import PackedInfo
from headrace.storage.source import PackPart, fingerprint_of_files
from headrace.storage.tokens.packed import PackedTokens
from headrace.storage.tokens.source import Tokens


class JoinedTokens(Tokens):
    """Tokens of several packed files, local or of one server. Windows are parts of documents, and
    so of one file; blocks go on from file to file. Where each document begins is copied to memory
    that workers share, 8 bytes a document.

    Args:
        each: the files, one at least.

    Attributes: those of `Tokens`, and:
        info: what the files say of themselves, as if they were one.
        targets: one for each document, or None.
        names: of the documents, or None.

    Raises:
        FormatError: the files were packed in different ways.
    """

    def __init__(self, each: Sequence[PackedTokens]) -> None:
        self._each, first = list(each), each[0]
        for tokens in self._each[1:]:
            _check_alike(first, tokens)
        self.files, self.made_with = first.files, first.made_with
        self.shown: str = f"{first.shown} and {len(each) - 1:,} more"
        self.dtype = np.result_type(*(tokens.dtype for tokens in each))
        self._starts: IntArray = np.cumsum([0, *(tokens.count for tokens in each)])
        self._documents: IntArray = np.cumsum([0, *(tokens.info.count for tokens in each)])
        self.count: int = int(self._starts[-1])
        edges = [
            tokens.short[0][:-1] + start for tokens, start in zip(each, self._starts, strict=False)
        ]
        self._edges = SharedArray(np.concatenate([*edges, self._starts[-1:]]))
        self.targets: npt.NDArray[Any] | None = None
        if first.targets is not None:
            self.targets = np.concatenate(
                [tokens.targets for tokens in each if tokens.targets is not None]
            )
        self.names: PackedNames | None = PackedNames.joined([tokens.names for tokens in each])
        self.info: PackedInfo = replace(
            first.info,
            count=int(self._documents[-1]),
            fingerprint=self._fingerprint(),
            checksums={},
            part=None,
        )

    def _fingerprint(self) -> str:
        infos = [tokens.info for tokens in self._each]
        parts = [None if info.part is None else PackPart(*info.part) for info in infos]
        return fingerprint_of_files(
            parts, int(self._documents[-1]), [info.fingerprint for info in infos]
        )

    # -- tokens

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        return [self._edges.array]

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        of, file, starts, stops = self._pieces(begins, ends)
        parts: list[npt.NDArray[Any]] = [np.empty(0, self.dtype)] * len(begins)
        for number, piece in zip(of.tolist(), self._read(file, starts, stops), strict=True):
            parts[number] = (
                np.concatenate([parts[number], piece])
                if len(parts[number])
                else piece.astype(self.dtype, copy=False)
            )
        return parts

    def _read(self, file: IntArray, starts: IntArray, stops: IntArray) -> list[npt.NDArray[Any]]:
        """Tokens of files, in the order of the files: of a server all at once."""
        groups = list(self._by_file(file, starts, stops))
        if not self.files.is_remote:
            return [part for tokens, *ends in groups for part in tokens.parts(*ends)]
        ranges = ByteRanges.joined([tokens.byte_ranges(*ends) for tokens, *ends in groups])
        dtypes = [tokens.dtype for tokens, begins, _ in groups for _ in begins]
        # copies: what was fetched with them need not be held
        return [
            np.frombuffer(data or b"", dtype).copy()
            for data, dtype in zip(self.files.read(ranges), dtypes, strict=True)
        ]

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        _, file, starts, stops = self._pieces(begins, ends)
        return ByteRanges.joined(
            [tokens.byte_ranges(*of_it) for tokens, *of_it in self._by_file(file, starts, stops)]
        )

    def _pieces(
        self, begins: IntArray, ends: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Ranges of tokens, cut where files end: for each piece, in the order of the files, the
        number of its range, its file, its begin and its end there. Empty ones have none.
        """
        first = np.searchsorted(self._starts, begins, side="right") - 1
        last = np.searchsorted(self._starts, ends, side="left") - 1
        counts = np.where(ends > begins, last - first + 1, 0)
        of = np.repeat(np.arange(len(begins)), counts)
        file = first[of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
        starts = np.maximum(begins[of], self._starts[file]) - self._starts[file]
        stops = np.minimum(ends[of], self._starts[file + 1]) - self._starts[file]
        order = np.argsort(file, kind="stable")
        order = order[(stops > starts)[order]]
        return of[order], file[order], starts[order], stops[order]

    def _by_file(
        self, file: IntArray, starts: IntArray, stops: IntArray
    ) -> Iterator[tuple[PackedTokens, IntArray, IntArray]]:
        edges = [*(np.flatnonzero(np.diff(file, prepend=-1))).tolist(), len(file)]
        for a, b in itertools.pairwise(edges):
            yield self._each[int(file[a])], starts[a:b], stops[a:b]

    # -- documents

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        number = int(np.searchsorted(self._documents, document, side="right")) - 1
        return self._each[number].location(document - int(self._documents[number]))


PackedTexts: TypeAlias = PackedTokens | JoinedTokens
"""Tokens of one packed file, or of several."""


def packed_texts_of(each: Sequence[PackedTokens]) -> PackedTexts:
    """The tokens of some files, as one.

    Raises:
        FormatError: the files were packed in different ways.
    """
    return each[0] if len(each) == 1 else JoinedTokens(each)


def _check_alike(first: PackedTokens, other: PackedTokens) -> None:
    """Raises a FormatError where two files can't be one dataset."""
    pairs = {
        name: (first.info.text.get(name), other.info.text.get(name))
        for name in ("tokenizer", "class", "end_token", "unit")
    }
    pairs["classes"] = (first.info.classes, other.info.classes)
    pairs["targets"] = tuple(  # type: ignore[assignment]
        None if column is None else f"{column.dtype} {list(column.shape[1:])}"
        for column in (first.targets, other.targets)
    )
    different = [name for name, (one, another) in pairs.items() if one != another]
    if different:
        raise FormatError(
            f"{redact(other.path)} and {redact(first.path)} can't be one dataset: they were "
            f"packed with other {', '.join(different)}: pack "
            "them from one dataset"
        )
