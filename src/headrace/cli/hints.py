"""What follows an error: the exit code, and the command to run next."""

from __future__ import annotations

import argparse
import os
import shlex

from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    MissingNameError,
    SampleError,
)
from headrace.io.paths import is_url, redact


def exit_code_of(error: BaseException) -> int:
    """1 where the data are wrong, else 2."""
    return 1 if isinstance(error, FormatError | SampleError | FileChangedError) else 2


def next_command(error: BaseException, given: argparse.Namespace) -> str | None:
    """The command that tells more of what is wrong, or puts it right; None: the message says it
    all.
    """
    verb, path = getattr(given, "verb", None), _path_of(given)
    if verb is None:
        return None
    if verb == "join" and path is not None and os.path.isdir(path):
        return f"headrace status {shlex.quote(redact(path))}"
    dst = getattr(given, "dst", None)
    if isinstance(dst, str) and not (
        is_url(dst) or os.path.isdir(os.path.dirname(os.path.abspath(os.path.expanduser(dst))))
    ):
        return None
    if isinstance(error, DataNotFoundError) and path is not None:
        nearest = path if os.path.isdir(path) and verb != "info" else _nearest_folder(path)
        return None if nearest is None else f"headrace info {shlex.quote(nearest)}"
    if isinstance(error, MissingNameError | FormatError) and path is not None and verb != "info":
        return f"headrace info {shlex.quote(redact(path))}"
    return f"headrace {verb} --help" if isinstance(error, ConfigError) else None


def _path_of(given: argparse.Namespace) -> str | None:
    for name in ("path", "src"):
        if isinstance(value := getattr(given, name, None), str):
            return value
    paths = getattr(given, "paths", None)
    return str(paths[0]) if isinstance(paths, list) and len(paths) == 1 else None


def _nearest_folder(path: str) -> str | None:
    """The folder that is there, of those that a path leads through."""
    if is_url(path):
        return None
    folder = os.path.dirname(os.path.abspath(os.path.expanduser(path)))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
