"""Which format a path is taken for, and what is said of what headrace does not read."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from PIL import Image

from headrace import open_dataset
from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError, RemoteError
from headrace.inspecting import inspect
from headrace.inspecting.formats import sniffed
from headrace.io.remote.options import RemoteOptions
from tests.inspecting.opening import opened


def test_an_empty_folder_and_an_unknown_one(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    report = inspect(tmp_path)
    assert (report.format, report.files, report.samples) == ("an empty folder", 0, None)
    (tmp_path / "a.xyz").write_bytes(b"what is this")
    report = inspect(tmp_path)
    assert report.format == "a folder of no known format"
    assert "1 .xyz" in report.notes[0]


def test_formats_by_plugin_are_images(tmp_path: Path) -> None:
    for name, head in [
        ("a.avif", b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf"),
        ("a.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"),
        ("a.jxl", b"\xff\x0a\x00"),
    ]:
        (tmp_path / name).write_bytes(head)
        report = inspect(tmp_path / name)
        assert (report.format, report.samples) == ("images", 1)
    assert sniffed(b"MM\x00+") == "BigTIFF image"


def test_a_file_that_is_not_what_it_says(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("L", (8, 8)).save(image, "png")
    png = image.getvalue()
    bitmap = io.BytesIO()
    Image.new("1", (8, 8)).save(bitmap, "bmp")
    for name, data, said in [
        ("a.h5", b"", "is empty"),
        ("a.h5", b"<!DOCTYPE html><html></html>", "is a web page"),
        ("a.h5", png, "is a PNG image, though its name says HDF5 files"),
        ("a.jpg", b"PAR1" + bytes(99), "is a Parquet table, though its name says images"),
        ("a.tar", bytes(2000), "is something else, though its name says tar shards"),
        ("a.txt", b"PK\x03\x04" + bytes(99), "is a zip"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("b.csv", bitmap.getvalue(), "is a BMP image"),
        ("d.mp4.png", b"\0\0\0\x14ftypisom" + bytes(99), "is a MP4 video"),
        ("c.nc", b"CDF\x01" + bytes(99), "is a netCDF-3"),
        ("picture", png, "is an image: give it an ending"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FormatError, match=said):
            inspect(tmp_path / name)


def write_unreadable(folder: Path) -> dict[str, str]:
    """Files that h5py, zarr and NumPy read, and headrace does not: what is said of each."""
    codecs = [{"name": "numcodecs.pcodec", "configuration": {}}]
    for name, array, changes in (
        ("dates.zarr", np.arange(3).astype("M8[s]"), {}),
        ("codec.zarr", np.ones(3), {"codecs": codecs}),
    ):
        zarr.create_array(folder / name, data=array, chunks=array.shape)
        metadata = folder / name / "zarr.json"
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))
    for name in ("two", "two_arrays"):
        (folder / name).mkdir()
    np.save(folder / "two_arrays/a.npy", np.ones((3, 2)))
    np.save(folder / "two_arrays/b.npy", np.ones((3, 4)))
    arrays: list[tuple[str, Any, int]] = [("references.h5", h5py.ref_dtype, 2)]
    arrays += [("fields.h5", [("a", np.longdouble)], 2), ("two/a.h5", "f4", 2)]
    for name, dtype, width in [*arrays, ("two/b.h5", "f4", 4)]:
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("x", (3, width), dtype)
    with h5py.File(folder / "cells.mat", "w", userblock_size=512) as file:
        file["x"] = np.ones(3)
        file["x"].attrs["MATLAB_class"] = np.bytes_(b"cell")
    return {
        "dates.zarr": r"dates\.zarr holds datetime64\[s\]",
        "codec.zarr": r"codec\.zarr .*pcodec",
        "cells.mat": "cell array of MATLAB",
        "references.h5": "holds references",
        "fields.h5": "long doubles",
        "two": "can't be one dataset",
        "two_arrays": "can't be one dataset",
    }


def test_what_does_not_open_is_not_printed(tmp_path: Path) -> None:
    for name, said in write_unreadable(tmp_path).items():
        report = inspect(tmp_path / name)
        assert report.opens_as is None
        assert not report.advice
        assert any(re.search(f"it can't be opened: .*{said}", note) for note in report.notes)
        with pytest.raises(FormatError, match=said):
            open_dataset(tmp_path / name)


def test_long_doubles_open_as_another_dtype(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.ones((3, 2), np.longdouble)
    np.save(tmp_path / "a.npy", np.ones((3, 2), np.clongdouble))
    for name, dtype in (("a.h5", torch.float64), ("a.npy", torch.complex128)):
        with opened(inspect(tmp_path / name)) as dataset:
            assert dataset[1].dtype == dtype


def test_content_comes_before_the_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.jpg", "w") as file:
        file["data"] = np.zeros((4, 3))
    report = inspect(tmp_path / "a.jpg")
    assert (report.format, report.samples) == ("HDF5", 4)
    assert "its name says images" in report.notes[-1]
    os.rename(tmp_path / "a.jpg", tmp_path / "a")
    assert inspect(tmp_path / "a").samples == 4
    (tmp_path / "b").write_bytes(b"MATLAB 5.0" + bytes(3))
    report = inspect(tmp_path / "b")
    assert (report.format, report.stored) == ("MATLAB 5", 13)
    assert "-v7.3" in report.notes[0]
    (tmp_path / "d").write_bytes(b"\x07\x08\x09" * 99)
    assert inspect(tmp_path / "d").format == "a file of no known format"


@pytest.mark.slow
def test_what_is_not_there_or_never_ends(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.h5", f"{tmp_path}/*.h5"):
        with pytest.raises(DataNotFoundError):
            inspect(missing)
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(ConfigError, match=r"pipe\.h5 is a pipe"):
        inspect(tmp_path / "pipe.h5")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/a.h5"
        with pytest.raises(RemoteError, match="deadline=1"):
            inspect(url, reach=RemoteOptions(retries=1, deadline=1.0))


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"x")
    (tmp_path / "a.h5").chmod(0)
    with pytest.raises(AccessError, match=r"a\.h5"):
        inspect(tmp_path / "a.h5")


def test_a_file_that_is_open_for_writing_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    code = f"import h5py, sys; f = h5py.File({str(path)!r}, 'w'); f['data'] = [1]; "
    code += "print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with pytest.raises(AccessError, match="another process has it open for writing"):
            inspect(path)
        writer.communicate(timeout=60)
    assert inspect(path).samples == 1


def test_arrays_of_two_kinds_are_noted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((6, 2))
    assert not inspect(tmp_path).notes
    zarr.create_array(tmp_path / "b.zarr", data=np.zeros((6, 2)))
    report = inspect(tmp_path)
    assert report.samples == 6
    assert "1 HDF5 file (a.h5) and 1 Zarr store (b.zarr)" in report.notes[-1]
    with pytest.raises(ConfigError) as refused:
        open_dataset(tmp_path)
    assert str(refused.value) == report.notes[-1]
