"""Says what a folder holds, for messages that name the class that reads it."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

_IMAGES = (
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
_TEXTS = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
READERS: dict[str, tuple[str, ...]] = {
    "ImageDataset": _IMAGES,
    "TextDataset": tuple(ending + packed for ending in _TEXTS for packed in ("", ".gz", ".zst")),
    "HDF5Dataset": (".h5", ".hdf5", ".he5"),
    "SparseDataset": (".h5ad",),
    "ZarrDataset": (".zarr", ".zarr.zip"),
    "StreamingDataset": (".tar",),
    "TableDataset": (".parquet", ".pq", ".arrow", ".feather", ".npy", ".npz"),
}
"""The classes that read files of some endings."""
_TABLES = READERS["TableDataset"]
BOOKKEEPING = (
    b"readme.md",
    b"dataset_dict.json",
    b"dataset_info.json",
    b"dataset_infos.json",
    b"state.json",
)
"""What HuggingFace writes beside tables, in lower case."""
MOST = 10_000
"""Names that are looked at for a message."""


def is_hidden_part(part: bytes) -> bool:
    """True if a file or folder of that name is hidden: ``.git``, ``._x.jpg``, and ``__MACOSX``,
    which macOS adds to archives.
    """
    return part.startswith(b".") or part == b"__MACOSX"


def is_hidden(name: bytes) -> bool:
    """True if a file, or a folder on the way to it, is hidden."""
    return name.startswith((b".", b"__MACOSX/")) or b"/." in name or b"/__MACOSX/" in name


def names_below(root: str) -> Iterator[str]:
    """Names of the files below a local folder that are not hidden, in no order; of Zarr stores,
    which are folders, their own.
    """
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    for folder, folders, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        stores = [name for name in folders if name.lower().endswith(".zarr")]
        folders[:] = [
            name for name in folders if not is_hidden_part(os.fsencode(name)) and name not in stores
        ]
        yield from (
            name for name in itertools.chain(names, stores) if not is_hidden_part(os.fsencode(name))
        )


def are_bookkeeping(names: Sequence[bytes]) -> bool:
    """True if files are no more than what HuggingFace writes beside the tables of a data set."""
    return 0 < len(names) <= MOST and all(
        name.rpartition(b"/")[2].lower() in BOOKKEEPING for name in names
    )


def has_tables(names: Iterable[str]) -> bool:
    """True if Arrow or Parquet tables are among some files."""
    return any(_ending_of(name) in _TABLES[:4] for name in names)


def summary_of(names: Sequence[str]) -> str:
    """Which files there are, and the class that reads them: "there are 24 .jpg and 1 .json: use
    ImageDataset".
    """
    if not names:
        return "nothing else is there: is the path right?"
    counts = sorted(Counter(map(_ending_of, names)).items(), key=lambda item: (-item[1], item[0]))
    shown = [
        f"{count:,}{'' if count < MOST else ' or more'} {ending or 'without an ending'}"
        for ending, count in counts[:3]
    ]
    found = f"{'there is' if len(names) == 1 else 'there are'} {' and '.join(shown)}"
    readers = [
        reader for ending, _ in counts for reader, endings in READERS.items() if ending in endings
    ]
    if has_tables(names) and are_bookkeeping(
        [os.fsencode(name) for name in names if _ending_of(name) not in _TABLES]
    ):
        readers = ["TableDataset"]
    advice = "is the path right?"
    if readers:
        advice = f"use {readers[0]}"
    return f"{found}: {advice}"


def _ending_of(name: str) -> str:
    """ ".jpg"; of what is packed both: ".jsonl.gz"."""
    root, ending = os.path.splitext(name.rpartition("/")[2].lower())
    if ending in (".gz", ".zst", ".zip"):
        return os.path.splitext(root)[1] + ending
    return ending
