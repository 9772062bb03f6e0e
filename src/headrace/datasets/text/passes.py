"""Passes over all texts of a dataset: their tokens, which are packed, and cut into windows and
blocks; and the targets of records. Both are cached in `cache_dir` where texts and tokenizer can be
identified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.reader import SampleReader
from headrace.core.values import Access, Decoded, Records
from headrace.datasets.cells import is_rounded, parsed
from headrace.datasets.text.decoders import Texts
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import BudgetError, ConfigError, SampleError, warn
from headrace.formats.text.index import kept_or_held
from headrace.formats.text.source import LinesSource
from headrace.formats.tokens import Tokens
from headrace.io.array_file import ArrayFile, FileArrays, Unkept
from headrace.io.paths import cache_folder, composed
from headrace.memory.budget import MemoryBudget, format_size
from headrace.tokenizer import dtype_for

_log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""For another process that makes the same pass over all texts, while it writes nothing."""
_TOKENS_VERSION = 2
_TOGETHER = 256  # texts that are tokenised at a time
_TARGETS_VERSION = 5
_SHOWN_FROM = 100_000  # records from which on progress is shown
_MANY_CLASSES = 100  # that many, and of half of the records each its own, are hardly classes
_INT64 = range(-(1 << 63), 1 << 63)
_UNREAD = object()


