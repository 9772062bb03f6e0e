"""Resolves the options that are left to the loader, and checks that they fit together before
workers start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from headrace.collate import collators, stack_collate
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.threads import SHARE
from headrace.errors import ConfigError, warn
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, Reasons, Shuffle
from headrace.loader.data import check_device
from headrace.loader.worker.start import choose_context
from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import cores
from headrace.memory.per_process import check_may_start, is_daemonic
from headrace.modes import LoadingMode
from headrace.order import World
from headrace.order.epoch import DEFAULT_TURNS

_SCARCE = 4 << 30  # below this, at most 2 workers


def resolve(
    config: DataLoaderConfig, dataset: Any, world: World
) -> tuple[DataLoaderConfig, Reasons]:
    """The config with every None decided as far as it can be, and why each value is what it is."""
    check_device(config.device)
    reasons: Reasons = {}
    changes: dict[str, Any] = {"rank": world.rank, "world_size": world.world_size}
    reasons["rank"] = reasons["world_size"] = world.source
    foreign_stream = isinstance(dataset, IterableDataset) and not isinstance(dataset, BaseDataset)
    ordered = {
        "shuffle": bool(config.shuffle),
        "num_samples": config.num_samples is not None,
        "bucket_by_length": config.is_bucketed,
    }
    if foreign_stream and (
        given := [name for name, is_given in ordered.items() if is_given] + config.order_of_its_own
    ):
        raise ConfigError(
            f"{' and '.join(given)} can't be given for an IterableDataset, which has its own order"
        )
    if config.shuffle is None:
        changes["shuffle"], reasons["shuffle"] = _auto_shuffle(config, dataset, foreign_stream)
    if config.generator is not None:
        changes["seed"], reasons["seed"] = (
            config.generator.initial_seed() & ((1 << 63) - 1),
            "the generator's seed",
        )
    if config.num_workers is None:
        block = changes.get("shuffle", config.shuffle) == "block"
        turns = _turns(config, dataset) if block else None
        changes["num_workers"], reasons["num_workers"] = _auto_workers(
            dataset, world, turns, foreign_stream
        )
    if config.num_workers:
        check_may_start(f"num_workers={config.num_workers}")
    if changes.get("num_workers", config.num_workers):
        for name, default in {"prefetch_factor": 2, "persistent_workers": True}.items():
            if getattr(config, name) is None:
                changes[name], reasons[name] = default, "the default with workers"
        changes["multiprocessing_context"], reasons["multiprocessing_context"] = start_of(
            config, dataset
        )
    else:
        for name in NO_WORKERS:
            if getattr(config, name):
                warn(f"{name} has no effect with num_workers=0 and is ignored")
            reasons[name] = "no workers"
        changes |= NO_WORKERS
    changes["pin_memory"], reasons["pin_memory"] = _auto_pin(config)
    return config.with_(**changes), reasons


def _auto_shuffle(
    config: DataLoaderConfig, dataset: Any, foreign_stream: bool
) -> tuple[Shuffle, str]:
    if own := config.order_of_its_own:
        return False, f"{own[0]} is the order"
    if config.is_bucketed:
        return True, "bucket_by_length is a shuffle"
    if foreign_stream:
        return False, "an IterableDataset has an order of its own"
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.STREAMING:
        return "block", "streaming reads whole blocks, one after the other"
    return True, "the default of map-style datasets"


def _is_in_memory(dataset: Any) -> bool:
    """True if nothing is left to be done with the samples that costs more than a copy."""
    if isinstance(dataset, BaseDataset):
        return dataset.loading_mode is LoadingMode.EAGER and not (
            dataset.holds_encoded or dataset.is_random
        )
    return isinstance(dataset, TensorDataset)


def _auto_workers(
    dataset: Any, world: World, turns: int | None, foreign_stream: bool
) -> tuple[int, str]:
    if foreign_stream:
        return (
            0,
            "each worker would yield all samples of an IterableDataset that does not divide them",
        )
    if _is_in_memory(dataset):
        return 0, "the dataset is in memory already"
    if is_daemonic():
        return 0, "this process is daemonic, and may start no workers"
    usable, ranks = cores(), world.local_world_size
    number = min(8, max(1, int(SHARE * usable.number / ranks)))
    quota = f" ({usable.quota})" if usable.quota else ""
    reason = f"min(8, max(1, {SHARE} x {usable.number} usable cores{quota} / {ranks} local ranks))"
    if number > 2 and MemoryBudget(1.0).available < _SCARCE:
        number, reason = (
            2,
            f"{reason} = {number}, but less than {format_size(_SCARCE)} of memory are free",
        )
    if turns is not None and turns % number:
        number = max(w for w in range(1, number + 1) if turns % w == 0)
        reason = (
            f"{reason}, lowered to a divisor of turns={turns}, so that each worker has blocks of "
            "its own"
        )
    return number, reason


def _turns(config: DataLoaderConfig, dataset: Any) -> int:
    blocks = dataset.blocks() if isinstance(dataset, BaseDataset) else None
    return config.turns or (DEFAULT_TURNS if blocks is None else dataset.lanes(len(blocks))[1])


def _auto_pin(config: DataLoaderConfig) -> tuple[bool, str]:
    device = None if config.device is None else torch.device(config.device)
    if config.pin_memory is None:
        wanted = torch.cuda.is_available() and (device is None or device.type == "cuda")
        return wanted, "CUDA is available" if wanted else "batches don't go to a CUDA device"
    if config.pin_memory and not torch.accelerator.is_available():
        warn("pin_memory=True has no meaning without an accelerator and is ignored")
        return False, "there is no accelerator"
    return config.pin_memory, "given"


def start_of(config: DataLoaderConfig, dataset: Any) -> tuple[Any, str]:
    """The multiprocessing context of a loader's workers, and why, as things are now: threads
    come and go.
    """
    return choose_context(
        config.multiprocessing_context,
        dataset,
        [choose_collate(config, dataset), config.worker_init_fn],
    )


def choose_collate(config: DataLoaderConfig, dataset: Any) -> Callable[[list[Any]], Any] | None:
    """The collate function. Where the dataset yields batches, one that was given gets one batch,
    as torch's does; else there is none.
    """
    chosen = config.collate_fn
    if chosen is None and not config.yields_batches:
        own = getattr(dataset, "collate", None) if isinstance(dataset, BaseDataset) else None
        chosen = stack_collate if own is None else own
    return collators.get(chosen) if isinstance(chosen, str) else chosen
