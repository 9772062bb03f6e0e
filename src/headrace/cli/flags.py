"""Declares the flags of verbs, reads their values, and names flags where a message names arguments
of Python. Options of verbs that open data are declared once, for `info`, `preview`, `profile` and
`pack`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import ConfigError, HeadraceError, WriteError

if TYPE_CHECKING:
    from headrace.cli.output import Output

_NAME = re.compile(r"(?P<module>[\w./\\~-]+?):(?P<name>[A-Za-z_][\w.]*)")


PATH = ({"metavar": "PATH"}, "a file, a folder, a glob or a URL")


class Verb(NamedTuple):
    """A verb of the command.

    Attributes:
        run: runs it, and gives the exit code; its docstring is the help.
        options: see `add_options`.
        opens_data: True if it has the options that `data_options` reads.
    """

    run: Callable[[argparse.Namespace, Output], int]
    options: dict[str, tuple[Any, str]] = {}  # noqa: RUF012
    opens_data: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options to a parser."""
        add_options(parser, self.options)
        parser.set_defaults(program=parser.prog)
        if self.opens_data:
            data = parser.add_argument_group("data")
            add_options(data, _DATA)
            add_options(parser.add_argument_group("texts"), _TEXTS)


def as_flags(message: str, given: argparse.Namespace) -> str:
    """A message of an error or a warning with the flags of the verb in place of arguments:
    ``unit='file'`` becomes ``--unit file``.
    """

    def flag(match: re.Match[str]) -> str:
        value = match[2].strip("'\"").removeprefix("True")
        name = match[1].removeprefix("image_")  # image_size is --size
        if name not in given:
            return match[0]
        return f"--{name.replace('_', '-')} {shlex.quote(value) if value else ''}".rstrip()

    return re.sub(r"\b([a-z_]+)=('[^']*'|\"[^\"]*\"|[\w.-]*)", flag, message)


def count(text: str) -> int:
    """Parses a number of threads, processes or samples."""
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: use 1 or more")


def seconds(text: str) -> float:
    """Parses a number of seconds."""
    if re.fullmatch(r"\d{1,6}(\.\d*)?|\.\d+", text) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: use one above 0")


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, options: dict[str, tuple[Any, str]]
) -> None:
    """Adds options, each given by its name, kind and help.

    A kind is a number (the default of a count, or of seconds), a tuple of choices, `bool` (a
    switch), `list` (it may be given several times), or a function that parses the text. A dict has
    keywords of `add_argument`; the name is then passed on as it is.
    """
    for name, (kind, about) in options.items():
        if isinstance(kind, dict):
            parser.add_argument(*name.split(), help=about, **kind)
            continue
        how: dict[str, Any] = {"type": kind, "metavar": name.rpartition("_")[2].upper()}
        if kind is bool:
            how = {"action": "store_true"}
        elif kind is list:
            how = {"action": "append", "metavar": how["metavar"]}
        elif isinstance(kind, tuple):
            how = {"choices": kind}
        elif isinstance(kind, int | float):
            about = f"{about} (default: {kind:g})"
            how["default"] = kind
            how["type"] = count if isinstance(kind, int) else seconds
        parser.add_argument(f"--{name.replace('_', '-')}", help=about, **how)


def is_name(text: str) -> bool:
    """True of ``module:name`` and ``file.py:name``, unless there is a file of that name."""
    return _NAME.fullmatch(text) is not None and not os.path.exists(text)


def imported(option: str, text: str) -> Any:
    """Imports ``module:name`` or ``file.py:name``, from the working folder first.

    Raises:
        ConfigError: it can't be imported, or has no such name; the message begins with the option.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{option} {text}: use MODULE:NAME or FILE.py:NAME, such as train.py:step"
        )
    folder = os.getcwd()
    module = match["module"]
    if module.endswith(".py"):
        path = os.path.abspath(os.path.expanduser(module))
        if not os.path.isfile(path):
            raise ConfigError(f"{option}: {path} does not exist")
        folder = os.path.dirname(path)
        module = os.path.basename(path).removesuffix(".py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        value: Any = importlib.import_module(module)
        for name in match["name"].split("."):
            value = getattr(value, name)
    except HeadraceError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: {text} can't be imported: {reason}") from error
    return value


def imported_function(option: str, text: str) -> Callable[..., Any]:
    """The function that ``module:name`` or ``file.py:name`` names. Its errors are reported as the
    user's, not headrace's.
    """
    function = imported(option, text)
    if not callable(function):
        raise ConfigError(f"{option}: {text} must be a function, not a {type(function).__name__}")
    return lambda *given: called(text, function, *given)


def called(text: str, function: Callable[..., Any], *given: Any) -> Any:
    """Calls a user's function. Its errors become a ConfigError."""
    try:
        return function(*given)
    except HeadraceError:
        raise
    except Exception as error:
        raise ConfigError(f"{text} raised {type(error).__name__}: {error}") from error


