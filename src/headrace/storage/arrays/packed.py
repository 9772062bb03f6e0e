"""What packs say about themselves, and their samples, whatever format holds them."""

from __future__ import annotations

import json
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.reader import ArrayReader, Map
from headrace.storage.arrays.rows import ArraysSource
from headrace.storage.source import Rows

# the latest layout; files that an older headrace reads keep the number that it knows
PACKED_VERSION = 7
PACKED_ATTRIBUTE = "headrace"  # root attribute of a pack: the JSON text of a PackedInfo
# root attribute: the CRC of that text (HDF5 has none for texts beyond 64 kB)
PACKED_CHECKSUM = "headrace_crc32"
DATA, OFFSETS, TARGETS, CRC, NAMES, NAME_OFFSETS = (
    "data",
    "offsets",
    "targets",
    "crc32",
    "names",
    "name_offsets",
)
# [1] uint32: the CRC of a whole HDF5 file, in which these four bytes count as zeros
FILE_CRC = "file_crc32"
STARTS, STOPS, NAME_STARTS, NAME_STOPS = "starts", "stops", "name_starts", "name_stops"
"""Of Zarr packs, in place of offsets: between two parts there is room."""
MASKS, BOXES = "masks", "boxes"  # what the targets of images may be, beside numbers
# [n] int64: the byte of `data` at which the mask of a sample begins, right behind its image
MASK_STARTS = "mask_starts"
# fields of a row of pixels with their mask; in Zarr packs the mask is an array of its own
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
+ 1] int64), and in Zarr packs ``object_starts`` and ``object_stops`` ([n] int64 each).
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


def edges_named(name: str) -> tuple[str, str]:
    """What starts and stops of an array of `RAGGED` are called in a Zarr pack."""
    return f"{RAGGED[name]}_starts", f"{RAGGED[name]}_stops"


BESIDE = {
    *(
        OFFSETS,
        TARGETS,
        CRC,
        NAMES,
        NAME_OFFSETS,
        STARTS,
        STOPS,
        NAME_STARTS,
        NAME_STOPS,
        MASK_STARTS,
        IMAGE_ID,
        IMAGE_SIZE,
    ),
    *(one for name in RAGGED for one in (name, offsets_named(name), *edges_named(name))),
}
"""The names of all arrays that may lie beside the samples."""


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """What a file that `headrace.pack` wrote says about itself.

    Attributes:
        kind: "image", "text", or "array" where the samples are arrays of any kind.
        store: "encoded" (flat bytes and offsets), "decoded" (one row a sample), "tokens" (flat
            tokens and offsets) or "ragged" (flat rows of arrays of any length, and offsets; layout
            2).
        count: number of samples.
        fingerprint: of the dataset that was packed.
        classes: class names, or None.
        image: for images: their `image_size` and `color` when decoded; with masks or boxes (layout
            4) `targets` ("masks" or "boxes"), and of boxes `class_ids`, the number of each of the
            `classes`. Pixels with masks in Zarr are layout 6.
        text: for texts: "tokenizer", by which it is known again (None: by nothing), its "class",
            "end_token" and "unit"; where this is "chat", ids that are not supervised are stored as
            -1 - id (layout 5).
        checksums: CRCs of the datasets beside the samples (offsets, names, targets), by name.
        part: of one of several files: its number, how many there are, and fingerprint and number of
            samples of all together (layout 2).
        values: "bytes" or "str" where the samples are these ("ragged" rows of uint8, those of str
            in UTF-8); None: arrays (layout 3).
        target_columns: of targets that are dicts, in order, the name of each column and the names
            of its classes, or None; column i is the array ``targets_{i}``. None: targets are one
            array, or there are none (layout 7).
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


def info_text(info: PackedInfo) -> bytes:
    """What a pack says of itself; without what older readers don't know, where there is none."""
    said = {
        name: value
        for name, value in asdict(info).items()
        if name not in ("part", "values", "target_columns") or value is not None
    }
    return json.dumps(said, sort_keys=True).encode("ascii")


