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
QUICK = json.loads((Path(__file__).parent / "quick_runs.json").read_text(encoding="utf-8"))
"""What `run_all.py --quick` gave, cut to a few sections and contestants."""


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


def test_a_wrong_mark_is_an_error(scripts: Any, tmp_path: Path) -> None:
    tables, page = scripts("doc_tables"), tmp_path / "page.md"
    kept = json.loads((tables.RESULTS / "monitoring.json").read_text(encoding="utf-8"))
    (tmp_path / "odd.json").write_text(json.dumps({**kept, "name": "odd", "result": {"rate": 1}}))
    (tmp_path / "monitoring.json").write_text(json.dumps(kept))
    odd, absent, known = (f"<!-- table: {n} -->\n" for n in ("odd", "absent", "monitoring"))
    end = "<!-- /table -->\n"
    for text in (absent + end, odd + end, known, 2 * (known + end)):
        page.write_text(text)
        with pytest.raises(tables.TableError):
            tables.write_tables(tmp_path, tmp_path)
