"""Formats of images that Pillow reads only in some builds, or by a plugin: AVIF, HEIC and JPEG
XL.
"""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

from PIL import Image

_HEIF_BRANDS = (
    b"heic",
    b"heix",
    b"heim",
    b"heis",
    b"hevc",
    b"hevx",
    b"hevm",
    b"hevs",
    b"mif1",
    b"msf1",
)
_JXL = b"\x00\x00\x00\x0cJXL \x0d\x0a\x87\x0a"
_LONGEST_HEAD = 128  # bytes of a file's first box, which names its brands


class ImageDecoder(NamedTuple):
    """One of these formats.

    Attributes:
        name: as Pillow has it.
        endings: of its files.
        module: a plugin of Pillow's that reads it.
        package: which holds the plugin.
    """

    name: str
    endings: tuple[str, ...]
    module: str
    package: str


AVIF = ImageDecoder("AVIF", (".avif",), "pillow_avif", "pillow-avif-plugin")
HEIC = ImageDecoder("HEIF", (".heic", ".heif"), "pillow_heif", "pillow-heif")
JPEG_XL = ImageDecoder("JXL", (".jxl",), "pillow_jxl", "pillow-jxl-plugin")
BY_PLUGIN = (AVIF, HEIC, JPEG_XL)


def format_by_content(data: bytes | memoryview) -> ImageDecoder | None:
    """The one of these formats that a file's first bytes are of."""
    head = bytes(data[:_LONGEST_HEAD])
    if head.startswith((b"\xff\x0a", _JXL)):
        return JPEG_XL
    if head[4:8] != b"ftyp":
        return None
    brands = head[8 : int.from_bytes(head[:4], "big")]
    if b"avif" in brands or b"avis" in brands:
        return AVIF
    return HEIC if brands[:4] in _HEIF_BRANDS else None


@functools.cache
def is_readable(wanted: ImageDecoder) -> bool:
    """True if Pillow reads a format in this process, where need be by its plugin, which is
    loaded.
    """
    Image.init()
    if wanted.name in Image.OPEN and wanted is not AVIF:
        return True
    if wanted is AVIF and _pillow_reads_avif():
        return True
    try:
        plugin = importlib.import_module(wanted.module)
    except ImportError:
        return False
    if wanted is HEIC:
        plugin.register_heif_opener()
    return wanted.name in Image.OPEN


def _pillow_reads_avif() -> bool:
    try:
        from PIL import AvifImagePlugin
    except ImportError:  # before Pillow 11.3
        return False
    return bool(AvifImagePlugin.SUPPORTED)


def remedy(wanted: ImageDecoder) -> str:
    """What to install."""
    return f"{wanted.name}, which needs the package {wanted.package}: pip install {wanted.package}"