def parse_info(text: str | bytes | np.bytes_ | None, checksum: Any, path: Any) -> PackedInfo | None:
    """What the attributes of a pack say; None: there are none.

    Args:
        text, checksum: the attributes.
        path: of the pack, for messages.

    Raises:
        FormatError: it is of a later version of headrace, or damaged.
    """
    if text is None:
        return None
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
        if checksum is not None and zlib.crc32(data) != int(checksum):
            raise ValueError("wrong checksum")
        fields = json.loads(data)
        if fields["version"] > PACKED_VERSION:
            raise FormatError(
                f"{redact(path)} was packed by a later headrace (layout {fields['version']}, this "
                "one reads up to "
                f"{PACKED_VERSION}): upgrade headrace, or pack again"
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


class PackedSource(ArraysSource):
    """Rows of arrays, which may be the samples of a pack: those are checked against their CRC.

    Attributes:
        info: what the pack says about itself; None: it is none.
        names: of the samples, or None.
    """

    info: PackedInfo | None = None
    names: PackedNames | None = None
    _crc: SharedArray | None = None
    _mask_starts: SharedArray | None = None
    gives_pairs, gives_images = False, False
    """True if records are pairs of an image and its mask; or images alone, out of pairs."""

    def give_pairs(self, images_alone: bool = False) -> None:
        """From now on `read` gives pairs: of the bytes of an image and of its mask, or of pixels
        and theirs; or the first of both alone.

        Raises:
            FormatError: where masks begin doesn't fit the samples.
        """
        spans = self._spans(slice(None))
        if spans is not None:
            begins = self.column(MASK_STARTS)
            if (
                begins.dtype != np.int64
                or begins.ndim != 1
                or (begins < spans[0]).any()
                or (begins > spans[1]).any()
            ):
                raise FormatError(
                    f"{redact(self.path)} is damaged: {MASK_STARTS} don't fit the samples: pack "
                    "it again"
                )
            self._mask_starts = SharedArray(begins)
        elif self.dtype.names != (IMAGE, MASK):
            raise FormatError(
                f"{redact(self.path)} is damaged: its rows have the fields {self.dtype.names}: "
                "pack it again"
            )
        self.gives_pairs, self.gives_images = not images_alone, images_alone

    @abstractmethod
    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        """Where samples begin and end that lie flat, one behind the other; None: they are rows."""

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets; of targets that are dicts a
        compound, with a field for each column.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        if (columns := self._columns_of(name)) is None:
            return self.stored_column(name)
        arrays = {
            one: self.stored_column(target_named(number)) for number, one in enumerate(columns)
        }
        rows = np.empty(
            len(self), [(one, array.dtype, array.shape[1:]) for one, array in arrays.items()]
        )
        for one, array in arrays.items():
            rows[one] = array
        return rows

    def has_column(self, name: str) -> bool:
        """True if there is such a `column`."""
        columns = self._columns_of(name)
        return (
            self.has_array(name)
            if columns is None
            else all(self.has_array(target_named(number)) for number in range(len(columns)))
        )

    def _columns_of(self, name: str) -> list[str] | None:
        """The names of the columns of targets that are dicts; None: the name is that of an
        array.
        """
        columns = None if self.info is None or name != TARGETS else self.info.target_columns
        return None if columns is None else [column for column, _ in columns]

    @abstractmethod
    def stored_column(self, name: str) -> npt.NDArray[Any]:
        """`column` of an array as it is stored."""

    @abstractmethod
    def has_array(self, name: str) -> bool:
        """True if there is an array of that name."""

    @abstractmethod
    def ragged(self, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        """An array of `RAGGED`, without what may lie between the items of two samples; and where
        those of each sample begin ([n + 1]).

        Raises:
            MissingNameError, FormatError: no such array; it is damaged.
        """

    # -- what it is

    @property
    @abstractmethod
    def is_flat(self) -> bool:
        """True if the samples lie flat, one behind the other."""

    @property
    def of_samples(self) -> PackedInfo | None:
        """`info`, if the rows are the samples of a pack; None: there is no pack, or they are
        what lies beside its samples.
        """
        return self.info if self.name == DATA else None

    def __len__(self) -> int:
        return self.info.count if self.is_flat and self.info is not None else super().__len__()

    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """The CRC of each sample ([n]); None: there are none."""
        return None if self._crc is None else self._crc.array

    def edges(self) -> IntArray | None:
        """The first byte of each sample in the file, and the end of the last ([n + 1]), where
        they lie one behind the other as they are.
        """
        spans, reader = self._spans(slice(None)), self._readers[0]
        begin = reader.begin if isinstance(reader, ArrayReader) else None
        if begin is None or (spans is not None and not np.array_equal(spans[0][1:], spans[1][:-1])):
            return None
        rows = (
            np.arange(len(self) + 1)
            if spans is None
            else np.concatenate([spans[0][:1] if len(self) else [0], spans[1]])
        )
        edges: IntArray = begin + rows * self._row_bytes
        return edges

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each sample in bytes ([n] int64); of objects nobody knows it: 0."""
        spans = self._spans(slice(None))
        return super().sizes() if spans is None else (spans[1] - spans[0]) * self._row_bytes

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return None if self.is_flat else super().array_spec

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        super().read_into(indices, rows)
        self.check(indices, rows)

    def gather(self, rows: IntArray, out: npt.NDArray[Any], run: Map | None = None) -> None:
        super().gather(rows, out, run)
        self.check(rows.tolist(), out)

    def read(self, indices: Sequence[int]) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64))
        records = self._read_rows(indices) if spans is None else self._read_spans(*spans)
        self.check(indices, records)
        if self.gives_images:
            return [image for image, _ in self._pairs(indices, records)]
        return self._pairs(indices, records) if self.gives_pairs else records

    def _read_rows(self, indices: Sequence[int]) -> list[Any]:
        return super().read(indices)

    def _pairs(self, indices: Sequence[int], records: list[Any]) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64))
        if spans is None or self._mask_starts is None:
            # a copy: in the row it may be at any address
            return [(row[IMAGE], np.array(row[MASK])) for row in records]
        sizes = (self._mask_starts.array[np.asarray(indices, np.int64)] - spans[0]).tolist()
        return [(record[:size], record[size:]) for record, size in zip(records, sizes, strict=True)]

    def image_sizes(self) -> IntArray:
        """Bytes of each image without its mask ([n] int64), where samples are pairs."""
        spans = self._spans(slice(None))
        if spans is None or self._mask_starts is None:
            return np.full(len(self), self.dtype[IMAGE].itemsize, np.int64)
        sizes: IntArray = self._mask_starts.array - spans[0]
        return sizes

    def _read_spans(self, starts: IntArray, stops: IntArray) -> list[Any]:
        samples = [
            np.empty((count, *self.shape[1:]), self.dtype) for count in (stops - starts).tolist()
        ]
        self._readers[0].read_spans(starts, samples, self.run)
        return samples

    def _located(self, indices: npt.NDArray[np.int64]) -> list[ByteRanges]:
        spans = self._spans(indices)
        return (
            super()._located(indices) if spans is None else [self._readers[0].span_ranges(*spans)]
        )

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        if self._crc is None:
            return
        for index, array in zip(indices, records, strict=True):
            if crc_of(array) != int(self._crc.array[index]):
                raise FormatError(self.damaged(index))

    def damaged(self, index: int) -> str:
        """What messages say of a sample that is not what was packed."""
        return f"{self.location(index)}: wrong checksum, the file is damaged: pack it again"

    def blocks_of(self, nbytes: int) -> npt.NDArray[np.int64]:
        spans = self._spans(slice(None))
        if spans is None:
            return super().blocks_of(nbytes)
        return np.unique(spans[0] * self._row_bytes // nbytes, return_counts=True)[1].astype(
            np.int64
        )

    def fingerprint(self) -> str:
        """The one of the packed dataset; else a hash of names, shapes, dtypes and chunk grids."""
        info = self.of_samples
        return super().fingerprint() if info is None else info.fingerprint

    def location(self, index: int) -> str:
        name = f" ({in_one_line(self.names[index])})" if self.names is not None else ""
        return f"{redact(self.path)}, {' and '.join(self._names)}, row {index}{name}"


def crc_of(data: Any) -> int:
    """The CRC-32 (zlib's) of a sample's bytes."""
    crc: int = isal_zlib.crc32(bytes_of(np.asarray(data)).data)
    return crc


def bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array's bytes, flat; in any byte order and any dtype of numbers, for which a
    memoryview has no cast.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
