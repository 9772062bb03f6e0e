"""Prints what a verb has to say: text for people, or one JSON document; colours on a terminal
only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

_STYLES = {"bold": "1", "dim": "2", "green": "32", "cyan": "36"}
_ASCII = {"├── ": "|-- ", "└── ": "`-- ", "│   ": "|   ", "█": "#", "…": "...", "→": "->"}
_WIDE = 100  # columns where there is no terminal
_NARROWEST = 40


class Output:
    """Where a verb prints its results.

    Args:
        as_json: one JSON document instead of text.
        quiet: no text.
        stream: to print to; None: the standard output.

    Attributes:
        is_terminal: True if somebody sees it come.
        width: columns that lines should fit in; None where it is no terminal.
    """

    def __init__(
        self, as_json: bool = False, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._stream = stream
        self.is_terminal: bool = is_terminal(self.stream)
        self.width: int | None = (
            max(_NARROWEST, shutil.get_terminal_size().columns) if self.is_terminal else None
        )
        self._is_plain = not has_colors(self.stream)
        self._is_ascii = not _can_print("".join(_ASCII), self.stream)

    @property
    def stream(self) -> TextIO:
        """What is printed to."""
        return self._stream or sys.stdout

    @property
    def columns(self) -> int:
        """Columns that a table may take."""
        return self.width or _WIDE

    def paint(self, text: str, style: str) -> str:
        """Text in a colour, where there are some."""
        return text if self._is_plain or not text else f"\x1b[{_STYLES[style]}m{text}\x1b[0m"

    def show(self, value: Any, lines: Iterable[str]) -> None:
        """Prints a result: `value` as JSON, or the lines."""
        self.show_lines(lines)
        self.show_json(value)

    def show_lines(self, lines: Iterable[str]) -> None:
        """Prints lines, where text is wanted."""
        if not self.as_json and not self.quiet:
            self._print("\n".join(lines))

    def show_json(self, value: Any) -> None:
        """Prints the document, where JSON is wanted."""
        if self.as_json:
            self._print(
                json.dumps(
                    _plain(value),
                    indent=1,
                    ensure_ascii=not _can_print("é", self.stream),
                    allow_nan=False,
                )
            )

    def show_error(self, error: BaseException, message: str, code: int) -> None:
        """Prints an error as JSON, where JSON is wanted; people read it elsewhere."""
        # the error may be that nothing can be printed, such as to a full disk
        with contextlib.suppress(OSError):
            self.show_json(
                {"error": {"type": type(error).__name__, "message": message, "exit_code": code}}
            )

    def _print(self, text: str) -> None:
        if self._is_ascii and not self.as_json:
            for symbol, plain in _ASCII.items():
                text = text.replace(symbol, plain)
        write(text + "\n", self.stream)


def write(text: str, stream: TextIO) -> None:
    """Writes text, whatever its encoding; where nobody reads any more (``| head``), the rest is
    dropped, and the exit code stays true.
    """
    if not _can_print(text, stream):
        encoding = _encoding_of(stream)
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        drop(stream)


def drop(stream: TextIO) -> None:
    """Lets a stream whose reader is gone lead nowhere, so that Python doesn't complain at its
    end either.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def is_terminal(stream: TextIO) -> bool:
    """True if somebody looks at it."""
    return bool(getattr(stream, "isatty", lambda: False)())


def has_colors(stream: TextIO) -> bool:
    """True if colours are wanted: on a terminal, unless NO_COLOR is set (https://no-color.org)
    or the terminal has none.
    """
    return (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _encoding_of(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _can_print(text: str, stream: TextIO) -> bool:
    try:
        text.encode(_encoding_of(stream))
    except UnicodeError:
        return False
    return True


def one_line(message: object) -> str:
    """A message without line breaks."""
    return " ".join(str(message).split())


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
    """What JSON can say: of dataclasses their fields; numbers that are none become null, NumPy's
    numbers Python's.
    """
    if hasattr(type(value), "__dataclass_fields__"):
        return _plain(fields_of(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return visible(os.fspath(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    return _plain(value.item() if hasattr(value, "item") else str(value))
