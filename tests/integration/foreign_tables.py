"""Writes HDF5 files with xarray and netCDF4, and beside each what that library reads of it,
decoded.

    python tests/integration/foreign_tables.py KIND FOLDER

KIND is xarray. It runs in a process of its own: these libraries bring HDF5 libraries of
their own. FOLDER gets files and "expected.pickle": a list of (file, arguments of
HDF5Dataset, samples), a sample being an array or a str.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

N = 41
Case = tuple[str, dict[str, Any], list[Any]]
RANDOM = np.random.default_rng(0)


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
    return cases


KINDS = {"xarray": xarray}
if __name__ == "__main__":
    place = Path(sys.argv[2])
    (place / "expected.pickle").write_bytes(pickle.dumps(KINDS[sys.argv[1]](place)))
