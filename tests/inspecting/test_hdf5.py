"""What is told of HDF5 files is what h5py says, and what headrace does when it reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import headrace
from headrace import HDF5Dataset
from headrace.cli.main import main
from headrace.errors import FormatError, MissingNameError
from headrace.inspecting import inspect
from headrace.inspecting.report import MOST_NODES
from headrace.storage.hdf5.rows import HDF5Source
from tests.datasets.demonstrations import write_demos
from tests.datasets.test_hdf5_conventions import write_netcdf, write_pandas

ROWS = 90
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "one": {"chunks": (1, 12, 10), "compression": "gzip"},
    "several": {"chunks": (16, 12, 10), "compression": "gzip", "shuffle": True},
    "cut": {"chunks": (8, 5, 4), "compression": "gzip"},
    "raw": {"chunks": (16, 12, 10)},
    "raw and cut": {"chunks": (4, 5, 10)},
    "checked": {"chunks": (16, 12, 10), "fletcher32": True},
    "lzf": {"chunks": (16, 12, 10), "compression": "lzf"},
}


def pixels(rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 9, (rows, 12, 10)).astype("u2")


def everything(path: Path) -> None:
    """A file with something of all that HDF5 has."""
    with h5py.File(path, "w") as file:
        for name, options in LAYOUTS.items():
            file.create_dataset(f"layouts/{name}", data=pixels(), **options)
        file.create_dataset("layouts/unwritten", (ROWS, 4), "f4", chunks=(8, 4))
        file["table"] = np.zeros(5, [("a", "<i4"), ("b", "<f8", (2,))])
        file["names"] = [f"name {number}" for number in range(ROWS)]
        file["fixed"] = np.array([b"abc"] * 4)
        file["scalar"], file["big"] = 3.0, np.arange(4, dtype=">i4")
        file["none"] = h5py.Empty("f4")
        file.create_dataset("ragged", (3,), h5py.vlen_dtype(np.int16))
        file.create_dataset(
            "enum", data=np.zeros(3, "i1"), dtype=h5py.enum_dtype({"a": 0, "b": 1}, "i1")
        )
        file["truth"] = np.zeros(3, bool)
        file["soft"], file["outside"] = h5py.SoftLink("/table"), h5py.ExternalLink("other.h5", "/x")
        file["z/again"] = file["layouts"]
        file["z/circle"] = file["z"]
        layout = h5py.VirtualLayout((4, 12, 10), "u2")
        layout[:] = h5py.VirtualSource(file["layouts/raw"])[:4]
        file.create_virtual_dataset("virtual", layout)


def test_nodes_are_those_of_h5py(tmp_path: Path) -> None:
    everything(tmp_path / "all.h5")
    report = inspect(tmp_path / "all.h5")
    nodes = {node.path: node for node in report.nodes}
    with h5py.File(tmp_path / "all.h5") as file:
        names: list[str] = []
        file.visit(names.append)
        assert (
            set(names) <= set(nodes)
            and nodes["soft"].details["to"] == "/table"
            and nodes["outside"].details["to"] == "other.h5:/x"
        )
        for name in names:
            node, item = nodes[name], file[name]
            assert node.kind == ("array" if isinstance(item, h5py.Dataset) else "group")
            if isinstance(item, h5py.Dataset):
                assert (node.shape, node.chunks) == (item.shape, item.chunks)
                assert node.nbytes == (item.nbytes if item.shape is not None else 0)
                if not item.is_virtual and item.shape is not None:
                    assert node.stored == item.id.get_storage_size()
                if item.chunks is not None:
                    assert node.chunks_written == item.id.get_num_chunks()
    told = {path: (node.dtype, node.layout) for path, node in nodes.items() if node.kind == "array"}
    assert told["table"] == ("{a: int32, b: float64 [2]}", "contiguous") and told["names"] == (
        "str",
        "contiguous",
    )
    assert (
        told["fixed"][0] == "str of 3 bytes"
        and told["scalar"] == ("float64", "scalar")
        and told["big"][0] == "int32 (other byte order)"
    )
    assert (
        told["none"][1] == "empty"
        and told["ragged"][0] == "int16 of any length"
        and told["enum"][0] == "enum of int8"
    )
    assert (
        told["truth"][0] == "bool"
        and told["virtual"] == ("uint16", "virtual")
        and nodes["virtual"].details["sources"] == 1
    )
    assert nodes["layouts/several"].codecs == ["shuffle", "deflate 4"] and nodes[
        "layouts/checked"
    ].codecs == ["fletcher32"]
    assert nodes["z/again"].details["to"] == "/layouts" and nodes["z/circle"].details["to"] == "/z"
    assert report.stored == (tmp_path / "all.h5").stat().st_size


@pytest.mark.parametrize("name", LAYOUTS)
def test_costs_are_those_of_reading(name: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=pixels(), **LAYOUTS[name])
    cost = inspect(tmp_path / "a.h5").access[0]
    source = HDF5Source(tmp_path / "a.h5", "data")
    try:
        source.read([17])
        assert cost.chunks == source.take_counts()["chunks_decoded"]
        assert cost.way == source.how()["data"] and cost.by_library == (not source.is_direct)
        assert cost.nbytes == 12 * 10 * 2 and cost.total == ROWS * 240
        # parts of chunks are read, though whole ones are told to the system
        if name == "raw and cut":
            assert (cost.read, cost.reads) == (240, 3)
        elif source.is_direct:
            read = [source.byte_ranges(np.array([row])) for row in range(ROWS)]
            assert cost.read == pytest.approx(
                np.mean([ranges.nbytes.sum() for ranges in read]), rel=0.1
            )
            assert cost.reads == len(read[17].nbytes)
    finally:
        source.close()
    chunks = LAYOUTS[name].get("chunks", (1, 12, 10))
    assert cost.decoded == cost.chunks * np.prod(chunks) * 2


@pytest.mark.parametrize("name", ["data", "pixels"])
def test_it_opens_as_it_says(name: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(name, data=pixels(), chunks=(16, 12, 10), compression="gzip")
        file["labels"] = np.arange(ROWS) % 3
    report = inspect(tmp_path / "a.h5")
    assert (
        report.opens_as is not None
        and report.classes == {"0": 30, "1": 30, "2": 30}
        and report.classes_are == "values of 'labels'"
    )
    with eval(report.opens_as, {"headrace": headrace}) as dataset:
        assert (
            (len(dataset), dataset.fingerprint)
            == (report.samples, report.fingerprint)
            == (ROWS, dataset.fingerprint)
        )
    assert (
        inspect(tmp_path / "a.h5", dataset_name="/labels").samples_are
        == "rows of 'labels', int64 []"
    )
    with pytest.raises(MissingNameError, match="labels"):
        inspect(tmp_path / "a.h5", dataset_name="lables")


def test_an_array_is_named_through_a_link(tmp_path: Path) -> None:
    everything(tmp_path / "all.h5")
    for name, samples in (("soft", 5), ("z/again/raw", ROWS)):
        report = inspect(tmp_path / "all.h5", dataset_name=name)
        with eval(str(report.opens_as), {"headrace": headrace}) as dataset:
            assert (
                (report.samples, report.access[0].name) == (len(dataset), name) == (samples, name)
            )
    for name, said in (
        ("scalar", "is a single value, it has no axis of samples"),
        ("none", "has a null dataspace, and so no values"),
    ):
        with pytest.raises(FormatError, match=said):
            inspect(tmp_path / "all.h5", dataset_name=name)


def test_an_array_is_named_beyond_those_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything(tmp_path / "all.h5")
    monkeypatch.setattr("headrace.inspecting.nodes.hdf5.MOST_NODES", 3)
    report = inspect(tmp_path / "all.h5", dataset_name="names")
    assert len(report.nodes) == 3 and report.samples == ROWS and report.access[0].name == "names"


def test_packs_tell_what_was_packed(photos: Path, tmp_path: Path) -> None:
    headrace.pack(headrace.ImageDataset(photos), tmp_path / "one.h5", progress=False)
    headrace.pack(
        headrace.ImageDataset(photos), tmp_path / "parts", shard_size="16kB", progress=False
    )
    with headrace.ImageDataset(photos) as dataset:
        counts = {
            name: int((np.asarray(dataset.targets) == number).sum())
            for number, name in enumerate(dataset.classes)
        }
        for path, files in ((tmp_path / "one.h5", 1), (tmp_path / "parts", 4)):
            report = inspect(path)
            assert (report.format, report.samples, report.files) == (
                "HDF5, packed by headrace",
                24,
                files,
            )
            assert (
                report.classes == counts
                and report.fingerprint == dataset.fingerprint
                and not report.advice
            )
            with eval(str(report.opens_as), {"headrace": headrace}) as opened:
                assert isinstance(opened, headrace.ImageDataset) and len(opened) == 24
    (cost, *_) = inspect(tmp_path / "one.h5").access
    mean = sum(path.stat().st_size for path in photos.rglob("*.*")) // 24
    assert (cost.sample, cost.nbytes, cost.chunks) == ("a sample", mean, 0)


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["data"] = pixels()
    report = inspect(tmp_path)
    assert report.files == 3 and report.stored == sum(
        path.stat().st_size for path in tmp_path.iterdir()
    )
    assert any("3 files" in note for note in report.notes)
    with headrace.HDF5Dataset(tmp_path) as dataset:
        assert (report.samples, report.fingerprint) == (3 * ROWS, dataset.fingerprint)


def test_many_arrays_are_cut_off(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        for number in range(MOST_NODES + 10):
            file[f"{number:05}"] = np.zeros(2)
    report = inspect(tmp_path / "a.h5")
    assert len(report.nodes) == MOST_NODES and any(
        "there are more" in note for note in report.notes
    )


def test_writers_are_recognized(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["X"] = np.zeros((3, 4))
        file["X"].attrs["MATLAB_class"] = np.bytes_("double")
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        file.attrs["encoding-type"], file.attrs["encoding-version"] = "anndata", "0.1.0"
        file["obs/_index"], file["var/_index"] = [b"a", b"b", b"c"], [b"x"]
        file["X/data"] = np.ones(2)
        file["X"].attrs["encoding-type"] = "csr_matrix"
    matlab, anndata = inspect(tmp_path / "a.mat"), inspect(tmp_path / "a.h5ad")
    assert matlab.format == "MATLAB 7.3 HDF5" and matlab.details["user block"] == "512 bytes"
    assert (
        anndata.format == "AnnData HDF5"
        and anndata.details["obs"] == 3
        and anndata.details["X"] == "csr_matrix, 2 values"
    )


def test_a_half_written_file_is_an_error(tmp_path: Path) -> None:
    everything(tmp_path / "all.h5")
    data = (tmp_path / "all.h5").read_bytes()
    (tmp_path / "half.h5").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match="no HDF5 file, or not a whole one"):
        inspect(tmp_path / "half.h5")


def test_an_array_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((4, 3))
        layout = h5py.VirtualLayout((4, 3), "f8")
        layout[:] = h5py.VirtualSource(tmp_path / "gone.h5", "data", (4, 3))
        file.create_virtual_dataset("virtual", layout)
    cost = next(cost for cost in inspect(tmp_path / "a.h5").access if cost.name == "virtual")
    assert cost.way.startswith("not at all: ") and "gone.h5" in cost.way


def test_a_file_without_arrays(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    report = inspect(tmp_path / "empty.h5")
    assert (
        report.samples is None
        and report.opens_as is None
        and report.notes == ["there is no array with an axis of samples"]
    )


def test_episodes_are_told(tmp_path: Path) -> None:
    report = inspect(write_demos(tmp_path / "demos.hdf5"))
    assert (
        report.samples == 12
        and report.opens_as
        == f"headrace.EpisodeDataset({str(tmp_path / 'demos.hdf5')!r}, window=16)"
    )
    assert report.samples_are.startswith(
        "episodes 'data/*' of 1 to 20 steps (96 in all): actions float64 [7], "
    )
    assert {access.name for access in report.access} == {
        f"data/demo_0/{name}"
        for name in ("actions", "dones", "obs/agentview_image", "obs/joint_pos")
    }
    with headrace.EpisodeDataset(tmp_path / "demos.hdf5", window=16) as dataset:
        assert len(dataset) == 96
    rows = inspect(tmp_path / "demos.hdf5", dataset_name="data/demo_1/actions")
    assert rows.samples == 12 and "HDF5Dataset" in (rows.opens_as or "")


def test_tables_of_pandas_are_told(tmp_path: Path) -> None:
    write_pandas(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.attrs["PYTABLES_FORMAT_VERSION"] = np.bytes_("2.1")
        file["df/_i_table/index/sorted"] = np.zeros(5000)
        file["other/_i_table/x"] = np.zeros(9)
    report = inspect(tmp_path / "a.h5")
    assert (
        report.samples == 25
        and report.samples_are == "rows of the table 'df', which pandas wrote: a, b, c"
    )
    assert report.opens_as == f"headrace.HDF5Dataset({str(tmp_path / 'a.h5')!r}, 'df')"
    assert [access.name for access in report.access] == ["df/table"]
    assert inspect(tmp_path / "a.h5", dataset_name="df").opens_as == report.opens_as


def test_packed_numbers_are_told(tmp_path: Path) -> None:
    write_netcdf(tmp_path / "a.nc")
    assert any(
        "'t2m' is packed as CF has it: decode_cf=True" in note
        for note in inspect(tmp_path / "a.nc", dataset_name="t2m").notes
    )
    assert not any(
        "packed" in note for note in inspect(tmp_path / "a.nc", dataset_name="time").notes
    )


@pytest.mark.parametrize("name", [None, "t2m", "bytes", "words"])
def test_decode_cf_is_proposed(
    name: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.nc"
    write_netcdf(path)
    report = inspect(path, dataset_name=name)
    if name is None:  # the largest array is shown
        assert report.opens_as == f"headrace.HDF5Dataset({str(path)!r}, 't2m', decode_cf=True)"
        assert report.samples_are == "rows of 't2m', int16 [4], unpacked float64"
        assert main(["info", str(path)]) == 0 and "decode_cf=True)" in capsys.readouterr().out
    assert report.opens_as is not None
    with eval(report.opens_as, {"headrace": headrace}) as dataset:
        assert report.opens_as.endswith("decode_cf=True)") and report.samples == len(dataset)
        assert report.fingerprint == dataset.fingerprint
        if name == "t2m":
            assert dataset[0].dtype == torch.float64


def test_advice_for_packed_numbers_unpacks_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        packed = file.create_dataset(
            "t2m", (100_000, 900), "i2", chunks=(64, 900), compression="gzip"
        )
        packed[:64] = np.arange(64 * 900).reshape(64, 900)
        packed.attrs["scale_factor"] = 0.5
    report = inspect(tmp_path / "a.nc")
    assert (
        report.advice[0].code == f"headrace.pack({report.opens_as}, 'a-packed.h5')"
        and not report.advice[0].command
    )


def test_other_arrays_are_opened_as_they_are(tmp_path: Path) -> None:
    write_netcdf(tmp_path / "a.nc")
    assert "decode_cf" not in str(inspect(tmp_path / "a.nc", dataset_name="time"))


def test_packed_numbers_of_several_files(tmp_path: Path) -> None:
    for number in range(3):
        write_netcdf(tmp_path / f"{number}.nc", begin=9 * number)
    report = inspect(tmp_path)
    with HDF5Dataset(tmp_path, "t2m", decode_cf=True) as dataset:
        assert report.samples == len(dataset) == 27 and report.fingerprint == dataset.fingerprint
    assert report.opens_as == f"headrace.HDF5Dataset({str(tmp_path)!r}, 't2m', decode_cf=True)"


def test_an_array_without_elements(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["empty"] = np.zeros((7, 3)), np.zeros((7, 0))
    assert (
        inspect(tmp_path / "a.h5").samples == 7
        and inspect(tmp_path / "a.h5", dataset_name="empty").samples == 7
    )
