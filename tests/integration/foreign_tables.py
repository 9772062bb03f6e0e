"""Writes HDF5 files with pandas, xarray and netCDF4, and beside each what that library reads of it,
decoded.

    python tests/integration/foreign_tables.py KIND FOLDER

KIND is pandas or xarray. Each runs in a process of its own: these libraries bring HDF5
libraries of their own. FOLDER gets files and "expected.pickle": a list of (file, arguments of
HDF5Dataset, samples), a sample being an array, a str, or a dict of these.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

N = 41
Case = tuple[str, dict[str, Any], list[Any]]
RANDOM = np.random.default_rng(0)


def pandas(folder: Path) -> list[Case]:
    import pandas as pd

    frame = pd.DataFrame({"price": RANDOM.normal(size=N), "count": RANDOM.integers(0, 9, N)})
    frame["half"] = RANDOM.normal(size=N).astype("f4")
    frame["small"] = RANDOM.integers(-9, 9, N).astype("i2")
    frame["flag"] = RANDOM.random(N) < 0.5
    frame["when"] = pd.date_range("2026-01-01", periods=N, freq="h")
    words = frame.assign(word=[f"wort {i}" for i in range(N)])
    kinds = words.assign(kind=pd.Categorical(np.array(["b", "ab", "c"])[RANDOM.integers(0, 3, N)]))
    odd = kinds.iloc[::-1].assign(gap=np.where(np.arange(N) % 4, np.arange(N), np.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("plain", "zlib", "blosc"):
            how: dict[str, Any] = {} if name == "plain" else {"complevel": 5, "complib": name}
            frame.to_hdf(folder / f"fixed-{name}.h5", key="df", format="fixed", **how)
            odd.to_hdf(folder / f"table-{name}.h5", key="a/df", format="table", **how)
        kinds.to_hdf(
            folder / "columns.h5", key="df", format="table", data_columns=["word", "count", "kind"]
        )
        with pd.HDFStore(folder / "store.h5", "w") as store:
            store.append("grown", words.iloc[:20])
            store.append("grown", words.iloc[20:])
            store.put("series", frame["price"], format="fixed")
            store.put("other", pd.Series(np.arange(N), name="other"), format="table")
            store.put("numbered", pd.DataFrame(RANDOM.normal(size=(N, 3))), format="fixed")
            store.put("numbered table", pd.DataFrame(RANDOM.normal(size=(N, 3))), format="table")
        words.to_hdf(folder / "objects.h5", key="df", format="fixed")
    cases: list[Case] = []
    for path in sorted(folder.glob("*.h5")):
        if path.name == "objects.h5":
            continue
        with pd.HDFStore(path, "r") as store:
            for key in store.keys():  # noqa: SIM118
                read = store[key]
                if isinstance(read, pd.Series):
                    read = read.to_frame("values" if read.name is None else read.name)
                read.columns = [str(column) for column in read.columns]
                rows = rows_of(plain(read))
                cases.append((path.name, {"dataset_name": key.strip("/")}, rows))
    columns = pd.read_hdf(folder / "columns.h5", "df")
    pairs = list(zip(rows_of(plain(columns.drop(columns="kind"))), columns["kind"], strict=True))
    cases.append(("columns.h5", {"target_name": "kind"}, pairs))
    return cases


def plain(frame: Any) -> Any:
    """Dates as numbers."""
    dates = [name for name in frame if frame[name].dtype.kind == "M"]
    return frame.astype(dict.fromkeys(dates, "i8"))


def rows_of(frame: Any) -> list[dict[str, Any]]:
    columns = {name: list(frame[name]) for name in frame.columns}
    dtypes = {name: frame[name].dtype for name in frame.columns}
    return [
        {
            name: values[i] if isinstance(values[i], str) else np.asarray(values[i], dtypes[name])
            for name, values in columns.items()
        }
        for i in range(len(frame))
    ]


def xarray(folder: Path) -> list[Case]:
    import netCDF4
    import xarray as library

    with netCDF4.Dataset(folder / "a.nc", "w") as file:
        file.createDimension("time", None)
        file.createDimension("lat", 6)
        file.createDimension("lon", 5)
        file.createDimension("length", 8)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(N) / 3
        file.createVariable("lat", "f4", ("lat",))[:] = np.linspace(40, 45, 6)
        file.createVariable("lon", "f4", ("lon",))[:] = np.linspace(0, 4, 5)
        halves = {"scale_factor": np.float32(0.5), "add_offset": np.float32(3)}
        ways: dict[str, dict[str, Any]] = {
            "both": {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -9999},
            "floats": {**halves, "_FillValue": -9999},
            "scale": {"scale_factor": 0.1},
            "offset": {"add_offset": np.float32(1)},
            "filled": {"_FillValue": -9999},
            "missing": {"missing_value": np.int16(7), "_FillValue": -9999},
            "none": {},
        }
        how: dict[str, Any] = {"chunksizes": (8, 6, 5), "zlib": True}
        for kind in ("i2", "i4", "i1", "u1", "f4", "f8"):
            for name, attributes in ways.items():
                fill = attributes.get("_FillValue")
                fill = None if fill is None else {"i1": -99, "u1": 255}.get(kind, fill)
                place = ("time", "lat", "lon")
                one = file.createVariable(f"{name}_{kind}", kind, place, fill_value=fill, **how)
                one.set_auto_maskandscale(False)
                for key, value in attributes.items():
                    if key == "missing_value":
                        value = np.array(value).astype(kind)[()]
                    if key != "_FillValue":
                        one.setncattr(key, value)
                values = RANDOM.integers(0, 99, (N, 6, 5)).astype(kind)
                values[RANDOM.random(values.shape) < 0.1] = 7
                if fill is not None:
                    values[RANDOM.random(values.shape) < 0.1] = fill
                one[:] = values
        unsigned = file.createVariable("unsigned", "i1", ("time", "lat"), fill_value=-1)
        unsigned.set_auto_maskandscale(False)
        unsigned.setncattr("_Unsigned", "true")
        unsigned[:] = RANDOM.integers(-128, 127, (N, 6)).astype("i1")
        letters = file.createVariable("letters", "S1", ("time", "length"))
        letters[:] = netCDF4.stringtochar(np.array([f"row {i}" for i in range(N)], "S8"))
    made = library.Dataset(
        {"t2m": (("time", "y", "x"), RANDOM.normal(280, 9, (N, 4, 3)).round(2))},
        {"time": np.arange(N) * 6.0, "y": [1.0, 2, 3, 4]},
    )
    made["t2m"][3, 1] = np.nan
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    made.to_netcdf(folder / "b.nc", encoding={"t2m": packed}, engine="netcdf4")
    cases: list[Case] = []
    for name in ("a.nc", "b.nc"):
        with library.open_dataset(folder / name, engine="netcdf4", decode_times=False) as data:
            for key, variable in data.variables.items():
                options = {"dataset_name": key, "decode_cf": True}
                values = variable.values
                if values.dtype.kind in "SU":
                    cases.append((name, options, [one.decode() for one in values.tolist()]))
                    continue
                cases.append((name, options, list(values)))
                if variable.ndim == 1 or not key.startswith(("t2m", "unsigned", "both")):
                    continue
                for number, axis in enumerate(variable.dims):
                    turned = np.moveaxis(values, number, 0)
                    cases.append((name, {**options, "axis": axis}, list(turned)))
    return cases


KINDS = {"pandas": pandas, "xarray": xarray}
if __name__ == "__main__":
    place = Path(sys.argv[2])
    (place / "expected.pickle").write_bytes(pickle.dumps(KINDS[sys.argv[1]](place)))
