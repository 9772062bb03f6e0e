"""The contract of remote datasets: what is read by ranges, whole files, and shards. The sources of
other formats have theirs in tests/storage/, and test_s3.py reads all formats.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, StreamingDataset, TextDataset
from tests.data.make import make_tar
from tests.datasets.remote_contract import RemoteDatasetContract, RemoteFaultContract
from tests.datasets.shards.test_streaming import IN_MODE

ROWS = np.random.default_rng(0).integers(0, 99, (60, 40), np.int32)


@pytest.mark.slow
class TestTextFiles(RemoteFaultContract):
    """Whole files."""

    names = tuple(f"{number}.txt" for number in range(8))
    has_index = asks_when_opened = is_versioned = False

    def write(self, folder: Path) -> None:
        for number, name in enumerate(self.names):
            (folder / name).write_text(f"the mill wheel {number}\n" * (number + 1))

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="file", **options)


class TestHDF5(RemoteFaultContract):
    """Rows that are decoded here, beside such that h5py reads."""

    names = ("a.h5", "b.h5")

    def write(self, folder: Path) -> None:
        for name in self.names:
            with h5py.File(folder / name, "w") as file:
                file.create_dataset("direct", data=ROWS, chunks=(8, 40), compression="gzip")
                file.create_dataset("library", data=ROWS, chunks=(8, 40), compression="lzf")
                file["targets"] = np.arange(60)

    def make(self, paths: list[str], **options: Any) -> HDF5Dataset:
        return HDF5Dataset(paths, ["direct", "library"], target_name="targets", **options)


@pytest.mark.slow
class TestTarShards(RemoteDatasetContract):
    names = ("0.tar", "1.tar", "2.tar")

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 8 << 10)

    def write(self, folder: Path) -> None:
        for name in self.names:
            kinds = itertools.product(range(20), ("cls", "txt"))
            members = [(f"{name[0]}{n:02d}.{kind}", b"%d" % n) for n, kind in kinds]
            make_tar(folder / name, members)

    def make(self, paths: list[str], **options: Any) -> StreamingDataset:
        mode = options.pop("loading_mode", "streaming")
        return IN_MODE[mode](paths, **options)
