"""Makes loaders one after the other, beside threads that take every lock they can find. None may
hang.

    PYTHONPATH=src python tests/loader/many_loaders.py --loaders 2000 [--start fork|forkserver|auto]
    [--ranks 3] [--limit 60]

The threads draw random numbers of torch and NumPy, log, allocate, compress, resolve names, move
progress bars and read tables; with several ranks gloo reduces tensors all the time. Each loader
goes through one epoch, and all its batches are compared with those that must come. A rank that
waits for longer than ``--limit`` seconds is a hang: the native stacks of its workers are printed,
if gdb is installed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import logging
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pyarrow.csv
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from headrace import create_dataloader


class Squares(Dataset[torch.Tensor]):
    """Sample i is the square of i."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


def forever(deed: Callable[[], object]) -> None:
    """Does something again and again in a daemon thread."""

    def run() -> None:
        while True:
            deed()
            time.sleep(0.002)

    threading.Thread(target=run, name="busy", daemon=True).start()


def start_busy_threads() -> None:
    """Each of them holds another lock most of the time."""
    logger = logging.getLogger("busy")
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    table = b"a,b\n" + b"1,2\n" * 20_000
    # holds the mutex of torch's default generator, which a new worker seeds
    forever(lambda: torch.rand(20_000))
    forever(lambda: torch.mm(torch.ones(64, 64), torch.ones(64, 64)))
    forever(lambda: np.random.rand(20_000))
    forever(lambda: logger.warning("busy"))
    forever(lambda: [bytearray(random.randrange(1 << 16)) for _ in range(50)])
    forever(lambda: zlib.compress(bytes(100_000)))
    forever(lambda: socket.getaddrinfo("localhost", 80))
    forever(lambda: list(tqdm(range(100), file=io.StringIO())))
    forever(lambda: pyarrow.csv.read_csv(io.BytesIO(table)))


class Guard:
    """Ends the process where one loader takes too long."""

    def __init__(self, limit: float) -> None:
        self._limit, self._since, self.slowest = limit, time.monotonic(), 0.0
        threading.Thread(target=self._watch, name="headrace-guard", daemon=True).start()

    def pat(self) -> None:
        """Another loader begins."""
        now = time.monotonic()
        self.slowest, self._since = max(self.slowest, now - self._since), now

    def _watch(self) -> None:
        while time.monotonic() - self._since < self._limit:
            time.sleep(0.5)
        print(f"hangs for {self._limit:g} s, pid {os.getpid()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        for child in psutil.Process().children():
            command = ["gdb", "-p", str(child.pid), "-batch", "-ex", "thread apply all bt 30"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdout=sys.stderr, timeout=60)
        os._exit(1)


def run(rank: int, port: int, args: argparse.Namespace) -> None:
    """One rank: its loaders, one after the other."""
    if args.ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        options: dict[str, Any] = {"rank": rank, "world_size": args.ranks}
        torch.distributed.init_process_group("gloo", init_method=address, **options)
        group = torch.distributed.new_group()
        forever(lambda: torch.distributed.all_reduce(torch.ones(8), group=group))
    start_busy_threads()
    guard, rng = Guard(args.limit), random.Random(args.seed)
    expected = [index**2 for index in range(8)][rank :: args.ranks]
    for number in range(args.loaders):
        guard.pat()
        options = {"num_workers": rng.choice((1, 2)), "persistent_workers": rng.random() < 0.3}
        options |= {"rank": rank, "world_size": args.ranks, "seed": number}
        if args.start != "auto":
            options["multiprocessing_context"] = args.start
        loader = create_dataloader(Squares(), batch_size=1, shuffle=False, **options)
        for _ in range(rng.choice((1, 1, 2))):
            batches = [int(batch) for batch in loader]
            assert batches[: len(expected)] == expected, batches
        loader.close()
        del loader
    guard.pat()
    summary = {"rank": rank, "loaders": args.loaders, "slowest, s": round(guard.slowest, 1)}
    print(json.dumps(summary), flush=True)
    os._exit(0)  # gloo's threads wait for ranks that are through already


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes many loaders beside busy threads.")
    parser.add_argument("--loaders", type=int, default=2000)
    parser.add_argument("--start", choices=("fork", "forkserver", "auto"), default="auto")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--limit", type=float, default=60, help="seconds that are a hang")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run, args=(rank, port, args)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
