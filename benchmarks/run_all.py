"""Runs all benchmarks, one after the other, and writes one report.

    python benchmarks/run_all.py                      # hours: all figures
    # small data, two rounds: shows that everything runs; no figures to quote
    python benchmarks/run_all.py --quick
    python benchmarks/run_all.py --only images order    # some of them
    # one of them, with options of your own
    python benchmarks/run_all.py --only text --options "--gb 0.5"
    python benchmarks/run_all.py --report  # runs nothing: the report of what lies in --out
    # keeps what docs/benchmark_tables.md is made of, and writes that page
    python benchmarks/run_all.py --write
    python benchmarks/run_all.py --write --report  # runs nothing: the page of what is kept

What each script prints with `--json` is kept as `OUT/NAME.json`, with its command, its time and the
machine around it, and `OUT/report.md` has the tables, with plots beside them where matplotlib is
installed (extra `plot`). OUT is benchmarks/results/latest, and out/benchmarks with `--quick`.
Scripts whose packages are missing are skipped, and the report says so; peers that are missing are
listed as such by the scripts.

`--write` makes docs/benchmark_tables.md of benchmarks/tables.md and benchmarks/results/NAME.json
(doc_tables.py).

Photographs are made unless `--photos` names a folder of class folders. Exit status: 0; 1 where a
script failed; 2 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from common import machine
from doc_forms import WHOLE
from doc_tables import PAGE, RESULTS, TableError, page, table_names
from folders import temporary_folder
from PIL import Image
from report import write_report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = (("zarr",), ("pyarrow",), ("aiohttp",), ("psutil",), ("hdf5plugin",))


@dataclass(frozen=True)
class Script:
    """How a benchmark is run.

    Attributes:
        question: the heading of its section in the report.
        full, quick: its options; PHOTOS stands for the folder of photographs.
        needs: modules without which it does not run.
        lines: True if it prints a JSON document a line.
    """

    question: str
    full: str = ""
    quick: str = ""
    needs: tuple[str, ...] = ()
    lines: bool = False


SCRIPTS: dict[str, Script] = {
    "images": Script(
        "Photographs to batches",
        "PHOTOS",
        "PHOTOS --limit 128 --rounds 2 --only headrace limit torchvision",
    ),
    "modes": Script("Loading modes", "PHOTOS", "PHOTOS --rounds 2"),
    "training": Script(
        "Training in each mode",
        "PHOTOS --epochs 2",
        "--images 48 --image-size 64 --epochs 2 --workers 1",
    ),
    "from_memory": Script(
        "Batches of what is in memory", "--step", "--images 256 --size 64 --rounds 2"
    ),
    "device": Script(
        "Training on a GPU",
        "PHOTOS",
        "PHOTOS --limit 16 --size 32 --batch 4 --images 8 --workers 1 --rounds 2 --only step "
        "eager lazy plain",
    ),
    "arrays": Script(
        "Random rows of HDF5 and Zarr",
        "PHOTOS",
        'PHOTOS --side 32 --samples 512 --layouts blosc "of 256, 16" --rounds 2',
    ),
    "read_rows": Script(
        "Random rows as one array",
        "",
        "--side 32 --samples 512 --rows 128 --layouts gzip --rounds 2",
    ),
    "others": Script(
        "Shards of other libraries",
        "PHOTOS",
        "PHOTOS --limit 64 --rounds 2",
        needs=("streaming", "litdata"),
    ),
    "sparse_rows": Script("Sparse rows", "", "--quick --cells 2000 --genes 500 --rounds 2"),
    "tables": Script(
        "Arrow and Parquet",
        "",
        '--rows 40000 --width 32 --rounds 2 --only headrace "HF datasets, 0" "its threads"',
        needs=("pyarrow", "datasets"),
    ),
    "eager": Script("Small blocks in mode eager", "", "--blocks 2000 --rounds 2", needs=("zarr",)),
    "episodes": Script("Windows over demonstrations", "", "--demos 4 --rounds 2"),
    "text": Script(
        "Texts and tokens",
        "",
        '--gb 0.01 --tokens 1 --rounds 2 --only headrace cat memmap "0 workers"',
    ),
    "stream": Script(
        "Shards from a server",
        "",
        "--quick --side 32 --shard 1 --order shuffled",
        needs=("aiohttp",),
    ),
    "stream_zarr": Script(
        "Chunks of Zarr from a server",
        "",
        "--rows 8 --samples 512 --side 32 --rounds 2 --only headrace",
        needs=("aiohttp",),
    ),
    "cold": Script("Files that are not in memory", "", "--gb 0.05 --batches 10 --rounds 2"),
    "pack": Script(
        "Packing", "PHOTOS", "PHOTOS --task encoded decoded read --rounds 2 --only headrace cp MDS"
    ),
    "order": Script(
        "The order of an epoch",
        "",
        "--sizes 2e5 --seconds 20 --rounds 2 --only EpochOrder OrderSampler RandomSampler "
        "permutation",
    ),
    "shuffling": Script("How well a block shuffle mixes", "", "--seeds 1"),
    "elastic": Script(
        "Epochs that go on elsewhere",
        "",
        "--only headrace --timeout 60 --changes fewer workers killed skipped",
    ),
    "memory": Script(
        "Memory", "PHOTOS", "PHOTOS --budgets 500MB --modes cached --images 200 --ranks 1"
    ),
    "cache_policy": Script(
        "What a cache should hold",
        "",
        "--samples 500 --held 0.5 --epochs 2 --workers 2",
        needs=("cachetools",),
    ),
    "monitoring": Script("The cost of counting", "", "--batches 200"),
    "profile_limits": Script(
        "Limits that a profile finds",
        "--idle",
        "--runs 1 --seconds 6 --only read server decode step idle-one",
        ("aiohttp",),
        lines=True,
    ),
}
"""All of them, in the order of the report."""


def run_script(
    name: str, script: Script, options: str, photos: Path, limit: float
) -> dict[str, Any]:
    """Runs a script, whose temporary files go when it has ended.

    Returns:
        Its command, seconds, and "result", or why there is none as "skipped" or "failed".
    """
    arguments = [str(photos) if one == "PHOTOS" else one for one in shlex.split(options)]
    kept: dict[str, Any] = {
        "name": name,
        "question": script.question,
        "command": shlex.join([f"benchmarks/{name}.py", *shlex.split(options)]),
    }
    missing = [module for module in script.needs if importlib.util.find_spec(module) is None]
    if missing:
        return {**kept, "skipped": f"not installed: {', '.join(missing)}"}
    kept["load"] = round(os.getloadavg()[0], 2)
    start = time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments, "--json"]
    with (
        temporary_folder() as folder,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        environment = os.environ | {"TMPDIR": folder}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                kill(process)
        kept["seconds"] = round(time.monotonic() - start, 1)
        output.seek(0)
        errors.seek(0)
        said, last = output.read(), errors.read().strip().splitlines()[-1:]
    if code is None:
        return {**kept, "failed": f"not done after {limit:,g} s"}
    if code != 0:
        return {**kept, "failed": f"exit status {code}: {' '.join(last)[:300]}"}
    try:
        kept["result"] = (
            [json.loads(line) for line in said.splitlines() if line.strip()]
            if script.lines
            else json.loads(said)
        )
    except ValueError:
        return {**kept, "failed": f"what it printed is no JSON: {said[:100]!r}"}
    return kept


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with all that it has started, in whatever session."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            # it ends last: it removes the semaphores of the others
            if not any("resource_tracker" in part for part in one.cmdline()):
                one.kill()
    process.wait()
    psutil.wait_procs(started, timeout=10)


def make_photos(folder: Path, count: int) -> Path:
    """Photographs in class folders, by examples/make_photos.py; its PNGs become JPEGs, which is
    all that some peers and limits read.
    """
    command = [
        sys.executable,
        str(ROOT / "examples" / "make_photos.py"),
        str(folder),
        "--images",
        str(count),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path in folder.rglob("*.png"):
        with Image.open(path) as image:
            image.convert("RGB").save(path.with_suffix(".jpg"), quality=90)
        path.unlink()
    return folder


def run_all(given: argparse.Namespace, names: list[str]) -> bool:
    """Runs the scripts, and keeps what each gave as soon as it is there; True if none failed."""
    given.out.mkdir(parents=True, exist_ok=True)
    tables = set(table_names()) - set(WHOLE)  # these write their results themselves
    fine = True
    with temporary_folder() as work:
        photos = given.photos.resolve() if given.photos else Path(work) / "photos"
        for name in names:
            script = SCRIPTS[name]
            options = (
                given.options
                if given.options is not None
                else script.quick
                if given.quick
                else script.full
            )
            print(f"{name}: ", end="", flush=True)
            if "PHOTOS" in options and not photos.exists():
                make_photos(photos, 150 if given.quick else 3000)
            kept = run_script(name, script, options, photos, given.limit)
            kept |= {
                "quick": given.quick,
                "date": datetime.now(UTC).date().isoformat(),
                "machine": machine(PACKAGES),
            }
            kept["photos"] = "of the user" if given.photos else "made"
            text = json.dumps(kept, indent=1) + "\n"
            (given.out / f"{name}.json").write_text(text, encoding="utf-8")
            if given.write and name in tables and "result" in kept:
                (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
            fine = fine and "failed" not in kept
            said = next(
                (f"{how}, {kept[how]}" for how in ("skipped", "failed") if how in kept), "ok"
            )
            print(
                said if "seconds" not in kept else f"{said} ({kept['seconds']:,.0f} s)", flush=True
            )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small data and two rounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument(
        "--options",
        metavar="TEXT",
        help="of the one script of --only, instead of its own; PHOTOS is the folder of photographs",
    )
    parser.add_argument(
        "--photos",
        type=Path,
        metavar="FOLDER",
        help="class folders of JPEG files (default: 3,000 are made)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for JSON, plots and the report")
    parser.add_argument(
        "--limit",
        type=float,
        default=4 * 3600.0,
        metavar="SECONDS",
        help="after which a script is given up (4 hours)",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing, and write the report of what lies in --out",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the results that have a table, and write docs/benchmark_tables.md",
    )
    given = parser.parse_args()
    if given.write and given.quick:
        parser.error("--write and --quick: a quick run has no figures to quote")
    if given.options is not None and (given.quick or len(given.only or ()) != 1):
        parser.error("--options needs one script, --only NAME, and no --quick")
    given.out = given.out or (
        ROOT / "out" / "benchmarks" if given.quick else HERE / "results" / "latest"
    )
    unknown = sorted(set(given.only or ()) - set(SCRIPTS))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    if given.photos and not given.photos.is_dir():
        parser.error(f"{given.photos} is no folder")
    names = [name for name in SCRIPTS if not given.only or name in given.only]
    try:
        fine = given.report or run_all(given, names)
        if given.write:
            PAGE.write_text(page(), encoding="utf-8")
    except KeyboardInterrupt:
        return 130
    except TableError as error:
        parser.error(str(error))
    if given.write and given.report:
        return 0
    kept = [
        json.loads(path.read_text(encoding="utf-8"))
        for name in names
        if (path := given.out / f"{name}.json").is_file()
    ]
    if not kept:
        parser.error(f"{given.out} holds no results")
    print(write_report(kept, given.out))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
