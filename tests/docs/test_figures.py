"""The figures of docs/benchmarks.md stand in the sections of docs/benchmark_tables.md that their
rows link to.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
TABLES = (ROOT / "docs" / "benchmark_tables.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"(?<![\w.,^-])\d+(?:[.,]\d+)*(?![\w^])")


def _section(anchor: str) -> str:
    """The text under a heading, up to the next one."""
    named = {
        re.sub(r"[^\w\- ]", "", text.partition("\n")[0].lower()).strip().replace(" ", "-"): text
        for text in re.split(r"^##+ ", TABLES, flags=re.MULTILINE)
    }
    return named[anchor]


def _stands_in(figure: str, text: str) -> bool:
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", text) is not None


def _rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the table under a heading."""
    text = re.split(rf"^##+ {heading}\n", page, flags=re.MULTILINE)[1]
    text = re.split(r"^##+ ", text, flags=re.MULTILINE)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_figure_stands_in_the_table_of_its_row() -> None:
    headings = {"Results": 16, "Where headrace loses": 13, "Limits": 9}
    for heading, count in headings.items():
        rows = _rows(heading)
        assert len(rows) >= count, heading
        for what, *cells, link in rows:
            text = _section(link.partition("#")[2].rstrip(")"))
            figures = [figure for cell in cells for figure in FIGURE.findall(cell)]
            assert figures and FIGURE.search(cells[0]), what
            assert [figure for figure in figures if not _stands_in(figure, text)] == [], what


def test_figures_of_layouts_are_those_of_the_arrays() -> None:
    page = (ROOT / "docs" / "hdf5.md").read_text(encoding="utf-8")
    text = _section("hdf5-and-zarr-random-rows-of-chunked-arrays")
    cells = [cell for row in _rows("How to lay out files", page) for cell in row[1:] if cell]
    assert len(cells) == 6
    assert [cell for cell in cells if not _stands_in(cell, text)] == []


def test_page_is_short_and_has_no_other_figures() -> None:
    """Outside of the compared tables only the machine, the batch and a version."""
    assert len(PAGE.split()) <= 1500
    prose = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    prose = re.sub(r"^```\n.*?^```$|\]\([^)]*\)", "", prose, flags=re.DOTALL | re.MULTILINE)
    assert set(FIGURE.findall(prose)) <= {"2", "24", "64", "3.3"}
