"""The marked tables of docs/ are those of benchmarks/results/, and `run_all.py --write` writes
them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MARK = "<!-- table: {} -->\n{}<!-- /table -->\n"
FAST = {"median": 4000.4, "min": 3e3, "max": 5e3}
RATIO = {"label": "headrace / h5py", "ratio": 2.0, "min": 1.5, "max": 2.5, "denominator": "h5py"}
ROWS = {
    "unit": "rows/s",
    "contestants": {"headrace": FAST, "absent": {"failed": "not installed"}},
    "ratios": [RATIO],
}
EMPTY = {
    "unit": "batches/s",
    "contestants": {"headrace": {"median": 9.0, "min": 8.0, "max": 10.0}},
    "ratios": [],
}
RACE = {
    "machine": {"cores": 2, "torch": "2.13.0", "h5py": "3.16.0"},
    "sections": {"Rows": ROWS, "Empty": EMPTY},
}
KEPT = {
    "name": "race",
    "command": "benchmarks/race.py --rounds 2",
    "date": "2026-11-03",
    "load": 0.51,
    "quick": False,
    "result": RACE,
    "machine": {"cores": 2, "cpu": "AMD EPYC", "memory": "25 GB", "python": "3.11.7"},
}
QUICK = json.loads((Path(__file__).parent / "quick_runs.json").read_text(encoding="utf-8"))
"""What `run_all.py --quick` gave, cut to a few sections and contestants."""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the result of a race."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "race.json").write_text(json.dumps(KEPT))
    return folder


def test_marked_tables_are_those_of_the_results(scripts: Any) -> None:
    tables, run_all = scripts("doc_tables"), scripts("run_all")
    pages = tables.marked()
    assert {"cache_policy", "monitoring"} <= set(pages) <= set(run_all.SCRIPTS)
    for name, page in pages.items():
        text = page.read_text(encoding="utf-8")
        assert tables.with_tables(text) == text, (
            "run: python benchmarks/run_all.py --write --report"
        )
        kept = json.loads((tables.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        assert kept["quick"] is False and kept["command"].split()[0] == f"benchmarks/{name}.py"


def test_the_page_names_its_marked_tables(scripts: Any) -> None:
    """The head of docs/benchmarks.md says which tables are written."""
    head = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split("\n## ")[0]
    for name, page in scripts("doc_tables").marked().items():
        before = page.read_text(encoding="utf-8").split(f"<!-- table: {name} -->")[0]
        heading = before.rpartition("\n#")[2].lstrip("#").partition("\n")[0].strip().lower()
        anchor = "#" + re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        assert (f"({anchor})" if page.name == "benchmarks.md" else f"({page.name}{anchor})") in head


def test_a_race_is_a_table(scripts: Any, results: Path) -> None:
    text = "# Races\n\n" + MARK.format("race", "what stood here before\n") + "\nProse stays.\n"
    written = scripts("doc_tables").with_tables(text, results)
    assert written.splitlines() == [
        *("# Races", "", "<!-- table: race -->"),
        "`python benchmarks/race.py --rounds 2`, 3 November 2026, 2 cores (AMD EPYC, 25 GB), load "
        "0.5 at the start; "
        "python 3.11.7, torch 2.13.0, h5py 3.16.0.",
        "",
        "|  | Rows, rows/s | Empty, batches/s |",
        "|---|--:|--:|",
        "| headrace | 4,000 (3,000 to 5,000) | 9 (8 to 10) |",
        "| absent | not installed |  |",
        "",
        "| ratio, median of those within each round |  | to |",
        "|---|--:|--:|",
        "| headrace / h5py | 2.00 (1.50 to 2.50) | h5py |",
        *("<!-- /table -->", "", "Prose stays."),
    ]
    assert scripts("doc_tables").with_tables(written, results) == written


def test_each_benchmark_has_its_table(scripts: Any) -> None:
    pages_of_their_own = {"elastic", "shuffling"}
    assert set(QUICK) == set(scripts("run_all").SCRIPTS) - pages_of_their_own
    forms = scripts("doc_forms")
    for name, result in QUICK.items():
        text = "\n".join(forms.FORMS.get(name, forms.column_a_section)(result))
        tables = [part.split("\n") for part in text.split("\n\n") if part.startswith("|")]
        assert tables, name
        for head, line, *rows in tables:
            columns = head.count("|")
            assert rows and line == "|---|" + "--:|" * (columns - 2), name
            assert all(len(re.findall(r"(?<!\\)\|", row)) == columns for row in rows), rows
        sections = result["sections"].values() if "sections" in result else ()
        for section in sections:
            assert all(contestant in text for contestant in section["contestants"]), name


def test_a_wrong_mark_is_an_error(scripts: Any, results: Path, tmp_path: Path) -> None:
    tables, docs = scripts("doc_tables"), tmp_path / "docs"
    docs.mkdir()
    (results / "odd.json").write_text(json.dumps(KEPT | {"name": "odd", "result": {"rate": 1}}))
    race, absent = MARK.format("race", ""), MARK.format("absent", "")
    for text in (absent, MARK.format("odd", ""), "<!-- table: race -->\n", race * 2):
        (docs / "page.md").write_text(text)
        with pytest.raises(tables.TableError):
            tables.write_tables(docs, results)
