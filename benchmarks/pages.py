"""Writes what scripts have measured into pages of docs/, between a pair of comments."""

from __future__ import annotations


def put(text: str, name: str, part: str) -> str:
    """The page with `part` between the comments ``<!-- name -->`` and ``<!-- /name -->``, each a
    line of its own.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"the page needs one {begin.strip()} and then one {end.strip()}, each a line of its own"
        )
    return f"{text[: text.index(begin)]}{begin}{part}\n{text[text.index(end) :]}"
