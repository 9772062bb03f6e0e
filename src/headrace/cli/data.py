"""The options of verbs that open data: declared once, for `info`, `preview`, `profile` and
`pack`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import add_options
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.core.dataset import BaseDataset

_TEXTS = {
    "unit": (
        ("file", "line", "record"),
        "what is a document (default: a record of .jsonl, .csv and .tsv, else a file)",
    ),
    "text_field": (str, "of records: the field of the text (default: text)"),
    "target_field": (str, "of records: the field of the target, numbers or classes"),
    "labels": (("folders",), "class folders give the targets"),
    "encoding": (str, "of the texts (default: utf-8)"),
    "cache_dir": (str, "where tokens are kept (default: the user's cache folder)"),
    "tokenizer": (str, "a file of the package `tokenizers` (default: a character is a token)"),
}
_DATA = {
    "targets": (
        str,
        "of images, in place of class folders: a folder of masks, annotations of COCO, or a table "
        "of labels by file; none: no targets",
    ),
    "target_name": (
        list,
        "of that table, or of a table of samples: the column of the targets; given several times, "
        "several (default: of labels all); of HDF5 and Zarr: the array of the targets, or labels "
        "(default: none)",
    ),
    "unused_targets": (("raise", "skip"), "targets of files that are missing (default: raise)"),
    "delimiter": (str, "between the cells of a .csv (default: a comma; .tsv: a tab)"),
    "dataset_name": (str, "of HDF5 and Zarr: the array (default: 'data', or the only one)"),
    "column": (
        str,
        "of a table such as Parquet, of HDF5, Zarr or .tar: the column of texts; with --targets, "
        "which names a column too, that of images",
    ),
    "on_error": (("raise", "skip"), "samples that can't be read (default: raise)"),
    "columns": (list, "of a table: a column to read, may be given again (default: all)"),
}
"""Arguments of datasets."""


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `data_options` reads."""
    data = parser.add_argument_group("data")
    add_options(data, _DATA)
    shape = {"patch_shape": (_extents, "of a Zarr volume: extents of a patch: 64 or 32,64,64")}
    add_options(data, shape)
    add_options(data, {"masks": (bool, "of annotations of COCO: the outlines of objects too")})
    add_options(parser.add_argument_group("texts"), _TEXTS)


def _extents(text: str) -> int | tuple[int, ...]:
    try:
        extents = tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write 64, or 32,64,64") from None
    if len(extents) == 1:
        return extents[0]
    return extents


def data_options(given: argparse.Namespace) -> dict[str, Any]:
    """The keywords of a dataset that were given as flags."""
    values = {name: getattr(given, name) for name in (*_DATA, "patch_shape", *_TEXTS)}
    options = {name: value for name, value in values.items() if value is not None}
    if len(options.get("target_name", ())) == 1:
        [options["target_name"]] = options["target_name"]
    if given.targets in ("none", "None"):
        options["targets"] = None
    if given.masks:
        options["masks"] = True
    if given.tokenizer is not None:
        options["tokenizer"] = _tokenizer(given.tokenizer)
    return options


def text_options(options: dict[str, Any]) -> set[str]:
    """Those of some options that only texts have."""
    names = {*_TEXTS}
    if "targets" not in options:
        names.add("delimiter")  # else it is that of the table of labels
    return options.keys() & names


def open_data(
    path: str,
    options: dict[str, Any],
    opens: Callable[..., BaseDataset] | None = None,
    are_texts: bool = False,
) -> BaseDataset:
    """Texts, where an option says so that only they have, or `are_texts`; else what the path holds,
    which `opens` opens.
    """
    from headrace.datasets.open import open_dataset
    from headrace.datasets.text.text import TextDataset
    from headrace.formats.resolve.resolver import kind_of
    from headrace.formats.table.files import TABLES

    if (are_texts or text_options(options)) and kind_of(path, (TABLES,)) is None:
        return TextDataset(path, **options)
    return (opens or open_dataset)(path, **options)


def _tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(path)
    except ImportError:
        raise ConfigError("--tokenizer: the package is missing: pip install tokenizers") from None
    except Exception as error:  # of the package's own kind, which is Exception itself
        raise ConfigError(f"--tokenizer {path}: {error}") from None
