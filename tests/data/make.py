"""Makes the small files that the tests read.

Everything is made here, from nothing but numpy and Pillow, and is the same at every call: for a
seed, the same bytes (of one version of Pillow).
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import re
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
Size = tuple[int, int]

SIZE: Size = (64, 48)  # (width, height), as Pillow has it; not square, so that a swapped axis shows
BOMB_PNG_SIZE: Size = (30000, 30000)
BOMB_JPEG_SIZE: Size = (65000, 65000)
_EXTENSIONS = (".jpg", ".PNG", ".JPEG", ".png")  # both formats, both cases


# --- pictures -------------------------------------------------------------------------------------


def circle(rng: np.random.Generator, size: Size = SIZE) -> Pixels:
    """A disc of one colour on a ground of another, uint8 [H, W, 3]."""
    (width, height), (x, y) = size, _grid(size)
    centre_x, centre_y = rng.uniform(0.3, 0.7, 2) * (width, height)
    inside = np.hypot(x - centre_x, y - centre_y) < rng.uniform(0.2, 0.4) * min(size)
    disc, ground = rng.integers(0, 256, (2, 3), dtype=np.uint8)
    picture: Pixels = np.where(inside[..., None], disc, ground)
    return picture


def gradient(rng: np.random.Generator, size: Size = SIZE) -> Pixels:
    """A ramp in some direction between two colours, uint8 [H, W, 3]."""
    x, y = _grid(size)
    angle = rng.uniform(0, 2 * np.pi)
    ramp = x * np.cos(angle) + y * np.sin(angle)
    ramp = (ramp - ramp.min()) / max(float(np.ptp(ramp)), 1.0)
    start, stop = rng.integers(0, 256, (2, 3)).astype(np.float64)
    picture: Pixels = np.rint(start + ramp[..., None] * (stop - start)).astype(np.uint8)
    return picture


def noise(rng: np.random.Generator, size: Size = SIZE) -> Pixels:
    """Independent pixels, uint8 [H, W, 3]."""
    return rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def corners(size: Size = SIZE) -> Pixels:
    """Four quarters, red green / blue white, uint8 [H, W, 3]: tells every turn and mirror image
    apart.
    """
    width, height = size
    picture = np.empty((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2] = (255, 0, 0)
    picture[: height // 2, width // 2 :] = (0, 255, 0)
    picture[height // 2 :, : width // 2] = (0, 0, 255)
    picture[height // 2 :, width // 2 :] = (255, 255, 255)
    return picture


def _grid(size: Size) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y, x = np.mgrid[: size[1], : size[0]].astype(np.float64)
    return x, y


_DRAW: dict[str, Callable[[np.random.Generator, Size], Pixels]] = {
    "circle": circle,
    "gradient": gradient,
    "noise": noise,
}


# --- a folder of photographs ----------------------------------------------------------------------


def make_photos(
    folder: str | os.PathLike[str],
    classes: Sequence[str] = ("circle", "gradient", "noise"),
    per_class: int = 8,
    size: Size = SIZE,
    seed: int = 0,
) -> Path:
    """Writes `per_class` images to `folder/<class>/` for each class, and returns the folder.

    JPEG and PNG take turns, as do lower and upper case extensions. A class named after a picture
    (circle, gradient, noise) shows it, any other name shows one of them. An image depends on (seed,
    class, number) alone: more classes or images don't change the others.
    """
    folder = Path(folder)
    for name in classes:
        label = zlib.crc32(name.encode())
        draw = _DRAW.get(name) or tuple(_DRAW.values())[label % len(_DRAW)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = draw(np.random.default_rng((seed, label, number)), size)
            _save(
                pixels,
                folder / name / f"{name}_{number:03d}{_EXTENSIONS[number % len(_EXTENSIONS)]}",
            )
    return folder


def image_bytes(image: Any, form: str = "PNG", **options: Any) -> bytes:
    """An image, or pixels, as Pillow encodes them."""
    stream = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(stream, form, **options)
    return stream.getvalue()


def turned(orientation: int) -> Image.Exif:
    """EXIF that says how an image is turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _save(pixels: Pixels, path: Path) -> None:
    if path.suffix.lower() in (".jpg", ".jpeg"):
        Image.fromarray(pixels).save(path, "JPEG", quality=90)
    else:
        Image.fromarray(pixels).save(path, "PNG")


