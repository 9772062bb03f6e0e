"""Kills packing jobs at random moments, runs them again, and compares every byte with those of an
undisturbed run.

    python -m tests.packing.kill_rounds [--rounds 1000] [--seed 0] [--only WORD ...]

A round packs some made photographs in one of several ways: one process, two processes, or four
jobs with a part each; encoded, decoded or re-encoded; to a folder or to moto's S3. One process of
it, or all, gets SIGKILL at a moment that is uniformly random over the time that the case takes;
then the same command runs again to its end. A round fails if a byte differs, a file is left that
should not be there, a process lives on, or a command does not end. Jobs are forked from a server
that has imported everything, so that a kill hits packing, not imports; each has a session of its
own, by which all of its processes are found. Exit code 1: a round failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

import headrace.packing.jobs.running
from headrace import ImageDataset, pack
from tests.data.make import make_photos
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
WAYS = ("one", "two", "jobs")
REPORTED = 50
"""Rounds between two lines."""


IMPORTED = [
    *("tests.servers.s3", "tests.packing.shared", "headrace.packing", "h5py", "zarr"),
    *("PIL.Image", "simplejpeg", "s3fs", "fsspec.implementations.local", "botocore.handlers"),
    *("aiobotocore.session", "aiobotocore.endpoint"),
    *("concurrent.futures.process", "multiprocessing.popen_fork"),
]


def forked_pool(processes: int, context: Any, initializer: Any, arguments: Any) -> Any:
    """A pool that is forked from its job, before that has threads: a server of its own would
    import torch first.
    """
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, fork, initializer, arguments)
    pool.submit(os.getpid).result()  # all are there now
    return pool


def run(job: dict[str, Any], log: Path, temporary: Path) -> None:
    """Packs, in a process of its own: "src" to "dst" with "options" of `pack`."""
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    headrace.packing.jobs.running.ProcessPoolExecutor = forked_pool  # type: ignore[assignment,misc]
    dataset = ImageDataset(job["src"], image_size=24)
    pack(dataset, job["dst"], progress=False, **job["options"])


class Jobs:
    """Starts jobs and waits for them.

    Args:
        folder: "log" in it gets what they print, and "tmp" in it is their folder for temporary
            files.
    """

    def __init__(self, folder: Path) -> None:
        self.log, self.temporary = folder / "log", folder / "tmp"
        self.temporary.mkdir()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)

    def start(self, jobs: Sequence[dict[str, Any]]) -> list[Any]:
        processes = []
        for job in jobs:
            process = self._context.Process(target=run, args=(job, self.log, self.temporary))
            process.start()
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                while os.getsid(process.pid) != process.pid:
                    time.sleep(0.001)
            processes.append(process)
        return processes

    def wait(self, jobs: Sequence[Any], seconds: float) -> list[int | None]:
        """Their exit codes, when all have ended; None: not in that time."""
        end = time.monotonic() + seconds
        for job in jobs:
            job.join(max(0.0, end - time.monotonic()))
        return [job.exitcode for job in jobs]

    def end(self, jobs: Sequence[Any]) -> None:
        """Kills what is left of them."""
        for process in processes_of(jobs):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.wait(jobs, 30)


def processes_of(jobs: Sequence[Any]) -> list[psutil.Process]:
    """The processes that live in the sessions of jobs."""
    sessions = {job.pid for job in jobs}
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            process = psutil.Process(pid)
            if os.getsid(pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Folder:
    """Where jobs pack to: a folder."""

    def __init__(self, folder: Path) -> None:
        self.dst = str(folder / "out")
        self.options: dict[str, Any] = {}

    def contents(self) -> dict[str, str]:
        """A checksum of each file, by name."""
        return contents(Path(self.dst))

    def clear(self) -> None:
        shutil.rmtree(self.dst, ignore_errors=True)


class Bucket:
    """The same, of S3."""

    dst = "s3://bucket/out"

    def __init__(self, server: S3Server) -> None:
        self.options: dict[str, Any] = {"storage_options": server.options}
        self.client = server.client()
        self.client.create_bucket(Bucket="bucket")

    def _keys(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return [item["Key"] for item in listed]

    def contents(self) -> dict[str, str]:
        found = {}
        for key in self._keys():
            data = self.client.get_object(Bucket="bucket", Key=key)["Body"].read()
            found[key.removeprefix("out/")] = hashlib.sha256(data).hexdigest()
        return found

    def clear(self) -> None:
        if keys := self._keys():
            named = [{"Key": key} for key in keys]
            self.client.delete_objects(Bucket="bucket", Delete={"Objects": named})


def commands(
    photos: Path, store: Folder | Bucket, way: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    shares: list[dict[str, Any]] = [{}]
    if way == "jobs":
        shares = [{"part": f"{number}/{JOBS}"} for number in range(JOBS)]
    if way == "two":
        shares = [{"processes": 2}]
    job = {"src": str(photos), "dst": store.dst}
    every = {"shard_size": SHARD, **options, **store.options}
    return [{**job, "options": {**every, **share}} for share in shares]


def undisturbed(jobs: Jobs, lines: Sequence[dict[str, Any]]) -> float:
    """Runs a command to its end; returns the seconds that it took."""
    jobs.log.write_bytes(b"")
    began, pids = time.monotonic(), jobs.start(lines)
    try:
        codes = jobs.wait(pids, LIMIT_S)
        took = time.monotonic() - began
        if any(codes) or None in codes:
            said = jobs.log.read_text()[-3000:]
            raise RuntimeError(f"an undisturbed run ended with {codes}: {said}")
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
        victims = processes_of(pids)
        if victims and not kills_all:
            victims = [choose.choice(victims)]
        for victim in victims:
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


class Rounds:
    """Chooses cases and runs them; what each gave undisturbed is kept."""

    def __init__(self, jobs: Jobs, photos: Path, stores: dict[str, Any], seed: int) -> None:
        self.jobs, self.photos, self.stores = jobs, photos, stores
        self.choose = random.Random(seed)
        self.expected: dict[str, dict[str, str]] = {}
        self.took: dict[tuple[str, str, str], float] = {}

    def run(self, case: tuple[str, str, str]) -> str:
        """What is wrong in a round of a case."""
        way, kind, place = case
        store = self.stores[place]
        lines = commands(self.photos, store, way, STORES[kind])
        store.clear()
        if case not in self.took:
            undisturbed(self.jobs, lines)  # what is done once in a while shall not count
            store.clear()
            self.took[case] = undisturbed(self.jobs, lines)
            # whoever packs, and wherever
            if self.expected.setdefault(kind, store.contents()) != store.contents():
                return "other bytes, undisturbed, than in another way"
            store.clear()
        if wrong := one_round(self.jobs, lines, self.took[case], self.choose):
            return wrong
        others = sorted(store.contents().items() ^ self.expected[kind].items())
        return f"other bytes, or files: {others[:4]}" if others else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    words = "ways, stores and destinations (folder, s3) that are tried"
    parser.add_argument("--only", nargs="+", metavar="WORD", help=words)
    given = parser.parse_args()

    def wanted(words: Sequence[str]) -> list[str]:
        return [word for word in words if not given.only or word in given.only] or list(words)

    failed, counts, began = 0, Counter[str](), time.monotonic()
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="headrace-kills-")))
        photos = make_photos(folder / "photos", per_class=4)
        stores: dict[str, Any] = {}
        for name in wanted(["folder", "s3"]):
            is_s3 = name == "s3"
            stores[name] = Bucket(opened.enter_context(S3Server())) if is_s3 else Folder(folder)
        rounds = Rounds(Jobs(folder), photos, stores, given.seed)
        cases = list(itertools.product(wanted(WAYS), wanted(list(STORES)), stores))
        for number in range(given.rounds):
            case = rounds.choose.choice(cases)
            counts[" ".join(case)] += 1
            if wrong := rounds.run(case):
                failed += 1
                print(f"round {number} ({' '.join(case)}): {wrong}", flush=True)
            if not (number + 1) % REPORTED:
                seconds = time.monotonic() - began
                print(f"{number + 1} rounds, {failed} failed, {seconds:.0f} s", flush=True)
    shown = ", ".join(f"{count} {case}" for case, count in sorted(counts.items()))
    print(f"{failed} of {given.rounds} rounds failed: {shown}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
