"""Datasets over a source, in one of four loading modes. A `SampleFormat` defines what a sample
is.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset

from headrace.arguments import check_integer, missing_attribute
from headrace.datasets.core import construction, loading, views
from headrace.datasets.core.budgeting import BlockMemory, DatasetBudget
from headrace.datasets.core.checks import as_targets, check_common, check_source
from headrace.datasets.core.finishing import Finisher, is_transformed, public_attributes
from headrace.datasets.core.format import Chain, FormatOf, JointChain, SampleFormat, chained
from headrace.datasets.core.reader import Access, OnError, SampleReader
from headrace.datasets.core.splitting import JointTransform, Splittable, Transform
from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.core.views import (
    checked_indices,
    chosen_indices,
    fingerprint_of_view,
    targets_of_view,
)
from headrace.dtypes import ArraySpec
from headrace.errors import EmptyBatchError, warn
from headrace.memory.anonymous import SharedInt
from headrace.memory.budget import MemoryBudget
from headrace.modes import LoadingMode, ModeName
from headrace.modes.mode import Coming, Mode
from headrace.order import RankBatches, World
from headrace.order.request import BatchRequest, current_request
from headrace.storage.source import Source


class BaseDataset(Splittable, Dataset[Any]):
    """A map-style dataset over a `Source`, in one of four loading modes. In mode "streaming" it is
    an `IterableDataset`.

    To support a new format, subclass it, pass a source to `super().__init__`, and override
    `decode`; or pass a `SampleFormat`. A subclass may also override the other steps:
    `split_target`, `to_input` and `make_sample`.

    Args:
        source: the source of the records.
        sample_format: defines what a sample is. None: records are samples.
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
            loader that draws samples repeatedly (`weights` or `balanced` with replacement),
                else "keep".
        hold: what modes "eager" and "cached" cache: "decoded" samples or "encoded" records. None:
            chosen by the dataset.
        shared: which processes share what "eager" and "cached" cache. "rank": all workers of a
            process. "machine": all ranks of this user on this machine, through a file in
            `cache_dir`.
        cache_dir: folder for files that later runs use again; it is made, with its parents. None:
            the folder of headrace in the user's cache folder, if one is needed.
        on_error: what to do with a sample that can't be read. "raise": raise a `SampleError`.
            "skip": leave it out of its batch, count it and list it. A callable ``(index, path,
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
    collate: Callable[[list[Any]], Any] | str | None = None
    """The collate function for these samples, or the name of a registered one. None: the default
    one.
    """
    data_path: Any = None
    """The path or paths, as passed. None for a dataset that was made from a `Source`."""
    _overridden: ClassVar[frozenset[str]] = frozenset()
    """The steps that the class overrides (`construction.STEPS`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        construction.prepare_class(cls, BaseDataset)

    def __init__(
        self,
        source: Source,
        *,
        sample_format: SampleFormat | None = None,
        targets: Sequence[Any] | npt.NDArray[Any] | None = None,
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
        check_source(source)
        check_common(locals())
        self.transform, self.target_transform, self.transforms = (
            chained(transform),
            target_transform,
            chained(transforms, "transforms"),
        )
        self.loading_mode = LoadingMode.of(loading_mode)
        if self.loading_mode is not LoadingMode.CACHED and cache_size is not None:
            warn(
                f"cache_size={cache_size!r} limits what loading_mode='cached' holds, and has no "
                "effect "
                f"in {self.loading_mode.value!r}: leave it out, or pass loading_mode='cached'"
            )
        self.seed, self.return_index = int(seed), return_index
        self.targets: Any = as_targets(targets, len(source))
        self.sample_source: Source = source
        self._format = sample_format or SampleFormat()
        self._cache_size, self._cache_policy, self._hold = cache_size, cache_policy, hold
        self._shared, self._cache_dir, self._progress = shared, cache_dir, progress
        # of a view: the indices of the whole dataset
        self._chosen: npt.NDArray[np.int64] | None = None
        self._fingerprint: str | None = None
        self._epoch = SharedInt(-1)  # nobody has named one yet
        self._served = SharedInt(0)  # samples under a plain DataLoader
        self._mode: Mode | None = None
        self._world: World | None = None
        self._arguments: dict[str, Any] = {}
        self._is_settled = False
        self.left_of_budget = DatasetBudget(max_memory_usage)
        self.block_memory = BlockMemory(
            source, self.loading_mode is LoadingMode.STREAMING, self.left_of_budget
        )
        self.sample_reader = SampleReader(source, on_error, WorkerThreads())
        source.use_threads(self.sample_reader.threads.map)
        self.sample_finisher = Finisher()

    # -- the steps from a record to a sample, which a subclass may override; defaults: as the format
    # does them

    def decode(self, record: Any) -> Any:
        """Decodes a record. The result must be deterministic and have its final size. Loading
        modes cache it.
        """
        return self._format.decode(record)

    def value_spec(self) -> ArraySpec | tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of what `decode` returns. None: they differ between samples, or are
        not known without reading.
        """
        return self._format.value_spec()

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        """Splits a decoded value of this dataset or view into input value and target. Default: the
        value, and a copy of its entry in `targets`.
        """
        return self._format.split_target(value, index, self)

    def to_input(self, value: Any) -> Any:
        """Converts an input value to what the transform receives. Without a transform this is the
        sample's input. Default: the value itself, writable.
        """
        return self._format.to_input(value)

    def make_sample(self, value: Any, target: Any) -> Any:
        """Makes a sample of input and target. Default: a tuple of both, or the input alone if
        the dataset has no targets.
        """
        return self._format.make_sample(
            value, target, self.targets is not None or self._format.always_pairs
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
        return (
            None
            if is_transformed(self) or not len(self.sample_source)
            else self._format.sample_nbytes()
        )

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """Length of each sample ([n] int64), in tokens or a similar measure. None: not known
        without reading them.
        """
        return None

    def held_as(self) -> str:
        """A text that identifies how records are turned into cached values.

        Ranks with equal texts share the cache under ``shared="machine"``. Default: the class, and
        its arguments other than transforms and loading options.

        Raises:
            ConfigError: an argument has no value that can be compared with that of another process.
                Override this method then.
        """
        return construction.describe_held(type(self), self._arguments)

    @property
    def holds_encoded(self) -> bool:
        """True if modes "eager" and "cached" cache encoded records, which are decoded at each
        access.
        """
        return self._hold == "encoded"

    @property
    def sample_format(self) -> SampleFormat:
        """The format of the samples, with the steps that the class overrides."""
        return FormatOf(self, self._format, self._overridden) if self._overridden else self._format

    @property
    def on_error(self) -> OnError:
        """What to do with a sample that can't be read: "raise", "skip" or a callable."""
        return self.sample_reader.on_error

    @on_error.setter
    def on_error(self, value: OnError) -> None:
        self.sample_reader.on_error = value

    # -- what users see

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            return missing_attribute(self, name)

    def __len__(self) -> int:
        return len(self.sample_source) if self._chosen is None else len(self._chosen)

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
        position, length = operator.index(index), len(self)
        if not -length <= position < length:
            raise IndexError(f"index {position} is outside of a dataset of {length:,} samples")
        return self.__getitems__([position % length])[0]

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
        length, around = len(self), current_request()  # of a dataset around this one
        indices = [index + length if -length <= index < 0 else index for index in indices]
        seed, epoch = (self.seed, self.epoch) if around is None else (around.seed, around.epoch)
        return self.make_samples(BatchRequest(indices, seed, epoch), is_plain=around is None)[0]

    def make_samples(
        self, request: BatchRequest, is_plain: bool = False, error: Exception | None = None
    ) -> tuple[list[Any], list[int]]:
        """Returns the samples of a batch, as `__getitems__` does, and the index of each.

        Args:
            request: the indices, and the epoch that they belong to.
            is_plain: True under a plain DataLoader, which passes no epoch.
            error: the error of an earlier attempt to make the batch in another way.
        """
        values = self.sample_reader.values(
            self.whole_indices(request).tolist(), self.sample_access, error
        )
        return self.sample_finisher.finish(self, request, values, is_plain)

    def may_repeat_draws(self, count: int) -> bool:
        """Counts samples under a plain DataLoader. True if no epoch was set and more samples
        were requested than the source has.
        """
        self._served.value += count
        return self._epoch.value < 0 and self._served.value > len(self.sample_source)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over all samples in order; in mode "streaming" over this rank's and worker's
        part of an epoch, block-shuffled and prefetched.
        """
        if not isinstance(self, IterableDataset):
            for index in range(len(self)):
                with contextlib.suppress(EmptyBatchError):
                    yield from self.__getitems__([index])
            return
        is_plain = current_request() is None
        for request in loading.stream_requests(self):
            with contextlib.suppress(EmptyBatchError):
                yield from self.make_samples(request, is_plain)[0]

    @property
    def epoch(self) -> int:
        """The epoch of random transforms, and of the streaming order under a plain DataLoader."""
        return max(0, self._epoch.value)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. Running workers see it too. Under a `Loader`, the loader's own
        `set_epoch` counts instead.
        """
        self._epoch.value = check_integer("epoch", epoch)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Self:
        """Returns a view of some samples. It shares cached samples with this dataset.

        Args:
            indices: indices of the samples, or a boolean mask with one entry per sample.

        Raises:
            IndexError: an index is out of range or not an integer, or the mask has another length.
        """
        chosen = chosen_indices(indices, len(self))
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made now where it was closed or stayed behind: views share it
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._chosen, view._fingerprint = self.whole_indices(chosen), None
        view.targets = targets_of_view(self.targets, chosen)
        view.sample_reader, view.sample_finisher = (
            self.sample_reader.another(is_view=True),
            Finisher(),
        )
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
        is_joint = self.transforms is not None or self._arguments.get("transforms") is not None
        view, name = self.subset(np.arange(len(self))), "transforms" if is_joint else "transform"
        view._format, rest = self._with_transform(transform)
        setattr(
            view,
            name,
            JointChain(rest.steps) if name == "transforms" and isinstance(rest, Chain) else rest,
        )
        view._arguments = {**self._arguments, name: [] if transform is None else transform}
        return view

    def source_of(self, index: int) -> str:
        """The location of a sample: its path, or file and row."""
        return self.sample_source.location(int(self.whole_indices(range(len(self))[index])))

    @property
    def fingerprint(self) -> str:
        """A short hash of the sample data. It is the same on every machine and in every mode."""
        if self._fingerprint is None:
            whole = self.sample_source.fingerprint()
            self._fingerprint = (
                whole if self._chosen is None else fingerprint_of_view(whole, self._chosen)
            )
        return self._fingerprint

    def explain(self) -> str:
        """Describes how samples are read, what is cached, and the state of the memory budget."""
        return construction.explained(self, {} if self._mode is None else self._mode.stats())

    def close(self) -> None:
        """Frees what is cached and closes the files that are open in this process. The dataset
        can be used again afterwards.
        """
        if self._chosen is not None:
            return
        if self._mode is not None:
            self._mode.close()
            self._mode = None
        self.sample_source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        view = "" if self._chosen is None else f".subset(<{len(self._chosen):,} indices>)"
        return (
            f"{construction.describe_call(type(self).__name__, self._arguments)}{view}  # "
            f"{len(self):,} samples"
        )

    # -- what loaders use

    @property
    def budget(self) -> MemoryBudget:
        """The memory budget of this process under `max_memory_usage`."""
        return self.left_of_budget.budget

    blocks = views.blocks
    lanes = views.lanes
    _layout_nbytes = views.layout_nbytes
    epoch_order = views.epoch_order

    def prefetch(self, key: Any, steps: range, batches: RankBatches) -> None:
        """Prefetches batches of an epoch in mode "streaming".

        Args:
            key: identifies the epoch; equal keys mean the same epoch.
            steps: steps of the batches, the next one first.
            batches: the rank's batches of the epoch.
        """
        segments = batches.order.segments if self.block_memory.prefetches_whole else None
        self.mode.prefetch(
            Coming(key, steps, batches.some, segments), self.sample_source, self.whole_indices
        )

    @property
    def sample_access(self) -> Access:
        """How samples are accessed."""
        return Access(self.sample_format, self.mode, self.holds_encoded)

    def whole_indices(self, indices: Any) -> npt.NDArray[np.int64]:
        """Converts indices of this dataset or view to record numbers of the source. Negative
        indices count from the end.

        Raises:
            IndexError: an index is out of range.
        """
        array = checked_indices(indices, len(self))
        return array if self._chosen is None else self._chosen[array]

    def seed_index(self, index: int) -> int:
        """Index of a sample in the whole dataset, which seeds its random numbers."""
        return index if self._chosen is None else int(self._chosen[index])

    def seeded_objects(self) -> Iterator[Any]:
        """Yields the objects that may hold random generators which transforms draw from."""
        yield from public_attributes(self).values()

    @property
    def mode(self) -> Mode:
        """The active loading mode. It is created at first use if it was not pickled with the
        dataset.
        """
        if self._mode is None:
            self._mode = self.make_mode()
        return self._mode

    make_mode = loading.make_mode  # a class may make a mode of its own

    def _with_transform(self, transform: Any) -> tuple[SampleFormat, Callable[[Any], Any] | None]:
        """The format of a view with that transform, and what is left for the view to call."""
        return self._format.with_transform(transform)

    def _settle(self) -> None:
        self._is_settled = True
        self.block_memory.settle()
        construction.become_iterable(self)
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made before any worker is forked, so that all share it

    __reduce_ex__ = construction.reduced
    __getstate__ = construction.state_of
    __setstate__ = construction.restore


BaseDataset.__init__ = construction.settling(BaseDataset.__init__)  # type: ignore[method-assign]  # that of subclasses: `prepare_class`
