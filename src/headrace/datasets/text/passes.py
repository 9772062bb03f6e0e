"""One pass over all records: how long their texts are, and what their targets are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.reader import SampleReader, raise_if_of_the_machine
from headrace.datasets.cells import float_in, integer_in, is_rounded
from headrace.datasets.text.tokenizing import PATIENCE_S, reading_all
from headrace.display import progress_bar
from headrace.errors import ConfigError, SampleError, warn
from headrace.io.array_file import ArrayFile, Unkept
from headrace.io.paths import cache_folder, composed
from headrace.io.single_flight import found_or_built
from headrace.storage.text.line_index import Arrays, HeldArrays

if TYPE_CHECKING:
    from headrace.datasets.text.units import RecordTexts

_VERSION = 4
_TOGETHER = 1024  # records that are read at a time
_SHOWN_FROM = 100_000  # records from which on progress is shown
_MANY_CLASSES = 100  # that many, and of half of the records each its own, are hardly classes
INT, FLOAT, CLASS = "int", "float", "class"
"""What the targets of all records are."""
_UNREAD = object()


class RecordTargets(NamedTuple):
    """The targets of records.

    Attributes:
        kind: INT, FLOAT, CLASS, or None: they are of several kinds, and stay as they are.
        numbers: [n] int64 or float64: the numbers themselves, or those of classes; -1 or NaN of
            what can't be read. None without a kind.
        classes: names of classes, sorted.
    """

    kind: str | None
    numbers: npt.NDArray[Any] | None
    classes: list[str]


def record_columns(texts: RecordTexts, reader: SampleReader, is_opening: bool) -> Arrays:
    """The characters of the text of each record, and their targets, see `targets_in`; kept where
    their index is kept in `cache_dir`.

    Args:
        texts: the records.
        reader: reads them.
        is_opening: True while the dataset is made, so that nothing else is read meanwhile.

    Raises:
        SampleError: a record can't be read, or has no text or target, and none may be left out.
        ConfigError: targets are numbers that no target can hold.
    """
    with reading_all(texts, reader, is_opening) as (about, expect):
        if about is None or not texts.source.keeps_tables:
            return _read_columns(texts, reader, expect)
        folder = str(cache_folder(texts.options.cache_dir))
        file = ArrayFile(folder, "records", {"version": _VERSION, **about})
        unkept = Unkept(
            folder, "lengths and targets of records are", "they are found anew at every start"
        )

        def build() -> Arrays:
            columns = _read_columns(texts, reader, expect)
            with unkept:
                with file.writing("<i8") as writer:
                    writer.write(columns.long)
                    writer.short(columns.short)
                return file.open()
            return columns

        return found_or_built(file, PATIENCE_S, build)


def targets_in(columns: Arrays, field: str) -> RecordTargets:
    """The targets that a pass found in a field. Many classes are warned of."""
    about = json.loads(bytes(columns.short[1]))
    kind = about["kind"]
    classes = about["classes"]
    numbers = np.array(columns.short[0])
    if len(classes) > max(_MANY_CLASSES, len(numbers) // 2):
        warn(
            f"target_field={field!r} holds {len(classes):,} different texts in {len(numbers):,} "
            "records, and each is a class: is it the right field? Records as they are come from "
            "StreamingDataset"
        )
    if kind is None:
        return RecordTargets(None, None, [])
    return RecordTargets(kind, numbers.view("<f8") if kind == FLOAT else numbers, classes)


def target_as(kind: str, value: Any, is_cell: bool, numbers: Mapping[str, int]) -> Any:
    """A target as samples have it.

    Args:
        kind: of the targets of all records.
        value: what the record holds.
        is_cell: True if it is a text because all of a table is.
        numbers: of classes.

    Raises:
        ValueError, KeyError, OverflowError: it is not of this kind.
    """
    if kind == CLASS:
        if type(value) is not str:
            raise ValueError(value)
        return numbers[composed(value)]
    if is_cell:
        return integer_in(value) if kind == INT else float_in(value)
    if type(value) is int:
        return value if kind == INT else float(value)
    if type(value) is not float or kind == INT:
        raise ValueError(value)
    return value


def _read_columns(
    texts: RecordTexts, reader: SampleReader, expect: Callable[[range], None]
) -> HeldArrays:
    source, options = texts.source, texts.options
    count = len(source)
    lengths = np.zeros(count, np.int64)
    has_targets = options.target_field is not None
    targets = [_UNREAD] * (count if has_targets else 0)
    with progress_bar(
        options.progress,
        is_short=count < _SHOWN_FROM,
        total=count,
        desc="reading records",
        unit="record",
    ) as bar:
        for start in range(0, count, _TOGETHER):
            some = range(start, min(start + _TOGETHER, count))
            expect(some)
            for index, record in zip(some, reader.records(list(some), source.read), strict=True):
                if isinstance(record, SampleError):
                    continue
                try:
                    text, target = texts.text_and_target(index, record)
                except Exception as error:
                    raise_if_of_the_machine(error, index)
                    reader.failed(index, "can't be decoded", error)
                    continue
                lengths[index] = len(text)
                if has_targets:
                    targets[index] = target
            bar.update(len(some))
    kind, numbers, classes = None, np.empty(0), list[str]()
    if has_targets:
        kind, numbers, classes = _targets_of(texts, targets)
    about = json.dumps({"kind": kind, "classes": classes}).encode()
    return HeldArrays(lengths, [numbers.view("<i8"), np.frombuffer(about, np.uint8)])


def _targets_of(
    texts: RecordTexts, targets: list[Any]
) -> tuple[str | None, npt.NDArray[Any], list[str]]:
    """Kind, numbers and classes of the targets of all records: integers, else floats, else the
    texts of classes.
    """
    field = texts.options.target_field
    are_cells = [texts.source.is_of_table(index) for index in range(len(targets))]
    integers = _numbers(INT, targets, are_cells)
    numbers = _numbers(FLOAT, targets, are_cells) if integers is None else integers
    if integers is None and numbers is not None:
        for index, target in enumerate(targets):
            is_integer = type(target) is int or are_cells[index]
            if target is not _UNREAD and is_integer and is_rounded(target):
                raise ConfigError(
                    f"target_field={field!r}: {texts.source.location(index)} has {target!s:.40}, "
                    "an integer that neither int64 nor, among floats, float64 holds: give integers "
                    "in the range of int64, or strings in .jsonl"
                )
    if numbers is not None and not _are_ambiguous(field, targets, are_cells, numbers):
        return INT if integers is not None else FLOAT, numbers, []
    if not all(type(target) is str or target is _UNREAD for target in targets):
        return None, np.empty(0), []
    classes = sorted({composed(target) for target in targets if target is not _UNREAD})
    rank = {name: number for number, name in enumerate(classes)}
    found = [-1 if target is _UNREAD else rank[composed(target)] for target in targets]
    return CLASS, np.array(found, np.int64), classes


def _numbers(
    kind: str, targets: Sequence[Any], are_cells: Sequence[bool]
) -> npt.NDArray[Any] | None:
    """Targets as numbers of a kind; None: one of them is of another."""
    missing: float = -1 if kind == INT else np.nan
    try:
        numbers = [
            missing if target is _UNREAD else target_as(kind, target, is_cell, {})
            for target, is_cell in zip(targets, are_cells, strict=True)
        ]
        return np.array(numbers, np.int64 if kind == INT else np.float64)
    except (ValueError, OverflowError):
        return None


def _are_ambiguous(
    field: Any, targets: Sequence[Any], are_cells: Sequence[bool], numbers: npt.NDArray[Any]
) -> bool:
    """True if two cells of different texts, but for the spaces around them, are one number.

    Raises:
        ConfigError: they differ in more than these spaces.
    """
    first = dict[float, str]()
    is_ambiguous = False
    for target, is_cell, number in zip(targets, are_cells, numbers.tolist(), strict=True):
        if target is _UNREAD or not is_cell:
            continue
        other = first.setdefault(number, target)
        if other.strip() != target.strip():
            raise ConfigError(
                f"target_field={field!r}: the fields {min(other, target)!r} and "
                f"{max(other, target)!r} are one number and two texts: write each number in one "
                "way, or save the records as .jsonl, where a class is a string and a number is none"
            )
        is_ambiguous = is_ambiguous or other != target
    return is_ambiguous
