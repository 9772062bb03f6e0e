"""Explains what a loader chose, why, and what follows from it.

The text has a line for each option, then the number of batches of an epoch, the origin of its
order, how often storage blocks are decoded or fetched, how to reduce that, and the reserved memory.

If chunks are decoded, or remote blocks fetched, as a whole, each process that has samples of one
does so. The numbers are estimates over all ranks and workers (see `order/visits.py`). If batches
take samples from everywhere (a full shuffle, weights), some of them are looked at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate import stack_collate
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.unnormalized import Images
from headrace.display import Lines, is_default
from headrace.errors import BudgetError
from headrace.loader.config import DataLoaderConfig, Reasons
from headrace.loader.data import inner_datasets, length_of
from headrace.loader.plan import IterablePlan, OrderPlan, Plan, SamplerPlan
from headrace.memory.budget import MemoryBudget, format_size
from headrace.modes import LoadingMode
from headrace.order import BucketedOrder, EpochOrder, Order, RankBatches, ResizedOrder
from headrace.order.visits import Visits, estimate_visits
from headrace.sorting import distinct

_ALWAYS = (
    *(
        "batch_size",
        "shuffle",
        "seed",
        "interleave",
        "turns",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
    ),
    *(
        "multiprocessing_context",
        "pin_memory",
        "device",
        "collate_fn",
        "drop_last",
        "pad",
        "rank",
        "world_size",
        "max_memory_usage",
    ),
)
"""Options that are shown in any case, in this order; the others where they are not as they are
by default.
"""
_OF_LANES = ("interleave", "turns")  # which mean nothing elsewhere
_WIDEST = 16  # letters of a value before its reason moves to the right
_STACKED = "samples of one shape are stacked"

_MEANINGS: dict[tuple[str, Any], str] = {
    ("drop_last", True): "the last, incomplete global batch is left out",
    ("drop_last", False): "the last global batch may be incomplete",
    ("pad", True): "ranks get equally many samples, some twice where they don't divide",
    ("pad", False): "no sample comes twice",
    ("device", None): "batches stay in the host's memory",
    ("batch_size", None): "the dataset yields batches",
    ("timeout", 0): "waits as long as the workers live",
}
_SAID: dict[str, str] = {
    "device": "batches are copied there",
    "memory_format": "of tensors [batch, C, H, W]",
    "interleave": "lanes of blocks that a global batch draws from",
    "turns": "sets of lanes, taken in turn, so that workers have their own",
    "weights": "samples are drawn by weight",
    "balanced": "all classes come equally often",
    "bucket_by_length": "batches hold samples of like length",
    "num_samples": "of an epoch, over all ranks",
    "sampler": "it is the order",
    "batch_sampler": "it is the order; batch_size and drop_last don't count",
}

_LOOKED_AT = 32  # batches that take from everywhere
_BETTER = 0.95  # of the decodes: what saves less is not worth a change
_MOST = 0.9  # of what can be saved: what saves so much is as good

Sizes = npt.NDArray[np.int64]


def explain_loader(
    config: DataLoaderConfig,
    given: DataLoaderConfig,
    reasons: Reasons,
    plan: Plan,
    dataset: Any,
    collate: Any,
    budget: MemoryBudget,
    reserved: int | None,
    way: str | None,
    images: Images,
) -> str:
    """Everything that is to be said of a loader.

    Args:
        config, given: with all auto values decided, and as the user gave it.
        reasons: why values are what they are, where more is known than that they were given.
        plan, dataset, collate, budget: the loader's.
        reserved: bytes of the budget set aside for batches; None: not known yet.
        way: how batches are made; None: a foreign dataset makes samples, which are collated.
        images: where they are normalised.
    """
    parameters = plan.parameters()
    known = {name: parameters[name] for name in _OF_LANES if parameters.get(name) is not None}
    lines = [
        explain_config(
            config,
            given,
            {**reasons, **_chosen(config, given, dataset, plan)},
            {**known, "collate_fn": collate},
        ),
        *_epoch(plan, config),
        *explain_blocks(plan, dataset, config.num_workers or 0),
        *([] if way is None else [f"batches: {way}"]),
        *_images(images, config),
        _memory(config, reserved),
    ]
    if isinstance(dataset, BaseDataset):
        lines.append(dataset.explain())
    if not isinstance(dataset, BaseDataset) or config.max_memory_usage is not None:
        lines.append(budget.explain())
    return Lines("\n".join(lines))


def explain_config(
    config: DataLoaderConfig,
    given: DataLoaderConfig,
    reasons: Reasons,
    known_values: dict[str, Any],
) -> str:
    """One line for each option: its value, and why it is what it is; some values are known
    better than by `config`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(DataLoaderConfig)}
    values = {name: known_values.get(name, getattr(config, name)) for name in defaults}
    names = [name for name in _ALWAYS if name not in _OF_LANES or values[name] is not None]
    names += [
        name
        for name in defaults
        if name not in names and not is_default(getattr(config, name), defaults[name])
    ]
    rows = []
    for name in names:
        text = _in_words(values[name])
        origin = reasons.get(name) or (
            "the default" if is_default(getattr(given, name), defaults[name]) else "given"
        )
        origin = origin.removeprefix(f"{text}: ").removeprefix(f"{text}, ")
        known = isinstance(values[name], (bool, int, type(None)))
        meaning = (
            _MEANINGS.get((name, values[name]))
            if known and (name, values[name]) in _MEANINGS
            else _SAID.get(name)
        )
        rows.append((name, text, f"{origin}: {meaning}" if meaning else origin))
    width, wide = (
        max(len(name) for name, *_ in rows),
        min(_WIDEST, max(len(text) for _, text, _ in rows)),
    )
    return "\n".join(f"{name:<{width}} = {text:<{wide}}  {reason}" for name, text, reason in rows)


