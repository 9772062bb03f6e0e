"""Finds episodes in HDF5 files, groups of arrays of equal length, and opens them.

Robotics keeps demonstrations so (robomimic, LIBERO: ``data/demo_0/obs/agentview_image``, ``data/demo_0/actions``), or a file each (ALOHA);
neurophysiology its time series (NWB: ``acquisition/NAME/data``, ``.../timestamps``).
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from headrace.errors import BudgetError, ConfigError, FormatError, MissingNameError, warn
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.chunks import DirectChunks
from headrace.storage.arrays.decoded import DecodedReader
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.episodes.source import MASK, EpisodeSource
from headrace.storage.episodes.steps import EpisodeArrays
from headrace.storage.episodes.windows import WindowOptions, Windows
from headrace.storage.hdf5.chunks import ObjectRows, rows_of
from headrace.storage.hdf5.conventions import conversion_of
from headrace.storage.hdf5.probe import is_as_stored
from headrace.storage.hdf5.rows import OpenHDF5

_NUMBERED = re.compile(r"^\D*\d+$")
_STATIC_BYTES = 256 << 20


class EpisodeOptions(NamedTuple):
    """What is read of each file.

    Attributes:
        groups: pattern of the groups' paths; "": each file is one; None: found out.
        keys: arrays with one row a step, or patterns of such; None: all.
        static: arrays and values without an axis of time.
        episodes: which ones: names, or the path of an array of names in each file; None: all.
        windows: by key or pattern, steps of a window; None: whole episodes.
        direct, cache_dir: see `rows_of`.
        decode_nwb: values of NWB are given in their units, see `conversion_of`.
    """

    groups: str | None = None
    keys: tuple[str, ...] | None = None
    static: tuple[str, ...] = ()
    episodes: str | tuple[str, ...] | None = None
    windows: int | Mapping[str, int] | None = None
    direct: bool = True
    cache_dir: Any = None
    decode_nwb: bool = False


class _Array(NamedTuple):
    """An array of one episode: where it lies as it is, or what reads it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str
    begin: int
    reader: ArrayReader | LibraryRows | None


class Episode(NamedTuple):
    """An episode of a file."""

    path: str
    name: str
    arrays: dict[str, _Array]
    static: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{redact(self.path)}: {self.name or '/'}"

    @property
    def length(self) -> int:
        return next(iter(self.arrays.values())).shape[0]


