"""Tokenises all texts once, for samples that are parts of them.

The tokens are one long array: cached in `cache_dir`, where the tokenizer can be identified; else in
memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.display import progress_bar
from headrace.errors import BudgetError, SampleError
from headrace.io.array_file import ArrayFile, Unkept
from headrace.io.single_flight import found_or_built
from headrace.memory.budget import MemoryBudget, format_size
from headrace.storage.text.line_index import Arrays, HeldArrays
from headrace.tokenizer import dtype_for

_log = logging.getLogger(__name__)

_VERSION = 1
_PATIENCE_S = 60.0  # for another process that makes the same tokens, while it writes none
_TOGETHER = 256  # texts that are tokenised at a time


def way_fingerprint(identity: str | None, end_token: int | None) -> str:
    """Of the way that texts become tokens: a tokenizer, by what it is known by, and what ends a
    document; "" where it isn't known.
    """
    return (
        ""
        if identity is None
        else hashlib.blake2b(f"{identity}|{end_token}".encode(), digest_size=8).hexdigest()
    )


class Tokenising:
    """All texts of a source as tokens.

    Args:
        read: gives the tokens of some documents, by their numbers, or a SampleError for each that
            can't be read.
        count: number of documents.
        about: what tells these texts, and how they are read, from others (JSON values); None:
            nobody can say.
        tokenizer, identity: what makes them, and what that is known by; None: it can't be known
            again.
        end_token: an id that is put behind each document; None: none.
        progress: show a progress bar; None: only on a terminal.
    """

    def __init__(
        self,
        read: Any,
        count: int,
        about: Any,
        tokenizer: Any,
        identity: str | None,
        end_token: int | None,
        progress: bool | None,
    ) -> None:
        self._read, self._count, self._end, self._progress = read, count, end_token, progress
        self._edges = np.zeros(count + 1, np.int64)
        self._least = self._most = 0
        self._left_out: list[int] = []
        self._tokenizer, self._way = tokenizer, way_fingerprint(identity, end_token)
        self._about = (
            None
            if identity is None or about is None
            else {"version": _VERSION, "of": about, "tokenizer": identity, "end": end_token}
        )

    @property
    def fingerprint(self) -> str:
        """Of the way that texts become tokens; "" where the tokenizer can't be known again."""
        return self._way

    def tokens(self, folder: Path, budget: MemoryBudget) -> Arrays:
        """The tokens that are kept, or new ones.

        Raises:
            SampleError: a document can't be read, or tokenised.
            BudgetError: tokens that can't be kept don't fit the memory budget.
        """
        if self._about is None:
            name = type(self._tokenizer).__name__
            why = (
                "they have no version"
                if self._way
                else f"a {name} has no `fingerprint` (str) to know it by"
            )
            _log.info("the tokens of these texts are not kept: %s", why)
            return self._held(budget)
        kept = ArrayFile(str(folder), "tokens", self._about)
        with Unkept(str(folder), "tokens are", "they are held in memory"):
            return found_or_built(kept, _PATIENCE_S, lambda: self._written(kept))
        return self._held(budget)

    def _written(self, kept: ArrayFile) -> Arrays:
        with kept.writing("<i4") as writer:
            for tokens in self._all():
                writer.write(tokens)
            if dtype_for(self._least, self._most) == "uint16":
                writer.narrow("<u2")
            writer.short([self._edges, np.array(self._left_out, np.int64)])
        return kept.open()

    def _held(self, budget: MemoryBudget) -> Arrays:
        pieces: list[npt.NDArray[np.int32]] = []
        reserved = budget.reserve(self._edges.nbytes, "tokens")
        try:
            for tokens in self._all():
                pieces.append(tokens)
                reserved.resize(self._edges.nbytes + 4 * int(self._edges.max()))
        except BudgetError as error:
            reserved.close()
            remedy = (
                "give the tokenizer a `fingerprint` (str), so that they can be kept on disk, or "
                "raise max_memory_usage"
            )
            raise BudgetError(
                f"the tokens of {self._count:,} documents don't fit memory: {remedy}. {error}"
            ) from None
        whole, at = np.empty(int(self._edges[-1]), dtype_for(self._least, self._most)), 0
        for number, tokens in enumerate(pieces):
            whole[at : at + len(tokens)] = tokens
            pieces[number], at = tokens[:0].copy(), at + len(tokens)
        reserved.resize(self._edges.nbytes + whole.nbytes)
        _log.info("%s of tokens are held in memory", format_size(whole.nbytes))
        return HeldArrays(whole, [self._edges, np.array(self._left_out, np.int64)], reserved)

    def _all(self) -> Iterator[npt.NDArray[np.int32]]:
        """The tokens, a piece at a time; notes where documents begin, and the largest id."""
        end = np.empty(0, np.int32) if self._end is None else np.array([self._end], np.int32)
        self._least, self._most, self._left_out = 0, 0, []
        is_short = self._count < _TOGETHER
        with progress_bar(
            self._progress, is_short=is_short, total=self._count, desc="tokenising", unit="document"
        ) as bar:
            for start in range(0, self._count, _TOGETHER):
                found: Sequence[Any] = self._read(range(start, min(start + _TOGETHER, self._count)))
                pieces: list[npt.NDArray[np.int32]] = []
                for number, ids in enumerate(found, start):
                    if isinstance(ids, SampleError):
                        self._left_out.append(number)
                        ids = np.empty(0, np.int32)
                    elif end.size:
                        ids = np.concatenate([ids.astype(np.int32), end])
                    self._edges[number + 1] = self._edges[number] + len(ids)
                    pieces.append(ids.astype(np.int32, copy=False))
                together = np.concatenate(pieces)
                self._least, self._most = (
                    min(self._least, int(together.min(initial=0))),
                    max(self._most, int(together.max(initial=0))),
                )
                bar.update(len(found))
                yield together
