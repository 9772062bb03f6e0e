"""The layout of packs in Zarr: shards, chunks, dtypes, and what Zarr can't hold.

Samples: test_round_trips.py. Jobs: test_parts.py. zarr-python: test_other_programs.py.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc
from torch.utils.data import Dataset

from headrace import (
    HDF5Dataset,
    ImageDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
    pack,
)
from headrace.errors import ConfigError, FormatError, TargetExistsError
from headrace.packing import pack_status, verify
from headrace.packing.zarr.layout import ArrayLayout, flat_options, rows_options, zarr_layout
from headrace.packing.zarr.shard import encoded
from tests.packing.shared import contents, flip


class Rows(Dataset[Any]):
    """Arrays of one shape but for one, with a target each."""

    def __init__(self, shape: Any = (3, 4), dtype: str = "<f4", ragged: int | None = None) -> None:
        self.shape, self.dtype, self.ragged = shape, dtype, ragged

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Any, int]:
        shape = (index, *self.shape[1:]) if index == self.ragged else self.shape
        return np.full(shape, index, self.dtype), index * 7


class Dicts(Rows):
    def __getitem__(self, index: int) -> Any:
        return {"a": np.zeros(2), "b": np.zeros(3)}


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 100_000), st.integers(1, 3_000_000))
def test_rows_of_parts_are_whole_chunks(count: int, row: int, shard_size: int) -> None:
    options = rows_options((count, row), np.dtype(np.uint8), shard_size)
    samples, chunk = options["samples"], options["chunk"]
    parts = -(-count // samples)
    assert samples % chunk == 0 and parts * samples >= count > (parts - 1) * samples
    assert chunk * row <= max(row, 64 << 10)
    assert zarr_layout(count, parts, options).data.shape == (count, row)
    assert samples * row < shard_size + 2 * chunk * row + row


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 10**7))
def test_flat_parts_fit_their_shards(sizes: list[int], shard_size: int) -> None:
    options = flat_options(np.array(sizes), np.array(sizes), shard_size)
    step = options["samples"]
    largest = max(sum(sizes[start : start + step]) for start in range(0, len(sizes), step))
    assert largest <= options["shard"] < largest + options["chunk"]
    assert options["shard"] % options["chunk"] == 0


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "|u1", "<i8", "|b1", "<c8", ">u2", "<f2"])
@pytest.mark.parametrize("shape", [(3, 4), (), (5,)])
def test_arrays(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    out = pack(Rows(shape, dtype), tmp_path / "out", format="zarr", shard_size=100)
    group: Any = zarr.open_group(out / "data.zarr", mode="r")
    assert all(np.array_equal(group["data"][n], np.full(shape, n, dtype)) for n in range(30))
    by_group = ZarrDataset(out / "data.zarr", "data", target_name="targets")
    with ZarrDataset(out, target_name="targets") as rows, by_group:
        for number, (value, target) in enumerate(rows):
            assert np.array_equal(np.asarray(value), np.full(shape, number, dtype))
            assert target == by_group[number][1] == number * 7
        assert rows.fingerprint == by_group.fingerprint
    with open_dataset(out) as rows:
        assert isinstance(rows, ZarrDataset) and verify(out).samples == len(rows) == 30


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("dtype", ["|u1", ">f4"])
@pytest.mark.parametrize("compression", ["gzip", "zstd", "lz4", None])
@pytest.mark.parametrize("chunks", [1, 4, None])
def test_compressed_chunks(dtype: str, compression: Any, chunks: Any, tmp_path: Path) -> None:
    source = Rows((9, 7), dtype)
    nbytes = 63 * np.dtype(dtype).itemsize
    how: dict[str, Any] = {"format": "zarr", "shard_size": 8 * nbytes, "chunks": chunks}
    out = pack(source, tmp_path / "out", compression=compression, workers=3, **how)
    again = tmp_path / "again"
    for part in ("1/2", "0/2"):
        pack(source, again, compression=compression, part=part, workers=1, **how)
    assert contents(again) == contents(out) and pack_status(out).parts == 4
    data: Any = zarr.open_array(out / "data.zarr", path="data", mode="r")
    assert data.chunks[0] == (chunks or 8)
    with ZarrDataset(out, target_name="targets") as rows:
        for number, (value, target) in enumerate(rows):
            assert np.array_equal(np.asarray(value), source[number][0]) and target == 7 * number
        assert "zarr-python" not in rows.explain()
    if compression is not None:
        stored = sum(path.stat().st_size for path in (out / "data.zarr" / "data").glob("c.*"))
        assert stored < 30 * nbytes or chunks == 1, "very small chunks don't get smaller"
        with pytest.raises(TargetExistsError, match="compression"):
            pack(source, out, **how)
    shard = out / "data.zarr" / "data" / "c.1.0.0"
    whole = shard.read_bytes()
    named = []
    for place in (10, len(whole) - 5):  # a sample, and the shard's index
        flip(shard, place)
        named.append([index for index, _, _ in verify(out).bad])
        shard.write_bytes(whole)
    assert named == [list(range(8, 8 + data.chunks[0])), [-1]]


def test_threads_that_encode_leave_blosc_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that encode at once the first to begin is the first to end."""
    array = ArrayLayout("data", (4, 4096), np.dtype("<i8"), 4, 1, compression="lz4")
    chunk = np.arange(4096).view(np.uint8)
    both = threading.Barrier(2)
    first_ended = threading.Event()
    numbers = itertools.count()
    settings: list[Any] = []
    compress = blosc.compress

    def in_turn(*arguments: Any) -> Any:
        number = next(numbers)
        both.wait(60)
        assert number == 0 or first_ended.wait(60)
        settings.append(blosc.use_threads)
        return compress(*arguments)

    monkeypatch.setattr(blosc, "compress", in_turn)
    monkeypatch.setattr(blosc, "use_threads", True)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(encoded, chunk, array) for _ in range(2)]
        wait(made, return_when=FIRST_COMPLETED)
        first_ended.set()
        assert made[0].result() == made[1].result()
    assert settings == [False, False] and blosc.use_threads is True


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs; not to be written to."""
    out = tmp_path_factory.mktemp("zarr") / "out"
    return Path(pack(photos, out, format="zarr", shard_size=16_000))


def test_a_missing_column_chunk_is_an_error(packed: Path, tmp_path: Path) -> None:
    for name in ("targets", "crc32", "names"):
        out = Path(shutil.copytree(packed, tmp_path / name))
        (out / "data.zarr" / name / "c.1").unlink()
        with pytest.raises(FormatError, match="missing"):
            ImageDataset(out)


# --- other datasets -------------------------------------------------------------------------------


def test_packs_of_another_kind(packed: Path, photos: Path, tmp_path: Path) -> None:
    hdf5 = pack(photos, tmp_path / "hdf5", shard_size=16_000)
    for dataset, path in ((HDF5Dataset, packed), (TextDataset, packed), (ZarrDataset, hdf5)):
        with pytest.raises(FormatError, match=r"headrace\.open_dataset"):
            dataset(path)
    with pytest.raises(FormatError, match="HDF5 files"):
        ImageDataset([packed, hdf5])


def test_what_zarr_can_not_hold(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    refused: list[tuple[Any, str]] = [
        (TextDataset(tmp_path / "a.txt"), "texts"),
        (Rows(ragged=7), "several shapes"),
        (Rows(dtype="<M8[s]"), "dtype|numbers"),
        (Rows((0, 3)), "no elements"),
        (Dicts(), "dtype"),
    ]
    for dataset, word in refused:
        with pytest.raises(ConfigError, match=word):
            pack(dataset, tmp_path / "out", format="zarr")
