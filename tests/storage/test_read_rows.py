"""`read_rows` gives what h5py, zarr-python and NumPy give of the same indices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from headrace import (
    BudgetError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    ImageDataset,
    MissingNameError,
    ZarrDataset,
    pack,
    read_rows,
)
from headrace.memory.limits import Limit
from tests.servers.ranges import RangeServer

N = 300
DRAWS = np.random.default_rng(0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw": {"chunks": (16, 6, 5)},
    "cut": {"chunks": (7, 4, 3)},
    "row": {"chunks": (1, 6, 5), "compression": "gzip"},
    "gzip": {"chunks": (16, 6, 5), "compression": "gzip", "shuffle": True},
    "cut gzip": {"chunks": (16, 4, 5), "compression": "gzip"},
    "lzf": {"chunks": (16, 6, 5), "compression": "lzf"},
    "compact": {},
}
INDICES: dict[str, Any] = {
    "one": 7,
    "last": -1,
    "a NumPy integer": np.int32(-N),
    "a list": [5, 299, 0, 5, 17, -1],
    "none": [],
    "a range": range(290, 10, -3),
    "all, shuffled": DRAWS.permutation(N),
    "often": DRAWS.integers(-N, N, 2000),
    "few": DRAWS.integers(0, N, 20).astype(np.uint8),
    "a table": DRAWS.integers(-N, N, (3, 4)),
    "a mask": DRAWS.random(N) < 0.3,
    "everything": slice(None),
    "a slice": slice(40, 91),
    "steps": slice(250, 3, -7),
    "beyond": slice(290, 900),
    "nothing": slice(9, 9),
    "in order": np.arange(3, 60),
    "pairs": np.repeat(np.arange(0, 300, 10), 2),
}


def rows(dtype: str = "i4", *row: int) -> np.ndarray[Any, Any]:
    return DRAWS.integers(0, 9, (N, *(row or (6, 5)))).astype(dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    with h5py.File(folder / "a.h5", "w") as file:
        for name, how in LAYOUTS.items():
            if name != "compact":
                file.create_dataset(name, data=rows(">f8" if name == "gzip" else "i4"), **how)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(
            file.id, b"compact", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((N, 6, 5)), plist
        )
        file["compact"][...] = rows()
        file["labels"] = np.arange(N)
        file.create_dataset(
            "packed labels", data=np.arange(N, dtype="u2"), chunks=(50,), compression="gzip"
        )
        file["texts"] = [f"text {i}" for i in range(N)]
        sparse = file.create_dataset("sparse", (N, 3), "i2", chunks=(8, 3), fillvalue=7)
        sparse[90:100] = 1
        file.create_dataset(
            "pairs", data=np.zeros(N, [("a", "i4"), ("b", "f8", (2,))]), chunks=(16,)
        )
        ragged = file.create_dataset("ragged", (N,), h5py.vlen_dtype("i4"))
        for i in range(N):
            ragged[i] = np.arange(i % 4)
        file["single"] = 3.0
    root = zarr.open_group(folder / "b.zarr", mode="w")
    for name, shards, compressors in (
        ("zstd", None, "auto"),
        ("raw", None, None),
        ("shards", (64, 6, 5), "auto"),
    ):
        root.create_array(
            name, data=rows(), chunks=(16, 6, 5), shards=shards, compressors=compressors
        )
    return folder


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("name", [*LAYOUTS, "labels", "packed labels", "sparse", "pairs"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_those_of_numpy(
    folder: Path, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.read_rows._WORTH", 100)
    with h5py.File(folder / "a.h5") as file:
        whole = file[name][...]
    for what, indices in INDICES.items():
        found = read_rows(folder / "a.h5", name, indices, threads=threads)
        expected = whole[
            np.asarray(indices, np.int64) if isinstance(indices, (list, range)) else indices
        ]
        assert (
            type(found) is type(expected)
            and found.dtype == expected.dtype
            and found.shape == expected.shape
        ), what
        assert found.tobytes() == expected.tobytes(), what


@pytest.mark.parametrize("name", ["zstd", "raw", "shards"])
@pytest.mark.parametrize("direct", [True, False])
def test_rows_of_zarr(folder: Path, name: str, direct: bool) -> None:
    whole = zarr.open_group(folder / "b.zarr")[name][...]
    for what, indices in INDICES.items():
        found = read_rows(folder / "b.zarr", name, indices, direct=direct)
        assert np.array_equal(
            found,
            whole[np.asarray(indices, np.int64) if isinstance(indices, (list, range)) else indices],
        ), what


@pytest.mark.parametrize("name", ["gzip", "lzf", "texts", "ragged"])
def test_rows_by_h5py_alone(folder: Path, name: str) -> None:
    with h5py.File(folder / "a.h5") as file:
        whole = file[name][...]
    for direct in (True, False):
        found = read_rows(folder / "a.h5", name, [5, -1, 5], direct=direct)
        assert found.dtype == whole.dtype and all(
            np.array_equal(one, whole[index]) for one, index in zip(found, [5, -1, 5], strict=True)
        )


def test_scratch_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with little between them are read by the stretch: here of eight rows, here of all."""
    with h5py.File(folder / "a.h5") as file:
        whole = file["contiguous"][...]
    for stretch in (1, 1000, 1 << 20):
        monkeypatch.setattr("headrace.storage.arrays.gather._STRETCH", stretch)
        for indices in (
            np.arange(0, N, 2),
            DRAWS.permutation(N),
            np.arange(N),
            DRAWS.integers(0, N, 50),
        ):
            assert np.array_equal(read_rows(folder / "a.h5", "contiguous", indices), whole[indices])


