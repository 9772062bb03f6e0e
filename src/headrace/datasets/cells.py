"""Distinguishes numbers from strings in columns of text, such as those of CSV files.

A cell is a number only where it is written as numbers are: "007", "+7" and digits of other scripts
are texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_DIGITS = r"(?:0|[1-9][0-9]*)"
_POINT = rf"(?:{_DIGITS}\.[0-9]*|\.[0-9]+)"
_EXPONENT = r"[eE][+-]?[0-9]+"
_FORMS: dict[type[Any], re.Pattern[str]] = {
    int: re.compile(r"0|-?[1-9][0-9]*"),
    float: re.compile(
        rf"-?{_DIGITS}|[+-]?(?:{_POINT}(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT})"
        r"|(?i:nan|[+-]?inf(?:inity)?)"
    ),
}
"""The texts that are numbers, by type."""


def _number(cell: str, kind: type[Any]) -> Any:
    """A cell, without surrounding spaces, as a number.

    Raises:
        ValueError: it is not a number of that type.
    """
    text = cell.strip()
    if not _FORMS[kind].fullmatch(text):
        raise ValueError(cell)
    return kind(text)


def is_rounded(value: str | int) -> bool:
    """True if a cell or a number is an integer that float64 can't represent."""
    try:
        number = _number(value, int) if isinstance(value, str) else value
        return bool(float(number) != number)
    except ValueError:
        return False
    except OverflowError:
        return True


class Column(NamedTuple):
    """The values of a column of text.

    Attributes:
        values: integers or floats, with None for an empty cell; or the texts.
        same: two texts of one number, such as "1.10" and "1.1". They make it a column of texts.
        rounded: an integer in a column of floats that float64 can't represent, if there is one.
    """

    values: list[Any]
    same: tuple[str, str] | None = None
    rounded: str | None = None


def parsed(cells: Sequence[str]) -> Column:
    """A column of integers, floats or texts. It has numbers only if no two texts are one number."""
    distinct = {cell for cell in cells if cell.strip()}
    for kind in _FORMS:
        try:
            numbers = {cell: _number(cell, kind) for cell in distinct}
        except ValueError:
            continue
        first = dict[float, str]()
        for cell, number in numbers.items():
            other = first.setdefault(number, cell)
            if other != cell:
                differ = other.strip() != cell.strip()
                return Column(list(cells), (min(other, cell), max(other, cell)) if differ else None)
        rounded = None
        if kind is float:
            rounded = next(filter(is_rounded, cells), None)
        return Column([numbers.get(cell) for cell in cells], rounded=rounded)
    return Column(list(cells))
