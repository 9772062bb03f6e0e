"""Passes over all texts of a dataset: one makes their tokens, another finds the lengths and targets of records."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.reading import raise_if_of_the_machine
from headrace.datasets.text.tokenizing import Tokenising
from headrace.display import progress_bar
from headrace.errors import HeadraceError, SampleError, warn
from headrace.io.array_file import ArrayFile, MappedArrays, UntrustedError
from headrace.io.paths import cache_folder
from headrace.io.single_flight import one_builder
from headrace.io.version import Stamp
from headrace.storage.text.files import TextFilesSource
from headrace.storage.text.source import HeldArrays, LinesSource
from headrace.storage.tokens.source import Tokens

_VERSION = 1
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
        numbers: [n] int64 or float64: the numbers themselves, or those of classes; -1 or NaN of what can't be read. None without a kind.
        classes: names of classes, sorted.
    """

    kind: str | None
    numbers: npt.NDArray[Any] | None
    classes: list[str]


def tokens_of(documents: Any, end_token: int | None) -> tuple[Tokens, str]:
    """All tokens of a dataset's documents, and the fingerprint of texts and of the way that they become tokens.

    Args:
        documents: a `TextDataset` without `max_length`, `target_field`, `stride` and `packing`, and no view.
        end_token: put behind each; None: nothing is.

    Raises:
        SampleError: a document can't be read, or tokenised.
        BudgetError: the tokens can't be kept on disk, and don't fit the memory budget.
    """
    texts: Any = documents._source
    with contextlib.ExitStack() as still:
        of, expect = _of_files(texts), None
        if texts.files.is_remote:
            of = still.enter_context(texts.of_one_version())
            expect = still.enter_context(texts.in_order()) if isinstance(texts, LinesSource) else None
        about = [of, texts.fingerprint(), documents._text_field, documents._encoding, documents._errors, getattr(texts, "newline", None)]
        about.append(documents.on_error == "raise")  # or are documents left out?

        def read(some: range) -> list[Any]:
            if expect is not None:
                expect(some)
            values: list[Any] = documents._values(np.asarray(some))
            return values

        is_known = of is not None and not callable(documents._text_field)
        making = Tokenising(read, len(documents), about if is_known else None, documents.tokenizer, end_token, documents._progress)
        tokens = making.tokens(folder_of(documents._cache_dir), documents.budget)
    left_out = tokens.short[1]
    if len(left_out):
        first = texts.location(int(left_out[0]))
        if len(left_out) == len(documents):
            raise SampleError(
                f"none of {len(documents):,} documents can be read, or tokenised, so there is nothing to train on; the first: {first}: "
                'with on_error="raise" it says why'
            )
        warn(f"{len(left_out):,} of {len(documents):,} documents can't be read, or tokenised, and are left out; the first: {first}")
    return tokens, f"{texts.fingerprint()}:{making.fingerprint}"


def record_columns(dataset: Any) -> MappedArrays | HeldArrays:
    """The characters of the text of each record, and their targets, see `targets_in`. One pass over all records; where their index is kept
    in `cache_dir`, this is too.

    Args:
        dataset: a `TextDataset` of records, or a view of one; all records are read.

    Raises:
        SampleError: a record can't be read, or has no text or target, and none may be left out.
    """
    source: LinesSource = dataset._source
    with contextlib.ExitStack() as still:
        of, expect = _of_files(source), None
        if source.far is not None:
            of = still.enter_context(source.of_one_version())
            expect = None if dataset._is_settled else still.enter_context(source.in_order())

        def found() -> HeldArrays:
            return _gone_through(dataset, expect)

        if of is None or not source.keeps_tables or callable(dataset._text_field):
            return found()
        about = {"version": _VERSION, "of": of, "fields": [dataset._text_field, dataset._target_field], "newline": source.newline}
        about |= {"encoding": [dataset._encoding, dataset._errors], "skips": dataset.on_error != "raise"}
        folder = folder_of(dataset._cache_dir)
        file = ArrayFile(str(folder), "records", about)
        try:
            with one_builder(file.path, _PATIENCE_S):  # other processes wait, and find it then
                if (kept := file.found()) is not None:
                    return kept
                made = found()
                with file.writing("<i8") as writer:
                    writer.write(made.long)
                    writer.short(made.short)
                return file.open()
        except HeadraceError:
            raise  # of a record: they are errors of the system too
        except (OSError, UntrustedError) as error:
            said = getattr(error, "strerror", None) or error
            warn(f"cache_dir={str(folder)!r}: lengths and targets of records are not kept ({said}), so they are found anew at every start")
        return made


