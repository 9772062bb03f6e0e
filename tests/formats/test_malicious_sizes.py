"""Sizes that files claim are checked before any memory is taken for them."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import zarr
import zstandard

from headrace import HDF5Dataset, ZarrDataset, create_dataloader
from headrace.errors import BudgetError, FormatError
from headrace.formats.hdf5.rows import HDF5Source
from tests.formats.arrays import zarr_rows

ROWS, WIDTH = 64, 1024
SIZE = ROWS * WIDTH  # bytes of a chunk
BOMB = bytes(1000 * SIZE)
ZSTD_BOMB = zstandard.compress(BOMB)
ZSTD_OF_UNKNOWN_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(BOMB)


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """Gives the most bytes that were held at once since `tracemalloc.reset_peak()`."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def zstd_frame(claimed: int) -> bytes:
    """A frame whose header claims that so many bytes come of it."""
    return b"\x28\xb5\x2f\xfd\xe0" + claimed.to_bytes(8, "little") + b"\x01\x00\x00"


def blosc_frame(claimed: int) -> bytes:
    stored = bytearray(numcodecs.Blosc("lz4").encode(bytes(SIZE)))
    stored[4:8] = claimed.to_bytes(4, "little")
    return bytes(stored)


def test_chunks_of_hdf5_that_claim_to_be_large(
    tmp_path: Path, peak: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is h5py asked for them, which makes room for all that comes."""
    zstd: Any = hdf5plugin.Zstd()
    cases: list[tuple[Any, bytes]] = [
        ({"compression": "gzip"}, zlib.compress(BOMB)),
        (zstd, zstd_frame(1 << 40)),
        (zstd, ZSTD_BOMB),
        (hdf5plugin.Blosc(), blosc_frame((1 << 31) - 1)),
        (zstd, ZSTD_OF_UNKNOWN_SIZE),
    ]
    asked: list[Any] = []
    plain = h5py.Dataset.__getitem__

    def noted(self: h5py.Dataset, part: Any) -> Any:
        asked.append(part)
        return plain(self, part)

    for number, (filters, stored) in enumerate(cases):
        path, how = tmp_path / f"{number}.h5", {"chunks": (ROWS, WIDTH), **filters}
        with h5py.File(path, "w") as file:
            rows = file.create_dataset("x", (2 * ROWS, WIDTH), "u1", **how)
            rows[ROWS:] = 3
            rows.id.write_direct_chunk((0, 0), stored)
        with monkeypatch.context() as patched:
            patched.setattr(h5py.Dataset, "__getitem__", noted)
            tracemalloc.reset_peak()
            source = HDF5Source(path, "x")
            with pytest.raises(FormatError, match=rf"{number}\.h5, chunk \(0, 0\) of 'x'"):
                source.read([5])
            assert source.read([ROWS])[0].tolist() == [3] * WIDTH
        assert peak() < 4 << 20 and (stored is ZSTD_OF_UNKNOWN_SIZE or not asked)
        source.close()


def test_a_shard_s_index_that_leads_beyond_it(tmp_path: Path, peak: Callable[[], int]) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x", shape=(8, 6), dtype="i4", chunks=(2, 6), shards=(8, 6))[...] = 3
    shard = tmp_path / "a.zarr" / "x" / "c" / "0" / "0"
    data = shard.read_bytes()
    beyond = [(1 << 40, 24), (0, 1 << 40), ((1 << 64) - 2, 24), (1 << 63, 1 << 63)]
    for offset, size in (*beyond, (100, (1 << 64) - 100)):
        index = bytearray(data[-68:-4])
        index[16:32] = offset.to_bytes(8, "little") + size.to_bytes(8, "little")
        checksum = google_crc32c.value(bytes(index)).to_bytes(4, "little")
        shard.write_bytes(data[:-68] + bytes(index) + checksum)
        tracemalloc.reset_peak()
        with pytest.raises(FormatError, match="x/c/0/0: chunk 1 of the shard"):
            zarr_rows(tmp_path / "a.zarr", "x").read([0])
        assert peak() < 4 << 20


# -- shapes


def edited(tmp_path: Path, chunk_shape: Any = (2, 6), **changes: Any) -> Path:
    """A store whose array's metadata say something else than they should."""
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x", shape=(8, 6), dtype="i4", chunks=(2, 6), fill_value=7)[...] = 3
    place = tmp_path / "a.zarr" / "x" / "zarr.json"
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}
    place.write_text(json.dumps({**json.loads(place.read_text()), "chunk_grid": grid, **changes}))
    return tmp_path / "a.zarr"


