"""Ranges one by one, as tests write them down."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from headrace.io.cache.blocks import CachedRemote
from headrace.io.files import Version
from headrace.io.ranges import ByteRanges
from headrace.io.remote.client import Remote


class Range(NamedTuple):
    """A range of a file, of a version or of any."""

    path: str
    start: int
    stop: int
    version: Version | None = None


def read(remote: Remote | CachedRemote, wanted: Sequence[Range]) -> list[bytes]:
    """The bytes of ranges; those of one path are of one version."""
    ranges, versions = ByteRanges.of(one[:3] for one in wanted), {one.path: one.version for one in wanted}
    of = [versions[path] for path in ranges.paths]
    found = remote.remote.run(functools.partial(remote.fetch, ranges, of)) if isinstance(remote, CachedRemote) else remote.read(ranges, of)
    return list(map(bytes, found))
