"""Decodes image files to pixels.

A file is decoded in the same way in every mode and process: JPEG by simplejpeg if that gives what
Pillow gives, everything else by Pillow.

A JPEG in colour that is resized is decoded to four bytes per pixel instead of three, into memory
that is reused: the same pixels, faster. If it is at least 2, 4 or 8 times as large as needed, it is
decoded at a half, a quarter or an eighth of its size, by an inverse DCT of fewer coefficients
(libjpeg-turbo), so that its pixels differ slightly.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError, features

from headrace.datasets.resizing import Box, Pixels, arranged, resize_image, scratch
from headrace.errors import FormatError
from headrace.io.library_errors import is_of_machine
from headrace.memory.budget import format_size
from headrace.memory.processes import PerProcess


class Plugin(NamedTuple):
    """A format that Pillow may need a plugin for.

    Attributes:
        name: Pillow's name of the format.
        endings: endings of its files.
        module: a Pillow plugin that reads it.
        package: the package of the plugin.
    """

    name: str
    endings: tuple[str, ...]
    module: str
    package: str


PLUGINS = (
    Plugin("AVIF", (".avif",), "pillow_avif", "pillow-avif-plugin"),
    Plugin("HEIF", (".heic", ".heif"), "pillow_heif", "pillow-heif"),
    Plugin("JXL", (".jxl",), "pillow_jxl", "pillow-jxl-plugin"),
)


@functools.cache
def is_readable(wanted: Plugin) -> bool:
    """True if Pillow reads the format in this process; loads its plugin if needed."""
    if wanted.name.lower() in features.get_supported_modules():
        return True
    try:
        plugin = importlib.import_module(wanted.module)
    except ImportError:
        return False
    if wanted.name == "HEIF":
        plugin.register_heif_opener()
    return True


FREE = 64 << 20
"""Bytes that an image may take without a look at the budget: a photograph of 16 million pixels."""
_BY_JPEG = 4  # bytes per pixel
_BY_PILLOW = 24  # bytes per pixel, at most, of Pillow's images and their arrays
_PROGRESSIVE = 6  # libjpeg holds the coefficients of a progressive JPEG until the last scan
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")

Left = Callable[[], int]
"""Returns the bytes that the budget leaves to this process."""


class _Claims(threading.Condition):
    """The bytes that threads of this process have claimed; notified when some are released."""

    nbytes = 0


_claims = PerProcess(_Claims)  # a forked child has none: the parent's threads don't decode there


@contextlib.contextmanager
def claimed(left: Left | None, height: int, width: int, nbytes: int) -> Iterator[None]:
    """Claims the memory for an image, and waits while other threads use too much.

    Args:
        left: returns the remaining memory budget of this process. None: no limit.
        height, width: size of the image, for the message.
        nbytes: bytes that the image takes.

    Raises:
        FormatError: it takes more than the remaining budget.
    """
    if nbytes <= FREE or left is None:
        yield
        return
    remaining = left()
    if nbytes > remaining:
        raise FormatError(
            f"decoding {width:,} x {height:,} pixels takes {format_size(nbytes)}, and the memory "
            f"budget leaves {format_size(remaining)}: use fewer workers or a smaller batch_size, "
            "raise max_memory_usage, or shrink the image"
        )
    claims = _claims.get()
    with claims:
        claims.wait_for(lambda: not claims.nbytes or claims.nbytes + nbytes <= remaining)
        claims.nbytes += nbytes
    try:
        yield
    finally:
        with claims:
            claims.nbytes -= nbytes
            claims.notify_all()


def _image_nbytes(shape: tuple[int, int], each: int, size: tuple[int, int] | None) -> int:
    """Upper limit of the bytes to decode an image, at `each` bytes per pixel, and to resize it:
    torch first makes rows of the new width.
    """
    height, width = shape
    if size is None:
        return height * width * each
    return height * (width * each + size[1] * 4)


FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF")
"""The formats that Pillow may open, whatever the file's name: its EPS reader, for example, starts
Ghostscript.
"""
_ORIENTATION = 0x0112  # EXIF tag
_BITS_PER_SAMPLE = 258  # tags of TIFF
_MAX_SAMPLE_VALUE = 281
_WHITE_16 = 65535
# libjpeg's warnings after which pixels are wrong; an intact file may have "extraneous bytes"
_DAMAGES = (
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
_SIDEWAYS = (5, 6, 7, 8)


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Turns every error of a decoder, and every warning raised as an error, into a `FormatError` of
    the image, except running out of memory or file descriptors.
    """
    try:
        yield
    except FormatError:
        raise
    except Image.DecompressionBombError as error:
        raise FormatError(_bomb(str(error))) from error
    except UnidentifiedImageError as error:
        names = ", ".join([*FORMATS, *_by_plugin()])
        missing = [one for one in PLUGINS if not is_readable(one)]
        if missing:
            others = ", ".join(one.name for one in missing)
            packages = " ".join(one.package for one in missing)
            names += f"; for {others} pip install {packages}"
        raise FormatError(f"the content is not an image ({names})") from error
    except Exception as error:
        if is_of_machine(error):
            raise
        raise FormatError(f"broken image: {str(error) or type(error).__name__}") from error


