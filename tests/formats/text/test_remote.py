"""Lines and records of remote texts are those of a local copy, with each byte fetched once."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.formats.text.source import LinesSource
from headrace.io import remote_files as in_order
from headrace.io.remote.options import RemoteOptions
from tests.formats.text.test_plain import packed
from tests.servers.ranges import RangeServer

LINES = {
    "1.txt": b"one\ntwo\r\n\r\nthree\rfour",
    "2.txt": b"",
    "3.txt": b"\xef\xbb\xbfmarked\n\xef\xbb\xbfnot the first\n",
    "4.txt.gz": packed(b"\xef\xbb\xbfpacked\n\nlines\n", ".gz"),
    "5.txt": b"\n",
    "6.txt": b"\xef\xbb\xbf",
    "7.txt.zst": packed(b"and these\n", ".zst"),
    "8.txt": b"\r",
    "9.txt": random.Random(0).randbytes(3000),
}
RECORDS = {
    "a.jsonl": b'{"a": 1}\n\n{"a": "x\\n"}\r\n  \n{"b": 2}',
    "b.json": b' [{"a": 1},\n {"b": [2, 3]}, "x"] ',
    "c.csv": b'\n\na,b\r\n1,"2\n3"\n\n"4 ""x""",5\n',
    "d.tsv": b"\xef\xbb\xbfa\tb\n1\t2\n",
    "e.jsonl.gz": packed(b'{"a": 7}\n' * 3, ".gz"),
    "f.json": b"[]",
    "g.jsonl": b"\n\n",
    "h.csv": b"a\n",
}
ODD = {
    "i.csv": b"a,b\n1,2\n",
    "j.csv": b'a,b\nan inch is 1",2\n"x\ny",3\n',
    "k.csv": b'a\n"1\n2"\n\n3\n',
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture
def served(folder: Path) -> Path:
    for path in folder.iterdir():
        path.unlink()
    return folder


@pytest.fixture
def both(
    server: RangeServer, served: Path, tmp_path: Path
) -> Iterator[Callable[..., tuple[LinesSource, LinesSource]]]:
    """Writes files, and opens them near and far."""
    made: list[Any] = []

    def make(contents: dict[str, bytes], unit: str = "line", **options: Any) -> Any:
        for name, content in contents.items():
            # else it would be of a new time
            if not (served / name).exists() or (served / name).read_bytes() != content:
                (served / name).write_bytes(content)
        reach = RemoteOptions(cache_dir=tmp_path / "far", retries=20)
        urls = [f"{server.url}/{name}" for name in contents]
        far = LinesSource(urls, unit, reach, **options)
        near = LinesSource([served / name for name in contents], unit, **options)
        made.extend((far, near))
        return near, far

    yield make
    for source in made:
        source.close()


def same(near: LinesSource, far: LinesSource) -> None:
    count = len(near)
    assert len(far) == count
    assert far.fingerprint() == near.fingerprint()
    assert far.headers == near.headers
    some = random.Random(1).choices(range(count), k=50 if count else 0)
    for numbers in (range(count), some):
        assert far.read(numbers) == near.read(numbers)
    for name in ("blocks", "sizes"):
        assert np.array_equal(getattr(far, name)(), getattr(near, name)()), name
    assert sum(far.blocks()) == count
    for number in range(count):
        assert far.offset_of(number) == near.offset_of(number)
        assert far.location(number).startswith("http://127.0.0.1:")
        place = near.location(number).rpartition("/")[2]
        assert far.location(number).rpartition("/")[2] == place


def test_the_same_lines(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "PIECE", 1000)
    monkeypatch.setattr("headrace.formats.source.block_length", lambda _: 16)
    same(*both(LINES))
    near, far = both(RECORDS, "record")
    same(near, far)
    assert far.row(0, far.read([0])[0]) == {"a": 1}
    copy = pickle.loads(pickle.dumps(far))
    assert copy.read(range(len(near))) == near.read(range(len(near)))
    copy.close()
    same(*both(ODD, "record"))


@pytest.mark.parametrize("piece", [1, 3, 6])
def test_pieces_may_end_anywhere(both: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "PIECE", piece)
    records = {name: RECORDS[name] for name in ("a.jsonl", "b.json", "c.csv", "d.tsv")}
    for unit, texts in (("line", LINES), ("record", records)):
        some = {name: data for name, data in texts.items() if len(data) < 100}
        if piece < 3:  # the first one holds a mark whole
            some = {name: data for name, data in some.items() if data[:1] != b"\xef"}
        same(*both(some, unit))


def test_each_byte_is_fetched_once_of_each_version(both: Any, server: RangeServer) -> None:
    contents = {f"{n}.csv": b"a,b\n\n" + b"1,2\n\n" * n for n in range(9)}
    contents |= {"x.jsonl": b"{}\n\n" * 99, "y.json": b"[1, 2]"}
    contents["z.jsonl.gz"] = packed(b"{}\n" * 1000, ".gz")
    far = both(contents, "record")[1]
    said = server.counts()
    assert said["bytes"] == sum(map(len, contents.values()))
    assert len(said["ranges"]) == len(contents)
    assert far._table.path
    near, far = both(contents, "record")
    assert server.counts()["ranges"] == []  # the table was kept, and the copy
    same(near, far)
    assert not far.is_remote  # one is compressed, so all are read from copies
    server.counts()
    contents["x.jsonl"] = b"{}\n"
    same(*both(contents, "record"))
