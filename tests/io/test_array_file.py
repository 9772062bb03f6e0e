"""Array files come back as they were written; what is damaged, another's or half-written is not
believed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import AccessError
from headrace.io import array_file, atomic
from headrace.io.array_file import HEAD, ArrayFile, FileArrays, UntrustedError

LONG = np.arange(1000, dtype=np.int64) * 3
SHORT = [np.arange(3), np.empty(0, np.int64), np.frombuffer(b"names", np.uint8)]


def file_in(folder: Path, **about: Any) -> ArrayFile:
    return ArrayFile(str(folder), "test", {"of": 1, **about})


def written(folder: Path, long: Any = LONG, short: Any = SHORT, pieces: int = 3) -> ArrayFile:
    file = file_in(folder)
    with file.writing(np.asarray(long).dtype.str) as writer:
        for piece in np.array_split(long, pieces):
            writer.write(piece)
        writer.short(short)
    return file


@pytest.fixture
def in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long array stays in the file after it was opened."""
    monkeypatch.setattr(array_file, "_IN_MEMORY", -1)


def equal(arrays: FileArrays, long: Any = LONG, short: Any = SHORT) -> bool:
    pairs = zip([arrays.long, *arrays.short], [np.asarray(long), *short], strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_arrays_of_any_size_and_dtype(
    is_in_memory: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not is_in_memory:
        request.getfixturevalue("in_the_file")
    for dtype, count in (("u1", 0), ("<u2", 1), ("<i4", 7), ("<i8", 1000), ("u1", 3 << 18)):
        long = np.arange(count).astype(dtype)
        arrays = written(tmp_path / "new", long).open()
        assert equal(arrays, long), (dtype, count)
        for array in (arrays.long, *arrays.short):
            assert array.flags.aligned
            assert not array.flags.writeable
    assert equal(written(tmp_path, short=[]).open(), short=[])


def test_a_narrower_dtype(tmp_path: Path) -> None:
    for number, count in enumerate([0, 5, (1 << 20) + 3]):
        folder = tmp_path / str(number)
        folder.mkdir()
        long, file = np.arange(count) % 60_000, file_in(folder)
        with file.writing("<i4") as writer:
            writer.write(long[:4])
            writer.write(long[4:])
            writer.narrow("<u2")
            writer.short([np.arange(4)])
        assert equal(file.open(), long.astype("<u2"), [np.arange(4)])
        assert os.path.getsize(file.path) < HEAD + 2 * count + 200


class TestNotTrusted:
    @pytest.fixture
    def file(self, tmp_path: Path) -> ArrayFile:
        return written(tmp_path)

    def test_any_flipped_bit(self, file: ArrayFile) -> None:
        """Of the head line as of the arrays; the zeros that fill the head up mean nothing."""
        whole = Path(file.path).read_bytes()
        end = whole.index(b"\n") + 1
        bits = [(place, bit) for place in range(end) for bit in range(8)]
        places = random.Random(1).sample(range(HEAD, len(whole)), 60)
        bits += [(place, place % 8) for place in places]
        for place, bit in bits:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            Path(file.path).write_bytes(damaged)
            try:
                # a damage that means the same, such as other white space
                assert equal(file.open()), place
            except UntrustedError:
                continue
            assert place < end

    def test_other_content(self, file: ArrayFile) -> None:
        whole = Path(file.path).read_bytes()
        contents = [whole[:size] for size in (0, 1, 100, HEAD - 1, HEAD, HEAD + 1, -1)]
        contents.append(whole + b"\0")
        other = json.dumps({"format": 1, "about": 2, "checksum": []}).encode()
        for head in (b"", b"[]", b"{}", b"[" * 4000, b"\xff", other):
            contents.append((head + b"\n").ljust(HEAD, b"\0")[:HEAD] + whole[HEAD:])
        for content in contents:
            Path(file.path).write_bytes(content)
            with pytest.raises(UntrustedError):
                file.open()

    def test_what_is_about_something_else(self, file: ArrayFile) -> None:
        other = file_in(Path(file.path).parent, of=2)
        assert other.path != file.path
        os.rename(file.path, other.path)
        with pytest.raises(UntrustedError, match="something else"):
            other.open()

    def test_what_others_may_write_to(
        self, file: ArrayFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert os.stat(file.path).st_mode & 0o777 == 0o600
        os.chmod(file.path, 0o620)
        with pytest.raises(UntrustedError, match="others may write"):
            file.open()
        os.chmod(file.path, 0o600)
        monkeypatch.setattr(atomic, "user_id", lambda: 12345)
        with pytest.raises(UntrustedError, match="another user's"):
            file.open()

    def test_a_link_a_folder_or_a_pipe(self, file: ArrayFile, tmp_path: Path) -> None:
        os.rename(file.path, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", file.path)
        with pytest.raises(OSError):
            file.open()
        os.unlink(file.path)
        os.mkfifo(file.path)
        with pytest.raises(UntrustedError):  # and is not waited for
            file.open()
        os.unlink(file.path)
        os.mkdir(file.path)
        with pytest.raises((OSError, UntrustedError)):
            file.open()


@pytest.mark.usefixtures("in_the_file")
class TestWhileInUse:
    def test_removed_or_replaced_before_it_is_read(self, tmp_path: Path) -> None:
        first, second, third = (written(tmp_path).open() for _ in range(3))
        written(tmp_path)  # by another process at the same time: equal
        assert equal(first)
        written(tmp_path, LONG + 1)
        with pytest.raises(AccessError, match="has been replaced"):
            _ = second.long
        os.truncate(second.path, HEAD + 10)
        with pytest.raises(AccessError, match="has been replaced"):
            _ = second.long
        os.unlink(second.path)
        with pytest.raises(AccessError, match="can't be read any more"):
            _ = third.long
        assert equal(first)  # what is open stays

    def test_cut_short_while_it_is_read(self, tmp_path: Path) -> None:
        for number, count in enumerate([1000, 1 << 20]):  # read by pread, and by pwritev
            folder = tmp_path / str(number)
            folder.mkdir()
            arrays = written(folder, np.arange(count)).open()
            begins = np.linspace(0, count - 2, 64).astype(np.int64)
            assert arrays.read(begins, begins + 1).tolist() == begins.tolist()
            os.truncate(arrays.path, HEAD + 4000)
            with pytest.raises(AccessError, match="cut short"):
                arrays.read(begins, begins + 1)

    def test_a_pickle_is_small_whatever_was_read(self, tmp_path: Path) -> None:
        arrays = written(tmp_path).open()
        assert equal(arrays)
        state = pickle.dumps(arrays)
        assert len(state) < 1000
        assert equal(pickle.loads(state))


class TestWriters:
    def test_an_error_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(_: int) -> None:
            raise OSError(5, "Input/output error")

        with pytest.raises(KeyError), file_in(tmp_path).writing("<i8") as writer:
            writer.write(LONG)
            raise KeyError
        assert not os.listdir(tmp_path)
        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output"):
            written(tmp_path, np.arange(2000), pieces=1)
        assert not os.listdir(tmp_path)

    def test_what_a_killed_one_left_is_removed_an_hour_later(self, tmp_path: Path) -> None:
        child = multiprocessing.get_context("fork").Process(target=_be_killed, args=(tmp_path,))
        child.start()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
        (left,) = tmp_path.iterdir()
        assert left.suffix == ".part"
        with pytest.raises(FileNotFoundError):
            file_in(tmp_path).open()
        written(tmp_path)
        assert left.exists()  # its writer might be at work
        os.utime(left, (time.time() - 4000, time.time() - 4000))
        file = written(tmp_path)
        assert [str(item) for item in tmp_path.iterdir()] == [file.path]
        assert equal(file.open())


def _be_killed(folder: Path) -> None:
    with file_in(folder).writing("<i8") as writer:
        writer.write(np.zeros(1 << 20, np.int64))
        os.kill(os.getpid(), signal.SIGKILL)