# --- shards ---------------------------------------------------------------------------------------


def make_tar(
    path: str | os.PathLike[str],
    members: Sequence[tuple[str, bytes]],
    form: int = tarfile.USTAR_FORMAT,
) -> Path:
    """Writes a tar of members (name, content), in this order; a name that ends in "/" is a
    folder's. Returns the path.
    """
    with tarfile.open(path, "w", format=form) as file:
        for name, data in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.size, info.type = (
                len(data),
                tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE,
            )
            file.addfile(info, io.BytesIO(data))
    return Path(path)


def make_mds(
    folder: str | os.PathLike[str],
    columns: dict[str, tuple[str, int | None]],
    shards: Sequence[Sequence[Sequence[bytes]]],
    compression: str = "",
) -> Path:
    """Writes shards of MosaicML Streaming, and their index, to `folder`; returns it.

    Args:
        columns: encoding and size in bytes by name; None: the size varies.
        shards: the encoded values of each sample of each shard.
        compression: "gz", or "" for none.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    encodings, widths = zip(*columns.values(), strict=True)
    kinds = {"column_names": [*columns], "column_encodings": encodings, "column_sizes": widths}
    about = {**kinds, "format": "mds", "version": 2, "compression": compression or None}
    entries = []
    for number, samples in enumerate(shards):
        bodies = []
        for values in samples:
            varying = [len(one) for one, width in zip(values, widths, strict=True) if width is None]
            bodies.append(struct.pack(f"<{len(varying)}I", *varying) + b"".join(values))
        edges = np.cumsum([4 * (len(samples) + 2), *map(len, bodies)]).tolist()
        data = struct.pack(f"<{len(edges) + 1}I", len(samples), *edges) + b"".join(bodies)
        name = f"shard.{number:05d}.mds"
        raw, packed = {"basename": name, "bytes": len(data)}, None
        if compression:
            name, data = f"{name}.gz", gzip.compress(data, mtime=0)
            packed = {"basename": name, "bytes": len(data)}
        (folder / name).write_bytes(data)
        entry = {**about, "samples": len(samples), "raw_data": raw, "zip_data": packed}
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def make_tfrecord(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> Path:
    """Writes a TFRecord file of Examples; values are bytes, lists of them, int64 [n] or float32
    [n].
    """

    def number(value: int) -> bytes:
        parts = bytearray()
        value &= (1 << 64) - 1
        while value > 0x7F:
            parts.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*parts, value])

    def field(place: int, data: bytes) -> bytes:
        return number(place << 3 | 2) + number(len(data)) + data

    def feature(value: Any) -> bytes:
        if isinstance(value, bytes):
            value = [value]
        if isinstance(value, list):
            return field(1, b"".join(field(1, one) for one in value))
        if value.dtype == np.float32:
            return field(2, field(1, value.astype("<f4").tobytes()))
        return field(3, field(1, b"".join(map(number, value.tolist()))))

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    with open(path, "wb") as file:
        for row in rows:
            entries = [
                field(1, field(1, name.encode()) + field(2, feature(value)))
                for name, value in row.items()
            ]
            data = field(1, b"".join(entries))
            head = struct.pack("<Q", len(data))
            file.write(head + masked(head) + data + masked(data))
    return Path(path)


def make_shards(
    folder: str | os.PathLike[str],
    counts: Sequence[int],
    ending: str = "tar",
    size: Size = (16, 12),
) -> Path:
    """Writes a shard for each count to `folder`, with so many samples, numbered through over all
    shards; returns the folder.

    .tar: a .png (noise), its number as .cls, and .json; .jsonl: objects {"number", "text"}; .txt:
    lines "line NUMBER".
    """
    folder, first = Path(folder), 0
    folder.mkdir(parents=True, exist_ok=True)
    for shard, count in enumerate(counts):
        path, numbers = folder / f"part-{shard:03d}.{ending}", range(first, first + count)
        if ending == "tar":
            make_tar(path, [member for number in numbers for member in _tar_sample(number, size)])
        elif ending == "jsonl":
            path.write_text(
                "".join(json.dumps({"number": n, "text": f"line {n}"}) + "\n" for n in numbers)
            )
        else:
            path.write_text("".join(f"line {n}\n" for n in numbers))
        first += count
    return folder


def _tar_sample(number: int, size: Size) -> list[tuple[str, bytes]]:
    encoded = io.BytesIO()
    Image.fromarray(noise(np.random.default_rng((9, number)), size)).save(encoded, "PNG")
    said = json.dumps({"number": number}).encode()
    return [
        (f"{number:06d}.png", encoded.getvalue()),
        (f"{number:06d}.cls", b"%d" % number),
        (f"{number:06d}.json", said),
    ]


# --- files with something odd about them ----------------------------------------------------------

Writer = Callable[[Path], None]


def saving(image: Image.Image, kind: str, **options: Any) -> Writer:
    """Saves an image as a format of Pillow."""
    return lambda path: image.save(path, kind, **options)


def writing(data: bytes) -> Writer:
    """Writes these bytes."""

    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def truncated_jpeg(path: Path) -> None:
    """The first half of a JPEG: the header is whole, the picture is not."""
    _NOISE.save(path, "JPEG", quality=90)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@functools.cache
def _bomb_pixels(width: int, height: int) -> bytes:
    row = bytes(1 + (width + 7) // 8)  # the filter byte, then the pixels
    compress = zlib.compressobj(9)
    return b"".join(compress.compress(row) for _ in range(height)) + compress.flush()


def grey_png(width: int, height: int, depth: int, pixels: bytes) -> bytes:
    """A PNG of compressed pixels, perhaps of fewer than its header says."""
    # grey, deflate, no interlace
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")):
        chunk = kind + content
        data += struct.pack(">I", len(content)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data


def bomb_png(path: Path) -> None:
    """A valid PNG of about 100 kB that decodes to 900 million black pixels.

    One bit a pixel, written by hand: Pillow would need the whole picture in memory to write it.
    """
    path.write_bytes(grey_png(*BOMB_PNG_SIZE, 1, _bomb_pixels(*BOMB_PNG_SIZE)))


def larger_jpeg(data: bytes, width: int, height: int) -> bytes:
    """A JPEG in colour whose header says another size."""
    # the frame of Pillow's files: marker, length 17, 8 bits a sample, then the size
    frame = re.search(rb"\xff[\xc0\xc2]\x00\x11\x08", data)
    assert frame is not None
    return data[: frame.end()] + struct.pack(">HH", height, width) + data[frame.end() + 4 :]


def bomb_jpeg(path: Path) -> None:
    """A small JPEG whose header claims 65000 x 65000 pixels."""
    path.write_bytes(larger_jpeg(image_bytes(_NOISE, "JPEG"), *BOMB_JPEG_SIZE))


def link_loop(path: Path) -> None:
    """A folder with one image and a link to the folder itself: a walk that follows links never
    ends.
    """
    path.mkdir()
    _NOISE.save(path / "image.jpg", "JPEG")
    (path / "again").symlink_to(Path("..") / path.name, target_is_directory=True)


def exif_jpeg(orientation: int) -> Writer:
    """`corners()` as a camera held at EXIF `orientation` (1 to 8) stores it: upright again once
    the tag is obeyed.
    """
    turn = Image.Transpose
    # What undoes the tag, from a viewer's side: 6 and 8 are each other's inverse, the rest are
    # their own.
    stored = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_90,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_270,
    }
    image = _CORNERS.transpose(stored[orientation]) if orientation in stored else _CORNERS
    return saving(image, "JPEG", quality=95, subsampling=0, exif=turned(orientation))


def _grey16() -> Image.Image:
    """The value of pixel (x, y) is 65535 (y w + x) // (w h - 1)."""
    width, height = SIZE
    values = np.arange(width * height, dtype=np.int64) * 65535 // (width * height - 1)
    return Image.fromarray(values.reshape(height, width).astype(np.uint16))


