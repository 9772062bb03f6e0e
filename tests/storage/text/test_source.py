"""Lines and records of many files are read at random as they stand there, by whichever table."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import AccessError, FileChangedError, FormatError, HeadraceWarning
from headrace.io.array_file import HEAD
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit
from headrace.storage.text import plain
from headrace.storage.text import source as texts
from headrace.storage.text.files import local_texts
from headrace.storage.text.plain import Room
from headrace.storage.text.source import LinesSource
from tests.io.resolve.scanning import scan
from tests.storage.text.test_plain import packed

ENDINGS = [".txt", ".csv", ".jsonl", ".json", ".gz", ".zst"]
CONTENTS = {
    "a/1.txt": b"one\ntwo\r\n\r\nthree\rfour",
    "a/2.txt": b"",
    "b/1.txt": b"\xef\xbb\xbfmarked\n\xef\xbb\xbfnot the first\n",
    "b/2.txt.gz": packed(b"\xef\xbb\xbfpacked\n\nlines\n", ".gz"),
    "c.txt": b"\n",
    "d.txt": b"\xef\xbb\xbf",
    "e.txt.zst": packed(b"", ".zst"),
    "f.txt": b"nul\0byte\n\xff bad\n",
}
LINES = [
    b"one",
    b"two",
    b"",
    b"three",
    b"four",
    b"marked",
    b"\xef\xbb\xbfnot the first",
    b"packed",
    b"",
    b"lines",
    b"",
    b"nul\0byte",
    b"\xff bad",
]
FILES = [0] * 5 + [2] * 2 + [3] * 3 + [4] + [7] * 2
WHERE = [*range(1, 6), 1, 2, 1, 2, 3, 1, 1, 2]
OFFSETS = [0, 4, 9, 11, 17, 3, 10, 3, 10, 11, 0, 0, 9]


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def opened(
    folder: Path, unit: str = "line", cache_dir: Path | None = None, **options: Any
) -> LinesSource:
    given = {"newline": None, "encoding": "utf-8", "errors": "strict", **options}
    cache = cache_dir or folder.parent / f"{folder.name}-cache"
    of_text = given.pop("newline"), given.pop("encoding"), given.pop("errors")
    return LinesSource(
        local_texts(scan(folder, ENDINGS)),
        unit,
        *of_text,
        cache,
        is_kept=cache_dir is not None,
        **given,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "data", CONTENTS)


@pytest.mark.parametrize("kept", [False, True])
class TestLines:
    @pytest.fixture
    def source(self, folder: Path, kept: bool, tmp_path: Path) -> LinesSource:
        source = opened(folder, cache_dir=tmp_path / "kept" if kept else None)
        assert (source._table.path is not None) == kept
        return source

    def test_in_any_order(self, source: LinesSource) -> None:
        assert len(source) == len(LINES)
        order = random.Random(1).choices(range(len(LINES)), k=200)
        assert source.read(order) == [LINES[n] for n in order]
        assert source.read([]) == [] and source.read(range(len(LINES))) == LINES

    def test_what_is_said_of_each(self, source: LinesSource, folder: Path) -> None:
        names = sorted(CONTENTS, key=lambda name: name.split("/"))
        assert source.file_numbers().tolist() == FILES
        assert [source.location(n) for n in range(len(LINES))] == [
            f"{folder / names[file]}, line {line}" for file, line in zip(FILES, WHERE, strict=True)
        ]
        assert [source.offset_of(n) for n in range(len(LINES))] == OFFSETS
        assert source.nbytes().tolist() == [4, 5, 2, 6, 4, 7, 17, 7, 1, 6, 1, 9, 6]
        assert "13 of 8 files, 2 of them through plain copies" in source.how()["lines"]

    def test_in_another_process(self, source: LinesSource) -> None:
        state = pickle.dumps(source)
        assert len(state) < 9000 and pickle.loads(state).read(range(len(LINES))) == LINES

    def test_found_again(
        self,
        source: LinesSource,
        folder: Path,
        kept: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        made = 0

        def scan_again(*args: Any) -> Any:
            nonlocal made
            made += 1
            return texts_scan(*args)

        texts_scan = texts.Scan
        monkeypatch.setattr(texts, "Scan", scan_again)
        again = opened(folder, cache_dir=tmp_path / "kept" if kept else None)
        assert again.read(range(len(LINES))) == LINES and made == (0 if kept else 1)
        assert again.fingerprint() == source.fingerprint()
        (folder / "c.txt").write_bytes(b"other\nlines\n")
        changed = opened(folder, cache_dir=tmp_path / "kept" if kept else None)
        assert (
            changed.read(range(10, 12)) == [b"other", b"lines"]
            and changed.fingerprint() != source.fingerprint()
        )


@settings(max_examples=40, deadline=None)
@given(
    contents=st.lists(st.text(st.sampled_from('{}1 \n\r,"'), max_size=12), min_size=1, max_size=4),
    newline=st.sampled_from([None, "\n", "\r", "\r\n"]),
    kept=st.booleans(),
)
def test_generated_files(
    contents: list[str], newline: Any, kept: bool, tmp_path_factory: Any
) -> None:
    folder = write(
        tmp_path_factory.mktemp("generated") / "data",
        {f"{n}.txt": text.encode() for n, text in enumerate(contents)},
    )
    expected = []
    for number in range(len(contents)):
        with open(folder / f"{number}.txt", newline="" if newline is None else newline) as file:
            expected += [
                (number, line.removesuffix(newline) if newline else line.rstrip("\r\n"))
                for line in file
            ]
    source = opened(folder, newline=newline, cache_dir=folder.parent / "kept" if kept else None)
    found = source.read(range(len(source)))
    assert [
        (n, line.decode()) for n, line in zip(source.file_numbers().tolist(), found, strict=True)
    ] == expected
    source.close()


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(
        st.lists(st.sampled_from(["", "1", "{}", '{"a": 2}', "\r", "0"]), max_size=6),
        min_size=1,
        max_size=3,
    )
)
def test_blank_lines_between_records(files: list[list[str]], tmp_path_factory: Any) -> None:
    folder = write(
        tmp_path_factory.mktemp("blank") / "data",
        {f"{n}.jsonl": "\n".join(rows).encode() for n, rows in enumerate(files)},
    )
    expected = [
        (number, line, row, len(row) + (line < len(rows)))
        for number, rows in enumerate(files)
        for line, row in enumerate(rows, 1)
        if row.strip("\r")
    ]
    source = opened(folder, "record")
    assert len(source) == len(expected)
    assert [record.decode() for record in source.read(range(len(source)))] == [
        row for _, _, row, _ in expected
    ]
    assert source.file_numbers().tolist() == [number for number, *_ in expected]
    assert [source.location(n) for n in range(len(source))] == [
        f"{folder}/{number}.jsonl, line {line}" for number, line, *_ in expected
    ]
    assert source.nbytes().tolist() == [size for *_, size in expected]
    source.close()


def test_records_of_every_kind_together(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "data",
        {
            "a.csv": b'\nid,text\n1,"a\nb"\n\n2,c\n',
            "b.csv": b"\xef\xbb\xbftext,id\r\nd,3\r\n",
            "c.json": b'\xef\xbb\xbf [{"id": 4, "text": "e"}, {"id": 5, "text": "f"}] ',
            "d.jsonl": b'\xef\xbb\xbf{"id": 6}\n\n{"id": 7}',
            "e.json": b"[]",
            "f.jsonl.gz": packed(b'{"id": 8}\n', ".gz"),
        },
    )
    source = opened(folder, "record")
    found = [
        source.fields(n, record.decode())
        for n, record in enumerate(source.read(range(len(source))))
    ]
    assert [int(row["id"]) for row in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row.get("text") for row in found[:5]] == ["a\nb", "c", "d", "e", "f"]
    places = [
        "a.csv, record 1",
        "a.csv, record 2",
        "b.csv, record 1",
        "c.json, record 1",
        "c.json, record 2",
    ]
    places += ["d.jsonl, line 1", "d.jsonl, line 3", "f.jsonl.gz, line 1"]
    assert [source.location(n) for n in range(8)] == [f"{folder}/{place}" for place in places]


class TestWhileOpen:
    def test_a_file_that_is_changed(self, folder: Path) -> None:
        source = opened(folder)
        assert source.read([0]) == [b"one"]
        for content in (b"on", b"ONE\ntwo\r\n\r\nthree\rfour"):  # shorter; as long, and later
            (folder / "a/1.txt").write_bytes(content)
            os.utime(folder / "a/1.txt", (1, 1))
            with pytest.raises(
                FileChangedError,
                match=r"1.txt has been changed since it was opened: open the dataset again",
            ):
                source.read([1])
        assert source.read([5]) == [b"marked"]

    def test_a_file_that_is_replaced_or_removed(self, folder: Path) -> None:
        """One that is open already is read on as it was."""
        source, other, third = opened(folder), opened(folder), opened(folder)
        assert source.read([0]) == [b"one"]
        (folder / "new").write_bytes(b"NEW\nNEW\r\n\r\nthree\rfour")
        os.replace(folder / "new", folder / "a/1.txt")
        assert source.read([1]) == [b"two"]
        with pytest.raises(FileChangedError, match="has been changed"):
            other.read([1])
        os.unlink(folder / "a/1.txt")
        assert source.read([1]) == [b"two"]
        with pytest.raises(FileNotFoundError):
            third.read([1])

    def test_a_copy_that_another_process_made_again(self, folder: Path) -> None:
        first = opened(folder)
        for copy in Path(first._cache_dir).iterdir():
            copy.unlink()
        opened(folder)  # as one that began at the same time
        assert first.read([7, 9]) == [b"packed", b"lines"]

    def test_shorter_than_the_system_said(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Cut between the look at it and the read; or the system gives less than it was asked
        for.
        """
        source, real = opened(folder), os.pread
        monkeypatch.setattr(os, "pread", lambda fd, size, at: real(fd, min(size, 2), at))
        assert source.read(range(len(LINES))) == LINES
        monkeypatch.setattr(os, "pread", lambda fd, size, at: b"")
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: 0)
        with pytest.raises(FormatError, match="ends before byte"):
            source.read([0])

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_permission_revoked(self, folder: Path) -> None:
        source = opened(folder)
        (folder / "a/1.txt").chmod(0)
        with pytest.raises(PermissionError):
            source.read([0])
        with pytest.raises(AccessError, match=r"1.txt can't be read"):
            opened(folder)


