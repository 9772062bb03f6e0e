"""`dtype=` of 16 bits: batches by every way hold the bytes of single samples, and those are what
torch makes of wider numbers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    ConfigError,
    EpisodeDataset,
    HDF5Dataset,
    ImageDataset,
    RandomHorizontalFlip,
    SparseDataset,
    TableDataset,
    ZarrDataset,
    create_dataloader,
    pack,
)
from headrace.casting import dtype_named
from headrace.collate import stack_collate
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.ways import SampleBySample, choose_way
from headrace.datasets.image.pixels import normalize
from headrace.order.request import BatchRequest
from headrace.testing.contract import same
from tests.data.labelled import make_masks
from tests.datasets.demonstrations import write_demos

pytestmark = pytest.mark.quick_every(3)

HALVES = [torch.bfloat16, torch.float16]
MODES = ["lazy", "eager", "cached"]
N = 24
ROWS = np.random.default_rng(5).normal(0, 50, (N, 5, 7)).astype(np.float32)
INDICES = [5, 3, 17, 3, 0, 23]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", data=ROWS)
        file.create_dataset("gzip", data=ROWS, chunks=(4, 5, 7), compression="gzip")
        file.create_dataset("bytes", data=np.arange(N * 6).reshape(N, 6).astype(np.uint8))
        file.create_dataset("numbers", data=np.linspace(-3, 3, N))
        file.create_dataset("foreign", data=ROWS.astype(">f4"))
        file["target"] = np.arange(N)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("photos") / "masks", size=(40, 30))


def made_by_ways(
    dataset: Any, epochs: int = 3, indices: list[int] = INDICES
) -> list[tuple[Any, Any]]:
    """Batches of some epochs by the way that is chosen, which makes no samples, and those of
    single samples.
    """
    made = []
    for epoch in range(epochs):
        request = BatchRequest(indices, 7, epoch)
        with mock.patch.object(SampleBySample, "make", side_effect=AssertionError("the slow way")):
            fast = choose_way(dataset, Collating(stack_collate)).make(request)
        made.append(
            (fast.batch, SampleBySample(dataset, Collating(stack_collate)).make(request).batch)
        )
    return made


# -- arrays


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["raw", "gzip", "bytes", "numbers"])
def test_rows_are_cast_into_their_batch(
    path: Path, name: str, mode: Any, half: torch.dtype
) -> None:
    with h5py.File(path) as file:
        expected = torch.from_numpy(file[name][...]).to(half)
    with HDF5Dataset(
        path, name, dtype=half, target_name="target", loading_mode=mode, progress=False
    ) as dataset:
        assert same(dataset[3], (expected[3], 3))
        for fast, slow in made_by_ways(dataset):
            assert same(fast, slow) and same(fast[0], expected[INDICES]) and fast[0].is_contiguous()


def test_rows_are_read_without_making_samples(path: Path) -> None:
    with (
        HDF5Dataset(path, "raw", dtype="bfloat16") as dataset,
        mock.patch.object(HDF5Dataset, "decode", side_effect=AssertionError),
    ):
        assert choose_way(dataset, Collating(stack_collate)).name == "straight from storage"
        assert all(
            same(fast, torch.from_numpy(ROWS[INDICES]).bfloat16())
            for fast, _ in [made_by_ways(dataset, 1)[0]]
        )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", [*MODES, "streaming"])
def test_loaders_carry_halves(path: Path, mode: Any, half: torch.dtype, workers: int) -> None:
    expected = torch.from_numpy(ROWS).to(half)
    with HDF5Dataset(
        path, "raw", dtype=half, target_name="target", loading_mode=mode, progress=False
    ) as dataset:
        loader = create_dataloader(
            dataset,
            batch_size=7,
            num_workers=workers,
            seed=1,
            shuffle=None if mode == "streaming" else True,
        )
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = [copy.deepcopy(batch) for batch in loader]
            assert sum(len(targets) for _, targets in batches) == N
            assert all(same(values, expected[targets]) for values, targets in batches)
        assert loader.get_stats().get("fallbacks", 0) == 0


def test_bytes_read_are_those_of_the_file(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    demos = write_demos(tmp_path / "demos.hdf5")
    for open_as in (
        lambda dtype: HDF5Dataset(path, "raw", dtype=dtype),
        lambda dtype: TableDataset(tmp_path / "a.npy", dtype=dtype),
        lambda dtype: EpisodeDataset(demos, ["actions"], window=4, dtype=dtype),
    ):
        read = []
        for dtype in (None, "bfloat16"):
            with open_as(dtype) as dataset:
                loader = create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)
                list(loader)
                read.append(loader.get_stats()["bytes_read"])
        assert read[0] == read[1] > 0


def test_rows_of_another_byte_order(path: Path) -> None:
    with HDF5Dataset(path, "foreign", dtype=torch.bfloat16) as dataset:
        batch = next(iter(create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)))
        assert same(batch, torch.from_numpy(ROWS[:4]).bfloat16())


def test_a_transform_gets_the_half(path: Path) -> None:
    with HDF5Dataset(path, "raw", dtype=torch.bfloat16, transform=lambda row: row + 1) as dataset:
        assert same(dataset[2], torch.from_numpy(ROWS[2]).bfloat16() + 1)


def test_other_formats(tmp_path: Path) -> None:
    zarr.save_array(tmp_path / "a.zarr", ROWS)
    np.save(tmp_path / "a.npy", ROWS)
    np.savez(tmp_path / "a.npz", x=ROWS, y=np.arange(N))
    demos, expected = write_demos(tmp_path / "demos.hdf5"), torch.from_numpy(ROWS).bfloat16()
    with (
        ZarrDataset(tmp_path / "a.zarr", dtype="bfloat16") as rows,
        TableDataset(tmp_path / "a.npy", dtype=torch.bfloat16) as table,
    ):
        for dataset in (rows, table):
            assert same(dataset[4], expected[4]) and all(
                same(*both) and same(both[0], expected[INDICES]) for both in made_by_ways(dataset)
            )
    with TableDataset(tmp_path / "a.npz", dtype=torch.bfloat16) as dicts:
        assert same(dicts[4], {"x": expected[4], "y": torch.tensor(4, dtype=torch.bfloat16)})
    with ZarrDataset(tmp_path / "a.zarr", dtype=torch.bfloat16, patch_shape=(2, 3)) as patches:
        assert same(patches[0], expected[:, :2, :3]) and all(
            same(*both) for both in made_by_ways(patches, indices=[1, 0, 3])
        )
    wide, half = (
        EpisodeDataset(demos, "actions", window=4, **options)
        for options in ({}, {"dtype": torch.bfloat16})
    )  # type: ignore[arg-type]
    with wide, half:
        request, collating = BatchRequest([0, 2, 9], 7, 0), Collating(stack_collate)
        fast, slow = (
            way.make(request).batch
            for way in (choose_way(half, collating), SampleBySample(half, collating))
        )
        assert choose_way(half, collating).name == "windows straight from storage" and same(
            fast, slow
        )
        assert same(fast["actions"], torch.stack([wide[n]["actions"] for n in request]).bfloat16())


# -- images


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"color": "L"}, {"image_size": None}, {"image_size": (1, 400)}]
)
def test_images_are_rounded_once(
    photos: Path, options: dict[str, Any], mode: Any, half: torch.dtype
) -> None:
    how: dict[str, Any] = {"image_size": 37, "targets": None, "progress": False} | options
    with (
        ImageDataset(photos / "images", **how) as wide,
        ImageDataset(photos / "images", dtype=half, loading_mode=mode, **how) as dataset,
    ):
        expected = torch.stack([wide[index][0] for index in INDICES]).to(half)
        assert same(dataset[5][0], expected[0])
        if how["image_size"] is not None:
            for fast, slow in made_by_ways(dataset):
                assert same(fast, slow) and same(fast[0], expected)


@pytest.mark.parametrize("half", HALVES)
def test_large_images_are_cast_in_parts(half: torch.dtype) -> None:
    pixels = np.random.default_rng(6).integers(0, 256, (3, 700, 301), dtype=np.uint8)
    dtype = dtype_named(half)
    assert dtype is not None
    assert same(normalize(pixels, dtype), normalize(pixels, np.dtype("f4")).to(half))
    # a row that is larger than what is kept
    wide = np.random.default_rng(7).integers(0, 256, (1, 2, 300_000), dtype=np.uint8)
    assert same(normalize(wide, dtype), normalize(wide, np.dtype("f4")).to(half))


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_carry_images_of_halves(photos: Path, workers: int) -> None:
    how: dict[str, Any] = {
        "image_size": 20,
        "transform": [RandomHorizontalFlip()],
        "targets": None,
        "return_index": False,
    }
    batches = {}
    for dtype in (torch.float32, torch.bfloat16):
        with ImageDataset(photos / "images", dtype=dtype, **how) as dataset:
            loader = create_dataloader(dataset, batch_size=7, num_workers=workers, seed=3)
            batches[dtype] = [batch[0].clone() for batch in loader]
    assert same([batch.bfloat16() for batch in batches[torch.float32]], batches[torch.bfloat16])


def test_dtypes_of_images_that_are_refused(photos: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"dtype": torch.float64},
            "dtype=torch.float64: normalised images are torch.float32, torch.float16 or "
            "torch.bfloat16",
        ),
        ({"dtype": "uint8"}, "dtype='uint8': normalised images are"),
        ({"dtype": torch.float8_e5m2}, "NumPy has no such numbers"),
        (
            {"dtype": torch.float16, "normalize": False},
            "normalize=False gives uint8: leave one of both out",
        ),
        (
            {"dtype": torch.float16, "transform": torch.zeros_like},
            "the transform gives images their dtype",
        ),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError) as caught:
            ImageDataset(photos / "images", **options)
        assert message in str(caught.value)


# -- where there are none


def test_halves_that_no_file_takes_are_refused(path: Path, tmp_path: Path) -> None:
    with (
        HDF5Dataset(path, "raw", dtype=torch.bfloat16) as dataset,
        pytest.raises(ConfigError, match=r"can't be packed: it is an array of bfloat16"),
    ):
        pack(dataset, tmp_path / "out.h5")
    with h5py.File(tmp_path / "sparse.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [2, 3]}
        )
        group["data"], group["indices"], group["indptr"] = (
            np.ones(2, "f4"),
            np.array([0, 1], "i4"),
            np.array([0, 1, 2], "i4"),
        )
    with pytest.raises(ConfigError, match="sparse matrices have no bfloat16"):
        SparseDataset(tmp_path / "sparse.h5ad", dtype=torch.bfloat16)
