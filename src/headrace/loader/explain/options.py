"""Explains in words what a loader chose, why, and what follows from it.

First a line for each option, then what an epoch is, where its order comes from, how often blocks of the storage are decoded for it (see
`loader/explain/blocks.py`), and what is set aside in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from headrace.collate import stack_collate
from headrace.datasets.core.base import BaseDataset
from headrace.display import Lines, is_default
from headrace.loader.config import DataLoaderConfig, Reasons
from headrace.loader.data import length_of
from headrace.loader.explain.blocks import explain_blocks, is_laned
from headrace.loader.plan import IterablePlan, OrderPlan, Plan, SamplerPlan
from headrace.memory.budget import MemoryBudget, format_size
from headrace.order import BucketedOrder, ResizedOrder

_ALWAYS = (
    *("batch_size", "shuffle", "seed", "interleave", "turns", "num_workers", "prefetch_factor", "persistent_workers"),
    *("multiprocessing_context", "pin_memory", "device", "collate_fn", "drop_last", "pad", "rank", "world_size", "max_memory_usage"),
)
"""Options that are shown in any case, in this order; the others where they are not as they are by default."""
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
    "interleave": "lanes of blocks that a global batch draws from",
    "turns": "sets of lanes, taken in turn, so that workers have their own",
    "weights": "samples are drawn by weight",
    "balanced": "all classes come equally often",
    "bucket_by_length": "batches hold samples of like length",
    "num_samples": "of an epoch, over all ranks",
    "sampler": "it is the order",
    "batch_sampler": "it is the order; batch_size and drop_last don't count",
}


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
) -> str:
    """Everything that is to be said of a loader.

    Args:
        config, given: with all auto values decided, and as the user gave it.
        reasons: why values are what they are, where more is known than that they were given.
        plan, dataset, collate, budget: the loader's.
        reserved: bytes of the budget set aside for batches; None: not known yet.
        way: how batches are made; None: a foreign dataset makes samples, which are collated.
    """
    parameters = plan.parameters()
    known = {name: parameters[name] for name in _OF_LANES if parameters.get(name) is not None}
    lines = [
        explain_config(config, given, {**reasons, **_chosen(config, given, dataset, plan)}, {**known, "collate_fn": collate}),
        *_epoch(plan, config),
        *explain_blocks(plan, dataset, config.num_workers or 0),
        *([] if way is None else [f"batches: {way}"]),
        _memory(config, reserved),
    ]
    if isinstance(dataset, BaseDataset):
        lines.append(dataset.explain())
    if not isinstance(dataset, BaseDataset) or config.max_memory_usage is not None:
        lines.append(budget.explain())
    return Lines("\n".join(lines))


def explain_config(config: DataLoaderConfig, given: DataLoaderConfig, reasons: Reasons, known_values: dict[str, Any]) -> str:
    """One line for each option: its value, and why it is what it is; some values are known better than by `config`."""
    defaults = {field.name: field.default for field in dataclasses.fields(DataLoaderConfig)}
    values = {name: known_values.get(name, getattr(config, name)) for name in defaults}
    names = [name for name in _ALWAYS if name not in _OF_LANES or values[name] is not None]
    names += [name for name in defaults if name not in names and not is_default(getattr(config, name), defaults[name])]
    rows = []
    for name in names:
        text = _in_words(values[name])
        origin = reasons.get(name) or ("the default" if is_default(getattr(given, name), defaults[name]) else "given")
        origin = origin.removeprefix(f"{text}: ").removeprefix(f"{text}, ")
        known = isinstance(values[name], (bool, int, type(None)))
        meaning = _MEANINGS.get((name, values[name])) if known and (name, values[name]) in _MEANINGS else _SAID.get(name)
        rows.append((name, text, f"{origin}: {meaning}" if meaning else origin))
    width, wide = max(len(name) for name, *_ in rows), min(_WIDEST, max(len(text) for _, text, _ in rows))
    return "\n".join(f"{name:<{width}} = {text:<{wide}}  {reason}" for name, text, reason in rows)


def _in_words(value: Any) -> str:
    """A value in a word or two."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if hasattr(value, "get_start_method"):
        return str(value.get_start_method())
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, torch.device):
        return str(value)
    return getattr(value, "__name__", None) or type(value).__name__


