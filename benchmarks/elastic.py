"""Shows what happens to an epoch that resumes with other ranks, workers or batches, in headrace and
its peers.

    python benchmarks/elastic.py [--only NAME ...] [--changes KEY ...] [--timeout 300] [--memory
    8GB] [--json] [--write]

An epoch of 968 samples is begun by one job, which saves its state and ends, and finished by another
one. Counted are the samples that never came, those that came again, and the batches of each rank:
ranks with unequal numbers of batches wait for each other for ever in synchronous training. Only
what came before the state was saved counts of the first job. With 10^9 rows the state is weighed,
and the memory: the highest of all processes of the job together (PSS), less that of the same job
with 968 rows.

Each job is a process group of its own, which is killed when its time is up ("hangs") or its memory
("more than"). Ranks are processes on this machine. `--write` puts the figures of the peers that ran
into `results/elastic.json`, of which `run_all.py --write` makes docs/benchmark_tables.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from common import machine, say, version_of
from doc_forms import elastic as tables
from elastic_peers import PEERS, Peer
from elastic_run import CHANGES, SMALL, Change
from folders import temporary_folder

from headrace.memory.budget import format_size, parse_size

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "results" / "elastic.json"
PACKAGES = tuple((peer.package,) for peer in PEERS if peer.package)
Row = dict[str, Any]


def job(peer: Peer, change: Change, timeout: float, memory: int) -> Row:
    """Runs a change of a peer in a process group of its own; its result, with `memory`, the most
    that its lives took.
    """
    with temporary_folder() as name:
        folder, before = Path(name), _shared_memory()
        environment = os.environ | {"HOME": name, "TMPDIR": name, "HF_HOME": name}
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "elastic_run.py"),
            peer.name,
            change.key,
            name,
        ]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        most, stopped, end = 0, None, time.monotonic() + timeout
        try:
            while stopped is None and process.poll() is None:
                time.sleep(0.1)
                if change.key in ("billion", "small") and "writing" not in _result(folder).get(
                    "at", "writing"
                ):
                    most = max(most, _memory(process.pid))
                if most > memory:
                    stopped = {"error": f"wants more than {format_size(memory)}", "large": True}
                elif time.monotonic() > end:
                    stopped = {"hangs": True, "seconds": timeout}
            result = {**_result(folder), **(stopped or {}), "memory": most}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode and not stopped and "error" not in result:
            result["error"] = f"ended with status {process.returncode}"
        left = sorted(_shared_memory() - before)
        for path in left:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return {**result, "left": len(left)}


def _result(folder: Path) -> Row:
    with contextlib.suppress(OSError, ValueError):
        result: Row = json.loads((folder / "result.json").read_text())
        return result
    return {}


def _memory(group: int) -> int:
    """Bytes of memory of a process and all below it; what they share counts once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(group)
        for process in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def _shared_memory() -> set[str]:
    """The names in the system's shared memory that MosaicML Streaming gives: a killed job leaves
    them there.
    """
    return {entry.path for entry in os.scandir("/dev/shm") if re.match(r"\d{6}_", entry.name)}


# -- the command


def measured(
    peers: list[Peer], changes: list[Change], timeout: float, memory: int
) -> Iterator[tuple[str, Row]]:
    """The results of each peer, one change after the other: name, and what `_write` takes of a
    peer.
    """
    for peer in peers:
        if peer.package is not None and version_of((peer.package,)) is None:
            yield peer.name, {"missing_because": f"{peer.package} is not installed"}
            continue
        for change in changes:
            row = job(peer, change, timeout, memory)
            if change.key == "billion" and "error" not in row and "hangs" not in row:
                small = job(peer, SMALL, timeout, memory)
                row["growth"] = max(0, row["memory"] - small["memory"])
            elif change.key != "billion":
                row["padding"] = -change.lives[0].samples % change.lives[-1].ranks
            say(f"{peer.name}, {change.title}: {json.dumps(row)}")
            yield peer.name, {"scale": peer.scale, "results": {change.key: row}}


def _joined(old: Row, data: Row) -> Row:
    """The figures of both; where both have a change of a peer, the later ones."""
    joined: Row = dict(old["peers"])
    for name, peer in data["peers"].items():
        kept = joined.get(name, {}).get("results", {})
        joined[name] = (
            peer if "results" not in peer else {**peer, "results": {**kept, **peer["results"]}}
        )
    peers = {peer.name: joined[peer.name] for peer in PEERS if peer.name in joined}
    for peer in peers.values():
        if "results" in peer:
            peer["results"] = {
                change.key: peer["results"][change.key]
                for change in CHANGES
                if change.key in peer["results"]
            }
    return {**data, "changes": {change.key: change.title for change in CHANGES}, "peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[peer.name for peer in PEERS],
        help="these peers alone",
    )
    parser.add_argument(
        "--changes",
        nargs="+",
        metavar="KEY",
        choices=[change.key for change in CHANGES],
        help="these changes alone",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds of a job, after which it hangs (300)"
    )
    parser.add_argument(
        "--memory", type=parse_size, default=parse_size("8GB"), help="of a job, at most (8GB)"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument(
        "--write", action="store_true", help="write the figures into results/elastic.json"
    )
    given = parser.parse_args()
    peers = [peer for peer in PEERS if given.only is None or peer.name in given.only]
    changes = [change for change in CHANGES if given.changes is None or change.key in given.changes]
    data: Row = {
        "date": time.strftime("%d %B %Y").lstrip("0"),
        "machine": machine(PACKAGES),
        "peers": {},
    }
    for name, found in measured(peers, changes, given.timeout, given.memory):
        row = {**data, "peers": {name: found}}
        data = _joined(data, row)
        if given.write:  # at once: a later one may be interrupted
            old = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"peers": {}}
            DATA.write_text(json.dumps(_joined(old, row), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(data, indent=1) if given.json else "\n".join(tables(data)))


if __name__ == "__main__":
    main()
