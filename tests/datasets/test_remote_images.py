"""Images behind a server that fails now and then."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import ImageDataset, SampleError
from tests.data.make import make_photos
from tests.servers.ranges import RangeServer


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos")
    return tmp_path / "photos"


def test_of_faults_nothing_is_seen_but_the_count(photos: Path, make_loader: Any) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*") if path.is_file())
    here = ImageDataset([photos / name for name in names], targets=None, image_size=16)
    with RangeServer(photos) as server:
        urls = [f"{server.url}/{name}" for name in names]
        there = ImageDataset(urls, targets=None, image_size=16, retries=30, deadline=60)
        server.set(faults={"500": 0.1, "short": 0.05, "429": 0.05}, seed=4)
        for workers in (0, 2):
            loader = make_loader(there, batch_size=4, num_workers=workers, shuffle=False)
            expected = make_loader(here, batch_size=4, num_workers=0, shuffle=False)
            assert all(torch.equal(a[0], b[0]) for a, b in zip(loader, expected, strict=True))
            assert loader.get_stats()["retries"] > 0
            loader.close()
        there.close()


def test_a_server_that_only_fails(photos: Path) -> None:
    with RangeServer(photos) as server:
        name = next(path for path in photos.rglob("*.jpg")).relative_to(photos)
        dataset = ImageDataset([f"{server.url}/{name}"], targets=None, retries=2, deadline=20)
        server.set(faults={"503": 1})
        with pytest.raises(SampleError, match=r"jpg: 3 attempts in .* the server says 503"):
            dataset[0]
        dataset.close()
