"""Resolves the options that are left to the loader, checks that they fit together before workers
start, and says why each is what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from headrace.collate import collators, stack_collate
from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode
from headrace.core.reader import SHARE
from headrace.display import is_default
from headrace.errors import ConfigError, warn
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, Reasons, Shuffle, check_device
from headrace.loader.start import choose_context
from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import cores
from headrace.memory.processes import check_may_start, is_daemonic
from headrace.order import World
from headrace.order.epoch import DEFAULT_TURNS

Collate = Callable[[list[Any]], Any]
_SCARCE = 4 << 30  # below this, at most 2 workers
# options that are shown in any case, in this order; the others where they are not as they are by
# default
_ALWAYS = ["batch_size", "shuffle", "seed", "num_workers", "prefetch_factor"]
_ALWAYS += ["persistent_workers", "multiprocessing_context", "pin_memory", "device", "collate_fn"]
_ALWAYS += ["drop_last", "pad", "rank", "world_size", "max_memory_usage"]
_WIDEST = 16  # letters of a value before its reason moves to the right


def resolve(
    config: DataLoaderConfig, dataset: Any, world: World
) -> tuple[DataLoaderConfig, Collate | None, Reasons]:
    """The config with every None decided as far as it can be, the collate function, and why each
    value is what it is.
    """
    check_device(config.device)
    is_own = isinstance(dataset, BaseDataset)
    is_stream = isinstance(dataset, IterableDataset) and not is_own
    chosen: dict[str, Any] = {}
    reasons: Reasons = {}

    def choose(name: str, value: Any, reason: str) -> None:
        chosen[name] = value
        reasons[name] = reason

    source = world.source if config.rank is None else "given"
    choose("rank", world.rank, source)
    choose("world_size", world.world_size, source)
    orders = config.orders
    if config.num_samples is not None:
        orders.append("num_samples")
    if is_stream and (orders or config.shuffle):
        raise ConfigError(
            f"{' and '.join(orders) or 'shuffle'} can't be given for an IterableDataset, which has "
            "its own order"
        )
    if config.shuffle is None:
        choose("shuffle", *_auto_shuffle(config, dataset, is_stream))
    if config.generator is not None:
        choose("seed", config.generator.initial_seed() & ((1 << 63) - 1), "the generator's seed")
    collate, reasons["collate_fn"] = _collate(config, dataset)
    if config.max_memory_usage is None:
        default = "the default: 0.8 of what is free at first use"
        reasons["max_memory_usage"] = "the dataset's" if is_own else default
    if config.num_workers is None:
        turns = 0
        if chosen.get("shuffle", config.shuffle) == "block":
            turns = config.turns or DEFAULT_TURNS
            blocks = dataset.blocks() if is_own and config.turns is None else None
            if blocks is not None:
                turns = dataset.lanes(len(blocks))[1]
        choose("num_workers", *_auto_workers(dataset, world, turns, is_stream))
    elif config.num_workers:
        check_may_start(f"num_workers={config.num_workers}")
    if chosen.get("num_workers", config.num_workers):
        for name, value in (("prefetch_factor", 2), ("persistent_workers", True)):
            if getattr(config, name) is None:
                choose(name, value, "the default with workers")
        choose("multiprocessing_context", *start_of(config, dataset, collate))
    else:
        for name, value in NO_WORKERS.items():
            if getattr(config, name):
                warn(f"{name} has no effect with num_workers=0 and is ignored")
            choose(name, value, "no workers")
    choose("pin_memory", *_auto_pin(config))
    return config.with_(**chosen), collate, reasons


def _auto_shuffle(config: DataLoaderConfig, dataset: Any, is_stream: bool) -> tuple[Shuffle, str]:
    if config.is_bucketed:
        return True, "bucket_by_length is a shuffle"
    if config.orders:
        return False, f"{config.orders[0]} is the order"
    if is_stream:
        return False, "an IterableDataset has an order of its own"
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.STREAMING:
        return "block", "streaming reads whole blocks, one after the other"
    return True, "the default of map-style datasets"


def _auto_workers(dataset: Any, world: World, turns: int, is_stream: bool) -> tuple[int, str]:
    if is_stream:
        return 0, "an IterableDataset may not divide its samples: each worker would yield them all"
    is_held = isinstance(dataset, TensorDataset)
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.EAGER:
        is_held = not (dataset.holds_encoded or dataset.is_random)
    if is_held:  # nothing is left to be done with the samples that costs more than a copy
        return 0, "the dataset is in memory already"
    if is_daemonic():
        return 0, "this process is daemonic, and may start no workers"
    usable = cores()
    ranks = world.local_world_size
    number = min(8, max(1, int(SHARE * usable.number / ranks)))
    quota = f" ({usable.quota})" if usable.quota else ""
    reason = f"min(8, max(1, {SHARE} x {usable.number} usable cores{quota} / {ranks} local ranks))"
    if number > 2 and MemoryBudget(1.0).available < _SCARCE:
        reason += f" = {number}, but less than {format_size(_SCARCE)} of memory are free"
        number = 2
    if turns % number:
        number = max(w for w in range(1, number + 1) if turns % w == 0)
        reason += f", lowered to a divisor of turns={turns}, so that each worker has its own blocks"
    return number, reason


def _auto_pin(config: DataLoaderConfig) -> tuple[bool, str]:
    if config.pin_memory is None:
        is_cuda = config.device is None or torch.device(config.device).type == "cuda"
        if is_cuda and torch.cuda.is_available():
            return True, "CUDA is available"
        return False, "batches don't go to a CUDA device"
    if config.pin_memory and not torch.accelerator.is_available():
        warn("pin_memory=True has no effect without an accelerator and is ignored")
        return False, "there is no accelerator"
    return config.pin_memory, "given"


def start_of(config: DataLoaderConfig, dataset: Any, collate: Collate | None) -> tuple[Any, str]:
    """The multiprocessing context of a loader's workers, and why, as things are now: threads
    come and go.
    """
    functions = [collate, config.worker_init_fn]
    return choose_context(config.multiprocessing_context, dataset, functions)


def _collate(config: DataLoaderConfig, dataset: Any) -> tuple[Collate | None, str]:
    """The collate function. Where the dataset yields batches, one that was given gets one batch,
    as torch's does; else there is none.
    """
    given = config.collate_fn
    if config.yields_batches:
        reason = "the dataset yields batches"
        if given is not None:
            reason += ", and it gets each of them"
    elif given is not None:
        reason = f"registered as {given!r}" if isinstance(given, str) else "given"
    else:
        given = getattr(dataset, "collate", None) if isinstance(dataset, BaseDataset) else None
        reason = f"{type(dataset).__name__}'s own"
        if given is None:
            given = stack_collate
            reason = "the default: samples of one shape are stacked"
    return collators.get(given) if isinstance(given, str) else given, reason


def explain_options(
    config: DataLoaderConfig,
    given: DataLoaderConfig,
    reasons: Reasons,
    order: dict[str, Any],
    collate: Collate | None,
) -> list[str]:
    """A line for each option: its value, and why it is what it is.

    Args:
        config, given: with all auto values decided, and as the user gave it.
        reasons: why values are what they are, where more is known than that they were given.
        order: its parameters.
        collate: the collate function.
    """
    default = vars(DataLoaderConfig())
    values = {**vars(config), "collate_fn": collate}
    shown = [*_ALWAYS, *(name for name in values if not is_default(values[name], default[name]))]
    for name in ("interleave", "turns"):
        if order.get(name) is not None:
            shown.append(name)
            values[name] = order[name]
    texts = {name: _in_words(values[name]) for name in dict.fromkeys(shown)}
    width = max(map(len, texts))
    wide = min(_WIDEST, max(map(len, texts.values())))
    lines = []
    for name, text in texts.items():
        reason = reasons.get(name, "given")
        if name not in reasons and is_default(getattr(given, name), default[name]):
            reason = "the default" if values[name] == default[name] else "from the layout"
        lines.append(f"{name:<{width}} = {text:<{wide}}  {reason}")
    return lines


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
