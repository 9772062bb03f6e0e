"""Reads texts as token ids: files, lines, records, chats, columns, windows or packed blocks."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.core.options import (
    REMOTE,
    LoadingMode,
    ModeName,
    PathOptions,
    check_arguments,
    describe_argument,
    describe_held,
)
from headrace.core.reader import SampleReader, WorkerThreads
from headrace.core.views import targets_of_view
from headrace.datasets.table import open_rows
from headrace.datasets.text.chats import OPTIONS, SYSTEM, TOOLS, Chats
from headrace.datasets.text.decoders import (
    CHAT,
    OF_DOCUMENTS,
    BlocksDecoder,
    TextDecoder,
    TextOptions,
    Texts,
    TokensDecoder,
    has_template,
    holds_chat,
)
from headrace.datasets.text.passes import class_numbers, targets_of, tokens_of, way_fingerprint
from headrace.errors import ConfigError, FormatError
from headrace.formats.files import check_splits, folder_targets
from headrace.formats.hdf5 import HDF5
from headrace.formats.registry import detect, open_columns
from headrace.formats.resolve.file_set import TARS, TEXTS, FileSet, Format
from headrace.formats.resolve.resolver import DataPath, entries_of, named_format
from headrace.formats.table.files import TABLES
from headrace.formats.table.source import TableSource
from headrace.formats.tar import TarSource
from headrace.formats.text import records
from headrace.formats.text.plain import check_encoding
from headrace.formats.text.records import TEXT_FIELD
from headrace.formats.text.source import LinesSource, TextFilesSource
from headrace.formats.tokens import BlocksSource, DocumentsSource, PackedTokens
from headrace.formats.trees import open_trees
from headrace.formats.zarr.stores import ZARR
from headrace.io.array_file import FileArrays
from headrace.io.paths import is_url, redact, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks
from headrace.tokenizer import CharTokenizer, identity_of

_CHARACTERS = "CharTokenizer("
_LOOKED_AT = 8  # records that decide whether all are chats
_OF_READING = frozenset({"cache_dir", "on_error", "progress", "max_memory_usage"}) | REMOTE
"""Options that a dataset of windows or blocks passes on to its documents."""


class TextDataset(BaseDataset):
    """Texts as token ids. A sample is ``{"input_ids": int64 [tokens]}``, with ``"labels"`` if there
    are targets.

    Samples are not padded. `TextCollator`, the default of a loader, pads batches.

    With ``stride``, samples are windows over whole documents. With ``packing=True``, samples are
    blocks of `max_length` tokens over the concatenation of all documents: ``{"input_ids": int64
    [max_length], "document_ids": int32 [max_length]}`` (see `document_mask`). Both need all tokens
    in advance. Tokens are made once and cached in `cache_dir` if the tokenizer can be identified
    (`CharTokenizer`, HuggingFace's fast tokenizers, `tokenizers.Tokenizer`, or an attribute
    ``fingerprint`` of type str), else in memory.

    Chats are records with ``messages`` (or ``conversations``, as in ShareGPT), rendered by the
    tokenizer's chat template. A sample is ``{"input_ids": int64 [tokens], "labels": int64
    [tokens]}``. Labels are the ids of what the template encloses in ``{% generation %}`` and ``{%
    endgeneration %}``, and -100 elsewhere. It is an error if a chat has no assistant's turn, or if
    none of it remains after the cut at `max_length`. With `packing`, blocks have "labels" too.

    With ``column=``, documents are the values of a column of Parquet, Arrow, HDF5 or Zarr, or the
    members with one extension of .tar shards: texts, their bytes (in `encoding`), or ids. Chats are
    read from tables too, with their columns "system", "tools" and "chat_template_kwargs".

    Files that `headrace.pack` made from texts (.h5, .hdf5, .he5) contain tokens, which are read by
    byte ranges. Several are read as one. The options for texts and tokenizer were fixed when they
    were packed.

    Args:
        data_path: a folder (searched recursively), a file, a glob, a URL, or a list of these: .txt,
            .md, .csv, .tsv, .json, .jsonl (or .ndjson), also .gz and .zst. Lines and records of
            compressed files are read through a plain copy in `cache_dir`. Or files that
            `headrace.pack` made, a folder of their parts, or their URLs.
        tokenizer: a callable from a text to a list of ids, a HuggingFace tokenizer, a
            `tokenizers.Tokenizer`, or an object with ``encode_batch`` or ``encode``. Chats need a
            fast HuggingFace tokenizer. None: `CharTokenizer()`.
        max_length: maximum number of tokens of a sample; longer ones are cut. None: no limit.
            Required by `stride` and `packing`.
        unit: what a document is. "file": each file. "line": each line, blank ones included;
            it ends at LF, CR or CRLF.
            "record": each record of .jsonl (a line), .json (an element of its list), .csv and .tsv
            (a row; the first row has the names). "chat": each record, as a chat. None: "record" if
            all files are .jsonl, .csv, .tsv (.gz and .zst too) or .json, of which the first holds a
            list of objects or strings, or if a field is named; "chat" if in addition the tokenizer
            has a chat template and the first record has ``messages``; else "file". A mixture of
            files with and without records is an error.
        column: name of the column with the texts, of a table, an HDF5 file or a Zarr store; of .tar
            shards the extension. `target_field` then names another column.
        transform: a callable that is applied to the sample's dict without "labels"; for chats with
            them.
        loading_mode: see `LoadingMode`.
        text_field: for records: name of the field with the text, or a callable from the record (a
            dict) to its text. Not needed if a record is itself a text, as in a .json list of texts.
            For chats: name of the field with the messages.
        target_field: for records: name of the field that becomes "labels". Numbers stay numbers; if
            a table's column contains only numbers, `targets` is int64 or float64. Texts become
            class numbers, in sorted order of the texts. Other values, and mixtures, are unchanged,
            and `targets` is None. All records are read once to determine this.
        labels: "folders": "labels" are class numbers from the first-level folders, and `classes`
            are their names.
        stride: number of tokens from the start of one window to the start of the next, at most
            `max_length`.
        packing: True: samples are blocks; an incomplete block at the end of all tokens is dropped.
        end_token: id that is appended to each document, for `stride` and `packing`. None: no token.
        encoding, errors: encoding and error handling, as in Python's `open`. A UTF-8 byte order
            mark is removed.
        chat_template: replaces the tokenizer's own template: Jinja, or the name of one of the
            tokenizer's templates.
        delimiter: character between the fields of .csv and .tsv. None: a comma, and a tab.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        tokenizer, max_length: the values in use. For a packed file that was not made with a
            `CharTokenizer`, `tokenizer` is None.
        classes, class_to_idx: class names, and their numbers, if `labels` or a `target_field` of
            texts defines classes.

    A text that needs more than 16 MiB and more than a quarter of the remaining memory budget is not
    read; its sample is an error.

    Raises:
        ConfigError: an argument is invalid; a tokenizer for chats has no chat template, or one
            without ``{% generation %}``; or files with records are mixed with other texts and
            `unit` is not given.
        DataNotFoundError: the path does not exist, or contains no texts.
        MissingNameError: there is no such column.
        AccessError: a file can't be read; or a plain copy is needed and `cache_dir` is not
            writable.
        FormatError: a file is damaged or has another encoding; files of this kind have no records;
            or the first line of a table does not name `text_field`.
        SampleError: with `stride`, `packing` or `target_field`: a text can't be read or tokenised,
            or has no target.
        RemoteError, FileChangedError: a request to a server failed; or a file changed since it was
            opened.
    """

    reads_urls = True
    collate: Callable[[list[Any]], Any] | str | None = "text"
    classes: list[str]
    _decoder: TextDecoder
    _documents: TextDataset | None = None
    """For windows and blocks: the dataset of the whole documents."""

    def __init__(
        self,
        data_path: DataPath,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        unit: Literal["file", "line", "record", "chat"] | None = None,
        column: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        text_field: str | Callable[[Any], str] = TEXT_FIELD,
        target_field: str | None = None,
        labels: Literal["folders"] | None = None,
        stride: int | None = None,
        packing: bool = False,
        end_token: int | None = None,
        encoding: str = "utf-8",
        errors: str = "strict",
        chat_template: str | None = None,
        delimiter: str | None = None,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        is_of_fields = text_field != TEXT_FIELD or target_field is not None or delimiter is not None
        if unit is None and chat_template is not None:
            unit = "chat"
        elif unit is None and is_of_fields and column is None:
            unit = "record"
        self.tokenizer: Any = CharTokenizer() if tokenizer is None else tokenizer
        self.max_length = max_length
        self.classes = []
        reach, common = RemoteOptions.split(options)
        texts = TextOptions(
            tokenizer=self.tokenizer,
            max_length=max_length,
            unit=unit,
            column=column,
            text_field=text_field,
            target_field=target_field,
            labels=labels,
            stride=stride,
            packing=packing,
            end_token=end_token,
            encoding=check_encoding(encoding, errors),
            errors=errors,
            chat_template=chat_template,
            delimiter=delimiter,
            cache_dir=reach.cache_dir,
            progress=common.get("progress"),
        )
        reading: dict[str, Any] = {
            name: value for name, value in options.items() if name in _OF_READING
        }
        targets: Any = None
        decoder: TextDecoder
        packed = None
        where: DataPath | FileSet = data_path
        if column is None:
            given = texts.given()
            if tokenizer is not None:
                given["tokenizer"] = tokenizer
            if isinstance(data_path, FileSet):
                kind: Format | None = data_path.kind
            else:
                kind, paths = named_format(data_path, (TEXTS, HDF5), reach)
                if kind is TEXTS:
                    where = paths
            if kind is HDF5:
                packed = _packed_tokens(data_path, given, reach)
        if packed is not None:
            info = packed.info
            fingerprint = info.fingerprint  # that the texts themselves would have
            if texts.is_in_parts:
                way = way_fingerprint(info.text.get("tokenizer"), info.text.get("end_token"))
                fingerprint = f"{fingerprint}:{way}"
            name = info.text.get("unit", "file")
            self.tokenizer = _tokenizer_of(packed)
            self.classes = list(info.classes or [])
            decoder, targets = _open_tokens(
                packed, fingerprint, packed.location, name, packed.targets, texts
            )
        elif texts.is_in_parts:
            which = {name: getattr(texts, name) for name in OF_DOCUMENTS}
            documents = TextDataset(where, tokenizer=self.tokenizer, **which, **reading)
            self._documents = documents
            self.classes = documents.classes
            tokens, fingerprint = documents.tokens(end_token)
            location = documents.sample_source.location
            name = documents.document_unit
            decoder, targets = _open_tokens(
                tokens, fingerprint, location, name, documents.targets, texts
            )
        elif column is not None:
            decoder, targets, self.classes = _open_column(data_path, reach, texts, reading)
        else:
            usage = options.get("max_memory_usage", 0.8)
            budget = MemoryBudget(usage, local_world_size=local_ranks)
            decoder = _open_texts(where, reach, texts, budget)
            if labels is not None:
                targets, self.classes = folder_targets(decoder.source.listing)
                if targets is None:
                    raise ConfigError('labels="folders": the files are not in class folders')
                if isinstance(decoder.source, LinesSource):
                    targets = targets[decoder.source.file_of(np.arange(len(decoder.source)))]
            else:
                check_splits(decoder.source.listing)
            if target_field is not None:
                on_error = options.get("on_error", "raise")
                reader = SampleReader(decoder.source, on_error, WorkerThreads())
                targets, self.classes = targets_of(decoder, reader)
                decoder.splits_targets = decoder.always_pairs = targets is None
        if packing:
            self.collate = None  # blocks have one length
        super().__init__(
            decoder.source,
            sample_decoder=decoder,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Numbers of the classes by name."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def tokenizer_identity(self) -> str | None:
        """Identifies the tokenizer, and its chat template, in later runs. None: they can't be
        identified.
        """
        texts = self._decoder if self._documents is None else self._documents._decoder
        if isinstance(texts, Texts):
            return texts.identity
        return identity_of(self.tokenizer)

    @property
    def document_unit(self) -> str:
        """What a document is: "file", "line", "record" or "chat"."""
        return self._decoder.name

    @property
    def _tokenized(self) -> Texts:
        assert isinstance(self._decoder, Texts)
        return self._decoder

    def text_of(self, index: int) -> str:
        """Returns the text of a document before tokenisation; for a chat the rendered text.

        Raises:
            SampleError: the text can't be read.
            ConfigError: samples are ids, windows or blocks.
        """
        if not isinstance(self._decoder, Texts):
            raise ConfigError("text_of: samples are tokens here, not texts: decode them")
        whole = int(self.whole_indices(range(len(self))[index]))
        return self._decoder.text_of(whole, self.sample_reader)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each sample ([n] int64).

        For texts that are not tokenised yet, another measure is used: characters of the texts for
        records and columns, which are all read for it, and bytes for files, lines and chats in text
        files.
        """
        lengths = self._decoder.lengths(self.sample_reader)
        if self._chosen is not None:
            lengths = lengths[self._chosen]
        if isinstance(self.tokenizer, CharTokenizer) and self.max_length is not None:
            return np.minimum(lengths, self.max_length)
        return lengths

    def held_as(self) -> str:
        if self._arguments.get("tokenizer") is None:
            return super().held_as()
        tokenizer = self.tokenizer_identity or self.tokenizer
        return describe_held(type(self), {**self._arguments, "tokenizer": tokenizer})

    # -- for packing

    def tokens(self, end_token: int | None = None) -> tuple[FileArrays, str]:
        """All tokens of all whole documents, and their fingerprint. Not for windows, blocks and
        packed files.

        Raises:
            SampleError: a document can't be read or tokenised.
            BudgetError: the tokens can't be cached on disk, and don't fit the memory budget.
        """
        return tokens_of(self._tokenized, self.sample_reader.another(), end_token, self.budget)