# -- groups


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts names as people do: demo_2 before demo_10."""
    return [(0, int(part), part) if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def groups_matching(file: h5py.File, pattern: str) -> list[str]:
    """The paths of the groups that a pattern means, such as "data/demo_*", sorted as people do; "": the file itself."""
    found: list[str] = [""]
    for part in [part for part in pattern.split("/") if part]:
        found = [
            f"{parent}/{name}".lstrip("/")
            for parent in found
            for name in (_children(file[parent or "/"]) if is_pattern(part) else [part])
            if fnmatch.fnmatchcase(name, part) and file.get(f"{parent}/{name}", getclass=True) is h5py.Group
        ]
    return sorted(found, key=natural)


def is_pattern(name: str) -> bool:
    """True if it stands for several names."""
    return any(letter in name for letter in "*?[")


def _children(group: Any) -> list[str]:
    return list(group) if isinstance(group, h5py.Group) else []


def unmistakable_groups(file: h5py.File) -> str | None:
    """The pattern of the episodes of a file that holds nothing else but them, as robomimic and LIBERO lay them out: ``data`` is a group of
    groups that are numbered, and have several arrays; None: it holds something else."""
    if file.get("data", getclass=True) is not h5py.Group:
        return None
    data = file["data"]
    names = list(data)
    if not names or not all(map(_NUMBERED.match, names)) or any(data.get(name, getclass=True) is not h5py.Group for name in names[:64]):
        return None
    return "data/*" if len(arrays_of(data[names[0]])) > 1 else None


def _found_groups(file: h5py.File, path: str) -> str:
    """The pattern of the episodes where nobody has said it."""
    if (found := unmistakable_groups(file)) is not None:
        return found
    children = list(file)
    kinds = {name: file.get(name, getclass=True) for name in children}
    if children and all(_NUMBERED.match(name) and kind is h5py.Group for name, kind in kinds.items()):
        return "*"
    if any(kind is h5py.Dataset for kind in kinds.values()):
        return ""
    raise MissingNameError(
        f"{redact(path)}: nobody knows which groups are episodes; pass groups=, such as 'data/*'; it has: {listed_names(_groups_in(file))}"
    )


def _groups_in(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Group) else None)
    return names


def arrays_of(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """The datasets below a group that have an axis, by their path in it."""
    found: dict[str, h5py.Dataset] = {}

    def note(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[key] = item

    group.visititems(note)
    return found


# -- one file


class EpisodeLook:
    """Looks into files, one after the other: what the first episode has, all others must have."""

    def __init__(self, opened: OpenHDF5, options: EpisodeOptions) -> None:
        self._opened, self._options = opened, options
        self.keys: tuple[str, ...] | None = None
        self._is_checked, self._file_number = False, -1
        self.missing: set[str] = set(options.episodes) if isinstance(options.episodes, tuple) else set()

    def __call__(self, file: h5py.File, path: str) -> list[Episode]:
        """The episodes of a file, which is open."""
        options, self._is_checked = self._options, False
        self._file_number = h5py.h5o.get_info(file["/"].id).fileno
        pattern = _found_groups(file, path) if options.groups is None else options.groups
        names = groups_matching(file, pattern)
        if not names:
            raise MissingNameError(
                f"{redact(path)} has no groups {pattern!r}, of which each would be an episode; it has: "
                f"{listed_names(_groups_in(file), pattern)}"
            )
        return [self._episode(file, path, name) for name in self._chosen(file, path, names)]

    def _chosen(self, file: h5py.File, path: str, names: list[str]) -> list[str]:
        wanted = self._options.episodes
        if wanted is None:
            return names
        by_name = {name.rpartition("/")[2]: name for name in names} | {name: name for name in names}
        if isinstance(wanted, str):
            listed = np.asarray(self._opened.hdf5.dataset(file, wanted, path)).reshape(-1)
            wanted = tuple(one.decode() if isinstance(one, bytes) else str(one) for one in listed.tolist())
            if absent := [name for name in wanted if name not in by_name]:
                raise MissingNameError(
                    f"{redact(path)}: {self._options.episodes!r} lists {absent[0]!r}, which is missing; the file has: "
                    f"{listed_names(names, absent[0])}"
                )
        self.missing -= by_name.keys()
        return sorted({by_name[name] for name in wanted if name in by_name}, key=natural)

    def _episode(self, file: h5py.File, path: str, name: str) -> Episode:
        group = file[name or "/"]
        if self.keys is None:
            self.keys = self._keys_of(group, path, name)
        arrays = {key: self._array(group, path, name, key) for key in self.keys}
        episode = Episode(path, name, arrays, {key: self._value(group, path, name, key) for key in self._options.static})
        if len({array.shape[0] for array in arrays.values()}) > 1:
            lengths = ", ".join(f"{key!r} {array.shape[0]:,}" for key, array in arrays.items())
            raise FormatError(
                f"{episode.where}: its arrays have different lengths: {lengths}: name those that belong together as keys=, and those "
                "without an axis of time as static="
            )
        return episode

    def _keys_of(self, group: h5py.Group, path: str, name: str) -> tuple[str, ...]:
        """The keys, by the first episode."""
        there, wanted = arrays_of(group), self._options.keys
        static = set(self._options.static)
        found: list[str] = []
        for one in ["*"] if wanted is None else wanted:
            matches = [key for key in sorted(there, key=natural) if fnmatch.fnmatchcase(key, one) and key not in static]
            found += matches if is_pattern(one) else [one.strip("/")]
            if wanted is not None and is_pattern(one) and not matches:
                raise MissingNameError(f"{redact(path)}: {name or '/'} has no arrays {one!r}; it has: {listed_names(there, one)}")
        return tuple(dict.fromkeys(found))

    def _dataset(self, group: h5py.Group, path: str, name: str, key: str) -> h5py.Dataset:
        dataset = group.get(key)
        if not isinstance(dataset, h5py.Dataset):
            raise MissingNameError(
                f"{redact(path)}: {name or '/'} has no array {key!r}; it has: {listed_names(arrays_of(group), key)}: name keys that all "
                "episodes have as keys=, or the episodes that have it as episodes="
            )
        return dataset

    def _array(self, group: h5py.Group, path: str, name: str, key: str) -> _Array:
        opened, options = self._opened, self._options
        if self._is_checked and not options.decode_nwb and (plain := self._plain_array(group, path, key)) is not None:
            return plain
        self._is_checked = options.direct and hasattr(os, "preadv") and not group.file.swmr_mode
        dataset, place = self._dataset(group, path, name, key), f"{name}/{key}".lstrip("/")
        rows = rows_of(dataset, path, place, opened.hdf5, opened.library, direct=options.direct, cache_dir=options.cache_dir)
        if isinstance(rows, ObjectRows):
            return _Array(rows.shape, rows.dtype, path, -1, rows)
        grid = rows.grid
        packing = conversion_of(dataset, f"{redact(path)}: {place!r}") if options.decode_nwb else None
        if packing is not None:
            reader = DecodedReader(ArrayReader(rows, opened.chunks, f"{path}\0{place}"), packing.decode, packing.dtype)
            return _Array(grid.shape, reader.dtype, path, -1, reader)
        if isinstance(rows, DirectChunks) and rows.is_raw and grid.chunks == grid.shape:
            ranges = rows.raw_ranges(np.zeros(1, np.int64))
            if ranges.start[0] >= 0:
                return _Array(grid.shape, rows.dtype, ranges.paths[int(ranges.file[0])], int(ranges.start[0]), None)
        return _Array(grid.shape, rows.dtype, path, -1, ArrayReader(rows, opened.chunks, f"{path}\0{place}"))

    def _plain_array(self, group: h5py.Group, path: str, key: str) -> _Array | None:
        """An array of numbers that lies in one piece in this very file, which takes a tenth of the time to find out; None: it is another.

        The first array of each file goes the long way, which compares the file with its version."""
        try:
            found = h5py.h5d.open(group.id, key.encode())
        except (KeyError, TypeError):  # who opens it in the other way says what is wrong
            return None
        plist, shape, dtype = found.get_create_plist(), found.shape, found.dtype
        if plist.get_layout() != h5py.h5d.CONTIGUOUS or plist.get_external_count() or not shape or dtype.kind not in "biufc":
            return None
        if not is_as_stored(found.get_type(), dtype) or h5py.h5o.get_info(found).fileno != self._file_number:
            return None
        begin, nbytes = found.get_offset(), math.prod(shape) * dtype.itemsize
        if begin is None or not nbytes or begin + nbytes > self._opened.hdf5.files.version(path).size:
            return None
        return _Array(tuple(shape), dtype, path, begin, None)

    def _value(self, group: h5py.Group, path: str, name: str, key: str) -> Any:
        """A static value: of a dataset, or of an attribute of the episode."""
        if key not in group and key in group.attrs:
            return group.attrs[key]
        dataset = group.get(key)
        if not isinstance(dataset, h5py.Dataset):
            there = [*arrays_of(group), *group.attrs]
            raise MissingNameError(
                f"{redact(path)}: {name or '/'} has no array and no attribute {key!r}; it has: {listed_names(there, key)}"
            )
        check_static(key, dataset.nbytes)
        return dataset[()]


# -- all files


def joined_episodes(
    paths: Sequence[str],
    everything: Sequence[Episode],
    look: EpisodeLook,
    opened: OpenHDF5,
    options: EpisodeOptions,
    windows: WindowOptions,
) -> EpisodeSource:
    """The episodes of some files, in order.

    Args:
        paths: of the files.
        everything: what `look` has found in them.
        look: has looked into all of them.
        opened: what is open of them.
        options, windows: what is read, and how samples are cut.

    Raises:
        MissingNameError: a name among `episodes` that no file has.
        FormatError: keys of several episodes differ in shape or dtype.
        ConfigError: options make no sense for these files.
    """
    if look.missing:
        known = [episode.name for episode in everything]
        raise MissingNameError(f"no file has an episode {min(look.missing)!r}, which episodes= names; there are: {listed_names(known)}")
    keys = look.keys or ()
    if not keys:
        raise FormatError(f"{redact(paths[0])}: {everything[0].name or '/'} has no array with an axis of time: name some as keys=")
    check_mask([*keys, *options.static], windows)
    empty = [episode for episode in everything if not episode.length]
    if empty:
        more = f" and {len(empty) - 1:,} more" if len(empty) > 1 else ""
        warn(f"{empty[0].where}{more}: the episode has no steps, and is left out")
    chosen = [episode for episode in everything if episode.length]
    places: dict[str, int] = {}
    for path in [*paths, *(array.path for episode in chosen for array in episode.arrays.values())]:
        places.setdefault(path, len(places))
    of_keys = windows_of(keys, options.windows)
    arrays = [_joined(key, chosen, places, of_keys[key]) for key in keys] if chosen else []
    check_pad(arrays, windows)
    lengths = np.array([episode.length for episode in chosen], np.int64)
    static = {name: stacked(name, [episode.static[name] for episode in chosen]) for name in options.static}
    return EpisodeSource(
        list(places), [places[episode.path] for episode in chosen], [episode.name for episode in chosen], Windows(lengths, windows), arrays,
        static, opened, [episode.where for episode in empty],
    )  # fmt: skip


def check_mask(names: Sequence[str], windows: WindowOptions) -> None:
    """Raises a ConfigError where an array has the name of the mask of windows."""
    if MASK in names and windows.window is not None:
        raise ConfigError(f"an array is called {MASK!r}, which is the mask of windows: leave it out of keys=")


def check_pad(arrays: Sequence[EpisodeArrays], windows: WindowOptions) -> None:
    """Raises a ConfigError where zeros are wanted of what has none."""
    if windows.pad == "constant" and (held := [array.name for array in arrays if array.holds_objects]):
        raise ConfigError(f"pad='constant' has no value for {held[0]!r}, whose elements are of any size: pass pad='edge'")


def windows_of(keys: Sequence[str], windows: int | Mapping[str, int] | None) -> dict[str, int | None]:
    """Steps of a window of each key.

    Raises:
        ConfigError: a key has none, or a pattern means no key.
    """
    if not isinstance(windows, Mapping):
        return dict.fromkeys(keys, windows)
    found: dict[str, int | None] = {}
    for pattern, steps in windows.items():
        matches = [key for key in keys if fnmatch.fnmatchcase(key, pattern)]
        if not matches:
            raise ConfigError(f"window= has {pattern!r}, which is no key; the keys are: {listed_names(keys, pattern)}")
        found |= dict.fromkeys(matches, steps)
    if missing := [key for key in keys if key not in found]:
        raise ConfigError(f"window= says nothing of {missing[0]!r}: give each key its steps ('*' stands for all), or leave it out of keys=")
    return found


def _joined(key: str, episodes: Sequence[Episode], places: Mapping[str, int], window: int | None) -> EpisodeArrays:
    """The arrays of a key of all episodes."""
    first = episodes[0].arrays[key]
    for episode in episodes:
        array = episode.arrays[key]
        if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
            raise FormatError(
                f"{episode.where}: steps of {key!r} are {array.dtype} {list(array.shape[1:])}, and in {episodes[0].where} {first.dtype} "
                f"{list(first.shape[1:])}: name the episodes that are alike as episodes=, or leave the key out of keys="
            )
    begins = [(places[array.path], array.begin) for array in (episode.arrays[key] for episode in episodes)]
    readers = [reader for episode in episodes if (reader := episode.arrays[key].reader) is not None]
    numbers = itertools.count()
    reader_of = [-1 if episode.arrays[key].reader is None else next(numbers) for episode in episodes]
    return EpisodeArrays(key, first.shape[1:], first.dtype, begins, readers, reader_of, window)


def stacked(name: str, values: Sequence[Any]) -> Sequence[Any] | SharedArray:
    """Static values: numbers of one shape in one array, which workers share."""
    arrays = [np.asarray(value) for value in values]
    check_static(name, sum(array.nbytes for array in arrays))
    alike = arrays and all((array.shape, array.dtype) == (arrays[0].shape, arrays[0].dtype) for array in arrays)
    return SharedArray(np.stack(arrays)) if alike and arrays[0].dtype.kind in "biufc" else list(values)


def check_static(name: str, nbytes: int) -> None:
    """Raises a BudgetError where static values take too many bytes."""
    if nbytes > _STATIC_BYTES:
        raise BudgetError(
            f"static={name!r} takes {nbytes:,} bytes, which would be held in memory: static values are small; name large arrays as keys="
        )


EPISODES = "episodes"


def kind_of_file(path: str, opened: OpenHDF5) -> str:
    """`EPISODES` if a file unmistakably holds such; else ""."""
    with opened.hdf5.reading(path) as file:
        return "" if unmistakable_groups(file) is None else EPISODES
