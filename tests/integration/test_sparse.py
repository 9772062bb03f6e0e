"""Sparse matrices that anndata wrote give what anndata reads of them."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import SparseDataset, create_dataloader, open_dataset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "foreign_sparse.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder, and by file and group what anndata reads: dense rows, kinds and their classes,
    names of columns.
    """
    if importlib.util.find_spec("anndata") is None:
        pytest.skip("anndata is not installed: pip install -c constraints.txt -e '.[integration]'")
    folder = tmp_path_factory.mktemp("anndata")
    run = subprocess.run(
        [sys.executable, SCRIPT, folder], capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
    return folder, pickle.loads((folder / "expected.pickle").read_bytes())


def rows_of(dataset: Any, order: Any) -> Any:
    found = [dataset[index] for index in order.tolist()]
    return torch.stack([row for row, _ in found]).numpy(), [kind for _, kind in found]


def as_dense(batch: Any) -> Any:
    """By SciPy: torch has no `to_dense` of some dtypes."""
    import scipy.sparse

    parts = (one.numpy() for one in (batch.values(), batch.col_indices(), batch.crow_indices()))
    return scipy.sparse.csr_matrix(tuple(parts), tuple(batch.shape)).toarray()


@pytest.mark.parametrize("direct", [True, False])
def test_files_that_anndata_wrote(written: Any, direct: bool) -> None:
    folder, expected = written
    assert len(expected) >= 30
    random = np.random.default_rng(0)
    for (name, group), (dense, kinds, classes, columns) in expected.items():
        with SparseDataset(folder / name, group, targets="kind", direct=direct) as dataset:
            where = f"{name} {group}: {dataset.explain()}"
            assert dataset.classes == classes and dataset.columns == columns, where
            order = random.permutation(len(dense))
            rows, found = rows_of(dataset, order)
            assert rows.dtype == dense.dtype and np.array_equal(rows, dense[order]), where
            assert found == kinds[order].tolist(), where
        how: dict[str, Any] = {"layout": "csr", "direct": direct}
        with SparseDataset(folder / name, group, **how) as whole:
            loader = create_dataloader(whole, batch_size=7, shuffle=False, num_workers=0)
            batches = [as_dense(batch) for batch in loader]
            assert np.array_equal(np.concatenate(batches), dense), where
        if group == "X":
            assert type(open_dataset(folder / name)) is SparseDataset


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_files_are_joined_as_anndata_does(written: Any, join: Any) -> None:
    import anndata
    import pandas as pd

    folder, _ = written
    paths = [folder / f"part {number}.h5ad" for number in range(3)]
    expected = anndata.concat([anndata.read_h5ad(path) for path in paths], join=join)
    with SparseDataset(paths, join=join) as dataset:
        assert dataset.columns is not None and sorted(dataset.columns) == sorted(expected.var_names)
        found = pd.DataFrame(torch.stack([*dataset]).numpy(), columns=dataset.columns)[
            list(expected.var_names)
        ]
    assert np.array_equal(found.to_numpy(), expected.X.toarray())
