"""Replay buffers: episodes that lie one behind the other in arrays of all steps, as Diffusion
Policy keeps them in HDF5 or Zarr.

``data/<key>`` has one row a step, and ``meta/episode_ends`` says behind which row each episode
ends.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import DataNotFoundError, FormatError, MissingNameError
from headrace.io.nearest_names import listed_names
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.resolver import resolve
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct
from headrace.storage.arrays.reader import ArrayReader, OpenArrays
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.episodes.look import (
    EPISODES,
    Episode,
    EpisodeOptions,
    check_mask,
    check_pad,
    check_static,
    is_pattern,
    joined_episodes,
    natural,
    stacked,
    windows_of,
)
from headrace.storage.episodes.source import EpisodeSource
from headrace.storage.episodes.steps import EpisodeArrays
from headrace.storage.episodes.windows import WindowOptions, Windows
from headrace.storage.hdf5.episodes import HDF5Look, kind_of_file as kind_of_groups
from headrace.storage.hdf5.rows import OpenHDF5, open_files
from headrace.storage.sparse.groups import GroupFile
from headrace.storage.sparse.hdf5 import HDF5Groups
from headrace.storage.sparse.zarr import ZarrGroups
from headrace.storage.zarr.episodes import ZarrLook
from headrace.storage.zarr.kind import ZARR
from headrace.storage.zarr.rows import OpenZarr

STEPS, ENDS = "data", "meta/episode_ends"


class _Buffer(NamedTuple):
    """A file.

    Attributes:
        path: of it, or its URL.
        shown: the path, as messages show it.
        starts, ends: [chosen episodes] their first rows, and the rows behind their last ones.
        numbers: [chosen episodes] their numbers among all of the file.
        rows: steps of all episodes.
        readers: by key.
        static: by name, a value for each chosen episode.
    """

    path: str
    shown: str
    starts: IntArray
    ends: IntArray
    numbers: IntArray
    rows: int
    readers: dict[str, ArrayReader | LibraryRows]
    static: dict[str, npt.NDArray[Any]]


class ReplaySource(EpisodeSource):
    """Episodes, or windows over their steps, of replay buffers. Blocks are the windows, or
    episodes, that begin in the same chunk.

    Args:
        begins: [episodes] where the first step of each lies among the rows of all files.
        files: of each file where its rows begin and end among these.
        **source: of `EpisodeSource`.
    """

    def __init__(self, begins: IntArray, files: Sequence[tuple[int, int]], **source: Any) -> None:
        super().__init__(**source)
        self._rows_begin, self._file_rows = SharedArray(begins), list(files)

    def blocks_of(self, nbytes: int) -> IntArray | None:
        height, begins = self._tallest(), self._rows_begin.array
        if height <= 1 or not len(begins):
            return super().blocks_of(nbytes)
        borders = np.concatenate([np.arange(first, end, height) for first, end in self._file_rows])
        episodes = np.searchsorted(begins, borders, side="right") - 1
        inside = episodes >= 0
        begun = np.where(
            inside,
            self.windows.begun(np.maximum(episodes, 0), borders - begins[np.maximum(episodes, 0)]),
            0,
        )
        sizes: IntArray = np.diff(begun, prepend=0, append=len(self))
        return sizes[sizes > 0]

    @property
    def block_nbytes(self) -> int:
        window = self.windows.options.window
        return self._chunk_bytes(
            int(self.windows.lengths.max(initial=0)) if window is None else window
        )


def open_source(
    data_path: DataPath,
    kind_is_zarr: bool,
    reach: RemoteOptions,
    options: EpisodeOptions,
    windows: WindowOptions,
) -> tuple[EpisodeSource, OpenArrays[Any]]:
    """The episodes of HDF5 files or Zarr stores, in groups or replay buffers; and what is open of
    them.

    Raises:
        MissingNameError, FormatError, ConfigError: see `EpisodeDataset`.
        DataNotFoundError, AccessError, RemoteError: a file is missing, or can't be read.
    """
    if kind_is_zarr:
        return _of_zarr(data_path, reach, options, windows)
    paths, opened = open_files(data_path, reach)

    look = _Look(opened, options)
    try:
        found = opened.hdf5.read_each(paths, look)
        buffers = [one for one in found if isinstance(one, _Buffer)]
        if buffers:
            return _joined(buffers, opened, options, windows), opened
        episodes = [episode for each in found if isinstance(each, list) for episode in each]
        return joined_episodes(paths, episodes, look.groups, opened, options, windows), opened
    except BaseException:
        opened.close()
        raise


class _Look:
    """Looks into HDF5 files, one after the other: where the first is a replay buffer, all others
    must be.

    Attributes:
        groups: looks for episodes in groups.
    """

    def __init__(self, opened: OpenHDF5, options: EpisodeOptions) -> None:
        self._opened, self._options, self._are_buffers = (
            opened,
            options,
            False if options.groups is not None else None,
        )
        self.groups = HDF5Look(opened, options)

    def __call__(self, path: str) -> _Buffer | list[Episode]:
        """What a file holds."""
        opened, options = self._opened, self._options
        with opened.hdf5.reading(path) as file:
            groups = HDF5Groups(
                file, path, opened, direct=options.direct, cache_dir=options.cache_dir
            )
            is_buffer = is_replay(groups) if self._are_buffers is None else self._are_buffers
            found = _look_into(groups, path, options) if is_buffer else self.groups(file, path)
        self._are_buffers = is_buffer
        return found


def _of_zarr(
    data_path: DataPath, reach: RemoteOptions, options: EpisodeOptions, windows: WindowOptions
) -> tuple[EpisodeSource, OpenArrays[Any]]:
    files = resolve(data_path, ZARR, reach)
    opened, paths = OpenZarr(files.server, direct=options.direct), files.urls()
    try:
        named = [f"{STEPS}/{key.strip('/')}" for key in options.keys or () if not is_pattern(key)]
        nodes = [STEPS, ENDS, *named, *options.static]
        stores = [(path, opened.store(path, nodes)) for path in paths]
        if options.groups is None and is_replay(ZarrGroups(stores[0][1], opened)):
            found = [_look_into(ZarrGroups(store, opened), path, options) for path, store in stores]
            return _joined(found, opened, options, windows), opened
        look = ZarrLook(opened, options)
        episodes = [episode for path, store in stores for episode in look(store, path)]
        return joined_episodes(paths, episodes, look, opened, options, windows), opened
    except BaseException:
        opened.close()
        raise


# -- what a file holds


def is_replay(file: GroupFile) -> bool:
    """True if a file is a replay buffer."""
    return file.is_group(STEPS) and file.is_array(ENDS)


def kind_of_hdf5(path: str, opened: OpenHDF5) -> str:
    """`EPISODES` if an HDF5 file unmistakably holds such; else ""."""
    with opened.hdf5.reading(path) as file:
        if is_replay(HDF5Groups(file, path, opened)):
            return EPISODES
    return kind_of_groups(path, opened)


def kind_of_stores(data_path: DataPath, options: RemoteOptions) -> str:
    """`EPISODES` if the first Zarr store unmistakably holds such; else ""."""
    files = resolve(data_path, ZARR, options)
    opened = OpenZarr(files.server)
    try:
        store = opened.store(files.url(0))
        if is_replay(ZarrGroups(store, opened)):
            return EPISODES
        groups = ZarrLook(opened, EpisodeOptions()).unmistakable_groups(store)
        return "" if groups is None else EPISODES
    except DataNotFoundError:  # a dataset says what is missing
        return ""
    finally:
        opened.close()


def read_ends(file: GroupFile) -> IntArray:
    """[episodes] the rows behind the last ones of the episodes.

    Raises:
        FormatError: they are no integers, or don't rise.
    """
    shape = file.shape(ENDS)
    if len(shape) != 1:
        raise FormatError(
            f"{file.path}: {ENDS} has shape {list(shape)}, and must have one number an episode: "
            "write [episodes] int64"
        )
    if not shape[0]:
        raise FormatError(
            f"{file.path}: {ENDS} is empty, so the file has no episodes: leave it out, or write "
            "the ends of its episodes"
        )
    stored = file.column(ENDS)
    if stored.dtype.kind not in "iu":
        raise FormatError(
            f"{file.path}: {ENDS} holds {file.described(ENDS)}, and must hold integers: write "
            "[episodes] int64"
        )
    if stored.dtype.kind == "u" and int(stored.max()) > np.iinfo(np.int64).max:
        raise FormatError(
            f"{file.path}: {ENDS} has {int(stored.max())}, more than there can be rows: the file "
            "is damaged"
        )
    ends: IntArray = stored.astype(np.int64)
    if int(ends.min()) < 0:
        number = int(np.flatnonzero(ends < 0)[0])
        raise FormatError(
            f"{file.path}: {ENDS}[{number}] is {int(ends[number])}, and no row is negative: the "
            "file is damaged"
        )
    starts = np.concatenate([[0], ends[:-1]])
    if (ends <= starts).any():
        number = int(np.flatnonzero(ends <= starts)[0])
        raise FormatError(
            f"{file.path}: {ENDS} must rise, and episode {number} begins at row "
            f"{int(starts[number]):,} and ends at {int(ends[number]):,}: "
            "write the row behind the last step of each episode"
        )
    return ends


def keys_of(file: GroupFile) -> list[str]:
    """The arrays of steps, by their paths below `STEPS`; [] where the server does not list them."""
    names = [
        name
        for name in file.names()
        if name.startswith(f"{STEPS}/") and file.is_array(name) and file.shape(name)
    ]
    return sorted((name.removeprefix(f"{STEPS}/") for name in names), key=natural)


def _look_into(file: GroupFile, path: str, options: EpisodeOptions) -> _Buffer:
    if not is_replay(file):
        raise FormatError(
            f"{file.path} is no replay buffer: it has no array {ENDS!r} beside a group {STEPS!r}; "
            "episodes are read of "
            "these, and of groups of HDF5 files"
        )
    ends = read_ends(file)
    readers = {key: file.rows(f"{STEPS}/{key}") for key in _chosen_keys(file, options, len(ends))}
    lengths = {key: int(reader.shape[0]) for key, reader in readers.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key!r} {length:,}" for key, length in lengths.items())
        raise FormatError(
            f"{file.path}: the arrays of {STEPS!r} have different lengths: {told}: name those "
            "that have one row a step as keys="
        )
    rows = next(iter(lengths.values()))
    if rows != ends[-1]:
        raise FormatError(
            f"{file.path}: the last episode ends at row {int(ends[-1]):,}, by {ENDS}, and the "
            f"arrays of {STEPS!r} have {rows:,} rows: the "
            "file was not finished, or is damaged: write it again"
        )
    chosen = _chosen_episodes(file, options, len(ends))
    static = {name: _static(file, name, len(ends))[chosen] for name in options.static}
    starts = np.concatenate([[0], ends[:-1]])
    return _Buffer(path, file.path, starts[chosen], ends[chosen], chosen, rows, readers, static)


def _chosen_keys(file: GroupFile, options: EpisodeOptions, count: int) -> list[str]:
    plain = options.keys is not None and not any(map(is_pattern, options.keys))
    known = [] if plain else keys_of(file)
    if not plain and not known and not file.names():
        raise MissingNameError(
            f"{file.path}: the names of its arrays are not known, since its server does not list "
            "them: name them as keys="
        )
    if not plain and not known:
        raise FormatError(
            f"{file.path}: {ENDS} has {count:,} episodes, and {STEPS!r} no arrays with their "
            "steps: the file is damaged"
        )
    found: list[str] = []
    for wanted in ["*"] if options.keys is None else options.keys:
        matches = (
            [key for key in known if fnmatch.fnmatchcase(key, wanted)]
            if is_pattern(wanted)
            else [wanted.strip("/")]
        )
        absent = (
            [wanted]
            if not matches
            else [key for key in matches if not file.is_array(f"{STEPS}/{key}")]
        )
        if absent:
            raise MissingNameError(
                f"{file.path}: {STEPS!r} has no array {absent[0]!r}; it has: "
                f"{listed_names(keys_of(file), absent[0])}"
            )
        found += matches
    return list(dict.fromkeys(found))


def _name(number: int) -> str:
    return f"episode_{number}"


def _chosen_episodes(file: GroupFile, options: EpisodeOptions, count: int) -> IntArray:
    """The numbers of the episodes of a file that are read, rising."""
    wanted = options.episodes
    if wanted is None:
        return np.arange(count)
    by_name = {_name(number): number for number in range(count)}
    if isinstance(wanted, tuple):
        return np.array(sorted({by_name[name] for name in wanted if name in by_name}), np.int64)
    if not file.is_array(wanted):
        raise MissingNameError(
            f"{file.path} has no array {wanted!r}, which episodes= names; it has: "
            f"{listed_names(file.names(), wanted)}"
        )
    listed = file.column(wanted)
    if listed.dtype.kind == "b" and listed.shape == (count,):
        return np.flatnonzero(listed)
    if listed.dtype.kind not in "iu" or listed.ndim != 1:
        raise FormatError(
            f"{file.path}: {wanted!r}, which episodes= names, holds {file.described(wanted)}: it "
            "must have the numbers of "
            f"episodes, or a bool for each of {count:,}"
        )
    if (outside := listed[(listed < 0) | (listed >= count)]).size:
        raise MissingNameError(
            f"{file.path}: {wanted!r} lists episode {outside[0]}, which is missing; there are 0 "
            f"to {count - 1:,}"
        )
    return distinct(listed).astype(np.int64)


def _static(file: GroupFile, name: str, count: int) -> npt.NDArray[Any]:
    """An array with one value an episode."""
    if not file.is_array(name):
        raise MissingNameError(
            f"{file.path} has no array {name!r}, which static= names; it has: "
            f"{listed_names(file.names(), name)}"
        )
    shape = file.shape(name)
    if shape[:1] != (count,):
        raise FormatError(
            f"{file.path}: {name!r} has shape {list(shape)}, and static= takes arrays with one "
            f"value for each of {count:,} episodes"
        )
    reader = file.rows(name)
    check_static(name, math.prod(shape) * (1 if reader.dtype.hasobject else reader.dtype.itemsize))
    return file.column(name)


# -- all files


def _joined(
    buffers: Sequence[_Buffer],
    opened: OpenArrays[Any],
    options: EpisodeOptions,
    windows: WindowOptions,
) -> ReplaySource:
    """The episodes of all files, in order."""
    keys = list(buffers[0].readers)
    check_mask([*keys, *options.static], windows)
    for buffer in buffers:
        if buffer.readers.keys() != set(keys):
            odd = min(buffer.readers.keys() ^ set(keys))
            other = buffer.shown if odd in keys else buffers[0].shown
            raise MissingNameError(
                f"{other}: {STEPS!r} has no array {odd!r}, which other files have: name keys that "
                "all files have as keys="
            )
    if isinstance(options.episodes, tuple):
        known = {_name(number) for buffer in buffers for number in buffer.numbers.tolist()}
        if missing := set(options.episodes) - known:
            raise MissingNameError(
                f"no file has an episode {min(missing)!r}, which episodes= names: those of a "
                "replay buffer are called episode_0, "
                "episode_1 and so on"
            )
    counts = [len(buffer.starts) for buffer in buffers]
    files = np.repeat(np.arange(len(buffers)), counts)
    starts = np.concatenate([buffer.starts for buffer in buffers])
    lengths = np.concatenate([buffer.ends - buffer.starts for buffer in buffers])
    of_keys = windows_of(keys, options.windows)
    arrays = [_array(key, buffers, files, starts, of_keys[key]) for key in keys]
    check_pad(arrays, windows)
    static = {
        name: stacked(name, [value for buffer in buffers for value in buffer.static[name]])
        for name in options.static
    }
    edges = np.concatenate([[0], np.cumsum([buffer.rows for buffer in buffers])]).astype(np.int64)
    return ReplaySource(
        edges[files] + starts,
        list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)),
        paths=[buffer.path for buffer in buffers],
        files_of=files,
        names=[_name(number) for buffer in buffers for number in buffer.numbers.tolist()],
        windows=Windows(lengths, windows),
        keys=arrays,
        static=static,
        opened=opened,
    )


def _array(
    key: str, buffers: Sequence[_Buffer], files: IntArray, starts: IntArray, window: int | None
) -> EpisodeArrays:
    """The arrays of a key of all files."""
    readers = [buffer.readers[key] for buffer in buffers]
    first = readers[0]
    for buffer, reader in zip(buffers, readers, strict=True):
        if (reader.shape[1:], reader.dtype) != (first.shape[1:], first.dtype):
            raise FormatError(
                f"{buffer.shown}: steps of {key!r} are {reader.dtype} {list(reader.shape[1:])}, "
                f"and in {buffers[0].shown} {first.dtype} "
                f"{list(first.shape[1:])}: read files that are alike, or leave the key out of keys="
            )
    nowhere = np.full((len(files), 2), -1, np.int64)
    return EpisodeArrays(
        key, tuple(first.shape[1:]), first.dtype, nowhere, readers, files, window, starts
    )
