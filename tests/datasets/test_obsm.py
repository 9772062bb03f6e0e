"""Dense and sparse arrays in AnnData's obsm, with targets out of obs."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import HDF5Dataset, SparseDataset, ZarrDataset, create_dataloader, open_dataset, pack
from headrace.errors import FormatError, HeadraceWarning, MissingNameError
from headrace.storage.hdf5.packed import packed_info
from headrace.testing.contract import DatasetContract, same
from tests.data.sparse import KINDS, random_matrix, write_anndata, write_matrix
from tests.servers.ranges import RangeServer

ROWS = 30
VECTORS = np.random.default_rng(3).random((ROWS, 5), np.float32)
CLASSES: dict[str, type[Any]] = {"a.h5ad": HDF5Dataset, "a.zarr": ZarrDataset}


def write_file(path: Path, vectors: Any = VECTORS) -> Path:
    """A file of AnnData with obsm/X_pca, and obsm/kmers, which is sparse."""
    write_anndata(path, random_matrix(ROWS, 12))
    root: Any = (
        zarr.open_group(path, mode="r+") if path.suffix == ".zarr" else h5py.File(path, "r+")
    )
    obsm = root.create_group("obsm")
    if path.suffix == ".zarr":
        obsm.create_array("X_pca", data=vectors)
        write_matrix(obsm, "kmers", random_matrix(ROWS, 7, seed=5))
    else:
        obsm["X_pca"] = vectors
        write_matrix(obsm, "kmers", random_matrix(ROWS, 7, seed=5))
        root.close()
    return path


@pytest.fixture(params=CLASSES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_file(tmp_path / str(request.param))


@pytest.mark.parametrize("direct", [True, False])
def test_categories_are_class_numbers(path: Path, direct: bool) -> None:
    with CLASSES[path.name](path, "obsm/X_pca", target_name="obs/kind", direct=direct) as dataset:
        assert dataset.classes == list(KINDS) and [target for _, target in dataset] == [
            row % 3 for row in range(ROWS)
        ]
        assert type(dataset[4][1]) is int and np.array_equal(dataset[4][0], VECTORS[4])
        vectors, kinds = next(
            iter(create_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0))
        )
        assert np.array_equal(vectors, VECTORS[:8]) and same(kinds, torch.arange(8) % 3)
        train, _ = dataset.split(0.5, stratify=True)
        assert np.bincount(train.targets).tolist() == [5, 5, 5]
    with open_dataset(path, dataset_name="obsm/X_pca", target_name="/obs/kind") as opened:
        assert type(opened) is CLASSES[path.name] and opened[4][1] == 1


def test_other_columns_are_what_they_are(path: Path) -> None:
    for name, wanted in (("age", 2.0), ("batch", "b0")):
        with CLASSES[path.name](path, "obsm/X_pca", target_name=f"obs/{name}") as dataset:
            assert dataset[4][1] == wanted and dataset.classes is None
    with pytest.raises(MissingNameError, match="'obs/nothing'"):
        CLASSES[path.name](path, "obsm/X_pca", target_name="obs/nothing")
    with pytest.raises(MissingNameError, match="'obs'"):  # a table is no column
        CLASSES[path.name](path, "obsm/X_pca", target_name="obs")


def test_sparse_matrices_in_obsm(path: Path) -> None:
    with SparseDataset(path, "obsm/kmers", targets="kind") as dataset:
        assert (
            dataset.shape == (ROWS, 7)
            and dataset.classes == list(KINDS)
            and dataset.columns is None
        )
        assert (
            np.array_equal(dataset[4][0], random_matrix(ROWS, 7, seed=5)[4]) and dataset[4][1] == 1
        )
        assert dataset.label_columns["batch"][3] == "b1"


def _changed(path: Path, codes: list[int] | None = None, kinds: list[str] | None = None) -> Path:
    """The same file with other codes, or other categories."""
    with h5py.File(write_file(path), "r+") as file:
        for name, values in (("codes", codes), ("categories", kinds)):
            if values is not None:
                attributes = dict(file[f"obs/kind/{name}"].attrs)
                del file[f"obs/kind/{name}"]
                file[f"obs/kind/{name}"] = np.array(values, np.int8 if name == "codes" else object)
                file[f"obs/kind/{name}"].attrs.update(attributes)
    return path


def test_categories_of_several_files_are_joined_by_name(tmp_path: Path) -> None:
    write_file(tmp_path / "a.h5ad")
    _changed(tmp_path / "b.h5ad", kinds=["NK", "monocyte", "B cell"])
    with HDF5Dataset(tmp_path, "obsm/X_pca", target_name="obs/kind") as dataset:
        assert dataset.classes == [*KINDS, "monocyte"]
        assert [target for _, target in dataset] == [row % 3 for row in range(ROWS)] + [
            (1, 3, 0)[row % 3] for row in range(ROWS)
        ]
    with h5py.File(tmp_path / "c.h5ad", "w") as file:
        file["obsm/X_pca"], file["obs/kind"] = VECTORS, np.arange(ROWS)
    with pytest.raises(FormatError, match="'obs/kind' is not of one kind in all files"):
        HDF5Dataset(tmp_path, "obsm/X_pca", target_name="obs/kind")


def test_rows_without_a_category(tmp_path: Path) -> None:
    path = _changed(tmp_path / "a.h5ad", codes=[-1, *[0] * (ROWS - 1)])
    with pytest.warns(
        HeadraceWarning, match="1 of 30 rows have no category in 'obs/kind': their target is -1"
    ):
        dataset = HDF5Dataset(path, "obsm/X_pca", target_name="obs/kind")
    assert dataset[0][1] == -1 and dataset[1][1] == 0
    dataset.close()


@pytest.mark.parametrize(("codes", "said"), [
    ([0] * (ROWS - 1), r"obs/kind has shape \[29\], and not one value for each of 30 rows"),
    ([3] * ROWS, "row 0 has code 3, and there are 3 categories: the file is damaged"),
])  # fmt: skip
def test_damaged_categories(codes: list[int], said: str, tmp_path: Path) -> None:
    path = _changed(tmp_path / "a.h5ad", codes=codes)
    with pytest.raises(FormatError, match=said):
        HDF5Dataset(path, "obsm/X_pca", target_name="obs/kind")


def test_missing_categories_and_values(tmp_path: Path) -> None:
    with h5py.File(write_file(tmp_path / "a.h5ad"), "r+") as file:
        del file["obs/kind/categories"]
        for name, missing in (("whole", -1), ("holes", 3)):
            group = file.create_group(f"obs/{name}")
            group.attrs["encoding-type"] = "nullable-integer"
            group["values"], group["mask"] = np.arange(ROWS), np.arange(ROWS) == missing
    with pytest.raises(
        FormatError, match="obs/kind is categorical and has no categories: the file is damaged"
    ):
        HDF5Dataset(tmp_path / "a.h5ad", "obsm/X_pca", target_name="obs/kind")
    with HDF5Dataset(tmp_path / "a.h5ad", "obsm/X_pca", target_name="obs/whole") as dataset:
        assert dataset[7][1] == 7 and dataset.classes is None
    with pytest.raises(
        FormatError,
        match=r"obs/holes has no value for 1 of 30 rows, such as row 3: .* choose another column",
    ):
        HDF5Dataset(tmp_path / "a.h5ad", "obsm/X_pca", target_name="obs/holes")


def test_classes_are_packed(path: Path, tmp_path: Path) -> None:
    with CLASSES[path.name](path, "obsm/X_pca", target_name="obs/kind") as dataset:
        pack(dataset, tmp_path / "out.h5")
        with HDF5Dataset(tmp_path / "out.h5", target_name="targets") as packed:
            assert same(list(packed), list(dataset))
    info = packed_info(str(tmp_path / "out.h5"))
    assert info is not None and info.classes == list(KINDS)


def test_through_a_server(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_file(tmp_path / "data" / "a.h5ad")
    local = write_file(tmp_path / "a.zarr")
    with zipfile.ZipFile(tmp_path / "data" / "a.zarr.zip", "w") as zipped:
        for file in sorted(one for one in local.rglob("*") if one.is_file()):
            zipped.write(file, file.relative_to(local))
    with RangeServer(tmp_path / "data") as server:
        for name, cls in (("a.h5ad", HDF5Dataset), ("a.zarr.zip", ZarrDataset)):
            for _ in range(2):  # what is cached of the first time does not lose the classes
                options: dict[str, Any] = {
                    "target_name": "obs/kind",
                    "cache_dir": tmp_path / "cache",
                }
                with cls(f"{server.url}/{name}", "obsm/X_pca", **options) as dataset:
                    assert (
                        dataset.classes == list(KINDS)
                        and dataset[4][1] == 1
                        and np.array_equal(dataset[4][0], VECTORS[4])
                    )


@pytest.mark.slow
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "obsm.h5ad"
        if not self.path.exists():
            write_file(self.path)

    def make(self, **options: Any) -> HDF5Dataset:
        return HDF5Dataset(self.path, "obsm/X_pca", target_name="obs/kind", **options)
