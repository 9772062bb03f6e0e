"""Datasets over a source, in one of four loading modes; what a sample is, a `SampleFormat` says."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset

from headrace.datasets.core import construction, loading, views
from headrace.datasets.core.budgeting import BlockMemory, DatasetBudget
from headrace.datasets.core.checks import as_targets, check_common, check_source
from headrace.datasets.core.finishing import Finisher, is_transformed, public_attributes
from headrace.datasets.core.format import Chain, FormatOf, JointChain, SampleFormat, chained
from headrace.datasets.core.reader import Access, OnError, SampleReader
from headrace.datasets.core.splitting import JointTransform, Splittable, Transform
from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.core.views import checked_indices, chosen_indices, fingerprint_of_view, targets_of_view
from headrace.dtypes import ArraySpec
from headrace.errors import EmptyBatchError
from headrace.memory.anonymous import SharedInt
from headrace.memory.budget import MemoryBudget
from headrace.modes import LoadingMode, ModeName
from headrace.modes.mode import Coming, Mode
from headrace.order import RankBatches, World
from headrace.order.request import BatchRequest, current_request
from headrace.storage.source import Source


class BaseDataset(Splittable, Dataset[Any]):
    """A map-style dataset over a `Source`, in one of four loading modes; in mode "streaming" an `IterableDataset`.

    For a format of one's own, subclass it, give `super().__init__` a source, and override `decode`; or give it a `SampleFormat`. A
    subclass may override the other steps too: `split_target`, `to_input` and `make_sample`.

    Args:
        source: where the records are.
        sample_format: what a sample is; None: records are samples.
        targets: one target a sample, or None where samples have none.
        transform: called with the input; a list of callables is called one after the other.
        target_transform: called with the target.
        transforms: called with input and target, returns both; or a list of such. Not together with the other two.
        loading_mode: a `LoadingMode` or its name.
        cache_size: for "cached": at most so many samples (int) or bytes ("2GB"); None: what the budget allows.
        max_memory_usage: the budget, as a fraction of the memory that is free at first use, or bytes ("500MB").
        cache_policy: "auto", "keep" or "lru" (see `headrace.modes.cached`).
        hold: "decoded" or "encoded": what eager and cached hold; None: the dataset's choice.
        shared: "rank": all workers of a process share what eager and cached hold; "machine": all ranks of this user on this machine
            do, in a file in `cache_dir`.
        cache_dir: a folder for what may be found again; None: headrace's part of the user's cache folder, for what needs one.
        on_error: what becomes of a sample that can't be read: "raise"; "skip": it is left out of its batch, counted and listed;
            or a callable ``(index, path, error) -> sample``.
        seed: of the order and the random transforms, where no Loader gives one.
        return_index: append the index to each sample.
        progress: show progress bars; None: only on a terminal.

    Raises:
        ConfigError: an argument makes no sense; the message names it.
        BudgetError: "eager" does not fit the budget.

    Reading may happen in several processes, each with its copy; not in several threads on one copy, since transforms that use
    global random generators can't run at the same time.
    """

    fork_safe = True
    """True if a process that has read from it may fork; elsewhere `Loader` starts workers by forkserver."""
    reads_urls = False
    """True if it is given paths, and so takes the options of `RemoteOptions` too."""
    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    transforms: Callable[[Any, Any], tuple[Any, Any]] | None
    loading_mode: LoadingMode
    seed: int
    return_index: bool
    sample_reader: SampleReader
    """Reads and decodes its samples."""
    collate: Callable[[list[Any]], Any] | str | None = None
    """The collate function (or the name of a registered one) that fits these samples, if the default does not."""
    data_path: Any = None
    """The path or paths that it reads, as they were given; None of a dataset that was made of a `Source`."""
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
        self.seed, self.return_index = int(seed), return_index
        self.targets: Any = as_targets(targets, len(source))
        self.sample_source: Source = source
        self._format = sample_format or SampleFormat()
        self._cache_size, self._cache_policy, self._hold = cache_size, cache_policy, hold
        self._shared, self._cache_dir, self._progress = shared, cache_dir, progress
        self._chosen: npt.NDArray[np.int64] | None = None  # of a view: the indices of the whole dataset
        self._fingerprint: str | None = None
        self._epoch = SharedInt(-1)  # nobody has named one yet
        self._served = SharedInt(0)  # samples under a plain DataLoader
        self._mode: Mode | None = None
        self._world: World | None = None
        self._arguments: dict[str, Any] = {}
        self._is_settled = False
        self.left_of_budget = DatasetBudget(max_memory_usage)
        self.block_memory = BlockMemory(source, self.loading_mode is LoadingMode.STREAMING, self.left_of_budget)
        self.sample_reader = SampleReader(source, on_error, WorkerThreads())
        source.use_threads(self.sample_reader.threads.map)
        self.sample_finisher = Finisher()

    # -- the steps from a record to a sample, which a subclass may override; defaults: as the format does them

    def decode(self, record: Any) -> Any:
        """The value of a record: deterministic, of its final size. Modes cache it."""
        return self._format.decode(record)

    def value_spec(self) -> ArraySpec | tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of what `decode` gives, if they are the same for all samples and known beforehand."""
        return self._format.value_spec()

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        """Input value and target of a decoded value of this dataset or view. Default: the value, and a copy of its entry in `targets`."""
        return self._format.split_target(value, index, self)

    def to_input(self, value: Any) -> Any:
        """What a transform gets, and without one the sample's input. Default: the value itself, writable."""
        return self._format.to_input(value)

    def make_sample(self, value: Any, target: Any) -> Any:
        """A finished sample of input and target. Default: both as a tuple, or the input alone where there are no targets."""
        return self._format.make_sample(value, target, self.targets is not None or self._format.always_pairs)

    def held_nbytes(self) -> int | None:
        """Bytes of all samples of the whole dataset when they are held, if that is known without reading them."""
        return None

    def sample_nbytes(self) -> int | None:
        """Bytes of one finished sample, if they are known and the same for all: what a loader plans its buffers by."""
        return None if is_transformed(self) or not len(self.sample_source) else self._format.sample_nbytes()

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """How long each sample is ([n] int64), in tokens or what stands for them, if that is known without reading them."""
        return None

    def held_as(self) -> str:
        """What, besides the record, decides the cached value: ranks whose text is the same share it under ``shared="machine"``. Default:
        class and arguments that are no transforms and don't concern loading.

        Raises:
            ConfigError: one of these has no value that could be compared with another process's; override this method then.
        """
        return construction.describe_held(type(self), self._arguments)

    @property
    def holds_encoded(self) -> bool:
        """True if eager and cached hold records, and decode at each access."""
        return self._hold == "encoded"

    @property
    def sample_format(self) -> SampleFormat:
        """What a sample is, with the steps that the class overrides."""
        return FormatOf(self, self._format, self._overridden) if self._overridden else self._format

    @property
    def on_error(self) -> OnError:
        """What becomes of a sample that can't be read."""
        return self.sample_reader.on_error

    @on_error.setter
    def on_error(self, value: OnError) -> None:
        self.sample_reader.on_error = value

    # -- what users see

    def __len__(self) -> int:
        return len(self.sample_source) if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: slice) -> Self: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """One sample; for a slice, a view of the dataset.

        Raises:
            IndexError: outside of the dataset.
            SampleError: the sample can't be read.
            TypeError: in mode "streaming", which has no random access.
        """
        if isinstance(index, slice):
            return self.subset(np.arange(len(self))[index])
        if isinstance(self, IterableDataset):
            raise TypeError("loading_mode='streaming' has no random access: iterate, or use 'lazy', 'eager' or 'cached'")
        position, length = operator.index(index), len(self)
        if not -length <= position < length:
            raise IndexError(f"index {position} is outside of a dataset of {length:,} samples")
        return self.__getitems__([position % length])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch (torch's fetcher calls this once a batch); with ``on_error="skip"`` perhaps fewer.

        Raises:
            IndexError: one is outside of the dataset; negative ones count from its end.
            SampleError: one can't be read; or, where such are skipped, none can.
        """
        if isinstance(indices, BatchRequest):
            return self.make_samples(indices)[0]
        length, around = len(self), current_request()  # of a dataset around this one
        indices = [index + length if -length <= index < 0 else index for index in indices]
        seed, epoch = (self.seed, self.epoch) if around is None else (around.seed, around.epoch)
        return self.make_samples(BatchRequest(indices, seed, epoch), is_plain=around is None)[0]

    def make_samples(self, request: BatchRequest, is_plain: bool = False, error: Exception | None = None) -> tuple[list[Any], list[int]]:
        """The samples of a batch and the index of each, as `__getitems__`. (`is_plain`: under a plain DataLoader, which names no epoch;
        `error`: why the batch could not be made in another way before.)"""
        values = self.sample_reader.values(self.whole_indices(request).tolist(), self.sample_access, error)
        return self.sample_finisher.finish(self, request, values, is_plain)

    def may_repeat_draws(self, count: int) -> bool:
        """Counts samples under a plain DataLoader. True if nobody has named an epoch, and more than there are were asked for."""
        self._served.value += count
        return self._epoch.value < 0 and self._served.value > len(self.sample_source)

    def __iter__(self) -> Iterator[Any]:
        """All samples in order; in mode "streaming" this rank's and worker's part of an epoch, block-shuffled, read ahead."""
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
        """The epoch that random transforms and a plain DataLoader's streaming order belong to."""
        return max(0, self._epoch.value)

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch; workers that run already see it too. Under a `Loader` its own `set_epoch` counts instead."""
        self._epoch.value = int(epoch)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Self:
        """A view of some samples, by indices or a mask, which shares what is cached with this dataset.

        Raises:
            IndexError: an index outside of the dataset, or that is no integer; a mask of another length.
        """
        chosen = chosen_indices(indices, len(self))
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made now where it was closed or stayed behind: views share it
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._chosen, view._fingerprint = self.whole_indices(chosen), None
        view.targets = targets_of_view(self.targets, chosen)
        view.sample_reader, view.sample_finisher = self.sample_reader.another(is_view=True), Finisher()
        return view

    def with_transform(self, transform: Transform) -> Self:
        """A view of all samples that has another transform, and shares what is cached with this dataset.

        Args:
            transform: in place of what was given as `transform` (or, where they are joint, as `transforms`); None or []: none.

        Raises:
            ConfigError: it is no callable, and no list of callables.
        """
        is_joint = self.transforms is not None or self._arguments.get("transforms") is not None
        view, name = self.subset(np.arange(len(self))), "transforms" if is_joint else "transform"
        view._format, rest = self._with_transform(transform)
        setattr(view, name, JointChain(rest.steps) if name == "transforms" and isinstance(rest, Chain) else rest)
        view._arguments = {**self._arguments, name: [] if transform is None else transform}
        return view

    def source_of(self, index: int) -> str:
        """Where a sample lies: its path, or file and row."""
        return self.sample_source.location(int(self.whole_indices(range(len(self))[index])))

    @property
    def fingerprint(self) -> str:
        """A short hash of what the samples are: the same on every machine, in every mode."""
        if self._fingerprint is None:
            whole = self.sample_source.fingerprint()
            self._fingerprint = whole if self._chosen is None else fingerprint_of_view(whole, self._chosen)
        return self._fingerprint

    def explain(self) -> str:
        """In words: how samples are read, what is cached, and where the budget stands."""
        return construction.explained(self, {} if self._mode is None else self._mode.stats())

    def close(self) -> None:
        """Gives back what is cached, and closes what is open in this process. The dataset can be used again after it."""
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
        return f"{construction.describe_call(type(self).__name__, self._arguments)}{view}  # {len(self):,} samples"

    # -- what loaders use

    @property
    def budget(self) -> MemoryBudget:
        """This process's memory budget under the dataset's `max_memory_usage`."""
        return self.left_of_budget.budget

    blocks = views.blocks
    blocks_of = views.blocks_of
    lanes = views.lanes
    _layout_nbytes = views.layout_nbytes
    epoch_order = views.epoch_order

    def prefetch(self, key: Any, steps: range, batches: RankBatches) -> None:
        """A streaming dataset prefetches these batches of an epoch, the next one first; `key` is equal while the epoch is the same."""
        segments = batches.order.segments if self.block_memory.prefetches_whole else None
        self.mode.prefetch(Coming(key, steps, batches.some, segments), self.sample_source, self.whole_indices)

    @property
    def sample_access(self) -> Access:
        """How samples are reached."""
        return Access(self.sample_format, self.mode, self.holds_encoded)

    def whole_indices(self, indices: Any) -> npt.NDArray[np.int64]:
        """The numbers in the source of samples of this dataset or view; negative indices count from the end.

        Raises:
            IndexError: one is outside of the dataset.
        """
        array = checked_indices(indices, len(self))
        return array if self._chosen is None else self._chosen[array]

    def seed_index(self, index: int) -> int:
        """The number of a sample in the whole dataset, which seeds its random numbers."""
        return index if self._chosen is None else int(self._chosen[index])

    def seeded_objects(self) -> Iterator[Any]:
        """What may hold random generators that transforms draw from."""
        yield from public_attributes(self).values()

    @property
    def mode(self) -> Mode:
        """The loading mode at work; made at first use where it stayed behind in a pickle."""
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
