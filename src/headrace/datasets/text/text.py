"""Texts as token ids: files, lines, records, chats, windows, or packed blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.core.checks import check_arguments
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, split_options
from headrace.datasets.text.documents import TokenizedDataset
from headrace.datasets.text.opening import (
    folder_labels,
    open_texts,
    packed_tokens,
    packed_unit,
    tokenizer_of,
)
from headrace.datasets.text.options import TextOptions, of_reading
from headrace.datasets.text.units import RecordTexts, TextUnit
from headrace.errors import FormatError
from headrace.io.resolve.expressions import DataPath
from headrace.storage.class_folders import warn_of_splits
from headrace.storage.describe import Description
from headrace.storage.text.lines import Newline
from headrace.storage.text.plain import check_encoding
from headrace.storage.text.records import TEXT_FIELD
from headrace.tokenizer import CharTokenizer


class TextDataset(TokenizedDataset):
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
        unit: what a document is. "file": each file. "line": each line, blank ones included.
            "record": each record of .jsonl (a line), .json (an element of its list), .csv and .tsv
            (a row; the first row has the names). "chat": each record, as a chat. None: "record" if
            all files are .jsonl, .csv, .tsv (.gz and .zst too) or .json, of which the first holds a
            list of objects or strings, or if a field is named; "chat" if in addition the tokenizer
            has a chat template and the first record has ``messages``; else "file". A mixture of
            files with and without records is an error.
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
        newline: line ending, as in Python's ``open``. None: LF, CR or CRLF; or one of these.
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
    _decoder: TextUnit

    def __init__(
        self,
        data_path: DataPath,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        unit: Literal["file", "line", "record", "chat"] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        text_field: str | Callable[[Any], str] = TEXT_FIELD,
        target_field: str | None = None,
        labels: Literal["folders"] | None = None,
        stride: int | None = None,
        packing: bool = False,
        end_token: int | None = None,
        newline: Newline = None,
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
        if unit is None and is_of_fields:
            unit = "record"
        self.tokenizer: Any = CharTokenizer() if tokenizer is None else tokenizer
        self.max_length = max_length
        self.classes: list[str] = []
        reach, common = split_options(options)
        on_error = options.get("on_error", "raise")
        texts = TextOptions(
            tokenizer=self.tokenizer,
            max_length=max_length,
            unit=unit,
            text_field=text_field,
            target_field=target_field,
            labels=labels,
            stride=stride,
            packing=packing,
            end_token=end_token,
            newline=newline,
            encoding=check_encoding(encoding, errors),
            errors=errors,
            chat_template=chat_template,
            delimiter=delimiter,
            cache_dir=reach.cache_dir,
            progress=common.get("progress"),
        )
        given = texts.packed_already()
        if tokenizer is not None:
            given["tokenizer"] = tokenizer
        packed = packed_tokens(data_path, given, reach)
        sample_decoder: TextUnit
        targets: npt.NDArray[Any] | None = None
        if packed is not None:
            sample_decoder = packed_unit(packed, texts)
            self.tokenizer = tokenizer_of(packed)
            self.classes = list(packed.info.classes or [])
            targets = self._targets_of_parts(packed.targets, sample_decoder, texts)
        elif texts.is_in_parts:
            documents = TextDataset(
                data_path,
                tokenizer=self.tokenizer,
                unit=unit,
                text_field=text_field,
                labels=labels,
                newline=newline,
                encoding=encoding,
                errors=errors,
                chat_template=chat_template,
                delimiter=delimiter,
                **of_reading(options),
            )
            sample_decoder, targets = self._cut(documents, texts)
        else:
            usage = options.get("max_memory_usage", 0.8)
            sample_decoder = open_texts(data_path, reach, texts, usage, on_error)
            if labels is not None:
                targets, self.classes = folder_labels(sample_decoder.source)
            else:
                warn_of_splits(sample_decoder.source.listing)
            if isinstance(sample_decoder, RecordTexts) and sample_decoder.targets is not None:
                _, targets, self.classes = sample_decoder.targets
        self._texts = sample_decoder
        super().__init__(
            sample_decoder.source,
            sample_decoder=sample_decoder,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def describe(self) -> Description:
        found = super().describe()
        source: Any = self.sample_source
        if getattr(source, "has_records", False) and len(source):
            with contextlib.suppress(FormatError):
                record = source.fields(0, source.read([0])[0].decode("utf-8", "replace"))
                if isinstance(record, dict):
                    found.facts["fields"] = ", ".join(record)
        return found

    def lengths(self) -> npt.NDArray[np.int64]:
        lengths = super().lengths()
        assert lengths is not None
        if isinstance(self.tokenizer, CharTokenizer) and self.max_length is not None:
            return np.minimum(lengths, self.max_length)
        return lengths
