"""How do the bytes of an image file become pixels?

One answer for each file, whatever the mode or the process: JPEG through simplejpeg where that gives what Pillow gives, everything
else through Pillow; resized by torch's antialiased bilinear interpolation. `sizing.py` does the same faster where the size is known.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError

from headrace.errors import FormatError

Pixels = npt.NDArray[np.uint8]
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".tiff", ".tif", ".webp", ".gif")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_ORIENTATION = 0x0112  # EXIF tag
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_DAMAGES = (  # libjpeg's warnings after which pixels are wrong; "extraneous bytes" may stand before a marker of a sound file
    "premature end of data segment",
    "bad Huffman code",
    "bad arithmetic code",
    "instead of RST",
)
_TURNED = {  # EXIF orientation -> array turned upright
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


def decode_image(data: Any, color: str = "RGB") -> Pixels:
    """The pixels of an encoded image.

    The colours are those of Pillow's ``convert``, but 16-bit grey is scaled by 1/257 (not clipped), and the EXIF orientation is
    applied. Alpha is dropped; of GIF and TIFF the first frame counts.

    Args:
        data: the file's bytes (bytes-like).
        color: "RGB" or "L".

    Returns:
        [H, W, 3] or [H, W, 1] uint8.

    Raises:
        FormatError: no image, a broken one, or one of so many pixels that it may be a decompression bomb.
    """
    if len(data) == 0:
        raise FormatError("the file is empty (0 bytes)")
    if bytes(data[:3]) == b"\xff\xd8\xff":
        pixels = _decode_jpeg(data, color)
        if pixels is not None:
            return pixels
    return _decode_pillow(data, color)


def _decode_jpeg(data: Any, color: str) -> Pixels | None:
    """JPEG of the usual colour spaces; None where Pillow has to look."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        check_pixels(width, height)
        if space not in ("YCbCr", "Gray"):
            if space in ("CMYK", "YCCK"):
                simplejpeg.decode_jpeg(data, "CMYK")  # only to see whether it is whole: Pillow does not say
            return None
        pixels = simplejpeg.decode_jpeg(data, "RGB" if space == "YCbCr" else "GRAY")
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        if any(damage in str(error) for damage in _DAMAGES):
            raise FormatError(f"broken image: {error}") from error
        return None  # broken for one decoder: Pillow reads it, or says what is wrong
    pixels = upright(pixels, exif_orientation(data))
    if color == "L":
        return pixels if space == "Gray" else np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
    return np.repeat(pixels, 3, axis=2) if space == "Gray" else pixels


def exif_orientation(data: Any) -> Any:
    """What the EXIF block of a JPEG says of how it is to be turned; 1: it stands upright."""
    if data.find(b"Exif\0\0", 0, 65536) < 0 if isinstance(data, bytes) else b"Exif\0\0" not in bytes(data[:65536]):
        return 1
    with Image.open(io.BytesIO(data)) as image:  # reads the header only
        return orientation_of(image)


def orientation_of(image: Image.Image) -> Any:
    """The same of an image that Pillow has opened."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, ValueError, struct.error):  # an EXIF block that is broken says nothing; the pixels are sound
        return 1


def upright(pixels: Pixels, orientation: Any) -> Pixels:
    """The pixels turned, and mirrored, as the orientation says."""
    turn = _TURNED.get(orientation)
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _decode_pillow(data: Any, color: str) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as image:
            check_pixels(*image.size)
            image.load()  # the reader of TIFF turns the image itself, and clears the tag
            orientation = orientation_of(image)
            if image.mode in _SIXTEEN_BIT:
                grey = np.rint(np.asarray(image, np.float32) / 257).astype(np.uint8)
                array = np.asarray(Image.fromarray(grey).convert(color))
            else:
                array = np.asarray(image.convert(color))
    except Image.DecompressionBombError as error:
        raise FormatError(_bomb(str(error))) from error
    except UnidentifiedImageError as error:
        raise FormatError("the content is no image that Pillow knows, whatever the file's name says") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for broken files
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"broken image: {error}") from error
    array = array if array.ndim == 3 else array[:, :, None]
    return upright(np.ascontiguousarray(array), orientation)


def check_pixels(width: int, height: int) -> None:
    """Raises a FormatError where an image may be a decompression bomb."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > 2 * limit:  # Pillow's own limit for an error
        raise FormatError(_bomb(f"{width} x {height} pixels, the limit is {2 * limit:,}"))


def _bomb(what: str) -> str:
    return f"it may be a decompression bomb: {what}; if it is not, raise PIL.Image.MAX_IMAGE_PIXELS"


def resize_image(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """[H, W, C] uint8 -> [size[0], size[1], C], bilinear with antialiasing, aspect not kept (torch's `interpolate`)."""
    if pixels.shape[:2] == size:
        return pixels
    source = torch.from_numpy(writable(pixels)).permute(2, 0, 1).unsqueeze(0)
    out = torch.nn.functional.interpolate(source, size=size, mode="bilinear", antialias=True, align_corners=False)
    return np.ascontiguousarray(out[0].permute(1, 2, 0).numpy())


def writable(pixels: Pixels) -> Pixels:
    """Itself, or a copy of what is read-only, such as Pillow's arrays and what a mode holds: torch warns of these."""
    return pixels if pixels.flags.writeable else pixels.copy()


def to_channels_first(pixels: Pixels) -> Pixels:
    """[H, W, C] -> contiguous [C, H, W]."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def to_channels_last(pixels: Pixels) -> Pixels:
    """[C, H, W] -> contiguous [H, W, C]."""
    return np.ascontiguousarray(pixels.transpose(1, 2, 0))


_SCALE = {
    3: np.array([1 / (255 * s) for s in IMAGENET_STD], np.float32).reshape(3, 1, 1),
    1: np.array(3 / (255 * sum(IMAGENET_STD)), np.float32).reshape(1, 1, 1),
}
_SHIFT = {
    3: np.array([-m / s for m, s in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)], np.float32).reshape(3, 1, 1),
    1: np.array(-sum(IMAGENET_MEAN) / sum(IMAGENET_STD), np.float32).reshape(1, 1, 1),
}


def normalize_into(pixels: Pixels, out: npt.NDArray[np.float32]) -> None:
    """[C, H, W] uint8 -> float32 in `out`: scaled to [0, 1], minus the ImageNet mean, over its standard deviation.

    One channel takes the means of the three channels' statistics. Three passes over memory that is in the cache by then; two roundings,
    so that it is the same everywhere.
    """
    np.copyto(out, pixels)
    np.multiply(out, _SCALE[len(out)], out=out)
    np.add(out, _SHIFT[len(out)], out=out)


def normalize(pixels: Pixels) -> torch.Tensor:
    """The same in memory of its own."""
    out = np.empty(pixels.shape, np.float32)
    normalize_into(pixels, out)
    return torch.from_numpy(out)
