"""TableDataset over .npy and .npz files, and arrays that can't be read in place."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    ConfigError,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    TableDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.testing.contract import DatasetContract, same

N = 40
ROWS = np.random.default_rng(1).integers(0, 255, (N, 6, 5), np.uint8)


def npy(path: Path, array: Any, **options: Any) -> Path:
    np.save(path, array, **options)
    return path


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


# -- what samples are


def test_rows_are_tensors(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", ROWS)
    for mode in ("lazy", "eager", "cached"):
        with TableDataset(path, loading_mode=mode, progress=False) as dataset:
            assert len(dataset) == N
            for row in (0, 17, N - 1):
                assert same(dataset[row], torch.from_numpy(ROWS[row])), mode
            loader = create_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0)
            assert ("straight from storage" in loader.explain()) == (mode == "lazy")
            assert torch.equal(next(iter(loader)), torch.from_numpy(ROWS[:8]))
            assert dataset.source_of(3) == f"{path}, row 3"
            assert "pread" in dataset.explain()
    with TableDataset(path) as dataset:
        pack(dataset, tmp_path / "a.h5", workers=1, progress=False)
        with HDF5Dataset(tmp_path / "a.h5") as packed:
            assert same(packed[3], dataset[3])


@pytest.mark.parametrize("shape", [(N,), (N, 3)])
def test_dtypes_and_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    for dtype in ("?", "i1", ">i4", "u2", "f2", "f4", ">f8", "c8"):
        array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        with TableDataset(npy(tmp_path / "a.npy", array)) as dataset:
            row = dataset[7].numpy()
            assert np.array_equal(row, array[7]), dtype
            assert row.dtype == array.dtype.newbyteorder("="), dtype
    texts = np.arange(math.prod(shape)).reshape(shape).astype("U5")
    for dtype in ("U5", "S4"):
        with TableDataset(npy(tmp_path / "a.npy", texts.astype(dtype))) as dataset:
            assert dataset[7] == texts[7].tolist(), dtype
    array = np.zeros(shape, [("x", "i4"), ("y", "f4", (2,))])
    array["x"] = np.arange(array.size).reshape(shape)
    with TableDataset(npy(tmp_path / "a.npy", array)) as dataset:
        assert np.array_equal(dataset[7]["x"], array[7]["x"])
        assert dataset[7]["y"].dtype == torch.float32


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for number, n in enumerate((7, 0, 12)):
        npy(tmp_path / f"{number}.npy", ROWS[:n])
    with open_dataset(tmp_path) as dataset:
        assert type(dataset) is TableDataset
        assert len(dataset) == 19
        assert same(dataset[8], torch.from_numpy(ROWS[1]))
    npy(tmp_path / "3.npy", ROWS.astype("f4"))
    with pytest.raises(FormatError, match=r"float32 \[6, 5\] here, and of uint8"):
        TableDataset(tmp_path)


def test_arrays_of_an_archive(tmp_path: Path) -> None:
    names = np.array([f"n{row}" for row in range(N)])
    path = npz(tmp_path / "a.npz", images=ROWS, labels=np.arange(N) % 4, names=names)
    with TableDataset(path, target_name="labels") as dataset:
        row, target = dataset[6]
        assert list(row) == ["images", "names"]
        assert same(row["images"], torch.from_numpy(ROWS[6]))
        assert row["names"] == "n6"
        assert target == 2
    with TableDataset(path, "images", target_name="labels") as dataset:
        loader = create_dataloader(dataset, batch_size=5, shuffle=False, num_workers=0)
        images, labels = next(iter(loader))
        assert torch.equal(images, torch.from_numpy(ROWS[:5]))
        assert labels.tolist() == [0, 1, 2, 3, 0]
    with TableDataset(path, ["labels"]) as dataset:
        assert int(dataset[5]["labels"]) == 1
    with pytest.raises(MissingNameError, match=r"a\.npz .*'image'; .*images, labels, names"):
        TableDataset(path, "image")


def test_fortran_order_of_one_long_axis(tmp_path: Path) -> None:
    for shape in ((N,), (N, 1, 1), (1, 1, N), (0, 6, 5)):
        array, file = np.arange(math.prod(shape), dtype=np.int16).reshape(shape), io.BytesIO()
        header = {"descr": "<i2", "fortran_order": True, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        (tmp_path / "a.npy").write_bytes(file.getvalue() + array.tobytes())
        with TableDataset(tmp_path / "a.npy") as dataset:
            assert [row.tolist() for row in dataset] == array.tolist(), shape


# -- arrays that can't be read in place


def test_arrays_that_are_refused(tmp_path: Path) -> None:
    """But not beside an array that is chosen."""
    by_columns = "Fortran order"
    for array, said in (
        (np.array([1, "a", None], object), "dtype object"),
        (np.zeros(3, [("a", "i4"), ("b", object)]), "Python objects"),
        (np.float64(3), "single value"),
        (np.asfortranarray(ROWS[:, :, 0]), by_columns),
        (np.asfortranarray(ROWS[:, None]), by_columns),
        (np.asfortranarray(ROWS[:1]), by_columns),
    ):
        with pytest.raises(FormatError, match=rf"a\.npy.*{said}"):
            TableDataset(npy(tmp_path / "a.npy", array, allow_pickle=True))
        path = npz(tmp_path / "a.npz", x=ROWS, meta=array)
        with pytest.raises(FormatError, match=rf"a\.npz, 'meta\.npy'.*{said}"):
            TableDataset(path)
        with TableDataset(path, "x") as dataset:
            assert same(dataset[N - 1], torch.from_numpy(ROWS[-1]))
    with pytest.raises(FormatError, match=r"a\.npy: it holds long doubles"):
        TableDataset(npy(tmp_path / "a.npy", np.ones(3, np.longdouble)))


def test_archives_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=ROWS)
    with pytest.raises(FormatError, match=r"a\.npz, 'x\.npy' is compressed.*numpy\.savez"):
        TableDataset(path)
    with pytest.raises(FormatError, match="'x' 40, 'classes' 3"):
        TableDataset(npz(path, x=ROWS, classes=np.arange(3)))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "no array")
    with pytest.raises(FormatError, match=r"'readme\.txt'"):
        TableDataset(path)


def test_names_that_have_no_meaning(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", ROWS)
    for option in ("columns", "target_name", "decode"):
        with pytest.raises(ConfigError):
            TableDataset(path, **{option: "x"})


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    whole = npy(tmp_path / "a.npy", ROWS).read_bytes()
    archive = npz(tmp_path / "a.npz", a=np.arange(10), b=np.arange(10)).read_bytes()
    damaged = {
        "a.npy": [
            whole.replace(b"(40, 6, 5)", b"(40, 6, -)"),
            whole.replace(b"|u1", b"|q9"),
            whole[:8] + b"\xff\xff" + whole[10:],
            whole.replace(b"(40, 6, 5)", b"(99, 6, 5)"),
            whole[:6] + b"\x09" + whole[7:],
        ],
        "a.npz": [],
    }
    for name, data in (("a.npy", whole), ("a.npz", archive)):
        damaged[name] += [data[:size] for size in (0, 5, 60, len(data) // 2, len(data) - 1)]
    directory = archive.rfind(b"PK\5\6") + 16
    for offset in (5, 1 << 31, 0xFFFFFFF0):
        place = struct.pack("<I", offset)
        damaged["a.npz"].append(archive[:directory] + place + archive[directory + 4 :])
    for name, contents in damaged.items():
        for number, content in enumerate(contents):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(FormatError) as raised:
                TableDataset(tmp_path / name)
            assert str(tmp_path / name) in str(raised.value), number


# -- the contracts


@pytest.mark.slow
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = npy(tmp_path / "a.npy", ROWS)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, **options)


def test_arrays_beside_tables(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for array, table in (("a.npy", "b.parquet"), ("b.npy", "a.parquet")):
        folder = tmp_path / array
        folder.mkdir()
        np.save(folder / array, ROWS)
        pq.write_table(pa.table({"x": [1, 2]}), folder / table)
        with pytest.raises(FormatError, match=rf"as .*{array}, and .*{table}: make one dataset"):
            TableDataset(folder)
