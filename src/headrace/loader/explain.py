"""Explains what a loader chose, and why."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from headrace.core.batcher import Batcher, Collating
from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode
from headrace.datasets.unnormalized import DevicePixels
from headrace.display import Lines, is_default
from headrace.loader.budget import LoaderMemory
from headrace.loader.config import DataLoaderConfig, Reasons
from headrace.loader.plan import Plan
from headrace.memory.budget import format_size
from headrace.order import BucketedOrder, RankBatches

# options that are shown in any case, in this order; the others where they are not as they are by
# default
_ALWAYS = ["batch_size", "shuffle", "seed", "num_workers", "prefetch_factor"]
_ALWAYS += ["persistent_workers", "multiprocessing_context", "pin_memory", "device", "collate_fn"]
_ALWAYS += ["drop_last", "pad", "rank", "world_size", "max_memory_usage"]
_WIDEST = 16  # letters of a value before its reason moves to the right
_ORDERS = {
    False: "as the samples are stored",
    True: "a permutation of all samples, which follows from seed and epoch",
    "block": "a permutation of all samples, since they have no blocks",
    "weights": "drawn by weight",
    "balanced": "drawn so that all classes come equally often",
}


def explain_loader(
    config: DataLoaderConfig,
    given: DataLoaderConfig,
    reasons: Reasons,
    plan: Plan,
    dataset: Any,
    collating: Collating,
    memory: LoaderMemory,
    pixels: DevicePixels | None,
    why_on_host: str | None,
) -> Lines:
    """Everything that is to be said of a loader.

    Args:
        config, given: with all auto values decided, and as the user gave it.
        reasons: why values are what they are, where more is known than that they were given.
        plan, dataset, collating, memory, pixels, why_on_host: the loader's.
    """
    own = isinstance(dataset, BaseDataset)
    lines = [*_options(config, given, reasons, plan, collating.function), *_epoch(plan)]
    if own:
        if isinstance(plan, RankBatches) and plan.steps:
            lines += _blocks(plan, dataset)
        lines.append(f"batches: {Batcher(dataset, collating).explain()}")
    if why_on_host is not None:
        lines.append(f"images: finished on the host, and copied as they are: {why_on_host}")
    if pixels is not None and config.device is not None:
        dtype = str(pixels.normalization.dtype).removeprefix("torch.")
        lines.append(
            f"images: uint8 until {torch.device(config.device)}, and normalised there, to {dtype} "
            "(normalize='host': on the host)"
        )
    buffers = f"{config.num_workers} x {config.prefetch_factor} + 2" if config.num_workers else "2"
    line = f"{buffers} batches may be on their way; the first one says how large they are"
    if memory.reservation is not None:
        line = (
            f"{format_size(memory.reservation.nbytes)} are set aside for {buffers} batches on "
            "their way, and for what they are made of"
        )
    lines.append(f"memory: {line}")
    if own:
        lines.append(dataset.explain())
    if not own or config.max_memory_usage is not None:
        lines.append(memory.budget.explain())
    return Lines("\n".join(lines))


def _options(
    config: DataLoaderConfig, given: DataLoaderConfig, reasons: Reasons, plan: Plan, collate: Any
) -> Iterator[str]:
    """A line for each option: its value, and why it is what it is."""
    default = vars(DataLoaderConfig())
    parameters = plan.parameters()
    values = {**vars(config), "collate_fn": collate}
    shown = [*_ALWAYS, *(name for name in values if not is_default(values[name], default[name]))]
    for name in ("interleave", "turns"):
        if parameters.get(name) is not None:
            shown.append(name)
            values[name] = parameters[name]
    texts = {name: _in_words(values[name]) for name in dict.fromkeys(shown)}
    width = max(map(len, texts))
    wide = min(_WIDEST, max(map(len, texts.values())))
    for name, text in texts.items():
        reason = reasons.get(name, "given")
        if name not in reasons and is_default(getattr(given, name), default[name]):
            reason = "the default" if values[name] == default[name] else "from the layout"
        yield f"{name:<{width}} = {text:<{wide}}  {reason}"


def _in_words(value: Any) -> str:
    """A value in a word or two."""
    plain = (bool, int, float, str, torch.device, torch.memory_format)
    if value is None or isinstance(value, plain):
        return str(value)
    if hasattr(value, "get_start_method"):
        return str(value.get_start_method())
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__name__", None) or type(value).__name__


def count_batches(steps: int) -> str:
    """ "1 batch", "1,000 batches"."""
    return f"{steps:,} {'batch' if steps == 1 else 'batches'}"


def _epoch(plan: Plan) -> Iterator[str]:
    """What an epoch is, and where its order comes from."""
    if not isinstance(plan, RankBatches):
        count = "as many batches as there are" if plan.steps is None else count_batches(plan.steps)
        yield f"an epoch: {count}"
        yield (
            f"order: that of the {plan.parameters()['shuffle']}; to resume it is asked for its "
            "state, if it has a state_dict, or gone through again"
        )
        return
    order = plan.order
    text = f"an epoch: {order.n:,} samples, {count_batches(plan.steps)} of {plan.global_batch:,}"
    if plan.world_size > 1:
        text += f" ({plan.batch_size:,} on each of {plan.world_size} ranks)"
    yield text
    if plan.padding:
        yield (
            f"padding: {plan.padding} samples come twice in an epoch, so that all ranks have "
            "as many (pad=False: none)"
        )
    if order.n > plan.total_size:
        yield (
            f"dropped: {order.n - plan.total_size:,} samples are left out of each epoch "
            "(drop_last=False: none)"
        )
    parameters = plan.parameters()
    kind = _ORDERS[order.shuffle]
    if isinstance(order, BucketedOrder):
        kind = "a shuffle whose batches hold samples of like length"
    elif parameters["interleave"] is not None:
        kind = (
            f"blocks are permuted and stand in {parameters['interleave']} x {parameters['turns']} "
            f"lanes; a global batch draws from {parameters['interleave']} of them, and samples "
            "are permuted inside of their block"
        )
    yield f"order: {kind}"
    if order.repeats:
        yield "replacement: a sample may come several times in an epoch"


def _blocks(batches: RankBatches, dataset: BaseDataset) -> Iterator[str]:
    """About the blocks of the storage; nothing where it has none, or where they don't matter."""
    nbytes = dataset.sample_source.block_nbytes
    order = batches.order.parameters()
    if dataset.loading_mode is LoadingMode.EAGER or not (nbytes or order["interleave"]):
        return
    how = "samples are read one by one"
    if nbytes:
        how = f"each of {format_size(nbytes)} is decoded as a whole"
    if dataset.block_memory.stays_decoded:
        how += "; all stay decoded in each process"
    elif order["interleave"]:
        how += (
            f", by one process where num_workers divides turns={order['turns']}, and world_size "
            f"divides interleave={order['interleave']}"
        )
    elif order["shuffle"] is not False:
        how += ", for nearly every sample; shuffle='block' reads each about once"
    yield f"blocks of the storage: {how}"