@decoding()
def decode_image(
    data: Any,
    color: str = "RGB",
    size: tuple[int, int] | None = None,
    channels_first: bool = False,
    box: Box | None = None,
    flip: bool = False,
    exact: bool = False,
    left: Left | None = None,
) -> Pixels:
    """Decodes an image file, or a part of it, to pixels of its own size or of another one.

    Colours are those of Pillow's ``convert``, and the orientation of EXIF (or XMP) is applied.
    Greyscale images of more than 8 bits are scaled and not clipped: 16 bits by 1/257, other depths
    of TIFF by their BitsPerSample or MaxSampleValue, floats from 0..1 if all values are in this
    range. Other floats and integers are unchanged if all values are in 0..255, and refused
    otherwise. (Images of 12 bits stored in 16, without a tag that says so, stay dark.) Alpha is
    dropped. GIF and TIFF files yield their first frame.

    Args:
        data: bytes of the file (bytes-like).
        color: "RGB" or "L".
        size: height and width of the result; see `resize_image`.
        channels_first: return [C, H, W].
        box: the part of the image to decode. None: all of it.
        flip: mirror it left to right.
        exact: decode large JPEGs at full size.
        left: returns the remaining memory budget; it is called for images that take more than
            `FREE`.

    Returns:
        [H, W, C] or [C, H, W] uint8, contiguous.

    Raises:
        FormatError: the file is not an image, is broken, has so many pixels that it may be a
            decompression bomb, or takes more memory than the remaining budget.
    """
    pixels = _decode_jpeg(data, color, size, box, exact, left)
    if pixels is None:
        pixels = _decode_pillow(data, color, size, box, left)
    return arranged(pixels, flip, channels_first)


@decoding()
def image_shape(data: Any, left: Left | None = None) -> tuple[int, int]:
    """Height and width of an encoded image, upright, from its header. (`left`: see `decode_image`.)

    Raises:
        FormatError: the header can't be read.
    """
    header = _jpeg_header(data)
    if header is not None:
        return header.upright
    # `decode_image` says what is wrong
    with contextlib.suppress(Exception), open_image(data) as image:
        if image.format != "TIFF":  # Pillow turns it when it is loaded
            return _upright_shape(image.height, image.width, _orientation_of(image))
    height, width = decode_image(data, left=left).shape[:2]
    return height, width


# -- JPEG


class _Header(NamedTuple):
    shape: tuple[int, int]
    upright: tuple[int, int]
    space: str
    orientation: Any
    is_progressive: bool


def _jpeg_header(data: Any) -> _Header | None:
    """The header of a JPEG. None: leave the image to Pillow."""
    if bytes(data[:3]) != b"\xff\xd8\xff":
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _check_pixels(width, height)
    may_be_turned, is_progressive = _marks(data)
    orientation = 1
    if may_be_turned:
        with open_image(data) as image:  # reads the header only
            orientation = _orientation_of(image)
    upright = _upright_shape(height, width, orientation)
    return _Header((height, width), upright, space, orientation, is_progressive)


