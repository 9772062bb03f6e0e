"""Lines and records of remote texts are those of a local copy, with each byte fetched once."""

from __future__ import annotations

import gc
import gzip
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import (
    AccessError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    RemoteError,
)
from headrace.io import sequential as in_order
from headrace.io.index import index_bytes
from headrace.io.ranges import coalesce
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.storage.text import source as texts
from headrace.storage.text.files import local_texts, remote_texts
from headrace.storage.text.index import INDEX
from headrace.storage.text.source import LinesSource
from tests.io.resolve.scanning import scan
from tests.servers.ranges import RangeServer
from tests.storage.text.test_plain import packed

pytestmark = pytest.mark.quick_every(2)

ENDINGS = [".txt", ".csv", ".tsv", ".jsonl", ".json", ".gz", ".zst"]
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
    "a.csv": b"a,b\n1,2\n",
    "b.csv": b'a,b\nan inch is 1",2\n"x\ny",3\n',
    "c.csv": b'a\n"1\n2"\n\n3\n',
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def running(served: Path) -> Iterator[RangeServer]:
    with RangeServer(served) as server:
        yield server


@pytest.fixture
def server(running: RangeServer, served: Path) -> RangeServer:
    for path in served.iterdir():
        path.unlink()
    running.set(latency=0, bandwidth=0, faults={}, seed=1)
    running.counts()
    return running


@pytest.fixture
def both(
    server: RangeServer, served: Path, tmp_path: Path
) -> Iterator[Callable[..., tuple[LinesSource, LinesSource]]]:
    """Writes files, and opens them near and far."""
    made: list[Any] = []

    def make(
        contents: dict[str, bytes],
        unit: str = "line",
        newline: Any = None,
        encoding: str = "utf-8",
        **reach: Any,
    ) -> Any:
        for name, content in contents.items():
            # else it would be of a new time
            if not (served / name).exists() or (served / name).read_bytes() != content:
                (served / name).write_bytes(content)
        reach = {"cache_dir": tmp_path / "far", "retries": 20, **reach}
        there = remote_texts(
            [f"{server.url}/{name}" for name in contents], ENDINGS, RemoteOptions(**reach)
        )
        made.append(there.files)
        far = LinesSource(there, unit, newline, encoding, "strict", tmp_path / "far")
        here = local_texts(scan([served / name for name in contents], ENDINGS))
        near = LinesSource(
            here, unit, newline, encoding, "strict", tmp_path / "near", is_kept=False
        )
        made.append(near)
        return near, far

    yield make
    for source in made:
        source.close()


def same(near: LinesSource, far: LinesSource) -> None:
    count = len(near)
    assert (
        len(far) == count
        and far.fingerprint() == near.fingerprint()
        and far.headers == near.headers
    )
    assert far.read(range(count)) == near.read(range(count))
    some = random.Random(1).choices(range(count), k=50 if count else 0)
    assert far.read(some) == near.read(some)
    for name in ("blocks", "nbytes", "file_numbers"):
        assert np.array_equal(getattr(far, name)(), getattr(near, name)())
    assert sum(far.blocks()) == count
    assert [far.offset_of(n) for n in range(count)] == [near.offset_of(n) for n in range(count)]
    assert [far.location(n).rpartition("/")[2] for n in range(count)] == [
        near.location(n).rpartition("/")[2] for n in range(count)
    ]
    assert not count or far.location(0).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("newline", [None, "\n", "\r", "\r\n"])
def test_the_same_lines(both: Any, newline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "PIECE", 1000)
    monkeypatch.setattr(texts, "block_length", lambda _: 16)
    same(*both(LINES, newline=newline))


@pytest.mark.parametrize("piece", [1, 6])
def test_pieces_may_end_anywhere(both: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "PIECE", piece)
    same(*both({name: data for name, data in LINES.items() if len(data) < 100}))
    same(*both({name: RECORDS[name] for name in ("a.jsonl", "b.json", "c.csv", "d.tsv")}, "record"))


def test_the_same_records(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "block_length", lambda _: 10)
    near, far = both(RECORDS, "record")
    same(near, far)
    assert far.fields(0, far.read([0])[0].decode()) == {"a": 1}


