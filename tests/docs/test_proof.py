"""docs/elastic.md and docs/shuffling.md have the figures of benchmarks/results/, and those of
headrace come out again.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
IN_PROCESSES = """
import json, pathlib, sys
from elastic_run import CHANGES, PEERS, run
for change in (change for change in CHANGES if change.key in ("fewer", "killed")):
    folder = pathlib.Path(sys.argv[1]) / change.key
    folder.mkdir()
    print(json.dumps([change.key, run(PEERS[0], change, folder)]), flush=True)
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Imports a script of benchmarks/, whose modules import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["elastic", "shuffling"])
def test_a_page_has_the_figures_of_its_script(scripts: Any, name: str) -> None:
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert scripts(name).page(page, data) == page, f"run: python benchmarks/{name}.py --page"


@pytest.mark.parametrize(("peers", "tables"), [(0, 1), (1, 1), (2, 2), (6, 2)])
def test_headrace_stands_beside_the_peers_that_ran(scripts: Any, peers: int, tables: int) -> None:
    data = json.loads((RESULTS / "elastic.json").read_text(encoding="utf-8"))
    others = [name for name in data["peers"] if name != "headrace"][peers:]
    data["peers"] |= {name: {"missing_because": "it is not installed"} for name in others}
    found = scripts("elastic").tables(data)
    assert found.count("| | headrace |") == tables and found.count(
        ": not run, it is not installed"
    ) == len(others)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_of_shuffling_is_drawn_of_them(scripts: Any, theme: str) -> None:
    data = json.loads((RESULTS / "shuffling.json").read_text(encoding="utf-8"))
    committed = (ROOT / "docs" / "assets" / f"shuffling-{theme}.svg").read_text(encoding="utf-8")
    assert committed == scripts("shuffling_chart").svg(data, theme), (
        "run: python benchmarks/shuffling.py --page"
    )


def test_entropies_come_out_again_and_are_predicted(scripts: Any) -> None:
    shuffling = scripts("shuffling")
    rows = json.loads((RESULTS / "shuffling.json").read_text(encoding="utf-8"))["entropy"]
    assert len(rows) == len(shuffling.BATCHES) * (
        len(shuffling.CHUNKS) * len(shuffling.INTERLEAVES) + 1
    )
    for row in rows:
        missed, interleave, chunks = (
            row["measured"] - row["predicted"],
            row.get("interleave", 1),
            shuffling.SAMPLES // row["chunk"],
        )
        if chunks >= 16 * interleave * shuffling.turns_of(chunks, interleave):
            assert missed > -0.05, row
        assert -0.4 < missed < (0.05 if row["chunk"] * interleave > 8 * row["batch"] else 0.7), row
    row = next(
        row for row in rows if (row["batch"], row["chunk"], row.get("interleave")) == (64, 1024, 16)
    )
    order = shuffling.order_of(shuffling.SAMPLES, 1024, 16, 64)
    assert shuffling.measured(order, 64) == pytest.approx(row["measured"], abs=1e-9)
    assert shuffling.predicted(16, shuffling.SAMPLES // 1024) == pytest.approx(
        row["predicted"], abs=1e-9
    )


def test_the_formula_is_exact_where_it_can_be_counted(scripts: Any) -> None:
    """Two chunks of each of two classes: of two that are drawn, one time in three both are of
    one class.
    """
    assert scripts("shuffling").predicted(2, 4, classes=2) == pytest.approx(2 / 3)


def same(found: dict[str, Any]) -> None:
    """These results of headrace are those of the page."""
    said = json.loads((RESULTS / "elastic.json").read_text(encoding="utf-8"))["peers"]["headrace"][
        "results"
    ]
    for key, row in found.items():
        for name in ("missing", "doubled", "batches", "error"):
            assert row.get(name) == said[key].get(name), (key, name)


def in_turn(scripts: Any, change: Any, folder: Path) -> dict[str, Any]:
    """What `elastic_run.run` finds with processes: here one rank after the other, and none is
    killed.
    """
    run, peer = scripts("elastic_run"), scripts("elastic_peers").Headrace()
    lives, dealt = [], [None] * change.lives[0].ranks
    for number, life in enumerate(change.lives):
        lived, states = run.Lived(), []
        for rank in range(life.ranks):
            try:
                opened = peer.open(folder, life, rank, dealt[rank])
            except Exception as error:
                return {"error": run.said(error)}
            with contextlib.closing(iter(opened.batches)) as batches:
                lived.batches.append(list(itertools.islice(batches, life.stop)))
                states.append(opened.state())
        lives.append(lived)
        if number + 1 < len(change.lives):
            assert all(state == states[0] for state in states)
            dealt = peer.deal(states, change.lives[number + 1].ranks)
    if change.lives[-1].stop is not None:
        return {}
    result: dict[str, Any] = run.count(lives, change.lives[0].samples)
    return {**result, "missing": result["missing"] - change.lives[0].skips}


@pytest.mark.slow
def test_headrace_comes_through_all_changes_in_turn(scripts: Any, tmp_path: Path) -> None:
    found = {
        change.key: in_turn(scripts, change, tmp_path) for change in scripts("elastic_run").CHANGES
    }
    assert len(found) == 8
    same(found)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_headrace_comes_through_a_killed_rank_in_processes(tmp_path: Path) -> None:
    """Fewer ranks, after an orderly end and after SIGKILL, as the script runs them; in a process
    group that is killed if it hangs.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(ROOT / "src"), str(ROOT)])
    }
    command = [sys.executable, "-c", IN_PROCESSES, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = dict(json.loads(line) for line in printed.splitlines())
    assert set(found) == {"fewer", "killed"}
    same(found)
    assert all(row["states"] == 1 and row["state"] < 1000 for row in found.values())
