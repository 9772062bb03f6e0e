"""Writes sparse matrices with anndata, and beside them what anndata reads.

    python tests/integration/foreign_sparse.py FOLDER

FOLDER gets .h5ad files, .zarr stores and "expected.pickle": (file, group) -> dense rows, codes and
categories of obs["kind"], var_names.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse

N, COLUMNS = 41, 30
DTYPES = ("f4", "f8", "c8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")


def cells(
    dtype: str, seed: int = 0, columns: int = COLUMNS, index_dtype: str = "i4"
) -> anndata.AnnData:
    random = np.random.default_rng(seed)
    dense = random.integers(1, 90, (N, columns)) * (random.random((N, columns)) < 0.2)
    matrix = scipy.sparse.csr_matrix(dense.astype(dtype))
    matrix.indices = matrix.indices.astype(index_dtype)
    matrix.indptr = matrix.indptr.astype(index_dtype)
    kinds = pd.Categorical(random.choice(["T", "B", "NK"], N), categories=["T", "B", "NK"])
    obs = pd.DataFrame(
        {"kind": kinds, "depth": random.random(N)}, index=[f"zelle-{n}-ß" for n in range(N)]
    )
    var = pd.DataFrame({"length": np.arange(columns)}, index=[f"gene {n}" for n in range(columns)])
    return anndata.AnnData(
        matrix, obs, var, layers={"counts": matrix.copy()}, obsm={"pca": random.random((N, 3))}
    )


def unsorted(whole: anndata.AnnData) -> anndata.AnnData:
    """The same with columns in any order."""
    matrix = whole.X
    for row in range(N):
        part = slice(matrix.indptr[row], matrix.indptr[row + 1])
        matrix.indices[part] = matrix.indices[part][::-1].copy()
        matrix.data[part] = matrix.data[part][::-1].copy()
    matrix.has_sorted_indices = False
    return whole


def main(folder: Path) -> None:
    expected: dict[tuple[str, str], Any] = {}

    def note(name: str, read: anndata.AnnData) -> None:
        kinds, columns = read.obs["kind"].cat, list(read.var_names)
        told = kinds.codes.to_numpy(), list(kinds.categories), columns
        for group, matrix in (("X", read.X), ("layers/counts", read.layers["counts"])):
            expected[name, group] = (np.asarray(matrix.toarray()), *told)

    for dtype in DTYPES:
        for index_dtype in ("i4", "i8") if dtype == "f4" else ("i4",):
            name = f"{dtype.replace('?', 'bool')} {index_dtype}.h5ad"
            cells(dtype, index_dtype=index_dtype).write_h5ad(folder / name)
            note(name, anndata.read_h5ad(folder / name))
    for compression in ("gzip", "lzf"):
        cells("f4").write_h5ad(folder / f"{compression}.h5ad", compression=compression)
        note(f"{compression}.h5ad", anndata.read_h5ad(folder / f"{compression}.h5ad"))
    unsorted(cells("f4")).write_h5ad(folder / "unsorted.h5ad")
    note("unsorted.h5ad", anndata.read_h5ad(folder / "unsorted.h5ad"))
    for version in (2, 3):
        for dtype in ("f4", "i8", "?"):
            name = f"{version} {dtype.replace('?', 'bool')}.zarr"
            with anndata.settings.override(zarr_write_format=version):
                cells(dtype).write_zarr(folder / name)
            note(name, anndata.read_zarr(folder / name))
    for number, columns in enumerate((30, 20, 25)):
        part = cells("f4", number, columns)
        part.obs_names = [f"{number}-{name}" for name in part.obs_names]
        part[:, np.random.default_rng(number).permutation(columns)].copy().write_h5ad(
            folder / f"part {number}.h5ad"
        )
    (folder / "expected.pickle").write_bytes(pickle.dumps(expected))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
