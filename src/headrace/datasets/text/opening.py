"""Opens texts as files, lines, records, windows or blocks; packed files as the tokens that they
hold.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.construction import describe_argument
from headrace.datasets.core.reader import SampleReader
from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.text.chats import ChatTexts, has_template, hold_chats
from headrace.datasets.text.options import BEST_FIT, CHAT, TextOptions
from headrace.datasets.text.tokenizing import way_fingerprint
from headrace.datasets.text.units import (
    FileTexts,
    LineTexts,
    RecordTexts,
    TextUnit,
    TokenBlocks,
    TokenizedTexts,
    TokenRows,
    TokenWindows,
)
from headrace.errors import ConfigError, FormatError, SampleError, warn
from headrace.io.paths import cache_folder, is_url, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import kind_of
from headrace.memory.budget import MemoryBudget
from headrace.order import detect_world
from headrace.storage.class_folders import folder_targets
from headrace.storage.hdf5.kind import HDF5
from headrace.storage.hdf5.rows import open_files
from headrace.storage.kinds import TEXT_EXTENSIONS, TEXTS
from headrace.storage.text import records
from headrace.storage.text.files import TextFilesSource, local_texts, remote_texts
from headrace.storage.text.lines import Newline
from headrace.storage.text.plain import Room
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.best_fit import BestFitSource
from headrace.storage.tokens.joined import PackedTexts, packed_texts_of
from headrace.storage.tokens.packed import PackedDocuments, PackedTokens
from headrace.storage.tokens.source import BlocksSource, DocumentsSource, Tokens, TokensSource
from headrace.tokenizer import CharTokenizer

_CHARACTERS = "CharTokenizer("
_PADDING = 0  # of rows, whatever the tokenizer: a packed file does not know its own
_TOGETHER = 256  # chats that are read at a time


def open_texts(
    data_path: DataPath,
    unit: str | None,
    newline: Newline,
    reach: RemoteOptions,
    texts: TextOptions,
    options: Mapping[str, Any],
) -> TokenizedTexts:
    """The texts below a path.

    Args:
        data_path: as `TextDataset` takes it.
        unit: "file", "line", "record" or "chat"; None: as the names of the files have it, and the
            first record.
        newline: what ends a line.
        reach: how URLs are reached.
        texts: what texts are.
        options: of the dataset.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, SampleError, RemoteError: see
            `TextDataset`.
    """
    room = Room(
        MemoryBudget(
            options.get("max_memory_usage", 0.8), local_world_size=detect_world().local_world_size
        )
    )
    listing: FileSet | None = None
    may_hold_chats = unit is None and has_template(texts.tokenizer)
    if unit is None and all(
        is_url(url) and without_query(url).lower().endswith(records.BY_RECORD)
        for url in entries_of(data_path)
    ):
        unit = "record"  # without a listing, which asks the server for each file
    if unit in (None, "file"):
        source = TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room)
        unit = unit or records.unit_of(source.listing, source.head)
        if unit == "file":
            _refuse_delimiter(texts, False)
            return FileTexts(source, texts)
        listing = source.listing
        source.close()
    assert unit is not None
    lines = _lines(data_path, unit, listing, newline, reach, texts, room)
    try:
        _refuse_delimiter(texts, lines.has_tables)
    except BaseException:
        lines.close()
        raise
    if unit == "line":
        return LineTexts(lines, texts)
    if unit == CHAT or (may_hold_chats and hold_chats(lines)):
        return ChatTexts(lines, texts)
    return RecordTexts(
        lines, texts, SampleReader(lines, options.get("on_error", "raise"), WorkerThreads())
    )


def _refuse_delimiter(options: TextOptions, has_tables: bool) -> None:
    if options.delimiter is not None and not has_tables:
        raise ConfigError(
            f"delimiter={options.delimiter!r} is for records of .csv and .tsv, and none are read "
            "here: leave it out"
        )


def _lines(
    data_path: DataPath,
    unit: str,
    listing: FileSet | None,
    newline: Newline,
    reach: RemoteOptions,
    options: TextOptions,
    room: Room,
) -> LinesSource:
    folder, of_text = cache_folder(reach.cache_dir), (newline, options.encoding, options.errors)
    if any(map(is_url, entries_of(data_path))):
        texts = remote_texts(data_path, TEXT_EXTENSIONS, reach, listing)
    else:
        texts = local_texts(
            listing or TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room).listing
        )
    kind, is_kept = (
        "record" if unit == CHAT else unit,
        reach.cache_dir is not None or texts.files.is_remote,
    )
    source = LinesSource(
        texts,
        kind,
        *of_text,
        folder,
        is_kept=is_kept,
        room=room,
        progress=options.progress,
        delimiter=options.delimiter,
    )
    for number, names in enumerate(source.headers):
        for name in (options.text_field, options.target_field) if names else ():
            if (
                isinstance(name, str)
                and names.count(name) != 1
                and not (unit == CHAT and name == records.TEXT_FIELD)
            ):
                hint = (
                    records.another_delimiter("".join(names), source.delimiter_in(number))
                    if len(names) == 1
                    else ""
                )
                raise FormatError(
                    f"{source.shown(number)}: its first line names "
                    f"{', '.join(map(repr, names[:20]))}, and "
                    f"{names.count(name) or 'none'} of these is "
                    f"{name!r}{hint or ': pass text_field= or target_field='}; a file "
                    "without such a line needs one, or unit='line' or 'file'"
                )
    return source


def folder_labels(source: TextFilesSource | LinesSource) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The class number of each document by first-level folder, and the names of the classes.

    Raises:
        ConfigError: the files lie in no class folders.
    """
    by_file, classes = folder_targets(source.listing)
    if by_file is None:
        raise ConfigError('labels="folders": the files lie in no class folders')
    return by_file if isinstance(source, TextFilesSource) else by_file[
        source.file_numbers()
    ], classes


