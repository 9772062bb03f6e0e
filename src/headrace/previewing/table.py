"""Tells a preview in words: a row for each sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace.previewing.batch import Item, Preview

_IDS = 32  # that are told, where nobody knows what they stand for


class Row(NamedTuple):
    """A sample in words."""

    number: str
    caption: str
    tokens: str
    text: str


def row_of(item: Item) -> Row:
    """What is told of a sample."""
    number = "" if item.index is None else f"#{item.index:,}"
    tokens, text = "", item.text
    if item.ids is not None:
        count = len(item.ids) - item.padding
        tokens = f"{count:,} tokens" + (f" + {item.padding:,} padding" if item.padding else "")
        if text is None:
            ids = item.ids[:_IDS].tolist()
            text = " ".join(map(str, ids)) + (" …" if len(item.ids) > _IDS else "")
    elif item.value is not None:
        tokens = f"{item.value.dtype} {list(item.value.shape)}"
    return Row(number, item.caption, tokens, " ".join((text or "").split()))


def table_lines(shown: Preview, columns: int) -> Iterator[str]:
    """A table of the samples that fits so many columns.

    Args:
        shown: what is told.
        columns: of the terminal.
    """
    yield shown.title
    for name, value in shown.facts.items():
        yield f"{name}: {value}"
    rows = [row_of(item) for item in shown.items]
    widths = [
        max((len(getattr(row, name)) for row in rows), default=0)
        for name in ("number", "caption", "tokens")
    ]
    widths[1] = min(widths[1], max(8, columns // 4))
    for row in rows:
        parts = [
            row.number.rjust(widths[0]),
            row.caption[: widths[1]].ljust(widths[1]),
            row.tokens.ljust(widths[2]),
        ]
        head = "  ".join(part for part, width in zip(parts, widths, strict=True) if width)
        room = columns - len(head) - 2
        yield (f"{head}  {row.text}"[:columns] if room >= 10 else head).rstrip()
    yield from shown.notes