def _in_words(value: Any) -> str:
    """A value in a word or two."""
    if value is None or isinstance(
        value, (bool, int, float, str, torch.device, torch.memory_format)
    ):
        return str(value)
    if hasattr(value, "get_start_method"):
        return str(value.get_start_method())
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__name__", None) or type(value).__name__


def _chosen(config: DataLoaderConfig, given: DataLoaderConfig, dataset: Any, plan: Plan) -> Reasons:
    """Reasons for what is chosen outside of the config."""
    reasons: Reasons = {}
    asked, ours = config.collate_fn, isinstance(dataset, BaseDataset)
    if config.yields_batches:
        reasons["collate_fn"] = "the dataset yields batches" + (
            "" if asked is None else ", and it gets each of them"
        )
    elif isinstance(asked, str):
        reasons["collate_fn"] = f"registered as {asked!r}"
    elif asked is None:
        own = getattr(dataset, "collate", None) if ours else None
        of_dataset = f"{type(dataset).__name__}'s own" + (
            f", registered as {own!r}" if isinstance(own, str) else ""
        )
        reasons["collate_fn"] = of_dataset if own is not None else f"the default: {_STACKED}"
    elif asked is stack_collate:
        reasons["collate_fn"] = f"given: {_STACKED}"
    if given.rank is not None:
        reasons["rank"] = reasons["world_size"] = "given"
    if config.max_memory_usage is None:
        reasons["max_memory_usage"] = (
            "the dataset's" if ours else "the default: 0.8 of what is free at first use"
        )
    if is_laned(plan):
        for name in _OF_LANES:
            if getattr(given, name) is None:
                reasons[name] = "from the layout"
    return reasons


def _epoch(plan: Plan, config: DataLoaderConfig) -> Iterator[str]:
    """What an epoch is, and where its order comes from."""
    steps = plan.steps()
    if not isinstance(plan, OrderPlan):
        yield (
            f"an epoch: {'as many batches as there are' if steps is None else count_batches(steps)}"
        )
        if isinstance(plan, SamplerPlan) and config.batch_sampler is None and config.drop_last:
            yield from _dropped(
                (length_of(config.sampler) or 0) % (config.batch_size or 1), ", the sampler's last"
            )
        whose = "the sampler's"
        if isinstance(plan, IterablePlan):
            whose = "the IterableDataset's own, and depends on the number of workers"
        yield (
            f"order: {whose}; to resume it is asked for its state, if it has a state_dict, or gone "
            "through again"
        )
        return
    batches = plan.batches
    order, world = batches.order, batches.world_size
    ranks = f" ({batches.batch_size:,} on each of {world} ranks)" if world > 1 else ""
    last = batches.total_size - batches.samples_before(batches.steps - 1) if batches.steps else 0
    short = f", the last of {last:,}" if batches.steps and last != batches.global_batch else ""
    yield (
        f"an epoch: {order.n:,} samples, {count_batches(batches.steps)} of "
        f"{batches.global_batch:,}{ranks}{short}"
    )
    if batches.padding:
        yield (
            f"padding: {batches.padding} samples come twice in an epoch, so that all ranks have "
            "as many (pad=False: none)"
        )
    yield from _dropped(
        max(0, order.n - batches.total_size),
        ", other ones each time" if order.shuffle else ", always the last",
    )
    again = "; after the last sample it begins again, in another order" if order.repeats else ""
    part = (
        f"; num_samples={order.n:,} positions of it{again}"
        if isinstance(order, ResizedOrder)
        else ""
    )
    yield f"order: {_kind(plan)}{part}"


