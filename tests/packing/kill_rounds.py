"""Kills packing jobs at random moments, runs them again, and compares every byte with those of an undisturbed run.

    python -m tests.packing.kill_rounds [--rounds 1000] [--seed 0] [--only WORD ...]

A round packs some made photographs in one of several ways: one process, two processes, four jobs with a part each, two workers of Dask;
encoded, decoded or re-encoded; to a folder or to moto's S3. One process of it, or all, gets SIGKILL at a random moment; then the same
command runs again to its end. A round fails if a byte differs, a file is left that should not be there, a process lives on, or a command
does not end. Exit code 1: one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.data.make import make_photos
from tests.servers.s3 import S3Server

SHARD, JOBS, LIMIT_S = "6kB", 4, 120.0
STORES = {"encoded": {}, "decoded": {"store": "decoded"}, "jpeg": {"store": "jpeg", "max_size": 48, "quality": 80}}
WAYS = ("one", "two", "jobs", "dask")
JOB = """
import json, sys
from headrace import ImageDataset, pack

def main():
    src, dst, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    dataset = ImageDataset(src, image_size=24)
    if options.pop("dask", False):
        from distributed import Client, LocalCluster
        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
            pack(dataset, dst, executor=client.get_executor(retries=3), progress=False, **options)
    else:
        pack(dataset, dst, progress=False, **options)

if __name__ == "__main__":
    main()
"""


class Store:
    """A bucket, or a folder: what is in it, and how it is emptied."""

    def __init__(self, folder: Path, server: S3Server | None) -> None:
        self.folder, self.server = folder, server
        if server is not None:
            self.client = server.client()
            self.client.create_bucket(Bucket="bucket")

    @property
    def dst(self) -> str:
        return str(self.folder / "out") if self.server is None else "s3://bucket/out"

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.server is None else {"storage_options": self.server.options}

    def contents(self) -> dict[str, str]:
        if self.server is None:
            return {entry.name: hashlib.sha256(Path(entry.path).read_bytes()).hexdigest() for entry in os.scandir(self.dst)}
        names = [item["Key"] for item in self.client.list_objects_v2(Bucket="bucket").get("Contents", [])]
        read: Callable[[str], bytes] = lambda name: self.client.get_object(Bucket="bucket", Key=name)["Body"].read()  # noqa: E731
        return {name.rpartition("/")[2]: hashlib.sha256(read(name)).hexdigest() for name in names}

    def clear(self) -> None:
        if self.server is None:
            shutil.rmtree(self.dst, ignore_errors=True)
            return
        for item in self.client.list_objects_v2(Bucket="bucket").get("Contents", []):
            self.client.delete_object(Bucket="bucket", Key=item["Key"])


def commands(script: Path, photos: Path, store: Store, way: str, options: dict[str, Any]) -> list[list[str]]:
    options = {"shard_size": SHARD, **options, **store.options}
    shares: list[dict[str, Any]] = [{"part": f"{i}/{JOBS}"} for i in range(JOBS)] if way == "jobs" else [{}]
    more = {"two": {"processes": 2}, "dask": {"dask": True}}.get(way, {})
    return [[sys.executable, str(script), str(photos), store.dst, json.dumps({**options, **more, **share})] for share in shares]


@contextlib.contextmanager
def started(lines: list[list[str]], temporary: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with open(temporary.parent / "log", "ab") as log:
        jobs = [subprocess.Popen(line, env=environment, stdout=log, stderr=log, start_new_session=True) for line in lines]
    try:
        yield jobs
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, 9)
            job.wait()


def tree(jobs: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    found = []
    for job in jobs:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(job.pid)
            found += [root, *root.children(recursive=True)]
    return found


def wait_for(jobs: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(job.poll() is None for job in jobs) and time.monotonic() < end:
        time.sleep(0.02)
    return all(job.poll() is not None for job in jobs)


def one_round(lines: list[list[str]], store: Store, temporary: Path, took: float, choose: random.Random) -> str:
    """What is wrong after a kill and a second run; "" if nothing is."""
    kills_all = choose.random() < 0.3
    with started(lines, temporary) as jobs:
        time.sleep(choose.uniform(0.3, 1.0) * took)
        processes = tree(jobs)
        victims = processes if kills_all else [choose.choice(processes)] if processes else []
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        if not wait_for(jobs, LIMIT_S):
            return "a job did not end after a kill"
        _, alive = psutil.wait_procs(processes, timeout=15)
        if alive:
            return f"still alive: {alive}"
    with started(lines, temporary) as jobs:
        if not wait_for(jobs, LIMIT_S):
            return "the second run did not end"
        if any(job.returncode for job in jobs):
            return f"the second run ended with {[job.returncode for job in jobs]}"
    left = list(temporary.rglob("*.part"))
    return f"left behind: {left}" if left else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="ways, stores and destinations (folder, s3) that are tried")
    given = parser.parse_args()
    choose, failed, counts = random.Random(given.seed), 0, dict[str, int]()

    def wanted(*words: str) -> list[str]:
        return [word for word in words if not given.only or word in given.only] or list(words)

    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="headrace-kills-")))
        photos, script, temporary = make_photos(folder / "photos"), folder / "job.py", folder / "tmp"
        script.write_text(JOB)
        temporary.mkdir()
        stores = {name: Store(folder, opened.enter_context(S3Server()) if name == "s3" else None) for name in wanted("folder", "s3")}
        expected: dict[tuple[str, str], tuple[dict[str, str], float]] = {}
        cases = list(itertools.product(wanted(*WAYS), wanted(*STORES), stores))
        for number in range(given.rounds):
            way, kind, place = choose.choice(cases)
            store = stores[place]
            lines = commands(script, photos, store, way, STORES[kind])
            store.clear()
            if (way, kind) not in expected:
                began = time.monotonic()
                with started(lines, temporary) as jobs:
                    assert wait_for(jobs, LIMIT_S) and not any(job.returncode for job in jobs), (folder / "log").read_text()[-3000:]
                expected[way, kind] = store.contents(), time.monotonic() - began
                store.clear()
            wrong = one_round(lines, store, temporary, expected[way, kind][1], choose)
            if not wrong and store.contents() != expected[way, kind][0]:
                wrong = f"other bytes, or files: {sorted(store.contents().items() ^ expected[way, kind][0].items())[:4]}"
            counts[f"{way} {kind} {place}"] = counts.get(f"{way} {kind} {place}", 0) + 1
            if wrong:
                failed += 1
                print(f"round {number} ({way}, {kind}, {place}): {wrong}", flush=True)
        for kind in STORES:  # whoever packs
            results = [found for (_, other), (found, _) in expected.items() if other == kind]
            if any(found != results[0] for found in results):
                failed += 1
                print(f"{kind}: other bytes in other ways")
    print(f"{failed} of {given.rounds} rounds failed: " + ", ".join(f"{count} {case}" for case, count in sorted(counts.items())))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