def test_several_files_are_one_array(folder: Path, tmp_path: Path) -> None:
    whole = []
    for number, count in enumerate((7, 0, 12, 1)):
        whole.append(DRAWS.integers(0, 99, (count, 3)))
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["data"] = whole[-1]
    indices = [19, 0, 7, 6, -1, 7]
    assert np.array_equal(
        read_rows(tmp_path / "*.h5", "data", indices), np.concatenate(whole)[indices]
    )
    assert np.array_equal(
        read_rows([tmp_path / "2.h5", tmp_path / "0.h5"], None, slice(None)),
        np.concatenate([whole[2], whole[0]]),
    )
    with pytest.raises(
        FormatError,
        match=(
            r"a\.h5 and .*0\.h5 can't be one array: rows of int64 \[\] here, and of int64 \[3\] "
            r"there"
        ),
    ):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["data"] = np.arange(3)
        read_rows(tmp_path / "*.h5", "data", 0)


def test_an_open_dataset_is_read_again(folder: Path) -> None:
    with h5py.File(folder / "a.h5") as file:
        whole = file["gzip"][...]
    with HDF5Dataset(folder / "a.h5", "gzip") as dataset:
        for indices in (slice(3, 90), [5, -1], slice(3, 90)):
            assert np.array_equal(read_rows(dataset, None, indices), whole[indices])
        view = dataset.subset([9, 4, 200])
        assert np.array_equal(read_rows(view, "gzip", [0, -1, 1]), whole[[9, 200, 4]])
        with pytest.raises(IndexError, match="index 3 is outside of 3 rows"):
            read_rows(view, None, 3)
        with pytest.raises(ConfigError, match="rows of 'gzip', not of 'raw'"):
            read_rows(dataset, "raw", 0)
    with (
        ZarrDataset(folder / "b.zarr", "zstd") as rows_,
        ZarrDataset(folder / "b.zarr", "zstd", patch_shape=(3, 3)) as patches,
    ):
        assert read_rows(rows_, None, [1, 2]).shape == (2, 6, 5)
        with pytest.raises(
            ConfigError, match="whose samples are the rows of one array, not a ZarrDataset"
        ):
            read_rows(patches, None, 0)


