"""The marked tables of docs/ are those of benchmarks/results/, and `run_all.py --write` writes
them.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MARK = "<!-- table: {} -->\n{}<!-- /table -->\n"
RACE = {
    "machine": {"cores": 2, "torch": "2.13.0", "h5py": "3.16.0"},
    "sections": {
        "Rows": {
            "unit": "rows/s",
            "contestants": {
                "headrace": {"median": 4000.4, "min": 3e3, "max": 5e3},
                "absent": {"failed": "not installed"},
            },
            "ratios": [
                {
                    "label": "headrace / h5py",
                    "ratio": 2.0,
                    "min": 1.5,
                    "max": 2.5,
                    "denominator": "h5py",
                }
            ],
        },
        "Empty": {
            "unit": "batches/s",
            "contestants": {"headrace": {"median": 9.0, "min": 8.0, "max": 10.0}},
            "ratios": [],
        },
    },
}
MACHINE = {"cores": 2, "cpu": "AMD EPYC", "memory": "25 GB", "python": "3.11.7", "zarr": "3.1.6"}
KEPT = {
    "name": "race",
    "command": "benchmarks/race.py --rounds 2",
    "date": "2026-11-03",
    "load": 0.51,
    "quick": False,
    "result": RACE,
}
KEPT |= {"machine": MACHINE}
QUICK = json.loads((Path(__file__).parent / "quick_runs.json").read_text(encoding="utf-8"))
"""What `run_all.py --quick` gave, cut to a few sections and contestants."""
HEADS = {
    "arrays": "| samples/s | headrace | headrace, block shuffle |",
    "cache_policy": (
        "| order | fits | keep, shared | keep, a worker | LRU, shared | LRU, a worker | no cache "
        "can pass |"
    ),
    "cold": "| lines/s | headrace | headrace, without hints |",
    "device": "| ResNet-50 in bfloat16 on cpu | img/s | blocked |",
    "eager": "|  | HDF5, blocks/s | Zarr, a file a chunk, blocks/s |",
    "episodes": "| windows/s | headrace | headrace, block shuffle | h5py, DataLoader |",
    "from_memory": "|  | uint8, img/s | float32 normalised, img/s |",
    "images": "|  | float32 normalised, img/s | uint8, img/s |",
    "info_advice": "| file | samples/s before | after | times | said, at least | command |",
    "memory": (
        "| mode, 150 images | workers | ranks | shared | budget | of it | taken | samples held | "
        "img/s |"
    ),
    "modes": "| 2 workers | img/s | to the plain `DataLoader` with the same decode |",
    "monitoring": "| a batch of 32 samples | counting it | of that batch | of a batch of 10 ms |",
    "order": (
        "| N = 200,000, time | first index | us, blocks | us, lists | with start | memory | "
        "resume |"
    ),
    "pack": "| encoded | img/s | MB written |",
    "profile_limits": "| planted | named | predictions kept | predicted | measured | seconds |",
    "read_rows": "| rows/s | headrace | headrace, open dataset |",
    "sparse_rows": "| 200 x 500, dense | cells/s | entropy |",
    "stream": "| shuffled, 20 ms | samples/s | first batch, ms | CPU, s | requests | MB |",
    "stream_zarr": "| 8 a chunk, 20 ms | samples/s | first batch, ms | CPU, s | requests | MB |",
    "tables": "| random rows of an Arrow file that HF datasets saved, batches of 64 | rows/s |",
    "training": "| mode | start | epoch 1, img/s | epoch 2, img/s | wait | hits | memory | loss |",
    "text": "| index of a text of 0.01 GB, from the disk | MB/s |",
}
"""How the first table of each begins."""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for name in ("run_all", "doc_tables", "doc_forms", "report", "folders", "common"):
        sys.modules.pop(name, None)


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


def test_figures_by_hand_stand_until_the_next_run(scripts: Any, results: Path) -> None:
    lines = ["| | rows/s |", "|---|--:|", "| headrace | 5 |"]
    kept = {key: value for key, value in KEPT.items() if key != "result"} | {
        "by_hand": "2 cores, nothing else ran.",
        "lines": lines,
    }
    (results / "race.json").write_text(json.dumps(kept))
    written = scripts("doc_tables").with_tables(MARK.format("race", ""), results)
    said = (
        "`python benchmarks/race.py --rounds 2`, measured by hand on 3 November 2026: 2 cores, "
        "nothing else ran."
    )
    assert written.splitlines()[1:-1] == [said, "", *lines]


@pytest.mark.parametrize("name", sorted(QUICK))
def test_each_benchmark_has_its_table(scripts: Any, name: str) -> None:
    result = QUICK[name]
    lines = list(
        scripts("doc_forms").FORMS.get(name, scripts("doc_forms").column_a_section)(result)
    )
    assert lines[0].startswith(HEADS[name])
    tables = [part.split("\n") for part in "\n".join(lines).split("\n\n") if part.startswith("|")]
    assert tables
    for head, line, *rows in tables:
        columns = head.count("|")
        assert rows and line == "|---|" + "--:|" * (columns - 2)
        assert all(len(re.findall(r"(?<!\\)\|", row)) == columns for row in rows), rows
    if "sections" in result:
        names = {name for section in result["sections"].values() for name in section["contestants"]}
        assert all(any(name in row for table in tables for row in table) for name in names)


def test_the_quick_runs_are_of_all_benchmarks(scripts: Any) -> None:
    pages_of_their_own = {"elastic", "shuffling"}
    assert set(QUICK) == set(HEADS) == set(scripts("run_all").SCRIPTS) - pages_of_their_own


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, ""),
        (0, "0.000"),
        (0.00004, "0.000"),
        (0.0123, "0.0123"),
        (9.0, "9"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_have_three_digits(scripts: Any, value: float | None, said: str) -> None:
    assert scripts("doc_forms").number(value) == said


def test_sizes_durations_and_ratios(scripts: Any) -> None:
    forms = scripts("doc_forms")
    assert [forms.size(n) for n in (None, 12, 1500, 269_000, 4.8e9)] == [
        "",
        "12 B",
        "1.5 kB",
        "269 kB",
        "4.8 GB",
    ]
    assert [forms.duration(n) for n in (None, 2e-7, 0.0043, 12.5)] == [
        "",
        "0.2 us",
        "4.3 ms",
        "12.5 s",
    ]
    assert forms.ratio_of({"at_least": 21355.4}) == "more than 21,355"
    assert forms.ratio_of({"ratio": 12.3, "min": 9.9, "max": 15.0}) == "12 (10 to 15)"


def test_only_pages_that_change_are_written(scripts: Any, results: Path, tmp_path: Path) -> None:
    tables, docs = scripts("doc_tables"), tmp_path / "docs"
    docs.mkdir()
    (docs / "race.md").write_text(MARK.format("race", ""))
    (docs / "other.md").write_text("No table.\n")
    assert tables.write_tables(docs, results) == [docs / "race.md"]
    assert "| headrace | 4,000" in (docs / "race.md").read_text()
    assert tables.write_tables(docs, results) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            MARK.format("absent", ""),
            "absent.json does not exist: run python benchmarks/run_all.py --only absent --write",
        ),
        (MARK.format("odd", ""), "results/odd.json has no table: give odd a form in FORMS"),
        ("<!-- table: race -->\n", "the table race has no end"),
        (MARK.format("race", "") * 2, "the table race is marked twice"),
    ],
)
def test_a_wrong_mark_is_said(
    scripts: Any, results: Path, tmp_path: Path, text: str, said: str
) -> None:
    tables, docs = scripts("doc_tables"), tmp_path / "docs"
    docs.mkdir()
    (results / "odd.json").write_text(json.dumps(KEPT | {"name": "odd", "result": {"rate": 1}}))
    (docs / "page.md").write_text(text)
    with pytest.raises(tables.TableError, match=said):
        tables.write_tables(docs, results)


def test_a_run_is_kept_where_it_has_a_table(
    scripts: Any, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all, tables, docs = scripts("run_all"), scripts("doc_tables"), tmp_path / "docs"
    docs.mkdir()
    (docs / "race.md").write_text(MARK.format("race", ""))
    new = json.loads(json.dumps(RACE).replace("4000.4", "7000"))
    for name in ("race", "walk"):
        (tmp_path / f"{name}.py").write_text(f"print({json.dumps(new)!r})")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "RESULTS", results)
    monkeypatch.setattr(run_all, "marked", lambda: tables.marked(docs))
    monkeypatch.setattr(run_all, "write_tables", lambda: tables.write_tables(docs, results))
    monkeypatch.setattr(
        run_all, "SCRIPTS", {name: run_all.Script(f"Of {name}") for name in ("race", "walk")}
    )
    for options in ([], ["--report"]):
        monkeypatch.setattr(
            sys, "argv", ["run_all.py", "--write", "--out", str(tmp_path / "out"), *options]
        )
        assert run_all.main() == 0
    assert "| headrace | 7,000" in (docs / "race.md").read_text()
    assert [path.name for path in results.iterdir()] == ["race.json"]
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--write", "--quick"])
    with pytest.raises(SystemExit):
        run_all.main()
