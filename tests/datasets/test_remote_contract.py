"""The contract of remote datasets, format by format."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, ImageDataset, StreamingDataset, TextDataset, ZarrDataset, pack
from tests.data.labelled import make_coco
from tests.data.make import make_photos, make_tar
from tests.datasets.remote_contract import RemoteDatasetContract, RemoteFaultContract
from tests.datasets.shards.test_streaming import IN_MODE

ROWS = np.random.default_rng(0).integers(0, 99, (60, 40), np.int32)


@pytest.mark.slow
class TestAnnotatedImages(RemoteDatasetContract):
    data = tuple(f"images/{number:03d}.{('png', 'jpg')[number % 3 == 2]}" for number in range(12))
    names = (*data, "instances.json")
    has_index = is_versioned = False

    def write(self, folder: Path) -> None:
        make_coco(folder, 12)

    def make(self, paths: list[str], **options: Any) -> ImageDataset:
        return ImageDataset(paths[:12], targets=paths[12], image_size=8, **options)


@pytest.mark.slow
class TestPackedImages(RemoteDatasetContract):
    names = ("photos.h5",)

    def write(self, folder: Path) -> None:
        with ImageDataset(make_photos(folder / "photos", size=(24, 16)), image_size=8) as dataset:
            pack(dataset, folder / "photos.h5", workers=1, progress=False)

    def make(self, paths: list[str], **options: Any) -> ImageDataset:
        return ImageDataset(paths[0], **options)


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


@pytest.mark.slow
class TestRecords(RemoteDatasetContract):
    names = ("a.jsonl", "b.csv")

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 100)

    def write(self, folder: Path) -> None:
        lines = [json.dumps({"text": f"row {n}", "n": n}) + "\n" for n in range(30)]
        (folder / "a.jsonl").write_text("".join(lines))
        fields = [f'{n},"a ""{n}""\n{n}"\n' for n in range(15)]
        (folder / "b.csv").write_text("n,text\n" + "".join(fields))

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="record", **{"progress": False, **options})


@pytest.mark.slow
class TestTokens(RemoteDatasetContract):
    names = ("tokens.h5",)

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 300)

    def write(self, folder: Path) -> None:
        lines = [json.dumps({"text": "wheel " * (n % 5)}) + "\n" for n in range(60)]
        (folder / "a.jsonl").write_text("".join(lines))
        options: dict[str, Any] = {"cache_dir": folder / "cache", "progress": False}
        with TextDataset(folder / "a.jsonl", unit="record", **options) as dataset:
            pack(dataset, folder / "tokens.h5", workers=1, progress=False)

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths[0], max_length=16, packing=True, **{"progress": False, **options})


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
class TestZarrShards(RemoteDatasetContract):
    names = ("a.zarr",)
    data = tuple(f"a.zarr/c/{number}/0" for number in range(4))

    def write(self, folder: Path) -> None:
        zarr.create_array(folder / "a.zarr", data=ROWS, chunks=(4, 40), shards=(16, 40))

    def make(self, paths: list[str], **options: Any) -> ZarrDataset:
        return ZarrDataset(paths[0], **options)


@pytest.mark.slow
class TestZarrChunks(TestZarrShards):
    data = tuple(f"a.zarr/c/{number}/0" for number in range(15))
    has_index = is_versioned = False

    def write(self, folder: Path) -> None:
        zarr.create_array(folder / "a.zarr", data=ROWS, chunks=(4, 40))


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
