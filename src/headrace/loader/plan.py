"""Chooses the order that a loader's plan follows."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from headrace.datasets.core.base import BaseDataset
from headrace.errors import ConfigError
from headrace.loader.batches import IterablePlan, OrderPlan, Plan, SamplerPlan, length_of
from headrace.loader.config import DataLoaderConfig, Shuffle
from headrace.order import BalancedOrder, BucketedOrder, EpochOrder, Order, RankBatches, ResizedOrder, WeightedOrder


def make_plan(config: DataLoaderConfig, dataset: Any, adopted: dict[str, Any]) -> Plan:
    """The plan of a loader.

    Args:
        config: resolved.
        dataset: the user's.
        adopted: parameters of the order, of a loaded state, that replace those of the config.

    Raises:
        ConfigError: a dataset without a length, or weights or targets that don't fit it.
    """
    seed = adopted.get("seed", config.seed)
    if config.sampler is not None or config.batch_sampler is not None:
        return SamplerPlan(seed, config.sampler, config.batch_sampler, config.batch_size, config.drop_last)
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, BaseDataset):
        return IterablePlan(seed, config.batch_size, length_of(dataset), config.drop_last, config.num_workers or 0)
    rank, world_size, batch_size = config.rank or 0, config.world_size or 1, config.batch_size or 1
    order = _make_order(config, dataset, seed, batch_size * world_size, adopted)
    return OrderPlan(RankBatches(order, rank, world_size, batch_size, config.drop_last, config.pad))


def _make_order(config: DataLoaderConfig, dataset: Any, seed: int, global_batch: int, adopted: dict[str, Any]) -> Order:
    n = length_of(dataset)
    if n is None:
        raise ConfigError(f"{type(dataset).__name__} has no length: give it __len__, make it an IterableDataset, or pass a sampler")
    drawn: dict[str, Any] = {"n": config.num_samples, "replacement": config.replacement, "seed": seed, "global_batch": global_batch}
    if config.weights is not None:
        weights = WeightedOrder(config.weights, **drawn)
        if (count := weights.parameters()["n"]) != n:
            raise ConfigError(f"weights holds {count:,} weights, and there are {n:,} samples: give one for each")
        return weights
    if config.balanced:
        return BalancedOrder(classes_of(dataset, n), **drawn)
    if config.is_bucketed:
        return BucketedOrder(_lengths_of(config.bucket_by_length, dataset, n), seed=seed, global_batch=global_batch)
    shuffle: Shuffle = adopted.get("shuffle", config.shuffle or False)
    if isinstance(dataset, BaseDataset):
        interleave, turns = adopted.get("interleave", config.interleave), adopted.get("turns", config.turns)
        order = dataset.epoch_order(shuffle, seed, 0, global_batch, interleave, turns)
    else:
        order = EpochOrder(n, shuffle=shuffle, seed=seed, global_batch=global_batch)
    return order if config.num_samples in (None, n) else ResizedOrder(order, config.num_samples or 0)


def _lengths_of(given: Any, dataset: Any, n: int) -> Any:
    lengths = dataset.lengths() if given is True and isinstance(dataset, BaseDataset) else None if given is True else given
    if lengths is None:
        raise ConfigError(
            f"bucket_by_length=True: {type(dataset).__name__} does not know how long its samples are: give one integer a sample"
        )
    if len(lengths) != n:
        raise ConfigError(f"bucket_by_length holds {len(lengths):,} lengths, and there are {n:,} samples: give one for each")
    return lengths


def classes_of(dataset: Any, n: int) -> Any:
    """The class of each sample: the dataset's `targets`, as headrace's and torchvision's have them, through torch's `Subset` and
    `ConcatDataset` too.

    Raises:
        ConfigError: it has none, or not one for each sample.
    """
    found = _targets_of(dataset)
    if found is None or len(found) != n:
        had = "has no targets" if found is None else f"has {len(found):,} targets for {n:,} samples"
        raise ConfigError(f"balanced=True: {type(dataset).__name__} {had}: give it `targets`, one class a sample, or pass weights=")
    return np.asarray(found)


def _targets_of(dataset: Any) -> Any:
    if isinstance(dataset, Subset):
        inner = _targets_of(dataset.dataset)
        return None if inner is None else np.asarray(inner)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_targets_of(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([np.asarray(part) for part in parts])
    return getattr(dataset, "targets", None)
