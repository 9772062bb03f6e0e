"""What is told of Zarr stores is what zarr-python says, and what headrace does when it reads
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import headrace
from headrace.errors import DataNotFoundError, FormatError, MissingNameError
from headrace.inspecting import inspect
from headrace.inspecting.report import Report
from headrace.io.remote.options import RemoteOptions
from headrace.storage.zarr.rows import ZarrSource
from tests.inspecting.opening import opened
from tests.servers.ranges import RangeServer

ROWS = 90
LAYOUTS: dict[str, dict[str, Any]] = {
    "three": {"chunks": (16, 12, 10)},
    "raw": {"chunks": (16, 12, 10), "compressors": None},
    "cut": {"chunks": (8, 5, 10)},
    "shards": {"chunks": (4, 12, 10), "shards": (32, 12, 10)},
    "two": {"chunks": (16, 12, 10), "zarr_format": 2},
    "fortran": {"chunks": (16, 12, 10), "zarr_format": 2, "order": "F", "compressors": None},
    "unknown": {"chunks": (16, 12, 10), "filters": [zarr.codecs.TransposeCodec(order=(1, 0, 2))]},
}


def written(path: Any, **options: Any) -> Any:
    array = zarr.create_array(path, shape=(ROWS, 12, 10), dtype="u2", **options)
    array[:] = np.random.default_rng(0).integers(0, 9, (ROWS, 12, 10))
    return array


def test_arrays_and_costs_are_those_of_zarr(tmp_path: Path) -> None:
    for number, name in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        array = written(folder / "a.zarr", **LAYOUTS[name])
        report = inspect(folder / "a.zarr")
        (node,), (cost,) = report.nodes, report.access
        assert report.format == f"Zarr {array.metadata.zarr_format}"
        assert (node.shape, node.chunks, node.shards) == (array.shape, array.chunks, array.shards)
        assert node.nbytes == array.nbytes
        files = [path for path in (folder / "a.zarr").rglob("*") if path.is_file()]
        chunks = [path for path in files if not path.name.startswith((".z", "zarr.json"))]
        if name != "unknown":
            assert node.stored == sum(path.stat().st_size for path in chunks)
            assert node.chunks_written == len(chunks) == node.details["files"]
            assert not node.is_estimate
        with opened(report):
            pass
        source = ZarrSource(folder / "a.zarr")
        source.read([17])
        counted = source.take_counts()["chunks_decoded"]
        assert cost.way == source.describe().ways["rows"]
        assert cost.by_library == (not source.is_direct)
        # whose chunk is read as a whole, and not decoded
        assert cost.chunks == (1 if name == "fortran" else counted)
        if source.is_direct:
            nbytes = [source.byte_ranges(np.array([row])).nbytes.sum() for row in range(ROWS)]
            assert cost.read == pytest.approx(np.mean(nbytes), rel=0.15)
        source.close()


def test_several_stores_are_one_dataset(tmp_path: Path) -> None:
    for number in range(2):
        written(tmp_path / f"{number}.zarr", chunks=(16, 12, 10))
    report = inspect(tmp_path)
    with headrace.ZarrDataset(tmp_path) as dataset:
        assert report.fingerprint == dataset.fingerprint
    assert (report.files, report.samples) == (2, 2 * ROWS)


def image(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    for level in range(2):
        shape = (2, 40 >> level, 48 >> level, 48 >> level)
        group.create_array(str(level), shape=shape, chunks=(1, 8, 16, 16), dtype="u2")[:] = 1
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    axes.insert(0, {"name": "c", "type": "channel"})
    scales = [{"type": "scale", "scale": [1, 2, 0.5, 0.5]}]
    levels = [{"path": name, "coordinateTransformations": scales} for name in "01"]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": levels}]}


def test_an_image_of_ome_ngff(tmp_path: Path) -> None:
    image(tmp_path / "a.zarr")
    report = inspect(tmp_path / "a.zarr")
    assert report.format == "OME-NGFF, Zarr 3"
    assert report.details["image"]["axes"] == "czyx"
    level = report.details["image"]["levels"][1]
    assert level == "1: 1 x 2 x 0.5 x 0.5 micrometer, [2, 20, 24, 24]"
    assert report.access[0].sample == "a patch of 1 x 40 x 48 x 48"
    with eval(str(report.opens_as), {"headrace": headrace}) as dataset:
        assert dataset[0].shape == (1, 40, 48, 48)


def test_patches_cost_what_they_cross(tmp_path: Path) -> None:
    shape, chunks = (200, 150, 130), np.array([32, 48, 20])
    zarr.create_array(tmp_path / "a.zarr", shape=shape, chunks=(32, 48, 20), dtype="u1")[:] = 1
    (cost,) = inspect(tmp_path / "a.zarr").access
    places = [np.arange(extent - 64 + 1) for extent in shape]
    corners = np.stack(np.meshgrid(*places, indexing="ij"), -1).reshape(-1, 3)
    crossed = np.prod((corners + 63) // chunks - corners // chunks + 1, axis=1)
    assert cost.sample == "a patch of 64 x 64 x 64"
    assert cost.chunks == pytest.approx(crossed.mean(), rel=0.1)
    assert cost.decoded == pytest.approx(cost.chunks * chunks.prod(), rel=1e-3)


def test_groups_are_told_from_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w")
    group.create_array("deep/er/x", shape=(6,), dtype="f4")[:] = 1
    group.create_array("names", shape=(6,), dtype=str)[:] = np.array(list("abcdef"))
    group.create_array("single", shape=(), dtype="i4")
    (path / "deep" / "stray").mkdir()
    report = inspect(path, dataset_name="deep/er/x")
    kinds = {node.path: node.kind for node in report.nodes}
    assert list(kinds) == ["", "deep", "deep/er", "deep/er/x", "names", "single"]
    assert list(kinds.values()) == ["group"] * 3 + ["array"] * 3
    assert str(report.opens_as).endswith("'deep/er/x')")
    assert report.nodes[-1].layout == "scalar"
    ways = {cost.name: cost.way for cost in report.access}
    assert ways["names"] == "zarr-python: strings of any length"
    with pytest.raises(MissingNameError, match="none"):
        inspect(path, dataset_name="none")
    for most in (4, 6):
        monkeypatch.setattr("headrace.inspecting.zarr.MOST_NODES", most)
        report = inspect(path, dataset_name="names")
        assert len(report.nodes) == most
        assert any("there are more" in note for note in report.notes) == (most == 4)
        assert report.access[0].name == "names"
        with pytest.raises(FormatError, match="'single'"):
            inspect(path, dataset_name="single")


def test_metadata_that_are_damaged_or_unknown(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", chunks=(16, 12, 10))
    path = tmp_path / "a.zarr" / "zarr.json"
    metadata = json.loads(path.read_text())
    grid = {"chunk_shape": [[16, 74], [12], [10]]}
    metadata["chunk_grid"] = {"name": "unheard-of", "configuration": grid}
    path.write_text(json.dumps(metadata))
    report = inspect(tmp_path / "a.zarr")
    assert report.samples == ROWS
    assert report.nodes[0].details["grid"] == "unheard-of"
    assert report.access[0].way.startswith("not at all: ")
    assert not report.advice
    path.write_text(path.read_text()[:100])
    with pytest.raises(FormatError):
        inspect(tmp_path / "a.zarr")


def test_a_zip_is_a_store(tmp_path: Path) -> None:
    with zarr.storage.ZipStore(tmp_path / "a.zarr.zip", mode="w") as store:
        written(store, chunks=(16, 12, 10))
    report = inspect(tmp_path / "a.zarr.zip")
    assert report.samples == ROWS
    assert (report.access[0].chunks, report.nodes[0].chunks_written) == (1, 6)


def test_chunks_that_were_never_written_or_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"chunks": (1, 4), "dtype": "u1", "compressors": None}
    array = zarr.create_array(tmp_path / "a.zarr", shape=(600, 4), fill_value=9, **options)
    (node,) = inspect(tmp_path / "a.zarr").nodes
    assert (node.stored, node.chunks_written) == (0, 0)
    monkeypatch.setattr("headrace.inspecting.nodes.zarr._COUNTED", 100)
    monkeypatch.setattr("headrace.inspecting.nodes.zarr._SAMPLED", 50)
    array[:] = 1
    (node,) = inspect(tmp_path / "a.zarr").nodes
    assert node.is_estimate
    assert (node.stored, node.chunks_written) == (2400, None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with RangeServer(tmp_path) as server:
        yield server


def far_report(url: str, cache: Path, name: str | None = None) -> Report:
    return inspect(url, dataset_name=name, reach=RemoteOptions(cache_dir=cache))


def test_a_remote_store_is_the_local_one(tmp_path: Path, server: RangeServer) -> None:
    cache = tmp_path / "cache"
    for name in ("three", "shards", "raw"):
        written(tmp_path / f"{name}.zarr", **LAYOUTS[name])
        url = f"{server.url}/{name}.zarr"
        near, far = inspect(tmp_path / f"{name}.zarr"), far_report(url, cache)
        assert (near.samples, near.fingerprint) == (far.samples, far.fingerprint)
        assert [node.stored for node in near.nodes] == [node.stored for node in far.nodes]
        (here,), (there,) = near.access, far.access
        assert (here.chunks, here.decoded, here.read) == (there.chunks, there.decoded, there.read)
        with headrace.ZarrDataset(url, cache_dir=cache) as dataset:
            assert there.way == dataset.sample_source.describe().ways["rows"]
    with pytest.raises(DataNotFoundError):
        inspect(f"{server.url}/none.zarr")


def test_a_server_that_does_not_list(tmp_path: Path, server: RangeServer) -> None:
    cache = tmp_path / "cache"
    image(tmp_path / "a.zarr")
    near, far = inspect(tmp_path / "a.zarr"), far_report(f"{server.url}/a.zarr", cache)
    assert [node.path for node in far.nodes] == [node.path for node in near.nodes] == ["", "0", "1"]
    assert far.access[0].chunks == near.access[0].chunks
    zarr.open_group(tmp_path / "b.zarr", mode="w").create_array("x", shape=(4,), dtype="u1")[:] = 1
    with pytest.raises(MissingNameError, match="no listing"):
        far_report(f"{server.url}/b.zarr", cache)
    assert far_report(f"{server.url}/b.zarr", cache, "x").samples == 4
