"""`dtype=` of 16 bits: batches by every way hold what torch makes of wider single samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
import zarr
from PIL import Image

from headrace import (
    ConfigError,
    EpisodeDataset,
    HDF5Dataset,
    ImageDataset,
    SparseDataset,
    TableDataset,
    ZarrDataset,
    pack,
)
from headrace.collate import stack_collate
from headrace.core.batcher import Batcher, Collating
from headrace.order.ranks import BatchRequest
from headrace.testing.contract import same
from tests.data.sparse import random_matrix, write_anndata
from tests.datasets.demonstrations import write_demos

HALVES = [torch.bfloat16, torch.float16]
MODES = ["lazy", "eager", "cached"]
N = 24
ROWS = np.random.default_rng(5).normal(0, 50, (N, 5, 7)).astype(np.float32)
INDICES = [5, 3, 17, 3, 0, 23]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "a.h5"
    with h5py.File(path, "w") as file:
        file["raw"], file["foreign"] = ROWS, ROWS.astype(">f4")
        file.create_dataset("gzip", data=ROWS, chunks=(4, 5, 7), compression="gzip")
        file["bytes"] = np.arange(N * 6).reshape(N, 6).astype(np.uint8)
        file["numbers"], file["target"] = np.linspace(-3, 3, N), np.arange(N)
    return path


def by_the_fast_way(dataset: Any, indices: list[int] = INDICES) -> Any:
    """A batch by the way that is chosen, compared with that of single samples, in two epochs."""
    collating = Collating(stack_collate)
    for epoch in range(2):
        request = BatchRequest(indices, 7, epoch)
        slow = Batcher(dataset, collating).of_samples(request).batch
        with mock.patch.object(Batcher, "of_samples", side_effect=AssertionError("the slow way")):
            fast = Batcher(dataset, collating).make(request).batch
        assert same(fast, slow)
    return fast


@pytest.mark.parametrize("half", HALVES)
def test_rows_are_cast_into_their_batch(path: Path, half: torch.dtype) -> None:
    for name in ("raw", "gzip", "bytes", "numbers"):
        with h5py.File(path) as file:
            expected = torch.from_numpy(file[name][...]).to(half)
        for mode in MODES:
            options: dict[str, Any] = {"loading_mode": mode, "progress": False, "dtype": half}
            with HDF5Dataset(path, name, target_name="target", **options) as dataset:
                assert same(dataset[3], (expected[3], 3)), (name, mode)
                rows, targets = by_the_fast_way(dataset)
                assert same(rows, expected[INDICES]) and rows.is_contiguous(), (name, mode)
                assert targets.tolist() == INDICES
    with HDF5Dataset(path, "foreign", dtype=half) as dataset:  # of another byte order
        rows = torch.stack(dataset.__getitems__(INDICES))
        assert same(rows, torch.from_numpy(ROWS[INDICES]).to(half))


def test_other_formats(path: Path, tmp_path: Path) -> None:
    zarr.save_array(tmp_path / "a.zarr", ROWS)
    np.save(tmp_path / "a.npy", ROWS)
    np.savez(tmp_path / "a.npz", x=ROWS, y=np.arange(N))
    expected = torch.from_numpy(ROWS).bfloat16()
    transformed = HDF5Dataset(path, "raw", dtype="bfloat16", transform=lambda row: row + 1)
    assert same(transformed[2], expected[2] + 1)
    for dataset in (
        ZarrDataset(tmp_path / "a.zarr", dtype="bfloat16"),
        TableDataset(tmp_path / "a.npy", dtype=torch.bfloat16),
    ):
        assert same(dataset[4], expected[4]) and same(by_the_fast_way(dataset), expected[INDICES])
    with TableDataset(tmp_path / "a.npz", dtype=torch.bfloat16) as dicts:
        assert same(dicts[4], {"x": expected[4], "y": torch.tensor(4, dtype=torch.bfloat16)})
    with ZarrDataset(tmp_path / "a.zarr", dtype=torch.bfloat16, patch_shape=(2, 3)) as patches:
        assert same(patches[0], expected[:, :2, :3])
        by_the_fast_way(patches, [1, 0, 3])
    demos = write_demos(tmp_path / "demos.hdf5")
    wide = EpisodeDataset(demos, "actions", window=4)
    with EpisodeDataset(demos, "actions", window=4, dtype=torch.bfloat16) as half:
        actions = by_the_fast_way(half, [0, 2, 9])["actions"]
        assert same(actions, torch.stack([wide[n]["actions"] for n in (0, 2, 9)]).bfloat16())


# -- images


def test_images_are_rounded_once(photos: Path, tmp_path: Path) -> None:
    for half, shape in zip(HALVES, ((301, 700, 3), (2, 200_000, 3)), strict=True):  # in parts
        large = np.random.default_rng(6).integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(large).save(tmp_path / "large.png")
        one, other = (ImageDataset(tmp_path, targets=None, dtype=dtype) for dtype in (half, None))
        assert same(one[0][0], other[0][0].to(half))
    cases: list[tuple[torch.dtype, str, dict[str, Any]]] = [
        (torch.bfloat16, "lazy", {"image_size": 37}),
        (torch.float16, "eager", {"image_size": 37, "color": "L"}),
        (torch.bfloat16, "cached", {"image_size": (1, 400)}),
        (torch.float16, "lazy", {"image_size": None}),
    ]
    for half, mode, options in cases:
        options |= {"targets": None, "progress": False}
        dataset = ImageDataset(photos, dtype=half, loading_mode=mode, **options)
        with dataset, ImageDataset(photos, **options) as wide:
            expected = torch.stack([wide[index][0] for index in INDICES]).to(half)
            assert same(dataset[5][0], expected[0]), options
            if options["image_size"] is not None:
                assert same(by_the_fast_way(dataset)[0], expected), options


def test_dtypes_that_are_refused(photos: Path, path: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dtype": "uint8"}, "'uint8'"),
        ({"dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"dtype": torch.float16, "normalize": False}, "normalize=False"),
        ({"dtype": torch.float16, "transform": torch.zeros_like}, "transform"),
    ]
    for options, named in cases:
        with pytest.raises(ConfigError, match=named):
            ImageDataset(photos, **options)
    with pytest.raises(ConfigError, match="bfloat16"):
        pack(HDF5Dataset(path, "raw", dtype=torch.bfloat16), tmp_path / "out.h5")
    sparse = write_anndata(tmp_path / "sparse.h5ad", random_matrix(5, 4))
    with pytest.raises(ConfigError, match="bfloat16"):
        SparseDataset(sparse, dtype=torch.bfloat16)
