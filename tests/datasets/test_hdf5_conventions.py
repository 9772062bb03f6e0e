"""HDF5Dataset along other axes, and on files of netCDF-4, MATLAB 7.3 and pandas: their layouts by
hand; written by these libraries in tests/integration/.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import (
    ConfigError,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    create_dataloader,
    pack,
    read_rows,
)
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

DRAWS = np.random.default_rng(0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"chunks": (4, 3, 5), "compression": "gzip"},
    "raw": {"chunks": (4, 3, 5)},
    "lzf": {"chunks": (4, 3, 5), "compression": "lzf"},
    "grows": {"chunks": (4, 3, 5), "compression": "gzip", "maxshape": (11, 13, None)},
}


# -- axes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_samples_along_any_axis(
    tmp_path: Path, layout: str, axis: int, is_reversed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = DRAWS.integers(0, 99, (11, 13, 17))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=rows, **LAYOUTS[layout])
    whole = np.moveaxis(rows.T if is_reversed else rows, axis, 0)
    for band, least in ((1 << 20, 1 << 20), (200, 1 << 20), (1, 1)):
        monkeypatch.setattr("headrace.storage.arrays.axes._BAND", band)
        monkeypatch.setattr("headrace.storage.arrays.axes._WHOLE", least)
        for direct in (True, False):
            with HDF5Dataset(
                tmp_path / "a.h5", axis=axis, reverse_axes=is_reversed, direct=direct
            ) as dataset:
                assert len(dataset) == len(whole)
                for indices in ([0], [len(whole) - 1, 3, 3, 0], list(range(len(whole)))):
                    found = dataset.__getitems__(indices)
                    assert all(
                        same(one, torch.from_numpy(whole[i].copy()))
                        for i, one in zip(indices, found, strict=True)
                    ), indices
                assert np.array_equal(read_rows(dataset, None, slice(None, None, 2)), whole[::2])
        if layout != "contiguous":
            break


def test_batches_along_an_axis(tmp_path: Path, make_loader: Any) -> None:
    rows = DRAWS.normal(size=(6, 5, 40)).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=rows, chunks=(6, 5, 8), compression="gzip")
        file["y"] = np.arange(40)
    dataset = HDF5Dataset(tmp_path / "a.h5", "data", axis=-1, target_name="y")
    for shuffle in (False, True, "block"):
        loader = make_loader(dataset, batch_size=8, shuffle=shuffle, num_workers=2, seed=1)
        for images, targets in loader:
            assert torch.equal(
                images, torch.from_numpy(rows[..., targets.numpy()].transpose(2, 0, 1))
            )
    assert dataset.blocks().tolist() == [8] * 5 and "along axis 2" in dataset.explain()
    assert dataset.fingerprint != HDF5Dataset(tmp_path / "a.h5", "data").fingerprint
    loader = make_loader(dataset, batch_size=8, shuffle="block", num_workers=0, seed=1)
    list(loader)
    assert loader.get_stats()["chunks_decoded"] == 5
    dataset.close()


def test_what_is_read_in_another_way_is_packed(tmp_path: Path) -> None:
    wanted = write_netcdf(tmp_path / "a.nc")["t2m"]
    for number, options in enumerate(({}, {"axis": "lat"})):
        dataset, expected = (
            HDF5Dataset(tmp_path / "a.nc", "t2m", decode_cf=True, **options),
            wanted.T if options else wanted,
        )
        with HDF5Dataset(
            pack(dataset, tmp_path / f"{number}.h5", workers=1, progress=False)
        ) as packed:
            assert all(
                np.array_equal(packed[i], expected[i], equal_nan=True) for i in range(len(dataset))
            )
        dataset.close()
    turned = HDF5Dataset(tmp_path / "a.nc", "t2m", axis="lat")
    with HDF5Dataset(pack(turned, tmp_path / "turned.h5", workers=1, progress=False)) as packed:
        assert len(packed) == 4 and all(same(packed[i], turned[i]) for i in range(4))
    turned.close()


def test_axes_that_are_not_there(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((3, 4))
        file["words"] = [["a", "b"], ["c", "d"]]
    for axis, message in (
        (2, r"axis=2: .*'data' has shape \[3, 4\], and so the axes 0 to 1"),
        ("time", "no axis of that name.* none has"),
    ):
        with pytest.raises(ConfigError, match=message):
            HDF5Dataset(tmp_path / "a.h5", "data", axis=axis)
    with pytest.raises(ConfigError, match="elements of any size"):
        HDF5Dataset(tmp_path / "a.h5", "words", axis=1)
    for option in ({"axis": 1.0}, {"axis": True}, {"reverse_axes": 1}, {"decode_cf": "yes"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            HDF5Dataset(tmp_path / "a.h5", "data", **option)  # type: ignore[arg-type]


@pytest.mark.quick_every(4)
class TestAnotherAxisKeepsTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-axis.h5"
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                file.create_dataset(
                    "data",
                    data=DRAWS.integers(0, 99, (3, 4, 37)),
                    chunks=(3, 4, 5),
                    compression="gzip",
                )

    def make(self, **options: Any) -> HDF5Dataset:
        return HDF5Dataset(self.path, axis=2, reverse_axes=False, **options)


# -- netCDF-4 and CF


def write_netcdf(path: Path, scale: float = 0.5, begin: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    stored = DRAWS.integers(-50, 50, (9, 4)).astype("i2")
    stored[3] = -99
    with h5py.File(path, "w") as file:
        for name, values in (("time", np.arange(9.0) + begin), ("lat", np.linspace(40, 43, 4))):
            file[name] = values
            file[name].make_scale(name)
        bare = file.create_dataset("letter", data=np.zeros(7, ">f4"))
        bare.make_scale("This is a netCDF dimension but not a netCDF variable.         7")
        packed = file.create_dataset(
            "t2m", data=stored, chunks=(2, 4), compression="gzip", maxshape=(None, 4), fillvalue=-99
        )
        packed.attrs["scale_factor"], packed.attrs["add_offset"] = (
            np.array([scale]),
            np.array([10.0]),
        )
        packed.attrs["_FillValue"] = np.array([-99], "i2")
        for number, name in enumerate(("time", "lat")):
            packed.dims[number].attach_scale(file[name])
        file["words"] = np.array([list(f"word {i:<2}") for i in range(9)], "S1")
        file["words"].dims[0].attach_scale(file["time"])
        file["words"].dims[1].attach_scale(file["letter"])
        bytes_ = file.create_dataset("bytes", data=np.arange(-5, 4, dtype="i1"))
        bytes_.attrs["_Unsigned"], bytes_.attrs["_FillValue"] = "true", np.int8(-1)
    values = np.where(stored == -99, np.nan, stored * scale + 10.0)
    return {"stored": stored, "t2m": values}


@pytest.mark.parametrize("direct", [True, False])
def test_packed_numbers_are_unpacked(tmp_path: Path, direct: bool) -> None:
    wanted = write_netcdf(tmp_path / "a.nc")
    with (
        HDF5Dataset(tmp_path / "a.nc", "t2m", direct=direct) as plain,
        HDF5Dataset(tmp_path / "a.nc", "t2m", decode_cf=True) as cf,
    ):
        assert all(same(plain[i], torch.from_numpy(wanted["stored"][i])) for i in range(9))
        assert (
            all(np.array_equal(cf[i], wanted["t2m"][i], equal_nan=True) for i in range(9))
            and cf[0].dtype == torch.float64
        )
        batch = next(iter(create_dataloader(cf, batch_size=9, shuffle=False, num_workers=0)))
        assert np.array_equal(batch, wanted["t2m"], equal_nan=True)
        assert np.array_equal(read_rows(cf, None, [3, 0]), wanted["t2m"][[3, 0]], equal_nan=True)
        assert cf.fingerprint != plain.fingerprint and "decoded to float64" in cf.explain()
    with HDF5Dataset(
        tmp_path / "a.nc", "t2m", decode_cf=True, axis="lat", dtype="float32"
    ) as columns:
        assert len(columns) == 4 and np.array_equal(
            columns[2], wanted["t2m"][:, 2].astype("f4"), equal_nan=True
        )
        assert list(columns.coordinates()) == ["time", "lat"] and columns.coordinates()[
            "lat"
        ].tolist() == [40, 41, 42, 43]
    with HDF5Dataset(
        tmp_path / "a.nc", ["words", "bytes"], decode_cf=True, target_name="time"
    ) as several:
        assert several[3][0]["words"] == "word 3 " and several[3][1] == 3.0
        assert several[0][0]["bytes"] == 251 and torch.isnan(several[4][0]["bytes"])
        assert list(several.coordinates()) == ["time"]
    with pytest.raises(ConfigError, match=r"no axis of that name; its axes are: 'time', 'lat'"):
        HDF5Dataset(tmp_path / "a.nc", "t2m", axis="latitude")


def test_files_with_scales_of_their_own(tmp_path: Path) -> None:
    """As reanalyses have them: each file is packed by its own factor."""
    wanted = [
        write_netcdf(tmp_path / f"{number}.nc", scale, 9 * number)["t2m"]
        for number, scale in enumerate((0.5, 0.25))
    ]
    with HDF5Dataset(
        tmp_path / "*.nc", "t2m", decode_cf=True, loading_mode="eager", progress=False
    ) as dataset:
        assert all(
            np.array_equal(dataset[i], np.concatenate(wanted)[i], equal_nan=True) for i in range(18)
        )
        assert (
            dataset.coordinates()["time"].tolist() == list(range(18))
            and len(dataset.coordinates()["lat"]) == 4
        )


def test_all_of_it_far_away(tmp_path: Path, loader_of: Any) -> None:
    (tmp_path / "served").mkdir()
    write_netcdf(tmp_path / "served" / "a.nc")
    write_pandas(tmp_path / "served" / "b.h5")
    write_matlab(tmp_path / "served" / "c.mat")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("a.nc", {"dataset_name": "t2m"}),
        ("a.nc", {"dataset_name": "t2m", "decode_cf": True}),
        ("a.nc", {"dataset_name": "t2m", "decode_cf": True, "axis": "lat"}),
        ("a.nc", {"dataset_name": ["t2m", "words"], "decode_cf": True, "target_name": "time"}),
        ("b.h5", {"dataset_name": "df", "target_name": "b"}),
        ("c.mat", {"dataset_name": "X", "reverse_axes": True, "axis": 1, "target_name": None}),
    ]
    with RangeServer(tmp_path / "served") as server:
        for mode in ("lazy", "streaming"):
            for name, options in cases:
                near = HDF5Dataset(tmp_path / "served" / name, loading_mode=mode, **options)
                far = HDF5Dataset(
                    f"{server.url}/{name}",
                    loading_mode=mode,
                    cache_dir=tmp_path / "cache",
                    **options,
                )
                assert far.fingerprint == near.fingerprint and len(far) == len(near)
                ours, theirs = (
                    list(loader_of(one, collate_fn="list", shuffle="block")) for one in (far, near)
                )
                assert str(ours) == str(theirs), (name, options)
                if options.get("axis") == "lat":
                    assert far.coordinates()["time"].tolist() == near.coordinates()["time"].tolist()
                far.close()
                near.close()


# -- MATLAB 7.3


def write_matlab(path: Path) -> np.ndarray[Any, Any]:
    """X = reshape(0:839, 7, 6, 20); y = (1:20)'; and what can't be read."""
    x = np.arange(840.0).reshape(20, 6, 7)
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values, kind in (
            ("X", x, "double"),
            ("y", np.arange(20.0)[None], "double"),
            ("none", np.array([0, 3], "u8"), "double"),
        ):
            file.create_dataset(name, data=values).attrs["MATLAB_class"] = np.bytes_(kind)
        file["none"].attrs["MATLAB_empty"] = np.uint8(1)
        cells = file.create_dataset("cells", (3, 1), h5py.ref_dtype)
        cells[:] = [[file["X"].ref]] * 3
        cells.attrs["MATLAB_class"] = np.bytes_("cell")
        struct = file.create_group("record")
        struct.attrs["MATLAB_class"] = np.bytes_("struct")
        struct["weights"] = np.zeros((3, 1))
        sparse = file.create_group("sparse")
        sparse.attrs["MATLAB_sparse"], sparse.attrs["MATLAB_class"] = (
            np.uint64(5),
            np.bytes_("double"),
        )
        sparse["data"] = np.zeros(3)
    return x.T


def test_arrays_of_matlab(tmp_path: Path) -> None:
    x = write_matlab(tmp_path / "a.mat")  # 7 x 6 x 20, as MATLAB shows it
    with HDF5Dataset(
        tmp_path / "a.mat", "X", reverse_axes=True, axis=-1, target_name="y"
    ) as images:
        assert len(images) == 20 and all(
            np.array_equal(images[i][0], x[:, :, i]) and images[i][1] == i for i in range(20)
        )
    with (
        HDF5Dataset(tmp_path / "a.mat", "X", reverse_axes=True) as rows,
        HDF5Dataset(tmp_path / "a.mat", "X") as plain,
    ):
        assert len(rows) == 7 and np.array_equal(rows[3], x[3]) and np.array_equal(plain[3], x.T[3])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cells", r"'cells' is a cell array of MATLAB: .* such as cat\(4, images\{:\}\)"),
        ("record", "'record' is a struct of MATLAB: name one of its fields: weights"),
        ("sparse", r"'sparse' is a sparse matrix of MATLAB: save full\(x\)"),
        ("none", r"'none' is an empty array of MATLAB: what stands there is its size, \[0, 3\]"),
    ],
)
def test_what_only_matlab_reads(tmp_path: Path, name: str, message: str) -> None:
    write_matlab(tmp_path / "a.mat")
    with pytest.raises(FormatError, match=message):
        HDF5Dataset(tmp_path / "a.mat", name)


# -- pandas


def write_pandas(path: Path, labels: Any = ("a", "c")) -> None:
    """A table of format "table" and one of format "fixed", in pandas' layout."""
    with h5py.File(path, "w") as file:
        rows = np.zeros(
            25, [("index", "i8"), ("values_block_0", "f8", (2,)), ("values_block_1", "S5", (1,))]
        )
        rows["values_block_0"], rows["values_block_1"][:, 0] = (
            np.arange(50).reshape(25, 2),
            [f"w{i}".encode() for i in range(25)],
        )
        table = file.create_dataset("df/table", data=rows, chunks=(10,), compression="gzip")
        table.attrs["values_block_0_kind"] = np.bytes_(pickle.dumps(list(labels), 0))
        table.attrs["values_block_1_kind"] = np.bytes_(pickle.dumps(["b"], 0))
        file["df"].attrs["pandas_type"] = np.bytes_("frame_table")
        file["df"].attrs["non_index_axes"] = np.bytes_(pickle.dumps([(1, ["a", "b", "c"])], 0))


