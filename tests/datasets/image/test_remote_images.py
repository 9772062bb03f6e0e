"""Images behind a server that fails now and then."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import ImageDataset
from tests.data.make import make_photos
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos")
    return tmp_path / "photos"


def fetched(server: RangeServer) -> int:
    return len(server.counts()["ranges"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_is_fetched_once_and_kept(
    photos: Path, tmp_path: Path, make_loader: Any, workers: int
) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*") if path.is_file())
    here = [
        sample[0]
        for sample in ImageDataset([photos / name for name in names], targets=None, image_size=16)
    ]
    options: Any = {
        "targets": None,
        "image_size": 16,
        "cache_dir": tmp_path / "cache",
        "disk_cache_size": "10MB",
    }
    with RangeServer(photos) as server:
        for run in range(2):  # a second job finds what the first one kept
            dataset = ImageDataset([f"{server.url}/{name}" for name in names], **options)
            loader = make_loader(dataset, batch_size=4, num_workers=workers, shuffle=False)
            server.counts()
            for epoch in range(2):
                given = torch.cat([batch for batch, _ in loader])
                assert all(map(torch.equal, given, here))
                assert fetched(server) == (len(names) if run == epoch == 0 else 0)
            stats = loader.get_stats()
            assert stats["disk_hits"] >= len(names) and stats.get("disk_damaged", 0) == 0
            assert "disk cache:" in dataset.explain() and "10.0 MB" in dataset.explain()
            loader.close()
            dataset.close()
        mine = here[0]
        (photos / names[0]).write_bytes((photos / names[1]).read_bytes())  # a new version
        dataset = ImageDataset([f"{server.url}/{name}" for name in names], **options)
        assert torch.equal(dataset[0][0], here[1]) and not torch.equal(dataset[0][0], mine)
        dataset.close()


def test_the_cache_may_be_damaged_or_deleted_while_running(photos: Path, tmp_path: Path) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*") if path.is_file())[
        :6
    ]
    here = [
        sample[0]
        for sample in ImageDataset([photos / name for name in names], targets=None, image_size=16)
    ]
    cache = tmp_path / "cache"
    with RangeServer(photos) as server:
        urls = [f"{server.url}/{name}" for name in names]
        with ImageDataset(
            urls, targets=None, image_size=16, cache_dir=cache, disk_cache_size="10MB"
        ) as dataset:
            for block in (None, "flip", "cut", "folder"):
                files = list(cache.rglob("*.blk"))
                assert len(files) == (0 if block is None else len(names))
                for file in files:
                    content = bytearray(file.read_bytes())
                    content[len(content) // 2] ^= 1
                    file.write_bytes(content if block == "flip" else content[:-1])
                if block == "folder":
                    shutil.rmtree(cache)
                server.counts()
                assert all(
                    torch.equal(image, right)
                    for (image, _), right in zip(dataset, here, strict=True)
                )
                assert fetched(server) == len(names)
