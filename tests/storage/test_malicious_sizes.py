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
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.zarr.rows import ZarrSource

ROWS, WIDTH = 64, 1024
SIZE = ROWS * WIDTH  # bytes of a chunk
BOMB = bytes(1000 * SIZE)


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


CLAIMS: dict[str, tuple[Any, bytes, str]] = {
    "deflate": ({"compression": "gzip"}, zlib.compress(BOMB), "more than 65,536 bytes come of it"),
    "zstd": (
        dict(hdf5plugin.Zstd()),
        zstd_frame(1 << 40),
        "1,099,511,627,776 bytes would come of it, not 65,536",
    ),
    "zstd, a bomb": (
        dict(hdf5plugin.Zstd()),
        zstandard.compress(BOMB),
        "65,536,000 bytes would come of it, not 65,536",
    ),
    "zstd, of unknown size": (
        dict(hdf5plugin.Zstd()),
        zstandard.ZstdCompressor(write_content_size=False).compress(BOMB),
        "zstd can't decode it",
    ),
    "blosc": (dict(hdf5plugin.Blosc()), blosc_frame((1 << 31) - 1), "that become 2,147,483,647"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_chunks_of_hdf5_that_claim_to_be_large(
    tmp_path: Path, peak: Callable[[], int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nor is h5py asked for them, which makes room for all that comes."""
    filters, stored, said = CLAIMS[name]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("x", (2 * ROWS, WIDTH), "u1", chunks=(ROWS, WIDTH), **filters)
        rows[ROWS:] = 3
        rows.id.write_direct_chunk((0, 0), stored)
    asked: list[Any] = []
    plain = h5py.Dataset.__getitem__
    monkeypatch.setattr(
        h5py.Dataset, "__getitem__", lambda self, part: asked.append(part) or plain(self, part)
    )
    tracemalloc.reset_peak()
    source = HDF5Source(tmp_path / "a.h5", "x")
    with pytest.raises(FormatError, match=rf"a\.h5, chunk \(0, 0\) of 'x': .*{said}"):
        source.read([5])
    assert source.read([ROWS])[0].tolist() == [3] * WIDTH
    assert peak() < 4 << 20
    assert name == "zstd, of unknown size" or not asked
    source.close()


ZARR_CLAIMS: dict[str, tuple[Any, bytes, str]] = {
    "gzip": (
        [zarr.codecs.GzipCodec()],
        numcodecs.GZip(1).encode(BOMB),
        "more than 65,536 bytes come of it",
    ),
    "zstd": (
        [zarr.codecs.ZstdCodec()],
        zstd_frame(1 << 40),
        "1,099,511,627,776 bytes would come of it",
    ),
    "blosc": ([zarr.codecs.BloscCodec()], blosc_frame((1 << 31) - 1), "that become 2,147,483,647"),
    "raw": (None, BOMB, "it has 65,536,000 bytes, not 65,536"),
}


@pytest.mark.parametrize("name", ZARR_CLAIMS)
def test_chunks_of_zarr_that_claim_to_be_large(
    tmp_path: Path, peak: Callable[[], int], name: str
) -> None:
    compressors, stored, said = ZARR_CLAIMS[name]
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array(
        "x", shape=(ROWS, WIDTH), dtype="u1", chunks=(ROWS, WIDTH), compressors=compressors
    )[...] = 3
    (tmp_path / "a.zarr" / "x" / "c" / "0" / "0").write_bytes(stored)
    tracemalloc.reset_peak()
    with pytest.raises(FormatError, match=rf"a\.zarr, chunk \(0, 0\) of 'x': .*{said}"):
        ZarrSource(tmp_path / "a.zarr", "x").read([5])
    assert peak() < 4 << 20


# -- shards


@pytest.mark.parametrize(
    "claim",
    [(1 << 40, 24), (0, 1 << 40), ((1 << 64) - 2, 24), (1 << 63, 1 << 63), (100, (1 << 64) - 100)],
)
def test_a_shard_s_index_that_leads_beyond_it(
    tmp_path: Path, peak: Callable[[], int], claim: tuple[int, int]
) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x", shape=(8, 6), dtype="i4", chunks=(2, 6), shards=(8, 6))[...] = 3
    shard = tmp_path / "a.zarr" / "x" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    index = data[-68:-4]
    index[16:32] = claim[0].to_bytes(8, "little") + claim[1].to_bytes(8, "little")
    shard.write_bytes(
        bytes(data[:-68] + index) + google_crc32c.value(bytes(index)).to_bytes(4, "little")
    )
    tracemalloc.reset_peak()
    with pytest.raises(
        FormatError, match=r"x/c/0/0: chunk 1 of the shard lies beyond its [\d,]+ bytes"
    ):
        ZarrSource(tmp_path / "a.zarr", "x").read([0])
    assert peak() < 4 << 20


# -- shapes


def edited(tmp_path: Path, **changes: Any) -> Path:
    """A store whose array's metadata say something else than they should."""
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x", shape=(8, 6), dtype="i4", chunks=(2, 6), fill_value=7)[...] = 3
    place = tmp_path / "a.zarr" / "x" / "zarr.json"
    said = {**json.loads(place.read_text()), **changes}
    place.write_text(json.dumps(said))
    return tmp_path / "a.zarr"


def test_a_zarr_array_of_very_many_rows(tmp_path: Path, peak: Callable[[], int]) -> None:
    path = edited(tmp_path, shape=[2**61, 6])
    dataset = ZarrDataset(path, "x")
    tracemalloc.reset_peak()
    assert (
        len(dataset) == 2**61
        and dataset[7].tolist() == [3] * 6
        and dataset[2**61 - 1].tolist() == [7] * 6
    )
    with pytest.raises(
        BudgetError,
        match=(
            r"has 1,152,921,504,606,846,976 blocks of 2 rows, too many to be listed: "
            r"shuffle=True"
        ),
    ):
        dataset.blocks()
    batch = next(iter(create_dataloader(dataset, batch_size=4, num_workers=0, seed=1)))
    assert batch.tolist() == [[7] * 6] * 4
    assert peak() < 4 << 20


@pytest.mark.parametrize("shape", [[2**63, 6], [2**64, 6], [10**30, 6], [2**40, 2**40]])
def test_more_rows_than_can_be_counted(tmp_path: Path, shape: list[int]) -> None:
    with pytest.raises((FormatError, BudgetError), match=r"a\.zarr: "):
        ZarrSource(edited(tmp_path, shape=shape), "x")


@pytest.mark.parametrize(
    "chunk_shape", [[2**40, 6], [2, 2**40], [2**62, 6], [2**64, 6], [10**30, 10**30]]
)
def test_a_zarr_array_of_very_large_chunks(
    tmp_path: Path, peak: Callable[[], int], chunk_shape: list[int]
) -> None:
    path = edited(
        tmp_path, chunk_grid={"name": "regular", "configuration": {"chunk_shape": chunk_shape}}
    )
    tracemalloc.reset_peak()
    with pytest.raises((FormatError, BudgetError), match=r"a\.zarr"):
        ZarrSource(path, "x").read([0])
    assert peak() < 16 << 20  # zarr-python may have been asked
    with pytest.raises((FormatError, BudgetError)):
        ZarrDataset(path, "x")[0]


def test_hdf5_dataset_of_many_unwritten_rows(tmp_path: Path, peak: Callable[[], int]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, how in {"x": {"compression": "gzip"}, "raw": {}}.items():
            rows = file.create_dataset(name, (1 << 40, 8), "i4", chunks=(16, 8), fillvalue=7, **how)
            rows[100:102] = 3
            rows[(1 << 40) - 1] = 4
        file.create_dataset("contiguous", (1 << 40, 8), "i4")
        file.create_dataset("nothing", (1 << 40, 8), "i4", chunks=(16, 8), fillvalue=5)
    tracemalloc.reset_peak()
    for name in ("x", "raw"):
        dataset = HDF5Dataset(tmp_path / "a.h5", name)
        assert "pread" in dataset.explain()
        found = [
            int(dataset[row][5])
            for row in (0, 99, 100, 101, 102, 1 << 30, (1 << 40) - 2, (1 << 40) - 1)
        ]
        assert found == [7, 7, 3, 3, 7, 7, 7, 4]
        dataset.close()
    for name, fill in (("contiguous", 0), ("nothing", 5)):
        assert HDF5Dataset(tmp_path / "a.h5", name)[1 << 39].tolist() == [fill] * 8
    assert peak() < 4 << 20


def test_rows_that_no_machine_can_hold(tmp_path: Path, peak: Callable[[], int]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (8, 1 << 45), "f8", chunks=(1, 1 << 20), compression="gzip")
        file.create_dataset("contiguous", (8, 1 << 45), "f8")
        file.create_dataset("many", (1 << 61, 4), "u1", chunks=(1, 1))
    tracemalloc.reset_peak()
    for name in ("x", "contiguous"):
        with pytest.raises(
            BudgetError, match=r"a\.h5: a row of .* takes 281\.5 TB, and .* are free"
        ):
            HDF5Source(tmp_path / "a.h5", name)
    with pytest.raises(FormatError, match=r"'many' has shape .* more chunks than can be counted"):
        HDF5Source(tmp_path / "a.h5", "many")
    assert peak() < 4 << 20


def test_blocks_take_no_memory_for_rows(tmp_path: Path, peak: Callable[[], int]) -> None:
    path = edited(
        tmp_path,
        shape=[10**9, 6],
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [3 * 10**6, 6]}},
    )
    source = ZarrSource(path, "x")
    tracemalloc.reset_peak()
    blocks = source.blocks()
    assert len(blocks) == 334 and int(blocks.sum()) == 10**9 and np.all(blocks[:-1] == 3 * 10**6)
    assert peak() < 1 << 20 and source.total_bytes == 24 * 10**9
