"""The figures of docs/losing.md are those of the sections of docs/benchmarks.md that it links
to.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "losing.md").read_text(encoding="utf-8")
SECTIONS = re.split(
    r"^##+ ", (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if "](benchmarks.md#" in line and line[0] == "|"
]


def _section(anchor: str) -> str:
    """The text under a heading, up to the next one."""
    named = {
        re.sub(r"[^\w\- ]", "", text.partition("\n")[0].lower()).strip().replace(" ", "-"): text
        for text in SECTIONS
    }
    return named[anchor]


def _stands_in(figure: str, text: str) -> bool:
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", text) is not None


def test_each_figure_stands_in_its_section() -> None:
    assert len(ROWS) >= 20
    for what, ours, other, command, link in ROWS:
        text = _section(link.partition("#")[2].rstrip(")"))
        assert _stands_in(ours, text), what
        assert _stands_in(re.findall(r"[\d.,]*\d", other)[-1], text), what
        assert (ROOT / "benchmarks" / command.strip("`").split()[0]).exists()


def test_the_figures_of_layouts_stand_in_the_benchmarks() -> None:
    """docs/hdf5.md, "How to lay out files", has some figures of the arrays."""
    page = (ROOT / "docs" / "hdf5.md").read_text(encoding="utf-8")
    page = page.partition("## How to lay out files")[2].partition("\n## ")[0]
    figures = []
    for line in page.splitlines():
        if re.match(r"\| (contiguous|\d+) \|", line):
            figures += [cell.strip() for cell in line.strip("|").split("|")[1:]]
    figures = list(filter(None, figures))
    text = _section("hdf5-and-zarr-random-rows-of-chunked-arrays")
    assert len(figures) >= 16
    assert [figure for figure in figures if not _stands_in(figure, text)] == []
