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
from tests.data.sparse import random_matrix, write_anndata
from tests.datasets.remote_contract import RemoteDatasetContract
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

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


class TestRawH5AD(TestH5AD):
    names = ("a.h5ad",)

    def write(self, folder: Path) -> None:
        write_anndata(folder / "a.h5ad", DENSE)

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        options = {"targets": ["kind", "age"], "columns": ["gene 3", "gene 17"], **options}
        return SparseDataset(paths[0], "layers/counts", **options)

    def test_a_batch_is_two_requests(self, server: RangeServer, remote: Any, local: Any) -> None:
        """Neighbours are fetched together: of a small file all spans of an array."""
        dataset = remote()
        server.counts()
        dataset.__getitems__([50, 3, 17, 20])
        assert server.counts()["requests"] <= 2


class TestZarrShards(TestH5AD):
    names = ("a.zarr",)
    data = tuple(f"a.zarr/X/{name}/c/{n}" for name in ("indices", "data") for n in range(2))
    has_index = False  # arrays without shards, such as indptr, have none

    def write(self, folder: Path) -> None:
        write_anndata(folder / "a.zarr", DENSE, chunks=32, shards=(320,))

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        return SparseDataset(paths[0], targets="kind", layout="pairs", **options)

    def test_open_dataset_finds_a_matrix(self, server: RangeServer, tmp_path: Path) -> None:
        with open_dataset(f"{server.url}/a.zarr", cache_dir=tmp_path, targets="kind") as dataset:
            assert type(dataset) is SparseDataset
            rows = torch.stack([row for row, _ in dataset[2:5]])
            assert np.array_equal(rows.numpy(), DENSE[2:5])
