"""Datasets over a source, in one of four loading modes. A `Decoder` defines the samples."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import os
import time
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsIndex, overload

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headrace.arguments import check_integer, checks_keywords, described
from headrace.core.ahead import WINDOW, Ahead
from headrace.core.decoder import Decoder, chained, overriding
from headrace.core.held import ALONE, BlockMemory, Held, Load, Sharing, cached, eager
from headrace.core.options import (
    JointTransform,
    LoadingMode,
    ModeName,
    Transform,
    as_targets,
    blank,
    check_call,
    check_common,
    classes_of,
    describe_call,
    describe_data,
    describe_held,
    joined_class,
    passed_arguments,
)
from headrace.core.reader import OnError, SampleReader, WorkerThreads
from headrace.core.values import Access, Coming, Decoded, Records, ValueSource, read_many
from headrace.core.views import (
    TargetSequence,
    chosen_indices,
    fingerprint_of_view,
    targets_of_view,
    warn_if_random,
)
from headrace.display import Lines
from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import (
    ConfigError,
    EmptyBatchError,
    FormatError,
    MissingNameError,
    SampleError,
    warn,
)
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.source import Description, Source
from headrace.io.paths import cache_folder, listed_names
from headrace.memory.anonymous import SHARED_FROM, SharedArray, SharedInt, is_spawning
from headrace.memory.budget import MemoryBudget
from headrace.order import EpochOrder, RankBatches, World, detect_world
from headrace.order.epoch import DEFAULT_TURNS, Shuffle
from headrace.order.lanes import lanes_for
from headrace.order.ranks import BatchRequest, check_shared_once, current_request
from headrace.order.seeding import (
    SampleSeeder,
    preserved_rng,
    rng_states,
    warn_off_main_thread,
)
from headrace.order.world import local_ranks

STEPS = ("decode", "value_spec", "split_target", "to_input", "make_sample")
"""The steps from a record to a sample that a subclass may override; a `Decoder` has the
same.
"""
STREAM_GROUP = 64  # samples that a streaming dataset reads together under a plain DataLoader
Key = tuple[int, int, int, int]
"""The key of a sample's random numbers: seed, epoch, index in the whole dataset, and how often the
order drew it before.
"""
_OF_GENERATORS = ("_seeder", "_seeded", "_is_untried", "_has_warned")
LEFT_BEHIND = ("_travelling", *_OF_GENERATORS)
"""Attributes that are not pickled: a copy of the dataset has copies of the generators."""
_WITHOUT_GENERATORS = ("sample_source", "sample_reader", "budget", "block_memory")


class _Constructed(ABCMeta):
    """Completes a dataset after its constructor, and those of its subclasses."""

    if not TYPE_CHECKING:  # type checkers should see the constructors

        @property
        def __signature__(cls) -> inspect.Signature:
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                arguments = passed_arguments(cls, args, kwargs)
            except TypeError:
                check_call(cls, kwargs)
                arguments = {}  # the call below raises a TypeError that names the class
            dataset: Any = super().__call__(*args, **kwargs)
            if "block_memory" not in vars(dataset):
                raise ConfigError(
                    f"{cls.__name__}.__init__ does not call super().__init__(...), which opens "
                    "the data: call it (that of BaseDataset takes a Source), or subclass "
                    "torch.utils.data.Dataset"
                )
            if isinstance(dataset.data_path, FileSet):
                dataset.data_path = dataset.data_path.given
            dataset._arguments = arguments
            dataset._settle()
            return dataset


class BaseDataset(Dataset[Any], metaclass=_Constructed):
    """A map-style dataset over a `Source`, in one of four loading modes. In mode "streaming" it is
    an `IterableDataset`.

    To support a new format, subclass it, pass a source to `super().__init__`, and override
    `decode`; or pass a `Decoder`. A subclass may also override the other steps:
    `split_target`, `to_input` and `make_sample`.

    Args:
        source: the source of the records.
        sample_decoder: defines what a sample is. None: records are samples.
        targets: a sequence of one target per sample. None: samples have no targets.
        transform: a callable that is applied to the input, or a list of callables that are applied
            one after the other.
        target_transform: a callable that is applied to the target.
        transforms: a callable that takes input and target and returns both, or a list of such
            callables. Not allowed together with `transform` or `target_transform`.
        loading_mode: a `LoadingMode` or its name.
        cache_size: limit for mode "cached": a number of samples (int) or bytes ("2GB"). None:
            limited by the memory budget only.
        max_memory_usage: memory budget, as a fraction of the memory that is free at first use, or
            bytes ("500MB").
        cache_policy: "keep", "lru" or "auto". "keep" admits samples until the cache is full and
            never evicts. "lru" evicts the least recently used samples. "auto" is "lru" under a
            loader that draws samples repeatedly (`weights` or `balanced` with replacement), else
            "keep".
        hold: what modes "eager" and "cached" cache: "decoded" samples or "encoded" records. None:
            chosen by the dataset.
        shared: which processes share what "eager" and "cached" cache. "rank": all workers of a
            process. "machine": all ranks of this user on this machine, through a file in
            `cache_dir`.
        cache_dir: folder for files that later runs reuse; it is created, with its parents. None:
            headrace's folder in the user's cache folder.
        on_error: what to do with a sample that can't be read. "raise": raise a `SampleError`.
            "skip": leave it out of its batch, and count and list it. A callable ``(index, path,
            error) -> sample``: use its result instead.
        seed: seed of the order and of random transforms. Under a `Loader`, the loader's seed counts
            instead.
        return_index: append the index to each sample; to a dict as the field ``"index"``.
        progress: show progress bars. None: only on a terminal.

    Raises:
        ConfigError: an argument is invalid; the message names it.
        BudgetError: the samples don't fit the memory budget in mode "eager".

    Several processes may read at the same time, each with its own copy of the dataset. Several
    threads must not share one copy, since transforms that use global random generators can't run at
    the same time.
    """

    fork_safe = True
    """True if a process that has read from the dataset may fork. If False, `Loader` starts
    workers by forkserver.
    """
    reads_urls = False
    """True if the dataset takes paths, and so the options of `RemoteOptions` too."""
    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    transforms: Callable[[Any, Any], tuple[Any, Any]] | None
    loading_mode: LoadingMode
    seed: int
    return_index: bool
    sample_reader: SampleReader
    """Reads and decodes the samples."""
    budget: MemoryBudget
    """The memory budget of this process under `max_memory_usage`."""
    collate: Callable[[list[Any]], Any] | str | None = None
    """The collate function for these samples, or the name of a registered one. None: the default
    one.
    """
    targets: Any
    """One target per sample, or None."""
    label_columns: Mapping[str, Any] = MappingProxyType({})
    """The columns of the table of labels, for all samples of the whole dataset. Empty if the
    labels are not a table.
    """
    data_path: Any = None
    """The path or paths, as passed. None for a dataset that was made from a `Source`."""
    _owns_source = True
    """True if `close` closes the source."""
    _seeder: SampleSeeder | None = None
    _seeded: tuple[Any, ...] = ()
    """The transforms that the seeder knows."""
    _is_untried = True
    """True if the transforms have not been called since the seeder looked for generators."""
    _has_warned = False
    _overridden: ClassVar[frozenset[str]] = frozenset()
    """The steps of `STEPS` that the class overrides."""
    _parts: ClassVar[tuple[type, ...]] = ()
    """For a class that headrace created: the classes that it combines."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._overridden = frozenset(
            step for step in STEPS if getattr(cls, step) is not getattr(BaseDataset, step)
        )

    def __init__(
        self,
        source: Source,
        *,
        sample_decoder: Decoder | None = None,
        targets: Sequence[Any] | AnyArray | None = None,
        transform: Transform = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: JointTransform = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        cache_size: int | str | None = None,
        max_memory_usage: float | int | str = 0.8,
        cache_policy: Literal["auto", "keep", "lru"] = "auto",
        hold: Literal["decoded", "encoded"] | None = None,
        shared: Literal["rank", "machine"] = "rank",
        cache_dir: str | os.PathLike[str] | None = None,
        on_error: OnError = "raise",
        seed: int = 42,
        return_index: bool = False,
        progress: bool | None = None,
    ) -> None:
        if not isinstance(source, Source):
            raise ConfigError(
                f"BaseDataset reads a Source, not {described(source)}: open a path with "
                "open_dataset(path); pass a torch dataset to create_dataloader as it is; for a "
                "format of your own, subclass BaseDataset and Source (__len__, read, fingerprint)"
            )
        check_common(locals())
        self.transform = chained(transform)
        self.target_transform = target_transform
        self.transforms = chained(transforms, "transforms")
        self.loading_mode = LoadingMode(loading_mode)
        if self.loading_mode is not LoadingMode.CACHED and cache_size is not None:
            warn(
                f"cache_size={cache_size!r} limits what loading_mode='cached' holds, and has no "
                "effect "
                f"in {self.loading_mode.value!r}: leave it out, or pass loading_mode='cached'"
            )
        self.seed = int(seed)
        self.return_index = return_index
        self._length = len(source)
        self.targets = as_targets(targets, self._length)
        self.sample_source: Source = source
        self._decoder = sample_decoder or Decoder()
        self._cache_size = cache_size
        self._cache_policy = cache_policy
        self._hold = hold
        self._shared = shared
        self._cache_dir = cache_dir
        self._progress = progress
        # numbers of the records that are samples here, and of those that the mode may cache (a
        # superset); None: all
        self._chosen: IntArray | None = None
        self._held_of: IntArray | None = None
        self._is_view = False
        # for a view: the dataset whose overridden `split_target` is called
        self._whole: BaseDataset | None = None
        self._fingerprint: str | None = None
        self._epoch = SharedInt(-1)  # nobody has named one yet
        self._served = SharedInt(0)  # samples under a plain DataLoader
        self._value_source: ValueSource | None = None
        self._world: World | None = None
        self._arguments: dict[str, Any] = {}
        # the class and arguments that decide what is cached, if they are not its own
        self._held_as: tuple[type, dict[str, Any]] | None = None
        self.budget = MemoryBudget(max_memory_usage, local_world_size=local_ranks)
        streams = self.loading_mode is LoadingMode.STREAMING
        self.block_memory: BlockMemory = BlockMemory(source, streams, self.budget)
        self.sample_reader = SampleReader(source, on_error, WorkerThreads())
        source.use_threads(self.sample_reader.threads.map)

    def _become(self, inner: BaseDataset, **options: Any) -> None:
        """Becomes a copy of another dataset, and of its class, with its own options.

        Args:
            inner: a dataset in mode "lazy", or a view of one.
            **options: options of `BaseDataset`, including transforms.
        """
        state = {name: value for name, value in vars(inner).items() if name not in LEFT_BEHIND}
        vars(self).update(state)
        source = inner.sample_source
        BaseDataset.__init__(self, source, sample_decoder=inner._decoder, **options)
        self.targets = inner.targets
        self._whole = inner._whole
        self._chosen = inner._chosen
        self._held_of = inner._chosen
        self._length = inner._length
        self.sample_reader = self.sample_reader.another(is_view=inner._chosen is not None)
        parts = classes_of(type(inner))
        self._held_as = inner._held_as or (parts[-1], inner._arguments)
        self.__class__ = joined_class(type(self), *parts)

    # -- the steps from a record to a sample, which a subclass may override; default: the decoder's

    def decode(self, record: Any) -> Any:
        """Decodes a record. The result must be deterministic and have its final size. Loading
        modes cache it.
        """
        return self._decoder.decode(record)

    def value_spec(self) -> ArraySpec | tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of what `decode` returns. None: they differ between samples, or are
        not known without reading.
        """
        return self._decoder.value_spec()

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        """Splits a decoded value into input value and target. Default: the value, and a copy of its
        entry in `targets`.

        An override is called on the whole dataset, with the index there, also for the samples of a
        view, so it may look up anything by index.
        """
        return self._decoder.split_target(value, index, self)

    def split_value(self, index: int, value: Any) -> tuple[Any, Any]:
        """Input value and target of a decoded value, of this dataset or view."""
        if self._whole is None:
            return self.split_target(index, value)
        return self._whole.split_target(int(self.whole_indices(index)), value)

    def to_input(self, value: Any) -> Any:
        """Converts an input value to what the transform receives. Without a transform this is the
        sample's input. Default: the value itself, writable.
        """
        return self._decoder.to_input(value)

    def make_sample(self, value: Any, target: Any) -> Any:
        """Makes a sample of input and target. Default: a tuple of both, or the input alone if
        the dataset has no targets.
        """
        return self._decoder.make_sample(
            value, target, self.targets is not None or self._decoder.always_pairs
        )

    def held_nbytes(self) -> int | None:
        """Bytes of all samples of the whole dataset when cached in memory. None: not known
        without reading them.
        """
        return None

    def sample_nbytes(self) -> int | None:
        """Bytes of one finished sample, which a loader plans its buffers by. None: they are not
        known, or differ between samples.
        """
        if self.is_transformed or not len(self.sample_source):
            return None
        return self._decoder.sample_nbytes()

    def lengths(self) -> IntArray | None:
        """Length of each sample ([n] int64), in tokens or a similar measure. None: not known
        without reading them.
        """
        return None

    def held_as(self) -> str:
        """A string that identifies how records become cached values.

        Ranks with equal strings share the cache under ``shared="machine"``. Default: the class, and
        its arguments except transforms and loading options.

        Raises:
            ConfigError: an argument can't be compared with that of another process. Override this
                method then.
        """
        return describe_held(*(self._held_as or (type(self), self._arguments)))

    @property
    def holds_encoded(self) -> bool:
        """True if modes "eager" and "cached" cache encoded records, which are decoded at each
        access.
        """
        return self._hold == "encoded"

    @property
    def sample_decoder(self) -> Decoder:
        """The decoder of the samples, with the steps that the class overrides."""
        if not self._overridden:
            return self._decoder
        return overriding(self, self._decoder, self._overridden)

    @property
    def on_error(self) -> OnError:
        """What to do with a sample that can't be read: "raise", "skip" or a callable."""
        return self.sample_reader.on_error

    @on_error.setter
    def on_error(self, value: OnError) -> None:
        self.sample_reader.on_error = value

    # -- what users see

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: slice) -> Self: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns one sample, or, for a slice, a view of the dataset.

        Raises:
            IndexError: the index is out of range.
            SampleError: the sample can't be read.
            TypeError: the mode is "streaming", which has no random access.
        """
        if isinstance(index, slice):
            return self.subset(np.arange(len(self))[index])
        if isinstance(self, IterableDataset):
            raise TypeError(
                "loading_mode='streaming' has no random access: iterate, or use 'lazy', 'eager' "
                "or 'cached'"
            )
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch, with ``on_error="skip"`` possibly fewer. torch's fetcher
        calls this once per batch.

        Raises:
            IndexError: an index is out of range; negative indices count from the end.
            SampleError: a sample can't be read; with ``on_error="skip"``: no sample of the batch
                can be read.
        """
        if isinstance(indices, BatchRequest):
            return self.make_samples(indices)[0]
        length = len(self)
        indices = [index + length if -length <= index < 0 else index for index in indices]
        return self.make_samples(BatchRequest(indices, *self._random_key()))[0]

    def _random_key(self) -> tuple[int, int]:
        """The current seed and epoch: those of a dataset around this one, if there is one."""
        around = current_request()
        if around is None:
            return self.seed, self.epoch
        return around.seed, around.epoch

    def make_samples(
        self, request: BatchRequest, decoder: Decoder | None = None
    ) -> tuple[list[Any], list[int]]:
        """Returns the samples of a batch, as `__getitems__` does, and the index of each.

        Args:
            request: the indices, and the epoch that they belong to.
            decoder: a variant of the dataset's `sample_decoder`, with the same values.
        """
        indices = self.whole_indices(request).tolist()
        return self.finish(request, self.value_source.read(indices, self.access()), decoder)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over all samples in order; in mode "streaming" over this rank's and worker's
        part of an epoch, block-shuffled and prefetched.
        """
        if not isinstance(self, IterableDataset):
            for index in range(len(self)):
                with contextlib.suppress(EmptyBatchError):
                    yield from self.__getitems__([index])
            return
        world = self._world or detect_world()
        check_shared_once(self, world.world_size)
        info = get_worker_info()
        worker = 0 if info is None else info.id
        workers = 1 if info is None else info.num_workers
        seed, epoch = self._random_key()
        order = self.epoch_order("block", seed, epoch, STREAM_GROUP * world.world_size)
        batches = RankBatches(order, world.rank, world.world_size, STREAM_GROUP)
        for step in range(worker, len(batches), workers):
            self.prefetch((seed, epoch, worker), range(step, len(batches), workers), batches)
            request = BatchRequest(batches.batch(step).tolist(), seed, epoch, step)
            with contextlib.suppress(EmptyBatchError):
                yield from self.make_samples(request)[0]

    @property
    def epoch(self) -> int:
        """The epoch of random transforms, and of the streaming order under a plain DataLoader."""
        return max(0, self._epoch.value)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, also for running workers. Under a `Loader`, the loader's own `set_epoch`
        counts instead.
        """
        self._epoch.value = check_integer("epoch", epoch)

    def subset(self, indices: Sequence[int] | AnyArray) -> Self:
        """Returns a view of some samples. It shares cached samples with this dataset.

        Args:
            indices: indices of the samples, or a boolean mask with one entry per sample.

        Raises:
            IndexError: an index is out of range or not an integer, or the mask has another length.
        """
        chosen = chosen_indices(indices, len(self))
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._value_source = self.value_source
        view._is_view = True
        view._chosen = self.whole_indices(chosen)
        view._length = len(chosen)
        if "split_target" in self._overridden and self._whole is None:
            view._whole = self
        view._fingerprint = None
        view.targets = targets_of_view(self.targets, chosen)
        view.sample_reader = self.sample_reader.another(is_view=True)
        for name in _OF_GENERATORS:  # they are looked for again
            vars(view).pop(name, None)
        return view

    def with_transform(self, transform: Transform) -> Self:
        """Returns a view of all samples with another transform. It shares cached samples with this
        dataset.

        Args:
            transform: replaces `transform`; replaces `transforms` if the dataset was given these.
                None or []: no transform.

        Raises:
            ConfigError: it is neither a callable nor a list of callables.
        """
        view = self.subset(np.arange(len(self)))
        view._decoder, rest = self._with_transform(transform)
        name = "transform"
        if self.transforms is not None or self._arguments.get("transforms") is not None:
            name = "transforms"
        setattr(view, name, rest)
        view._arguments = {**self._arguments, name: [] if transform is None else transform}
        return view

    @checks_keywords
    def split(
        self,
        fraction: float | Sequence[float],
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> tuple[Self, ...]:
        """Splits the dataset into disjoint views that together contain all samples. Each view is in
        index order.

        Args:
            fraction: fraction of the samples in the first of two views (rounded), or a list with
                the fraction of each view (``[.7, .15, .15]``).
            seed: any integer.
            stratify: one label per sample, the name of a column of the table of labels, or True for
                `targets`. Each view gets its fraction of the samples of each label.
            groups: one group per sample, such as a patient, or the name of a column of these.
                Samples of a group stay together, so fractions are approximate.
            val_transform: transform of all views but the first; [] for none. None: the views keep
                the dataset's transform, with a warning if it is random.

        Raises:
            ConfigError: an argument is invalid, or a view would have no samples.
        """
        from headrace.order.splits import split_parts  # later: few programs split

        if val_transform is None:
            warn_if_random(self, "split: all views")
        labels = {
            "stratify": self._labels("stratify", stratify),
            "groups": self._labels("groups", groups),
        }
        if not isinstance(fraction, (Sequence, np.ndarray)):
            fraction = [fraction, 1 - fraction]
        first, *others = map(self.subset, split_parts(len(self), list(fraction), seed, **labels))
        if val_transform is not None:
            others = [view.with_transform(val_transform) for view in others]
        return first, *others

    @checks_keywords
    def folds(
        self,
        k: int,
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> list[tuple[Self, Self]]:
        """Returns pairs of training and validation views for k-fold cross-validation.

        Each sample is in exactly one validation view. The other arguments are those of `split`.
        """
        from headrace.order.splits import fold_parts

        if val_transform is None:
            warn_if_random(self, "folds: the validation views too")
        stratify = self._labels("stratify", stratify)
        groups = self._labels("groups", groups)
        pairs = []
        for part in fold_parts(len(self), k, seed, stratify=stratify, groups=groups):
            rest = np.delete(np.arange(len(self)), part)
            validation = self.subset(part)
            if val_transform is not None:
                validation = validation.with_transform(val_transform)
            pairs.append((self.subset(rest), validation))
        return pairs

    def _labels(self, name: str, given: Any) -> Any:
        """Resolves an argument of `split` to one value per sample: as given, from a named column,
        or, for True, the targets.
        """
        columns = self.label_columns
        about = f"{name}={given!r}: this {type(self).__name__}"
        if name == "stratify" and given is True:
            if self.targets is not None and not isinstance(self.targets, TargetSequence):
                return self.targets
            named = f", or the name of one of its columns ({', '.join(columns)})" if columns else ""
            raise ConfigError(
                f"{about} has no targets that are single labels: pass a label for each "
                f"sample{named}"
            )
        if not isinstance(given, str):
            return given
        if not columns:
            raise ConfigError(f"{about} has no table of labels: pass a label for each sample")
        if given not in columns:
            raise MissingNameError(
                f"{name}: the table of labels has no column {given!r}; it has "
                f"{listed_names(columns, given, repr)}"
            )
        return targets_of_view(columns[given], self.whole_indices(np.arange(len(self))))

    def source_of(self, index: int) -> str:
        """The location of a sample: its path, or file and row."""
        return self.sample_source.location(int(self.whole_indices(range(len(self))[index])))

    @property
    def fingerprint(self) -> str:
        """A short hash of the sample data. It is the same on every machine and in every mode."""
        if self._fingerprint is None:
            self._fingerprint = self.sample_source.fingerprint()
            if self._chosen is not None:
                self._fingerprint = fingerprint_of_view(self._fingerprint, self._chosen)
        return self._fingerprint

    def describe(self) -> Description:
        """Describes the data, how they are read, and the cost of a random sample, for
        `headrace info`.
        """
        found = self.sample_source.describe()
        found.samples = len(self)
        found.fingerprint = self.fingerprint
        found.opens_as = repr(self).partition("  # ")[0]
        found.held = self.held_nbytes()
        if getattr(self.targets, "ndim", 0) == 1 and self.targets.dtype.kind in "iu":
            names = dict(enumerate(getattr(self, "classes", None) or ()))
            counts = Counter(self.targets.tolist())
            found.classes = {
                str(names.get(number, number)): counts[number]
                for number in dict.fromkeys([*names, *sorted(counts)])
            }
        return found

    def explain(self) -> str:
        """Describes how samples are read, what is cached, and the state of the memory budget."""
        held = "decoded samples"
        if self.holds_encoded:
            held = "records as stored"
        held = {
            LoadingMode.LAZY: "nothing is held",
            LoadingMode.STREAMING: "only the read-ahead window is held",
        }.get(self.loading_mode, f"{held} are held, shared by all workers")
        if self._value_source is not None:
            held = self._value_source.holds or held
        lines = [
            f"{type(self).__name__}: {len(self):,} samples from "
            f"{type(self.sample_source).__name__}",
            f"loading_mode {self.loading_mode}: {held}",
            *(f"{name}: {way}" for name, way in self.sample_source.describe().ways.items()),
        ]
        if self.held is not None:
            counts = [f"{name} {count:,}" for name, count in self.held.stats().items()]
            lines.append(f"now: {', '.join(counts)}")
        return Lines("\n".join([*lines, self.budget.explain()]))

    def close(self) -> None:
        """Frees the cache, and closes the files that are open in this process. The dataset can be
        used again afterwards.
        """
        if self._is_view:
            return
        if self._value_source is not None:
            self._value_source.close()
            self._value_source = None
        if self._owns_source:
            self.sample_source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        view = f".subset(<{len(self):,} indices>)" if self._is_view else ""
        return (
            f"{describe_call(type(self).__name__, self._arguments)}{view}  # {len(self):,} samples"
        )

    # -- what loaders use

    def blocks(self) -> IntArray | None:
        """Number of consecutive samples in each storage block ([blocks] int64). None: each sample
        is stored by itself.
        """
        sizes = self.sample_source.blocks()
        if sizes is None or self._chosen is None:
            return sizes
        block_of = np.repeat(np.arange(len(sizes)), sizes)[self._chosen]
        starts = np.flatnonzero(np.diff(block_of, prepend=-1))
        return np.diff(starts, append=len(block_of)).astype(np.int64)

    def lanes(self, blocks: int) -> tuple[int, int]:
        """The default (interleave, turns) of an order over `blocks` blocks, which depends on the
        layout alone.
        """
        return lanes_for(blocks, self.sample_source.layout_nbytes)

    def epoch_order(
        self,
        shuffle: Shuffle,
        seed: int,
        epoch: int,
        global_batch: int,
        interleave: int | None = None,
        turns: int | None = None,
    ) -> EpochOrder:
        """The order of one epoch of this dataset."""
        sizes = self.blocks() if shuffle == "block" else None
        if sizes is not None:
            of_layout = self.lanes(len(sizes))
            interleave = interleave or of_layout[0]
            turns = turns or of_layout[1]
        return EpochOrder(
            len(self),
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            blocks=sizes,
            global_batch=global_batch,
            interleave=interleave,
            turns=turns or DEFAULT_TURNS,
            aligned=self.sample_source.layout_nbytes > 0,
        )

    def prefetch(self, key: Any, steps: range, batches: RankBatches) -> None:
        """Prefetches batches of an epoch in mode "streaming".

        Args:
            key: identifies the epoch; equal keys mean the same epoch.
            steps: steps of the batches, the next one first.
            batches: the rank's batches of the epoch.
        """
        segments = batches.order.segments if self.block_memory.prefetches_whole else None
        coming = Coming(key, steps, batches.some, segments, self.whole_indices)
        self.value_source.announce(coming)

    def access(self) -> Access:
        """The reader and decoder with which this dataset or view reads its `value_source`."""
        return Access(self.sample_reader, self.sample_decoder)

    def whole_indices(self, indices: Any) -> IntArray:
        """Converts indices of this dataset or view to record numbers of the source. Negative
        indices count from the end.

        Raises:
            IndexError: an index is out of range.
        """
        array = np.asarray(indices, np.int64)
        length = len(self)
        # as unsigned numbers, negative ones are the largest
        if array.size and np.maximum.reduce(array.view(np.uint64), axis=None) >= length:
            outside = array[(array < -length) | (array >= length)]
            if outside.size:
                raise IndexError(
                    f"index {outside[0]} is outside of a dataset of {length:,} samples"
                )
            array = array % length
        return array if self._chosen is None else self._chosen[array]

    @property
    def value_source(self) -> ValueSource:
        """The source of decoded values. It is created at first use if it was not pickled with the
        dataset; "eager" then reads its samples.
        """
        if self._value_source is None:
            self._value_source = self.make_value_source()
        return self._value_source

    def make_value_source(self) -> ValueSource:
        """The source of the decoded values of the whole dataset, in its loading mode."""
        source = self.sample_source
        if self.loading_mode is LoadingMode.STREAMING:
            window = min(WINDOW, self.budget.available // 32)  # of each worker
            return Decoded(Ahead(source, window))
        values: ValueSource = Records(source)
        if self.loading_mode is LoadingMode.LAZY:
            return Decoded(values)
        access = Access(self.sample_reader.another(), self.sample_decoder)
        nbytes = self.held_nbytes() if self._held_of is None else None
        spec = None
        if not self.holds_encoded:
            values = Decoded(values)
            spec = access.decoder.value_spec()
        load = functools.partial(read_many, values, access=access)
        held = self.hold(values, len(source), load, nbytes, spec)
        return Decoded(held) if self.holds_encoded else held

    def hold(
        self,
        values: ValueSource,
        length: int,
        load: Load,
        nbytes: int | None,
        spec: ArraySpec | None = None,
    ) -> Held:
        """Caches values in mode "eager" or "cached".

        Args:
            values: the source of the values.
            length: number of values.
            load: reads values by index; "eager" reads all of them now.
            nbytes: bytes of all values. None: not known.
            spec: shape and dtype of all values, if they are arrays of one spec.
        """
        sharing = self.sharing()
        if self.loading_mode is LoadingMode.CACHED:
            size, policy = self._cache_size, self._cache_policy
            return cached(values, length, self.budget, size, policy, nbytes, sharing)
        return eager(
            values,
            length,
            load,
            self.budget,
            nbytes,
            self._progress,
            chosen=self._held_of,
            threads=None if self.sample_source.thread_safe else 1,
            sharing=sharing,
            spec=spec,
        )

    @property
    def held(self) -> Held | None:
        """The cache of samples. None: there is none now."""
        return None if self._value_source is None else self._value_source.find(Held)

    def sharing(self) -> Sharing:
        """The ranks that share what is held here."""
        if self._shared == "rank":
            return ALONE
        if not self._arguments:  # which are known when the constructor is through
            raise ConfigError(
                "shared='machine': samples are read before the constructor has finished: read them "
                "later"
            )
        world = detect_world()
        held = "encoded" if self.holds_encoded else "decoded"
        fingerprint = self.sample_source.fingerprint()
        if self._held_of is not None:
            fingerprint = fingerprint_of_view(fingerprint, self._held_of)
        _, arguments = self._held_as or (type(self), self._arguments)
        paths = describe_data(arguments.get("data_path"))  # files of one layout: one fingerprint
        key = [self.loading_mode.value, fingerprint, held, self.held_as(), paths]
        folder = cache_folder(self._cache_dir)
        return Sharing(world.local_rank, world.local_world_size, folder, "\0".join(key))

    def _with_transform(self, transform: Any) -> tuple[Decoder, Callable[[Any], Any] | None]:
        """The decoder of a view with that transform, and the part that the view must call."""
        return self._decoder.with_transform(transform)

    # -- finishing samples

    @property
    def is_transformed(self) -> bool:
        """True if the user gave a transform."""
        return (
            self.transform is not None
            or self.target_transform is not None
            or self.transforms is not None
        )

    @property
    def is_random(self) -> bool:
        """True if finishing a sample may draw random numbers."""
        return self.sample_decoder.draws or self.is_transformed

    def seeded_objects(self) -> Iterator[Any]:
        """Yields the objects that may hold random generators which transforms draw from."""
        for name, value in list(vars(self).items()):
            if not (name.startswith("_") or name in _WITHOUT_GENERATORS):
                yield value
        yield self.on_error

    def finish(
        self, request: BatchRequest, values: list[Any], decoder: Decoder | None = None
    ) -> tuple[list[Any], list[int]]:
        """The samples of a batch without skipped ones, and the index of each.

        Args:
            request: the indices of the samples.
            values: the decoded value of each sample, or a SampleError. The list is emptied, so that
                values and samples of a whole batch are not in memory at once.
            decoder: a variant of the dataset's `sample_decoder`, with the same values.

        Raises:
            SampleError: none of the samples can be read.
        """
        is_random = self.is_random
        decoder = decoder or self.sample_decoder
        reader = self.sample_reader
        failure: SampleError | None = None
        last: Key | None = None
        samples: list[Any] = []
        indices: list[int] = []
        start = time.perf_counter()
        with self.restoring(is_random):
            for number, (index, value) in enumerate(zip(request, values, strict=True)):
                values[number] = None
                if not isinstance(value, SampleError):
                    last = self.key_of(request, number)
                    value = self._finish(decoder, index, value, last if is_random else None)
                made = [value]
                if isinstance(value, SampleError):
                    failure = failure or value
                    made = reader.replacement(index, self.source_of(index), value)
                samples += made
                indices += [index] * len(made)
            reader.count_seconds("transform_seconds", start)
            if is_random and last is not None and current_request() is None:
                self._warn_of_repeats(len(request), last)
        if failure is not None and not samples:
            raise EmptyBatchError(
                f"none of the {len(request)} samples of a batch can be read; the first: {failure}; "
                "use a larger batch_size, or an on_error=callable that returns a stand-in"
            )
        return samples, indices

    @contextlib.contextmanager
    def restoring(self, is_random: bool) -> Iterator[None]:
        """Context that restores the random generators of the main process."""
        if not is_random or get_worker_info() is not None:
            yield
            return
        warn_off_main_thread()
        with preserved_rng(self.seeder()):
            yield

    def key_of(self, request: BatchRequest, number: int) -> Key:
        """The key of a sample's random numbers, by its position in a batch."""
        k = request.draws[number] if request.draws else 0
        index = request[number]
        if self._chosen is not None:  # in the whole dataset
            index = int(self._chosen[index])
        return request.seed, request.epoch, index, k

    def _finish(self, decoder: Decoder, index: int, value: Any, key: Key | None) -> Any:
        """The finished sample, or a SampleError if it can't be decoded. (`key`: the key of its
        random numbers.)
        """
        try:
            value, target = self.split_value(index, value)
            if key is None:
                value, target = self._transformed(decoder, value, target)
            else:
                value, target = self._call_seeded(decoder, value, target, key)
            sample = self.make_sample(value, target)
        except FormatError as error:
            return self.undecodable(index, error)
        except Exception as error:
            error.add_note(f"headrace: while transforming sample {index} ({self.source_of(index)})")
            raise
        if not self.return_index:
            return sample
        if not isinstance(sample, dict):
            return (*sample, index) if type(sample) is tuple else (sample, index)
        if "index" in sample:
            raise ConfigError(
                "samples have a field 'index' of their own, which return_index=True would "
                "replace: rename or omit it"
            )
        return {**sample, "index": index}

    def undecodable(self, index: int, error: FormatError) -> SampleError:
        """Raises the error of a sample that can't be decoded, or returns it if samples may be
        skipped.
        """
        whole = int(self.whole_indices(index))
        return self.sample_reader.failed(whole, "can't be decoded", error)

    def _call_seeded(self, decoder: Decoder, value: Any, target: Any, key: Key) -> tuple[Any, Any]:
        seeder = self.seeder()
        untouched = copy.deepcopy((value, target)) if self._is_untried else None
        seeder(*key)
        made = self._transformed(decoder, value, target)
        if untouched is not None:
            self._is_untried = False
            now = SampleSeeder(*self.seeded_objects())
            # some transforms create generators at the first call: draw again
            if len(now.generators) != len(seeder.generators):
                self._seeder = now
                now(*key)
                made = self._transformed(decoder, *untouched)
        return made

    def _transformed(self, decoder: Decoder, value: Any, target: Any) -> tuple[Any, Any]:
        value, target = decoder.to_pair(value, target)
        if self.transforms is not None:
            value, target = self.transforms(value, target)
        if self.transform is not None:
            value = self.transform(value)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return value, target

    def seeder(self) -> SampleSeeder:
        """Seeds all generators that the transforms draw from."""
        given = self.transforms, self.transform, self.target_transform
        # equal transforms may have other generators
        if self._seeder is None or not all(map(operator.is_, self._seeded, given)):
            self._seeder = SampleSeeder(*self.seeded_objects())
            self._seeded = given
            self._is_untried = True
        return self._seeder

    def _warn_of_repeats(self, count: int, key: Key) -> None:
        """Under a plain DataLoader, counts samples, and warns once if an unnamed epoch starts again
        and transforms draw random numbers: they draw the same ones again.
        """
        self._served.value += count
        is_first = self._served.value <= len(self.sample_source)
        if is_first or self._epoch.value >= 0 or self._has_warned:
            return
        self._has_warned = True
        after = rng_states()
        self.seeder()(*key)
        if rng_states() != after:
            warn(
                f"{type(self).__name__}: the random transforms draw the same numbers in each "
                "epoch, since the epoch is unknown: call dataset.set_epoch(epoch) before each one, "
                "or use headrace.create_dataloader, which does"
            )

    # -- construction and pickling

    def _settle(self) -> None:
        self.block_memory.settle()
        self._become_iterable()
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.value_source  # noqa: B018  # made before any worker is forked: all share it

    def _become_iterable(self) -> None:
        """Makes a streaming dataset an `IterableDataset` (law 8): torch decides by `isinstance`.
        The mode may be unknown until the constructor has finished.
        """
        if self.loading_mode is LoadingMode.STREAMING:
            self.__class__ = joined_class(type(self), IterableDataset)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles the dataset as its plain class; for a worker with its cache, else without."""
        return blank, classes_of(type(self)), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in LEFT_BEHIND}
        if is_spawning():
            state["_world"] = detect_world()  # a spawned worker does not see torch.distributed
            for name in ("targets", "_chosen", "_held_of"):
                state[name] = self._mapped_by_workers(name)
        else:
            state["_value_source"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.__dict__[name] = value.array if isinstance(value, SharedArray) else value
        self._become_iterable()

    def _mapped_by_workers(self, name: str) -> Any:
        """An attribute as it is pickled for a spawned worker: a large array is moved to memory that
        all workers map.
        """
        value = getattr(self, name)
        if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.nbytes < SHARED_FROM:
            return value
        travelling: dict[str, tuple[Any, SharedArray]]
        travelling = self.__dict__.setdefault("_travelling", {})
        if name not in travelling or travelling[name][0] is not value:
            shared = SharedArray(value)
            travelling[name] = shared.moved(), shared
            setattr(self, name, travelling[name][0])
        return travelling[name][1]
