"""Images behind a server, kept on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace import ImageDataset
from headrace.testing.contract import same
from tests.data.make import make_photos
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow


def opened(paths: list[Any], **options: Any) -> ImageDataset:
    return ImageDataset(paths, targets=None, image_size=16, **options)


def fetched(server: RangeServer) -> int:
    return len(server.counts()["ranges"])


def test_a_file_is_fetched_once_and_kept(tmp_path: Path, make_loader: Any) -> None:
    photos = make_photos(tmp_path / "photos", per_class=4)
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.*"))
    here = [*opened([photos / name for name in names])]
    cache = tmp_path / "cache"
    options: Any = {"cache_dir": cache, "disk_cache_size": "10MB"}
    with RangeServer(photos) as server:
        urls = [f"{server.url}/{name}" for name in names]
        for run, workers in ((0, 2), (1, 0)):  # a second job finds what the first one kept
            dataset = opened(urls, **options)
            loader = make_loader(dataset, batch_size=4, num_workers=workers, shuffle=False)
            server.counts()
            for epoch in range(2):
                given = [(image, None) for images, _ in loader for image in images]
                assert same(given, here)
                assert fetched(server) == (len(names) if run == epoch == 0 else 0)
            stats = loader.get_stats()
            assert stats["disk_hits"] >= len(names)
            assert stats.get("disk_damaged", 0) == 0
            assert "disk cache:" in dataset.explain()
            loader.close()
            dataset.close()
        with opened(urls, **options) as dataset:  # the cache is damaged, or deleted, meanwhile
            for damage in ("flip", "cut", "folder"):
                files = list(cache.rglob("*.blk"))
                assert len(files) == len(names)
                for file in files:
                    content = bytearray(file.read_bytes())
                    content[len(content) // 2] ^= 1
                    file.write_bytes(content if damage == "flip" else content[:-1])
                if damage == "folder":
                    shutil.rmtree(cache)
                assert same([*dataset], here), damage
                assert fetched(server) == len(names), damage
        (photos / names[0]).write_bytes((photos / names[1]).read_bytes())  # a new version
        with opened(urls, **options) as dataset:
            assert same(dataset[0], here[1])
