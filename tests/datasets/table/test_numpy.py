"""TableDataset over .npy and .npz files: rows straight into their batch, and arrays that can't
be read in place.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    ConfigError,
    FileChangedError,
    FormatError,
    MissingNameError,
    TableDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.inspecting import inspect
from headrace.testing.contract import DatasetContract, same
from tests.datasets.remote_contract import RemoteDatasetContract

pytestmark = pytest.mark.quick_every(4)

N = 40
ROWS = np.random.default_rng(1).integers(0, 255, (N, 6, 5), np.uint8)


def npy(path: Path, array: Any, **options: Any) -> Path:
    np.save(path, array, **options)
    return path


# -- what samples are


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_rows_are_tensors(mode: str, tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", ROWS)
    with TableDataset(path, loading_mode=mode, progress=False) as dataset:
        assert len(dataset) == N and all(
            same(dataset[row], torch.from_numpy(ROWS[row])) for row in range(N)
        )
        loader = create_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0)
        assert "straight from storage" in loader.explain()
        assert torch.equal(next(iter(loader)), torch.from_numpy(ROWS[:8]))
        assert dataset.source_of(3) == f"{path}, row 3" and "pread" in dataset.explain()


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", ">i4", "u2", "f2", "f4", ">f8", "c8", "U5", "S4", [("x", "i4"), ("y", "f4", (2,))]],
)
@pytest.mark.parametrize("shape", [(N,), (N, 3)])
def test_dtypes_and_shapes(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.zeros(shape, dtype)
    if array.dtype.names is None:
        array = np.arange(array.size).reshape(shape).astype(dtype)
    else:
        array["x"] = np.arange(array.size).reshape(shape)
    with TableDataset(npy(tmp_path / "a.npy", array)) as dataset:
        row = dataset[7]
        if array.dtype.names is not None:
            assert np.array_equal(row["x"], array[7]["x"]) and row["y"].dtype == torch.float32
        elif array.dtype.kind in "US":
            texts = np.char.decode(array[7]) if array.dtype.kind == "S" else array[7]
            assert row == (texts.tolist() if array.ndim > 1 else str(texts))
        else:
            assert np.array_equal(
                row.numpy(), array[7]
            ) and row.numpy().dtype == array.dtype.newbyteorder("=")


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for number, n in enumerate((7, 0, 12)):
        npy(tmp_path / f"{number}.npy", ROWS[:n])
    with open_dataset(tmp_path) as dataset:
        assert (
            type(dataset) is TableDataset
            and len(dataset) == 19
            and same(dataset[8], torch.from_numpy(ROWS[1]))
        )
    npy(tmp_path / "3.npy", ROWS.astype("f4"))
    with pytest.raises(
        FormatError, match=r"can't be one dataset: rows of float32 \[6, 5\] here, and of uint8"
    ):
        TableDataset(tmp_path)


def test_arrays_of_an_archive(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        images=ROWS,
        labels=np.arange(N) % 4,
        names=np.array([f"n{row}" for row in range(N)]),
    )
    path = tmp_path / "a.npz"
    with TableDataset(path, target_name="labels") as dataset:
        row, target = dataset[6]
        assert (
            list(row) == ["images", "names"]
            and same(row["images"], torch.from_numpy(ROWS[6]))
            and row["names"] == "n6"
            and target == 2
        )
    with TableDataset(path, "images", target_name="labels") as dataset:
        images, labels = next(
            iter(create_dataloader(dataset, batch_size=5, shuffle=False, num_workers=0))
        )
        assert torch.equal(images, torch.from_numpy(ROWS[:5])) and labels.tolist() == [
            0,
            1,
            2,
            3,
            0,
        ]
    with TableDataset(path, ["labels"]) as dataset:
        assert int(dataset[5]["labels"]) == 1
    with pytest.raises(
        MissingNameError, match=r"a\.npz has no array 'image'; it has: images, labels, names"
    ):
        TableDataset(path, "image")


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 1, 1), (1, 1, N), (0, 6, 5)])
def test_fortran_order_of_one_long_axis(shape: tuple[int, ...], tmp_path: Path) -> None:
    array, rows = np.arange(math.prod(shape), dtype=np.int16).reshape(shape), io.BytesIO()
    np.lib.format.write_array_header_1_0(
        rows, {"descr": "<i2", "fortran_order": True, "shape": shape}
    )
    (tmp_path / "a.npy").write_bytes(rows.getvalue() + array.tobytes())
    with TableDataset(tmp_path / "a.npy") as dataset:
        assert [dataset[row].tolist() for row in range(len(array))] == array.tolist()


# -- arrays that can't be read in place


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (
            np.array([1, "a", None], object),
            r"holds Python objects \(dtype object\), which are pickles",
        ),
        (np.float64(3), "is a single value, and no array of samples"),
        (
            np.asfortranarray(ROWS[:, :, 0]),
            r"lies column by column \(Fortran order\).*numpy.ascontiguousarray",
        ),
        (np.asfortranarray(ROWS[:, None]), "lies column by column"),
        (np.asfortranarray(ROWS[:1]), "lies column by column"),
        (np.zeros(3, [("a", "i4"), ("b", object)]), "holds Python objects"),
    ],
)
def test_arrays_that_are_refused(array: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=said):
        TableDataset(npy(tmp_path / "a.npy", array, allow_pickle=True))
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises(FormatError, match=rf"a\.npz, 'x\.npy' {said}"):
        TableDataset(tmp_path / "a.npz")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=ROWS)
    with pytest.raises(
        FormatError,
        match=(
            r"a\.npz, 'x\.npy' is compressed, so its rows can't be read in place: write the file "
            r"with numpy\.savez"
        ),
    ):
        TableDataset(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "other", [np.float32(1), np.array(["a", None], object), np.asfortranarray(np.ones((3, 4)))]
)
def test_arrays_that_nobody_chose_do_not_matter(other: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=ROWS, meta=other)
    with TableDataset(tmp_path / "a.npz", "x") as dataset:
        assert np.array_equal(np.stack([dataset[row].numpy() for row in range(N)]), ROWS)
    with pytest.raises(FormatError, match=r"a\.npz, 'meta\.npy'"):
        TableDataset(tmp_path / "a.npz")
    report = inspect(tmp_path / "a.npz")
    assert report.opens_as.endswith("columns=['x'])") and any(
        "'meta.npy'" in note for note in report.notes
    )


def test_names_that_have_no_meaning(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", ROWS)
    for options in ({"columns": "x"}, {"target_name": "x"}):
        with pytest.raises(
            ConfigError,
            match=r"a\.npy is one array without names: leave out columns and target_name",
        ):
            TableDataset(path, **options)
    with pytest.raises(
        ConfigError, match="holds NumPy arrays, which have no columns of images or texts"
    ):
        TableDataset(path, image_column="x")
    np.savez(tmp_path / "a.npz", x=ROWS, classes=np.arange(3))
    with pytest.raises(
        FormatError,
        match=(
            r"different numbers of rows: 'x' 40, 'classes' 3: name those that belong together "
            r"with columns="
        ),
    ):
        TableDataset(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_a_file_that_is_cut_short(name: str, tmp_path: Path) -> None:
    data = io.BytesIO()
    np.save(data, ROWS) if name == "a.npy" else np.savez(data, x=ROWS)
    whole = data.getvalue()
    for size in (0, 5, 60, len(whole) // 2, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(FormatError, match=rf"{name}"):
            TableDataset(tmp_path / name)


def test_a_header_that_is_damaged(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", ROWS)
    whole = path.read_bytes()
    for damaged in (
        whole.replace(b"(40, 6, 5)", b"(40, 6, -)"),
        whole.replace(b"|u1", b"|q9"),
        whole[:8] + b"\xff\xff" + whole[10:],
        whole.replace(b"(40, 6, 5)", b"(99, 6, 5)"),
        whole[:6] + b"\x09" + whole[7:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"a\.npy.*(header|cut short)"):
            TableDataset(path)


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("readme.txt", "no array")
    with pytest.raises(
        FormatError,
        match=r"'readme\.txt' is no array: the zip file was not written by numpy\.savez",
    ):
        TableDataset(tmp_path / "a.npz")


def test_a_file_that_changes_is_not_read_on(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", ROWS)
    with TableDataset(path) as dataset:
        dataset[0]
        os.utime(path, (1, 1))
        with pytest.raises(FileChangedError):
            dataset[1]


def test_arrays_are_packed(tmp_path: Path) -> None:
    from headrace import HDF5Dataset

    with TableDataset(npy(tmp_path / "a.npy", ROWS)) as dataset:
        pack(dataset, tmp_path / "a.h5", workers=1, progress=False)
        with HDF5Dataset(tmp_path / "a.h5") as packed:
            assert same(packed[3], dataset[3])


# -- the contracts


class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = npy(tmp_path / "a.npy", ROWS)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, **options)


@pytest.mark.slow
class TestRemote(RemoteDatasetContract):
    names = ("a.npz", "b.npz")
    has_index = False

    def write(self, folder: Path) -> None:
        for name in self.names:
            np.savez(folder / name, x=ROWS, y=np.arange(N))

    def make(self, paths: list[str], **options: Any) -> TableDataset:
        return TableDataset(paths, "x", target_name="y", **{"progress": False, **options})


def test_long_doubles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 2), np.longdouble))
    with pytest.raises(FormatError, match=r"a\.npy: it holds long doubles"):
        TableDataset(tmp_path / "a.npy")