def test_a_zarr_array_of_very_many_rows(tmp_path: Path, peak: Callable[[], int]) -> None:
    dataset = ZarrDataset(edited(tmp_path, shape=[2**61, 6]), "x")
    tracemalloc.reset_peak()
    assert len(dataset) == 2**61
    assert dataset[7].tolist() == [3] * 6 and dataset[2**61 - 1].tolist() == [7] * 6
    with pytest.raises(BudgetError, match="1,152,921,504,606,846,976 blocks"):
        dataset.blocks()
    batch = next(iter(create_dataloader(dataset, batch_size=4, num_workers=0, seed=1)))
    assert batch.tolist() == [[7] * 6] * 4
    source = zarr_rows(edited(tmp_path, [3 * 10**6, 6], shape=[10**9, 6]), "x")
    blocks = source.blocks()
    assert len(blocks) == 334 and int(blocks.sum()) == 10**9 and np.all(blocks[:-1] == 3 * 10**6)
    assert peak() < 4 << 20 and source.total_bytes == 24 * 10**9


def test_a_zarr_array_that_no_machine_can_hold(tmp_path: Path, peak: Callable[[], int]) -> None:
    for shape in ([2**63, 6], [2**64, 6], [10**30, 6], [2**40, 2**40]):
        with pytest.raises((FormatError, BudgetError), match=r"a\.zarr: "):
            zarr_rows(edited(tmp_path, shape=shape), "x")
    for chunks in ([2**40, 6], [2, 2**40], [2**62, 6], [2**64, 6], [10**30, 10**30]):
        path = edited(tmp_path, chunks)
        tracemalloc.reset_peak()
        with pytest.raises((FormatError, BudgetError), match=r"a\.zarr"):
            zarr_rows(path, "x").read([0])
        assert peak() < 16 << 20  # zarr-python may have been asked
        with pytest.raises((FormatError, BudgetError)):
            ZarrDataset(path, "x")[0]


def test_hdf5_datasets_of_many_unwritten_rows(tmp_path: Path, peak: Callable[[], int]) -> None:
    many = 1 << 40
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, compression in (("gzip", "gzip"), ("raw", None)):
            how: Any = {"chunks": (16, 8), "fillvalue": 7, "compression": compression}
            rows = file.create_dataset(name, (many, 8), "i4", **how)
            rows[100:102] = 3
            rows[many - 1] = 4
        file.create_dataset("contiguous", (many, 8), "i4")
        file.create_dataset("nothing", (many, 8), "i4", chunks=(16, 8), fillvalue=5)
    tracemalloc.reset_peak()
    for name in ("gzip", "raw"):
        dataset = HDF5Dataset(tmp_path / "a.h5", name)
        assert "pread" in dataset.explain()
        places = (0, 99, 100, 101, 102, 1 << 30, many - 2, many - 1)
        assert [int(dataset[row][5]) for row in places] == [7, 7, 3, 3, 7, 7, 7, 4]
        dataset.close()
    for name, fill in (("contiguous", 0), ("nothing", 5)):
        assert HDF5Dataset(tmp_path / "a.h5", name)[1 << 39].tolist() == [fill] * 8
    assert peak() < 4 << 20


def test_hdf5_rows_that_no_machine_can_hold(tmp_path: Path, peak: Callable[[], int]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (8, 1 << 45), "f8", chunks=(1, 1 << 20), compression="gzip")
        file.create_dataset("contiguous", (8, 1 << 45), "f8")
        file.create_dataset("many", (1 << 61, 4), "u1", chunks=(1, 1))
    tracemalloc.reset_peak()
    for name in ("x", "contiguous"):
        with pytest.raises(BudgetError, match=r"a\.h5: .*281\.5 TB"):
            HDF5Source(tmp_path / "a.h5", name)
    with pytest.raises(FormatError, match="'many'"):
        HDF5Source(tmp_path / "a.h5", "many")
    assert peak() < 4 << 20
