"""How often does an epoch decode the blocks of the storage, and what would make it less?

Where chunks are decoded as a whole, each process that has samples of one decodes it. The numbers follow from the order (see
`order/visits.py`), for all ranks and workers together; only for a full shuffle, whose batches take from everywhere, they are drawn from
some of its batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.base import BaseDataset
from headrace.errors import BudgetError
from headrace.loader.batches import OrderPlan, Plan
from headrace.loader.fetch import inner_datasets
from headrace.memory.budget import format_size
from headrace.modes import LoadingMode
from headrace.order import EpochOrder, RankBatches
from headrace.order.visits import Visits, count_visits

_LOOKED_AT = 32  # batches of a full shuffle
_BETTER = 0.95  # of the decodes: what saves less is not worth a change
_MOST = 0.9  # of what can be saved: what saves so much is as good

Sizes = npt.NDArray[np.int64]


def is_laned(plan: Plan) -> bool:
    """Is it the order of a block shuffle, by blocks that there are?"""
    return isinstance(plan, OrderPlan) and plan.parameters().get("interleave") is not None


def explain_blocks(plan: Plan, dataset: Any, workers: int) -> Iterator[str]:
    """Lines about the blocks of a headrace dataset's storage; none where it has none, or where they don't matter."""
    if not isinstance(plan, OrderPlan) or not plan.batches.steps:
        return
    if not isinstance(dataset, BaseDataset):
        if any(inner.block_nbytes for inner in inner_datasets(dataset)):
            yield f"blocks: those of the dataset inside can't be seen through {type(dataset).__name__}, and are decoded for each batch"
            yield "  views that headrace makes (dataset.subset, dataset.split) know their blocks"
        return
    nbytes = dataset.block_nbytes
    if dataset.loading_mode is LoadingMode.EAGER or not (nbytes or is_laned(plan)):
        return
    try:
        sizes = dataset.blocks()
    except BudgetError:  # too many to be listed, which a full shuffle needs no list of
        return
    if sizes is None or not len(sizes):
        return
    batches = plan.batches
    yield f"blocks: {len(sizes):,} of the storage" + (f", of {format_size(nbytes)} each when they are decoded" if nbytes else "")
    if not nbytes:
        yield "  samples are read one by one: none is decoded with its whole block, and so none twice"
    elif is_laned(plan) or batches.order.shuffle is False:
        yield from _by_visits(batches, workers, sizes, dataset)
    else:
        yield from _of_full_shuffle(batches, workers, sizes, dataset)


def _by_visits(batches: RankBatches, workers: int, sizes: Sizes, dataset: BaseDataset) -> Iterator[str]:
    visits = count_visits(batches, workers, sizes)
    how = f"{visits.readings + visits.repeated:,} decodes an epoch over all ranks and workers, {_rate(visits)}{_unheld(dataset)}"
    if visits.processes == 1:
        yield f"  each is decoded by one process: {how}"
    else:
        yield f"  each is decoded by {visits.processes:.2f} processes on average: {how}"
    if visits.cut:
        yield f"  {visits.cut:,} of them are cut by the end of a lane, and decoded for each part"
    if visits.processes > 1:
        yield from (f"  {line}" for line in _advice(batches, workers, sizes, visits, dataset))


def _rate(visits: Visits) -> str:
    return f"{(visits.readings + visits.repeated) / max(1, visits.blocks):.2f} a block"


def _unheld(dataset: BaseDataset) -> str:
    return ", less what is held" if dataset.loading_mode is LoadingMode.CACHED else ""


def _advice(batches: RankBatches, workers: int, sizes: Sizes, visits: Visits, dataset: BaseDataset) -> Iterator[str]:
    order, world = batches.order, batches.world_size
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
    for change, changed in _remedies(batches, workers, sizes, visits, dataset):
        yield _would(change, changed)


def _would(change: dict[str, Any], changed: Visits) -> str:
    other = "" if set(change) == {"num_workers"} else " (another order of samples)"
    return f"{', '.join(f'{name}={value!r}' for name, value in change.items())} would make it {_rate(changed)}{other}"


def _remedies(
    batches: RankBatches, workers: int, sizes: Sizes, visits: Visits, dataset: BaseDataset
) -> list[tuple[dict[str, Any], Visits]]:
    """Changes of options, each with what it would lead to: the least changes among those that save most."""
    found = [(change, _changed(batches, workers, sizes, dataset, change)) for change in _changes(batches, workers, dataset)]
    best = min((after.readings for _, after in found), default=visits.readings)
    enough = min(visits.readings - _MOST * (visits.readings - best), _BETTER * visits.readings)
    good = [(change, after) for change, after in found if after.readings <= enough]
    least = min((len(change) for change, _ in good), default=0)
    return [(change, after) for change, after in good if len(change) == least]


def _changes(batches: RankBatches, workers: int, dataset: BaseDataset) -> list[dict[str, Any]]:
    """What may help, one thing at a time and then together."""
    order, world = batches.order, batches.world_size
    if order.shuffle is False:
        return [*([{"num_workers": 1}] if workers > 1 else []), _to_blocks(batches, workers, dataset)]
    of_workers: list[dict[str, Any]] = []
    if workers > 1 and order.turns % workers:
        of_workers.append({"num_workers": _fitting(workers, order.turns)})
        of_workers.append({"turns": max(workers, order.turns // workers * workers)})
    of_ranks: list[dict[str, Any]] = []
    if order.interleave % world:
        of_ranks.append({"interleave": max(world, order.interleave // world * world)})
    return [*of_workers, *of_ranks, *({**a, **b} for a in of_workers for b in of_ranks)]


def _fitting(workers: int, turns: int) -> int:
    """The largest number of workers, up to this, that divides the turns."""
    return max(w for w in range(1, max(1, workers) + 1) if turns % w == 0)


def _to_blocks(batches: RankBatches, workers: int, dataset: BaseDataset) -> dict[str, Any]:
    """The change to a block shuffle, with a number of workers that fits its turns."""
    order = batches.order
    fitting = _fitting(workers, dataset.epoch_order("block", order.seed, order.epoch, order.global_batch).turns)
    return {"shuffle": "block"} if fitting == max(1, workers) else {"shuffle": "block", "num_workers": fitting}


def _changed(batches: RankBatches, workers: int, sizes: Sizes, dataset: BaseDataset, change: dict[str, Any]) -> Visits:
    return count_visits(_with(batches, sizes, dataset, change), change.get("num_workers", workers), sizes)


def _with(batches: RankBatches, sizes: Sizes, dataset: BaseDataset, change: dict[str, Any]) -> RankBatches:
    """The same epoch in the order that a change leads to."""
    order = batches.order
    if "shuffle" in change:
        other = dataset.epoch_order("block", order.seed, order.epoch, order.global_batch)
    elif order.shuffle == "block":
        interleave, turns = change.get("interleave", order.interleave), change.get("turns", order.turns)
        other = EpochOrder(
            order.n, shuffle="block", seed=order.seed, epoch=order.epoch, blocks=sizes, global_batch=order.global_batch,
            interleave=interleave, turns=turns,
        )  # fmt: skip
    else:
        return batches
    return RankBatches(other, batches.rank, batches.world_size, batches.batch_size, batches.drop_last, batches.pad)


def _of_full_shuffle(batches: RankBatches, workers: int, sizes: Sizes, dataset: BaseDataset) -> Iterator[str]:
    """What each batch decodes by itself: how much of it the cache of a process spares depends on its size."""
    edges = np.cumsum(sizes)
    some = min(_LOOKED_AT, batches.steps)
    drawn = [len(np.unique(np.searchsorted(edges, batches.batch(step), side="right"))) for step in range(some)]
    each = sum(drawn) / some
    total = round(each * batches.steps * batches.world_size)
    yield (
        f"  a full shuffle draws a batch from {each:.1f} blocks, which are decoded for it: about {total:,} decodes an epoch over all "
        f"ranks and workers, {total / len(sizes):.2f} a block, less what a process has still in memory{_unheld(dataset)}"
    )
    change = _to_blocks(batches, workers, dataset)
    changed = _changed(batches, workers, sizes, dataset, change)
    if changed.readings < _BETTER * total:
        yield f"  {_would(change, changed)}"
