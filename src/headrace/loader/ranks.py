"""What a loader shows to trainers, and checks of what they and other ranks do with it.

NOTE [ agreement of ranks ]

Where seed, data or options differ, each rank takes its share of another order: samples are lost and
doubled, or a rank has a batch more than the others and waits for them for ever. So it is where one
rank alone resumes, or names another epoch. Nothing else would say so.

* Only where torch.distributed is up and says what rank and world size are: with `rank=` and
  `world_size=` given, the ranks may be those of a group, or of data that is shared out already.
  Only for headrace's own orders: a sampler of the user's is his.
* No collective: it would hang where one rank alone builds a loader (to validate on rank 0). With
  the second batch of an epoch, or its end, the first rank leaves what the epoch depends on in the
  store of the process group, and each other one compares its own with that: one round trip, and
  none waits for a rank. It is done in a thread, which is left behind if the store does not answer:
  its own calls have no time limit.
* "The same" loader of another rank is the one built at the same place of the program, by its whole
  call stack, and as often there. Epochs are compared by their number on each rank. An epoch that a
  rank left after its first batch (to look at one) does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from headrace.errors import ConfigError, warn
from headrace.loader.config import DataLoaderConfig
from headrace.order import OrderSampler, RankBatches, World, detect_world
from headrace.order.ranks import REMEDY, askers

PATIENCE = 10.0
"""Seconds that the store is given to answer."""
_TORCH = "torch.utils.data.dataloader"
_built: Counter[str] = Counter()  # loaders of this process, by their place in the program
_silent: list[object] = []  # stores that did not answer, or failed: they are not asked again


class Agreement:
    """What the batches of all ranks together depend on, compared with the same loader of the other
    ranks; see NOTE [ agreement of ranks ].
    """

    def __init__(self, facts: Mapping[str, Any], world: World) -> None:
        self._facts = facts
        self._world = world
        # where in the program it is built: the same on all machines, whatever folder that lies in
        frames = traceback.walk_stack(None)
        lines = [f"{os.path.basename(f.f_code.co_filename)}:{line}" for f, line in frames]
        site = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
        self._key = f"headrace/{world.world_size}/{site}/{_built[site]}"
        _built[site] += 1
        self._epochs = 0  # that were compared

    def compare(self, epoch: int, position: int) -> None:
        """Compares what an epoch depends on, which was begun at a position.

        Raises:
            ConfigError: another rank has begun it otherwise; the message says in what.
        """
        facts = {**self._facts, "epoch": epoch, "position": f"batch {position}"}
        own = {name: repr(value) for name, value in facts.items()}
        rank = self._world.rank
        key = f"{self._key}/{self._epochs}"
        store = _store(self._world)
        if store is None or any(store is other for other in _silent):
            return
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(store.compare_set(key, "", json.dumps([rank, own])))
            except Exception as error:  # of torch, of a store of the user's
                answers.append(error)

        thread = threading.Thread(target=ask, name="headrace-agreement", daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if not answers or isinstance(answers[0], Exception):
            _silent.append(store)
            # one that was there is gone with the process that held it, which has ended
            if not answers or not self._epochs:
                why = f"failed: {answers[0]}" if answers else f"no answer within {PATIENCE:g} s"
                warn(
                    f"the store of the process group: {why}; that all ranks have the same loader "
                    "has not been checked"
                )
            return
        self._epochs += 1
        other, theirs = json.loads(answers[0])
        differing: list[str] = []
        for name in dict.fromkeys([*theirs, *own]):
            # other orders mostly follow from what differs
            if own.get(name) != theirs.get(name) and not (differing and name == "order"):
                has = f"{theirs.get(name)} on rank {other}, {own.get(name)} on rank {rank}"
                differing.append(f"{name} is {has}")
        if differing:
            raise ConfigError(
                f"the ranks have different loaders, or epochs: {'; '.join(differing)}. Their "
                "shares don't belong together: samples would be lost and doubled. Use the same "
                "data, options, checkpoint and set_epoch on every rank, and iterate equally often; "
                "where they differ on purpose (data that is shared out already: rank=0, "
                "world_size=1), pass rank= and world_size="
            )


def _store(world: World) -> Any:
    """The store of the process group; None without one, or where its ranks are others than the
    loader's.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        return None
    find = getattr(dist.distributed_c10d, "_get_default_store", None)  # private to torch
    return None if find is None else find()


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
