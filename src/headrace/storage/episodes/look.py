"""Finds episodes in files of groups: what files are looked for, whatever their format, and how what
was found becomes one source.

Robotics keeps demonstrations so (robomimic, LIBERO: ``data/demo_0/obs/agentview_image``,
``data/demo_0/actions``), or a file each (ALOHA); neurophysiology its time series (NWB:
``acquisition/NAME/data``, ``.../timestamps``).
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from headrace.errors import BudgetError, ConfigError, FormatError, MissingNameError, warn
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.reader import ArrayReader, OpenArrays
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.episodes.source import MASK, EpisodeSource
from headrace.storage.episodes.steps import EpisodeArrays
from headrace.storage.episodes.windows import WindowOptions, Windows

_STATIC_BYTES = 256 << 20
_NUMBERED = re.compile(r"^\D*\d+$")
EPISODES = "episodes"
"""What files of episodes are called where a format is found out."""
GROUP, ARRAY = "group", "array"
F = TypeVar("F")
G = TypeVar("G")


class EpisodeOptions(NamedTuple):
    """What is read of each file.

    Attributes:
        groups: pattern of the groups' paths; "": each file is one; None: found out.
        keys: arrays with one row a step, or patterns of such; None: all.
        static: arrays and values without an axis of time.
        episodes: which ones: names, or the path of an array of names in each file; None: all.
        windows: by key or pattern, steps of a window; None: whole episodes.
        direct, cache_dir: see `EpisodeDataset`.
    """

    groups: str | None = None
    keys: tuple[str, ...] | None = None
    static: tuple[str, ...] = ()
    episodes: str | tuple[str, ...] | None = None
    windows: int | Mapping[str, int] | None = None
    direct: bool = True
    cache_dir: Any = None


class EpisodeArray(NamedTuple):
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
    arrays: dict[str, EpisodeArray]
    static: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{redact(self.path)}: {self.name or '/'}"

    @property
    def length(self) -> int:
        return next(iter(self.arrays.values())).shape[0]


# -- names


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts names as people do: demo_2 before demo_10."""
    return [
        (0, int(part), part) if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def is_pattern(name: str) -> bool:
    """True if it stands for several names."""
    return any(letter in name for letter in "*?[")


def matching(
    pattern: str, children: Callable[[str], Iterable[str]], is_group: Callable[[str], bool]
) -> list[str]:
    """The paths of the groups that a pattern means, such as "data/demo_*", sorted as people do; "":
    the file itself.

    Args:
        pattern: of their paths.
        children: gives the names of what lies in a group.
        is_group: True if a path is that of a group.
    """
    found: list[str] = [""]
    for part in [part for part in pattern.split("/") if part]:
        found = [
            path
            for parent in found
            for name in (children(parent) if is_pattern(part) else [part])
            if fnmatch.fnmatchcase(name, part) and is_group(path := f"{parent}/{name}".lstrip("/"))
        ]
    return sorted(found, key=natural)


# -- one file


class EpisodeLook(ABC, Generic[F, G]):
    """Looks into files, one after the other: what the first episode has, all others must have.

    Args:
        options: what is read.

    Attributes:
        keys: of all episodes; None: none was found so far.
        missing: names of episodes that are wanted, and were in no file so far.
        known: names of episodes that there are, for a message about those.
    """

    def __init__(self, options: EpisodeOptions) -> None:
        self.options = options
        self.keys: tuple[str, ...] | None = None
        self.missing: set[str] = (
            set(options.episodes) if isinstance(options.episodes, tuple) else set()
        )
        self.known: list[str] = []

    def __call__(self, file: F, path: str) -> list[Episode]:
        """The episodes of a file, which is open.

        Raises:
            MissingNameError: it has no such groups, arrays or values.
            FormatError: arrays of an episode have different lengths, or are damaged.
        """
        pattern = (
            self.found_groups(file, path) if self.options.groups is None else self.options.groups
        )
        names = self.groups_matching(file, pattern)
        if not names:
            raise MissingNameError(
                f"{redact(path)} has no groups {pattern!r}, of which each would be an episode; it "
                "has: "
                f"{listed_names(self.group_names(file), pattern)}"
            )
        return [self._episode(file, path, name) for name in self._chosen(file, path, names)]

    def groups_matching(self, file: F, pattern: str) -> list[str]:
        """The paths of the groups that a pattern means, see `matching`."""
        return matching(
            pattern,
            lambda parent: self.children(file, parent),
            lambda name: self.kind(file, name) == GROUP,
        )

    def unmistakable_groups(self, file: F) -> str | None:
        """The pattern of the episodes of a file that holds nothing else but them, as robomimic and
        LIBERO lay them out: ``data`` is a group of groups that are numbered, and have several
        arrays; None: it holds something else.
        """
        names = self.children(file, "data") if self.kind(file, "data") == GROUP else ()
        if (
            not names
            or not all(map(_NUMBERED.match, names))
            or any(self.kind(file, f"data/{name}") != GROUP for name in names[:64])
        ):
            return None
        return "data/*" if len(self.arrays(self.group(file, f"data/{names[0]}"))) > 1 else None

    def found_groups(self, file: F, path: str) -> str:
        """The pattern of the episodes where nobody has said it."""
        if (found := self.unmistakable_groups(file)) is not None:
            return found
        kinds = {name: self.kind(file, name) for name in self.children(file, "")}
        if kinds and all(_NUMBERED.match(name) and kind == GROUP for name, kind in kinds.items()):
            return "*"
        if ARRAY in kinds.values():
            return ""
        raise MissingNameError(
            f"{redact(path)}: nobody knows which groups are episodes; pass groups=, such as "
            "'data/*' (a replay buffer has an array "
            "'meta/episode_ends' beside a group 'data'); it has: "
            f"{listed_names(self.group_names(file))}"
        )

    # -- what each format does in a way of its own

    @abstractmethod
    def children(self, file: F, parent: str) -> Sequence[str]:
        """The names of what lies in a group, or in the file itself (""); () of what is no group."""

    @abstractmethod
    def kind(self, file: F, name: str) -> str | None:
        """`GROUP`, `ARRAY`, or None of anything else."""

    @abstractmethod
    def group_names(self, file: F) -> list[str]:
        """The paths of all groups."""

    @abstractmethod
    def listed(self, file: F, path: str, name: str) -> list[str]:
        """The texts of an array."""

    @abstractmethod
    def group(self, file: F, name: str) -> G:
        """A group, by its path."""

    @abstractmethod
    def arrays(self, group: G) -> Collection[str]:
        """The arrays below a group that have an axis, by their paths in it."""

    @abstractmethod
    def attributes(self, group: G) -> Mapping[str, Any]:
        """The attributes of a group."""

    @abstractmethod
    def array(self, group: G, path: str, name: str, key: str) -> EpisodeArray:
        """An array of a group."""

    @abstractmethod
    def value(self, group: G, key: str) -> Any:
        """The value of an array of a group, which `check_static` has measured; None: there is no
        such array, or it has no value.
        """

    # -- what all have in common

    def _chosen(self, file: F, path: str, names: list[str]) -> list[str]:
        wanted = self.options.episodes
        if wanted is None:
            return names
        by_name = {name.rpartition("/")[2]: name for name in names} | {name: name for name in names}
        if isinstance(wanted, str):
            wanted = tuple(self.listed(file, path, wanted))
            if absent := [name for name in wanted if name not in by_name]:
                raise MissingNameError(
                    f"{redact(path)}: {self.options.episodes!r} lists {absent[0]!r}, which is "
                    "missing; the file has: "
                    f"{listed_names(names, absent[0])}"
                )
        self.missing -= by_name.keys()
        self.known += names if self.missing else []
        return sorted({by_name[name] for name in wanted if name in by_name}, key=natural)

    def _episode(self, file: F, path: str, name: str) -> Episode:
        group = self.group(file, name)
        if self.keys is None:
            self.keys = self._keys_of(group, path, name)
        arrays = {key: self.array(group, path, name, key) for key in self.keys}
        episode = Episode(
            path,
            name,
            arrays,
            {key: self._value(group, path, name, key) for key in self.options.static},
        )
        if len({array.shape[0] for array in arrays.values()}) > 1:
            lengths = ", ".join(f"{key!r} {array.shape[0]:,}" for key, array in arrays.items())
            raise FormatError(
                f"{episode.where}: its arrays have different lengths: {lengths}: name those that "
                "belong together as keys=, and those "
                "without an axis of time as static="
            )
        return episode

    def _keys_of(self, group: G, path: str, name: str) -> tuple[str, ...]:
        """The keys, by the first episode."""
        there, wanted = self.arrays(group), self.options.keys
        static = set(self.options.static)
        found: list[str] = []
        for one in ["*"] if wanted is None else wanted:
            matches = [
                key
                for key in sorted(there, key=natural)
                if fnmatch.fnmatchcase(key, one) and key not in static
            ]
            found += matches if is_pattern(one) else [one.strip("/")]
            if wanted is not None and is_pattern(one) and not matches:
                raise MissingNameError(
                    f"{redact(path)}: {name or '/'} has no arrays {one!r}; it has: "
                    f"{listed_names(there, one)}"
                )
        return tuple(dict.fromkeys(found))

    def absent(self, group: G, path: str, name: str, key: str) -> MissingNameError:
        """The error of an array that an episode lacks."""
        return MissingNameError(
            f"{redact(path)}: {name or '/'} has no array {key!r}; it has: "
            f"{listed_names(self.arrays(group), key)}: name keys that all "
            "episodes have as keys=, or the episodes that have it as episodes="
        )

    def _value(self, group: G, path: str, name: str, key: str) -> Any:
        """A static value: of an array, or of an attribute of the episode."""
        if (value := self.value(group, key)) is not None:
            return value
        attributes = self.attributes(group)
        if key in attributes:
            return attributes[key]
        there = [*self.arrays(group), *attributes]
        raise MissingNameError(
            f"{redact(path)}: {name or '/'} has no array and no attribute {key!r}; it has: "
            f"{listed_names(there, key)}"
        )


# -- all files


def joined_episodes(
    paths: Sequence[str],
    everything: Sequence[Episode],
    look: EpisodeLook[Any, Any],
    opened: OpenArrays[Any],
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
        absent = min(look.missing)
        raise MissingNameError(
            f"no file has an episode {absent!r}, which episodes= names; there are: "
            f"{listed_names(set(look.known), absent)}"
        )
    keys = look.keys or ()
    if not keys:
        raise FormatError(
            f"{redact(paths[0])}: {everything[0].name or '/'} has no array with an axis of time: "
            "name some as keys="
        )
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
    static = {
        name: stacked(name, [episode.static[name] for episode in chosen]) for name in options.static
    }
    return EpisodeSource(
        list(places),
        [places[episode.path] for episode in chosen],
        [episode.name for episode in chosen],
        Windows(lengths, windows),
        arrays,
        static,
        opened,
        [episode.where for episode in empty],
    )


def check_mask(names: Sequence[str], windows: WindowOptions) -> None:
    """Raises a ConfigError where an array has the name of the mask of windows."""
    if MASK in names and windows.window is not None:
        raise ConfigError(
            f"an array is called {MASK!r}, which is the mask of windows: leave it out of keys="
        )


def check_pad(arrays: Sequence[EpisodeArrays], windows: WindowOptions) -> None:
    """Raises a ConfigError where zeros are wanted of what has none."""
    if windows.pad == "constant" and (
        held := [array.name for array in arrays if array.holds_objects]
    ):
        raise ConfigError(
            f"pad='constant' has no value for {held[0]!r}, whose elements are of any size: pass "
            "pad='edge'"
        )


def windows_of(
    keys: Sequence[str], windows: int | Mapping[str, int] | None
) -> dict[str, int | None]:
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
            raise ConfigError(
                f"window= has {pattern!r}, which is no key; the keys are: "
                f"{listed_names(keys, pattern)}"
            )
        found |= dict.fromkeys(matches, steps)
    if missing := [key for key in keys if key not in found]:
        raise ConfigError(
            f"window= says nothing of {missing[0]!r}: give each key its steps ('*' stands for "
            "all), or leave it out of keys="
        )
    return found


def _joined(
    key: str, episodes: Sequence[Episode], places: Mapping[str, int], window: int | None
) -> EpisodeArrays:
    """The arrays of a key of all episodes."""
    first = episodes[0].arrays[key]
    for episode in episodes:
        array = episode.arrays[key]
        if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
            raise FormatError(
                f"{episode.where}: steps of {key!r} are {array.dtype} {list(array.shape[1:])}, "
                f"and in {episodes[0].where} {first.dtype} "
                f"{list(first.shape[1:])}: name the episodes that are alike as episodes=, or "
                "leave the key out of keys="
            )
    begins = [
        (places[array.path], array.begin) for array in (episode.arrays[key] for episode in episodes)
    ]
    readers = [reader for episode in episodes if (reader := episode.arrays[key].reader) is not None]
    numbers = itertools.count()
    reader_of = [
        -1 if episode.arrays[key].reader is None else next(numbers) for episode in episodes
    ]
    return EpisodeArrays(key, first.shape[1:], first.dtype, begins, readers, reader_of, window)


def stacked(name: str, values: Sequence[Any]) -> Sequence[Any] | SharedArray:
    """Static values: numbers of one shape in one array, which workers share."""
    arrays = [np.asarray(value) for value in values]
    check_static(name, sum(array.nbytes for array in arrays))
    alike = arrays and all(
        (array.shape, array.dtype) == (arrays[0].shape, arrays[0].dtype) for array in arrays
    )
    return (
        SharedArray(np.stack(arrays)) if alike and arrays[0].dtype.kind in "biufc" else list(values)
    )


def check_static(name: str, nbytes: int) -> None:
    """Raises a BudgetError where static values take too many bytes."""
    if nbytes > _STATIC_BYTES:
        raise BudgetError(
            f"static={name!r} takes {nbytes:,} bytes, which would be held in memory: static "
            "values are small; name large arrays as keys="
        )
