"""Reads all texts of a dataset once: for their tokens, or for the targets of records. Both are
cached in `cache_dir` if texts and tokenizer can be identified.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.core.reader import SampleReader
from headrace.datasets.cells import is_rounded, parsed
from headrace.datasets.text.decoders import Texts
from headrace.display import progress_bar
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import BudgetError, ConfigError, SampleError, warn
from headrace.formats.text.index import Take, kept_or_held
from headrace.io.array_file import ArrayFile, Arrays, FileArrays
from headrace.io.paths import cache_folder, composed
from headrace.memory.budget import MemoryBudget
from headrace.tokenizer import dtype_for

PATIENCE_S = 60.0
"""How long to wait for another process that reads the same texts and writes nothing."""
_TOKENS_VERSION = 2
_TOGETHER = 256  # texts that are tokenised at a time
_TARGETS_VERSION = 6
_SHOWN_FROM = 100_000  # progress is shown from so many records on
_INT64 = range(-(1 << 63), 1 << 63)
_UNREAD = object()


def way_fingerprint(identity: str | None, end_token: int | None) -> str:
    """A fingerprint of how texts become tokens: of the tokenizer's identity and the end token; ""
    if the tokenizer can't be identified.
    """
    if identity is None:
        return ""
    return hashlib.blake2b(f"{identity}|{end_token}".encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def reading_all(texts: Texts, reader: SampleReader) -> Iterator[dict[str, Any] | None]:
    """Context in which all texts are read in order, in their current version.

    Args:
        texts: the texts of a dataset.
        reader: reads them.

    Yields:
        What identifies these texts and how they are read (JSON values). None: they can't be
            identified.
    """
    source = texts.source
    options = texts.options
    version: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if hasattr(source, "of_one_version"):  # not of columns of every container
        version = source.of_one_version()
    with version as identities:
        if identities is None or callable(options.text_field):
            yield None
            return
        yield {
            "of": identities,
            "fingerprint": source.fingerprint(),
            "fields": [options.text_field, options.target_field, options.column],
            "encoding": [options.encoding, options.errors],
            "delimiter": options.delimiter,
            "skips": reader.on_error != "raise",
        }


def tokens_of(
    texts: Texts, reader: SampleReader, end_token: int | None, budget: MemoryBudget
) -> tuple[FileArrays, str]:
    """All tokens of some documents, and a fingerprint of the texts and of how they become tokens.

    Args:
        texts: the documents.
        reader: reads them.
        end_token: id that is appended to each document. None: no token.
        budget: memory budget for tokens that can't be cached on disk.

    Raises:
        SampleError: a document can't be read or tokenised.
        BudgetError: the tokens can't be cached on disk, and don't fit the memory budget.
    """
    source = texts.source
    identity = texts.identity
    make = functools.partial(_tokenise, texts, reader, end_token)
    with reading_all(texts, reader) as about:
        cached = None
        if about is not None and identity is not None:
            made_of = {"version": _TOKENS_VERSION, **about, "tokenizer": identity, "end": end_token}
            cached = ArrayFile(str(cache_folder(texts.options.cache_dir)), "tokens", made_of)
        try:
            tokens = kept_or_held(cached, PATIENCE_S, "tokens", "<i4", make, budget)
        except BudgetError as error:
            raise BudgetError(
                "the tokens of all documents don't fit memory: give the tokenizer a `fingerprint` "
                f"(str), so that they can be cached on disk, or raise max_memory_usage. {error}"
            ) from None
    left_out = tokens.short[1]
    if len(left_out):
        count = len(source)
        first = source.location(int(left_out[0]))
        if len(left_out) == count:
            raise SampleError(
                f"none of {count:,} documents can be read and tokenised; the first: {first}: pass "
                'on_error="raise" to see why'
            )
        warn(
            f"{len(left_out):,} of {count:,} documents can't be read or tokenised, and are "
            f"skipped; the first: {first}"
        )
    return tokens, f"{source.fingerprint()}:{way_fingerprint(identity, end_token)}"


def _tokenise(
    texts: Texts, reader: SampleReader, end_token: int | None, take: Take
) -> tuple[str, Arrays]:
    """Passes the tokens of all documents (int32) to `take`, some documents at a time.

    Returns:
        The smallest dtype that fits the tokens, and the short arrays of `TokensSource`.
    """
    count = len(texts.source)
    end = np.array([] if end_token is None else [end_token], np.int32)
    edges = np.zeros(count + 1, np.int64)
    left_out: list[int] = []
    least = 0
    most = 0
    with progress_bar(
        texts.options.progress,
        is_short=count < _TOGETHER,
        total=count,
        desc="tokenising",
        unit="document",
    ) as bar:
        for start in range(0, count, _TOGETHER):
            some = range(start, min(start + _TOGETHER, count))
            pieces = [np.empty(0, np.int32)]
            for number, ids in zip(some, texts.whole_ids(some, reader), strict=True):
                if isinstance(ids, SampleError):
                    left_out.append(number)
                    continue
                pieces += [ids, end]
                edges[number + 1] = len(ids) + len(end)
            tokens = np.concatenate(pieces, dtype=np.int32, casting="unsafe")
            least = min(least, int(tokens.min(initial=0)))
            most = max(most, int(tokens.max(initial=0)))
            take(tokens)
            bar.update(len(some))
    return dtype_for(least, most), [np.cumsum(edges), np.array(left_out, np.int64)]


# -- targets


def targets_of(texts: Texts, reader: SampleReader) -> tuple[AnyArray | None, list[str]]:
    """The targets of all records, cached on disk if the index of the records is.

    Returns:
        [n] int64 or float64: numbers, or class numbers; -1 or NaN for records that can't be read.
        None: targets are of several types, and stay unchanged. And the sorted class names.

    Raises:
        SampleError: a record can't be read, or has no text or target, and may not be skipped.
        ConfigError: a number fits neither int64 nor float64.
    """
    with reading_all(texts, reader) as about:
        cached = None
        if about is not None and texts.source.keeps_tables:
            folder = str(cache_folder(texts.options.cache_dir))
            cached = ArrayFile(folder, "records", {"version": _TARGETS_VERSION, **about})

        def make(take: Take) -> tuple[str, Arrays]:
            values = read_targets(texts, reader, np.arange(len(texts.source)))
            numbers, classes = _numbers_of(texts, values)
            names = np.frombuffer(json.dumps(classes).encode(), np.uint8)
            return "u1", [names] if numbers is None else [names, numbers]

        found = kept_or_held(cached, PATIENCE_S, "targets of records", "u1", make)
    names, *targets = found.short
    return np.array(targets[0]) if targets else None, json.loads(bytes(names))


def read_targets(texts: Texts, reader: SampleReader, numbers: IntArray) -> list[Any]:
    """The targets of some records as stored, by their numbers, read in order.

    Raises:
        SampleError: a record can't be read, or has no text or target, and may not be skipped.
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
        for position, _, target in texts.read_each(numbers, reader):
            targets[position] = target
            bar.update()
    return targets


