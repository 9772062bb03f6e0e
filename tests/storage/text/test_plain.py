"""Compressed and foreign-encoded texts are read as Python reads them, and unsound ones refused."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError
from headrace.io.local.files import LocalFiles
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit
from headrace.storage.text import plain
from headrace.storage.text.plain import (
    Room,
    check_encoding,
    decompressed,
    is_compressed,
    pieces_of,
    plain_copy,
    shows_lines,
)

TEXT = "".join(f"linea {number} è 你好 \U0001f600\r\n" for number in range(40))
ENCODINGS = ["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-32-be", "gb18030", "utf-7"]


def packed(data: bytes, ending: str) -> bytes:
    return {
        "": lambda: data,
        ".gz": lambda: gzip.compress(data),
        ".zst": lambda: zstandard.ZstdCompressor().compress(data),
    }[ending]()


def content(path: Path) -> bytes:
    return b"".join(pieces_of(str(path)))


class TestCompressed:
    @pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
    @pytest.mark.parametrize(
        "parts",
        [[b"one\n"], [b"one\n", b"", b"two"], [b""], [b"x" * 3_000_000, b"y"]],
        ids=["1", "3", "empty", "large"],
    )
    def test_one_after_the_other(self, parts: list[bytes], ending: str, tmp_path: Path) -> None:
        """Members of gzip, and frames of zstd, as `cat` would join them."""
        path = tmp_path / f"a.txt{ending}"
        path.write_bytes(b"".join(packed(part, ending) for part in parts))
        assert (
            content(path) == b"".join(parts) == decompressed(path.read_bytes(), str(path), Room())
        )

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    @pytest.mark.parametrize("parts", [1, 2])
    def test_cut_short_anywhere(self, ending: str, parts: int, tmp_path: Path) -> None:
        """But between two members or frames, which nothing shows."""
        one = packed(b"a line and a longer line\n" * 3, ending)
        whole, path = one * parts, tmp_path / f"a.txt{ending.upper()}"
        for size in set(range(len(whole))) - {len(one)}:
            path.write_bytes(whole[:size])
            with pytest.raises(FormatError, match=f"a.txt{ending.upper()} is (cut short|no sound)"):
                content(path)
            with pytest.raises(FormatError):
                decompressed(whole[:size], str(path), Room())

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_what_is_none(self, ending: str, tmp_path: Path) -> None:
        for data in (b"just text\n", packed(b"text" * 50, ending) + b"more", os.urandom(100)):
            (tmp_path / f"a{ending}").write_bytes(data)
            with pytest.raises(FormatError, match=f"a{ending} is"):
                content(tmp_path / f"a{ending}")

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_a_flipped_bit_is_found(self, ending: str, tmp_path: Path) -> None:
        text = b"".join(b"%d %d\n" % (n, n * n) for n in range(200))
        cctx = zstandard.ZstdCompressor(write_checksum=True)
        whole = gzip.compress(text, mtime=0) if ending == ".gz" else cctx.compress(text)
        path = tmp_path / f"a{ending}"
        for place in range(10, len(whole), 7):
            damaged = bytearray(whole)
            damaged[place] ^= 4
            path.write_bytes(damaged)
            try:
                assert content(path) == text
            except FormatError:
                continue

    def test_names(self) -> None:
        assert is_compressed("a.txt.GZ") and is_compressed("b.zst") and not is_compressed("gz")

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_more_than_there_is_room_for(
        self, ending: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plain, "LARGE", 1 << 20)
        room = Room(MemoryBudget("10MB", limits=[Limit("a machine", 10**9, 0)]))
        data = packed(bytes(8_000_000), ending)
        with pytest.raises(
            FormatError,
            match=r"too large for the memory budget.* 2.5 MB: split it, or raise max_memory_usage",
        ):
            decompressed(data, f"a{ending}", room)
        room.check(2_500_000)
        Room(MemoryBudget("1kB", limits=[Limit("a machine", 10**9, 0)])).check(plain.LARGE)
        Room(None).check(1 << 60)


class TestEncodings:
    def test_names(self) -> None:
        assert [
            check_encoding(name, "strict") for name in ("UTF8", "latin1", "utf_8_sig", "UTF-16")
        ] == [
            "utf-8",
            "iso8859-1",
            "utf-8",
            "utf-16",
        ]

    @pytest.mark.parametrize(
        ("encoding", "errors"),
        [
            ("utf-9", "strict"),
            ("utf-8", "nonsense"),
            ("rot13", "strict"),
            ("base64", "strict"),
            ("utf-8", "xmlcharrefreplace"),
            ("a\0b", "strict"),
        ],
    )
    def test_what_is_none(self, encoding: str, errors: str) -> None:
        with pytest.raises(ConfigError, match="encoding="):
            check_encoding(encoding, errors)

    def test_which_show_lines(self) -> None:
        assert all(
            map(shows_lines, ["utf-8", "ascii", "iso8859-1", "cp1252", "koi8-r", "mac-roman"])
        )
        hidden = [
            "utf-16",
            "utf-32-le",
            "shift_jis",
            "gb18030",
            "cp037",
            "iso2022_jp",
            "hz",
            "utf-7",
            "raw_unicode_escape",
            "unicode_escape",
        ]
        assert not any(map(shows_lines, hidden))


class TestCopies:
    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plain, "_PIECE", 7)
        monkeypatch.setattr(plain, "_ZSTD_PIECE", 7)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
    def test_as_python_decodes(self, encoding: str, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"a.txt{ending}"
        path.write_bytes(packed(TEXT.encode(encoding), ending))
        copy = plain_copy(LocalFiles(), str(path), encoding, "strict", str(tmp_path / "cache"))
        assert copy.long.tobytes().decode("utf-8", "surrogatepass") == TEXT.encode(encoding).decode(
            encoding
        )
        empty = tmp_path / f"empty.txt{ending}"
        empty.write_bytes(packed(b"", ending))
        assert not len(
            plain_copy(LocalFiles(), str(empty), encoding, "strict", str(tmp_path / "cache")).long
        )

    @settings(max_examples=60, deadline=None)
    @given(
        data=st.binary(max_size=40),
        encoding=st.sampled_from(
            ["utf-16", "utf-16-be", "utf-32", "shift_jis", "gb18030", "euc_jp", "big5", "utf-7"]
        ),
        errors=st.sampled_from(
            ["strict", "replace", "ignore", "backslashreplace", "surrogateescape", "surrogatepass"]
        ),
    )
    @example(data=b"\xff\xfe\x00\xd8a\x00", encoding="utf-16", errors="surrogatepass")
    def test_any_bytes_as_python_decodes_them(
        self, data: bytes, encoding: str, errors: str, tmp_path_factory: Any
    ) -> None:
        folder = tmp_path_factory.mktemp("any")
        (folder / "a.txt").write_bytes(data)
        try:
            with open(folder / "a.txt", encoding=encoding, errors=errors, newline="") as file:
                expected = file.read()
        except UnicodeError:
            expected = None
        try:
            copy = plain_copy(LocalFiles(), str(folder / "a.txt"), encoding, errors, str(folder))
            assert copy.long.tobytes().decode("utf-8", "surrogatepass") == expected
        except FormatError:
            assert expected is None

    @pytest.mark.parametrize(
        ("encoding", "bad", "offset"),
        [
            ("utf-16-le", b"\x00\xdc", 60),
            ("utf-32-le", b"\xff\xff\xff\xff", 120),
            ("shift_jis", b"\x81\x00", 30),
            ("gb18030", b"\xff", 30),
        ],
    )
    @pytest.mark.parametrize("ending", ["", ".gz"])
    def test_a_bad_byte_is_named(
        self, encoding: str, bad: bytes, offset: int, ending: str, tmp_path: Path
    ) -> None:
        data = ("x" * 30).encode(encoding) + bad + ("y" * 30).encode(encoding)
        path = tmp_path / f"a.txt{ending}"
        path.write_bytes(packed(data, ending))
        said = "of the decompressed text" if ending else "offset"
        with pytest.raises(
            FormatError,
            match=rf"a.txt{ending}: .*{said}.*\b{offset}\b.* no {encoding}.*encoding= or errors=",
        ):
            plain_copy(LocalFiles(), str(path), encoding, "strict", str(tmp_path / "cache"))
        assert not list((tmp_path / "cache").glob("headrace-[!m]*"))


class TestLifeOfACopy:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "a.txt.gz").write_bytes(packed(b"one\ntwo\n", ".gz"))
        return tmp_path / "a.txt.gz"

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The files that were read, in order."""
        read: list[str] = []

        def note(path: Any, *_: Any) -> Iterator[bytes]:
            read.append(os.path.basename(path))
            return pieces_of(path)

        monkeypatch.setattr(plain, "pieces_of", note)
        return read

    def copy(self, path: Path, **options: Any) -> bytes:
        settings = {
            "encoding": "utf-8",
            "errors": "strict",
            "cache_dir": str(path.parent / "cache"),
            **options,
        }
        return bytes(plain_copy(LocalFiles(), str(path), **settings).long.tobytes())

    def test_it_is_made_once(self, path: Path, made: list[str]) -> None:
        assert [self.copy(path) for _ in range(3)] == [b"one\ntwo\n"] * 3 and len(made) == 1
        assert self.copy(path, encoding="latin-1") == b"one\ntwo\n" and len(made) == 2

    def test_of_a_changed_file_a_new_one(self, path: Path, made: list[str]) -> None:
        self.copy(path)
        path.write_bytes(packed(b"ONE\ntwo\n", ".gz"))
        os.utime(path, (1, 1))
        assert self.copy(path) == b"ONE\ntwo\n" and len(made) == 2

    def test_a_damaged_one_is_made_anew(self, path: Path, made: list[str]) -> None:
        self.copy(path)
        (kept,) = (path.parent / "cache").glob("headrace-[!m]*")
        kept.write_bytes(kept.read_bytes()[:-1] + b"X")
        assert self.copy(path) == b"one\ntwo\n" and len(made) == 2
        assert self.copy(path) == b"one\ntwo\n" and len(made) == 2

    def test_where_none_can_be_made(self, path: Path) -> None:
        (path.parent / "file").write_text("no folder")
        with pytest.raises(
            AccessError,
            match=r"a.txt.gz is read through a plain copy.*file.*pass another cache_dir=",
        ):
            self.copy(path, cache_dir=str(path.parent / "file"))
        with pytest.raises(AccessError, match="can't be made"):
            self.copy(path, cache_dir=str(path.parent / "file" / "below"))

    def test_a_full_disk(self, path: Path) -> None:
        import resource

        path.write_bytes(packed(bytes(300_000), ".gz"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            with pytest.raises(
                AccessError, match=r"can't be made \(File too large\): pass another cache_dir="
            ):
                self.copy(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert not list((path.parent / "cache").glob("headrace-[!m]*"))

    def test_an_error_of_the_text_is_not_taken_for_one_of_its_copy(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DataNotFoundError, match=r"gone.gz does not exist"):
            self.copy(path.parent / "gone.gz")

        def broken(*_: Any) -> Iterator[bytes]:
            yield b"one"
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(plain, "pieces_of", broken)
        with pytest.raises(AccessError, match=r"a.txt.gz can't be read: Input/output error$"):
            self.copy(path)

    def test_two_at_the_same_time(self, path: Path) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            found = pool.map(self.copy, [path] * 8, chunksize=1)
            pool.close()
            pool.join()
        assert (
            set(found) == {b"one\ntwo\n"}
            and len(list((path.parent / "cache").glob("headrace-[!m]*"))) == 1
        )

    def test_the_error_of_a_large_text_can_be_pickled(self) -> None:
        room = Room(MemoryBudget("1MB", limits=[Limit("a machine", 10**9, 0)]))
        with pytest.raises(FormatError) as raised:
            room.check(1 << 30)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
