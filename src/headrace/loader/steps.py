"""Exact number of batches per epoch, and of optimizer steps.

For learning rate schedules. Ranks, `drop_last`, padding and gradient accumulation are taken into
account.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.arguments import check_integer, checks_keywords
from headrace.errors import ConfigError
from headrace.loader.config import DataLoaderConfig
from headrace.loader.data import length_of
from headrace.loader.loader import Loader
from headrace.loader.multi import MultiDataLoader
from headrace.loader.replayed import ReplayedLoader
from headrace.order import EpochOrder, RankBatches, detect_world


@checks_keywords
def get_epoch_length(loader: Any, length: int | None = None, *, samples: int | None = None) -> int:
    """Returns the number of batches per epoch and rank.

    Args:
        loader: a `Loader`, a torch `DataLoader` or a `MultiDataLoader`.
        length: number of batches per epoch and rank, which is returned unchanged (``length=1000``
            gives 1000). For loops that end an epoch early, or datasets without a length. None:
            computed from `samples`, or else ``len(loader)``.
        samples: number of samples of the dataset, over all ranks (``samples=1000`` with
            ``batch_size=32`` gives 32). For a number that differs from that of the dataset, or
            datasets without a length. Samples are distributed as in a `Loader`; an iterable dataset
            whose workers each end with an incomplete batch may give a few batches more. With
            ``batch_size=None``: number of batches of the dataset.

    Raises:
        ConfigError: the dataset has no length and neither `length` nor `samples` is given; both are
            given; `samples` is given for a `MultiDataLoader`; or `loader` is a dataset.
    """
    if isinstance(loader, DataLoaderConfig) or isinstance(length, DataLoader | MultiDataLoader):
        raise ConfigError("a loader holds its own options: pass the loader first, and no config")
    check_integer("length", length, 0, optional=True)
    check_integer("samples", samples, 0, optional=True)
    if length is not None and samples is not None:
        raise ConfigError(
            "length= and samples= are given, the batches and the samples of an epoch: pass one of "
            "them"
        )
    if length is not None:
        return length
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ConfigError(
            f"pass a loader, and no dataset: the length of a {type(loader).__name__} is a number "
            "of samples"
        )
    if samples is None:
        known = length_of(loader)
        if known is None:
            data = type(getattr(loader, "dataset", loader)).__name__
            raise ConfigError(
                f"the length of an epoch over {data} is not known: pass length=, the batches of "
                "each rank, or samples=, those of all ranks"
            )
        return known
    if isinstance(loader, MultiDataLoader):
        raise ConfigError(
            "samples= has no meaning for a MultiDataLoader, which has several datasets: pass "
            "length=, or give it steps="
        )
    world, size = _world_size(loader), _batch_size(loader)
    drop_last = bool(
        getattr(loader, "drop_last", False)
        or getattr(getattr(loader, "batch_sampler", None), "drop_last", False)
    )
    pad = loader.config.pad if isinstance(loader, Loader) else True
    order = EpochOrder(samples, shuffle=False, global_batch=size * world)
    return len(RankBatches(order, 0, world, size, drop_last, pad))


@checks_keywords
def get_train_dataloader_steps(
    loader: Any,
    length: int | None = None,
    accumulate: int = 1,
    *,
    samples: int | None = None,
    gradient_accumulation_steps: int | None = None,
) -> tuple[int, int, int]:
    """Returns global batch size, optimizer steps per epoch and accumulation.

    The optimizer steps every `accumulate` batches, and once more for the remaining batches at the
    end of the epoch.

    Args:
        loader, length, samples: see `get_epoch_length`.
        accumulate: number of batches of a rank per optimizer step.
        gradient_accumulation_steps: the same, by the name that trainers give it.

    Returns:
        ``(global_batch, steps, accumulate)``: number of samples per full optimizer step, over all
        ranks and accumulated batches; number of
            optimizer steps per epoch; and `accumulate`, reduced to the number of batches of an
            epoch if that is smaller.

    Raises:
        ConfigError: see `get_epoch_length`; or `accumulate` is below 1, or batch sizes are unknown
            or differ.
    """
    if gradient_accumulation_steps is not None:
        if accumulate != 1:
            raise ConfigError(
                "accumulate and gradient_accumulation_steps are the same: pass one of them"
            )
        accumulate = check_integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    check_integer("accumulate", accumulate, 1)
    batches = get_epoch_length(loader, length, samples=samples)
    accumulate = min(accumulate, max(1, batches))
    return (
        _batch_size(loader, exact=True) * _world_size(loader) * accumulate,
        -(-batches // accumulate),
        accumulate,
    )


@checks_keywords
def get_val_dataloader_steps(
    loader: Any, length: int | None = None, sanity_steps: int = 0, *, samples: int | None = None
) -> int:
    """Returns the number of validation batches per rank. 0 if `loader` is None, as it is without
    validation data.

    Args:
        loader, length, samples: see `get_epoch_length`.
        sanity_steps: maximum number of batches, for the short check before training. 0: all
            batches.

    Raises:
        ConfigError: see `get_epoch_length`; or `sanity_steps` is below 0.
    """
    check_integer("sanity_steps", sanity_steps, 0)
    if loader is None:
        return 0
    batches = get_epoch_length(loader, length, samples=samples)
    return min(batches, sanity_steps) if sanity_steps else batches


def _parts(loader: Any) -> list[Any]:
    """The loaders that a loader consists of."""
    if isinstance(loader, MultiDataLoader):
        return [
            part.loader if isinstance(part, ReplayedLoader) else part
            for part in loader.loaders.values()
        ]
    return [loader]


def _batch_size(loader: Any, exact: bool = False) -> int:
    """The samples of a rank's batch; where it need not be exact, 1 for batches that the dataset
    makes.
    """
    sizes = {_size_of(part) for part in _parts(loader)}
    if len(sizes) > 1:
        raise ConfigError(
            "the loaders have batches of different sizes "
            f"({', '.join(map(str, sorted(sizes, key=str)))}): ask for each of them"
        )
    size = sizes.pop()
    if size is None and exact:
        raise ConfigError(
            "the size of a batch is not known: the dataset or a batch sampler makes the batches, "
            "and has no batch_size"
        )
    return 1 if size is None else size


def _size_of(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _world_size(loader: Any) -> int:
    for part in _parts(loader):
        if isinstance(part, Loader):
            return part.config.world_size or 1
        ranks = getattr(getattr(part, "sampler", None), "num_replicas", None)
        if isinstance(ranks, int):
            return ranks
    return detect_world().world_size
