"""Layouts of packed arrays: contiguous, in chunks, compressed; h5py reads them, and each sample
keeps its checksum.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace import HDF5Dataset, ImageDataset, pack
from headrace.cli.main import main
from headrace.errors import ConfigError, TargetExistsError, WriteError
from headrace.packing import pack_status, verify
from headrace.packing.formats import layout as layouts
from headrace.packing.formats.layout import rows_a_chunk
from headrace.packing.samples import groups_of
from headrace.storage.arrays import compressors

COMPRESSIONS = [None, "gzip", "lz4", "zstd"]
COUNT = 37


class Waves(Dataset[Any]):
    """Float arrays [6, 5] that compress, with a target each."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return (np.arange(30, dtype=np.float32) // 7 + index).reshape(6, 5), index % 3


def images(path: Any) -> ImageDataset:
    return ImageDataset(path, image_size=(20, 30), normalize=False)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("chunks", [None, 1, 7, 64])
def test_round_trip(tmp_path: Path, compression: str | None, chunks: int | None) -> None:
    out = pack(Waves(), tmp_path / "out.h5", compression=compression, chunks=chunks)
    with h5py.File(out) as file:
        is_chunked = chunks is not None or compression is not None
        assert file["data"].chunks == ((min(chunks or COUNT, COUNT), 6, 5) if is_chunked else None)
        # which h5py needs for lz4 and zstd
        assert file["data"].dtype == np.float32 and len(hdf5plugin.get_filters()) > 0
        assert np.array_equal(file["data"][:], np.stack([Waves()[i][0] for i in range(COUNT)]))
    with HDF5Dataset(out, target_name="targets") as dataset:
        assert "h5py" not in str(dataset.sample_source.how()), "headrace reads it by itself"
        for index in (0, 36, 5, 7):
            assert (
                np.array_equal(dataset[index][0], Waves()[index][0])
                and dataset[index][1] == index % 3
            )
    assert verify(out).ok and os.listdir(tmp_path) == ["out.h5"]


READ = """
import sys, h5py, numpy as np
with h5py.File(sys.argv[1]) as file:
    print(file["data"].compression, file["data"].shuffle, file["data"][:].sum())
assert not any(name.startswith(("headrace", "hdf5plugin")) for name in sys.modules)
"""


def test_gzip_is_read_by_h5py_alone(tmp_path: Path) -> None:
    out = pack(Waves(), tmp_path / "out.h5", compression="gzip")
    run = subprocess.run(
        [sys.executable, "-c", READ, out], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == [
        "gzip",
        "True",
        str(sum(Waves()[i][0].sum() for i in range(COUNT))),
    ], run.stderr


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_decoded_images(photos: Path, tmp_path: Path, compression: str | None) -> None:
    out = pack(
        images(photos), tmp_path / "out.h5", store="decoded", compression=compression, chunks=5
    )
    with images(photos) as source, images(out) as packed:
        assert packed.fingerprint == source.fingerprint and packed.classes == source.classes
        assert all(
            torch.equal(packed[i][0], source[i][0]) and packed[i][1] == source[i][1]
            for i in range(len(source))
        )


def test_kinds_of_samples(tmp_path: Path) -> None:
    """Numbers, big-endian ones, booleans, rows of named fields, and rows without elements."""
    table = np.zeros(COUNT, [("a", "<f8"), ("b", "u1", (3,))])
    table["a"] = np.arange(COUNT)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "int": np.arange(COUNT),
        "big": np.arange(2.0 * COUNT).astype(">f8").reshape(COUNT, 2),
        "bool": np.arange(COUNT) % 3 == 0,
    }
    arrays |= {"table": table, "none": np.zeros((COUNT, 0, 3))}
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    for name, array in arrays.items():
        for compression in COMPRESSIONS[1:]:
            with HDF5Dataset(tmp_path / "in.h5", name) as source:
                out = pack(
                    source,
                    tmp_path / f"{name}.h5",
                    compression=compression,
                    chunks=8,
                    overwrite=True,
                )
            with h5py.File(out) as packed:
                assert (
                    packed["data"].dtype == array.dtype
                    and packed["data"][:].tobytes() == array.tobytes()
                )
            assert verify(out).ok


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_same_bytes_with_any_workers(photos: Path, tmp_path: Path, compression: str | None) -> None:
    contents = {
        pack(
            images(photos),
            tmp_path / f"{workers}.h5",
            store="decoded",
            compression=compression,
            chunks=3,
            workers=workers,
        ).read_bytes()
        for workers in (1, 4)
    }
    assert len(contents) == 1


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_same_parts_with_any_processes(photos: Path, tmp_path: Path, compression: str) -> None:
    for processes in (1, 2):
        pack(
            images(photos),
            tmp_path / str(processes),
            store="decoded",
            compression=compression,
            chunks=3,
            shard_size=9000,
            processes=processes,
        )
    one, two = (sorted((p.name, p.read_bytes()) for p in (tmp_path / n).iterdir()) for n in "12")
    assert one == two and len(one) > 8 and verify(tmp_path / "2").ok


