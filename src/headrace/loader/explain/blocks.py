"""Counts how often an epoch decodes or fetches the blocks of the storage, and finds options that save some of it.

Where chunks are decoded, or remote blocks fetched, as a whole, each process that has samples of one does so. The numbers follow from the
order (see `order/visits.py`), for all ranks and workers together; only where batches take from everywhere (a full shuffle, weights), they
are drawn from some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.base import BaseDataset
from headrace.errors import BudgetError
from headrace.loader.data import inner_datasets
from headrace.loader.plan import OrderPlan, Plan
from headrace.memory.budget import format_size
from headrace.modes import LoadingMode
from headrace.order import EpochOrder, Order, RankBatches, ResizedOrder
from headrace.order.visits import Visits, count_visits

_LOOKED_AT = 32  # batches that take from everywhere
_BETTER = 0.95  # of the decodes: what saves less is not worth a change
_MOST = 0.9  # of what can be saved: what saves so much is as good

Sizes = npt.NDArray[np.int64]


def is_laned(plan: Plan) -> bool:
    """True if the order is a block shuffle of known blocks."""
    return isinstance(plan, OrderPlan) and plan.parameters().get("interleave") is not None


def explain_blocks(plan: Plan, dataset: Any, workers: int) -> Iterator[str]:
    """Lines about the blocks of a headrace dataset's storage; none where it has none, or where they don't matter."""
    if not isinstance(plan, OrderPlan) or not plan.batches.steps:
        return
    if not isinstance(dataset, BaseDataset):
        if any(inner.sample_source.block_nbytes for inner in inner_datasets(dataset)):
            yield f"blocks: those of the dataset inside can't be seen through {type(dataset).__name__}, and are decoded for each batch"
            yield "  views that headrace makes (dataset.subset, dataset.split) know their blocks"
        return
    nbytes = dataset.sample_source.block_nbytes
    if dataset.loading_mode is LoadingMode.EAGER or not (nbytes or is_laned(plan)):
        return
    try:
        sizes = dataset.blocks()
    except BudgetError:  # too many to be listed, which a full shuffle needs no list of
        return
    if sizes is None or not len(sizes):
        return
    is_fetched = not nbytes and dataset.block_memory.prefetches_whole and dataset.block_memory.remote_nbytes(1) > 0 and is_laned(plan)
    how = f", of {format_size(nbytes)} each when they are decoded" if nbytes else ", each fetched as a whole" if is_fetched else ""
    yield f"blocks: {len(sizes):,} of the storage{how}"
    if not nbytes and not is_fetched:
        yield "  samples are read one by one: none is decoded with its whole block, and so none twice"
        return
    job = _Job(dataset, sizes, workers, plan.batches, ("fetched", "fetches at most") if is_fetched else ("decoded", "decodes"))
    if job.order is not None and job.order.shuffle is not True:
        yield from job.by_visits()
    else:
        yield from job.by_batches()


class _Job:
    """What ranks and workers do with the blocks of a dataset; `words` say what becomes of a block, and how often."""

    def __init__(self, dataset: BaseDataset, sizes: Sizes, workers: int, batches: RankBatches, words: tuple[str, str]) -> None:
        self._dataset, self._sizes, self._workers, self._batches = dataset, sizes, workers, batches
        self._done, self._times = words
        # that all samples stand in, as far as they do: of an epoch, or of a whole pass where the epoch is longer or shorter
        self.order, self.span = _whole(batches.order, dataset), "an epoch"
        if self.order is not None and self.order is not batches.order:
            self._batches, self.span = self._with(self.order), "a pass over all samples"

    def _with(self, order: EpochOrder) -> RankBatches:
        """The same ranks and batches of another order."""
        old = self._batches
        return RankBatches(order, old.rank, old.world_size, old.batch_size, old.drop_last, old.pad)

    def by_visits(self) -> Iterator[str]:
        """Of an order that goes through blocks in stretches."""
        visits = count_visits(self._batches, self._workers, self._sizes)
        decodes = visits.readings + visits.repeated
        how = f"{decodes:,} {self._times} {self.span} over all ranks and workers, {_rate(visits)}{self._unheld}"
        alone = "one process" if visits.processes == 1 else f"{visits.processes:.2f} processes on average"
        yield f"  each is {self._done} by {alone}: {how}"
        if visits.cut:
            yield f"  {visits.cut:,} of them are cut by the end of a lane, and {self._done} for each part"
        if visits.processes > 1:
            yield from (f"  {line}" for line in self._advice(visits))

    def by_batches(self) -> Iterator[str]:
        """Of an order that takes each batch from everywhere: how much of it the cache of a process spares depends on its size."""
        batches, edges = self._batches, np.cumsum(self._sizes)
        count = min(_LOOKED_AT, batches.steps)
        drawn = [len(np.unique(np.searchsorted(edges, batches.batch(step), side="right"))) for step in range(count)]
        each = sum(drawn) / count
        total = round(each * batches.steps * batches.world_size)
        what = "a full shuffle" if self.order is not None else "this order"
        yield (
            f"  {what} draws a batch from {each:.1f} blocks, which are decoded for it: about {total:,} decodes {self.span} over all ranks "
            f"and workers, {total / len(self._sizes):.2f} a block, less what a process has still in memory{self._unheld}"
        )
        if self.order is not None:
            change = self._to_blocks()
            changed = self._changed(change)
            if changed.readings < _BETTER * total:
                yield f"  {_would(change, changed)}"

    @property
    def _unheld(self) -> str:
        return ", less what is cached" if self._dataset.loading_mode is LoadingMode.CACHED else ""

    def _advice(self, visits: Visits) -> Iterator[str]:
        order, world, workers = self._laned, self._batches.world_size, self._workers
        if order.shuffle is False:
            yield "since batches go to ranks and workers in turn, wherever a block ends"
        else:
            reasons = []
            if workers > 1 and order.turns % workers:
                reasons.append(f"turns={order.turns} is no multiple of num_workers={workers}")
            if order.interleave % world:
                reasons.append(f"interleave={order.interleave} is no multiple of world_size={world}")
            if reasons:
                yield f"since {' and '.join(reasons)}"
        for change, changed in self._remedies(visits):
            yield _would(change, changed)

    @property
    def _laned(self) -> EpochOrder:
        assert self.order is not None
        return self.order

    def _remedies(self, visits: Visits) -> list[tuple[dict[str, Any], Visits]]:
        """Changes of options, each with what it would lead to: the least changes among those that save most."""
        outcomes = [(change, self._changed(change)) for change in self._changes()]
        best = min((after.readings for _, after in outcomes), default=visits.readings)
        enough = min(visits.readings - _MOST * (visits.readings - best), _BETTER * visits.readings)
        good = [(change, after) for change, after in outcomes if after.readings <= enough]
        least = min((len(change) for change, _ in good), default=0)
        return [(change, after) for change, after in good if len(change) == least]

    def _changes(self) -> list[dict[str, Any]]:
        """What may help, one thing at a time and then together."""
        order, world, workers = self._laned, self._batches.world_size, self._workers
        if order.shuffle is False:
            return [*([{"num_workers": 1}] if workers > 1 else []), self._to_blocks()]
        of_workers: list[dict[str, Any]] = []
        if workers > 1 and order.turns % workers:
            of_workers.append({"num_workers": _fitting(workers, order.turns)})
            of_workers.append({"turns": max(workers, order.turns // workers * workers)})
        of_ranks: list[dict[str, Any]] = []
        if order.interleave % world:
            of_ranks.append({"interleave": max(world, order.interleave // world * world)})
        return [*of_workers, *of_ranks, *({**a, **b} for a in of_workers for b in of_ranks)]

    def _to_blocks(self) -> dict[str, Any]:
        """The change to a block shuffle, with a number of workers that fits its turns."""
        fitting = _fitting(self._workers, self._in_blocks().turns)
        return {"shuffle": "block"} if fitting == max(1, self._workers) else {"shuffle": "block", "num_workers": fitting}

    def _in_blocks(self) -> EpochOrder:
        order = self._laned
        return self._dataset.epoch_order("block", order.seed, order.epoch, order.global_batch)

    def _changed(self, change: dict[str, Any]) -> Visits:
        """What a change would lead to."""
        order = self._laned
        if "shuffle" in change:
            order = self._in_blocks()
        elif order.shuffle == "block":
            order = EpochOrder(
                order.n, shuffle="block", seed=order.seed, epoch=order.epoch, blocks=self._sizes, global_batch=order.global_batch,
                interleave=change.get("interleave", order.interleave), turns=change.get("turns", order.turns),
            )  # fmt: skip
        return count_visits(self._with(order), change.get("num_workers", self._workers), self._sizes)


def _whole(order: Order, dataset: BaseDataset) -> EpochOrder | None:
    """The order of all samples that an epoch is; or that it is a part, or a multiple, of; None where samples are drawn."""
    if isinstance(order, EpochOrder):
        return order
    if not isinstance(order, ResizedOrder):
        return None
    whole = order.parameters()
    return dataset.epoch_order(whole["shuffle"], order.seed, order.epoch, order.global_batch, whole["interleave"], whole["turns"])


def _rate(visits: Visits) -> str:
    return f"{(visits.readings + visits.repeated) / max(1, visits.blocks):.2f} a block"


def _would(change: dict[str, Any], changed: Visits) -> str:
    other = "" if set(change) == {"num_workers"} else " (another order of samples)"
    return f"{', '.join(f'{name}={value!r}' for name, value in change.items())} would make it {_rate(changed)}{other}"


def _fitting(workers: int, turns: int) -> int:
    """The largest number of workers, up to this, that divides the turns."""
    return max(w for w in range(1, max(1, workers) + 1) if turns % w == 0)
