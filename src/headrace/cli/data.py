"""The options of verbs that open data: declared once, for `info`, `preview`, `profile` and
`pack`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.core.dataset import BaseDataset

UNITS = ("file", "line", "record")
_OF_TEXTS = ("unit", "text_field", "target_field", "labels", "encoding", "cache_dir")
_NAMES = (
    *("targets", "target_name", "unused_targets", "dataset_name", "patch_shape"),
    *("image_column", "text_column", "columns", "delimiter"),
    *_OF_TEXTS,
)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `data_options` reads."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--targets",
        metavar="PATH",
        help=(
            "of images, in place of class folders: a folder of masks, annotations of COCO, or a "
            "table of labels by file; none: no targets"
        ),
    )
    data.add_argument(
        "--target-name",
        metavar="NAME",
        action="append",
        help="of that table, or of a table of samples: the column of the targets; given several "
        "times, several (default: of labels all); "
        "of HDF5 and Zarr: the array of the targets, or labels (default: none)",
    )
    data.add_argument(
        "--unused-targets",
        choices=("raise", "skip"),
        help="targets of files that are not there (default: raise)",
    )
    data.add_argument(
        "--delimiter",
        metavar="C",
        help="between the cells of a .csv of labels, or of texts (default: a comma; .tsv: a tab)",
    )
    data.add_argument(
        "--masks", action="store_true", help="of annotations of COCO: the outlines of objects too"
    )
    data.add_argument(
        "--dataset-name",
        metavar="NAME",
        help="of HDF5 and Zarr: the array (default: 'data', or the only one)",
    )
    data.add_argument(
        "--patch-shape",
        metavar="N[,N...]",
        type=_extents,
        help="of a Zarr volume: the extents of a patch",
    )
    data.add_argument(
        "--image-column",
        metavar="NAME",
        help="of a table such as Parquet: the column of encoded images",
    )
    data.add_argument(
        "--text-column",
        metavar="NAME",
        help="of a table such as Parquet: the column of texts",
    )
    data.add_argument(
        "--columns",
        metavar="NAME",
        action="append",
        help="of a table: a column to read, may be given again (default: all)",
    )
    data.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out samples that can't be read (default: stop at the first)",
    )
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a JSON file of the package `tokenizers` (default: each character is a token)",
    )
    texts.add_argument(
        "--unit",
        choices=UNITS,
        help="what is a document (default: a record of .jsonl, .csv and .tsv, else a file)",
    )
    texts.add_argument(
        "--text-field", metavar="NAME", help="of records: the field of the text (default: text)"
    )
    texts.add_argument(
        "--target-field",
        metavar="NAME",
        help="of records: the field of the target, numbers or classes",
    )
    texts.add_argument("--labels", choices=("folders",), help="class folders give the targets")
    texts.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where tokens are kept while they are made (default: the user's cache folder)",
    )
    texts.add_argument("--encoding", help="of the texts (default: utf-8)")


def _extents(text: str) -> int | tuple[int, ...]:
    try:
        extents = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write 64, or 32,64,64") from None
    return extents[0] if len(extents) == 1 else extents


def data_options(given: argparse.Namespace) -> dict[str, Any]:
    """The keywords of a dataset that were given as flags."""
    options = {name: getattr(given, name) for name in _NAMES if getattr(given, name) is not None}
    names = options.get("target_name")
    if names is not None and len(names) == 1:
        options["target_name"] = names[0]
    if given.targets == "none":
        options["targets"] = None
    if given.masks:
        options["masks"] = True
    if given.tokenizer is not None:
        options["tokenizer"] = _tokenizer(given.tokenizer)
    if given.skip_bad:
        options["on_error"] = "skip"
    return options


def text_options(options: dict[str, Any]) -> set[str]:
    """Those of some options that only texts have."""
    names = {*_OF_TEXTS, "tokenizer"}
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

    Raises:
        HeadraceError: it can't be opened.
    """
    from headrace.datasets.open import open_dataset
    from headrace.datasets.text.text import TextDataset
    from headrace.io.resolve.resolver import kind_of
    from headrace.storage.table.files import TABLES

    if (are_texts or text_options(options)) and kind_of(path, (TABLES,)) is None:
        return TextDataset(path, **options)
    return (opens or open_dataset)(path, **options)


def refuse_own_data(option: str, path: str, sources: Iterable[str | None]) -> None:
    """Raises a ConfigError: a picture to write is a file of the data, or lies in a folder of it,
    where it would become a sample.
    """
    written = os.path.realpath(path)
    for source in sources:
        if source is None or not os.path.exists(source):
            continue
        folder = os.path.join(os.path.realpath(source), "")
        is_inside = os.path.isdir(source) and written.startswith(folder)
        if is_inside or (os.path.exists(path) and os.path.samefile(source, path)):
            raise ConfigError(
                f"{option} {path}: it is a part of the data ({source}): write the picture elsewhere"
            )


def _tokenizer(path: str) -> Any:
    """Raises a ConfigError: the package is missing, or can't read the file."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the package `tokenizers`: pip install tokenizers"
        ) from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # of the package's own kind, which is Exception itself
        raise ConfigError(f"--tokenizer {path}: {error}") from None