def check_output(
    option: str, path: str, endings: tuple[str, ...], sources: Iterable[str | None] = ()
) -> None:
    """Raises an error for a file that can't be written, or that would become a sample of the data
    in `sources`, before anything is read.
    """
    if not path.lower().endswith(endings):
        raise ConfigError(f"{option} {path}: name a file that ends with {' or '.join(endings)}")
    path = os.path.realpath(path)
    if not os.access(os.path.dirname(path), os.W_OK):
        raise WriteError(
            f"{option} {path}: the folder does not exist, or this user may not write to it"
        )
    for source in map(os.path.realpath, filter(None, sources)):
        if os.path.exists(source) and f"{path}/".startswith(f"{source}/"):
            raise ConfigError(
                f"{option} {path}: it is inside the data ({source}): write it elsewhere"
            )


# -- options of data


def _extents(text: str) -> int | tuple[int, ...]:
    try:
        extents = tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: use 64, or 32,64,64") from None
    if len(extents) == 1:
        return extents[0]
    return extents


_TEXTS = {
    "unit": (
        ("file", "line", "record"),
        "what one sample is (default: record for .jsonl, .csv and .tsv, else file)",
    ),
    "text_field": (str, "field of a record that holds the text (default: text)"),
    "target_field": (str, "field of a record that holds the target: numbers or classes"),
    "labels": (("folders",), "use class folders as targets"),
    "encoding": (str, "encoding of the texts (default: utf-8)"),
    "cache_dir": (str, "folder for indexes and tokens (default: the user's cache folder)"),
    "tokenizer": (str, "a file of the package `tokenizers` (default: one token per character)"),
}
_DATA = {
    "targets": (
        str,
        "targets of images, instead of class folders: a folder of masks, COCO annotations, or a "
        "table of labels; none: no targets",
    ),
    "target_name": (
        list,
        "column of the targets, in a table of labels or samples; repeat for several (default: all "
        "labels). In HDF5 and Zarr: the array of the targets (default: none)",
    ),
    "unused_targets": (("raise", "skip"), "targets whose file is missing (default: raise)"),
    "delimiter": (str, "character between the cells of a .csv (default: comma; of a .tsv: tab)"),
    "dataset_name": (str, "array of HDF5 or Zarr to read (default: 'data', or the only one)"),
    "column": (
        str,
        "column of the texts, in a table, HDF5, Zarr or .tar; if --targets names a column too, "
        "column of the images",
    ),
    "on_error": (("raise", "skip"), "samples that can't be read (default: raise)"),
    "columns": (list, "column of a table to read; repeat for several (default: all)"),
    "patch_shape": (_extents, "shape of a patch of a Zarr volume: 64, or 32,64,64"),
    "masks": (bool, "read the masks of objects in COCO annotations too"),
}
"""Arguments of datasets."""


def data_options(given: argparse.Namespace) -> dict[str, Any]:
    """The keywords of a dataset that were given as flags."""
    values = {name: getattr(given, name) for name in (*_DATA, *_TEXTS)}
    options = {name: value for name, value in values.items() if value not in (None, False)}
    if len(options.get("target_name", ())) == 1:
        [options["target_name"]] = options["target_name"]
    if given.targets in ("none", "None"):
        options["targets"] = None
    if given.tokenizer is not None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                "--tokenizer: the package is missing: pip install tokenizers"
            ) from None
        try:
            options["tokenizer"] = Tokenizer.from_file(given.tokenizer)
        except Exception as error:  # of the package's own kind, which is Exception itself
            raise ConfigError(f"--tokenizer {given.tokenizer}: {error}") from None
    return options