def test_packed_rows_are_checked(photos: Path, tmp_path: Path) -> None:
    path = pack(ImageDataset(photos, image_size=16), tmp_path / "a.h5", store="decoded", workers=1)
    with h5py.File(path) as file:
        whole = file["data"][...]
        place = file["data"].id.get_offset() or file["data"].id.get_chunk_info(2).byte_offset
    assert np.array_equal(read_rows(path, None, [3, 1]), whole[[3, 1]])
    with open(path, "r+b") as raw:
        raw.seek(place)
        raw.write(b"damage")
    with pytest.raises(FormatError, match="wrong checksum"):
        read_rows(path, "data", slice(None))
    flat = pack(ImageDataset(photos, image_size=16), tmp_path / "b.h5", store="encoded", workers=1)
    with pytest.raises(FormatError, match="holds samples of several lengths, one after the other"):
        read_rows(flat, "data", 0)


def test_rows_far_away(folder: Path, tmp_path: Path) -> None:
    indices = [5, 299, 0, 5, 17, -1]
    with RangeServer(folder) as server:
        for name in ("contiguous", "gzip", "cut"):
            with h5py.File(folder / "a.h5") as file:
                expected = file[name][...][indices]
            assert np.array_equal(
                read_rows(f"{server.url}/a.h5", name, indices, cache_dir=tmp_path), expected
            )
        found = read_rows(f"{server.url}/b.zarr", "shards", indices, cache_dir=tmp_path)
    assert np.array_equal(found, zarr.open_group(folder / "b.zarr")["shards"][...][indices])


