"""Damage to the bytes of chunks is found, and no wrong value is given."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, ZarrDataset
from headrace.errors import FormatError, HeadraceError, SampleError
from headrace.formats.arrays import codecs
from headrace.formats.hdf5.rows import HDF5Source
from tests.formats.arrays import zarr_rows
from tests.formats.specimens import (
    FOLDER,
    NAME,
    ZIP,
    N,
    Specimen,
    rows_or_errors,
    specimens,
    values,
    wrong_rows,
)

ALL = specimens()


def originals(specimen: Specimen, place: Path) -> list[Any]:
    found = rows_or_errors(specimen.kind, specimen.write(place))
    assert not any(isinstance(row, HeadraceError) for row in found)
    return found


def chunk_bytes(specimen: Specimen, place: Path) -> list[tuple[str, int]]:
    """File and place of each stored byte of the chunks; of zip files all before the directory."""
    found: list[Any] = []
    if specimen.kind == FOLDER:
        for name, data in specimen.files.items():
            if "/c/" in name or name.rpartition("/")[2][0].isdigit():
                found += [(name, at) for at in range(len(data))]
    elif specimen.kind == ZIP:
        found = [("a", at) for at in range(specimen.files["a"].index(b"PK\x01\x02"))]
    else:
        with h5py.File(specimen.write(place)) as file:
            infos: list[Any] = []
            file[NAME].id.chunk_iter(infos.append)
        for info in infos:
            found += [("a", info.byte_offset + at) for at in range(info.size)]
    return found


@pytest.mark.parametrize("cuts", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_files_that_are_cut(tmp_path: Path, cuts: int) -> None:
    """An error, or the rows that were there."""
    draw, errors = random.Random(1), 0
    for number, (name, specimen) in enumerate(ALL.items()):
        place = tmp_path / str(number)
        place.mkdir()
        expected = originals(specimen, place)
        for _ in range(cuts):
            file = draw.choice(sorted(specimen.files))
            length = draw.randrange(len(specimen.files[file]))
            path = specimen.write(place, **{file: specimen.files[file][:length]})
            found = rows_or_errors(specimen.kind, path)
            assert not wrong_rows(found, expected), (name, file, length)
            errors += sum(isinstance(row, HeadraceError) for row in found)
    assert errors > 100 * cuts


# parts of a stream that mean nothing: times and names in its head, bits between its blocks
GUARDED: dict[str, float] = {
    "HDF5 earliest, fletcher32": 0,
    "HDF5 latest, gzip, fletcher32": 0,
    "HDF5 latest, gzip, shuffle": 1 / 8,
    "Zarr 2, zlib": 1 / 8,
    "Zarr 2, gzip": 1 / 3,
    "Zarr 3, gzip": 1 / 3,
    "Zarr 3, zstd, checksum": 0,
    "Zarr 3, crc32c": 0,
    "Zarr 3, sharded": 0,
    # but for names, which only the directory is asked for
    "Zarr 2 zip, zstd": 1,
    "Zarr 3 zip, raw": 1,
}
UNGUARDED = [f"HDF5 latest, {name}" for name in ("lz4", "zstd", "blosc", "blosc, zstd")]
UNGUARDED += ["Zarr 2, blosc", "Zarr 3, blosc", "Zarr 3, zstd"]


@pytest.mark.parametrize("step", [23, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("guarded", [True, False])
def test_each_flipped_byte_is_found(tmp_path: Path, step: int, guarded: bool) -> None:
    """Where there is a checksum. Without one nobody can notice other values, but they have the
    right shape, and nothing else is raised.
    """
    for number, name in enumerate(GUARDED if guarded else UNGUARDED):
        specimen, place, unnoticed = ALL[name], tmp_path / str(number), 0
        place.mkdir()
        expected = originals(specimen, place)
        flips = chunk_bytes(specimen, place)[::step]
        for file, at in flips:
            data = bytearray(specimen.files[file])
            data[at] ^= 0x01 if at % 2 else 0x80
            found = rows_or_errors(specimen.kind, specimen.write(place, **{file: bytes(data)}))
            if guarded:
                assert not wrong_rows(found, expected), (name, file, at)
            else:
                assert all(isinstance(row, HeadraceError) or row.shape == (3,) for row in found)
            unnoticed += not any(isinstance(row, HeadraceError) for row in found)
            specimen.write(place)
        assert len(flips) > 3 and unnoticed <= GUARDED.get(name, 1) * len(flips) + 2, name


def test_blosc_fills_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a byte becomes, an error or values that were decoded: never what lay in memory."""
    made, before = np.empty, 0

    def dirty(*given: Any) -> Any:
        return np.full(given[0], before, *given[1:])

    def decoded(data: bytes) -> bytes | None:
        monkeypatch.setattr(codecs.np, "empty", dirty)
        try:
            return bytes(codecs.Pipeline([codecs.BLOSC]).decode(data, 160))
        except FormatError:
            return None
        finally:
            monkeypatch.setattr(codecs.np, "empty", made)

    for number, compressor in enumerate(("lz4", "zstd", "blosclz", "zlib")):
        blosc = numcodecs.Blosc(compressor, 5, number % 3, 64)
        stored = blosc.encode(np.arange(40, dtype="u4") % 7)
        for at in range(len(stored)):
            for byte in (0, 0x7F, 0xFF, stored[at] ^ 1, stored[at] ^ 0x10):
                data = stored[:at] + bytes([byte]) + stored[at + 1 :]
                found = []
                for before in (0, 255):  # noqa: B007  # of `dirty`
                    found.append(decoded(data))
                assert found[0] == found[1], (compressor, at, byte)


