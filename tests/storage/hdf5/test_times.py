"""Times as PyTables stores them, of HDF5's class H5T_TIME, are read in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import FormatError, HDF5Dataset
from headrace.inspecting.hdf5 import inspect_hdf5
from headrace.io.remote.options import RemoteOptions

SECONDS = np.array([0, 1, -2, 1_763_900_000, 2_000_000_000], np.int64)
MICROSECONDS = np.array([0, 500_000, 750_000, 123_456, -250_000], np.int64)
STORED = SECONDS << 32 | MICROSECONDS & 0xFFFFFFFF
TIMES = 1e-6 * MICROSECONDS + SECONDS
UNIX = {"<": h5py.h5t.UNIX_D64LE, ">": h5py.h5t.UNIX_D64BE}


def write(
    path: Path,
    name: str,
    kind: Any,
    rows: np.ndarray[Any, Any],
    writer: str | None = "CARRAY",
    **chunks: Any,
) -> Path:
    """Writes elements as they are to be stored."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunks:
        plist.set_chunk(chunks["chunks"])
        plist.set_deflate(4)
    with h5py.File(path, "a") as file:
        dataset = h5py.h5d.create(
            file.id, name.encode(), kind, h5py.h5s.create_simple((len(rows),)), plist
        )
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, rows, kind)
        if writer is not None:
            file[name].attrs["CLASS"] = np.bytes_(writer)
    return path


def table(order: str) -> tuple[Any, np.ndarray[Any, Any]]:
    """The type of a table, and its rows as they are stored: a time, an array of two, a nested
    one, a number and a string.
    """
    inner = h5py.h5t.create(h5py.h5t.COMPOUND, 9)
    inner.insert(b"end", 0, UNIX[order])
    inner.insert(b"kind", 8, h5py.h5t.STD_I8LE)
    kind = h5py.h5t.create(h5py.h5t.COMPOUND, 40)
    for name, at, member in (
        *(
            (b"when", 0, UNIX[order]),
            (b"both", 8, h5py.h5t.array_create(UNIX[order], (2,))),
            (b"inner", 24, inner),
        ),
        *(
            (b"day", 33, h5py.h5t.UNIX_D32LE),
            (b"name", 37, h5py.h5t.py_create(np.dtype("S3"))),
        ),
    ):
        kind.insert(name, at, member)
    whole = f"{order}i8"
    rows = np.zeros(
        5,
        [
            ("when", whole),
            ("both", whole, 2),
            ("inner", [("end", whole), ("kind", "i1")]),
            ("day", "<i4"),
            ("name", "S3"),
        ],
    )
    rows["when"], rows["both"], rows["inner"]["end"] = (
        STORED,
        np.stack([STORED, STORED[::-1]], 1),
        STORED,
    )
    rows["inner"]["kind"], rows["day"], rows["name"] = (
        np.arange(5),
        np.arange(5) * 100,
        [b"a", b"bc", b"", b"def", b"g"],
    )
    return kind, rows


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("chunks", [{}, {"chunks": (2,)}])
def test_times_are_seconds(
    tmp_path: Path, order: str, chunks: dict[str, Any], direct: bool
) -> None:
    path = write(tmp_path / "a.h5", "when", UNIX[order], STORED.astype(f"{order}i8"), **chunks)
    with HDF5Dataset(path, "when", direct=direct) as dataset:
        assert dataset.sample_source.is_direct is direct  # type: ignore[attr-defined]
        assert (
            np.array_equal([dataset[i].numpy() for i in range(5)], TIMES)
            and dataset[0].numpy().dtype == np.float64
        )


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("order", "<>")
def test_times_in_tables(tmp_path: Path, order: str, direct: bool) -> None:
    kind, rows = table(order)
    with HDF5Dataset(
        write(tmp_path / "a.h5", "t", kind, rows, "TABLE", chunks=(2,)), "t", direct=direct
    ) as dataset:
        for i, row in enumerate(dataset.__getitems__(list(range(5)))):
            assert row["when"] == TIMES[i] and row["both"].tolist() == [TIMES[i], TIMES[4 - i]]
            assert row["inner"]["end"] == TIMES[i] and row["inner"]["kind"] == i
            assert (row["day"], row["name"]) == (100 * i, rows["name"][i].decode())


def test_times_as_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", "when", UNIX["<"], STORED)
    with h5py.File(path, "a") as file:
        file["x"] = np.arange(10.0).reshape(5, 2)
    with HDF5Dataset(path, "x", target_name="when") as dataset:
        assert [float(target) for _, target in dataset] == TIMES.tolist()


def test_other_times_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", "when", UNIX["<"], STORED, writer=None)
    with pytest.raises(
        FormatError, match=r"'when' holds times \(H5T_TIME\) that PyTables did not write.*pandas"
    ):
        HDF5Dataset(path, "when")
    with h5py.File(path, "a") as file:
        ragged = h5py.h5d.create(
            file.id, b"ragged", h5py.h5t.vlen_create(UNIX["<"]), h5py.h5s.create_simple((3,))
        )
        assert ragged.get_type().get_class() == h5py.h5t.VLEN
    with pytest.raises(FormatError, match=r"'ragged' holds times .* elements of any size"):
        HDF5Dataset(path, "ragged")


def test_times_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", "when", UNIX["<"], STORED)
    kind, rows = table("<")
    write(path, "t", kind, rows, "TABLE")
    write(path, "other", UNIX["<"], STORED, writer=None)
    nodes = {node.path: node for node in inspect_hdf5(path, RemoteOptions(), "when").nodes}
    assert nodes["when"].dtype == "float64" and "when: float64, both: float64 [2]" in str(
        nodes["t"].dtype
    )
    assert "PyTables did not write" in str(nodes["other"].details["unusual"])
    for name in ("when", "t"):
        with HDF5Dataset(path, name) as dataset:
            assert (
                inspect_hdf5(path, RemoteOptions(), name).fingerprint
                == dataset.sample_source.fingerprint()
            )
