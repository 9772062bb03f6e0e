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
from headrace.io.remote.options import RemoteOptions
from headrace.storage.zarr.rows import ZarrSource
from tests.servers.ranges import RangeServer

ROWS = 90
LAYOUTS: dict[str, dict[str, Any]] = {
    "three": {"chunks": (16, 12, 10)},
    "raw": {"chunks": (16, 12, 10), "compressors": None},
    "one": {"chunks": (1, 12, 10)},
    "cut": {"chunks": (8, 5, 10)},
    "shards": {"chunks": (4, 12, 10), "shards": (32, 12, 10)},
    "two": {"chunks": (16, 12, 10), "zarr_format": 2},
    "fortran": {"chunks": (16, 12, 10), "zarr_format": 2, "order": "F", "compressors": None},
    "unknown": {"chunks": (16, 12, 10), "filters": [zarr.codecs.TransposeCodec(order=(1, 0, 2))]},
}


def pixels(rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 9, (rows, 12, 10)).astype("u2")


def written(path: Path, **options: Any) -> Any:
    array = zarr.create_array(path, shape=(ROWS, 12, 10), dtype="u2", **options)
    array[:] = pixels()
    return array


@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_are_those_of_zarr(name: str, tmp_path: Path) -> None:
    array = written(tmp_path / "a.zarr", **LAYOUTS[name])
    report = inspect(tmp_path / "a.zarr")
    (node,) = report.nodes
    assert report.format == f"Zarr {array.metadata.zarr_format}" and report.path == str(
        tmp_path / "a.zarr"
    )
    assert (node.shape, node.chunks, node.shards, node.nbytes) == (
        array.shape,
        array.chunks,
        array.shards,
        array.nbytes,
    )
    files = [
        path
        for path in (tmp_path / "a.zarr").rglob("*")
        if path.is_file() and not path.name.startswith((".z", "zarr.json"))
    ]
    if name != "unknown":
        assert (
            node.stored
            == sum(path.stat().st_size for path in files)
            == array.nbytes_stored() - _metadata(tmp_path / "a.zarr")
        )
        assert node.chunks_written == len(files) == node.details["files"] and not node.is_estimate


