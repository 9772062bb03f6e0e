"""Opens texts as files, lines, records or chats; tokens as documents, windows or blocks."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.construction import describe_argument
from headrace.core.reader import OnError, SampleReader
from headrace.core.threads import WorkerThreads
from headrace.datasets.text.chats import ChatTexts, has_template, hold_chats
from headrace.datasets.text.options import CHAT, TextOptions
from headrace.datasets.text.tokenizing import way_fingerprint
from headrace.datasets.text.units import (
    FileTexts,
    LineTexts,
    RecordTexts,
    TextUnit,
    TokenBlocks,
    TokenizedTexts,
    TokenWindows,
)
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import cache_folder, is_url, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import kind_of
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks
from headrace.storage.class_folders import folder_targets
from headrace.storage.hdf5.kind import HDF5
from headrace.storage.hdf5.rows import open_files
from headrace.storage.kinds import TEXT_EXTENSIONS, TEXTS
from headrace.storage.text import records
from headrace.storage.text.files import TextFilesSource, local_texts, remote_texts
from headrace.storage.text.plain import Room
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.joined import PackedTexts, packed_texts_of
from headrace.storage.tokens.packed import PackedDocuments, PackedTokens
from headrace.storage.tokens.source import BlocksSource, DocumentsSource, Tokens
from headrace.tokenizer import CharTokenizer

_CHARACTERS = "CharTokenizer("


def open_texts(
    data_path: DataPath,
    reach: RemoteOptions,
    options: TextOptions,
    max_memory_usage: float | int | str,
    on_error: OnError,
) -> TokenizedTexts:
    """The texts below a path, in the unit that the options name, or else the names of the files
    and the first record.

    Args:
        data_path: as `TextDataset` takes it.
        reach: how URLs are reached.
        options: what texts are.
        max_memory_usage, on_error: of the dataset.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, SampleError, RemoteError: see
            `TextDataset`.
    """
    unit = options.unit
    may_hold_chats = unit is None and has_template(options.tokenizer)
    room = Room(MemoryBudget(max_memory_usage, local_world_size=local_ranks))
    entries = list(entries_of(data_path))
    if unit is None and all(
        is_url(url) and without_query(url).lower().endswith(records.BY_RECORD) for url in entries
    ):
        unit = "record"  # without a listing, which asks the server for each file
    listing: FileSet | None = None
    if unit in (None, "file"):
        files = TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room)
        unit = unit or records.unit_of(files.listing, files.head)
        if unit == "file":
            _check_delimiter(options, False)
            return FileTexts(files, options)
        listing = files.listing
        files.close()
    if any(map(is_url, entries)):
        texts = remote_texts(data_path, TEXT_EXTENSIONS, reach, listing)
    else:
        if listing is None:
            listing = TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room).listing
        texts = local_texts(listing)
    source = LinesSource(
        texts,
        "line" if unit == "line" else "record",
        options.newline,
        options.encoding,
        options.errors,
        cache_folder(reach.cache_dir),
        is_kept=reach.cache_dir is not None or texts.files.is_remote,
        room=room,
        progress=options.progress,
        delimiter=options.delimiter,
    )
    try:
        _check_delimiter(options, source.has_tables)
        _check_headers(source, options)
    except BaseException:
        source.close()
        raise
    if unit == "line":
        return LineTexts(source, options)
    if unit == CHAT or (may_hold_chats and hold_chats(source)):
        return ChatTexts(source, options)
    return RecordTexts(source, options, SampleReader(source, on_error, WorkerThreads()))


def _check_delimiter(options: TextOptions, has_tables: bool) -> None:
    if options.delimiter is not None and not has_tables:
        raise ConfigError(
            f"delimiter={options.delimiter!r} is for records of .csv and .tsv, and none are read "
            "here: leave it out"
        )


def _check_headers(source: LinesSource, options: TextOptions) -> None:
    """Raises a FormatError where the first line of a table lacks a field that is named."""
    wanted = [options.text_field, options.target_field]
    if options.unit == CHAT and options.text_field == records.TEXT_FIELD:
        wanted = []  # messages may stand in several fields
    for number, names in enumerate(source.headers):
        for name in wanted if names else ():
            if not isinstance(name, str) or names.count(name) == 1:
                continue
            hint = ""
            if len(names) == 1:
                hint = records.another_delimiter(names[0], source.delimiter_in(number))
            raise FormatError(
                f"{source.shown(number)}: its first line names "
                f"{', '.join(map(repr, names[:20]))}, and {names.count(name) or 'none'} of these "
                f"is {name!r}{hint or ': pass text_field= or target_field='}; a file without such "
                "a line needs one, or unit='line' or 'file'"
            )


def folder_labels(source: TextFilesSource | LinesSource) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The class number of each document by first-level folder, and the names of the classes.

    Raises:
        ConfigError: the files lie in no class folders.
    """
    by_file, classes = folder_targets(source.listing)
    if by_file is None:
        raise ConfigError('labels="folders": the files lie in no class folders')
    if isinstance(source, LinesSource):
        return by_file[source.file_numbers()], classes
    return by_file, classes


