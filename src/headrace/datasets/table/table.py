"""Rows of Parquet, Arrow and NumPy files as samples."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.casting import DTypeArgument, dtype_named
from headrace.datasets.arrays import joined_rows, joined_targets
from headrace.datasets.core.budgeting import DatasetBudget
from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.construction import describe_held
from headrace.datasets.core.format import SampleFormat, chained
from headrace.datasets.core.options import PathOptions, split_options
from headrace.datasets.core.views import targets_of_view
from headrace.datasets.image.augment import image_sides, split_augment
from headrace.datasets.image.format import DEFAULT_SIZE, UNSET, ImageFormat, check_image_options
from headrace.datasets.table.format import ColumnImage, ColumnImages, TableFormat
from headrace.datasets.table.texts import ColumnChats, ColumnTexts, columns_along
from headrace.datasets.text.documents import TokenizedDataset
from headrace.datasets.text.opening import Cutting, parts_of
from headrace.datasets.text.options import (
    CHAT,
    OF_READING,
    TextOptions,
    check_chat_options,
    check_text_options,
)
from headrace.datasets.text.units import TextUnit
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import redact
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.modes import LoadingMode, ModeName
from headrace.storage.class_folders import warn_of_splits
from headrace.storage.table.arrays import open_arrays
from headrace.storage.table.columns import (
    holds_chats,
    holds_images,
    is_bytes,
    is_categorical,
    is_text,
)
from headrace.storage.table.files import TABLES, TableFile, classes_in, hold_arrays
from headrace.storage.table.source import TableSource, open_tables
from headrace.storage.text.records import TEXT_FIELD
from headrace.tokenizer import CharTokenizer, identity_of, vocabulary_of

_IMAGE_OPTIONS: dict[str, Any] = {
    "image_size": UNSET,
    "color": "RGB",
    "normalize": True,
    "transform_input": "pil",
    "decode": "fast",
}
_TEXT_OPTIONS: dict[str, Any] = {
    "tokenizer": None,
    "max_length": None,
    "chat_template": None,
    "stride": None,
    "packing": False,
    "end_token": None,
}


class TableDataset(TokenizedDataset):
    """Rows of a table as dicts of its columns. With `target_name` a sample is ``(row, target)``.

    Numbers are tensors of their dtype, lists of numbers 1-D tensors, texts str, and bytes bytes;
    lists and structs of these are lists and dicts. Row groups of Parquet files and record batches
    of Arrow files are the blocks of ``shuffle="block"``; each is decoded once for all rows of a
    batch. Record batches of local, uncompressed Arrow files are memory-mapped. A table that
    HuggingFace's `datasets` saved is opened in place.

    In NumPy files the rows of each array are samples: tensors for .npy, dicts of the arrays for
    .npz.

    Parquet and Arrow files need the package pyarrow: ``pip install 'headrace[arrow]'``.

    Args:
        data_path: a file; or several with equal columns, as a folder (searched for .parquet, .pq,
            .arrow, .feather, .npy, .npz), a glob, a pattern with braces or a list. Their rows are
            concatenated: a list's in its order, others sorted. Or fsspec URLs of such files, all on
            one server. The splits of a HuggingFace data set are separate tables.
        columns: list of column names: samples are dicts of these. One name as a str: samples are
            the values of that column. None: all columns except the targets, or, with `image_column`
            or `text_column`, only these.
        target_name: column of the targets, which is read when the table is opened.
            Dictionary-encoded texts, such as pandas categoricals, become class numbers (int64), in
            sorted order of the texts; other texts stay str.
        image_column: column of encoded images, as bytes or as structs {"bytes", "path"}, which are
            decoded as in `ImageDataset`. If no other column is read, the image itself is the
            sample's input.
        text_column: column of texts, which become ``"input_ids"`` (int64 [tokens]). If no other
            column is read, samples are those of `TextDataset`, and targets are their "labels". Or
            column of chats (lists of structs with "role" and "content"): "input_ids" and "labels"
            are those of chats in `TextDataset`, and columns "tools" and "chat_template_kwargs" are
            passed to the template.
        transform: a callable that is applied to the row (or the value, or the image).
        loading_mode: see `LoadingMode`.
        dtype: dtype that numbers are cast to in all columns, also inside lists and structs, but not
            targets, images, tokens and chats. None: unchanged.
        image_size, color, normalize, transform_input, decode: for `image_column`: see
            `ImageDataset`. If other columns are read too, `transform` receives the dict, with the
            image as a tensor.
        tokenizer, max_length, chat_template: for `text_column`: see `TextDataset`.
        stride, packing, end_token: for `text_column`, if no other column is read: samples are
            windows over the texts, blocks of tokens, or rows of whole texts or chats, as in
            `TextDataset`. With `stride` a window has the target of its row.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes, class_to_idx: class names, and their numbers, if targets are dictionary-encoded
            texts, or if HuggingFace's `datasets` stored them for `target_name` (`ClassLabel`).

    Raises:
        ConfigError: an argument is invalid, or pyarrow is missing.
        DataNotFoundError, FormatError: a file does not exist; it is damaged, or its values can't be
            samples.
        MissingNameError: there is no such column; the message lists the columns.
        SampleError: with `stride` or `packing`: a text can't be read or tokenised.
        AccessError, RemoteError: a file is not readable; a request to a server failed.
        FileChangedError: a file changed since it was opened.
        BudgetError: a decoded row group does not fit the memory budget; or tokens that can't be
            cached in `cache_dir` don't fit it.
    """

    reads_urls = True
    collate: Callable[[list[Any]], Any] | str | None = None
    _texts: ColumnTexts | ColumnChats | None = None

    def __init__(
        self,
        data_path: DataPath,
        columns: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        image_column: str | None = None,
        text_column: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        image_size: int | tuple[int, int] | None = UNSET,
        color: Literal["RGB", "L"] = "RGB",
        normalize: bool | Literal["host"] = True,
        transform_input: Literal["pil", "tensor", "numpy"] = "pil",
        decode: Literal["fast", "exact"] = "fast",
        tokenizer: Any = None,
        max_length: int | None = None,
        chat_template: str | None = None,
        stride: int | None = None,
        packing: bool | Literal["bfd"] = False,
        end_token: int | None = None,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        images: dict[str, Any] = {
            "image_size": image_size,
            "color": color,
            "normalize": normalize,
            "transform_input": transform_input,
            "decode": decode,
        }
        texts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "max_length": max_length,
            "chat_template": chat_template,
            "stride": stride,
            "packing": packing,
            "end_token": end_token,
        }
        _check_options("image_column", image_column, images, _IMAGE_OPTIONS)
        _check_options("text_column", text_column, texts, _TEXT_OPTIONS)
        columns = _checked_columns(columns)
        if not isinstance(target_name, (str, type(None))):
            raise ConfigError(
                f"target_name must be the name of one column, or None, not {target_name!r}"
            )
        check_image_options(color, transform_input, decode, normalize)
        unit = None if chat_template is None else CHAT
        check_text_options(
            max_length,
            unit,
            TEXT_FIELD,
            None,
            None,
            stride,
            packing,
            end_token,
            None,
            chat_template,
        )
        is_in_parts = bool(packing) or stride is not None
        if is_in_parts:
            _check_parts(packing, columns, text_column, target_name, image_column)
        vocabulary_of(tokenizer)  # raises where it is none
        cast_to = dtype_named(dtype)
        self.classes: list[str] = []
        self.tokenizer: Any = (
            CharTokenizer() if tokenizer is None and text_column is not None else tokenizer
        )
        reach, common = split_options(options)
        files = resolve(data_path, TABLES, reach)
        warn_of_splits(files)
        shown = redact(
            data_path if isinstance(data_path, (str, bytes, os.PathLike)) else files.url(0)
        )
        source: Any
        rows: SampleFormat
        targets: Any = None
        of_texts: ColumnTexts | ColumnChats | None = None
        if is_in_parts:
            of_reading: Any = {name: options[name] for name in OF_READING if name in options}  # type: ignore[literal-required]
            resolved: Any = files
            documents = TableDataset(
                resolved,
                text_column=text_column,
                target_name=target_name,
                tokenizer=self.tokenizer,
                chat_template=chat_template,
                **of_reading,
                **reach.keywords(),
            )
            of_texts, self.classes = documents._texts, documents.classes
            assert of_texts is not None
            check_chat_options(of_texts.is_marked, stride, None)
            cutting = Cutting(
                max_length, stride, packing, of_texts.is_marked, documents.on_error != "raise"
            )
            self._documents = documents
            rows = parts_of(documents.tokens(end_token), of_texts, documents.text_of, cutting)
            source, self.collate = rows.source, None if packing else "text"
            if documents.targets is not None:
                targets = targets_of_view(
                    documents.targets, source.document_of(np.arange(len(source)))
                )
        elif hold_arrays(files, shown):
            if image_column is not None or text_column is not None:
                raise ConfigError(
                    f"{shown} holds NumPy arrays, which have no columns of images or texts"
                )
            source, rows, targets = _numpy_rows(files, columns, target_name, cast_to)
        else:
            tables, reader = open_tables(files, shown)
            names, is_one = _names_of(
                tables[0],
                columns,
                target_name,
                [one for one in (image_column, text_column) if one is not None],
            )
            named, are_chats = names, text_column is not None and _are_chats(tables, text_column)
            if are_chats:
                names = (
                    *names,
                    *(name for name in columns_along(tables[0].schema) if name not in names),
                )
            source = TableSource(tables, reader, names, is_one and len(names) == 1)
            first = source.first
            _check_column(
                first,
                image_column,
                "image_column",
                "images: bytes, or structs with a field 'bytes'",
                holds_images,
            )
            _check_column(
                first,
                text_column,
                "text_column",
                "texts or chats",
                lambda kind: is_text(kind) or are_chats,
            )
            if are_chats and target_name is not None:
                raise ConfigError(
                    "target_name can't be given for chats, whose labels are the assistant's "
                    "tokens: leave it out"
                )
            if chat_template is not None and not are_chats:
                raise ConfigError(
                    f"chat_template is for chats, and the column {text_column!r} holds texts: "
                    "leave it out"
                )
            if target_name is not None:
                targets, self.classes = _targets(source, target_name)
            left = DatasetBudget(common.get("max_memory_usage", 0.8))
            made: ImageFormat | None = None
            if image_column is not None:
                is_alone = is_one and image_column in names
                has_joint = options.get("transforms") is not None
                made, transform = _image_format(
                    images, transform, has_joint, is_alone, common.get("hold"), left
                )
                if isinstance(made, ColumnImages):
                    made.column = image_column
            if text_column is not None:
                text_options = TextOptions(
                    self.tokenizer,
                    max_length,
                    TEXT_FIELD,
                    None,
                    "utf-8",
                    "strict",
                    reach.cache_dir,
                    common.get("progress"),
                    chat_template,
                )
                of_texts, self.collate = (
                    (ColumnChats if are_chats else ColumnTexts)(source, text_column, text_options),
                    "text",
                )
            if is_one and made is not None:
                rows = made
            elif is_one and of_texts is not None:
                rows = of_texts
            else:
                lists = [
                    name
                    for name in names
                    if is_text(first.schema.field(name).type)
                    or is_bytes(first.schema.field(name).type)
                ]
                image = (
                    None
                    if made is None or image_column is None
                    else ColumnImage(image_column, made)
                )
                rows = TableFormat(source.specs, lists, is_one, image, of_texts, named, cast_to)
        self._texts = of_texts
        super().__init__(
            source,
            sample_format=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )
        self.class_to_idx: dict[str, int] = {
            name: number for number, name in enumerate(self.classes)
        }

    def _layout_nbytes(self) -> int:
        source = self.sample_source
        return source.layout_nbytes if isinstance(source, TableSource) else source.block_nbytes

    @property
    def has_texts(self) -> bool:
        """True if a column is tokenised, alone or together with other columns."""
        return self._texts is not None

    def text_of(self, index: int) -> str:
        """Returns the text of a sample before tokenisation; for a chat the rendered text, for a
        window the text of its row.

        Raises:
            SampleError: the text can't be read.
            ConfigError: there is no `text_column`; or, with `packing`, a block or row belongs to no
                single text.
        """
        texts = self._format if isinstance(self._format, TextUnit) else self._texts
        if texts is None:
            raise ConfigError("text_of: no column of texts is named: pass text_column=")
        return texts.text_of(int(self.whole_indices(range(len(self))[index])), self.sample_reader)

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """Length of each sample ([n] int64), or None.

        For texts without other columns: number of characters, for which all texts are read. For
        windows, blocks and rows of tokens: number of tokens. Otherwise None.
        """
        texts = self._format
        if not isinstance(texts, TextUnit):
            return None
        with self.block_memory.in_order():
            found = texts.lengths(self.sample_reader)
        return found if self._chosen is None else found[self._chosen]

    @property
    def holds_encoded(self) -> bool:
        """True if modes "eager" and "cached" cache encoded images. Default: True if images keep
        their own size.
        """
        return (
            self._hold == "encoded"
            if self._hold is not None
            else isinstance(self._format, ImageFormat) and self._format.image_size is None
        )

    def held_as(self) -> str:
        if self._arguments.get("tokenizer") is None:
            return super().held_as()
        texts = self._texts
        identity = identity_of(self.tokenizer) if texts is None else texts.identity
        return describe_held(
            type(self), {**self._arguments, "tokenizer": identity or self.tokenizer}
        )

    def held_nbytes(self) -> int | None:
        if self.holds_encoded or self._overridden:
            return None
        if isinstance(self._format, ImageFormat):
            size = self._format.image_size
            return (
                None
                if size is None
                else len(self.sample_source) * size[0] * size[1] * self._format.channels
            )
        each = self._format.sample_nbytes()
        return None if each is None else each * len(self.sample_source)


def _check_options(
    argument: str, column: Any, given: dict[str, Any], usual: dict[str, Any]
) -> None:
    """Raises a ConfigError where options are given for a column that is not named, or its name
    is none.
    """
    if not isinstance(column, (str, type(None))):
        raise ConfigError(f"{argument} must be the name of one column, or None, not {column!r}")
    for name, value in given.items():
        if column is None and value is not usual[name] and value != usual[name]:
            raise ConfigError(f"{name} is for {argument}: name the column")


def _check_parts(
    packing: bool | str,
    columns: Any,
    text_column: str | None,
    target_name: str | None,
    image_column: str | None,
) -> None:
    """Raises a ConfigError where more is read than the texts that windows, blocks and rows are
    made of.
    """
    if image_column is not None or not (
        columns is None or columns in (text_column, (text_column,))
    ):
        raise ConfigError(
            "with stride or packing samples are tokens of one column alone: leave out columns and "
            "image_column"
        )
    if packing and target_name is not None:
        raise ConfigError(
            "target_name can't be given with packing: a block or row is of several rows of the "
            "table"
        )


def _checked_columns(columns: Any) -> str | tuple[str, ...] | None:
    if columns is None or isinstance(columns, str):
        return columns
    names = (
        tuple(columns) if isinstance(columns, Sequence) and not isinstance(columns, bytes) else ()
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"columns must be the name of a column, or a list of such, not {columns!r}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"columns names a column twice: {list(names)!r}")
    return names


def _names_of(
    table: TableFile,
    columns: str | tuple[str, ...] | None,
    target_name: str | None,
    special: list[str],
) -> tuple[tuple[str, ...], bool]:
    """The columns that are read, and whether samples are the values of the one column."""
    if columns is None and not special:
        names = tuple(name for name in table.schema.names if name != target_name)
        if not names:
            raise FormatError(
                f"{table.shown} has no column{' beside the targets' if target_name else ''}"
            )
        return names, False
    named = () if columns is None else (columns,) if isinstance(columns, str) else columns
    names = (*named, *(name for name in dict.fromkeys(special) if name not in named))
    if len(special) != len(set(special)):
        raise ConfigError(f"image_column and text_column are both {special[0]!r}")
    return names, len(names) == 1 and (columns is None or isinstance(columns, str))


def _check_column(
    table: TableFile, column: str | None, argument: str, wanted: str, fits: Callable[[Any], bool]
) -> None:
    """Raises a FormatError where a column is of another type than its argument says."""
    if column is not None and not fits(kind := table.schema.field(column).type):
        raise FormatError(
            f"{table.shown}: {argument}={column!r}: the column is of type {kind}, and holds no "
            f"{wanted}"
        )


def _are_chats(tables: Sequence[TableFile], column: str) -> bool:
    """True if a column of the first table with rows holds chats."""
    schema = next((table for table in tables if table.rows.any()), tables[0]).schema
    return column in schema.names and holds_chats(schema.field(column).type)


def _targets(source: TableSource, name: str) -> tuple[Any, list[str]]:
    """The targets, and the names of their classes."""
    for table in source.tables:
        table.check([name])
    found = source.column(name)
    row = (
        next((row for row, value in enumerate(found) if value is None), None)
        if isinstance(found, list)
        else None
    )
    if row is not None:
        raise FormatError(f"{source.location(row)}: target_name={name!r}: there is no value (null)")
    if not is_categorical(source.first.schema.field(name).type):
        return found, classes_in(source.first.schema, name)
    classes = sorted(set(found))
    number = {text: i for i, text in enumerate(classes)}
    return np.array([number[text] for text in found], np.int64), classes


def _numpy_rows(
    files: FileSet,
    columns: str | tuple[str, ...] | None,
    target_name: str | None,
    dtype: np.dtype[Any] | None,
) -> tuple[Any, SampleFormat, Any]:
    sources = open_arrays(files, columns, target_name)
    source, rows = joined_rows(sources, dtype)
    targets = None
    if target_name is not None:
        targets = joined_targets(
            [one.column(target_name) for one in sources], [one.path for one in sources], target_name
        )
    return source, rows, targets


def _image_format(
    given: dict[str, Any],
    transform: Any,
    has_joint: bool,
    is_alone: bool,
    hold: str | None,
    left: DatasetBudget,
) -> tuple[ImageFormat, Any]:
    """The format of a column of images, and what is left of the transform."""
    image_size = given["image_size"]
    augment, rest = split_augment(transform) if is_alone else (None, transform)
    transformed = is_alone and (rest is not None or has_joint)
    if image_size is UNSET:
        size = (
            None
            if transformed or (augment is not None and augment.size is not None)
            else DEFAULT_SIZE
        )
    else:
        size = None if image_size is None else image_sides(image_size, "image_size", ", or None")
    make = functools.partial(
        ColumnImages if is_alone else ImageFormat,
        color=given["color"],
        image_size=size,
        is_size_given=image_size is not UNSET,
        exact=given["decode"] == "exact",
        normalize=given["normalize"],
        transform_input=given["transform_input"],
        augment=augment,
        transformed=transformed,
        is_stored_decoded=False,
        hold=hold,
        left=left,
    )
    return make(), rest if is_alone else chained(transform)
