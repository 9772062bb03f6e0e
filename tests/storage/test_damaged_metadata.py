"""Damage to what describes the data is an error that names it, or gives the same rows as the
library.

Each of these was found by fuzz.py.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from headrace import ZarrDataset
from headrace.errors import FormatError, HeadraceError
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.zarr.rows import ZarrSource
from tests.storage.specimens import HDF5, NAME, N, Specimen, specimens, values, write

ALL = {specimen.name: specimen for specimen in specimens()}

# -- the index of an HDF5 dataset's chunks


def with_key(specimen: Specimen, place: Path, old: tuple[int, ...], new: tuple[int, ...]) -> Path:
    """The file with another key in the B-tree that leads to its chunks: coordinates, and a zero
    at the end.
    """
    data = specimen.files["a"]
    key = b"".join(number.to_bytes(8, "little") for number in (*old, 0))
    assert data.count(key) >= 1
    at = data.index(key, data.index(b"TREE\x01"))
    changed = (
        data[:at]
        + b"".join(number.to_bytes(8, "little") for number in (*new, 0))
        + data[at + len(key) :]
    )
    return write(HDF5, {"a": changed}, place)


@pytest.mark.parametrize("new", [(4161, 0), (0, 0), (3, 2)], ids=["beyond", "again", "twice"])
def test_keys_of_chunks_that_are_out_of_order(tmp_path: Path, new: tuple[int, ...]) -> None:
    """HDF5 looks chunks up by their order, and lists them as they are: what it lists it may not
    find.
    """
    path = with_key(ALL["HDF5 earliest, raw"], tmp_path, (6, 0), new)
    source = HDF5Source(path, NAME)
    assert source.how() == {NAME: "h5py: the index of its chunks is unusual"}
    with h5py.File(path) as file:
        assert all(np.array_equal(source.read([row])[0], file[NAME][row]) for row in range(N))
    source.close()


@pytest.mark.parametrize(
    ("field", "said"), [("size", "a chunk of '/x' has 0 bytes"), ("offset", "lies beyond its")]
)
def test_chunks_without_bytes_and_beyond_what_can_be_counted(
    tmp_path: Path, field: str, said: str
) -> None:
    """HDF5 crashes over those without bytes, where there are checksums."""
    specimen, found = ALL["HDF5 earliest, gzip, shuffle"], list[Any]()
    with h5py.File(specimen.write(tmp_path)) as file:
        file[NAME].id.chunk_iter(found.append)
    data, last = bytearray(specimen.files["a"]), found[-1]
    key = (
        last.size.to_bytes(4, "little")
        + bytes(4)
        + b"".join(number.to_bytes(8, "little") for number in (*last.chunk_offset, 0))
    )
    at = data.index(key + last.byte_offset.to_bytes(8, "little"))
    if field == "size":
        data[at : at + 4] = bytes(4)
    else:
        data[at + len(key) : at + len(key) + 8] = (2**63 - 1).to_bytes(8, "little")
    path = write(HDF5, {"a": bytes(data)}, tmp_path)
    with pytest.raises(FormatError, match=said):
        HDF5Source(path, NAME)


@pytest.mark.parametrize("maxshape", [(None, 6), (13, None), (None, None), (13, 6)])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_chunks_of_what_grows(tmp_path: Path, libver: str, maxshape: Any) -> None:
    """HDF5 itself lists chunks at wrong places where one axis grows that is not the first."""
    data = np.arange(78, dtype="i4").reshape(13, 6)
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("x", data=data, chunks=(4, 2), maxshape=maxshape, compression="gzip")
        some = file.create_dataset(
            "some", (13, 6), "i4", chunks=(4, 2), maxshape=maxshape, compression="gzip"
        )
        some[12, 5] = some[1, 3] = 9
    for name in ("x", "some"):
        source = HDF5Source(tmp_path / "a.h5", name)
        assert source.is_direct == (maxshape != (13, None)), source.how()
        with h5py.File(tmp_path / "a.h5") as file:
            assert np.array_equal(np.stack(source.read(range(13))), file[name][:])
        source.close()


# -- the metadata of Zarr


def store(place: Path, version: int) -> tuple[Path, dict[str, Any]]:
    how: dict[str, Any] = {"compressors": numcodecs.Zlib(1)} if version == 2 else {}
    root = zarr.open_group(place, mode="w", zarr_format=version)
    root.create_array(NAME, shape=(N, 3), dtype="<i4", chunks=(3, 3), **how)[...] = values()
    path = place / NAME / ("zarr.json" if version == 3 else ".zarray")
    return path, json.loads(path.read_text())


def codecs_3(**options: Any) -> Any:
    return {
        "codecs": [
            {"name": "bytes", "configuration": options},
            {"name": "zstd", "configuration": {"level": 0, "checksum": False}},
        ]
    }


def keys_3(separator: Any) -> Any:
    return {"chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}}}


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (2, {"dimension_separator": "/../"}),
        (2, {"dimension_separator": 3}),
        (2, {"fill_value": 2**40}),
        (2, {"shape": [7]}),
        (2, {"chunks": [0, 3]}),
        (2, {"chunks": [3, 10**400]}),
        (2, {"compressor": {"id": "zlib", "|evel": 1}}),
        (2, {"filters": [{"id": "shuffle", "elementsize": 0}]}),
        (2, {"filters": [{"id": "shuffle", "elementsize": 5}]}),
        (2, {"filters": 0}),
        (2, {"dtype": "int32x"}),
        (2, {"zarr_format": True}),
        (2, {"order": ["C"]}),
        (3, keys_3("/../")),
        (3, keys_3([])),
        (3, keys_3("\0")),
        (3, codecs_3(endian=None)),
        (3, codecs_3(endian="middle")),
        (3, {"codecs": [{"name": "zstd", "configuration": {"level": 0, "checksum": False}}]}),
        (3, {"codecs": []}),
        (3, {"codecs": 7}),
        (3, {"fill_value": "x"}),
        (3, {"node_type": "tree"}),
        (3, {"data_type": ["int32"]}),
        (3, {"shape": "x"}),
        (3, {"attributes": 3}),
        (3, {"dimension_names": [1, 2, 3]}),
        (3, {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 3]}}}),
        (3, {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}}}),
    ],
)
def test_metadata_that_make_no_sense(tmp_path: Path, version: int, changes: dict[str, Any]) -> None:
    """An error that names the store; or what zarr-python gives, where it doesn't mind."""
    path, said = store(tmp_path / "a.zarr", version)
    path.write_text(json.dumps({**said, **changes}))
    try:
        array = zarr.open_group(tmp_path / "a.zarr", mode="r")[NAME]
        expected = [np.asarray(array[row]) for row in range(N)]
    except Exception:
        expected = None
    try:
        source = ZarrSource(tmp_path / "a.zarr", NAME)
        found = source.read(range(N))
    except HeadraceError as error:
        assert "a.zarr" in str(error)
        return
    assert expected is not None and all(
        np.array_equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def test_a_key_that_is_missing(tmp_path: Path) -> None:
    for version in (2, 3):
        path, said = store(tmp_path / f"{version}.zarr", version)
        for key in said:
            path.write_text(
                json.dumps({name: value for name, value in said.items() if name != key})
            )
            try:
                rows = ZarrSource(tmp_path / f"{version}.zarr", NAME).read(range(N))
            except HeadraceError:
                continue
            assert np.array_equal(np.stack(rows), values()), (version, key)


def test_attributes_of_version_2_that_are_damaged(tmp_path: Path) -> None:
    path, _ = store(tmp_path / "a.zarr", 2)
    (path.parent / ".zattrs").write_bytes(b"\xff{")
    with pytest.raises(FormatError, match=r"a\.zarr: x/\.zattrs is damaged"):
        ZarrSource(tmp_path / "a.zarr", NAME)


# -- zip files


def test_zip_files_whose_directory_or_metadata_are_damaged(tmp_path: Path) -> None:
    whole = ALL["Zarr 3 zip, zstd"].files["a"]
    path = tmp_path / "a.zip"
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as file:
        places = {info.filename: info.header_offset for info in file.infolist()}
    changes = {
        "Bad CRC-32 for file 'x/zarr.json'": (places["x/zarr.json"] + 60, b"#"),
        "differ": (places["x/zarr.json"] + 30, b"#"),
        "x/c/0/0 has a wrong checksum": (places["x/c/0/0"] + 50, b"#"),
        "no file begins where x/c/0/0 should": (places["x/c/0/0"], b"#"),
        "is damaged, or holds what zipfile can't read|is no Zarr store": (
            whole.index(b"PK\x01\x02"),
            b"#",
        ),
    }
    for said, (at, byte) in changes.items():
        path.write_bytes(whole[:at] + byte + whole[at + 1 :])
        with pytest.raises(FormatError, match=said):
            ZarrSource(path, NAME).read([0])
        with pytest.raises(HeadraceError, match=said):
            ZarrDataset(path, NAME)[0]
