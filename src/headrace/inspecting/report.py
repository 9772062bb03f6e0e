"""What is found out about a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.storage.arrays.packed import LABELS, PackedInfo

MOST_NODES = 2000
"""Groups and arrays of a file that are looked at."""
CUT_OFF = f"the first {MOST_NODES:,} groups and arrays are shown, there are more"
NO_SAMPLES = "there is no array with an axis of samples"


@dataclass(slots=True)
class Node:
    """A group or an array of a file, or files of one kind.

    Attributes:
        path: in the file; "" is its root.
        kind: "group", "array", "link" (to another place or file) or "files".
        shape, dtype: of an array.
        layout: "contiguous", "chunked", "sharded", "compact", "virtual", "external" or "scalar".
        chunks, shards: extents.
        codecs: in the order in which they encode.
        nbytes: of the values.
        stored: bytes in the file; None: nobody knows without reading it.
        is_estimate: True if `stored` was found by looking at some chunks.
        chunks_written: how many chunks there are; None: it was not counted.
        details: what else there is to say, such as the axes of an image.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    layout: str | None = None
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    codecs: list[str] = field(default_factory=list)
    nbytes: int = 0
    stored: int | None = None
    is_estimate: bool = False
    chunks_written: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


def largest_of(arrays: Sequence[Node], notes: list[str]) -> Node:
    """The largest array, where nobody has named one; of several a note says so."""
    largest = max(arrays, key=lambda node: node.nbytes)
    if len(arrays) > 1:
        notes.append(
            f"there are {len(arrays):,} arrays: {largest.path!r} is the largest; name another one "
            "by --dataset-name"
        )
    return largest


OBJECTS_ARE = f"objects by {LABELS!r}"
"""What tells the classes of a pack with boxes."""


def samples_of_pack(info: PackedInfo) -> str:
    """What the samples of a pack are."""
    targets = f" with {info.image['targets']}" if "targets" in info.image else ""
    return {"image": "images", "text": "texts as tokens"}.get(
        info.kind, "arrays"
    ) + f"{targets}, stored {info.store}"


def columns_of_pack(info: PackedInfo) -> dict[str, str]:
    """The columns of targets that are dicts, as a detail of a report; {}: they are none."""
    if info.target_columns is None:
        return {}
    each = [
        name if classes is None else f"{name} ({len(classes):,} classes)"
        for name, classes in info.target_columns
    ]
    return {"targets": ", ".join(each)}


@dataclass(frozen=True, slots=True)
class Access:
    """What one random sample costs, with nothing in memory.

    Attributes:
        name: of the array; "" where there is none.
        sample: what a sample is: "a row", "a patch of 64 x 64 x 64", "a file".
        way: by which path headrace reads it, and why.
        nbytes: of the sample, decoded; None: it is not known, such as that of a text.
        chunks: that are decoded for it; 0: none, its bytes lie as they are.
        decoded: bytes that come of these.
        read: stored bytes that are read, about.
        reads: ranges of the file that are read, about.
        by_library: True if h5py, zarr-python or the like read it.
        total: bytes of all samples, decoded; 0: it is not known.
        chunk_count: chunks of the array; 0: it has none.
        problem: why it can't be read; "": it can.
    """

    name: str
    sample: str
    way: str
    nbytes: int | None = None
    chunks: float = 0
    decoded: int = 0
    read: int = 0
    reads: float = 1
    by_library: bool = False
    total: int = 0
    chunk_count: int = 0
    problem: str = ""

    @classmethod
    def impossible(cls, name: str, error: Exception) -> Access:
        """Of an array that can't be read."""
        problem = " ".join(str(error).split())
        return cls(name, "a row", f"not at all: {problem}", by_library=True, problem=problem)

    @property
    def amplification(self) -> float:
        """Bytes that are decoded, or read, for each byte of a sample."""
        return max(self.decoded, self.read) / self.nbytes if self.nbytes else 1.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What would make random samples faster.

    Attributes:
        why: what is slow now.
        command: that changes it; "": there is none.
        code: Python that helps without a change of the files; "": there is none.
        gain: by which the rate of random samples grows at least, in one process that reads from
            memory; None: nobody can say.
        nbytes: of what the command writes, about; None: it is not known.
    """

    why: str
    command: str = ""
    code: str = ""
    gain: float | None = None
    nbytes: int | None = None


@dataclass(slots=True)
class Report:
    """What a path holds.

    Attributes:
        path: as it may be shown.
        format: such as "HDF5", "Zarr 3", "images".
        details: facts in the order in which they are told.
        files: how many there are.
        stored: bytes of them; None: it is not known.
        is_estimate: True if `stored` was found by looking at some files.
        samples: how many there are; None: it is not known, or nothing here is one.
        samples_are: what they are: "rows of 'data', uint8 [28, 28]".
        samples_estimated: True if they were counted in a part of the files.
        nodes: groups and arrays, each group before what is in it.
        classes: samples of each class; None: there are no classes.
        classes_are: what says the class: "folders", "values of 'labels'".
        fingerprint: of the dataset.
        opens_as: how it is opened in Python; None: it can't be.
        access: what random samples cost.
        advice: what would make them faster.
        notes: what there is to know besides.
    """

    path: str
    format: str
    details: dict[str, Any] = field(default_factory=dict)
    files: int = 1
    stored: int | None = None
    is_estimate: bool = False
    samples: int | None = None
    samples_are: str = ""
    samples_estimated: bool = False
    nodes: list[Node] = field(default_factory=list)
    classes: dict[str, int] | None = None
    classes_are: str = ""
    fingerprint: str | None = None
    opens_as: str | None = None
    access: list[Access] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tell_opening(self, call: str, problem: str) -> None:
        """Tells how it is opened, or what speaks against that."""
        if problem:
            self.notes.append(f"it can't be opened: {problem}")
        else:
            self.opens_as = call

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can say it."""
        return asdict(self)
