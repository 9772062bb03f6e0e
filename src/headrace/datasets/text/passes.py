"""Passes over all texts of a dataset: one makes their tokens, another finds the lengths and
targets of records.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.datasets.cells import float_in, integer_in, is_rounded
from headrace.datasets.core.format import SampleFormat
from headrace.datasets.core.reader import Access, SampleReader, raise_if_of_the_machine
from headrace.datasets.text.tokenizing import Tokenising
from headrace.display import progress_bar
from headrace.errors import ConfigError, SampleError, warn
from headrace.io.array_file import ArrayFile, Unkept
from headrace.io.paths import cache_folder, composed
from headrace.io.single_flight import found_or_built
from headrace.memory.budget import MemoryBudget
from headrace.modes.lazy import Lazy
from headrace.storage.text.line_index import Arrays, HeldArrays
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.source import ArrayTokens, Tokens

if TYPE_CHECKING:
    from headrace.datasets.text.units import TokenizedTexts

_VERSION = 3
_PATIENCE_S = 60.0  # for another process that makes the same pass, while it writes nothing
_TOGETHER = 1024  # records that are read at a time
_SHOWN_FROM = 100_000  # records from which on progress is shown
_MANY_CLASSES = 100  # that many, and of half of the records each its own, are hardly classes
INT, FLOAT, CLASS = "int", "float", "class"
"""What the targets of all records are."""


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


def tokens_of(
    texts: TokenizedTexts,
    whole: SampleFormat,
    reader: SampleReader,
    end_token: int | None,
    budget: MemoryBudget,
) -> tuple[Tokens, str]:
    """All tokens of some documents, and the fingerprint of texts and of the way that they become
    tokens.

    Args:
        texts: the documents.
        whole: the format of whole documents, whose values are ids.
        reader: reads them.
        end_token: put behind each; None: nothing is.
        budget: for tokens that can't be kept on disk.

    Raises:
        SampleError: a document can't be read, or tokenised.
        ConfigError: `end_token` is given, and the documents are chats.
        BudgetError: the tokens can't be kept on disk, and don't fit the memory budget.
    """
    if end_token is not None and texts.is_marked:
        raise ConfigError(
            f"end_token={end_token} can't be given for chats, whose template ends each turn: "
            "leave it out"
        )
    source, options, access = texts.source, texts.options, Access(whole, Lazy(), False)
    with contextlib.ExitStack() as still:
        of = still.enter_context(source.of_one_version())
        expect = (
            still.enter_context(source.in_order())
            if isinstance(source, LinesSource) and source.is_remote
            else None
        )
        about = [
            of,
            source.fingerprint(),
            options.text_field,
            options.encoding,
            options.errors,
            getattr(source, "newline", None),
        ]
        if options.delimiter is not None:
            about.append(options.delimiter)
        about.append(reader.on_error == "raise")  # or are documents left out?

        def read(some: range) -> list[Any]:
            if expect is not None:
                expect(some)
            return reader.values(list(some), access)

        is_known = of is not None and not callable(options.text_field)
        making = Tokenising(
            read,
            len(source),
            about if is_known else None,
            options.tokenizer,
            texts.identity,
            end_token,
            options.progress,
        )
        tokens = ArrayTokens(making.tokens(cache_folder(options.cache_dir), budget))
    left_out = tokens.short[1]
    if len(left_out):
        first = source.location(int(left_out[0]))
        if len(left_out) == len(source):
            raise SampleError(
                f"none of {len(source):,} documents can be read, or tokenised, so there is "
                f"nothing to train on; the first: {first}: "
                'with on_error="raise" the message says why'
            )
        warn(
            f"{len(left_out):,} of {len(source):,} documents can't be read, or tokenised, and are "
            f"left out; the first: {first}"
        )
    return tokens, f"{source.fingerprint()}:{making.fingerprint}"


def record_columns(texts: TokenizedTexts, reader: SampleReader, is_opening: bool) -> Arrays:
    """The characters of the text of each record, and their targets, see `targets_in`. One pass over
    all records; where their index is kept in `cache_dir`, this is too.

    Args:
        texts: the records.
        reader: reads them.
        is_opening: True while the dataset is made: remote records are then read in the order of
            their files.

    Raises:
        SampleError: a record can't be read, or has no text or target, and none may be left out.
    """
    source, options = texts.source, texts.options
    with contextlib.ExitStack() as still:
        of = still.enter_context(source.of_one_version())
        expect = still.enter_context(source.in_order()) if is_opening and source.is_remote else None

        if of is None or not source.keeps_tables or callable(options.text_field):
            return _all_columns(texts, reader, expect)
        about = {
            "version": _VERSION,
            "of": of,
            "fields": [options.text_field, options.target_field],
            "newline": source.newline,
        }
        if options.delimiter is not None:
            about["delimiter"] = options.delimiter
        about |= {
            "encoding": [options.encoding, options.errors],
            "skips": reader.on_error != "raise",
        }
        folder = cache_folder(options.cache_dir)
        file = ArrayFile(str(folder), "records", about)
        unkept = Unkept(
            str(folder), "lengths and targets of records are", "they are found anew at every start"
        )

        def build() -> Arrays:
            made = _all_columns(texts, reader, expect)
            with unkept:
                with file.writing("<i8") as writer:
                    writer.write(made.long)
                    writer.short(made.short)
                return file.open()
            return made

        return found_or_built(file, _PATIENCE_S, build)


def targets_in(columns: Arrays, field: str) -> RecordTargets:
    """The targets that a pass found in a field. Many classes are warned of."""
    numbers, about = np.array(columns.short[0]), json.loads(bytes(columns.short[1]))
    kind, classes = about["kind"], about["classes"]
    if len(classes) > max(_MANY_CLASSES, len(numbers) // 2):
        warn(
            f"target_field={field!r} holds {len(classes):,} different texts in {len(numbers):,} "
            "records, and each is a class: is it the "
            "right field? Records as they are come from StreamingDataset"
        )
    return RecordTargets(
        kind,
        numbers.view("<f8") if kind == FLOAT else numbers if kind is not None else None,
        classes,
    )


def target_as(kind: str | None, value: Any, is_cell: bool, numbers: Mapping[str, int]) -> Any:
    """A target as samples have it.

    Args:
        kind: of the targets of all records.
        value: what the record holds.
        is_cell: True if it is a text because all of a table is.
        numbers: of classes.

    Raises:
        ValueError, KeyError: it is not of this kind.
    """
    if kind is None:
        return value
    if kind == CLASS:
        if type(value) is not str:
            raise ValueError(value)
        return numbers[composed(value)]
    if is_cell:
        return integer_in(value) if kind == INT else float_in(value)
    types: tuple[type, ...] = (int,) if kind == INT else (int, float)
    if type(value) not in types:
        raise ValueError(value)
    return int(value) if kind == INT else float(value)


class _Numbers(dict[str, int]):
    """Gives each text that is asked for first the next number."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def _all_columns(
    texts: TokenizedTexts, reader: SampleReader, expect: Callable[[range], None] | None
) -> HeldArrays:
    """What `record_columns` gives. A pass that meets a target of another kind begins again, and
    looks for the next kind.
    """
    kinds: list[str | None] = (
        [None] if texts.options.target_field is None else [INT, FLOAT, CLASS, None]
    )
    while (found := _pass(texts, reader, kinds, expect)) is None:
        continue
    return found


