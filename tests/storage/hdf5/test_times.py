"""Times as PyTables stores them, of HDF5's class H5T_TIME, are read in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from headrace import FormatError, HDF5Dataset

SECONDS = np.array([0, 1, -2, 1_763_900_000, 2_000_000_000], np.int64)
MICROSECONDS = np.array([0, 500_000, 750_000, 123_456, -250_000], np.int64)
STORED = SECONDS << 32 | MICROSECONDS & 0xFFFFFFFF
TIMES = 1e-6 * MICROSECONDS + SECONDS
UNIX = {"<": h5t.UNIX_D64LE, ">": h5t.UNIX_D64BE}


def write(
    path: Path, name: str, kind: Any, rows: Any, writer: str | None = "CARRAY", chunk: int = 0
) -> Path:
    """Writes elements as they are to be stored; `writer` is how PyTables marks its own."""
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunk:
        plist.set_chunk((chunk,))
        plist.set_deflate(4)
    with h5py.File(path, "a") as file:
        space = h5s.create_simple((len(rows),))
        h5d.create(file.id, name.encode(), kind, space, plist).write(h5s.ALL, h5s.ALL, rows, kind)
        if writer is not None:
            file[name].attrs["CLASS"] = np.bytes_(writer)
    return path


def table(order: str) -> tuple[Any, np.ndarray[Any, Any]]:
    """The type of a table, and its rows as they are stored: a time, an array of two, a nested
    one, a number and a string.
    """
    inner = h5t.create(h5t.COMPOUND, 9)
    inner.insert(b"end", 0, UNIX[order])
    inner.insert(b"kind", 8, h5t.STD_I8LE)
    kind = h5t.create(h5t.COMPOUND, 40)
    kind.insert(b"when", 0, UNIX[order])
    kind.insert(b"both", 8, h5t.array_create(UNIX[order], (2,)))
    kind.insert(b"inner", 24, inner)
    kind.insert(b"day", 33, h5t.UNIX_D32LE)
    kind.insert(b"name", 37, h5t.py_create(np.dtype("S3")))
    whole = f"{order}i8"
    nested = [("end", whole), ("kind", "i1")]
    fields: Any = [("when", whole), ("both", whole, 2), ("inner", nested), ("day", "<i4")]
    rows = np.zeros(5, [*fields, ("name", "S3")])
    rows["when"] = rows["inner"]["end"] = STORED
    rows["both"] = np.stack([STORED, STORED[::-1]], 1)
    rows["inner"]["kind"] = np.arange(5)
    rows["day"] = np.arange(5) * 100
    rows["name"] = [b"a", b"bc", b"", b"def", b"g"]
    return kind, rows


@pytest.mark.parametrize(("order", "direct"), [("<", True), (">", True), (">", False)])
def test_times_are_seconds(tmp_path: Path, order: str, direct: bool) -> None:
    """Alone, in chunks and in tables."""
    for chunk in (0, 2):
        rows = STORED.astype(f"{order}i8")
        path = write(tmp_path / f"{chunk}.h5", "when", UNIX[order], rows, chunk=chunk)
        with HDF5Dataset(path, "when", direct=direct) as dataset:
            assert dataset.sample_source.is_direct is direct  # type: ignore[attr-defined]
            found = np.stack([dataset[i].numpy() for i in range(5)])
            assert np.array_equal(found, TIMES) and found.dtype == np.float64
    kind, stored = table(order)
    path = write(tmp_path / "a.h5", "t", kind, stored, "TABLE", chunk=2)
    with HDF5Dataset(path, "t", direct=direct) as dataset:
        for i, row in enumerate(dataset.__getitems__([*range(5)])):
            assert row["when"] == TIMES[i] and row["both"].tolist() == [TIMES[i], TIMES[4 - i]]
            assert row["inner"]["end"] == TIMES[i] and row["inner"]["kind"] == i
            assert (row["day"], row["name"]) == (100 * i, stored["name"][i].decode())


def test_times_as_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", "when", UNIX["<"], STORED)
    with h5py.File(path, "a") as file:
        file["x"] = np.arange(10.0).reshape(5, 2)
    with HDF5Dataset(path, "x", target_name="when") as dataset:
        assert [float(target) for _, target in dataset] == TIMES.tolist()


def test_other_times_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", "when", UNIX["<"], STORED, writer=None)
    with h5py.File(path, "a") as file:
        ragged = h5t.vlen_create(UNIX["<"])
        h5d.create(file.id, b"ragged", ragged, h5s.create_simple((3,)))
    for name in ("when", "ragged"):
        with pytest.raises(FormatError, match=f"'{name}' holds times"):
            HDF5Dataset(path, name)