def count_batches(steps: int) -> str:
    """ "1 batch", "1,000 batches"."""
    return f"{steps:,} {'batch' if steps == 1 else 'batches'}"


def _dropped(samples: int, which: str) -> Iterator[str]:
    if samples:
        yield (
            f"dropped: {samples:,} samples are left out of each epoch{which} (drop_last=False: "
            "none)"
        )


def _kind(plan: OrderPlan) -> str:
    order, parameters = plan.batches.order, plan.parameters()
    again = "with replacement" if order.repeats else "without replacement"
    if isinstance(order, BucketedOrder):
        return "a shuffle whose batches hold samples of like length; it follows from seed and epoch"
    if order.shuffle == "weights":
        return f"drawn by weight, {again}; it follows from seed and epoch"
    if order.shuffle == "balanced":
        return (
            f"drawn so that all classes come equally often, {again}; it follows from seed and epoch"
        )
    if order.shuffle is False:
        return "as the samples are stored"
    if is_laned(plan):
        return (
            f"blocks are permuted and stand in {parameters['interleave']} x {parameters['turns']} "
            "lanes; a global batch draws from "
            f"{parameters['interleave']} of them, and samples are permuted inside of their block"
        )
    blocks = (
        "; samples here have no blocks, so that 'block' is a full shuffle"
        if order.shuffle == "block"
        else ""
    )
    return f"a permutation of all samples, which follows from seed and epoch{blocks}"


def _images(images: Images, config: DataLoaderConfig) -> Iterator[str]:
    if images.why_on_host is not None:
        yield f"images: finished on the host, and copied as they are: {images.why_on_host}"
    if images.pixels is not None and config.device is not None:
        dtype = str(images.pixels.normalization.dtype).removeprefix("torch.")
        yield (
            f"images: uint8 until {torch.device(config.device)}, and normalised there, to {dtype} "
            "(normalize='host': on the host)"
        )


def _memory(config: DataLoaderConfig, reserved: int | None) -> str:
    workers, prefetch = config.num_workers or 0, config.prefetch_factor or 1
    buffers = f"{workers} x {prefetch} + 2" if workers else "2"
    if reserved is None:
        return (
            f"memory: {buffers} batches may be on their way; the first one says how large they are"
        )
    return (
        f"memory: {format_size(reserved)} are set aside for {buffers} batches on their way, and "
        "for what they are made of"
    )


def is_laned(plan: Plan) -> bool:
    """True if the order is a block shuffle of known blocks."""
    return isinstance(plan, OrderPlan) and plan.parameters().get("interleave") is not None


def explain_blocks(plan: Plan, dataset: Any, workers: int) -> Iterator[str]:
    """Lines about the blocks of a headrace dataset's storage; none where it has none, or where
    they don't matter.
    """
    if not isinstance(plan, OrderPlan) or not plan.batches.steps:
        return
    if not isinstance(dataset, BaseDataset):
        if any(inner.sample_source.block_nbytes for inner in inner_datasets(dataset)):
            yield (
                "blocks: those of the dataset inside can't be seen through "
                f"{type(dataset).__name__}, and are decoded for each batch"
            )
            yield "  views that headrace makes (dataset.subset, dataset.split) know their blocks"
        return
    nbytes = dataset.sample_source.block_nbytes
    if dataset.loading_mode is LoadingMode.EAGER or not (nbytes or is_laned(plan)):
        return
    try:
        whole = _whole(plan.batches.order)
        sizes = whole.blocks if whole is not None and is_laned(plan) else dataset.blocks()
    except BudgetError:  # too many to be listed, which a full shuffle needs no list of
        return
    if sizes is None or not len(sizes):
        return
    is_fetched = (
        not nbytes
        and dataset.block_memory.prefetches_whole
        and dataset.block_memory.remote_nbytes(1) > 0
        and is_laned(plan)
    )
    how = (
        f", of {format_size(nbytes)} each when they are decoded"
        if nbytes
        else ", each fetched as a whole"
        if is_fetched
        else ""
    )
    yield f"blocks: {len(sizes):,} of the storage{how}"
    if not nbytes and not is_fetched:
        yield (
            "  samples are read one by one: none is decoded with its whole block, and so none twice"
        )
        return
    job = _Job(
        dataset,
        sizes,
        workers,
        plan.batches,
        ("fetched", "fetches at most") if is_fetched else ("decoded", "decodes"),
    )
    if job.order is not None and job.order.shuffle is not True:
        yield from job.by_visits()
    else:
        yield from job.by_batches()


