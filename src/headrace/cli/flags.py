"""Reads the values of flags, and names flags where a message names arguments of Python."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any

from headrace.errors import ConfigError, HeadraceError, WriteError

_NAME = re.compile(r"(?P<module>[\w./\\~-]+?):(?P<name>[A-Za-z_][\w.]*)")


def as_flags(message: str, given: argparse.Namespace) -> str:
    """A message of an error or a warning with the flags of the verb in place of arguments:
    ``unit='file'`` becomes ``--unit file``.
    """

    def flag(match: re.Match[str]) -> str:
        value = match[2].strip("'\"").removeprefix("True")
        if match[1] not in given:
            return match[0]
        return f"--{match[1].replace('_', '-')} {shlex.quote(value) if value else ''}".rstrip()

    return re.sub(r"\b([a-z_]+)=('[^']*'|\"[^\"]*\"|[\w.-]*)", flag, message)


def count(text: str) -> int:
    """A number of threads, processes or samples, as an option has it."""
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no such number: write 1 or more")


def seconds(text: str) -> float:
    """A number of seconds, as an option has it."""
    if re.fullmatch(r"\d{1,6}(\.\d*)?|\.\d+", text) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: write one above 0")


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, options: dict[str, tuple[Any, str]]
) -> None:
    """Adds options: for each name its kind, and what it is about.

    A kind is a number (the default of a count, or of seconds), a tuple of choices, `bool` (a
    switch), `list` (it may be given several times), or what reads a text.
    """
    for name, (kind, about) in options.items():
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
    """What ``module:name`` or ``file.py:name`` names; the working folder is looked in first.

    Raises:
        ConfigError: it can't be imported, or has no such name; the message begins with the option.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{option} {text}: write MODULE:NAME or FILE.py:NAME, such as train.py:step"
        )
    folder = os.getcwd()
    module = match["module"]
    if module.endswith(".py"):
        path = os.path.abspath(os.path.expanduser(module))
        if not os.path.isfile(path):
            raise ConfigError(f"{option}: there is no file {path}")
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
    """The function that ``module:name`` or ``file.py:name`` names. What it raises is the user's
    error, not one of headrace.
    """
    function = imported(option, text)
    if not callable(function):
        raise ConfigError(f"{option}: {text} is no function, but a {type(function).__name__}")
    return lambda *given: called(text, function, *given)


def called(text: str, function: Callable[..., Any], *given: Any) -> Any:
    """Calls a function of the user's."""
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
                f"{option} {path}: it is a part of the data ({source}): write it elsewhere"
            )
