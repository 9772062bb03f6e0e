"""Writes the marked tables of docs/ from the JSON in benchmarks/results/.

A page marks a table with two comments, between which nothing is written by hand:

    <!-- table: images -->
    <!-- /table -->

`run_all.py --write` puts there the table of `results/images.json`, with the command, the day, the
machine and the versions. doc_forms.py has the forms; a benchmark of `common.run_sections` needs
none of its own. Figures that were measured by hand, before a table was marked, lie there as the
lines of the page ("by_hand": their circumstances) until the next `--write`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from doc_forms import FORMS, column_a_section

HERE = Path(__file__).resolve().parent
DOCS, RESULTS = HERE.parent / "docs", HERE / "results"
OPENING = re.compile(r"^<!-- table: (\w+) -->\n", re.MULTILINE)
ALWAYS_NAMED = ("cores", "cpu", "memory", "python", "torch", "numpy", "headrace")
MARKED = re.compile(r"^<!-- table: (\w+) -->\n(.*?)^<!-- /table -->$", re.MULTILINE | re.DOTALL)


class TableError(ValueError):
    """A page or a result of which no table can be made."""


def marked(docs: Path = DOCS) -> dict[str, Path]:
    """The page of each marked table.

    Raises:
        TableError: a mark has no end, or two have the same name.
    """
    pages: dict[str, Path] = {}
    for page in sorted(docs.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        names = [match[1] for match in MARKED.finditer(text)]
        for name in OPENING.findall(text):
            if name not in names:
                raise TableError(f"{page}: the table {name} has no end: add a line <!-- /table -->")
            if name in pages:
                raise TableError(f"{page}: the table {name} is marked twice: remove one mark")
            pages[name] = page
    return pages


def write_tables(docs: Path = DOCS, results: Path = RESULTS) -> list[Path]:
    """Replaces the marked tables of all pages; the pages that changed."""
    changed = []
    for page in sorted(set(marked(docs).values())):
        before = page.read_text(encoding="utf-8")
        after = with_tables(before, results)
        if after != before:
            page.write_text(after, encoding="utf-8")
            changed.append(page)
    return changed


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The text of a page with its marked tables as the results have them."""

    def replaced(match: re.Match[str]) -> str:
        path = results / f"{match[1]}.json"
        if not path.is_file():
            raise TableError(
                f"{path} does not exist: run python benchmarks/run_all.py --only {match[1]} --write"
            )
        kept = json.loads(path.read_text(encoding="utf-8"))
        return "\n".join([f"<!-- table: {match[1]} -->", *_table(kept), "<!-- /table -->"])

    return MARKED.sub(replaced, text)


def _table(kept: Mapping[str, Any]) -> Iterator[str]:
    name, result = kept["name"], kept.get("result")
    day = date.fromisoformat(kept["date"])
    if "by_hand" in kept:
        yield (
            f"`python {kept['command']}`, measured by hand on {day.day} {day:%B %Y}: "
            f"{kept['by_hand']}"
        )
        yield from ("", *kept["lines"])
        return
    form = FORMS.get(name) or (
        column_a_section if isinstance(result, dict) and "sections" in result else None
    )
    if form is None:
        raise TableError(
            f"results/{name}.json has no table: give {name} a form in FORMS of "
            "benchmarks/doc_forms.py"
        )
    # run_all's own names packages of all scripts
    where = {key: value for key, value in kept["machine"].items() if key in ALWAYS_NAMED}
    where |= result.get("machine", {}) if isinstance(result, dict) else {}
    processor = f"{where.pop('cores')} cores ({where.pop('cpu')}, {where.pop('memory')})"
    versions = ", ".join(f"{package} {version}" for package, version in where.items())
    photos = (
        "; PHOTOS were made" if "PHOTOS" in kept["command"] and kept["photos"] == "made" else ""
    )
    yield (
        f"`python {kept['command']}`{photos}, {day.day} {day:%B %Y}, {processor}, load "
        f"{kept['load']:.1f} at the start; {versions}."
    )
    yield ""
    yield from form(result)
