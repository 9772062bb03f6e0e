"""The options of verbs that open data: declared once, for `info`, `preview`, `profile` and
`pack`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.core.dataset import BaseDataset

_TEXTS = {
    "unit": "what is a document: file, line or record (default: a record of .jsonl, .csv and .tsv, "
    "else a file)",
    "text_field": "of records: the field of the text (default: text)",
    "target_field": "of records: the field of the target, numbers or classes",
    "labels": "folders: class folders give the targets",
    "encoding": "of the texts (default: utf-8)",
    "cache_dir": "where tokens are kept while they are made (default: the user's cache folder)",
    "tokenizer": "a JSON file of the package `tokenizers` (default: each character is a token)",
}
_DATA = {
    "targets": "of images, in place of class folders: a folder of masks, annotations of COCO, or a "
    "table of labels by file; none: no targets",
    "target_name": "of that table, or of a table of samples: the column of the targets; given "
    "several times, several (default: of labels all); of HDF5 and Zarr: the array of the targets, "
    "or labels (default: none)",
    "unused_targets": "raise or skip: targets of files that are not there (default: raise)",
    "delimiter": "between the cells of a .csv of labels, or of texts (default: a comma; .tsv: a "
    "tab)",
    "dataset_name": "of HDF5 and Zarr: the array (default: 'data', or the only one)",
    "patch_shape": "of a Zarr volume: the extents of a patch, such as 64 or 32,64,64",
    "image_column": "of a table such as Parquet: the column of encoded images",
    "column": "of a table such as Parquet, of HDF5, Zarr or .tar: the column of texts",
    "columns": "of a table: a column to read, may be given again (default: all)",
}
"""Arguments of datasets, and what they are about."""
_CHOICES = {
    "unit": ("file", "line", "record"),
    "labels": ("folders",),
    "unused_targets": ("raise", "skip"),
}


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `data_options` reads."""
    for title, options in (("data", _DATA), ("texts", _TEXTS)):
        group = parser.add_argument_group(title)
        for name, about in options.items():
            kind: dict[str, Any] = {"metavar": name.rpartition("_")[2].upper()}
            if name in ("target_name", "columns"):
                kind["action"] = "append"
            if name == "patch_shape":
                kind["type"] = _extents
            if name in _CHOICES:
                kind = {"choices": _CHOICES[name]}
            group.add_argument(f"--{name.replace('_', '-')}", help=about, **kind)
    parser.add_argument(
        "--masks", action="store_true", help="of annotations of COCO: the outlines of objects too"
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out samples that can't be read (default: stop at the first)",
    )


def _extents(text: str) -> int | tuple[int, ...]:
    try:
        extents = tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write 64, or 32,64,64") from None
    return extents[0] if len(extents) == 1 else extents


def data_options(given: argparse.Namespace) -> dict[str, Any]:
    """The keywords of a dataset that were given as flags."""
    values = {name: getattr(given, name) for name in (*_DATA, *_TEXTS)}
    options = {name: value for name, value in values.items() if value is not None}
    if len(options.get("target_name", ())) == 1:
        [options["target_name"]] = options["target_name"]
    if given.targets == "none":
        options["targets"] = None
    if given.masks:
        options["masks"] = True
    if given.skip_bad:
        options["on_error"] = "skip"
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
    from headrace.io.resolve.resolver import kind_of
    from headrace.storage.table.files import TABLES

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
