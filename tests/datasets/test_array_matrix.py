"""HDF5Dataset and ZarrDataset against h5py and zarr-python: all layouts, modes, ways to index, and
workers.

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
import zarr
from torch.utils.data import ConcatDataset, DataLoader
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from headrace import HDF5Dataset, ZarrDataset, create_dataloader

pytestmark = pytest.mark.slow

N = 11
DTYPES = ["u1", "i2", ">i4", "f2", ">f8", "c8", "?"]
ORDERS = [[*range(N)], [N - 1, 0, 3, 3, 7], [-1, -N, 2, 2, 2]]
HDF5: dict[str, dict[str, Any] | None] = {
    "contiguous": None,
    "raw": {},
    "gzip, shuffle, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc()),
    "lz4, small blocks, shuffle": {"shuffle": True, **hdf5plugin.LZ4(nbytes=64)},
}
ZARR: list[dict[str, Any]] = [
    {"zarr_format": 2, "compressors": None},
    {"zarr_format": 2, "compressors": numcodecs.Zlib(3)},
    {"zarr_format": 2, "compressors": numcodecs.Zstd(3), "order": "F"},
    {"zarr_format": 3, "compressors": None},
    {"zarr_format": 3, "compressors": [GzipCodec(level=4)]},
    {"zarr_format": 3, "compressors": [BloscCodec(cname="lz4", shuffle="shuffle", typesize=4)]},
    {"zarr_format": 3, "compressors": [ZstdCodec(level=3)], "sharded": True},
]
Case = tuple[Path, str, np.ndarray[Any, Any]]
"""A file, the name of an array in it, and what it holds."""


def write(folder: Path) -> list[Case]:
    """All arrays, each read back by its own library."""
    cases: list[Case] = []
    combinations = list(itertools.product(DTYPES, [(), (4, 3)], (1, 4)))
    with h5py.File(folder / "a.h5", "w") as file:
        for filters, options in HDF5.items():
            for number, (dtype, row, height) in enumerate(combinations):
                data = (np.random.default_rng(number).standard_normal((N, *row)) * 100).astype(
                    dtype
                )
                # chunks of a height of 4 are cut through a row, too
                cut = [max(1, extent - 1) if height == 4 else extent for extent in row]
                how = {"chunks": None if options is None else (height, *cut), **(options or {})}
                name = f"{filters}/{number}"
                file.create_dataset(name, data=data, **how)
                cases.append((folder / "a.h5", name, file[name][:]))
    for version in (2, 3):
        root = zarr.open_group(folder / f"{version}.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
        for layout, options in enumerate(ZARR):
            if options["zarr_format"] != version:
                continue
            for number, (dtype, row, height) in enumerate(combinations):
                data = (np.random.default_rng(number).standard_normal((N, *row)) * 100).astype(
                    dtype
                )
                how = {key: options[key] for key in ("compressors", "order") if key in options}
                if options.get("sharded"):
                    how["shards"] = (2 * height, *row)
                name = f"{layout} {number}"
                array = root.create_array(name, data=data, chunks=(height, *row), **how)
                cases.append((folder / f"{version}.zarr", name, np.asarray(array[...])))
    return cases


def open_case(case: Case, **options: Any) -> Any:
    cls = HDF5Dataset if case[0].suffix == ".h5" else ZarrDataset
    return cls(case[0], case[1], **options)


def same(found: Any, expected: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, but for the byte order, which torch has only one of."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.numpy().dtype == native.dtype and found.numpy().tobytes() == native.tobytes()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Case]]:
    cases = write(tmp_path_factory.mktemp("matrix"))
    assert len(cases) >= 300
    yield cases


def test_every_way_to_index_and_a_loader(cases: list[Case]) -> None:
    modes = ("lazy", "eager", "cached", "streaming", "lazy")  # each layout and dtype in several
    for number, case in enumerate(cases):
        expected, mode = case[2], modes[number % len(modes)]
        with open_case(case, loading_mode=mode, return_index=True, progress=False) as dataset:
            assert len(dataset) == N
            for order in ORDERS if mode != "streaming" else []:
                for found in ([dataset[index] for index in order], dataset.__getitems__(order)):
                    for (row, _), wanted in zip(found, expected[order], strict=True):
                        assert same(row, wanted), (mode, case[:2])
            shuffle = (False, True, "block")[number % 3] if mode != "streaming" else "block"
            loader = create_dataloader(dataset, batch_size=4, shuffle=shuffle, num_workers=0)
            for _ in range(2):  # the second from memory, where the mode holds samples
                batches = [zip(indices, rows, strict=True) for rows, indices in loader]
                rows = {int(index): row for batch in batches for index, row in batch}
                assert sorted(rows) == [*range(N)]
                assert all(same(rows[index], expected[index, ...]) for index in rows), case[:2]
            loader.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_two_workers(cases: list[Case], method: str) -> None:
    """All arrays in one loader, since starting workers for each would take hours."""
    modes = ("lazy", "eager", "cached")
    datasets = [
        open_case(case, loading_mode=modes[number % 3], progress=False)
        for number, case in enumerate(cases)
    ]
    order = np.random.default_rng(0).permutation(len(cases) * N)[:1500].tolist()
    options: dict[str, Any] = {"batch_size": None, "multiprocessing_context": method}
    loader = DataLoader(ConcatDataset(datasets), sampler=order, num_workers=2, **options)
    for index, found in zip(order, loader, strict=True):
        case = cases[index // N]
        assert same(found, case[2][index % N, ...]), (case[:2], index % N)
    for dataset in datasets:
        dataset.close()
