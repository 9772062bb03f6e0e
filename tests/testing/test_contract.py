"""The contract, run against headrace's own datasets and one of the kind that users write."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import BaseDataset, HDF5Dataset, ImageDataset, Source, ZarrDataset
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.make import make_photos


def bad_photos(folder: Path) -> Path:
    """Photographs of which numbers 2 and 13 are cut short."""
    if not folder.exists():
        make_photos(folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        for path in (files[2], files[13]):
            path.write_bytes(path.read_bytes()[:100])
    return folder


class TestImageFolder(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, photos: Path) -> None:
        self.path = photos

    def make(self, **options: Any) -> BaseDataset:
        return ImageDataset(self.path, **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return ImageDataset(
            bad_photos(self.path.parent / "bad-photos"), image_size=32, **options
        ), [2, 13]


@pytest.mark.slow
class TestHDF5Rows(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-rows.h5"
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                rows = np.random.default_rng(3).integers(0, 255, (37, 5, 4), dtype=np.uint8)
                file.create_dataset("data", data=rows)
                file.create_dataset("labels", data=np.arange(37) % 4)

    def make(self, **options: Any) -> BaseDataset:
        return HDF5Dataset(self.path, "data", target_name="labels", **options)


class Squares(Source):
    """Records made of arithmetic, in blocks of five, some of which can't be read."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad = set(bad)

    def __len__(self) -> int:
        return 42

    def read(self, indices: Sequence[int]) -> list[bytes]:
        if self.bad & set(indices):
            raise OSError("a square that can't be read")
        return [np.array([i, i * i], "<i8").tobytes() for i in indices]

    def blocks(self) -> np.ndarray[Any, Any]:
        return np.array([5] * 8 + [2])

    def fingerprint(self) -> str:
        return "squares-42"


class SquareDataset(BaseDataset):
    def __init__(self, bad: Sequence[int] = (), **options: Any) -> None:
        super().__init__(Squares(bad), **options)

    def decode(self, record: bytes) -> Any:
        return np.frombuffer(record, "<i8").copy()


class TestOwnFormat(DatasetContract):
    def make(self, **options: Any) -> BaseDataset:
        return SquareDataset(**options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return SquareDataset(bad=[7, 30], **options), [7, 30]


def test_what_is_the_same_has_dtype_shape_and_values() -> None:
    rows = np.zeros((2, 3), np.int32)
    assert same(rows, rows.copy())
    for other in (rows.view(np.uint32), rows.astype("f4"), rows.reshape(3, 2), rows + 1):
        assert not same(rows, other)
    assert not same(torch.zeros(3, dtype=torch.int32), torch.zeros(3))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 1, 2)], ids=str)
def test_tensors_are_the_same_however_they_lie(shape: tuple[int, ...]) -> None:
    dense = torch.arange(64.0).as_strided(shape, [1] * len(shape)).clone()
    every_other = tuple(slice(None, None, 2) for _ in shape)
    spread = torch.zeros([extent * 2 for extent in shape])[every_other]
    spread.copy_(dense)
    assert same(dense, spread) and same(spread, dense) and not same(dense.double(), spread)


class TestHDF5Chunks(DatasetContract):
    """Compressed chunks of several rows, some of them cut."""

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-chunks.h5"
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                rows = np.random.default_rng(3).integers(0, 255, (37, 5, 4), dtype=np.uint8)
                file.create_dataset(
                    "data",
                    data=rows,
                    chunks=(4, 3, 4),
                    compression="gzip",
                    shuffle=True,
                    fletcher32=True,
                )

    def make(self, **options: Any) -> BaseDataset:
        return HDF5Dataset(self.path, "data", **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        bad = self.path.with_name("contract-bad-chunks.h5")
        if not bad.exists():
            bad.write_bytes(self.path.read_bytes())
            with h5py.File(bad) as file:
                found: list[Any] = []
                file["data"].id.chunk_iter(found.append)
            place = next(info.byte_offset for info in found if info.chunk_offset == (8, 3, 0))
            with open(bad, "r+b") as file:
                file.seek(place + 5)
                byte = file.read(1)[0]
                file.seek(place + 5)
                file.write(bytes([byte ^ 0x10]))
        return HDF5Dataset(bad, "data", **options), [8, 9, 10, 11]


@pytest.mark.slow
class TestHDF5Strings(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-strings.h5"
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                file["words"] = [f"word {number} " * (number % 5) for number in range(30)]
                file["numbers"] = np.arange(30.0)
                file["pairs"] = np.array(
                    [(number, number / 3) for number in range(30)], [("a", ">i4"), ("b", "f8")]
                )

    def make(self, **options: Any) -> BaseDataset:
        return HDF5Dataset(self.path, ["words", "numbers", "pairs"], **options)


@pytest.mark.slow
class TestZarrRows(DatasetContract):
    """Rows in shards, in a version 3 store."""

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-rows.zarr"
        if not self.path.exists():
            root = zarr.open_group(self.path, mode="w")
            rows = np.random.default_rng(3).integers(0, 255, (37, 5, 4), dtype=np.uint8)
            root.create_array(
                "data", shape=rows.shape, dtype="u1", chunks=(2, 5, 4), shards=(8, 5, 4)
            )[...] = rows
            root.create_array("labels", shape=(37,), dtype="i8", chunks=(10,))[...] = (
                np.arange(37) % 4
            )

    def make(self, **options: Any) -> BaseDataset:
        return ZarrDataset(self.path, "data", target_name="labels", **options)


class TestZarrPatches(DatasetContract):
    """Patches of a volume with labels, padded."""

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-volume.zarr"
        if not self.path.exists():
            root, random = (
                zarr.open_group(self.path, mode="w", zarr_format=2),
                np.random.default_rng(3),
            )
            volume, labels = (
                random.integers(0, 255, (2, 9, 11, 13)),
                random.integers(0, 5, (9, 11, 13)),
            )
            root.create_array("volume", shape=volume.shape, dtype="i2", chunks=(1, 4, 5, 6))[
                ...
            ] = volume
            root.create_array("labels", shape=labels.shape, dtype="u1", chunks=(4, 4, 4))[...] = (
                labels
            )

    def make(self, **options: Any) -> BaseDataset:
        return ZarrDataset(
            self.path,
            "volume",
            target_name="labels",
            patch_shape=(4, 4, 4),
            stride=3,
            edges="pad",
            **options,
        )