def _marks(data: Any) -> tuple[bool, bool]:
    """Whether a JPEG's header has metadata (EXIF, XMP) that may contain an orientation, and whether
    it is progressive. Both are True if the header can't be parsed.

    All segments are visited, since large colour profiles may come before the metadata.
    """
    may_be_turned = is_progressive = False
    position = 2
    while position < len(data) - 4 and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xDA:  # the scan begins
            return may_be_turned, is_progressive
        size = int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xE1:
            segment = bytes(data[position + 4 : position + 2 + size])
            may_be_turned |= segment.startswith(b"Exif\0\0") or b"tiff:Orientation" in segment
        is_progressive |= marker in (0xC2, 0xC6, 0xCA, 0xCE)
        position += 2 + size
    return True, True


def _decode_jpeg(
    data: Any,
    color: str,
    size: tuple[int, int] | None,
    box: Box | None,
    exact: bool,
    left: Left | None,
) -> Pixels | None:
    """Decodes a JPEG of a usual colour space. None: leave the image to Pillow."""
    header = _jpeg_header(data)
    if header is None:
        return None
    shape = header.shape
    each = _BY_JPEG * (1 + (header.orientation in _TURNED))
    if color == "L" and header.space != "Gray":
        each += _BY_JPEG  # Pillow's image between
    whole_nbytes = math.prod(shape) * _PROGRESSIVE * header.is_progressive
    if header.space in ("CMYK", "YCCK"):
        with claimed(left, *shape, _image_nbytes(shape, each, None) + whole_nbytes):
            _simplejpeg(data, "CMYK")  # Pillow does not notice if it is cut short
        return None
    if header.space not in ("YCbCr", "Gray"):
        return None
    whole = Box(0, 0, *header.upright)
    if box == whole:
        box = None
    factor = 1
    options: dict[str, Any] = {}
    space = "RGB"
    if header.space == "Gray":
        space = "GRAY"
    elif color == "RGB" and size is not None:
        space = "RGBX"  # faster to decode, resize and take apart than three bytes
        if not exact:
            part = box or whole
            least = min(part.height // size[0], part.width // size[1])
            factor = next((factor for factor in (8, 4, 2) if least >= factor), 1)
    height = -(-shape[0] // factor)
    width = -(-shape[1] // factor)
    if factor > 1:
        options = {"min_height": height, "min_width": width, "min_factor": factor}
    with claimed(left, *shape, _image_nbytes((height, width), each, size) + whole_nbytes):
        if space == "RGBX":
            options["buffer"] = scratch.take("jpeg", height * width * 4)
        pixels = _simplejpeg(data, space, **options)
        if pixels is None:
            return None
        pixels = upright(pixels, header.orientation)
        if box is not None:
            pixels = box.at(factor).of(pixels)
        if color == "L" and space == "RGB":
            pixels = np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
        elif color == "RGB" and space == "GRAY":
            pixels = np.repeat(pixels, 3, axis=2)
        return resize_image(pixels, size)


def _simplejpeg(data: Any, space: str, **options: Any) -> Pixels | None:
    """Decodes a JPEG. None: simplejpeg can't; Pillow reads it, or says what is wrong.

    Raises:
        FormatError: it is damaged in a way that Pillow does not notice.
    """
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, space, **options)
        return pixels
    except ValueError as error:
        if any(damage in str(error) for damage in _DAMAGES):
            raise FormatError(f"broken image: {error}") from error
        return None


# -- all other formats


def open_image(data: Any) -> Image.Image:
    """Opens an image by Pillow, which reads its header.

    Raises:
        FormatError: it is empty, or may be a decompression bomb.
        UnidentifiedImageError: its format is unknown.
    """
    if len(data) == 0:
        raise FormatError("the file is empty (0 bytes)")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        image = Image.open(io.BytesIO(data), formats=_by_plugin())
    _check_pixels(*image.size)
    return image


def _by_plugin() -> list[str]:
    return [one.name for one in PLUGINS if is_readable(one)]


def _decode_pillow(
    data: Any, color: str, size: tuple[int, int] | None, box: Box | None, left: Left | None
) -> Pixels:
    with open_image(data) as image:
        shape = (image.height, image.width)
        with claimed(left, *shape, _image_nbytes(shape, _BY_PILLOW, size)):
            image.load()  # turns a TIFF, and clears its tag
            orientation = _orientation_of(image)
            grey = _deep_grey(image)
            shown: Image.Image = image
            if grey is not None:
                shown = Image.fromarray(grey)
            elif image.mode == "LAB":  # Pillow can't convert it to grey directly
                shown = image.convert("RGB")
            if shown.mode != color:
                shown = shown.convert(color)
            array = np.asarray(shown)
            if array.ndim == 2:
                array = array[:, :, None]
            pixels = upright(np.ascontiguousarray(array), orientation)
            if box is not None:
                pixels = box.of(pixels)
            return resize_image(pixels, size)


def _deep_grey(image: Image.Image) -> Pixels | None:
    """The 8-bit grey of a greyscale image of more than 8 bits. None: it is another image.

    Raises:
        FormatError: its value of white is unknown.
    """
    if image.mode not in (*SIXTEEN_BIT, "I", "F"):
        return None
    values = np.asarray(image, np.float32 if image.mode in SIXTEEN_BIT else None)
    least = float(values.min())
    most = float(values.max())
    if image.mode in SIXTEEN_BIT:
        white: float = max(_white_of(image), most)  # a tag may be too low
    elif image.mode == "I" and image.format == "PNG":  # 16 bits, in some versions of Pillow
        white = _WHITE_16
    elif least >= 0 and most <= 255:  # False for NaN
        white = 255
        if image.mode == "F" and most <= 1:
            white = 1
    else:
        raise FormatError(
            f"grey of mode {image.mode!r} has values from {least:g} to {most:g}, and none is known "
            "to be white: scale them to 0..255, to unsigned 16 bits, or floats to 0..1"
        )
    grey: Pixels = np.rint(values * (255 / white)).astype(np.uint8)
    return grey


def _white_of(image: Image.Image) -> int:
    """The value of white in unsigned grey of more than 8 bits, according to the tags of a TIFF."""
    tags = getattr(image, "tag_v2", {})
    for tag, most in ((_MAX_SAMPLE_VALUE, _WHITE_16), (_BITS_PER_SAMPLE, 16)):
        value = tags.get(tag)
        if isinstance(value, tuple) and value:
            value = value[0]
        if isinstance(value, int) and 0 < value <= most:
            if tag == _MAX_SAMPLE_VALUE:
                return value
            return (1 << value) - 1
    return _WHITE_16


def _orientation_of(image: Image.Image) -> Any:
    """The orientation in an image's metadata (EXIF, or else XMP); 1: upright."""
    if image.format == "JXL" and not getattr(image, "jpeg", False):
        return 1  # the decoder turns it, unless it is a recompressed JPEG
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, ValueError, struct.error):  # broken EXIF; the pixels are intact
        return 1


def upright(pixels: Pixels, orientation: Any) -> Pixels:
    """Turns and mirrors pixels according to the orientation."""
    turn = _TURNED.get(orientation)
    if turn is None:
        return pixels
    return np.ascontiguousarray(turn(pixels))


def _upright_shape(height: int, width: int, orientation: Any) -> tuple[int, int]:
    if orientation in _SIDEWAYS:
        return (width, height)
    return (height, width)


def _check_pixels(width: int, height: int) -> None:
    """Raises a FormatError if an image may be a decompression bomb."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > 2 * limit:  # Pillow's own limit for an error
        raise FormatError(_bomb(f"{width} x {height} pixels, the limit is {2 * limit:,}"))


def _bomb(what: str) -> str:
    return f"it may be a decompression bomb: {what}; if it is not, raise PIL.Image.MAX_IMAGE_PIXELS"