def _metadata(store: Path) -> int:
    return sum(
        path.stat().st_size
        for path in store.iterdir()
        if path.is_file() and path.name.startswith((".z", "zarr.json"))
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_costs_are_those_of_reading(name: str, tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", **LAYOUTS[name])
    cost = inspect(tmp_path / "a.zarr").access[0]
    source = ZarrSource(tmp_path / "a.zarr")
    try:
        source.read([17])
        counted = source.take_counts()["chunks_decoded"]
        assert cost.way == source.how()["rows"] and cost.by_library == (not source.is_direct)
        # whose chunk is read as a whole, and not decoded
        assert cost.chunks == (1 if name == "fortran" else counted)
        if source.is_direct:
            nbytes = [source.byte_ranges(np.array([row])).nbytes.sum() for row in range(ROWS)]
            assert cost.read == pytest.approx(np.mean(nbytes), rel=0.15)
    finally:
        source.close()


def test_it_opens_as_it_says(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", chunks=(16, 12, 10))
    report = inspect(tmp_path / "a.zarr")
    assert report.opens_as is not None
    with eval(report.opens_as, {"headrace": headrace}) as dataset:
        assert (len(dataset), dataset.fingerprint) == (report.samples, report.fingerprint)


def test_several_stores_are_one_dataset(tmp_path: Path) -> None:
    for number in range(2):
        written(tmp_path / f"{number}.zarr", chunks=(16, 12, 10))
    report = inspect(tmp_path)
    with headrace.ZarrDataset(tmp_path) as dataset:
        assert (report.files, report.samples, report.fingerprint) == (
            2,
            2 * ROWS,
            dataset.fingerprint,
        )


def image(path: Path) -> Any:
    group = zarr.open_group(path, mode="w")
    for level in range(2):
        shape = (2, 40 >> level, 48 >> level, 48 >> level)
        group.create_array(str(level), shape=shape, chunks=(1, 8, 16, 16), dtype="u2")[:] = 1
    axes = [
        {"name": "c", "type": "channel"},
        *({"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"),
    ]
    scales = [
        {
            "path": str(level),
            "coordinateTransformations": [{"type": "scale", "scale": [1, 2, 0.5, 0.5]}],
        }
        for level in range(2)
    ]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": scales}]}
    return group


def test_an_image_of_ome_ngff(tmp_path: Path) -> None:
    image(tmp_path / "a.zarr")
    report = inspect(tmp_path / "a.zarr")
    assert report.format == "OME-NGFF, Zarr 3" and report.details["image"]["axes"] == "czyx"
    assert (
        report.details["image"]["levels"][1] == "1: 1 x 2 x 0.5 x 0.5 micrometer, [2, 20, 24, 24]"
    )
    assert report.access[0].sample == "a patch of 1 x 40 x 48 x 48"
    with eval(str(report.opens_as), {"headrace": headrace}) as dataset:
        assert (
            dataset[0][0].shape == (1, 40, 48, 48)
            if isinstance(dataset[0], tuple)
            else dataset[0].shape == (1, 40, 48, 48)
        )


def test_patches_cost_what_they_cross(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(200, 150, 130), chunks=(32, 48, 20), dtype="u1")[
        :
    ] = 1
    (cost,) = inspect(tmp_path / "a.zarr").access
    corners = np.stack(
        np.meshgrid(*(np.arange(extent - 64 + 1) for extent in (200, 150, 130)), indexing="ij"), -1
    ).reshape(-1, 3)
    crossed = np.prod((corners + 63) // [32, 48, 20] - corners // [32, 48, 20] + 1, axis=1)
    assert cost.sample == "a patch of 64 x 64 x 64" and cost.chunks == pytest.approx(
        crossed.mean(), rel=0.1
    )
    assert cost.decoded == pytest.approx(cost.chunks * 32 * 48 * 20, rel=1e-3)


def test_groups_are_told_from_arrays(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("deep/er/x", shape=(6,), dtype="f4")[:] = 1
    group.create_array("names", shape=(6,), dtype=str)[:] = np.array(list("abcdef"))
    group.create_array("single", shape=(), dtype="i4")
    (tmp_path / "a.zarr" / "deep" / "stray").mkdir()
    report = inspect(tmp_path / "a.zarr", dataset_name="deep/er/x")
    assert [(node.path, node.kind) for node in report.nodes] == [
        ("", "group"),
        ("deep", "group"),
        ("deep/er", "group"),
        ("deep/er/x", "array"),
        ("names", "array"),
        ("single", "array"),
    ]
    assert (
        report.opens_as is not None
        and report.opens_as.endswith("'deep/er/x')")
        and report.nodes[-1].layout == "scalar"
    )
    assert (
        next(cost.way for cost in report.access if cost.name == "names")
        == "zarr-python: strings of any length"
    )
    with pytest.raises(MissingNameError):
        inspect(tmp_path / "a.zarr", dataset_name="none")
    with pytest.raises(FormatError, match="'single' is a single value"):
        inspect(tmp_path / "a.zarr", dataset_name="single")


@pytest.mark.parametrize(("most", "is_cut"), [(2, True), (3, False)])
def test_nodes_are_cut_off_where_there_are_more(
    most: int, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for name in "xy":
        group.create_array(name, shape=(6,), dtype="f4")
    monkeypatch.setattr("headrace.inspecting.zarr.MOST_NODES", most)
    report = inspect(tmp_path / "a.zarr")
    assert (
        len(report.nodes) == most
        and any("there are more" in note for note in report.notes) == is_cut
    )
    assert inspect(tmp_path / "a.zarr", dataset_name="y").access[0].name == "y"


def test_a_grid_that_nobody_knows(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", chunks=(16, 12, 10))
    path = tmp_path / "a.zarr" / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["chunk_grid"] = {
        "name": "unheard-of",
        "configuration": {"chunk_shape": [[16, 74], [12], [10]]},
    }
    path.write_text(json.dumps(metadata))
    report = inspect(tmp_path / "a.zarr")
    assert (
        report.samples == ROWS
        and report.nodes[0].details["grid"] == "unheard-of"
        and not report.advice
    )
    assert report.access[0].way.startswith("not at all: ")


def test_a_zip_is_a_store(tmp_path: Path) -> None:
    with zarr.storage.ZipStore(tmp_path / "a.zarr.zip", mode="w") as store:
        zarr.create_array(store, shape=(ROWS, 12, 10), chunks=(16, 12, 10), dtype="u2")[:] = (
            pixels()
        )
    report = inspect(tmp_path / "a.zarr.zip")
    assert (
        report.samples == ROWS
        and report.access[0].chunks == 1
        and report.nodes[0].chunks_written == 6
    )


def test_packs_tell_what_was_packed(photos: Path, tmp_path: Path) -> None:
    headrace.pack(headrace.ImageDataset(photos), tmp_path / "a.zarr", format="zarr", progress=False)
    report = inspect(tmp_path / "a.zarr")
    with headrace.ImageDataset(photos) as dataset:
        assert (report.format, report.samples, report.fingerprint) == (
            "Zarr 3, packed by headrace",
            24,
            dataset.fingerprint,
        )
        assert report.classes == {name: 8 for name in dataset.classes} and [
            cost.sample for cost in report.access
        ] == ["a sample"]


def test_damaged_metadata_are_an_error(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", chunks=(16, 12, 10))
    path = tmp_path / "a.zarr" / "zarr.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(FormatError):
        inspect(tmp_path / "a.zarr")


def test_chunks_that_were_never_written(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(ROWS, 4), chunks=(8, 4), dtype="f4")
    (node,) = inspect(tmp_path / "a.zarr").nodes
    assert (node.stored, node.chunks_written) == (0, 0)


def test_millions_of_chunks_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.inspecting.nodes.zarr._COUNTED", 100)
    monkeypatch.setattr("headrace.inspecting.nodes.zarr._SAMPLED", 50)
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=(600, 4),
        chunks=(1, 4),
        dtype="u1",
        compressors=None,
        fill_value=9,
    )
    array[:] = 1
    (node,) = inspect(tmp_path / "a.zarr").nodes
    assert node.is_estimate and node.chunks_written is None and node.stored == 2400


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with RangeServer(tmp_path) as server:
        yield server


@pytest.mark.parametrize("name", ["three", "shards", "raw"])
def test_a_remote_store_is_the_local_one(name: str, tmp_path: Path, server: RangeServer) -> None:
    written(tmp_path / "a.zarr", **LAYOUTS[name])
    near, far = (
        inspect(tmp_path / "a.zarr"),
        inspect(f"{server.url}/a.zarr", reach=RemoteOptions(cache_dir=tmp_path / "cache")),
    )
    assert (near.samples, near.fingerprint) == (far.samples, far.fingerprint)
    assert [node.stored for node in near.nodes] == [node.stored for node in far.nodes]
    (here,), (there,) = near.access, far.access
    assert (here.chunks, here.decoded, here.read) == (there.chunks, there.decoded, there.read)
    source = headrace.ZarrDataset(f"{server.url}/a.zarr", cache_dir=tmp_path / "cache")
    try:
        assert there.way == source.sample_source.how()["rows"]
    finally:
        source.close()
    with pytest.raises(DataNotFoundError):
        inspect(f"{server.url}/none.zarr")


def test_a_server_that_does_not_list(tmp_path: Path, server: RangeServer) -> None:
    image(tmp_path / "a.zarr")
    near, far = (
        inspect(tmp_path / "a.zarr"),
        inspect(f"{server.url}/a.zarr", reach=RemoteOptions(cache_dir=tmp_path / "cache")),
    )
    assert [node.path for node in far.nodes] == [node.path for node in near.nodes] == ["", "0", "1"]
    assert far.access[0].chunks == near.access[0].chunks
    zarr.open_group(tmp_path / "b.zarr", mode="w").create_array("x", shape=(4,), dtype="u1")[:] = 1
    with pytest.raises(MissingNameError, match="no listing"):
        inspect(f"{server.url}/b.zarr", reach=RemoteOptions(cache_dir=tmp_path / "cache"))
    assert (
        inspect(
            f"{server.url}/b.zarr",
            dataset_name="x",
            reach=RemoteOptions(cache_dir=tmp_path / "cache"),
        ).samples
        == 4
    )
