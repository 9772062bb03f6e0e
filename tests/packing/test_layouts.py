"""Layouts of packed arrays: contiguous, in chunks, compressed; what a plan says.

h5py reads them: test_other_programs.py.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch.utils.data import Dataset

from headrace import HDF5Dataset, ZarrDataset, pack
from headrace.errors import ConfigError, FormatError, TargetExistsError, WriteError
from headrace.formats.arrays import codecs
from headrace.packing import plan as layouts, verify
from headrace.packing.destination import PartFile
from tests.packing.shared import flip, images

pytestmark = pytest.mark.quick_every(2)

COMPRESSIONS = ("gzip", "zstd")
COUNT = 37


class Rows(Dataset[Any]):
    """Arrays of one shape (but for one) that compress, with a target each."""

    def __init__(self, shape: Any = (6, 5), dtype: str = "<f4", ragged: int | None = None) -> None:
        self.shape, self.dtype, self.ragged = shape, dtype, ragged

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, int]:
        shape = (index, *self.shape[1:]) if index == self.ragged else self.shape
        values = np.arange(math.prod(shape)) // 7 + index
        return values.astype(self.dtype).reshape(shape), index % 3


def chunks_of(path: Path) -> list[Any]:
    """Where the chunks of the samples lie."""
    found: list[Any] = []
    with h5py.File(path) as file:
        file["data"].id.chunk_iter(found.append)
    return found


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("compression", [None, *COMPRESSIONS])
@pytest.mark.parametrize("chunks", [None, 1, 7, 64])
def test_round_trip(compression: Any, chunks: int | None, tmp_path: Path) -> None:
    how: dict[str, Any] = {"compression": compression, "chunks": chunks}
    out = pack(Rows(), tmp_path / "out.h5", **how, workers=4)
    with h5py.File(out) as file:
        is_chunked = chunks is not None or compression is not None
        assert file["data"].chunks == ((min(chunks or COUNT, COUNT), 6, 5) if is_chunked else None)
    with HDF5Dataset(out, target_name="targets") as packed:
        assert "h5py" not in str(packed.sample_source.describe().ways), (
            "headrace reads it by itself"
        )
        for index in (0, 36, 5, 7):
            row, target = packed[index]
            assert np.array_equal(row, Rows()[index][0]) and target == index % 3
        if compression and chunks == 7:
            assert packed.sample_source.blocks().tolist() == [7, 7, 7, 7, 7, 2]
    assert verify(out).ok and os.listdir(tmp_path) == ["out.h5"]
    assert pack(Rows(), tmp_path / "b.h5", **how, workers=1).read_bytes() == out.read_bytes()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_kinds_of_rows(compression: str, tmp_path: Path) -> None:
    """Numbers, big-endian ones, booleans, rows of named fields, and rows without elements."""
    table = np.zeros(COUNT, [("a", "<f8"), ("b", "u1", (3,))])
    table["a"] = np.arange(COUNT)
    arrays: dict[str, Any] = {
        "int": np.arange(COUNT),
        "big": np.arange(2.0 * COUNT).astype(">f8").reshape(COUNT, 2),
        "bool": np.arange(COUNT) % 3 == 0,
        "table": table,
        "none": np.zeros((COUNT, 0, 3)),
    }
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    for name, array in arrays.items():
        with HDF5Dataset(tmp_path / "in.h5", name) as source:
            out = pack(source, tmp_path / f"{name}.h5", compression=compression, chunks=8)
        with h5py.File(out) as file:
            assert file["data"].dtype == array.dtype
            assert file["data"][:].tobytes() == array.tobytes(), name
        assert verify(out).ok


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_flipped_bit_in_a_chunk_is_found(compression: str, tmp_path: Path) -> None:
    """The samples whose bytes it decides are named, and no others."""
    out = pack(Rows(), tmp_path / "out.h5", compression=compression, chunks=7)
    chunk = chunks_of(out)[2]
    flip(out, chunk.byte_offset + chunk.size // 2, 2)
    bad = verify(out).bad
    assert bad and {index for index, _, _ in bad} <= set(range(14, 21))
    assert all(f"row {index}" in location for index, location, _ in bad)


def test_failed_pack_leaves_the_descriptor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 has closed the file, so it does not write to the next one with this descriptor."""

    def fails(self: PartFile, data: Any, offset: int) -> None:
        raise WriteError("the targets can't be written")

    monkeypatch.setattr(PartFile, "write", fails)
    with pytest.raises(WriteError) as caught:
        pack(Rows(), tmp_path / "out.h5", compression="gzip")
    files = [(tmp_path / str(number)).open("wb", buffering=0) for number in range(10)]
    del caught
    gc.collect()
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {0}
    for file in files:
        file.close()


