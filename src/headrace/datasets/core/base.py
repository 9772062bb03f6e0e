"""What is a sample, whatever the format?

`BaseDataset` takes a batch's indices all the way to finished samples: what the mode holds, what the source must read, decode, keep,
transform. A format of one's own is a `Source` and a `decode`.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headrace.datasets.core.checks import as_targets, check_common, check_source
from headrace.datasets.core.filling import BatchFilling
from headrace.datasets.core.making import DatasetMeta, Travelling, describe_call, describe_held, streaming_class
from headrace.datasets.core.reading import OnError
from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.image.augment import chained
from headrace.display import Lines
from headrace.errors import BudgetError, ConfigError, SampleError
from headrace.io.paths import cache_folder
from headrace.memory.anonymous import SharedInt
from headrace.memory.budget import MemoryBudget, Reservation, format_size
from headrace.modes import LoadingMode, ModeName
from headrace.modes.cached import Cached
from headrace.modes.eager import Eager
from headrace.modes.held import Place
from headrace.modes.lazy import Lazy
from headrace.modes.mode import Coming, Mode
from headrace.modes.streaming import WINDOW, Streaming
from headrace.order import EpochOrder, RankBatches, World, detect_world
from headrace.order.epoch import DEFAULT_TURNS
from headrace.order.lanes import lanes_for
from headrace.order.request import BatchRequest
from headrace.order.shares import check_shared_once
from headrace.order.splits import fold_parts, split_parts
from headrace.storage.source import Source

CHUNK_BYTES = 64 << 20
"""Decoded chunks that each process holds where the order does not say how many are of use."""
STREAM_GROUP = 64  # samples that a streaming dataset reads together under a plain DataLoader


class BaseDataset(BatchFilling, Travelling, Dataset[Any], metaclass=DatasetMeta):
    """A map-style dataset over a `Source`, in one of four loading modes; in mode "streaming" an `IterableDataset`.

    For a format of one's own, subclass it, give `super().__init__` a source, and override `decode`. What a sample looks like is
    decided by `assemble`; how what is held becomes the transform's input, by `present`.

    Args:
        source: where the records are.
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
    """May a process that has read from it fork? If not, `Loader` starts workers by forkserver."""
    reads_urls = False
    """True if it is given paths, and so takes the options of `RemoteOptions` too."""
    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    transforms: Callable[[Any, Any], tuple[Any, Any]] | None
    loading_mode: LoadingMode
    seed: int
    return_index: bool
    on_error: OnError
    collate: Callable[[list[Any]], Any] | str | None = None
    """The collate function (or the name of a registered one) that fits these samples, if the default does not."""
    data_path: Any = None
    """The path or paths that it reads, as they were given; None of a dataset that was made of a `Source`."""

    def __init__(
        self,
        source: Source,
        *,
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
        self.on_error = on_error
        self.targets = as_targets(targets, len(source))
        self._source = source
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
        self._chunk_bytes: Reservation | None = None
        self._ahead_bytes: Reservation | None = None
        self._holds_ahead = False
        self._threads = WorkerThreads()
        source.use_threads(self._threads.map)
        self._reset_report()

    # -- what a format overrides

    def held_nbytes(self) -> int | None:
        """Bytes of all samples of the whole dataset when they are held, if that is known without reading them."""
        return None

    def sample_nbytes(self) -> int | None:
        """Bytes of one finished sample, if they are known and the same for all: what a loader plans its buffers by."""
        return None

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """How long each sample is ([n] int64), in tokens or what stands for them, if that is known without reading them."""
        return None

    def held_as(self) -> str:
        """What, besides the record, decides the value that is held: ranks that say the same share it under ``shared="machine"``.

        Default: class and arguments that are no transforms and don't concern loading.

        Raises:
            ConfigError: one of these has no value that could be compared with another process's; override this method then.
        """
        return describe_held(type(self), self._arguments)

    @property
    def holds_encoded(self) -> bool:
        """Do eager and cached hold records, and decode at each access?"""
        return self._hold == "encoded"

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
        if not isinstance(indices, BatchRequest) and any(index < 0 for index in indices):
            indices = [index + len(self) if -len(self) <= index < 0 else index for index in indices]
        is_plain = not isinstance(indices, BatchRequest) and _context is None
        request = indices if isinstance(indices, BatchRequest) else _context_request(indices, self.seed, self.epoch)
        samples, failure = self._samples(request, is_plain)
        if failure is not None and not samples:
            raise self._nothing_readable(failure, len(request))
        return samples

    def _samples(self, request: BatchRequest, is_plain: bool) -> tuple[list[Any], SampleError | None]:
        """The samples of a batch, and the first error among them."""
        values = self._values(self._whole_indices(request))
        failure = next((v for v in values if isinstance(v, SampleError)), None)
        if is_plain and self._is_random:
            self._served.value += len(request)

        def may_repeat() -> bool:
            return is_plain and self._epoch.value < 0 and self._served.value > len(self._source)

        return self._finished(request, values, may_repeat), failure

    def __iter__(self) -> Iterator[Any]:
        """All samples in order; in mode "streaming" this rank's and worker's part of an epoch, block-shuffled, read ahead."""
        if not isinstance(self, IterableDataset):
            for index in range(len(self)):
                yield from self._samples(_context_request([index], self.seed, self.epoch), _context is None)[0]
            return
        world, info = self._world or detect_world(), get_worker_info()
        check_shared_once(self, world.world_size)
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        seed, epoch = (self.seed, self.epoch) if _context is None else (_context.seed, _context.epoch)
        order = self.epoch_order("block", seed, epoch, STREAM_GROUP * world.world_size)
        batches = RankBatches(order, world.rank, world.world_size, STREAM_GROUP)
        for step in range(worker, len(batches), workers):
            self.expect((seed, epoch, worker), range(step, len(batches), workers), batches)
            yield from self._samples(BatchRequest(batches.batch(step).tolist(), seed, epoch, step), _context is None)[0]

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
        chosen = np.asarray(indices).reshape(-1)
        if chosen.dtype == bool and len(chosen) not in (0, len(self)):
            raise IndexError(f"subset: the mask has {len(chosen):,} entries, the dataset {len(self):,} samples")
        if chosen.dtype.kind not in "biu" and len(chosen):
            raise IndexError(f"subset takes indices or a mask, not {chosen.dtype} such as {chosen[0]!r}")
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
        if len(chosen) and not -len(self) <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"subset: indices reach from {chosen.min()} to {chosen.max()}, the dataset has {len(self):,} samples")
        chosen = chosen % max(1, len(self))
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made now where it was closed or stayed behind: views share it
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._chosen, view._fingerprint = self._whole_indices(chosen), None
        if self.targets is not None:
            targets = self.targets
            view.targets = targets[chosen] if isinstance(targets, np.ndarray) else [targets[i] for i in chosen.tolist()]
        view._reset_report()
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
        view._replace_transform(transform)
        view._arguments = {**self._arguments, "transforms" if self.transforms is not None else "transform": transform}
        return view

    def source_of(self, index: int) -> str:
        """Where a sample lies: its path, or file and row."""
        return self._source.location(int(self._whole_indices([range(len(self))[index]])[0]))

    @property
    def fingerprint(self) -> str:
        """A short hash of what the samples are: the same on every machine, in every mode."""
        if self._fingerprint is None:
            self._fingerprint = self._source.fingerprint()
            if self._chosen is not None:
                said = self._fingerprint.encode() + self._chosen.astype("<i8").tobytes()
                self._fingerprint = hashlib.blake2b(said, digest_size=16).hexdigest()
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
        info = get_worker_info()
        left = self.budget.available if self._left_at_spawn is None else self._left_at_spawn
        return left if info is None else left // info.num_workers

    def blocks(self) -> npt.NDArray[np.int64] | None:
        """How many consecutive samples share each block of the storage ([blocks] int64); None: each lies by itself."""
        sizes = self._source.blocks()
        if sizes is None or self._chosen is None:
            return sizes
        block_of = np.repeat(np.arange(len(sizes)), sizes)[self._chosen]
        starts = np.flatnonzero(np.diff(block_of, prepend=-1))
        return np.diff(starts, append=len(block_of)).astype(np.int64)

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
        wanted = nbytes * processes
        if self._chunk_bytes is None and wanted:
            self._chunk_bytes = self.budget.reserve(wanted, "decoded chunks")
        elif self._chunk_bytes is not None:
            self._chunk_bytes.resize(wanted)
        self._source.hold_chunks(nbytes)

    @property
    def has_inputs_in_memory(self) -> bool:
        """Are all samples held, and is nothing left to be done with them that costs more than a copy?"""
        return self.loading_mode is LoadingMode.EAGER and not (self.holds_encoded or self._is_random)

    def expect(self, key: Any, steps: range, batches: RankBatches) -> None:
        """These batches come next: a streaming dataset begins to read them.

        Args:
            key: of the epoch: equal while it is the same.
            steps: of the batches, the next one first.
            batches: of the epoch.
        """
        stretches = batches.order.segments if self._holds_ahead else None
        self.mode.expect(Coming(key, steps, batches.some, stretches), self._source, self._whole_indices)

    def hold_ahead(self, nbytes: int, processes: int = 1) -> None:
        """Each of so many processes may hold `nbytes` of blocks that are far away while it is in the midst of them; 0: it fetches what each
        batch takes instead.

        Raises:
            BudgetError: they don't fit the budget.
        """
        wanted = nbytes * processes
        self._holds_ahead = nbytes > 0
        if self._ahead_bytes is None and wanted:
            self._ahead_bytes = self.budget.reserve(wanted, "blocks fetched ahead")
        elif self._ahead_bytes is not None:
            self._ahead_bytes.resize(wanted)
        if self._source.far is not None:
            self._source.far.hold_prefetched(nbytes)

    @property
    def fetches_blocks(self) -> bool:
        """Do its blocks lie far away, and is there room to hold those that a process is in the midst of, so that each is fetched once?"""
        return self._holds_ahead and self.far_nbytes(1) > 0

    def far_nbytes(self, count: int) -> int:
        """Stored bytes of the so many largest blocks, if they lie far away and are fetched as a whole; else 0."""
        sizes = None if self._source.far is None or self.loading_mode is not LoadingMode.STREAMING else self._source.blocks()
        if sizes is None or not len(sizes):
            return 0
        largest = np.sort(sizes)[-count:]
        return int(-(-self._source.stored_nbytes // len(self._source))) * int(largest.sum())

    @property
    def mode(self) -> Mode:
        """The loading mode at work; made at first use where it stayed behind in a pickle."""
        if self._mode is None:
            self._mode = self._make_mode()
        return self._mode

    # -- inside

    def _replace_transform(self, transform: Any) -> None:
        """Of a new view."""
        setattr(self, "transform" if self.transforms is None else "transforms", chained(transform))

    def _labels(self, stratify: Any) -> Any:
        if stratify is not True:
            return stratify
        if self.targets is None:
            raise ConfigError(f"stratify=True: this {type(self).__name__} has no targets: pass a label for each sample")
        return self.targets

    def _settle(self) -> None:
        self._is_settled = True
        if self._source.block_nbytes:
            self._hold_some_chunks()
        two = self.far_nbytes(2)
        if two:
            self.hold_ahead(min(max(CHUNK_BYTES, two), self.budget.available // 8))
        if self.loading_mode is LoadingMode.STREAMING:
            self.__class__ = streaming_class(type(self))
        if self.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            self.mode  # noqa: B018  # made before any worker is forked, so that all share it

    def _hold_some_chunks(self) -> None:
        """For whoever reads without a Loader, which knows its order."""
        block, budget = self._source.block_nbytes, self.budget
        if block > budget.limit:
            raise BudgetError(
                f"a chunk of {type(self._source).__name__} takes {format_size(block)} when it is decoded, and the memory budget is "
                f"{format_size(budget.limit)}: pack the data again in smaller chunks, or raise max_memory_usage"
            )
        self.hold_chunks(min(max(CHUNK_BYTES, block), budget.available // 8))

    def _make_mode(self) -> Mode:
        n = len(self._source)
        if self.loading_mode is LoadingMode.EAGER:
            threads = None if self._source.thread_safe else 1
            like = None if self.holds_encoded else self.value_like()
            return Eager(n, self._load, self.budget, self.held_nbytes(), self._progress, threads=threads, place=self._place(), like=like)
        if self.loading_mode is LoadingMode.CACHED:
            return Cached(n, self.budget, self._cache_size, self._cache_policy, self.held_nbytes(), self._place())
        if self.loading_mode is LoadingMode.STREAMING:
            return Streaming(min(WINDOW, self.budget.available // 32))  # of each worker
        return Lazy()

    def _place(self) -> Place | None:
        if self._shared == "rank":
            return None
        if not self._is_settled:
            raise ConfigError(
                "shared='machine': samples are read before the constructor is through, and so before it is known what they are"
            )
        world = detect_world()
        key = [self.loading_mode.value, self._source.fingerprint(), "encoded" if self.holds_encoded else "decoded", self.held_as()]
        return Place(cache_folder(self._cache_dir), "\0".join(key), world.local_rank, world.local_world_size)


_context: BatchRequest | None = None


def set_context(request: BatchRequest | None) -> None:
    """The batch that this process works on: it names seed and epoch for datasets inside others, such as `torch.utils.data.Subset`."""
    global _context
    _context = request


def _context_request(indices: Sequence[int], seed: int, epoch: int) -> BatchRequest:
    if _context is not None:
        seed, epoch = _context.seed, _context.epoch
    return BatchRequest(indices, seed, epoch)


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
    """The array as a tensor, over the same memory where it can be, if torch has its dtype; else the array."""
    try:
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except TypeError:
        return array
