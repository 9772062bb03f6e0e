"""Lines and records of many files are read at random as they stand there, by whichever table."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from headrace.errors import AccessError, FileChangedError, FormatError
from headrace.formats.text import index, plain
from headrace.formats.text.source import LinesSource
from headrace.io.remote.options import RemoteOptions
from tests.formats.text.test_plain import budget_of, packed

pytestmark = pytest.mark.usefixtures("own_cache")

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
PLACES = [
    (b"one", "a/1.txt, line 1", 0, 4),
    (b"two", "a/1.txt, line 2", 4, 5),
    (b"", "a/1.txt, line 3", 9, 2),
    (b"three", "a/1.txt, line 4", 11, 6),
    (b"four", "a/1.txt, line 5", 17, 4),
    (b"marked", "b/1.txt, line 1", 3, 7),
    (b"\xef\xbb\xbfnot the first", "b/1.txt, line 2", 10, 17),
    (b"packed", "b/2.txt.gz, line 1", 3, 7),
    (b"", "b/2.txt.gz, line 2", 10, 1),
    (b"lines", "b/2.txt.gz, line 3", 11, 6),
    (b"", "c.txt, line 1", 0, 1),
    (b"nul\0byte", "f.txt, line 1", 0, 9),
    (b"\xff bad", "f.txt, line 2", 9, 6),
]
"""Lines, where they are, at which byte, and how long with their end."""
LINES = [line for line, *_ in PLACES]


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def opened(folder: Path, unit: str = "line", kept: Path | None = None, **room: Any) -> LinesSource:
    return LinesSource(folder, unit, RemoteOptions(cache_dir=kept), **room)


def read_all(source: LinesSource) -> list[bytes]:
    return list(source.read(range(len(source))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "data", CONTENTS)


@pytest.mark.parametrize("is_kept", [False, True])
def test_lines_of_many_files(folder: Path, is_kept: bool, tmp_path: Path) -> None:
    kept = tmp_path / "kept" if is_kept else None
    source = opened(folder, kept=kept)
    assert bool(source._table.path) == is_kept
    order = random.Random(1).choices(range(len(LINES)), k=200)
    assert source.read(order) == [LINES[n] for n in order]
    assert source.read([]) == []
    numbers = range(len(source))
    found = [(source.location(n), source.offset_of(n)) for n in numbers]
    assert found == [(f"{folder}/{place}", offset) for _, place, offset, _ in PLACES]
    assert source.sizes().tolist() == [size for *_, size in PLACES]
    assert source.file_of(np.array(numbers)).tolist() == [0] * 5 + [2] * 2 + [3] * 3 + [4] + [7] * 2
    assert "13 of 8 files, 2 of them through plain copies" in source.describe().ways["lines"]
    state = pickle.dumps(source)
    assert len(state) < 9000
    assert read_all(pickle.loads(state)) == LINES
    with mock.patch.object(index, "line_starts", wraps=index.line_starts) as scan:
        again = opened(folder, kept=kept)
    assert read_all(again) == LINES
    assert scan.called != is_kept
    assert again.fingerprint() == source.fingerprint()
    (folder / "c.txt").write_bytes(b"other\nlines\n")
    changed = opened(folder, kept=kept)
    assert changed.read(range(10, 12)) == [b"other", b"lines"]
    assert changed.fingerprint() != source.fingerprint()


@settings(max_examples=40)
@given(
    contents=st.lists(st.text(st.sampled_from('{}1 \n\r,"'), max_size=12), min_size=1, max_size=4),
    piece=st.integers(1, 9),
    is_kept=st.booleans(),
)
@example(contents=["\r\n", "a\r\n\r\r\n\n"], piece=1, is_kept=True)
@example(contents=["\r", "a\r\n\r\r\n\n"], piece=2, is_kept=False)
def test_generated_files(
    contents: list[str], piece: int, is_kept: bool, tmp_path_factory: Any
) -> None:
    """Cut into pieces anywhere."""
    files = {f"{n}.txt": text.encode() for n, text in enumerate(contents)}
    folder = write(tmp_path_factory.mktemp("generated") / "data", files)
    expected = []
    for number, name in enumerate(files):
        with open(folder / name, newline="") as file:
            for line in file:
                expected.append((number, line.rstrip("\r\n").encode()))
    kept = folder.parent / "kept" if is_kept else None
    with mock.patch.object(index, "PIECE", piece):
        with_numbers = opened(folder, kept=kept)
    numbers = with_numbers.file_of(np.arange(len(with_numbers))).tolist()
    assert list(zip(numbers, read_all(with_numbers), strict=True)) == expected
    with_numbers.close()


@settings(max_examples=40)
@given(
    files=st.lists(
        st.lists(st.sampled_from(["", "1", "{}", '{"a": 2}', "\r", "0"]), max_size=6),
        min_size=1,
        max_size=3,
    )
)
def test_blank_lines_between_records(files: list[list[str]], tmp_path_factory: Any) -> None:
    contents = {f"{n}.jsonl": "\n".join(rows).encode() for n, rows in enumerate(files)}
    folder = write(tmp_path_factory.mktemp("blank") / "data", contents)
    expected = [
        (f"{folder}/{number}.jsonl, record {record}", row.encode())
        for number, rows in enumerate(files)
        for record, row in enumerate((row for row in rows if row.strip("\r")), 1)
    ]
    source = opened(folder, "record")
    places = [source.location(n) for n in range(len(source))]
    assert list(zip(places, read_all(source), strict=True)) == expected
    source.close()


class TestWhileOpen:
    def test_a_file_that_is_changed(self, folder: Path) -> None:
        source = opened(folder)
        assert source.read([0]) == [b"one"]
        for content in (b"on", b"ONE\ntwo\r\n\r\nthree\rfour"):  # shorter; as long, and later
            (folder / "a/1.txt").write_bytes(content)
            os.utime(folder / "a/1.txt", (1, 1))
            with pytest.raises(FileChangedError, match=r"1.txt"):
                source.read([1])
        assert source.read([5]) == [b"marked"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_permission_revoked(self, folder: Path) -> None:
        source = opened(folder)
        (folder / "a/1.txt").chmod(0)
        with pytest.raises(PermissionError):
            source.read([0])
        with pytest.raises(AccessError, match=r"1.txt"):
            opened(folder)


# -- large ones


def write_long(path: Path, size: int) -> None:
    """Three lines, of which the second has so many zeros, which take no room on the disk."""
    with open(path, "wb") as file:
        file.write(b"one\n")
        file.truncate(4 + size)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthree\n")


def test_one_that_does_not_fit_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "LARGE", 1 << 20)
    budget = budget_of("12MB")
    for name in ("a.json", "a.csv"):  # which are read at the start
        (tmp_path / name).write_bytes(b"[" + b" " * (5 << 20))
        with pytest.raises(FormatError, match=f"{name}: its content of .* is too large"):
            opened(tmp_path / name, "record", budget=budget)
    write_long(tmp_path / "a.txt", 5 << 20)
    source = opened(tmp_path / "a.txt", budget=budget)
    assert len(source) == 3
    assert source.read([0, 2]) == [b"one", b"three"]
    monkeypatch.setattr(os, "pread", None)  # it is not even begun
    with pytest.raises(FormatError, match=r"5.2 MB.* 3.0 MB"):
        source.read([0, 1])


def run(code: str) -> str:
    """What a Python process of its own prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_line_of_more_than_2_gb(tmp_path: Path) -> None:
    """Indexed within some MB of memory, and refused; where there is room, it is read: one
    call gives no more than 2 GiB.
    """
    size = (2 << 30) + 5000
    write_long(tmp_path / "a.txt", size)
    code = f"""
        import resource
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
    assert "a.txt, line 2: its content of 2.1 GB" in run(code)
    (line,) = opened(tmp_path / "a.txt").read([1])
    assert len(line) == size
    assert not np.frombuffer(line, np.uint8).any()
