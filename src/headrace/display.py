"""Multi-line strings, short reprs and progress bars."""

from __future__ import annotations

import inspect
import reprlib
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import TqdmWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets, notebooks show a text bar
    from tqdm.auto import tqdm


class Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar without a monitor thread, which might hold a lock while workers are forked, and
    without a semaphore, whose name would stay in shared memory if the process is killed.
    """

    monitor_interval = 0
    _lock = threading.RLock()


class Lines(str):
    """A string that is its own repr, so that notebooks and the prompt show it like `print`."""

    __slots__ = ()

    __repr__ = str.__str__


def progress_bar(progress: bool | None, *, is_short: bool = False, **options: Any) -> Bar:
    """A progress bar that disappears when it is full.

    Args:
        progress: show it. None: on a terminal and in notebooks.
        is_short: True for work too short for a bar, unless `progress` is True.
        **options: options of `tqdm`.
    """
    disable = None  # tqdm looks for a terminal
    if progress is not None:
        disable = not progress
    elif is_short:
        disable = True
    elif "IPython" in sys.modules:
        # Jupyter's output does not look like a terminal
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None and "IPKernelApp" in shell.config:
            disable = False
    return Bar(disable=disable, leave=False, **options)


def short_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """A call as text, with the arguments that differ from the defaults of `function`, shortened."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in arguments:
            continue
        value = arguments[parameter.name]
        if is_default(value, parameter.default):
            continue
        if value is None or isinstance(value, (bool, int, float, str, list, tuple, set, dict)):
            text = reprlib.repr(value)
        else:
            text = getattr(value, "__name__", f"<{type(value).__name__}>")
        shown.append(f"{parameter.name}={text}")
    return f"{name}({', '.join(shown)})"


def is_default(value: Any, default: Any) -> bool:
    """True if a value is the default. Only plain values are compared, not arrays."""
    return value is default or (
        isinstance(value, (bool, int, float, str))
        and type(value) is type(default)
        and value == default
    )
