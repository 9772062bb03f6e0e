"""Lists the words of other libraries and older guides that headrace refuses with a hint.

python tools/list_words.py        # prints them as docs/moving.md shows them

As a hook of mkdocs it writes the lists into docs/moving.md when the site is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import synonyms

MARKS: dict[str, Mapping[str, str]] = {
    "<!-- arguments -->": {**synonyms.BY_ARGUMENT, **synonyms.BY_REMEDY},
    "<!-- public names -->": synonyms.BY_NAME,
}


def listed(table: Mapping[str, str]) -> str:
    """A table of synonyms as Markdown."""
    rows = ["| word | use |", "|---|---|"]
    for remedy, words in table.items():
        shown = ", ".join(f"`{word}`" for word in words.split())
        rows.append(f"| {shown} | {remedy} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page: puts the lists where they are marked."""
    for mark, table in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, listed(table))
    return markdown


if __name__ == "__main__":
    print("\n\n".join(map(listed, MARKS.values())))