def test_parts_have_the_same_chunks(tmp_path: Path) -> None:
    out = pack(Waves(300), tmp_path / "out", shard_size=20_000, compression="gzip", chunks=16)
    status = pack_status(out)
    assert status.joined and status.parts == 2
    for path in sorted(out.glob("*.h5")):
        with h5py.File(path) as file:
            assert file["data"].chunks == (16, 6, 5)
    with HDF5Dataset(out, target_name="targets") as dataset:
        assert len(dataset) == 300 and all(
            np.array_equal(dataset[i][0], Waves()[i][0]) for i in range(300)
        )


# -- blocks


@pytest.mark.parametrize("compression", ["gzip", "lz4", "zstd"])
def test_a_chunk_is_a_block(tmp_path: Path, compression: str) -> None:
    out = pack(Waves(), tmp_path / "out.h5", compression=compression, chunks=7)
    with HDF5Dataset(out) as dataset:
        assert dataset.sample_source.blocks().tolist() == [7, 7, 7, 7, 7, 2]


def test_one_sample_a_chunk_has_no_index(tmp_path: Path) -> None:
    """Chunks that are not compressed lie one behind the other, as contiguous rows do."""
    plain, chunked = (
        pack(Waves(), tmp_path / f"{chunks}.h5", chunks=chunks) for chunks in (None, 1)
    )
    assert abs(chunked.stat().st_size - plain.stat().st_size) < 500
    found: list[Any] = []
    with h5py.File(chunked) as file:
        file["data"].id.chunk_iter(found.append)
    assert np.diff([info.byte_offset for info in found]).tolist() == [120] * (COUNT - 1)


@pytest.mark.parametrize(
    ("row_bytes", "rows"),
    [(1, 1 << 20), (150_528, 4), (1 << 20, 1), ((1 << 20) + 1, 1), (600_000, 1), (500_000, 2)],
)
def test_samples_of_a_chunk_by_bytes(row_bytes: int, rows: int) -> None:
    assert rows_a_chunk(row_bytes) == rows


def test_groups_keep_chunks_together() -> None:
    sizes = np.full(COUNT, 1000)
    groups = list(groups_of(sizes, 16, 5))
    assert [group.start for group in groups] == [0, 15, 30] and groups[-1].stop == COUNT
    assert [len(group) for group in groups_of(sizes, 16, 30)] == [30, 7] and not list(
        groups_of(sizes[:0], 16, 5)
    )


# -- damage