def way_fingerprint(identity: str | None, end_token: int | None) -> str:
    """Of the way that texts become tokens: a tokenizer, by what it is known by, and what ends a
    document; "" where it isn't known.
    """
    if identity is None:
        return ""
    return hashlib.blake2b(f"{identity}|{end_token}".encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def reading_all(
    texts: Texts, reader: SampleReader
) -> Iterator[tuple[dict[str, Any] | None, Callable[[range], None]]]:
    """Inside, all texts are read in their order, of the version that they have now; remote lines
    are fetched ahead.

    Args:
        texts: of a dataset.
        reader: reads them.

    Yields:
        What tells these texts, and how they are read, from others (JSON values; None: nobody can
        say); and what is to be called before some are read, with their numbers.
    """
    source = texts.source
    options = texts.options
    with contextlib.ExitStack() as stack:
        expect: Callable[[range], None] = lambda _: None  # noqa: E731
        version = None
        if hasattr(source, "of_one_version"):  # not of columns of every container
            version = stack.enter_context(source.of_one_version())
        if isinstance(source, LinesSource) and source.is_remote:
            expect = stack.enter_context(source.in_order())
        about: dict[str, Any] | None = None
        if version is not None and not callable(options.text_field):
            about = {
                "of": version,
                "fingerprint": source.fingerprint(),
                "fields": [options.text_field, options.target_field, options.column],
                "encoding": [options.encoding, options.errors],
                "delimiter": options.delimiter,
                "skips": reader.on_error != "raise",
            }
        yield about, expect


def tokens_of(
    texts: Texts, reader: SampleReader, end_token: int | None, budget: MemoryBudget
) -> tuple[Tokens, str]:
    """All tokens of some documents, and the fingerprint of texts and of the way that they become
    tokens.

    Args:
        texts: the documents.
        reader: reads them.
        end_token: put behind each; None: nothing is.
        budget: for tokens that can't be kept on disk.

    Raises:
        SampleError: a document can't be read, or tokenised.
        BudgetError: the tokens can't be kept on disk, and don't fit the memory budget.
    """
    source = texts.source
    identity = texts.identity
    with reading_all(texts, reader) as (about, expect):
        every = _AllTokens(texts, reader, end_token, expect)
        arrays: FileArrays | None = None
        if about is None or identity is None:
            _log.info("the tokens of these texts are not kept: texts or tokenizer have no version")
        else:
            made_of = {"version": _TOKENS_VERSION, **about, "tokenizer": identity, "end": end_token}
            folder = str(cache_folder(texts.options.cache_dir))
            kept = ArrayFile(folder, "tokens", made_of)
            with Unkept(folder, "tokens are", "they are held in memory"):
                arrays = kept.found_or_built(PATIENCE_S, lambda: every.written(kept))
        if arrays is None:
            arrays = every.held(budget)
    left_out = arrays.short[1]
    if len(left_out):
        count = len(source)
        first = source.location(int(left_out[0]))
        if len(left_out) == count:
            raise SampleError(
                f"none of {count:,} documents can be read, or tokenised, so there is nothing to "
                f'train on; the first: {first}: with on_error="raise" the message says why'
            )
        warn(
            f"{len(left_out):,} of {count:,} documents can't be read, or tokenised, and are left "
            f"out; the first: {first}"
        )
    return Tokens(arrays), f"{source.fingerprint()}:{way_fingerprint(identity, end_token)}"


class _AllTokens:
    """The tokens of all documents, made some documents at a time.

    Args:
        texts: the documents.
        reader: reads them.
        end_token: an id that is put behind each document; None: none.
        expect: is told which ones are read next.
    """

    def __init__(
        self,
        texts: Texts,
        reader: SampleReader,
        end_token: int | None,
        expect: Callable[[range], None],
    ) -> None:
        self._documents = Decoded(Records(texts.source))
        self._access = Access(reader, texts.uncut())
        self._expect = expect
        self._progress = texts.options.progress
        self._end = np.array([] if end_token is None else [end_token], np.int32)
        self._edges = np.zeros(len(texts.source) + 1, np.int64)

    def written(self, kept: ArrayFile) -> FileArrays:
        """Writes the tokens into a file."""
        with kept.writing("<i4") as writer:
            for tokens in self:
                writer.write(tokens)
            if self._dtype == "uint16":
                writer.narrow("<u2")
            writer.short(self._short)
        return kept.open()

    def held(self, budget: MemoryBudget) -> FileArrays:
        """The tokens in memory."""
        pieces = deque[npt.NDArray[np.int32]]()
        nbytes = self._edges.nbytes
        reserved = budget.reserve(nbytes, "tokens")
        try:
            for tokens in self:
                pieces.append(tokens)
                nbytes += tokens.nbytes
                reserved.resize(nbytes)
        except BudgetError as error:
            reserved.close()
            raise BudgetError(
                f"the tokens of {len(self._edges) - 1:,} documents don't fit memory: give the "
                "tokenizer a `fingerprint` (str), so that they can be kept on disk, or raise "
                f"max_memory_usage. {error}"
            ) from None
        whole = np.empty(int(self._edges[-1]), self._dtype)
        position = 0
        while pieces:
            piece = pieces.popleft()
            whole[position : position + len(piece)] = piece
            position += len(piece)
        reserved.resize(self._edges.nbytes + whole.nbytes)
        _log.info("%s of tokens are held in memory", format_size(whole.nbytes))
        return FileArrays(whole, self._short, reserved=reserved)

    @property
    def _dtype(self) -> str:
        return dtype_for(self._least, self._most)

    @property
    def _short(self) -> list[npt.NDArray[np.int64]]:
        return [self._edges, np.array(self._left_out, np.int64)]

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """Notes where documents begin, and the least and largest id."""
        count = len(self._edges) - 1
        self._least = 0
        self._most = 0
        self._left_out: list[int] = []
        is_short = count < _TOGETHER
        with progress_bar(
            self._progress, is_short=is_short, total=count, desc="tokenising", unit="document"
        ) as bar:
            for start in range(0, count, _TOGETHER):
                some = range(start, min(start + _TOGETHER, count))
                self._expect(some)
                pieces = [np.empty(0, np.int32)]
                size = int(self._edges[start])
                documents = self._documents.read(list(some), self._access)
                for number, ids in zip(some, documents, strict=True):
                    if isinstance(ids, SampleError):
                        self._left_out.append(number)
                    else:
                        pieces += [ids, self._end]
                        size += len(ids) + len(self._end)
                    self._edges[number + 1] = size
                tokens = np.concatenate(pieces, dtype=np.int32, casting="unsafe")
                self._least = min(self._least, int(tokens.min(initial=0)))
                self._most = max(self._most, int(tokens.max(initial=0)))
                bar.update(len(some))
                yield tokens


# -- targets


class Targets(NamedTuple):
    """The targets of all records.

    Attributes:
        numbers: [n] int64 or float64: the numbers themselves, or those of classes; -1 or NaN of
            what can't be read. None: they are of several kinds, and stay as they are.
        classes: names of classes, sorted.
    """

    numbers: npt.NDArray[Any] | None
    classes: list[str]


def targets_of(texts: Texts, reader: SampleReader) -> Targets:
    """The targets of all records, cached on disk where the index of these is. Many classes are
    warned of.

    Raises:
        SampleError: a record can't be read, or has no text or target, and none may be left out.
        ConfigError: targets are numbers that no target can hold.
    """
    with reading_all(texts, reader) as (about, expect):
        cached = None
        if about is not None and texts.source.keeps_tables:
            folder = str(cache_folder(texts.options.cache_dir))
            cached = ArrayFile(folder, "records", {"version": _TARGETS_VERSION, **about})

        def make(take: Callable[[npt.NDArray[Any]], None]) -> list[npt.NDArray[Any]]:
            everything = np.arange(len(texts.source))
            values = read_targets(texts, reader, everything, expect)
            numbers, classes = _numbers_of(texts, values)
            dtype = None
            if numbers is not None:
                dtype = numbers.dtype.str
                take(numbers.view("<i8"))
            found = json.dumps({"dtype": dtype, "classes": classes}).encode()
            return [np.frombuffer(found, np.uint8)]

        arrays = kept_or_held(cached, PATIENCE_S, "targets of records are", "<i8", make)
    found = json.loads(bytes(arrays.short[0]))
    numbers = np.array(arrays.long)
    if len(found["classes"]) > max(_MANY_CLASSES, len(numbers) // 2):
        warn(
            f"target_field={texts.options.target_field!r} holds {len(found['classes']):,} "
            f"different texts in {len(numbers):,} records, and each is a class: is it the right "
            "field? Records as they are come from StreamingDataset"
        )
    if found["dtype"] is None:
        return Targets(None, [])
    return Targets(numbers.view(found["dtype"]), found["classes"])


def read_targets(
    texts: Texts,
    reader: SampleReader,
    numbers: IntArray,
    expect: Callable[[range], None] = lambda _: None,
) -> list[Any]:
    """The targets of records as they stand there, read in order.

    Args:
        texts: the records.
        reader: reads them.
        numbers: of the records.
        expect: is told which ones of these are read next.

    Raises:
        SampleError: a record can't be read, or has no text or target, and none may be left out.
    """
    count = len(numbers)
    targets = [_UNREAD] * count
    with progress_bar(
        texts.options.progress,
        is_short=count < _SHOWN_FROM,
        total=count,
        desc="reading records",
        unit="record",
    ) as bar:
        for position, _, target in texts.read_each(numbers, reader, expect):
            targets[position] = target
            bar.update()
    return targets


def _numbers_of(texts: Texts, targets: list[Any]) -> tuple[npt.NDArray[Any] | None, list[str]]:
    """The targets as integers, else as floats, else as the numbers of classes; and the names of
    classes.
    """
    field = texts.options.target_field
    read = [index for index, target in enumerate(targets) if target is not _UNREAD]
    values = [targets[index] for index in read]
    kinds = set(map(type, values))
    if str in kinds and all(texts.is_cell(i) for i in read if type(targets[i]) is str):
        cells = parsed([value for value in values if type(value) is str])
        if cells.same is not None:
            raise ConfigError(
                f"target_field={field!r}: the fields {cells.same[0]!r} and {cells.same[1]!r} are "
                "one number and two texts: write each number in one way, or save the records as "
                ".jsonl, where a class is a string and a number is none"
            )
        if len(kinds) == 1 or not any(isinstance(value, str) for value in cells.values):
            numbers = iter(cells.values)
            values = [next(numbers) if type(value) is str else value for value in values]
            kinds = set(map(type, values))
    if kinds == {str}:
        values = list(map(composed, values))
        classes = sorted(set(values))
        rank = {name: number for number, name in enumerate(classes)}
        found = np.full(len(targets), -1, np.int64)
        found[read] = [rank[value] for value in values]
        return found, classes
    if not kinds <= {int, float}:
        return None, []
    if kinds <= {int} and all(value in _INT64 for value in values):
        found = np.full(len(targets), -1, np.int64)
        found[read] = values
        return found, []
    for index in read:
        if isinstance(targets[index], (int, str)) and is_rounded(targets[index]):
            raise ConfigError(
                f"target_field={field!r}: {texts.source.location(index)} has "
                f"{targets[index]!s:.40}, an integer that neither int64 nor, among floats, float64 "
                "holds: give integers in the range of int64, or strings in .jsonl"
            )
    floats = np.full(len(targets), np.nan)
    floats[read] = values
    return floats, []
