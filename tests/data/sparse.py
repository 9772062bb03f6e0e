"""Writes sparse matrices as AnnData lays them out, by h5py and zarr alone, and says what they
hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

KINDS = ("B cell", "NK", "T cell")


def random_matrix(
    rows: int, columns: int, density: float = 0.2, dtype: Any = "f4", seed: int = 0
) -> np.ndarray[Any, Any]:
    """A dense array, most of which is zeros; its third row is empty, and the one after it is
    full.
    """
    random = np.random.default_rng(seed)
    dense = random.integers(1, 100, (rows, columns)) * (random.random((rows, columns)) < density)
    if rows > 3:
        dense[2], dense[3] = 0, np.arange(1, columns + 1)
    return dense.astype(dtype)


def csr_of(dense: np.ndarray[Any, Any], index_dtype: Any = "i4") -> dict[str, np.ndarray[Any, Any]]:
    """indptr, indices and data of a dense array."""
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return {
        "indptr": indptr.astype(index_dtype),
        "indices": columns.astype(index_dtype),
        "data": dense[rows, columns],
    }


def write_matrix(
    group: Any,
    name: str,
    dense: np.ndarray[Any, Any],
    *,
    chunks: int | None = None,
    old: bool = False,
    **options: Any,
) -> Any:
    """Writes a CSR group into an open h5py or zarr group; returns it."""
    made = group.create_group(name) if name else group
    for key, values in csr_of(dense).items():
        how = dict(options)
        if chunks is not None:
            how["chunks"] = (min(chunks, len(values)) if _is_hdf5(group) else chunks,)
        _write_array(made, key, values, **how)
    if old:
        made.attrs["h5sparse_format"], made.attrs["h5sparse_shape"] = "csr", np.array(dense.shape)
    else:
        said = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
        made.attrs.update({**said, "shape": list(dense.shape)})
    return made


def write_strings(group: Any, name: str, values: Sequence[str]) -> None:
    if isinstance(group, h5py.Group):
        group.create_dataset(name, data=np.array(values, object), dtype=h5py.string_dtype())
    else:
        made = group.create_array(name, shape=(len(values),), dtype=str)
        made[...] = np.array(values, object)
    group[name].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})


def write_frame(
    root: Any, name: str, index: Sequence[str], columns: dict[str, Any] | None = None
) -> None:
    """Writes a table: columns of numbers, lists of str, or (codes, categories)."""
    frame, columns = root.create_group(name), columns or {}
    said = {"encoding-type": "dataframe", "encoding-version": "0.2.0"}
    frame.attrs.update({**said, "_index": "_index", "column-order": list(columns)})
    write_strings(frame, "_index", index)
    for key, values in columns.items():
        if isinstance(values, tuple):
            made = frame.create_group(key)
            said = {"encoding-type": "categorical", "encoding-version": "0.2.0"}
            made.attrs.update({**said, "ordered": False})
            _write_array(made, "codes", np.asarray(values[0], np.int8))
            write_strings(made, "categories", values[1])
        elif isinstance(values, list):
            write_strings(frame, key, values)
        else:
            _write_array(frame, key, np.asarray(values))


def _is_hdf5(group: Any) -> bool:
    return isinstance(group, h5py.Group)


def _write_array(group: Any, name: str, values: np.ndarray[Any, Any], **options: Any) -> None:
    make = group.create_dataset if _is_hdf5(group) else group.create_array
    make(name, data=values, **options)


def write_anndata(
    path: Path, dense: np.ndarray[Any, Any], *, names: Sequence[str] | None = None, **options: Any
) -> Path:
    """An .h5ad file or a .zarr store with X, layers/counts (twice X, int32), obs ("kind", "age",
    "batch") and var.
    """
    rows, columns = dense.shape
    is_zarr = path.suffix == ".zarr"
    root: Any = zarr.open_group(path, mode="w") if is_zarr else h5py.File(path, "w")
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    write_matrix(root, "X", dense, **options)
    write_matrix(root.create_group("layers"), "counts", (2 * dense).astype("i4"), **options)
    kinds: Any = np.arange(rows) % len(KINDS)
    obs: dict[str, Any] = {"kind": (kinds, KINDS), "age": np.arange(rows, dtype="f4") / 2}
    obs["batch"] = [f"b{n % 2}" for n in range(rows)]
    write_frame(root, "obs", [f"cell {n}" for n in range(rows)], obs)
    genes = names or [f"gene {n}" for n in range(columns)]
    write_frame(root, "var", genes, {"mean": dense.mean(0)})
    if not is_zarr:
        root.close()
    return path
