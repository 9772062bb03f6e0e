"""Finds episodes in HDF5 files and Zarr stores, and joins them to one source.

Robotics stores demonstrations in groups (robomimic, LIBERO: ``data/demo_0/obs/agentview_image``,
``data/demo_0/actions``), or in a file each (ALOHA). Diffusion Policy stores the steps of all
episodes in arrays ``data/<key>``, and in ``meta/episode_ends`` the row after the last step of each:
a replay buffer. RLDS has a TFRecord for each (`headrace.formats.episodes.rlds`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError, MissingNameError, warn
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.episodes import rlds
from headrace.formats.episodes.rlds import DecodeImage, RecordEpisodes
from headrace.formats.episodes.source import (
    MASK,
    Episode,
    EpisodeArrays,
    EpisodeSource,
    StepKey,
    WindowOptions,
    Windows,
)
from headrace.formats.hdf5 import HDF5
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import DataPath, look_for
from headrace.formats.tfrecord import TFRECORD
from headrace.formats.tree import StoredArray, Tree, join
from headrace.formats.trees import look_into
from headrace.formats.zarr.stores import ZARR
from headrace.io.paths import listed_names, redact
from headrace.io.remote.options import RemoteOptions
from headrace.memory.anonymous import SharedArray

STEPS = "data"
ENDS = "meta/episode_ends"

_NUMBERED = re.compile(r"^\D*\d+$")
T = TypeVar("T")


class EpisodeOptions(NamedTuple):
    """What to read of each file.

    Attributes:
        groups: pattern of the paths of groups. "": each file is an episode. None: it is detected.
        keys: arrays with one row per step, or patterns of their paths. None: all.
        static: arrays and values without a time axis.
        episodes: names of the episodes to read, or the path of an array in each file. None: all.
        windows: steps of a window, or a dict of steps by key or pattern. None: whole episodes.
    """

    groups: str | None = None
    keys: tuple[str, ...] | None = None
    static: tuple[str, ...] = ()
    episodes: str | tuple[str, ...] | None = None
    windows: int | Mapping[str, int] | None = None


# -- the contents of a file


def claims(tree: Tree) -> str | None:
    """ "" if a file certainly contains episodes. None: it contains something else."""
    return "" if is_replay(tree) or has_numbered_groups(tree) else None


def is_replay(tree: Tree) -> bool:
    """True if a file is a replay buffer."""
    return tree.is_group(STEPS) and tree.is_array(ENDS)


def has_numbered_groups(tree: Tree) -> bool:
    """True if ``data`` is a group of numbered groups with several arrays each, as in robomimic and
    LIBERO.
    """
    names = tree.children(STEPS)
    if not names or not all(map(_NUMBERED.match, names)):
        return False
    if not all(tree.is_group(f"{STEPS}/{name}") for name in names[:64]):
        return False
    return len(arrays_in(tree, f"{STEPS}/{names[0]}")) > 1


def groups_matching(tree: Tree, pattern: str) -> list[str]:
    """The paths of the groups that match a pattern such as "data/demo_*", in natural order. "": the
    file itself.
    """
    found = [""]
    for part in filter(None, pattern.split("/")):
        paths: list[str] = []
        for parent in found:
            names = tree.children(parent) if _is_pattern(part) else [part]
            matching = [join(parent, name) for name in names if fnmatch.fnmatchcase(name, part)]
            paths += [path for path in matching if tree.is_group(path)]
        found = paths
    return sorted(found, key=_natural)


def arrays_in(tree: Tree, group: str) -> list[str]:
    """The arrays below a group that have an axis, by their relative paths, in natural order."""
    start = len(join(group, ""))
    names = [name for name in tree.nodes(group) if tree.is_array(name) and tree.shape(name)]
    return sorted((name[start:] for name in names), key=_natural)


def episode_ends(tree: Tree) -> IntArray:
    """The row after the last step of each episode of a replay buffer ([episodes] int64).

    Raises:
        FormatError: the ends are not integers, or don't rise.
    """
    where = f"{tree.shown}: {ENDS}"
    shape = tree.shape(ENDS)
    if len(shape) != 1 or not shape[0] or tree.dtype(ENDS).kind not in "iu":
        raise FormatError(
            f"{where} holds {tree.described(ENDS)}, but must hold one integer per episode: write "
            "[episodes] int64"
        )
    stored = tree.column(ENDS)
    ends: IntArray = stored.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    falls = np.flatnonzero(ends <= starts)
    if len(falls):
        number = int(falls[0])
        raise FormatError(
            f"{where} must rise, and episode {number} begins at row {int(starts[number]):,} and "
            f"ends at {int(stored[number]):,}: write the row after the last step of each episode"
        )
    return ends


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts names as people do: demo_2 before demo_10."""
    return [
        (0, int(part), part) if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def _matching(pattern: str, keys: Sequence[str], static: Sequence[str]) -> list[str]:
    """The keys that match a pattern, without static ones; or the key itself, if it is none."""
    if not _is_pattern(pattern):
        return [pattern.strip("/")]
    return [key for key in keys if fnmatch.fnmatchcase(key, pattern) and key not in static]


def _check_episodes(missing: Collection[str], names: Iterable[str]) -> None:
    """Raises a MissingNameError if episodes that were asked for are missing."""
    if missing:
        absent = min(missing)
        raise MissingNameError(
            f"no file has an episode {absent!r}, which episodes= names; there are: "
            f"{listed_names(names, absent)}"
        )


def by_key(option: str, given: Mapping[str, T], keys: Sequence[str]) -> dict[str, T]:
    """The values of an option that is given by key or pattern.

    Raises:
        ConfigError: a pattern matches no key.
    """
    found: dict[str, T] = {}
    for pattern, value in given.items():
        matches = [key for key in keys if fnmatch.fnmatchcase(key, pattern)]
        if not matches and keys:
            raise ConfigError(
                f"{option}= has {pattern!r}, which is not a key; the keys are: "
                f"{listed_names(keys, pattern)}"
            )
        found |= dict.fromkeys(matches, value)
    return found


class _Finder:
    """Finds the episodes of files, one file after the other. All episodes must have the keys of the
    first one. If the first file is a replay buffer, all must be.

    Attributes:
        keys: keys of all episodes. None: no episode was found yet.
        missing: requested episodes that no file had yet.
        known: names of the episodes found, for the message about missing ones.
        are_buffers: True if the files are replay buffers. None: not known yet.
    """

    def __init__(self, options: EpisodeOptions) -> None:
        self.options = options
        self.keys: list[str] | None = None
        self.missing = set[str]()
        if not isinstance(options.episodes, str):
            self.missing.update(options.episodes or ())
        self.known = set[str]()
        self.are_buffers = None if options.groups is None else False

    def __call__(self, tree: Tree) -> list[Episode]:
        """The episodes of a file.

        Raises:
            MissingNameError: the file has no such groups, arrays or values.
            FormatError: arrays of an episode differ in length, or are damaged.
        """
        if self.are_buffers is None:
            self.are_buffers = is_replay(tree)
        if self.are_buffers:
            return self._of_buffer(tree)
        return self._of_groups(tree)

    # -- an episode is a group

    def _of_groups(self, tree: Tree) -> list[Episode]:
        pattern = self.options.groups
        if pattern is None:
            pattern = self._pattern(tree)
        names = groups_matching(tree, pattern)
        if not names:
            raise tree.missing("groups", pattern, list(filter(tree.is_group, tree.nodes())))
        episodes: list[Episode] = []
        for number in self._chosen(tree, names):
            group = names[number]
            arrays = self._arrays(tree, group)
            static = {key: self._value(tree, group, key) for key in self.options.static}
            length = next(iter(arrays.values())).shape[0]
            episodes.append(Episode(tree.path, group, arrays, static, 0, length))
        return episodes

    def _pattern(self, tree: Tree) -> str:
        """Detects the pattern of the groups."""
        if has_numbered_groups(tree):
            return f"{STEPS}/*"
        kinds = {name: tree.kind(name) for name in tree.children("")}
        are_numbered = all(_NUMBERED.match(name) for name in kinds)
        if kinds and are_numbered and {*kinds.values()} == {"group"}:
            return "*"
        if "array" in kinds.values():
            return ""
        groups = list(filter(tree.is_group, tree.nodes()))
        raise MissingNameError(
            f"{tree.shown}: which groups are episodes is not known; pass groups=, such as "
            f"'data/*' (a replay buffer has an array {ENDS!r} beside a group {STEPS!r}); it has: "
            f"{listed_names(groups)}"
        )

    def _value(self, tree: Tree, group: str, key: str) -> Any:
        """A static value: an array, or an attribute of the episode."""
        name = join(group, key)
        if tree.is_array(name):
            return tree.whole(name)[()]
        attributes = tree.attrs(group)
        value = attributes.get(key)
        if getattr(value, "shape", ()) is None:  # HDF5 has attributes without a value
            value = None
        if value is not None:
            return value
        names = [*arrays_in(tree, group), *attributes]
        raise tree.missing(f"array or attribute in {group or '/'}:", key, names)

    # -- episodes are ranges of rows

    def _of_buffer(self, tree: Tree) -> list[Episode]:
        if not is_replay(tree):
            raise FormatError(
                f"{tree.shown} is not a replay buffer, as the first file is: it has no array "
                f"{ENDS!r} beside a group {STEPS!r}"
            )
        ends = episode_ends(tree)
        arrays = self._arrays(tree, STEPS)
        rows = next(iter(arrays.values())).shape[0]
        if rows != ends[-1]:
            raise FormatError(
                f"{tree.shown}: the last episode ends at row {int(ends[-1]):,}, by {ENDS}, and the "
                f"arrays of {STEPS!r} have {rows:,} rows: the file was not finished, or is "
                "damaged: write it again"
            )
        static: dict[str, Any] = {}
        for name in self.options.static:
            shape = tree.shape(name)
            if shape[:1] != ends.shape:
                raise FormatError(
                    f"{tree.shown}: {name!r} has shape {list(shape)}, and static= takes arrays "
                    f"with one value for each of {len(ends):,} episodes"
                )
            static[name] = tree.column(name)
        names = [f"episode_{number}" for number in range(len(ends))]
        firsts = [0, *ends.tolist()]
        episodes: list[Episode] = []
        for number in self._chosen(tree, names):
            own = {name: values[number] for name, values in static.items()}
            first, end = firsts[number : number + 2]
            episodes.append(Episode(tree.path, names[number], arrays, own, first, end - first))
        return episodes

    # -- both

    def _chosen(self, tree: Tree, names: Sequence[str]) -> list[int]:
        """The numbers of the episodes to read, in order."""
        wanted = self.options.episodes
        if wanted is None:
            return [*range(len(names))]
        numbers: dict[Any, int] = {}
        for number, name in enumerate(names):
            numbers[name.rpartition("/")[2]] = numbers[name] = number
        if isinstance(wanted, tuple):
            self.missing -= numbers.keys()
            self.known.update(names)
            return sorted({numbers[name] for name in wanted if name in numbers})
        listed = tree.column(wanted)
        if listed.dtype.kind == "b" and listed.shape == (len(names),):
            return [*np.flatnonzero(listed).tolist()]
        if self.are_buffers:
            numbers = {number: number for number in range(len(names))}
            if listed.dtype.kind not in "iu" or listed.ndim != 1:
                raise FormatError(
                    f"{tree.shown}: {wanted!r}, which episodes= names, holds "
                    f"{tree.described(wanted)}: it must have the numbers of episodes, or a bool "
                    f"for each of {len(names):,}"
                )
        found = set[int]()
        for one in listed.reshape(-1).tolist():
            if one not in numbers:
                raise MissingNameError(
                    f"{tree.shown}: {wanted!r} lists {one!r}, which is missing; there are: "
                    f"{listed_names(names, str(one))}"
                )
            found.add(numbers[one])
        return sorted(found)

    def _keys_of(self, tree: Tree, group: str) -> list[str]:
        """The keys of the first episode."""
        if self.keys is not None:
            return self.keys
        patterns = ("*",) if self.options.keys is None else self.options.keys
        stored: list[str] = []
        if any(map(_is_pattern, patterns)):
            stored = arrays_in(tree, group)
            if not stored and not tree.nodes():
                raise MissingNameError(
                    f"{tree.shown}: the names of its arrays are not known, since its server does "
                    "not list them: name them as keys="
                )
        found: list[str] = []
        for pattern in patterns:
            matches = _matching(pattern, stored, self.options.static)
            if not matches and self.options.keys is not None:
                raise tree.missing(f"arrays in {group or '/'}:", pattern, stored)
            found += matches
        if not found:
            raise FormatError(
                f"{tree.shown}: {group or '/'} has no array with a time axis: pass keys="
            )
        self.keys = list(dict.fromkeys(found))
        return self.keys

    def _arrays(self, tree: Tree, group: str) -> dict[str, StoredArray]:
        """The arrays of a group by key, which have equal numbers of rows."""
        arrays: dict[str, StoredArray] = {}
        for key in self._keys_of(tree, group):
            array = tree.stored(join(group, key))
            if array is None:
                raise MissingNameError(
                    f"{tree.shown}: {group or '/'} has no array {key!r}; it has: "
                    f"{listed_names(arrays_in(tree, group), key, repr)}: name keys that all "
                    "episodes have as keys=, or the episodes that have it as episodes="
                )
            if not array.shape:
                raise FormatError(
                    f"{tree.shown}: {join(group, key)!r} is a single value without a time axis: "
                    "pass it in static="
                )
            if not isinstance(array.reader, ArrayReader | None):
                raise FormatError(
                    f"{tree.shown}: {join(group, key)!r} holds elements of variable length "
                    f"({array.dtype}), which can't be cut into windows: leave it out of keys="
                )
            arrays[key] = array
        if len({array.shape[0] for array in arrays.values()}) > 1:
            lengths = ", ".join(f"{key!r} {array.shape[0]:,}" for key, array in arrays.items())
            raise FormatError(
                f"{tree.shown}: {group or '/'}: its arrays have different lengths: {lengths}: "
                "pass those that belong together as keys=, and those without a time axis as "
                "static="
            )
        return arrays


# -- all files


def open_episodes(
    data_path: DataPath,
    reach: RemoteOptions,
    options: EpisodeOptions,
    windows: WindowOptions,
    direct: bool,
    decode_image: DecodeImage,
) -> EpisodeSource:
    """The episodes of HDF5 files, Zarr stores or TFRecord files.

    Args:
        data_path, reach, direct: see `look_into`.
        options, windows: what to read, and the windows.
        decode_image: decodes the images of TFRecord files.

    Raises:
        MissingNameError, FormatError, ConfigError: see `EpisodeDataset`.
        DataNotFoundError, AccessError, RemoteError: a file does not exist, or can't be read.
    """
    files = look_for(data_path, (HDF5, ZARR, TFRECORD), reach)
    try:
        if files is not None and files.kind == TFRECORD:
            return _of_records(files, reach, options, windows, decode_image)
        where = data_path if files is None else files
        return _of_trees(where, reach, options, windows, direct)
    except BaseException:
        if files is not None and files.server is not None:
            files.server.close()
        raise


def _of_records(
    found: FileSet,
    reach: RemoteOptions,
    options: EpisodeOptions,
    windows: WindowOptions,
    decode_image: DecodeImage,
) -> EpisodeSource:
    """The episodes of TFRecord files."""
    source, features = rlds.open_records(found, reach)
    if options.groups is not None or isinstance(options.episodes, str):
        raise ConfigError(
            "groups=, and episodes= with the name of an array, are for HDF5 files and Zarr stores: "
            "of TFRecord files each record is an episode, and episodes= takes a list of names"
        )
    names = [f"episode_{number}" for number in range(len(source))]
    chosen = source.steps > 0
    _warn_of_empty([source.location(number) for number in np.flatnonzero(~chosen).tolist()])
    if options.episodes is not None:
        _check_episodes(set(options.episodes).difference(names), names)
        chosen &= np.isin(names, options.episodes)
    numbers = np.flatnonzero(chosen)
    start = len(rlds.STEPS)
    of_steps = {
        name[start:]: feature for name, feature in features.items() if name.startswith(rlds.STEPS)
    }
    known = [name for name, feature in of_steps.items() if feature.encoding in rlds.READ]
    wanted: dict[str, None] = {}
    for pattern in options.keys or ("*",):
        wanted |= dict.fromkeys(_matching(pattern, known, options.static))
    steps = _windows_of([*wanted], options, windows)
    keys: list[StepKey] = []
    for name in wanted:
        if name not in known:
            reason = ""
            if name in of_steps:
                reason = f" (it holds {of_steps[name].encoding}: pass it in static=)"
            raise MissingNameError(
                f"{redact(source.shown[0])}: its steps have no {name!r} that can be cut into "
                f"windows{reason}; they have: {listed_names(known, name)}"
            )
        feature = of_steps[name]
        keys.append(StepKey(name, feature.shape, np.dtype(feature.dtype), steps[name]))
    values = rlds.values_of(source, features, options.static, numbers)
    return RecordEpisodes(
        source,
        numbers,
        {name: of_steps[name] for name in wanted},
        [names[number] for number in numbers.tolist()],
        Windows(source.steps[numbers], windows),
        keys,
        {name: _stacked(each) for name, each in values.items()},
        decode_image,
    )


def _of_trees(
    data_path: DataPath | FileSet,
    reach: RemoteOptions,
    options: EpisodeOptions,
    windows: WindowOptions,
    direct: bool,
) -> EpisodeSource:
    """The episodes of HDF5 files or Zarr stores."""
    named = [f"{STEPS}/{key.strip('/')}" for key in options.keys or () if not _is_pattern(key)]
    nodes = [STEPS, ENDS, *named, *options.static]
    finder = _Finder(options)
    found, opened = look_into(
        data_path, reach, None, finder, nodes=nodes, direct=direct, keeps=True
    )
    try:
        _check_episodes(finder.missing, finder.known)
        episodes = [episode for each in found for episode in each]
        return _joined(episodes, finder, opened, windows)
    except BaseException:
        opened.close()
        raise


def _joined(
    everything: Sequence[Episode],
    finder: _Finder,
    opened: OpenArrays[Any],
    windows: WindowOptions,
) -> EpisodeSource:
    """The episodes of all files as one source."""
    options = finder.options
    keys = finder.keys or []
    steps = _windows_of(keys, options, windows)
    _warn_of_empty([episode.where for episode in everything if not episode.length])
    episodes = [episode for episode in everything if episode.length]
    paths = [episode.path for episode in everything]
    paths += [array.path for episode in episodes for array in episode.arrays.values()]
    numbers = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    arrays: list[EpisodeArrays] = []
    if episodes:
        arrays = [EpisodeArrays(key, episodes, numbers, steps[key]) for key in keys]
    static = {
        name: _stacked([episode.static[name] for episode in episodes]) for name in options.static
    }
    rows: tuple[IntArray, IntArray] | None = None
    if finder.are_buffers and episodes:
        sizes = {episode.path: episode.arrays[keys[0]].shape[0] for episode in everything}
        edges = np.concatenate([[0], np.cumsum([*sizes.values()])]).astype(np.int64)
        firsts = [edges[numbers[episode.path]] + episode.first for episode in episodes]
        rows = (np.array(firsts, np.int64), edges)
    lengths = np.array([episode.length for episode in episodes], np.int64)
    files = np.array([numbers[episode.path] for episode in episodes], np.int64)
    names = [episode.name for episode in episodes]
    cut = Windows(lengths, windows)
    return EpisodeSource([*numbers], files, names, cut, arrays, static, opened, rows)


def _warn_of_empty(episodes: Sequence[str]) -> None:
    """Warns of episodes without steps, given by their locations."""
    if episodes:
        more = ""
        if len(episodes) > 1:
            more = f" and {len(episodes) - 1:,} more"
        warn(f"{episodes[0]}{more}: the episode has no steps, and is left out")


def _windows_of(
    keys: Sequence[str], options: EpisodeOptions, windows: WindowOptions
) -> Mapping[str, int | None]:
    """The number of steps in a window of each key."""
    if windows.window is not None and MASK in (*keys, *options.static):
        raise ConfigError(
            f"an array is called {MASK!r}, the name of the mask of windows: leave it out of keys="
        )
    steps: Mapping[str, int | None] = dict.fromkeys(keys, windows.window)
    if isinstance(options.windows, Mapping):
        steps = by_key("window", options.windows, keys)
        missing = [key for key in keys if key not in steps]
        if missing:
            raise ConfigError(
                f"window= has no entry for {missing[0]!r}: give each key its steps ('*' stands "
                "for all), or leave it out of keys="
            )
    return steps


def _stacked(values: Sequence[Any]) -> Sequence[Any] | SharedArray:
    """Static values of all episodes; numbers of one shape as one array, which workers share."""
    arrays = [np.asarray(value) for value in values]
    specs = {(array.shape, array.dtype) for array in arrays}
    if len(specs) == 1 and arrays[0].dtype.kind in "biufc":
        return SharedArray(np.stack(arrays))
    return list(values)
