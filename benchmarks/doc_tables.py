"""Writes the marked tables of docs/ from the JSON in benchmarks/results/.

A page marks a table with two comments, between which nothing is written by hand:

    <!-- table: images -->
    <!-- /table -->

`run_all.py --write` puts there the table of `results/images.json`, with the command, the day, the machine and the versions. A
benchmark of `common.run_sections` needs no code here; one with a form of its own has a function in `FORMS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

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
            raise TableError(f"{path} does not exist: run python benchmarks/run_all.py --only {match[1]} --write")
        kept = json.loads(path.read_text(encoding="utf-8"))
        return "\n".join([f"<!-- table: {match[1]} -->", *_table(kept), "<!-- /table -->"])

    return MARKED.sub(replaced, text)


def _table(kept: Mapping[str, Any]) -> Iterator[str]:
    name, result = kept["name"], kept.get("result")
    form = FORMS.get(name) or (_sections if isinstance(result, dict) and isinstance(result.get("sections"), dict) else None)
    if form is None:
        raise TableError(f"results/{name}.json has no table: give {name} a function in FORMS of benchmarks/doc_tables.py")
    where = {key: value for key, value in kept["machine"].items() if key in ALWAYS_NAMED}  # run_all's own names packages of all scripts
    where |= result.get("machine", {}) if isinstance(result, dict) else {}
    processor = f"{where.pop('cores')} cores ({where.pop('cpu')}, {where.pop('memory')})"
    versions = ", ".join(f"{package} {version}" for package, version in where.items())
    day = date.fromisoformat(kept["date"])
    yield f"`python {kept['command']}`, {day.day} {day:%B %Y}, {processor}, load {kept['load']:.1f} at the start; {versions}."
    yield ""
    yield from form(result)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(cells: list[str]) -> Iterator[str]:
    """The names of the columns; all but the first are aligned as numbers."""
    yield _row(cells)
    yield "|---|" + "--:|" * (len(cells) - 1)


def _speed(contestants: Mapping[str, Any], name: str) -> str:
    """The median, and from where to where; "" for one that was not there."""
    row = contestants.get(name)
    if row is None:
        return ""
    return f"{row['median']:,.0f} ({row['min']:,.0f} to {row['max']:,.0f})" if "median" in row else row["failed"].replace("|", "\\|")


def _ratio(row: Mapping[str, Any]) -> str:
    size = ".0f" if row["ratio"] >= 10 else ".2f"
    return f"{row['ratio']:{size}} ({row['min']:{size}} to {row['max']:{size}})"


def _sections(result: Mapping[str, Any]) -> Iterator[str]:
    """A race: a column a section and a line a contestant; then a line a ratio."""
    sections = result["sections"]
    names = list(dict.fromkeys(name for section in sections.values() for name in section["contestants"]))
    yield from _head(["", *(f"{title}, {section['unit']}" for title, section in sections.items())])
    yield from (_row([name, *(_speed(section["contestants"], name) for section in sections.values())]) for name in names)
    ratios = [row for section in sections.values() for row in section["ratios"] if row["ratio"] is not None]
    if ratios:
        yield from ("", *_head(["ratio, median of those within each round", "", "to"]))
        yield from (_row([row["label"], _ratio(row), row["denominator"]]) for row in ratios)


def _cache_policy(result: Mapping[str, Any]) -> Iterator[str]:
    """Hit rates: a line for each part that fits and each order."""
    columns = [f"{cache}, headrace, {who}" for cache in ("keep", "LRU") for who in ("shared", "a worker")]
    yield from _head(["order", "fits", *(name.replace(", headrace", "") for name in columns), "no cache can pass"])
    for row in sorted(result["rows"], key=lambda row: ORDERS.index(row["order"])):
        rates = (f"{row[name]:.1%}" for name in columns)
        yield _row([cell.replace("%", " %") for cell in (row["order"], f"{row['held']:.0%}", *rates, f"{row['limit']:.0%}")])


def _monitoring(result: Mapping[str, Any]) -> Iterator[str]:
    yield from _head(["a batch of 32 samples", "counting it", "of that batch", "of a batch of 10 ms"])
    shares = f"{100 * result['share']:.1f} %", f"{100 * result['of_10_ms']:.2f} %"
    yield _row([f"{result['batch_us']:.0f} us", f"{result['counting_us']:.0f} us", *shares])


ORDERS = ("shuffled", "sequential", "weighted", "with replacement")
FORMS: dict[str, Callable[[Any], Iterator[str]]] = {"cache_policy": _cache_policy, "monitoring": _monitoring}
"""Of the benchmarks whose table is not that of a race."""
