"""Local and remote files give the same bytes by one protocol: at once, prefetched, from the disk
cache, in a child.
"""

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
from headrace.io.index import IndexKind, index_bytes, index_of
from headrace.io.local.files import LocalFiles
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles, with_index
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.quick_every(2)

SIZE = 1_000_000
CONTENT = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}


@pytest.fixture
def files_of(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[RemoteFiles] = []

    def make(**options: Any) -> RemoteFiles:
        made.append(
            RemoteFiles(
                server.url + "/a.bin", RemoteOptions(**{"cache_dir": tmp_path / "cache", **options})
            )
        )
        return made[-1]

    yield make
    for files in made:
        files.close()


def some(server: RangeServer, seed: int = 0, count: int = 30) -> list[tuple[str, int, int]]:
    draws = random.Random(seed)
    starts = [draws.randrange(SIZE - 3000) for _ in range(count)]
    return [
        (f"{server.url}/{draws.choice(list(CONTENT))}", start, start + draws.choice([0, 1, 2999]))
        for start in starts
    ]


def right(span: tuple[str, int, int]) -> bytes:
    return CONTENT[span[0].rpartition("/")[2]][span[1] : span[2]]


def ranges(spans: Sequence[tuple[str, int, int] | None]) -> ByteRanges:
    return ByteRanges.of(spans)


def read(files: Files, spans: Sequence[tuple[str, int, int] | None]) -> list[bytes | None]:
    return [None if data is None else bytes(data) for data in files.read(ranges(spans))]


@pytest.mark.parametrize("disk", [None, "10MB"])
def test_prefetched_bytes_are_those_of_the_file(
    server: RangeServer, files_of: Any, disk: str | None
) -> None:
    files, spans = files_of(disk_cache_size=disk), some(server)
    files.hold_prefetched(SIZE)
    files.prefetch([ranges(spans[:10]), ranges(spans[10:20])])
    for number in range(0, 30, 3):
        assert read(files, spans[number : number + 3]) == [
            right(span) for span in spans[number : number + 3]
        ]
    assert files.bytes_prefetched == 0


def test_prefetched_ranges_are_fetched_once(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/a.bin"
    files.hold_prefetched(100_000)
    files.learn([url])
    server.counts()
    files.prefetch([ranges([(url, 0, 50_000)]), ranges([(url, 300_000, 350_000)])])
    files.prefetch([ranges([(url, 0, 50_000)])])
    assert files.bytes_prefetched == 100_000
    for start in range(0, 50_000, 10_000):
        assert read(files, [(url, start, start + 10_000)]) == [
            CONTENT["a.bin"][start : start + 10_000]
        ]
    assert read(files, [(url, 300_000, 350_000)]) == [CONTENT["a.bin"][300_000:350_000]]
    assert sorted(map(tuple, server.counts()["ranges"])) == [
        ("a.bin", 0, 50_000),
        ("a.bin", 300_000, 350_000),
    ]
    # read once, forgotten
    assert files._prefetcher._extents == {} and files._prefetcher._starts == {}


def test_partly_read_pieces_are_bounded(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/b.bin"
    files.hold_prefetched(50_000)
    files.prefetch(
        [ranges([(url, start, start + 20_000)]) for start in range(0, 200_000, 100_000 // 2)]
    )
    for start in range(0, 200_000, 50_000):
        read(files, [(url, start, start + 10)])
        assert files._prefetcher._touched <= 50_000
    files.drop_prefetched()
    assert (
        files._prefetcher._extents == {}
        and files._prefetcher._touched == files.bytes_prefetched == 0
    )


def test_urgent_pieces_go_first(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/a.bin"
    files.hold_prefetched(SIZE)
    files.learn([url])
    server.set(latency=0.05)
    server.counts()
    files.prefetch([ranges([(url, 0, 10)])], urgent=True)
    files.prefetch(
        [ranges([(url, start, start + 10)]) for start in range(100_000, 600_000, 100_000)]
    )
    files.prefetch([ranges([(url, 900_000, 900_010)])], urgent=True)
    for start in [0, 900_000, *range(100_000, 600_000, 100_000)]:
        assert read(files, [(url, start, start + 10)]) == [CONTENT["a.bin"][start : start + 10]]
    asked = [start for _, start, _ in server.counts()["ranges"]]
    assert set(asked[:2]) == {0, 900_000} and len(asked) == 7


def test_an_error_of_prefetching_is_raised_by_one_read(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(retries=0, deadline=20), server.url + "/a.bin"
    files.learn([url])
    server.set(faults={"503": 1})
    files.prefetch([ranges([(url, 0, 1000)])])
    with pytest.raises(RemoteError, match=r"bytes 0 to 1,000: 1 attempt in .* the server says 503"):
        read(files, [(url, 0, 10)])
    server.set(faults={})
    assert read(files, [(url, 0, 10)]) == [CONTENT["a.bin"][:10]]


# -- local and remote alike


@pytest.fixture(params=["local", "remote"])
def place(
    request: pytest.FixtureRequest, server: RangeServer, files_of: Any, folder: Path
) -> Iterator[tuple[Files, str]]:
    """Files, and what stands before their names."""
    if request.param == "remote":
        yield files_of(), f"{server.url}/"
        return
    files = LocalFiles()
    yield files, f"{folder}/"
    files.close()


def test_ranges_of_all_kinds(place: tuple[Files, str]) -> None:
    files, before = place
    a, b = before + "a.bin", before + "b.bin"
    spans = [
        (a, 10, 40),
        None,
        (b, 5, 35),
        (a, 40, 70),
        (a, 500_000, 500_000),
        (a, 30, 60),
        (b, 0, WHOLE),
        (before + "none", 0, WHOLE),
    ]
    found = read(files, spans)
    content_a, content_b = CONTENT["a.bin"], CONTENT["b.bin"]
    assert found == [
        content_a[10:40],
        None,
        content_b[5:35],
        content_a[40:70],
        b"",
        content_a[30:60],
        content_b,
        None,
    ]
    # in rows, twice, empty, overlapping
    wanted = [(a, 10, 40), (b, 5, 35), (a, 40, 80), (a, 10, 40), (b, 90, 90), (a, 20, 50)]
    buffers = [memoryview(bytearray(stop - start)) for _, start, stop in wanted]
    files.read_into(ranges(wanted), buffers)
    assert [bytes(buffer) for buffer in buffers] == [right(one) for one in wanted]
    assert files.read(ranges([])) == []


def test_more_buffers_than_one_call_takes(place: tuple[Files, str]) -> None:
    files, before = place
    wanted = [(before + "a.bin", start, start + 3) for start in range(9000, 18_000, 3)]
    buffers = [memoryview(bytearray(3)) for _ in wanted]
    files.read_into(ranges(wanted), buffers)
    assert b"".join(buffers) == CONTENT["a.bin"][9000:18_000]


def test_beyond_the_end(place: tuple[Files, str]) -> None:
    files, before = place
    with pytest.raises(
        FormatError, match=r"a.bin ends before byte 1,000,001: the file is cut short"
    ):
        files.read(ranges([(before + "a.bin", 0, SIZE + 1)]))


def test_a_file_that_changes_is_an_error(place: tuple[Files, str], folder: Path) -> None:
    files, before = place
    path = folder / "changes.bin"
    path.write_bytes(b"first version")
    try:
        name = before + path.name
        assert files.version(name).size == 13 and read(files, [(name, 0, 5)]) == [b"first"]
        path.write_bytes(b"another version")
        os.utime(path, (1, 1))
        for span in ((name, 0, 5), (name, 6, 13)):
            with pytest.raises(
                FileChangedError,
                match=r"changes.bin.* has been (changed|replaced) since it was opened",
            ):
                files.read(ranges([span]))
        with pytest.raises(FileChangedError):
            files.read_into(ranges([(name, 0, 5)]), [memoryview(bytearray(5))])
        if not files.is_remote:
            with pytest.raises(FileChangedError):
                files.check(name)
        copy = pickle.loads(pickle.dumps(files))
        with pytest.raises(FileChangedError):
            copy.read(ranges([(name, 0, 5)]))
        copy.close()
    finally:
        path.unlink()


def test_a_file_that_is_missing(place: tuple[Files, str]) -> None:
    files, before = place
    with pytest.raises(DataNotFoundError, match=r"none\.bin"):
        files.version(before + "none.bin")


def test_damage_on_the_way_is_fetched_again(server: RangeServer, files_of: Any) -> None:
    files, span = files_of(disk_cache_size="10MB"), (server.url + "/a.bin", 0, SIZE)
    files.learn([span[0]])
    server.set(faults={"wrong": 1})
    assert read(files, [span]) != [right(span)] and read(files, [span]) != [right(span)]
    server.set(faults={})
    assert read(files, [span]) != [right(span)]  # kept on the disk
    with files.bypassing_cache():
        assert read(files, [span]) == [right(span)]
    assert read(files, [span]) == [right(span)]


@pytest.mark.parametrize(("size", "whole"), [("10MB", True), ("1.5MB", False)])
def test_small_ranges_of_more_than_has_room_are_fetched_alone(
    server: RangeServer, files_of: Any, size: str, whole: bool
) -> None:
    files, a, b = files_of(disk_cache_size=size), server.url + "/a.bin", server.url + "/b.bin"
    files.learn([a, b])
    server.counts()
    for _ in range(2):
        assert read(files, [(a, 5, 900), (b, 0, 800_000)]) == [
            CONTENT["a.bin"][5:900],
            CONTENT["b.bin"][:800_000],
        ]
    asked = sorted(map(tuple, server.counts()["ranges"]))
    assert asked == (
        [("a.bin", 0, SIZE), ("b.bin", 0, SIZE)]
        if whole
        else [("a.bin", 5, 900), ("a.bin", 5, 900), ("b.bin", 0, SIZE)]
    )


def _in_child(files: RemoteFiles, span: tuple[str, int, int], pipe: Any) -> None:
    pipe.send(read(files, [span])[0])
    files.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_reads_for_itself(server: RangeServer, files_of: Any, method: str) -> None:
    files, span = files_of(), some(server)[2]
    files.prefetch([ranges([span])])
    read(files, [span])
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(files, span, theirs))
    child.start()
    assert ours.poll(60) and ours.recv() == right(span)
    child.join()
    assert read(files, [span]) == [right(span)]


def test_a_pickle_knows_the_versions(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/a.bin"
    version = files.version(url)
    server.counts()
    copy = pickle.loads(pickle.dumps(files))
    assert copy.version(url) == version and server.counts()["requests"] == 0
    assert read(copy, [(url, 3, 9)]) == [CONTENT["a.bin"][3:9]]
    copy.close()


# -- the index


def _make(files: RemoteFiles, url: str) -> list[Any]:
    return [np.frombuffer(read(files, [(url, 0, 80)])[0] or b"", np.uint8).copy(), np.arange(3)]


KIND = IndexKind("test", 1, ("u1", "<i8"), _make)


def refuse(files: RemoteFiles, url: str) -> list[Any]:
    raise AssertionError("made anew")


def test_an_index_is_made_once(server: RangeServer, files_of: Any, tmp_path: Path) -> None:
    url = server.url + "/a.bin"
    first = index_of(files_of(), url, KIND)
    again = index_of(files_of(), url, KIND._replace(make=refuse))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(AssertionError, match="anew"):
        index_of(files_of(), url, KIND._replace(make=refuse, version=2))
    with pytest.raises(AssertionError, match="anew"):
        index_of(files_of(), server.url + "/b.bin", KIND._replace(make=refuse))
    kept = next((tmp_path / "cache").glob("headrace-test-index-*"))
    content = bytearray(kept.read_bytes())
    content[-9] ^= 1
    kept.write_bytes(content)
    with pytest.raises(AssertionError, match="anew"):
        index_of(files_of(), url, KIND._replace(make=refuse))


def test_an_index_beside_the_file(server: RangeServer, files_of: Any, folder: Path) -> None:
    url, arrays = server.url + "/a.bin", [np.arange(80, dtype=np.uint8), np.arange(3)]
    beside = folder / "a.bin.index"
    try:
        beside.write_bytes(index_bytes(arrays, KIND, SIZE))
        files = files_of()
        files.learn([url, server.url + "/b.bin"], beside=lambda _: True)
        server.counts()
        found = index_of(files, url, KIND._replace(make=refuse))
        assert (
            all(np.array_equal(a, b) for a, b in zip(found, arrays, strict=True))
            and server.counts()["requests"] == 0
        )
        for content, why in (
            (index_bytes(arrays, KIND, SIZE + 1), "of another version, or"),
            (b"nonsense", "of another version"),
        ):
            beside.write_bytes(content)
            files = files_of()
            files.learn([url], beside=lambda _: True)
            with pytest.warns(
                HeadraceWarning, match=rf"a.bin: the index beside it is not used: it is {why}"
            ):
                assert len(index_of(files, url, KIND)) == 2
            for kept in Path(files.options.cache_dir).glob("headrace-test*"):
                kept.unlink()
    finally:
        beside.unlink()


def test_where_no_index_can_be_kept(
    server: RangeServer, files_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    files = files_of(cache_dir=tmp_path / "file" / "below")
    monkeypatch.setattr(index_module, "_HINT_S", -1.0)
    with pytest.warns(HeadraceWarning) as said:
        index_of(files, server.url + "/a.bin", KIND)
    texts = [str(one.message) for one in said]
    assert any("headrace.write_index makes the index beforehand" in text for text in texts)
    assert any("is not kept (" in text and "every start makes it anew" in text for text in texts)


@pytest.mark.parametrize(
    ("url", "index"),
    [
        ("s3://b/a.h5", "s3://b/a.h5.index"),
        ("https://h/a.tar?key=1", "https://h/a.tar.index?key=1"),
        ("simplecache::s3://b/a", "simplecache::s3://b/a.index"),
    ],
)
def test_the_name_of_an_index(url: str, index: str) -> None:
    assert with_index(url) == index


# -- whole files


def test_whole_file_is_read_in_the_version_asked_for(
    server: RangeServer, files_of: Any, folder: Path
) -> None:
    files, url = files_of(), server.url + "/c.bin"
    wholes = ByteRanges.of_wholes([url], [0, 0])
    (folder / "c.bin").write_bytes(b"old")
    assert files.read_each(wholes) == [b"old"] * 2 and files.take_counts()["requests"] == 1
    files.learn([url])
    (folder / "c.bin").write_bytes(b"new")
    with pytest.raises(FileChangedError, match=r"c\.bin.*has been replaced"):
        files.read_each(wholes)
    files.forget([url])
    assert files.read_each(wholes) == [b"new"] * 2
    (folder / "c.bin").unlink()
    with pytest.raises(DataNotFoundError, match=r"c\.bin: there is no such file"):
        files.read_each(wholes)


def _read_in_child(files: RemoteFiles, wholes: ByteRanges, pipe: Any) -> None:
    pipe.recv()
    pipe.send((files.read_each(wholes), files.take_counts()["requests"]))
    files.close()


def test_versions_of_numbered_files_are_asked_for_once(
    server: RangeServer, files_of: Any, folder: Path
) -> None:
    files, paths = files_of(disk_cache_size="10MB"), [f"{server.url}/{name}" for name in CONTENT]
    files.share_versions(paths)
    wholes, expected = (
        ByteRanges.of_wholes(paths, [1, 0, 1]),
        [CONTENT[name] for name in ("b.bin", "a.bin", "b.bin")],
    )
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=_read_in_child, args=(files, wholes, theirs)
    )
    child.start()  # before anything is known
    # a version and the content of each
    assert files.read_each(wholes) == expected and files.take_counts()["requests"] == 4
    ours.send("read")
    assert ours.poll(60) and ours.recv() == (expected, 0)
    child.join(30)
    child.close()
    assert files.read_each(wholes) == expected and files.take_counts()["requests"] == 0
    # not numbered: its version may be another one now
    assert files.read_each(ByteRanges.of_wholes(list(paths), [0])) == expected[1:2]
    assert files.take_counts()["requests"] == 1
