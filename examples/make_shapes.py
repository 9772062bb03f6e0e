"""Makes images of a disc and a square on noise, their masks, and annotations of the square as COCO
has them.

python examples/make_shapes.py out/shapes
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image


def make_shapes(folder: Path, count: int = 160, size: tuple[int, int] = (80, 60)) -> Path:
    """Writes `images/`, `masks/` (0 the ground, 1 the disc, 2 the square) and `instances.json`, the
    same at every call.

    Args:
        folder: where to; it is made.
        count: images.
        size: width and height.

    Returns:
        The folder.
    """
    y, x = np.mgrid[: size[1], : size[0]]
    images, annotations = [], []
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng, name = np.random.default_rng(number), f"{number:04d}.png"
        mask = np.where(
            np.hypot(y - rng.integers(12, size[1] - 12), x - rng.integers(12, size[0] - 12)) < 10,
            1,
            0,
        ).astype(np.uint8)
        width, height = rng.integers(14, 32, 2).tolist()
        left, top = int(rng.integers(0, size[0] - width)), int(rng.integers(0, size[1] - height))
        mask[top : top + height, left : left + width] = 2
        image = (
            rng.integers(0, 120, (size[1], size[0], 3))
            + np.array([[0, 0, 0], [130, 40, 0], [0, 60, 130]])[mask]
        )
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / name)
        Image.fromarray(mask).save(folder / "masks" / name)
        images.append({"id": number, "file_name": name, "width": size[0], "height": size[1]})
        annotations.append(
            {
                "id": number,
                "image_id": number,
                "category_id": 1,
                "bbox": [left, top, width, height],
                "iscrowd": 0,
            }
        )
    said = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "square"}],
    }
    (folder / "instances.json").write_text(json.dumps(said))
    return folder


if __name__ == "__main__":
    make_shapes(Path(sys.argv[1]))
