"""docs/benchmark_tables.md is what `run_all.py --write` makes of benchmarks/results/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICK = json.loads((Path(__file__).parent / "quick_runs.json").read_text(encoding="utf-8"))
"""What `run_all.py --quick` gave, cut to a few sections and contestants."""


def test_page_of_tables_is_made_of_the_results(scripts: Any) -> None:
    tables, run_all = scripts("doc_tables"), scripts("run_all")
    assert tables.PAGE.read_text(encoding="utf-8") == tables.page(), (
        "run: python benchmarks/run_all.py --write --report"
    )
    names = tables.table_names()
    kept = {path.stem for path in tables.RESULTS.glob("*.json")} - {"chart"}
    assert set(names) == kept
    for name in kept - set(scripts("doc_forms").WHOLE):
        one = json.loads((tables.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        assert one["quick"] is False and one["name"] in run_all.SCRIPTS
        assert one["command"].split()[0] == f"benchmarks/{one['name']}.py"


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