# -- texts


def _open_texts(
    data_path: DataPath, reach: RemoteOptions, options: TextOptions, budget: MemoryBudget
) -> Texts:
    """The texts of a path, in the unit of the options, or else in that of the files' names and
    the first record.

    Args:
        data_path: see `TextDataset`.
        reach: how URLs are read.
        options: the options of the dataset.
        budget: limits the size of one text.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, RemoteError: see `TextDataset`.
    """
    unit = options.unit
    codec = options.encoding, options.errors
    entries = list(entries_of(data_path))
    for entry in entries:
        if any(container.fits(os.fsdecode(entry)) for container in (TABLES, TARS, ZARR)):
            raise ConfigError(f"{redact(entry)} has columns: pass column= with that of the texts")
    if unit is None and all(
        is_url(url) and without_query(url).lower().endswith(records.BY_RECORD) for url in entries
    ):
        unit = "record"  # saves a request for each file
    where: DataPath | FileSet = data_path
    if unit in (None, "file"):
        files = TextFilesSource(data_path, reach, budget, codec)
        unit = unit or records.unit_of(files.listing, files.head)
        if unit == "file":
            _check_delimiter(options, False)
            return Texts(files, options, "file")
        where = files.listing
    source = LinesSource(
        where,
        "line" if unit == "line" else "record",
        reach,
        codec=codec,
        budget=budget,
        progress=options.progress,
        delimiter=options.delimiter,
    )
    try:
        _check_delimiter(options, any(source.headers))
        _check_headers(source, options)
    except BaseException:
        source.close()
        raise
    if unit == "line":
        return Texts(source, options, "line")
    found = Texts(source, options, "record")
    may_hold_chats = options.unit is None and has_template(options.tokenizer)
    if unit == CHAT or (may_hold_chats and holds_chat(_first_row(found))):
        return Chats(source, options)
    return found


