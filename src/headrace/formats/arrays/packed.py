"""What packs say about themselves, and their samples, whatever format holds them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import AnyArray
from headrace.errors import FormatError
from headrace.io.paths import redact

PACKED_VERSION = 1  # the layout that this headrace writes
PACKED_ATTRIBUTE = "headrace"  # root attribute of a pack: the JSON text of a PackedInfo
# root attribute: the CRC of that text (HDF5 has none for texts beyond 64 kB)
PACKED_CHECKSUM = "headrace_crc32"
DATA, OFFSETS, TARGETS, CRC = "data", "offsets", "targets", "crc32"
NAMES, NAME_OFFSETS = "names", "name_offsets"
# [1] uint32: the CRC of a whole HDF5 file, in which these four bytes count as zeros
FILE_CRC = "file_crc32"
MASKS, BOXES = "masks", "boxes"  # what the targets of images may be, beside numbers
# [n] int64: the byte of `data` at which the mask of a sample begins, right behind its image
MASK_STARTS = "mask_starts"
# fields of a row of pixels with their mask
IMAGE, MASK = "image", "mask"
# [n] int64; [n, 2] int64, height and width that boxes are in pixels of
IMAGE_ID, IMAGE_SIZE = "image_id", "image_size"
OBJECT, LABELS, SEGMENTATIONS = "object", "labels", "segmentations"
RAGGED = {
    BOXES: OBJECT,
    LABELS: OBJECT,
    "area": OBJECT,
    "iscrowd": OBJECT,
    SEGMENTATIONS: "segmentation",
}
"""Arrays with any number of items a sample, and what their edges are called: ``object_offsets`` ([n
+ 1] int64).
"""


def target_named(number: int) -> str:
    """What a column is called of targets that are dicts ([n, ...])."""
    return f"{TARGETS}_{number}"


def are_targets(name: str) -> bool:
    """True if an array of a pack holds targets, or a column of them."""
    begin, _, number = name.partition("_")
    return name == TARGETS or (begin == TARGETS and number.isdecimal())


def offsets_named(name: str) -> str:
    """What the offsets of an array of `RAGGED` are called."""
    return f"{RAGGED[name]}_offsets"


BESIDE = {OFFSETS, TARGETS, CRC, NAMES, NAME_OFFSETS, MASK_STARTS, IMAGE_ID, IMAGE_SIZE}
BESIDE |= {*RAGGED, *map(offsets_named, RAGGED)}
"""The names of all arrays that may lie beside the samples."""


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """What a file that `headrace.pack` wrote says about itself.

    Attributes:
        kind: "image", "text", or "array" where the samples are arrays of any kind.
        store: "encoded" (flat bytes and offsets), "decoded" (one row a sample), "tokens" (flat
            tokens and offsets) or "ragged" (flat rows of arrays of any length, and offsets).
        count: number of samples.
        fingerprint: of the dataset that was packed.
        classes: class names, or None.
        image: for images: their `image_size` and `color` when decoded; with masks or boxes
            `targets` ("masks" or "boxes"), and of boxes `class_ids`, the number of each of the
            `classes`.
        text: for texts: "tokenizer", by which it is known again (None: by nothing), its "class",
            "end_token" and "unit"; where this is "chat", ids that are not supervised are stored as
            -1 - id.
        checksums: CRCs of the datasets beside the samples (offsets, names, targets), by name.
        part: of one of several files: its number, how many there are, and fingerprint and number of
            samples of all together.
        values: "bytes" or "str" where the samples are these ("ragged" rows of uint8, those of str
            in UTF-8); None: arrays.
        target_columns: of targets that are dicts, in order, the name of each column and the names
            of its classes, or None; column i is the array ``targets_{i}``. None: targets are one
            array, or there are none.
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
    values: str | None = None
    target_columns: list[Any] | None = None
    version: int = 1

    @property
    def is_flat(self) -> bool:
        """True if the samples lie flat, one behind the other, and offsets say where each begins."""
        return self.store != "decoded"


class PackPart(NamedTuple):
    """Which part of a pack of several files a source is."""

    number: int
    of: int
    fingerprint: str
    """Of all parts together."""
    samples: int
    """Of all parts together."""


def fingerprint_of_files(
    parts: Sequence[PackPart | None], count: int, fingerprints: Sequence[str]
) -> str:
    """The fingerprint of several files as one dataset: that of the pack, if these are all of its
    parts, and none has left out a sample.

    Args:
        parts: what each says which part of a pack it is.
        count: of samples of all.
        fingerprints: of each.
    """
    first = parts[0]
    if (
        first is not None
        and count == first.samples
        and list(parts) == [first._replace(number=number) for number in range(first.of)]
    ):
        return first.fingerprint
    return hashlib.blake2b("\0".join(fingerprints).encode(), digest_size=16).hexdigest()


def info_text(info: PackedInfo) -> bytes:
    """The JSON text of a pack's attribute."""
    return json.dumps(asdict(info), sort_keys=True).encode("ascii")


def info_in(attributes: Mapping[str, Any], path: Any) -> PackedInfo | None:
    """What a file or store says about itself; None: `headrace.pack` did not write it.

    Args:
        attributes: of its root.
        path: for messages.

    Raises:
        FormatError: it is of a later version of headrace, or damaged.
    """
    text = attributes.get(PACKED_ATTRIBUTE)
    checksum = attributes.get(PACKED_CHECKSUM)
    if not isinstance(text, str | bytes):
        return None
    try:
        data = text.encode() if isinstance(text, str) else text
        if checksum is not None and zlib.crc32(data) != int(checksum):
            raise ValueError("wrong checksum")
        fields = json.loads(data)
        if fields["version"] > PACKED_VERSION:
            raise FormatError(
                f"{redact(path)} was packed by a later headrace (layout {fields['version']}, this "
                f"one reads {PACKED_VERSION}): upgrade headrace, or pack again"
            )
        info = PackedInfo(**fields)
        # the only one is the whole
        if info.part is not None and info.part[1] == 1 and info.part[3] == info.count:
            return replace(info, fingerprint=info.part[2])
        return info
    except FormatError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(
            f"{redact(path)}: the attribute {PACKED_ATTRIBUTE!r} is damaged: {error}"
        ) from error


def crc_of(data: Any) -> int:
    """The CRC-32 (zlib's) of a sample's bytes."""
    crc: int = isal_zlib.crc32(bytes_of(np.asarray(data)).data)
    return crc


def bytes_of(array: AnyArray) -> npt.NDArray[np.uint8]:
    """The array's bytes, flat; in any byte order and any dtype of numbers, for which a
    memoryview has no cast.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def are_offsets(offsets: AnyArray, count: int, end: int) -> bool:
    """True if `count + 1` offsets lead from 0 to `end`, never backwards."""
    is_whole = offsets.shape == (count + 1,) and offsets[0] == 0 and offsets[-1] == end
    return bool(is_whole and np.all(offsets[1:] >= offsets[:-1]))
