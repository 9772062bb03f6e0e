"""Reads episodes of HDF5 files, Zarr stores and TFRecord files, or windows over their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import numpy as np
import torch

from headrace.arguments import check_choice, check_integer
from headrace.casting import DTypeArgument, cast, dtype_named, known_dtype
from headrace.collate.sequences import Padding
from headrace.collate.stack import USUAL, FieldPath, stack_inside, stack_tree
from headrace.core.batcher import BatchReader, Collating, ColumnReader
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.held import Held
from headrace.core.options import LoadingMode, ModeName, PathOptions, check_arguments
from headrace.core.values import Access, Records, Use, ValueSource, used
from headrace.datasets.arrays import as_input, checked_list
from headrace.datasets.image.masks import decode_mask
from headrace.datasets.pixels import decode_image
from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError, HeadraceError, SampleError
from headrace.formats.arrays.rows import as_value, long_doubles_in
from headrace.formats.episodes.find import EpisodeOptions, by_key, open_episodes
from headrace.formats.episodes.source import MASK, EpisodeSource, WindowOptions, Windows
from headrace.formats.resolve.resolver import DataPath
from headrace.io.remote.options import RemoteOptions
from headrace.memory.store import MISSING

LENGTHS = "lengths"
"""Key in a batch of whole episodes: the number of steps of each."""


class EpisodeDecoder(Decoder):
    """Decodes episodes or windows to dicts of tensors by key.

    Args:
        source: the episodes.
        window: steps of the longest window. None: samples are whole episodes.
        dtype: dtype that numbers are cast to, or a dict of dtypes by key or pattern.
        encoding: encoding of strings. None: strings are bytes.

    Raises:
        ConfigError: a dtype is invalid, or a pattern matches no key.
        FormatError: a key has numbers that torch does not support.
    """

    stores_values = False

    def __init__(
        self,
        source: EpisodeSource,
        window: int | None,
        dtype: DTypeArgument | Mapping[str, DTypeArgument] | None,
        encoding: str | None,
    ) -> None:
        named: Mapping[str, Any] = dtype if isinstance(dtype, Mapping) else {"*": dtype}
        of_patterns = {pattern: dtype_named(kind) for pattern, kind in named.items()}
        chosen = by_key("dtype", of_patterns, [key.name for key in source.keys])
        specs = dict[str, ArraySpec]()
        self._dtypes = dict[str, np.dtype[Any]]()
        for key in source.keys:
            kind = key.dtype.newbyteorder("=")
            cast_to = chosen.get(key.name)
            if cast_to is not None and kind.kind in "biufc":
                self._dtypes[key.name] = kind = cast_to
            elif long_doubles_in(kind) == "":
                raise FormatError(
                    f"{key.name!r} holds long doubles ({kind}), which torch does not have: pass "
                    f'dtype={{"{key.name}": "float64"}}'
                )
            specs[key.name] = ArraySpec((key.window or 0, *key.row_shape), kind)
        self._encoding = encoding
        self._specs: dict[str, ArraySpec] | None = None
        """Shape and dtype of all values of a sample, if they are the same for all samples."""
        if window is not None and not source.static:
            self._specs = {**specs, MASK: ArraySpec((window,), np.dtype(bool))}

    def decode(self, record: Any) -> Any:
        values = {name: as_value(value, self._encoding) for name, value in record.items()}
        for name, dtype in self._dtypes.items():
            values[name] = cast(values[name], dtype)
        return values

    def to_input(self, value: Any) -> Any:
        return as_input(value)

    def sample_nbytes(self) -> int | None:
        if self._specs is None:
            return None
        return sum(spec.nbytes for spec in self._specs.values())

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        """Reads windows of numbers into their batch, if they are stacked and not cached."""
        source = dataset.sample_source
        if not isinstance(source, EpisodeSource) or dataset.targets is not None:
            return None
        if self._specs is None or not collating.stacks or not dataset.value_source.is_direct:
            return None
        if any(known_dtype(spec.dtype) is None for spec in self._specs.values()):
            return None

        def read(indices: IntArray, outs: dict[str, Any]) -> int:
            source.read_windows(indices, outs)
            return sum(outs[key.name].nbytes for key in source.keys)

        stored = {key.name: key.dtype for key in source.keys}
        way = "windows straight from storage"
        return ColumnReader(way, dataset, self._specs, read, stored)


class EpisodeCollator:
    """Pads whole episodes to the longest one of their batch.

    Keys with a time axis become [batch, steps, ...], padded with zeros at the end. "mask", bool
    [batch, steps], is True for steps inside the episode, and "lengths", int64 [batch], is their
    number. Everything else is stacked.

    Args:
        keys: the keys with a time axis.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys, self._padding = frozenset(keys), Padding()

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch."""
        padded = dict[FieldPath, torch.Tensor]()  # the lengths of the fields at these paths

        def special(values: list[Any], path: FieldPath) -> Any:
            first = values[0]
            name = path[-1].names[0] if path else ""
            if name in self._keys and isinstance(first, torch.Tensor) and first.ndim:
                batch, padded[path] = self._padding.apply(values, 0, path)
                return batch
            if not isinstance(first, dict) or not self._keys & first.keys():
                return USUAL
            batch = stack_inside(values, path, special, "")
            inside = [at for at in padded if at[:-1] == path]
            if inside:
                lengths = padded[inside[0]]
                longest = batch[inside[0][-1].names[0]].shape[1]
                mask = torch.from_numpy(self._padding.inside(lengths.numpy(), longest))
                batch |= {MASK: mask, LENGTHS: lengths}
            return batch

        return stack_tree(list(samples), special)

    def __repr__(self) -> str:
        return f"EpisodeCollator({sorted(self._keys)!r})"


class EpisodeDataset(BaseDataset):
    """Episodes, or windows over their steps.

    An episode is a group of an HDF5 file or a Zarr store whose arrays have one row per step, or a
    range of rows of a replay buffer. Demonstrations in robotics are stored in groups (robomimic,
    LIBERO: ``data/demo_0/obs/agentview_image``, ``data/demo_0/actions``; ALOHA: one file per
    episode), and so are time series in neurophysiology (NWB). Replay buffers in the layout of
    Diffusion Policy (HDF5 or Zarr) store the steps of all episodes in arrays ``data/<key>``, and in
    ``meta/episode_ends`` the row after the last step of each. RLDS, as TensorFlow Datasets writes
    it (Open X-Embodiment), has a TFRecord for each, and a ``features.json`` beside the files.

    A sample is a dict by key of tensors [steps, ...]. With `window`, samples have that many steps,
    and "mask", bool [window], is True for steps inside the episode. Whole episodes of a batch are
    padded to the longest, with "mask", bool [batch, steps], and "lengths".

    Args:
        data_path: as in `HDF5Dataset` or `ZarrDataset`; or TFRecord files, such as
            ``"bridge-train*"``.
        keys: paths of arrays in the group (in a replay buffer: in "data"; in RLDS: of features in
            "steps"), or patterns such as ``"obs/*"``. All must have the same number of rows. None:
            all arrays that have an axis.
        groups: pattern of the groups' paths, such as ``"data/demo_*"``; "": each file is an
            episode. None: a replay buffer, if the file has "meta/episode_ends"; else ``"data/*"``,
            if "data" is a group of groups; else the numbered groups of the file; else the file
            itself. Episodes are ordered by file, and within a file by name in natural order: demo_2
            comes before demo_10.
        episodes: names of the episodes to read, or the path of an array of names in each file
            (robomimic: "mask/train"). Episodes of a replay buffer are called "episode_0",
            "episode_1" and so on in each file; an array holds their numbers, or one bool per
            episode. None: all.
        window: number of steps of a sample; or a dict of numbers by key or pattern, for example for
            few frames and many actions, which then start at the same step. None: samples are whole
            episodes.
        stride: number of steps from the start of one window to the start of the next. None: 1.
        pad_before: number of steps by which the first window starts before the episode.
        pad_after: number of steps by which windows may reach past the end of an episode. 0: windows
            stay inside, and an episode that is shorter than the window has none. None: window - 1,
            so that a window starts at each step.
        pad: values of steps outside the episode: "edge": those of the first or last step;
            "constant": zeros.
        static: arrays, single values or attributes of the group without a time axis, which are
            added to all samples of an episode. They are held in memory. In a replay buffer: paths
            of arrays with one value per episode, such as "meta/success". In RLDS: features; of
            those of the steps the first value.
        transform: a callable that is applied to the dict.
        loading_mode: see `LoadingMode`. If windows overlap, "eager" and "cached" cache each step
            once.
        dtype: NumPy or torch dtype that numbers are cast to, also torch.bfloat16; or a dict of
            dtypes by key or pattern. None: unchanged.
        encoding: encoding of strings. None: strings are returned as bytes.
        direct: False: always use h5py or zarr-python.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Raises:
        ConfigError: an argument is invalid.
        DataNotFoundError, AccessError, RemoteError: see `HDF5Dataset`.
        MissingNameError: there are no such groups, an episode lacks a key, or a name in `episodes`
            does not exist.
        FormatError: arrays of an episode differ in length, arrays of a key differ in shape or
            dtype, or the episode ends of a replay buffer are invalid.
        BudgetError: a decoded chunk does not fit the memory budget.
    """

    reads_urls = True
    sample_source: EpisodeSource

    def __init__(
        self,
        data_path: DataPath,
        keys: str | Sequence[str] | None = None,
        *,
        groups: str | None = None,
        episodes: str | Sequence[str] | None = None,
        window: int | Mapping[str, int] | None = None,
        stride: int | None = None,
        pad_before: int = 0,
        pad_after: int | None = None,
        pad: Literal["edge", "constant"] = "edge",
        static: Sequence[str] = (),
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | Mapping[str, DTypeArgument] | None = None,
        encoding: str | None = "utf-8",
        direct: bool = True,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        longest: Any = window
        if isinstance(window, Mapping):
            if not window:
                raise ConfigError("window={} is empty: pass an integer, or steps by key")
            longest = max(check_integer(f"window[{key!r}]", window[key], 1) for key in window)
        windows = _window_options(
            check_integer("window", longest, 1, optional=True),
            check_integer("stride", stride, 1, optional=True),
            check_integer("pad_before", pad_before, 0),
            check_integer("pad_after", pad_after, 0, optional=True),
            pad,
        )
        wanted: Any = episodes
        if episodes is not None and not isinstance(episodes, str):
            wanted = checked_list("episodes", episodes)
        reach, common = RemoteOptions.split(options)
        how = EpisodeOptions(
            groups=groups,
            keys=None if keys is None else checked_list("keys", keys),
            static=checked_list("static", static, 0),
            episodes=wanted,
            windows=window,
        )
        source = open_episodes(data_path, reach, how, windows, direct, _pixels)
        try:
            decoder = EpisodeDecoder(source, longest, dtype, encoding)
            lengths = source.windows.lengths
            if longest is not None and not len(source) and len(lengths):
                raise ConfigError(
                    f"no episode has a window of {longest:,} steps; the longest of "
                    f"{len(lengths):,} has {int(lengths.max()):,}: use a smaller window=, or a "
                    "larger pad_after="
                )
        except BaseException:
            source.close()
            raise
        super().__init__(
            source,
            sample_decoder=decoder,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )
        if longest is None:
            self.collate = EpisodeCollator([key.name for key in source.keys])

    # -- what there is

    @property
    def episode_names(self) -> list[str]:
        """Names of all episodes in order: paths of the groups, or names in replay buffers. Episodes
        of different files may have the same name.
        """
        return [name.decode() for name in self.sample_source.names]

    @property
    def episode_lengths(self) -> IntArray:
        """Number of steps of each episode ([episodes] int64)."""
        return self.sample_source.windows.lengths.copy()

    def episode_numbers(self) -> IntArray:
        """Episode number of each sample ([n] int64). ``split(0.9,
        groups=dataset.episode_numbers())`` keeps episodes whole.
        """
        return self.sample_source.windows.places(self.whole_indices(np.arange(len(self))))[0]

    def lengths(self) -> IntArray | None:
        """Number of steps of each sample ([n] int64). None for windows, which have equal
        lengths.
        """
        windows = self.sample_source.windows
        if windows.options.window is not None:
            return None
        return windows.lengths[self.whole_indices(np.arange(len(self)))]

    def make_value_source(self) -> ValueSource:
        """The source of the windows. If they overlap, "eager" and "cached" cache each step once."""
        source = self.sample_source
        options = source.windows.options
        overlaps = options.window is not None and options.stride < options.window
        is_held = self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED)
        if (
            not (overlaps and is_held and len(source))
            or self._held_of is not None
            or "decode" in self._overridden
            or isinstance(self._cache_size, int)
        ):
            return super().make_value_source()
        bands = source.bands()
        load = partial(_load_bands, source, bands)
        held = self.hold(Records(source), len(bands), load, source.steps_nbytes)
        return HeldSteps(held, source, bands)

    def held_nbytes(self) -> int | None:
        if "decode" in self._overridden:
            return None
        per_sample = self._decoder.sample_nbytes()
        if per_sample is None:
            return self.sample_source.held_nbytes
        return per_sample * len(self.sample_source)


class HeldSteps(ValueSource):
    """Cuts windows out of cached bands of steps; see `EpisodeSource.bands`.

    Args:
        parent: caches the bands by number, over the records of the windows.
        source: the source of the windows.
        bands: the bands of its episodes.
    """

    def __init__(self, parent: Held, source: EpisodeSource, bands: Windows) -> None:
        super().__init__(parent)
        self._held = parent
        self._source = source
        self._bands = bands

    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        reader = access.reader
        read = partial(self._read, reader.counts)
        records = reader.records(list(indices), read)
        values = [
            reader.decoded(index, record, access.decoder)
            for index, record in zip(indices, records, strict=True)
        ]
        return used(values, use, access)

    def _read(self, counts: Counter[str], indices: Sequence[int]) -> list[Any]:
        """Windows. Bands that are missing are read, and offered to the store."""
        wanted = np.asarray(indices, np.int64)
        needed = self._source.bands_of(wanted, self._bands)
        numbers = sorted(set[int]().union(*needed))
        held = dict(zip(numbers, self._held.get(numbers), strict=True))
        missing = [number for number, band in held.items() if band is MISSING]
        if missing:
            bands = self._source.read_bands(missing, self._bands)
            self._held.admit(missing, bands)
            held |= zip(missing, bands, strict=True)
        hits = sum(set(missing).isdisjoint(some) for some in needed)
        counts["cache_hits"] += hits
        counts["cache_misses"] += len(needed) - hits
        return self._source.cut(wanted, self._bands, held)


def _load_bands(source: EpisodeSource, bands: Windows, numbers: Sequence[int]) -> list[Any]:
    """The bands of these numbers, or a SampleError each, which their windows raise when read."""
    try:
        return source.read_bands(numbers, bands)
    except (HeadraceError, OSError, ValueError) as error:
        if len(numbers) == 1:
            return [SampleError(str(error))]
    return [band for number in numbers for band in _load_bands(source, bands, [number])]


def _pixels(data: bytes, channels: int, dtype: np.dtype[Any]) -> AnyArray:
    """An encoded image as [H, W, C]: uint8 colours or grey; or integers as they are stored."""
    if dtype == np.uint8:
        return decode_image(data, "L" if channels == 1 else "RGB")
    return decode_mask(data)[..., None]


def _window_options(
    window: int | None, stride: int | None, before: int, after: int | None, pad: str
) -> WindowOptions:
    """Checks the options. Without `after`, windows start up to the last step."""
    check_choice("pad", pad, ("edge", "constant"))
    given = {"stride": stride, "pad_before": before, "pad_after": after}
    if window is None:
        for name, value in given.items():
            if value:
                raise ConfigError(f"{name}={value!r} is for windows: pass window= too")
        return WindowOptions(pad=pad)
    for name in ("pad_before", "pad_after"):
        if not (given[name] or 0) < window:
            raise ConfigError(
                f"{name}={given[name]} must be at least 0, and less than window={window}: a window "
                "has at least one step"
            )
    return WindowOptions(window, stride or 1, before, window - 1 if after is None else after, pad)
