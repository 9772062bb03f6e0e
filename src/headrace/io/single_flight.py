"""Cross-process single flight: one process fetches or builds what is missing, the others wait for
it.

It uses kernel locks on single bytes of a file, which a killed process does not keep. A process that
waits in vain (for a stopped process, for example) does the work too; nothing else goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

from headrace.io.array_file import ArrayFile, FileArrays
from headrace.io.atomic import TEMPORARY, user_id
from headrace.memory.locks import HAS_LOCKS, try_lock, unlock

T = TypeVar("T")

_POLL_S = 0.02


@contextlib.contextmanager
def single_flight(
    lock_file: str, keys: Iterable[int], patience: float, progress: Callable[[], object]
) -> Iterator[None]:
    """Inside, nobody else on this machine does what these keys stand for, unless waiting was in
    vain. Look for the result once more first.

    Args:
        lock_file: made if it is missing; where it can't be, nobody waits.
        keys: 0 to 2**63 - 1.
        patience: seconds to wait for all of them.
        progress: seconds count anew when what it returns changes.
    """
    with _attempts(lock_file, keys, patience, progress) as attempts:
        for _ in attempts:
            time.sleep(_POLL_S)
        yield


@contextlib.asynccontextmanager
async def single_flight_in_loop(
    lock_file: str, keys: Iterable[int], patience: float
) -> AsyncIterator[None]:
    """`single_flight`, as a coroutine: who waits leaves the loop to others."""
    with _attempts(lock_file, keys, patience, lambda: None) as attempts:
        for _ in attempts:
            await asyncio.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def _attempts(
    lock_file: str, keys: Iterable[int], patience: float, progress: Callable[[], object]
) -> Iterator[Iterator[None]]:
    """Attempts at locking all keys, between which to pause; what they have locked is unlocked at
    the end.
    """
    fd = None
    with contextlib.suppress(OSError):
        fd = (
            os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if HAS_LOCKS
            else None
        )

    def each() -> Iterator[None]:
        end = time.monotonic() + patience
        last = progress()
        with contextlib.suppress(OSError):
            for key in sorted(set(keys)):  # in order: so nobody waits for one that waits for him
                while fd is not None and not try_lock(fd, key):
                    if (now := progress()) != last:
                        end = time.monotonic() + patience
                        last = now
                    if time.monotonic() >= end:
                        break
                    yield

    try:
        yield each()
    finally:
        if fd is not None:
            unlock(fd)


@contextlib.contextmanager
def one_builder(path: str, patience: float) -> Iterator[None]:
    """Inside, no other process of this user builds the cache file of that path: `single_flight`, as
    long as the file that is written grows.

    Args:
        path: of the file.
        patience: seconds that the file may stay as it is.
    """
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):  # without leave to write nothing is cached
        os.makedirs(folder, 0o700, exist_ok=True)
    key = (
        int.from_bytes(
            hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=4).digest(), "big"
        )
        >> 1
    )
    with single_flight(
        os.path.join(folder, f"headrace-making-{user_id()}.lock"),
        [key],
        patience,
        lambda: _written(path),
    ):
        yield


def found_or_built(file: ArrayFile, patience: float, build: Callable[[], T]) -> FileArrays | T:
    """The arrays of a cache file; or what `build` makes, in one process of this user at a time.

    Args:
        file: in the cache.
        patience: seconds that the file may stay as it is while another process writes it.
        build: makes the arrays, and the file if it can be written.
    """
    if (found := file.found()) is not None:
        return found
    with one_builder(file.path, patience):
        found = file.found()  # another process may have built it meanwhile
        if found is None:
            return build()
        return found


def _written(path: str) -> int:
    """Bytes of the temporary files that are written for it."""
    folder, name = os.path.split(path)
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        for item in listing:
            if item.name.startswith(f"{name}.") and item.name.endswith(TEMPORARY):
                total += item.stat(follow_symlinks=False).st_size
    return total