# --- what is refused ------------------------------------------------------------------------------


def test_what_has_no_such_layout(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_MOST_CHUNK_BYTES", 1000)
    (tmp_path / "a.txt").write_text("some text")
    (broken := tmp_path / "a.jpg").write_bytes(b"no image")  # which nobody is to read
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (photos, {"compression": "gzip", "store": "encoded"}, "store='decoded'"),
        (broken, {"compression": "gzip", "store": "jpeg"}, "store='decoded'"),
        (tmp_path / "a.txt", {"compression": "zstd"}, "tokens"),
        (Rows(ragged=7), {"chunks": 4}, "several lengths"),
        (Rows(), {"compression": "lzma"}, "compression"),
        (Rows(), {"chunks": 0}, "chunks"),
        (Rows(), {"chunks": True}, "chunks"),
        (Rows(), {"chunks": 30}, r"chunks=30: .* 3\.6 kB"),
    ]
    for source, options, word in rows:
        with pytest.raises(ConfigError, match=word):
            pack(source, tmp_path / "out.h5", **options)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"a.txt", "a.jpg"}


def test_another_layout_is_another_plan(tmp_path: Path) -> None:
    out = pack(Rows(), tmp_path / "out", shard_size=2000, compression="gzip", chunks=4)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())
    pack(Rows(), out, shard_size=2000, compression="gzip", chunks=4)  # goes on
    others: list[tuple[dict[str, Any], str]] = [
        ({"compression": "zstd", "chunks": 4}, "compression: gzip there, zstd now"),
        ({"chunks": 4}, "compression: gzip there, None now"),
        ({"compression": "gzip", "chunks": 5}, "chunks: 4 there, 5 now"),
    ]
    for options, message in others:
        with pytest.raises(TargetExistsError, match=message):
            pack(Rows(), out, shard_size=2000, **options)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir()) == before


# --- versions -------------------------------------------------------------------------------------


def test_the_plan_says_what_decides_the_bytes(photos: Path, tmp_path: Path) -> None:
    one = pack(images(photos), tmp_path / "one.h5", store="decoded")
    decoded: dict[str, Any] = {"store": "decoded", "shard_size": 9000}
    rows: list[tuple[Any, dict[str, Any], set[str]]] = [
        (photos, {"shard_size": 9000}, set()),
        (Rows(), {"shard_size": 2000, "chunks": 1}, set()),
        (photos, {"shard_size": 9000, "store": "jpeg"}, {"Pillow", "simplejpeg"}),
        (
            images(photos),
            {**decoded, "compression": "gzip"},
            {"Pillow", "simplejpeg", "torch", "zlib"},
        ),
        # pixels are copied, and not decoded
        (images(one), {**decoded, "compression": "zstd"}, {"hdf5plugin", "zstd"}),
    ]
    for number, (source, how, versions) in enumerate(rows):
        out = pack(source, tmp_path / f"{number}", **how)
        options = json.loads((out / "plan.json").read_text())["options"]
        assert set(options.get("versions", ())) == versions


def test_a_missing_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    for shard_size in (None, 1000):
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[hdf5\]'"):
            pack(Rows(), tmp_path / "out", compression="zstd", shard_size=shard_size)
    assert verify(pack(Rows(), tmp_path / "gzip.h5", compression="gzip")).ok


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = pack(Rows(), tmp_path / "out", shard_size=2000, compression="gzip")
    (out / "manifest.json").unlink()
    monkeypatch.setattr(codecs.zlib, "ZLIB_RUNTIME_VERSION", "9.9")
    with pytest.raises(TargetExistsError, match=r"zlib: .* there, 9\.9 now"):
        pack(Rows(), out, shard_size=2000, compression="gzip")


def test_packs_of_another_kind(photos: Path, tmp_path: Path) -> None:
    packed = pack(photos, tmp_path / "packed", shard_size=16_000)
    with pytest.raises(FormatError, match=r"headrace\.open_dataset"):
        ZarrDataset(packed)
