"""What is told of HDF5 files is what h5py says, and what headrace does when it reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import headrace
from headrace.cli.main import main
from headrace.errors import FormatError, MissingNameError
from headrace.inspecting import inspect
from headrace.storage.hdf5.rows import HDF5Source
from tests.datasets.demonstrations import write_demos
from tests.datasets.test_hdf5_conventions import write_netcdf
from tests.inspecting.opening import opened

ROWS = 90
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "several": {"chunks": (16, 12, 10), "compression": "gzip", "shuffle": True},
    "cut": {"chunks": (8, 5, 4), "compression": "gzip"},
    "raw": {"chunks": (16, 12, 10)},
    "raw and cut": {"chunks": (4, 5, 10)},
    "checked": {"chunks": (16, 12, 10), "fletcher32": True},
    "lzf": {"chunks": (16, 12, 10), "compression": "lzf"},
}


def pixels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 9, (ROWS, 12, 10)).astype("u2")


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A file with something of all that HDF5 has."""
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for name, options in LAYOUTS.items():
            file.create_dataset(f"layouts/{name}", data=pixels(), **options)
        file.create_dataset("layouts/unwritten", (ROWS, 4), "f4", chunks=(8, 4))
        file["table"] = np.zeros(5, [("a", "<i4"), ("b", "<f8", (2,))])
        file["names"] = [f"name {number}" for number in range(ROWS)]
        file["fixed"] = np.array([b"abc"] * 4)
        file["scalar"], file["big"] = 3.0, np.arange(4, dtype=">i4")
        file["none"] = h5py.Empty("f4")
        file["hollow"] = np.zeros((7, 0))
        file.create_dataset("ragged", (3,), h5py.vlen_dtype(np.int16))
        kinds = h5py.enum_dtype({"a": 0, "b": 1}, "i1")
        file.create_dataset("enum", data=np.zeros(3, "i1"), dtype=kinds)
        file["truth"] = np.zeros(3, bool)
        file["soft"], file["outside"] = h5py.SoftLink("/table"), h5py.ExternalLink("other.h5", "/x")
        file["z/again"] = file["layouts"]
        file["z/circle"] = file["z"]
        layout = h5py.VirtualLayout((4, 12, 10), "u2")
        layout[:] = h5py.VirtualSource(file["layouts/raw"])[:4]
        file.create_virtual_dataset("virtual", layout)
        lost = h5py.VirtualLayout((4, 3), "f8")
        lost[:] = h5py.VirtualSource(tmp_path / "gone.h5", "data", (4, 3))
        file.create_virtual_dataset("lost", lost)
    return tmp_path / "all.h5"


def test_nodes_are_those_of_h5py(everything: Path) -> None:
    report = inspect(everything)
    nodes = {node.path: node for node in report.nodes}
    with h5py.File(everything) as file:
        names: list[str] = []
        file.visit(names.append)
        assert set(names) <= set(nodes)
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
    assert report.stored == everything.stat().st_size
    for name, dtype, layout in [
        ("table", "{a: int32, b: float64 [2]}", "contiguous"),
        ("names", "str", "contiguous"),
        ("fixed", "str of 3 bytes", "contiguous"),
        ("scalar", "float64", "scalar"),
        ("big", "int32 (other byte order)", "contiguous"),
        ("none", "float32", "empty"),
        ("ragged", "int16 of any length", "contiguous"),
        ("enum", "enum of int8", "contiguous"),
        ("truth", "bool", "contiguous"),
        ("virtual", "uint16", "virtual"),
    ]:
        assert (nodes[name].dtype, nodes[name].layout) == (dtype, layout)
    links = {"soft": "/table", "outside": "other.h5:/x", "z/again": "/layouts", "z/circle": "/z"}
    assert {name: nodes[name].details["to"] for name in links} == links
    assert nodes["virtual"].details["sources"] == 1
    assert nodes["layouts/several"].codecs == ["shuffle", "deflate 4"]
    assert nodes["layouts/checked"].codecs == ["fletcher32"]
    (lost,) = [cost for cost in report.access if cost.name == "lost"]
    assert lost.way.startswith("not at all: ")
    assert "gone.h5" in lost.way


def test_costs_are_those_of_reading(tmp_path: Path) -> None:
    for number, name in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("data", data=pixels(), **LAYOUTS[name])
        cost = inspect(folder / "a.h5").access[0]
        source = HDF5Source(folder / "a.h5", "data")
        source.read([17])
        assert cost.chunks == source.take_counts()["chunks_decoded"]
        assert cost.way == source.describe().ways["data"]
        assert cost.by_library == (not source.is_direct)
        assert (cost.nbytes, cost.total) == (12 * 10 * 2, ROWS * 240)
        # parts of chunks are read, though whole ones are told to the system
        if name == "raw and cut":
            assert (cost.read, cost.reads) == (240, 3)
        elif source.is_direct:
            read = [source.byte_ranges(np.array([row])).nbytes for row in range(ROWS)]
            mean = np.mean([nbytes.sum() for nbytes in read])
            assert cost.read == pytest.approx(mean, rel=0.1)
            assert cost.reads == len(read[17])
        source.close()
        chunks = LAYOUTS[name].get("chunks", (1, 12, 10))
        assert cost.decoded == cost.chunks * np.prod(chunks) * 2


def test_it_opens_as_it_says(tmp_path: Path) -> None:
    for name in ("data", "pixels"):
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset(name, data=pixels(), chunks=(16, 12, 10), compression="gzip")
            file["labels"] = np.arange(ROWS) % 3
        report = inspect(path)
        assert report.classes == {"0": 30, "1": 30, "2": 30}
        assert report.classes_are == "values of 'labels'"
        with opened(report):
            pass
        labels = inspect(path, dataset_name="/labels")
        assert labels.samples_are == "rows of 'labels', int64 []"
        with pytest.raises(MissingNameError, match="labels"):
            inspect(path, dataset_name="lables")