# -- chunk files


def store(place: Path, **how: Any) -> tuple[Path, Path]:
    """A store, and the file of its first chunk, which has row 0, and not the last one."""
    how = {"shape": (N, 3), "dtype": "<i4", "chunks": (3, 3), **how}
    zarr.open_group(place, mode="w").create_array(NAME, **how)[...] = values()
    return place, place / NAME / "c" / "0" / "0"


def test_chunk_files_of_the_wrong_size_or_kind(tmp_path: Path) -> None:
    gzip = [zarr.codecs.GzipCodec()]
    hows: list[Any] = [
        {"compressors": None},
        {"compressors": gzip},
        {},
        {"compressors": None, "chunks": (1, 3)},
        {"chunks": (1, 3)},
    ]
    for number, how in enumerate(hows):
        path, chunk = store(tmp_path / f"{number}.zarr", **how)
        whole = chunk.read_bytes()
        for wrong in (b"", whole[:-1], whole + b"x", whole + whole, whole[: len(whole) // 2]):
            chunk.write_bytes(wrong)
            source = zarr_rows(path, NAME)
            said = r"\.zarr(, chunk \(0, 0\) of 'x'|/x/c/0/0 has \d+ bytes)"
            with pytest.raises(FormatError, match=said):
                source.read([0])
            assert np.array_equal(source.read([N - 1])[0], values()[N - 1])
            source.close()
        chunk.unlink()
        assert zarr_rows(path, NAME).read([0])[0].tolist() == [0, 0, 0]  # never written
        with pytest.raises(FormatError, match=r"(chunk \(0, 0\) of 'x'|x/c/0/0) is missing"):
            zarr_rows(path, NAME, missing="error").read([0])
        chunk.mkdir()
        with pytest.raises(FormatError, match="x/c/0/0 is a folder"):
            zarr_rows(path, NAME).read([0])
        with pytest.raises(SampleError, match=r"sample 0 .* is a folder"):
            ZarrDataset(path, NAME)[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_chunk_that_may_not_be_read(tmp_path: Path) -> None:
    path, chunk = store(tmp_path / "a.zarr")
    chunk.parent.chmod(0)
    try:
        with pytest.raises(SampleError, match="Permission denied"):
            ZarrDataset(path, NAME)[2]
    finally:
        chunk.parent.chmod(0o755)


# -- HDF5 through h5py


def test_errors_of_h5py_name_the_file_and_the_dataset(tmp_path: Path) -> None:
    """Chunks and heaps that only h5py reads, all of them overwritten."""
    for name in ("lzf", "vlen", "strings", "compound of strings"):
        specimen, place = ALL[f"HDF5 earliest, {name}"], tmp_path / name
        place.mkdir()
        data = bytearray(specimen.files["a"])
        begin = data.find(b"GCOL")
        if begin < 0:
            begin = min(at for _, at in chunk_bytes(specimen, place))
        data[begin + 16 :] = b"\xff" * (len(data) - begin - 16)
        path = specimen.write(place, a=bytes(data))
        with pytest.raises(FormatError, match=r"a\.h5: 'x' "):
            HDF5Source(path, NAME).read(range(N))
        with pytest.raises(SampleError, match=re.escape(f"sample {N - 1} can't be read: {path}")):
            HDF5Dataset(path, NAME)[N - 1]


def test_a_damaged_chunk_is_not_left_to_h5py(tmp_path: Path) -> None:
    """Which may give what lay in memory for it: zstd's filter does."""
    specimen = ALL["HDF5 latest, zstd"]
    data = bytearray(specimen.files["a"])
    with h5py.File(specimen.write(tmp_path)) as file:
        begin = file[NAME].id.get_chunk_info_by_coord((0, 2)).byte_offset
    data[begin + 9 : begin + 29] = bytes(20)
    source = HDF5Source(specimen.write(tmp_path, a=bytes(data)), NAME)
    assert source.is_direct
    with pytest.raises(FormatError, match=r"a\.h5, chunk \(0, 1\) of 'x'"):
        source.read([0])