def _first_row(texts: Texts) -> Any:
    """The first readable record among the first ones, or None."""
    for index in range(min(len(texts.source), _LOOKED_AT)):
        try:
            return texts.row(index, texts.source.read([index])[0])
        except FormatError:
            continue  # an error of that sample
    return None


def _check_delimiter(options: TextOptions, has_tables: bool) -> None:
    if options.delimiter is not None and not has_tables:
        raise ConfigError(
            f"delimiter={options.delimiter!r} is for records of .csv and .tsv: leave it out"
        )


def _check_headers(source: LinesSource, options: TextOptions) -> None:
    """Raises a FormatError if the first line of a table lacks a field of the options."""
    wanted = [options.text_field, options.target_field]
    if options.unit == CHAT and options.text_field == records.TEXT_FIELD:
        wanted = []  # messages may stand in several fields
    for text, names in zip(source.texts, source.headers, strict=True):
        for name in wanted:
            if not names or not isinstance(name, str) or names.count(name) == 1:
                continue
            hint = ": pass text_field= or target_field="
            if len(names) == 1 and text.delimiter is not None:
                hint = records.another_delimiter(names[0], text.delimiter) or hint
            raise FormatError(
                f"{redact(text.shown)}: its first line has {', '.join(map(repr, names[:20]))}, "
                f"and {names.count(name) or 'no'} field {name!r}{hint}; without a header add "
                "one, or pass unit='line' or 'file'"
            )


