"""Dense and sparse arrays in AnnData's obsm, with targets out of obs."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, SparseDataset, ZarrDataset, open_dataset, pack
from headrace.errors import FormatError, MissingNameError
from headrace.testing.contract import same
from tests.data.sparse import KINDS, random_matrix, write_anndata, write_matrix
from tests.servers.ranges import RangeServer

ROWS = 30
VECTORS = np.random.default_rng(3).random((ROWS, 5), np.float32)
KMERS = random_matrix(ROWS, 7, seed=5)
CLASSES: dict[str, type[Any]] = {"a.h5ad": HDF5Dataset, "a.zarr": ZarrDataset}


def write_file(path: Path) -> Path:
    """A file of AnnData with obsm/X_pca, and obsm/kmers, which is sparse."""
    write_anndata(path, random_matrix(ROWS, 12))
    is_zarr = path.suffix == ".zarr"
    root: Any = zarr.open_group(path, mode="r+") if is_zarr else h5py.File(path, "r+")
    obsm = root.create_group("obsm")
    if is_zarr:
        obsm.create_array("X_pca", data=VECTORS)
    else:
        obsm["X_pca"] = VECTORS
    write_matrix(obsm, "kmers", KMERS)
    if not is_zarr:
        root.close()
    return path


@pytest.fixture(params=CLASSES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_file(tmp_path / str(request.param))


def test_columns_of_obs_are_targets(path: Path, tmp_path: Path, loader_of: Any) -> None:
    cls = CLASSES[path.name]
    for direct in (True, False):
        with cls(path, "obsm/X_pca", target_name="obs/kind", direct=direct) as dataset:
            assert dataset.classes == list(KINDS) and type(dataset[4][1]) is int
            assert [target for _, target in dataset] == [row % 3 for row in range(ROWS)]
            assert np.array_equal(np.stack([vector for vector, _ in dataset]), VECTORS)
            vectors, kinds = next(iter(loader_of(dataset, shuffle=False)))
            assert np.array_equal(vectors, VECTORS[:4]) and kinds.tolist() == [0, 1, 2, 0]
            train, _ = dataset.split(0.5, stratify=True)
            assert np.bincount(train.targets).tolist() == [5, 5, 5]
    with HDF5Dataset(pack(dataset, tmp_path / "out.h5"), target_name="targets") as packed:
        assert same(list(packed), list(dataset))
        assert packed.sample_source.info.classes == list(KINDS)
    with open_dataset(path, dataset_name="obsm/X_pca", target_name="/obs/kind") as opened:
        assert type(opened) is cls and opened[4][1] == 1
    for name, wanted in (("age", 2.0), ("batch", "b0")):
        with cls(path, "obsm/X_pca", target_name=f"obs/{name}") as dataset:
            assert dataset[4][1] == wanted and dataset.classes is None
    for name in ("obs/nothing", "obs"):  # a table is no column
        with pytest.raises(MissingNameError, match=f"'{name}'"):
            cls(path, "obsm/X_pca", target_name=name)


def test_sparse_matrices_in_obsm(path: Path) -> None:
    with SparseDataset(path, "obsm/kmers", targets="kind") as dataset:
        assert dataset.shape == (ROWS, 7) and dataset.columns is None
        assert dataset.classes == list(KINDS) and dataset[4][1] == 1
        assert np.array_equal(dataset[4][0], KMERS[4]) and dataset.label_columns["batch"][3] == "b1"


def test_categories_of_several_files_are_joined_by_name(tmp_path: Path) -> None:
    write_file(tmp_path / "a.h5ad")
    with h5py.File(write_file(tmp_path / "b.h5ad"), "r+") as file:
        file["obs/kind/categories"][...] = ["NK", "monocyte", "B cell"]
    with HDF5Dataset(tmp_path, "obsm/X_pca", target_name="obs/kind") as dataset:
        assert dataset.classes == [*KINDS, "monocyte"]
        assert [dataset[row][1] for row in (0, 1, 2)] == [0, 1, 2]
        assert [dataset[ROWS + row][1] for row in (0, 1, 2)] == [1, 3, 0]
    with h5py.File(tmp_path / "c.h5ad", "w") as file:
        file["obsm/X_pca"], file["obs/kind"] = VECTORS, np.arange(ROWS)
    with pytest.raises(FormatError, match="'obs/kind'"):
        HDF5Dataset(tmp_path, "obsm/X_pca", target_name="obs/kind")


@pytest.mark.slow
def test_through_a_server(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_file(tmp_path / "data" / "a.h5ad")
    local = write_file(tmp_path / "a.zarr")
    with zipfile.ZipFile(tmp_path / "data" / "a.zarr.zip", "w") as zipped:
        for file in sorted(one for one in local.rglob("*") if one.is_file()):
            zipped.write(file, file.relative_to(local))
    options: dict[str, Any] = {"target_name": "obs/kind", "cache_dir": tmp_path / "cache"}
    with RangeServer(tmp_path / "data") as server:
        for name, cls in (("a.h5ad", HDF5Dataset), ("a.zarr.zip", ZarrDataset)):
            for _ in range(2):  # what is cached of the first time does not lose the classes
                with cls(f"{server.url}/{name}", "obsm/X_pca", **options) as dataset:
                    assert dataset.classes == list(KINDS) and dataset[4][1] == 1
                    assert np.array_equal(dataset[4][0], VECTORS[4])
