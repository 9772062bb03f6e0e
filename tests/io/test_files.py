"""Local and remote files give the same bytes by one protocol: at once, prefetched, from the disk
cache, in a child.
"""

import contextlib
import multiprocessing
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import (
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    RemoteError,
)
from headrace.io import index as index_module
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of
from headrace.io.local_files import LocalFiles
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from tests.io.remote import reading
from tests.servers.ranges import RangeServer

SIZE = 1_000_000
CONTENT = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}
Span = tuple[str, int, int]


@pytest.fixture
def files_of(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[RemoteFiles] = []

    def make(**options: Any) -> RemoteFiles:
        how = RemoteOptions(**{"cache_dir": tmp_path / "cache", **options})
        made.append(RemoteFiles(server.url + "/a.bin", how))
        return made[-1]

    yield make
    for files in made:
        files.close()


def right(span: Span) -> bytes:
    path, start, stop = span
    return CONTENT[path.rpartition("/")[2]][start:stop]


def read(files: Files, spans: Sequence[Span | None]) -> list[bytes | None]:
    found = files.read(ByteRanges.of(spans))
    return [None if data is None else bytes(data) for data in found]


def check(files: Files, *spans: Span) -> None:
    assert read(files, spans) == [right(span) for span in spans]


class TestPrefetched:
    @pytest.mark.parametrize("disk", [None, "10MB"])
    def test_bytes_are_those_of_the_file(
        self, server: RangeServer, files_of: Any, disk: str | None
    ) -> None:
        files, urls = files_of(disk_cache_size=disk), [f"{server.url}/{name}" for name in CONTENT]
        spans = [one[:3] for one in reading.some(urls, SIZE, count=30)]
        files.hold_prefetched(SIZE)
        files.prefetch([ByteRanges.of(spans[:10]), ByteRanges.of(spans[10:20])])
        for number in range(0, 30, 3):
            check(files, *spans[number : number + 3])
        assert files.bytes_prefetched == 0

    def test_ranges_are_fetched_once(self, server: RangeServer, files_of: Any) -> None:
        files, url = files_of(), server.url + "/a.bin"
        rows = [(url, start, start + 10_000) for start in range(0, 50_000, 10_000)]
        apart = [(url, 300_000, 350_000), (server.url + "/b.bin", 0, 1000)]
        first, second = ByteRanges.of(rows), ByteRanges.of(apart)
        files.hold_prefetched(50_000)  # room for no part of both files
        files.learn([span[0] for span in apart])
        server.counts()
        files.prefetch([first, second])
        files.prefetch([first])
        assert files.bytes_prefetched == 101_000
        for span in rows + apart:
            check(files, span)
        asked = sorted(map(tuple, server.counts()["ranges"]))
        assert asked == [("a.bin", 0, 50_000), ("a.bin", 300_000, 350_000), ("b.bin", 0, 1000)]
        # read once, forgotten
        assert files._prefetcher._pieces == files._prefetcher._touched == {}

    def test_an_error_is_raised_by_one_read(self, server: RangeServer, files_of: Any) -> None:
        files, url = files_of(retries=0, deadline=20), server.url + "/a.bin"
        files.learn([url])
        server.set(faults={"503": 1})
        files.prefetch([ByteRanges.of([(url, 0, 1000)])])
        with pytest.raises(RemoteError, match="bytes 0 to 1,000: 1 attempt"):
            read(files, [(url, 0, 1000)])
        server.set(faults={})
        check(files, (url, 0, 1000))


class TestLocalAndRemoteAlike:
    @pytest.fixture(params=["local", "remote"])
    def place(
        self, request: pytest.FixtureRequest, server: RangeServer, files_of: Any, folder: Path
    ) -> Iterator[tuple[Files, str]]:
        """Files, and what stands before their names."""
        if request.param == "remote":
            yield files_of(), f"{server.url}/"
        else:
            with contextlib.closing(LocalFiles()) as files:
                yield files, f"{folder}/"

    def test_ranges_of_all_kinds(self, place: tuple[Files, str]) -> None:
        files, before = place
        a, b = before + "a.bin", before + "b.bin"
        spans = [(a, 10, 40), (b, 5, 35), (a, 40, 70), (a, 500_000, 500_000), (a, 30, 60)]
        wholes = [None, (b, 0, WHOLE), (before + "none", 0, WHOLE)]
        expected = [*map(right, spans), None, CONTENT["b.bin"], None]
        assert read(files, [*spans, *wholes]) == expected
        # in rows, twice, empty, overlapping, and more than one call takes
        wanted = [(a, 10, 40), (b, 5, 35), (a, 40, 80), (a, 10, 40), (b, 90, 90), (a, 20, 50)]
        wanted += [(a, start, start + 3) for start in range(9000, 18_000, 3)]
        buffers = [memoryview(bytearray(stop - start)) for _, start, stop in wanted]
        files.read_into(ByteRanges.of(wanted), buffers)
        assert [bytes(buffer) for buffer in buffers] == [right(span) for span in wanted]
        assert files.read(ByteRanges.of([])) == []

    def test_what_is_not_there(self, place: tuple[Files, str]) -> None:
        files, before = place
        with pytest.raises(FormatError, match=r"a.bin ends before byte 1,000,001"):
            read(files, [(before + "a.bin", 0, SIZE + 1)])
        with pytest.raises(DataNotFoundError, match=r"none\.bin"):
            files.version(before + "none.bin")

    def test_a_file_that_changes_is_an_error(self, place: tuple[Files, str], folder: Path) -> None:
        files, before = place
        path = folder / "changes.bin"
        path.write_bytes(b"first version")
        name = before + path.name
        assert files.version(name).size == 13
        assert read(files, [(name, 0, 5)]) == [b"first"]
        path.write_bytes(b"another version")
        os.utime(path, (1, 1))
        for span in ((name, 0, 5), (name, 6, 13)):
            with pytest.raises(FileChangedError, match=r"changes.bin"):
                read(files, [span])
        with pytest.raises(FileChangedError):
            files.read_into(ByteRanges.of([(name, 0, 5)]), [memoryview(bytearray(5))])
        if isinstance(files, LocalFiles):
            with pytest.raises(FileChangedError):
                files.check(name)
        with (
            contextlib.closing(pickle.loads(pickle.dumps(files))) as copy,
            pytest.raises(FileChangedError),
        ):
            read(copy, [(name, 0, 5)])
        path.unlink()


def test_damage_on_the_way_is_fetched_again(server: RangeServer, files_of: Any) -> None:
    files, span = files_of(disk_cache_size="10MB"), (server.url + "/a.bin", 0, SIZE)
    files.learn([span[0]])
    server.set(faults={"wrong": 1})
    assert read(files, [span]) != [right(span)]
    server.set(faults={})
    assert read(files, [span]) != [right(span)]  # kept on the disk
    with files.bypassing_cache():
        check(files, span)
    check(files, span)


@pytest.mark.parametrize(
    ("size", "asked"),
    [
        ("10MB", [("a.bin", 0, SIZE), ("b.bin", 0, SIZE)]),
        ("1.5MB", [("a.bin", 5, 900), ("a.bin", 5, 900), ("b.bin", 0, SIZE)]),
    ],
)
def test_small_ranges_of_more_than_has_room_are_fetched_alone(
    server: RangeServer, files_of: Any, size: str, asked: list[Span]
) -> None:
    files, a, b = files_of(disk_cache_size=size), server.url + "/a.bin", server.url + "/b.bin"
    files.learn([a, b])
    server.counts()
    for _ in range(2):
        check(files, (a, 5, 900), (b, 0, 800_000))
    assert sorted(map(tuple, server.counts()["ranges"])) == asked


# -- the index


def _make(files: RemoteFiles, url: str) -> list[Any]:
    return [np.frombuffer(read(files, [(url, 0, 80)])[0] or b"", np.uint8).copy(), np.arange(3)]


def refuse(files: RemoteFiles, url: str) -> list[Any]:
    raise AssertionError("made anew")


KIND = IndexKind("test", 1, ("u1", "<i8"), _make)
KEPT = KIND._replace(make=refuse)


def test_an_index_is_made_once(server: RangeServer, files_of: Any, tmp_path: Path) -> None:
    url = server.url + "/a.bin"
    first = index_of(files_of(), url, KIND)
    again = index_of(files_of(), url, KEPT)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for path, kind in ((url, KEPT._replace(version=2)), (server.url + "/b.bin", KEPT)):
        with pytest.raises(AssertionError, match="anew"):
            index_of(files_of(), path, kind)
    kept = next((tmp_path / "cache").glob("headrace-index-*"))
    content = bytearray(kept.read_bytes())
    content[-9] ^= 1
    kept.write_bytes(content)
    with pytest.raises(AssertionError, match="anew"):
        index_of(files_of(), url, KEPT)


def test_where_no_index_can_be_kept(
    server: RangeServer, files_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    files = files_of(cache_dir=tmp_path / "file" / "below")
    monkeypatch.setattr(index_module, "_HINT_S", -1.0)
    with pytest.warns(HeadraceWarning) as said:
        index_of(files, server.url + "/a.bin", KIND)
    texts = [str(one.message) for one in said]
    assert any("headrace.write_index" in text for text in texts)
    assert any("indexes are not kept (" in text for text in texts)


# -- whole files


def test_whole_file_is_read_in_the_version_asked_for(
    server: RangeServer, files_of: Any, folder: Path
) -> None:
    files, url = files_of(), server.url + "/c.bin"
    wholes = ByteRanges.of_wholes([url], [0, 0])
    (folder / "c.bin").write_bytes(b"old")
    assert files.read_each(wholes) == [b"old"] * 2
    assert files.take_counts()["requests"] == 1
    files.learn([url])
    (folder / "c.bin").write_bytes(b"new")
    with pytest.raises(FileChangedError, match=r"c\.bin"):
        files.read_each(wholes)
    files.forget([url])
    assert files.read_each(wholes) == [b"new"] * 2
    (folder / "c.bin").unlink()
    with pytest.raises(DataNotFoundError, match=r"c\.bin"):
        files.read_each(wholes)


def _read_in_child(files: RemoteFiles, wholes: ByteRanges, pipe: Any) -> None:
    pipe.recv()
    pipe.send((files.read_each(wholes), files.take_counts()["requests"]))
    files.close()


def test_versions_of_numbered_files_are_asked_for_once(server: RangeServer, files_of: Any) -> None:
    files, paths = files_of(disk_cache_size="10MB"), [f"{server.url}/{name}" for name in CONTENT]
    files.share_versions(paths)
    wholes = ByteRanges.of_wholes(paths, [1, 0, 1])
    expected = [CONTENT["b.bin"], CONTENT["a.bin"], CONTENT["b.bin"]]
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=_read_in_child, args=(files, wholes, theirs)
    )
    child.start()  # before anything is known
    # a version and the content of each
    assert files.read_each(wholes) == expected
    assert files.take_counts()["requests"] == 4
    ours.send("read")
    assert ours.poll(60)
    assert ours.recv() == (expected, 0)
    child.join(30)
    child.close()
    assert files.read_each(wholes) == expected
    assert files.take_counts()["requests"] == 0
    # not numbered: its version may be another one now
    assert files.read_each(ByteRanges.of_wholes(list(paths), [0])) == [CONTENT["a.bin"]]
    assert files.take_counts()["requests"] == 1
