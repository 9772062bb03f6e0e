"""The sampler that trainers see on a loader, and checks of what they do with it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from headrace.errors import ConfigError, warn
from headrace.loader.config import DataLoaderConfig
from headrace.order import OrderSampler, RankBatches, detect_world
from headrace.order.shares import REMEDY, askers

_TORCH = "torch.utils.data.dataloader"


class EpochSampler(OrderSampler):
    """The sampler that a Loader shows; trainers that call its `set_epoch` set the loader's epoch.

    The loader itself never goes through it. It yields the indices of the loader's next epoch.
    """

    def __init__(self, loader: Any, dataset: Any, batches: RankBatches) -> None:
        self._loader = weakref.ref(loader)
        super().__init__(
            dataset,
            order=batches.order,
            batch_size=batches.batch_size,
            rank=batches.rank,
            world_size=batches.world_size,
            drop_last=batches.drop_last,
            pad=batches.pad,
        )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        loader = self._loader()
        if loader is not None:
            super().set_epoch(loader.next_epoch)
        indices = super().__iter__()  # raises where they are shared out again
        # another DataLoader that was made of a loader's parts: only the indices are in them
        around = {type(asker) for asker in askers(self, sys._getframe(1))}
        if any(cls.__name__ == "SkipBatchSampler" for cls in around):
            raise ConfigError(
                "skip_first_batches makes another DataLoader of this loader's parts, which knows "
                "neither its epoch nor its random numbers: resume with "
                "loader.load_state_dict(state) instead; with HuggingFace's Trainer pass "
                "ignore_data_skip=True besides (docs/trainers.md)"
            )
        if any(cls.__module__ == _TORCH for cls in around):
            warn(
                "another DataLoader was made of this loader's sampler: the samples are the same, "
                "but random transforms are not repeatable, and the loader's state, statistics and "
                f"buffers stay empty. Go through the loader itself. {REMEDY} (docs/trainers.md)"
            )
        return indices


def check_world(reason: str) -> None:
    """Raises a ConfigError if torch.distributed has been initialised, with several processes, since
    a single one made the loader; `reason`: why its world size is 1.
    """
    if dist.get_world_size() == 1:
        return
    raise ConfigError(
        f"this loader was made as rank 0 of 1 ({reason}), and torch.distributed now says rank "
        f"{dist.get_rank()} of {dist.get_world_size()}: every rank would load all samples. Make it "
        "after the process group is initialised (with Lightning in the hook train_dataloader), or "
        "pass rank= and world_size="
    )


def counts_as_prepared(config: DataLoaderConfig, has_own_order: bool) -> bool:
    """True if Accelerate must not shard the loader.

    So for a loader that shares its samples out to the ranks: sharded again, it would lose them.
    False where the order is the user's or a foreign stream's (`has_own_order` is False), or the
    loader was made for one process alone.
    """
    is_shared_out = config.world_size != 1 and has_own_order
    if not is_shared_out and detect_world().world_size > 1:
        warn(
            "Accelerate shards this loader, by making another DataLoader of its parts: random "
            "transforms are not repeatable, and the loader's state, statistics and buffers stay "
            "empty (docs/trainers.md)"
        )
        return False
    if config.device is None:
        warn(
            "Accelerate leaves a headrace loader as it is: it shares its samples out to the ranks "
            f"by itself, and moves no batches. {REMEDY} (docs/trainers.md)"
        )
    return True