def test_any_array_may_be_named(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, samples in (("soft", 5), ("z/again/raw", ROWS), ("hollow", 7)):
        report = inspect(everything, dataset_name=name)
        assert report.samples == samples
        with opened(report):
            pass
    for name in ("scalar", "none"):
        with pytest.raises(FormatError, match=name):
            inspect(everything, dataset_name=name)
    monkeypatch.setattr("headrace.inspecting.nodes.hdf5.MOST_NODES", 3)
    report = inspect(everything, dataset_name="names")  # beyond those looked at
    assert len(report.nodes) == 3
    assert any("there are more" in note for note in report.notes)
    assert (report.samples, report.access[0].name) == (ROWS, "names")


def test_packs_tell_what_was_packed(photos: Path, tmp_path: Path) -> None:
    with headrace.ImageDataset(photos) as dataset:
        headrace.pack(dataset, tmp_path / "one.h5", progress=False)
        headrace.pack(dataset, tmp_path / "parts", shard_size="16kB", progress=False)
        for name, files in (("one.h5", 1), ("parts", 4)):
            report = inspect(tmp_path / name)
            assert (report.format, report.files) == ("HDF5, packed by headrace", files)
            assert report.fingerprint == dataset.fingerprint
            assert report.classes == dict.fromkeys(dataset.classes, 8)
            assert not report.advice
            with opened(report) as again:
                assert isinstance(again, headrace.ImageDataset)
    (cost, *_) = inspect(tmp_path / "one.h5").access
    mean = sum(path.stat().st_size for path in photos.rglob("*.*")) // 24
    assert (cost.sample, cost.nbytes, cost.chunks) == ("a sample", mean, 0)


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
    assert matlab.format == "MATLAB 7.3 HDF5"
    assert matlab.details["user block"] == "512 bytes"
    assert anndata.format == "AnnData HDF5"
    assert anndata.details["obs"] == 3
    assert anndata.details["X"] == "csr_matrix, 2 values"


def test_files_that_are_not_whole_or_empty(everything: Path, tmp_path: Path) -> None:
    data = everything.read_bytes()
    (tmp_path / "half.h5").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=r"half\.h5"):
        inspect(tmp_path / "half.h5")
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    report = inspect(tmp_path / "empty.h5")
    assert (report.samples, report.opens_as) == (None, None)
    assert report.notes == ["there is no array with an axis of samples"]


def test_episodes_are_told(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    report = inspect(path)
    assert report.opens_as == f"headrace.EpisodeDataset({str(path)!r}, window=16)"
    assert report.samples == 12
    assert report.samples_are.startswith(
        "episodes 'data/*' of 1 to 20 steps (96 in all): actions float64 [7], "
    )
    names = ("actions", "dones", "obs/agentview_image", "obs/joint_pos")
    assert {access.name for access in report.access} == {f"data/demo_0/{name}" for name in names}
    with headrace.EpisodeDataset(path, window=16) as dataset:
        assert len(dataset) == 96
    rows = inspect(path, dataset_name="data/demo_1/actions")
    assert rows.samples == 12
    assert "HDF5Dataset" in str(rows.opens_as)


class TestPackedNumbers:
    """As CF has it: with a scale, an offset and a fill value."""

    def test_decode_cf_is_proposed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "a.nc"
        write_netcdf(path)
        report = inspect(path)  # the largest array is shown
        assert report.opens_as == f"headrace.HDF5Dataset({str(path)!r}, 't2m', decode_cf=True)"
        assert report.samples_are == "rows of 't2m', int16 [4], unpacked float64"
        assert main(["info", str(path)]) == 0
        assert "decode_cf=True)" in capsys.readouterr().out
        for name in ("t2m", "bytes", "words"):
            named = inspect(path, dataset_name=name)
            assert str(named.opens_as).endswith("decode_cf=True)")
            assert any(f"'{name}' is packed as CF has it" in note for note in named.notes)
            with opened(named) as dataset:
                assert name != "t2m" or dataset[0].dtype == torch.float64
        plain = inspect(path, dataset_name="time")
        assert "decode_cf=" not in str(plain.opens_as)
        assert not any("packed" in note for note in plain.notes)

    def test_advice_unpacks_them(self, tmp_path: Path) -> None:
        how = {"chunks": (64, 900), "compression": "gzip"}
        with h5py.File(tmp_path / "a.nc", "w") as file:
            packed = file.create_dataset("t2m", (100_000, 900), "i2", **how)
            packed[:64] = np.arange(64 * 900).reshape(64, 900)
            packed.attrs["scale_factor"] = 0.5
        report = inspect(tmp_path / "a.nc")
        assert report.advice[0].code == f"headrace.pack({report.opens_as}, 'a-packed.h5')"
        assert not report.advice[0].command

    def test_of_several_files(self, tmp_path: Path) -> None:
        for number in range(3):
            write_netcdf(tmp_path / f"{number}.nc", begin=9 * number)
        report = inspect(tmp_path)
        assert (report.files, report.samples) == (3, 27)
        assert report.stored == sum(path.stat().st_size for path in tmp_path.iterdir())
        assert any("3 files" in note for note in report.notes)
        with opened(report) as dataset:
            assert dataset[0].dtype == torch.float64


def test_damaged_labels_are_a_note(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((64, 32), np.float32)
        labels = file.create_dataset("labels", data=np.arange(64) % 5, compression="gzip")
        offset = labels.id.get_chunk_info(0).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 8)
    report = inspect(path)
    assert (report.samples, report.classes) == (64, None)
    assert any("the array 'labels' can't be read" in note for note in report.notes)