class TestTables:
    @pytest.mark.parametrize("why", ["file", "full"])
    def test_where_none_can_be_kept(
        self, folder: Path, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("b/2.txt.gz", "e.txt.zst"):
            (folder / name).unlink()
        kept = tmp_path / "kept"
        if why == "file":
            kept.write_text("no folder")
        else:

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("headrace.io.array_file.ArrayWriter.write", full)
        with pytest.warns(
            HeadraceWarning, match="cache_dir=.*kept.*is not kept.*made at every start"
        ):
            source = opened(folder, cache_dir=kept)
        assert source.read(range(5)) == LINES[:5]
        assert why == "file" or not list(Path(kept).glob("headrace-[!m]*"))

    def test_a_damaged_one_is_made_anew(self, folder: Path, tmp_path: Path) -> None:
        path = Path(opened(folder, cache_dir=tmp_path / "kept")._table.path or "")
        good = path.read_bytes()
        # where groups begin; a place that is noted; a distance
        for place in (-1, HEAD + 3, HEAD + 600):
            damaged = bytearray(good)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            assert opened(folder, cache_dir=tmp_path / "kept").read(range(len(LINES))) == LINES
            assert path.read_bytes() == good

    def test_one_of_another_version_is_not_looked_at(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(texts, "_VERSION", texts._VERSION - 1)
            old = opened(folder, cache_dir=tmp_path / "kept")._table.path
        source = opened(folder, cache_dir=tmp_path / "kept")
        assert source._table.path != old and source.read(range(len(LINES))) == LINES

    def test_an_error_of_a_text_is_told_once(
        self, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        """And not taken for one of the folder."""
        write(tmp_path / "data", {"a.csv": b'x,y\n"open'})
        with pytest.raises(FormatError, match=r"a.csv: line 2: unexpected end of data"):
            opened(tmp_path / "data", "record", tmp_path / "kept")
        assert not len(recwarn) and not list((tmp_path / "kept").glob("headrace-[!m]*"))

    def test_a_large_one_is_kept_without_being_told(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(texts, "KEPT_FROM", 10)
        source = opened(folder)
        assert source._table.path and source.read(range(len(LINES))) == LINES

    def test_two_processes_at_once(self, folder: Path, tmp_path: Path) -> None:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(3) as pool:
            found = pool.starmap(_read_all, [(folder, tmp_path / "kept")] * 9, chunksize=1)
            pool.close()
            pool.join()
        assert found == [LINES] * 9
        assert len(list((tmp_path / "kept").glob("headrace-[!m]*"))) == 3  # a table, two copies

    def test_killed_while_indexing(self, folder: Path, tmp_path: Path) -> None:
        import multiprocessing

        (folder / "large.txt").write_bytes(b"a line\n" * 500_000)
        child = multiprocessing.get_context("fork").Process(
            target=_index_slowly, args=(folder, tmp_path / "kept")
        )
        child.start()
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("kept/headrace-lines-*.part")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        (left,) = tmp_path.glob("kept/*.part")
        source = opened(folder, cache_dir=tmp_path / "kept")
        assert len(source) == len(LINES) + 500_000 and source.read([len(source) - 1]) == [b"a line"]
        os.utime(left, (time.time() - 4000, time.time() - 4000))
        (folder / "large.txt").unlink()
        opened(folder, cache_dir=tmp_path / "kept")
        assert not left.exists()


def _read_all(folder: Path, kept: Path) -> list[bytes]:
    source = opened(folder, cache_dir=kept)
    return source.read(range(len(source)))


def _index_slowly(folder: Path, kept: Path) -> None:
    real = texts.Scan._file

    def slow(*args: Any) -> Any:
        for places in real(*args):
            yield places
            time.sleep(0.2)

    texts.Scan._file = slow  # type: ignore[method-assign]
    opened(folder, cache_dir=kept)


class TestLargeLines:
    def test_one_that_does_not_fit_is_refused_unread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plain, "LARGE", 1 << 20)
        room = Room(MemoryBudget("12MB", limits=[Limit("a machine", 10**9, 0)]))
        with open(tmp_path / "a.txt", "wb") as file:
            file.write(b"one\n")
            file.truncate(5 << 20)
            file.seek(0, os.SEEK_END)
            file.write(b"\nthree\n")
        source = opened(tmp_path / "a.txt", room=room)
        assert len(source) == 3 and source.read([0, 2]) == [b"one", b"three"]
        monkeypatch.setattr(os, "pread", None)  # it is not even begun
        with pytest.raises(
            FormatError,
            match=r"a text of 5.2 MB.*leaves room for 3.0 MB: split it, or raise max_memory_usage",
        ):
            source.read([0, 1])

    @pytest.mark.parametrize("name", ["a.json", "a.csv"])
    def test_what_must_be_read_at_the_start(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plain, "LARGE", 1 << 20)
        room = Room(MemoryBudget("12MB", limits=[Limit("a machine", 10**9, 0)]))
        (tmp_path / name).write_bytes(b"[" + b" " * (5 << 20))
        with pytest.raises(
            FormatError, match=f"{name}: a text of .* is too large for the memory budget"
        ):
            opened(tmp_path / name, "record", room=room)

    @pytest.mark.slow
    def test_a_line_of_more_than_2_gb(self, tmp_path: Path) -> None:
        """Indexed within some MB of memory, and refused; where there is room, it is read: one
        call gives no more than 2 GiB.
        """
        size = (2 << 30) + 5000
        with open(tmp_path / "a.txt", "wb") as file:
            file.write(b"one\n")
            file.truncate(4 + size)
            file.seek(0, os.SEEK_END)
            file.write(b"\nthree\n")
        code = f"""
            import numpy, os, resource
            from headrace import TextDataset
            kept = {str(tmp_path / "kept")!r}
            dataset = TextDataset(
                {str(tmp_path)!r}, unit="line", cache_dir=kept, max_memory_usage="1GB"
            )
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert len(dataset) == 3
            assert dataset[2]["input_ids"].tolist() == [ord(c) + 2 for c in "three"]
            try:
                dataset[1]
            except OSError as error:
                print(error)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
        """
        assert "a.txt, line 2: a text of 2.1 GB" in run(code)
        source = opened(tmp_path / "a.txt")
        (line,) = source.read([1])
        assert len(line) == size and not np.frombuffer(line, np.uint8).any()


def run(code: str) -> str:
    """What a Python process of its own prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl", "txt.gz", "utf16.txt", "quoted.csv"])
def test_indexing_a_large_file_takes_little_memory(kind: str, tmp_path: Path) -> None:
    """Of 300 MB, with a table that is kept."""
    rows = {
        "csv": '%d,"a text, and more of it"\n',
        "jsonl": '{"id": %d, "text": "a text, and more of it"}\n\n',
        "quoted.csv": '%d,a 5" disk\n',
    }
    row = rows.get(kind, "line %d of a text, and more of it\n")
    some = "".join(row % n for n in range(30_000)).encode(
        "utf-16-le" if kind == "utf16.txt" else "utf-8"
    )
    path, target = tmp_path / f"a.{kind}", (300 << 20) if kind != "quoted.csv" else (60 << 20)
    import gzip

    with gzip.open(path, "wb", compresslevel=1) if kind == "txt.gz" else open(path, "wb") as file:
        if kind.endswith("csv"):
            file.write(b"id,text\n")
        for _ in range(target // len(some)):
            file.write(some)
    small = write(tmp_path / "small", {"a.csv": b"text", "b.jsonl": b""})
    code = f"""
        import resource
        from headrace import TextDataset
        from headrace.storage.text import source as texts  # imports are not counted
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        TextDataset({str(small)!r}, unit="record", cache_dir={str(tmp_path / "k")!r})
        before = peak()
        unit = "record" if {kind!r}.endswith(("csv", "jsonl")) else "line"
        encoding = "utf-16-le" if "utf16" in {kind!r} else "utf-8"
        kept = {str(tmp_path / "kept")!r}
        dataset = TextDataset({str(path)!r}, unit=unit, encoding=encoding, cache_dir=kept)
        print(len(dataset), peak() - before)
    """
    count, grown = map(int, run(code).split())
    assert count == target // len(some) * 30_000
    # Pages of mapped files count as the process's own, though the system may take them back at any
    # time: the first look maps the table.
    assert grown < 50_000, f"{grown} kB"
