"""The attributes of files that `headrace.pack` wrote."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.paths import redact
from headrace.storage.hdf5.files import HDF5Files

PACKED_VERSION = 2  # the latest layout; files that an older headrace reads keep the number that it knows
PACKED_ATTRIBUTE = "headrace"  # root attribute of a packed file: the JSON text of a PackedInfo
PACKED_CHECKSUM = "headrace_crc32"  # root attribute: the CRC of that text (HDF5 has none for texts beyond 64 kB)
DATA, OFFSETS, TARGETS, CRC, NAMES, NAME_OFFSETS = "data", "offsets", "targets", "crc32", "names", "name_offsets"


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """What a file that `headrace.pack` wrote says about itself.

    Attributes:
        kind: "image", "text", or "array" where the samples are arrays of any kind.
        store: "encoded" (flat bytes and offsets), "decoded" (one row a sample), "tokens" (flat tokens and offsets) or "ragged" (flat rows
            of arrays of any length, and offsets; layout 2).
        count: number of samples.
        fingerprint: of the dataset that was packed.
        classes: class names, or None.
        image: for images: their `image_size` and `color` when decoded.
        text: for texts: "tokenizer", by which it is known again (None: by nothing), its "class", "end_token" and "unit".
        checksums: CRCs of the datasets beside the samples (offsets, names, targets), by name.
        part: of one of several files: its number, how many there are, and fingerprint and number of samples of all together (layout 2).
        version: of this layout.
    """

    kind: str
    store: str
    count: int
    fingerprint: str
    classes: list[str] | None = None
    image: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    part: tuple[int, int, str, int] | None = None
    version: int = 1

    @property
    def is_flat(self) -> bool:
        """True if the samples lie flat, one behind the other, and offsets say where each begins."""
        return self.store != "decoded"


def packed_info(path: str | os.PathLike[Any], hdf5: HDF5Files | None = None) -> PackedInfo | None:
    """What a packed file says about itself; None for any other HDF5 file.

    Raises:
        FormatError: the file is of a later version of headrace, or damaged.
    """
    with (hdf5 or HDF5Files()).reading(os.fspath(path)) as file:
        text, checksum = file.attrs.get(PACKED_ATTRIBUTE), file.attrs.get(PACKED_CHECKSUM)
    if text is None:
        return None
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
        if checksum is not None and zlib.crc32(data) != int(checksum):
            raise ValueError("wrong checksum")
        fields = json.loads(data)
        if fields["version"] > PACKED_VERSION:
            raise FormatError(
                f"{redact(path)} was packed by a later headrace (layout {fields['version']}, this one reads up to "
                f"{PACKED_VERSION}): upgrade headrace, or pack again"
            )
        return PackedInfo(**fields)
    except FormatError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{redact(path)}: the attribute {PACKED_ATTRIBUTE!r} is damaged: {error}") from error


def are_offsets(offsets: npt.NDArray[Any], count: int, end: int) -> bool:
    """True if `count + 1` offsets lead from 0 to `end`, never backwards."""
    is_whole = offsets.shape == (count + 1,) and offsets[0] == 0 and offsets[-1] == end
    return bool(is_whole and np.all(offsets[1:] >= offsets[:-1]))


def crc_of(data: Any) -> int:
    """The CRC-32 (zlib's) of a sample's bytes."""
    return zlib.crc32(bytes_of(np.asarray(data)).data)


def bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array's bytes, flat; in any byte order and any dtype of numbers, for which a memoryview has no cast."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
