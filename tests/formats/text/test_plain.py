"""Compressed and foreign-encoded texts are read as Python reads them, and unsound ones refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zstandard
from hypothesis import example, given, settings, strategies as st

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError
from headrace.formats.text import plain
from headrace.formats.text.plain import (
    check_encoding,
    decompressed,
    is_compressed,
    pieces_of,
    plain_copy,
    shows_lines,
)
from headrace.io.local_files import LocalFiles
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit

TEXT = "".join(f"linea {number} è 你好 \U0001f600\r\n" for number in range(40))


def packed(data: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(data)
    return zstandard.ZstdCompressor().compress(data) if ending else data


def content(path: Path) -> bytes:
    return b"".join(pieces_of(str(path), open(path, "rb")))


def budget_of(size: str) -> MemoryBudget:
    return MemoryBudget(size, limits=[Limit("a machine", 10**9, 0)])


def copy_of(path: Path, encoding: str = "utf-8", errors: str = "strict", **where: Any) -> bytes:
    folder = str(where.get("cache", path.parent / "cache"))
    return bytes(plain_copy(LocalFiles(), str(path), (encoding, errors), folder).long.tobytes())


def kept(path: Path) -> list[Path]:
    return list((path.parent / "cache").glob("headrace-[!m]*"))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
class TestCompressed:
    def test_one_after_the_other(self, ending: str, tmp_path: Path) -> None:
        """Members of gzip, and frames of zstd, as `cat` would join them."""
        path = tmp_path / f"a.txt{ending}"
        for parts in ([b"one\n", b"", b"two"], [b""], [b"x" * 3_000_000, b"y"]):
            path.write_bytes(b"".join(packed(part, ending) for part in parts))
            assert content(path) == b"".join(parts)
            assert decompressed(path.read_bytes(), str(path)) == b"".join(parts)

    def test_cut_short_anywhere(self, ending: str, tmp_path: Path) -> None:
        """But between two members or frames, which nothing shows."""
        one, path = packed(b"a line and a longer line\n" * 3, ending), tmp_path / f"a{ending}"
        for size in set(range(2 * len(one))) - {len(one)}:
            path.write_bytes((one * 2)[:size])
            with pytest.raises(FormatError, match=str(path)):
                content(path)
            with pytest.raises(FormatError):
                decompressed((one * 2)[:size], str(path))

    def test_what_is_none_or_damaged(self, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"a{ending.upper()}"
        assert is_compressed(str(path))
        assert not is_compressed(ending[1:])
        for data in (b"just text\n", packed(b"text" * 50, ending) + b"more", bytes(100)):
            path.write_bytes(data)
            with pytest.raises(FormatError, match=str(path)):
                content(path)
        text = b"".join(b"%d %d\n" % (n, n * n) for n in range(200))
        whole = zstandard.ZstdCompressor(write_checksum=True).compress(text)
        if ending == ".gz":
            whole = gzip.compress(text, mtime=0)
        for place in range(10, len(whole), 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            try:
                assert content(path) == text
            except FormatError:
                continue

    def test_more_than_there_is_room_for(
        self, ending: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plain, "LARGE", 1 << 20)
        budget = budget_of("10MB")
        with pytest.raises(FormatError, match=r"2.5 MB") as raised:
            decompressed(packed(bytes(8_000_000), ending), f"a{ending}", budget)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
        plain.check_room(2_500_000, budget)
        plain.check_room(plain.LARGE, budget_of("1kB"))
        plain.check_room(1 << 60, None)


class TestEncodings:
    def test_names(self) -> None:
        for name, known in {"UTF8": "utf-8", "latin1": "iso8859-1", "utf_8_sig": "utf-8"}.items():
            assert check_encoding(name, "strict") == known
        for encoding in ("utf-9", "rot13", "base64", "a\0b"):
            with pytest.raises(ConfigError, match="encoding="):
                check_encoding(encoding, "strict")
        for errors in ("nonsense", "xmlcharrefreplace"):
            with pytest.raises(ConfigError, match="encoding="):
                check_encoding("utf-8", errors)

    def test_which_show_lines(self) -> None:
        for name in ("utf-8", "ascii", "iso8859-1", "cp1252", "koi8-r", "mac-roman"):
            assert shows_lines(name), name
        hidden = ["utf-16", "utf-32-le", "shift_jis", "gb18030", "cp037", "iso2022_jp", "hz"]
        for name in (*hidden, "utf-7", "raw_unicode_escape", "unicode_escape"):
            assert not shows_lines(name), name


class TestCopies:
    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plain, "_PIECE", 7)
        monkeypatch.setattr(plain, "_INPUT", 7)

    @settings(max_examples=60)
    @given(
        data=st.binary(max_size=40),
        encoding=st.sampled_from(
            ["utf-16", "utf-16-be", "utf-32", "shift_jis", "gb18030", "euc_jp", "big5", "utf-7"]
        ),
        ending=st.sampled_from(["", ".gz", ".zst"]),
        errors=st.sampled_from(
            ["strict", "replace", "ignore", "backslashreplace", "surrogateescape", "surrogatepass"]
        ),
    )
    @example(data=b"\xff\xfe\x00\xd8a\x00", encoding="utf-16", ending="", errors="surrogatepass")
    @example(data=TEXT.encode("utf-16"), encoding="utf-16", ending=".gz", errors="strict")
    @example(data=TEXT.encode("utf-7"), encoding="utf-7", ending=".zst", errors="strict")
    @example(data=TEXT.encode(), encoding="utf-8", ending=".zst", errors="strict")
    def test_any_bytes_as_python_decodes_them(
        self, data: bytes, encoding: str, ending: str, errors: str, tmp_path_factory: Any
    ) -> None:
        path = tmp_path_factory.mktemp("any") / f"a.txt{ending}"
        path.write_bytes(packed(data, ending))
        try:
            text = io.TextIOWrapper(io.BytesIO(data), encoding, errors, newline="")
            expected = text.read()
        except UnicodeError:
            expected = None
        try:
            copied = copy_of(path, encoding, errors).decode("utf-8", "surrogatepass")
        except FormatError:
            copied = None
        assert copied == expected

    def test_a_bad_byte_is_named(self, tmp_path: Path) -> None:
        for encoding, bad, offset in (
            ("utf-16-le", b"\x00\xdc", 60),
            ("utf-32-le", b"\xff\xff\xff\xff", 120),
            ("shift_jis", b"\x81\x00", 30),
            ("gb18030", b"\xff", 30),
        ):
            data = ("x" * 30).encode(encoding) + bad + ("y" * 30).encode(encoding)
            for ending in ("", ".gz"):
                path = tmp_path / f"a.txt{ending}"
                path.write_bytes(packed(data, ending))
                with pytest.raises(FormatError, match=rf"{path}: .*\b{offset}\b.* not {encoding}"):
                    copy_of(path, encoding)
                assert not kept(path)


class TestLifeOfACopy:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "a.txt.gz").write_bytes(packed(b"one\ntwo\n", ".gz"))
        return tmp_path / "a.txt.gz"

    def test_it_is_made_once_of_each_version(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = mock.Mock(wraps=pieces_of)
        monkeypatch.setattr(plain, "pieces_of", made)
        assert [copy_of(path) for _ in range(3)] == [b"one\ntwo\n"] * 3
        assert made.call_count == 1
        (copy,) = kept(path)
        copy.write_bytes(copy.read_bytes()[:-1] + b"X")  # damaged, it is made anew
        assert [copy_of(path) for _ in range(2)] == [b"one\ntwo\n"] * 2
        assert made.call_count == 2
        assert copy_of(path, "latin-1") == b"one\ntwo\n"
        assert made.call_count == 3
        path.write_bytes(packed(b"ONE\ntwo\n", ".gz"))
        os.utime(path, (1, 1))
        assert copy_of(path) == b"ONE\ntwo\n"
        assert made.call_count == 4

    def test_an_error_of_the_text_is_not_taken_for_one_of_its_copy(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DataNotFoundError, match=r"gone.gz"):
            copy_of(path.parent / "gone.gz")

        def broken(_: Any, opened: Any) -> Iterator[bytes]:
            with opened:
                yield b"one"
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(plain, "pieces_of", broken)
        with pytest.raises(AccessError, match=r"a.txt.gz can't be read: Input/output error$"):
            copy_of(path)