def _palette() -> Image.Image:
    """Four quarters of a palette's colours, of which entry 0 is red."""
    image = Image.new("P", SIZE)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 255, 255, 255])
    half = np.indices((SIZE[1], SIZE[0])) * 2 // np.array([SIZE[1], SIZE[0]])[:, None, None]
    image.putdata((half[0] * 2 + half[1]).ravel().tolist())
    return image


_NOISE, _CORNERS = Image.fromarray(noise(np.random.default_rng(0))), Image.fromarray(corners())
_RED, _BLUE = (Image.new("RGB", SIZE, colour) for colour in ((255, 0, 0), (0, 0, 255)))
_RGBA = _CORNERS.copy()  # with an alpha ramp from left to right
_RGBA.putalpha(
    Image.fromarray(np.tile(np.linspace(0, 255, SIZE[0]).astype(np.uint8), (SIZE[1], 1)))
)

UNREADABLE: dict[str, tuple[str, Writer]] = {
    "truncated_jpeg": ("truncated.jpg", truncated_jpeg),
    "empty_jpeg": ("empty.jpg", writing(b"")),
    "text_as_jpeg": ("text.jpg", writing(b"This is not an image.\n")),
    "bomb_png": ("bomb.png", bomb_png),
    "bomb_jpeg": ("bomb.jpg", bomb_jpeg),
}
"""Kind -> (file name, writer): image names that every dataset must refuse."""