def _pass(
    texts: TokenizedTexts,
    reader: SampleReader,
    kinds: list[str | None],
    expect: Callable[[range], None] | None,
) -> HeldArrays | None:
    lengths = np.zeros(len(texts.source), np.int64)
    targets, names, is_begun = _no_targets(kinds[0], len(lengths)), _Numbers(), False
    rounded: str | None = None
    # a hash of the text of each cell, which tells two texts of one number
    cells = np.zeros(len(lengths), np.int64)
    for index, text, target, is_cell in _records(texts, reader, expect):
        lengths[index] = len(text)
        if is_cell:
            cells[index] = hash(target)
        while kinds[0] is not None:
            is_integer = is_cell or type(target) is int
            if kinds[0] == FLOAT and rounded is None and is_integer and is_rounded(target):
                rounded = f"{texts.source.location(index)} has {target!s:.40}"
            try:
                targets[index] = target_as(kinds[0], target, is_cell, names)
                break
            except (ValueError, OverflowError):
                del kinds[0]
                if is_begun:
                    return None
                targets = _no_targets(kinds[0], len(lengths))
        is_begun = True
    if kinds[0] == FLOAT and rounded is not None:
        raise ConfigError(
            f"target_field={texts.options.target_field!r}: {rounded}, an integer that neither "
            "int64 nor, among floats, float64 holds: give integers in the range of int64, or "
            "strings in .jsonl"
        )
    if (
        kinds[0] in (INT, FLOAT)
        and (pair := _texts_of_one_number(texts, reader, targets, cells)) is not None
    ):
        first, second = pair
        if first.strip() != second.strip():
            raise ConfigError(
                f"target_field={texts.options.target_field!r}: the fields {first!r} and "
                f"{second!r} are one number and two texts: write "
                "each number in one way, or save the records as .jsonl, where a class is a string "
                "and a number is none"
            )
        del kinds[: kinds.index(CLASS)]
        return None
    classes = sorted(names) if kinds[0] == CLASS else []
    if classes:
        rank, readable = {name: number for number, name in enumerate(classes)}, targets >= 0
        targets[readable] = np.array([rank[name] for name in names], np.int64)[targets[readable]]
    about = json.dumps({"kind": kinds[0], "classes": classes}).encode()
    return HeldArrays(lengths, [targets.view("<i8"), np.frombuffer(about, np.uint8)])


