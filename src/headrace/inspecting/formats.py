"""Knows formats by the first bytes of a file, also those that headrace does not read."""

from __future__ import annotations

import contextlib
import os
import tarfile

from headrace.errors import AccessError, DataNotFoundError
from headrace.io.paths import redact

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (512, b"\x89HDF\r\n\x1a\n", "HDF5 with a user block"),
    (0, b"CDF\x01", "netCDF-3"),
    (0, b"CDF\x02", "netCDF-3"),
    (0, b"\x0e\x03\x13\x01", "HDF4"),
    (0, b"MATLAB 5.0", "MATLAB 5"),
    (257, b"ustar", "tar"),
    (0, b"\x89PNG\r\n", "PNG image"),
    (0, b"\xff\xd8\xff", "JPEG image"),
    (0, b"GIF8", "GIF image"),
    (0, b"II*\x00", "TIFF image"),
    (0, b"MM\x00*", "TIFF image"),
    (0, b"II+\x00", "BigTIFF image"),
    (0, b"MM\x00+", "BigTIFF image"),
    (8, b"WEBP", "WebP image"),
    (128, b"DICM", "DICOM image"),
    (344, b"n+1\x00", "NIfTI image"),
    (0, b"PAR1", "Parquet table"),
    (0, b"ARROW1", "Arrow file"),
    (0, b"\xff\xff\xff\xff", "Arrow stream"),
    (0, b"\x93NUMPY", "NumPy array (.npy)"),
    (0, b"PK\x03\x04", "zip"),
    (0, b"PK\x05\x06", "empty zip"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (0, b"BZh", "bzip2"),
    (0, b"\xfd7zXZ", "xz"),
    (0, b"%PDF", "PDF"),
    (0, b"\x80\x04\x95", "pickle"),
    (0, b"SQLite format 3", "SQLite database"),
    (0, b"RIFF", "RIFF (sound or video)"),
    (0, b"fLaC", "FLAC sound"),
    (4, b"ftyp", "MP4 video"),
)
"""Place, bytes and name of what formats begin with; what comes first counts."""
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)
"""Sizes of the header that follows that of the file, by version."""
_HEAD = 1024


def sniffed(head: bytes) -> str | None:
    """The format that the first bytes of a file say; None: none that is known."""
    for place, magic, name in _MAGIC:
        if head[place : place + len(magic)] == magic:
            return name
    # texts begin with BM too
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return "BMP image"
    with contextlib.suppress(tarfile.HeaderError):  # the first tars have no magic, but a checksum
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        return "tar"
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "web page"
    if start.startswith(b"version https://git-lfs"):
        return "Git LFS pointer, in place of the file: git lfs pull"
    return None


def head_of(path: str) -> bytes:
    """The first bytes of a local file.

    Raises:
        DataNotFoundError, AccessError: it is not there; it may not be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"{redact(path)} does not exist (working folder: {os.getcwd()})"
        ) from error
    except OSError as error:
        raise AccessError(f"{redact(path)} can't be read: {error.strerror or error}") from error