_BOTH: dict[str, Any] = {"save_all": True, "append_images": [_BLUE]}
READABLE: dict[str, tuple[str, Writer]] = {
    "png_as_jpeg": ("png_inside.jpg", saving(_NOISE, "PNG")),
    "not_utf8_name": (os.fsdecode(b"caf\xe9.jpg"), saving(_NOISE, "JPEG")),
    "grey16_png": ("grey16.png", saving(_grey16(), "PNG")),
    "grey_jpeg": ("grey.jpg", saving(_CORNERS.convert("L"), "JPEG", quality=95)),
    # stored inverted, as Adobe does
    "cmyk_jpeg": ("cmyk.jpg", saving(_CORNERS.convert("CMYK"), "JPEG", quality=95)),
    "rgba_png": ("rgba.png", saving(_RGBA, "PNG")),
    "palette_png": ("palette.png", saving(_palette(), "PNG", transparency=0)),
    "la_png": ("la.png", saving(_RGBA.convert("LA"), "PNG")),
    **{f"exif_{tag}_jpeg": (f"exif_{tag}.jpg", exif_jpeg(tag)) for tag in range(1, 9)},
    "animated_gif": ("animated.gif", saving(_RED, "GIF", duration=100, loop=0, **_BOTH)),
    "multipage_tiff": ("multipage.tiff", saving(_RED, "TIFF", **_BOTH)),
    "webp": ("lossless.webp", saving(_CORNERS, "WEBP", lossless=True)),
    "bmp": ("bitmap.bmp", saving(_CORNERS, "BMP")),
}
"""Kind -> (file name, writer): images that every dataset must read, of the first page or frame."""

NO_IMAGE: dict[str, tuple[str, Writer]] = {
    "text_file": ("notes.txt", writing(b"Notes on these images.\n")),
    "link_loop": ("loop", link_loop),
}
"""Kind -> (name, writer): what else lies in folders of images."""


def make_bad(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes one file of each kind (`UNREADABLE`, `READABLE`, `NO_IMAGE`) to `folder`; returns kind
    -> path.

    A kind that the file system refuses (names that are no UTF-8 on macOS, links on Windows) is left
    out.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for kind, (name, write) in (UNREADABLE | READABLE | NO_IMAGE).items():
        try:
            write(folder / name)
        except (OSError, UnicodeError):
            if sys.platform == "linux":
                raise
        else:
            made[kind] = folder / name
    return made
