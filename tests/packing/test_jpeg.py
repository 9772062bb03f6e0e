"""Re-encoding: smaller images of equal aspect, and never larger files."""

from __future__ import annotations

import io
import itertools
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from headrace import ImageDataset, pack
from headrace.errors import ConfigError, HeadraceWarning, SampleError
from headrace.packing import verify
from headrace.packing.jpeg import reencoded
from headrace.packing.options import StoreOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of 300 x 200 and one of 60 x 40, some PNG, in two classes."""
    root, rng = tmp_path_factory.mktemp("large"), np.random.default_rng(3)
    for number in range(12):
        small = rng.integers(0, 255, (4, 6, 3), np.uint8)
        image = Image.fromarray(small).resize(
            (60, 40) if number == 5 else (300, 200), Image.Resampling.BICUBIC
        )
        path = root / "ab"[number % 2] / f"{number:02d}{'.png' if number % 3 == 0 else '.jpg'}"
        path.parent.mkdir(exist_ok=True)
        image.save(path, quality=95)
    return root


def stored(path: Path) -> list[bytes]:
    with h5py.File(path) as file:
        offsets = file["offsets"][:]
        return [file["data"][a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def test_images_become_smaller(folder: Path, tmp_path: Path) -> None:
    out = pack(folder, tmp_path / "out.h5", store="jpeg", max_size=100, quality=80)
    with (
        ImageDataset(folder, image_size=(50, 75)) as source,
        ImageDataset(out, image_size=(50, 75)) as packed,
    ):
        assert packed.classes == source.classes and np.array_equal(packed.targets, source.targets)
        for index, ((path, _), data) in enumerate(
            zip(source.samples, stored(Path(out)), strict=True)
        ):
            image = Image.open(io.BytesIO(data))
            assert (
                image.size == ((60, 40) if "05" in path else (100, 67))
                and len(data) <= Path(path).stat().st_size
            )
            assert np.abs(packed.pixels_of(index).astype(int) - source.pixels_of(index)).mean() < 6
    assert verify(out).ok


def test_larger_ones_stay_as_they_are(folder: Path, tmp_path: Path) -> None:
    out = pack(folder, tmp_path / "out.h5", store="jpeg", quality=100)
    with ImageDataset(folder) as source:
        for (path, _), data in zip(source.samples, stored(Path(out)), strict=True):
            original = Path(path).read_bytes()
            assert data == original or len(data) < len(original)
            assert data == original or not path.endswith(".jpg")


def test_grey_is_grey() -> None:
    image = Image.fromarray(np.arange(120 * 90, dtype=np.uint32).reshape(90, 120).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=0)
    made = Image.open(io.BytesIO(reencoded(buffer.getvalue(), StoreOptions("jpeg", 60, 90), "L")))
    assert made.mode == "L" and made.size == (60, 45) and made.format == "JPEG"


def test_parts_have_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"store": "jpeg", "max_size": 100, "quality": 80}
    whole = stored(Path(pack(folder, tmp_path / "out.h5", **how)))
    out = Path(pack(folder, tmp_path / "out", shard_size=6000, processes=2, **how))
    assert [data for path in sorted(out.glob("part-*.h5")) for data in stored(path)] == whole
    assert len(list(out.glob("part-*.h5"))) > 2
    with ImageDataset(out, image_size=20) as packed:
        assert len(packed) == 12
    with pytest.raises(Exception, match="jpeg"):
        pack(folder, out, shard_size=6000, store="jpeg", max_size=90, quality=80)


def test_unreadable_images(folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    (source / "a" / "04.jpg").write_bytes((source / "a" / "04.jpg").read_bytes()[:300])
    with pytest.raises(SampleError, match=r"04\.jpg"):
        pack(source, tmp_path / "out.h5", store="jpeg")
    with pytest.warns(HeadraceWarning, match=r"04\.jpg"):
        out = pack(ImageDataset(source, on_error="skip"), tmp_path / "out.h5", store="jpeg")
    assert len(stored(Path(out))) == 11 and [path.name for path in tmp_path.iterdir()] in (
        ["out.h5", "source"],
        ["source", "out.h5"],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "jpeg", "max_size": 0}, "max_size must be"),
        ({"store": "jpeg", "quality": 101}, "quality must be"),
        ({"quality": 80}, "are for store='jpeg'"),
        ({"store": "webp"}, "'encoded', 'jpeg' or 'decoded'"),
    ],
)
def test_bad_arguments(folder: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack(folder, tmp_path / "out.h5", **options)
