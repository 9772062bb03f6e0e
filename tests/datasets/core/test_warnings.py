"""Warnings of Pillow name the file, once for each kind as Python shows them, on every way of
making a sample.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace import ImageDataset, MemoryEfficientDataset, RandomResizedCrop


def test_pillows_warnings_name_the_file(
    tmp_path: Path, make_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 30)).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    options: dict[str, Any]
    for options in (
        {"image_size": 8},
        {"image_size": None},
        {"transform": [RandomResizedCrop(8)]},
        {"image_size": 8, "transform": lambda image: 0},
    ):
        for cls in (ImageDataset, MemoryEfficientDataset):
            dataset = cls(tmp_path, targets=None, **options)
            with pytest.warns(Image.DecompressionBombWarning, match=r"1000 .*/b\.png\)"):
                dataset[1]
            loader = make_loader(dataset, batch_size=2, shuffle=False, num_workers=0)
            with pytest.warns(Image.DecompressionBombWarning, match=r"/a\.png\)"):
                next(iter(loader))
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ImageDataset(tmp_path, targets=None)[0]
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert shown == ["mine"]  # those of others stay
