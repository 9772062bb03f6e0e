"""The version of a local file is its size, times and inode; where only ctime or inode differ,
its bytes decide.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace import StreamingDataset, TextDataset, ZarrDataset
from headrace.errors import FileChangedError
from headrace.io.local.files import LocalFiles
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


@pytest.mark.parametrize("change", [rewritten, replaced])
@pytest.mark.parametrize("nbytes", [1000, LONG])
def test_same_size_and_time_other_bytes(
    tmp_path: Path, change: Callable[[Path, bytes], None], nbytes: int
) -> None:
    path, files = tmp_path / "a.bin", LocalFiles()
    path.write_bytes(bytes(nbytes))
    old = files.identity(str(path))
    change(path, b"\1" * nbytes)
    assert (
        LocalFiles().identity(str(path))[:3] == old[:3] and LocalFiles().identity(str(path)) != old
    )
    with pytest.raises(FileChangedError, match="has been changed since it was opened"):
        pickle.loads(pickle.dumps(files)).read(ByteRanges.of([(str(path), 10, 20)]))


@pytest.mark.parametrize("nbytes", [0, 1000, LONG])
def test_equal_bytes_are_read_on(tmp_path: Path, nbytes: int) -> None:
    path, files, content = tmp_path / "a.bin", LocalFiles(), bytes(range(250)) * (nbytes // 250)
    path.write_bytes(content)
    files.version(str(path))
    path.chmod(0o600)
    files.check(str(path))
    os.link(path, tmp_path / "b.bin")
    files.check(str(path))
    files.close()  # so that the descriptor is none of the file before
    replaced(path, content)
    files.check(str(path))
    assert files.read_joined(ByteRanges.of([(str(path), 0, nbytes)])) == content
    files.close()


def test_kept_index_of_a_replaced_tar(tmp_path: Path) -> None:
    def put(order: range, word: str) -> None:
        make_tar(
            tmp_path / "new",
            [(f"{number:02}.txt", f"{word}{number:02}".encode()) for number in order],
        )
        os.utime(tmp_path / "new", (1, 1))
        (tmp_path / "new").replace(tmp_path / "s.tar")

    put(range(20), "old")
    list(StreamingDataset(str(tmp_path / "s.tar"), cache_dir=tmp_path / "kept"))
    put(range(19, -1, -1), "new")
    samples = list(StreamingDataset(str(tmp_path / "s.tar"), cache_dir=tmp_path / "kept"))
    assert len(samples) == 20 and all(
        sample["txt"] == "new" + sample["__key__"] for sample in samples
    )


def test_kept_table_of_replaced_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nbbb\n")
    TextDataset(path, unit="line", cache_dir=tmp_path / "kept")[0]
    replaced(path, b"ccc\nd\n")
    dataset = TextDataset(
        path, unit="line", cache_dir=tmp_path / "kept", tokenizer=lambda text: list(text.encode())
    )
    assert bytes(dataset[0]["input_ids"].tolist()) == b"ccc"


def test_replaced_zarr_metadata(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.create_array(
        store=tmp_path / "a.zarr", data=np.arange(8, dtype="<i4"), chunks=(4,), compressors=None
    )
    dataset, file = ZarrDataset(tmp_path / "a.zarr"), tmp_path / "a.zarr" / "zarr.json"
    assert dataset[1] == 1
    file.chmod(0o600)
    assert dataset[2] == 2
    content = file.read_bytes()
    rewritten(file, content.replace(b'"little"', b'"big"   '))
    with pytest.raises(FileChangedError, match="was changed after the dataset was opened"):
        dataset[3]
    with ZarrDataset(tmp_path / "a.zarr") as again:
        assert again[1] == 1 << 24
        replaced(file, file.read_bytes())  # the store may be another one, with chunks of its own
        with pytest.raises(FileChangedError, match="was changed after the dataset was opened"):
            again[3]