def _chosen(config: DataLoaderConfig, given: DataLoaderConfig, dataset: Any, plan: Plan) -> Reasons:
    """Reasons for what is chosen outside of the config."""
    reasons: Reasons = {}
    asked, ours = config.collate_fn, isinstance(dataset, BaseDataset)
    if config.yields_batches:
        reasons["collate_fn"] = "the dataset yields batches" + ("" if asked is None else ", and it gets each of them")
    elif isinstance(asked, str):
        reasons["collate_fn"] = f"registered as {asked!r}"
    elif asked is None:
        own = getattr(dataset, "collate", None) if ours else None
        of_dataset = f"{type(dataset).__name__}'s own" + (f", registered as {own!r}" if isinstance(own, str) else "")
        reasons["collate_fn"] = of_dataset if own is not None else f"the default: {_STACKED}"
    elif asked is stack_collate:
        reasons["collate_fn"] = f"given: {_STACKED}"
    if given.rank is not None:
        reasons["rank"] = reasons["world_size"] = "given"
    if config.max_memory_usage is None:
        reasons["max_memory_usage"] = "the dataset's" if ours else "the default: 0.8 of what is free at first use"
    if is_laned(plan):
        for name in _OF_LANES:
            if getattr(given, name) is None:
                reasons[name] = "from the layout"
    return reasons


def _epoch(plan: Plan, config: DataLoaderConfig) -> Iterator[str]:
    """What an epoch is, and where its order comes from."""
    steps = plan.steps()
    if not isinstance(plan, OrderPlan):
        yield f"an epoch: {'as many batches as there are' if steps is None else count_batches(steps)}"
        if isinstance(plan, SamplerPlan) and config.batch_sampler is None and config.drop_last:
            yield from _dropped((length_of(config.sampler) or 0) % (config.batch_size or 1), ", the sampler's last")
        if isinstance(plan, IterablePlan):
            yield "order: the IterableDataset's own, and depends on the number of workers; to resume it is gone through again"
        else:
            yield "order: the sampler's; to resume it is asked for its state, if it has a state_dict, or gone through again"
        return
    batches = plan.batches
    order, world = batches.order, batches.world_size
    ranks = f" ({batches.batch_size:,} on each of {world} ranks)" if world > 1 else ""
    last = batches.total_size - batches.samples_before(batches.steps - 1) if batches.steps else 0
    short = f", the last of {last:,}" if batches.steps and last != batches.global_batch else ""
    yield f"an epoch: {order.n:,} samples, {count_batches(batches.steps)} of {batches.global_batch:,}{ranks}{short}"
    if batches.padding:
        yield f"padding: {batches.padding} samples come twice in an epoch, so that all ranks have as many (pad=False: none)"
    yield from _dropped(max(0, order.n - batches.total_size), ", other ones each time" if order.shuffle else ", always the last")
    again = "; after the last sample it begins again, in another order" if order.repeats else ""
    part = f"; num_samples={order.n:,} positions of it{again}" if isinstance(order, ResizedOrder) else ""
    yield f"order: {_kind(plan)}{part}"


def count_batches(steps: int) -> str:
    """ "1 batch", "1,000 batches"."""
    return f"{steps:,} {'batch' if steps == 1 else 'batches'}"


def _dropped(samples: int, which: str) -> Iterator[str]:
    if samples:
        yield f"dropped: {samples:,} samples are left out of each epoch{which} (drop_last=False: none)"


def _kind(plan: OrderPlan) -> str:
    order, parameters = plan.batches.order, plan.parameters()
    again = "with replacement" if order.repeats else "without replacement"
    if isinstance(order, BucketedOrder):
        return "a shuffle whose batches hold samples of like length; it follows from seed and epoch"
    if order.shuffle == "weights":
        return f"drawn by weight, {again}; it follows from seed and epoch"
    if order.shuffle == "balanced":
        return f"drawn so that all classes come equally often, {again}; it follows from seed and epoch"
    if order.shuffle is False:
        return "as the samples are stored"
    if is_laned(plan):
        return (
            f"blocks are permuted and stand in {parameters['interleave']} x {parameters['turns']} lanes; a global batch draws from "
            f"{parameters['interleave']} of them, and samples are permuted inside of their block"
        )
    blocks = "; samples here have no blocks, so that 'block' is a full shuffle" if order.shuffle == "block" else ""
    return f"a permutation of all samples, which follows from seed and epoch{blocks}"


def _memory(config: DataLoaderConfig, reserved: int | None) -> str:
    workers, prefetch = config.num_workers or 0, config.prefetch_factor or 1
    buffers = f"{workers} x {prefetch} + 2" if workers else "2"
    if reserved is None:
        return f"memory: {buffers} batches may be on their way; the first one says how large they are"
    return f"memory: {format_size(reserved)} are set aside for {buffers} batches on their way, and for what they are made of"
