"""Multi-line texts, short reprs and progress bars."""

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
    warnings.simplefilter("ignore", TqdmWarning)  # a notebook without ipywidgets gets a bar of text
    from tqdm.auto import tqdm


class Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar of this process: no thread, since tqdm's monitor might hold a lock while workers
    are forked; and no semaphore for other processes, whose name would stay in shared memory where
    this one is killed.
    """

    monitor_interval = 0
    _lock = threading.RLock()


class Lines(str):
    """A text of several lines that is its own repr, so that a notebook and the prompt show it as
    `print` does.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def progress_bar(progress: bool | None, *, is_short: bool = False, **options: Any) -> Bar:
    """A bar that is gone when it is full.

    Args:
        progress: True: it is shown; False: it is not; None: it is shown on a terminal and in a
            notebook.
        is_short: True if it is not worth a bar where `progress` is None.
        **options: those of `tqdm`.
    """
    disable = None  # tqdm looks for a terminal
    if progress is not None:
        disable = not progress
    elif is_short:
        disable = True
    elif "IPython" in sys.modules:
        # Jupyter's output says that it is no terminal
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None and "IPKernelApp" in shell.config:
            disable = False
    return Bar(disable=disable, leave=False, **options)


def short_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """A call as text: those of the arguments that `function` knows, and that are not its
    defaults, each in a word or two.
    """
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
    """True if a value is the default. Only plain values are compared: arrays have no single
    answer.
    """
    return value is default or (
        isinstance(value, (bool, int, float, str))
        and type(value) is type(default)
        and value == default
    )
