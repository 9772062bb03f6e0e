"""Damage to what describes the data is an error that names it, or gives the same rows as the
library. Each of these was found by test_fuzz.py.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import ZarrDataset
from headrace.errors import FormatError, HeadraceError
from headrace.formats.hdf5.rows import HDF5Source
from tests.formats.arrays import zarr_rows
from tests.formats.specimens import NAME, N, specimens

# -- the index of an HDF5 dataset's chunks


def packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def test_keys_of_chunks_that_are_out_of_order(tmp_path: Path) -> None:
    """HDF5 looks chunks up by their order, and lists them as they are: what it lists it may not
    find.
    """
    specimen = specimens()["HDF5 earliest, raw"]
    data, key = specimen.files["a"], packed(6, 0, 0)  # coordinates, and a zero at the end
    at = data.index(key, data.index(b"TREE\x01"))
    for number, new in enumerate([(4161, 0), (0, 0), (3, 2)]):  # beyond, again, twice
        (tmp_path / str(number)).mkdir()
        changed = data[:at] + packed(*new, 0) + data[at + len(key) :]
        path = specimen.write(tmp_path / str(number), a=changed)
        source = HDF5Source(path, NAME)
        assert source.describe().ways == {NAME: "h5py: the index of its chunks is unusual"}
        with h5py.File(path) as file:
            assert all(np.array_equal(source.read([row])[0], file[NAME][row]) for row in range(N))
        source.close()


def test_chunks_without_bytes_and_beyond_what_can_be_counted(tmp_path: Path) -> None:
    """HDF5 crashes over those without bytes, where there are checksums."""
    specimen, infos = specimens()["HDF5 earliest, gzip, shuffle"], list[Any]()
    with h5py.File(specimen.write(tmp_path)) as file:
        file[NAME].id.chunk_iter(infos.append)
    data, last = specimen.files["a"], infos[-1]
    key = last.size.to_bytes(4, "little") + bytes(4) + packed(*last.chunk_offset, 0)
    at = data.index(key + packed(last.byte_offset))
    for number, (place, new) in enumerate([(at, bytes(4)), (at + len(key), packed(2**63 - 1))]):
        (tmp_path / str(number)).mkdir()
        changed = data[:place] + new + data[place + len(new) :]
        with pytest.raises(FormatError, match=r"0 bytes|lies beyond"):
            HDF5Source(specimen.write(tmp_path / str(number), a=changed), NAME)


# -- the metadata of Zarr


def test_attributes_of_version_2_that_are_damaged(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    root.create_array(NAME, shape=(N, 3), dtype="<i4")
    (tmp_path / "a.zarr" / NAME / ".zattrs").write_bytes(b"\xff{")
    with pytest.raises(FormatError, match=r"a\.zarr: x/\.zattrs"):
        zarr_rows(tmp_path / "a.zarr", NAME)


def test_zip_files_whose_directory_or_metadata_are_damaged(tmp_path: Path) -> None:
    specimen = specimens()["Zarr 3 zip, zstd"]
    whole, path = specimen.files["a"], specimen.write(tmp_path)
    with zipfile.ZipFile(path) as file:
        places = {info.filename: info.header_offset for info in file.infolist()}
    for at, said in (
        (places["x/zarr.json"] + 60, "'x/zarr.json'"),
        (places["x/c/0/0"] + 50, r"chunk \(0, 0\) of 'x'"),
        (whole.index(b"PK\x01\x02"), r"a\.zip"),
    ):
        path.write_bytes(whole[:at] + b"#" + whole[at + 1 :])
        with pytest.raises(FormatError, match=said):
            zarr_rows(path, NAME).read([0])
        with pytest.raises(HeadraceError, match=said):
            ZarrDataset(path, NAME)[0]
