"""`headrace info` prints what opened datasets say of themselves."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

from headrace import HDF5Dataset, open_dataset, pack
from headrace.cli.info import sniffed
from headrace.cli.main import main
from headrace.formats.hdf5.rows import HDF5Source
from tests.data.make import make_tar
from tests.datasets.table.test_table import some_table, write
from tests.formats.arrays import zarr_rows
from tests.servers.ranges import RangeServer

ROWS = 90
PIXELS = np.random.default_rng(0).integers(0, 9, (ROWS, 12, 10), np.uint16)
LAYOUTS: dict[str, dict[str, Any]] = {
    "raw": {"chunks": (16, 12, 10)},
    "tall": {"chunks": (16, 12, 10), "gzip": True},
    "cut": {"chunks": (8, 5, 10), "gzip": True},
    "one": {"chunks": (1, 12, 10), "gzip": True},
}


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `headrace info` prints as JSON."""

    def run(path: Any, *options: str) -> Any:
        assert main(["info", "--json", str(path), *options]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def badly_laid_out(tmp_path: Path) -> str:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = {"chunks": (4000, 64, 64), "compression": "gzip"}
        file.create_dataset("deep/images", (20_000, 64, 64), "u1", **layout)
        file["deep/labels"] = np.arange(20_000) % 30
        file["names\x1b[2J"] = np.arange(3)
    return str(tmp_path / "a.h5")


def test_a_page_says_what_there_is(badly_laid_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", badly_laid_out, "--target-name", "deep/labels"]) == 0
    shown, warned = capsys.readouterr()
    assert "'deep/images' is the largest of 3 arrays: --dataset-name NAME" in warned
    for wanted in (
        f"{badly_laid_out}: 20,000 samples",
        "dataset_name='deep/images'",
        "deep/images uint8 [20000, 64, 64]",
        "pread + inflate, chunks [4000, 64, 64]",
        "decodes 16.4 MB (1 x chunk [4000, 64, 64]), 4,000 times its bytes",
        "30 classes",
        "... and 18 more: --json",
    ):
        assert wanted in " ".join(shown.split()), wanted
    assert "\x1b" not in shown and "names\\x1b[2J" in shown


def test_all_formats_are_told(photos: Path, tmp_path: Path, told: Any) -> None:
    pack(open_dataset(photos), tmp_path / "pack.h5", progress=False)
    make_tar(tmp_path / "a.tar", [("0.txt", b"a"), ("1.txt", b"bc")])
    write(tmp_path / "a.parquet", some_table(), "parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "mill"}\n' * 3)
    (tmp_path / "a.txt").write_text("mill")
    np.save(tmp_path / "a.npy", np.zeros((30, 5), np.float32))
    for name in ("pack.h5", "a.tar", "a.parquet", "a.jsonl", "a.txt", "a.npy", str(photos)):
        path = tmp_path / name
        shown = told(path)
        with open_dataset(path) as dataset:
            assert shown["samples"] == len(dataset), name
            assert shown["fingerprint"] == dataset.fingerprint
            assert shown["opens_as"] == repr(dataset).partition("  #")[0]
            assert shown["held"] == dataset.held_nbytes()
        assert shown["stored"] > 0 and shown["columns"], name
    assert told(photos)["classes"] == told(tmp_path / "pack.h5")["classes"]
    assert sum(told(photos)["classes"].values()) == 24


@pytest.mark.parametrize("name", LAYOUTS)
def test_costs_are_those_of_reading(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        compression = "gzip" if "gzip" in layout else None
        file.create_dataset("x", data=PIXELS, chunks=layout["chunks"], compression=compression)
    compressors = "auto" if "gzip" in layout else None
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=PIXELS.shape,
        dtype="u2",
        chunks=layout["chunks"],
        compressors=compressors,
    )
    array[:] = PIXELS
    sources: list[Any] = [HDF5Source(tmp_path / "a.h5", "x"), zarr_rows(tmp_path / "a.zarr")]
    for source in sources:
        (column,) = source.describe().columns
        source.read([17])
        counted = source.take_counts()["chunks_decoded"]
        if "gzip" in layout:
            assert column.chunks == counted
        else:
            assert column.chunks == 0
        assert (column.nbytes, column.total) == (240, PIXELS.nbytes)
        assert column.sample == "uint16 [12, 10]"
        read = np.mean([source.byte_ranges(np.array([row])).nbytes.sum() for row in range(ROWS)])
        if isinstance(source, HDF5Source):
            assert column.read == pytest.approx(read, rel=0.1)
        source.close()


def test_arrays_that_cannot_be_read_say_why(tmp_path: Path, told: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((3, 2))
        file["names"] = ["a", "b"]
        file["single"] = 5
        file.create_dataset("references", (3,), h5py.ref_dtype)
    arrays = {array["name"]: array for array in told(tmp_path / "a.h5")["arrays"]}
    assert list(arrays) == ["data", "names", "references", "single"]
    assert arrays["data"]["stored"] == 48
    assert "h5py" in arrays["names"]["read_by"]
    assert "can't be read" in arrays["references"]["read_by"]


def test_errors_name_the_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = io.BytesIO()
    Image.new("L", (8, 8)).save(image, "png")
    for name, data, content in (
        ("a.h5", b"", ""),
        ("b.h5", b"<!DOCTYPE html><html></html>", "web page"),
        ("c.h5", image.getvalue(), "PNG image"),
        ("a.parquet", b"PK\x03\x04" + bytes(99), "zip"),
        ("c.nc", b"CDF\x01" + bytes(99), "netCDF-3"),
        ("picture", b"MATLAB 5.0" + bytes(99), "MATLAB 5"),
    ):
        (tmp_path / name).write_bytes(data)
        assert main(["info", "-q", str(tmp_path / name)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("headrace info: error: ") and content in err, name
    assert sniffed(str(tmp_path)) is None
    (tmp_path / "none").mkdir()
    assert main(["info", str(tmp_path / "none")]) == 2
    assert main(["info", str(tmp_path / "a.h5"), "--dataset-name", "x"]) == 1
    assert main(["info", str(tmp_path / "gone.h5")]) == 2


def test_a_url_is_told_as_a_path(tmp_path: Path, photos: Path, told: Any, own_cache: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("x", "y"):
            file.create_dataset(f"deep/{name}", data=PIXELS, chunks=(16, 12, 10), compression=1)
    pack(open_dataset(photos), tmp_path / "pack.h5", progress=False)
    with RangeServer(tmp_path) as server:
        for name in ("a.h5", "pack.h5"):
            local, remote = told(tmp_path / name), told(f"{server.url}/{name}?token=secret")
            for key in ("samples", "fingerprint", "stored", "held", "classes"):
                assert local[key] == remote[key], (name, key)
            assert [array["name"] for array in local["arrays"]] == [
                array["name"] for array in remote["arrays"]
            ]
            assert "secret" not in json.dumps(remote)
            with HDF5Dataset(tmp_path / "a.h5", "deep/x") as dataset:
                assert local["columns"][0]["decoded"] in (0, dataset.describe().columns[0].decoded)


def test_large_texts_on_a_server_are_not_read(
    tmp_path: Path, told: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.info._FETCHED", 10)
    (tmp_path / "a.jsonl").write_text('{"text": "mill"}\n' * 3000)
    with RangeServer(tmp_path) as server:
        assert told(f"{server.url}/a.jsonl")["samples"] == 1
        assert server.counts()["bytes"] < 1000
        assert told(f"{server.url}/a.jsonl", "--unit", "record")["samples"] == 3000