def _texts_of_one_number(
    texts: TokenizedTexts,
    reader: SampleReader,
    targets: npt.NDArray[Any],
    cells: npt.NDArray[np.int64],
) -> tuple[str, str] | None:
    """Two cells of different texts that became one number; None: there are none.

    Args:
        texts: the records.
        reader: reads them.
        targets: [n] the numbers.
        cells: [n] hashes of the cells' texts; 0: no cell.
    """
    of_cells = np.flatnonzero(cells)
    order = of_cells[np.lexsort((cells[of_cells], targets[of_cells]))]
    is_pair = (np.diff(targets[order]) == 0) & (np.diff(cells[order]) != 0)
    if not is_pair.any():
        return None
    at = int(is_pair.argmax())
    pair = order[at : at + 2].tolist()
    found = [
        texts.text_and_target(index, record)[1]
        for index, record in zip(pair, reader.records(pair, texts.source.read), strict=True)
    ]
    return min(found), max(found)


def _no_targets(kind: str | None, count: int) -> npt.NDArray[Any]:
    if kind == FLOAT:
        return np.full(count, np.nan)
    return np.full(0 if kind is None else count, -1, np.int64)


def _records(
    texts: TokenizedTexts, reader: SampleReader, expect: Callable[[range], None] | None
) -> Iterator[tuple[int, str, Any, bool]]:
    """Number, text and target of each record that can be read, and whether all that it holds is
    text.
    """
    source, count = texts.source, len(texts.source)
    is_short, progress = count < _SHOWN_FROM, texts.options.progress
    with progress_bar(
        progress, is_short=is_short, total=count, desc="reading records", unit="record"
    ) as bar:
        for start in range(0, count, _TOGETHER):
            some = range(start, min(start + _TOGETHER, count))
            if expect is not None:
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
                yield index, text, target, source.is_of_table(index)
            bar.update(len(some))