def unit_over(
    source: TokensSource, name: str, text_of: Callable[[int], str] | None, is_marked: bool = False
) -> TextUnit:
    """Samples of tokens that are there already.

    Args:
        source: the documents, windows or blocks.
        name: what a document is.
        text_of: says what the text of a document is; None: nobody can.
        is_marked: True if the ids have marks, see `headrace.datasets.text.marked`.
    """
    if isinstance(source, BestFitSource):
        return TokenRows(source, name, is_marked)
    return (
        TokenBlocks(source, name, is_marked)
        if isinstance(source, BlocksSource)
        else TokenWindows(source, name, text_of, is_marked)
    )


def parts_of(
    tokens: tuple[Tokens, str],
    documents: TextUnit,
    text_of: Callable[[int], str] | None,
    cutting: Cutting,
) -> TextUnit:
    """Windows, blocks or rows of documents.

    Args:
        tokens: of the documents, and their fingerprint.
        documents: what they are, and where they lie.
        text_of: says what the text of a document is; None: nobody can.
        cutting: how samples are made of them.

    Raises:
        SampleError, ConfigError: see `source_over`.
    """
    source = source_over(*tokens, documents.source.location, cutting)
    return unit_over(source, documents.name, text_of, cutting.is_marked)


# -- packed tokens


def packed_tokens(
    data_path: Any, given: dict[str, Any], reach: RemoteOptions
) -> PackedTexts | None:
    """The tokens of packed files, local or remote; None where the path names none.

    Args:
        data_path: of the dataset.
        given: arguments of which a packed file has decided already, those that were given.
        reach: how a URL is reached.

    Raises:
        ConfigError: there are such.
        FormatError, AccessError: a file is damaged, was not packed from texts, or can't be read;
            files were packed in different ways.
        DataNotFoundError, RemoteError: there is nothing at a URL, or its server does not give it.
    """
    tokens = _opened(data_path, reach)
    if tokens is not None and given:
        tokens.files.close()
        said = ", ".join(describe_argument(name, value) for name, value in given.items())
        raise ConfigError(
            f"{said}: {tokens.shown} holds tokens, so packing has decided this: leave it out, or "
            "open the texts themselves"
        )
    return tokens