class _Job:
    """What ranks and workers do with the blocks of a dataset; `words` say what becomes of a
    block, and how often.
    """

    def __init__(
        self,
        dataset: BaseDataset,
        sizes: Sizes,
        workers: int,
        batches: RankBatches,
        words: tuple[str, str],
    ) -> None:
        self._dataset, self._sizes, self._workers, self._batches = dataset, sizes, workers, batches
        self._done, self._times = words
        # that all samples stand in, as far as they do: of an epoch, or of a whole pass where the
        # epoch is longer or shorter
        self.order, self.span = _whole(batches.order), "an epoch"
        if self.order is not None and self.order is not batches.order:
            self._batches, self.span = self._with(self.order), "a pass over all samples"

    def _with(self, order: EpochOrder) -> RankBatches:
        """The same ranks and batches of another order."""
        old = self._batches
        return RankBatches(order, old.rank, old.world_size, old.batch_size, old.drop_last, old.pad)

    def by_visits(self) -> Iterator[str]:
        """Of an order that goes through blocks in stretches."""
        visits = estimate_visits(self._batches, self._workers, self._sizes)
        alone = "one process"
        if visits.rate > 1:
            alone = f"{visits.rate:.2f} processes on average"
        yield (
            f"  each is {self._done} by {alone}: about {visits.readings:,} {self._times} "
            f"{self.span} over all ranks and workers, {visits.rate:.2f} a block{self._unheld}"
        )
        if self._dataset.block_memory.stays_decoded:
            yield (
                "  all stay decoded in each process that has read them: later epochs decode "
                "fewer, and in the end none"
            )
        if visits.rate > 1:
            yield from (f"  {line}" for line in self._advice(visits))

    def by_batches(self) -> Iterator[str]:
        """Of an order that takes each batch from everywhere: how much of it the cache of a
        process spares depends on its size.
        """
        batches, edges = self._batches, np.cumsum(self._sizes)
        count = min(_LOOKED_AT, batches.steps)
        drawn = [
            len(distinct(np.searchsorted(edges, batches.batch(step), side="right")))
            for step in range(count)
        ]
        each = sum(drawn) / count
        total = round(each * batches.steps * batches.world_size)
        what = "a full shuffle" if self.order is not None else "this order"
        yield (
            f"  {what} draws a batch from {each:.1f} blocks, which are decoded for it: about "
            f"{total:,} decodes {self.span} over all ranks "
            f"and workers, {total / len(self._sizes):.2f} a block, less what a process has still "
            f"in memory{self._unheld}"
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
                reasons.append(
                    f"interleave={order.interleave} is no multiple of world_size={world}"
                )
            if reasons:
                yield f"since {' and '.join(reasons)}"
            elif order.aligned:
                yield (
                    "since some blocks are shared by lanes of several ranks or workers, at their "
                    "beginnings and ends"
                )
        for change, changed in self._remedies(visits):
            yield _would(change, changed)

    @property
    def _laned(self) -> EpochOrder:
        assert self.order is not None
        return self.order

    def _remedies(self, visits: Visits) -> list[tuple[dict[str, Any], Visits]]:
        """Changes of options, each with what it would lead to: the least changes among those
        that save most.
        """
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
        return (
            {"shuffle": "block"}
            if fitting == max(1, self._workers)
            else {"shuffle": "block", "num_workers": fitting}
        )

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
                order.n,
                shuffle="block",
                seed=order.seed,
                epoch=order.epoch,
                blocks=self._sizes,
                global_batch=order.global_batch,
                interleave=change.get("interleave", order.interleave),
                turns=change.get("turns", order.turns),
                aligned=order.aligned,
            )
        return estimate_visits(
            self._with(order), change.get("num_workers", self._workers), self._sizes
        )


def _whole(order: Order) -> EpochOrder | None:
    """The order of all samples that an epoch is; or that it is a part, or a multiple, of; None
    where samples are drawn.
    """
    if isinstance(order, EpochOrder):
        return order
    return order.whole if isinstance(order, ResizedOrder) else None


def _would(change: dict[str, Any], changed: Visits) -> str:
    other = "" if set(change) == {"num_workers"} else " (another order of samples)"
    return (
        f"{', '.join(f'{name}={value!r}' for name, value in change.items())} would make it "
        f"{changed.rate:.2f} a block{other}"
    )


def _fitting(workers: int, turns: int) -> int:
    """The largest number of workers, up to this, that divides the turns."""
    return max(w for w in range(1, max(1, workers) + 1) if turns % w == 0)
