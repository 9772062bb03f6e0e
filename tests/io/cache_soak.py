"""Kills processes that share a disk cache, over and over, and looks at everything that they left.

Each process reads random blocks, compares every byte, and puts what is missing; one after the other
is killed with SIGKILL at a random moment, and started again. The bytes on the disk are looked at
all the time. At the end one process reads everything; then the folder may hold whole blocks and
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator

from headrace.io.disk_cache import DiskCache

BLOCKS, BLOCK = 64, 200_000


@contextlib.contextmanager
def claimed(cache: DiskCache, keys: Iterable[str], patience: float) -> Iterator[None]:
    """See `DiskCache.claimed`, outside of a loop."""
    loop, claim = asyncio.new_event_loop(), cache.claimed(keys, patience)
    loop.run_until_complete(claim.__aenter__())
    try:
        yield
    finally:
        loop.run_until_complete(claim.__aexit__(None, None, None))
        loop.close()


def content(number: int) -> bytes:
    """What a block holds."""
    return random.Random(number).randbytes(BLOCK + number)


def work(folder: str, limit: int, seed: int, rounds: int | None) -> None:
    """Reads and puts blocks, for ever or so many times."""
    cache, draws = DiskCache(folder, limit), random.Random(seed)
    while rounds is None or rounds > 0:
        number = draws.randrange(BLOCKS)
        key = cache.key("memory://bucket/file", "version", number)
        found = cache.get(key)
        if found is None:
            with claimed(cache, [key], 10):
                found = cache.get(key)
                if found is None:
                    cache.put(key, content(number))
        if found is not None and found != content(number):
            print(f"block {number} is wrong", flush=True)
            os._exit(7)
        rounds = None if rounds is None else rounds - 1


def nbytes_of(folder: str) -> tuple[int, int]:
    """Bytes of all blocks and parts, and the number of parts."""
    total = parts = 0
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".blk", ".part")):
                parts += name.endswith(".part")
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(root, name)).st_size
    return total, parts


def soak(folder: str, kills: int, processes: int, seed: int) -> None:
    """Kills as often as that, and looks at what is left. Blocks that are renamed or evicted while
    the folder is looked at may be counted with those that follow, so it is looked at twice.
    """
    limit, draws = 24 * BLOCK, random.Random(seed)
    context = multiprocessing.get_context("fork")

    def start() -> multiprocessing.process.BaseProcess:
        process = context.Process(target=work, args=(folder, limit, draws.randrange(1 << 30), None))
        process.start()
        return process

    running = [start() for _ in range(processes)]
    largest = 0
    try:
        for _ in range(kills):
            time.sleep(draws.uniform(0, 0.03))
            largest = max(largest, min(nbytes_of(folder)[0] for _ in range(2)))
            chosen = draws.randrange(processes)
            running[chosen].kill()
            running[chosen].join(30)
            assert running[chosen].exitcode == -signal.SIGKILL, "a block was wrong"
            running[chosen] = start()
    finally:
        for process in running:
            process.kill()
            process.join(30)
    clean = context.Process(target=work, args=(folder, limit, 1, 10 * BLOCKS))
    clean.start()
    clean.join(300)
    assert clean.exitcode == 0
    assert nbytes_of(folder)[1] == 0, "parts are left"
    assert largest <= limit + BLOCK
