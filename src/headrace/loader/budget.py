"""Fits prefetched batches, and the decoded and fetched blocks of each process, into the memory
budget.
"""

from __future__ import annotations

from typing import Any

from headrace.core.ahead import Ahead
from headrace.core.batcher import Batcher, Collating
from headrace.core.dataset import BaseDataset
from headrace.core.held import CHUNK_BYTES, Held
from headrace.core.options import LoadingMode
from headrace.datasets.unnormalized import DevicePixels
from headrace.errors import BudgetError, warn
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, Reasons, inner_datasets
from headrace.loader.plan import Plan
from headrace.memory.budget import MemoryBudget, Reservation, format_size
from headrace.order.lanes import OPEN_BYTES

_WORKING = 16 << 20  # bytes that a process which loads takes beside its batch
_WHAT = "batches on their way"


class LoaderMemory:
    """What one loader takes of its memory budget.

    Args:
        usage: its `max_memory_usage`; None: the dataset's.
        pixels: as for `Fetch`.

    Attributes:
        budget: the loader's own, or the dataset's.
        reservation: for batches; None where their size is not known yet.
        too_large: bytes of a batch of which too many are on their way; 0: they fit.
    """

    def __init__(
        self,
        dataset: Any,
        usage: Any,
        collating: Collating,
        local_world_size: int,
        pixels: DevicePixels | None,
    ) -> None:
        self.reservation: Reservation | None = None
        self.too_large: int = 0
        self._dataset = dataset
        self._pixels = pixels
        self._datasets = inner_datasets(dataset)
        is_own = isinstance(dataset, BaseDataset)
        self._is_straight = is_own and Batcher(dataset, collating).writes_in_place
        if usage is None and is_own:
            self.budget: MemoryBudget = dataset.budget
        else:
            self.budget = MemoryBudget(usage or 0.8, local_world_size=local_world_size)

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
        beside = min(_WORKING, self.budget.limit // 20)
        beside += batch // 2 if self._is_straight else batch * 3 // 2
        for dataset in self._datasets:
            ahead = dataset.value_source.find(Ahead)
            if ahead is not None:
                beside += ahead.window
        return (batch + pinned) * slots + max(1, workers) * beside

    def _shrink_caches(self, needed: int, datasets: list[BaseDataset]) -> int:
        """Has the caches of datasets shrink where less of the budget is left than needed; returns
        what is left then.
        """
        for dataset in datasets:
            short = needed - self.budget.available
            held = dataset.value_source.find(Held)
            if short > 0 and held is not None:
                held.shrink(short)
        return self.budget.available

    def fit(self, config: DataLoaderConfig, reasons: Reasons) -> DataLoaderConfig:
        """Lowers `prefetch_factor`, and then `num_workers`, until batches fit that are as large as
        samples are known to be, or as one was that was too large; says so, and reserves them.

        Raises:
            BudgetError: not even without workers do they fit.
        """
        batch = self.too_large
        if not batch:
            sample = None if self._pixels is None else self._pixels.sample_nbytes()
            if sample is None and isinstance(self._dataset, BaseDataset):
                sample = self._dataset.sample_nbytes()
            if sample is None:
                return config
            batch = sample * (config.batch_size or 1)
        self.close()
        self.too_large = 0
        workers = config.num_workers or 0
        prefetch = config.prefetch_factor or 1
        # caches leave room for one batch a worker
        left = self._shrink_caches(self._needed(config, batch, workers, 1), self._datasets)
        choices = [(workers, p) for p in range(prefetch, 0, -1)]
        choices += [(w, 1) for w in range(workers - 1, -1, -1)]
        for fitting in choices:
            needed = self._needed(config, batch, *fitting)
            if needed <= left:
                break
        else:
            raise BudgetError(
                f"a batch of {config.batch_size} samples takes {format_size(batch)}, two are held "
                f"while the next one is made ({format_size(needed)} in all), and "
                f"{format_size(left)} are left of the budget: use a smaller batch_size, or raise "
                f"max_memory_usage.\n{self.budget.explain()}"
            )
        self.reservation = self.budget.reserve(needed, _WHAT)
        if not workers or fitting == choices[0]:
            return config
        sizes = f"{format_size(batch)} a batch, {format_size(left)} left of the budget"
        warn(
            f"num_workers={workers} x prefetch_factor={prefetch} don't fit the memory budget "
            f"({sizes}): lowered to {fitting[0]} x {fitting[1]}; use a smaller batch_size, or "
            "raise max_memory_usage"
        )
        reason = f"lowered to fit the memory budget: {sizes}"
        reasons["prefetch_factor"] = reasons["num_workers"] = reason
        if not fitting[0]:
            return config.with_(num_workers=0, **NO_WORKERS)
        return config.with_(num_workers=fitting[0], prefetch_factor=fitting[1])

    def reserve_measured(self, config: DataLoaderConfig, batch: int) -> None:
        """Reserves memory for batches, by the size of the first one."""
        if not batch:
            return
        workers = config.num_workers or 0
        left = self._shrink_caches(self._needed(config, batch, workers, 1), self._datasets)
        needed = self._needed(config, batch, workers, config.prefetch_factor or 1)
        self.reservation = self.budget.reserve(min(needed, left), _WHAT)
        if needed > left:
            self.too_large = batch
            warn(
                f"queued batches of {format_size(batch)} take {format_size(needed)}, but "
                f"{format_size(left)} are left of the memory budget: in the next epoch there will "
                "be fewer workers or prefetched batches; use a smaller batch_size or "
                "prefetch_factor, or raise max_memory_usage"
            )

    def close(self) -> None:
        """Releases what is reserved for batches."""
        if self.reservation is not None:
            self.reservation.close()
            self.reservation = None

    def reserve_blocks(self, config: DataLoaderConfig, plan: Plan) -> None:
        """Reserves memory for the decoded chunks that each process caches: under a block shuffle
        all that it has open, so that each is decoded once, or a small table as a whole; else some.
        The same for blocks that are fetched as a whole.

        Raises:
            BudgetError: the chunks of a block shuffle don't fit the budget; or not even one does.
        """
        workers = config.num_workers or 0
        processes = max(1, workers)
        order = plan.parameters()
        blocks = 0  # that one process has open under a block shuffle
        if order["shuffle"] == "block":
            world = config.world_size or 1
            drawn = order.get("interleave") or 1
            own = order.get("turns") or 1
            if drawn % world == 0:
                drawn //= world
            if own % processes == 0:
                own //= processes
            blocks = drawn * (own + 1)  # with those that a batch may end and begin
        for dataset in self._datasets:
            self._reserve_fetched(dataset, workers, blocks)
            if dataset.sample_source.block_nbytes:
                self._reserve_chunks(dataset, workers, blocks, order["shuffle"] is True)

    def _reserve_chunks(
        self, dataset: BaseDataset, workers: int, blocks: int, is_random: bool
    ) -> None:
        processes = max(1, workers)
        held = dataset.block_memory
        held.hold_chunks(0, owner=self)
        if dataset.loading_mode is LoadingMode.EAGER:
            return
        block = dataset.sample_source.block_nbytes
        needed = block * max(1, blocks)
        wanted = needed
        if not blocks:
            wanted = max(block, CHUNK_BYTES)
        if dataset.loading_mode is LoadingMode.LAZY and (blocks or is_random):
            whole = dataset.sample_source.decoded_nbytes
            room = self.budget.available // processes // 2
            # later epochs find a small table where all processes together have no more of it than
            # blocks are open at most, and half of the budget has room for that
            if whole <= room and (is_random or whole * processes <= OPEN_BYTES):
                wanted = max(wanted, whole)
            elif is_random:
                warn(
                    f"shuffle=True: the blocks of {type(dataset).__name__} take "
                    f"{format_size(whole)} when they are decoded, and {format_size(room)} (half of "
                    f"the memory budget, for each of {processes} processes) have no room for all: "
                    "a block is decoded for nearly every sample. Use shuffle='block', or raise "
                    "max_memory_usage, or store the data in a form in which single samples can be "
                    "read"
                )
        left = self._shrink_caches(wanted * processes, [dataset]) // processes
        if needed > left:
            raise BudgetError(
                f"{type(dataset).__name__}: {max(1, blocks)} blocks at a time take "
                f"{format_size(needed)} when they are decoded, in each of {processes} processes, "
                f"and {format_size(left)} a process are left of the budget: use fewer workers, "
                "smaller chunks, a smaller interleave or turns of shuffle='block', or raise "
                f"max_memory_usage.\n{self.budget.explain()}"
            )
        held.hold_chunks(min(wanted, left if blocks else left // 2), workers, owner=self)

    def _reserve_fetched(self, dataset: BaseDataset, workers: int, blocks: int) -> None:
        """Of remote blocks that are fetched as a whole. Where they don't fit, each batch fetches
        its own ranges: more requests, and the same samples.
        """
        processes = max(1, workers)
        held = dataset.block_memory
        held.prefetch(0, owner=self)
        wanted = held.remote_nbytes(blocks) if blocks else 0
        left = self.budget.available // processes
        if wanted > left:
            warn(
                f"shuffle='block': {blocks} blocks that each of {processes} processes would hold "
                f"take {format_size(wanted)}, and {format_size(left)} a process are left of the "
                "budget: samples are fetched one by one instead, in many more requests. Use a "
                "smaller interleave or turns, fewer workers, or raise max_memory_usage"
            )
            wanted = 0
        held.prefetch(wanted, workers, owner=self)
