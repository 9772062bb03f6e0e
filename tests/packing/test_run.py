"""Packing of images into one file: odd files, targets, what is left out, and what is refused.

That samples are those of the source: test_round_trips.py.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from headrace import HDF5Dataset, ImageDataset, pack
from headrace.errors import ConfigError, HeadraceWarning, SampleError, TargetExistsError
from headrace.packing import verify
from tests.data.make import READABLE, UNREADABLE, make_bad
from tests.packing.shared import check_same, images

pytestmark = pytest.mark.quick_every(2)

STORES = ("encoded", "decoded")


def leftovers(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def copy(photos: Path, tmp_path: Path) -> Path:
    """The photographs, to be changed."""
    return Path(shutil.copytree(photos, tmp_path / "in"))


@pytest.mark.parametrize("store", STORES)
def test_files_of_every_kind(store: str, tmp_path: Path) -> None:
    """Turned, grey, CMYK, 16 bits, many frames, names that are no UTF-8."""
    bad = make_bad(tmp_path / "odd")
    for kind in UNREADABLE:
        bad[kind].unlink()
    with images(tmp_path / "odd", targets=None) as source:
        assert len(source) >= len(READABLE)
        with images(pack(source, tmp_path / "out.h5", store=store)) as packed:
            check_same(packed, source)
            assert packed.targets is None and packed.classes == []


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_same_bytes_of_a_copy(store: str, photos: Path, copy: Path, tmp_path: Path) -> None:
    first = pack(images(photos), tmp_path / "first.h5", store=store, workers=1)
    time.sleep(1.1)  # HDF5 notes whole seconds, where it does
    second = pack(images(copy), tmp_path / "second.h5", store=store, workers=3)
    assert first.read_bytes() == second.read_bytes()
    assert pack(first, tmp_path / "third.h5").read_bytes() == first.read_bytes()
    if store == "encoded":
        rows = HDF5Dataset(first, target_name="targets")
        assert pack(rows, tmp_path / "fourth.h5").read_bytes() == first.read_bytes()
    assert str(photos).encode() not in first.read_bytes()


def test_no_samples(photos: Path, tmp_path: Path) -> None:
    nothing = images(photos).subset([])
    for store in STORES:
        out = pack(nothing, tmp_path / f"{store}.h5", store=store)
        assert len(images(out)) == 0 and verify(out).ok
    with pytest.raises(ConfigError):
        pack(nothing, tmp_path / "out", shard_size=6000)


# --- targets --------------------------------------------------------------------------------------


def test_targets(photos: Path, tmp_path: Path) -> None:
    kinds: dict[type, Callable[[str], Any]] = {
        float: lambda path: len(path) / 3,
        int: lambda path: os.path.basename(path)[:5],
        bool: lambda path: path.endswith("g"),
        np.ndarray: lambda path: np.array([len(path), 0.5], np.float32),
    }
    for kind, target in kinds.items():
        source = images(photos, targets=target)
        packed = images(pack(source, tmp_path / f"{kind.__name__}.h5"))
        check_same(packed, source)
        assert type(packed[0][1]) is kind and packed.classes == source.classes


def test_targets_that_no_file_can_give_back(photos: Path, tmp_path: Path) -> None:
    def ragged(path: str) -> list[int]:
        return [1] * (2 if "circle" in path else 3)

    refused: list[Callable[[str], Any]] = [
        *(ragged, lambda path: {"a": ragged(path)}, lambda path: None, lambda path: [1, 2])
    ]
    for target in refused:
        with pytest.raises(ConfigError, match="targets=None"):
            pack(images(photos, targets=target), tmp_path / "out.h5")
    assert leftovers(tmp_path) == []


def test_many_class_names(photos: Path, tmp_path: Path) -> None:
    """More than the 64 kB that an attribute could hold in HDF5's oldest format."""
    source = images(photos)
    source.classes = [f"a class of a long name, number {number:05}" for number in range(20_000)]
    out = pack(source, tmp_path / "out.h5")
    assert images(out).classes == source.classes and verify(out).ok
    source.classes = tuple(source.classes)  # as others may have them
    assert images(pack(source, tmp_path / "parts", shard_size="1GB")).classes == [*source.classes]


# --- images that are encoded again ----------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of 300 x 200 and one of 60 x 40, each third a PNG."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(3)
    for number in range(12):
        size = (60, 40) if number == 5 else (300, 200)
        image = Image.fromarray(rng.integers(0, 255, (4, 6, 3), np.uint8)).resize(size)
        image.save(folder / f"{number:02d}{'.png' if number % 3 == 0 else '.jpg'}", quality=95)
    return folder


def stored(path: Path) -> list[bytes]:
    with h5py.File(path) as file:
        edges = itertools.pairwise(file["offsets"])
        return [file["data"][begin:end].tobytes() for begin, end in edges]


