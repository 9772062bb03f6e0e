"""Exact number of batches per epoch, and of optimizer steps.

For learning rate schedules. Ranks, `drop_last`, padding and gradient accumulation are taken into
account.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.arguments import check_integer, checks_keywords
from headrace.errors import ConfigError
from headrace.loader.config import DataLoaderConfig, length_of
from headrace.loader.loader import Loader
from headrace.loader.multi import MultiDataLoader
from headrace.order import detect_world


@checks_keywords
def get_epoch_length(loader: Any, length: int | None = None) -> int:
    """Returns the number of batches per epoch and rank.

    Args:
        loader: a `Loader`, a torch `DataLoader` or a `MultiDataLoader`.
        length: number of batches per epoch and rank, which is returned unchanged (``length=1000``
            gives 1000). For loops that end an epoch early, or datasets without a length. None:
            ``len(loader)``.

    Raises:
        ConfigError: the dataset has no length and `length` is not given; or `loader` is a dataset.
    """
    if isinstance(loader, DataLoaderConfig) or isinstance(length, DataLoader | MultiDataLoader):
        raise ConfigError("a loader holds its own options: pass the loader first, and no config")
    if length is not None:
        return check_integer("length", length, 0)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ConfigError(
            f"pass a loader, and no dataset: the length of a {type(loader).__name__} is a number "
            "of samples"
        )
    known = length_of(loader)
    if known is None:
        data = type(getattr(loader, "dataset", loader)).__name__
        raise ConfigError(
            f"the length of an epoch over {data} is not known: pass length=, the batches of each "
            "rank"
        )
    return known


@checks_keywords
def get_train_dataloader_steps(
    loader: Any,
    length: int | None = None,
    accumulate: int = 1,
) -> tuple[int, int, int]:
    """Returns global batch size, optimizer steps per epoch and accumulation.

    The optimizer steps every `accumulate` batches, and once more for the remaining batches at the
    end of the epoch.

    Args:
        loader, length: see `get_epoch_length`.
        accumulate: number of batches of a rank per optimizer step.

    Returns:
        ``(global_batch, steps, accumulate)``: number of samples per full optimizer step, over all
        ranks and accumulated batches; number of
            optimizer steps per epoch; and `accumulate`, reduced to the number of batches of an
            epoch if that is smaller.

    Raises:
        ConfigError: see `get_epoch_length`; or `accumulate` is below 1, or batch sizes are unknown
            or differ.
    """
    check_integer("accumulate", accumulate, 1)
    batches = get_epoch_length(loader, length)
    accumulate = min(accumulate, max(1, batches))
    global_batch = _global_batch(loader) * accumulate
    return global_batch, -(-batches // accumulate), accumulate


@checks_keywords
def get_val_dataloader_steps(loader: Any, length: int | None = None, sanity_steps: int = 0) -> int:
    """Returns the number of validation batches per rank. 0 if `loader` is None, as it is without
    validation data.

    Args:
        loader, length: see `get_epoch_length`.
        sanity_steps: maximum number of batches, for the short check before training. 0: all
            batches.

    Raises:
        ConfigError: see `get_epoch_length`; or `sanity_steps` is below 0.
    """
    check_integer("sanity_steps", sanity_steps, 0)
    if loader is None:
        return 0
    batches = get_epoch_length(loader, length)
    return min(batches, sanity_steps) if sanity_steps else batches


def _global_batch(loader: Any) -> int:
    """The samples of a batch, over all ranks."""
    parts = [loader]
    if isinstance(loader, MultiDataLoader):
        parts = list(loader.loaders.values())
    sizes = set()
    world_size = None
    for part in parts:
        size = getattr(part, "batch_size", None)
        if size is None:
            size = getattr(getattr(part, "batch_sampler", None), "batch_size", None)
        sizes.add(size)
        if isinstance(part, Loader):
            world_size = part.config.world_size
        elif world_size is None:
            world_size = getattr(getattr(part, "sampler", None), "num_replicas", None)
    size = sizes.pop()
    if sizes:
        raise ConfigError(
            f"the loaders have batches of different sizes ({size}, {', '.join(map(str, sizes))}): "
            "ask for each of them"
        )
    if not isinstance(size, int):
        raise ConfigError(
            "the size of a batch is not known: the dataset or a batch sampler makes the batches, "
            "and has no batch_size"
        )
    return size * (world_size or detect_world().world_size)
