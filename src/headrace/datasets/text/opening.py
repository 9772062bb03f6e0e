"""Opens texts as files, lines, records, chats or a column; tokens as documents, windows or
blocks.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from headrace.core.dataset import BaseDataset
from headrace.core.options import describe_argument
from headrace.datasets.arrays import HDF5Dataset, ZarrDataset
from headrace.datasets.table import TableDataset
from headrace.datasets.text.chats import OPTIONS, SYSTEM, TOOLS, Chats
from headrace.datasets.text.decoders import (
    CHAT,
    TextDecoder,
    TextOptions,
    Texts,
    TokensDecoder,
    are_messages,
    chat_field,
    has_template,
)
from headrace.datasets.text.passes import way_fingerprint
from headrace.errors import ConfigError, FormatError
from headrace.formats.hdf5.kind import HDF5
from headrace.formats.hdf5.tree import open_files
from headrace.formats.registry import look_up, open_columns
from headrace.formats.resolve.file_set import TEXTS, FileSet, Format
from headrace.formats.resolve.resolver import DataPath, entries_of, look_for
from headrace.formats.table.files import TABLES
from headrace.formats.table.source import TableSource
from headrace.formats.tar import TARS, TarSource
from headrace.formats.text import records
from headrace.formats.text.plain import Room
from headrace.formats.text.source import LinesSource, TextFilesSource
from headrace.formats.tokens import (
    BlocksSource,
    DocumentsSource,
    PackedFile,
    PackedTokens,
    Tokens,
    TokensSource,
)
from headrace.formats.zarr.stores import ZARR
from headrace.io.paths import is_url, redact, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.tokenizer import CharTokenizer

_CHARACTERS = "CharTokenizer("
_LOOKED_AT = 8  # records by which the kind of all is told
_OF_KIND: dict[Format, type[BaseDataset]] = {
    TABLES: TableDataset,
    HDF5: HDF5Dataset,
    ZARR: ZarrDataset,
}


# -- texts


def open_texts(
    data_path: DataPath, reach: RemoteOptions, options: TextOptions, room: Room
) -> Texts:
    """The texts below a path, in the unit that the options name, or else the names of the files
    and the first record.

    Args:
        data_path: as `TextDataset` takes it.
        reach: how URLs are reached.
        options: what texts are.
        room: for one text.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, RemoteError: see `TextDataset`.
    """
    unit = options.unit
    entries = list(entries_of(data_path))
    if unit is None and all(
        is_url(url) and without_query(url).lower().endswith(records.BY_RECORD) for url in entries
    ):
        unit = "record"  # without asking the server for each file
    where: DataPath | FileSet = data_path
    if unit in (None, "file"):
        files = TextFilesSource(data_path, reach, room, (options.encoding, options.errors))
        unit = unit or records.unit_of(files.listing, files.head)
        if unit == "file":
            _check_delimiter(options, False)
            return Texts(files, options, "file")
        where = files.listing
    source = LinesSource(
        where,
        "line" if unit == "line" else "record",
        reach,
        encoding=options.encoding,
        errors=options.errors,
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
        return Texts(source, options, "line")
    found = Texts(source, options, "record")
    may_hold_chats = options.unit is None and has_template(options.tokenizer)
    if unit == CHAT or (may_hold_chats and chat_field(_first_row(found)) is not None):
        return Chats(source, options)
    return found


def _first_row(texts: Texts) -> Any:
    """What the first record says that can be read; None: none of the first ones."""
    for index in range(min(len(texts.source), _LOOKED_AT)):
        try:
            return texts.row(index, texts.source.read([index])[0])
        except FormatError:
            continue  # which is an error of that sample
    return None


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
            hint = ": pass text_field= or target_field="
            if len(names) == 1:
                delimiter = source.delimiters[source.kinds[number]]
                hint = records.another_delimiter(names[0], delimiter) or hint
            raise FormatError(
                f"{source.shown(number)}: its first line names "
                f"{', '.join(map(repr, names[:20]))}, and {names.count(name) or 'none'} of these "
                f"is {name!r}{hint}; a file without such a line needs one, or unit='line' or "
                "'file'"
            )


class OpenedColumn(NamedTuple):
    """A column of texts, and the targets of its rows."""

    texts: Texts
    targets: Any
    classes: list[str]


def open_column(
    data_path: DataPath, reach: RemoteOptions, options: TextOptions, reading: Mapping[str, Any]
) -> OpenedColumn:
    """The texts, bytes or ids of a column of any container.

    Args:
        data_path: of tables, HDF5 files, Zarr stores, tars, or what another package reads.
        reach: how URLs are reached.
        options: name the column.
        reading: options of `BaseDataset` that concern reading.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, RemoteError: see `TextDataset`.
        MissingNameError: there is no such column.
    """
    column = options.column
    assert column is not None
    format_, _ = look_up(data_path, reach)
    source: Any
    value_of: Callable[[Any], Any] | None = None
    targets: Any = None
    classes: list[str] = []
    cls: Any = _OF_KIND.get(format_)
    if cls is not None:
        opened = cls(data_path, column, target_name=options.target_field, **reading)
        source = opened.sample_source
        value_of = None if format_ is TABLES else opened._decoder.decode
        targets = opened.targets
        classes = list(getattr(opened, "classes", None) or ())
        if source.block_nbytes:
            opened.block_memory.hold_chunks(0)  # the dataset of texts reserves memory for them
    elif options.target_field is not None:
        raise ConfigError(f"target_field can't be given for a column of {format_.name} yet")
    elif format_ is TARS:
        source = TarSource(data_path, reach=reach, progress=options.progress)
    elif format_.open is not None:
        source = open_columns(data_path, format_, reach, [column]).column(column)
    else:
        raise ConfigError(
            f"{redact(entries_of(data_path)[0])} holds {format_.name}, which have no columns: "
            "leave out column="
        )
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        classes = sorted(set(targets))
        rank = {name: number for number, name in enumerate(classes)}
        targets = np.array([rank[target] for target in targets], np.int64)
    texts = Texts(source, options, "record", value_of)
    is_chat = options.unit == CHAT
    if options.unit is None and has_template(options.tokenizer):
        is_chat = are_messages(_first_row(texts))
    if not is_chat:
        return OpenedColumn(texts, targets, classes)
    if isinstance(source, TableSource):
        along = [name for name in (SYSTEM, TOOLS, OPTIONS) if name in source.first.schema.names]
        source = TableSource(source.tables, source.files, [column, *along], False)
        value_of = None
    return OpenedColumn(Chats(source, options, value_of), None, [])


# -- tokens that are there already


def decoder_of_tokens(
    tokens: Tokens,
    fingerprint: str,
    where: Callable[[int], str],
    name: str,
    text_of: Callable[[int], str] | None,
    options: TextOptions,
) -> TextDecoder:
    """Documents, windows or blocks of some tokens.

    Args:
        tokens: of all documents.
        fingerprint: of the tokens, or of whole documents.
        where: says where a document lies.
        name: what a document is.
        text_of: says what the text of a document is; None: nobody can.
        options: of the dataset.

    Raises:
        ConfigError: no block comes of them; or an option has no meaning for chats.
    """
    if name == CHAT:
        options.check_chats()
    source: TokensSource
    if options.packing:
        source = BlocksSource(tokens, fingerprint, where, options.max_length or 1)
    else:
        left_out = tokens.short[1] if len(tokens.short) > 1 else None  # of a packed file none
        length = options.max_length
        source = DocumentsSource(tokens, fingerprint, where, length, options.stride, left_out)
    return TokensDecoder(source, name, text_of)


def packed_decoder(tokens: PackedTokens, options: TextOptions) -> TextDecoder:
    """Documents, windows or blocks of packed files, with the fingerprint that the texts themselves
    would have.
    """
    info = tokens.info
    fingerprint = info.fingerprint
    if options.is_in_parts:
        way = way_fingerprint(info.text.get("tokenizer"), info.text.get("end_token"))
        fingerprint = f"{fingerprint}:{way}"
    name = info.text.get("unit", "file")
    return decoder_of_tokens(tokens, fingerprint, tokens.location, name, None, options)


def packed_tokens(
    data_path: Any, given: dict[str, Any], reach: RemoteOptions
) -> PackedTokens | None:
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
    if not isinstance(data_path, FileSet):
        kind, _ = look_for(data_path, (TEXTS, HDF5), reach, lists=False)
        if kind is not HDF5:
            return None
    paths, opened = open_files(data_path, reach)
    try:
        hdf5 = opened.hdf5
        tokens = PackedTokens(hdf5.read_each(paths, lambda path: PackedFile(path, hdf5)))
    except BaseException:
        opened.close()
        raise
    if given:
        tokens.files.close()
        described = ", ".join(describe_argument(name, value) for name, value in given.items())
        raise ConfigError(
            f"{described}: {tokens.shown} holds tokens, so packing has decided this: leave it out, "
            "or open the texts themselves"
        )
    return tokens


def tokenizer_of(tokens: PackedTokens) -> CharTokenizer | None:
    """The `CharTokenizer` that a file was made with; None: it was another one."""
    call = tokens.info.text.get("tokenizer") or ""
    if not (call.startswith(_CHARACTERS) and call.endswith(")")):
        return None
    inside = call[len(_CHARACTERS) : -1]
    return CharTokenizer(ast.literal_eval(inside) if inside else None)
