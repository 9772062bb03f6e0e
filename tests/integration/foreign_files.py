"""Writes HDF5 files with other libraries, and beside each what that library reads of it.

    python tests/integration/foreign_files.py KIND FOLDER

KIND is netcdf4 or pytables. Each runs in a process of its own: these libraries bring HDF5 libraries
of their own. FOLDER gets files and "expected.pickle": (file, dataset) ->
array; a list of str, or of arrays; a dict of these for compounds; or None for what h5py can't read.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

N = 41
Expected = dict[tuple[str, str], Any]
RANDOM = np.random.default_rng(0)


def numbers(*row: int, dtype: str = "f4") -> Any:
    """Random bytes as numbers, most of them 0, so that they can be packed."""
    nbytes = N * int(np.prod(row, dtype=int)) * np.dtype(dtype).itemsize
    values = RANDOM.integers(0, 256, nbytes, np.uint8) * (RANDOM.random(nbytes) < 0.1)
    return values.view(dtype).reshape(N, *row)


def netcdf4(folder: Path) -> Expected:
    import netCDF4

    path = folder / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("y", 6)
        file.createDimension("x", 5)
        file.createDimension("length", 7)
        plane: dict[str, Any] = {"chunksizes": (8, 6, 5)}
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "zlib": {"compression": "zlib", "shuffle": True, "chunksizes": (8, 4, 5)},
            "checked": {"compression": "zlib", "fletcher32": True, "chunksizes": (3, 6, 5)},
            "bits": {"compression": "zlib", "least_significant_digit": 2},
            "filled": {"fill_value": -9.0, "chunksizes": (4, 6, 5)},
        }
        for compression in ("zstd", "blosc_lz4", "bzip2", "szip"):
            ways[compression] = {"compression": compression, **plane}
        for name, options in ways.items():
            file.createVariable(name, "f4", ("time", "y", "x"), **options)[:] = numbers(6, 5)
        file.createVariable("big", ">i4", ("time", "x"), endian="big", compression="zlib")[:] = (
            numbers(5, dtype="i4")
        )
        file.createVariable("scaled", "i2", ("time", "y"))[:] = numbers(6, dtype="i2")
        file.createVariable("time", "f8", ("time",))[:] = np.arange(N) / 3
        file.createVariable("letters", "S1", ("time", "length"))[:] = netCDF4.stringtochar(
            np.array([f"row {i}" for i in range(N)], "S7")
        )
        words = file.createVariable("words", str, ("time",))
        for i in range(N):
            words[i] = f"Wört {i}"
        group = file.createGroup("deep/er")
        table = group.createCompoundType(np.dtype([("a", "i4"), ("b", "f8", (2,))]), "pair")
        rows = np.zeros(N, table.dtype)
        rows["a"], rows["b"] = np.arange(N), numbers(2, dtype="f8")
        group.createVariable("pairs", table, ("time",))[:] = rows
        ragged = group.createVariable("ragged", group.createVLType(np.int16, "any"), ("time",))
        for i in range(N):
            ragged[i] = np.arange(i % 5, dtype="i2")
        colours = group.createEnumType(np.uint8, "colour", {"red": 0, "green": 1})
        group.createVariable("colours", colours, ("time",))[:] = (np.arange(N) % 2).astype("u1")
        sparse = group.createVariable(
            "sparse", "i4", ("time", "x"), chunksizes=(4, 5), fill_value=77
        )
        sparse[N - 1] = np.arange(5)
    with netCDF4.Dataset(folder / "classic.nc", "w", format="NETCDF4_CLASSIC") as file:
        file.createDimension("n", N)
        file.createVariable("x", "f8", ("n",))[:] = numbers(dtype="f8")
    found: Expected = {}
    for name in ("a.nc", "classic.nc"):
        with netCDF4.Dataset(folder / name) as file:
            file.set_auto_maskandscale(False)
            file.set_always_mask(False)
            file.set_auto_chartostring(False)
            for prefix in ["", "deep/er/"] if name == "a.nc" else [""]:
                for variable, data in (file[prefix] if prefix else file).variables.items():
                    found[name, prefix + variable] = data[:]
    for name in ("words", "deep/er/ragged"):
        found["a.nc", name] = found["a.nc", name].tolist()
    letters = found["a.nc", "letters"].tolist()
    found["a.nc", "letters"] = [[one.decode() for one in row] for row in letters]
    return found


def pytables(folder: Path) -> Expected:
    import tables

    class Row(tables.IsDescription):  # type: ignore[misc]
        flag = tables.BoolCol()
        name = tables.StringCol(9)
        number = tables.Float64Col(shape=(2, 3))

        class inner(tables.IsDescription):  # type: ignore[misc]
            z = tables.ComplexCol(16)
            small = tables.Int8Col()

    rows = np.zeros(N, tables.dtype_from_descr(Row))
    rows["flag"], rows["name"] = np.arange(N) % 3 == 0, [f"n{i}".encode() for i in range(N)]
    rows["number"], rows["inner"]["z"] = numbers(2, 3, dtype="f8"), np.arange(N) + 1j
    with tables.open_file(folder / "a.h5", "w") as file:
        file.create_array("/", "plain", numbers(4, 3, dtype="f8"))
        file.create_array("/", "truth", np.arange(2 * N).reshape(N, 2) % 3 == 0)
        file.create_array("/", "half", numbers(4, dtype="f2"))
        file.create_array("/", "names", np.array([f"s{i}".encode() for i in range(N)]))
        whole = {
            "zlib": tables.Filters(5, "zlib", fletcher32=True),
            "blosc": tables.Filters(5, "blosc:lz4"),
            "bitshuffled": tables.Filters(5, "blosc:zstd", shuffle=False, bitshuffle=True),
            "blosc2": tables.Filters(5, "blosc2"),
            "bzip2": tables.Filters(5, "bzip2"),
        }
        for name, filters in whole.items():
            how: dict[str, Any] = {"filters": filters, "createparents": True}
            file.create_carray(
                "/", name, obj=numbers(6, 5, dtype="i4"), chunkshape=(8, 4, 5), **how
            )
            file.create_table("/tables", name, obj=rows, chunkshape=(8,), **how)
        packed: dict[str, Any] = {"filters": tables.Filters(1), "chunkshape": (5, 3)}
        grows = file.create_earray("/", "grows", tables.UInt16Atom(), (0, 3), **packed)
        grows.append(numbers(3, dtype="u2"))
        sideways = file.create_earray("/", "sideways", tables.UInt16Atom(), (N, 0), **packed)
        sideways.append(numbers(4, dtype="u2"))
        ragged = file.create_vlarray("/", "ragged", tables.Float32Atom())
        for i in range(N):
            ragged.append(np.arange(i % 4, dtype="f4"))

        def carray(name: str, atom: Any, *row: int, **how: Any) -> Any:
            return file.create_carray("/", name, atom, (N, *row), **how)

        carray("empty", tables.Int32Atom(dflt=5), 3, chunkshape=(4, 3))[N - 1] = 1
        arrays = carray("arrays", tables.Float32Atom(shape=(3, 2)), chunkshape=(4,))
        arrays[:] = numbers(3, 2)
        colours = tables.EnumAtom(tables.Enum({"red": 0, "green": 1}), "red", base="uint8")
        carray("colours", colours)[:] = (np.arange(N) % 2).astype("u1")
    found: Expected = {}
    with tables.open_file(folder / "a.h5") as file:
        for node in file.walk_nodes("/"):
            if not isinstance(node, tables.Group):
                found["a.h5", node._v_pathname[1:]] = node.read()
    found["a.h5", "names"] = [name.decode() for name in found["a.h5", "names"]]
    return found


KINDS = {"netcdf4": netcdf4, "pytables": pytables}
if __name__ == "__main__":
    place = Path(sys.argv[2])
    (place / "expected.pickle").write_bytes(pickle.dumps(KINDS[sys.argv[1]](place)))
