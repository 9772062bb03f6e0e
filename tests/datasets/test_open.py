"""open_dataset: which dataset opens a path."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import headrace
from headrace import (
    EpisodeDataset,
    HDF5Dataset,
    MemoryEfficientDataset,
    SparseDataset,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
    read_rows,
    write_index,
)
from headrace.errors import ConfigError, FormatError
from tests.data.make import make_shards
from tests.datasets.text.test_text import write


def test_tar_files_are_streamed(tmp_path: Path) -> None:
    folder = write(make_shards(tmp_path / "shards", (4, 3)), {"README.md": "which are shards"})
    with open_dataset(folder) as dataset:
        assert isinstance(dataset, StreamingDataset) and len(dataset) == 7
    for mode in ("lazy", "cached"):
        with MemoryEfficientDataset(folder, loading_mode=mode, progress=False) as dataset:
            assert [sample["__key__"] for sample in dataset] == [f"{n:06d}" for n in range(7)]
    with pytest.raises(FormatError):
        open_dataset(write(tmp_path / "packed", {"a.tar.gz": b"x"}))


def test_hidden_files_do_not_count(tmp_path: Path) -> None:
    hidden = {"._a.jpg": "", ".ipynb_checkpoints/b.jpg": "", ".cache/0.tar": ""}
    folder = write(tmp_path / "hidden", {"a.txt": "text", **hidden})
    assert type(open_dataset(folder)) is TextDataset


def test_a_folder_of_images_opens_in_few_steps(photos: Path) -> None:
    package = str(Path(headrace.__file__).parent)
    called: set[Any] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.add(frame.f_code)

    gc.collect()
    sys.setprofile(look)
    try:
        open_dataset(photos)
    finally:
        sys.setprofile(None)
    assert len(called) <= 60, sorted(code.co_qualname for code in called)


# -- HDF5 beside Zarr


def write_arrays(folder: Path, *names: str) -> Path:
    """Files of six rows: as their names say in HDF5 or Zarr."""
    rows = np.arange(12).reshape(6, 2)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".zarr"):
            zarr.open_group(folder / name, mode="w").create_array("data", data=rows)
        else:
            with h5py.File(folder / name, "w") as file:
                file["data"] = rows
    return folder


def read_first(path: Any) -> Any:
    return read_rows(path, "data", [0])


def test_both_kinds_are_named(tmp_path: Path) -> None:
    folder = write_arrays(tmp_path / "runs", "b.zarr", "a.h5", "c/d.h5")
    opens: list[Callable[[Any], Any]] = [open_dataset, SparseDataset, EpisodeDataset, read_first]
    for open_path in opens:
        for path in (folder, f"{folder}/*"):
            with pytest.raises(ConfigError) as refused:
                open_path(path)
            for named in ("HDF5 files (a.h5)", "Zarr stores (b.zarr)", "'*.h5' or '*.zarr'"):
                assert named in str(refused.value)
    with pytest.raises(ConfigError, match=r"holds HDF5 files \(a\.h5\) and Zarr"):
        SparseDataset([folder / "a.h5", folder / "b.zarr"])
    for opened in (open_dataset(f"{folder}/*.h5"), HDF5Dataset(f"{folder}/*.h5")):
        assert type(opened) is HDF5Dataset and len(opened) == 6
    for opened in (open_dataset(f"{folder}/*.zarr"), ZarrDataset(folder)):
        assert type(opened) is ZarrDataset and len(opened) == 6
    write(folder, {"notes.txt": "documented: texts come first"})
    assert type(open_dataset(folder)) is TextDataset


def test_what_is_no_data_does_not_count(tmp_path: Path) -> None:
    folder = write_arrays(tmp_path / "runs", "a.h5", "c.h5", ".cache.zarr", "deep/b.zarr")
    write_index(folder / "a.h5")
    with open_dataset(folder) as dataset:  # ZarrDataset finds no store deeper than that
        assert type(dataset) is HDF5Dataset and len(dataset) == 12
    with open_dataset(write_arrays(tmp_path / "stores", "a.zarr", "b.zarr")) as dataset:
        assert type(dataset) is ZarrDataset and len(dataset) == 12
