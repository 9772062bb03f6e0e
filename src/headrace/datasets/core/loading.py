"""Loading modes of datasets, and the batches of a dataset that streams under a plain DataLoader."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

from headrace.datasets.core.reader import Access
from headrace.errors import ConfigError
from headrace.io.paths import cache_folder
from headrace.modes import LoadingMode
from headrace.modes.cached import Cached
from headrace.modes.eager import Eager
from headrace.modes.lazy import Lazy
from headrace.modes.mode import Mode
from headrace.modes.stored import MachineShare
from headrace.modes.streaming import WINDOW, Streaming
from headrace.order import RankBatches, detect_world
from headrace.order.request import BatchRequest, current_request
from headrace.order.shares import check_shared_once

STREAM_GROUP = 64  # samples that a streaming dataset reads together under a plain DataLoader


def make_mode(dataset: Any) -> Mode:
    """The loading mode of a dataset, at work; "eager" reads its samples now."""
    source, reader, budget = dataset.sample_source, dataset.sample_reader, dataset.budget
    if dataset.loading_mode is LoadingMode.EAGER:
        access = Access(dataset.sample_format, Lazy(), dataset.holds_encoded)
        return Eager(
            len(source),
            functools.partial(reader.load, access=access),
            budget,
            dataset.held_nbytes(),
            dataset._progress,
            threads=None if source.thread_safe else 1,
            share=machine_share(dataset),
            spec=None if access.holds_encoded else access.format.value_spec(),
        )
    if dataset.loading_mode is LoadingMode.CACHED:
        return Cached(
            len(source),
            budget,
            dataset._cache_size,
            dataset._cache_policy,
            dataset.held_nbytes(),
            machine_share(dataset),
        )
    if dataset.loading_mode is LoadingMode.STREAMING:
        return Streaming(min(WINDOW, budget.available // 32))  # of each worker
    return Lazy()


def machine_share(dataset: Any) -> MachineShare | None:
    """Where the samples lie that all ranks of a machine share."""
    if dataset._shared == "rank":
        return None
    if not dataset._is_settled:
        raise ConfigError(
            "shared='machine': samples are read before the constructor is through, and so before "
            "it is known what they are"
        )
    world = detect_world()
    held = "encoded" if dataset.holds_encoded else "decoded"
    key = [dataset.loading_mode.value, dataset.sample_source.fingerprint(), held, dataset.held_as()]
    return MachineShare(
        cache_folder(dataset._cache_dir), "\0".join(key), world.local_rank, world.local_world_size
    )


def stream_requests(dataset: Any) -> Iterator[BatchRequest]:
    """The batches of this rank and worker in an epoch of a streaming dataset, each prefetched by
    its mode.
    """
    around = current_request()  # of a dataset around this one
    world, info = dataset._world or detect_world(), get_worker_info()
    check_shared_once(dataset, world.world_size)
    worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
    seed, epoch = (dataset.seed, dataset.epoch) if around is None else (around.seed, around.epoch)
    order = dataset.epoch_order("block", seed, epoch, STREAM_GROUP * world.world_size)
    batches = RankBatches(order, world.rank, world.world_size, STREAM_GROUP)
    for step in range(worker, len(batches), workers):
        dataset.prefetch((seed, epoch, worker), range(step, len(batches), workers), batches)
        yield BatchRequest(batches.batch(step).tolist(), seed, epoch, step)
