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
    FormatError,
    HDF5Dataset,
    ImageDataset,
    MissingNameError,
    ZarrDataset,
    pack,
    read_rows,
)
from headrace.memory.limits import Limit

N = 300
DRAWS = np.random.default_rng(0)
ROWS = DRAWS.integers(0, 9, (N, 6, 5)).astype("i4")
NUMBERS = np.arange(100, 100 + N, dtype="i4")
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw": {"chunks": 16},
    "alone": {"chunks": 1},
    "gzip": {"chunks": 16, "compression": "gzip", "shuffle": True},
    "gzip, alone": {"chunks": 1, "compression": "gzip"},
    "lzf": {"chunks": 16, "compression": "lzf"},
    "lzf, alone": {"chunks": 1, "compression": "lzf"},
}
INDICES: dict[str, Any] = {
    "one": 7,
    "last": -1,
    "a NumPy integer": np.int32(-N),
    "a list": [5, 299, 0, 5, 17, -1],
    "none": [],
    "a range": range(290, 10, -3),
    "all, shuffled": DRAWS.permutation(N),
    "few": DRAWS.integers(0, N, 20).astype(np.uint8),
    "a table": DRAWS.integers(-N, N, (3, 4)),
    "a mask": DRAWS.random(N) < 0.3,
    "everything": slice(None),
    "steps": slice(250, 3, -7),
    "beyond": slice(290, 900),
    "nothing": slice(9, 9),
    "pairs": np.repeat(np.arange(0, 300, 10), 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of rows and of numbers in all layouts; those in "others.h5" have objects."""
    folder = tmp_path_factory.mktemp("rows")
    with h5py.File(folder / "a.h5", "w") as file:
        for kind, data in (("rows", ROWS), ("numbers", NUMBERS)):
            for name, layout in LAYOUTS.items():
                how = dict(layout)
                if "chunks" in how:
                    how["chunks"] = (how["chunks"], *data.shape[1:])
                file.create_dataset(f"{kind}, {name}", data=data, **how)
            layout = h5py.VirtualLayout(data.shape, "i4")
            layout[:] = h5py.VirtualSource(file[f"{kind}, contiguous"])
            file.create_virtual_dataset(f"{kind}, virtual", layout)
        big = ROWS.astype(">f8")
        file.create_dataset("cut", data=big, chunks=(7, 4, 3))
        file.create_dataset("cut gzip", data=big, chunks=(16, 4, 5), compression="gzip")
        for name, chunks in (("partly", 16), ("partly, alone", 1)):
            file.create_dataset(name, (N,), "i4", chunks=(chunks,), fillvalue=7)[:16] = 3
        pairs = np.zeros(N, [("a", "i4"), ("b", "f8", (2,))])
        pairs["a"] = NUMBERS
        file.create_dataset("pairs", data=pairs, chunks=(1,), compression="gzip")
        file.create_dataset("unwritten", (N,), "i8", fillvalue=-1)
    with h5py.File(folder / "others.h5", "w", userblock_size=512) as file:
        file["texts"] = [f"text {i}" for i in range(N)]
        ragged = file.create_dataset("ragged", (N,), h5py.vlen_dtype("i4"))
        for i in range(N):
            ragged[i] = np.arange(i % 4)
        file["single"] = 3.0
        file.create_dataset("unwritten", (4, 4), "i8", fillvalue=-1)
        file["written"] = np.arange(4)
    root = zarr.open_group(folder / "b.zarr", mode="w")
    whole: Any = {"data": ROWS, "chunks": (16, 6, 5)}
    root.create_array("zstd", **whole)
    root.create_array("raw", compressors=None, **whole)
    root.create_array("shards", shards=(64, 6, 5), **whole)
    old = zarr.open_group(folder / "c.zarr", mode="w", zarr_format=2)
    for name, chunk, codec in (
        ("alone", 1, numcodecs.Zstd()),
        ("bz2, alone", 1, numcodecs.BZ2()),
        ("bz2", 16, numcodecs.BZ2()),
    ):
        old.create_array(name, data=NUMBERS[:40], chunks=(chunk,), compressors=[codec])
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


def check(path: Path, name: str, whole: Any, indices: Any, **options: Any) -> None:
    found = read_rows(path, name, indices, **options)
    if isinstance(indices, (list, range)):
        indices = np.asarray(indices, np.int64)
    expected = whole[indices]
    assert type(found) is type(expected) and found.dtype == expected.dtype, name
    assert found.shape == expected.shape and found.tobytes() == expected.tobytes(), name


@pytest.mark.usefixtures("dirty")
@pytest.mark.parametrize(
    ("threads", "direct"),
    [(3, True), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((1, True), (1, False)))],
)
def test_rows_are_those_of_numpy(
    folder: Path, threads: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every array by some indices each, so that all of them are used."""
    monkeypatch.setattr("headrace.formats.read_rows._WORTH", 100)
    arrays: list[tuple[Path, str, Any]] = []
    with h5py.File(folder / "a.h5") as file:
        arrays += [(folder / "a.h5", name, file[name][...]) for name in file]
    for store in ("b.zarr", "c.zarr"):
        root = zarr.open_group(folder / store, mode="r")
        arrays += [(folder / store, name, root[name][...]) for name in root.array_keys()]
    assert len(arrays) == 28
    for number, (path, name, whole) in enumerate(arrays):
        if len(whole) < N:  # read row by row
            for indices in (7, [5, 39, 0, 5], slice(None, None, -3)):
                check(path, name, whole, indices, threads=threads, direct=direct)
            continue
        for what, indices in enumerate(INDICES.values()):
            if (number + what) % 3 == 0:
                check(path, name, whole, indices, threads=threads, direct=direct)


def test_rows_that_are_objects_and_a_user_block(folder: Path) -> None:
    path = folder / "others.h5"
    with h5py.File(path) as file:
        arrays = {name: file[name][...] for name in ("texts", "ragged")}
    for name, whole in arrays.items():
        for direct in (True, False):
            found = read_rows(path, name, [5, -1, 5], direct=direct)
            assert found.dtype == whole.dtype
            for row, index in zip(found, (5, -1, 5), strict=True):
                assert np.array_equal(row, whole[index])
    assert (read_rows(path, "unwritten", slice(None)) == np.full((4, 4), -1)).all()
    assert read_rows(path, "written", slice(None)).tolist() == [0, 1, 2, 3]


def test_several_files_are_one_array(tmp_path: Path) -> None:
    whole = []
    for number, count in enumerate((7, 0, 12, 1)):
        whole.append(DRAWS.integers(0, 99, (count, 3)))
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["data"] = whole[-1]
    indices = [19, 0, 7, 6, -1, 7]
    found = read_rows(tmp_path / "*.h5", "data", indices)
    assert np.array_equal(found, np.concatenate(whole)[indices])
    found = read_rows([tmp_path / "2.h5", tmp_path / "0.h5"], None, slice(None))
    assert np.array_equal(found, np.concatenate([whole[2], whole[0]]))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.arange(3)
    with h5py.File(tmp_path / "b.hdf5", "w") as file:
        file["other"] = np.arange(3)
    with pytest.raises(ConfigError, match=r"b\.hdf5 holds 'other', and .*a\.h5 'data'"):
        read_rows([tmp_path / "a.h5", tmp_path / "b.hdf5"], None, 0)
    with pytest.raises(FormatError, match=r"a\.h5 and .*0\.h5 .*int64 \[\] .*int64 \[3\]"):
        read_rows(tmp_path / "*.h5", "data", 0)


def test_an_open_dataset_is_read_again(folder: Path) -> None:
    name = "rows, gzip"
    with HDF5Dataset(folder / "a.h5", name) as dataset:
        for indices in (slice(3, 90), [5, -1], slice(3, 90)):
            assert np.array_equal(read_rows(dataset, None, indices), ROWS[indices])
        view = dataset.subset([9, 4, 200])
        assert np.array_equal(read_rows(view, name, [0, -1, 1]), ROWS[[9, 200, 4]])
        with pytest.raises(IndexError, match="3 is outside of 3"):
            read_rows(view, None, 3)
        with pytest.raises(ConfigError, match=r"'rows, gzip'.*'raw'"):
            read_rows(dataset, "raw", 0)
    rows = ZarrDataset(folder / "b.zarr", "zstd")
    assert read_rows(rows, None, [1, 2]).shape == (2, 6, 5)
    patches = ZarrDataset(folder / "b.zarr", "zstd", patch_shape=(3, 3))
    with pytest.raises(ConfigError, match="ZarrDataset"):
        read_rows(patches, None, 0)


def test_samples_of_several_lengths_are_no_rows(tiny_photos: Path, tmp_path: Path) -> None:
    path = pack(ImageDataset(tiny_photos), tmp_path / "a.h5", store="encoded", workers=1)
    with pytest.raises(FormatError, match="several lengths"):
        read_rows(path, "data", 0)


# -- what is refused


def test_indices_that_make_no_sense(folder: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (N, r"a\.h5: .* 300 .* 300 rows"),
        ([0, -N - 1], "-301"),
        (np.array([2**63], np.uint64), "9223372036854775808"),
        (1.5, r"1\.5"),
        (["a"], "a list"),
        (np.ones(3, bool), r"\[3\], .* 300 rows"),
    ]
    for indices, said in cases:
        with pytest.raises(IndexError, match=said):
            read_rows(folder / "a.h5", "rows, raw", indices)


def test_arguments_that_make_no_sense(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, others, text = folder / "a.h5", folder / "others.h5", tmp_path / "a.txt"
    text.write_text("a text")
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (path, "none", {}, MissingNameError, "'none'"),
        (others, "single", {}, FormatError, "'single'"),
        (path, ["cut", "pairs"], {}, ConfigError, "name"),
        (path, "cut", {"threads": 0}, ConfigError, "threads"),
        (path, "cut", {"thread": 2}, ConfigError, "'thread': .* threads"),
        ([path, tmp_path], "cut", {}, DataNotFoundError, r"\.h5"),
        (tmp_path / "none.h5", "cut", {}, DataNotFoundError, r"none\.h5"),
        (text, "cut", {}, FormatError, r"a\.txt"),
    ]
    for where, name, options, error, said in cases:
        with pytest.raises(error, match=said):
            read_rows(where, name, 0, **options)
    monkeypatch.setattr("headrace.formats.read_rows._WORTH", 100)
    limit = Limit("a test", 1000, 0)
    monkeypatch.setattr("headrace.formats.arrays.rows.memory_limits", lambda: [limit])
    with pytest.raises(BudgetError, match=r"300 rows .*a test"):
        read_rows(path, "cut", slice(None))


@pytest.mark.slow
def test_it_needs_no_torch(folder: Path) -> None:
    code = (
        f"import sys, headrace; headrace.read_rows({str(folder / 'a.h5')!r}, 'cut', [3, 1]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
