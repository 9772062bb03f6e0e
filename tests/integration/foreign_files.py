"""Writes HDF5 files with other libraries, and beside each what that library reads of it.

    python tests/integration/foreign_files.py KIND FOLDER

KIND is netcdf4, pytables, anndata or matlab. Each runs in a process of its own: these libraries
bring HDF5 libraries of their own. FOLDER gets files and "expected.pickle": (file, dataset) ->
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
    return (
        (RANDOM.integers(0, 256, nbytes, np.uint8) * (RANDOM.random(nbytes) < 0.1))
        .view(dtype)
        .reshape(N, *row)
    )


def netcdf4(folder: Path) -> Expected:
    import netCDF4

    path = folder / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("y", 6)
        file.createDimension("x", 5)
        file.createDimension("length", 7)
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "zlib": {"compression": "zlib", "shuffle": True, "chunksizes": (8, 4, 5)},
            "checked": {"compression": "zlib", "fletcher32": True, "chunksizes": (3, 6, 5)},
            "bits": {"compression": "zlib", "least_significant_digit": 2},
            "zstd": {"compression": "zstd", "chunksizes": (8, 6, 5)},
            "blosc": {"compression": "blosc_lz4", "chunksizes": (8, 6, 5)},
            "bzip2": {"compression": "bzip2", "chunksizes": (8, 6, 5)},
            "szip": {"compression": "szip", "chunksizes": (8, 6, 5)},
            "filled": {"fill_value": -9.0, "chunksizes": (4, 6, 5)},
        }
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
    for key in (("a.nc", "letters"), ("a.nc", "words"), ("a.nc", "deep/er/ragged")):
        rows = found[key].tolist()
        found[key] = (
            [[one.decode() for one in row] for row in rows] if key[1] == "letters" else rows
        )
    return found


def pytables(folder: Path) -> Expected:
    import tables

    class Row(tables.IsDescription):  # type: ignore[misc]
        flag = tables.BoolCol()
        name = tables.StringCol(9)
        number = tables.Float64Col(shape=(2, 3))
        when = tables.Time32Col()

        class inner(tables.IsDescription):  # type: ignore[misc]
            z = tables.ComplexCol(16)
            small = tables.Int8Col()

    class Dated(tables.IsDescription):  # type: ignore[misc]
        when = tables.Time64Col(pos=0)
        both = tables.Time64Col(shape=(2,), pos=1)

        class inner(tables.IsDescription):  # type: ignore[misc]
            _v_pos = 2
            end = tables.Time64Col()

        day = tables.Time32Col(pos=3)
        name = tables.StringCol(5, pos=4)

    rows = np.zeros(N, tables.dtype_from_descr(Row))
    rows["flag"], rows["name"] = np.arange(N) % 3 == 0, [f"n{i}".encode() for i in range(N)]
    rows["number"], rows["inner"]["z"] = numbers(2, 3, dtype="f8"), np.arange(N) + 1j
    with tables.open_file(folder / "a.h5", "w") as file:
        file.create_array("/", "plain", numbers(4, 3, dtype="f8"))
        file.create_array("/", "truth", np.arange(2 * N).reshape(N, 2) % 3 == 0)
        file.create_array("/", "half", numbers(4, dtype="f2"))
        file.create_array("/", "names", np.array([f"s{i}".encode() for i in range(N)]))
        filters = {
            "zlib": "zlib",
            "blosc": "blosc:lz4",
            "bitshuffled": "blosc:zstd",
            "blosc2": "blosc2",
            "bzip2": "bzip2",
        }
        for name, how in filters.items():
            chosen = tables.Filters(
                5,
                how,
                shuffle=name != "bitshuffled",
                bitshuffle=name == "bitshuffled",
                fletcher32=name == "zlib",
            )
            file.create_carray(
                "/", name, obj=numbers(6, 5, dtype="i4"), filters=chosen, chunkshape=(8, 4, 5)
            )
            file.create_table(
                "/tables", name, obj=rows, filters=chosen, createparents=True, chunkshape=(8,)
            )
        grows = file.create_earray(
            "/", "grows", tables.UInt16Atom(), (0, 3), filters=tables.Filters(1), chunkshape=(5, 3)
        )
        grows.append(numbers(3, dtype="u2"))
        sideways = file.create_earray(
            "/",
            "sideways",
            tables.UInt16Atom(),
            (N, 0),
            filters=tables.Filters(1),
            chunkshape=(5, 3),
        )
        sideways.append(numbers(4, dtype="u2"))
        ragged = file.create_vlarray("/", "ragged", tables.Float32Atom())
        for i in range(N):
            ragged.append(np.arange(i % 4, dtype="f4"))
        file.create_carray("/", "empty", tables.Int32Atom(dflt=5), (N, 3), chunkshape=(4, 3))[
            N - 1
        ] = 1
        file.create_carray(
            "/",
            "arrays",
            tables.Float32Atom(shape=(3, 2)),
            (N,),
            chunkshape=(4,),
            filters=tables.Filters(1),
        )[:] = numbers(3, 2)
        colours = tables.Enum({"red": 0, "green": 1})
        file.create_carray("/", "colours", tables.EnumAtom(colours, "red", base="uint8"), (N,))[
            :
        ] = (np.arange(N) % 2).astype("u1")
        times = 1.7e9 + np.random.default_rng(1).uniform(-2e9, 4e8, N).round(6)
        file.create_table("/", "dated", Dated).append(
            [(when, (when, -when), (when,), int(when), f"t{i}") for i, when in enumerate(times)]
        )
        file.create_table("/", "backwards", Dated, byteorder="big").append(
            [(one, (one, 0.5), (one,), 7, "x") for one in times]
        )
        file.create_carray("/", "when", tables.Time64Atom(), (N,), chunkshape=(8,))[:] = times
        file.create_carray(
            "/",
            "whens",
            tables.Time64Atom(dflt=0.5),
            (N, 2),
            chunkshape=(4, 2),
            filters=tables.Filters(1),
        )[:9] = 2.25
        file.create_carray("/", "spans", tables.Time64Atom(shape=(2,)), (N,), chunkshape=(4,))[
            :
        ] = np.stack([times, -times], 1)
        file.create_carray("/", "seconds", tables.Time32Atom(), (N,))[:] = times.astype("i4")
        file.create_earray("/", "moments", tables.Time64Atom(), (0, 2)).append(
            np.stack([times, times / 2], 1)
        )
        file.create_array("/", "as_floats", atom=tables.Time64Atom(), shape=(N,))[:] = times
        file.create_vlarray("/", "whens of any number", tables.Time64Atom()).append(times[:3])
    found: Expected = {}
    with tables.open_file(folder / "a.h5") as file:
        for node in file.walk_nodes("/"):
            if not isinstance(node, tables.Group):
                found["a.h5", node._v_pathname[1:]] = node.read()
    found["a.h5", "names"] = [name.decode() for name in found["a.h5", "names"]]
    found["a.h5", "whens of any number"] = None  # h5py has no type for what lies elsewhere
    return found


def anndata(folder: Path) -> Expected:
    import anndata as library
    import pandas as pd
    import scipy.sparse

    sparse = scipy.sparse.random(N, 30, 0.2, format="csr", dtype=np.float32, random_state=0)
    found: Expected = {}
    for compression in ("gzip", "lzf", None):
        name = f"{compression}.h5ad"
        cells = library.AnnData(
            X=numbers(30),
            obs=pd.DataFrame(
                {
                    "kind": pd.Categorical(np.array(["B", "T"])[np.arange(N) % 2]),
                    "depth": np.arange(N) / 7,
                },
                index=[f"cell {i}" for i in range(N)],
            ),
            obsm={"pca": numbers(5, dtype="f8")},
            layers={"counts": sparse},
        )
        cells.write_h5ad(folder / name, compression=compression)
        read = library.read_h5ad(folder / name)
        counts = read.layers["counts"]
        found |= {
            (name, "X"): read.X,
            (name, "obsm/pca"): read.obsm["pca"],
            (name, "obs/depth"): read.obs["depth"].to_numpy(),
            (name, "obs/kind/codes"): read.obs["kind"].cat.codes.to_numpy(),
            (name, "obs/kind/categories"): list(read.obs["kind"].cat.categories),
            (name, "obs/_index"): list(read.obs_names),
            (name, "layers/counts/data"): counts.data,
            (name, "layers/counts/indices"): counts.indices,
            (name, "layers/counts/indptr"): counts.indptr,
        }
    return found


def matlab(folder: Path) -> Expected:
    """The layout of MATLAB's files of version 7.3, by hand: a user block, and arrays whose axes
    are turned round.
    """
    import h5py

    found: Expected = {}
    with h5py.File(folder / "a.mat", "w", userblock_size=512, libver="earliest") as file:
        matrices = {
            "images": numbers(6, 5, dtype="f8"),
            "labels": np.arange(N, dtype="u1").reshape(N, 1),
            "record/weights": numbers(3, dtype="i2"),
        }
        for name, rows in matrices.items():
            chunks = (8, *rows.shape[1:])
            one = file.create_dataset(
                name,
                data=rows,
                chunks=chunks,
                compression="gzip",
                compression_opts=3,
                maxshape=rows.shape,
            )
            one.attrs["MATLAB_class"] = np.bytes_(
                {"f8": "double", "u1": "uint8", "i2": "int16"}[rows.dtype.str[1:]]
            )
        small = file.create_dataset("small", data=np.arange(2 * N, dtype="f8").reshape(N, 2))
        small.attrs["MATLAB_class"] = np.bytes_("double")
        letters = np.array([[ord(letter) for letter in "über"]], "u2").T
        file.create_dataset("letters", data=letters).attrs["MATLAB_class"] = np.bytes_("char")
        cells = file.create_dataset("cells", (3, 1), h5py.ref_dtype)
        cells[:] = [[file["images"].ref]] * 3
        for name in (*matrices, "small", "letters"):
            found["a.mat", name] = file[name][:]
    found["a.mat", "cells"] = None
    with open(folder / "a.mat", "r+b") as raw:
        raw.write(
            (
                b"MATLAB 7.3 MAT-file, Platform: GLNXA64, Created on: Mon Nov 16 10:00:00 2026 "
                b"HDF5 "
                b"schema 1.00 ."
            ).ljust(116)
        )
        raw.write(bytes(8) + b"\0\2IM")
    return found


if __name__ == "__main__":
    kind, where = sys.argv[1], Path(sys.argv[2])
    with open(where / "expected.pickle", "wb") as out:
        pickle.dump(
            {"netcdf4": netcdf4, "pytables": pytables, "anndata": anndata, "matlab": matlab}[kind](
                where
            ),
            out,
        )