@pytest.mark.parametrize("compression", ["gzip", "lz4", "zstd"])
def test_a_flipped_bit_in_a_chunk_is_found(tmp_path: Path, compression: str) -> None:
    """The samples whose bytes it decides are named, and no others."""
    out = pack(Waves(), tmp_path / "out.h5", compression=compression, chunks=7)
    found: list[Any] = []
    with h5py.File(out) as file:
        file["data"].id.chunk_iter(found.append)
    data = bytearray(out.read_bytes())
    data[found[2].byte_offset + found[2].size // 2] ^= 4
    out.write_bytes(data)
    bad = verify(out).bad
    assert bad and {index for index, _, _ in bad} <= set(range(14, 21))
    assert all(f"row {index}" in location for index, location, _ in bad)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """HDF5 writes the chunks: what the system says comes through, and the process goes on."""
    source = np.random.default_rng(1).random((2000, 50))
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"] = source
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(
            WriteError,
            match=r"too large for this file system, or for this user's limit \(ulimit -f\)",
        ):
            pack(
                HDF5Dataset(tmp_path / "in.h5"), tmp_path / "out.h5", compression="gzip", chunks=10
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["in.h5"]
    assert verify(
        pack(HDF5Dataset(tmp_path / "in.h5"), tmp_path / "out.h5", compression="gzip", chunks=10)
    ).ok


# -- what is refused


@pytest.mark.parametrize("store", [None, "encoded", "jpeg"])
def test_encoded_images_are_not_compressed(photos: Path, tmp_path: Path, store: Any) -> None:
    with pytest.raises(ConfigError, match=r"compressed already.*pass store='decoded'"):
        pack(photos, tmp_path / "out.h5", store=store, compression="gzip")
    assert os.listdir(tmp_path) == []


def test_what_has_no_chunks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ConfigError, match="tokens lie flat"):
        pack(tmp_path / "a.txt", tmp_path / "out.h5", compression="zstd")

    class Ragged(Waves):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            return np.zeros(1 + index), index

    with pytest.raises(ConfigError, match="arrays of several lengths lie flat"):
        pack(Ragged(), tmp_path / "out.h5", chunks=4)
    for wrong in ({"compression": "lzma"}, {"chunks": 0}, {"chunks": True}, {"chunks": 2.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            pack(Waves(), tmp_path / "out.h5", **wrong)  # type: ignore[arg-type]


def test_chunks_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_MOST_CHUNK_BYTES", 1000)
    with pytest.raises(
        ConfigError, match=r"chunks=30: a chunk of 30 samples has 3\.6 kB.*use fewer"
    ):
        pack(Waves(), tmp_path / "out.h5", chunks=30)


def test_another_layout_is_another_plan(tmp_path: Path) -> None:
    out = pack(Waves(), tmp_path / "out", shard_size=2000, compression="gzip", chunks=4)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())
    pack(Waves(), out, shard_size=2000, compression="gzip", chunks=4)  # goes on
    for other, said in (
        ({"compression": "zstd", "chunks": 4}, "gzip there, zstd now"),
        ({"chunks": 4}, "gzip there, None now"),
    ):
        with pytest.raises(TargetExistsError, match=f"compression: {said}"):
            pack(Waves(), out, shard_size=2000, **other)  # type: ignore[arg-type]
    with pytest.raises(TargetExistsError, match="chunks: 4 there, 5 now"):
        pack(Waves(), out, shard_size=2000, compression="gzip", chunks=5)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir()) == before


# -- versions


def options(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "plan.json").read_text())["options"])


def test_the_plan_says_what_decides_the_bytes(photos: Path, tmp_path: Path) -> None:
    assert "versions" not in options(pack(photos, tmp_path / "encoded", shard_size=9000))
    decoded = options(
        pack(
            images(photos),
            tmp_path / "decoded",
            store="decoded",
            shard_size=9000,
            compression="gzip",
        )
    )
    assert (
        set(decoded["versions"]) == {"Pillow", "simplejpeg", "torch", "zlib"}
        and decoded["chunks"] == 512
    )
    assert set(
        options(pack(photos, tmp_path / "jpeg", store="jpeg", shard_size=9000))["versions"]
    ) == {"Pillow", "simplejpeg"}
    assert "versions" not in options(pack(Waves(), tmp_path / "arrays", shard_size=2000, chunks=1))
    one = pack(images(photos), tmp_path / "one.h5", store="decoded")
    again = pack(
        images(one), tmp_path / "copy", store="decoded", shard_size=9000, compression="zstd"
    )
    assert set(options(again)["versions"]) == {"hdf5plugin", "zstd"}, (
        "pixels are copied, and not decoded"
    )


def test_a_missing_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    for options in ({}, {"shard_size": 1000}):
        with pytest.raises(
            ConfigError, match=r"need the package hdf5plugin: pip install 'headrace\[hdf5\]'"
        ):
            pack(Waves(), tmp_path / "out", compression="zstd", **options)  # type: ignore[arg-type]
    assert verify(pack(Waves(), tmp_path / "gzip.h5", compression="gzip")).ok


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = pack(Waves(), tmp_path / "out", shard_size=2000, compression="gzip")
    (out / "manifest.json").unlink()
    monkeypatch.setattr(compressors.zlib, "ZLIB_RUNTIME_VERSION", "9.9")
    with pytest.raises(TargetExistsError, match=r"version of zlib: .* there, 9\.9 now"):
        pack(Waves(), out, shard_size=2000, compression="gzip")


def test_the_command(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "pack",
        str(photos),
        str(tmp_path / "out.h5"),
        "--store",
        "decoded",
        "--size",
        "20x30",
        "--compression",
        "gzip",
        "--chunks",
        "4",
    ]
    assert main(arguments) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["data"].chunks == (4, 20, 30, 3) and file["data"].compression == "gzip"
    assert main(["pack", str(photos), str(tmp_path / "other.h5"), "--compression", "gzip"]) != 0
    assert "--store decoded" in capsys.readouterr().err
