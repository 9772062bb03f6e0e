"""Warnings of Pillow name the file, once for each kind as Python shows them, on every way of
making a sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace import ImageDataset, MemoryEfficientDataset, RandomResizedCrop

OPTIONS: dict[str, dict[str, Any]] = {
    "decoded": {"image_size": 8},
    "own size": {"image_size": None},
    "cropped": {"transform": [RandomResizedCrop(8)]},
    "transformed": {"image_size": 8, "transform": lambda image: 0},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two images of which Pillow warns."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 30)).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    return tmp_path


@pytest.mark.parametrize("cls", [ImageDataset, MemoryEfficientDataset])
@pytest.mark.parametrize("options", OPTIONS)
def test_pillows_warnings_name_the_file(folder: Path, options: str, cls: Any) -> None:
    with pytest.warns(
        Image.DecompressionBombWarning, match=rf"exceeds limit of 1000 pixels.*\({folder}/b\.png\)"
    ):
        cls(folder, targets=None, **OPTIONS[options])[1]


def test_batches_too(folder: Path, make_loader: Any) -> None:
    for options in ("decoded", "cropped"):
        loader = make_loader(
            ImageDataset(folder, targets=None, **OPTIONS[options]),
            batch_size=2,
            shuffle=False,
            num_workers=0,
        )
        with pytest.warns(Image.DecompressionBombWarning, match=rf"\({folder}/a\.png\)"):
            next(iter(loader))


def test_those_of_others_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    ask: Callable[[], Any] = lambda: ImageDataset(folder, targets=None)[0]  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ask()
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert shown == ["mine"]
