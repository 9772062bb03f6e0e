"""Damage to the bytes of chunks is found, and no wrong value is given."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, ZarrDataset
from headrace.errors import FileChangedError, FormatError, HeadraceError, SampleError
from headrace.storage.arrays import codecs
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.zarr.rows import ZarrSource
from tests.storage.specimens import (
    FOLDER,
    HDF5,
    NAME,
    N,
    Specimen,
    rows_or_errors,
    specimens,
    values,
    write,
    wrong_rows,
)

pytestmark = pytest.mark.slow

ALL = {specimen.name: specimen for specimen in specimens()}
METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs")


def originals(specimen: Specimen, place: Path) -> list[Any]:
    place.mkdir()
    found = rows_or_errors(specimen.kind, specimen.write(place))
    assert not any(isinstance(row, HeadraceError) for row in found)
    shutil.rmtree(place)
    return found


def chunk_bytes(specimen: Specimen, place: Path) -> list[tuple[str, int]]:
    """File and place of each stored byte of the chunks."""
    if specimen.kind == FOLDER:
        return [
            (name, at)
            for name, data in specimen.files.items()
            if not name.endswith(METADATA)
            for at in range(len(data))
        ]
    found: list[Any] = []
    place.mkdir()
    with h5py.File(specimen.write(place)) as file:
        file[NAME].id.chunk_iter(found.append)
    return [("a", info.byte_offset + at) for info in found for at in range(info.size)]


# -- cut files


@pytest.mark.quick_every(16)
@pytest.mark.parametrize("name", ALL)
def test_files_that_are_cut(tmp_path: Path, name: str) -> None:
    """Each file at 20 lengths: an error, or the rows that were there."""
    specimen, draw = ALL[name], random.Random(name)
    expected, errors = originals(specimen, tmp_path / "whole"), 0
    for number in range(20):
        file = draw.choice(sorted(specimen.files))
        cut = {
            **specimen.files,
            file: specimen.files[file][: draw.randrange(len(specimen.files[file]))],
        }
        place = tmp_path / str(number)
        place.mkdir()
        found = rows_or_errors(specimen.kind, write(specimen.kind, cut, place))
        assert not wrong_rows(found, expected), (file, len(cut[file]))
        errors += sum(isinstance(row, HeadraceError) for row in found)
    assert errors


# -- flipped bytes

GUARDED = [
    f"HDF5 {libver}, {name}"
    for libver in ("earliest", "latest")
    for name in ("fletcher32", "gzip, fletcher32", "gzip, shuffle")
]
GUARDED += [
    "Zarr 2, zlib",
    "Zarr 2, gzip",
    "Zarr 3, gzip",
    "Zarr 3, zstd, checksum",
    "Zarr 3, crc32c",
    "Zarr 3, sharded",
]
UNGUARDED = [f"HDF5 latest, {name}" for name in ("lz4", "zstd", "blosc", "blosc, zstd")]
UNGUARDED += ["Zarr 2, blosc", "Zarr 3, blosc", "Zarr 3, zstd"]
# parts of a stream that mean nothing: times and names in its head, bits between its blocks
NO_DATA = {"gzip": 1 / 3, "zlib": 1 / 8}


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("name", GUARDED)
def test_each_flipped_byte_is_found_where_there_is_a_checksum(tmp_path: Path, name: str) -> None:
    specimen = ALL[name]
    expected, unnoticed, tried = originals(specimen, tmp_path / "whole"), 0, 0
    for file, at in chunk_bytes(specimen, tmp_path / "listed"):
        for pattern in (0x01, 0x80):
            data = bytearray(specimen.files[file])
            data[at] ^= pattern
            place = tmp_path / "flipped"
            place.mkdir()
            found = rows_or_errors(
                specimen.kind, write(specimen.kind, {**specimen.files, file: bytes(data)}, place)
            )
            assert not wrong_rows(found, expected), (file, at, pattern)
            unnoticed += not any(isinstance(row, HeadraceError) for row in found)
            shutil.rmtree(place)
            tried += 1
    share = next(
        (share for part, share in NO_DATA.items() if part in name and "fletcher32" not in name), 0
    )
    assert unnoticed <= share * tried


@pytest.mark.parametrize("name", UNGUARDED)
def test_flipped_bytes_without_a_checksum_are_rows_or_errors(tmp_path: Path, name: str) -> None:
    """Other values nobody can notice; they have the right shape, and nothing else is raised."""
    specimen = ALL[name]
    for file, at in chunk_bytes(specimen, tmp_path / "listed"):
        data = bytearray(specimen.files[file])
        data[at] ^= 1 << at % 8
        place = tmp_path / "flipped"
        place.mkdir()
        for row in rows_or_errors(
            specimen.kind, write(specimen.kind, {**specimen.files, file: bytes(data)}, place)
        ):
            assert isinstance(row, HeadraceError) or row.shape == (3,)
        shutil.rmtree(place)


@pytest.mark.parametrize("compressor", ["lz4", "zstd", "blosclz", "zlib"])
@pytest.mark.parametrize("shuffle", [0, 1, 2])
def test_blosc_fills_what_it_gives(
    monkeypatch: pytest.MonkeyPatch, compressor: str, shuffle: int
) -> None:
    """Whatever a byte becomes, an error or values that were decoded: never what lay in memory."""
    stored = numcodecs.Blosc(compressor, 5, shuffle, 64).encode(np.arange(40, dtype="u4") % 7)
    made = np.empty

    def decoded(data: bytes, before: int) -> bytes | None:
        monkeypatch.setattr(
            codecs.np, "empty", lambda *given: np.full(*given[:1], before, *given[1:])
        )
        try:
            return bytes(codecs.Pipeline([codecs.Blosc()]).decode(data, 160))
        except FormatError:
            return None
        finally:
            monkeypatch.setattr(codecs.np, "empty", made)

    for at in range(len(stored)):
        for byte in (0, 1, 0x7F, 0x80, 0xFF, stored[at] ^ 1, stored[at] ^ 0x10):
            data = stored[:at] + bytes([byte]) + stored[at + 1 :]
            assert decoded(data, 0) == decoded(data, 255), (at, byte)


@pytest.mark.parametrize(
    "name", ["Zarr 2 zip, raw", "Zarr 2 zip, zstd", "Zarr 3 zip, raw", "Zarr 3 zip, zstd"]
)
def test_flipped_bytes_in_zip_files_are_found(tmp_path: Path, name: str) -> None:
    """By the zip file's own checksums, also where rows are parts of chunks; but for names in its
    directory: those chunks are missing.
    """
    specimen = ALL[name]
    expected = originals(specimen, tmp_path / "whole")
    for at in range(specimen.files["a"].index(b"PK\x01\x02")):
        data = bytearray(specimen.files["a"])
        data[at] ^= 0x04
        place = tmp_path / str(at)
        place.mkdir()
        assert not wrong_rows(
            rows_or_errors(specimen.kind, write(specimen.kind, {"a": bytes(data)}, place)), expected
        ), at


# -- chunk files


def store(place: Path, **how: Any) -> tuple[Path, Path]:
    """A store, and the file of its first chunk, which has rows 0 to 2."""
    array = zarr.open_group(place, mode="w").create_array(
        NAME, shape=(N, 3), dtype="<i4", **{"chunks": (3, 3), **how}
    )
    array[...] = values()
    return place, place / NAME / "c" / "0" / "0"


@pytest.mark.parametrize(
    "how",
    [{"compressors": None}, {"compressors": [zarr.codecs.GzipCodec()]}, {}],
    ids=["raw", "gzip", "zstd"],
)
def test_chunk_files_of_the_wrong_size_or_kind(tmp_path: Path, how: Any) -> None:
    path, chunk = store(tmp_path / "a.zarr", **how)
    wrong_files(path, chunk, 2, 3)


@pytest.mark.parametrize("how", [{"compressors": None}, {}], ids=["raw", "zstd"])
def test_row_files_of_the_wrong_size_or_kind(tmp_path: Path, how: Any) -> None:
    path, chunk = store(tmp_path / "a.zarr", **how, chunks=(1, 3))
    wrong_files(path, chunk, 0, 1)


def wrong_files(path: Path, chunk: Path, row: int, other: int) -> None:
    """The file of the first chunk, in which one row lies, and not the other, is damaged in
    several ways.
    """
    whole = chunk.read_bytes()
    for wrong in (b"", whole[:-1], whole + b"x", whole + whole, whole[: len(whole) // 2]):
        chunk.write_bytes(wrong)
        source = ZarrSource(path, NAME)
        with pytest.raises(FormatError, match=r"a\.zarr, chunk \(0, 0\) of 'x': "):
            source.read([row])
        assert np.array_equal(source.read([other])[0], values()[other])
        source.close()
    chunk.unlink()
    assert ZarrSource(path, NAME).read([row])[0].tolist() == [0, 0, 0]  # what was never written
    with pytest.raises(FormatError, match=r"chunk \(0, 0\) of 'x' is missing, and missing='error'"):
        ZarrSource(path, NAME, missing="error").read([row])
    chunk.mkdir()
    with pytest.raises(
        FormatError, match=r"x/c/0/0 is a folder, where a file with a chunk should be"
    ):
        ZarrSource(path, NAME).read([row])
    with pytest.raises(SampleError, match=rf"sample {row} can't be read: .* is a folder"):
        ZarrDataset(path, NAME)[row]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_chunk_that_may_not_be_read(tmp_path: Path) -> None:
    path, chunk = store(tmp_path / "a.zarr")
    chunk.parent.chmod(0)
    try:
        with pytest.raises(SampleError, match="Permission denied"):
            ZarrDataset(path, NAME)[2]
    finally:
        chunk.parent.chmod(0o755)


def test_a_zip_file_that_is_replaced_says_so(tmp_path: Path) -> None:
    specimen = ALL["Zarr 3 zip, raw"]
    path = specimen.write(tmp_path)
    dataset = ZarrDataset(path, NAME)
    assert np.array_equal(dataset[0], values()[0])
    path.write_bytes(specimen.files["a"] + b"\0")
    with pytest.raises(
        FileChangedError,
        match=r"a\.zip was changed after the dataset was opened, .*: open the dataset again",
    ):
        dataset[6]


# -- HDF5 through h5py


@pytest.mark.parametrize("name", ["lzf", "vlen", "strings", "compound of strings"])
def test_errors_of_h5py_name_the_file_and_the_dataset(tmp_path: Path, name: str) -> None:
    """Chunks and heaps that only h5py reads, all of them overwritten."""
    specimen = ALL[f"HDF5 earliest, {name}"]
    data = bytearray(specimen.files["a"])
    begin = (
        data.index(b"GCOL")
        if b"GCOL" in data
        else min(at for _, at in chunk_bytes(specimen, tmp_path / "listed"))
    )
    data[begin + 16 :] = b"\xff" * (len(data) - begin - 16)
    path = write(HDF5, {"a": bytes(data)}, tmp_path)
    with pytest.raises(
        FormatError, match=r"a\.h5: 'x' is damaged, or holds what h5py can't read \(\w+: "
    ):
        HDF5Source(path, NAME).read(range(N))
    with pytest.raises(SampleError, match=re.escape(f"sample {N - 1} can't be read: {path}")):
        HDF5Dataset(path, NAME)[N - 1]


def test_a_damaged_chunk_is_not_left_to_h5py(tmp_path: Path) -> None:
    """Which may give what lay in memory for it: zstd's filter does."""
    specimen = ALL["HDF5 latest, zstd"]
    data = bytearray(specimen.files["a"])
    found: list[Any] = []
    with h5py.File(specimen.write(tmp_path)) as file:
        file[NAME].id.chunk_iter(found.append)
    data[found[1].byte_offset + 9 : found[1].byte_offset + 29] = bytes(20)
    source = HDF5Source(write(HDF5, {"a": bytes(data)}, tmp_path), NAME)
    assert source.is_direct
    with pytest.raises(FormatError, match=r"a\.h5, chunk \(0, 1\) of 'x': zstd can't decode it"):
        source.read([0])
