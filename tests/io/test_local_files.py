"""The version of a local file is its size, times and inode; where only ctime or inode differ,
its bytes decide.
"""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace import StreamingDataset, TextDataset, ZarrDataset
from headrace.errors import FileChangedError, FormatError
from headrace.io.local_files import LocalFiles
from headrace.io.ranges import ByteRanges
from tests.data.make import make_tar

LONG = 3_000_000


def rewritten(path: Path, content: bytes) -> None:
    """Writes other bytes of the same length in place, as `cp -p` does, and puts the time back."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path, content: bytes) -> None:
    """Puts another file of the same length and time in its place, as rsync does."""
    new = path.with_name("new")
    new.write_bytes(content)
    shutil.copystat(path, new)
    new.replace(path)


def test_same_size_and_time_other_bytes(tmp_path: Path) -> None:
    for number, (change, nbytes) in enumerate([(rewritten, 1000), (replaced, LONG)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, files = folder / "a.bin", LocalFiles()
        path.write_bytes(bytes(nbytes))
        old = files.identity(str(path))
        change(path, b"\1" * nbytes)
        new = LocalFiles().identity(str(path))
        assert new[:3] == old[:3]
        assert new != old
        with pytest.raises(FileChangedError, match=str(path)):
            pickle.loads(pickle.dumps(files)).read(ByteRanges.of([(str(path), 10, 20)]))


def test_equal_bytes_are_read_on(tmp_path: Path) -> None:
    for number, nbytes in enumerate([0, 1000, LONG]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, files, content = folder / "a.bin", LocalFiles(), bytes(range(250)) * (nbytes // 250)
        path.write_bytes(content)
        files.version(str(path))
        path.chmod(0o600)
        files.check(str(path))
        os.link(path, folder / "b.bin")
        files.check(str(path))
        files.close()  # so that the descriptor is none of the file before
        replaced(path, content)
        files.check(str(path))
        assert files.read_joined(ByteRanges.of([(str(path), 0, nbytes)])) == content
        files.close()


def test_kept_index_of_a_replaced_tar(tmp_path: Path) -> None:
    for numbers, word in ((range(20), "old"), (range(19, -1, -1), "new")):
        members = [(f"{number:02}.txt", f"{word}{number:02}".encode()) for number in numbers]
        make_tar(tmp_path / "new", members)
        os.utime(tmp_path / "new", (1, 1))
        (tmp_path / "new").replace(tmp_path / "s.tar")
        samples = list(StreamingDataset(str(tmp_path / "s.tar"), cache_dir=tmp_path / "kept"))
        assert len(samples) == 20
        assert all(sample["txt"] == word + sample["__key__"] for sample in samples)


def test_kept_table_of_replaced_lines(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_text("a\nbbb\n")
    assert TextDataset(path, unit="line", cache_dir=kept).text_of(0) == "a"
    replaced(path, b"ccc\nd\n")
    assert TextDataset(path, unit="line", cache_dir=kept).text_of(0) == "ccc"


def test_replaced_zarr_metadata(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    values = np.arange(8, dtype="<i4")
    zarr.create_array(store=tmp_path / "a.zarr", data=values, chunks=(4,), compressors=None)
    dataset, file = ZarrDataset(tmp_path / "a.zarr"), tmp_path / "a.zarr" / "zarr.json"
    assert dataset[1] == 1
    file.chmod(0o600)
    assert dataset[2] == 2
    rewritten(file, file.read_bytes().replace(b'"little"', b'"big"   '))
    with pytest.raises(FileChangedError):
        dataset[3]
    with ZarrDataset(tmp_path / "a.zarr") as again:
        assert again[1] == 1 << 24
        replaced(file, file.read_bytes())  # the store may be another one, with chunks of its own
        with pytest.raises(FileChangedError):
            again[3]


@pytest.mark.parametrize("spread", [200, 40_000, 3 << 20])
def test_joined_ranges_are_the_bytes_of_the_file(tmp_path: Path, spread: int) -> None:
    """Close together they are read by one call, else gathered, or by a call each."""
    content = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8).tobytes()
    path, files = tmp_path / "a", LocalFiles()
    path.write_bytes(content)
    drawn = np.random.default_rng(2)
    for count in (1, 2, 64):
        starts = drawn.integers(0, spread - 100, count)
        for stops in (starts + drawn.integers(0, 100, count), starts):
            ranges = ByteRanges.in_file(str(path), starts, stops)
            pairs = zip(starts.tolist(), stops.tolist(), strict=True)
            expected = b"".join(content[start:stop] for start, stop in pairs)
            assert files.read_joined(ranges) == expected
    beyond = ByteRanges.of([(str(path), len(content) - 9, len(content) + at) for at in (-3, 1)])
    with pytest.raises(FormatError, match="a ends before"):
        files.read_joined(beyond)
    files.close()


def test_one_range_into_its_buffer(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    files = LocalFiles()
    buffer = memoryview(bytearray(7))
    assert files.read_into(ByteRanges.of([(str(path), 90, 97)]), [buffer]) == []
    assert buffer.tobytes() == bytes(range(90, 97))
    with pytest.raises(FormatError, match="ends before byte"):
        files.read_into(ByteRanges.of([(str(path), 95, 102)]), [buffer])
    files.close()
