"""Ranges one by one, as tests write them down."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from headrace.io.files import Version
from headrace.io.ranges import ByteRanges
from headrace.io.remote.client import Remote
from headrace.io.remote_files import RemoteFiles


class Range(NamedTuple):
    """A range of a file, of a version or of any."""

    path: str
    start: int
    stop: int
    version: Version | None = None


def versions_of(remote: Remote, urls: Sequence[str]) -> list[Version]:
    """See `Remote.versions`."""
    return remote.run(remote.versions(urls))


def read(files: Remote | RemoteFiles, wanted: Sequence[Range]) -> list[bytes]:
    """The bytes of ranges; those of one path are of one version."""
    ranges = ByteRanges.of(one[:3] for one in wanted)
    versions = {one.path: one.version for one in wanted if one.version is not None}
    if isinstance(files, RemoteFiles):
        return files.read_each(ranges)
    return [bytes(data) for data in files.run(files.fetch(ranges, versions))]


def some(
    urls: Sequence[str], size: int, seed: int = 1, count: int = 12, version: Version | None = None
) -> list[Range]:
    """Ranges here and there in files of that size."""
    draws = random.Random(seed)
    ranges: list[Range] = []
    for _ in range(count):
        start = draws.randrange(size)
        stop = min(size, start + draws.choice([0, 1, 700, 90_000]))
        ranges.append(Range(draws.choice(urls), start, stop, version))
    return ranges


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What so many threads return, in a minute at most."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count), timeout=60))
