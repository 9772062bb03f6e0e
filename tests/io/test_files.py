"""Are the bytes of files that are far away the same ahead, at once, from the disk cache, and in a child?"""

import multiprocessing
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import FormatError, HeadraceWarning, RemoteError
from headrace.io import index as index_module
from headrace.io.index import IndexKind, index_bytes, index_of
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles, with_index
from headrace.io.stretches import Stretch, places_of, read_part, read_places, read_stretches
from tests.servers.ranges import RangeServer

SIZE = 1_000_000
CONTENT = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    for name, content in CONTENT.items():
        (made / name).write_bytes(content)
    return made


@pytest.fixture
def files_of(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[RemoteFiles] = []

    def make(**options: Any) -> RemoteFiles:
        made.append(RemoteFiles(server.url + "/a.bin", RemoteOptions(**{"cache_dir": tmp_path / "cache", **options})))
        return made[-1]

    yield make
    for files in made:
        files.close()


def some(server: RangeServer, seed: int = 0, count: int = 30) -> list[tuple[str, int, int]]:
    draws = random.Random(seed)
    starts = [draws.randrange(SIZE - 3000) for _ in range(count)]
    return [(f"{server.url}/{draws.choice(list(CONTENT))}", start, start + draws.choice([0, 1, 2999])) for start in starts]


def right(span: tuple[str, int, int]) -> bytes:
    return CONTENT[span[0].rpartition("/")[2]][span[1] : span[2]]


@pytest.mark.parametrize("disk", [None, "10MB"])
def test_the_same_bytes_ahead_and_at_once(server: RangeServer, files_of: Any, disk: str | None) -> None:
    files, spans = files_of(disk_cache_size=disk), some(server)
    files.hold_ahead(SIZE)
    files.ahead([spans[:10], spans[10:20]])
    for number in range(0, 30, 3):
        assert [bytes(data) for data in files.read(spans[number : number + 3])] == [right(span) for span in spans[number : number + 3]]
    assert files.bytes_ahead == 0


def test_what_was_fetched_ahead_is_fetched_once(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/a.bin"
    files.hold_ahead(100_000)
    files.learn([url])
    server.counts()
    files.ahead([[(url, 0, 50_000)], [(url, 300_000, 350_000)]])
    files.ahead([[(url, 0, 50_000)]])
    assert files.bytes_ahead == 100_000
    for start in range(0, 50_000, 10_000):
        assert files.read([(url, start, start + 10_000)])[0] == CONTENT["a.bin"][start : start + 10_000]
    assert files.read([(url, 300_000, 350_000)])[0] == CONTENT["a.bin"][300_000:350_000]
    assert sorted(map(tuple, server.counts()["ranges"])) == [("a.bin", 0, 50_000), ("a.bin", 300_000, 350_000)]
    assert files._ahead._extents == {} and files._ahead._starts == {}  # read once, forgotten


def test_what_is_begun_and_not_ended_has_bounds(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/b.bin"
    files.hold_ahead(50_000)
    files.ahead([[(url, start, start + 20_000)] for start in range(0, 200_000, 100_000 // 2)])
    for start in range(0, 200_000, 50_000):
        files.read([(url, start, start + 10)])
        assert files._ahead._touched <= 50_000
    files.drop_ahead()
    assert files._ahead._extents == {} and files._ahead._touched == files.bytes_ahead == 0


def test_an_error_ahead_is_raised_where_it_is_read_and_once(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(retries=0, deadline=20), server.url + "/a.bin"
    files.learn([url])
    server.set(faults={"503": 1})
    files.ahead([[(url, 0, 1000)]])
    with pytest.raises(RemoteError, match=r"bytes 0 to 1,000: 1 attempt in .* the server says 503"):
        files.read([(url, 0, 10)])
    server.set(faults={})
    assert files.read([(url, 0, 10)])[0] == CONTENT["a.bin"][:10]


def test_beyond_the_end(server: RangeServer, files_of: Any) -> None:
    with pytest.raises(FormatError, match=r"a.bin ends before byte 1,000,001: the file is cut short"):
        files_of().read([(server.url + "/a.bin", 0, SIZE + 1)])


def test_stretches_and_places(server: RangeServer, files_of: Any) -> None:
    files, a, b = files_of(), server.url + "/a.bin", server.url + "/b.bin"
    stretches = [Stretch(a, 10, 30), None, Stretch(b, 5, 30), Stretch(a, 40, 30)]
    found = read_stretches(stretches, files)
    assert found == [CONTENT["a.bin"][10:40], None, CONTENT["b.bin"][5:35], CONTENT["a.bin"][40:70]]
    there = [one for one in stretches if one is not None]
    parts = [memoryview(bytearray(30)) for _ in there]
    read_places(places_of(there), parts, files)
    assert parts == [one for one in found if one is not None]
    read_part(b, 100, parts[0], files)
    assert parts[0] == CONTENT["b.bin"][100:130]
    assert list(places_of(stretches).spans()) == [one.span for one in there]


def test_what_is_damaged_on_the_way_is_fetched_again(server: RangeServer, files_of: Any) -> None:
    files, span = files_of(disk_cache_size="10MB"), (server.url + "/a.bin", 0, SIZE)
    files.learn([span[0]])
    server.set(faults={"wrong": 1})
    assert files.read([span])[0] != right(span) and files.read([span])[0] != right(span)
    server.set(faults={})
    assert files.read([span])[0] != right(span)  # kept on the disk
    with files.afresh():
        assert files.read([span])[0] == right(span)
    assert files.read([span])[0] == right(span)


@pytest.mark.parametrize(("size", "whole"), [("10MB", True), ("1.5MB", False)])
def test_small_ranges_of_more_than_has_room_are_fetched_alone(server: RangeServer, files_of: Any, size: str, whole: bool) -> None:
    files, a, b = files_of(disk_cache_size=size), server.url + "/a.bin", server.url + "/b.bin"
    files.learn([a, b])
    server.counts()
    for _ in range(2):
        assert [bytes(data) for data in files.read([(a, 5, 900), (b, 0, 800_000)])] == [CONTENT["a.bin"][5:900], CONTENT["b.bin"][:800_000]]
    ranges = sorted(map(tuple, server.counts()["ranges"]))
    assert ranges == ([("a.bin", 0, SIZE), ("b.bin", 0, SIZE)] if whole else [("a.bin", 5, 900), ("a.bin", 5, 900), ("b.bin", 0, SIZE)])


def _in_child(files: RemoteFiles, span: tuple[str, int, int], pipe: Any) -> None:
    pipe.send(bytes(files.read([span])[0]))
    files.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_reads_for_itself(server: RangeServer, files_of: Any, method: str) -> None:
    files, span = files_of(), some(server)[2]
    files.ahead([[span]])
    files.read([span])
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(files, span, theirs))
    child.start()
    assert ours.poll(60) and ours.recv() == right(span)
    child.join()
    assert files.read([span])[0] == right(span)


def test_a_pickle_knows_the_versions(server: RangeServer, files_of: Any) -> None:
    files, url = files_of(), server.url + "/a.bin"
    version = files.version(url)
    server.counts()
    copy = pickle.loads(pickle.dumps(files))
    assert copy.version(url) == version and server.counts()["requests"] == 0
    assert copy.read([(url, 3, 9)])[0] == CONTENT["a.bin"][3:9]
    copy.close()


# -- the index


def _make(files: RemoteFiles, url: str) -> list[Any]:
    return [np.frombuffer(files.read([(url, 0, 80)])[0], np.uint8).copy(), np.arange(3)]


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
        assert all(np.array_equal(a, b) for a, b in zip(found, arrays, strict=True)) and server.counts()["requests"] == 0
        for content, why in (
            (index_bytes(arrays, KIND, SIZE + 1), "of another version, or"),
            (b"nonsense", "of another version"),
        ):
            beside.write_bytes(content)
            files = files_of()
            files.learn([url], beside=lambda _: True)
            with pytest.warns(HeadraceWarning, match=rf"a.bin: the index beside it is not used: it is {why}"):
                assert len(index_of(files, url, KIND)) == 2
            for kept in Path(files.options.cache_dir).glob("headrace-test*"):
                kept.unlink()
    finally:
        beside.unlink()


def test_where_no_index_can_be_kept(server: RangeServer, files_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
