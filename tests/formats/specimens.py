"""The small files that the tests of damage begin with.

Each is small enough that a random byte of it is as likely metadata as data, and large enough to
have several chunks with edges.
"""

from __future__ import annotations

import functools
import io
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from headrace.errors import HeadraceError
from headrace.formats.hdf5.rows import HDF5Source
from headrace.testing.contract import same
from tests.formats.arrays import zarr_rows

N, ROW, NAME = 7, (3,), "x"
HDF5, FOLDER, ZIP = "HDF5", "Zarr folder", "Zarr zip"
Files = dict[str, bytes]
_CHUNKS = (3, 2)  # with edges along both axes


@dataclass(frozen=True)
class Specimen:
    """One dataset, "x", in a folder of files, or in a single one, which is called "a"."""

    name: str
    kind: str
    files: Files = field(repr=False)

    def write(self, place: Path, **changed: bytes) -> Path:
        """The file or folder in the folder `place`, as h5py or zarr-python want it named."""
        return write(self.kind, {**self.files, **changed}, place)


def write(kind: str, files: Files, place: Path) -> Path:
    """Writes files of a kind into a folder; gives the path to open."""
    if kind != FOLDER:
        path = place / ("a.h5" if kind == HDF5 else "a.zip")
        path.write_bytes(files["a"])
        return path
    for name, data in files.items():
        path = place / "a.zarr" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place / "a.zarr"


def values(dtype: str = "<i4") -> np.ndarray[Any, Any]:
    """Rows that compress somewhat."""
    data = np.random.default_rng(5).integers(0, 99, (N, *ROW))
    return (data % 2 == 0) if dtype == "?" else data.astype(dtype)


# -- HDF5

GZIP = {"compression": "gzip"}
CUT: Any = {"chunks": _CHUNKS}
WHOLE: Any = {"chunks": (3, *ROW)}
ARRAYS: dict[str, Any] = {
    "contiguous": {},
    "raw": CUT,
    "raw, whole rows": {**WHOLE, "dtype": "<f8"},
    "bool": {**CUT, "dtype": "?"},
    "gzip, shuffle": {**CUT, **GZIP, "shuffle": True},
    "gzip, fletcher32": {**WHOLE, **GZIP, "fletcher32": True, "dtype": ">i4"},
    "fletcher32": {**WHOLE, "fletcher32": True},
    "grows": {**CUT, **GZIP, "maxshape": (None, *ROW)},
    "grows, two ways": {**CUT, **GZIP, "maxshape": (None, None)},
    "one chunk": {**GZIP, "chunks": (N, *ROW)},
    "zstd": {**CUT, **hdf5plugin.Zstd()},
    "lz4": {**CUT, **hdf5plugin.LZ4(nbytes=16)},
    "blosc": {**WHOLE, **hdf5plugin.Blosc(cname="lz4", shuffle=1)},
    "blosc, zstd": {**WHOLE, **hdf5plugin.Blosc(cname="zstd", shuffle=2), "dtype": "<f8"},
    "lzf": {**CUT, "compression": "lzf"},
    "scaled": {**CUT, "scaleoffset": 0},
}


def _partly(file: h5py.File) -> None:
    rows = file.create_dataset(NAME, (N, *ROW), "<i4", fillvalue=7, **CUT, **GZIP)
    rows[:4] = values()[:4]


def _strings(file: h5py.File) -> None:
    texts = file.create_dataset(NAME, (N,), h5py.string_dtype())
    texts[:] = [f"text {number}" * number for number in range(N)]


def _vlen(file: h5py.File) -> None:
    kind = h5py.vlen_dtype(np.dtype("<i4"))
    rows = file.create_dataset(NAME, (N,), kind, chunks=(3,), **GZIP)
    for number in range(N):
        rows[number] = np.arange(number)


def _compound(file: h5py.File) -> None:
    rows = np.zeros(N, [("a", "<i4"), ("b", "<f8", (2,)), ("c", "S4")])
    rows["a"], rows["b"], rows["c"] = np.arange(N), np.ones((N, 2)), b"abc"
    file.create_dataset(NAME, data=rows, chunks=(3,), **GZIP)


def _compound_of_strings(file: h5py.File) -> None:
    rows = file.create_dataset(NAME, (N,), [("a", "<i4"), ("s", h5py.string_dtype())])
    for number in range(N):
        rows[number] = (number, "text" * number)


