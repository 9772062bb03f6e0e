"""Packing jobs as processes: forked from a server that has imported everything.

A forked job begins to pack after a few milliseconds, so a kill at a random moment hits packing, not
imports. The server starts no thread and opens nothing. Each job has a session of its own, by which
all of its processes are found. It reads requests from stdin, one a line, answers each with a line,
and ends with stdin.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
IMPORTED = (
    *("torch", "headrace.packing", "headrace.datasets", "headrace.datasets.image.image"),
    *("h5py", "zarr", "PIL.Image", "simplejpeg", "fsspec.implementations.local", "s3fs"),
    *("aiobotocore.session", "aiobotocore.endpoint", "botocore.handlers"),
    *("concurrent.futures.process", "multiprocessing.popen_fork"),
)


def run(job: dict[str, Any]) -> None:
    """Packs: "src" to "dst" with "options" of `pack`, and "dask": on two workers of Dask."""
    from headrace import ImageDataset, pack

    dataset, options = (
        ImageDataset(job["src"], image_size=24),
        {"progress": False, **job["options"]},
    )
    if not job["dask"]:
        pack(dataset, job["dst"], **options)
        return
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        pack(dataset, job["dst"], executor=client.get_executor(retries=3), **options)


class Jobs:
    """Starts jobs and waits for them; a context manager.

    Args:
        folder: "log" in it gets what they print, and "tmp" in it is their folder for temporary
            files.
    """

    def __init__(self, folder: Path) -> None:
        self.log, self.temporary = folder / "log", folder / "tmp"

    def __enter__(self) -> Self:
        self.temporary.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.packing.job_server"],
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()  # its stdin ends, and so does it

    def start(self, jobs: Sequence[dict[str, Any]]) -> list[int]:
        """The process ids, and session ids, of jobs."""
        places = {"log": str(self.log), "temporary": str(self.temporary)}
        return [self._ask({"start": job, **places}) for job in jobs]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def wait(self, pids: Sequence[int], seconds: float) -> list[int | None]:
        """The exit codes of jobs, when all have ended; None: not in that time."""
        end = time.monotonic() + seconds
        while True:
            codes = [self._ask({"code": pid}) for pid in pids]
            if None not in codes or time.monotonic() > end:
                return codes
            time.sleep(0.005)

    def end(self, pids: Sequence[int]) -> None:
        """Kills what is left of jobs."""
        for process in processes_of(pids):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.wait(pids, 30)


def processes_of(sessions: Sequence[int]) -> list[psutil.Process]:
    """The processes of some sessions that live."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if (
                os.getsid(pid) in sessions
                and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def _serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer: int | None = _forked(request)
            codes[answer] = None
        else:
            pid = request["code"]
            if codes[pid] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
            answer = codes[pid]
        print(json.dumps(answer), flush=True)


def _forked(request: dict[str, Any]) -> int:
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        os.read(read, 1)  # until it has its session
        os.close(read)
        return pid
    try:
        os.close(read)
        os.setsid()
        os.write(write, b"x")
        os.close(write)
        log, nothing = (
            os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
            os.open(os.devnull, os.O_RDONLY),
        )
        for target, fd in enumerate((nothing, log, log)):
            os.dup2(fd, target)
        os.environ["TMPDIR"], tempfile.tempdir = request["temporary"], None
        _fork_pools()
        run(request["start"])
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _fork_pools() -> None:
    """Processes of a job's pool are forked from it, before it has threads: a server of its own
    would import torch first.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import headrace.packing.jobs.running

    def forked(
        processes: int, context: Any, initializer: Any, arguments: Any
    ) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), initializer, arguments
        )
        pool.submit(os.getpid).result()  # all are there now
        return pool

    headrace.packing.jobs.running.ProcessPoolExecutor = forked  # type: ignore[assignment,misc]


if __name__ == "__main__":
    _serve()