def _open_column(
    data_path: DataPath, reach: RemoteOptions, options: TextOptions, reading: Mapping[str, Any]
) -> tuple[Texts, Any, list[str]]:
    """The texts, bytes or ids in a column of any container, and the targets of its rows.

    Args:
        data_path: path of tables, HDF5 files, Zarr stores, tars, or another package's format.
        reach: how URLs are read.
        options: the options of the dataset, which name the column.
        reading: options of `BaseDataset` that concern reading.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, RemoteError: see `TextDataset`.
        MissingNameError: there is no such column.
    """
    column = options.column
    assert column is not None
    files = detect(data_path, reach)
    source: Any
    value_of: Callable[[Any], Any] | None = None
    targets: Any = None
    classes: list[str] = []
    rows: Any = open_rows(files, column, options.target_field, reading)
    if rows is not None:
        source = rows.sample_source
        value_of = None if files.kind is TABLES else rows._decoder.decode
        targets = rows.targets
        classes = list(rows.classes or ())
    elif options.target_field is not None:
        raise ConfigError(f"target_field is not supported for columns of {files.kind.name} yet")
    elif files.kind is TARS:
        source = TarSource(files, reach, options.progress)
    else:
        source = open_columns(files, reach, [column]).column(column)
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        targets, classes = class_numbers(targets)
    texts = Texts(source, options, "record", value_of)
    is_chat = options.unit == CHAT
    if options.unit is None and has_template(options.tokenizer):
        is_chat = holds_chat(_first_row(texts))
    if not is_chat:
        return texts, targets, classes
    if isinstance(source, TableSource):
        along = [name for name in (SYSTEM, TOOLS, OPTIONS) if name in source.first.schema.names]
        source = TableSource(source.tables, source.files, [column, *along])
        value_of = None
    return Chats(source, options, value_of), None, []


