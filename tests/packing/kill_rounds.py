"""Kills packing jobs at random moments, runs them again, and compares every byte with those of an
undisturbed run.

    python -m tests.packing.kill_rounds [--rounds 1000] [--seed 0] [--only WORD ...] [--spawn]

A round packs some made photographs in one of several ways: one process, two processes, four jobs
with a part each, two workers of Dask (in few rounds, where `distributed` is installed: these are
new interpreters); encoded, decoded or re-encoded; to a folder or to moto's S3. One process of it,
or all, gets SIGKILL at a moment that is uniformly random over the time that the case takes; then
the same command runs again to its end. A round fails if a byte differs, a file is left that should
not be there, a process lives on, or a command does not end. Jobs are forked from a process that has
imported everything (`job_server`); with --spawn they are new interpreters, as users start them.
Exit code 1: a round failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.data.make import make_photos
from tests.packing.job_server import Jobs, processes_of
from tests.packing.shared import contents
from tests.servers.s3 import S3Server

SHARD, JOBS, LIMIT_S = "8kB", 4, 120.0
STORES: dict[str, dict[str, Any]] = {
    "encoded": {},
    "decoded": {"store": "decoded"},
    "jpeg": {"store": "jpeg", "max_size": 48, "quality": 80},
    "gzip": {"store": "decoded", "compression": "gzip", "chunks": 2},
    "zarr": {"format": "zarr"},
    "zarr-decoded": {"format": "zarr", "store": "decoded"},
}
WAYS = {"one": 1.0, "two": 1.0, "jobs": 1.0, "dask": 0.03}
"""How often each is chosen."""
REPORTED = 50
"""Rounds between two lines."""


class Store:
    """A bucket, or a folder: what is in it, and how it is emptied."""

    def __init__(self, folder: Path, server: S3Server | None) -> None:
        self.folder, self.server = folder / "out", server
        if server is not None:
            self.client = server.client()
            self.client.create_bucket(Bucket="bucket")

    @property
    def dst(self) -> str:
        return str(self.folder) if self.server is None else "s3://bucket/out"

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.server is None else {"storage_options": self.server.options}

    def _keys(self) -> list[str]:
        return [
            item["Key"] for item in self.client.list_objects_v2(Bucket="bucket").get("Contents", [])
        ]

    def contents(self) -> dict[str, str]:
        """A checksum of each file, by name."""
        if self.server is None:
            return contents(self.folder)
        read = {
            key[4:]: self.client.get_object(Bucket="bucket", Key=key)["Body"].read()
            for key in self._keys()
        }
        return {name: hashlib.sha256(data).hexdigest() for name, data in read.items()}

    def clear(self) -> None:
        if self.server is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif keys := self._keys():
            self.client.delete_objects(
                Bucket="bucket", Delete={"Objects": [{"Key": key} for key in keys]}
            )


def commands(photos: Path, store: Store, way: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    more: dict[str, Any] = {"processes": 2} if way == "two" else {}
    shares: list[dict[str, Any]] = (
        [{"part": f"{i}/{JOBS}"} for i in range(JOBS)] if way == "jobs" else [{}]
    )
    every = {"shard_size": SHARD, **options, **store.options, **more}
    return [
        {"src": str(photos), "dst": store.dst, "dask": way == "dask", "options": {**every, **share}}
        for share in shares
    ]


def undisturbed(jobs: Jobs, lines: Sequence[dict[str, Any]]) -> float:
    """Runs a command to its end; returns the seconds that it took."""
    jobs.log.write_bytes(b"")
    began, pids = time.monotonic(), jobs.start(lines)
    try:
        codes = jobs.wait(pids, LIMIT_S)
        took = time.monotonic() - began
        if any(codes) or None in codes:
            raise RuntimeError(
                f"an undisturbed run ended with {codes}: {jobs.log.read_text()[-3000:]}"
            )
        return took
    finally:
        jobs.end(pids)


def one_round(
    jobs: Jobs, lines: Sequence[dict[str, Any]], took: float, choose: random.Random
) -> str:
    """What is wrong after a kill and a second run; "" if nothing is."""
    kills_all, moment, began = choose.random() < 0.3, choose.uniform(0, took), time.monotonic()
    pids = jobs.start(lines)
    try:
        time.sleep(max(0.0, began + moment - time.monotonic()))
        processes = processes_of(pids)
        for victim in processes if kills_all else [choose.choice(processes)] if processes else []:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        if None in jobs.wait(pids, LIMIT_S):
            return "a job did not end after a kill"
        end = time.monotonic() + 15
        while (alive := processes_of(pids)) and time.monotonic() < end:
            time.sleep(0.02)
        if alive:
            return f"still alive: {alive}"
    finally:
        jobs.end(pids)
    try:
        undisturbed(jobs, lines)
    except RuntimeError as error:
        return str(error)
    left = [path for path in jobs.temporary.rglob("*") if path.suffix == ".part"]
    return f"left behind: {left}" if left else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="ways, stores and destinations (folder, s3) that are tried",
    )
    parser.add_argument("--spawn", action="store_true", help="each job is a new interpreter")
    given = parser.parse_args()
    choose, failed, counts, began = random.Random(given.seed), 0, Counter[str](), time.monotonic()

    def wanted(words: Sequence[str]) -> list[str]:
        return [word for word in words if not given.only or word in given.only] or list(words)

    ways = wanted([way for way in WAYS if way != "dask" or importlib.util.find_spec("distributed")])
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="headrace-kills-")))
        photos = make_photos(folder / "photos", per_class=4)
        stores = {
            name: Store(folder, opened.enter_context(S3Server()) if name == "s3" else None)
            for name in wanted(["folder", "s3"])
        }
        jobs = opened.enter_context(Jobs(folder, given.spawn))
        expected, took = dict[str, dict[str, str]](), dict[tuple[str, str, str], float]()
        cases = list(itertools.product(ways, wanted(list(STORES)), stores))
        for number in range(given.rounds):
            (case,) = choose.choices(cases, [WAYS[way] for way, _, _ in cases])
            way, kind, place = case
            store, name = stores[place], " ".join(case)
            lines, wrong = commands(photos, store, way, STORES[kind]), ""
            store.clear()
            if case not in took:
                undisturbed(jobs, lines)  # what is done once in a while shall not count
                store.clear()
                took[case] = undisturbed(jobs, lines)
                # whoever packs, and wherever
                if expected.setdefault(kind, store.contents()) != store.contents():
                    wrong = "other bytes, undisturbed, than in another way"
                store.clear()
            wrong = wrong or one_round(jobs, lines, took[case], choose)
            if not wrong and (contents := store.contents()) != expected[kind]:
                wrong = (
                    "other bytes, or files: "
                    f"{sorted(contents.items() ^ expected[kind].items())[:4]}"
                )
            counts[name] += 1
            if wrong:
                failed += 1
                print(f"round {number} ({name}): {wrong}", flush=True)
            if not (number + 1) % REPORTED:
                print(
                    f"{number + 1} rounds, {failed} failed, {time.monotonic() - began:.0f} s: "
                    f"{shown(counts)}",
                    flush=True,
                )
    print(f"{failed} of {given.rounds} rounds failed: {shown(counts)}")
    return bool(failed)


def shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {case}" for case, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
