"""Samples that are one file each, or two; and classes by folders."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import ConfigError, DataNotFoundError, warn
from headrace.formats.resolve.file_set import FileSet, Format, PackedNames, is_hidden_part
from headrace.formats.resolve.find import learn, names_file
from headrace.formats.resolve.resolver import DataPath, entries_of, resolve
from headrace.formats.source import Column, Description, Source
from headrace.io.files import Files
from headrace.io.local_files import LocalFiles
from headrace.io.paths import composed, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions

if TYPE_CHECKING:
    from headrace.io.remote_files import RemoteFiles

_LOOKED_AT = 1000  # files whose sizes are looked at
_PIECE = 1 << 16  # names that are looked at together: what is made of them is small


class FilesSource(Source):
    """One file a sample: local paths are read directly, URLs through fsspec, a batch of them at
    once.

    The index is built here, once, and held as packed bytes and offsets.

    Args:
        data_path: folder, file, glob, fsspec URL, or a list of these.
        extensions: endings of the files that count, in any case.
        remote: how URLs are read.

    Raises:
        DataNotFoundError: there are no such files.
        ConfigError: URLs and paths are mixed, or are on several file systems.
    """

    def __init__(
        self,
        data_path: DataPath | FileSet,
        extensions: Sequence[str],
        remote: RemoteOptions | None = None,
    ) -> None:
        if not isinstance(data_path, FileSet):
            kind = Format("files", tuple(map(str.lower, extensions)))
            data_path = resolve(data_path, kind, remote)
        self.listing: FileSet = data_path
        self._server: RemoteFiles | None = self.listing.server
        self._files: Files = self._server or LocalFiles()
        self._listed_sizes: npt.NDArray[np.int64] | None = None
        if self._server is not None:
            urls = map(os.fsdecode, entries_of(data_path))
            named = [url for url in urls if names_file(url, self.listing.kind)]
            learn(named, self._server)
            self._server.forget(named)  # they are read in whatever version they have then
            self._server.share_versions(self.listing)

    def __len__(self) -> int:
        return len(self.listing.names)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes."""
        return self._files.read_each(ByteRanges.of_wholes(self.listing, indices))

    def describe(self) -> Description:
        count = len(self)
        if self._server is not None:
            way = f"a file each, fetched whole; {self._files.explain()}"
            return Description([Column("files", way)], files=count)
        some = np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)
        mean = 0
        if count:
            mean = int(self.sizes(some).mean())
        column = Column("files", f"a file each, {self._files.explain()}", read=mean)
        return Description([column], files=count, stored=mean * count)

    def take_counts(self) -> Counter[str]:
        return self._files.take_counts()

    def fingerprint(self) -> str:
        """A hash of the sorted relative names and their number."""
        return fingerprint_names(*self.listing.names.arrays)

    def location(self, index: int) -> str:
        if self._server is None:
            return redact(self.listing[index])
        return self._server.shown(self.listing[index])

    def sizes(self, indices: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """The sizes of all files, or of some, in bytes ([n] int64); 0: unknown. Remote files are
        listed again for the sizes of all; those of some are from the last listing.
        """
        if indices is None:
            self._listed_sizes = None
            indices = np.arange(len(self))
        if self._server is None:
            sizes = np.zeros(len(indices), np.int64)
            for place, number in enumerate(indices.tolist()):
                # of one that is gone since it was listed: reading it will say so
                with contextlib.suppress(OSError):
                    sizes[place] = os.stat(self.listing.path(number)).st_size
            return sizes
        if self._listed_sizes is None:
            known: dict[str, int | None] = {}
            # asking for each file of a folder would take far longer than listing it once more
            for root in self.listing.searched:
                for path, info in self._server.ask("find", root, detail=True).items():
                    known[path] = info.get("size")
            self._server.filesystem.invalidate_cache()
            unknown = [path for path in self.listing if known.get(path) is None]
            known.update(zip(unknown, self._server.sizes(unknown), strict=True))
            self._listed_sizes = np.array([known[path] or 0 for path in self.listing], np.int64)
        return self._listed_sizes[indices]


def fingerprint_names(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> str:
    """The fingerprint of samples with names: a blake2b hash of the names, their lengths and their
    number.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.int64(len(offsets) - 1).tobytes())
    for start in range(0, len(offsets) - 1, _PIECE):
        digest.update(np.diff(offsets[start : start + _PIECE + 1]).astype("<i8").tobytes())
    digest.update(np.ascontiguousarray(data).data)
    return digest.hexdigest()


class PairedSource(Source):
    """Pairs of files, such as an image and its mask: a record is the bytes of both.

    Args:
        files: the first file of each sample.
        others: the second files, perhaps on another server.
        numbers: [n] int64, for each sample the number of its file among `others`.
    """

    def __init__(self, files: FilesSource, others: FilesSource, numbers: IntArray) -> None:
        self.files = files
        self.others = others
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """The bytes of both files of each sample."""
        others = self.others.read(self.numbers[np.asarray(indices, np.int64)].tolist())
        return list(zip(self.files.read(indices), others, strict=True))

    def describe(self) -> Description:
        files = self.files.describe()
        others = self.others.describe()
        files.columns.append(replace(others.columns[0], name="beside"))
        files.files += others.files
        files.stored += others.stored
        return files

    def take_counts(self) -> Counter[str]:
        return self.files.take_counts() + self.others.take_counts()

    def fingerprint(self) -> str:
        """A hash of the names of both."""
        both = f"{self.files.fingerprint()}\0{self.others.fingerprint()}"
        return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        return f"{self.files.location(index)} with {self.others.location(int(self.numbers[index]))}"

    def other_path(self, index: int) -> str:
        """The path of the second file of a sample."""
        return os.fsdecode(self.others.listing.path(int(self.numbers[index])))

    def sizes(self, indices: IntArray | None = None) -> IntArray:
        """Bytes of both files, of all samples or of some ([n] int64)."""
        if indices is None:
            return self.files.sizes() + self.others.sizes()[self.numbers]
        return self.files.sizes(indices) + self.others.sizes(self.numbers[indices])


_OF_TARGETS = re.compile(r"^(?!\.).*(mask|label|annot|target|truth|segm)", re.IGNORECASE)
"""Names of folders of masks or annotations."""
_OF_IMAGES = re.compile(r"images?|imgs?|jpegimages", re.IGNORECASE)
_SPLIT = re.compile(
    r"(training|train|validation|valid|val|dev|testing|test|unlabell?ed)[-_]?[0-9]*", re.IGNORECASE
)


_RECORDS_OF_SPLIT = re.compile(
    rb"([^/\0]+-%s)\.tfrecords?-\d{5,}-of-\d{5,}(?=\0|\Z)" % _SPLIT.pattern.encode(),
    re.IGNORECASE,
)
"""Names of shards as TensorFlow Datasets writes them: mnist-train.tfrecord-00000-of-00001."""


def folder_targets(
    files: FileSet, only_classes: bool = False
) -> tuple[npt.NDArray[np.int64] | None, list[str]]:
    """Targets from the first-level folders, as torchvision's ImageFolder has them: ([n] int64,
    class names sorted).

    (None, []) where all files lie flat in the folder. Folders whose names look the same
    (`composed`) are one class, and classes have the order of their composed names, which is the
    same on all systems.

    Args:
        files: the samples.
        only_classes: refuse folders that are hardly classes: see `_refuse_other_folders`.

    Raises:
        ConfigError: some files lie beside the class folders: nobody can say which class they have.
        DataNotFoundError: a class folder is empty (as torchvision has it).
    """
    names = files.names
    targets = np.empty(len(names), np.int64)
    number = dict[bytes, int]()
    first = dict[bytes, bytes]()
    filled = set[str]()
    for folder, start, stop in _runs(names):
        if folder is None:
            data, _ = names.arrays
            if not (data == ord("/")).any():
                return None, []
            raise ConfigError(
                f"{redact(files.path(start))} lies beside the class folders: move such files into "
                "a class folder, or pass targets= (targets=None: no targets)"
            )
        filled.add(os.fsdecode(folder))
        name = folder
        if not name.isascii():
            name = os.fsencode(composed(os.fsdecode(folder)))
        first.setdefault(name, folder)
        targets[start:stop] = number.setdefault(name, len(number))
    classes = sorted(number)
    shown = list(map(os.fsdecode, map(first.__getitem__, classes)))
    if only_classes:
        _refuse_other_folders(files, shown)
    for one in sorted(set(files.folders) - filled):
        name = os.fsencode(composed(one))
        if name not in number and not is_hidden_part(name):
            raise DataNotFoundError(
                f"the class folder {redact(one)!r} holds no files that headrace reads: remove "
                "empty folders, which differ between machines, or pass targets= (targets=None: "
                "no targets)"
            )
    if classes != list(number):
        targets = np.argsort([number[c] for c in classes])[targets]
    return targets, shown


def _refuse_other_folders(files: FileSet, filled: list[str]) -> None:
    """Refuses first-level folders that are hardly classes: splits of a dataset, or images next to
    their targets.

    Args:
        files: the samples.
        filled: the folders that hold some.

    Raises:
        ConfigError: there are such; the message says what to pass.
    """
    root = files.roots[0]
    outright = "; if these folders are classes, pass targets='folders' (targets=None: no targets)"
    if all(map(_SPLIT.fullmatch, filled)):
        paths = " or ".join(repr(redact(os.path.join(root, name))) for name in filled)
        raise ConfigError(
            f"{redact(root)} holds {', '.join(filled)}: parts of a dataset, not classes. Pass "
            f"the path of one, {paths}{outright}"
        )
    images = list(filter(_OF_IMAGES.fullmatch, filled))
    others = list(filter(_OF_TARGETS.search, files.folders))
    if len(images) != 1 or not set(filled).issubset([*images, *others]):
        return
    beside = [os.path.join(root, name) for name in others]
    if not files.is_remote:
        beside += sorted(glob.glob(os.path.join(glob.escape(root), "*.json")))
    if beside:
        path = os.path.join(root, images[0])
        raise ConfigError(
            f"{redact(root)} holds the images of {images[0]} and their targets, not classes: pass "
            f"{redact(path)!r} and masks, annotations of COCO or a table of labels as targets=, "
            f"such as targets={redact(beside[0])!r}{outright}"
        )


def check_splits(files: FileSet) -> None:
    """Warns where all files of a folder belong to parts of a dataset, by their first-level folder
    or the first word of their name, and to several of them.

    Raises:
        ConfigError: a folder of TensorFlow Datasets holds several splits.
    """
    if len(files.roots) != 1 or files.roots[0] not in files.searched:
        return
    shards = dict[bytes, bytes]()
    for stem, split in _RECORDS_OF_SPLIT.findall(b"\0".join(files.names)):
        shards.setdefault(split, stem)
    if len(shards) > 1:
        root = redact(files.roots[0])
        globs = [f"{root}/**/{redact(stem)}.tfrecord*" for stem in shards.values()]
        raise ConfigError(
            f"{root} holds several splits of a dataset ({', '.join(map(redact, shards))}): pass "
            f"one by a glob, such as {globs[0]!r}, or several by a list of globs"
        )
    found = dict[str, str]()
    for folder, start, _ in _runs(files.names):
        if folder is None and start >= _PIECE:  # a million flat files are no parts
            return
        name = os.fsdecode(files.names[start] if folder is None else folder)
        split = _SPLIT.match(name)
        if split is None or name[split.end() : split.end() + 1] not in ("", "-", "_", "."):
            return
        found.setdefault(split[1].lower(), name)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        warn(
            f"{redact(files.roots[0])}: {redact(first)} and {redact(second)} are named like parts "
            "of a dataset, but read as one: pass the path of one part, or a list of paths if "
            "this is meant"
        )


def _runs(names: PackedNames) -> Iterator[tuple[bytes | None, int, int]]:
    """First-level folders (None: no folder) and where their names begin and end; a folder may come
    again.

    In the order of parts the names below a folder follow each other, so that the end of each such
    run is found by bisection.
    """
    start = 0
    while start < len(names):
        folder, slash, _ = names[start].partition(b"/")
        if not slash:
            yield None, start, start + 1
            start += 1
            continue

        prefix = folder + slash
        step = 1  # doubled, since most runs are short
        while start + step < len(names) and names[start + step].startswith(prefix):
            step *= 2
        last = start + step // 2  # the last one that is known to be in the folder
        stop = min(start + step, len(names))
        while stop - last > 1:
            middle = (last + stop) // 2
            if names[middle].startswith(prefix):
                last = middle
            else:
                stop = middle
        yield folder, start, stop
        start = stop