def _opened(data_path: Any, reach: RemoteOptions) -> PackedTexts | None:
    if not isinstance(data_path, FileSet) and kind_of(data_path, (TEXTS, HDF5), reach) is not HDF5:
        return None
    paths, opened = open_files(data_path, reach)
    try:
        hdf5 = opened.hdf5
        return packed_texts_of(hdf5.read_each(paths, lambda path: PackedTokens(path, hdf5)))
    except BaseException:
        opened.close()
        raise


def tokenizer_of(tokens: PackedTexts) -> CharTokenizer | None:
    """The `CharTokenizer` that a file was made with; None: it was another one."""
    said = tokens.info.text.get("tokenizer") or ""
    if not (said.startswith(_CHARACTERS) and said.endswith(")")):
        return None
    inside = said[len(_CHARACTERS) : -1]
    return CharTokenizer(ast.literal_eval(inside) if inside else None)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How tokens become samples: see `TextDataset`. Without `stride` and `packing` each document is
    one.

    Attributes:
        is_marked: True if the ids have marks, see `headrace.datasets.text.marked`.
        leaves_out: True if a chat of which nothing that is supervised is left is in no row; else it
            is an error.
    """

    max_length: int | None
    stride: int | None
    packing: bool | str
    is_marked: bool
    leaves_out: bool


def source_over(
    tokens: Tokens, fingerprint: str, where: str | Callable[[int], str], cutting: Cutting
) -> DocumentsSource | BlocksSource | BestFitSource:
    """Documents, windows, blocks or rows of some tokens.

    Raises:
        SampleError: of a chat that is cut nothing that is supervised is left.
        ConfigError: no block or row comes of them.
    """
    length = cutting.max_length or 1
    if cutting.packing == BEST_FIT:
        unsupervised = _unsupervised(tokens, where, length, cutting)
        return BestFitSource(
            tokens,
            fingerprint,
            where,
            length,
            ~_PADDING if cutting.is_marked else _PADDING,
            unsupervised,
        )
    if cutting.packing:
        return BlocksSource(tokens, fingerprint, where, length)
    left_out = tokens.short[1] if len(tokens.short) > 1 else None  # of a packed file none is
    return DocumentsSource(tokens, fingerprint, where, cutting.max_length, cutting.stride, left_out)


def _unsupervised(
    tokens: Tokens, where: str | Callable[[int], str], length: int, cutting: Cutting
) -> npt.NDArray[np.int64] | None:
    """The numbers of the chats that are longer than a row, and of which no supervised token is
    left when they are cut.
    """
    if not cutting.is_marked:
        return None
    edges = tokens.short[0]
    long = np.flatnonzero(np.diff(edges) > length)
    found = list[int]()
    for start in range(0, len(long), _TOGETHER):
        some = long[start : start + _TOGETHER]
        parts = tokens.parts(edges[some], edges[some] + length)
        found += [
            number
            for number, part in zip(some.tolist(), parts, strict=True)
            if not (part >= 0).any()
        ]
    if found:
        first = where(found[0]) if callable(where) else f"{where}, document {found[0]:,}"
        said = f"its first {length:,} tokens hold none of the assistant's: raise max_length"
        if not cutting.leaves_out:
            raise SampleError(
                f'{first}: {said}, or pass on_error="skip", which leaves such chats out '
                f"({len(found):,} of {len(edges) - 1:,})"
            )
        warn(f"{len(found):,} of {len(edges) - 1:,} chats are left out; the first: {first}: {said}")
    return np.array(found, np.int64)


def packed_source(
    tokens: PackedTexts, cutting: Cutting
) -> DocumentsSource | BlocksSource | BestFitSource:
    """The same of packed files, with the fingerprint that the texts themselves would have."""
    text = tokens.info.text
    if not cutting.packing and cutting.stride is None:
        return PackedDocuments(tokens, tokens.info.fingerprint, tokens.location, cutting.max_length)
    way = way_fingerprint(text.get("tokenizer"), text.get("end_token"))
    return source_over(tokens, f"{tokens.info.fingerprint}:{way}", tokens.location, cutting)
