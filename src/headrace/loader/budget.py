"""Fits prefetched batches, and the decoded and fetched blocks of each process, into the memory
budget.
"""

from __future__ import annotations

from typing import Any

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.budgeting import CHUNK_BYTES
from headrace.datasets.core.ways import choose_way
from headrace.datasets.unnormalized import PixelBatches
from headrace.errors import BudgetError, warn
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, Reasons
from headrace.loader.data import inner_datasets
from headrace.loader.plan import Plan
from headrace.memory.budget import MemoryBudget, Reservation, format_size
from headrace.modes import LoadingMode
from headrace.order.lanes import OPEN_BYTES

_WORKING = 16 << 20  # bytes that a process which loads takes beside its batch
_WHAT = "batches on their way"


class LoaderMemory:
    """What one loader takes of its memory budget; `usage` is its `max_memory_usage`, None for
    the dataset's. (`pixels`: as for `Fetch`.)
    """

    def __init__(
        self,
        dataset: Any,
        usage: Any,
        collating: Collating,
        local_world_size: int,
        pixels: PixelBatches | None,
    ) -> None:
        self._dataset, self._usage, self._ranks, self._pixels = (
            dataset,
            usage,
            local_world_size,
            pixels,
        )
        self._datasets = inner_datasets(dataset)
        self._is_straight = (
            isinstance(dataset, BaseDataset) and choose_way(dataset, collating).writes_in_place
        )
        self._reserved: Reservation | None = None
        self._too_large = 0  # bytes of a batch of which too many are on their way

    @property
    def budget(self) -> MemoryBudget:
        """The budget: the loader's own, or the dataset's."""
        if self._usage is None and isinstance(self._dataset, BaseDataset):
            return self._dataset.budget
        return MemoryBudget(
            0.8 if self._usage is None else self._usage, local_world_size=self._ranks
        )

    @property
    def reserved(self) -> int | None:
        """Bytes reserved for batches; None where their size is not known yet."""
        return None if self._reserved is None else self._reserved.nbytes

    def _needed(self, config: DataLoaderConfig, batch: int, workers: int, prefetch: int) -> int:
        """Bytes of all batches on their way, each of so many bytes, and of what they are made of.

        The ring has a slot for each batch that is handed out, and two that the user holds, or that
        are copied to a device. Pinned batches have as many buffers once more: torch keeps those
        that it has made, and rounds each up to a power of two. Each process that loads has beside
        its slot what decoders and allocators take (16 MiB, or 5 % of a small budget:
        docs/memory.md), the samples before they are stacked and some of what they were decoded from
        (by measurement a batch and a half; half a batch where they are written straight into it),
        and what it prefetches.
        """
        slots = workers * prefetch + 2 if workers else 2
        pinned = 1 << (batch - 1).bit_length() if config.pin_memory and batch else 0
        prefetched = sum(
            d.mode.window for d in self._datasets if d.loading_mode is LoadingMode.STREAMING
        )
        beside = (
            min(_WORKING, self.budget.limit // 20)
            + (batch // 2 if self._is_straight else batch * 3 // 2)
            + prefetched
        )
        return (batch + pinned) * slots + max(1, workers) * beside

    def _shrink_caches(self, needed: int, datasets: list[BaseDataset] | None = None) -> None:
        """Has the caches of datasets (None: all) shrink where less of the budget is left than
        needed.
        """
        for dataset in self._datasets if datasets is None else datasets:
            short = needed - self.budget.available
            if short > 0 and dataset.loading_mode is LoadingMode.CACHED:
                dataset.mode.shrink(short)

    def fit(self, config: DataLoaderConfig, reasons: Reasons) -> DataLoaderConfig:
        """The config with as many batches on their way as fit; unchanged where the size of a
        sample is not known.
        """
        sample = None if self._pixels is None else self._pixels.sample_nbytes()
        if sample is None and isinstance(self._dataset, BaseDataset):
            sample = self._dataset.sample_nbytes()
        return (
            config
            if sample is None
            else self._fit(config, sample * (config.batch_size or 1), reasons)
        )

    def _fit(self, config: DataLoaderConfig, batch: int, reasons: Reasons) -> DataLoaderConfig:
        """Lowers `prefetch_factor`, and then `num_workers`, until batches of so many bytes fit;
        says so, and reserves them.

        Raises:
            BudgetError: not even without workers do they fit.
        """
        workers, prefetch, budget = (
            config.num_workers or 0,
            config.prefetch_factor or 1,
            self.budget,
        )
        self._shrink_caches(self._needed(config, batch, workers, 1))
        left = budget.available
        choices = [(workers, p) for p in range(prefetch, 0, -1)] + [
            (w, 1) for w in range(workers - 1, -1, -1)
        ]
        fitting = next(
            (choice for choice in choices if self._needed(config, batch, *choice) <= left), None
        )
        if fitting is None:
            least = format_size(self._needed(config, batch, 0, 1))
            raise BudgetError(
                f"a batch of {config.batch_size} samples takes {format_size(batch)}, two are held "
                f"while the next one is made ({least} in "
                f"all), and {format_size(left)} are left of the budget: use a smaller batch_size, "
                "or raise max_memory_usage.\n"
                f"{budget.explain()}"
            )
        self._reserved = budget.reserve(self._needed(config, batch, *fitting), _WHAT)
        if not workers or fitting == (workers, prefetch):
            return config
        sizes = f"{format_size(batch)} a batch, {format_size(left)} left of the budget"
        warn(
            f"num_workers={workers} x prefetch_factor={prefetch} don't fit the memory budget "
            f"({sizes}): lowered to "
            f"{fitting[0]} x {fitting[1]}; use a smaller batch_size, or raise max_memory_usage"
        )
        reasons["prefetch_factor"] = reasons["num_workers"] = (
            f"lowered to fit the memory budget: {sizes}"
        )
        if not fitting[0]:
            return config.with_(num_workers=0, **NO_WORKERS)
        return config.with_(num_workers=fitting[0], prefetch_factor=fitting[1])

    def reserve_measured(self, config: DataLoaderConfig, batch: int) -> None:
        """Reserves memory for batches, where the first one says how large they are."""
        if self._reserved is not None or not batch:
            return
        workers, budget = config.num_workers or 0, self.budget
        self._shrink_caches(self._needed(config, batch, workers, 1))
        needed, available = (
            self._needed(config, batch, workers, config.prefetch_factor or 1),
            budget.available,
        )
        self._reserved = budget.reserve(min(needed, available), _WHAT)
        if needed > available:
            self._too_large = batch
            warn(
                f"batches of {format_size(batch)} take {format_size(needed)} on their way, and "
                f"{format_size(available)} are left "
                "of the memory budget: in the next epoch there will be fewer; use a smaller "
                "batch_size or prefetch_factor, or raise "
                "max_memory_usage"
            )

    def refit(self, config: DataLoaderConfig, reasons: Reasons) -> DataLoaderConfig | None:
        """Before an epoch: the config that fits, where the first batch of the last one was too
        large; else None.
        """
        if not self._too_large or self._reserved is None:
            return None
        batch, self._too_large = self._too_large, 0
        self.close()
        return self._fit(config, batch, reasons)

    def close(self) -> None:
        """Gives back what is reserved for batches."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def reserve_blocks(self, config: DataLoaderConfig, plan: Plan) -> None:
        """Reserves memory for the decoded chunks that each process caches: under a block shuffle
        all that it has open, so that each is decoded once, or a small table as a whole; else some.
        The same for blocks that are fetched as a whole.

        Raises:
            BudgetError: the chunks of a block shuffle don't fit the budget; or not even one does.
        """
        processes = max(1, config.num_workers or 0)
        lanes = _Lanes(plan, processes, config.world_size or 1)
        for dataset in self._datasets:
            self._reserve_fetched(dataset, processes, lanes)
            block = dataset.sample_source.block_nbytes
            if not block:
                continue
            blocks = dataset.block_memory
            blocks.hold_chunks(0, owner=self)
            if dataset.loading_mode is LoadingMode.EAGER:
                continue
            # is reserved for loaders of views of the same data, and shared with them
            shared = blocks.chunk_nbytes
            free = self.budget.available + shared
            if lanes.is_block:
                wanted = max(block * lanes.blocks, self._small(dataset, processes, free))
            else:
                wanted = max(block, CHUNK_BYTES, self._decoded(dataset, processes, lanes, free))
            self._shrink_caches(wanted * processes - shared, [dataset])
            left = (self.budget.available + shared) // processes
            if lanes.is_block and wanted > left:
                raise BudgetError(
                    f"shuffle='block': each of {processes} processes has {lanes.open} blocks open "
                    "at a time, which take "
                    f"{format_size(wanted)} when they are decoded, and {format_size(left)} a "
                    "process are left of the budget: use a smaller "
                    f"{lanes.smaller}, fewer workers, smaller chunks, or raise "
                    f"max_memory_usage.\n{self.budget.explain()}"
                )
            if block > left:
                raise BudgetError(
                    f"samples lie in chunks that take {format_size(block)} when they are decoded, "
                    f"in each of {processes} processes, and "
                    f"{format_size(left)} a process are left of the budget: use fewer workers, "
                    "write smaller chunks, or raise "
                    f"max_memory_usage.\n{self.budget.explain()}"
                )
            blocks.hold_chunks(
                min(wanted, left if lanes.is_block else left // 2), processes, owner=self
            )

    def _small(self, dataset: BaseDataset, processes: int, free: int) -> int:
        """Bytes of all blocks, if they may stay decoded under a block shuffle, so that later epochs
        find them: where all processes together have no more of them than blocks are open at most,
        and half of the budget has room for that; else 0.
        """
        decoded = (
            dataset.sample_source.decoded_nbytes if dataset.loading_mode is LoadingMode.LAZY else 0
        )
        return decoded if decoded * processes <= min(OPEN_BYTES, free // 2) else 0

    def _decoded(self, dataset: BaseDataset, processes: int, lanes: _Lanes, free: int) -> int:
        """Bytes of all blocks, if a random order comes back to each of them until its end, and half
        of the budget has room for them in each process; else 0.
        """
        decodes_again = lanes.is_random and dataset.loading_mode is LoadingMode.LAZY
        decoded = dataset.sample_source.decoded_nbytes if decodes_again else 0
        left = free // processes // 2
        if decoded <= left:
            return decoded
        warn(
            f"shuffle=True: the blocks of {type(dataset).__name__} take {format_size(decoded)} "
            "when they are decoded, and "
            f"{format_size(left)} (half of the memory budget, for each of {processes} processes) "
            "have no room for all: a block is decoded "
            "for nearly every sample. Use shuffle='block', or raise max_memory_usage, or store the "
            "data in a form in which single samples can be read"
        )
        return 0

    def _reserve_fetched(self, dataset: BaseDataset, processes: int, lanes: _Lanes) -> None:
        """The same for remote blocks that are fetched as a whole. Where they don't fit, each batch
        fetches its own ranges: more requests, and the same samples.
        """
        dataset.block_memory.prefetch(0, owner=self)
        wanted = dataset.block_memory.remote_nbytes(lanes.blocks) if lanes.is_block else 0
        left = (self.budget.available + dataset.block_memory.prefetched_nbytes) // processes
        if wanted > left:
            warn(
                f"shuffle='block': each of {processes} processes would hold {lanes.open} blocks "
                "that it has fetched, which take "
                f"{format_size(wanted)}, and {format_size(left)} a process are left of the "
                "budget: samples are fetched one by one instead, "
                f"in many more requests. Use a smaller {lanes.smaller}, fewer workers, or raise "
                "max_memory_usage"
            )
            wanted = 0
        dataset.block_memory.prefetch(wanted, processes, owner=self)


class _Lanes:
    """The lanes of a block shuffle that one process has open."""

    def __init__(self, plan: Plan, processes: int, world: int) -> None:
        order = plan.parameters()
        interleave, turns = order.get("interleave") or 1, order.get("turns") or 1
        drawn = interleave // world if interleave % world == 0 else interleave
        own = turns // processes if turns % processes == 0 else turns
        self.is_block: bool = order.get("shuffle") == "block"
        self.is_random: bool = order.get("shuffle") is True
        self.open: int = drawn * own  # blocks of these lanes
        self.blocks: int = drawn * (own + 1)  # the same with those that a batch may end and begin
        # options that make them fewer
        self.smaller: str = f"interleave (now {interleave}) or turns (now {turns})"