def test_tables_with_quotes_inside_of_fields(both: Any) -> None:
    same(*both(ODD, "record"))
    same(*both({"z.csv": b'a,b\nan inch is 1",2\n'}, "record"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1", "utf-32", "cp037"])
def test_encodings(both: Any, encoding: str) -> None:
    text = "grün\nund\r\nblau\rrot\n\n"
    same(
        *both(
            {"1.txt": text.encode(encoding), "2.txt.gz": packed(text.encode(encoding), ".gz")},
            encoding=encoding,
        )
    )


def test_each_byte_is_fetched_once_and_never_again(both: Any, server: RangeServer) -> None:
    contents = {f"{n}.csv": b"a,b\n\n" + b"1,2\n\n" * n for n in range(9)} | {
        "x.jsonl": b"{}\n\n" * 99,
        "y.json": b"[1, 2]",
    }
    near, far = both(contents, "record")
    said = server.counts()
    assert said["bytes"] == sum(map(len, contents.values()))
    assert len(said["ranges"]) == len(contents)
    assert far._table.path is not None
    far = both(contents, "record")[1]
    assert server.counts()["ranges"] == []  # the table was kept
    same(near, far)


def test_a_changed_file_is_another_one(both: Any) -> None:
    assert len(both({"a.txt": b"1\n2\n"})[1]) == 2
    near, far = both({"a.txt": b"1\n2\n3\n"})
    assert len(far) == 3
    same(near, far)


def test_a_batch_takes_few_requests(both: Any, server: RangeServer) -> None:
    _, far = both({"a.txt": b"0123456789\n" * 50_000})
    server.counts()
    far.read(range(1000, 2000))
    assert len(server.counts()["ranges"]) == 1
    ranges = far.byte_ranges(np.arange(1000, 3000))
    assert list(coalesce(ranges, 0).ranges.each()) == [(far._read_paths[0], 11_000, 33_000)]
    assert far.byte_ranges(np.empty(0, np.int64)).size == 0
    far.files.hold_prefetched(1 << 20)
    far.files.prefetch([ranges])
    assert (
        far.read(range(1000, 2000)) == far.read(range(2000, 3000))
        and far.files.bytes_prefetched == 0
    )
    assert len(server.counts()["ranges"]) == 1 and far.stored_nbytes == 550_000


def test_in_a_pickle(both: Any) -> None:
    near, far = both(LINES)
    copy = pickle.loads(pickle.dumps(far))
    assert copy.read(range(len(near))) == near.read(range(len(near)))
    copy.close()


def test_of_faults_nothing_is_seen(
    both: Any, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    monkeypatch.setattr(in_order, "PIECE", 200)
    server.set(faults={kind: 0.05 for kind in ("500", "503", "429", "reset", "short", "less")})
    near, far = both(LINES, retries=30)
    assert far.take_counts()["retries"] > 0
    same(near, far)


def test_a_server_that_only_fails(both: Any, server: RangeServer) -> None:
    server.set(faults={"503": 1})
    with pytest.raises(RemoteError, match=r"a.txt(.index)?: 2 attempts in .* the server says 503"):
        both({"a.txt": b"1\n"}, retries=1)
    server.set(faults={})
    _, far = both({"a.txt": b"1\n"}, retries=1)
    server.set(faults={"503": 1})
    with pytest.raises(RemoteError, match=r"a.txt, bytes 0 to 2: 2 attempts"):
        far.read([0])


def test_a_file_that_is_missing(server: RangeServer, both: Any) -> None:
    with pytest.raises(DataNotFoundError, match=r"gone.txt: there is no such file"):
        remote_texts(server.url + "/gone.txt", ENDINGS, RemoteOptions())


def test_a_file_that_is_replaced(both: Any, served: Path) -> None:
    _, far = both({"a.txt": b"1\n2\n"})
    assert far.read([0]) == [b"1"]
    (served / "a.txt").write_bytes(b"3\n4\n")
    with pytest.raises(FileChangedError, match=r"a.txt, bytes 2 to 4: the file has been replaced"):
        far.read([1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", r"a.csv: it is empty: a CSV or TSV file begins with a line of field names"),
        ("a.csv", b'a\n"1', r"a.csv: line 2: unexpected end of data"),
        ("a.json", b'[{"a": 1}, {]', r"a.json: record 2 at byte 11 is no JSON"),
        ("a.txt", b"", r"a.txt: records are read from .csv, .tsv, .json, .jsonl"),
        (
            "a.jsonl.gz",
            packed(b"{}\n" * 99, ".gz")[:-9],
            r"a.jsonl.gz is cut short: the end of its gzip stream is missing",
        ),
        (
            "a.jsonl.zst",
            packed(b"{}\n" * 99, ".zst")[:-1],
            r"a.jsonl.zst is cut short: the end of its zstd frame is missing",
        ),
        ("a.jsonl.gz", b"nonsense, and no gzip", r"a.jsonl.gz is no sound gzip file"),
    ],
    ids=["empty", "open quote", "no json", "no records", "short gzip", "short zstd", "no gzip"],
)
def test_what_is_damaged_is_named(
    both: Any, server: RangeServer, name: str, content: bytes, said: str
) -> None:
    with pytest.raises(FormatError, match=f"^http://127.0.0.1:.*{said}"):
        both({name: content}, "record")


# -- plain copies


def test_a_copy_is_made_once(both: Any, server: RangeServer, tmp_path: Path) -> None:
    content = {
        "a.txt.gz": packed(b"line\n" * 1000, ".gz"),
        "b.txt.zst": packed(b"line\n" * 1000, ".zst"),
    }
    both(content)
    server.counts()
    near, far = both(content)
    same(near, far)
    assert (
        server.counts()["ranges"] == []
        and far.byte_ranges(np.arange(len(far))).size == 0
        and far.stored_nbytes == 0
    )
    both({"a.txt.gz": packed(b"more\n" * 1000, ".gz")})
    assert len(server.counts()["ranges"]) == 1


def test_what_is_damaged_on_the_way_is_fetched_again(
    both: Any, server: RangeServer, served: Path, tmp_path: Path
) -> None:
    data = gzip.compress(
        b"\n".join(
            random.Random(0).randbytes(9).replace(b"\n", b"").replace(b"\r", b"")
            for _ in range(500)
        )
    )
    (served / "a.txt.gz").write_bytes(data)
    there = remote_texts(
        server.url + "/a.txt.gz", ENDINGS, RemoteOptions(cache_dir=tmp_path, disk_cache_size="10MB")
    )
    server.counts()
    server.set(faults={"wrong": 1})
    with pytest.raises(FormatError, match=r"^http://.*a.txt.gz "):
        LinesSource(there, "line", None, "utf-8", "strict", tmp_path)
    assert server.counts()["faults"] == {"wrong": 2} and not list(tmp_path.glob("headrace-plain*"))
    server.set(faults={})  # what is kept on the disk is wrong by now
    source = LinesSource(there, "line", None, "utf-8", "strict", tmp_path)
    assert b"\n".join(source.read(range(len(source)))) == gzip.decompress(data)
    source.close()


def test_read_only_cache_refuses_copies_and_holds_tables(
    both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").write_bytes(b"a file, and no folder")
    with pytest.raises(
        AccessError,
        match=(
            r"^http://.*a.txt.gz is read through a plain copy of its text, in .*: pass another "
            r"cache_dir="
        ),
    ):
        both({"a.txt.gz": packed(b"1\n", ".gz")})
    with pytest.warns(
        HeadraceWarning, match=r"the table of lines is not kept \(.*\), so it is held in memory"
    ):
        near, far = both({"a.txt": b"1\n2\n"})
    same(near, far)


def _open_in_child(url: str, folder: str, pipe: Any) -> None:
    there = remote_texts(url, ENDINGS, RemoteOptions(cache_dir=folder))
    pipe.send(LinesSource(there, "line", None, "utf-8", "strict", Path(folder)).read([0, 1]))
    there.files.close()


@pytest.fixture
def context() -> Any:
    """Children of a process without garbage: fsspec's file systems take a tenth of a second each
    to be collected in a child.
    """
    gc.collect()
    return multiprocessing.get_context("fork")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_of_processes_that_start_at_once_one_fetches(
    server: RangeServer, served: Path, tmp_path: Path, context: Any, name: str
) -> None:
    data = bytes(random.Random(0).choices(b"abcdefgh\n", k=300_000))
    (served / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    server.set(bandwidth=2_000_000)
    pipes = [context.Pipe() for _ in range(3)]
    children = [
        context.Process(
            target=_open_in_child, args=(f"{server.url}/{name}", str(tmp_path / "far"), theirs)
        )
        for _, theirs in pipes
    ]
    for child in children:
        child.start()
    expected = data.split(b"\n")[:2]
    for ours, _ in pipes:
        assert ours.poll(60) and ours.recv() == expected
    for child in children:
        child.join()
    whole = [stop - start for _, start, stop in server.counts()["ranges"] if stop - start > 1000]
    assert sum(whole) == (served / name).stat().st_size


@pytest.mark.slow
def test_a_killed_maker_keeps_nobody(
    server: RangeServer, served: Path, tmp_path: Path, context: Any
) -> None:
    (served / "a.txt.gz").write_bytes(gzip.compress(random.Random(0).randbytes(300_000)))
    server.set(bandwidth=200_000)
    ours, theirs = context.Pipe()
    arguments = (server.url + "/a.txt.gz", str(tmp_path / "far"), theirs)
    child = context.Process(target=_open_in_child, args=arguments)
    child.start()
    end = time.monotonic() + 30
    while not list((tmp_path / "far").glob("headrace-plain-*.part")) and time.monotonic() < end:
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    server.set(bandwidth=0)
    second = context.Process(target=_open_in_child, args=arguments)
    second.start()
    assert ours.poll(30) and len(ours.recv()) == 2
    second.join()


# -- which files


def test_a_listing_in_memory(memory: Any, tmp_path: Path) -> None:
    contents = {
        "b/2.txt": b"three\n",
        "a/1.txt": b"one\ntwo\n",
        "a/1.bin": b"nothing",
        "c.jsonl": b"{}\n",
    }
    for name, content in contents.items():
        memory.pipe(f"/texts/{name}", content)
    for path, lines in (
        ("memory://texts", [b"one", b"two", b"three", b"{}"]),
        ("memory://texts/", [b"one", b"two", b"three", b"{}"]),
        ("memory://texts/*/*.txt", [b"one", b"two", b"three"]),
        (["memory://texts/c.jsonl", "memory://texts/a"], [b"one", b"two", b"{}"]),
    ):
        there = remote_texts(path, ENDINGS, RemoteOptions(cache_dir=tmp_path))
        source = LinesSource(there, "line", None, "utf-8", "strict", tmp_path)
        assert source.read(range(len(source))) == lines
        assert source.location(0).startswith("memory://texts/")
        source.close()
    memory.makedirs("/texts/folder.txt")
    with pytest.raises(
        DataNotFoundError, match=r"memory://texts/folder.txt is a folder with the name of a file"
    ):
        remote_texts("memory://texts/folder.txt", ENDINGS, RemoteOptions(cache_dir=tmp_path))


def test_secrets_are_not_shown_and_don_t_count(
    server: RangeServer, served: Path, tmp_path: Path
) -> None:
    (served / "a.jsonl.gz").write_bytes(packed(b"{}\n", ".gz"))
    (served / "b.jsonl").write_bytes(b"{}\n")
    found = []
    for key in ("one", "two"):
        urls = [f"{server.url}/{name}?signature={key}" for name in ("a.jsonl.gz", "b.jsonl")]
        there = remote_texts(urls, ENDINGS, RemoteOptions(cache_dir=tmp_path))
        source = LinesSource(there, "record", None, "utf-8", "strict", tmp_path)
        assert "signature" not in "".join(
            [source.location(0), source.location(1), *source.how().values()]
        )
        found.append((source.fingerprint(), source.read([0, 1])))
        source.close()
    assert found[0] == found[1] and len(list(tmp_path.glob("headrace-plain-*"))) == 1


# -- what lies beside a text


def indexed(served: Path, contents: dict[str, bytes], files: Any, url: str) -> None:
    for name, content in contents.items():
        (served / name).write_bytes(content)
        found = index_bytes(INDEX.make(files, f"{url}/{name}"), INDEX, len(content))
        (served / f"{name}.index").write_bytes(found)


@pytest.mark.parametrize("unit", ["line", "record"])
def test_an_index_beside_each_text(both: Any, server: RangeServer, served: Path, unit: str) -> None:
    contents = {
        name: data
        for name, data in (LINES | ODD if unit == "line" else RECORDS | ODD).items()
        if not name.endswith(("gz", "zst"))
    }
    contents["long.txt" if unit == "line" else "long.jsonl"] = (
        b"{}" * 40_000 + b"\n" + b"[]\n" * 300_000
    )
    maker = RemoteFiles(server.url, RemoteOptions())
    indexed(served, contents, maker, server.url)
    maker.close()
    server.counts()
    if unit == "line":
        contents = {name: data for name, data in contents.items() if name.endswith("txt")}
    near, far = both(contents, unit)
    # an empty one, of which it is asked whether it is a folder
    fetched = {name for name, _, _ in server.counts()["ranges"]} - {"2.txt"}
    assert fetched == {f"{name}.index" for name in contents}
    assert (
        len(far) == len(near)
        and far.read(range(50)) == near.read(range(50))
        and far.headers == near.headers
    )
    assert np.array_equal(far.nbytes(), near.nbytes()) and np.array_equal(
        far.blocks(), near.blocks()
    )
    other = both(contents, unit, newline="\n")
    assert len(other[0]) == len(other[1]) and {
        name for name, _, _ in server.counts()["ranges"]
    } >= set(contents) - {"2.txt"}


def test_an_index_of_another_text_is_not_used(both: Any, server: RangeServer, served: Path) -> None:
    maker = RemoteFiles(server.url, RemoteOptions())
    indexed(served, {"a.txt": b"1\n2\n"}, maker, server.url)
    with pytest.warns(
        HeadraceWarning,
        match=(
            r"a.txt: the index beside it is not used: it is of another version, or about "
            r"something else"
        ),
    ):
        same(*both({"a.txt": b"1\n2\n3\n"}))
    (served / "a.txt.index").write_bytes(
        index_bytes([np.frombuffer(b"{}", np.uint8)] * 2 + [np.empty(0, np.int64)], INDEX, 8)
    )
    with pytest.warns(
        HeadraceWarning, match=r"a.txt: the index beside it is not used: it is damaged"
    ):
        same(*both({"a.txt": b"1\n2\n3\n4\n"}))
    with pytest.raises(FormatError, match=r"a.txt.gz is compressed: .* has no use for an index"):
        INDEX.make(maker, server.url + "/a.txt.gz")
    maker.close()
