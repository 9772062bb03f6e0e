"""Formats, and the files that a path means as flat arrays of names."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.io.files import Files
from headrace.io.local_files import LocalFiles
from headrace.io.paths import named_part
from headrace.memory.anonymous import SharedArray

if TYPE_CHECKING:
    from headrace.io.remote_files import RemoteFiles

EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".tiff",
    ".tif",
    ".webp",
    ".gif",
    ".avif",
    ".heic",
    ".heif",
    ".jxl",
)
"""Of images, in any case."""
_TEXTS = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
TEXT_EXTENSIONS = tuple(ending + packed for ending in _TEXTS for packed in ("", ".gz", ".zst"))
_TABLES = (".parquet", ".pq", ".arrow", ".feather")
READERS: dict[str, tuple[str, ...]] = {
    "ImageDataset": EXTENSIONS,
    "TextDataset": TEXT_EXTENSIONS,
    "HDF5Dataset": (".h5", ".hdf5", ".he5"),
    "SparseDataset": (".h5ad",),
    "ZarrDataset": (".zarr", ".zarr.zip"),
    "StreamingDataset": (".tar",),
    "TableDataset": (*_TABLES, ".npy", ".npz"),
    "open_dataset": (
        *(".mds", ".mds.gz", ".zstd", ".bin"),
        *(".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz"),
    ),
}
"""The endings of the files that a class or function reads."""
BOOKKEEPING = (
    b"readme.md",
    b"dataset_dict.json",
    b"dataset_info.json",
    b"dataset_infos.json",
    b"state.json",
)
"""Metadata files that HuggingFace writes next to tables, in lower case."""
MOST = 10_000
"""Number of names that messages are made of."""
_CHUNK = 1 << 16  # names that are Python objects at the same time


NUMBERED = re.compile(rb"(\.tfrecords?)-\d{5,}-of-\d{5,}(?=\0|\Z)")
"""The number that TensorFlow appends to a name, also among names with zero bytes between them."""


def plain_name(name: str) -> str:
    """A name by which endings are compared: in lower case, and without the number that TensorFlow
    appends, as in ``train.tfrecord-00000-of-00010``.
    """
    return os.fsdecode(plain_bytes(os.fsencode(name.lower())))


def plain_bytes(name: bytes) -> bytes:
    """See `plain_name`."""
    if name[-1:].isdigit():
        return NUMBERED.sub(rb"\1", name.lower())
    return name.lower()


@dataclass(frozen=True, slots=True)
class Format:
    """A file format that datasets read.

    A package registers its own format by an entry point in the group ``headrace.formats`` that
    names a `Format`, with at least `name`, `endings` and `open`.

    Attributes:
        name: the plural that messages use, such as "images".
        endings: endings of its files in lower case, such as (".jpg", ".png").
        stores: endings of stores that may be folders, such as (".zarr", ".zarr.zip"). Stores are
            looked for in the first level of a folder only.
        keeps_order: True: files keep the order of the entries of `data_path`, and those of a glob
            or folder are sorted as text. False: all are sorted by the parts of their names.
        recognizes: ``recognizes(path)`` is True if the content of a local file or folder has this
            format, whatever its name. None: the ending decides.
        is_store: ``is_store(url, server)`` is True if there is a store at a URL, whatever its name.
        bookkeeping: lower-case names of files that are written next to the data and are not data.
        is_exclusive: True if files of this and of another exclusive format in one folder are an
            error.
        dataset: name of the class that reads it. "": `ColumnsDataset`.
        open: ``open(paths, files)`` returns a `headrace.formats.source.Columns`. `paths` are
            absolute paths or URLs (list of str), in order. ``files.read_each(ByteRanges.of([(path,
            start, stop), ...]))`` returns their bytes, local or remote. None: the class `dataset`
            opens the files.
        all_endings: `endings` and `stores`.
    """

    name: str
    endings: tuple[str, ...]
    stores: tuple[str, ...] = ()
    keeps_order: bool = False
    recognizes: Callable[[str], bool] | None = None
    is_store: Callable[[str, Any], bool] | None = None
    bookkeeping: tuple[bytes, ...] = ()
    is_exclusive: bool = False
    dataset: str = ""
    open: Callable[[Sequence[str], Files], Any] | None = None
    all_endings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_endings", (*self.endings, *self.stores))

    def fits(self, path: str) -> bool:
        """True if a path, URL or glob has one of the endings."""
        return plain_name(named_part(path).rstrip("/")).endswith(self.all_endings)


class PackedNames(Sequence[bytes]):
    """Many byte strings in two flat, read-only arrays, which workers share: their bytes, and the
    offsets where each begins. A list of as many objects would take ten times the memory, and each
    worker would copy it.
    """

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        listed = list(names)
        offsets = itertools.accumulate(map(len, listed), initial=0)
        self._bytes = SharedArray(np.frombuffer(b"".join(listed), np.uint8))
        self._offsets = SharedArray(np.fromiter(offsets, np.int64, len(listed) + 1))

    @classmethod
    def from_arrays(
        cls, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
    ) -> PackedNames:
        """Names from their bytes ([bytes] uint8) and offsets ([n + 1] int64)."""
        packed = cls.__new__(cls)
        packed._bytes = SharedArray(data)
        packed._offsets = SharedArray(offsets)
        return packed

    @classmethod
    def joined(cls, each: Iterable[PackedNames | None]) -> PackedNames | None:
        """Concatenates several; None if one is None."""
        data = [np.empty(0, np.uint8)]
        offsets = [np.zeros(1, np.int64)]
        nbytes = 0
        for names in each:
            if names is None:
                return None
            data.append(names._bytes.array)
            offsets.append(names._offsets.array[1:] + nbytes)
            nbytes += len(names._bytes)
        return cls.from_arrays(np.concatenate(data), np.concatenate(offsets))

    @property
    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes and the offsets."""
        return self._bytes.array, self._offsets.array

    def __len__(self) -> int:
        return len(self._offsets.array) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        data = self._bytes.array
        offsets = self._offsets.array
        count = len(offsets) - 1
        if not -count <= index < count:
            raise IndexError(index)
        index %= count
        return data[offsets[index] : offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data, offsets = self.arrays
        for start in range(0, len(self), _CHUNK):
            ends = offsets[start : start + _CHUNK + 1].tolist()
            first = ends[0]
            joined = data[first : ends[-1]].tobytes()
            for begin, end in itertools.pairwise(ends):
                yield joined[begin - first : end - first]

    def end_in(self, *endings: str) -> npt.NDArray[np.bool_]:
        """[n] bool: which names have one of these endings (ASCII letters and dots, any case)."""
        data = self._bytes.array
        offsets = self._offsets.array
        found = np.zeros(len(self), bool)
        for ending in endings:
            fits = np.diff(offsets) >= len(ending)
            for place, byte in enumerate(reversed(ending.encode()), 1):
                left = np.flatnonzero(fits)
                # which makes letters small, and leaves a dot
                fits[left] = (data[offsets[left + 1] - place] | 0x20) == (byte | 0x20)
            found |= fits
        return found

    def take(self, order: npt.NDArray[np.int64]) -> PackedNames:
        """The names at `order` ([m] int64)."""
        return PackedNames(map(self.__getitem__, order.tolist()))


IMAGES = Format("images", EXTENSIONS, dataset="ImageDataset")
TEXTS = Format("texts", TEXT_EXTENSIONS, dataset="TextDataset")
TARS = Format(
    "tar shards",
    (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"),
    dataset="StreamingDataset",
)


@dataclass(frozen=True, slots=True)
class FileSet(Sequence[str]):
    """The files of a `data_path`, as a sequence of their paths (without the protocol if they are
    remote).

    Attributes:
        roots: folders, local or on a server, that the names are relative to.
        tails: per root, what follows the names: the query of an HTTP URL, else "".
        root_of: [files] int32, the number of each file's root. None: there is one root.
        names: relative names as bytes, with '/' between their parts, sorted by their parts (but see
            `Format.keeps_order`).
        folders: sorted names of the first-level folders of the roots, empty ones too.
        searched: the roots that were searched recursively.
        server: reads the files. None: they are local.
        given: the `data_path` as the user passed it.
        kind: their format.
        beside: contents of files next to them, by name.
    """

    roots: tuple[str, ...]
    tails: tuple[str, ...]
    root_of: SharedArray | None
    names: PackedNames
    folders: tuple[str, ...]
    searched: frozenset[str]
    server: RemoteFiles | None
    given: Any
    kind: Format
    beside: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        return os.fsdecode(self.path(index))

    @property
    def is_remote(self) -> bool:
        """True if the files are read through fsspec."""
        return self.server is not None

    def path(self, index: int) -> bytes:
        """The path of a file, without the protocol if it is remote."""
        number = 0
        if self.root_of is not None:
            number = int(self.root_of.array[index])
        root = self.roots[number]
        if root not in ("", "/"):
            root += "/"  # even after a slash: of the keys of a bucket each counts
        path: bytes = os.fsencode(root) + self.names[index] + os.fsencode(self.tails[number])
        return path

    def url(self, index: int) -> str:
        """The path or URL of a file."""
        path: str = self[index]
        if self.server is None:
            return path
        return self.server.url_of(path)

    def urls(self) -> list[str]:
        """The paths or URLs of all files."""
        return [self.url(index) for index in range(len(self))]

    def to_read(
        self, cache_dir: str | os.PathLike[str] | None = None
    ) -> tuple[list[str], RemoteFiles | LocalFiles]:
        """The absolute paths or URLs of all files, and what reads them."""
        if self.server is not None:
            return self.urls(), self.server
        return list(map(os.path.abspath, self)), LocalFiles(cache_dir)


@dataclass(slots=True)
class Found:
    """The files of one entry of a `data_path`.

    Attributes:
        root: the folder that the names are relative to.
        names: names of the files.
        folders: names of the first-level folders.
        searched: True if the root was searched recursively.
        tail: see `FileSet.tails`.
        others: names of other files, at most `MOST`.
    """

    root: str
    names: list[bytes]
    folders: set[bytes] = field(default_factory=set)
    searched: bool = False
    tail: str = ""
    others: list[bytes] = field(default_factory=list)


def is_hidden_part(part: bytes) -> bool:
    """True if a file or folder with this name is hidden: ``.git``, ``._x.jpg``, and ``__MACOSX``,
    which macOS adds to archives.
    """
    return part.startswith(b".") or part == b"__MACOSX"


def is_hidden(name: bytes) -> bool:
    """True if a file, or a folder that contains it, is hidden."""
    return name.startswith((b".", b"__MACOSX/")) or b"/." in name or b"/__MACOSX/" in name


def are_bookkeeping(names: Sequence[bytes], bookkeeping: Sequence[bytes] = BOOKKEEPING) -> bool:
    """True if all files are metadata that are written next to data."""
    for number in range(len(names)):
        if number >= MOST or names[number].rpartition(b"/")[2].lower() not in bookkeeping:
            return False
    return len(names) > 0


def are_tables(names: Sequence[bytes]) -> bool:
    """True if the files are Arrow or Parquet tables, and at most metadata besides."""
    endings = tuple(map(os.fsencode, _TABLES))
    others = [name for name in names if not name.lower().endswith(endings)]
    return len(others) < len(names) and (not others or are_bookkeeping(others))


def are_shards(names: Sequence[bytes]) -> bool:
    """True if some files are shards of another library."""
    endings = tuple(map(os.fsencode, READERS["open_dataset"]))
    return any(plain_bytes(name).endswith(endings) for name in names)


def summary_of(names: Sequence[bytes]) -> str:
    """Counts files by ending, and names the class that reads them: "there are 24 .jpg and 1 .json:
    use ImageDataset".
    """
    if not names:
        return "nothing else is there: check the path"
    # of a store all files are one
    stores = {re.sub(rb"(?i)(\.zarr)/.*", rb"\1", name, flags=re.DOTALL) for name in names}
    counts = Counter(sorted(_ending_of(os.fsdecode(name)) for name in stores)).most_common()
    shown = [f"{count:,} {ending or 'without an ending'}" for ending, count in counts[:3]]
    readers = [
        reader for ending, _ in counts for reader, endings in READERS.items() if ending in endings
    ]
    if are_tables(names):
        readers = ["TableDataset"]
    advice = "check the path"
    if readers:
        advice = f"use {readers[0]}"
    verb = "are"
    if len(stores) == 1:
        verb = "is"
    return f"there {verb} {' and '.join(shown)}: {advice}"


def _ending_of(name: str) -> str:
    """The ending of a name, including that of a compressed file: ".jpg", ".jsonl.gz"."""
    root, ending = os.path.splitext(plain_name(name.rpartition("/")[2]))
    if ending in (".gz", ".zst", ".zip"):
        return os.path.splitext(root)[1] + ending
    return ending
