"""Images in AVIF, HEIC and JPEG XL are read where Pillow or a plugin can; else the package to
install is named.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace import ConfigError, ImageDataset, SampleError
from headrace.datasets import pixels
from headrace.datasets.pixels import PLUGINS, Plugin, decode_image, image_shape, is_readable

HEADS = {
    "AVIF": b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00mif1avifmiaf",
    "HEIF": b"\x00\x00\x00\x18ftypmif1\x00\x00\x00\x00mif1heic",
    "JXL": b"\xff\x0a\xfa\x7f",
}


@pytest.mark.parametrize("wanted", PLUGINS, ids=lambda one: one.name)
def test_images_are_read_upright(wanted: Plugin, tmp_path: Path) -> None:
    if not is_readable(wanted):
        pytest.skip(f"nothing here reads {wanted.name}")
    corner = np.zeros((40, 60, 3), np.uint8)
    corner[:20, :30] = 255
    exif = Image.Exif()
    exif[0x112] = 6
    path = tmp_path / f"1{wanted.endings[0]}"
    Image.fromarray(corner).save(path, wanted.name, exif=exif.tobytes())
    data = path.read_bytes()
    found = decode_image(data)
    # JPEG XL keeps the orientation elsewhere
    upright = corner if wanted.name == "JXL" else np.rot90(corner, -1)
    assert image_shape(data) == found.shape[:2] == upright.shape[:2]
    assert np.abs(found.astype(int) - upright).mean() < 5
    assert ImageDataset(tmp_path, targets=None)[0][0].shape == (3, 224, 224)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "is_readable", lambda one: False)
    Image.new("RGB", (4, 3)).save(tmp_path / "1.png")
    for wanted in PLUGINS:
        (tmp_path / "2.png").write_bytes(HEADS[wanted.name])
        with pytest.raises(SampleError, match=rf"2\.png.* {wanted.name}.* {wanted.package}"):
            ImageDataset(tmp_path, targets=None)[1]
        renamed = (tmp_path / "2.png").rename(tmp_path / f"2{wanted.endings[0].upper()}")
        with pytest.raises(ConfigError, match=rf"1 of 2 .* 2\..*{wanted.package}"):
            ImageDataset(tmp_path, targets=None)
        renamed.unlink()
