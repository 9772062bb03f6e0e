"""HDF5Dataset on files as netCDF-4 lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import ConfigError, HDF5Dataset, read_rows
from headrace.testing.contract import same

DRAWS = np.random.default_rng(0)


def rows_of(dataset: Any) -> Any:
    return np.stack([np.asarray(dataset[index]) for index in range(len(dataset))])


def equal(found: Any, expected: Any) -> bool:
    return np.array_equal(found, expected, equal_nan=True)


def write_netcdf(path: Path, scale: float = 0.5, begin: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    stored = DRAWS.integers(-50, 50, (9, 4)).astype("i2")
    stored[3] = -99
    with h5py.File(path, "w") as file:
        for name, values in (("time", np.arange(9.0) + begin), ("lat", np.linspace(40, 43, 4))):
            file[name] = values
            file[name].make_scale(name)
        bare = file.create_dataset("letter", data=np.zeros(7, ">f4"))
        bare.make_scale("This is a netCDF dimension but not a netCDF variable.         7")
        how: dict[str, Any] = {"chunks": (2, 4), "compression": "gzip", "maxshape": (None, 4)}
        packed = file.create_dataset("t2m", data=stored, fillvalue=-99, **how)
        packed.attrs["scale_factor"] = np.array([scale])
        packed.attrs["add_offset"] = np.array([10.0])
        packed.attrs["_FillValue"] = np.array([-99], "i2")
        for number, name in enumerate(("time", "lat")):
            packed.dims[number].attach_scale(file[name])
        file["words"] = np.array([list(f"word {i:<2}") for i in range(9)], "S1")
        file["words"].dims[0].attach_scale(file["time"])
        file["words"].dims[1].attach_scale(file["letter"])
        unsigned = file.create_dataset("bytes", data=np.arange(-5, 4, dtype="i1"))
        unsigned.attrs["_Unsigned"], unsigned.attrs["_FillValue"] = "true", np.int8(-1)
    values = np.where(stored == -99, np.nan, stored * scale + 10.0)
    return {"stored": stored, "t2m": values}


@pytest.mark.parametrize("direct", [True, False])
def test_packed_numbers_are_unpacked(tmp_path: Path, loader_of: Any, direct: bool) -> None:
    path = tmp_path / "a.nc"
    wanted = write_netcdf(path)
    with HDF5Dataset(path, "t2m", direct=direct, decode_cf=True) as cf:
        assert equal(rows_of(cf), wanted["t2m"]) and cf[0].dtype == torch.float64
        assert equal(torch.cat(list(loader_of(cf, shuffle=False))), wanted["t2m"])
        assert equal(read_rows(cf, None, [3, 0]), wanted["t2m"][[3, 0]])
        assert "decoded to float64" in cf.explain()
        with HDF5Dataset(path, "t2m", direct=direct) as plain:
            assert same(torch.stack(list(plain)), torch.from_numpy(wanted["stored"]))
            assert cf.fingerprint != plain.fingerprint
    with HDF5Dataset(path, "t2m", decode_cf=True, dtype="float32") as columns:
        assert equal(rows_of(columns), wanted["t2m"].astype("f4"))
    with HDF5Dataset(path, ["words", "bytes"], decode_cf=True, target_name="time") as several:
        assert several[3][0]["words"] == "word 3 " and several[3][1] == 3.0
        assert several[0][0]["bytes"] == 251 and torch.isnan(several[4][0]["bytes"])
    with pytest.raises(ConfigError, match="decode_cf"):
        HDF5Dataset(path, "t2m", decode_cf="yes")  # type: ignore[arg-type]


def test_files_with_scales_of_their_own(tmp_path: Path) -> None:
    """As reanalyses have them: each file is packed by its own factor."""
    scales = enumerate((0.5, 0.25))
    wanted = [write_netcdf(tmp_path / f"{n}.nc", scale, 9 * n)["t2m"] for n, scale in scales]
    for mode in ("lazy", "eager", "cached"):
        options: dict[str, Any] = {"loading_mode": mode, "progress": False, "decode_cf": True}
        with HDF5Dataset(tmp_path / "*.nc", "t2m", **options) as dataset:
            assert equal(rows_of(dataset), np.concatenate(wanted))