# -- stored tokens


def _open_tokens(
    tokens: FileArrays | PackedTokens,
    fingerprint: str,
    where: Callable[[int], str],
    name: str,
    targets: Any,
    options: TextOptions,
) -> tuple[TextDecoder, Any]:
    """Documents, windows or blocks of tokens, and their targets: a window has that of its document,
    a block has none.

    Args:
        tokens: the tokens of all documents.
        fingerprint: that of the tokens, or of the documents.
        where: returns the location of a document.
        name: what a document is.
        targets: the targets of the documents, or None.
        options: the options of the dataset.

    Raises:
        ConfigError: there are fewer tokens than in a block; or an option does not apply to chats.
    """
    if name == CHAT:
        options.check_chats()
    length = options.max_length
    if options.packing:
        assert length is not None
        return BlocksDecoder(BlocksSource(tokens, fingerprint, where, length), name), None
    source = DocumentsSource(tokens, fingerprint, where, length, options.stride)
    if options.stride is not None:
        targets = targets_of_view(targets, source.document_of(np.arange(len(source))))
    return TokensDecoder(source, name), targets


def _packed_tokens(data_path: Any, given: dict[str, Any], reach: RemoteOptions) -> PackedTokens:
    """The tokens of packed files, local or remote.

    Args:
        data_path: the path of the dataset.
        given: the given arguments that packing has fixed.
        reach: how URLs are read.

    Raises:
        ConfigError: `given` is not empty.
        FormatError, AccessError: a file is damaged, was not packed from texts, or can't be read; or
            files were packed in different ways.
        DataNotFoundError, RemoteError: a URL does not exist; a request to a server failed.
    """
    paths, opened = open_trees(data_path, HDF5, reach)
    try:
        tokens = PackedTokens(paths, opened)
    except BaseException:
        opened.close()
        raise
    if given:
        tokens.files.close()
        described = ", ".join(describe_argument(name, value) for name, value in given.items())
        raise ConfigError(
            f"{described}: fixed when {tokens.path} was packed: leave it out, or open the texts"
        )
    return tokens


def _tokenizer_of(tokens: PackedTokens) -> CharTokenizer | None:
    """The `CharTokenizer` that a file was packed with. None: it was another tokenizer."""
    call = tokens.info.text.get("tokenizer") or ""
    if not (call.startswith(_CHARACTERS) and call.endswith(")")):
        return None
    inside = call[len(_CHARACTERS) : -1]
    return CharTokenizer(ast.literal_eval(inside) if inside else None)