def test_several_tables_of_pandas_are_listed(tmp_path: Path) -> None:
    write_pandas(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.copy("df", "deep/other")
    with pytest.raises(
        MissingNameError,
        match=r"a\.h5 has 2 tables of pandas: name one of them as dataset_name: deep/other, df$",
    ):
        HDF5Dataset(tmp_path / "a.h5")
    with HDF5Dataset(tmp_path / "a.h5", "deep/other") as dataset:
        assert dataset[3]["a"] == 6.0


def test_a_table_of_pandas(tmp_path: Path) -> None:
    write_pandas(tmp_path / "a.h5")
    with (
        HDF5Dataset(tmp_path / "a.h5") as dataset,
        HDF5Dataset(tmp_path / "a.h5", "df", target_name="b", dtype="f4") as pairs,
    ):
        assert len(dataset) == 25 and list(dataset[3]) == ["a", "b", "c"]
        assert (dataset[3]["a"], dataset[3]["b"], dataset[3]["c"]) == (6.0, "w3", 7.0)
        assert (
            pairs[4][1] == "w4"
            and pairs[4][0]["c"].dtype == torch.float32
            and list(pairs[4][0]) == ["a", "c"]
        )
        batch = next(iter(create_dataloader(dataset, batch_size=5, shuffle=False, num_workers=0)))
        assert batch["a"].tolist() == [0, 2, 4, 6, 8] and batch["b"][1] == "w1"
    with pytest.raises(
        MissingNameError,
        match="'d' is no column of the table, and no dataset; its columns are: a, b, c",
    ):
        HDF5Dataset(tmp_path / "a.h5", "df", target_name="d")
    with pytest.raises(
        ConfigError, match="is a table of pandas: axis, reverse_axes and decode_cf are for arrays"
    ):
        HDF5Dataset(tmp_path / "a.h5", "df", axis=1)


def test_tables_of_several_files(tmp_path: Path) -> None:
    write_pandas(tmp_path / "a.h5")
    write_pandas(tmp_path / "b.h5")
    with HDF5Dataset(tmp_path / "*.h5", "df") as dataset:
        assert len(dataset) == 50 and dataset[28]["b"] == "w3"
    write_pandas(tmp_path / "c.h5", ["a", "d"])
    with pytest.raises(
        FormatError,
        match=(
            r"c\.h5 and .*a\.h5 can't be one dataset: columns \['a', 'b', 'd'\] here, and \['a', "
            r"'b', 'c'\]"
        ),
    ):
        HDF5Dataset(tmp_path / "*.h5", "df")
    write_pandas(tmp_path / "c.h5", ["c", "a"])
    with pytest.raises(FormatError, match="the same columns, kept or categorised in another way"):
        HDF5Dataset(tmp_path / "*.h5", "df")


class _Label:
    """What must never be made."""

    def __reduce__(self) -> Any:
        return print, ("opened",)


def test_pickles_are_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pandas(tmp_path / "a.h5", [_Label(), "c"])
    with pytest.raises(
        FormatError, match=r"the labels of its columns can't be read \(it names \w+\.print\)"
    ):
        HDF5Dataset(tmp_path / "a.h5", "df")
    assert "opened" not in capsys.readouterr().out
    with h5py.File(tmp_path / "b.h5", "w") as file:
        frame = file.create_group("df")
        frame.attrs["pandas_type"], frame.attrs["nblocks"] = np.bytes_("frame"), 1
        frame["axis0"], frame["block0_items"] = np.array([b"a"]), np.array([b"a"])
        values = frame.create_dataset("block0_values", (1,), h5py.vlen_dtype("u1"))
        values.attrs["PSEUDOATOM"] = np.bytes_("object")
        other = file.create_group("wide")
        other.attrs["pandas_type"] = np.bytes_("wide")
    with pytest.raises(
        FormatError, match="'a' holds Python objects as a pickle, which is never opened"
    ):
        HDF5Dataset(tmp_path / "b.h5", "df")
    with pytest.raises(FormatError, match="'wide' is a wide of pandas, which is not supported"):
        HDF5Dataset(tmp_path / "b.h5", "wide")


@pytest.mark.slow
class TestUnpackedNumbersKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-cf.nc"
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                packed = file.create_dataset(
                    "t2m",
                    data=DRAWS.integers(-9, 9, (37, 4)).astype("i2"),
                    chunks=(5, 4),
                    compression="gzip",
                )
                packed.attrs["scale_factor"], packed.attrs["_FillValue"] = 0.5, np.int16(-9)

    def make(self, **options: Any) -> HDF5Dataset:
        return HDF5Dataset(self.path, "t2m", decode_cf=True, **options)


@pytest.mark.slow
class TestTablesOfPandasKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-pandas.h5"
        if not self.path.exists():
            write_pandas(self.path)

    def make(self, **options: Any) -> HDF5Dataset:
        return HDF5Dataset(self.path, "df", target_name="a", **options)
