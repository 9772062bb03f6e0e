"""Flags: how they are named where a message names arguments of Python, and what is read of them."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError, HeadraceError

_SAME = (
    *(
        "unit",
        "labels",
        "text_field",
        "target_field",
        "targets",
        "target_name",
        "unused_targets",
        "store",
        "color",
        "encoding",
        "tokenizer",
        "end_token",
        "cache_dir",
        "patch_shape",
    ),
    *("dataset_name", "workers", "shard_size", "image_column", "text_column", "columns"),
)
_FLAGS = {**{name: f"--{name.replace('_', '-')}" for name in _SAME}, "image_size": "--size"}
_DESTS = {"image_size": "size"}
_ARGUMENT = re.compile(
    rf"\b({'|'.join(_FLAGS)})=(?:'([\w./-]+)'|\"([\w./-]+)\"|([\w-]+)|\(height, width\))?"
)
_NAME = re.compile(r"(?P<module>[\w./\\~-]+?):(?P<name>[A-Za-z_][\w.]*)")
_IN_WORDS = {
    'pass on_error="skip"': ("skip_bad", "pass --skip-bad"),
    "overwrite=True (--overwrite)": ("overwrite", "--overwrite"),
    "leave out shard_size": ("shard_size", "leave out --shard-size"),
    "pass shard_size, such as '1GB'": ("shard_size", "pass --shard-size 1GB"),
    "pass encoding= or errors=": ("encoding", "pass encoding="),
    "name one as dataset_name": ("dataset_name", "name one by dataset_name="),
    "name one of them as dataset_name": ("dataset_name", "name one of them by dataset_name="),
    "use fewer workers or a smaller batch_size, or raise max_memory_usage": (
        "",
        "or use a machine with more memory",
    ),
    "raise PIL.Image.MAX_IMAGE_PIXELS": (
        "store",
        "pack it in Python, by headrace.pack, with a larger PIL.Image.MAX_IMAGE_PIXELS",
    ),
    "pass delimiter=';'": ("delimiter", "pass --delimiter ';'"),
    "pass delimiter='|'": ("delimiter", "pass --delimiter '|'"),
    "pass delimiter=','": ("delimiter", "pass --delimiter ','"),
    "pass delimiter='\\t'": ("delimiter", "pass --delimiter $'\\t'"),
    ": use ImageDataset": ("unit", ": leave out the options for texts"),
    ": use TextDataset": ("unit", ": pass --unit file"),
}
"""Words of messages, the argument of a verb that makes them a flag ("": every verb), and the
words with it.
"""


def as_flags(message: str, given: argparse.Namespace) -> str:
    """A message of an error or a warning, with the flags that the verb has: ``unit='file'`` is
    ``--unit file``.
    """
    for words, (name, instead) in _IN_WORDS.items():
        if not name or name in given:
            message = message.replace(words, instead)
    return _ARGUMENT.sub(
        lambda found: _as_flag(found) if _DESTS.get(found[1], found[1]) in given else found[0],
        message,
    )


def _as_flag(found: re.Match[str]) -> str:
    name, value = found[1], found[2] or found[3] or found[4] or ""
    if name == "targets" and value in ("", "None"):
        value = "none" if value else "FILE.csv"
    return f"{_FLAGS[name]} {value}".rstrip()


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    """What reads an option: a number from `least` on, and up to `most` where that is given."""
    wanted = f"{least} or more" if most is None else f"one from {least} to {most}"

    def parsed(text: str) -> int:
        if not (
            text.isascii()
            and text.isdigit()
            and least <= int(text)
            and (most is None or int(text) <= most)
        ):
            raise argparse.ArgumentTypeError(f"{text!r} is no such number: write {wanted}")
        return int(text)

    return parsed


count = number(1)
"""A number of threads, processes or samples."""


def seconds(text: str) -> float:
    """A number of seconds, as an option has it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: write one above 0")
    return value


# -- MODULE:NAME


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
            f"{option} {text}: write MODULE:NAME or FILE.py:NAME, such as "
            "my_project.transforms:augment"
        )
    module, folder = match["module"], os.getcwd()
    if module.endswith(".py"):
        path = os.path.abspath(os.path.expanduser(module))
        if not os.path.isfile(path):
            raise ConfigError(f"{option}: there is no file {path}")
        folder, module = os.path.dirname(path), os.path.basename(path)[: -len(".py")]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except HeadraceError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{option}: {module} can't be imported: {type(error).__name__}: {error}"
        ) from error
    for name in match["name"].split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{option}: {module} has no {match['name']}")
        found = getattr(found, name)
    return found


def raised_by(text: str, error: Exception) -> ConfigError:
    """The error of what a function of the user's raised."""
    return ConfigError(f"{text} raised {type(error).__name__}: {error}")