# -- tokens that are there already


def unit_of_tokens(
    tokens: tuple[Tokens, str],
    where: str | Callable[[int], str],
    name: str,
    text_of: Callable[[int], str] | None,
    options: TextOptions,
) -> TextUnit:
    """Documents, windows or blocks of some tokens.

    Args:
        tokens: of all documents, and their fingerprint.
        where: says where a document lies.
        name: what a document is.
        text_of: says what the text of a document is; None: nobody can.
        options: of the dataset.

    Raises:
        ConfigError: no block comes of them; or an option has no meaning for chats.
    """
    if name == CHAT:
        options.check_chats()
    length = options.max_length or 1
    all_tokens = tokens[0]
    if options.packing:
        return TokenBlocks(BlocksSource(*tokens, where, length), name)
    left_out = all_tokens.short[1] if len(all_tokens.short) > 1 else None  # of a packed file none
    source = DocumentsSource(*tokens, where, options.max_length, options.stride, left_out)
    return TokenWindows(source, name, text_of)


def packed_unit(tokens: PackedTexts, options: TextOptions) -> TextUnit:
    """The same of packed files, with the fingerprint that the texts themselves would have."""
    info = tokens.info
    name = info.text.get("unit", "file")
    if not options.is_in_parts:
        source = PackedDocuments(tokens, info.fingerprint, tokens.location, options.max_length)
        return TokenWindows(source, name, None)
    way = way_fingerprint(info.text.get("tokenizer"), info.text.get("end_token"))
    fingerprint = f"{info.fingerprint}:{way}"
    return unit_of_tokens((tokens, fingerprint), tokens.location, name, None, options)


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
    if not isinstance(data_path, FileSet) and kind_of(data_path, (TEXTS, HDF5), reach) is not HDF5:
        return None
    paths, opened = open_files(data_path, reach)
    try:
        hdf5 = opened.hdf5
        tokens = packed_texts_of(hdf5.read_each(paths, lambda path: PackedTokens(path, hdf5)))
    except BaseException:
        opened.close()
        raise
    if tokens is not None and given:
        tokens.files.close()
        described = ", ".join(describe_argument(name, value) for name, value in given.items())
        raise ConfigError(
            f"{described}: {tokens.shown} holds tokens, so packing has decided this: leave it out, "
            "or open the texts themselves"
        )
    return tokens


def tokenizer_of(tokens: PackedTexts) -> CharTokenizer | None:
    """The `CharTokenizer` that a file was made with; None: it was another one."""
    call = tokens.info.text.get("tokenizer") or ""
    if not (call.startswith(_CHARACTERS) and call.endswith(")")):
        return None
    inside = call[len(_CHARACTERS) : -1]
    return CharTokenizer(ast.literal_eval(inside) if inside else None)