def _numbers_of(texts: Texts, targets: list[Any]) -> tuple[AnyArray | None, list[str]]:
    """The targets as integers, floats or class numbers, and the class names."""
    field = texts.options.target_field
    read = [index for index, target in enumerate(targets) if target is not _UNREAD]
    values: Any = [targets[index] for index in read]
    words = [index for index in read if type(targets[index]) is str]
    if words and all(map(texts.is_cell, words)):
        cells = parsed([targets[index] for index in words])
        if cells.same is not None:
            raise ConfigError(
                f"target_field={field!r}: {cells.same[0]!r} and {cells.same[1]!r} are one number: "
                "write it in one way, or save the records as .jsonl, with strings as classes"
            )
        if len(words) == len(read) or not any(isinstance(value, str) for value in cells.values):
            numbers = iter(cells.values)
            values = [next(numbers) if type(value) is str else value for value in values]
    kinds = set(map(type, values))
    classes: list[str] = []
    if kinds == {str}:
        values, classes = class_numbers(list(map(composed, values)))
    elif not kinds <= {int, float}:
        return None, []
    if classes or (kinds <= {int} and all(value in _INT64 for value in values)):
        found = np.full(len(targets), -1, np.int64)
    else:
        found = np.full(len(targets), np.nan)
        for index in read:
            if isinstance(targets[index], (int, str)) and is_rounded(targets[index]):
                raise ConfigError(
                    f"target_field={field!r}: {texts.source.location(index)} has "
                    f"{targets[index]!s:.40}, an integer that does not fit int64, or float64 among "
                    "floats: use smaller integers, or strings in .jsonl"
                )
    found[read] = values
    return found, classes


def class_numbers(names: list[str]) -> tuple[IntArray, list[str]]:
    """The class number of each name ([n] int64), and the sorted class names."""
    classes = sorted(set(names))
    rank = {name: number for number, name in enumerate(classes)}
    return np.array([rank[name] for name in names], np.int64), classes