# -- what is refused


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (N, "a.h5: 'raw': index 300 is outside of 300 rows"),
        ([0, -N - 1], "index -301 is outside of 300 rows"),
        (np.array([2**63], np.uint64), "index 9223372036854775808 is outside"),
        (1.5, "indices are integers, a slice or a mask, not 1.5"),
        (["a"], "indices are integers, a slice or a mask, not a list"),
        (np.ones(3, bool), r"the mask has shape \[3\], and there are 300 rows"),
    ],
)
def test_indices_that_make_no_sense(folder: Path, indices: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        read_rows(folder / "a.h5", "raw", indices)


def test_arguments_that_make_no_sense(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingNameError, match="no dataset 'none'"):
        read_rows(folder / "a.h5", "none", 0)
    with pytest.raises(FormatError, match="'single' is a single value"):
        read_rows(folder / "a.h5", "single", 0)
    with pytest.raises(ConfigError, match="name must be that of one array"):
        read_rows(folder / "a.h5", ["raw", "gzip"], 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads"):
        read_rows(folder / "a.h5", "raw", 0, threads=0)
    with pytest.raises(ConfigError, match="read_rows has no 'thread': did you mean threads"):
        read_rows(folder / "a.h5", "raw", 0, thread=2)  # type: ignore[call-arg]
    with pytest.raises(
        DataNotFoundError, match=r"one of 2 paths, has no file that ends in any of .*\.h5"
    ):
        read_rows([folder / "a.h5", tmp_path], "raw", 0)
    with pytest.raises(DataNotFoundError, match="does not exist"):
        read_rows(tmp_path / "none.h5", "raw", 0)
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(FormatError, match="is no HDF5 file and no Zarr store"):
        read_rows(tmp_path / "a.txt", "raw", 0)
    monkeypatch.setattr("headrace.storage.read_rows._WORTH", 100)
    monkeypatch.setattr(
        "headrace.storage.read_rows.memory_limits", lambda: [Limit("a test", 1000, 0)]
    )
    with pytest.raises(
        BudgetError, match=r"300 rows take .* and .* are free \(a test\): ask for fewer"
    ):
        read_rows(folder / "a.h5", "raw", slice(None))


def test_a_file_that_changes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.arange(9)
    with HDF5Dataset(tmp_path / "a.h5") as dataset:
        read_rows(dataset, None, 0)
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["data"] = np.arange(10)
        with pytest.raises(FileChangedError):
            read_rows(dataset, None, 0)


def test_it_needs_no_torch(folder: Path) -> None:
    code = (
        f"import sys, headrace; headrace.read_rows({str(folder / 'a.h5')!r}, 'gzip', [3, 1]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


NUMBERS = np.arange(100, 100 + N, dtype="i4")
OF_NUMBERS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw": {"chunks": (16,)},
    "alone": {"chunks": (1,)},
    "gzip, alone": {"chunks": (1,), "compression": "gzip"},
    "lzf, alone": {"chunks": (1,), "compression": "lzf"},
    "gzip": {"chunks": (16,), "compression": "gzip"},
    "lzf": {"chunks": (16,), "compression": "lzf"},
}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of one axis, whose rows are numbers."""
    folder = tmp_path_factory.mktemp("numbers")
    with h5py.File(folder / "a.h5", "w") as file:
        for name, how in OF_NUMBERS.items():
            file.create_dataset(name, data=NUMBERS, **how)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(
            file.id, b"compact", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((N,)), plist
        )
        file["compact"][...] = NUMBERS
        layout = h5py.VirtualLayout((N,), "i4")
        layout[:] = h5py.VirtualSource(file["contiguous"])
        file.create_virtual_dataset("virtual", layout)
        pairs = file.create_dataset(
            "pairs", (N,), [("a", "i4"), ("b", "f8")], chunks=(1,), compression="gzip"
        )
        pairs["a"] = NUMBERS
        for name, chunks in (("partly", 16), ("partly, alone", 1)):
            file.create_dataset(name, (N,), "i4", chunks=(chunks,), fillvalue=7)[:16] = NUMBERS[:16]
    root = zarr.open_group(folder / "b.zarr", mode="w", zarr_format=2)
    for name, chunks, compressor in (
        ("alone", 1, numcodecs.Zstd()),
        ("bz2, alone", 1, numcodecs.BZ2()),
        ("bz2", 16, numcodecs.BZ2()),
    ):
        root.create_array(name, data=NUMBERS, chunks=(chunks,), compressors=[compressor])
    return folder


@pytest.fixture
def dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New arrays are full of something, as after a program that has run for a while."""
    empty = np.empty

    def full(*arguments: Any, **options: Any) -> Any:
        made = empty(*arguments, **options)
        if not made.dtype.hasobject:
            made.reshape(-1).view("u1")[...] = 0xA5
        return made

    monkeypatch.setattr(np, "empty", full)


@pytest.mark.usefixtures("dirty")
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_are_numbers(
    numbers: Path, direct: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.read_rows._WORTH", 100)
    with h5py.File(numbers / "a.h5") as file:
        arrays = {(str(numbers / "a.h5"), name): file[name][...] for name in file}
    root = zarr.open_group(numbers / "b.zarr", mode="r")
    arrays |= {(str(numbers / "b.zarr"), name): root[name][...] for name in root.array_keys()}
    assert len(arrays) == 15
    for (path, name), whole in arrays.items():
        for what, indices in INDICES.items():
            found = read_rows(path, name, indices, direct=direct, threads=threads)
            expected = whole[
                np.asarray(indices, np.int64) if isinstance(indices, (list, range)) else indices
            ]
            assert type(found) is type(expected) and found.tobytes() == expected.tobytes(), (
                name,
                what,
            )


@pytest.mark.parametrize("shape", [(4, 4), (400,)])
def test_what_was_never_written_in_a_file_with_a_user_block(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file.create_dataset("data", shape, "i8", fillvalue=-1)
        file.create_dataset("written", data=np.arange(4))
    assert (read_rows(tmp_path / "a.h5", "data", slice(None)) == np.full(shape, -1)).all()
    assert read_rows(tmp_path / "a.h5", "written", slice(None)).tolist() == [0, 1, 2, 3]
