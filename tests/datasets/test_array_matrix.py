"""HDF5Dataset and ZarrDataset against h5py and zarr-python: all layouts, modes, ways to index,
workers and start methods.

The matrices of `tests/storage` compare more layouts, below the dataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import ConcatDataset, DataLoader
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from headrace import HDF5Dataset, ZarrDataset, create_dataloader

pytestmark = pytest.mark.slow

N = 11
DTYPES = ["u1", "i2", ">i4", "i8", "f2", "f4", ">f8", "c8", "?"]
ROWS: list[tuple[int, ...]] = [(), (4, 3)]
ORDERS = [[*range(N)], [N - 1, 0, 3, 3, 7], [5], [-1, -N, 2, 2, 2]]
HDF5: dict[str, Any] = {
    "contiguous": None,
    "raw": {},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc()),
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4, small blocks, shuffle": {"shuffle": True, **hdf5plugin.LZ4(nbytes=64)},
}
ZARR: dict[str, Any] = {
    "2, raw": {"compressors": None},
    "2, zlib": {"compressors": numcodecs.Zlib(3)},
    "2, F, zstd": {"compressors": numcodecs.Zstd(3), "order": "F"},
    "2, lz4": {"compressors": numcodecs.LZ4()},
    "3, raw": {"compressors": None},
    "3, gzip": {"compressors": [GzipCodec(level=4)]},
    "3, blosc": {"compressors": [BloscCodec(cname="lz4", shuffle="shuffle", typesize=4)]},
    "3, shards": {"compressors": [ZstdCodec(level=3)], "sharded": True},
}
Case = tuple[str, str, np.ndarray[Any, Any]]
"""The kind of file, the array's name, and what it holds."""


def values(dtype: str, row: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    random, kind = np.random.default_rng(seed), np.dtype(dtype)
    return (random.standard_normal((N, *row)) * 100).astype(kind)


def write(folder: Path) -> list[Case]:
    """All arrays, 620 of them, each read back by its own library."""
    cases: list[Case] = []
    combinations = list(itertools.product(DTYPES, ROWS, (1, 4)))
    with h5py.File(folder / "a.h5", "w") as file:
        for number, (filters, (dtype, row, height)) in enumerate(
            itertools.product(HDF5, combinations)
        ):
            if filters == "contiguous" and height > 1:
                continue
            chunks = (
                None
                if filters == "contiguous"
                else (height, *(max(1, extent - 1) if height == 4 else extent for extent in row))
            )
            name = f"{filters}/{dtype}{number}"
            file.create_dataset(
                name, data=values(dtype, row, number), chunks=chunks, **(HDF5[filters] or {})
            )
            cases.append(("h5", name, file[name][:]))
    roots = {
        version: zarr.open_group(folder / f"{version}.zarr", mode="w", zarr_format=version)
        for version in (2, 3)
    }
    for number, (codecs, (dtype, row, height)) in enumerate(itertools.product(ZARR, combinations)):
        if codecs == "2, lz4" and dtype == "?":
            continue
        version, options = int(codecs[0]), dict(ZARR[codecs])
        sharded, order = options.pop("sharded", False), options.pop("order", "C")
        data, name = values(dtype, row, number), f"a{number}"
        options |= {"shards": (2 * height, *row)} if sharded else {}
        options |= {"order": order} if version == 2 else {}
        array = roots[version].create_array(
            name, shape=data.shape, dtype=data.dtype, chunks=(height, *row), **options
        )
        array[...] = data
        cases.append((str(version), name, np.asarray(array[...])))
    return cases


def open_case(folder: Path, case: Case, **options: Any) -> Any:
    kind, name, _ = case
    return (
        HDF5Dataset(folder / "a.h5", name, **options)
        if kind == "h5"
        else ZarrDataset(folder / f"{kind}.zarr", name, **options)
    )


def same(found: Any, expected: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, but for the byte order, which torch has only one of."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.numpy().dtype == native.dtype and found.numpy().tobytes() == native.tobytes()


def some(cases: list[Case], step: int) -> list[Case]:
    return cases[::step]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Case]]]:
    folder = tmp_path_factory.mktemp("matrix")
    cases = write(folder)
    assert len(cases) >= 400
    yield folder, cases


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_way_to_index(written: tuple[Path, list[Case]], mode: str, step: int) -> None:
    folder, cases = written
    for case in some(cases, step):
        expected = case[2]
        dataset = open_case(folder, case, loading_mode=mode)
        assert len(dataset) == N
        for _ in range(2):  # the second time from memory, where the mode holds samples
            for order in ORDERS:
                assert all(same(dataset[index], expected[index, ...]) for index in order), case[:2]
                assert all(
                    same(*pair)
                    for pair in zip(dataset.__getitems__(order), expected[order], strict=True)
                ), case[:2]
            view = dataset[2:9:3]
            assert len(view) == 3 and same(view[-1], expected[8, ...]), case[:2]
        dataset.close()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_in_two_workers(
    written: tuple[Path, list[Case]], mode: str, method: str, step: int
) -> None:
    """All arrays in one loader, since starting workers for each would take hours."""
    folder, cases = written
    chosen = some(cases, step)
    datasets = [open_case(folder, case, loading_mode=mode) for case in chosen]
    order = np.random.default_rng(0).permutation(len(chosen) * N).tolist()
    joined = ConcatDataset(datasets)
    loader = DataLoader(
        joined, batch_size=None, sampler=order, num_workers=2, multiprocessing_context=method
    )
    for index, found in zip(order, loader, strict=True):
        case = chosen[index // N]
        assert same(found, case[2][index % N, ...]), (case[:2], index % N)
    for dataset in datasets:
        dataset.close()


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_in_a_loader(written: tuple[Path, list[Case]], mode: str, step: int) -> None:
    folder, cases = written
    for number, case in enumerate(some(cases, step)):
        shuffle = (False, True, "block")[number % 3]
        dataset = open_case(folder, case, loading_mode=mode, return_index=True)
        loader = create_dataloader(
            dataset, batch_size=4, shuffle=shuffle, num_workers=0, seed=number
        )
        found = {
            int(index): row
            for rows, indices in loader
            for row, index in zip(rows, indices, strict=True)
        }
        assert sorted(found) == [*range(N)] and all(
            same(found[index], case[2][index, ...]) for index in range(N)
        ), case[:2]
        loader.close()
        dataset.close()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_streaming_in_two_workers(written: tuple[Path, list[Case]], method: str) -> None:
    folder, cases = written
    for case in some(cases, 91):
        dataset = open_case(folder, case, loading_mode="streaming", return_index=True)
        loader = create_dataloader(
            dataset, batch_size=4, num_workers=2, multiprocessing_context=method
        )
        found = {
            int(index): row
            for rows, indices in loader
            for row, index in zip(rows, indices, strict=True)
        }
        assert sorted(found) == [*range(N)] and all(torch.is_tensor(row) for row in found.values())
        assert all(same(found[index], case[2][index, ...]) for index in range(N)), case[:2]
        loader.close()
        dataset.close()
