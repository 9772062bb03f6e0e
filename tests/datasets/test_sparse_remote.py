"""Sparse matrices behind URLs: the contract of remote datasets, and how many requests a batch
takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import SparseDataset, open_dataset
from headrace.testing.contract import same
from tests.data.sparse import random_matrix, write_anndata
from tests.datasets.remote_contract import FAULTS, RemoteDatasetContract
from tests.servers.ranges import RangeServer

DENSE = random_matrix(60, 40)


class TestH5AD(RemoteDatasetContract):
    """Chunks that are decoded here, of two files."""

    names = ("a.h5ad", "b.h5ad")

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 400)

    def write(self, folder: Path) -> None:
        for name in self.names:
            write_anndata(folder / name, DENSE, chunks=32, compression="gzip")

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        return SparseDataset(paths, targets="kind", layout="csr", **options)


@pytest.mark.slow
class TestRawH5AD(TestH5AD):
    names = ("a.h5ad",)

    def write(self, folder: Path) -> None:
        write_anndata(folder / "a.h5ad", DENSE)

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        return SparseDataset(
            paths[0],
            "layers/counts",
            targets=["kind", "age"],
            columns=["gene 3", "gene 17"],
            **options,
        )


@pytest.mark.slow
class TestZarrShards(TestH5AD):
    names = ("a.zarr",)
    data = tuple(
        f"a.zarr/X/{name}/c/{number}" for name in ("indices", "data") for number in range(2)
    )
    has_index = False  # arrays without shards, such as indptr, have none

    def write(self, folder: Path) -> None:
        write_anndata(folder / "a.zarr", DENSE, chunks=32, shards=(320,))

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        return SparseDataset(paths[0], targets="kind", layout="pairs", **options)

    @pytest.mark.parametrize("mode", ["lazy", "streaming"])
    def test_a_third_of_all_requests_fail(
        self, mode: str, remote: Any, server: RangeServer, local: Any, loader_of: Any
    ) -> None:
        """Once it is open: nobody knows how long the many files of metadata should be."""
        dataset = remote(retries=30, deadline=60, loading_mode=mode)
        server.set(faults={kind: 0.33 / len(FAULTS) for kind in FAULTS})
        assert (
            same(self.epoch(loader_of, dataset), self.epoch(loader_of, local))
            and server.counts()["faults"]
        )


class TestRequests:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("served")
        write_anndata(folder / "a.h5ad", DENSE)
        write_anndata(folder / "a.zarr", DENSE, chunks=64)
        return folder

    @pytest.fixture(scope="class")
    def running(self, folder: Path) -> Any:
        with RangeServer(folder) as server:
            yield server

    @pytest.mark.parametrize("name", ["a.h5ad", "a.zarr"])
    def test_open_dataset_finds_remote_matrices(
        self, server: RangeServer, tmp_path: Path, name: str
    ) -> None:
        with open_dataset(f"{server.url}/{name}", cache_dir=tmp_path, targets="kind") as dataset:
            assert type(dataset) is SparseDataset and np.array_equal(
                torch.stack([row for row, _ in dataset[2:5]]).numpy(), DENSE[2:5]
            )

    def test_a_batch_of_raw_rows_is_two_requests(
        self, server: RangeServer, tmp_path: Path, loader_of: Any
    ) -> None:
        """Neighbours are fetched together: of a small file all spans of an array."""
        with SparseDataset(f"{server.url}/a.h5ad", cache_dir=tmp_path) as dataset:
            server.counts()
            loader = loader_of(dataset, batch_size=8, shuffle=True)
            batches = len([*loader])
            assert server.counts()["requests"] <= 2 * batches
