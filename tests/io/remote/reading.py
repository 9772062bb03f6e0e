"""Ranges one by one, as tests write them down."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from headrace.io.files import Version
from headrace.io.ranges import ByteRanges
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles


class Range(NamedTuple):
    """A range of a file, of a version or of any."""

    path: str
    start: int
    stop: int
    version: Version | None = None


def remote_of_url(
    url: str, storage_options: dict[str, Any] | None = None, **options: Any
) -> Remote:
    """The server of a URL."""
    return Remote(url, RemoteOptions(storage_options, **options))


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


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What so many threads return, in a minute at most."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count), timeout=60))
