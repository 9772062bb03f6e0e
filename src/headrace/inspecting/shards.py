"""Inspects tar shards."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from typing import Any

from headrace.errors import FormatError
from headrace.inspecting.report import Access, Report
from headrace.inspecting.sizes import ASKED, evenly, stored_in
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.storage.tar.source import COMPRESSED_TARS, TARS, TarSource

_SCANNED = 1 << 30  # bytes of tars up to which all headers are read
_HEAD = 2 << 20  # bytes of a tar whose headers are read, where there are more
_SHARDS = 10_000  # whose sizes are all looked at
_LOOKED_AT = 64  # samples whose members are


def inspect_tars(data_path: Any, reach: RemoteOptions) -> Report:
    """What tar shards hold: all of small ones is looked at, else the beginning of the first.

    Args:
        data_path: as `StreamingDataset` takes it; or its files.
        reach: how URLs are reached.

    Raises:
        DataNotFoundError, AccessError, FormatError, RemoteError: see `TarSource`.
    """
    files = resolve(data_path, TARS, reach)
    paths = files.urls()
    shown = redact(data_path if not isinstance(data_path, FileSet) else paths[0])
    report = Report(shown, "tar shards", files=len(paths))
    report.opens_as = f"headrace.StreamingDataset({shown!r})"
    try:
        sizes = _sizes(files, paths)
        report.stored, report.is_estimate = stored_in(len(paths), sizes)
        if any(path.lower().endswith(COMPRESSED_TARS) for path in paths):
            TarSource(files, reach=reach)  # says what to do
        if files.server is None and report.stored <= _SCANNED:
            _scan(report, files, reach)
        else:
            _look(report, files, paths[0], sizes[0])
    finally:
        if files.server is not None:
            files.server.close()
    if report.samples:
        size = report.stored // report.samples
        way = (
            "ranges, by an index of the members"
            if files.is_remote
            else "pread, by an index of the members"
        )
        report.access = [Access("", "a sample", way, read=size)]
    return report


def _sizes(files: FileSet, paths: list[str]) -> list[int]:
    if files.server is not None:
        return [size or 0 for size in files.server.sizes(paths[:ASKED])]
    return [os.stat(path).st_size for path in paths[:_SHARDS]]


def _scan(report: Report, files: FileSet, reach: RemoteOptions) -> None:
    """All headers are read."""
    source = TarSource(files, reach=reach, progress=False)
    try:
        report.samples, report.fingerprint = len(source), source.fingerprint()
        kinds = Counter[str]()
        for record in source.read(evenly(len(source), _LOOKED_AT).tolist()):
            kinds.update(key for key in record if not key.startswith("__"))
        report.details["members"] = [kind for kind, _ in kinds.most_common(16)]
        report.samples_are = "members of one key, by extension"
    finally:
        source.close()


def _look(report: Report, files: FileSet, path: str, size: int) -> None:
    """The headers of the first bytes of the first shard."""
    if files.server is None:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    else:
        head = bytes(files.server.read(ByteRanges.of([(path, 0, min(size, _HEAD))]))[0] or b"")
    keys, kinds, behind = list[str](), Counter[str](), 0
    try:
        with tarfile.open(fileobj=io.BytesIO(head), mode="r:") as tar:
            while (member := tar.next()) is not None:
                folder, _, name = member.name.rpartition("/")
                key, _, kind = name.partition(".")
                if member.isfile() and key and kind:
                    if not keys or keys[-1] != f"{folder}/{key}":
                        keys.append(f"{folder}/{key}")
                    kinds[kind.lower()] += 1
                    behind = member.offset_data + member.size
    except tarfile.ReadError as error:
        if not keys:
            raise FormatError(f"{redact(path)} is no tar, or a damaged one: {error}") from error
    report.details["members"] = [kind for kind, _ in kinds.most_common(16)]
    report.samples_are = "members of one key, by extension"
    if keys and behind and report.stored:
        is_whole = size <= len(head) and report.files == 1
        report.samples = len(keys) if is_whole else max(1, int(report.stored * len(keys) / behind))
        report.samples_estimated = not is_whole
