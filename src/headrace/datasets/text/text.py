"""Texts as token ids: files, lines, records, chats, windows, or packed blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
    describe_held,
    split_options,
)
from headrace.core.reader import SampleReader, WorkerThreads
from headrace.core.values import Access, Decoded, Records
from headrace.core.views import targets_of_view
from headrace.datasets.text.decoders import TextDecoder, TextOptions, Texts
from headrace.datasets.text.opening import (
    decoder_of_tokens,
    open_column,
    open_texts,
    packed_decoder,
    packed_tokens,
    tokenizer_of,
)
from headrace.datasets.text.passes import read_targets, targets_of, tokens_of
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError
from headrace.formats.describe import Description
from headrace.formats.files import folder_targets, warn_of_splits
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.text.plain import Room, check_encoding
from headrace.formats.text.records import TEXT_FIELD
from headrace.formats.text.source import LinesSource
from headrace.formats.tokens import Tokens
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks
from headrace.tokenizer import CharTokenizer, identity_of

_OF_READING = frozenset({"cache_dir", "on_error", "progress", "max_memory_usage"}) | REMOTE
"""Options that the documents of a dataset of windows or blocks are read with."""


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
        encoding, errors: encoding of the texts and its error handling, as in Python. A UTF-8 byte
            order mark is removed.
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
    _texts: TextDecoder
    _documents: TextDataset | None = None
    """Of windows and blocks of texts: the whole documents."""

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
        if unit is None and chat_template is not None:
            unit = "chat"
        is_of_fields = text_field != TEXT_FIELD or target_field is not None or delimiter is not None
        if unit is None and is_of_fields and column is None:
            unit = "record"
        self.tokenizer: Any = CharTokenizer() if tokenizer is None else tokenizer
        self.max_length = max_length
        self.classes = []
        reach, common = split_options(options)
        of_texts: dict[str, Any] = {
            "unit": unit,
            "column": column,
            "text_field": text_field,
            "target_field": target_field,
            "labels": labels,
            "encoding": check_encoding(encoding, errors),
            "errors": errors,
            "chat_template": chat_template,
            "delimiter": delimiter,
        }
        texts = TextOptions(
            tokenizer=self.tokenizer,
            max_length=max_length,
            stride=stride,
            packing=packing,
            end_token=end_token,
            cache_dir=reach.cache_dir,
            progress=common.get("progress"),
            **of_texts,
        )
        reading: dict[str, Any] = {
            name: value for name, value in options.items() if name in _OF_READING
        }
        targets: Any = None
        decoder: TextDecoder
        packed = None
        if column is None:
            given = texts.packed_already()
            if tokenizer is not None:
                given["tokenizer"] = tokenizer
            packed = packed_tokens(data_path, given, reach)
        if packed is not None:
            decoder = packed_decoder(packed, texts)
            self.tokenizer = tokenizer_of(packed)
            self.classes = list(packed.info.classes or [])
            targets = self._targets_of_parts(packed.targets, decoder, texts)
        elif texts.is_in_parts:
            documents = TextDataset(data_path, tokenizer=self.tokenizer, **of_texts, **reading)
            decoder = decoder_of_tokens(
                *documents.tokens(end_token),
                documents.sample_source.location,
                documents.document_unit,
                documents.text_of,
                texts,
            )
            self._documents = documents
            self.classes = documents.classes
            targets = self._targets_of_parts(documents.targets, decoder, texts)
        elif column is not None:
            decoder, targets, self.classes = open_column(data_path, reach, texts, reading)
        else:
            usage = options.get("max_memory_usage", 0.8)
            room = Room(MemoryBudget(usage, local_world_size=local_ranks))
            decoder = open_texts(data_path, reach, texts, room)
            if labels is not None:
                targets, self.classes = _folder_labels(decoder.source)
            else:
                warn_of_splits(decoder.source.listing)
            if target_field is not None:
                on_error = options.get("on_error", "raise")
                reader = SampleReader(decoder.source, on_error, WorkerThreads())
                targets, self.classes = targets_of(decoder, reader)
                decoder.splits_targets = decoder.always_pairs = targets is None
        self._texts = decoder
        super().__init__(
            decoder.source,
            sample_decoder=decoder,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def describe(self) -> Description:
        found = super().describe()
        texts = self._texts
        if isinstance(texts, Texts) and isinstance(texts.source, LinesSource) and len(texts.source):
            with contextlib.suppress(FormatError):
                row = texts.row(0, texts.source.read([0])[0])
                if isinstance(row, dict):
                    found.facts["fields"] = ", ".join(row)
        return found

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Numbers of the classes by name."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def is_of_chats(self) -> bool:
        """True if the documents are chats, of which the assistant's tokens are labels."""
        return self._texts.is_marked

    @property
    def tokenizer_identity(self) -> str | None:
        """What the tokenizer, and of chats its template, are known by at another start; None:
        they can't be known again.
        """
        texts = self._texts if self._documents is None else self._documents._texts
        if isinstance(texts, Texts):
            return texts.identity
        return identity_of(self.tokenizer)

    @property
    def document_unit(self) -> str:
        """What a document is: "file", "line", "record" or "chat"."""
        return self._texts.name

    @property
    def _tokenized(self) -> Texts:
        assert isinstance(self._texts, Texts)
        return self._texts

    def text_of(self, index: int) -> str:
        """Returns the text of a sample before tokenisation; for a chat the rendered text, for a
        window the text of its document.

        Raises:
            SampleError: the text can't be read.
            ConfigError: there are no texts; or, with `packing`, a block belongs to no single one.
        """
        whole = int(self.whole_indices(range(len(self))[index]))
        return self._texts.text_of(whole, self.sample_reader)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each sample ([n] int64).

        For texts that are not tokenised yet, another measure is used: characters of the texts for
        records and columns, which are all read for it, and bytes for files, lines and chats in text
        files.
        """
        with self.block_memory.in_order():
            lengths = self._texts.lengths(self.sample_reader)
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

    def _targets_of_parts(self, targets: Any, decoder: TextDecoder, options: TextOptions) -> Any:
        """Of the targets of documents those of the samples: a window has that of its document, a
        block has none.
        """
        if options.packing:
            self.collate = None
            return None
        if options.stride is None:
            return targets
        numbers = decoder.source.document_of(np.arange(len(decoder.source)))
        return targets_of_view(targets, numbers)

    # -- what is packed

    def tokens(self, end_token: int | None = None) -> tuple[Tokens, str]:
        """All tokens of all whole documents, and a fingerprint of them: what is packed. Not of
        windows, blocks and packed files, which have them already.

        Raises:
            SampleError: a document can't be read, or tokenised.
            BudgetError: the tokens can't be kept on disk, and don't fit the memory budget.
        """
        with self.block_memory.in_order():
            return tokens_of(self._tokenized, self.sample_reader.another(), end_token, self.budget)

    def ids_of(self, numbers: list[int]) -> list[Any]:
        """The ids of whole documents by their number in the source; a SampleError for each that
        can't be read.
        """
        documents = Decoded(Records(self.sample_source))
        return documents.read(
            numbers, Access(self.sample_reader.another(), self._tokenized.uncut())
        )

    def text_nbytes(self, numbers: IntArray) -> IntArray:
        """About how many bytes the text of each of some documents has, by its number in the
        source ([n] int64).
        """
        return self._tokenized.nbytes(numbers, self.sample_reader)

    def record_targets(self) -> list[Any] | None:
        """The target of each record, where they are of several kinds; None: there are none."""
        texts = self._texts
        if not isinstance(texts, Texts) or not texts.splits_targets:
            return None
        return read_targets(texts, self.sample_reader, self.whole_indices(np.arange(len(self))))


def _folder_labels(source: Any) -> tuple[npt.NDArray[np.int64], list[str]]:
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
