"""`benchmarks/run_all.py` reports what benchmarks gave, what failed and what was skipped; a job
stays within its budget (law 5).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.data.make import make_photos
from tests.test_examples import MODES

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HANGS = """
import subprocess, sys, tempfile, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
own = subprocess.Popen(sleep, start_new_session=True)
with open(__file__ + ".left", "w") as file:
    print(own.pid, tempfile.mkdtemp(), file=file)
time.sleep(600)
"""
"""A script that starts a process in a session of its own, and makes a temporary folder."""


@pytest.fixture
def run(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run_all` with scripts of the test's own in place of the benchmarks; returns what runs
    them: (exit status, report).
    """
    runner = scripts("run_all")
    fast = {"median": 4000.4, "min": 3e3, "max": 5e3, "more": {"first batch, ms": [110, 120, 140]}}
    rows = {"headrace": fast, "absent": {"failed": "not installed"}}
    ratio = {"label": "headrace / h5py", "ratio": 2.0, "min": 1.5, "max": 2.5}
    ratios = [{**ratio, "denominator": "h5py"}, {"label": "none", "ratio": None}]
    race = {"sections": {"Rows": {"unit": "rows/s", "ratios": ratios, "contestants": rows}}}
    wanted = "import sys; assert sys.argv[1:] == ['--rounds', '2', '--json']"
    made = {
        "race": f"{wanted}; print({json.dumps(race)!r})",
        "lines": """print('{"limit": "decode", "found": true}')
print('{"limit": "disk", "found": false}')""",
        "broken": "import sys; sys.exit('error: no such disk')",
        "hangs": HANGS,
        "garbage": "print('no json')",
        "monitoring": """print(
'{"batch_us": 500, "counting_us": 10, "share": 0.02, "of_10_ms": 0.001}')""",
        "lacks": "raise AssertionError('it must not be run')",
    }
    for name, program in made.items():
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    known = {name: runner.Script(f"Of {name}", "", lines=name == "lines") for name in made}
    known["race"] = runner.Script("Of race", "", "--rounds 2")
    known["lacks"] = runner.Script("Of lacks", needs=("headrace_has_no_such_package",))
    monkeypatch.setattr(runner, "SCRIPTS", known)

    def run_all(*options: str) -> tuple[int, str]:
        out = tmp_path / "results"
        fixed = ["run_all.py", "--quick", "--photos", str(tmp_path), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*fixed, *options])
        return runner.main(), (out / "report.md").read_text(encoding="utf-8")

    return run_all


def test_every_benchmark_is_run(scripts: Any) -> None:
    runner = scripts("run_all")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("*.py")}
    measure = {
        name
        for name, text in texts.items()
        if 'add_argument("--json"' in text or "options(parser" in text
    }
    assert set(runner.SCRIPTS) == measure - {"common"}
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}.py" in readme for name in runner.SCRIPTS)


def test_results_are_tables_and_plots(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    status, report = run("--only", "race", "lines", "lacks", "monitoring")
    assert status == 0
    for said in (
        "| Rows | rows/s | first batch, ms |",
        "| headrace | 4,000 (3,000 to 5,000) | 120 |",
        "| absent | not installed |  |",
        "| headrace / h5py | 2.00 (1.50 to 2.50) | h5py |",
        "| [Of race](#of-race) | `benchmarks/race.py --rounds 2` |",
        "| 500 us | 10 us | 2.0 % | 0.10 % |",
        "| disk | no |",
        "skipped: not installed: headrace_has_no_such_package",
        "its figures say nothing",
        "![Rows: rows/s](race-0.svg)",
    ):
        assert said in report
    assert (tmp_path / "results/race-0.svg").read_text().startswith("<?xml")
    kept = json.loads((tmp_path / "results/race.json").read_text())
    assert kept["command"] == "benchmarks/race.py --rounds 2" and kept["quick"] is True
    (tmp_path / "race.py").write_text("raise AssertionError('it must not be run')")
    assert run("--report")[0] == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ".svg" not in run("--report")[1]


@pytest.mark.slow
def test_what_fails_or_hangs_is_said_and_leaves_nothing(run: Any, tmp_path: Path) -> None:
    status, report = run("--only", "broken", "garbage", "race", "hangs", "--limit", "5")
    assert status == 1 and "| headrace | 4,000 (3,000" in report
    assert "failed: exit status 1: error: no such disk" in report
    assert "failed: what it printed is no JSON: 'no json" in report
    assert "failed: not done after 5 s" in report
    pid, folder = (tmp_path / "hangs.py.left").read_text().split()
    assert not psutil.pid_exists(int(pid)) and not Path(folder).exists()


# -- benchmarks/memory.py

BUDGET = 300_000_000  # batches of 64 float32 images of 224 x 224 take 38.5 MB each


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS is Linux's")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_stays_within_its_budget(scripts: Any, workers: int, tmp_path: Path) -> None:
    photos, measure = str(make_photos(tmp_path, per_class=256)), scripts("memory").measure
    idle = measure(photos, "idle", workers, "1GB")["growth"]
    for mode in MODES:
        one = measure(photos, mode, workers, f"{BUDGET}B")
        assert one["refused"] is None
        assert 50e6 < one["growth"] - idle < 1.05 * BUDGET, mode
