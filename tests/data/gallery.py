"""Makes one small dataset of each format: what a test of all formats iterates over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from headrace import (
    EpisodeDataset,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    SparseDataset,
    TableDataset,
    TextDataset,
    ZarrDataset,
    pack,
)
from tests.data.make import make_photos

Maker = Callable[..., Any]
ROWS = 24


def make_gallery(folder: Path) -> dict[str, Maker]:
    """Writes the files; returns by name what makes each dataset of them, by keywords of datasets.

    Each has at least 20 samples.
    """
    write_gallery(folder)
    return gallery_at(folder, folder / "cache")


def write_gallery(folder: Path) -> None:
    """The files of all formats."""
    rng = np.random.default_rng(5)
    photos = make_photos(folder / "photos", per_class=8, size=(20, 14))
    pixels = rng.integers(0, 256, (ROWS, 5, 4), dtype=np.uint8)
    arrays = folder / "arrays.h5"
    with h5py.File(arrays, "w") as file:
        file["plain"] = pixels
        file.create_dataset("chunked", data=pixels, chunks=(5, 3, 4), compression="gzip")
        file["label"] = np.arange(ROWS) % 4
        file["words"] = [f"word {number} " * (number % 5) for number in range(ROWS)]
    demonstrations = folder / "demonstrations.h5"
    with h5py.File(demonstrations, "w") as file:
        for number in range(4):
            file[f"data/demo_{number}/actions"] = rng.normal(size=(7 + number, 3))
    store = folder / "arrays.zarr"
    root = zarr.open_group(store, mode="w")
    sharded = root.create_array(
        "sharded", shape=pixels.shape, dtype="u1", chunks=(2, 5, 4), shards=(8, 5, 4)
    )
    sharded[...] = pixels
    volume = root.create_array("volume", shape=(9, 11, 13), dtype="i2", chunks=(4, 5, 6))
    volume[...] = rng.integers(0, 255, (9, 11, 13))
    texts = folder / "texts"
    texts.mkdir()
    lines = [f"line {number} " * (number % 4 + 1) for number in range(ROWS)]
    (texts / "lines.txt").write_text("\n".join(lines) + "\n")
    table = folder / "table.parquet"
    columns = {
        "number": list(range(ROWS)),
        "vector": pixels.reshape(ROWS, -1).tolist(),
        "text": lines,
    }
    pq.write_table(pa.table(columns), table, row_group_size=5)
    sparse = folder / "sparse.h5"
    with h5py.File(sparse, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (ROWS, 30)})
        group["indptr"] = np.arange(ROWS + 1) * 3
        group["indices"] = np.tile([1, 7, 20], ROWS)
        group["data"] = rng.normal(size=3 * ROWS).astype("f4")
    packed = folder / "photos.h5"
    pack(ImageDataset(photos), packed, progress=False)


def gallery_at(place: Path | str, cache: Path) -> dict[str, Maker]:
    """By name what makes each dataset of the files that lie in a folder, or below a URL."""

    def made(cls: Any, name: str, *arguments: Any, **fixed: Any) -> Maker:
        known = {"progress": False, **fixed}
        return lambda **options: cls(f"{place}/{name}", *arguments, **{**known, **options})

    patches = {"patch_shape": (4, 4, 4), "stride": 3}
    return {
        "image files": made(ImageDataset, "photos"),
        "packed images": made(ImageDataset, "photos.h5"),
        "hdf5 rows": made(HDF5Dataset, "arrays.h5", "plain", target_name="label"),
        "hdf5 chunks": made(HDF5Dataset, "arrays.h5", ["chunked", "words"]),
        "zarr shards": made(ZarrDataset, "arrays.zarr", "sharded"),
        "zarr patches": made(ZarrDataset, "arrays.zarr", "volume", **patches),
        "lines": made(TextDataset, "texts", unit="line", cache_dir=cache),
        "tokens": made(TextDataset, "texts", max_length=12, packing=True, cache_dir=cache),
        "table": made(TableDataset, "table.parquet", ["number", "vector"]),
        "sparse rows": made(SparseDataset, "sparse.h5", "X"),
        "episodes": made(EpisodeDataset, "demonstrations.h5", window=3, groups="data/*"),
        "held": made(MemoryEfficientDataset, "arrays.h5", dataset_name="chunked"),
    }
