"""One pass over all records: what their targets are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.reader import SampleReader
from headrace.datasets.cells import is_rounded, parsed
from headrace.datasets.text.decoders import Texts
from headrace.datasets.text.tokenizing import PATIENCE_S, reading_all
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, warn
from headrace.formats.text.index import Arrays, kept_or_held
from headrace.io.array_file import ArrayFile
from headrace.io.paths import cache_folder, composed

_VERSION = 5
_SHOWN_FROM = 100_000  # records from which on progress is shown
_MANY_CLASSES = 100  # that many, and of half of the records each its own, are hardly classes
_INT64 = range(-(1 << 63), 1 << 63)
_UNREAD = object()


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
    arrays = _arrays(texts, reader)
    about = json.loads(bytes(arrays.short[0]))
    numbers = np.array(arrays.long)
    if len(about["classes"]) > max(_MANY_CLASSES, len(numbers) // 2):
        warn(
            f"target_field={texts.options.target_field!r} holds {len(about['classes']):,} "
            f"different texts in {len(numbers):,} records, and each is a class: is it the right "
            "field? Records as they are come from StreamingDataset"
        )
    if about["dtype"] is None:
        return Targets(None, [])
    return Targets(numbers.view(about["dtype"]), about["classes"])


def _arrays(texts: Texts, reader: SampleReader) -> Arrays:
    with reading_all(texts, reader) as (about, expect):
        cached = None
        if about is not None and texts.source.keeps_tables:
            folder = str(cache_folder(texts.options.cache_dir))
            cached = ArrayFile(folder, "records", {"version": _VERSION, **about})

        def make(take: Callable[[npt.NDArray[Any]], None]) -> list[npt.NDArray[Any]]:
            everything = np.arange(len(texts.source))
            values = read_targets(texts, reader, everything, expect)
            numbers, classes = _numbers_of(texts, values)
            dtype = None if numbers is None else numbers.dtype.str
            take(np.empty(0, np.int64) if numbers is None else numbers.view("<i8"))
            about = json.dumps({"dtype": dtype, "classes": classes}).encode()
            return [np.frombuffer(about, np.uint8)]

        return kept_or_held(cached, PATIENCE_S, "targets of records are", "<i8", make)


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
