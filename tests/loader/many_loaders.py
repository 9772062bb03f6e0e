"""Makes loaders one after the other, beside threads that take every lock they can find. None may
hang.

    PYTHONPATH=src python tests/loader/many_loaders.py --loaders 2000 [--start fork|forkserver|auto]
    [--ranks 3] [--limit 60] [--json]

The threads draw random numbers of torch and NumPy, log, allocate, compress, resolve names, write to
streams, move progress bars and, where pyarrow is installed, read tables; with several ranks gloo
reduces tensors all the time. Each loader goes through one epoch, and all its batches are compared
with those that must come. A rank that waits for longer than ``--limit`` seconds is a hang: the
native stacks of its workers are printed, if gdb is installed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
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
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
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


# --- threads --------------------------------------------------------------------------------------


def _arrow() -> Callable[[], object] | None:
    try:
        import pyarrow.csv
    except ImportError:
        return None
    table = b"a,b\n" + b"1,2\n" * 20_000
    return lambda: pyarrow.csv.read_csv(io.BytesIO(table))


def busy_threads() -> list[threading.Thread]:
    """Starts daemon threads, each of which holds another lock most of the time."""
    logger = logging.getLogger("busy")
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    stream, generator = io.BufferedWriter(io.FileIO(os.devnull, "w")), np.random.default_rng()
    deeds: list[Callable[[], object] | None] = [
        # holds the mutex of torch's default generator, which a new worker seeds
        lambda: torch.rand(20_000),
        lambda: torch.mm(torch.ones(64, 64), torch.ones(64, 64)),
        lambda: np.random.rand(20_000) + generator.random(20_000),
        lambda: logger.warning("busy"),
        lambda: [bytearray(random.randrange(1 << 16)) for _ in range(50)],
        lambda: zlib.compress(bytes(100_000)),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: stream.write(bytes(10_000)),
        lambda: [None for _ in tqdm(range(100), file=io.StringIO())],
        _arrow(),
    ]

    def forever(deed: Callable[[], object]) -> None:
        while True:
            deed()
            time.sleep(0.002)

    threads = [
        threading.Thread(target=forever, args=(deed,), name="busy", daemon=True)
        for deed in deeds
        if deed is not None
    ]
    for thread in threads:
        thread.start()
    return threads


def reduce_forever(seconds: float = 0.001) -> None:
    """Has gloo reduce tensors, in a thread, as long as the other ranks do; not waited for at the
    end.
    """
    group = torch.distributed.new_group()

    def run() -> None:
        while True:
            torch.distributed.all_reduce(torch.ones(8), group=group)
            time.sleep(seconds)

    threading.Thread(target=run, name="busy", daemon=True).start()


# --- hangs ----------------------------------------------------------------------------------------


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
        print(f"hangs for {self._limit:g} s, pid {os.getpid()}", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        for child in psutil.Process().children():
            print(
                f"child {child.pid}, {child.status()}, {child.num_threads()} threads, "
                f"{child.cpu_times()}",
                file=sys.stderr,
            )
            command = ["gdb", "-p", str(child.pid), "-batch", "-ex", "thread apply all bt 30"]
            try:
                print(
                    subprocess.run(command, capture_output=True, text=True, timeout=60).stdout,
                    file=sys.stderr,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"no native stack: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


# --- ranks ----------------------------------------------------------------------------------------


def run(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    """One rank: its loaders, one after the other."""
    if ranks > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks)
        )
        torch.distributed.init_process_group("gloo")
        reduce_forever()
    busy_threads()
    guard, counts, rng = Guard(args.limit), Counter[str](), random.Random(args.seed)
    for number in range(args.loaders):
        guard.pat()
        options: dict[str, Any] = {
            "num_workers": rng.choice((1, 2)),
            "persistent_workers": rng.random() < 0.3,
        }
        if args.start != "auto":
            options["multiprocessing_context"] = args.start
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = create_dataloader(
                Squares(),
                batch_size=1,
                shuffle=False,
                seed=number,
                rank=rank,
                world_size=ranks,
                **options,
            )
            for _ in range(rng.choice((1, 1, 2))):
                batches = [int(batch) for batch in loader]
                expected = [index**2 for index in range(8)][rank::ranks]
                assert batches[: len(expected)] == expected, batches
                counts["epochs"] += 1
            loader.close()
        counts["started again"] += sum(
            "started again" in str(warning.message) for warning in caught
        )
        counts["loaders"] += 1
        del loader
    guard.pat()
    said = {"rank": rank, "start": args.start, **counts, "slowest, s": round(guard.slowest, 1)}
    print(json.dumps(said), flush=True)
    os._exit(0)  # gloo's threads wait for ranks that are through already


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes many loaders beside busy threads.")
    parser.add_argument("--loaders", type=int, default=2000)
    parser.add_argument("--start", choices=("fork", "forkserver", "auto"), default="auto")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds of one loader that are a hang"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run, args=(rank, args.ranks, port, args))
        for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
