"""Imports what ``MODULE:NAME`` or ``FILE.py:NAME`` names on the command line."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from headrace.errors import ConfigError, HeadraceError

_NAME = re.compile(r"(?P<module>[\w./\\~-]+?):(?P<name>[A-Za-z_][\w.]*)")


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
        raise ConfigError(f"{option} {text}: write MODULE:NAME or FILE.py:NAME, such as my_project.transforms:augment")
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
        raise ConfigError(f"{option}: {module} can't be imported: {type(error).__name__}: {error}") from error
    for name in match["name"].split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{option}: {module} has no {match['name']}")
        found = getattr(found, name)
    return found


def raised_by(text: str, error: Exception) -> ConfigError:
    """The error of what a function of the user's raised."""
    return ConfigError(f"{text} raised {type(error).__name__}: {error}")