def test_images_become_smaller(large: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"store": "jpeg", "max_size": 100, "quality": 80}
    out = pack(ImageDataset(large, targets=None), tmp_path / "out.h5", **how)
    with images(large, targets=None) as source, images(out) as packed:
        for index, data in enumerate(stored(out)):
            image = Image.open(io.BytesIO(data))
            assert image.size == ((60, 40) if index == 5 else (100, 67))
            assert len(data) <= Path(source.samples[index][0]).stat().st_size
            one, other = (
                dataset.value_source.read([index], dataset.access())[0].astype(int)
                for dataset in (packed, source)
            )
            assert np.abs(one - other).mean() < 6
    parts = pack(source, tmp_path / "parts", shard_size=6000, processes=2, **how)
    assert [data for path in sorted(parts.glob("*.h5")) for data in stored(path)] == stored(out)
    with pytest.raises(TargetExistsError):
        pack(source, parts, shard_size=6000, store="jpeg", max_size=90, quality=80)


# --- unreadable images ----------------------------------------------------------------------------


def test_a_header_is_all_that_may_be_checked(copy: Path, tmp_path: Path) -> None:
    shutil.copy(make_bad(tmp_path / "odd")["truncated_jpeg"], copy / "gradient" / "a.jpg")
    with pytest.raises(SampleError, match=r"a\.jpg"):
        pack(copy, tmp_path / "out.h5")
    out = pack(copy, tmp_path / "out.h5", check="header")
    assert len(images(out)) == 25 and verify(out).ok
    (copy / "noise" / "z.jpg").write_bytes(b"")
    with pytest.raises(SampleError, match=r"z\.jpg"):
        pack(copy, tmp_path / "other.h5", check="header")


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("on_error", ["skip", lambda index, path, error: torch.zeros(3, 20, 30)])
def test_samples_are_not_made_up(on_error: Any, tmp_path: Path) -> None:
    """None left of none, and a callable that would give one."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"")
    with pytest.raises(SampleError, match=r"a\.jpg"):
        pack(images(tmp_path / "in", targets=None, on_error=on_error), tmp_path / "out.h5")
    assert leftovers(tmp_path) == ["in"]


def test_a_file_that_changes_while_it_is_packed(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = images(copy)
    path = Path(source.samples[7][0])
    sizes = source.sample_source.sizes()
    # as they were when packing began
    monkeypatch.setattr(source.sample_source, "sizes", lambda indices: sizes[indices])
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(SampleError, match=rf"{path.name} .* {sizes[7]:,} .*{sizes[7] + 4:,}"):
        pack(source, tmp_path / "out.h5")
    path.unlink()
    with pytest.raises(SampleError, match=path.name):
        pack(source, tmp_path / "out.h5")
    assert leftovers(tmp_path) == ["in"]


# --- targets of packing, and options --------------------------------------------------------------


def test_an_existing_file_is_kept(photos: Path, tiny_photos: Path, tmp_path: Path) -> None:
    """Unless it may be replaced, and by a whole one."""
    out = pack(photos, tmp_path / "out.h5")
    before = out.read_bytes()
    with pytest.raises(TargetExistsError, match=r"out\.h5 .*--overwrite") as caught:
        pack(tiny_photos, out)
    assert isinstance(caught.value, FileExistsError) and out.read_bytes() == before
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jpg").write_bytes(b"")
    with pytest.raises(SampleError), warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        pack(tmp_path / "bad", out, overwrite=True)
    assert out.read_bytes() == before
    pack(tiny_photos, out, overwrite=True)
    assert len(ImageDataset(out)) == 4


def test_options_that_make_no_sense(photos: Path, tmp_path: Path) -> None:
    encoded = pack(photos, tmp_path / "e.h5")
    decoded = pack(images(photos), tmp_path / "d.h5", store="decoded")
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (photos, {"workers": 0}, "workers"),
        (photos, {"workers": "two", "dry_run": True}, "workers"),
        (photos, {"store": "webp"}, "'encoded', 'jpeg', 'decoded'"),
        (photos, {"store": "jpeg", "max_size": 0}, "max_size"),
        (photos, {"store": "jpeg", "quality": 101}, "quality"),
        (photos, {"quality": 80}, "store='jpeg'"),
        (images(photos), {"store": "decoded", "check": "header"}, "check"),
        (photos, {"check": "none"}, "check"),
        (ImageDataset(encoded, image_size=None), {"store": "decoded"}, "image_size="),
        (ImageDataset(decoded), {"store": "encoded"}, "store='decoded'"),
        (HDF5Dataset(decoded), {"store": "encoded"}, "store='decoded'"),
        (HDF5Dataset(encoded), {"store": "decoded"}, "ImageDataset"),
    ]
    for source, options, word in rows:
        with pytest.raises(ConfigError, match=word):
            pack(source, tmp_path / "out.h5", **options)
    assert leftovers(tmp_path) == ["d.h5", "e.h5"]
