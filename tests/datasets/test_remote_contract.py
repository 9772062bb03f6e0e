"""The contract of remote datasets, format by format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

from headrace import HDF5Dataset, ImageDataset, StreamingDataset, TextDataset, ZarrDataset, pack
from tests.data.labelled import make_coco, make_pair
from tests.data.make import make_photos, make_tar
from tests.datasets.remote_contract import RemoteDatasetContract
from tests.datasets.shards.test_streaming import IN_MODE
from tests.datasets.text.chat_tokenizer import ChatTokenizer

ROWS = np.random.default_rng(0).integers(0, 99, (60, 40), np.int32)


@pytest.mark.slow
class TestImages(RemoteDatasetContract):
    names = tuple(f"{number}.jpg" for number in range(12))
    has_index = asks_when_opened = is_versioned = False

    def write(self, folder: Path) -> None:
        photos = sorted(make_photos(folder / "photos", size=(24, 16)).rglob("*.jpg"))
        for number, name in enumerate(self.names):
            (folder / name).write_bytes(photos[number % len(photos)].read_bytes())

    def make(self, paths: list[str], **options: Any) -> ImageDataset:
        return ImageDataset(paths, targets=None, image_size=8, **options)


@pytest.mark.slow
class TestMasks(RemoteDatasetContract):
    names = (
        *(f"images/{number}.png" for number in range(12)),
        *(f"masks/{number}.png" for number in range(12)),
    )
    has_index = asks_when_opened = is_versioned = False

    def write(self, folder: Path) -> None:
        for number in range(12):
            for part, array in zip(
                ("images", "masks"), make_pair(number, (24, 16))[:2], strict=True
            ):
                (folder / part).mkdir(exist_ok=True)
                Image.fromarray(array).save(folder / part / f"{number}.png")

    def make(self, paths: list[str], **options: Any) -> ImageDataset:
        return ImageDataset(
            paths[:12],
            targets=paths[12].replace("masks/0.png", "masks/{0..11}.png"),
            image_size=8,
            **options,
        )


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


class TestTextFiles(RemoteDatasetContract):
    names = tuple(f"{number}.txt" for number in range(8))
    has_index = asks_when_opened = is_versioned = False

    def write(self, folder: Path) -> None:
        for number, name in enumerate(self.names):
            (folder / name).write_text(f"the mill wheel {number}\n" * (number + 1))

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="file", **options)


@pytest.mark.slow
class TestLines(TestTextFiles):
    has_index = asks_when_opened = is_versioned = True

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 100)

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="line", **{"progress": False, **options})


@pytest.mark.slow
class TestRecords(TestLines):
    names = ("a.jsonl", "b.csv")

    def write(self, folder: Path) -> None:
        (folder / "a.jsonl").write_text(
            "".join(json.dumps({"text": f"row {n}", "n": n}) + "\n" for n in range(30))
        )
        (folder / "b.csv").write_text(
            "n,text\n" + "".join(f'{n},"a ""{n}""\n{n}"\n' for n in range(15))
        )

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="record", **{"progress": False, **options})


@pytest.mark.slow
class TestChats(TestLines):
    names = ("a.jsonl", "b.jsonl")

    def write(self, folder: Path) -> None:
        for name in self.names:
            chats = (
                [
                    {"role": "user", "content": "x" * n},
                    {"role": "assistant", "content": f"{name} {n}"},
                ]
                for n in range(25)
            )
            (folder / name).write_text(
                "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
            )

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(
            paths, unit="chat", tokenizer=ChatTokenizer(), **{"progress": False, **options}
        )


@pytest.mark.slow
class TestTokens(RemoteDatasetContract):
    names = ("tokens.h5",)

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 300)

    def write(self, folder: Path) -> None:
        (folder / "a.jsonl").write_text(
            "".join(json.dumps({"text": "wheel " * (n % 5)}) + "\n" for n in range(60))
        )
        with TextDataset(
            folder / "a.jsonl", unit="record", cache_dir=folder / "cache", progress=False
        ) as dataset:
            pack(dataset, folder / "tokens.h5", workers=1, progress=False)

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths[0], max_length=16, packing=True, **{"progress": False, **options})


class TestHDF5(RemoteDatasetContract):
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
class TestZarrChunksAlongAnotherAxis(TestZarrChunks):
    data = tuple(f"a.zarr/c/{number}" for number in ("0/0", "0/1"))

    def write(self, folder: Path) -> None:
        zarr.create_array(folder / "a.zarr", data=ROWS, chunks=(len(ROWS), 20))

    def make(self, paths: list[str], **options: Any) -> ZarrDataset:
        return ZarrDataset(paths[0], axis=1, **options)


@pytest.mark.slow
class TestZarrZip(TestZarrShards):
    names = ("a.zarr.zip",)
    data = ()

    def write(self, folder: Path) -> None:
        with zarr.storage.ZipStore(folder / "a.zarr.zip", mode="w") as store:
            zarr.create_array(store, data=ROWS, chunks=(4, 40))


@pytest.mark.slow
class TestTarShards(RemoteDatasetContract):
    names = ("0.tar", "1.tar", "2.tar")

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.storage.blocks.LONGEST", 8 << 10)

    def write(self, folder: Path) -> None:
        for name in self.names:
            make_tar(
                folder / name,
                [
                    (f"{name[0]}{n:02d}.{kind}", b"%d" % n)
                    for n in range(20)
                    for kind in ("cls", "txt")
                ],
            )

    def make(self, paths: list[str], **options: Any) -> StreamingDataset:
        mode = options.pop("loading_mode", "streaming")
        return IN_MODE[mode](paths, **options)
