"""Makes photographs to train on: shapes of six kinds on coloured, grainy grounds, as JPEG and PNG
in class folders.

python examples/make_photos.py OUT --images 600
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

Size = tuple[int, int]
Point = tuple[float, float]
GRAIN = 24  # grey levels of noise


def make_photos(
    folder: str | os.PathLike[str], images: int = 600, size: Size = (320, 240), seed: int = 0
) -> Path:
    """Writes `images` photographs of `size` (width, height) to `folder/<class>/`, the classes in
    turn; every fourth is a PNG.

    A photograph depends on (seed, number, size) alone. What a run that was interrupted has left
    under `folder` is made anew, and a finished folder is left as it is.

    Returns:
        The folder.
    """
    folder = Path(folder)
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in SHAPES:
        (unfinished / name).mkdir(parents=True)
    for number in range(images):
        name = list(SHAPES)[number % len(SHAPES)]
        picture = draw(name, np.random.default_rng((seed, number)), size)
        path = unfinished / name / f"{number:05d}"
        if number // len(SHAPES) % 4 == 3:
            picture.save(path.with_suffix(".png"), compress_level=1)
        else:
            picture.save(path.with_suffix(".jpg"), quality=90)
    os.replace(unfinished, folder)
    return folder


def draw(name: str, rng: np.random.Generator, size: Size) -> Image.Image:
    """One photograph: a few shapes of one kind, anywhere, of any size and colour, on a gradient,
    with grain over all of it.
    """
    picture = Image.fromarray(gradient(rng, size))
    pen, scale = ImageDraw.Draw(picture), min(size)
    for _ in range(rng.integers(2, 6)):
        centre = (float(rng.uniform(0.1, 0.9) * size[0]), float(rng.uniform(0.1, 0.9) * size[1]))
        colour = tuple(int(c) for c in rng.integers(0, 256, 3))
        SHAPES[name](
            pen,
            centre,
            float(rng.uniform(0.08, 0.25) * scale),
            float(rng.uniform(0, np.pi)),
            colour,
        )
    grain = rng.integers(-GRAIN, GRAIN + 1, (size[1], size[0], 3), dtype=np.int16)
    return Image.fromarray((np.asarray(picture) + grain).clip(0, 255).astype(np.uint8))


def gradient(rng: np.random.Generator, size: Size) -> np.ndarray:
    """A ramp in some direction from one colour to another, uint8 [height, width, 3]."""
    x, y = np.arange(size[0], dtype=np.float32), np.arange(size[1], dtype=np.float32)[:, None]
    angle = rng.uniform(0, 2 * np.pi)
    ramp = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
    ramp = (ramp - ramp.min()) / max(float(np.ptp(ramp)), 1.0)
    start, stop = rng.integers(0, 256, (2, 3)).astype(np.float32)
    return (start + ramp[..., None] * (stop - start)).astype(np.uint8)


def _polygon(centre: Point, radius: float, turn: float, corners: int) -> list[Point]:
    angles = turn + np.arange(corners) * 2 * np.pi / corners
    return [
        (centre[0] + radius * float(np.cos(a)), centre[1] + radius * float(np.sin(a)))
        for a in angles
    ]


def _box(centre: Point, radius: float) -> tuple[float, float, float, float]:
    return centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius


def _disc(
    pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    pen.ellipse(_box(centre, radius), fill=colour)


def _ring(
    pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    for part in (1.0, 0.7, 0.4):
        pen.ellipse(_box(centre, radius * part), outline=colour, width=max(1, round(radius / 10)))


def _square(
    pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    pen.rectangle(_box(centre, radius * 0.8), fill=colour)


def _triangle(
    pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    pen.polygon(_polygon(centre, radius * 1.2, turn, 3), fill=colour)


def _stripes(
    pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    left, top, right, bottom = _box(centre, radius)
    for part in np.linspace(0, 1, 6):
        y = top + float(part) * (bottom - top)
        pen.line((left, y, right, y), fill=colour, width=max(1, round(radius / 8)))


def _star(
    pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    outer, inner = (
        _polygon(centre, radius * 1.2, turn, 8),
        _polygon(centre, radius * 0.4, turn + np.pi / 8, 8),
    )
    pen.polygon([point for pair in zip(outer, inner, strict=True) for point in pair], fill=colour)


SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, Point, float, float, tuple[int, ...]], None]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "star": _star,
    "stripes": _stripes,
    "triangle": _triangle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes photographs to train on.")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument(
        "--size", type=int, nargs=2, default=(320, 240), metavar=("WIDTH", "HEIGHT")
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_photos(given.out, given.images, tuple(given.size), given.seed))


if __name__ == "__main__":
    main()