def targets_in(columns: MappedArrays | HeldArrays, field: str) -> RecordTargets:
    """The targets that a pass found in a field. Many classes are warned of."""
    numbers, said = np.array(columns.short[0]), json.loads(bytes(columns.short[1]))
    kind, classes = said["kind"], said["classes"]
    if len(classes) > max(_MANY_CLASSES, len(numbers) // 2):
        warn(
            f"target_field={field!r} holds {len(classes):,} different texts in {len(numbers):,} records, and each is a class: is it the "
            "right field? Records as they are come from StreamingDataset"
        )
    return RecordTargets(kind, numbers.view("<f8") if kind == FLOAT else numbers if kind is not None else None, classes)


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
        return numbers[value]
    types: tuple[type, ...] = (str,) if is_cell else (int,) if kind == INT else (int, float)
    if type(value) not in types or (is_cell and "_" in value):
        raise ValueError(value)
    return int(value) if kind == INT else float(value)


class _Numbers(dict[str, int]):
    """Gives each text that is asked for first the next number."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def _gone_through(dataset: Any, expect: Callable[[range], None] | None) -> HeldArrays:
    """What `record_columns` gives. A pass that meets a target of another kind begins again, and looks for the next kind."""
    kinds: list[str | None] = [INT, FLOAT, CLASS, None]
    if dataset._target_field is None:
        kinds = [None]
    while (found := _pass(dataset, kinds, expect)) is None:
        continue
    return found


def _pass(dataset: Any, kinds: list[str | None], expect: Callable[[range], None] | None) -> HeldArrays | None:
    lengths = np.zeros(len(dataset._source), np.int64)
    targets, names, is_begun = _no_targets(kinds[0], len(lengths)), _Numbers(), False
    for index, text, target, is_cell in _records(dataset, expect):
        lengths[index] = len(text)
        while kinds[0] is not None:
            try:
                targets[index] = target_as(kinds[0], target, is_cell, names)
                break
            except (ValueError, OverflowError):
                del kinds[0]
                if is_begun:
                    return None
                targets = _no_targets(kinds[0], len(lengths))
        is_begun = True
    classes = sorted(names) if kinds[0] == CLASS else []
    if classes:
        rank, readable = {name: number for number, name in enumerate(classes)}, targets >= 0
        targets[readable] = np.array([rank[name] for name in names], np.int64)[targets[readable]]
    said = json.dumps({"kind": kinds[0], "classes": classes}).encode()
    return HeldArrays(lengths, [targets.view("<i8"), np.frombuffer(said, np.uint8)])


def _no_targets(kind: str | None, count: int) -> npt.NDArray[Any]:
    if kind == FLOAT:
        return np.full(count, np.nan)
    return np.full(0 if kind is None else count, -1, np.int64)


def _records(dataset: Any, expect: Callable[[range], None] | None) -> Iterator[tuple[int, str, Any, bool]]:
    """Number, text and target of each record that can be read, and whether all that it holds is text."""
    source, count = dataset._source, len(dataset._source)
    with progress_bar(dataset._progress, is_short=count < _SHOWN_FROM, total=count, desc="reading records", unit="record") as bar:
        for start in range(0, count, _TOGETHER):
            some = range(start, min(start + _TOGETHER, count))
            if expect is not None:
                expect(some)
            for index, record in zip(some, dataset._records(list(some), source.read), strict=True):
                if isinstance(record, SampleError):
                    continue
                try:
                    text, target = dataset._text(index, record)
                except Exception as error:
                    raise_if_of_the_machine(error, index)
                    dataset._failed(index, "can't be decoded", error)
                    continue
                yield index, text, target, source.is_of_table(index)
            bar.update(len(some))


def _of_files(texts: TextFilesSource | LinesSource) -> list[list[Any]] | None:
    """What tells the files from others, and from what they were before; None: they are remote."""
    files = texts.files
    if files.is_remote:
        return None
    stamps = [Stamp(os.path.abspath(os.fsdecode(files.path(number)))) for number in range(len(files.names))]
    return [[stamp.path, stamp.size, stamp.mtime] for stamp in stamps]


def folder_of(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where tables, copies and tokens are kept."""
    folder = cache_folder(cache_dir)
    if cache_dir is None:  # the user's cache folder is made too; where it can't be, what needs it says so
        with contextlib.suppress(OSError):
            os.makedirs(folder.parent, exist_ok=True)
    return folder