OTHERS: dict[str, Any] = {
    "partly written": _partly,
    "strings": _strings,
    "vlen": _vlen,
    "compound": _compound,
    "compound of strings": _compound_of_strings,
}


def _hdf5(name: str, libver: str) -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w", libver=libver) as file:
        if name in OTHERS:
            OTHERS[name](file)
        else:
            how = {"dtype": "<i4", **ARRAYS[name]}
            file.create_dataset(NAME, data=values(how.pop("dtype")), **how)
    return memory.getvalue()


# -- Zarr

V2_COMMON: dict[str, Any] = {
    "raw": {"compressors": None},
    "zlib": {"compressors": numcodecs.Zlib(3)},
    "gzip": {"compressors": numcodecs.GZip(3)},
    "zstd": {"compressors": numcodecs.Zstd(3)},
    "blosc": {"compressors": numcodecs.Blosc("lz4", shuffle=1)},
    "shuffle, zlib": {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.Zlib(3)},
}
"""Also of zarr/test_matrix.py."""
V2_KINDS: dict[str, Any] = {
    **V2_COMMON,
    "F": {"compressors": numcodecs.Zlib(3), "order": "F"},
    "lz4": {"compressors": numcodecs.LZ4()},
    "fill": {"compressors": None, "fill_value": 7},
}
V3_KINDS: dict[str, Any] = {
    "raw": {"compressors": None},
    "big-endian": {"compressors": None, "serializer": BytesCodec(endian="big")},
    "gzip": {"compressors": [GzipCodec(level=4)]},
    "zstd": {"compressors": [ZstdCodec(level=3)]},
    "zstd, checksum": {"compressors": [ZstdCodec(level=3, checksum=True)]},
    "blosc": {"compressors": [BloscCodec(cname="zstd", shuffle="bitshuffle", typesize=4)]},
    "crc32c": {"compressors": [Crc32cCodec()]},
    "transposed": {"filters": [TransposeCodec(order=(1, 0))], "compressors": [ZstdCodec()]},
    "sharded": {"compressors": [ZstdCodec(checksum=True)], "shards": (6, 4)},
    "sharded, raw": {"compressors": None, "shards": {"shape": (6, 4), "index_location": "start"}},
    "fill": {"compressors": None, "fill_value": 7},
}


def _zarr_folder(version: int, how: dict[str, Any]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        root = zarr.open_group(folder, mode="w", zarr_format=version)
        array = root.create_array(NAME, shape=(N, *ROW), dtype="<i4", chunks=_CHUNKS, **how)
        written = N if how.get("fill_value") is None else 2  # some chunks are never written
        array[:written] = values()[:written]
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _zipped(files: Files) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return memory.getvalue()


@functools.cache
def specimens() -> dict[str, Specimen]:
    """All of them, by name."""
    found = []
    for libver in ("earliest", "latest"):
        for name in (*ARRAYS, *OTHERS):
            found.append(Specimen(f"HDF5 {libver}, {name}", HDF5, {"a": _hdf5(name, libver)}))
    for version, kinds in ((2, V2_KINDS), (3, V3_KINDS)):
        for name, how in kinds.items():
            files = _zarr_folder(version, how)
            found.append(Specimen(f"Zarr {version}, {name}", FOLDER, files))
            if name in ("raw", "zstd", "sharded"):
                found.append(Specimen(f"Zarr {version} zip, {name}", ZIP, {"a": _zipped(files)}))
    return {specimen.name: specimen for specimen in found}


def source_of(kind: str, path: Path) -> Any:
    """The rows of "x", as headrace reads them."""
    return HDF5Source(path, NAME) if kind == HDF5 else zarr_rows(path, NAME)


def rows_or_errors(kind: str, path: Path) -> list[Any]:
    """Each row, or the error of headrace's that it gave; where the file can't be opened, that
    error for each row.
    """
    try:
        source = source_of(kind, path)
    except HeadraceError as error:
        return [error] * N
    found: list[Any] = []
    for row in range(len(source)):
        try:
            found.append(source.read([row])[0])
        except HeadraceError as error:
            found.append(error)
    source.close()
    return found


def wrong_rows(found: list[Any], originals: list[Any]) -> list[int]:
    """Those that are neither errors nor what they should be."""
    wrong = []
    for number, (row, original) in enumerate(zip(found, originals, strict=True)):
        if not isinstance(row, HeadraceError) and not same(row, original):
            wrong.append(number)
    return wrong
