"""What is no file with a size is refused by name, before anybody waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    AccessError,
    ConfigError,
    HDF5Dataset,
    ImageDataset,
    StreamingDataset,
    TableDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
    read_rows,
    verify,
)

OPENERS: dict[str, Callable[..., Any]] = {
    "a.h5": HDF5Dataset,
    "a.tar": StreamingDataset,
    "a.txt": TextDataset,
    "a.parquet": TableDataset,
    "a.npy": TableDataset,
    "a.jpg": ImageDataset,
    "a.zarr.zip": ZarrDataset,
    "a": open_dataset,
    "b.h5": lambda path: read_rows(path, "x", [0]),
    "c.h5": verify,
}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name, open_path in OPENERS.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(ConfigError, match=f"{name} is a pipe"):
            open_path(tmp_path / name)


def test_devices_and_files_without_a_size_are_refused() -> None:
    for open_path in (HDF5Dataset, TextDataset, TableDataset, open_dataset):
        with pytest.raises(ConfigError, match="/dev/zero is a device"):
            open_path("/dev/zero")
    for unit in ("file", "line") if os.path.exists("/proc/cpuinfo") else ():
        with pytest.raises(ConfigError, match="/proc/cpuinfo"):
            TextDataset("/proc/cpuinfo", unit=unit)


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may read everything")
def test_an_empty_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.h5").touch(0)
    with pytest.raises(AccessError, match=r"a\.h5"):
        HDF5Dataset(tmp_path / "a.h5")
