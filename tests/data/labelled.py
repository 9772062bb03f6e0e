"""Makes images with masks, with annotations as COCO has them, and with tables of labels: the
same at every call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]


def make_pair(number: int, size: tuple[int, int]) -> tuple[Array, Array, tuple[int, int, int, int]]:
    """An image uint8 [H, W, 3] with a bright rectangle on noise, its mask uint8 [H, W] of class
    1 to 3, and the rectangle.
    """
    width, height = size
    rng = np.random.default_rng(number)
    image, mask = (
        rng.integers(0, 100, (height, width, 3), np.uint8),
        np.zeros((height, width), "u1"),
    )
    left, top = int(rng.integers(0, width // 2)), int(rng.integers(0, height // 2))
    right, bottom = left + int(rng.integers(4, width // 2)), top + int(rng.integers(4, height // 2))
    label = number % 3 + 1
    image[top:bottom, left:right] = 255 - 20 * label
    mask[top:bottom, left:right] = label
    return image, mask, (left, top, right, bottom)


def make_masks(folder: Path, count: int = 24, size: tuple[int, int] = (32, 24)) -> Path:
    """Writes images/ and masks/, in two sub-folders each; masks are palette, grey and 16-bit
    PNGs and TIFFs. Returns the folder.
    """
    for number in range(count):
        image, mask, _ = make_pair(number, size)
        name = f"{'ab'[number % 2]}/{number:03d}"
        for part in ("images", "masks"):
            (folder / part / name).parent.mkdir(parents=True, exist_ok=True)
        photo = folder / "images" / f"{name}.{('png', 'JPG')[number % 4 == 3]}"
        Image.fromarray(image).save(photo, quality=95)
        path = folder / "masks" / f"{name}.{('png', 'tif')[number % 5 == 4]}"
        save_mask(path, mask, ("P", "L", "I;16")[number % 3])
    return folder


def save_mask(path: Path, mask: Array, mode: str) -> None:
    """Writes class numbers as an image of mode "P", "L", "1", "I;16" or "I"."""
    image = Image.fromarray(mask.astype({"1": "?", "I;16": "u2", "I": "i4"}.get(mode, "u1")))
    if mode == "P":
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype("u1").tobytes())
    image.save(path)


def coco_of(
    boxes: dict[str, list[tuple[int, int, int, int]]], size: tuple[int, int]
) -> dict[str, Any]:
    """Annotations of images of one size, by file name; ids don't count from 0, and leave gaps."""
    images = [
        {"id": 10 + 3 * n, "file_name": name, "width": size[0], "height": size[1]}
        for n, name in enumerate(boxes)
    ]
    annotations: list[dict[str, Any]] = []
    for image, found in zip(images, boxes.values(), strict=True):
        for number, (left, top, right, bottom) in enumerate(found):
            one = {"id": len(annotations) + 1, "image_id": image["id"]}
            one |= {"category_id": (3, 7)[number % 2], "iscrowd": int(number == 2)}
            one["bbox"] = [left, top, right - left, bottom - top]
            one["area"] = (right - left) * (bottom - top) / 2
            one["segmentation"] = [[left, top, right, top, right, bottom, left, bottom]]
            annotations.append(one)
    categories = [{"id": 7, "name": "wheel"}, {"id": 3, "name": "mill"}]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def make_coco(folder: Path, count: int = 24, size: tuple[int, int] = (32, 24)) -> Path:
    """Writes images/ and instances.json; each fifth image has no object, others one to three.
    Returns the folder.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    boxes: dict[str, list[tuple[int, int, int, int]]] = {}
    for number in range(count):
        image, _, box = make_pair(number, size)
        name = f"{number:03d}.{('png', 'jpg')[number % 3 == 2]}"
        Image.fromarray(image).save(folder / "images" / name, quality=95)
        others = [(1, 2, 6, 9), (20, 10, 31, 23)]
        boxes[name] = [] if number % 5 == 4 else [box, *others[: number % 3]]
    (folder / "instances.json").write_text(json.dumps(coco_of(boxes, size)))
    return folder


def make_street_labels(folder: Path, count: int = 16) -> Path:
    """Writes labels.csv beside the images of `make_street`. Returns the folder."""
    rows = "".join(f"{n:03d},{('sun', 'rain')[n % 2]},{n},camera {n % 4}\n" for n in range(count))
    (folder / "labels.csv").write_text("file,weather,lamps,camera\n" + rows)
    return folder


def make_street(folder: Path, count: int = 16) -> Path:
    """Writes images/ with masks/ and instances.json of the same names, as docs/labels.md has
    them. Returns the folder.
    """
    make_masks(make_coco(folder, count), count)
    for path in [*(folder / "images" / "a").iterdir(), *(folder / "images" / "b").iterdir()]:
        path.unlink()
    for path in [*(folder / "masks").rglob("*.*")]:
        path.rename(folder / "masks" / path.name)
    return folder
