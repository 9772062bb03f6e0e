"""The contract, run against headrace's own datasets and one of the kind that users write."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import BaseDataset, HDF5Dataset, ImageDataset, Source
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
        return ImageDataset(bad_photos(self.path.parent / "bad-photos"), image_size=32, **options), [2, 13]


class TestImageFolderResized(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, photos: Path) -> None:
        self.path = photos

    def make(self, **options: Any) -> BaseDataset:
        return ImageDataset(self.path, image_size=(24, 32), transform_input="numpy", **options)


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
        return HDF5Dataset(self.path, "data", "labels", **options)


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


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (1, 3), (3, 1, 2)], ids=str)
def test_tensors_are_the_same_however_they_lie(shape: tuple[int, ...]) -> None:
    dense = torch.arange(64.0).as_strided(shape, [1] * len(shape)).clone()
    spread = torch.zeros([extent * 2 for extent in shape])[tuple(slice(None, None, 2) for _ in shape)]
    spread.copy_(dense)
    assert same(dense, spread) and same(spread, dense) and not same(dense.double(), spread)
    assert not dense.numel() or not same(dense, spread + 1)
