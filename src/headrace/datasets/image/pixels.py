"""Decodes the bytes of an image file to pixels.

One way for each file, whatever the mode or the process: JPEG through simplejpeg where that gives
what Pillow gives, everything else through Pillow; resized by torch's antialiased bilinear
interpolation. `sizing.py` does the same faster where the size is known.
"""

from __future__ import annotations

import functools
import io
import struct
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError

from headrace.casting import as_tensor, cast_into
from headrace.collate.normalization import STATISTICS, Normalization
from headrace.datasets.image.claims import (
    FREE,
    SIXTEEN_BIT,
    Claim,
    Left,
    jpeg_nbytes,
    pillow_nbytes,
)
from headrace.dtypes import BFLOAT16
from headrace.errors import FormatError
from headrace.io.library_errors import is_of_machine
from headrace.storage.image_formats import (
    BY_PLUGIN,
    JPEG_XL,
    format_by_content,
    is_readable,
    remedy,
)

Pixels = npt.NDArray[np.uint8]
FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF")
"""What Pillow may open, whatever a file's name says: its reader of EPS starts Ghostscript, and
others are as little asked for.
"""
IMAGENET_MEAN, IMAGENET_STD = STATISTICS["imagenet"]
IMAGENET = Normalization(IMAGENET_MEAN, IMAGENET_STD, fits_grey=True)
_ORIENTATION = 0x0112  # EXIF tag
_BITS_PER_SAMPLE, _MAX_SAMPLE_VALUE = 258, 281  # tags of TIFF
_WHITE_16 = 65535
_SMALL = 1 << 20  # pixels that take less than FREE, whatever is done with them
_WIDENED = 1 << 24  # pixels between the two steps of resizing
# libjpeg's warnings after which pixels are wrong; "extraneous bytes" may stand before a marker of a
# sound file
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


_P = ParamSpec("_P")
_R = TypeVar("_R")


