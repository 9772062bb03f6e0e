"""Prints results of verbs: text for people, or one JSON document. Colours only on a terminal."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from headrace.errors import FileChangedError, FormatError, SampleError

_STYLES = {"bold": "1", "dim": "2", "cyan": "36", "error": "31;1", "warning": "33;1"}
_WIDE = 100  # columns where there is no terminal


class Output:
    """Where a verb prints its results.

    Args:
        as_json: one JSON document instead of text.
        quiet: no text.
        stream: to print to. None: the standard output.

    Attributes:
        width: number of columns of the terminal. None: the stream is no terminal.
        columns: number of columns that a table may take.
    """

    def __init__(
        self, as_json: bool = False, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.stream: TextIO = stream or sys.stdout
        self.width: int | None = None
        if self.stream.isatty():
            self.width = max(40, shutil.get_terminal_size().columns)
        self.columns: int = self.width or _WIDE

    def paint(self, text: str, style: str) -> str:
        """Text in a colour, on a terminal that has some, unless NO_COLOR is set
        (https://no-color.org).
        """
        is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if not text or not self.stream.isatty() or is_plain:
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"

    def show(self, value: Any, lines: Iterable[str]) -> None:
        """Prints a result: `value` as JSON, or the lines."""
        self.show_lines(lines)
        self.show_json(value)

    def show_lines(self, lines: Iterable[str]) -> None:
        """Prints lines, where text is wanted."""
        if not self.as_json and not self.quiet:
            self.write("\n".join(lines) + "\n")

    def show_json(self, value: Any) -> None:
        """Prints the document, where JSON is wanted."""
        if self.as_json:
            is_ascii = not self._can_print("é")
            text = json.dumps(_plain(value), indent=1, ensure_ascii=is_ascii, allow_nan=False)
            self.write(text + "\n")

    def _can_print(self, text: str) -> bool:
        try:
            text.encode(self.stream.encoding or "utf-8")
        except UnicodeError:
            return False
        return True

    def write(self, text: str) -> None:
        """Writes text, whatever its encoding. Where nobody reads any more (``| head``), the rest is
        dropped, and the exit code stays true.
        """
        if not self._can_print(text):
            encoding = self.stream.encoding
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            # Python must not complain at its end either
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


def exit_code_of(error: BaseException) -> int:
    """1 where the data are wrong, else 2."""
    return 1 if isinstance(error, FormatError | SampleError | FileChangedError) else 2


def visible(text: object) -> str:
    """A name out of a file, without what would move the cursor or colour the terminal."""
    return "".join(
        one if unicodedata.category(one)[0] != "C" else ascii(one)[1:-1] for one in str(text)
    )


def shortened(text: str, columns: int) -> str:
    """Text of at most so many columns; of a long one the middle is left out."""
    if len(text) <= columns:
        return text
    tail = max(0, (columns - 1) // 2)
    return f"{text[: max(1, columns - 1 - tail)]}…{text[len(text) - tail :] if tail else ''}"


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name. (The module `dataclasses` takes as long to import as
    all of a verb's help.)
    """
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}


def _plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses become dicts, NumPy's numbers those of Python, NaN and
    infinities null.
    """
    if hasattr(type(value), "__dataclass_fields__"):
        value = fields_of(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()
