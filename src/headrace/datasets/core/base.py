"""Datasets over a source, in one of four loading modes.

`BaseDataset` takes a batch's indices all the way to finished samples: what the mode holds, what the source must read, decode, admit,
transform. What a sample is, a `SampleFormat` says; a format of one's own is a `Source` and a `decode`.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset

from headrace.datasets.core import loading
from headrace.datasets.core.budgeting import BlockMemory, BudgetLeft
from headrace.datasets.core.checks import as_targets, check_common, check_source
from headrace.datasets.core.construction import (
    become_iterable,
    describe_call,
    describe_held,
    prepare_class,
    reduced,
    restore,
    settling,
    state_of,
)
from headrace.datasets.core.finishing import Finisher, is_random_in, is_transformed, public_attributes
from headrace.datasets.core.format import FormatOf, SampleFormat, chained
from headrace.datasets.core.reader import Access, OnError, SampleReader, nothing_readable
from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.core.views import blocks_of_view, checked_indices, chosen_indices
from headrace.display import Lines
from headrace.errors import ConfigError, EmptyBatchError, SampleError
from headrace.memory.anonymous import SharedInt
from headrace.memory.budget import MemoryBudget
from headrace.memory.rows import ArraySpec
from headrace.modes import LoadingMode, ModeName
from headrace.modes.mode import Coming, Mode
from headrace.order import EpochOrder, RankBatches, World, detect_world
from headrace.order.epoch import DEFAULT_TURNS
from headrace.order.lanes import lanes_for
from headrace.order.request import BatchRequest, current_request
from headrace.order.splits import fold_parts, split_parts
from headrace.storage.source import Source


class BaseDataset(Dataset[Any]):
    """A map-style dataset over a `Source`, in one of four loading modes; in mode "streaming" an `IterableDataset`.

    For a format of one's own, subclass it, give `super().__init__` a source, and override `decode`; or give it a `SampleFormat`. A
    subclass may override the other steps too: `split_target`, `to_input` and `make_sample`.

    Args:
        source: where the records are.
        sample_format: what a sample is; None: records are samples.
        targets: one target a sample, or None where samples have none.
        transform: called with the input; a list of callables is called one after the other.
        target_transform: called with the target.
        transforms: called with input and target, returns both; not together with the other two.
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
        prepare_class(cls, BaseDataset)

    def __init__(
        self,
        source: Source,
        *,
        sample_format: SampleFormat | None = None,
        targets: Sequence[Any] | npt.NDArray[Any] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], tuple[Any, Any]] | None = None,
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
        check_common(
            {
                "transform": transform, "target_transform": target_transform, "transforms": transforms, "loading_mode": loading_mode,
                "cache_size": cache_size, "max_memory_usage": max_memory_usage, "cache_policy": cache_policy, "hold": hold,
                "shared": shared, "on_error": on_error, "seed": seed,
            }
        )  # fmt: skip
        self.transform, self.target_transform, self.transforms = chained(transform), target_transform, transforms
        self.loading_mode = LoadingMode.of(loading_mode)
        self.seed, self.return_index = int(seed), return_index
        self.targets = as_targets(targets, len(source))
        self._source = source
        self._format = sample_format or SampleFormat()
        self._cache_size, self._max_memory_usage, self._cache_policy = cache_size, max_memory_usage, cache_policy
        self._hold, self._progress = hold, progress
        self._shared, self._cache_dir = shared, cache_dir
        self._chosen: npt.NDArray[np.int64] | None = None  # of a view: the indices of the whole dataset
        self._fingerprint: str | None = None
        self._epoch = SharedInt(-1)  # nobody has named one yet
        self._served = SharedInt(0)  # samples under a plain DataLoader
        self._mode: Mode | None = None
        self._world: World | None = None
        self._arguments: dict[str, Any] = {}
        self._is_settled = False
        self._budget_left = BudgetLeft(max_memory_usage)
        self._blocks = BlockMemory(source, self.loading_mode is LoadingMode.STREAMING)
        threads = WorkerThreads()
        source.use_threads(threads.map)
        self.sample_reader = SampleReader(source, on_error, threads)
        self.sample_finisher = Finisher()

    # -- the steps from a record to a sample, which a subclass may override

    def decode(self, record: Any) -> Any:
        """The value of a record: deterministic, of its final size. Modes hold it. Default: as the format does it."""
        return self._format.decode(record)

    def value_spec(self) -> ArraySpec | tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of what `decode` gives, if they are the same for all samples and known beforehand."""
        return self._format.value_spec()

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        """Input value and target of a decoded value. Default: the value, and a copy of its entry in `targets`.

        Args:
            index: of the sample, in this dataset or view.
            value: its decoded value.
        """
        return self._format.split_target(value, index, self)

    def to_input(self, value: Any) -> Any:
        """What a transform gets, and without one the sample's input. Default: the value itself, writable."""
        return self._format.to_input(value)

    def make_sample(self, value: Any, target: Any) -> Any:
        """A finished sample of input and target. Default: both as a tuple, or the input alone where there are no targets."""
        return self._format.make_sample(value, target, self.targets is not None or self._format.always_pairs)

    # -- what else a format may know

    def held_nbytes(self) -> int | None:
        """Bytes of all samples of the whole dataset when they are held, if that is known without reading them."""
        return None

    def sample_nbytes(self) -> int | None:
        """Bytes of one finished sample, if they are known and the same for all: what a loader plans its buffers by."""
        return None if is_transformed(self) or not len(self._source) else self._format.sample_nbytes()

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """How long each sample is ([n] int64), in tokens or what stands for them, if that is known without reading them."""
        return None

    def held_as(self) -> str:
        """What, besides the record, decides the value that is held: ranks whose text is the same share it under ``shared="machine"``.

        Default: class and arguments that are no transforms and don't concern loading.

        Raises:
            ConfigError: one of these has no value that could be compared with another process's; override this method then.
        """
        return describe_held(type(self), self._arguments)

    @property
    def holds_encoded(self) -> bool:
        """True if eager and cached hold records, and decode at each access."""
        return self._hold == "encoded"

    @property
    def sample_source(self) -> Source:
        """Where the records are."""
        return self._source

    @property
    def sample_format(self) -> SampleFormat:
        """What a sample is, with the steps that the class overrides."""
        return FormatOf(self, self._format, self._overridden) if self._overridden else self._format

    def wrapped_format(self) -> SampleFormat:
        """The same, for a dataset whose samples have the numbers that they have here."""
        is_as_given = not self._overridden and self._chosen is None
        return self._format if is_as_given else FormatOf(self, self._format, self._overridden, self._chosen)

    @property
    def on_error(self) -> OnError:
        """What becomes of a sample that can't be read."""
        return self.sample_reader.on_error

    @on_error.setter
    def on_error(self, value: OnError) -> None:
        self.sample_reader.on_error = value

    # -- what users see

    def __len__(self) -> int:
        return len(self._source) if self._chosen is None else len(self._chosen)

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
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is outside of a dataset of {len(self):,} samples")
        return self.__getitems__([position % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch (torch's fetcher calls this once a batch); with ``on_error="skip"`` perhaps fewer.

        Raises:
            IndexError: one is outside of the dataset; negative ones count from its end.
            SampleError: one can't be read; or, where such are skipped, none can.
        """
        is_plain = not isinstance(indices, BatchRequest) and current_request() is None
        if not isinstance(indices, BatchRequest):
            length = len(self)
            indices = [index + length if -length <= index < 0 else index for index in indices]
        samples, _ = self.make_samples(self._as_request(indices), is_plain)
        return samples

    def _as_request(self, indices: Sequence[int]) -> BatchRequest:
        """Indices with seed and epoch: of the batch that this process works on, if it is one of a dataset around this one."""
        if isinstance(indices, BatchRequest):
            return indices
        around = current_request()
        return BatchRequest(indices, self.seed, self.epoch) if around is None else BatchRequest(indices, around.seed, around.epoch)

    def make_samples(self, request: BatchRequest, is_plain: bool = False, error: Exception | None = None) -> tuple[list[Any], list[int]]:
        """The samples of a batch, and the index of each; where such are skipped, without those that can't be read.

        Args:
            request: names the samples.
            is_plain: True under a plain DataLoader, which names no epoch.
            error: why the batch could not be made in another way before.

        Raises:
            SampleError: one can't be read; or, where such are skipped, none can.
        """
        values = self.sample_reader.values(self.whole_indices(request).tolist(), self.sample_access, error)
        return self.finish_samples(request, values, is_plain)

    def finish_samples(self, request: BatchRequest, values: list[Any], is_plain: bool = False) -> tuple[list[Any], list[int]]:
        """The samples of decoded values, as `make_samples` gives them."""
        failure = next((value for value in values if isinstance(value, SampleError)), None)
        if is_plain and is_random_in(self):
            self._served.value += len(request)

        def may_repeat() -> bool:
            return is_plain and self._epoch.value < 0 and self._served.value > len(self._source)

        samples, indices = self.sample_finisher.finish(self, request, values, may_repeat)
        if failure is not None and not samples:
            raise nothing_readable(failure, len(request))
        return samples, indices

    def __iter__(self) -> Iterator[Any]:
        """All samples in order; in mode "streaming" this rank's and worker's part of an epoch, block-shuffled, read ahead."""
        around = current_request()
        if not isinstance(self, IterableDataset):
            for index in range(len(self)):
                yield from self._readable(self._as_request([index]), around is None)
            return
        for request in loading.stream_requests(self, around):
            yield from self._readable(request, around is None)

    def _readable(self, request: BatchRequest, is_plain: bool) -> list[Any]:
        try:
            return self.make_samples(request, is_plain)[0]
        except EmptyBatchError:
            return []

    @property
    def epoch(self) -> int:
        """The epoch that random transforms and a plain DataLoader's streaming order belong to."""
        return max(0, self._epoch.value)

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch; workers that run already see it too. Under a `Loader` its own `set_epoch` counts instead."""
        self._epoch.value = int(epoch)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Self:
        """A view of some samples, which shares what is held with this dataset.

        Raises:
            IndexError: an index outside of the dataset, or that is no integer; a mask that is not as long as the dataset.
        """
        chosen = chosen_indices(indices, len(self))
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made now where it was closed or stayed behind: views share it
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._chosen, view._fingerprint = self.whole_indices(chosen), None
        if self.targets is not None:
            targets = self.targets
            view.targets = targets[chosen] if isinstance(targets, np.ndarray) else [targets[i] for i in chosen.tolist()]
        view.sample_reader, view.sample_finisher = self.sample_reader.another(is_view=True), Finisher()
        return view

    @overload
    def split(self, fraction: float, seed: int = 42, *, stratify: Any = None, groups: Any = None) -> tuple[Self, Self]: ...
    @overload
    def split(self, fraction: Sequence[float], seed: int = 42, *, stratify: Any = None, groups: Any = None) -> tuple[Self, ...]: ...
    def split(self, fraction: float | Sequence[float], seed: int = 42, *, stratify: Any = None, groups: Any = None) -> tuple[Self, ...]:
        """Views that share no sample and together have all, drawn at random by seed and length alone; each in index order.

        Args:
            fraction: of the samples that the first of two views gets (rounded); or the fractions of all views (``[.7, .15, .15]``).
            seed: any integer.
            stratify: a label a sample, or True for `targets`: each view gets its fraction of each label's samples.
            groups: a group a sample, such as its patient: the samples of a group stay together, and the fractions are approached.

        Raises:
            ConfigError: an argument makes no sense, or a view would have no sample.
        """
        fractions = list(fraction) if isinstance(fraction, (Sequence, np.ndarray)) else [fraction, 1 - fraction]
        parts = split_parts(len(self), fractions, seed, stratify=self._labels(stratify), groups=groups)
        return tuple(self.subset(part) for part in parts)

    def folds(self, k: int, seed: int = 42, *, stratify: Any = None, groups: Any = None) -> list[tuple[Self, Self]]:
        """Training and validation views of a k-fold cross-validation: each sample is in one validation view. Arguments: see `split`.

        Raises:
            ConfigError: as `split`.
        """
        parts = fold_parts(len(self), k, seed, stratify=self._labels(stratify), groups=groups)
        everything = np.arange(len(self))
        return [(self.subset(np.delete(everything, part)), self.subset(part)) for part in parts]

    def with_transform(self, transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None) -> Self:
        """A view of all samples that has another transform, and shares what is held with this dataset.

        Args:
            transform: in place of what was given as `transform` (or, where they are joint, as `transforms`); None or []: none.

        Raises:
            ConfigError: it is no callable, and no list of callables.
        """
        view = self.subset(np.arange(len(self)))
        view._format, rest = self._with_transform(transform)
        setattr(view, "transform" if self.transforms is None else "transforms", rest)
        view._arguments = {**self._arguments, "transforms" if self.transforms is not None else "transform": transform}
        return view

    def source_of(self, index: int) -> str:
        """Where a sample lies: its path, or file and row."""
        return self._source.location(int(self.whole_indices(range(len(self))[index])))

    @property
    def fingerprint(self) -> str:
        """A short hash of what the samples are: the same on every machine, in every mode."""
        if self._fingerprint is None:
            self._fingerprint = self._source.fingerprint()
            if self._chosen is not None:
                whole_and_chosen = self._fingerprint.encode() + self._chosen.astype("<i8").tobytes()
                self._fingerprint = hashlib.blake2b(whole_and_chosen, digest_size=16).hexdigest()
        return self._fingerprint

    def explain(self) -> str:
        """In words: how samples are read, what is held, and where the budget stands."""
        held = "records as stored" if self.holds_encoded else "decoded samples"
        what = {"lazy": "nothing is held", "streaming": "only the read-ahead window is held"}
        lines = [
            f"{type(self).__name__}: {len(self):,} samples from {type(self._source).__name__}",
            f"loading_mode {self.loading_mode}: {what.get(str(self.loading_mode), f'{held} are held, shared by all workers')}",
        ]
        lines += [f"{name}: {way}" for name, way in self._source.how().items()]
        if self._mode is not None and self._mode.stats():
            lines.append("now: " + ", ".join(f"{k} {v:,}" for k, v in self._mode.stats().items()))
        return Lines("\n".join([*lines, self.budget.explain()]))

    def close(self) -> None:
        """Gives back what is held, and closes what is open in this process. The dataset can be used again after it."""
        if self._mode is not None and self._chosen is None:
            self._mode.close()
            self._mode = None
        if self._chosen is None:
            self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        view = "" if self._chosen is None else f".subset(<{len(self._chosen):,} indices>)"
        return f"{describe_call(type(self).__name__, self._arguments)}{view}  # {len(self):,} samples"

    # -- what loaders use

    @property
    def budget(self) -> MemoryBudget:
        """This process's memory budget under the dataset's `max_memory_usage`."""
        return MemoryBudget(self._max_memory_usage, local_world_size=detect_world().local_world_size)

    def left_of_budget(self) -> int:
        """Bytes that the budget leaves to this process, a worker among others, for what it needs a short time."""
        return self._budget_left()

    def blocks(self) -> npt.NDArray[np.int64] | None:
        """How many consecutive samples share each block of the storage ([blocks] int64); None: each lies by itself."""
        sizes = self._source.blocks()
        return sizes if sizes is None or self._chosen is None else blocks_of_view(sizes, self._chosen)

    def lanes(self, blocks: int) -> tuple[int, int]:
        """The (interleave, turns) that suit an order over so many blocks, where nobody gave any: by the layout alone."""
        return lanes_for(blocks, self._source.block_nbytes)

    def epoch_order(
        self,
        shuffle: bool | Literal["block"],
        seed: int,
        epoch: int,
        global_batch: int,
        interleave: int | None = None,
        turns: int | None = None,
    ) -> EpochOrder:
        """The order of one epoch of this dataset."""
        blocks = self.blocks() if shuffle == "block" else None
        if blocks is not None:
            fitting = self.lanes(len(blocks))
            interleave, turns = interleave or fitting[0], turns or fitting[1]
        return EpochOrder(
            len(self), shuffle=shuffle, seed=seed, epoch=epoch, blocks=blocks, global_batch=global_batch,
            interleave=interleave, turns=turns or DEFAULT_TURNS,
        )  # fmt: skip

    @property
    def block_nbytes(self) -> int:
        """Bytes of the decoded chunks of one block; 0 where nothing is decoded as a whole."""
        return self._source.block_nbytes

    def hold_chunks(self, nbytes: int, processes: int = 1) -> None:
        """Each of so many processes may hold `nbytes` of decoded chunks, which are set aside in the budget.

        Raises:
            BudgetError: they don't fit it.
        """
        self._blocks.hold_chunks(nbytes, processes, self.budget)

    @property
    def has_inputs_in_memory(self) -> bool:
        """True if all samples are held, and nothing is left to be done with them that costs more than a copy."""
        return self.loading_mode is LoadingMode.EAGER and not (self.holds_encoded or is_random_in(self))

    def expect(self, key: Any, steps: range, batches: RankBatches) -> None:
        """These batches come next: a streaming dataset begins to read them.

        Args:
            key: of the epoch: equal while it is the same.
            steps: of the batches, the next one first.
            batches: of the epoch.
        """
        stretches = batches.order.segments if self._blocks.prefetches_whole else None
        self.mode.expect(Coming(key, steps, batches.some, stretches), self._source, self.whole_indices)

    def hold_prefetched(self, nbytes: int, processes: int = 1) -> None:
        """Each of so many processes may hold `nbytes` of remote blocks while it is in the midst of them; 0: it fetches what each batch
        takes instead.

        Raises:
            BudgetError: they don't fit the budget.
        """
        self._blocks.prefetch(nbytes, processes, self.budget)

    @property
    def prefetches_blocks(self) -> bool:
        """True if its blocks are remote, and there is room for those that a process is in the midst of, so that each is fetched once."""
        return self._blocks.prefetches_whole and self._blocks.remote_nbytes(1) > 0

    def remote_nbytes(self, count: int) -> int:
        """Stored bytes of the so many largest blocks, if they are remote and prefetched as a whole; else 0."""
        return self._blocks.remote_nbytes(count)

    def take_report(self) -> dict[str, Any]:
        """What was counted in this process since the last call."""
        return self.sample_reader.take_report()

    @property
    def sample_access(self) -> Access:
        """How samples are reached at the moment."""
        return Access(self.sample_format, self.mode, self.holds_encoded)

    def whole_indices(self, indices: Any) -> npt.NDArray[np.int64]:
        """The numbers in the source of samples of this dataset or view; negative indices count from the end.

        Raises:
            IndexError: one is outside of the dataset.
        """
        array = checked_indices(indices, len(self))
        return array if self._chosen is None else self._chosen[array]

    def seed_index(self, index: int) -> int:
        """What stands for a sample where random numbers are seeded: its number in the whole dataset."""
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

    def _labels(self, stratify: Any) -> Any:
        if stratify is not True:
            return stratify
        if self.targets is None:
            raise ConfigError(f"stratify=True: this {type(self).__name__} has no targets: pass a label for each sample")
        return self.targets

    def _settle(self) -> None:
        self._is_settled = True
        self._blocks.settle(self.budget)
        become_iterable(self)
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made before any worker is forked, so that all share it

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self)

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state)


BaseDataset.__init__ = settling(BaseDataset.__init__)  # type: ignore[method-assign]  # that of subclasses: `prepare_class`
