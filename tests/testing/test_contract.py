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


RANDOM = np.random.default_rng(3)
PIXELS = RANDOM.integers(0, 255, (37, 5, 4), dtype=np.uint8)
CHUNKS: dict[str, Any] = {
    **{"chunks": (4, 3, 4), "compression": "gzip"},
    **{"shuffle": True, "fletcher32": True},
}
PATCHES = {"patch_shape": (4, 4, 4), "stride": 3, "edges": "pad"}
FORMATS: dict[str, Any] = {
    "rows of HDF5": (HDF5Dataset, "a.h5", "rows", {"target_name": "label"}),
    "strings and pairs": (HDF5Dataset, "a.h5", ["words", "numbers", "pairs"], {}),
    "shards of Zarr": (ZarrDataset, "a.zarr", "rows", {"target_name": "label"}),
    "patches": (ZarrDataset, "a.zarr", "volume", {"target_name": "labels", **PATCHES}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of HDF5 and Zarr; of HDF5 another one, in which a chunk is damaged."""
    folder = tmp_path_factory.mktemp("contract")
    pairs = [(number, number / 3) for number in range(30)]
    with h5py.File(folder / "a.h5", "w") as file:
        file["rows"] = PIXELS
        file["label"] = np.arange(37) % 4
        chunks = file.create_dataset("chunks", data=PIXELS, **CHUNKS)
        found: list[Any] = []
        chunks.id.chunk_iter(found.append)
        file["words"] = [f"word {number} " * (number % 5) for number in range(30)]
        file["numbers"] = np.arange(30.0)
        file["pairs"] = np.array(pairs, [("a", ">i4"), ("b", "f8")])
    place = next(info.byte_offset for info in found if info.chunk_offset == (8, 3, 0))
    content = bytearray((folder / "a.h5").read_bytes())
    content[place + 5] ^= 0x10
    (folder / "bad.h5").write_bytes(content)
    root = zarr.open_group(folder / "a.zarr", mode="w")
    root.create_array("rows", data=PIXELS, chunks=(2, 5, 4), shards=(8, 5, 4))
    root.create_array("label", data=np.arange(37) % 4, chunks=(10,))
    volume = RANDOM.integers(0, 255, (2, 9, 11, 13)).astype("i2")
    root.create_array("volume", data=volume, chunks=(1, 4, 5, 6))
    labels = RANDOM.integers(0, 5, (9, 11, 13)).astype("u1")
    root.create_array("labels", data=labels, chunks=(4, 4, 4))
    return folder


@pytest.mark.quick_every(2)
class TestHDF5Chunks(DatasetContract):
    """Compressed chunks of several rows, some of them cut."""

    @pytest.fixture(autouse=True)
    def _data(self, files: Path) -> None:
        self.path = files

    def make(self, **options: Any) -> BaseDataset:
        return HDF5Dataset(self.path / "a.h5", "chunks", **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return HDF5Dataset(self.path / "bad.h5", "chunks", **options), [8, 9, 10, 11]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
class TestFormats(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, files: Path, name: str) -> None:
        self.format, self.path = FORMATS[name], files

    def make(self, **options: Any) -> BaseDataset:
        of, file, names, how = self.format
        made: BaseDataset = of(self.path / file, names, **how, **options)
        return made