def decoding(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Every error of a decoder, and every warning that is raised as an error, becomes a
    `FormatError`, so that it is the image's fault wherever it is decoded. Running out of memory or
    file descriptors is not.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except FormatError:
            raise
        except Image.DecompressionBombError as error:
            raise FormatError(_bomb(str(error))) from error
        except UnidentifiedImageError as error:
            raise FormatError(
                "the content is no image "
                f"({', '.join((*FORMATS, *(one.name for one in BY_PLUGIN)))}), whatever the "
                "file's name says"
            ) from error
        except Exception as error:
            if is_of_machine(error):
                raise
            raise FormatError(f"broken image: {str(error) or type(error).__name__}") from error

    return call


@decoding
def decode_image(data: Any, color: str = "RGB", left: Left | None = None) -> Pixels:
    """Decodes an image file to pixels.

    Colours are those of Pillow's ``convert``, and the orientation of EXIF (or XMP) is applied.
    Greyscale images of more than 8 bits are scaled and not clipped: 16 bits by 1/257, other depths
    of TIFF by their BitsPerSample or MaxSampleValue, floats from 0..1 if all values are in this
    range. Other floats and integers are unchanged if all values are in 0..255, and refused
    otherwise. (Images of 12 bits stored in 16, without a tag that says so, stay dark.) Alpha is
    dropped. GIF and TIFF files yield their first frame.

    Args:
        data: bytes of the file (bytes-like).
        color: "RGB" or "L".
        left: returns the remaining memory budget; it is called for images that take more than
            `FREE`.

    Returns:
        [H, W, 3] or [H, W, 1] uint8.

    Raises:
        FormatError: the file is not an image, is broken, has so many pixels that it may be a
            decompression bomb, or takes more memory than the remaining budget.
    """
    with Claim(left) as claim:
        return decode_claimed(data, color, claim, None)


def decode_claimed(data: Any, color: str, claim: Claim, size: tuple[int, int] | None) -> Pixels:
    """As `decode_image`, where the memory that this takes, and resizing it to `size`, stays
    claimed.
    """
    if len(data) == 0:
        raise FormatError("the file is empty (0 bytes)")
    if bytes(data[:3]) == b"\xff\xd8\xff":
        pixels = _decode_jpeg(data, color, claim, size)
        if pixels is not None:
            return pixels
    return _decode_pillow(data, color, claim, size)


def _decode_jpeg(
    data: Any, color: str, claim: Claim, size: tuple[int, int] | None
) -> Pixels | None:
    """JPEG of the usual colour spaces; None where Pillow has to look."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        check_pixels(width, height)
        if space not in ("YCbCr", "Gray"):
            if space in ("CMYK", "YCCK"):
                claim_jpeg(claim, data, (height, width), 4, 1, None)
                # only to see whether it is whole: Pillow does not say
                simplejpeg.decode_jpeg(data, "CMYK")
            return None
        # and of Pillow's image between
        channels = (
            (8 if space == "YCbCr" else 1) if color == "L" else (3 if space == "YCbCr" else 4)
        )
        claim_jpeg(claim, data, (height, width), channels, 1, size)
        pixels = simplejpeg.decode_jpeg(data, "RGB" if space == "YCbCr" else "GRAY")
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        if any(damage in str(error) for damage in _DAMAGES):
            raise FormatError(f"broken image: {error}") from error
        return None  # broken for one decoder: Pillow reads it, or says what is wrong
    pixels = upright(pixels, exif_orientation(data))
    if color == "L":
        return (
            pixels
            if space == "Gray"
            else np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
        )
    return np.repeat(pixels, 3, axis=2) if space == "Gray" else pixels


def claim_jpeg(
    claim: Claim,
    data: Any,
    shape: tuple[int, int],
    channels: int,
    factor: int,
    size: tuple[int, int] | None,
) -> None:
    """Claims what decoding a JPEG at a fraction of its size takes, and resizing it."""
    if (
        shape[0] * shape[1] <= _SMALL
        or jpeg_nbytes(shape, channels, factor, size, True, True) <= FREE
    ):
        return
    with open_image(data) as image:
        turns, is_progressive = orientation_of(image) in _TURNED, "progressive" in image.info
    claim.take(*shape, jpeg_nbytes(shape, channels, factor, size, turns, is_progressive))


def exif_orientation(data: Any) -> Any:
    """What the metadata of a JPEG (EXIF, or else XMP) say of how it is to be turned; 1: it
    stands upright.
    """
    if not _may_be_turned(data):
        return 1
    with open_image(data) as image:  # reads the header only
        return orientation_of(image)


def _may_be_turned(data: Any) -> bool:
    """True if a JPEG's header has metadata that may hold an orientation, or is not one segment
    after the other.

    The segments are walked through: a search would have to end somewhere, and colour profiles
    before the metadata may be large.
    """
    position, end = 2, len(data) - 4
    while position < end:
        if data[position] != 0xFF:
            return True
        marker = data[position + 1]
        if marker == 0xDA:  # the scan begins
            return False
        size = int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xE1:
            segment = bytes(data[position + 4 : position + 2 + size])
            if segment.startswith(b"Exif\0\0") or b"tiff:Orientation" in segment:
                return True
        position += 2 + size
    return True


def open_image(data: Any) -> Image.Image:
    """The image as Pillow opens it: its header is read.

    Raises:
        FormatError: it is of a format that nothing installed here reads.
    """
    own = format_by_content(data)
    if own is not None and not is_readable(own):
        raise FormatError(f"the content is {remedy(own)}")
    return Image.open(io.BytesIO(data), formats=FORMATS if own is None else (own.name,))


def orientation_of(image: Image.Image) -> Any:
    """The same of an image that Pillow has opened."""
    if image.format == JPEG_XL.name and not getattr(image, "jpeg", False):
        return 1  # the decoder turns it; what EXIF says counts only in a JPEG that was recompressed
    try:
        return image.getexif().get(_ORIENTATION, 1)
    # an EXIF block that is broken says nothing; the pixels are sound
    except (SyntaxError, ValueError, struct.error):
        return 1


def upright(pixels: Pixels, orientation: Any) -> Pixels:
    """The pixels turned, and mirrored, as the orientation says."""
    turn = _TURNED.get(orientation)
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _decode_pillow(data: Any, color: str, claim: Claim, size: tuple[int, int] | None) -> Pixels:
    with open_image(data) as image:
        check_pixels(*image.size)
        claim.take(image.height, image.width, pillow_nbytes(image, color, size))
        image.load()  # the reader of TIFF turns the image itself, and clears the tag
        orientation = orientation_of(image)
        grey = _deep_grey(image)
        if grey is not None:
            array = np.asarray(Image.fromarray(grey).convert(color))
        elif image.mode == "LAB":  # Pillow has no other way from there to grey
            array = np.asarray(image.convert("RGB").convert(color))
        else:
            array = np.asarray(image if image.mode == color else image.convert(color))
    array = array if array.ndim == 3 else array[:, :, None]
    return upright(np.ascontiguousarray(array), orientation)


def _deep_grey(image: Image.Image) -> Pixels | None:
    """The 8-bit grey of an image of one channel with more than 8 bits; None of any other image.

    Raises:
        FormatError: nothing says which of its values are black and white.
    """
    if image.mode not in (*SIXTEEN_BIT, "I", "F"):
        return None
    values = np.asarray(image, np.float32 if image.mode in SIXTEEN_BIT else None)
    least, most = float(values.min()), float(values.max())
    white: float | None = None
    if image.mode in SIXTEEN_BIT:
        white = max(_white_of(image), most)  # a tag may be too low
    elif image.mode == "I" and image.format == "PNG":  # 16 bits, in some versions of Pillow
        white = _WHITE_16
    elif least >= 0 and most <= 255:  # False for NaN
        white = 1 if image.mode == "F" and most <= 1 else 255
    if white is not None:
        grey: Pixels = np.rint(values * (255 / white)).astype(np.uint8)
        return grey
    kind, fits = (
        ("floats", "0..1 or 0..255")
        if image.mode == "F"
        else ("signed or 32-bit integers", "0..255")
    )
    raise FormatError(
        f"grey of {kind} from {least:g} to {most:g}: nothing says which of them is white, unless "
        f"all lie in {fits}; scale the files "
        "to that, or to unsigned 16 bits"
    )


def _white_of(image: Image.Image) -> int:
    """The value of white of unsigned grey of more than 8 bits: of TIFF as its tags say."""
    tags = getattr(image, "tag_v2", {})
    for tag, most in ((_MAX_SAMPLE_VALUE, _WHITE_16), (_BITS_PER_SAMPLE, 16)):
        value = tags.get(tag)
        value = value[0] if isinstance(value, tuple) and value else value
        if isinstance(value, int) and 0 < value <= most:
            return value if tag == _MAX_SAMPLE_VALUE else (1 << value) - 1
    return _WHITE_16


def check_pixels(width: int, height: int) -> None:
    """Raises a FormatError where an image may be a decompression bomb."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > 2 * limit:  # Pillow's own limit for an error
        raise FormatError(_bomb(f"{width} x {height} pixels, the limit is {2 * limit:,}"))


def _bomb(what: str) -> str:
    return f"it may be a decompression bomb: {what}; if it is not, raise PIL.Image.MAX_IMAGE_PIXELS"


def resize_image(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """[H, W, C] uint8 -> [size[0], size[1], C], bilinear with antialiasing, aspect not kept
    (torch's `interpolate`).
    """
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return pixels
    # torch resizes the width first: 1 x 4,000,000 would take GB
    if width < size[1] and size[0] < height and height * size[1] > _WIDENED:
        pixels = resize_image(pixels, (size[0], width))
    source = torch.from_numpy(writable(pixels)).permute(2, 0, 1).unsqueeze(0)
    out = torch.nn.functional.interpolate(
        source, size=size, mode="bilinear", antialias=True, align_corners=False
    )
    return np.ascontiguousarray(out[0].permute(1, 2, 0).numpy())


def writable(pixels: Pixels) -> Pixels:
    """Itself, or a copy of what is read-only, such as Pillow's arrays and what a mode holds:
    torch warns of these.
    """
    return pixels if pixels.flags.writeable else pixels.copy()


def to_channels_first(pixels: Pixels) -> Pixels:
    """[H, W, C] -> contiguous [C, H, W]."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def to_channels_last(pixels: Pixels) -> Pixels:
    """[C, H, W] -> contiguous [H, W, C]."""
    return np.ascontiguousarray(pixels.transpose(1, 2, 0))


@functools.cache
def _factors(channels: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    factors = IMAGENET.factors(channels)
    assert factors is not None
    return factors[0].numpy(), factors[1].numpy()


_BESIDE = 1 << 18  # numbers of a thread's float32, 1 MB: a whole image of 224 x 224
_thread = threading.local()
_HALF, _DROPPED = np.uint32(1 << 15), np.uint32(16)  # of the bits that bfloat16 does not have


def normalize_into(pixels: Pixels, out: npt.NDArray[Any]) -> None:
    """[C, H, W] uint8 -> float32, float16 or `BFLOAT16` in `out`: scaled to [0, 1], minus the
    ImageNet mean, over its deviation.

    One channel takes the means of the three channels' statistics. Three passes over memory that is
    in the cache by then; two roundings, so that it is the same everywhere. What has 16 bits is made
    of those float32, by one rounding more.
    """
    if out.dtype != np.float32:
        _normalize_beside(pixels, out)
        return
    scale, shift = _factors(len(out))
    np.copyto(out, pixels)
    np.multiply(out, scale, out=out)
    np.add(out, shift, out=out)


def _normalize_beside(pixels: Pixels, out: npt.NDArray[Any]) -> None:
    """The same by way of float32 that stay in the processor's cache."""
    channels, height, width = pixels.shape
    # kept: fresh memory costs as much as the arithmetic
    if (values := getattr(_thread, "values", None)) is None:
        values = _thread.values = np.empty(_BESIDE, np.float32)
    rows = max(1, _BESIDE // max(1, channels * width))
    for top in range(0, height, rows):
        part = pixels[:, top : top + rows]
        beside = values[: part.size] if part.size <= _BESIDE else np.empty(part.size, np.float32)
        normalize_into(part, beside := beside.reshape(part.shape))
        if out.dtype == BFLOAT16 and torch.get_num_threads() > 1:
            _round_into(beside, out[:, top : top + rows])
        elif rows >= height:
            cast_into(beside, out)
        else:
            for channel in range(channels):
                cast_into(beside[channel], out[channel, top : top + rows])


def _round_into(values: npt.NDArray[np.float32], out: npt.NDArray[Any]) -> None:
    """Rounds normalised pixels to bfloat16, and writes over them: as `cast_into`, since none lies
    halfway between two of bfloat16.

    Twice as fast as `cast_into` where torch has several threads, which would wait for each other;
    slower by a seventh where it has one.
    """
    bits = values.view(np.uint32)
    np.add(bits, _HALF, out=bits)
    np.right_shift(bits, _DROPPED, out=bits)
    np.copyto(out.view(np.uint16), bits, casting="unsafe")


def normalize(pixels: Pixels, dtype: npt.DTypeLike = np.float32) -> torch.Tensor:
    """The same in memory of its own, as a dtype that `normalize_into` takes."""
    out = np.empty(pixels.shape, dtype)
    normalize_into(pixels, out)
    made = as_tensor(out)
    assert isinstance(made, torch.Tensor)
    return made
